"""Messages of operators, of diagnosis, and of the run's bundle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gridtrain.core.messages.declaration import (
    Address,
    AtMost,
    Count,
    Digest,
    Lifetime,
    Payload,
    PeerId,
    Positive,
    Reason,
    message,
)
from gridtrain.core.messages.types import MAX_BLOCK_BYTES, find_problem_of_block


@message(84)
@dataclass(frozen=True, slots=True)
class DiagnosticRequest:
    """From `gridtrain doctor`, no member: call `peer` back at `address` (empty: do not), say how the run
    stands, and let some members expect `peer`.  CheckupReply answers, and Reach where there is an address."""

    peer: PeerId
    address: Address


@message(6)
@dataclass(frozen=True, slots=True)
class Invite:
    """Make a new invitation valid.  `key` is its public key: the token itself never travels."""

    key: PeerId
    uses: Positive
    expires_s: Lifetime


@message(7)
@dataclass(frozen=True, slots=True)
class RemoveWorker:
    """Remove a worker for good: its key is refused until it is invited anew, or at all (`ban`)."""

    peer: PeerId
    ban: bool
    reason: Reason


@message(8)
@dataclass(frozen=True, slots=True)
class Unban:
    """Lift the ban: the key may be invited again."""

    peer: PeerId


@message(19)
@dataclass(frozen=True, slots=True)
class StatusRequest:
    """From `gridtrain status`: no member, changes nothing."""


@message(87)
@dataclass(frozen=True, slots=True)
class BundleRequest:
    """One block of the run's bundle; `digest` is the SHA-256 of the whole, as the status told it."""

    digest: Digest
    index: Count


@message(42)
@dataclass(frozen=True, slots=True)
class OperatorReply:
    """Answer to an operator's order, in words."""

    text: Reason


@message(85)
@dataclass(frozen=True, slots=True)
class DiagnosticReply:
    """`probe`: members that expect the asker's key, and where; `payload`: as of StatusReply."""

    probe_targets: Annotated[tuple[tuple[PeerId, Address], ...], AtMost(8)]
    payload: Payload


MAX_BUNDLE_BYTES = 8 << 20
"""The largest bundle: a run's script and the files beside it, as one archive."""


@message(88)
@dataclass(frozen=True, slots=True)
class BundleBlock:
    """Answer to BundleAsk: block `index` of `total`, 1 MiB but for the last one."""

    digest: Digest
    index: Count
    total: Positive
    payload: Payload

    def find_problem(self) -> str | None:
        most = MAX_BUNDLE_BYTES // MAX_BLOCK_BYTES
        return find_problem_of_block(self.index, self.total, self.payload, most)


@message(39)
@dataclass(frozen=True, slots=True)
class StatusReply:
    """`payload` is one frame of UTF-8 JSON."""

    payload: Payload
