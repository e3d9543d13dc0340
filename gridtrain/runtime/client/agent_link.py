"""The training script's end of the connection to the agent, which says what this machine's owner allows.

Rules and sensors belong to the agent (`gridtrain_worker.training_policy`).

    agent  -- {"run": false, "reason": "battery, until 22:00", "most_bytes": 5000000} -->  AgentLink.directive
           <-- {"state": "paused", "moved_bytes": 4711, "step": 12} ---------------------  report

One JSON text a line, of at most `MAX_LINE_BYTES`, over a Unix socket.  Without an agent everything is allowed
(`NoAgent`).
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gridtrain.config import ENV_PREFIX

log = logging.getLogger("gridtrain")

CONTROL_VARIABLE = ENV_PREFIX + "CONTROL"
MAX_LINE_BYTES = 16_384
BUDGET_EXHAUSTED = "spent"
"""State of a script that ends itself, as its step would cost more than what is left of the day's bytes."""

REPORT_INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True)
class AgentDirective:
    """What the owner allows now.

    Attributes:
        run: False: leave the group between two steps and wait, for this `reason`.
        most_bytes: limit of bytes sent and received since this process began; infinite: none.
        upload_Bps, download_Bps: rate caps; None: none.
        stop: end after the step: the script's loop ends as if the run had finished.
        spent_text: the reason to be shown when the day's budget is used up.
    """

    run: bool = True
    reason: str = ""
    most_bytes: float = math.inf
    upload_Bps: float | None = None
    download_Bps: float | None = None
    stop: bool = False
    spent_text: str = "the day's bytes are used up"


class AgentControl(Protocol):
    """What the training thread asks."""

    @property
    def directive(self) -> AgentDirective: ...

    def report(self, **state: Any) -> None:
        """Report this worker's state: `state`, `step`, ..."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until the directive may have changed, at most so long."""
        ...


class NoAgent:
    """For a script that was started by hand, and for a group in one process.

    Attributes:
        directive: may be replaced, from any thread, by tests and by programs that control themselves.
    """

    def __init__(self) -> None:
        self.directive = AgentDirective()
        self.reported: list[dict[str, Any]] = []

    def report(self, **state: Any) -> None:
        self.reported = [*self.reported[-99:], state]

    def wait(self, timeout_s: float) -> None:
        time.sleep(min(timeout_s, 0.02))


class AgentLink:
    """The connection to the agent whose socket is at `path`.

    Args:
        moved_bytes: bytes that this process has sent and received so far; called in this object's thread.
    """

    def __init__(self, path: str, moved_bytes: Callable[[], int]) -> None:
        self.directive = AgentDirective()
        self._moved_bytes = moved_bytes
        self._state: dict[str, Any] = {"state": "training"}
        self._path = path
        self._condition = threading.Condition()
        self._sending = threading.Lock()
        self._socket = self._connect()
        first = threading.Event()
        self._thread = threading.Thread(target=self._main, args=(first,), name="gridtrain-owner", daemon=True)
        self._thread.start()
        first.wait(5.0)  # so that the rules hold from the beginning

    def report(self, **state: Any) -> None:
        self._state = state
        self._report()

    def wait(self, timeout_s: float) -> None:
        with self._condition:
            self._condition.wait(timeout_s)

    def _report(self) -> None:
        self._send({**self._state, "moved_bytes": self._moved_bytes()})

    def _connect(self) -> socket.socket:
        """Raises `OSError`."""
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.settimeout(REPORT_INTERVAL_S)
            link.connect(self._path)
            link.sendall(json.dumps({"role": "script", "pid": os.getpid()}).encode() + b"\n")
        except OSError:
            link.close()
            raise
        return link

    def _send(self, body: dict[str, Any]) -> None:
        with self._sending:
            try:
                self._socket.sendall(json.dumps(body).encode() + b"\n")
            except OSError:
                self._socket.close()  # a message may be incomplete: the thread connects again

    def _main(self, first: threading.Event) -> None:
        while True:
            self._listen(first)
            time.sleep(REPORT_INTERVAL_S)  # an agent that ends stops this process; its last directive holds
            with self._sending:
                self._socket.close()
                try:
                    self._socket = self._connect()
                except OSError:
                    log.debug("the agent does not listen at %s", self._path)

    def _listen(self, first: threading.Event) -> None:
        """Read until the connection breaks."""
        rest = b""
        while True:
            try:
                received = self._socket.recv(MAX_LINE_BYTES)
            except TimeoutError:
                self._report()
                continue
            except OSError:
                return
            if not received or len(rest) > MAX_LINE_BYTES:
                return
            *lines, rest = (rest + received).split(b"\n")
            for line in lines:
                self._handle_line(line)
            first.set()
            self._report()

    def _handle_line(self, line: bytes) -> None:
        fields = json.loads(line)
        most_bytes = fields.pop("most_bytes", None)
        with self._condition:
            self.directive = replace(
                AgentDirective(),
                **fields,
                most_bytes=math.inf if most_bytes is None else float(most_bytes),
            )
            self._condition.notify_all()
