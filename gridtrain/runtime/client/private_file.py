"""Writes files that only their owner can read, and replaces each file as a whole."""

from __future__ import annotations

import fcntl
import glob
import json
import os
import secrets
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path

from gridtrain.errors import disk_errors

LEFTOVER_AGE_S = 60.0
MAX_LEFTOVERS = 100
PARTIAL = "partial-"
"""Part of the name of a file that is being written, by which `_remove_leftovers` recognizes such files."""


def replace_private_file(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Replace a file atomically with one of mode 0600.  Several processes can replace it at the same time.

    A process that is killed leaves a partial file in the same folder, which a later call removes.

    Args:
        path: the path of the file, which need not exist.
        content: the new content; a string is encoded in UTF-8.
        durable: whether to return only when the content is on disk.

    Raises `OSError` if the file cannot be written.
    """
    _remove_leftovers(path)
    partial = path.with_name(f".{path.name}.{PARTIAL}{secrets.token_hex(4)}")
    try:
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # held until the file is replaced, see `_remove_leftovers`
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def replace_private_json(path: Path, body: object, remedy: str) -> None:
    """Replace a file with `body` as JSON, with mode 0600.

    Raises `ConfigError` with this remedy if the file cannot be written.
    """
    with disk_errors(f"{path} cannot be written", remedy):
        replace_private_file(path, json.dumps(body, indent=1))


def _remove_leftovers(path: Path) -> None:
    """Remove the partial files of killed processes: those that are old and not locked by any process."""
    for left in islice(path.parent.glob(f".{glob.escape(path.name)}.{PARTIAL}*"), MAX_LEFTOVERS):
        with suppress(OSError):  # it is being written, or another process has removed it
            if time.time() - left.stat().st_mtime < LEFTOVER_AGE_S:
                continue  # it may just have been created, and not be locked yet
            with left.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
