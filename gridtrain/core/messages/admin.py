"""Messages for operators, for `gridtrain doctor` and `gridtrain status`, and for transferring bundles."""

from __future__ import annotations

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
class DiagnosticRequest(Message):
    """Request from `gridtrain doctor` for the run's status, members to probe, and an attempt to dial `peer`.

    The coordinator announces `peer` to some members and answers with DiagnosticReply.  If `address` is not
    empty, it also dials `peer` at that address and sends the result as Reachability.
    """

    peer: PeerId
    address: Address


@message(6)
class Invite(Message):
    """Operator's command to the coordinator to accept a new invitation.

    `key` is the public key of the invitation's token; the token itself is never sent.
    """

    key: PeerId
    uses: Positive
    expires_s: Lifetime


@message(7)
class RemoveWorker(Message):
    """Operator's command to remove a worker.

    The worker's key is refused until the worker is invited again; if `ban` is set, Unban must come first.
    """

    peer: PeerId
    ban: bool
    reason: Reason


@message(8)
class Unban(Message):
    """Operator's command to lift a ban, so that the peer may be invited again."""

    peer: PeerId


@message(90)
class EndRun(Message):
    """Operator's command to end the run after its open step, even if the script would train longer."""


@message(19)
class StatusRequest(Message):
    """Request from `gridtrain status` for a StatusReply.  The sender need not be a member."""


@message(87)
class BundleRequest(Message):
    """Request for one block of the run's bundle.

    `digest` is the SHA-256 digest of the whole bundle, as displayed by `gridtrain status`.
    """

    digest: Digest
    index: Count


@message(42)
class OperatorReply(Message):
    """Answer to an operator's command; `text` is displayed."""

    text: Reason


@message(85)
class DiagnosticReply(Message):
    """Answer to DiagnosticRequest.

    `probe_targets` are members that expect a connection from the requester, with their addresses; `payload`
    has the same content as that of StatusReply.
    """

    probe_targets: Annotated[tuple[tuple[PeerId, Address], ...], AtMost(8)]
    payload: Payload


MAX_BUNDLE_BYTES = 8 << 20
"""Maximum size of a bundle, which is one archive of a run's script and the files beside it."""


@message(88)
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
class StatusReply(Message):
    """Answer to StatusRequest; `payload` is one frame of UTF-8 JSON."""

    payload: Payload
