"""Addresses of coordinators, and a client that answers or raises in time."""

from __future__ import annotations

import errno
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
    VersionMismatch,
)
from gridtrain.network.transport.zmq import name_lookup
from gridtrain.runtime.client.coordinator_client import (
    CoordinatorClient,
    allow_only,
    parse_coordinator_address,
)

COORDINATOR = b"c" * 32
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
def test_an_address_is_parsed(text: str, address: str) -> None:
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
def test_an_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"tcp://host:port, got .* -> write the address that .* tcp://"):
        parse_coordinator_address(text)


class ScriptedTransport:
    """Returns one list of events for each poll; then polls time out."""

    def __init__(self, *turns: list[TransportEvent]) -> None:
        self.turns = list(turns)
        self.sent: list[m.Message] = []
        self.closed = False

    def dial(self, peer: m.PeerId, address: str) -> None:
        assert (peer, address) == (COORDINATOR, "tcp://there:7700")

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
    return CoordinatorClient("tcp://there:7700", COORDINATOR, ME, transport=transport)  # type: ignore[arg-type]


def request_status(*turns: list[TransportEvent]) -> dict[str, object]:
    transport = ScriptedTransport(*turns)
    try:
        with scripted(transport) as client:
            return client.status(0.05)
    finally:
        assert transport.closed


def reply(payload: bytes) -> Received:
    return Received(COORDINATOR, m.StatusReply(payload), len(payload))


def test_a_status_is_returned() -> None:
    assert request_status([PeerUp(COORDINATOR)], [reply(b'{"run": "default"}')]) == {"run": "default"}


def test_a_request_is_repeated_after_a_broken_connection() -> None:
    assert (
        request_status(
            [PeerUp(COORDINATOR), PeerDown(COORDINATOR, "reset")], [PeerUp(COORDINATOR)], [reply(b"{}")]
        )
        == {}
    )


def test_texts_from_the_network_are_made_printable() -> None:
    hostile = {"members": [{"name": "\x1b[2Ja\u200bnna\r\n", "step": 3, "reason": "x" * 10_000}]}
    status = request_status([PeerUp(COORDINATOR)], [reply(json.dumps(hostile).encode())])
    assert status == {"members": [{"name": "\ufffd[2Ja\ufffdnna  ", "step": 3, "reason": "x" * 512}]}


@pytest.mark.parametrize(
    "payload", [b"", b"\xff", b"[1]", b"{", b"[" * 100_000], ids=lambda payload: str(payload[:9])
)
def test_an_invalid_status_is_an_error(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="not a valid status -> check that the address"):
        request_status([PeerUp(COORDINATOR)], [reply(payload)])


def test_a_missing_answer_times_out() -> None:
    with pytest.raises(CoordinatorUnreachable, match=r"it did not answer within 0\.05 s -> "):
        request_status()


def test_another_program_at_the_coordinators_address_is_named_as_the_cause() -> None:
    """For example the coordinator of another run.  The remedy must not be a firewall."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with (
            CoordinatorClient(address, COORDINATOR, ME) as client,
            pytest.raises(
                CoordinatorUnreachable, match=r"a program listens on .* another key.* new invitation"
            ),
        ):
            client.status(0.05)
    with (
        CoordinatorClient(address, COORDINATOR, ME) as client,
        pytest.raises(CoordinatorUnreachable, match=r"the coordinator at .* cannot be reached.* firewall"),
    ):
        client.status(0.05)


def test_a_name_that_cannot_be_resolved_is_named_as_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(*_: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(name_lookup.socket, "getaddrinfo", getaddrinfo)
    with (
        CoordinatorClient("tcp://coordinator.invalid:7700", COORDINATOR, ME) as client,
        pytest.raises(
            CoordinatorUnreachable, match=r"'coordinator.invalid' cannot be resolved .* name server \(DNS\)"
        ),
    ):
        client.status(0.05)


@pytest.mark.parametrize(("host", "needs_ipv6"), [("[2001:db8::1]", True), ("192.0.2.1", False)])
def test_a_machine_without_a_route_to_the_coordinator_is_told_so(
    host: str, needs_ipv6: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create_connection(*_: object, **__: object) -> None:
        raise ExceptionGroup("", [OSError(errno.ENETUNREACH, "Network is unreachable")])

    monkeypatch.setattr(socket, "create_connection", create_connection)
    with (
        CoordinatorClient(f"tcp://{host}:7700", COORDINATOR, ME) as client,
        pytest.raises(CoordinatorUnreachable, match=r"within 0\.05 s: Network is unreachable") as raised,
    ):
        client.status(0.05)
    assert ("enable IPv6" in raised.value.remedy) == needs_ipv6 and "firewall" not in raised.value.remedy


def test_a_stopped_coordinator_is_not_blamed_on_an_address_without_a_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its name has an IPv4 and an IPv6 address, and this machine has only IPv4."""

    def create_connection(*_: object, **__: object) -> None:
        refused = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        raise ExceptionGroup("", [refused, OSError(errno.ENETUNREACH, "Network is unreachable")])

    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    monkeypatch.setattr(socket, "create_connection", create_connection)
    assert name_lookup.names.resolve("lab") == "127.0.0.1"
    with (
        CoordinatorClient("tcp://lab:7700", COORDINATOR, ME) as client,
        pytest.raises(CoordinatorUnreachable, match=r"within 0\.05 s -> ") as raised,
    ):
        client.status(0.05)
    assert "firewall" in raised.value.remedy


