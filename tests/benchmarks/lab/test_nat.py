"""Home routers: outwards everything, inwards nothing, and the eavesdropper between them.

internet 10.77.0.0/24
   |-- hub    10.77.0.2
   |-- home   10.77.0.3 = 192.168.1.1
   |     |-- anna 192.168.1.2
   |     `-- bert 192.168.1.3
   `-- other  10.77.0.4 = 192.168.2.1
         `-- cleo 192.168.2.2
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from lab import ns
from lab.nat import FIREWALLS
from lab.net import Host, Net, Router

PORT = 7700
SILENCE_S = 0.3
"""So long nothing may come through; what does come through takes a millisecond."""


@dataclass(frozen=True)
class Town:
    hub: Host
    home: Router
    anna: Host
    bert: Host
    other: Router
    cleo: Host


@pytest.fixture(params=FIREWALLS)
def town(lab: None, request: pytest.FixtureRequest) -> Iterator[Town]:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    with Net(firewall=request.param) as net:
        hub, home, other = net.host("hub"), net.router("home"), net.router("other")
        yield Town(hub, home, home.host("anna"), home.host("bert"), other, other.host("cleo"))


def talk(sender: Host, receiver: Host, address: str) -> str:
    """Dial, send a word both ways; returns the address that the receiver saw."""
    with receiver.listen(PORT) as listener:
        outgoing = sender.dial(address, PORT)
        incoming, (seen, _) = listener.accept()
    with outgoing, incoming:
        outgoing.sendall(b"ping")
        assert incoming.recv(4, socket.MSG_WAITALL) == b"ping"
        incoming.sendall(b"pong")
        assert outgoing.recv(4, socket.MSG_WAITALL) == b"pong"
    return str(seen)


def test_who_reaches_whom(town: Town) -> None:
    """The address that the dialled side sees, or why nothing came through."""

    def attempt(sender: Host, receiver: Host, address: str) -> str:
        with receiver.listen(PORT):
            try:
                sender.dial(address, PORT, SILENCE_S).close()
            except TimeoutError:
                return "silence"
            except OSError as error:
                return str(error).partition("] ")[2]
            return "reached"

    t = town
    assert talk(t.anna, t.hub, t.hub.address) == t.home.address, "the internet sees the router, not anna"
    assert talk(t.cleo, t.hub, t.hub.address) == t.other.address
    assert talk(t.anna, t.bert, t.bert.address) == t.anna.address, "one LAN, no translation"
    assert talk(t.bert, t.anna, t.anna.address) == t.bert.address
    assert attempt(t.hub, t.anna, t.home.address) == "silence"
    assert attempt(t.hub, t.anna, t.anna.address) == "Network is unreachable"
    assert attempt(t.cleo, t.anna, t.home.address) == "silence"
    assert attempt(t.cleo, t.anna, t.anna.address) != "reached"
    assert attempt(t.bert, t.anna, t.home.address) == "Connection refused", "the router itself answers"


def test_a_stranger_who_routes_to_the_lan_by_hand_is_not_let_in(town: Town) -> None:
    """It knows anna's private address and sends straight to her router: only the rules stop it."""
    route = f"route add 192.168.1.0/24 via {town.home.address}"
    ns.ip_batch(town.hub.namespace, [route])
    with town.anna.listen(PORT), pytest.raises(TimeoutError):
        town.hub.dial(town.anna.address, PORT, SILENCE_S)


def test_a_router_without_translation_lets_everybody_in(lab: None) -> None:
    """That the tests above fail where there is no NAT."""
    with Net() as net:
        hub, office = net.host("hub"), net.router("office", translate=False)
        anna = office.host("anna")
        ns.ip_batch(hub.namespace, [f"route add 192.168.1.0/24 via {office.address}"])
        assert talk(hub, anna, anna.address) == hub.address
        assert talk(anna, hub, hub.address) == anna.address


def test_two_homes_may_have_the_same_private_addresses(lab: None) -> None:
    """As nearly all homes do: whoever dials the private address of another home meets a neighbour."""
    with Net() as net:
        hub = net.host("hub")
        one, two = (net.router(name, subnet="192.168.178") for name in ("one", "two"))
        anna, bert = one.host("anna"), two.host("bert")
        assert anna.address == bert.address == "192.168.178.2"
        assert talk(anna, hub, hub.address) == one.address
        assert talk(bert, hub, hub.address) == two.address
        assert talk(bert, bert, anna.address) == anna.address, "bert meets himself"
