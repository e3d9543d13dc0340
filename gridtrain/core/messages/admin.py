"""Messages for operators, for `gridtrain doctor` and `gridtrain status`, and for transferring bundles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gridtrain.core.messages.declaration import (
    Address,
    AtMost,
    Count,
    Digest,
    Lifetime,
    Message,
    Payload,
    PeerId,
    Positive,
    Reason,
    message,
)
from gridtrain.core.messages.types import MAX_BLOCK_BYTES, find_problem_of_block


@message(84)
@dataclass(frozen=True, slots=True)
class DiagnosticRequest(Message):
    """Request from `gridtrain doctor` for the run's state, members to probe, and an incoming connection.

    The coordinator announces `peer` to some members and answers with DiagnosticReply.  If `address` is not
    empty, it also dials `peer` back and answers with Reachability.
    """

    peer: PeerId
    address: Address


@message(6)
@dataclass(frozen=True, slots=True)
class Invite(Message):
    """Order to accept a new invitation.  `key` is the public key of its token; the token is never sent."""

    key: PeerId
    uses: Positive
    expires_s: Lifetime


@message(7)
@dataclass(frozen=True, slots=True)
class RemoveWorker(Message):
    """Order to remove a worker: its key is refused until a new invitation or, with `ban`, until `Unban`."""

    peer: PeerId
    ban: bool
    reason: Reason


@message(8)
@dataclass(frozen=True, slots=True)
class Unban(Message):
    """Order to lift a ban, so that the key may be invited again."""

    peer: PeerId


@message(90)
@dataclass(frozen=True, slots=True)
class EndRun(Message):
    """Order to end the run after its open step, even if its script would train for longer."""


@message(19)
@dataclass(frozen=True, slots=True)
class StatusRequest(Message):
    """Request from `gridtrain status` for a StatusReply.  Read-only; the sender need not be a member."""


@message(87)
@dataclass(frozen=True, slots=True)
class BundleRequest(Message):
    """Request for one block of the run's bundle.

    `digest` is the SHA-256 of the whole bundle, as displayed by `gridtrain status`.
    """

    digest: Digest
    index: Count


@message(42)
@dataclass(frozen=True, slots=True)
class OperatorReply(Message):
    """Answer to an operator's command; `text` is displayed."""

    text: Reason


@message(85)
@dataclass(frozen=True, slots=True)
class DiagnosticReply(Message):
    """Answer to DiagnosticRequest.

    `probe_targets` are members that expect the requester's connection, with their addresses; `payload` is as
    in StatusReply.
    """

    probe_targets: Annotated[tuple[tuple[PeerId, Address], ...], AtMost(8)]
    payload: Payload


MAX_BUNDLE_BYTES = 8 << 20
"""Maximum size of a bundle, which is one archive of a run's script and the files beside it."""


@message(88)
@dataclass(frozen=True, slots=True)
class BundleBlock(Message):
    """Answer to BundleRequest: block `index` of `total`; all blocks except the last are 1 MiB long."""

    digest: Digest
    index: Count
    total: Positive
    payload: Payload

    def find_problem(self) -> str | None:
        most = MAX_BUNDLE_BYTES // MAX_BLOCK_BYTES
        return find_problem_of_block(self.index, self.total, self.payload, most)


@message(39)
@dataclass(frozen=True, slots=True)
class StatusReply(Message):
    """Answer to StatusRequest; `payload` is one frame of UTF-8 JSON."""

    payload: Payload
