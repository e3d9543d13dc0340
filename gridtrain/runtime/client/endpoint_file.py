"""`coordinator.json`, in which programs on the same machine find the coordinator's address and public key.

`coordinator.json` is in the same folder as the journal.  The file is replaced as a whole, and only its owner
can read it.  It contains no secrets; commands are authorized with the key in `operator.key`, in the same
folder.

    the state folder of a run
        journal.sqlite  coordinator.key  operator.key     permanent
        coordinator.json                                  exists while the coordinator listens

The coordinator also holds a lock on the file, so an unlocked file was left by a coordinator that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gridtrain.core.messages import PeerId
from gridtrain.errors import ConfigError
from gridtrain.runtime.client.private_file import replace_private_json

CONTACT_FILE, OPERATOR_KEY, COORDINATOR_KEY = "coordinator.json", "operator.key", "coordinator.key"
FORMAT = 1
MAX_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class EndpointFile:
    """The content of the file: the addresses and the public key of the coordinator.

    Attributes:
        address: the address at which workers reach the coordinator.
        here: the address at which programs on this machine reach the coordinator.  It differs from `address`
            if the coordinator is behind a router or in a container.
        coordinator: the coordinator's public key.
        run: the run's name.
        encrypted: whether connections are encrypted.
        pid: the process that wrote the file; 0 if the file does not name it.
    """

    address: str
    here: str
    coordinator: PeerId
    run: str
    encrypted: bool
    pid: int = field(default=0, compare=False)

    @property
    def local_addresses(self) -> list[str]:
        """The addresses that a program on this machine tries.  If the machine's address has changed since the
        file was written, a coordinator that listens on all interfaces still answers at 127.0.0.1."""
        port = self.here.rpartition(":")[2]
        return list(dict.fromkeys((self.here, f"tcp://127.0.0.1:{port}", self.address)))

    def write(self, folder: Path) -> None:
        """Replace the file in `folder`.  Raises `ConfigError` if the file cannot be written."""
        body = {
            "version": FORMAT,
            "address": self.address,
            "here": self.here,
            "key": self.coordinator.hex(),
            "run": self.run,
            "encrypted": self.encrypted,
            "pid": os.getpid(),
        }
        replace_private_json(folder / CONTACT_FILE, body, "check the permissions of the folder")

    @contextlib.contextmanager
    def published(self, folder: Path) -> Iterator[None]:
        """Return a context manager that writes the file, holds its lock, and removes it on exit.

        Raises `ConfigError` if the file cannot be written.
        """
        self.write(folder)
        try:
            with open(folder / CONTACT_FILE, "r+b") as file:  # NFS locks only files open for writing
                with contextlib.suppress(OSError):  # the file system does not support locks
                    fcntl.flock(file, fcntl.LOCK_EX)  # only `is_abandoned` could hold it, for a moment
                yield
        finally:
            self.remove(folder)

    def remove(self, folder: Path) -> None:
        """Remove the file from `folder`, unless another coordinator has replaced it."""
        with contextlib.suppress(OSError, ConfigError):
            if EndpointFile.read(folder) == self:
                (folder / CONTACT_FILE).unlink(missing_ok=True)

    @classmethod
    def read(cls, folder: Path) -> EndpointFile:
        """Read the file in `folder`.

        Raises `FileNotFoundError` if the file does not exist, and `ConfigError` if it cannot be read or is
        invalid.
        """
        path = folder / CONTACT_FILE
        try:
            with open(path, "rb") as file:
                text = file.read(MAX_FILE_BYTES)
            return cls._parse(json.loads(text))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read: {error.strerror}",
                remedy="run the command as the user that runs the coordinator",
            ) from None
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(
                f"{path} is not a valid endpoint file: {error}",
                remedy="restart the coordinator, so that it writes the file again",
            ) from None

    @staticmethod
    def is_abandoned(folder: Path) -> bool:
        """Return whether a coordinator has ended without removing its file; False if the file system does not
        support locks."""
        return EndpointFile.is_locked(folder) is False

    @staticmethod
    def is_locked(folder: Path) -> bool | None:
        """Return whether a running coordinator holds the file's lock; None if the file cannot be locked or
        does not exist."""
        try:
            with open(folder / CONTACT_FILE, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: other commands may also check
        except BlockingIOError:
            return True
        except OSError:
            return None
        return False

    @classmethod
    def _parse(cls, body: object) -> EndpointFile:
        if not isinstance(body, dict):
            raise TypeError("the content is not a JSON object")
        if body["version"] != FORMAT:
            raise ValueError(
                f"the file has version {body['version']!r}; this version of gridtrain reads version {FORMAT}"
            )
        address, here, run, encrypted = body["address"], body["here"], body["run"], body["encrypted"]
        texts_are_valid = all(isinstance(text, str) for text in (address, here, run))
        pid = body.get("pid", 0)
        if not texts_are_valid or not isinstance(encrypted, bool) or not isinstance(pid, int):
            raise TypeError("a field has the wrong type")
        key = bytes.fromhex(body["key"])
        if len(key) != 32:
            raise ValueError(f"the key is {len(key)} bytes long; it must be 32 bytes long")
        return cls(address, here, key, run, encrypted, pid)
