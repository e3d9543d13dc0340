"""Addresses as people write them, and a client that always answers or raises in time."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence

import pytest

from gridtrain.core import messages as m
from gridtrain.errors import (
    ConfigError,
    CoordinatorUnreachable,
    JoinRefused,
    RemoteProtocolError,
    TransportError,
)
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.in_memory import MemoryHub, MemoryTransport
from gridtrain.network.transport.interface import (
    ConnectionDenied,
    ConnectionRole,
    PeerDown,
    PeerUp,
    Received,
    TransportEvent,
    TransportViolation,
)
from gridtrain.runtime.client.coordinator_client import (
    CoordinatorClient,
    allow_only,
    parse_coordinator_address,
)

THERE = b"c" * 32
ME = Identity.from_secret(b"a" * 32)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://10.0.0.5:7000", "tcp://10.0.0.5:7000"),
        ("10.0.0.5:7000", "tcp://10.0.0.5:7000"),
        ("10.0.0.5", "tcp://10.0.0.5:7700"),
        ("lab-pc.local", "tcp://lab-pc.local:7700"),
        (" tcp://localhost ", "tcp://localhost:7700"),
        ("[::1]:7000", "tcp://[::1]:7000"),
    ],
)
def test_addresses(text: str, address: str) -> None:
    assert parse_coordinator_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tcp://",
        "http://10.0.0.5",
        "10.0.0.5:",
        "10.0.0.5:0",
        "10.0.0.5:70000",
        "a b",
        "-x",
        "::1",
        "tcp://*:7700",
    ],
)
def test_no_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match=r"tcp://host:port, got .* -> write the address that .* tcp://"):
        parse_coordinator_address(text)


class ScriptedTransport:
    """One list of events for each poll; then time passes."""

    def __init__(self, *turns: list[TransportEvent]) -> None:
        self.turns = list(turns)
        self.sent: list[m.Message] = []
        self.closed = False

    def dial(self, peer: m.PeerId, address: str) -> None:
        assert (peer, address) == (THERE, "tcp://there:7700")

    def connected(self, peer: m.PeerId) -> bool:
        return False

    def send(self, peer: m.PeerId, message: m.Message) -> None:
        self.sent.append(message)

    def poll(self, timeout_s: float) -> list[TransportEvent]:
        if self.turns:
            return self.turns.pop(0)
        time.sleep(timeout_s)
        return []

    def close(self) -> None:
        self.closed = True


def scripted(transport: ScriptedTransport) -> CoordinatorClient:
    return CoordinatorClient("tcp://there:7700", THERE, ME, transport=transport)  # type: ignore[arg-type]


def asked(*turns: list[TransportEvent]) -> dict[str, object]:
    transport = ScriptedTransport(*turns)
    try:
        with scripted(transport) as client:
            return client.status(0.05)
    finally:
        assert transport.closed


def reply(payload: bytes) -> Received:
    return Received(THERE, m.StatusReply(payload), len(payload))


def test_a_status() -> None:
    assert asked([PeerUp(THERE)], [reply(b'{"run": "default"}')]) == {"run": "default"}


def test_a_connection_that_breaks_is_asked_again() -> None:
    assert asked([PeerUp(THERE), PeerDown(THERE, "reset")], [PeerUp(THERE)], [reply(b"{}")]) == {}


def test_texts_from_the_network_are_made_printable() -> None:
    hostile = {"members": [{"name": "\x1b[2Janna\r\n", "step": 3, "reason": "x" * 10_000}]}
    picture = asked([PeerUp(THERE)], [reply(json.dumps(hostile).encode())])
    assert picture == {"members": [{"name": " [2Janna  ", "step": 3, "reason": "x" * 512}]}


@pytest.mark.parametrize(
    "payload", [b"", b"\xff", b"[1]", b"{", b"[" * 100_000], ids=lambda payload: str(payload[:9])
)
def test_an_answer_that_is_no_status(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="not a valid status -> check that the address"):
        asked([PeerUp(THERE)], [reply(payload)])


def test_nobody_answers() -> None:
    with pytest.raises(CoordinatorUnreachable, match=r"it did not answer within 0\.05 s -> "):
        asked()


def test_somebody_else_listens_at_the_coordinators_address() -> None:
    """As where another run is coordinated there by now: a firewall is not what to look for."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with (
            CoordinatorClient(address, THERE, ME) as client,
            pytest.raises(
                CoordinatorUnreachable, match=r"a program listens at .* another key.* new invitation"
            ),
        ):
            client.status(0.05)
    with (
        CoordinatorClient(address, THERE, ME) as client,
        pytest.raises(CoordinatorUnreachable, match=r"no coordinator can be reached at .* firewall"),
    ):
        client.status(0.05)


