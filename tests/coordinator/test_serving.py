"""The address that a coordinator announces if it listens on all interfaces, and where it prints this."""

from __future__ import annotations

import contextlib
import io
import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from gridtrain.runtime.client.endpoint_file import EndpointFile
from gridtrain_coordinator import serving


class Route(contextlib.nullcontext):
    """A socket on a machine whose default route is of one family."""

    only = socket.AF_INET6

    def __init__(self, family: int, kind: int) -> None:
        super().__init__(self)
        self.family = family

    def connect(self, address: tuple[str, int]) -> None:
        if self.family != self.only:
            raise OSError("Network is unreachable")

    def getsockname(self) -> tuple[str, int]:
        return "fd77::2" if self.family == socket.AF_INET6 else "10.77.0.2", 40000


@pytest.mark.parametrize(
    ("only", "listen", "announced"),
    [
        (socket.AF_INET6, "tcp://0.0.0.0:7700", "127.0.0.1"),
        (socket.AF_INET6, "tcp://*:7700", "127.0.0.1"),
        (socket.AF_INET6, "tcp://[::]:7700", "[fd77::2]"),
        (socket.AF_INET, "tcp://0.0.0.0:7700", "10.77.0.2"),
        (socket.AF_INET, "tcp://[::]:7700", "10.77.0.2"),
    ],
)
def test_the_announced_address_is_one_that_is_bound(only, listen, announced, monkeypatch):
    monkeypatch.setattr(Route, "only", only)
    monkeypatch.setattr(serving.socket, "socket", Route)
    assert serving._outward_host(listen) == announced


@pytest.mark.parametrize(
    ("log_format", "is_shared", "is_logged"),
    [("json", False, True), ("", True, True), ("", False, False), ("text", True, False)],
)
def test_the_greeting_has_the_format_of_a_log_in_the_same_stream(
    log_format: str, is_shared: bool, is_logged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = EndpointFile("tcp://lab-pc:7700", "tcp://127.0.0.1:7700", bytes(32), "default", True)
    core = SimpleNamespace(run=lambda stop: None)
    board = SimpleNamespace(start=lambda: None, close=lambda: None, startup_lines=lambda is_terminal: [])
    monkeypatch.setattr(serving, "StopOnSignal", lambda: SimpleNamespace(signal_number=0))
    monkeypatch.setattr(serving, "_open", lambda *_: (core, board, endpoint))
    out = io.StringIO()
    err = out if is_shared else io.StringIO()
    settings = serving.Settings(state=tmp_path, log_format=log_format)
    assert serving.serve_and_log_errors(settings, out=out, err=err) == 0
    greeting = 'run "default" is coordinated at tcp://lab-pc:7700'
    if is_logged:
        assert json.loads(err.getvalue())["fields"]["text"].startswith(greeting)
        assert is_shared or out.getvalue() == ""
    else:
        assert out.getvalue().startswith(greeting)
