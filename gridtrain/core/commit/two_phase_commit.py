"""The vote that makes a round all or none (commit rules 1 to 4).

Decides, for one attempt at one step, whether its update is applied everywhere or nowhere.  Never
touches gradients, sockets or clocks, and does not know which exchange produced the update.

    member                      root (rank 0)
      | Prepared(digest)          | Prepared(digest)
      |-------- Vote YES -------->|
      |<----- Decision -----------|   COMMIT iff every member voted YES for one digest,
      v                           v   else ABORT; decided once
    Decided                     Decided

After a YES a member never aborts by itself: it waits for the root, or for the coordinator's FREEZE.
The root gives up after `patience_s` in which a member neither voted nor showed a sign of life, or in
which nothing moved anywhere (a payload was lost with a connection, and all wait for it).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from gridtrain.core.messages import RoundId, Verdict
from gridtrain.errors import LocalProtocolError, RemoteProtocolError

ROOT = 0
EMPTY_HISTORY = bytes(32)
_REMEDY = "drop that peer; an honest one of the same version never sends this"


def extend_history(history: bytes, digest: bytes) -> bytes:
    """Chain one more update's digest: equal histories mean the same updates from the same start."""
    return hashlib.blake2b(history + digest, digest_size=32).digest()


def largest_agreeing_group(held: Mapping[int, Hashable]) -> list[int]:
    """Of what each rank holds: the ranks of the largest party, of equal ones of that with the lowest rank."""
    parties: dict[Hashable, list[int]] = {}
    for rank in sorted(held):
        parties.setdefault(held[rank], []).append(rank)
    return max(parties.values(), key=lambda ranks: (len(ranks), -ranks[0]))


# -- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepared:
    """The complete update is held here, and the new residual beside the old one."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """The exchange cannot complete here; vote NO."""

    reason: str


@dataclass(frozen=True, slots=True)
class VoteReceived:
    rank: int
    yes: bool
    digest: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class DecisionReceived:
    rank: int
    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True)
class LaterStepSeen:
    """A message of the next step in the same generation: this one was committed (rule 3)."""


@dataclass(frozen=True, slots=True)
class ProgressReceived:
    """A sign of life: the member's trainer works, or waits for the others inside of gridtrain.

    `stirred`: more than that, something moved (a payload, a step of its computing).
    """

    rank: int
    has_moved: bool


CommitEvent = Prepared | Failed | VoteReceived | DecisionReceived | LaterStepSeen | ProgressReceived


# -- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CastVote:
    """Send a Vote to the root."""

    yes: bool
    digest: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class AnnounceDecision:
    """The root's Decision, to every other member."""

    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True)
class Decided:
    """The verdict is known here.

    `suspects`: ranks that were silent for `silent_s`, or (0) voted NO or hold another update than most.
    """

    verdict: Verdict
    reason: str
    suspects: tuple[int, ...] = ()
    silent_s: float = 0.0


CommitEffect = CastVote | AnnounceDecision | Decided


