"""What this machine's owner wants of the training script, as the agent beside it says.

Decides nothing: rules and sensors are the agent's (`gridtrain_worker.training_policy`).  This is the script's
end of a line between two processes of one user.

    agent  -- {"run": false, "reason": "battery, until 22:00", "most_bytes": 5000000} -->  AgentLine.wish
           <-- {"state": "paused", "moved_bytes": 4711, "step": 12} ---------------------  tell

A text a line, JSON, at most `MAX_LINE_BYTES`.  Where there is no agent everything is allowed: `Unled`.
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
"""The state of a script that ends itself, as the step it is in would cost more than is left of the day."""

REPORT_INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True)
class AgentDirective:
    """What is wanted now.

    Attributes:
        run: False: leave the group between two steps and wait, for this `reason`.
        most_bytes: sent and received since this process began, at most; infinite: no limit.
        upload_Bps, download_Bps: rate caps; None: none.
        stop: end after the step: the script's loop ends as if the run had.
        spent_text: what the day's budget is called when it is used up.
    """

    run: bool = True
    reason: str = ""
    most_bytes: float = math.inf
    upload_Bps: float | None = None
    download_Bps: float | None = None
    stop: bool = False
    spent_text: str = "the day's bytes are used up"


class AgentControl(Protocol):
    """Asked from the training thread."""

    @property
    def directive(self) -> AgentDirective: ...

    def report(self, **state: Any) -> None:
        """How it stands: `state`, `step`, ..."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Until the wish may be another one, and at most so long."""
        ...


class NoAgent:
    """Nobody says anything: a script that was started by hand, a group in one process.

    Attributes:
        wish: may be replaced, from any thread, for tests and for programs that lead themselves.
    """

    def __init__(self) -> None:
        self.directive = AgentDirective()
        self.reported: list[dict[str, Any]] = []

    def report(self, **state: Any) -> None:
        self.reported = [*self.reported[-99:], state]

    def wait(self, timeout_s: float) -> None:
        time.sleep(min(timeout_s, 0.02))


class AgentLink:
    """The line to the agent whose socket lies at `path`.

    Args:
        moved_bytes: what this process has sent and received so far, all in all; asked in this line's thread.
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
        first.wait(5.0)  # the rules hold from the beginning

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
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            line.settimeout(REPORT_INTERVAL_S)
            line.connect(self._path)
            line.sendall(json.dumps({"role": "script", "pid": os.getpid()}).encode() + b"\n")
        except OSError:
            line.close()
            raise
        return line

    def _send(self, body: dict[str, Any]) -> None:
        with self._sending:
            try:
                self._socket.sendall(json.dumps(body).encode() + b"\n")
            except OSError:
                self._socket.close()  # a line may have been cut in its middle: the loop connects anew

    def _main(self, first: threading.Event) -> None:
        while True:
            self._listen(first)
            time.sleep(
                REPORT_INTERVAL_S
            )  # the agent ends this process when it goes: till then its last wish holds
            with self._sending:
                self._socket.close()
                try:
                    self._socket = self._connect()
                except OSError:
                    log.debug("the agent does not listen")

    def _listen(self, first: threading.Event) -> None:
        """Until the line breaks."""
        rest = b""
        while True:
            try:
                got = self._socket.recv(MAX_LINE_BYTES)
            except TimeoutError:
                self._report()
                continue
            except OSError:
                return
            if not got or len(rest) > MAX_LINE_BYTES:
                return
            *lines, rest = (rest + got).split(b"\n")
            for line in lines:
                self._handle_line(line)
            first.set()
            self._report()

    def _handle_line(self, line: bytes) -> None:
        said = json.loads(line)
        most = said.pop("most_bytes", None)
        with self._condition:
            self.directive = replace(
                AgentDirective(), **said, most_bytes=math.inf if most is None else float(most)
            )
            self._condition.notify_all()
