"""A peer's identity: a Curve25519 key pair, and the file in which it is stored.

    Identity.generate()                     a new one, in memory
    Identity.load_or_create(path)           the one in the file, created if there is none
    claim_identity(folder)                  the first in the folder that no other process uses

The secret key is stored in a file of mode 0600, never in the environment, argv or a log.  The public key, 32
bytes, is the peer's only name (`PeerId`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from gridtrain.core.messages import PeerId
from gridtrain.errors import ConfigError

OLDEST_LIBZMQ = (4, 3, 5)
"""Older versions have known vulnerabilities in CURVE (CVE-2020-15166, CVE-2021-20236 and later ones)."""

KEY_BYTES = 32
MAX_IDENTITIES = 256
_HEADER = "gridtrain secret key, keep it private: "


@dataclass(frozen=True, slots=True)
class Identity:
    """A key pair, 32 bytes each.  `repr` omits the secret key."""

    public: PeerId
    secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> Identity:
        return cls.from_secret(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def from_secret(cls, secret: bytes) -> Identity:
        """Raises `ConfigError` unless it is 32 bytes."""
        if len(secret) != KEY_BYTES:
            raise ConfigError(f"a secret key has {KEY_BYTES} bytes, not {len(secret)}")
        return cls(z85.decode(zmq.curve_public(z85.encode(secret))), secret)

    @classmethod
    def read(cls, path: Path) -> Identity:
        """Raises `ConfigError` if there is no such file, it is damaged, or others may read it."""
        try:
            mode, text = stat.S_IMODE(path.stat().st_mode), path.read_text("ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"the key file {path} cannot be read: {error}",
                remedy="check that it exists and belongs to you; a lost key needs a new invitation",
            ) from None
        if mode & 0o077:
            raise ConfigError(
                f"the key file {path} has mode {mode:04o}, so others may read it",
                remedy=f"chmod 600 {path}; if others may have read it: delete a worker's file and ask for a "
                "new invitation; if it is the coordinator's, all workers must be invited again",
            )
        try:
            if not text.startswith(_HEADER):
                raise ValueError("no header")
            return cls.from_secret(bytes.fromhex(text.removeprefix(_HEADER).strip()))
        except (ValueError, ConfigError):
            raise ConfigError(
                f"the key file {path} does not contain a key",
                remedy="restore it from a backup; a worker's file can be deleted and a new invitation asked "
                "for, but without the coordinator's key no worker recognises the run",
            ) from None

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """The identity in the file, or a new one that is written to it.  Raises `ConfigError`."""
        if not path.exists():
            with contextlib.suppress(FileExistsError):  # another process was faster
                cls.generate().write(path)
        return cls.read(path)

    def write(self, path: Path) -> None:
        """Write it atomically to a new file of mode 0600.  Raises `FileExistsError`, `ConfigError`."""
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
                remedy="make the folder writable, or set XDG_STATE_HOME to another one",
            ) from None
        finally:
            partial.unlink(missing_ok=True)


def make_private_folder(folder: Path) -> None:
    """Create the folder, accessible to its owner alone."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)


@contextlib.contextmanager
def claim_identity(folder: Path) -> Iterator[tuple[Identity, Path]]:
    """Lock the first identity of the folder that is not locked; it is created if there is none.

    So a restarted worker is the same peer as before, and two workers of one machine are different ones.  A
    second call in the same process gets the next identity.  Raises `ConfigError`.
    """
    with claim_existing_identity(folder, fresh=True) as claimed:
        assert claimed is not None
        yield claimed


@contextlib.contextmanager
def claim_existing_identity(folder: Path, *, fresh: bool = False) -> Iterator[tuple[Identity, Path] | None]:
    """As `claim_identity`; without `fresh` only an existing identity, or None."""
    make_private_folder(folder)
    for slot in range(MAX_IDENTITIES):
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
        f"{MAX_IDENTITIES} workers of this machine use the identities in {folder}",
        remedy="stop some of these workers",
    )


def require_curve() -> None:
    """Raises `ConfigError` if libzmq cannot encrypt, or has known vulnerabilities."""
    version = zmq.zmq_version_info()
    if version < OLDEST_LIBZMQ or not zmq.has("curve"):
        wanted = ".".join(map(str, OLDEST_LIBZMQ))
        raise ConfigError(
            f"libzmq {zmq.zmq_version()} {'is too old' if zmq.has('curve') else 'has no CURVE'}; "
            f"encryption needs {wanted} or newer",
            remedy="install pyzmq from its wheel: pip install --force-reinstall --only-binary :all: pyzmq",
        )
