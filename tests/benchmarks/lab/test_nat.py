"""Home routers let connections out and none in.

internet 10.77.0.0/24
   |-- hub    10.77.0.2
   |-- home   10.77.0.3 = 192.168.1.1
   |     |-- anna 192.168.1.2
   |     `-- bert 192.168.1.3
   `-- other  10.77.0.4 = 192.168.2.1
         `-- cleo 192.168.2.2
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from lab import ns
from lab.net import Host, Net, Router

PORT = 7700
TIMEOUT_S = 0.3
"""After this time a connection counts as dropped; one that succeeds takes a millisecond."""


@dataclass(frozen=True)
class Town:
    hub: Host
    home: Router
    anna: Host
    bert: Host
    other: Router
    cleo: Host


@pytest.fixture
def town(lab: None) -> Iterator[Town]:
    with Net() as net:
        hub, home, other = net.host("hub"), net.router("home"), net.router("other")
        yield Town(hub, home, home.host("anna"), home.host("bert"), other, other.host("cleo"))


def talk(sender: Host, receiver: Host, address: str) -> str:
    """Dial and send a word in each direction; return the sender's address as the receiver sees it."""
    with receiver.listen(PORT) as listener:
        outgoing = sender.dial(address, PORT)
        incoming, (seen, _) = listener.accept()
    with outgoing, incoming:
        outgoing.sendall(b"ping")
        assert incoming.recv(4, socket.MSG_WAITALL) == b"ping"
        incoming.sendall(b"pong")
        assert outgoing.recv(4, socket.MSG_WAITALL) == b"pong"
    return str(seen)


def test_a_router_hides_its_hosts_and_drops_connections_from_outside(town: Town) -> None:

    def attempt(sender: Host, receiver: Host, address: str) -> str:
        with receiver.listen(PORT):
            try:
                sender.dial(address, PORT, TIMEOUT_S).close()
            except TimeoutError:
                return "dropped"
            except OSError as error:
                return str(error).partition("] ")[2]
            return "reached"

    t = town
    assert talk(t.anna, t.hub, t.hub.address) == t.home.address, "the internet sees the router, not anna"
    assert talk(t.cleo, t.hub, t.hub.address) == t.other.address
    assert talk(t.anna, t.bert, t.bert.address) == t.anna.address, "one LAN, no translation"
    assert talk(t.bert, t.anna, t.anna.address) == t.bert.address
    assert attempt(t.hub, t.anna, t.home.address) == "dropped"
    assert attempt(t.hub, t.anna, t.anna.address) == "Network is unreachable"
    assert attempt(t.cleo, t.anna, t.home.address) == "dropped"
    assert attempt(t.cleo, t.anna, t.anna.address) != "reached"
    assert attempt(t.bert, t.anna, t.home.address) == "Connection refused", "the router itself answers"


def test_a_stranger_with_a_route_to_the_lan_is_dropped(town: Town) -> None:
    """It sends to anna's private address through the router, whose rules alone stop it."""
    route = f"route add 192.168.1.0/24 via {town.home.address}"
    ns.ip_batch(town.hub.namespace, [route])
    with town.anna.listen(PORT), pytest.raises(TimeoutError):
        town.hub.dial(town.anna.address, PORT, TIMEOUT_S)


def test_a_router_without_translation_lets_connections_in(lab: None) -> None:
    """This shows that the tests above fail without NAT."""
    with Net() as net:
        hub, office = net.host("hub"), net.router("office", translate=False)
        anna = office.host("anna")
        ns.ip_batch(hub.namespace, [f"route add 192.168.1.0/24 via {office.address}"])
        assert talk(hub, anna, anna.address) == hub.address
        assert talk(anna, hub, hub.address) == anna.address


def test_two_homes_may_have_the_same_private_addresses(lab: None) -> None:
    """As many real homes do: a connection to such an address stays in the sender's home."""
    with Net() as net:
        hub = net.host("hub")
        one, two = (net.router(name, subnet="192.168.178") for name in ("one", "two"))
        anna, bert = one.host("anna"), two.host("bert")
        assert anna.address == bert.address == "192.168.178.2"
        assert talk(anna, hub, hub.address) == one.address
        assert talk(bert, hub, hub.address) == two.address
        assert talk(bert, bert, anna.address) == anna.address, "bert reaches itself"
