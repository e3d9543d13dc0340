"""From an invitation to a worker that the coordinator knows.

Decides which of this machine's identities a worker uses, and when the invitation has to be shown.
Joins nothing.

    enter(invitation)   each free identity of this run --status?--> known: go on
                        none is known    --> Enrol, over the invitation's own key, of one that was put out,
                                             else of a new one
                                             Enrolled: go on      Refused, denied: stop, and say why

A machine whose worker was put out does not make itself another key for the same invitation.

The invitation's token is the secret half of a key pair that only lets its holder ask for enrolment.  It is
kept where it was not needed (`guestbook`), beside the worker's own secret key, in 0600 files;
neither is sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gridtrain.core.group.invitation import Invitation
from gridtrain.core.messages import Enrol, PeerId
from gridtrain.errors import ConfigError, CoordinatorUnreachable, GridtrainError, JoinRefused
from gridtrain.network.transport.identity import Identity, claim_existing_identity
from gridtrain.runtime.client.coordinator_client import DENIED, CoordinatorClient
from gridtrain.runtime.client.invitation_store import InvitationStore
from gridtrain.runtime.client.worker_naming import state_directory

INVALID_INVITATION = "this invitation is not valid: it was used up, has expired, was withdrawn, or never was"

INVITATION, PUT_OUT = "invitation", "put-out"
"""Codes of refusals: of an invitation that is not valid, and of a key that was a member's."""

PLAIN_ANSWER_TIMEOUT_S = 1.0
"""In the clear there is no handshake that could be refused: who is not known hears nothing."""


@dataclass(frozen=True, slots=True)
class Enrollment:
    """What a worker needs to connect; nothing in it is secret.

    Attributes:
        identity: the file with the worker's own key pair.
        status: how the run stood a moment ago.
    """

    coordinator: str
    coordinator_key: PeerId
    run: str
    encrypted: bool
    identity: Path
    status: dict[str, Any]

    def join_options(self) -> dict[str, str]:
        """For `JoinConfig`; none of it is secret."""
        return {
            "coordinator": self.coordinator,
            "coordinator_key": self.coordinator_key.hex(),
            "run": self.run,
            "identity": str(self.identity),
            "unencrypted": "" if self.encrypted else "yes",
        }


@contextlib.contextmanager
def enroll(invitation: Invitation, timeout_s: float, *, unencrypted: bool = False) -> Iterator[Enrollment]:
    """Hold an identity of this machine that the coordinator lets in, until the end.

    Args:
        timeout_s: for each question to the coordinator.
        unencrypted: an invitation to a run that talks in the clear is accepted, and only such a one.

    Raises:
        CoordinatorUnreachable: nobody answered in time.
        JoinRefused: the invitation is not valid (any more), or this identity was put out or banned.
        ConfigError: the key files cannot be used.
    """
    if invitation.encrypted == unencrypted:
        raise ConfigError(
            f'the run "{invitation.run}" is {"" if invitation.encrypted else "not "}encrypted, '
            f"and this worker was {'' if unencrypted else 'not '}told to do without",
            remedy="leave --unencrypted out"
            if invitation.encrypted
            else "ask its owner for an encrypted run; for a benchmark add --unencrypted",
        )
    folder = state_directory(invitation.run) / "identities" / invitation.coordinator.hex()[:16]
    with _admit(invitation, folder, timeout_s) as (path, status):
        yield Enrollment(
            coordinator=invitation.address,
            coordinator_key=invitation.coordinator,
            run=invitation.run,
            encrypted=invitation.encrypted,
            identity=path,
            status=status,
        )


@dataclass(frozen=True, slots=True)
class _ClaimedIdentity:
    """An identity that nobody else uses until `lock` is left."""

    identity: Identity
    path: Path
    lock: contextlib.ExitStack


@contextlib.contextmanager
def _admit(invitation: Invitation, folder: Path, timeout_s: float) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Hold an identity that the coordinator lets in, and ask how the run stands.  Raises as `enter`."""
    book = InvitationStore(folder)
    with contextlib.ExitStack() as others:  # which nobody else has to try meanwhile
        chosen, status = _choose_identity(book, invitation, folder, timeout_s, others)
    with chosen.lock:
        yield chosen.path, status or ask_status(invitation, chosen.identity, timeout_s)


def _choose_identity(
    book: InvitationStore,
    invitation: Invitation,
    folder: Path,
    timeout_s: float,
    others: contextlib.ExitStack,
) -> tuple[_ClaimedIdentity, dict[str, Any] | None]:
    """An identity that is let in now, still locked; with the run's status if it was so before."""
    put_out: list[_ClaimedIdentity] = []
    while (one := _claim_identity(book, invitation, folder, fresh=not put_out)) is not None:
        lock = others.enter_context(one.lock)
        status = _status_if_admitted(invitation, one.identity, timeout_s)
        if status is not None:
            book.record_known(one.path)
            return replace(one, lock=lock.pop_all()), status
        if book.was_admitted(one.path):
            put_out.append(one)
        elif not put_out:
            _present_new(book, invitation, one.identity, one.path, timeout_s)
            return replace(one, lock=lock.pop_all()), None
    one = put_out[0]
    try:
        present_invitation(invitation, one.identity.public, timeout_s)
    except JoinRefused as refusal:
        raise (revoked_error(invitation, one.identity) if refusal.code == INVITATION else refusal) from None
    book.record_admitted(one.path, invitation)
    return replace(one, lock=one.lock.pop_all()), None


