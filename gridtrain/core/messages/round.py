"""Messages between workers in one round: payloads, votes, decisions, progress, stragglers and means."""

from __future__ import annotations

from dataclasses import dataclass

from gridtrain.core.messages.declaration import (
    Count,
    Digest,
    Message,
    Payload,
    Reason,
    Seconds,
    UInt,
    message,
)
from gridtrain.core.messages.types import Channel, PayloadSlot, RoundId, Verdict


@message(50)
@dataclass(frozen=True, slots=True)
class Data(Message):
    """One payload of a collective.

    `flags` combines the flags of the contributions in the payload: bit 0, the update is skipped, because a
    contribution is not finite; bit 1 + r, the contribution of rank r is empty, because its trainer is absent.
    """

    round: RoundId
    channel: Channel
    slot: PayloadSlot
    flags: UInt
    payload: Payload


@message(51)
@dataclass(frozen=True, slots=True)
class Vote(Message):
    """A member's vote on a round, sent to the root (commit rules 2 and 3).

    `compute_s` is the time from the previous commit to the trainer's submission, from which the root
    estimates when to expect the next submission; None if the trainer was absent.
    """

    round: RoundId
    yes: bool
    digest: Digest
    reason: Reason
    compute_s: Seconds | None = None


@message(52)
@dataclass(frozen=True, slots=True)
class Decision(Message):
    """The root's verdict on a round, decided once for each attempt (commit rule 3)."""

    round: RoundId
    verdict: Verdict
    reason: Reason


@message(53)
@dataclass(frozen=True, slots=True)
class RoundProgress(Message):
    """Report that the sender is alive and working on this round; extends the deadline for the sender."""

    round: RoundId
    progress: UInt


@message(48)
@dataclass(frozen=True, slots=True)
class Waiting(Message):
    """Report to the root that the sender has submitted its contribution and is waiting for other members.

    The payload contains the optimizer settings of the sender's contribution.
    """

    round: RoundId
    payload: Payload


@message(49)
@dataclass(frozen=True, slots=True)
class ProceedWithout(Message):
    """Root's request to a member that has not submitted: submit an empty contribution to the step.

    A member whose trainer has begun to submit ignores the request.  The payload contains the optimizer
    settings with which the other members apply the step.
    """

    round: RoundId
    payload: Payload


@message(58)
@dataclass(frozen=True, slots=True)
class MeanRequest(Message):
    """The sender's value for the `index`-th average (`grid.mean`) of this step, sent to the root."""

    term: UInt
    generation: UInt
    step: UInt
    index: Count
    value: float


@message(59)
@dataclass(frozen=True, slots=True)
class MeanReply(Message):
    """The average over all members of the generation, sent by the root."""

    term: UInt
    generation: UInt
    step: UInt
    index: Count
    value: float
