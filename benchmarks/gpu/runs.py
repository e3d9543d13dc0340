"""Training on a GPU: in many ways with workers in threads, and as processes behind slow links."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch._dynamo.utils
import torch.nn.functional as F
from torch import Tensor, nn

import gridtrain
from accuracy.llama import LoRALinear
from gpu.parts import Setting, Store
from gpu.speed import copies_of
from gridtrain.tools.demo import pipeline_model, recipe
from gridtrain.tools.demo.demo_model import ByteGPT, Windows
from gridtrain.tools.demo.recipe import ModelSize
from gridtrain.tools.demo.text_corpus import load_corpus
from gridtrain.training.checkpoint import serialization
from lab.group import run_in_lab

WORKERS = 2
STEPS = {False: 24, True: 12}  # by `Setting.small`
OVERFLOW_STEP = 3
RUN_S = 110.0  # of the processes of one run, from their start to their end
SPARSE = gridtrain.GTopK(density=0.05, momentum=0.9)


@dataclass(frozen=True)
class Load:
    """The model and the windows of a batch; the last step is profiled if the process has one worker."""

    size: ModelSize
    batch_size: int = 8
    is_profiled: bool = True


LOADS = {
    "tiny": Load(recipe.SIZES["tiny"]),
    "demo": Load(recipe.SIZES["small"]),
    "threads": Load(ModelSize(width=256, layers=4, heads=4, context=128), is_profiled=False),
    "gpt": Load(ModelSize(width=512, layers=8, heads=8, context=256), batch_size=32),
}


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        autocast: the dtype of mixed precision.
        scaled: with a GradScaler; the first worker's gradient overflows once.
        adam: the learning rate of AdamW; 0 for SGD.
        change: a function that changes the model before training.
        options: further arguments of `grid.optimizer`.
    """

    exchange: gridtrain.GTopK | gridtrain.Dense | gridtrain.LocalSteps = SPARSE
    autocast: torch.dtype | None = None
    scaled: bool = False
    adam: float = 0.0
    change: Callable[[nn.Module, Setting], nn.Module] = lambda model, setting: model
    options: dict[str, Any] = field(default_factory=dict)


# -- changes of the model ------------------------------------------------------------------------------


def compiled(model: nn.Module, setting: Setting) -> nn.Module:
    made: nn.Module = torch.compile(model, backend="eager" if setting.small else "inductor")  # type: ignore[assignment]
    return made


