"""Messages between workers in one round: payloads, votes, decisions, progress, averages."""

from __future__ import annotations

from dataclasses import dataclass

from gridtrain.core.messages.declaration import Count, Digest, Payload, Reason, UInt, message
from gridtrain.core.messages.types import Channel, PayloadSlot, RoundId, Verdict


@message(50)
@dataclass(frozen=True, slots=True)
class Data:
    """A piece of an exchange.  `payload` is a token: one frame on the wire, anything in a simulator.

    `skip` is ORed along the exchange: somebody's gradient was not finite.
    """

    round: RoundId
    channel: Channel
    slot: PayloadSlot
    skip: bool
    payload: Payload


@message(51)
@dataclass(frozen=True, slots=True)
class Vote:
    round: RoundId
    yes: bool
    digest: Digest
    reason: Reason


@message(52)
@dataclass(frozen=True, slots=True)
class Decision:
    """The root's, once for each attempt (commit rule 3)."""

    round: RoundId
    verdict: Verdict
    reason: Reason


@message(53)
@dataclass(frozen=True, slots=True)
class RoundProgress:
    """I am alive and working on this round; extends the root's deadline."""

    round: RoundId
    progress: UInt


@message(58)
@dataclass(frozen=True, slots=True)
class MeanRequest:
    """To the root: my number for the `index`-th average of this step; for people, not for the model."""

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
