"""Names of hosts: what is dialled while a name server is silent, fails, or has a new address."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gridtrain.core.messages import Ping
from gridtrain.errors import TransportError
from gridtrain.network.transport.interface import PeerUp
from gridtrain.network.transport.zmq import name_lookup, sockets
from gridtrain.network.transport.zmq.name_lookup import NameLookup

BOTH = {socket.AF_INET, socket.AF_INET6}


class NameServer:
    """Takes the place of `socket.getaddrinfo`.

    Attributes:
        addresses: the addresses of each name; a name that is missing does not exist.
        failing: the families of addresses whose questions fail.
        answers: the resolver waits while it is not set.
    """

    def __init__(self) -> None:
        self.addresses: dict[str, list[str]] = {}
        self.failing: set[int] = set()
        self.answers = threading.Event()
        self.answers.set()

    def getaddrinfo(self, host: str, _port: None, family: int, _type: int) -> list[Any]:
        assert self.answers.wait(60.0)
        if family in self.failing:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        found = [
            (family, socket.SOCK_STREAM, 6, "", (address, 0))
            for address in self.addresses.get(host, ())
            if (":" in address) == (family == socket.AF_INET6)
        ]
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return found


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    made = NameServer()
    monkeypatch.setattr(name_lookup.socket, "getaddrinfo", made.getaddrinfo)
    yield made
    made.answers.set()


def by_name(bound: str, name: str) -> str:
    return f"tcp://{name}:{bound.rpartition(':')[2]}"


def test_a_silent_name_server_stops_nobody(zeromq_net: Any, server: NameServer) -> None:
    server.addresses["clara.invalid"] = ["127.0.0.1"]
    anna, bert = zeromq_net.pair()
    clara = zeromq_net.add("clara")
    server.answers.clear()
    anna.transport.dial(clara.key, by_name(clara.transport.listen("tcp://127.0.0.1:0"), "clara.invalid"))
    anna.transport.send(bert.key, Ping(1))
    zeromq_net.until(lambda: bert.got(), anna, bert)
    assert "no name server has answered yet" in name_lookup.names.problem("tcp://clara.invalid:7700")
    server.answers.set()
    zeromq_net.until(lambda: anna.transport.connected(clara.key), anna, bert, clara)
    assert name_lookup.names.problem("tcp://clara.invalid:7700") == ""


@pytest.mark.parametrize("trouble", ["silent", "failing"])
def test_the_last_address_is_dialled_while_the_name_cannot_be_resolved(
    zeromq_net: Any, server: NameServer, trouble: str
) -> None:
    name = f"{trouble}.invalid"
    server.addresses[name] = ["127.0.0.1"]
    anna, bert = zeromq_net.add("anna"), zeromq_net.add("bert")
    bound = bert.transport.listen("tcp://127.0.0.1:0")
    anna.transport.dial(bert.key, by_name(bound, name))
    zeromq_net.until(lambda: anna.of(PeerUp), anna, bert)
    if trouble == "failing":
        server.failing = BOTH
    if trouble == "silent":
        server.answers.clear()
    bert.transport.close()
    again = zeromq_net.add("bert")
    again.transport.listen(bound)
    zeromq_net.until(lambda: len(anna.of(PeerUp)) == 2, anna, again)


def test_each_loss_of_a_connection_is_explained(
    zeromq_net: Any, server: NameServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.addresses["lost.invalid"] = ["127.0.0.1"]
    anna, bert = zeromq_net.add("anna"), zeromq_net.add("bert")
    bound = bert.transport.listen("tcp://127.0.0.1:0")
    anna.transport.dial(bert.key, by_name(bound, "lost.invalid"))
    zeromq_net.until(lambda: anna.of(PeerUp), anna, bert)
    server.failing = BOTH
    for losses in (1, 2):
        bert.transport.close()
        zeromq_net.until(lambda times=losses: len(caplog.messages) == times, anna)
        bert = zeromq_net.add("bert")
        bert.transport.listen(bound)
        zeromq_net.until(lambda times=losses: len(anna.of(PeerUp)) == 1 + times, anna, bert)
    assert all("'lost.invalid' cannot be resolved" in message for message in caplog.messages)


def test_a_host_is_followed_to_its_new_address(zeromq_net: Any, server: NameServer) -> None:
    server.addresses["moved.invalid"] = ["127.0.0.1"]
    anna, bert = zeromq_net.add("anna"), zeromq_net.add("bert")
    bound = bert.transport.listen("tcp://127.0.0.1:0")
    anna.transport.dial(bert.key, by_name(bound, "moved.invalid"))
    zeromq_net.until(lambda: anna.of(PeerUp), anna, bert)
    server.addresses["moved.invalid"] = ["127.0.0.2"]
    bert.transport.close()
    moved = zeromq_net.add("bert")
    moved.transport.listen(by_name(bound, "127.0.0.2"))
    zeromq_net.until(lambda: len(anna.of(PeerUp)) == 2, anna, moved)
    assert [up.host for up in anna.of(PeerUp)] == ["127.0.0.1", "127.0.0.2"]


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine speaks no IPv6")
def test_a_name_that_has_ipv6_addresses_only(zeromq_net: Any, server: NameServer) -> None:
    """To listen and to dial."""
    server.addresses["six.invalid"] = ["::1"]
    anna, bert = zeromq_net.add("anna"), zeromq_net.add("bert")
    address = bert.transport.listen("tcp://six.invalid:0")
    assert address.startswith("tcp://[::1]:")
    anna.transport.dial(bert.key, by_name(address, "six.invalid"))
    zeromq_net.until(lambda: anna.of(PeerUp) and bert.of(PeerUp), anna, bert)
    assert [up.host for up in bert.of(PeerUp)] == ["::1"]


@pytest.mark.parametrize("host", ["127.0.0.1", "port.invalid"])
def test_an_invalid_port_is_an_error_of_the_dialler_and_not_of_the_loop(
    host: str, zeromq_net: Any, server: NameServer
) -> None:
    server.addresses["port.invalid"] = ["127.0.0.1"]
    anna = zeromq_net.add("anna")
    with pytest.raises(TransportError, match="cannot dial"):
        anna.transport.dial(b"b" * 32, f"tcp://{host}:*")


def test_ipv4_comes_first(server: NameServer) -> None:
    server.addresses["both.invalid"] = ["::1", "127.0.0.1"]
    assert NameLookup().resolve("both.invalid") == "127.0.0.1"


def test_a_failure_for_ipv4_does_not_hide_an_ipv6_address(server: NameServer) -> None:
    server.addresses["six.invalid"] = ["2001:db8::9"]
    server.failing = {socket.AF_INET}
    assert NameLookup().resolve("six.invalid") == "2001:db8::9"


def test_a_failure_for_ipv4_replaces_no_ipv4_address(server: NameServer) -> None:
    names, server.addresses["both.invalid"] = NameLookup(), ["192.0.2.7", "2001:db8::9"]
    assert names.resolve("both.invalid") == "192.0.2.7"
    server.failing = {socket.AF_INET}
    assert names.resolve("both.invalid") == "192.0.2.7"
    assert "Temporary failure" in names.problem("tcp://both.invalid:7700")


def test_a_lookup_that_cannot_begin_has_failed(monkeypatch: pytest.MonkeyPatch, server: NameServer) -> None:
    def refuse(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    names = NameLookup()
    server.addresses["lab.invalid"] = ["192.0.2.7"]
    with monkeypatch.context() as no_threads:
        no_threads.setattr(threading.Thread, "start", refuse)
        assert not names.begin("lab.invalid")
    assert "(can't start new thread)" in names.problem("tcp://lab.invalid:7700")
    assert names.resolve("lab.invalid") == "192.0.2.7"
    assert names.problem("tcp://lab.invalid:7700") == ""


def test_the_number_of_lookups_is_bounded(server: NameServer) -> None:
    server.answers.clear()
    names = NameLookup()
    hosts = [f"host-{number}.invalid" for number in range(name_lookup.MAX_LOOKUPS + 1)]
    server.addresses = {host: ["192.0.2.7"] for host in hosts}
    assert [names.begin(host) for host in hosts] == [True] * name_lookup.MAX_LOOKUPS + [False]
    assert [names.address(host) for host in hosts] == [""] * len(hosts)
    server.answers.set()
    assert [names.resolve(host) for host in hosts] == ["192.0.2.7"] * len(hosts)


def test_a_name_that_cannot_be_resolved_is_reported_once(
    server: NameServer, caplog: pytest.LogCaptureFixture
) -> None:
    names = NameLookup()
    server.addresses["lab.invalid"] = ["192.0.2.7"]
    assert names.resolve("lab.invalid") == "192.0.2.7"
    server.failing = BOTH
    for host in ["lab.invalid", "lab.invalid", "none.invalid"]:
        ended = threading.Event()
        assert names.begin(host, ended.set)
        assert ended.wait(60.0)
    assert (names.address("lab.invalid"), names.address("none.invalid")) == ("192.0.2.7", "")
    assert caplog.messages == [
        "the host name 'lab.invalid' cannot be resolved (Temporary failure in name resolution); check the "
        "name, and this machine's name server (DNS); meanwhile its last known address, 192.0.2.7, is used",
        "the host name 'none.invalid' cannot be resolved (Temporary failure in name resolution); check the "
        "name, and this machine's name server (DNS); trying again",
    ]


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8::9", "2001:db8::9"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("localhost", "127.0.0.1"),
    ],
)
def test_an_address_is_not_looked_up(
    host: str, address: str, server: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(name_lookup.socket, "getaddrinfo", None)
    assert not NameLookup().begin(host)
    assert NameLookup().resolve(host) == address


@pytest.mark.parametrize(
    "host",
    [
        "lab.invalid",
        "1.2.3",
        "192.0.2.7%lab.invalid",
        "192.0.2.7:1;lab.invalid",
        "[fe80::1%1]:1;lab.invalid",
        "[fe80::1%1;lab.invalid]",
    ],
)
def test_libzmq_never_gets_a_name(host: str, zeromq_net: Any) -> None:
    """It would look it up in the thread that serves all connections."""
    anna = zeromq_net.add("anna")
    assert not sockets.is_numeric(f"tcp://{host}:7700")
    with (
        pytest.raises(TransportError, match="cannot dial"),
        anna.transport._dialer.open_socket(anna.key) as dealer,
    ):
        sockets.connect(dealer, f"tcp://{host}:7700")
