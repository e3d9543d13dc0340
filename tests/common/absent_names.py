"""The frozen parameters that a checkpoint does not contain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gridtrain.training.checkpoint.frozen_base import FROZEN_KEY


def absent_names(document: Mapping[str, Any]) -> list[str]:
    """Return the names of the frozen parameters that a checkpoint does not contain; its document is
    `Checkpoint.document`."""
    packed = document.get("parameters")
    items = packed.get("dict", ()) if isinstance(packed, Mapping) else ()
    present = {str(item[0]) for item in items}
    return [str(name) for name in document.get(FROZEN_KEY, ()) if str(name) not in present]
