"""The messages of `grid.mean` and `grid.weigh`; rank 0 computes the average of the members' values.

    member r: MeanRequest(step, index, x_r) --> rank 0: average, once no value is awaited --> MeanReply

The i-th call between two steps on one worker corresponds to the i-th call on each other worker.  A call
before a step's `optimizer.step()` has the index `BEFORE_STEP_INDEX` + i; a call after it has the index i and
the number of the next step.  A call to `grid.weigh` has the index `WEIGHTS_INDEX`.  Step and index together
identify an average; the code calls them its key.

If the generation ends before all members have made the call, the average is cancelled, and the trainer
repeats the call in the next generation.  Some members may have received the average in the earlier
generation.  So that all members receive the same value, these members repeat their call with the average as
its value and with `KNOWN_INDEX` added to its index, and the root (rank 0) sends the average to the others.
If the group can continue without stalled trainers, then at the start of the generation members repeat the
averages that they know, even if their trainers do not call again.

The root does not wait for a rank that has made a later call, or whose trainer has submitted its contribution
to the step.  Nor does it wait for joining members if the calls were made after the last step of the earlier
generation.  The root asks the ranks without a value to report when they submit: it sends each of them a
MeanReply with the index `SUBMITTED_INDEX` and the rank as its value.  From then on, these ranks report each
submission with a MeanRequest with this index.  If a MeanReply with this index has the rank of another member
as its value, that member has no value in the average that follows.  The root stores the latest
`MAX_OPEN_MEANS` values of each member, so that no member can displace the values of another member.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping

from gridtrain.core import messages as m
from gridtrain.core.commit.two_phase_commit import ROOT
from gridtrain.core.group.member_events import DeliverMean, MemberEffect, Send
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.errors import RemoteProtocolError

MeanKey = tuple[int, int]
WEIGHTS_INDEX = 2**31 - 1
SUBMITTED_INDEX = WEIGHTS_INDEX - 1
BEFORE_STEP_INDEX = 2**30
KNOWN_INDEX = 2**29
"""Added to the index of a repeated call whose value is the average that the member has already received."""
MAX_OPEN_MEANS = 64
"""Maximum number of values stored for each member, which has one open call and can repeat a few calls."""


class ScalarMeans:
    """The averages of one generation, as seen by one member.

    Args:
        first_step: the generation's first step.
        known: averages that this member received in earlier generations.

    Attributes:
        known: the latest averages of `grid.mean` that this member has received, by key.
        absent: the ranks whose trainers have stalled; averages do not wait for them.
        awaited_key: (step, index) of the average that the trainer is waiting for; None if there is none.
    """

    def __init__(self, assignment: RankAssignment, first_step: int, known: Mapping[MeanKey, float]) -> None:
        self._rank_assignment, self._first_step = assignment, first_step
        self.known = dict(known)
        self.absent: frozenset[int] = frozenset()
        self._values: dict[MeanKey, dict[int, float]] = {}
        self._results: dict[MeanKey, tuple[float, tuple[int, ...]]] = {}  # the average, ranks without a value
        self._submitted: dict[int, int] = {}  # by rank: the latest step for which it makes no more calls
        self._reported_step = -1  # the latest step that `trainer_submitted` has reported
        self._is_asked = False  # whether the root wants to know when this member has submitted
        self._asked_ranks: set[int] = set()
        self._missing: set[int] = set()  # according to the root: ranks without a value in the awaited average
        self._keys_of: dict[int, list[MeanKey]] = {}  # by rank, latest last
        self.awaited_key: MeanKey | None = None
        self._value = 0.0  # this member's value in the awaited average

    @property
    def awaited_ranks(self) -> frozenset[int]:
        """On the root, the ranks without a value in at least one of the open averages."""
        ranks = range(self._rank_assignment.world_size)
        return frozenset(rank for key in self._open_keys for rank in ranks if rank not in self._values[key])

    @property
    def _open_keys(self) -> list[MeanKey]:
        return sorted(self._values.keys() - self._results.keys())

    def complete(self) -> list[MemberEffect]:
        """Complete all open averages with the values received so far; called on the root."""
        return [effect for key in self._open_keys for effect in self._complete(key, must_wait=False)]

    def request(self, key: MeanKey, value: float) -> list[MemberEffect]:
        """Contribute the trainer's value to an average; `DeliverMean` follows."""
        self.awaited_key, self._value = key, value
        self._missing.clear()
        if self._rank_assignment.rank == ROOT:
            known = self.known.get(key)
            return self._collect(key, ROOT, value if known is None else known, is_known=known is not None)
        return self._request_from_root(key)

    def repeat_known(self) -> list[MemberEffect]:
        """Give the root the averages that this member has received and that others could request again.

        This member's trainer may have stalled, in which case it does not repeat its calls.  The averages are
        sent in ascending order of their keys, because the root completes an average without a member from
        which it already has a later one.
        """
        latest = max(self.known, default=(0, 0))[0]
        keys = sorted(key for key in self.known if key[0] >= latest - 1)
        if self._rank_assignment.rank != ROOT:
            return [effect for key in keys for effect in self._request_from_root(key)]
        return [effect for key in keys for effect in self._collect(key, ROOT, self.known[key], is_known=True)]

    def _request_from_root(self, key: MeanKey) -> list[MemberEffect]:
        at, (step, index), value = self._rank_assignment, key, self._value
        if key in self.known:
            index, value = index + KNOWN_INDEX, self.known[key]
        return [Send(at.members[ROOT].peer, m.MeanRequest(at.term, at.generation, step, index, value))]

    def ask_missing(self) -> list[MemberEffect]:
        """Ask the ranks without a value in an open average to report when they submit; called on the root."""
        at = self._rank_assignment
        effects: list[MemberEffect] = []
        for step, index in self._open_keys:
            ranks = set(range(1, at.world_size)) - self.absent - self._values[step, index].keys()
            for rank in sorted(ranks - self._asked_ranks) if index != WEIGHTS_INDEX else ():
                self._asked_ranks.add(rank)
                question = m.MeanReply(at.term, at.generation, step, SUBMITTED_INDEX, float(rank))
                effects.append(Send(at.members[rank].peer, question))
        return effects

    def trainer_submitted(self, step: int) -> list[MemberEffect]:
        """Report that the trainer has submitted `step` and will make no more calls for this or earlier steps.

        The root records this; any other member reports it to the root, once, if the root has asked.
        """
        at = self._rank_assignment
        if at.rank == ROOT:
            return self._record_submitted(ROOT, step)
        if step == self._reported_step or not self._is_asked:
            return []
        self._reported_step = step
        request = m.MeanRequest(at.term, at.generation, step, SUBMITTED_INDEX, 0.0)
        return [Send(at.members[ROOT].peer, request)]

    def _record_submitted(self, rank: int, step: int) -> list[MemberEffect]:
        if self._submitted.get(rank) == step:
            return []
        self._submitted[rank] = step
        return [effect for each in self._open_keys for effect in self._complete(each, must_wait=True)]

    def peer_connected(self, peer: m.PeerId) -> list[MemberEffect]:
        """If the root has reconnected, repeat the request, because it or the reply may have been lost.

        If another member has reconnected, the root may ask it again to report its submissions.
        """
        rank = self._rank_assignment.rank_of(peer)
        if rank != ROOT:
            self._asked_ranks -= {rank}
            return []
        self._reported_step = -1
        return self._request_from_root(self.awaited_key) if self.awaited_key is not None else []

    def cancel(self) -> list[MemberEffect]:
        """Cancel the average that the trainer is waiting for, because the generation ends."""
        key, self.awaited_key = self.awaited_key, None
        return [] if key is None else [DeliverMean(*key, None)]

    def receive(self, peer: m.PeerId, message: m.MeanRequest | m.MeanReply) -> list[MemberEffect]:
        """Process a value or the root's reply; ignore messages from non-members and other generations.

        Raises:
            RemoteProtocolError: a member other than the root received a request or sent a reply.
        """
        at = self._rank_assignment
        rank = at.rank_of(peer)
        if rank is None or not at.is_generation_of(message):
            return []
        _check_role(message, rank, at.rank)
        key = (message.step, message.index)
        match message:
            case m.MeanRequest(step=step, index=index) if index == SUBMITTED_INDEX:
                return self._record_submitted(rank, step)
            case m.MeanReply(index=index, value=value) if index == SUBMITTED_INDEX:
                self._is_asked |= value == at.rank
                self._missing.update(each for each in range(at.world_size) if each == value != at.rank)
                return []
            case m.MeanRequest(step=step, index=index, value=value):
                is_known = index != WEIGHTS_INDEX and bool(index & KNOWN_INDEX)
                return self._collect((step, index - KNOWN_INDEX * is_known), rank, value, is_known=is_known)
            case m.MeanReply(value=value):
                return self._deliver(key, value)

    def _deliver(self, key: MeanKey, value: float) -> list[MemberEffect]:
        if self.awaited_key != key:
            self._missing.clear()  # these ranks belong to this reply, which is for an earlier average
            return []
        self.awaited_key = None
        if key[1] != WEIGHTS_INDEX:
            self.known[key] = value
            while len(self.known) > MAX_OPEN_MEANS:
                del self.known[next(iter(self.known))]
        at = self._rank_assignment
        names = (at.members[rank].name for rank in sorted(self._missing))
        return [DeliverMean(*key, value, tuple(names))]

    def _collect(
        self, key: MeanKey, rank: int, value: float, *, is_known: bool = False
    ) -> list[MemberEffect]:
        """Store a member's value; if the average is now complete, send it to the members that requested it.

        With `is_known`, the value is the average itself.  If the average has already been computed, only this
        member receives it.
        """
        self._values.setdefault(key, {})[rank] = value
        self._keep_latest(key, rank)
        if key in self._results:
            return self._send_result(key, rank)
        if is_known:
            value = self.known.get(key, value)
            self._results[key] = value, ()
            return self._send_results(key)
        return [effect for each in self._open_keys for effect in self._complete(each, must_wait=True)]

    def _complete(self, key: MeanKey, *, must_wait: bool) -> list[MemberEffect]:
        """Compute an average and send it to the members that requested it.

        With `must_wait`, do nothing while a rank that can still contribute has not done so (`_has_passed`).
        """
        values = self._values[key]
        awaited = set(range(self._rank_assignment.world_size)) - self.absent - values.keys()
        # A call after the last step of the earlier generation:
        if key < (self._first_step, BEFORE_STEP_INDEX):
            awaited -= {rank for rank in awaited if self._rank_assignment.members[rank].joining}
        if must_wait and any(not self._has_passed(rank, key) for rank in awaited):
            return []
        missing = tuple(rank for rank in sorted(awaited) if self._has_submitted(rank, key))
        self._results[key] = _mean([values[rank] for rank in sorted(values)]), missing
        return self._send_results(key)

    def _has_passed(self, rank: int, key: MeanKey) -> bool:
        """Return whether a rank will not contribute to this average any more.

        This is the case if it has submitted the step or contributed to a later average.  If the run has a
        delay, for example, a newcomer can begin one step after the step that the others are computing.
        """
        later = (each for each in self._keys_of.get(rank, ()) if each[1] != WEIGHTS_INDEX)
        has_called_later = key[1] != WEIGHTS_INDEX and max(later, default=key) > key
        return has_called_later or self._has_submitted(rank, key)

    def _has_submitted(self, rank: int, key: MeanKey) -> bool:
        return key[1] != WEIGHTS_INDEX and self._submitted.get(rank, -1) >= key[0]

    def _keep_latest(self, key: MeanKey, rank: int) -> None:
        """Drop this rank's oldest values beyond the limit; the values of other ranks are not affected."""
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

    def _send_results(self, key: MeanKey) -> list[MemberEffect]:
        return [effect for rank in sorted(self._values[key]) for effect in self._send_result(key, rank)]

    def _send_result(self, key: MeanKey, rank: int) -> list[MemberEffect]:
        at, (value, missing) = self._rank_assignment, self._results[key]
        if rank == ROOT:
            self._missing = set(missing)
            return self._deliver(key, value)
        named = [(SUBMITTED_INDEX, float(each)) for each in missing]
        replies = [m.MeanReply(at.term, at.generation, key[0], *each) for each in [*named, (key[1], value)]]
        return [Send(at.members[rank].peer, reply) for reply in replies]


def _check_role(message: m.MeanRequest | m.MeanReply, from_rank: int, rank: int) -> None:
    is_wrong = from_rank != ROOT if isinstance(message, m.MeanReply) else rank != ROOT
    if is_wrong:
        raise RemoteProtocolError(
            f"rank {from_rank} sent {type(message).__name__} to rank {rank}; only rank {ROOT} receives "
            "requests for averages and sends replies",
        )


def _mean(values: list[float]) -> float:
    """Return the mean, which is finite if all values are finite, even if their sum overflows."""
    if not all(map(math.isfinite, values)):
        return sum(values)  # infinite or NaN; `math.fsum` refuses opposite infinities
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        largest = sys.float_info.max
        return max(-largest, min(largest, 2.0 * math.fsum(v / (2 * len(values)) for v in values)))
