"""Files that only their owner can read, replaced as a whole."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def replace_private_file(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Replace a file by one of mode 0600, or leave it as it is.  Other processes may do so at the same time.

    Args:
        durable: whether to return only when the content is on disk.

    Raises `OSError`.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