def test_a_coordinator_that_connects_and_does_not_answer_times_out() -> None:
    with pytest.raises(CoordinatorUnreachable, match=r"accepted the connection, but did not answer .*MTU"):
        request_status([PeerUp(COORDINATOR)])


def test_another_protocol_version_is_refused() -> None:
    reason = "peer speaks gridtrain protocol 9, this software speaks 1 -> install the same version"
    with pytest.raises(JoinRefused, match=r"protocol 9.*install the same version") as caught:
        request_status([VersionMismatch(COORDINATOR, reason, COORDINATOR, "", 9, "gridtrain 9.9")])
    assert caught.value.code == "version"


def test_another_protocol_is_an_invalid_answer() -> None:
    with pytest.raises(RemoteProtocolError, match="sent an invalid response: no msgpack of this protocol"):
        request_status([TransportViolation(None, "no msgpack of this protocol")])


def test_an_unknown_key_is_denied() -> None:
    with pytest.raises(JoinRefused, match=r"denies access to this key -> ask the run's owner") as caught:
        request_status([ConnectionDenied(COORDINATOR, "tcp://there:7700")])
    assert caught.value.code == "denied"


def test_a_refusal_has_the_coordinators_reason() -> None:
    transport = ScriptedTransport(
        [PeerUp(COORDINATOR)], [Received(COORDINATOR, m.Refused("invitation", "used up", "ask"), 9)]
    )
    enrol = m.Enrol(b"n" * 32)
    with scripted(transport) as client, pytest.raises(JoinRefused, match=r"^used up -> ask$") as caught:
        client.ask(enrol, 0.05)
    assert caught.value.code == "invitation"
    assert transport.sent == [enrol]


@pytest.mark.parametrize(
    "answer", [m.Enrolled("default"), m.OperatorReply("out")], ids=lambda answer: str(answer)[:8]
)
def test_each_request_expects_its_own_type_of_answer(answer: m.Message) -> None:
    turns: Sequence[list[TransportEvent]] = ([PeerUp(COORDINATOR)], [Received(COORDINATOR, answer, 9)])
    with scripted(ScriptedTransport(*turns)) as client:
        assert client.ask(m.Unban(b"n" * 32), 0.05) == answer
    with pytest.raises(RemoteProtocolError, match=f"a status request with {type(answer).__name__}"):
        request_status(*turns)


def test_an_address_that_cannot_be_dialled_is_a_configuration_error() -> None:
    class Refusing(ScriptedTransport):
        def dial(self, peer: m.PeerId, address: str) -> None:
            raise TransportError("cannot dial it in the clear", remedy="switch encryption on")

    transport = Refusing()
    with pytest.raises(ConfigError, match=r"^cannot dial it in the clear -> switch encryption on$"):
        scripted(transport)
    assert transport.closed


def test_only_the_coordinator_may_connect() -> None:
    gate = allow_only(COORDINATOR)
    assert (gate(COORDINATOR), gate(b"x" * 32)) == (ConnectionRole.MEMBER, ConnectionRole.STRANGER)


def test_one_connection_serves_several_requests() -> None:
    hub = MemoryHub()
    coordinator = MemoryTransport(COORDINATOR, hub)
    coordinator.listen("memory://there")
    mine = MemoryTransport(ME.public, hub, gate=allow_only(COORDINATOR))
    with CoordinatorClient("memory://there", COORDINATOR, ME, transport=mine) as client:
        for step in range(3):
            coordinator.send(ME.public, m.StatusReply(json.dumps({"step": step}).encode()))
            assert client.status(5.0) == {"step": step}
