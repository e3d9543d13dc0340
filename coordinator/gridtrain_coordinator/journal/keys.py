"""The coordinator's key and its operator's: files beside the journal, which holds neither.

Decides that a journal and a key belong together: workers know the coordinator by its key, so with another
one nobody would come back.  Never touches a socket.

    journal.sqlite   the coordinator's PUBLIC key, written down at the first start
    coordinator.key  its secret one                          0600
    operator.key     what gives orders: invite, kick, ban    0600
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gridtrain.core.messages import PeerId
from gridtrain.errors import JournalError
from gridtrain.network.transport.identity import Identity
from gridtrain.runtime.client.endpoint_file import COORDINATOR_KEY, OPERATOR_KEY


def coordinator_identity(journal: Path, known: PeerId | None, adopt: Callable[[PeerId], None]) -> Identity:
    """The coordinator's key pair, made if this is the journal's first start.

    Args:
        known: the public key that the journal holds; None: none yet, and `adopt` writes it down.

    Raises:
        JournalError: the journal is that of another key, or its key file is gone.
        ConfigError: the file cannot be read or written, or others may read it.
    """
    path = journal.absolute().parent / COORDINATOR_KEY
    if known is not None and not path.exists():
        raise JournalError(
            f"the journal {journal} belongs to the key {known.hex()[:12]}, and there is no {path}",
            remedy=f"restore {path} from a backup; or begin a new run: name another folder with --state",
        )
    identity = Identity.load_or_create(path)
    if known is None:
        adopt(identity.public)
    elif identity.public != known:
        raise JournalError(
            f"the journal {journal} belongs to the key {known.hex()[:12]}, "
            f"and {path} holds {identity.public.hex()[:12]}: no worker would recognise this coordinator",
            remedy=f"restore {path} from a backup; or begin a new run: name another folder with --state",
        )
    return identity


def operator_identity(journal: Path) -> Identity:
    """Whoever can read this file gives orders.  Made if there is none; deleting it makes another one at
    the next start, and the old one is worth nothing.  Raises `ConfigError`."""
    return Identity.load_or_create(journal.absolute().parent / OPERATOR_KEY)
