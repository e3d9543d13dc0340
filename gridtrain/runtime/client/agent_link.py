"""The script's connection to the worker agent, which sends the machine owner's permissions and limits.

The agent evaluates the owner's rules and reads the sensors (`gridtrain_worker.training_policy`).

    agent  -- {"run": false, "reason": "battery, until 22:00", "most_bytes": 5000000} -->  AgentLink.directive
           <-- {"state": "paused", "moved_bytes": 4711, "step": 12} ---------------------  report

Each message is a line of JSON of at most `MAX_LINE_BYTES`, sent over a Unix socket.  Without an agent,
everything is allowed (`NoAgent`).
"""

from __future__ import annotations

import json
import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from gridtrain.config import ENV_PREFIX

log = logging.getLogger("gridtrain")

CONTROL_VARIABLE = ENV_PREFIX + "CONTROL"
MAX_LINE_BYTES = 16_384
BUDGET_EXHAUSTED = "spent"
"""The state that a script reports when it ends because its next step would exceed the day's byte budget."""

DAY_BYTES = "day_bytes"
"""A field of the directive, which the agent sends only to scripts that support it."""

REPORT_INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True)
class AgentDirective:
    """The machine owner's current permissions and limits for the script.

    Attributes:
        run: whether the script may train.  If False, the script leaves the group between two steps and waits.
        reason: the reason why `run` is False; empty if `run` is True.
        most_bytes: the maximum number of bytes that this process may send and receive in total; infinity for
            no limit.
        day_bytes: the maximum number of bytes that may be sent and received in a whole day; infinity for no
            limit.
        upload_Bps, download_Bps: the rate caps in bytes per second; None for no cap.
        stop: whether the script has to stop after the current step; its training loop then ends as if the run
            had finished.
        spent_text: the message to show when the day's byte budget is exhausted.
    """

    run: bool = True
    reason: str = ""
    most_bytes: float = math.inf
    day_bytes: float = math.inf
    upload_Bps: float | None = None
    download_Bps: float | None = None
    stop: bool = False
    spent_text: str = "the day's traffic budget is used up"


class NoAgent:
    """Takes the place of the agent in a script that was started by hand, or in a group within one process.

    Attributes:
        directive: the current permissions.  Tests and programs may replace them from any thread.
        reported: the latest reports, at most 100.
    """

    is_lost = False

    def __init__(self) -> None:
        self.directive = AgentDirective()
        self.reported: list[dict[str, Any]] = []

    def report(self, **state: Any) -> None:
        self.reported = [*self.reported[-99:], state]

    def wait(self, timeout_s: float, known: AgentDirective) -> None:
        time.sleep(min(timeout_s, 0.02))


class AgentLink:
    """The connection to the agent whose socket is at `path`.

    Args:
        path: the path of the agent's Unix socket.
        moved_bytes: a thread-safe function that returns the number of bytes that this process has sent and
            received so far.
        why_waiting: a thread-safe function that returns why no worker is training; "" if the run is training.

    Raises `OSError` if no agent listens on `path`.
    """

    def __init__(
        self, path: str, moved_bytes: Callable[[], int], why_waiting: Callable[[], str] = lambda: ""
    ) -> None:
        self.directive = AgentDirective()
        self._moved_bytes, self._why_waiting = moved_bytes, why_waiting
        self._state: dict[str, Any] = {"state": "joining"}
        self._path = path
        self._condition = threading.Condition()
        self._sending = threading.Lock()
        self._socket = self._connect()
        first = threading.Event()
        self._thread = threading.Thread(target=self._main, args=(first,), name="gridtrain-owner", daemon=True)
        self._thread.start()
        first.wait(5.0)  # so that the owner's rules apply from the beginning

    @property
    def is_lost(self) -> bool:
        """Whether the connection to the agent is closed, because the agent's process has ended.

        Normally, the agent stops the script before it ends.
        """
        try:
            end = select.poll()
            end.register(self._socket, select.POLLIN)
            return bool(end.poll(0)) and not self._socket.recv(1, socket.MSG_PEEK)
        except TimeoutError:  # the thread has already read everything
            return False
        except (OSError, ValueError):  # closed, and not reconnected
            return True

    def report(self, **state: Any) -> None:
        """Report this worker's state to the agent, as fields such as `state` and `step`."""
        self._state = state
        self._report()

    def wait(self, timeout_s: float, known: AgentDirective) -> None:
        """Wait until the directive differs from `known`, but not longer than `timeout_s`."""
        with self._condition:
            self._condition.wait_for(lambda: self.directive != known, timeout_s)

    def _report(self) -> None:
        self._send({**self._state, "moved_bytes": self._moved_bytes(), "why_waiting": self._why_waiting()})

    def _connect(self) -> socket.socket:
        """Connect to the agent and send this script's role and process id.

        Raises `OSError` if the connection fails.
        """
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.settimeout(REPORT_INTERVAL_S)
            link.connect(self._path)
            hello = {"role": "script", "pid": os.getpid(), "knows": [DAY_BYTES]}
            link.sendall(json.dumps(hello).encode() + b"\n")
        except OSError:
            link.close()
            raise
        return link

    def _send(self, body: dict[str, Any]) -> None:
        with self._sending:
            try:
                self._socket.sendall(json.dumps(body).encode() + b"\n")
            except OSError:
                self._socket.close()  # a message may be incomplete, so the thread reconnects

    def _main(self, first: threading.Event) -> None:
        while True:
            self._listen(first)
            time.sleep(REPORT_INTERVAL_S)  # the last directive stays valid while the agent is unreachable
            with self._sending:
                self._socket.close()
                try:
                    self._socket = self._connect()
                except OSError:
                    log.debug("the agent is not listening on %s", self._path)

    def _listen(self, first: threading.Event) -> None:
        """Read directives until the connection breaks."""
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
        for name in ("most_bytes", DAY_BYTES):
            fields[name] = math.inf if fields.get(name) is None else float(fields[name])
        with self._condition:
            self.directive = replace(AgentDirective(), **fields)
            self._condition.notify_all()


AgentControl = AgentLink | NoAgent
"""The training thread's interface to the agent."""
