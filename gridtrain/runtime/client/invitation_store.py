"""`invitations.json`: records the invitation that each key of this machine used, and the unused invitations.

Only the coordinator can decide whether an invitation is still valid and whether a key is admitted.  Example:

    worker-0.key was admitted with invitation A.  Its worker is stopped, and two workers are started:
    the first, started with B    takes worker-0.key, which is free and admitted; B is not needed and is stored
    the second, started with A   gets a new key; A is used up, so the new key is admitted with B

The file (mode 0600, like the keys in the same folder) contains an invitation only until the invitation is
used or refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gridtrain.core.group.invitation import Invitation, invitation_digest, parse
from gridtrain.errors import ConfigError, disk_errors
from gridtrain.network.transport.identity import Identity, make_private_folder
from gridtrain.runtime.client.private_file import replace_private_json

STORE_FILE, LOCK_FILE = "invitations.json", "invitations.lock"
MAX_UNUSED = 16
MAX_BYTES = 1 << 18


@dataclass(slots=True)
class _StoredInvitations:
    """The content of the file.

    Attributes:
        used_by_key: maps the name of a key file to the digest of the invitation with which the key was
            admitted; "" if the invitation is unknown.
        unused: the unused invitations as text, oldest first.
    """

    used_by_key: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)


class InvitationStore:
    """Records which of this machine's keys were admitted, and which invitations are unused.

    The record is a file next to the keys.  A method raises `ConfigError` if it cannot write this file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Return a context manager that keeps other processes on this machine from choosing a key.

        Raises `ConfigError` if the keys' folder cannot be written to.
        """
        with disk_errors(
            f"the folder of this machine's keys, {self._folder}, cannot be written to",
            "free disk space, check the folder's permissions, or set XDG_STATE_HOME to another folder",
        ):
            make_private_folder(self._folder)
            lock = open(self._folder / LOCK_FILE, "w")  # noqa: SIM115  closed below, outside of this block
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def was_admitted(self, key: Path) -> bool:
        """Return whether the key has ever been admitted; it may have been removed from the run since."""
        return key.stem in self._read().used_by_key

    def keys_of(self, invitation: Invitation) -> frozenset[str]:
        """Return the names of the keys that were last admitted with `invitation`."""
        name = _digest(invitation)
        return frozenset(key for key, used in self._read().used_by_key.items() if used == name)

    def has_other_admitted_keys(self, key: Path) -> bool:
        """Return whether any other key has ever been admitted."""
        return any(name != key.stem for name in self._read().used_by_key)

    def record_attempt(self, key: Path, invitation: Invitation) -> None:
        """Store `invitation` as unused if the worker started with it can join using `key` alone.

        This is assumed if `key` was admitted with another invitation, and no key with `invitation`.
        The caller holds `lock`, so that other processes see the unused invitation before they need an
        invitation.
        """
        content, name = self._read(), _digest(invitation)
        if content.used_by_key.get(key.stem, name) != name and name not in content.used_by_key.values():
            text = invitation.text()
            content.unused = [*(one for one in content.unused if one != text), text][-MAX_UNUSED:]
            self._write(content)

    def record_known(self, key: Path) -> None:
        """Record that the coordinator admitted `key` without an invitation."""
        with self.lock():
            content = self._read()
            if key.stem not in content.used_by_key:
                content.used_by_key[key.stem] = ""
                self._write(content)

    def record_admitted(self, key: Path, invitation: Invitation) -> None:
        """Record that `key` was admitted with `invitation`."""
        with self.lock():
            content = self._read()
            content.used_by_key[key.stem] = _digest(invitation)
            content.unused = [one for one in content.unused if one != invitation.text()]
            self._write(content)

    def unused(self, besides: Invitation) -> list[Invitation]:
        """Return the unused invitations, oldest first, except `besides`."""
        found = []
        for text in self._read().unused:
            with contextlib.suppress(ConfigError):
                found.append(parse(text))
        return [one for one in found if one.token != besides.token]

    def discard(self, invitation: Invitation) -> None:
        """Remove an invitation that the coordinator has refused."""
        with self.lock():
            content = self._read()
            content.unused = [one for one in content.unused if one != invitation.text()]
            self._write(content)

    def _read(self) -> _StoredInvitations:
        """Read the file.

        An invalid file is treated as empty, because only the coordinator can say which invitations and keys
        are valid.
        """
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

    def _write(self, content: _StoredInvitations) -> None:
        body = {"used": content.used_by_key, "spare": content.unused}
        remedy = "free disk space, or set XDG_STATE_HOME to another folder"
        replace_private_json(self._folder / STORE_FILE, body, remedy)


def _digest(invitation: Invitation) -> str:
    return invitation_digest(Identity.from_secret(invitation.token).public)
