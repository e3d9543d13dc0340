"""Addresses as people write them, and a client that always answers or raises in time."""

from __future__ import annotations

import json
import time

import pytest

from gridtrain.errors import ConfigError, CoordinatorUnreachable, JoinRefused, RemoteProtocolError
from gridtrain.protocol import messages as m
from gridtrain.runtime.client import StatusClient, coordinator_address
from gridtrain.transport.base import PeerDown, PeerUp, Received, TransportEvent, Violation
from gridtrain.transport.memory import MemoryHub, MemoryTransport

THERE = b"c" * 32


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
    assert coordinator_address(text) == address


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
    with pytest.raises(ConfigError, match=r"tcp://host:port, got .* -> write for instance tcp://"):
        coordinator_address(text)


class ScriptedTransport:
    """One list of events for each poll; then time passes."""

    def __init__(self, *turns: list[TransportEvent]) -> None:
        self.turns = list(turns)
        self.sent: list[m.Message] = []
        self.closed = False

    def dial(self, peer: m.PeerId | None, address: str) -> None: ...

    def connected(self, peer: m.PeerId) -> bool:
        return True

    def send(self, peer: m.PeerId, message: m.Message) -> None:
        self.sent.append(message)

    def poll(self, timeout_s: float) -> list[TransportEvent]:
        if self.turns:
            return self.turns.pop(0)
        time.sleep(timeout_s)
        return []

    def close(self) -> None:
        self.closed = True


def asked(*turns: list[TransportEvent]) -> dict[str, object]:
    transport = ScriptedTransport(*turns)
    try:
        with StatusClient("tcp://there:7700", transport) as client:  # type: ignore[arg-type]
            return client.ask(0.05)
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
    with pytest.raises(RemoteProtocolError, match="no status -> check that the address"):
        asked([PeerUp(THERE)], [reply(payload)])


def test_nobody_answers() -> None:
    with pytest.raises(CoordinatorUnreachable, match=r"it did not answer within 0\.05 s -> "):
        asked()


def test_somebody_greets_and_says_nothing() -> None:
    with pytest.raises(CoordinatorUnreachable, match="it greeted, but did not answer"):
        asked([PeerUp(THERE)])


def test_another_version() -> None:
    reason = "peer speaks gridtrain protocol 9, this software speaks 1 -> install the same version"
    with pytest.raises(JoinRefused, match=r"protocol 9.*install the same version") as caught:
        asked([Violation(THERE, reason)])
    assert caught.value.code == "version"


def test_somebody_who_speaks_something_else() -> None:
    with pytest.raises(RemoteProtocolError, match="something else: no msgpack"):
        asked([Violation(None, "no msgpack")])


def test_one_connection_can_be_asked_again_and_again() -> None:
    hub = MemoryHub()
    there = MemoryTransport(THERE, hub)
    there.listen("memory://there")
    with StatusClient("memory://there", MemoryTransport(b"a" * 32, hub)) as client:
        for step in range(3):
            there.send(b"a" * 32, m.StatusReply(json.dumps({"step": step}).encode()))
            assert client.ask(5.0) == {"step": step}
