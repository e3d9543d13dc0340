"""A peer's identity: its Curve25519 key pair, the file that stores it, and how a process chooses a file.

    Identity.generate()                     returns a new identity, in memory
    Identity.load_or_create(path)           returns the identity in the file, creating the file if necessary
    claim_identity(folder, fresh=True)      yields the first identity in the folder that is not in use

The secret key is stored in a file of mode 0600, never in the environment, argv or a log.  The public key, 32
bytes, is the peer's only name (`PeerId`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from gridtrain.core.messages import PeerId
from gridtrain.errors import ConfigError

OLDEST_LIBZMQ = (4, 3, 5)
"""Older versions have known vulnerabilities in CURVE (CVE-2020-15166, CVE-2021-20236 and later CVEs)."""

KEY_BYTES = 32
MAX_IDENTITIES = 256
_HEADER = "gridtrain secret key, keep it private: "


@dataclass(frozen=True, slots=True)
class Identity:
    """A key pair; each key is 32 bytes long.  `repr` omits the secret key."""

    public: PeerId
    secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> Identity:
        return cls.from_secret(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def from_secret(cls, secret: bytes) -> Identity:
        """Return the identity with this secret key.  Raises `ConfigError` unless it is 32 bytes long."""
        if len(secret) != KEY_BYTES:
            raise ConfigError(f"a secret key must be {KEY_BYTES} bytes long; this one has {len(secret)}")
        return cls(z85.decode(zmq.curve_public(z85.encode(secret))), secret)

    @classmethod
    def read(cls, path: Path, lost: str = "ask for a new invitation") -> Identity:
        """Read the identity from a file.

        Args:
            lost: what the user can do if the key is lost.

        Raises:
            ConfigError: the file is missing or damaged, or its mode gives other users access.
        """
        try:
            mode, text = stat.S_IMODE(path.stat().st_mode), path.read_text("ascii")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"the key file {path} cannot be read: {reason}",
                remedy=f"check that the file exists and belongs to you; if the key is lost, {lost}",
            ) from None
        if mode & 0o077:
            raise ConfigError(
                f"the key file {path} has mode {mode:04o}, so others may read it",
                remedy=f"chmod 600 {path}; if someone else may have read a worker's key, delete the file and "
                "ask for a new invitation; if it is the coordinator's key, invite all workers again",
            )
        try:
            if not text.startswith(_HEADER):
                raise ValueError("no header")
            return cls.from_secret(bytes.fromhex(text.removeprefix(_HEADER).strip()))
        except (ValueError, ConfigError):
            raise ConfigError(
                f"the key file {path} does not contain a key",
                remedy="restore the file from a backup, or delete a worker's file and ask for a new "
                "invitation; the coordinator's next start creates a deleted operator.key, but without "
                "coordinator.key, workers do not recognize the run",
            ) from None

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Return the identity in the file; if there is no file, create a new identity and the file.

        Raises:
            ConfigError: the file cannot be read or written.
        """
        if not path.exists():
            with contextlib.suppress(FileExistsError):  # another process has created it
                cls.generate().write(path)
        return cls.read(path)

    def write(self, path: Path) -> None:
        """Write the secret key atomically to a new file of mode 0600.

        Raises `FileExistsError` if the file exists, `ConfigError` if it cannot be written.
        """
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            make_private_folder(path.parent)
            handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w", encoding="ascii") as file:
                file.write(f"{_HEADER}{self.secret.hex()}\n")
                file.flush()
                os.fsync(file.fileno())
            os.link(partial, path)
        except FileExistsError:
            raise
        except OSError as error:
            raise ConfigError(
                f"the key file {path} cannot be written: {error.strerror}",
                remedy="make the folder writable, or set XDG_STATE_HOME to another folder",
            ) from None
        finally:
            partial.unlink(missing_ok=True)


def make_private_folder(folder: Path) -> None:
    """Create the folder and its parents, unless they exist, with access only for their owner."""
    for parent in reversed(folder.parents):
        if not parent.exists():
            parent.mkdir(exist_ok=True, mode=0o700)
    folder.mkdir(exist_ok=True, mode=0o700)


@contextlib.contextmanager
def claim_identity(
    folder: Path, *, fresh: bool, first: Collection[str] = ()
) -> Iterator[tuple[Identity, Path] | None]:
    """Lock the first unlocked identity in the folder; yield the identity and its file.

    A restarted worker is therefore the same peer as before, and two workers on one machine are different
    peers.  A second call in the same process yields the next identity.

    Args:
        folder: the folder of the key files.
        fresh: whether to create an identity if no existing identity is free; if False, None is yielded
            instead.
        first: the names, without suffix, of key files that are tried before all others.

    Raises:
        ConfigError: `fresh` is True and all `MAX_IDENTITIES` identities are in use, or a key file cannot be
            read or written.
    """
    make_private_folder(folder)
    for slot in sorted(range(MAX_IDENTITIES), key=lambda slot: f"worker-{slot}" not in first):
        path = folder / f"worker-{slot}.key"
        if not fresh and not path.exists():
            continue
        with open(folder / f"worker-{slot}.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            yield Identity.load_or_create(path), path
            return
    if not fresh:
        yield None
        return
    raise ConfigError(
        f"all {MAX_IDENTITIES} identities in {folder} are in use by workers on this machine",
        remedy="stop some of these workers",
    )


def require_curve() -> None:
    """Raise `ConfigError` if libzmq cannot encrypt or has known vulnerabilities."""
    version = zmq.zmq_version_info()
    if version < OLDEST_LIBZMQ or not zmq.has("curve"):
        wanted = ".".join(map(str, OLDEST_LIBZMQ))
        raise ConfigError(
            f"libzmq {zmq.zmq_version()} {'is too old' if zmq.has('curve') else 'was built without CURVE'}; "
            f"encryption needs libzmq {wanted} or newer, built with CURVE",
            remedy="install pyzmq from its wheel: pip install --force-reinstall --only-binary :all: pyzmq",
        )
