"""From an invitation to a worker that the coordinator admits.

Chooses which of this machine's identities a worker uses, and presents the invitation where that is needed.

    enroll(invitation)  each free identity of this run --status?--> known: use it
                        none is known    --> Enrol, over the invitation's key: an identity that was removed,
                                             otherwise a new one
                                             Enrolled: use it     Refused, denied: stop, and say why

A machine whose worker was removed does not create another key for the same invitation.

The invitation's token is the secret half of a key pair that only lets its holder ask for enrolment.  An
invitation that was not needed is stored (`invitation_store`) beside the worker's secret key, in 0600 files;
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
"""Refusal codes: an invitation that is not valid, and a key that was removed from the run."""

PLAIN_ANSWER_TIMEOUT_S = 1.0
"""Without encryption no handshake can be refused: an unknown key gets no answer."""


@dataclass(frozen=True, slots=True)
class Enrollment:
    """What a worker needs to connect; nothing in it is secret.

    Attributes:
        identity: the file with the worker's own key pair.
        status: of the run, a moment ago.
    """

    coordinator: str
    coordinator_key: PeerId
    run: str
    encrypted: bool
    identity: Path
    status: dict[str, Any]

    def join_options(self) -> dict[str, str]:
        """Fields of `JoinConfig`; none of it is secret."""
        return {
            "coordinator": self.coordinator,
            "coordinator_key": self.coordinator_key.hex(),
            "run": self.run,
            "identity": str(self.identity),
            "unencrypted": "" if self.encrypted else "yes",
        }


@contextlib.contextmanager
def enroll(invitation: Invitation, timeout_s: float, *, unencrypted: bool = False) -> Iterator[Enrollment]:
    """Context manager: holds an identity of this machine that the coordinator admits.

    Args:
        timeout_s: for each question to the coordinator.
        unencrypted: an invitation to a run without encryption is accepted, and only such a one.

    Raises:
        CoordinatorUnreachable: nobody answered in time.
        JoinRefused: the invitation is not valid, or this identity was removed or banned.
        ConfigError: the key files cannot be used.
    """
    if invitation.encrypted == unencrypted:
        raise ConfigError(
            f'the run "{invitation.run}" is {"" if invitation.encrypted else "not "}encrypted, '
            f"and this worker was {'' if unencrypted else 'not '}started with --unencrypted",
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
    """Hold an identity that the coordinator admits, and ask for the run's status.  Raises as `enroll`."""
    store = InvitationStore(folder)
    with contextlib.ExitStack() as others:  # so that nobody else tries them meanwhile
        chosen, status = _choose_identity(store, invitation, folder, timeout_s, others)
    with chosen.lock:
        yield chosen.path, status or ask_status(invitation, chosen.identity, timeout_s)


def _choose_identity(
    store: InvitationStore,
    invitation: Invitation,
    folder: Path,
    timeout_s: float,
    others: contextlib.ExitStack,
) -> tuple[_ClaimedIdentity, dict[str, Any] | None]:
    """An identity that is admitted now, still locked; with the run's status if it was admitted before."""
    removed: list[_ClaimedIdentity] = []
    while (one := _claim_identity(store, invitation, folder, fresh=not removed)) is not None:
        lock = others.enter_context(one.lock)
        status = _status_if_admitted(invitation, one.identity, timeout_s)
        if status is not None:
            store.record_known(one.path)
            return replace(one, lock=lock.pop_all()), status
        if store.was_admitted(one.path):
            removed.append(one)
        elif not removed:
            _present_new(store, invitation, one.identity, one.path, timeout_s)
            return replace(one, lock=lock.pop_all()), None
    one = removed[0]
    try:
        present_invitation(invitation, one.identity.public, timeout_s)
    except JoinRefused as refusal:
        raise (revoked_error(invitation, one.identity) if refusal.code == INVITATION else refusal) from None
    store.record_admitted(one.path, invitation)
    return replace(one, lock=one.lock.pop_all()), None


def _claim_identity(
    store: InvitationStore, invitation: Invitation, folder: Path, *, fresh: bool
) -> _ClaimedIdentity | None:
    """An identity that no process holds; None: none is left that was created before."""
    with store.lock(), contextlib.ExitStack() as lock:
        claimed = lock.enter_context(claim_existing_identity(folder, fresh=fresh))
        if claimed is None:
            return None
        store.record_attempt(claimed[1], invitation)
        return _ClaimedIdentity(*claimed, lock.pop_all())


def _present_new(
    store: InvitationStore, invitation: Invitation, identity: Identity, path: Path, timeout_s: float
) -> None:
    """Enrol with this invitation, or with one that another worker of this machine did not need."""
    try:
        present_invitation(invitation, identity.public, timeout_s)
        store.record_admitted(path, invitation)
        return
    except JoinRefused as refusal:
        if refusal.code != INVITATION:
            raise
        refused = refusal
    for other in store.unused(invitation):
        if other.encrypted != invitation.encrypted:
            continue
        try:
            present_invitation(replace(other, address=invitation.address), identity.public, timeout_s)
        except JoinRefused:
            store.discard(other)
            continue
        store.record_admitted(path, other)
        return
    if store.has_other_admitted_keys(path):
        raise JoinRefused(
            INVITATION,
            f"{refused.reason}; the admitted keys of this machine are in use by its other workers",
            remedy="ask the run's owner for one more invitation; `gridtrain worker show` lists these workers",
        )
    raise refused


def revoked_error(invitation: Invitation, identity: Identity) -> JoinRefused:
    """For a key that was admitted before, and no longer is."""
    digits = identity.public.hex()[:12]
    return JoinRefused(
        PUT_OUT,
        f'this worker, key {digits}, was removed from the run "{invitation.run}", and this invitation does '
        "not admit it again",
        remedy=f"ask the run's owner for a new invitation (after a ban: and for gridtrain unban {digits})",
    )


def is_still_admitted(entry: Enrollment, timeout_s: float) -> bool:
    """Whether the coordinator still knows this worker's key; True also where nobody answers."""
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
    """None: the coordinator does not admit this identity.  Raises as `CoordinatorClient.ask`."""
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
    """The status of the run.  Raises as `CoordinatorClient.ask`."""
    with CoordinatorClient(
        invitation.address, invitation.coordinator, identity, encrypted=invitation.encrypted
    ) as client:
        return client.status(timeout_s)


def present_invitation(invitation: Invitation, peer: PeerId, timeout_s: float) -> None:
    """Present the invitation, so that the coordinator admits `peer` from now on.

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
