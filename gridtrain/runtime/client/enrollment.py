"""Enrols a worker with an invitation and one of this machine's keys, and explains refusals.

This module chooses which of this machine's identities the worker uses, and presents the invitation if needed.

    enroll(invitation)  request the status with each free identity of this run, first with the identities
                        that this invitation has admitted
                        an identity is known      --> use this identity
                        one of these was removed  --> use no identity of another invitation
                        none is known             --> send Enrol with the invitation's key, for an identity
                                                      that was removed from the run, or else for a new one
                                                      Enrolled: use it   Refused, denied: report why

If a worker on this machine was removed from the run, no new key is created for the same invitation.

The invitation's token is the secret key of a key pair that only permits a request for enrolment.  An
invitation that was not needed is stored (`invitation_store`) in the same folder as the worker's secret key,
in a file with mode 0600.  Neither the token nor the secret key is ever sent.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gridtrain.core.group.invitation import Invitation
from gridtrain.core.messages import Enrol, PeerId
from gridtrain.errors import ConfigError, CoordinatorUnreachable, GridtrainError, JoinRefused
from gridtrain.network.transport.identity import Identity, claim_identity
from gridtrain.runtime.client.coordinator_client import DENIED, CoordinatorClient
from gridtrain.runtime.client.invitation_store import InvitationStore
from gridtrain.runtime.client.worker_defaults import identity_folder

log = logging.getLogger("gridtrain")

UNKNOWN_INVITATION = (
    "the coordinator does not know this invitation, because it expired long ago or was made for another run"
)

INVITATION, PUT_OUT = "invitation", "put-out"
"""Refusal codes: the first for an invitation that is not valid, the second for a key that was removed from
the run."""

PLAIN_ANSWER_TIMEOUT_S = 1.0
"""Time limit for a reply from an unencrypted coordinator.  There is no handshake that it could refuse, so a
client with an unknown key receives no answer."""

SILENT_S = 1.5
"""Time after which a worker reports that it is waiting for the coordinator."""


@dataclass(frozen=True, slots=True)
class Enrollment:
    """The data that a worker needs to connect to the coordinator.  None of the data is secret.

    Attributes:
        coordinator: the coordinator's address.
        coordinator_key: the coordinator's public key.
        run: the run's name.
        encrypted: whether connections are encrypted.
        identity: the path of the file with the worker's key pair.
        status: the status of the run at the time of enrolment.
    """

    coordinator: str
    coordinator_key: PeerId
    run: str
    encrypted: bool
    identity: Path
    status: dict[str, Any]

    def join_options(self) -> dict[str, str]:
        """Return the data as values for the fields of `JoinConfig`.  None of the values is secret."""
        return {
            "coordinator": self.coordinator,
            "coordinator_key": self.coordinator_key.hex(),
            "run": self.run,
            "identity": str(self.identity),
            "unencrypted": "" if self.encrypted else "yes",
        }

    def connect(self) -> CoordinatorClient:
        """Connect to the coordinator with the worker's key.

        Raises `ConfigError` if the key file cannot be read or the address is invalid.
        """
        key = Identity.read(self.identity)
        return CoordinatorClient(self.coordinator, self.coordinator_key, key, encrypted=self.encrypted)


@contextlib.contextmanager
def enroll(
    invitation: Invitation,
    timeout_s: float,
    *,
    unencrypted: bool = False,
    tell: Callable[[str], None] = log.warning,
) -> Iterator[Enrollment]:
    """Return a context manager that holds an identity that the coordinator admits.

    The identity is one of this machine's identities.  No other process uses it until the context ends.

    Args:
        invitation: the invitation to the run.
        timeout_s: the time limit of each request to the coordinator.
        unencrypted: whether the run must be unencrypted; if False, the run must be encrypted.
        tell: called, possibly in another thread, with a message that explains a long wait.

    Raises:
        CoordinatorUnreachable: the coordinator did not answer in time.
        JoinRefused: the invitation is not valid, this identity was removed or banned, or the coordinator
            refuses the request for another reason.
        RemoteProtocolError: the program at the address is not a coordinator.
        ConfigError: the run is encrypted although it must not be, or vice versa; or the key files cannot be
            used.
    """
    if invitation.encrypted == unencrypted:
        raise ConfigError(
            f'the run "{invitation.run}" is {"" if invitation.encrypted else "not "}encrypted, '
            f"but this worker was {'' if unencrypted else 'not '}started with --unencrypted",
            remedy="omit --unencrypted"
            if invitation.encrypted
            else "ask its owner for an encrypted run; use --unencrypted only for a benchmark",
        )
    folder = identity_folder(invitation.run, invitation.coordinator)
    waits = (
        f"waiting up to {timeout_s:g} s for the coordinator at {invitation.address}, which has not answered"
    )
    notice = threading.Timer(SILENT_S, tell, [waits])
    notice.daemon = True
    with contextlib.ExitStack() as admission:
        notice.start()
        try:
            path, status = admission.enter_context(_admit(invitation, folder, timeout_s))
        finally:
            notice.cancel()
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
    """An identity that no other process uses until `lock` is closed.

    Attributes:
        is_new: whether the identity has just been created.
    """

    identity: Identity
    path: Path
    lock: contextlib.ExitStack
    is_new: bool

    @contextlib.contextmanager
    def discarded_after(self, error: type[BaseException]) -> Iterator[None]:
        """Return a context manager that removes a new key if `error` is raised.

        Such an error means that the coordinator has not admitted the key.
        """
        try:
            yield
        except error:
            if self.is_new:
                self.path.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _admit(invitation: Invitation, folder: Path, timeout_s: float) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Return a context manager that holds an identity which the coordinator admits.

    It yields the path of the identity's file and the status of the run.  Raises the same errors as `enroll`.
    """
    store = InvitationStore(folder)
    with contextlib.ExitStack() as others:  # prevents other processes from trying the same identities
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
    """Lock and return an identity that the coordinator admits; present the invitation if needed.

    Also returns the run's status if the identity was admitted without the invitation, and None otherwise.
    """
    removed: list[_ClaimedIdentity] = []
    own = store.keys_of(invitation)
    while (one := _claim_identity(store, invitation, folder, fresh=not removed, first=own)) is not None:
        lock = others.enter_context(one.lock)
        if removed and removed[0].path.stem in own and one.path.stem not in own:
            break  # this worker was removed, and must not take the identity of another worker
        with one.discarded_after(BaseException):
            status = _status_if_admitted(invitation, one.identity, timeout_s)
        if status is not None:
            store.record_known(one.path)
            return replace(one, lock=lock.pop_all()), status
        if store.was_admitted(one.path):
            removed.append(one)
        elif not removed:
            with one.discarded_after(JoinRefused):
                _present(store, invitation, one, timeout_s)
            return replace(one, lock=lock.pop_all()), None
    one = removed[0]
    try:
        _present(store, invitation, one, timeout_s)
    except JoinRefused as refusal:
        raise (revoked_error(invitation, one.identity) if refusal.code == INVITATION else refusal) from None
    return replace(one, lock=one.lock.pop_all()), None


