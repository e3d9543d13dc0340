"""Messages between workers in one round: payloads, votes, decisions, progress, averages."""

from __future__ import annotations

from dataclasses import dataclass

from gridtrain.core.messages.declaration import Count, Digest, Payload, Reason, UInt, message
from gridtrain.core.messages.types import Channel, PayloadSlot, RoundId, Verdict


@message(50)
@dataclass(frozen=True, slots=True)
class Data:
    """One payload of a collective.  `skip`: the gradient of a member that contributed to it is not finite."""

    round: RoundId
    channel: Channel
    slot: PayloadSlot
    skip: bool
    payload: Payload


@message(51)
@dataclass(frozen=True, slots=True)
class Vote:
    """A member's vote on a round, to the root (commit rules 2 and 3)."""

    round: RoundId
    yes: bool
    digest: Digest
    reason: Reason


@message(52)
@dataclass(frozen=True, slots=True)
class Decision:
    """The root's verdict on a round, decided once for each attempt (commit rule 3)."""

    round: RoundId
    verdict: Verdict
    reason: Reason


@message(53)
@dataclass(frozen=True, slots=True)
class RoundProgress:
    """The sender is alive and working on this round; extends the receiver's deadline."""

    round: RoundId
    progress: UInt


@message(58)
@dataclass(frozen=True, slots=True)
class MeanRequest:
    """To the root: the sender's value for the `index`-th average (`grid.mean`) of this step."""

    term: UInt
    generation: UInt
    step: UInt
    index: Count
    value: float


@message(59)
@dataclass(frozen=True, slots=True)
class MeanReply:
    """From the root: the average over the generation."""

    term: UInt
    generation: UInt
    step: UInt
    index: Count
    value: float


RoundMessage = Data | Vote | Decision | RoundProgress | MeanRequest | MeanReply
