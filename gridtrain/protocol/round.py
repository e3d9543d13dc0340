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

from gridtrain.errors import LocalProtocolError, RemoteProtocolError
from gridtrain.protocol.messages import RoundId, Verdict

ROOT = 0
HISTORY_START = bytes(32)
_REMEDY = "drop that peer; an honest one of the same version never sends this"


def extend_history(history: bytes, digest: bytes) -> bytes:
    """Chain one more update's digest: equal histories mean the same updates from the same start."""
    return hashlib.blake2b(history + digest, digest_size=32).digest()


def largest_party(held: Mapping[int, Hashable]) -> list[int]:
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
class VoteCame:
    rank: int
    yes: bool
    digest: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class DecisionCame:
    rank: int
    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True)
class LaterStepSeen:
    """A message of the next step in the same generation: this one was committed (rule 3)."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A sign of life: the member's trainer works, or waits for the others inside of gridtrain.

    `stirred`: more than that, something moved (a payload, a step of its computing).
    """

    rank: int
    stirred: bool


RoundEvent = Prepared | Failed | VoteCame | DecisionCame | LaterStepSeen | Moved


# -- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CastVote:
    """Send a Vote to the root."""

    yes: bool
    digest: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Announce:
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


RoundEffect = CastVote | Announce | Decided


class Round:
    """One attempt, as the member of rank `rank` sees it.

    Attributes:
        voted: this member's own vote; None before it.
        digest: what this member voted YES for; empty otherwise.
        verdict: None until it is known here.
    """

    def __init__(self, id: RoundId, rank: int, world_size: int, patience_s: float, now_s: float) -> None:
        self.id = id
        self.rank = rank
        self.world_size = world_size
        self.patience_s = patience_s
        self.voted: bool | None = None
        self.digest = b""
        self.verdict: Verdict | None = None
        self._votes: dict[int, VoteCame] = {}
        self._moved_s = dict.fromkeys(range(world_size), now_s)
        self._stirred_s = now_s

    @property
    def prepared(self) -> bool:
        """Voted YES and waiting for the verdict."""
        return self.voted is True and self.verdict is None

    @property
    def deadline_s(self) -> float:
        """When the next laggard's patience runs out; infinite where nobody is waited for."""
        if self.verdict is not None:
            return math.inf
        quiet_since_s = [self._moved_s[rank] for rank in self._laggards()]
        if self.rank == ROOT:
            quiet_since_s.append(self._stirred_s)
        return min(quiet_since_s) + self.patience_s

    def handle(self, event: RoundEvent, now_s: float) -> list[RoundEffect]:
        match event:
            case Moved(rank, stirred):
                self._moved_s[rank] = now_s
                self._stirred_s = now_s if stirred else self._stirred_s
                return []
            case Prepared(digest):
                return self._vote(VoteCame(self.rank, True, digest, ""), now_s)
            case Failed(reason):
                # After a YES only the root or the coordinator may end the attempt.
                if self.voted is not None:
                    return []
                return self._vote(VoteCame(self.rank, False, b"", reason), now_s)
            case VoteCame():
                return self._count(event, now_s)
            case DecisionCame(rank, verdict, reason):
                return self._obey(rank, verdict, reason)
            case LaterStepSeen():
                return self._obey(ROOT, Verdict.COMMIT, "a message of the next step proves the commit")

    def tick(self, now_s: float) -> list[RoundEffect]:
        """Root: ABORT when patience has run out.  A member only waits: the caller tells the coordinator."""
        if now_s < self.deadline_s or self.rank != ROOT:
            return []
        late = tuple(r for r in self._laggards() if now_s >= self._moved_s[r] + self.patience_s)
        if late:
            reason = f"no vote and no sign of life from rank {_listed(late)} for {self.patience_s:.1f} s"
        else:
            reason = f"nothing moved anywhere for {self.patience_s:.1f} s"
        return self._decide(Verdict.ABORT, reason, late, self.patience_s if late else 0.0)

    def second_chance(self, until_s: float) -> None:
        """This member stood still, and has not read what came: patience lasts until `until_s` at least."""
        since_s = until_s - self.patience_s
        self._moved_s = {rank: max(moved_s, since_s) for rank, moved_s in self._moved_s.items()}
        self._stirred_s = max(self._stirred_s, since_s)

    def _laggards(self) -> list[int]:
        if self.rank == ROOT:
            return [rank for rank in range(self.world_size) if rank not in self._votes]
        return [ROOT]

    def _vote(self, vote: VoteCame, now_s: float) -> list[RoundEffect]:
        if self.voted is not None:
            raise LocalProtocolError(f"round {self.id}: a second vote of our own; the first was {self.voted}")
        if self.verdict is not None:
            return []
        self.voted, self.digest = vote.yes, vote.digest
        if self.rank == ROOT:
            return self._count(vote, now_s)
        return [CastVote(vote.yes, vote.digest, vote.reason)]

    def _count(self, vote: VoteCame, now_s: float) -> list[RoundEffect]:
        check_vote(vote.rank, self.rank)
        self._moved_s[vote.rank] = self._stirred_s = now_s
        if self.verdict is not None:
            return []  # decided once; the caller repeats the decision to late voters
        earlier = self._votes.get(vote.rank)
        if earlier is not None and not _is_same_vote(earlier, vote):
            raise RemoteProtocolError(
                f"rank {vote.rank} voted twice, and differently, in round {self.id}", remedy=_REMEDY
            )
        self._votes[vote.rank] = vote
        if not vote.yes:
            return self._decide(Verdict.ABORT, f"rank {vote.rank} voted NO: {vote.reason}", (vote.rank,))
        if len(self._votes) < self.world_size:
            return []
        right = largest_party({rank: cast.digest for rank, cast in self._votes.items()})
        if len(right) == self.world_size:
            return self._decide(Verdict.COMMIT, f"{self.world_size} of {self.world_size} voted YES")
        wrong = tuple(sorted(set(self._votes) - set(right)))
        reason = f"updates differ: ranks {_listed(right)} agree, ranks {_listed(wrong)} hold something else"
        return self._decide(Verdict.ABORT, reason, wrong)

    def _decide(
        self, verdict: Verdict, reason: str, suspects: tuple[int, ...] = (), silent_s: float = 0.0
    ) -> list[RoundEffect]:
        self.verdict = verdict
        return [Announce(verdict, reason), Decided(verdict, reason, suspects, silent_s)]

    def _obey(self, rank: int, verdict: Verdict, reason: str) -> list[RoundEffect]:
        check_decision(rank, self.rank)
        if self.verdict is not None:
            return []
        if verdict is Verdict.COMMIT and self.voted is not True:
            raise RemoteProtocolError(
                f"rank {rank} sent COMMIT of round {self.id} without the YES of rank {self.rank}",
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


def _is_same_vote(earlier: VoteCame, vote: VoteCame) -> bool:
    return (earlier.yes, earlier.digest) == (vote.yes, vote.digest)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
