"""Connections that a worker dials and closes from generation to generation."""

from __future__ import annotations

from scripted_member import COORDINATOR, ScriptedMember

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as ev

ME, A, B = (letter * 32 for letter in (b"m", b"a", b"b"))


class Worker(ScriptedMember):
    """A member core in a full mesh, and the effects on its connections."""

    def __init__(self) -> None:
        super().__init__(ME, address="tcp://me:1")

    def hear(self, event: ev.MemberEvent) -> list[str]:  # type: ignore[override]
        """Returns effects such as "dial a at a:1", "disconnect b" and "ready"."""
        done = []
        for effect in super().hear(event):
            match effect:
                case ev.Dial(peer, address):
                    done.append(f"dial {peer[:1].decode()} at {address}")
                case ev.Disconnect(peer):
                    done.append(f"disconnect {peer[:1].decode()}")
                case ev.Send(_, m.Ready()):
                    done.append("ready")
        return done

    def view(self, generation: int, **addresses: str) -> list[str]:
        """A generation of this worker and others, by letter and address."""
        by_peer = {ME: ""} | {name.encode() * 32: address for name, address in addresses.items()}
        members = (m.Member(p, p[:1].decode(), address, 4, False) for p, address in by_peer.items())
        return self.install(generation, members)  # type: ignore[return-value]


def test_a_disconnected_peer_is_dialled_again_when_it_is_a_member_again() -> None:
    """If it still counted as connected, this worker would be ready without the connection."""
    worker = Worker()
    assert worker.view(1, a="a:1", b="b:1") == ["dial a at a:1", "dial b at b:1"]
    assert worker.hear(ev.PeerConnected(A)) + worker.hear(ev.PeerConnected(B)) == ["ready"]
    assert worker.view(2, b="b:1") == ["disconnect a", "ready"]
    assert worker.view(3, a="a:1", b="b:1") == ["dial a at a:1"]
    assert worker.hear(ev.PeerConnected(A)) == ["ready"]


def test_in_the_shared_list_the_larger_key_dials() -> None:
    worker = Worker()
    assert worker.view(1, m="me:1", a="a:1", z="z:1", b="") == ["dial a at a:1"], (
        "b, behind NAT, dials itself"
    )
    own = worker.view(2, m="", a="a:1", z="z:1", b="")
    assert own == ["dial a at a:1", "dial z at z:1"], "in a list of its own, every member with an address"


def test_an_accepted_connection_is_not_closed_from_this_side() -> None:
    """Otherwise a would not notice, and not dial again when it is a member again."""
    worker = Worker()
    assert worker.view(1, a="", b="b:1") == ["dial b at b:1"]
    worker.hear(ev.PeerConnected(A)), worker.hear(ev.PeerConnected(B))
    assert worker.view(2, b="b:1") == ["ready"]
    assert A not in worker.core.known_peers, "its next message closes the connection"
    assert worker.view(3, a="", b="b:1") == ["ready"], "it sent nothing, and its connection is open"
    worker.view(4, b="b:1")
    assert worker.hear(ev.PeerDisconnected(A, "its key is no longer admitted")) == []
    assert worker.view(5, a="", b="b:1") == [], "not ready before a has connected"
    assert worker.hear(ev.PeerConnected(A)) == ["ready"]


def test_a_peer_that_has_left_is_not_dialled_again() -> None:
    worker = Worker()
    worker.view(1, a="a:1", b="b:1")
    worker.hear(ev.PeerConnected(A)), worker.hear(ev.PeerConnected(B))
    worker.hear(ev.PeerDisconnected(A, "the peer closed"))
    assert worker.view(2, b="b:1") == ["disconnect a", "ready"]


def test_a_connection_that_breaks_while_forming_is_dialled_again() -> None:
    """It was connected when the view arrived, so it was not dialled then."""
    worker = Worker()
    worker.hear(ev.PeerConnected(A))
    assert worker.view(1, a="a:1", b="") == []
    assert worker.hear(ev.PeerDisconnected(A, "reset")) == ["dial a at a:1"]
    assert worker.hear(ev.PeerConnected(B)) + worker.hear(ev.PeerConnected(A)) == ["ready"]


def test_a_member_relay_replaces_the_coordinator_as_relay() -> None:
    """A newcomer is probed through the coordinator; in a generation members relay."""
    worker, by_coordinator, by_b = Worker(), f"relay:{COORDINATOR.hex()}", f"relay:{B.hex()}"
    announced = m.ExpectProbes(((A, by_coordinator),))
    assert worker.say(announced) == [f"dial a at {by_coordinator}"]
    worker.hear(ev.PeerConnected(A)), worker.hear(ev.PeerConnected(B))
    assert worker.view(1, a=by_b, b="") == [f"dial a at {by_b}", "ready"], (
        "the former route is used until then"
    )
    assert worker.hear(ev.PeerDisconnected(A, "it is reached through b now")) == [f"dial a at {by_b}"], (
        "harmless"
    )
    assert worker.hear(ev.PeerConnected(A)) == []
    assert worker.view(2, a=by_b, b="") == ["ready"], "the same route as before"


def test_a_direct_connection_is_not_replaced_for_another_address() -> None:
    worker = Worker()
    worker.view(1, a="a:1")
    worker.hear(ev.PeerConnected(A))
    assert worker.view(2, a="a:2") == ["ready"]
