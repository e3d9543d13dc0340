"""The speed of selection on a GPU, and copies to the host."""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import selection as bench
from gpu.parts import Setting, Store
from gridtrain.config import Dense, Exchange, GTopK
from gridtrain.runtime.mailbox.step_plan import StepPlan
from gridtrain.training.checkpoint.flat_gradient import FlatGradient
from gridtrain.training.exchangers import make_exchanger

DENSITY = 0.001
SIZES = (1_000_000, 16_000_000, 128_000_000, 1_000_000_000)
TOGETHER = 200_000_000  # the vectors of all cases of this length fit into the memory of one card
CASE_BYTES = 64  # of an element, for the largest case with its temporary tensors
GOAL_CASES = ("ours: residual update, carried", "ours: weight, momentum, carried")
TIMED_STEPS, WARM_UP_STEPS = 9, 5
GOAL = 2.0
"""The bound of selection's time over the time of its memory traffic."""


# -- selection beside other methods ------------------------------------------------------------------


def selection(setting: Setting, store: Store) -> None:
    """Time selection with residual and momentum beside torch.topk, DGC's sampled threshold and a copy."""
    blocks: list[dict[str, Any]] = []
    for n in sizes(setting):
        try:
            figures = bench.measure(
                n, DENSITY, torch.device(setting.device), TIMED_STEPS, 20.0, alternate=n <= TOGETHER
            )
            blocks.append(bench.block_of(n, DENSITY, 1, figures))
        except torch.cuda.OutOfMemoryError as error:
            blocks.append({"n": n, "error": str(error).splitlines()[0]})
        store("blocks", blocks)
        gc.collect()
        if setting.is_gpu:
            torch.cuda.empty_cache()
    measured = [block for block in blocks if "cases" in block]
    if len(measured) < len(blocks):
        raise RuntimeError(f"not enough memory for n = {[b['n'] for b in blocks if 'error' in b]}")
    ratios = {name: measured[-1]["cases"][name]["x_bytes"] for name in GOAL_CASES}
    store("goal", {"at_most": GOAL, "n": measured[-1]["n"], "met": max(ratios.values()) <= GOAL, **ratios})


def sizes(setting: Setting) -> list[int]:
    if setting.small:
        return [4096, 20_000]
    with torch.cuda.device(setting.device):  # in torch 2.4, `mem_get_info` refuses "cuda"
        free_bytes, _ = torch.cuda.mem_get_info()
    return sorted({min(n, free_bytes // CASE_BYTES) for n in SIZES})


# -- copies, memory, the times of a step ---------------------------------------------------------------


def transfers(setting: Setting, store: Store) -> None:
    """Measure what a step copies to the host, its peak memory a parameter, and the times of its phases.

    Raises `RuntimeError` if a sparse exchange copies more to the host than its entries, or if no copy was
    recorded on a GPU.
    """
    n = 4096 if setting.small else 25_600_000
    exchanges: dict[str, Exchange] = {
        "gtopk": GTopK(density=DENSITY),
        "gtopk, momentum": GTopK(density=DENSITY, momentum=0.9),
        "dense": Dense(),
    }
    found = {name: one_worker(setting, n, exchange) for name, exchange in exchanges.items()}
    store("steps", found)
    store("to_host_ms", {name: to_host_ms(setting, n, name == "pinned") for name in ("pageable", "pinned")})
    k = round(DENSITY * n)
    for name, figures in found.items():
        copied = sum(each["bytes"] for kind, each in figures["copies"].items() if "DtoH" in kind)
        if setting.is_gpu and not copied:
            raise RuntimeError(
                f"{name}: torch's profiler recorded no copy to the host, so nothing was measured -> "
                "allow access to the GPU's performance counters (CUPTI)"
            )
        if name != "dense" and copied > 2 * (4 + 8 * k):  # twice after a threshold that was too high
            raise RuntimeError(f"{name}: {copied} bytes were copied to the host for k = {k} entries")


def one_worker(setting: Setting, n: int, exchange: Exchange) -> dict[str, Any]:
    """Take steps with a model of n parameters, without a network; return their figures."""
    device = torch.device(setting.device)
    if setting.is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device) if setting.is_gpu else 0
    model = nn.ParameterList([nn.Parameter(torch.zeros(n, device=device))])
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    flat = FlatGradient(model, sgd)
    exchanger = make_exchanger(exchange, (0, n), device)
    generator = torch.Generator(device).manual_seed(1)
    model[0].grad = torch.randn(n, device=device, generator=generator)
    laps: dict[str, list[float]] = {}

    @contextmanager
    def lap(name: str) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        bench.settle(device)
        laps.setdefault(name, []).append(time.perf_counter() - began_s)

    def step(number: int) -> None:
        with lap("gather"):
            flat.gather()
        with lap("select, encode"):
            plan = StepPlan(number, 0, 0, 2, 1, 2)
            attempt = exchanger.prepare_bucket(0, flat.flat_N, plan, usable=True)
        with lap("commit, load"):
            if attempt.prepared is not None and exchanger.feedback is not None:
                exchanger.feedback.commit(attempt.prepared, [])
                flat.load_update(attempt.prepared.decoded)
            else:
                flat.load_update(exchanger.commit(attempt))
            flat.scatter()
        with lap("optimizer"):
            sgd.step()
        model[0].grad.normal_(generator=generator)

    for number in range(WARM_UP_STEPS + (2 if setting.small else TIMED_STEPS)):
        step(number)
    peak = (torch.cuda.max_memory_allocated(device) - before_bytes) / n if setting.is_gpu else None
    ms = {name: 1e3 * statistics.median(taken_s[WARM_UP_STEPS:]) for name, taken_s in laps.items()}
    copies = copies_of(lambda: step(99), setting)
    return {"n": n, "peak_bytes_a_parameter": peak, "ms": ms, "copies": copies}


def to_host_ms(setting: Setting, n: int, pinned: bool) -> float:
    """Return the median duration of copying a whole gradient to the host."""
    device = torch.device(setting.device)
    source_N = torch.ones(n, device=device)
    target_N = torch.empty(n, pin_memory=pinned and setting.is_gpu)
    taken_s = []
    for _ in range(TIMED_STEPS):
        bench.settle(device)
        began_s = time.perf_counter()
        target_N.copy_(source_N)
        taken_s.append(time.perf_counter() - began_s)
    return 1e3 * statistics.median(taken_s)


def copies_of(run: Callable[[], object], setting: Setting) -> dict[str, dict[str, float]]:
    """Return the copies between host and device while `run` runs; see `copies_in`."""
    if not setting.is_gpu:
        run()
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        bench.settle(torch.device(setting.device))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        return copies_in(json.loads(path.read_text()))


def copies_in(trace: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Sum up the copies of a profiler's trace by kind, such as "DtoH (Device -> Pinned)"."""
    found: dict[str, dict[str, float]] = {}
    for event in trace["traceEvents"]:
        if event.get("cat") == "gpu_memcpy" and not event["name"].startswith("Memcpy DtoD"):
            kind = found.setdefault(
                event["name"].removeprefix("Memcpy "), {"count": 0, "bytes": 0, "us": 0.0}
            )
            kind["count"] += 1
            kind["bytes"] += event["args"]["bytes"]
            kind["us"] += event["dur"]
    return found