def test_somebody_greets_and_says_nothing() -> None:
    with pytest.raises(CoordinatorUnreachable, match="it accepted the connection, but did not answer"):
        asked([PeerUp(THERE)])


def test_another_version() -> None:
    reason = "peer speaks gridtrain protocol 9, this software speaks 1 -> install the same version"
    with pytest.raises(JoinRefused, match=r"protocol 9.*install the same version") as caught:
        asked([TransportViolation(THERE, reason)])
    assert caught.value.code == "version"


def test_somebody_who_speaks_something_else() -> None:
    with pytest.raises(RemoteProtocolError, match="sent an invalid answer: no msgpack"):
        asked([TransportViolation(None, "no msgpack")])


def test_a_key_that_the_coordinator_does_not_know() -> None:
    with pytest.raises(JoinRefused, match=r"denies access to this key -> ask the run's owner") as caught:
        asked([ConnectionDenied(THERE, "tcp://there:7700")])
    assert caught.value.code == "denied"


def test_what_it_refuses_it_says_itself() -> None:
    transport = ScriptedTransport(
        [PeerUp(THERE)], [Received(THERE, m.Refused("invitation", "used up", "ask"), 9)]
    )
    enrol = m.Enrol(b"n" * 32)
    with scripted(transport) as client, pytest.raises(JoinRefused, match=r"^used up -> ask$") as caught:
        client.ask(enrol, 0.05)
    assert caught.value.code == "invitation"
    assert transport.sent == [enrol]


@pytest.mark.parametrize(
    "answer", [m.Enrolled("default"), m.OperatorReply("out")], ids=lambda answer: str(answer)[:8]
)
def test_an_order_is_answered_by_what_fits_it(answer: m.Message) -> None:
    turns: Sequence[list[TransportEvent]] = ([PeerUp(THERE)], [Received(THERE, answer, 9)])
    with scripted(ScriptedTransport(*turns)) as client:
        assert client.ask(m.Unban(b"n" * 32), 0.05) == answer
    with pytest.raises(RemoteProtocolError, match=f"a status request with {type(answer).__name__}"):
        asked(*turns)


def test_an_address_that_cannot_be_dialled_is_a_matter_of_options() -> None:
    class Refusing(ScriptedTransport):
        def dial(self, peer: m.PeerId, address: str) -> None:
            raise TransportError("cannot dial it in the clear", remedy="switch encryption on")

    transport = Refusing()
    with pytest.raises(ConfigError, match=r"^cannot dial it in the clear -> switch encryption on$"):
        scripted(transport)
    assert transport.closed


def test_nobody_else_than_the_coordinator_gets_in() -> None:
    gate = allow_only(THERE)
    assert (gate(THERE), gate(b"x" * 32)) == (ConnectionRole.MEMBER, ConnectionRole.STRANGER)


def test_one_connection_can_be_asked_again_and_again() -> None:
    hub = MemoryHub()
    there = MemoryTransport(THERE, hub)
    there.listen("memory://there")
    mine = MemoryTransport(ME.public, hub, gate=allow_only(THERE))
    with CoordinatorClient("memory://there", THERE, ME, transport=mine) as client:
        for step in range(3):
            there.send(ME.public, m.StatusReply(json.dumps({"step": step}).encode()))
            assert client.status(5.0) == {"step": step}
