"""The environment of a worker's core: a network below its loop that checks sent messages, and a clock.

schedule --Received, PeerUp ..--> Driver --> Watched core --> Driver --> Wire
                                                |
                                                +--> a watcher sees each event with its effects
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Protocol

from gridfuzz.targets.base import must
from gridtrain.core import messages as m
from gridtrain.core.group import member_events as ev
from gridtrain.core.member.member import MemberCore
from gridtrain.errors import TransportError
from gridtrain.network.transport.interface import TrafficCounters
from gridtrain.network.wire.codec import encode as to_frames
from gridtrain.runtime import io_loop as loop


@dataclass(frozen=True)
class Before:
    """State of the core before an event."""

    term: int
    generation: int
    applied: int
    prepared: m.RoundId | None
    members: frozenset[m.PeerId]
    running: bool


class Watcher(Protocol):
    def state(self) -> Before: ...
    def check(self, cause: ev.MemberEvent | None, effects: list[ev.MemberEffect], before: Before) -> None: ...


class Watched(MemberCore):
    """The product's core; the watcher sees each event with its effects."""

    watcher: Watcher

    def handle(self, event: ev.MemberEvent, now_s: float) -> list[ev.MemberEffect]:
        before = self.watcher.state()
        effects = super().handle(event, now_s)
        self.watcher.check(event, effects, before)
        return effects

    def tick(self, now_s: float) -> list[ev.MemberEffect]:
        before = self.watcher.state()
        effects = super().tick(now_s)
        self.watcher.check(None, effects, before)
        return effects


class Wire:
    """The network below the loop; checks that only messages are sent, and only to connected peers."""

    def __init__(self, me: m.PeerId, up: set[m.PeerId]) -> None:
        self.me, self.up, self.traffic = me, up, TrafficCounters()

    def send(self, peer: m.PeerId, message: m.Message) -> None:
        to_frames(message)  # a LocalProtocolError here was caused by other peers
        if peer not in self.up:
            raise TransportError("there is no connection")

    def dial(self, peer: m.PeerId, address: str) -> None:
        must(peer != self.me, "dials itself")

    def hang_up(self, peer: m.PeerId) -> None:
        self.up.discard(peer)

    def connected(self, peer: m.PeerId) -> bool:
        return peer in self.up

    def return_credit(self, held_bytes: Callable[[m.PeerId], int]) -> None:
        must(all(held_bytes(peer) >= 0 for peer in self.up), "the core reports a negative number of bytes")

    def backlog_bytes(self, peer: m.PeerId) -> int:
        return 0

    def wake(self) -> None:
        pass


@contextmanager
def loop_by(clock: Callable[[], float]) -> Iterator[None]:
    """The loop uses this clock and logs nothing."""
    real, level = loop.time, loop.log.level
    loop.time = SimpleNamespace(monotonic=clock)  # type: ignore[assignment]
    loop.log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        loop.time = real
        loop.log.setLevel(level)
