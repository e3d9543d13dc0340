r"""Trains a model that needs four times the memory limit of a worker, with four workers and their agents.

    one process, the whole mini-batch at once      peak >= 4 x limit; and 4 x limit, enforced, is not enough
    four workers, each with the enforced limit     all steps are committed; all peaks are below the limit

Memory counts from before the model is made, so that the interpreter, torch's code and network threads are not
included, but messages are.  The peak is of resident memory (VmHWM).  The limit is enforced with RLIMIT_DATA,
the kernel's bound of private memory: an allocation beyond it fails with torch's "not enough memory".
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gridtrain
from gridtrain.pipeline.blueprint import Blueprint
from gridtrain.tools.demo import pipeline_model as recipe
from gridtrain.tools.demo.byte_gpt import Windows
from gridtrain.tools.demo.recipe import ModelSize
from gridtrain.tools.demo.text_corpus import load_corpus
from lab.group import Plan, start
from lab.net import Net

SHAPE = ModelSize(width=192, layers=8, heads=4, context=128)
STAGES, BATCH, MICRO_BATCHES, STEPS = 4, 16, 8, 3
LIMIT_BYTES = 64 << 20
TIMEOUT_S = 170.0

STACK_BYTES = 512 << 10
"""Stack of a worker's threads, which RLIMIT_DATA counts as a whole, usually 8 MiB."""


@dataclass(frozen=True)
class Peak:
    """The peak of a process; `peak_bytes` is None if an allocation beyond `cap_bytes` failed."""

    name: str
    cap_bytes: int | None
    peak_bytes: int | None
    losses: list[float]


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


class MemoryBound:
    """Bounds and measures the memory that the process uses from now on."""

    def __init__(self, cap_bytes: int | None) -> None:
        _warm_up()
        ctypes.CDLL(None).malloc_trim(0)
        self._base_bytes = _status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak until now
        if cap_bytes is not None:
            most = _status_bytes("VmData") + cap_bytes
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))

    @property
    def peak_bytes(self) -> int:
        return _status_bytes("VmHWM") - self._base_bytes


def _warm_up() -> None:
    """Make torch load its kernels and start its threads."""
    small = ModelSize(width=16, layers=1, heads=2, context=8)
    net = nn.Sequential(*Blueprint(lambda: recipe.make_model(small), seed=0, init=recipe.init).build(0, 3))
    optimizer = recipe.adam(net.parameters())
    x_BT = torch.zeros(2, 8, dtype=torch.long)
    for _ in range(2):
        recipe.compute_loss(net(x_BT), x_BT).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _blueprint() -> Blueprint:
    return Blueprint(lambda: recipe.make_model(SHAPE), seed=0, init=recipe.init)


def _batches(windows: Windows) -> list[tuple[Tensor, Tensor]]:
    return [windows.evenly_spaced(BATCH) for _ in range(STEPS)]


def in_one_piece(cap_bytes: int | None) -> Peak:
    """Train in an ordinary loop: the whole mini-batch forward, backward, AdamW."""
    windows = Windows(load_corpus().train, SHAPE.context)
    batches = _batches(windows)
    bound = MemoryBound(cap_bytes)
    losses: list[float] = []
    try:
        model = nn.Sequential(*_blueprint().build(0, SHAPE.layers + 2))
        optimizer = recipe.adam(model.parameters())
        for x_BT, y_BT in batches:
            loss = recipe.compute_loss(model(x_BT), y_BT)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        return Peak("in one piece", cap_bytes, None, losses)
    return Peak("in one piece", cap_bytes, bound.peak_bytes, losses)


def work(result: Path, cap_bytes: int) -> None:
    """Train as one of the four workers.  The run ends with an error if an allocation fails."""
    threading.stack_size(STACK_BYTES)
    windows = Windows(load_corpus().train, SHAPE.context)
    grid = gridtrain.join()
    bound = MemoryBound(cap_bytes)
    pipe = grid.pipeline(
        _blueprint(),
        recipe.adam,
        stages=STAGES,
        loss_fn=recipe.compute_loss,
        micro_batches=MICRO_BATCHES,
        exchange=gridtrain.Dense(),
        ahead=0.0,
        compare_every=0,
    )
    losses = []
    for inputs, targets in grid.batches(windows, batch_size=BATCH, steps=STEPS):
        loss = pipe.step(inputs, targets)
        losses.append(float("nan") if loss is None else loss)
        peak = Peak(f"stage {pipe.stage} of {STAGES}", cap_bytes, bound.peak_bytes, losses)
        (result / f"stage-{pipe.stage}.json").write_text(json.dumps(asdict(peak)))


def all_cases() -> dict[str, Any]:
    """Measure one process without a bound and with 4 limits, then four workers with one limit each."""
    found = [_alone(None), _alone(STAGES * LIMIT_BYTES)]
    with tempfile.TemporaryDirectory(prefix="gridtrain-limit-") as text, Net() as net:
        folder = Path(text)
        script = [sys.executable, str(Path(__file__).resolve()), "--cap", str(LIMIT_BYTES), "--work", text]
        plan = Plan(workers=STAGES, environment={"MALLOC_ARENA_MAX": "2"})
        start(net, plan, folder, lambda name: script).wait(TIMEOUT_S)
        parts = [json.loads((folder / f"stage-{stage}.json").read_text()) for stage in range(STAGES)]
    return {"limit_bytes": LIMIT_BYTES, "rows": [asdict(peak) for peak in found] + parts}


def _alone(cap_bytes: int | None) -> Peak:
    command = [sys.executable, __file__, "--cap", str(cap_bytes or 0)]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return Peak(**json.loads(done.stdout))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="a process of the part `limit`")
    parser.add_argument("--cap", type=int, required=True, help="bytes; 0: no bound")
    parser.add_argument(
        "--work", type=Path, help="be a worker of the pipeline, with this folder for its figures"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.work is not None:
        work(options.work, options.cap)
    else:
        print(json.dumps(asdict(in_one_piece(options.cap or None))))


if __name__ == "__main__":
    main()
