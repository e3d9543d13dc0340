"""Results of pure functions for drawn inputs, compared with those that were recorded.

`GRIDTRAIN_RECORD=1 pytest FILE` records them again, if a change is meant.  The difference of the
recorded file then shows the effect of the change.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

TEXTS = {"reason", "name"}


def compare(path: Path, name: str, found: Any) -> None:
    """Fail if `found` differs from the file's value of this name."""
    recorded = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    shown = json.loads(json.dumps(plain(found)))
    if os.environ.get("GRIDTRAIN_RECORD"):
        recorded[name] = shown
        rows = ",\n".join(
            f"{json.dumps(key)}: [\n" + ",\n".join(json.dumps(row) for row in recorded[key]) + "\n]"
            for key in sorted(recorded)
        )
        path.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")
    test = os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]
    assert shown == recorded.get(name), (
        f"{name!r} is not as in {path.name}; if the change is meant, record it with "
        f"GRIDTRAIN_RECORD=1 pytest {test}, and check the difference of the file"
    )


def plain(value: Any) -> Any:
    """JSON-able: dataclasses as lists without texts for people, floats with nine digits, keys as letters."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, bytes):
        return value[:1].decode()
    if is_dataclass(value):
        return [plain(getattr(value, each.name)) for each in fields(value) if each.name not in TEXTS]
    if isinstance(value, Mapping):
        return [[plain(key), plain(value[key])] for key in sorted(value)]
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value))
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return value
