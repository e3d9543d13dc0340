"""A barrier for processes on one machine, in any network namespaces, that also collects their reports.

All network namespaces share the file system and the monotonic clock, so the times of different processes can
be compared.

    member   --{"at": "ready", ...}-->   server    waits until all have arrived
    member   <------- "go" -----------   server    all at once, over sockets without a rate limit
    member   --{"at": "done", ...}-->    server
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gridtrain.errors import GridtrainError

MemberReport = dict[str, Any]

_LOOK_S = 0.5  # interval between two checks for failed processes
_READ_BYTES = 65536


class BarrierServer:
    """The server of the barrier; a context manager that closes the sockets.

    Args:
        path: the path of the server's socket; at most 100 bytes.
        members: the number of members that must arrive.
        check: a function that is called repeatedly while the server waits, and that raises an exception if a
            process has ended.
    """

    def __init__(self, path: Path, members: int, check: Callable[[], None] = lambda: None) -> None:
        self._members, self._check = members, check
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(members)
        self._lines: dict[socket.socket, bytes] = {}

    def __enter__(self) -> BarrierServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for handle in (self._listener, *self._lines):
            handle.close()

    def wait_for_all(self, place: str, timeout_s: float) -> list[MemberReport]:
        """Wait until all members are at `place`; return their reports in arbitrary order.

        Raises:
            GridtrainError: not all members reach `place` within `timeout_s`, or a member is at another place;
                exceptions from `check` are passed on.
        """
        reports: list[MemberReport] = []
        until_s = time.monotonic() + timeout_s
        while len(reports) < self._members:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise GridtrainError(
                    f"only {len(reports)} of {self._members} members reached {place!r} within "
                    f"{timeout_s:g} s",
                    remedy="see the members' logs; a slow machine needs more time",
                )
            readable, _, _ = select.select([self._listener, *self._lines], [], [], min(left_s, _LOOK_S))
            for handle in readable:
                reports += self._read(handle)
            self._check()
        if wrong := {report["at"] for report in reports} - {place}:
            raise GridtrainError(
                f"members are at {sorted(wrong)}, but must be at {place!r}",
                remedy="use the same version of gridtrain for all members",
            )
        return reports

    def release(self, word: str) -> None:
        """Send `word` to all members, which then continue."""
        for handle in self._lines:
            with contextlib.suppress(BrokenPipeError):  # the next wait detects that the member has ended
                handle.sendall(word.encode() + b"\n")

    def _read(self, handle: socket.socket) -> list[MemberReport]:
        if handle is self._listener:
            self._lines[self._listener.accept()[0]] = b""
            return []
        data = handle.recv(_READ_BYTES)
        if not data:
            del self._lines[handle]
            handle.close()
            self._check()
            return []
        *whole, self._lines[handle] = (self._lines[handle] + data).split(b"\n")
        return [json.loads(line) for line in whole]


class BarrierClient:
    """A member's side of the barrier."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(str(path))
        self._lines = self._socket.makefile("r")

    def wait_at(self, place: str, **figures: object) -> str:
        """Report that this member is at `place`, and wait until the server releases the members.

        Returns the word that the server sends, or "end" if the server has closed the connection.

        Args:
            figures: the values to report, by name.
        """
        try:
            self._socket.sendall(json.dumps({"at": place, **figures}).encode() + b"\n")
            return self._lines.readline().strip() or "end"
        except (BrokenPipeError, ConnectionResetError):
            return "end"
