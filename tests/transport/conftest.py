"""Endpoints to poll by hand: one thread drives all of them, so a test reads from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gridtrain.protocol.messages import Message, PeerId, Ping
from gridtrain.transport.base import PeerDown, PeerUp, Received, Transport, TransportEvent, Violation
from gridtrain.transport.memory import MemoryHub, MemoryTransport
from gridtrain.transport.zeromq import ZeroMQTransport


def key(name: str) -> PeerId:
    return name.encode().ljust(32, b".")


class Endpoint:
    """A transport and everything it has reported."""

    def __init__(self, name: str, transport: Transport) -> None:
        self.name = name
        self.key = key(name)
        self.transport = transport
        self.events: list[TransportEvent] = []

    def got(self, kind: type[Message] | None = None) -> list[Message]:
        messages = [event.message for event in self.events if isinstance(event, Received)]
        return [m for m in messages if kind is None or isinstance(m, kind)]

    def of(self, kind: type[TransportEvent]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def story(self) -> list[str]:
        """What happened, in words: "up bert", "down bert", "Ping 3 from bert", "violation"."""
        lines = []
        for event in self.events:
            who = "?" if event.peer is None else event.peer.decode().rstrip(".")
            match event:
                case PeerUp():
                    lines.append(f"up {who}")
                case PeerDown():
                    lines.append(f"down {who}")
                case Received(message=Ping(nonce=nonce)):
                    lines.append(f"Ping {nonce} from {who}")
                case Received(message=message):
                    lines.append(f"{type(message).__name__} from {who}")
                case Violation():
                    lines.append(f"violation {who}")
        return lines


class Net:
    """Makes endpoints of one kind of transport and closes them at the end."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.hub = MemoryHub()
        self.endpoints: list[Endpoint] = []

    def add(self, name: str, **options: Any) -> Endpoint:
        transport: Transport
        if self.kind == "memory":
            transport = MemoryTransport(key(name), self.hub, **options)
        else:
            transport = ZeroMQTransport(key(name), "gridtrain test", **options)
        endpoint = Endpoint(name, transport)
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

    def until(self, condition: Callable[[], Any], *endpoints: Endpoint, deadline_s: float = 10.0) -> None:
        """Poll the endpoints in turn until the condition holds."""
        end_s = time.monotonic() + deadline_s
        while not condition():
            stories = {endpoint.name: endpoint.story()[-20:] for endpoint in endpoints}
            assert time.monotonic() < end_s, f"not within {deadline_s} s; so far {stories}"
            for endpoint in endpoints:
                endpoint.events += endpoint.transport.poll(0.002)

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.transport.close()


@pytest.fixture(params=["memory", "zeromq"])
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    made = Net(request.param)
    yield made
    made.close()


@pytest.fixture
def zeromq_net() -> Iterator[Net]:
    made = Net("zeromq")
    yield made
    made.close()


@pytest.fixture
def memory_net() -> Iterator[Net]:
    made = Net("memory")
    yield made
    made.close()
