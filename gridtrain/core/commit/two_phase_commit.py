"""The vote on a step, after which all members apply its update or none does (two-phase commit; rules 1 to 4).

    member                      root (rank 0)
      | prepare(digest)           | prepare(digest)
      |-------- Vote YES -------->|
      |<----- Decision -----------|   COMMIT if all members voted YES for the same digest,
      v                           v   otherwise ABORT; decided once
    Decided                     Decided

After a YES, a member never aborts on its own: it waits for the root, or for the coordinator's Freeze.  The
root aborts if a member has neither voted nor reported that it is alive for `timeout_s`, or if no member has
made progress for that long, for example because all are waiting for a payload that a broken connection lost.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from gridtrain.core import messages as m
from gridtrain.core.group.io_loop_stalls import extend_start
from gridtrain.errors import LocalProtocolError, RemoteProtocolError
from gridtrain.quantities import MAX_NAMES, list_first

ROOT = 0
EMPTY_HISTORY = bytes(32)


def extend_history(history: bytes, digest: bytes) -> bytes:
    """Return `history` extended by an update's digest.

    Equal histories mean that the same updates were applied to the same initial state.
    """
    return hashlib.blake2b(history + digest, digest_size=32).digest()


def largest_agreeing_group(values: Mapping[int, Hashable]) -> list[int]:
    """Return the ranks of the largest group with equal values; ties go to the group with the lowest rank."""
    groups: dict[Hashable, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(values[rank], []).append(rank)
    return max(groups.values(), key=lambda ranks: (len(ranks), -ranks[0]))


@dataclass(frozen=True, slots=True)
class Decided:
    """The verdict is known on this member.

    Attributes:
        suspects: if `silent_s` > 0, ranks that were silent for that time; otherwise ranks that voted NO, or
            whose update differs from the majority's.
    """

    verdict: m.Verdict
    reason: str
    suspects: tuple[int, ...] = ()
    silent_s: float = 0.0


CommitEffect = m.Vote | m.Decision | Decided
"""A Vote to send to the root, the root's Decision to send to every other member, or the verdict."""