def _claim_identity(
    book: InvitationStore, invitation: Invitation, folder: Path, *, fresh: bool
) -> _ClaimedIdentity | None:
    """One that neither we nor anybody else holds; None: none is left that was made before."""
    with book.lock(), contextlib.ExitStack() as lock:
        claimed = lock.enter_context(claim_existing_identity(folder, fresh=fresh))
        if claimed is None:
            return None
        book.record_attempt(claimed[1], invitation)
        return _ClaimedIdentity(*claimed, lock.pop_all())


def _present_new(
    book: InvitationStore, invitation: Invitation, identity: Identity, path: Path, timeout_s: float
) -> None:
    """With this invitation, or else with one that another worker of this machine did not need."""
    try:
        present_invitation(invitation, identity.public, timeout_s)
        book.record_admitted(path, invitation)
        return
    except JoinRefused as refusal:
        if refusal.code != INVITATION:
            raise
        refused = refusal
    for other in book.unused(invitation):
        if other.encrypted != invitation.encrypted:
            continue
        try:
            present_invitation(replace(other, address=invitation.address), identity.public, timeout_s)
        except JoinRefused:
            book.discard(other)
            continue
        book.record_admitted(path, other)
        return
    if book.has_other_admitted_keys(path):
        raise JoinRefused(
            INVITATION,
            f"{refused.reason}; the keys of this machine that were let in are in use by other workers of it",
            remedy="ask the run's owner for one more invitation; `gridtrain worker show` lists these workers",
        )
    raise refused


def revoked_error(invitation: Invitation, identity: Identity) -> JoinRefused:
    """A key that was let in before, and is not any more."""
    digits = identity.public.hex()[:12]
    return JoinRefused(
        PUT_OUT,
        f'this worker, key {digits}, was put out of the run "{invitation.run}", and this invitation does not '
        "let it in again",
        remedy=f"ask the run's owner for a new invitation (after a ban: and for gridtrain unban {digits})",
    )


def is_still_admitted(entry: Enrollment, timeout_s: float) -> bool:
    """False: the coordinator does not know this worker's key any more.  True also where nobody answers."""
    try:
        with CoordinatorClient(
            entry.coordinator, entry.coordinator_key, Identity.read(entry.identity), encrypted=entry.encrypted
        ) as client:
            client.status(timeout_s)
    except JoinRefused as refusal:
        return refusal.code != DENIED
    except GridtrainError:
        pass
    return True


def _status_if_admitted(
    invitation: Invitation, identity: Identity, timeout_s: float
) -> dict[str, Any] | None:
    """None: the coordinator does not let this identity in (yet).  Raises as `CoordinatorClient.ask`."""
    if not invitation.encrypted:
        timeout_s = min(timeout_s, PLAIN_ANSWER_TIMEOUT_S)
    try:
        return ask_status(invitation, identity, timeout_s)
    except JoinRefused as refusal:
        if refusal.code != DENIED:
            raise
    except CoordinatorUnreachable:
        if invitation.encrypted:
            raise
    return None


def ask_status(invitation: Invitation, identity: Identity, timeout_s: float) -> dict[str, Any]:
    """How the run stands.  Raises as `CoordinatorClient.ask`."""
    with CoordinatorClient(
        invitation.address, invitation.coordinator, identity, encrypted=invitation.encrypted
    ) as client:
        return client.status(timeout_s)


def present_invitation(invitation: Invitation, peer: PeerId, timeout_s: float) -> None:
    """Show the invitation, so that the coordinator lets `peer` in from now on.

    Raises `JoinRefused`, `CoordinatorUnreachable`.
    """
    guest = Identity.from_secret(invitation.token)
    try:
        with CoordinatorClient(
            invitation.address, invitation.coordinator, guest, encrypted=invitation.encrypted
        ) as client:
            client.ask(Enrol(peer), timeout_s)
    except JoinRefused as refusal:
        if refusal.code != DENIED:
            raise
        raise JoinRefused(
            INVITATION, INVALID_INVITATION, remedy="ask the run's owner for a new one"
        ) from None
