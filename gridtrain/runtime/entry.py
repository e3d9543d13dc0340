"""From an invitation to a worker that the coordinator knows.

Decides which of this machine's identities a worker uses, and when the invitation has to be shown.
Joins nothing.

    enter(invitation)   a free identity of this run --status?--> known: go on
                                                    --denied---> Enrol, over the invitation's own key
                                                                 Enrolled: go on    Refused, denied: stop

The invitation's token is the secret half of a key pair that only lets its holder ask for enrolment.
It never leaves this process; neither does the worker's own secret key, which lies in a 0600 file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gridtrain.errors import ConfigError, CoordinatorUnreachable, JoinRefused
from gridtrain.protocol.invitation import Invitation
from gridtrain.protocol.messages import Enrol, PeerId
from gridtrain.runtime.client import DENIED, CoordinatorClient
from gridtrain.runtime.naming import state_directory
from gridtrain.transport.curve import Identity, claim

NOT_VALID = "this invitation is not valid: it was used up, has expired, was withdrawn, or never was"

CLEAR_ANSWER_S = 1.0
"""In the clear there is no handshake that could be refused: who is not known hears nothing."""


@dataclass(frozen=True, slots=True)
class Entry:
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

    def variables(self) -> dict[str, str]:
        """For `JoinConfig`; none of it is secret."""
        return {
            "coordinator": self.coordinator,
            "coordinator_key": self.coordinator_key.hex(),
            "run": self.run,
            "identity": str(self.identity),
            "unencrypted": "" if self.encrypted else "yes",
        }


@contextlib.contextmanager
def enter(invitation: Invitation, timeout_s: float, *, unencrypted: bool = False) -> Iterator[Entry]:
    """Hold an identity of this machine that the coordinator lets in, until the end.

    Args:
        timeout_s: for each question to the coordinator.
        unencrypted: an invitation to a run that talks in the clear is accepted, and only such a one.

    Raises:
        CoordinatorUnreachable: nobody answered in time.
        JoinRefused: the invitation is not valid (any more), or this identity is banned.
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
    with claim(folder) as (identity, path):
        status = _status_if_known(invitation, identity, timeout_s)
        if status is None:
            enrol(invitation, identity.public, timeout_s)
            status = ask_status(invitation, identity, timeout_s)
        yield Entry(
            coordinator=invitation.address,
            coordinator_key=invitation.coordinator,
            run=invitation.run,
            encrypted=invitation.encrypted,
            identity=path,
            status=status,
        )


def _status_if_known(invitation: Invitation, identity: Identity, timeout_s: float) -> dict[str, Any] | None:
    """None: the coordinator does not let this identity in (yet).  Raises as `CoordinatorClient.ask`."""
    if not invitation.encrypted:
        timeout_s = min(timeout_s, CLEAR_ANSWER_S)
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


def enrol(invitation: Invitation, peer: PeerId, timeout_s: float) -> None:
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
        raise JoinRefused("invitation", NOT_VALID, remedy="ask the run's owner for a new one") from None