def _claim_identity(
    store: InvitationStore, invitation: Invitation, folder: Path, *, fresh: bool, first: Collection[str]
) -> _ClaimedIdentity | None:
    """Lock and return an identity that no process uses; if there is none and `fresh` is True, create one.

    The keys named in `first` are tried before all other keys.

    Returns None if there is no free identity and `fresh` is False.
    """
    with store.lock(), contextlib.ExitStack() as lock:
        before = {*folder.glob("*.key")}
        claimed = lock.enter_context(claim_identity(folder, fresh=fresh, first=first))
        if claimed is None:
            return None
        store.record_attempt(claimed[1], invitation)
        return _ClaimedIdentity(*claimed, lock.pop_all(), is_new=claimed[1] not in before)


def _present(store: InvitationStore, invitation: Invitation, one: _ClaimedIdentity, timeout_s: float) -> None:
    """Enrol an identity with this invitation, or with an unused invitation of another worker.

    An identity that this invitation has already admitted is enrolled with no other invitation.

    Raises `JoinRefused` if no invitation is accepted, and the same errors as `present_invitation`.
    """
    public, path = one.identity.public, one.path
    try:
        present_invitation(invitation, public, timeout_s)
        store.record_admitted(path, invitation)
        return
    except JoinRefused as refusal:
        if refusal.code != INVITATION or path.stem in store.keys_of(invitation):
            raise
        refused = refusal
    for other in store.unused(invitation):
        if other.encrypted != invitation.encrypted:
            continue
        try:
            present_invitation(replace(other, address=invitation.address), public, timeout_s)
        except JoinRefused as refusal:
            if refusal.code == INVITATION:  # otherwise `other` may admit another identity
                store.discard(other)
            continue
        store.record_admitted(path, other)
        return
    if store.has_other_admitted_keys(path):
        raise JoinRefused(
            INVITATION,
            f"{refused.reason}; the admitted keys on this machine are in use by other workers",
            remedy="ask the run's owner for another invitation; `gridtrain worker show` lists the workers",
        )
    raise refused


def revoked_error(invitation: Invitation, identity: Identity) -> JoinRefused:
    """Return the error for a key that was admitted before but is no longer admitted."""
    digits = identity.public.hex()[:12]
    return JoinRefused(
        PUT_OUT,
        f'this worker, key {digits}, was removed from the run "{invitation.run}" (kicked or banned), and '
        "this invitation does not admit it again",
        remedy="ask the run's owner for a new invitation; if the worker was banned, also ask the owner to "
        f"run gridtrain unban {digits}",
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """The coordinator's answer to a request for the run's status.

    Attributes:
        is_finished: whether the run has finished; None if the coordinator did not say.
        refusal: the code of the refusal, `DENIED` if this worker's key is not admitted; "" if there is none.
        is_away: whether there was no answer.
    """

    is_finished: bool | None = None
    refusal: str = ""
    is_away: bool = False


def ask_coordinator(entry: Enrollment, timeout_s: float) -> Answer:
    """Request the run's status once, without raising an error."""
    try:
        with entry.connect() as client:
            return Answer(is_finished=bool(client.status(timeout_s).get("finished")))
    except JoinRefused as refusal:
        return Answer(refusal=refusal.code)
    except CoordinatorUnreachable:
        return Answer(is_away=True)
    except GridtrainError:
        return Answer()


def _status_if_admitted(
    invitation: Invitation, identity: Identity, timeout_s: float
) -> dict[str, Any] | None:
    """Return the status of the run, or None if the coordinator does not admit this identity.

    Also returns None if an unencrypted coordinator does not answer.  Otherwise, raises the same errors
    as `CoordinatorClient.ask`.
    """
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
    """Request and return the status of the run.  Raises the same errors as `CoordinatorClient.ask`."""
    with CoordinatorClient(
        invitation.address, invitation.coordinator, identity, encrypted=invitation.encrypted
    ) as client:
        return client.status(timeout_s)


def present_invitation(invitation: Invitation, peer: PeerId, timeout_s: float) -> None:
    """Present the invitation to the coordinator, so that it admits the key `peer` from now on.

    Raises `JoinRefused` if the coordinator refuses the invitation or the key, and the other errors of
    `CoordinatorClient.ask`.
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
            INVITATION, UNKNOWN_INVITATION, remedy="ask the run's owner for a new one"
        ) from None
