"""The parts of `make gpu` and their arguments.  It does not import torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Store = Callable[[str, Any], None]
"""Stores a figure of a part under a name, at once, so that it remains if the part is ended."""

PIP_NAMES = {
    "_cffi_backend": "cffi",  # without it, pynacl is found but cannot be imported
    "nacl": "pynacl",
    "zmq": "pyzmq",
    "pytest_timeout": "pytest-timeout",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """The arguments of a part.

    Attributes:
        device: "cuda", "cuda:1", ... or "cpu".
        small: whether to use sizes that take a CPU seconds, and tell nothing about speed.
    """

    device: str
    small: bool = False

    @property
    def is_gpu(self) -> bool:
        return self.device.startswith("cuda")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of `make gpu`.

    Attributes:
        function: MODULE:NAME of a function of a `Setting` and a `Store`, which raises if the part fails.
        needs: the packages that it imports besides torch, by the names in `import`.
        limit_s: after this time the part is ended.
    """

    function: str
    needs: tuple[str, ...]
    limit_s: float


_SELECTION = ("numpy",)
TRAINING = (*_SELECTION, "_cffi_backend", "msgpack", "nacl", "safetensors", "zmq")

PARTS = {
    "bits": Part("gpu.exact:bits", _SELECTION, 120.0),
    "selection": Part("gpu.speed:selection", _SELECTION, 120.0),
    "transfers": Part("gpu.speed:transfers", _SELECTION, 60.0),
    "tests": Part("gpu.exact:tests", (*_SELECTION, "hypothesis", "pytest", "pytest_timeout"), 120.0),
    "training": Part("gpu.runs:training", TRAINING, 150.0),
    "processes": Part("gpu.runs:processes", (*TRAINING, "click", "rich"), 200.0),
}
"""The parts in the order in which they run; the first ones need the fewest packages."""


def missing_packages(names: Sequence[str]) -> list[str]:
    """Return the packages that are not installed, by their names in the package index."""
    return [PIP_NAMES.get(name, name) for name in names if importlib.util.find_spec(name) is None]
