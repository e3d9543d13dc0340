"""What kinds of values and topologies of gTop-k cost in loss: the demo's GPT, four workers in one process.

Decides nothing at run time.  Selection, error feedback, cores and workspaces are the product's own, on the
simulated network; only sockets are left out.  The demo's recipe for gTop-k (learning rate, momentum, bound on
the norm), the same start and the same batches for each line.

Run:  cd benchmarks; python loss_of_values.py [--seeds 0 1] [--out FILE]     (a minute for each line and seed)
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / part) for part in ("common", "")]

from collective_group import CollectiveGroup

from gridtrain.network.wire.value_encoding import VALUE_KINDS
from gridtrain.runtime.buffers.star_buffers import SPARSE_BUFFERS
from gridtrain.sparsify.error_feedback import ErrorFeedback
from gridtrain.tools.demo.recipe import RECIPES
from tune_demo import BATCH_SIZE, MOMENTUM, WORKERS, Lesson

STEPS = 250
LINES = (
    ("fp32", "butterfly", 0.05),
    ("fp16", "butterfly", 0.05),
    ("bf16", "butterfly", 0.05),
    ("int8", "butterfly", 0.05),
    ("fp16", "tree", 0.05),
    ("fp16", "star", 0.05),
    ("fp16", "butterfly", 0.01),
    ("int8", "butterfly", 0.01),
)


@dataclass(frozen=True)
class Result:
    """`rounding`: norm of what encoding took from what was selected, as a part of the norm of that."""

    values: str
    topology: str
    density: float
    seed: int
    payload_bytes: int
    rounding: float
    held_out: float


def run(values: str, topology: str, density: float, seed: int, steps: int) -> Result:
    lesson, kind = Lesson(seed), VALUE_KINDS[values]
    n, k = lesson.n, max(1, round(density * lesson.n))
    feedbacks = [ErrorFeedback(n, "cpu", MOMENTUM) for _ in range(WORKERS)]
    optimizer = torch.optim.SGD(lesson.parameters, lr=RECIPES["gtopk"].learning_rate)
    roundings, payload_bytes = [], 0

    def exchange(contributions: list[Tensor]) -> Tensor:
        nonlocal payload_bytes
        prepared = [
            feedback.prepare(contribution, k, kind)
            for feedback, contribution in zip(feedbacks, contributions, strict=True)
        ]
        first = prepared[0]
        assert first.new_residual_N is not None
        left = first.new_residual_N.numpy()[first.decoded.indices]
        roundings.append(float(np.linalg.norm(left) / np.linalg.norm(left + first.decoded.values)))
        payload_bytes = len(first.payload)
        made = SPARSE_BUFFERS[topology]
        workspaces = [made(p.payload, n=n, k=k, kind=kind, decoded=p.decoded) for p in prepared]
        CollectiveGroup(workspaces, seed=seed).run()
        for feedback, ready, workspace in zip(feedbacks, prepared, workspaces, strict=True):
            feedback.commit(ready, workspace.truncated)
        update = workspaces[0].update
        update_N = torch.zeros(n)
        update_N[torch.from_numpy(update.indices)] = torch.from_numpy(update.values.copy())
        return update_N

    samples = WORKERS * BATCH_SIZE
    for step in range(steps):
        first = range(step * samples, (step + 1) * samples, BATCH_SIZE)
        lesson.apply(exchange([lesson.gradient_N(f, BATCH_SIZE) / WORKERS for f in first]), optimizer)
    return Result(
        values, topology, density, seed, payload_bytes, statistics.median(roundings), lesson.measure()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for values, topology, density in LINES:
        found = [run(values, topology, density, seed, options.steps) for seed in options.seeds]
        results += found
        losses = ", ".join(f"{result.held_out:.3f}" for result in found)
        print(
            f"{values:<6}{topology:<11}{density:<6g}{found[0].payload_bytes:>8} B  rounding "
            f"{found[0].rounding:.2e}  held-out loss at {options.steps}: {losses}",
            flush=True,
        )
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
