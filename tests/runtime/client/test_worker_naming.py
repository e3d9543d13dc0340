"""Where a worker waits for the others: on the interface that leads to the coordinator."""

from __future__ import annotations

import socket

import pytest

from gridtrain.runtime.client.worker_naming import default_listen_address

WAYS = {"10.0.0.9": "10.0.0.5", "2001:db8::9": "2001:db8::5"}
"""The coordinator's address, and ours on the way to it."""


class Route:
    """A datagram socket of a machine with two interfaces; connecting it sends nothing."""

    def __init__(self, family: int, kind: int) -> None:
        assert kind == socket.SOCK_DGRAM

    def __enter__(self) -> Route:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def connect(self, place: tuple[str, int]) -> None:
        self.place = place

    def getsockname(self) -> tuple[str, int]:
        return WAYS[self.place[0]], 40000


@pytest.mark.parametrize(
    ("coordinator", "ours"),
    [
        ("tcp://10.0.0.9:7700", "tcp://10.0.0.5:0"),
        ("tcp://[2001:db8::9]:7700", "tcp://[2001:db8::5]:0"),
    ],
)
def test_on_another_machine_a_worker_listens_where_the_coordinator_can_be_reached(
    monkeypatch: pytest.MonkeyPatch, coordinator: str, ours: str
) -> None:
    monkeypatch.setattr(socket, "socket", Route)
    assert default_listen_address(coordinator) == ours


def test_beside_its_coordinator_a_worker_listens_on_loopback() -> None:
    assert default_listen_address("tcp://127.0.0.1:7700") == "tcp://127.0.0.1:0"


def test_without_a_way_to_the_coordinator_it_listens_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*_: object, **__: object) -> object:
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    assert default_listen_address("tcp://coordinator.invalid:7700") == "tcp://127.0.0.1:0"
