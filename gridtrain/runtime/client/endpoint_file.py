"""How programs on the coordinator's machine find it: a small file beside its journal.

`coordinator.json` is replaced as a whole, and readable by its owner only.  Nothing in it is secret; authority
comes from `operator.key`, beside it.

    the state folder of a run
        journal.sqlite  coordinator.key  operator.key     permanent
        coordinator.json                                  while the coordinator listens
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from gridtrain.core.messages import PeerId
from gridtrain.errors import ConfigError

CONTACT_FILE, OPERATOR_KEY, COORDINATOR_KEY = "coordinator.json", "operator.key", "coordinator.key"
FORMAT = 1
MAX_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class EndpointFile:
    """How the coordinator can be reached.

    Attributes:
        address: that workers use.
        here: that this machine can dial; the two differ behind a router or in a container.
    """

    address: str
    here: str
    coordinator: PeerId
    run: str
    encrypted: bool

    def write(self, folder: Path) -> None:
        """Replace the file.  Raises `ConfigError`."""
        body = {
            "version": FORMAT,
            "address": self.address,
            "here": self.here,
            "key": self.coordinator.hex(),
            "run": self.run,
            "encrypted": self.encrypted,
        }
        path = folder / CONTACT_FILE
        partial = folder / f".{CONTACT_FILE}.{secrets.token_hex(4)}"
        try:
            handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(body, file, indent=1)
            os.replace(partial, path)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {error.strerror}", remedy="check the permissions of its folder"
            ) from None
        finally:
            partial.unlink(missing_ok=True)

    def remove(self, folder: Path) -> None:
        """Remove the file, unless another coordinator has replaced it."""
        with contextlib.suppress(OSError, ConfigError):
            if EndpointFile.read(folder) == self:
                (folder / CONTACT_FILE).unlink(missing_ok=True)

    @classmethod
    def read(cls, folder: Path) -> EndpointFile:
        """Raises `FileNotFoundError`, and `ConfigError` if it cannot be used."""
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
                remedy="run this as the user that runs the coordinator",
            ) from None
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(
                f"{path} is not a valid endpoint file: {error}",
                remedy="restart the coordinator: it writes the file again",
            ) from None

    @classmethod
    def _parse(cls, body: object) -> EndpointFile:
        if not isinstance(body, dict):
            raise TypeError("it is not a JSON object")
        if body["version"] != FORMAT:
            raise ValueError(f"it has version {body['version']!r}, this gridtrain reads {FORMAT}")
        address, here, run, encrypted = body["address"], body["here"], body["run"], body["encrypted"]
        if not all(isinstance(text, str) for text in (address, here, run)) or not isinstance(encrypted, bool):
            raise TypeError("a field has a wrong type")
        key = bytes.fromhex(body["key"])
        if len(key) != 32:
            raise ValueError(f"its key has {len(key)} bytes, must have 32")
        return cls(address, here, key, run, encrypted)
