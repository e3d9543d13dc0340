"""Messages of operators, of `gridtrain doctor` and `gridtrain status`, and of the run's bundle."""

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
    """From `gridtrain doctor`: report the run's state, let some members expect `peer`, and call `peer` back.

    Answered by DiagnosticReply and, where `address` is not empty, by Reachability.
    """

    peer: PeerId
    address: Address


@message(6)
@dataclass(frozen=True, slots=True)
class Invite:
    """Make a new invitation valid.  `key` is the public key of its token; the token itself never travels."""

    key: PeerId
    uses: Positive
    expires_s: Lifetime


@message(7)
@dataclass(frozen=True, slots=True)
class RemoveWorker:
    """Remove a worker: its key is refused until it is invited again or, with `ban`, until `Unban`."""

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
    """From `gridtrain status`: read-only; the sender need not be a member."""


@message(87)
@dataclass(frozen=True, slots=True)
class BundleRequest:
    """Request one block of the run's bundle; `digest` is the SHA-256 of the whole, as the status shows it."""

    digest: Digest
    index: Count


@message(42)
@dataclass(frozen=True, slots=True)
class OperatorReply:
    """Answer to an operator's command, for people."""

    text: Reason


@message(85)
@dataclass(frozen=True, slots=True)
class DiagnosticReply:
    """`probe_targets`: members that expect the requester, with addresses; `payload`: as in StatusReply."""

    probe_targets: Annotated[tuple[tuple[PeerId, Address], ...], AtMost(8)]
    payload: Payload


MAX_BUNDLE_BYTES = 8 << 20
"""Largest bundle: a run's script and the files beside it, as one archive."""


@message(88)
@dataclass(frozen=True, slots=True)
class BundleBlock:
    """Answer to BundleRequest: block `index` of `total`, 1 MiB except for the last one."""

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


AdminMessage = (
    DiagnosticRequest
    | DiagnosticReply
    | Invite
    | RemoveWorker
    | Unban
    | OperatorReply
    | StatusRequest
    | StatusReply
    | BundleRequest
    | BundleBlock
)
