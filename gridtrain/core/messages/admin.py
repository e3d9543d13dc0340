"""Messages of operators, of diagnosis, and of the run's bundle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gridtrain.core.messages.types import PeerId


@dataclass(frozen=True, slots=True)
class DiagnosticRequest:
    """From `gridtrain doctor`, no member: call `peer` back at `address` (empty: do not), say how the run
    stands, and let some members expect `peer`.  CheckupReply answers, and Reach where there is an address."""

    peer: PeerId
    address: str


@dataclass(frozen=True, slots=True)
class Invite:
    """Make a new invitation valid.  `key` is its public key: the token itself never travels."""

    key: PeerId
    uses: int
    expires_s: float


@dataclass(frozen=True, slots=True)
class RemoveWorker:
    """Remove a worker for good: its key is refused until it is invited anew, or at all (`ban`)."""

    peer: PeerId
    ban: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Unban:
    """Lift the ban: the key may be invited again."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """From `gridtrain status`: no member, changes nothing."""


@dataclass(frozen=True, slots=True)
class BundleRequest:
    """One block of the run's bundle; `digest` is the SHA-256 of the whole, as the status told it."""

    digest: bytes
    index: int


@dataclass(frozen=True, slots=True)
class OperatorReply:
    """Answer to an operator's order, in words."""

    text: str


@dataclass(frozen=True, slots=True)
class DiagnosticReply:
    """`probe`: members that expect the asker's key, and where; `payload`: as of StatusReply."""

    probe_targets: tuple[tuple[PeerId, str], ...]
    payload: Any


MAX_BUNDLE_BYTES = 8 << 20
"""The largest bundle: a run's script and the files beside it, as one archive."""


@dataclass(frozen=True, slots=True)
class BundleBlock:
    """Answer to BundleAsk: block `index` of `total`, 1 MiB but for the last one."""

    digest: bytes
    index: int
    total: int
    payload: Any


@dataclass(frozen=True, slots=True)
class StatusReply:
    """`payload` is one frame of UTF-8 JSON."""

    payload: Any
