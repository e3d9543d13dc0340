"""A worker listens on the interface that leads to the coordinator."""

from __future__ import annotations

import socket

import pytest

from gridtrain.runtime.client.worker_defaults import default_listen_address, interface_address

ROUTES = {"10.0.0.9": "10.0.0.5", "2001:db8::9": "2001:db8::5"}
"""The coordinator's address, and the local address of the route to it."""


class RoutedSocket:
    """A datagram socket of a machine with two interfaces; connecting it sends nothing."""

    def __init__(self, family: int, kind: int) -> None:
        assert kind == socket.SOCK_DGRAM

    def __enter__(self) -> RoutedSocket:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def connect(self, address: tuple[str, int]) -> None:
        self.address = address

    def getsockname(self) -> tuple[str, int]:
        return ROUTES[self.address[0]], 40000


@pytest.mark.parametrize(
    ("coordinator", "expected"),
    [
        ("tcp://10.0.0.9:7700", "tcp://10.0.0.5:0"),
        ("tcp://[2001:db8::9]:7700", "tcp://[2001:db8::5]:0"),
    ],
)
def test_a_worker_listens_on_the_interface_of_its_route_to_the_coordinator(
    monkeypatch: pytest.MonkeyPatch, coordinator: str, expected: str
) -> None:
    monkeypatch.setattr(socket, "socket", RoutedSocket)
    assert default_listen_address(coordinator) == expected


def test_a_worker_on_the_coordinators_machine_listens_on_loopback() -> None:
    assert default_listen_address("tcp://127.0.0.1:7700") == "tcp://127.0.0.1:0"


def test_a_name_with_addresses_of_both_kinds_is_reached_over_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {socket.AF_INET6: "::1", socket.AF_INET: "127.0.0.1"}
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda _host, _port, family, _kind: [(family, 0, 0, "", (addresses[family], 0))],
    )
    assert default_listen_address("tcp://both.invalid:7700") == "tcp://127.0.0.1:0"


def test_a_worker_without_a_route_listens_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_such_host(*_: object, **__: object) -> object:
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", no_such_host)
    assert default_listen_address("tcp://coordinator.invalid:7700") == "tcp://127.0.0.1:0"
    assert interface_address("coordinator.invalid") == ""
