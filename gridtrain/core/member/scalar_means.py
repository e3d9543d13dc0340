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

from gridtrain.core import messages as m
from gridtrain.core.commit.attempts import RankAssignment
from gridtrain.core.commit.two_phase_commit import ROOT
from gridtrain.core.group.member_events import DeliverMean, MemberEffect, Send
from gridtrain.errors import RemoteProtocolError

MeanKey = tuple[int, int]
MAX_OPEN_MEANS = 64
"""Numbers that are kept of one member: it has one call open at a time, and may repeat a few."""


class ScalarMeans:
    """The averages of one generation, as one member sees them."""

    def __init__(self, seat: RankAssignment) -> None:
        self._rank_assignment = seat
        self._values: dict[MeanKey, dict[int, float]] = {}
        self._results: dict[MeanKey, float] = {}
        self._keys_of: dict[int, list[MeanKey]] = {}  # by rank, the latest last
        self.awaited_key: MeanKey | None = None
        self._value = 0.0  # of the one that is waited for

    def request(self, key: MeanKey, value: float) -> list[MemberEffect]:
        """The trainer's own number; `MeanKnown` follows."""
        self.awaited_key, self._value = key, value
        return (
            self._collect(key, ROOT, value)
            if self._rank_assignment.rank == ROOT
            else self._request_from_root(key)
        )

    def _request_from_root(self, key: MeanKey) -> list[MemberEffect]:
        seat = self._rank_assignment
        return [Send(seat.members[ROOT].peer, m.MeanRequest(seat.term, seat.generation, *key, self._value))]

    def peer_connected(self, peer: m.PeerId) -> list[MemberEffect]:
        """The question, or the answer, may have been lost with the connection to the root."""
        key = self.awaited_key
        return (
            self._request_from_root(key)
            if key is not None and self._rank_assignment.rank_of(peer) == ROOT
            else []
        )

    def cancel(self) -> list[MemberEffect]:
        """The generation ends."""
        key, self.awaited_key = self.awaited_key, None
        return [] if key is None else [DeliverMean(None)]

    def receive(self, peer: m.PeerId, message: m.MeanRequest | m.MeanReply) -> list[MemberEffect]:
        """A peer's number, or the root's answer; dropped if `peer` or the generation is another.

        Raises:
            RemoteProtocolError: only the root is asked, and only the root tells.
        """
        rank, seat = self._rank_assignment.rank_of(peer), self._rank_assignment
        if rank is None or (message.term, message.generation) != (seat.term, seat.generation):
            return []
        _check_role(message, rank, seat.rank)
        key = (message.step, message.index)
        match message:
            case m.MeanRequest(value=value):
                return self._collect(key, rank, value)
            case m.MeanReply(value=value):
                return self._deliver(key, value)

    def _deliver(self, key: MeanKey, value: float) -> list[MemberEffect]:
        if self.awaited_key != key:
            return []
        self.awaited_key = None
        return [DeliverMean(value)]

    def _collect(self, key: MeanKey, rank: int, value: float) -> list[MemberEffect]:
        """Of a worker that repeats a step, the answer that is known."""
        self._values.setdefault(key, {})[rank] = value
        self._keep_latest(key, rank)
        asked = self._values[key]
        complete = len(asked) == self._rank_assignment.world_size
        if key not in self._results and complete:
            self._results[key] = _mean([asked[r] for r in range(len(asked))])
        if key not in self._results:
            return []
        tell_ranks = sorted(asked) if complete else [rank]
        return [effect for r in tell_ranks for effect in self._send_result(key, r)]

    def _keep_latest(self, key: MeanKey, rank: int) -> None:
        """Forget this rank's oldest number: what is due to others stays."""
        keys = self._keys_of.setdefault(rank, [])
        if key in keys:
            keys.remove(key)
        keys.append(key)
        while len(keys) > MAX_OPEN_MEANS:
            oldest = keys.pop(0)
            del self._values[oldest][rank]
            if not self._values[oldest]:
                del self._values[oldest]
                self._results.pop(oldest, None)

    def _send_result(self, key: MeanKey, rank: int) -> list[MemberEffect]:
        seat, value = self._rank_assignment, self._results[key]
        if rank == ROOT:
            return self._deliver(key, value)
        return [Send(seat.members[rank].peer, m.MeanReply(seat.term, seat.generation, *key, value))]


def _check_role(message: m.MeanRequest | m.MeanReply, from_rank: int, rank: int) -> None:
    wrong = from_rank != ROOT if isinstance(message, m.MeanReply) else rank != ROOT
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