class TwoPhaseCommit:
    """One attempt, as the member of rank `rank` sees it.

    Attributes:
        voted: this member's own vote; None before it.
        digest: what this member voted YES for; empty otherwise.
        verdict: None until it is known here.
    """

    def __init__(self, id: RoundId, rank: int, world_size: int, patience_s: float, now_s: float) -> None:
        self.round_id = id
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = patience_s
        self.vote: bool | None = None
        self.digest = b""
        self.verdict: Verdict | None = None
        self._votes: dict[int, VoteReceived] = {}
        self._last_progress_s = dict.fromkeys(range(world_size), now_s)
        self._last_movement_s = now_s

    @property
    def is_prepared(self) -> bool:
        """Voted YES and waiting for the verdict."""
        return self.vote is True and self.verdict is None

    @property
    def deadline_s(self) -> float:
        """When the next laggard's patience runs out; infinite where nobody is waited for."""
        if self.verdict is not None:
            return math.inf
        quiet_since_s = [self._last_progress_s[rank] for rank in self._laggards()]
        if self.rank == ROOT:
            quiet_since_s.append(self._last_movement_s)
        return min(quiet_since_s) + self.timeout_s

    def handle(self, event: CommitEvent, now_s: float) -> list[CommitEffect]:
        match event:
            case ProgressReceived(rank, stirred):
                self._last_progress_s[rank] = now_s
                self._last_movement_s = now_s if stirred else self._last_movement_s
                return []
            case Prepared(digest):
                return self._cast_vote(VoteReceived(self.rank, True, digest, ""), now_s)
            case Failed(reason):
                # After a YES only the root or the coordinator may end the attempt.
                if self.vote is not None:
                    return []
                return self._cast_vote(VoteReceived(self.rank, False, b"", reason), now_s)
            case VoteReceived():
                return self._count_vote(event, now_s)
            case DecisionReceived(rank, verdict, reason):
                return self._accept_decision(rank, verdict, reason)
            case LaterStepSeen():
                return self._accept_decision(
                    ROOT, Verdict.COMMIT, "a message of the next step proves the commit"
                )

    def tick(self, now_s: float) -> list[CommitEffect]:
        """Root: ABORT when patience has run out.  A member only waits: the caller tells the coordinator."""
        if now_s < self.deadline_s or self.rank != ROOT:
            return []
        late = tuple(r for r in self._laggards() if now_s >= self._last_progress_s[r] + self.timeout_s)
        if late:
            reason = f"no vote and no sign of life from rank {_format_ranks(late)} for {self.timeout_s:.1f} s"
        else:
            reason = f"nothing moved anywhere for {self.timeout_s:.1f} s"
        return self._decide(Verdict.ABORT, reason, late, self.timeout_s if late else 0.0)

    def extend_timeouts(self, until_s: float) -> None:
        """This member stood still, and has not read what came: patience lasts until `until_s` at least."""
        since_s = until_s - self.timeout_s
        self._last_progress_s = {
            rank: max(moved_s, since_s) for rank, moved_s in self._last_progress_s.items()
        }
        self._last_movement_s = max(self._last_movement_s, since_s)

    def _laggards(self) -> list[int]:
        if self.rank == ROOT:
            return [rank for rank in range(self.world_size) if rank not in self._votes]
        return [ROOT]

    def _cast_vote(self, vote: VoteReceived, now_s: float) -> list[CommitEffect]:
        if self.vote is not None:
            raise LocalProtocolError(
                f"round {self.round_id}: a second vote of our own; the first was {self.vote}"
            )
        if self.verdict is not None:
            return []
        self.vote, self.digest = vote.yes, vote.digest
        if self.rank == ROOT:
            return self._count_vote(vote, now_s)
        return [CastVote(vote.yes, vote.digest, vote.reason)]

    def _count_vote(self, vote: VoteReceived, now_s: float) -> list[CommitEffect]:
        check_vote(vote.rank, self.rank)
        self._last_progress_s[vote.rank] = self._last_movement_s = now_s
        if self.verdict is not None:
            return []  # decided once; the caller repeats the decision to late voters
        earlier = self._votes.get(vote.rank)
        if earlier is not None and not _is_same_vote(earlier, vote):
            raise RemoteProtocolError(
                f"rank {vote.rank} voted twice, and differently, in round {self.round_id}", remedy=_REMEDY
            )
        self._votes[vote.rank] = vote
        if not vote.yes:
            return self._decide(Verdict.ABORT, f"rank {vote.rank} voted NO: {vote.reason}", (vote.rank,))
        if len(self._votes) < self.world_size:
            return []
        right = largest_agreeing_group({rank: cast.digest for rank, cast in self._votes.items()})
        if len(right) == self.world_size:
            return self._decide(Verdict.COMMIT, f"{self.world_size} of {self.world_size} voted YES")
        wrong = tuple(sorted(set(self._votes) - set(right)))
        reason = f"updates differ: ranks {_format_ranks(right)} agree, ranks {_format_ranks(wrong)} hold something else"
        return self._decide(Verdict.ABORT, reason, wrong)

    def _decide(
        self, verdict: Verdict, reason: str, suspects: tuple[int, ...] = (), silent_s: float = 0.0
    ) -> list[CommitEffect]:
        self.verdict = verdict
        return [AnnounceDecision(verdict, reason), Decided(verdict, reason, suspects, silent_s)]

    def _accept_decision(self, rank: int, verdict: Verdict, reason: str) -> list[CommitEffect]:
        check_decision(rank, self.rank)
        if self.verdict is not None:
            return []
        if verdict is Verdict.COMMIT and self.vote is not True:
            raise RemoteProtocolError(
                f"rank {rank} sent COMMIT of round {self.round_id} without the YES of rank {self.rank}",
                remedy=_REMEDY,
            )
        self.verdict = verdict
        return [Decided(verdict, reason)]


def check_vote(from_rank: int, rank: int) -> None:
    """Raises `RemoteProtocolError` for a vote at a member that is not the root."""
    if not _counts_votes(rank):
        raise RemoteProtocolError(
            f"rank {from_rank} voted at rank {rank}; the root is rank {ROOT}", remedy=_REMEDY
        )


def check_decision(from_rank: int, rank: int) -> None:
    """Raises `RemoteProtocolError` for a decision that is not the root's, or that is sent to the root."""
    if not _decides(from_rank, rank):
        raise RemoteProtocolError(
            f"rank {from_rank} sent a decision to rank {rank}; only rank {ROOT} decides", remedy=_REMEDY
        )


def _counts_votes(rank: int) -> bool:
    return rank == ROOT


def _decides(from_rank: int, rank: int) -> bool:
    return from_rank == ROOT and rank != ROOT


def _is_same_vote(earlier: VoteReceived, vote: VoteReceived) -> bool:
    return (earlier.yes, earlier.digest) == (vote.yes, vote.digest)


def _format_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