class TwoPhaseCommit:
    """One attempt, as seen by the member with rank `rank`.

    Args:
        timeout_s: the time after which the root aborts if a member is silent or no member makes progress.

    Attributes:
        vote: this member's vote; None until it has voted.
        digest: digest of the update for which this member voted YES; empty otherwise.
        verdict: verdict on the attempt; None until it is known.
    """

    def __init__(
        self, round_id: m.RoundId, rank: int, world_size: int, timeout_s: float, now_s: float
    ) -> None:
        self.round_id = round_id
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.vote: bool | None = None
        self.digest = b""
        self.verdict: m.Verdict | None = None
        self._votes: dict[int, m.Vote] = {}
        self._last_progress_s = dict.fromkeys(range(world_size), now_s)
        self._last_movement_s = now_s

    @property
    def is_prepared(self) -> bool:
        """Whether this member has voted YES and is waiting for the verdict."""
        return self.vote is True and self.verdict is None

    @property
    def deadline_s(self) -> float:
        """The time at which the next timeout expires; infinite once the verdict is known."""
        if self.verdict is not None:
            return math.inf
        if self.rank != ROOT:
            return self._last_progress_s[ROOT] + self.timeout_s
        last_s = [self._last_progress_s[rank] for rank in self._awaited_ranks()]
        return min(self._last_movement_s, *last_s) + self.timeout_s

    def prepare(self, digest: bytes, now_s: float) -> list[CommitEffect]:
        """Vote YES: this member holds the complete update, and the new residual in addition to the old one.

        Raises:
            LocalProtocolError: this member has already voted.
        """
        if self.vote is not None:
            raise LocalProtocolError(
                f"this member voted twice in round {self.round_id}; its first vote was {self.vote}"
            )
        return self._cast_vote(m.Vote(self.round_id, True, digest, ""), now_s)

    def fail(self, reason: str, now_s: float) -> list[CommitEffect]:
        """Vote NO, because the exchange cannot complete on this member.

        After a YES, nothing happens: only the root or the coordinator may then end the attempt.
        """
        if self.vote is not None:
            return []
        return self._cast_vote(m.Vote(self.round_id, False, b"", reason), now_s)

    def count_vote(self, rank: int, vote: m.Vote, now_s: float) -> list[CommitEffect]:
        """As the root, count the vote of the member with this rank, and decide as soon as the votes suffice.

        Raises:
            RemoteProtocolError: this member is not the root, or the vote differs from an earlier one.
        """
        check_vote(rank, self.rank)
        self._last_progress_s[rank] = self._last_movement_s = now_s
        if self.verdict is not None:
            return []  # already decided; the caller repeats the decision to late voters
        earlier = self._votes.get(rank)
        if earlier is not None and (earlier.yes, earlier.digest) != (vote.yes, vote.digest):
            raise RemoteProtocolError(f"rank {rank} changed its vote in round {self.round_id}")
        self._votes[rank] = vote
        if not vote.yes:
            return self._decide(m.Verdict.ABORT, f"rank {rank} voted NO: {vote.reason}", (rank,))
        if len(self._votes) < self.world_size:
            return []
        majority = largest_agreeing_group({rank: cast.digest for rank, cast in self._votes.items()})
        if len(majority) == self.world_size:
            return self._decide(m.Verdict.COMMIT, f"{self.world_size} of {self.world_size} voted YES")
        others = tuple(sorted(set(self._votes) - set(majority)))
        reason = f"updates differ: {_format_ranks(majority)} agree, but not {_format_ranks(others)}"
        return self._decide(m.Verdict.ABORT, reason, others)

    def accept_decision(self, rank: int, decision: m.Decision) -> list[CommitEffect]:
        """Accept the root's decision.

        Raises:
            RemoteProtocolError: the sender with this rank is not the root, this member is the root, or the
                decision is COMMIT although this member has not voted YES.
        """
        check_decision(rank, self.rank)
        if self.verdict is not None:
            return []
        if decision.verdict is m.Verdict.COMMIT and self.vote is not True:
            raise RemoteProtocolError(
                f"rank {rank} sent COMMIT of round {self.round_id} without a YES from rank {self.rank}",
            )
        self.verdict = decision.verdict
        return [Decided(decision.verdict, decision.reason)]

    def record_progress(self, rank: int, has_moved: bool, now_s: float) -> None:
        """Record that the member with this rank is alive: its trainer is computing, or is waiting inside
        gridtrain for the other members.

        Args:
            has_moved: whether the member has also made progress, for example by receiving a payload.
        """
        self._last_progress_s[rank] = now_s
        self._last_movement_s = now_s if has_moved else self._last_movement_s

    def tick(self, now_s: float) -> list[CommitEffect]:
        """Decide ABORT if this member is the root and a timeout has passed.

        On any other member, nothing happens; the caller reports the timeout to the coordinator.
        """
        if now_s < self.deadline_s or self.rank != ROOT:
            return []
        late = tuple(r for r in self._awaited_ranks() if now_s >= self._last_progress_s[r] + self.timeout_s)
        if late:
            reason = f"no vote and no progress from {_format_ranks(late)} for {self.timeout_s:.1f} s"
        else:
            reason = f"no member made progress for {self.timeout_s:.1f} s"
        return self._decide(m.Verdict.ABORT, reason, late, self.timeout_s if late else 0.0)

    def extend_timeouts(self, until_s: float) -> None:
        """After a stall of this worker's loop, postpone the deadlines to `until_s` or later."""
        self._last_progress_s = {
            rank: extend_start(last_s, self.timeout_s, until_s)
            for rank, last_s in self._last_progress_s.items()
        }
        self._last_movement_s = extend_start(self._last_movement_s, self.timeout_s, until_s)

    def _awaited_ranks(self) -> list[int]:
        """Return the ranks that have not voted yet."""
        return [rank for rank in range(self.world_size) if rank not in self._votes]

    def _cast_vote(self, vote: m.Vote, now_s: float) -> list[CommitEffect]:
        if self.verdict is not None:
            return []
        self.vote, self.digest = vote.yes, vote.digest
        return self.count_vote(ROOT, vote, now_s) if self.rank == ROOT else [vote]

    def _decide(
        self, verdict: m.Verdict, reason: str, suspects: tuple[int, ...] = (), silent_s: float = 0.0
    ) -> list[CommitEffect]:
        self.verdict = verdict
        return [m.Decision(self.round_id, verdict, reason), Decided(verdict, reason, suspects, silent_s)]


def check_vote(from_rank: int, rank: int) -> None:
    """Raise `RemoteProtocolError` if the vote was sent to a member that is not the root."""
    if rank != ROOT:
        raise RemoteProtocolError(f"rank {from_rank} sent its vote to rank {rank}; the root is rank {ROOT}")


def check_decision(from_rank: int, rank: int) -> None:
    """Raise `RemoteProtocolError` if the decision was not sent by the root, or was sent to the root."""
    if not _decides(from_rank, rank):
        raise RemoteProtocolError(
            f"rank {from_rank} sent a decision to rank {rank}; only rank {ROOT} decides"
        )


def _decides(from_rank: int, rank: int) -> bool:
    return from_rank == ROOT and rank != ROOT


def _format_ranks(ranks: Sequence[int]) -> str:
    return list_first([f"rank {rank}" for rank in ranks], MAX_NAMES)
