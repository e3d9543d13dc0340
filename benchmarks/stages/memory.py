r"""Measures the memory of stages: with and without re-materialization, and below an enforced limit.

    memory    one stage executes its part of the schedule with random activations and gradients
              ____/\_/\___ steps before: weights, gradients, libraries = the base
                          \____/^^^^\___ one step: its peak above the base is reported
    limit     one process, the whole mini-batch at once      peak >= 4 x limit; and 4 x limit is not enough
              four workers, each with the enforced limit     all steps are committed; all peaks are below it

Memory counts from before the model is made, so that the interpreter, torch's code and network threads are not
included, but messages are.  The peak is of resident memory (VmHWM).  The limit is enforced with RLIMIT_DATA,
the kernel's bound of private memory: an allocation beyond it fails with torch's "not enough memory".
"""

from __future__ import annotations

import ctypes
import os
import resource
import threading
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import gridtrain
from gridtrain.core.stages.schedule import ActionKind, fill_drain, one_forward_one_backward
from gridtrain.pipeline.blueprint import Blueprint
from gridtrain.pipeline.stage import Stage
from gridtrain.pipeline.tensor_tree import TensorTreeSpec
from gridtrain.tools.demo import pipeline_model as recipe
from gridtrain.tools.demo.byte_gpt import TransformerBlock, Windows
from gridtrain.tools.demo.recipe import ModelSize
from gridtrain.tools.demo.text_corpus import load_corpus
from lab.group import run_in_lab
from procfs import forget_peak, in_own_process, memory_bytes

STAGES, MICRO_BATCHES = 4, 8
STAGE_SHAPE, STAGE_SAMPLES = ModelSize(width=256, layers=4, heads=4, context=128), 4
SCHEDULES = {"fill-drain": fill_drain, "1F1B": one_forward_one_backward}
LIMIT_SHAPE = ModelSize(width=192, layers=8, heads=4, context=128)
BATCH, STEPS = 16, 3
LIMIT_BYTES = 64 << 20
STATE_BYTES = 20 << 20
"""The memory for weights, gradients and optimizer that each worker declares, so that a worker that was
measured as faster does not get more layers."""

TIMEOUT_S = 170.0
STACK_BYTES = 512 << 10
"""Stack of a worker's threads, which RLIMIT_DATA counts as a whole, usually 8 MiB."""

ALONE = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}


class MemoryBound:
    """Measures the memory that the process uses from now on, and bounds it."""

    def __init__(self, cap_bytes: int | None = None) -> None:
        ctypes.CDLL(None).malloc_trim(0)
        self._base_bytes = memory_bytes("VmRSS")
        forget_peak()
        if cap_bytes is not None:
            most = memory_bytes("VmData") + cap_bytes
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))

    @property
    def peak_bytes(self) -> int:
        return memory_bytes("VmHWM") - self._base_bytes


# -- one stage -------------------------------------------------------------------------------------


def _step(stage: Stage, name: str, micro_batches: int) -> None:
    x_BTD, gradient = torch.randn(2, STAGE_SAMPLES, STAGE_SHAPE.context, STAGE_SHAPE.width)
    stage.begin(1, (STAGE_SAMPLES,) * micro_batches)
    for action in SCHEDULES[name](STAGES, micro_batches).actions[0]:
        if action.kind is ActionKind.FORWARD:
            stage.forward(action.micro_batch, x_BTD.clone())
        else:
            stage.backward(action.micro_batch, [gradient])
    stage.finish()
    for parameter in stage.parameters:
        parameter.grad = None


def of_a_stage(name: str, rematerialise: bool) -> dict[str, Any]:
    """Return the peak of the first stage, which stores the most micro-batches (`kept`)."""
    torch.set_num_threads(1)
    spec = TensorTreeSpec.of(torch.zeros(7, STAGE_SHAPE.context, STAGE_SHAPE.width), 7)
    blocks = [TransformerBlock(STAGE_SHAPE) for _ in range(STAGE_SHAPE.layers)]
    stage = Stage(blocks, input=spec, output=spec, rematerialise=rematerialise)
    _step(stage, name, 1)
    bound = MemoryBound()
    _step(stage, name, MICRO_BATCHES)
    return {
        "schedule": name,
        "rematerialise": rematerialise,
        "kept": SCHEDULES[name](STAGES, MICRO_BATCHES).max_in_flight(0),
        "peak_bytes": bound.peak_bytes,
        "weights_bytes": sum(p.numel() * p.element_size() for p in stage.parameters),
    }


def stages() -> dict[str, Any]:
    cases = product(SCHEDULES, (False, True))
    return {"rows": [in_own_process(of_a_stage, *case) for case in cases]}


# -- a limit -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peak:
    """The peak of a process; `peak_bytes` is None if an allocation beyond `cap_bytes` failed."""

    name: str
    cap_bytes: int | None
    peak_bytes: int | None
    losses: list[float]


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
    return Blueprint(lambda: recipe.make_model(LIMIT_SHAPE), seed=0, init=recipe.init)


def in_one_piece(cap_bytes: int | None) -> Peak:
    """Train in an ordinary loop: the whole mini-batch forward, backward, AdamW."""
    torch.set_num_threads(1)
    windows = Windows(load_corpus().train, LIMIT_SHAPE.context)
    batches: list[tuple[Tensor, Tensor]] = [windows.evenly_spaced(BATCH) for _ in range(STEPS)]
    _warm_up()
    bound = MemoryBound(cap_bytes)
    losses: list[float] = []
    try:
        model = nn.Sequential(*_blueprint().build(0, LIMIT_SHAPE.layers + 2))
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


def work(options: dict[str, Any]) -> dict[str, Any]:
    """Train as one of the four workers.  The run ends with an error if an allocation fails."""
    threading.stack_size(STACK_BYTES)
    windows = Windows(load_corpus().train, LIMIT_SHAPE.context)
    with gridtrain.join() as grid:
        _warm_up()
        bound = MemoryBound(options["cap_bytes"])
        pipe = grid.pipeline(
            _blueprint(),
            recipe.adam,
            stages=STAGES,
            loss_fn=recipe.compute_loss,
            micro_batches=MICRO_BATCHES,
            exchange=gridtrain.Dense(),
            ahead=0.0,
            memory_bytes=STATE_BYTES,
            compare_every=0,
        )
        losses = []
        for inputs, targets in grid.batches(windows, batch_size=BATCH, steps=STEPS):
            loss = pipe.step(inputs, targets)
            losses.append(float("nan") if loss is None else loss)
        return asdict(Peak(f"stage {pipe.stage} of {STAGES}", options["cap_bytes"], bound.peak_bytes, losses))


def limit() -> dict[str, Any]:
    """Measure one process without a bound and with 4 limits, then four workers with one limit each."""
    os.environ.update(ALONE)
    found = [asdict(in_own_process(in_one_piece, cap)) for cap in (None, STAGES * LIMIT_BYTES)]
    workers = run_in_lab(work, {"cap_bytes": LIMIT_BYTES}, STAGES, TIMEOUT_S, env=ALONE)
    return {"limit_bytes": LIMIT_BYTES, "rows": found + sorted(workers.values(), key=lambda row: row["name"])}
