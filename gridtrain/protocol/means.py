"""Averages of numbers for people (`grid.mean`): not replicated state, so no vote and no retry.

Decides when an average is known.  Members ask the root; it tells everybody once all have asked.

    member r   MeanAsk(step, index, x_r) --> root: all ranks here? sum in rank order / P --> MeanTell

Within a step the first call on one worker meets the first call on the others, and so on.  Where the
generation ends in between, an average is given up: whoever waits for it goes on with its own number.
The root keeps the latest `MAX_OPEN` numbers of each member, so that none can crowd out another's.
"""

from __future__ import annotations

import math
import sys

from gridtrain.errors import RemoteProtocolError
from gridtrain.protocol import messages as m
from gridtrain.protocol.attempts import Seat
from gridtrain.protocol.member_io import Effect, MeanKnown, Post
from gridtrain.protocol.round import ROOT

Key = tuple[int, int]
MAX_OPEN = 64
"""Numbers that are kept of one member: it has one call open at a time, and may repeat a few."""


class Means:
    """The averages of one generation, as one member sees them."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._asked: dict[Key, dict[int, float]] = {}
        self._known: dict[Key, float] = {}
        self._keys_of: dict[int, list[Key]] = {}  # by rank, the latest last
        self.waiting: Key | None = None
        self._value = 0.0  # of the one that is waited for

    def ask(self, key: Key, value: float) -> list[Effect]:
        """The trainer's own number; `MeanKnown` follows."""
        self.waiting, self._value = key, value
        return self._collect(key, ROOT, value) if self._seat.rank == ROOT else self._asks(key)

    def _asks(self, key: Key) -> list[Effect]:
        seat = self._seat
        return [Post(seat.roster[ROOT].peer, m.MeanAsk(seat.term, seat.generation, *key, self._value))]

    def edge_up(self, peer: m.PeerId) -> list[Effect]:
        """The question, or the answer, may have been lost with the connection to the root."""
        key = self.waiting
        return self._asks(key) if key is not None and self._seat.rank_of(peer) == ROOT else []

    def give_up(self) -> list[Effect]:
        """The generation ends."""
        key, self.waiting = self.waiting, None
        return [] if key is None else [MeanKnown(None)]

    def heard(self, peer: m.PeerId, message: m.MeanAsk | m.MeanTell) -> list[Effect]:
        """A peer's number, or the root's answer; dropped if `peer` or the generation is another.

        Raises:
            RemoteProtocolError: only the root is asked, and only the root tells.
        """
        rank, seat = self._seat.rank_of(peer), self._seat
        if rank is None or (message.term, message.generation) != (seat.term, seat.generation):
            return []
        _check_role(message, rank, seat.rank)
        key = (message.step, message.index)
        match message:
            case m.MeanAsk(value=value):
                return self._collect(key, rank, value)
            case m.MeanTell(value=value):
                return self._told(key, value)

    def _told(self, key: Key, value: float) -> list[Effect]:
        if self.waiting != key:
            return []
        self.waiting = None
        return [MeanKnown(value)]

    def _collect(self, key: Key, rank: int, value: float) -> list[Effect]:
        """Of a worker that repeats a step, the answer that is known."""
        self._asked.setdefault(key, {})[rank] = value
        self._keep_latest(key, rank)
        asked = self._asked[key]
        complete = len(asked) == self._seat.world_size
        if key not in self._known and complete:
            self._known[key] = _mean([asked[r] for r in range(len(asked))])
        if key not in self._known:
            return []
        tell_ranks = sorted(asked) if complete else [rank]
        return [effect for r in tell_ranks for effect in self._tell(key, r)]

    def _keep_latest(self, key: Key, rank: int) -> None:
        """Forget this rank's oldest number: what is due to others stays."""
        keys = self._keys_of.setdefault(rank, [])
        if key in keys:
            keys.remove(key)
        keys.append(key)
        while len(keys) > MAX_OPEN:
            oldest = keys.pop(0)
            del self._asked[oldest][rank]
            if not self._asked[oldest]:
                del self._asked[oldest]
                self._known.pop(oldest, None)

    def _tell(self, key: Key, rank: int) -> list[Effect]:
        seat, value = self._seat, self._known[key]
        if rank == ROOT:
            return self._told(key, value)
        return [Post(seat.roster[rank].peer, m.MeanTell(seat.term, seat.generation, *key, value))]


def _check_role(message: m.MeanAsk | m.MeanTell, from_rank: int, rank: int) -> None:
    wrong = from_rank != ROOT if isinstance(message, m.MeanTell) else rank != ROOT
    if wrong:
        raise RemoteProtocolError(
            f"rank {from_rank} sent {type(message).__name__} to rank {rank}; "
            f"averages are made by rank {ROOT}",
            remedy="drop that peer; an honest one of the same version never sends this",
        )


def _mean(values: list[float]) -> float:
    """Of finite numbers, which may be as large as a float can be: finite whatever they are."""
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        largest = sys.float_info.max
        return max(-largest, min(largest, 2.0 * math.fsum(v / (2 * len(values)) for v in values)))
