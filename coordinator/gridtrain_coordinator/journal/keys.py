"""The secret keys of the coordinator and of its operator, in files beside the journal.

    journal.sqlite   the coordinator's PUBLIC key, written on the first start
    coordinator.key  its secret key                                    0600
    operator.key     authorizes commands: invite, kick, ban            0600

A journal belongs to one key.  Workers recognize the coordinator by this key and reject all others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gridtrain.core.messages import PeerId
from gridtrain.errors import JournalError
from gridtrain.network.transport.identity import Identity
from gridtrain.runtime.client.endpoint_file import COORDINATOR_KEY, OPERATOR_KEY


def coordinator_identity(journal: Path, known: PeerId | None, adopt: Callable[[PeerId], None]) -> Identity:
    """Return the coordinator's key pair; create it on the first start with this journal.

    Args:
        journal: the path of the journal.
        known: the public key in the journal; None if the journal has no key yet.
        adopt: a function that writes the public key to a journal without a key.

    Raises:
        JournalError: the journal belongs to another key, or the key file is missing.
        ConfigError: the key file cannot be read or written, or other users may read it.
    """
    path = journal.absolute().parent / COORDINATOR_KEY
    if known is None:
        identity = Identity.load_or_create(path)
        adopt(identity.public)
        return identity
    problem = "does not exist"
    if path.exists():
        identity = Identity.read(path)
        if identity.public == known:
            return identity
        problem = f"contains the key {identity.public.hex()[:12]}, which no worker would recognize"
    raise JournalError(
        f"the journal {journal} belongs to the key {known.hex()[:12]}, but {path} {problem}",
        remedy=f"restore {path} from a backup, or choose another folder with --state to start a new run",
    )


def operator_identity(journal: Path) -> Identity:
    """Return the operator's key pair; anyone who can read its file can send the operator's commands.

    The file is created if it is missing, so deleting it replaces the key on the next start.  Raises
    `ConfigError` if the file cannot be used.
    """
    return Identity.load_or_create(journal.absolute().parent / OPERATOR_KEY)
