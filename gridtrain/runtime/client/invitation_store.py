"""What this machine remembers of its invitations to one run, so that its workers do not cross.

Decides which key came in with which invitation, and which invitations are not spent.  Asks nobody: whether
an invitation is (still) valid, and a key let in, the coordinator says.

    worker-0.key   let in with invitation A      its worker is stopped, then both are started:
    one with B     takes worker-0.key, free and known: B is not spent, and noted down here
    one with A     gets a new key; A is used up: B lets it in, whoever was meant by which

The file holds invitations (0600, like the keys beside it, which are worth the same) only from when one was
not needed until one is, or is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gridtrain.core.group.invitation import Invitation, invitation_digest, parse
from gridtrain.errors import ConfigError
from gridtrain.network.transport.identity import Identity, make_private_folder

STORE_FILE, LOCK_FILE = "invitations.json", "invitations.lock"
MAX_UNUSED = 16
MAX_BYTES = 1 << 18


@dataclass(slots=True)
class _StoredInvitations:
    """`used`: name of a key file -> digest of the invitation that it came in with ("": not known which)."""

    used_by_key: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)


class InvitationStore:
    """See the module's text.  `folder`: where the keys of the run lie.

    Each method may raise `ConfigError`: the folder cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """No other process of this machine chooses a key meanwhile."""
        try:
            make_private_folder(self._folder)
            lock = open(self._folder / LOCK_FILE, "w")  # noqa: SIM115  closed below, outside of this try
        except OSError as error:
            raise ConfigError(
                f"the folder of this machine's keys, {self._folder}, cannot be written to: {error.strerror}",
                remedy="make room, or check who may write there, or set XDG_STATE_HOME to another folder",
            ) from None
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def was_admitted(self, key: Path) -> bool:
        """Some time before, whatever holds now."""
        return key.stem in self._read().used_by_key

    def has_other_admitted_keys(self, key: Path) -> bool:
        """That were let in some time before."""
        return any(name != key.stem for name in self._read().used_by_key)

    def record_attempt(self, key: Path, invitation: Invitation) -> None:
        """A worker takes `key` and has `invitation`.  To be called while `locked`, which makes the note of
        an invitation that is left over visible before anybody else can miss it."""
        page, name = self._read(), _digest(invitation)
        if page.used_by_key.get(key.stem, name) != name and name not in page.used_by_key.values():
            text = invitation.text()
            page.unused = [*(one for one in page.unused if one != text), text][-MAX_UNUSED:]
            self._write(page)

    def record_known(self, key: Path) -> None:
        """The coordinator let `key` in, without an invitation."""
        with self.lock():
            page = self._read()
            if key.stem not in page.used_by_key:
                page.used_by_key[key.stem] = ""
                self._write(page)

    def record_admitted(self, key: Path, invitation: Invitation) -> None:
        """A use of `invitation` was spent on `key`."""
        with self.lock():
            page = self._read()
            page.used_by_key[key.stem] = _digest(invitation)
            page.unused = [one for one in page.unused if one != invitation.text()]
            self._write(page)

    def unused(self, besides: Invitation) -> list[Invitation]:
        """Those that were not needed, the first one first."""
        found = []
        for text in self._read().unused:
            with contextlib.suppress(ConfigError):
                found.append(parse(text))
        return [one for one in found if one.token != besides.token]

    def discard(self, invitation: Invitation) -> None:
        """The coordinator does not accept it."""
        with self.lock():
            page = self._read()
            page.unused = [one for one in page.unused if one != invitation.text()]
            self._write(page)

    def _read(self) -> _StoredInvitations:
        """A file that says nothing sensible is a memory that is gone: the coordinator is asked anyway."""
        try:
            with open(self._folder / STORE_FILE, "rb") as file:
                body: Any = json.loads(file.read(MAX_BYTES))
            used, spare = dict(body["used"]), list(body["spare"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return _StoredInvitations()
        return _StoredInvitations(
            {str(key): str(name) for key, name in used.items()},
            [one for one in spare if isinstance(one, str)][-MAX_UNUSED:],
        )

    def _write(self, page: _StoredInvitations) -> None:
        partial = self._folder / f".{STORE_FILE}.{secrets.token_hex(4)}"
        try:
            handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"used": page.used_by_key, "spare": page.unused}, file, indent=1)
            os.replace(partial, self._folder / STORE_FILE)
        except OSError as error:
            raise ConfigError(
                f"{self._folder / STORE_FILE} cannot be written: {error.strerror}",
                remedy="make room there, or set XDG_STATE_HOME to another folder",
            ) from None
        finally:
            partial.unlink(missing_ok=True)


def _digest(invitation: Invitation) -> str:
    return invitation_digest(Identity.from_secret(invitation.token).public)
