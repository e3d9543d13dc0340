"""Endpoints that a test polls itself: one thread drives all of them, so a test reads from top to bottom."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from faulty_hub import FaultyHub

from gridtrain.core.messages import Message, PeerId, Ping
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.in_memory import MemoryTransport
from gridtrain.network.transport.interface import (
    ConnectionDenied,
    ConnectionRole,
    PeerDown,
    PeerUp,
    ReachResult,
    Received,
    Transport,
    TransportEvent,
    TransportViolation,
)
from gridtrain.network.transport.zmq.zeromq_transport import ZeroMQTransport

_NAMES: dict[PeerId, str] = {}  # of the keys that were made here


@functools.cache
def identity(name: str) -> Identity:
    """The same for the same name, in every process."""
    made = Identity.from_secret(hashlib.blake2b(name.encode(), digest_size=32).digest())
    _NAMES[made.public] = name
    return made


def key(name: str) -> PeerId:
    return identity(name).public


class ChangeablePolicy:
    """An access policy that a test can change; at first it admits everybody."""

    def __init__(self) -> None:
        self.standings: dict[PeerId, ConnectionRole] = {}
        self.otherwise = ConnectionRole.MEMBER

    def __call__(self, peer: PeerId) -> ConnectionRole:
        return self.standings.get(peer, self.otherwise)

    def only(self, **standings: ConnectionRole) -> None:
        """Admit these by name; everybody else is a stranger from now on."""
        self.otherwise = ConnectionRole.STRANGER
        self.standings = {key(name): standing for name, standing in standings.items()}


class Endpoint:
    """A transport and everything it has reported."""

    def __init__(self, name: str, transport: Transport, policy: ChangeablePolicy) -> None:
        self.name = name
        self.key = key(name)
        self.transport = transport
        self.policy = policy
        self.events: list[TransportEvent] = []

    def got(self, kind: type[Message] | None = None) -> list[Message]:
        messages = [event.message for event in self.events if isinstance(event, Received)]
        return [m for m in messages if kind is None or isinstance(m, kind)]

    def of(self, kind: type[TransportEvent]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def story(self) -> list[str]:
        """The events as text: "up bert", "down bert", "Ping 3 from bert", "violation"."""
        lines = []
        guests = {event.peer: _NAMES[event.pending_key] for event in self.of(PeerUp) if event.pending_key}
        for event in self.events:
            who = "?" if event.peer is None else _NAMES.get(event.peer, event.peer.hex()[:8])
            if event.peer in guests:
                who = f"guest {guests[event.peer]}"
            match event:
                case PeerUp():
                    lines.append(f"up {who}")
                case PeerDown():
                    lines.append(f"down {who}")
                case Received(message=Ping(nonce=nonce)):
                    lines.append(f"Ping {nonce} from {who}")
                case Received(message=message):
                    lines.append(f"{type(message).__name__} from {who}")
                case TransportViolation():
                    lines.append(f"violation {who}")
                case ConnectionDenied():
                    lines.append(f"denied {who}")
                case ReachResult(address=address):
                    lines.append(f"reached {who}" if address else f"not reached {who}")
        return lines


class Net:
    """Makes endpoints of one kind of transport and closes them at the end."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.hub = FaultyHub()
        self.endpoints: list[Endpoint] = []

    def add(self, name: str, **options: Any) -> Endpoint:
        transport: Transport
        policy = ChangeablePolicy()
        if self.kind == "memory":
            transport = MemoryTransport(key(name), self.hub, gate=policy, **options)
        else:
            options = {"encrypted": self.kind == "zeromq", **options}
            transport = ZeroMQTransport(identity(name), "gridtrain test", gate=policy, **options)
        endpoint = Endpoint(name, transport, policy)
        self.endpoints.append(endpoint)
        return endpoint

    def address(self, name: str) -> str:
        return f"memory://{name}" if self.kind == "memory" else "tcp://127.0.0.1:0"

    def pair(self, dialler: dict[str, Any] | None = None, acceptor: dict[str, Any] | None = None) -> Any:
        """anna has dialled bert, and both are up."""
        anna, bert = self.add("anna", **(dialler or {})), self.add("bert", **(acceptor or {}))
        anna.transport.dial(bert.key, bert.transport.listen(self.address("bert")))
        self.until(lambda: anna.of(PeerUp) and bert.of(PeerUp), anna, bert)
        return anna, bert

    def until(self, condition: Callable[[], Any], *endpoints: Endpoint, deadline_s: float = 20.0) -> None:
        """Poll the endpoints in turn until the condition holds; within less than `SILENCE_S`."""
        end_s = time.monotonic() + deadline_s
        while not condition():
            stories = {endpoint.name: endpoint.story()[-20:] for endpoint in endpoints}
            assert time.monotonic() < end_s, f"not within {deadline_s} s; so far {stories}"
            for endpoint in endpoints:
                endpoint.events += endpoint.transport.poll(0.002)

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.transport.close()


@pytest.fixture(params=["memory", "zeromq", "plain"])
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    made = Net(request.param)
    yield made
    made.close()


@pytest.fixture(params=["zeromq", "plain"])
def socket_net(request: pytest.FixtureRequest) -> Iterator[Net]:
    """A network with what a group within one process has not: pending members, and all limits."""
    made = Net(request.param)
    yield made
    made.close()


@pytest.fixture(params=["memory", "zeromq"])
def proving_net(request: pytest.FixtureRequest) -> Iterator[Net]:
    """A network in which a peer is told that it is not admitted."""
    made = Net(request.param)
    yield made
    made.close()


@pytest.fixture
def zeromq_net() -> Iterator[Net]:
    made = Net("zeromq")
    yield made
    made.close()


@pytest.fixture
def plain_net() -> Iterator[Net]:
    """Over TCP, not encrypted."""
    made = Net("plain")
    yield made
    made.close()


@pytest.fixture
def identity_of() -> Callable[[str], Identity]:
    return identity


@pytest.fixture
def raw() -> Iterator[Callable[..., Any]]:
    """Makes ZeroMQ sockets that send what a test wants: `raw(kind, me="mallory", server=key("bert"))`."""
    context = zmq.Context()

    def make(kind: int, me: str = "", server: PeerId = b"") -> Any:
        socket = context.socket(kind)
        socket.linger = 0  # also if it is collected before the end
        if me:
            socket.setsockopt(zmq.CURVE_PUBLICKEY, identity(me).public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, identity(me).secret)
            socket.setsockopt(zmq.CURVE_SERVERKEY if server else zmq.CURVE_SERVER, server or 1)
        return socket

    yield make
    context.destroy(linger=0)


@pytest.fixture
def memory_net() -> Iterator[Net]:
    made = Net("memory")
    yield made
    made.close()
