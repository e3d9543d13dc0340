"""The recorded files: their folder, their contents, and copies that a program may change."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

DATA = Path(__file__).parent.parent / "data"


@cache
def recorded(name: str) -> Any:
    """The JSON in a file below `data/`; callers must not change it."""
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def private_copy(source: Path, target: Path) -> Path:
    """A private copy, folders 0700 and files 0600, with journals under their real name."""
    shutil.copytree(source, target)
    for folder, _, files in os.walk(target):
        Path(folder).chmod(0o700)
        for name in files:
            path = Path(folder, name)
            path.chmod(0o600)
            if name == "journal.db":
                path.rename(path.with_name("journal.sqlite"))
    return target


def script(name: str) -> ModuleType:
    """A recorded training script as a module."""
    spec = importlib.util.spec_from_file_location(f"recorded_{name}", DATA / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def described(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Name -> [dtype, shape, bytes in hexadecimal], as `known.json` has tensors."""
    return {
        name: [
            str(tensor.dtype).removeprefix("torch."),
            list(tensor.shape),
            tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex(),
        ]
        for name, tensor in tensors.items()
    }
