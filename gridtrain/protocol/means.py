"""Averages of numbers for people (`grid.mean`): not replicated state, so no vote and no retry.

Decides when an average is known.  Members ask the root; it tells everybody once all have asked.

    member r   MeanAsk(step, index, x_r) --> root: all ranks here? sum in rank order / P --> MeanTell

Within a step the first call on one worker meets the first call on the others, and so on.  Where the
generation ends in between, an average is given up: whoever waits for it goes on with its own number.
"""

from __future__ import annotations

import math

from gridtrain.protocol import messages as m
from gridtrain.protocol.attempts import Seat
from gridtrain.protocol.member_io import Effect, MeanKnown, Post
from gridtrain.protocol.round import ROOT

Key = tuple[int, int]
MAX_OPEN = 64


class Means:
    """The averages of one generation, as one member sees them."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._asked: dict[Key, dict[int, float]] = {}
        self._known: dict[Key, float] = {}
        self.waiting: Key | None = None

    def ask(self, key: Key, value: float) -> list[Effect]:
        """The trainer's own number; `MeanKnown` follows."""
        self.waiting = key
        if self._seat.rank == ROOT:
            return self._collect(key, ROOT, value)
        seat = self._seat
        return [Post(seat.roster[ROOT].peer, m.MeanAsk(seat.term, seat.generation, *key, value))]

    def give_up(self) -> list[Effect]:
        """The generation ends."""
        key, self.waiting = self.waiting, None
        return [] if key is None else [MeanKnown(None)]

    def asked(self, peer: m.PeerId, ask: m.MeanAsk) -> list[Effect]:
        """At the root: a member's number.  Of a worker that repeats a step, an answer that is known."""
        rank = self._seat.rank_of(peer)
        if rank is None or not self._current(ask):
            return []
        return self._collect((ask.step, ask.index), rank, ask.value)

    def told(self, tell: m.MeanTell) -> list[Effect]:
        if not self._current(tell) or self.waiting != (tell.step, tell.index):
            return []
        self.waiting = None
        return [MeanKnown(tell.value)]

    def _current(self, message: m.MeanAsk | m.MeanTell) -> bool:
        return (message.term, message.generation) == (self._seat.term, self._seat.generation)

    def _collect(self, key: Key, rank: int, value: float) -> list[Effect]:
        asked = self._asked.setdefault(key, {})
        asked[rank] = value
        if key not in self._known and len(asked) == self._seat.world_size:
            self._known[key] = math.fsum(asked[r] for r in range(len(asked))) / len(asked)
        for old in sorted(self._asked)[:-MAX_OPEN]:
            self._asked.pop(old)
            self._known.pop(old, None)
        if key not in self._known:
            return []
        tell_ranks = sorted(asked) if len(asked) == self._seat.world_size else [rank]
        return [effect for r in tell_ranks for effect in self._tell(key, r)]

    def _tell(self, key: Key, rank: int) -> list[Effect]:
        seat, value = self._seat, self._known[key]
        tell = m.MeanTell(seat.term, seat.generation, *key, value)
        return self.told(tell) if rank == ROOT else [Post(seat.roster[rank].peer, tell)]