def with_adapters(model: nn.Module, setting: Setting) -> nn.Module:
    """Freeze the model and add LoRA to the linear layers of its blocks."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for block in model.blocks:  # type: ignore[union-attr]
        for name in ("query_key_value", "attention_out", "mlp_in", "mlp_out"):
            layer = LoRALinear(getattr(block, name), rank=8, alpha=8.0, generator=generator)
            setattr(block, name, layer.to(setting.device))
    return model


WAYS = {
    "gTop-k": Way(),
    "dense": Way(gridtrain.Dense()),
    "dense, overlap": Way(gridtrain.Dense(), options={"overlap": gridtrain.Overlap(4, 1, adaptive=False)}),
    "local steps, vectors on the host": Way(
        gridtrain.LocalSteps(4, gridtrain.GTopK(density=0.05)),
        adam=1e-3,
        options={"exchange_device": "cpu"},
    ),
    "bfloat16 autocast": Way(autocast=torch.bfloat16),
    "float16 autocast, GradScaler": Way(autocast=torch.float16, scaled=True),
    "LoRA": Way(gridtrain.Dense(), adam=2e-2, change=with_adapters),
    "torch.compile": Way(change=compiled),  # the last one, because it may take most of the time
}


# -- workers in threads --------------------------------------------------------------------------------


def training(setting: Setting, store: Store) -> None:
    """Train in all ways.  Raises `RuntimeError` if one fails, or if workers end with different parameters."""
    failed = []
    found: dict[str, Any] = {}
    ways: dict[str, Callable[[gridtrain.Grid], dict[str, Any]]] = {
        "pipeline, 2 stages": partial(train_stages, setting=setting),
        **{name: partial(train, way=way, setting=setting) for name, way in WAYS.items()},
    }
    for name, work in ways.items():
        try:
            with tempfile.TemporaryDirectory() as folder:
                workers = gridtrain.local(work, WORKERS, export_dir=folder)
            found[name] = summary(workers)
        except Exception as error:
            traceback.print_exc()
            found[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        if "error" in found[name]:
            failed.append(f"{name} ({found[name]['error']})")
        store("ways", found)
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(found)} failed: {'; '.join(failed)}")


def summary(workers: list[dict[str, Any]], *, learns: bool = True) -> dict[str, Any]:
    """Return the first worker's figures, with an error if workers differ or the loss does not fall.

    Args:
        learns: whether the loss must fall.
    """
    first = dict(workers[0])
    if len({json.dumps(worker["equal"]) for worker in workers}) > 1:
        first["error"] = "the workers ended with different parameters, losses or scales"
    if learns and not first["last_loss"] < first["first_loss"]:
        first["error"] = f"the loss went from {first['first_loss']:.3f} to {first['last_loss']:.3f}"
    del first["equal"]
    return first


def train(
    grid: gridtrain.Grid, way: Way, setting: Setting, load: Load | None = None, steps: int = 0
) -> dict[str, Any]:
    """Train the demo's model on one worker; return figures, and values that must be equal on all workers."""
    load = load or (LOADS["tiny"] if setting.small else LOADS["threads"])
    steps = steps or STEPS[setting.small]
    model = way.change(ByteGPT(load.size, seed=0).to(setting.device), setting)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    inner = torch.optim.AdamW(trained, way.adam) if way.adam else torch.optim.SGD(trained, lr=0.2)
    optimizer = grid.optimizer(inner, model, exchange=way.exchange, **way.options)
    kind = torch.device(setting.device).type
    scaler = grid.scaler(device=kind, enabled=way.scaled)
    record = Steps()

    def step(x_BT: Tensor, y_BT: Tensor) -> None:
        with nullcontext() if way.autocast is None else torch.autocast(kind, way.autocast):
            logits_BTV = model(x_BT.to(setting.device))
        loss = F.cross_entropy(logits_BTV.float().flatten(0, 1), y_BT.to(setting.device).flatten())
        overflow = way.scaled and grid.step == OVERFLOW_STEP and grid.is_first
        scaler.scale(loss * torch.inf if overflow else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        record.add(loss.item(), optimizer.timings, optimizer.last_overflowed)

    windows = Windows(load_corpus().train, load.size.context)
    copies: dict[str, dict[str, float]] = {}
    for x_BT, y_BT in grid.batches(windows, batch_size=load.batch_size, steps=steps):
        if load.is_profiled and grid.step == steps - 1:
            copies = copies_of(partial(step, x_BT, y_BT), setting)
        else:
            step(x_BT, y_BT)
    if way.scaled and not record.skipped:
        raise RuntimeError(f"the gradient of step {OVERFLOW_STEP} was not finite, and no step was skipped")
    digest = serialization.replica_digest(model, optimizer.replicated)
    peak = torch.cuda.max_memory_allocated(setting.device) / optimizer.flat_size if setting.is_gpu else None
    return record.figures() | {
        "parameters": optimizer.flat_size,
        "graph_breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
        "copies": copies,
        "sent_bytes": grid.traffic.get("Data", (0, 0))[0] / steps,
        "peak_bytes_a_parameter": peak if load.is_profiled else None,
        "equal": [digest.hex(), scaler.get_scale(), record.skipped],
    }


def train_stages(grid: gridtrain.Grid, setting: Setting) -> dict[str, Any]:
    """Train the pipeline demo's model on one worker of two."""
    size = pipeline_model.QUICK_SIZE if setting.small else pipeline_model.SIZE
    pipe = grid.pipeline(
        lambda: pipeline_model.make_model(size),
        pipeline_model.adam,
        stages=WORKERS,
        loss_fn=pipeline_model.compute_loss,
        micro_batches=4,
        exchange=gridtrain.Dense(),
        device=setting.device,
        init=pipeline_model.init,
    )
    record, losses = Steps(), []
    for x_BT, y_BT in grid.batches(
        Windows(load_corpus().train, size.context), batch_size=16, steps=STEPS[setting.small]
    ):
        loss = pipe.step(x_BT, y_BT)
        if loss is not None:
            losses.append(loss)
            record.add(loss, pipe.timings)
    parameters = sum(parameter.numel() for parameter in pipeline_model.make_model(size).parameters())
    return record.figures() | {"parameters": parameters, "equal": losses}


class Steps:
    """The steps of a worker: losses, ends and durations of phases."""

    def __init__(self) -> None:
        self.skipped = 0
        self._losses: list[float] = []
        self._ends_s: list[float] = []
        self._phases_s: dict[str, list[float]] = {}

    def add(self, loss: float, timings: dict[str, float], overflowed: bool = False) -> None:
        self.skipped += overflowed
        self._losses.append(loss)
        self._ends_s.append(time.perf_counter())
        for name, seconds in timings.items():
            self._phases_s.setdefault(name.removesuffix("_s"), []).append(seconds)

    def figures(self) -> dict[str, Any]:
        taken_s = [after - before for before, after in pairwise(self._ends_s)]
        return {
            "step_ms": middle_ms(taken_s),
            "phases_ms": {name: middle_ms(phase_s) for name, phase_s in self._phases_s.items()},
            "first_loss": statistics.mean(self._losses[:4]),
            "last_loss": statistics.mean(self._losses[-4:]),
            "skipped": self.skipped,
        }


def middle_ms(taken_s: list[float]) -> float:
    return 1e3 * statistics.median(taken_s[len(taken_s) // 4 :])


# -- processes -----------------------------------------------------------------------------------------


RUNS: dict[str, tuple[str, Any, str, int]] = {  # load, exchange, rate of each worker's link, steps
    "demo": ("demo", SPARSE, "20Mbit", 100),
    "gTop-k, 1 Gbit/s": ("gpt", gridtrain.GTopK(density=0.001, momentum=0.9), "1000Mbit", 12),
    "gTop-k, 20 Mbit/s": ("gpt", gridtrain.GTopK(density=0.001, momentum=0.9), "20Mbit", 12),
    "dense, 1 Gbit/s": ("gpt", gridtrain.Dense(), "1000Mbit", 8),
}
SMALL_RUNS: dict[str, tuple[str, Any, str, int]] = {"gTop-k, 20 Mbit/s": ("tiny", SPARSE, "20Mbit", 8)}


def processes(setting: Setting, store: Store) -> None:
    """Train in processes that share the device and limit their own rates.

    Raises `LabError` if a process fails, `RuntimeError` if the replicas differ.
    """
    found: dict[str, Any] = {}
    workers = 2 if setting.small else 4
    for name, (_, _, rate, _) in (SMALL_RUNS if setting.small else RUNS).items():
        options = {"device": setting.device, "small": setting.small, "name": name}
        reports = run_in_lab(work, options, workers, RUN_S, loopback=True, rate=rate)
        figures = sorted(reports.values(), key=lambda each: int(each.pop("rank")))
        found[name] = summary(figures, learns=name == "demo") | {"share": shares(figures[0])}
        store("runs", found)
        if "error" in found[name]:
            raise RuntimeError(f"{name}: {found[name]['error']}")


def shares(figures: dict[str, Any]) -> dict[str, float]:
    """Return the phases' shares of a step; "copies" between host and device are part of the phases."""
    copied_ms = sum(each["us"] for each in figures["copies"].values()) / 1e3
    phases_ms = figures["phases_ms"] | {"copies": copied_ms}
    return {name: ms / figures["step_ms"] for name, ms in phases_ms.items()}


def work(options: dict[str, Any]) -> dict[str, Any]:
    """Train as a worker of `processes`."""
    setting = Setting(options["device"], options["small"])
    load, exchange, _, steps = (SMALL_RUNS if setting.small else RUNS)[options["name"]]
    with gridtrain.join() as grid:
        way = Way(exchange, options={"clip_norm": 1.0})
        return train(grid, way, setting, LOADS[load], steps) | {"rank": grid.rank}
