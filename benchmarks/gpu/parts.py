"""The parts of `make gpu`, and what each of them is given.  Imports no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Keep = Callable[[str, Any], None]
"""Stores a figure of a part under a name, at once, so that a part that is cut off keeps it."""

PIP_NAMES = {"nacl": "pynacl", "zmq": "pyzmq", "pytest_timeout": "pytest-timeout"}


@dataclass(frozen=True, slots=True)
class Setting:
    """Attributes:
    device: "cuda", "cuda:1", ... or "cpu".
    small: sizes that take a CPU seconds, and say nothing about speed.
    """

    device: str
    small: bool = False

    @property
    def is_gpu(self) -> bool:
        return self.device.startswith("cuda")


@dataclass(frozen=True, slots=True)
class Part:
    """Attributes:
    function: MODULE:NAME of a function of a `Setting` and a `Keep`, which raises if the part fails.
    needs: the packages that it imports beside torch, by the names in `import`.
    limit_s: after this time it is ended.
    """

    function: str
    needs: tuple[str, ...]
    limit_s: float


_SELECTION = ("numpy",)
TRAINING = (*_SELECTION, "msgpack", "nacl", "safetensors", "zmq")

PARTS = {
    "bits": Part("gpu.exact:bits", _SELECTION, 120.0),
    "selection": Part("gpu.speed:selection", _SELECTION, 120.0),
    "transfers": Part("gpu.speed:transfers", _SELECTION, 60.0),
    "streams": Part("gpu.speed:streams", _SELECTION, 60.0),
    "tests": Part("gpu.exact:tests", (*_SELECTION, "hypothesis", "pytest", "pytest_timeout"), 120.0),
    "training": Part("gpu.runs:training", TRAINING, 150.0),
    "processes": Part("gpu.runs:processes", (*TRAINING, "click", "rich"), 200.0),
}
"""In the order in which they run: the first ones need the fewest packages."""


def missing_packages(names: Sequence[str]) -> list[str]:
    """Return those that are not installed, by the names that pip knows."""
    return [PIP_NAMES.get(name, name) for name in names if importlib.util.find_spec(name) is None]
