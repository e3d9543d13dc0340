"""The keys of the coordinator and of its operator, in files beside the journal.

    journal.sqlite   the coordinator's PUBLIC key, written at the first start
    coordinator.key  its secret key                                    0600
    operator.key     authorizes orders: invite, kick, ban              0600

A journal belongs to one key: workers know the coordinator by it, so with another one none would come back.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gridtrain.core.messages import PeerId
from gridtrain.errors import JournalError
from gridtrain.network.transport.identity import Identity
from gridtrain.runtime.client.endpoint_file import COORDINATOR_KEY, OPERATOR_KEY


def coordinator_identity(journal: Path, known: PeerId | None, adopt: Callable[[PeerId], None]) -> Identity:
    """The coordinator's key pair, made at the journal's first start.

    Args:
        known: the public key in the journal; None: there is none yet, and `adopt` writes it.

    Raises:
        JournalError: the journal belongs to another key, or the key file is missing.
        ConfigError: the file cannot be read or written, or others may read it.
    """
    path = journal.absolute().parent / COORDINATOR_KEY
    if known is not None and not path.exists():
        raise JournalError(
            f"the journal {journal} belongs to the key {known.hex()[:12]}, but there is no {path}",
            remedy=f"restore {path} from a backup; or start a new run: name another folder with --state",
        )
    identity = Identity.load_or_create(path)
    if known is None:
        adopt(identity.public)
    elif identity.public != known:
        raise JournalError(
            f"the journal {journal} belongs to the key {known.hex()[:12]}, "
            f"and {path} holds {identity.public.hex()[:12]}: no worker would recognize this coordinator",
            remedy=f"restore {path} from a backup; or start a new run: name another folder with --state",
        )
    return identity


def operator_identity(journal: Path) -> Identity:
    """The key of the operator: whoever can read this file can give orders.

    Made if it is missing, so deleting it replaces it at the next start.  Raises `ConfigError`.
    """
    return Identity.load_or_create(journal.absolute().parent / OPERATOR_KEY)
