"""Tune the demo: the same grid of learning rates for every exchange, four workers in one process.

Decides nothing at run time; what it finds is written by hand into gridtrain/tools/demo/recipe.py.  The
sparsifier and the merges are the product's own; only the network is left out.

    for each worker:   gradient / P -> ErrorFeedback.prepare -> payload
    butterfly:         merge with rank XOR 1, XOR 2, ...; kept values go to their owners' residuals
    all workers:       clip the sum, SGD

Run:  python benchmarks/tune_demo.py            (about 6 minutes on one CPU thread)
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gridtrain.network.wire.sparse_payload import ValueKind, decode
from gridtrain.sparsify.error_feedback import ErrorFeedback
from gridtrain.sparsify.merge import TruncatedEntries, merge
from gridtrain.tools.demo.byte_gpt import ByteGPT, Windows
from gridtrain.tools.demo.recipe import BATCH_SIZE, HELD_OUT_WINDOWS, MEASURE_EVERY, SIZES
from gridtrain.tools.demo.text_corpus import load_corpus

WORKERS = 4
CLIP_NORM = 1.0
MOMENTUM = 0.9
STEPS = 250
LEARNING_RATES = (0.1, 0.2, 0.3, 0.4, 0.6)
DENSITIES = (0.05, 0.02)
PAST = 150
"""The best sparse setting goes on this many steps, to see where it crosses dense's final loss."""


class Lesson:
    """Model, data and held-out subset; the same start for every setting."""

    def __init__(self, seed: int) -> None:
        size = SIZES["small"]
        corpus = load_corpus()
        self.windows = Windows(corpus.train, size.context)
        self.held_out = Windows(corpus.held_out, size.context).evenly_spaced(HELD_OUT_WINDOWS)
        self.order = torch.randperm(len(self.windows), generator=torch.Generator().manual_seed(seed))
        self.model = ByteGPT(size, seed=seed)
        self.parameters = list(self.model.parameters())
        self.n = sum(p.numel() for p in self.parameters)

    def gradient_N(self, first: int, count: int) -> Tensor:
        """Mean gradient over `count` windows from position `first` of the order, flat (n,)."""
        pairs = [self.windows[i] for i in self.order[first : first + count].tolist()]
        self.model.zero_grad()
        x_BT, y_BT = torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])
        self.model.loss(x_BT, y_BT).backward()  # type: ignore[no-untyped-call]
        return torch.cat([p.grad.flatten() for p in self.parameters if p.grad is not None])

    def apply(self, update_N: Tensor, optimizer: torch.optim.Optimizer) -> None:
        pieces = torch.split(update_N, [p.numel() for p in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter).clone()
        torch.nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM)
        optimizer.step()

    @torch.no_grad()
    def measure(self) -> float:
        return float(self.model.loss(*self.held_out))


class Butterfly:
    """gTop-k among WORKERS members without a network (see docs/exchanges.md)."""

    def __init__(self, n: int, density: float) -> None:
        self.n, self.k = n, max(1, round(density * n))
        self.feedback = [ErrorFeedback(n, "cpu", MOMENTUM) for _ in range(WORKERS)]

    def exchange(self, contributions: list[Tensor]) -> Tensor:
        kind = ValueKind.FP16
        prepared = [
            feedback.prepare(contribution, self.k, kind)
            for feedback, contribution in zip(self.feedback, contributions, strict=True)
        ]
        mine = [decode(p.payload, n=self.n, max_entries=self.k, kind=kind) for p in prepared]
        kept: list[list[TruncatedEntries]] = [[] for _ in range(WORKERS)]
        distance = 1
        while distance < WORKERS:
            merged = [
                merge(mine[r], mine[r ^ distance], n=self.n, k=self.k, kind=kind) for r in range(WORKERS)
            ]
            for rank, result in enumerate(merged):
                kept[rank].append(result.truncated_of_owner(2 * distance, rank % (2 * distance)))
            mine = [result.sparse for result in merged]
            distance *= 2
        for feedback, ready, back in zip(self.feedback, prepared, kept, strict=True):
            feedback.commit(ready, back)
        update_N = np.zeros(self.n, np.float32)
        update_N[mine[0].indices] = mine[0].values
        return torch.from_numpy(update_N)


def run(exchange: str, learning_rate: float, density: float, steps: int, seed: int) -> dict[str, Any]:
    """Train once; returns the setting with its held-out curve [[step, loss], ...]."""
    lesson = Lesson(seed)
    momentum = MOMENTUM if exchange == "dense" else 0.0
    optimizer = torch.optim.SGD(lesson.parameters, lr=learning_rate, momentum=momentum)
    butterfly = Butterfly(lesson.n, density) if exchange == "gtopk" else None
    samples = WORKERS * BATCH_SIZE
    curve: list[tuple[int, float]] = []
    started = time.perf_counter()
    for step in range(steps):
        if butterfly is None:
            update_N = lesson.gradient_N(step * samples, samples)
        else:
            first = range(step * samples, (step + 1) * samples, BATCH_SIZE)
            update_N = butterfly.exchange([lesson.gradient_N(f, BATCH_SIZE) / WORKERS for f in first])
        lesson.apply(update_N, optimizer)
        if (step + 1) % MEASURE_EVERY == 0:
            curve.append((step + 1, round(lesson.measure(), 4)))
    result = {
        "exchange": exchange,
        "density": density if exchange == "gtopk" else None,
        "learning_rate": learning_rate,
        "seed": seed,
        "at_250": dict(curve).get(STEPS),
        "seconds": round(time.perf_counter() - started, 1),
        "held_out": curve,
    }
    print(json.dumps({key: value for key, value in result.items() if key != "held_out"}), flush=True)
    return result


def tune(seed: int) -> dict[str, Any]:
    """The grid, then the best sparse setting further on."""
    dense = [run("dense", lr, 0.0, STEPS, seed) for lr in LEARNING_RATES]
    sparse = [run("gtopk", lr, density, STEPS, seed) for density in DENSITIES for lr in LEARNING_RATES]
    best_dense = min(dense, key=lambda result: result["at_250"])
    best_sparse = min(sparse, key=lambda result: result["at_250"])
    on = run("gtopk", best_sparse["learning_rate"], best_sparse["density"], STEPS + PAST, seed)
    target = best_dense["at_250"]
    crossed = next((step for step, loss in on["held_out"] if loss <= target), None)
    return {
        "best_dense": {"learning_rate": best_dense["learning_rate"], "at_250": target},
        "best_gtopk": {
            "learning_rate": on["learning_rate"],
            "density": on["density"],
            "at_250": on["at_250"],
            "steps_to_dense_final": crossed,
        },
        "runs": [*dense, *sparse, on],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "demo_tuning.json", metavar="FILE"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    heading = {
        "command": " ".join(["python benchmarks/tune_demo.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {_memory_gib()} GiB, no GPU, one thread used",
        "software": f"Python {platform.python_version()}, torch {torch.__version__}",
        "text": f"standard library source, SHA-256 {load_corpus().digest}",
        "workers": WORKERS,
        "batch_size": BATCH_SIZE,
        "clip_norm": CLIP_NORM,
        "momentum": MOMENTUM,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(heading | tune(arguments.seed), indent=1)
    pairs_on_one_line = re.sub(r"\[\s+([\d.]+),\s+([\d.]+)\s+\]", r"[\1, \2]", text)
    arguments.out.write_text(pairs_on_one_line + "\n")
    print(f"written: {arguments.out}")


def _memory_gib() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)


if __name__ == "__main__":
    main()
