"""Averages of a number over the members of a generation (`grid.mean`), for people: no vote, no retry.

    member r   MeanRequest(step, index, x_r) --> root: all ranks here? sum in rank order / P --> MeanReply

Within a step, the first call on one worker belongs to the first call on the others, and so on.  Where the
generation ends in between, the average is cancelled and the trainer continues with its own number.  The root
stores the latest `MAX_OPEN_MEANS` numbers of each member, so that no member can crowd out another's.
"""

from __future__ import annotations

import math
import sys

from gridtrain.core import messages as m
from gridtrain.core.commit.two_phase_commit import ROOT
from gridtrain.core.group.member_events import DeliverMean, MemberEffect, Send
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.errors import RemoteProtocolError

MeanKey = tuple[int, int]
MAX_OPEN_MEANS = 64
"""Numbers stored of each member: it has one call open at a time, and may repeat a few."""


class ScalarMeans:
    """The averages of one generation, as one member sees them.

    Attributes:
        awaited_key: (step, index) of the average that the trainer waits for.
    """

    def __init__(self, assignment: RankAssignment) -> None:
        self._rank_assignment = assignment
        self._values: dict[MeanKey, dict[int, float]] = {}
        self._results: dict[MeanKey, float] = {}
        self._keys_of: dict[int, list[MeanKey]] = {}  # by rank, the latest last
        self.awaited_key: MeanKey | None = None
        self._value = 0.0  # this member's, of the awaited average

    def request(self, key: MeanKey, value: float) -> list[MemberEffect]:
        """The trainer's own number; `DeliverMean` follows."""
        self.awaited_key, self._value = key, value
        if self._rank_assignment.rank == ROOT:
            return self._collect(key, ROOT, value)
        return self._request_from_root(key)

    def _request_from_root(self, key: MeanKey) -> list[MemberEffect]:
        at = self._rank_assignment
        return [Send(at.members[ROOT].peer, m.MeanRequest(at.term, at.generation, *key, self._value))]

    def peer_connected(self, peer: m.PeerId) -> list[MemberEffect]:
        """Repeat the request: it or its reply may have been lost with the connection to the root."""
        if self.awaited_key is None or self._rank_assignment.rank_of(peer) != ROOT:
            return []
        return self._request_from_root(self.awaited_key)

    def cancel(self) -> list[MemberEffect]:
        """The generation ends."""
        key, self.awaited_key = self.awaited_key, None
        return [] if key is None else [DeliverMean(None)]

    def receive(self, peer: m.PeerId, message: m.MeanRequest | m.MeanReply) -> list[MemberEffect]:
        """A member's number, or the root's reply; ignored from non-members and other generations.

        Raises:
            RemoteProtocolError: a request to a rank other than the root, or a reply from one.
        """
        at = self._rank_assignment
        rank = at.rank_of(peer)
        if rank is None or (message.term, message.generation) != (at.term, at.generation):
            return []
        _check_role(message, rank, at.rank)
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
        """Reply to all once the average is complete; to a worker that repeats a step, the known result."""
        self._values.setdefault(key, {})[rank] = value
        self._keep_latest(key, rank)
        values = self._values[key]
        is_complete = len(values) == self._rank_assignment.world_size
        if key not in self._results and is_complete:
            self._results[key] = _mean([values[r] for r in range(len(values))])
        if key not in self._results:
            return []
        receivers = sorted(values) if is_complete else [rank]
        return [effect for r in receivers for effect in self._send_result(key, r)]

    def _keep_latest(self, key: MeanKey, rank: int) -> None:
        """Drop this rank's oldest number; the numbers of other ranks stay."""
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
        at, value = self._rank_assignment, self._results[key]
        if rank == ROOT:
            return self._deliver(key, value)
        return [Send(at.members[rank].peer, m.MeanReply(at.term, at.generation, *key, value))]


def _check_role(message: m.MeanRequest | m.MeanReply, from_rank: int, rank: int) -> None:
    is_wrong = from_rank != ROOT if isinstance(message, m.MeanReply) else rank != ROOT
    if is_wrong:
        raise RemoteProtocolError(
            f"rank {from_rank} sent {type(message).__name__} to rank {rank}; rank {ROOT} computes averages",
            remedy="drop that peer; an honest one of the same version never sends this",
        )


def _mean(values: list[float]) -> float:
    """The mean of finite numbers, finite even where their sum overflows."""
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        largest = sys.float_info.max
        return max(-largest, min(largest, 2.0 * math.fsum(v / (2 * len(values)) for v in values)))
