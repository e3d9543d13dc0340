"""The tests marked `gpu`, and a comparison of selection and encoding on a GPU and the CPU, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import torch
from torch import Tensor

from gpu.parts import TRAINING, Setting, Store, missing_packages
from gridtrain.network.wire.value_encoding import ValueKind
from gridtrain.sparsify import error_feedback
from gridtrain.sparsify.cuda_selection import CudaSelection, are_kernels_correct
from gridtrain.sparsify.error_feedback import ErrorFeedback
from gridtrain.sparsify.selection import make_selection
from gridtrain.sparsify.tensor_selection import Selection, TensorSelection

ROOT = Path(__file__).resolve().parents[2]
MARK = "mark.gpu"
STEPS, DENSITY, WEIGHT, CHUNK = 4, 0.001, 0.3, 4096
SPECIAL = {"inf": torch.inf, "nan": torch.nan}


def tests(setting: Setting, store: Store) -> None:
    """Run the tests marked `gpu`; without the packages that the others need, only those of selection.

    Raises `RuntimeError` if one fails.
    """
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if MARK in path.read_text()]
    missing = missing_packages(TRAINING)
    if setting.small or missing:
        files = [path for path in files if path.parent.name == "sparsify"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        argv = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
        argv += ["--continue-on-collection-errors", f"--junitxml={report}", *map(str, files)]
        code = subprocess.run(argv, cwd=ROOT).returncode
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failed = [case.get("name", "") for case in cases if {each.tag for each in case} & {"failure", "error"}]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - len(failed) - skipped
    store("tests", {"passed": passed, "skipped": skipped, "failed": failed, "left out, without": missing})
    if code:
        raise RuntimeError(f"pytest ended with exit code {code}; failed: {', '.join(failed) or 'none'}")


def bits(setting: Setting, store: Store) -> None:
    """Compare payloads, residuals and momentum with the CPU's.  Raises `RuntimeError` if any bit differs."""
    device = torch.device(setting.device)
    ways, problem = selections(device)
    figures: dict[str, Any] = {"ways": list(ways), "compared": 0, "differing": [], "problem": problem}
    differing: list[str] = figures["differing"]
    for way, kind, momentum, values, n in cases(setting, list(ways)):
        if not agree(device, ways[way], kind, momentum, values, n, chunk=CHUNK if way == "chunks" else 0):
            differing.append(f"{way}, {kind.name}, momentum {momentum}, {values}, n = {n}")
        figures["compared"] += 1
        store("bits", figures)
    if problem or differing:
        raise RuntimeError(
            problem or f"{len(differing)} of {figures['compared']} differ, such as {differing[0]}"
        )


def selections(device: torch.device) -> tuple[dict[str, Callable[[], Selection]], str]:
    """Return the implementations for the device, and why Triton's kernels cannot be used, if they cannot."""
    ways: dict[str, Callable[[], Selection]] = {
        "torch": TensorSelection,
        "chunks": lambda: make_selection(device, CHUNK),
    }
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return ways, ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if are_kernels_correct(device):
            return ways | {"triton": CudaSelection}, ""
    return ways, "; ".join(str(warning.message) for warning in caught) or "Triton is not installed"


def cases(setting: Setting, ways: list[str]) -> Iterator[tuple[str, ValueKind, float, str, int]]:
    sizes = (1, 2049, 20_000) if setting.small else (1, 2049, 1_000_003)
    kinds = (ValueKind.FP16, ValueKind.INT8) if setting.small else tuple(ValueKind)
    yield from product(ways, kinds, (0.0, 0.9), ("normal", "ties", "zeros", *SPECIAL), sizes)
    if not setting.small:
        yield from product(ways, (ValueKind.FP16,), (0.9,), ("normal",), (100_000_000,))


def agree(
    device: torch.device,
    way: Callable[[], Selection],
    kind: ValueKind,
    momentum: float,
    values: str,
    n: int,
    *,
    chunk: int = 0,
) -> bool:
    """Return whether steps of error feedback have the same bits on the device as on the CPU."""
    generator = torch.Generator().manual_seed(n)
    own, reference = (ErrorFeedback(n, place, momentum, chunk) for place in (device, "cpu"))
    k = max(1, round(DENSITY * n))
    for step in range(STEPS if n < 10_000_000 else 2):
        gradient_N = gradient(values, n, step, generator)
        with mock.patch.object(error_feedback, "make_selection", lambda *_: way()):
            made = own.prepare(gradient_N.to(device), k, kind, weight=WEIGHT)
        expected = reference.prepare(gradient_N, k, kind, weight=WEIGHT)
        if (made.payload, made.skip) != (expected.payload, expected.skip):
            return False
        truncated = [(expected.decoded.indices[:3], expected.decoded.values[:3] / 2)]
        own.commit(made, truncated)
        reference.commit(expected, truncated)
        if not all(
            same_bits(*pair) for pair in ((own.residual_N, reference.residual_N), (own.u_N, reference.u_N))
        ):
            return False
    return True


def gradient(values: str, n: int, step: int, generator: torch.Generator) -> Tensor:
    if values == "ties":
        return torch.randint(-4, 5, (n,), generator=generator).float()
    drawn_N = torch.randn(n, generator=generator) * (1000.0 if step == 2 else 1.0)  # a threshold too low
    if values == "zeros":
        drawn_N[n // 2000 :] = 0.0  # fewer than k are nonzero
    if step == 1 and values in SPECIAL:
        drawn_N[n // 2] = SPECIAL[values]
    return drawn_N


def same_bits(own: Tensor | None, reference: Tensor | None) -> bool:
    if own is None or reference is None:
        return own is reference
    return torch.equal(own.cpu().view(torch.int32), reference.view(torch.int32))
