"""Decides, from a trainer's usual delay, when a step continues without that trainer (`wait="auto"`).

    waiting member           root                               member whose trainer has stalled
      has submitted, waits
      longer than usual
      --- Waiting ------------> the waiting members have
                                enough of the shares, and
                                rank 2 is later than usual
                                --- ProceedWithout ----------------> its I/O loop makes an empty contribution,
                                                                     marked as absent, and votes

A member is late if its delay exceeds the median of its latest delays by a multiple of their median absolute
deviation, and by a minimum margin.  The limit is computed for each member, in seconds per sample of its
share, so that a worker that is always slow is not late.  If no member is late, no message is sent.  A member
that was absent from the last step is asked to stay absent as soon as the others have submitted, so that a
long stall delays the group only once (commit rule 14).

The late member itself decides, for all attempts at the step, whether it is absent.  If its trainer has begun
to submit, it takes part, and the group waits for it, even if the trainer stalls after sending some buckets:

- It cannot be absent from the whole step.  The rings of the other members contain what it has sent, and a
  retry continues these rings; `Decision` cannot announce that all rings must be restarted.
- It cannot be absent from the remaining buckets alone.  Its batch may be assigned again, so the part that it
  has sent would be counted twice.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from statistics import median

from gridtrain.core import messages as m
from gridtrain.core.commit.two_phase_commit import ROOT
from gridtrain.core.group.member_events import LogEvent, MemberEffect, Send
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.core.group.round_flags import MAX_RANKS, absent_ranks
from gridtrain.errors import RemoteProtocolError

QUORUM = 0.5
"""The waiting members must have at least this fraction of the sum of all shares for the step to continue
without late members; otherwise the group waits."""

WINDOW, FEWEST_DELAYS = 32, 4
"""Number of delays from which a limit is computed, and the number below which there is no limit."""

DEVIATIONS = 6.0
"""Number of median absolute deviations above the median at which a delay is unusual."""

MIN_MARGIN_S, MIN_MARGIN_SHARE = 0.05, 0.25
"""Smallest distance of the limit from the median, in seconds and as a fraction of the median; the larger of
the two applies."""

MAX_ABSENT_S = 300.0
"""Longest absence of a member; afterwards, the group waits for it, and the usual timeouts apply."""

MAX_SETTINGS_BYTES = 1 << 20
"""Maximum size of the optimizer's settings in a message or in the update log.  One parameter group takes
about 230 bytes, and each parameter may have its own group."""


class UsualDelay:
    """The limit beyond which a delay is unusual, computed from the latest delays in seconds.

    A delay that is proportional to a quantity, such as a number of samples, is recorded with that quantity as
    its scale.
    """

    def __init__(self) -> None:
        self._delays_s: deque[float] = deque(maxlen=WINDOW)
        self._middle_s = self._deviation_s = math.inf
        self._is_outdated = False

    def record(self, delay_s: float, scale: float = 1.0) -> None:
        self._delays_s.append(delay_s / scale)
        self._is_outdated = len(self._delays_s) >= FEWEST_DELAYS

    def limit_s(self, scale: float = 1.0) -> float:
        if self._is_outdated:  # most delays are recorded in steps in which the limit is not requested
            self._is_outdated = False
            self._middle_s = median(self._delays_s)
            self._deviation_s = median(abs(each_s - self._middle_s) for each_s in self._delays_s)
        middle_s = scale * self._middle_s
        margin_s = max(DEVIATIONS * scale * self._deviation_s, MIN_MARGIN_SHARE * middle_s, MIN_MARGIN_S)
        return middle_s + margin_s


class UsualDelays:
    """The delays known to one member; they persist across generations.

    Attributes:
        compute: by member, the delay from a commit to the submission by the member's trainer, with the
            member's share as the scale.
        wait: this member's delay from its submission to the commit.
    """

    def __init__(self) -> None:
        self.compute: defaultdict[m.PeerId, UsualDelay] = defaultdict(UsualDelay)
        self.wait = UsualDelay()

    def forget_departed(self, members: Collection[m.PeerId]) -> None:
        """Discard the delays of all but `members` if more than 2 x `MAX_RANKS` workers have delays."""
        if len(self.compute) > 2 * MAX_RANKS:
            present = {peer: delay for peer, delay in self.compute.items() if peer in members}
            self.compute = defaultdict(UsualDelay, present)


class Stragglers:
    """The waiting and absent members of one generation, as seen by one member.

    Args:
        count_samples: returns the number of samples of each rank in the open step.
        delays: the delays that this member knows from earlier generations.
        is_enabled: whether steps may continue without some members in this run.

    Attributes:
        absent: the ranks that were absent from the last committed step.
        is_enabled: whether steps may continue without some members in this generation.
        absence: the step that this member misses, and the other members' optimizer settings; None if this
            member takes part.
    """

    def __init__(
        self,
        assignment: RankAssignment,
        count_samples: Callable[[], Sequence[int]],
        delays: UsualDelays,
        *,
        is_enabled: bool,
    ) -> None:
        self._assignment, self._count_samples = assignment, count_samples
        self.is_enabled = is_enabled and 1 < assignment.world_size <= MAX_RANKS and assignment.stages == 1
        delays.forget_departed([member.peer for member in assignment.members])
        self._compute = [delays.compute[member.peer] for member in assignment.members]
        self._scales = [max(1, share) for _, share in assignment.shares]
        self._wait = delays.wait
        self.absent: frozenset[int] = frozenset()
        self.absence: tuple[int, bytes] | None = None
        self._earliest_s = -math.inf  # no deadline passes before this time
        self._returned_s = math.inf  # when the absent trainer was ready to take part again
        self._absent_since_s = math.inf  # when the first step of the absence opened
        # Of the open step:
        self._opened_s = math.inf
        self._step = 0  # valid once this member or another one has submitted
        self._requested_settings: bytes | None = None  # from the root's request that this member be absent
        self._takes_part = False  # the trainer has begun to submit, or must not be absent
        self._has_contributed_nothing = False  # an empty contribution to an attempt was accepted
        self._waiting: dict[int, bytes] = {}  # on the root: settings of the ranks that are waiting
        # Of the open attempt:
        self._submission: tuple[m.RoundId, float, bytes] | None = None
        self._is_reported = False
        self._requested: set[int] = set()  # on the root: the ranks that it has asked to be absent

    def _open_step(self, now_s: float) -> None:
        self._opened_s = now_s
        self.absence = self._requested_settings = None
        self._takes_part = self._has_contributed_nothing = False
        self._waiting.clear()
        self.attempt_ended()

    # -- events ----------------------------------------------------------------------------------

    def started(self, late: Collection[m.PeerId], now_s: float) -> None:
        """Record that the first step of the generation is open, and which members have a late batch."""
        ranks = (self._assignment.rank_of(peer) for peer in late)
        self.absent = frozenset(rank for rank in ranks if rank is not None)
        self._open_step(now_s)

    def take_part(self) -> None:
        """Record that the trainer takes part in the open step: it has begun to submit, or must not be
        absent."""
        self.absence, self._takes_part = None, True

    def accepts(self, *, is_absent: bool) -> bool:
        """Return whether to accept the trainer's submission or, with `is_absent`, the I/O loop's empty one.

        If both occur in one step, the one that is handled first is accepted.
        """
        if is_absent:
            self._has_contributed_nothing = self.absence is not None
            return self._has_contributed_nothing
        if not self._has_contributed_nothing:
            self.take_part()
        return not self._has_contributed_nothing

    def submitted(self, round_id: m.RoundId, settings: bytes, now_s: float) -> float | None:
        """Record the trainer's submission, and return its delay in seconds for the vote.

        The result is None in a retry, or if it is unknown when the step was opened.  The delay of a late
        batch is measured from the opening of the first missed step, so that the limit adapts to a worker that
        has become slower.
        """
        self._submission, self._step = (round_id, now_s, settings), round_id.step
        since_s = self._absent_since_s if self._assignment.rank in self.absent else self._opened_s
        if round_id.attempt or not math.isfinite(since_s):
            return None
        own_rank = self._assignment.rank
        self._compute[own_rank].record(now_s - since_s, self._scales[own_rank])
        return now_s - since_s

    def attempt_ended(self) -> None:
        """Record the end of an attempt: reports and requests must be repeated in the next one."""
        self._submission, self._is_reported = None, False
        self._requested.clear()

    def voted(self, rank: int, compute_s: float | None) -> None:
        """Record the delay that a vote of the member with this rank contains; called on the root."""
        if compute_s is not None:
            self._compute[rank].record(compute_s, self._scales[rank])

    def committed(self, flags: int, now_s: float) -> list[MemberEffect]:
        """Record that the open step was committed with these flags, and that the next one is open.

        On the root, return log events about the members that were absent from this step, but not from the
        previous one.
        """
        if self._submission is not None:
            self._wait.record(now_s - self._submission[1])
        before, self.absent = self.absent, frozenset(absent_ranks(flags))
        is_root, members = self._assignment.rank == ROOT, self._assignment.members
        events: list[MemberEffect] = [
            LogEvent("proceed", {"step": self._step + 1, "without": members[rank].name})
            for rank in sorted(self.absent - before if is_root else ())
        ]
        if self._assignment.rank not in self.absent:
            self._returned_s = self._absent_since_s = math.inf
        elif not math.isfinite(self._absent_since_s):
            self._absent_since_s = self._opened_s
        self._open_step(now_s)
        return events

    def repeat(self) -> None:
        """Let `tick` repeat reports and requests, which may have been lost; called at each heartbeat."""
        self._is_reported = False
        self._requested.clear()

    def trainer_returned(self, now_s: float) -> None:
        """Record that the trainer has applied the missed steps and is ready to take part again."""
        self._returned_s = now_s

    def extend_timeouts(self, until_s: float) -> None:
        """After a stall of this worker's loop, postpone the deadlines to `until_s` or later."""
        self._earliest_s = max(self._earliest_s, until_s)

    def receive(
        self, rank: int, message: m.Waiting | m.ProceedWithout, step: int, now_s: float
    ) -> list[MemberEffect]:
        """Process a message about the open step, `step`; ignore a message about another step.

        Raises:
            RemoteProtocolError: the sender must not send this message to this member, or the settings in it
                exceed `MAX_SETTINGS_BYTES`.
        """
        _check_message(rank, self._assignment.rank, message)
        if not self.is_enabled or message.round.step != step:
            return []
        settings = bytes(message.payload)
        if isinstance(message, m.Waiting):
            self._waiting[rank], self._step = settings, step
            return self.tick(now_s)
        self._requested_settings, self._step = settings, step
        return self.tick(now_s)

    # -- the clock -------------------------------------------------------------------------------

    @property
    def deadline_s(self) -> float:
        """The time at which to call `tick`."""
        due_s = [self._report_due_s, self._absence_due_s]
        if self._has_quorum:
            due_s += [self._request_due_s(rank) for rank in self._candidates]
        return max(self._earliest_s, min(due_s))

    def tick(self, now_s: float) -> list[MemberEffect]:
        """Do what is due now: report that this member is waiting, comply with a request to be absent, and, as
        the root, ask late members to be absent."""
        if now_s < self._earliest_s:
            return []
        effects: list[MemberEffect] = []
        if now_s >= self._report_due_s and self._submission is not None:
            self._is_reported = True
            round_id, _, settings = self._submission
            if self._assignment.rank == ROOT:
                self._waiting[ROOT] = settings
            else:
                effects.append(Send(self._assignment.members[ROOT].peer, m.Waiting(round_id, settings)))
        if self._has_quorum:
            late = [rank for rank in self._candidates if now_s >= self._request_due_s(rank)]
            effects += [effect for rank in late for effect in self._request(rank)]
        if now_s >= self._absence_due_s and self._requested_settings is not None:
            self.absence, self._returned_s = (self._step, self._requested_settings), math.inf
        return effects

    @property
    def _absence_due_s(self) -> float:
        """The time at which this member complies with the root's request to be absent; infinite if the root
        has not sent one, or if this member takes part or has been absent for too long.

        A trainer that has returned is given its usual time, because the other members report immediately that
        they are waiting.
        """
        if self._takes_part or self.absence is not None or self._requested_settings is None:
            return math.inf
        if self._opened_s - self._absent_since_s > MAX_ABSENT_S:
            return math.inf
        if self._assignment.rank not in self.absent:
            return self._opened_s + self._own_limit_s
        if not math.isfinite(self._returned_s):
            return -math.inf
        return max(self._opened_s, self._returned_s) + self._own_limit_s

    def _limit_s(self, rank: int) -> float:
        """Return the limit of a rank's delay in seconds, for the rank's share in this generation."""
        return self._compute[rank].limit_s(self._scales[rank])

    @property
    def _own_limit_s(self) -> float:
        return self._limit_s(self._assignment.rank)

    @property
    def _report_due_s(self) -> float:
        """The time at which this member reports that it is waiting; infinite if no report is due."""
        if not self.is_enabled or self._submission is None or self._is_reported:
            return math.inf
        return self._submission[1] + (0.0 if self.absent else self._wait.limit_s())

    @property
    def _candidates(self) -> list[int]:
        """The ranks that the root could ask to be absent: they have neither reported that they are waiting,
        nor been asked already."""
        known = self._waiting.keys() | self._requested
        if self._submission is not None:
            known |= {self._assignment.rank}
        return [rank for rank in range(self._assignment.world_size) if rank not in known]

    @property
    def _has_quorum(self) -> bool:
        """Whether the root may ask late members to be absent; always False on other members.

        The waiting members must have a quorum of the shares, at least one sample, and equal settings.
        """
        if not self._waiting or len(set(self._waiting.values())) > 1:  # always empty except on the root
            return False
        counts, shares = self._count_samples(), [share for _, share in self._assignment.shares]
        has_samples = any(counts[rank] for rank in self._waiting)
        # Shares count, not this step's samples: at the end of a pass, a step may have fewer samples than a
        # late batch.
        return has_samples and sum(shares[rank] for rank in self._waiting) >= QUORUM * sum(shares)

    def late_s(self, ranks: Iterable[int]) -> float:
        """Return the time from which all of these ranks are late in the open step.

        The result is infinite if `ranks` is empty, or no limit is known for one of them.
        """
        return max((self._late_s(rank) for rank in ranks), default=math.inf)

    def _late_s(self, rank: int) -> float:
        """Return the time from which this rank is late in the open step; infinite if its limit is unknown."""
        return self._opened_s + (0.0 if rank in self.absent else self._limit_s(rank))

    def _request_due_s(self, rank: int) -> float:
        """Return the time at which the root asks this rank to be absent.

        A member reports its delays to the root only.  A new root may not know the member's limit, but the
        member does not comply with a request before its own limit, so the root applies its own limit instead.
        """
        late_s = self._late_s(rank)
        return late_s if math.isfinite(late_s) else self._opened_s + self._own_limit_s

    def _request(self, rank: int) -> list[MemberEffect]:
        """Request that this rank, which may be this member's own, be absent from the step."""
        self._requested.add(rank)
        settings = next(iter(self._waiting.values()))
        member, at = self._assignment.members[rank], self._assignment
        if rank == ROOT:
            self._requested_settings = settings
            return []
        round_id = m.RoundId(at.term, at.generation, self._step, 0)
        return [Send(member.peer, m.ProceedWithout(round_id, settings))]


def _check_message(from_rank: int, rank: int, message: m.Waiting | m.ProceedWithout) -> None:
    is_wrong = rank != ROOT if isinstance(message, m.Waiting) else from_rank != ROOT
    size = len(message.payload)
    if is_wrong or size > MAX_SETTINGS_BYTES:
        raise RemoteProtocolError(
            f"rank {from_rank} sent {type(message).__name__} with {size} bytes of settings to rank {rank}; "
            f"only rank {ROOT} receives Waiting and sends ProceedWithout, and the settings must have at most "
            f"{MAX_SETTINGS_BYTES} bytes",
        )
