"""Names and places of this worker.  Host and user names are personal: they are never used."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

_FIRST = ("amber", "brisk", "calm", "deft", "eager", "fair", "glad", "keen", "lucid", "mild", "neat", "quiet")
_SECOND = ("ant", "bear", "crane", "deer", "elk", "finch", "gecko", "hare", "ibis", "lynx", "otter", "wren")


def random_name() -> str:
    """A name such as "keen-otter-4f2a" that says nothing about the machine."""
    return f"{secrets.choice(_FIRST)}-{secrets.choice(_SECOND)}-{secrets.token_hex(2)}"


def state_directory(run: str) -> Path:
    """Where files of `run` belong: `$XDG_STATE_HOME/gridtrain/<run>`, by default under ~/.local/state."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "gridtrain" / re.sub(r"[^A-Za-z0-9._-]", "_", run).lstrip(".")
