"""Messages of operators, of `gridtrain doctor` and `gridtrain status`, and of the run's bundle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gridtrain.core.messages.types import PeerId


@dataclass(frozen=True, slots=True)
class DiagnosticRequest:
    """From `gridtrain doctor`: report the run's state, let some members expect `peer`, and call `peer` back.

    Answered by DiagnosticReply and, where `address` is not empty, by Reachability.
    """

    peer: PeerId
    address: str


@dataclass(frozen=True, slots=True)
class Invite:
    """Make a new invitation valid.  `key` is the public key of its token; the token itself never travels."""

    key: PeerId
    uses: int
    expires_s: float


@dataclass(frozen=True, slots=True)
class RemoveWorker:
    """Remove a worker: its key is refused until it is invited again or, with `ban`, until `Unban`."""

    peer: PeerId
    ban: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Unban:
    """Lift the ban: the key may be invited again."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """From `gridtrain status`: read-only; the sender need not be a member."""


@dataclass(frozen=True, slots=True)
class BundleRequest:
    """Request one block of the run's bundle; `digest` is the SHA-256 of the whole, as the status shows it."""

    digest: bytes
    index: int


@dataclass(frozen=True, slots=True)
class OperatorReply:
    """Answer to an operator's command, for people."""

    text: str


@dataclass(frozen=True, slots=True)
class DiagnosticReply:
    """`probe_targets`: members that expect the requester, with addresses; `payload`: as in StatusReply."""

    probe_targets: tuple[tuple[PeerId, str], ...]
    payload: Any


MAX_BUNDLE_BYTES = 8 << 20
"""Largest bundle: a run's script and the files beside it, as one archive."""


@dataclass(frozen=True, slots=True)
class BundleBlock:
    """Answer to BundleRequest: block `index` of `total`, 1 MiB except for the last one."""

    digest: bytes
    index: int
    total: int
    payload: Any


@dataclass(frozen=True, slots=True)
class StatusReply:
    """`payload` is one frame of UTF-8 JSON."""

    payload: Any


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
