"""The address that a coordinator announces if it listens on all interfaces."""

from __future__ import annotations

import contextlib
import socket

import pytest

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
