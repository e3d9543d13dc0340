"""Messages between workers in a round: payloads, votes, decisions, progress, stalled trainers, averages."""

from __future__ import annotations

from gridtrain.core.messages.declaration import (
    AnyFloat,
    Count,
    Digest,
    GenerationMessage,
    Message,
    Payload,
    Reason,
    Seconds,
    UInt,
    message,
)
from gridtrain.core.messages.types import Channel, PayloadSlot, RoundId, Verdict


@message(50)
class Data(Message):
    """One payload of a collective.

    `flags` combines the flags of the contributions in the payload.  Bit 0 is set if a contribution is not
    finite, so that the update is skipped; bit 1 + r is set if the contribution of rank r is empty, because
    its trainer is absent.
    """

    round: RoundId
    channel: Channel
    slot: PayloadSlot
    flags: UInt
    payload: Payload


@message(51)
class Vote(Message):
    """A member's vote on a round, sent to the root (commit rules 2 and 3).

    Attributes:
        compute_s: the time from the opening of the step to the trainer's submission or, after an absence,
            from the opening of the first step that the trainer missed.  The root estimates from it when to
            expect the next submission.  None if the trainer is absent, if the time is unknown, in a retry,
            and in a repeated vote.
    """

    round: RoundId
    yes: bool
    digest: Digest
    reason: Reason
    compute_s: Seconds | None = None


@message(52)
class Decision(Message):
    """The root's verdict on a round, decided once for each attempt (commit rule 3)."""

    round: RoundId
    verdict: Verdict
    reason: Reason


@message(53)
class RoundProgress(Message):
    """Report that the sender is alive and working on this round; the receiver then extends its timeouts."""

    round: RoundId
    progress: UInt


@message(48)
class Waiting(Message):
    """Report to the root that the sender has submitted its contribution and is waiting for other members.

    The payload contains the optimizer settings of the sender's contribution.
    """

    round: RoundId
    payload: Payload


@message(49)
class ProceedWithout(Message):
    """The root's request to make an empty contribution to the step, sent to a member that has not submitted.

    A member whose trainer has begun to submit ignores the request.  The payload contains the optimizer
    settings with which the other members apply the step.
    """

    round: RoundId
    payload: Payload


@message(58)
class MeanRequest(GenerationMessage):
    """The sender's value for the average (`grid.mean`) with this step and index, sent to the root.

    `core.member.scalar_means` defines the indices, some of which have a special meaning.
    """

    step: UInt
    index: Count
    value: AnyFloat


@message(59)
class MeanReply(GenerationMessage):
    """The root's answer to MeanRequest: the average over the members that contributed a value.

    `core.member.scalar_means` defines the indices, some of which have a special meaning.
    """

    step: UInt
    index: Count
    value: AnyFloat
