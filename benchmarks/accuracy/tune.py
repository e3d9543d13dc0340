"""Learning rates of the runs to a target: one grid for every family, four workers in one process.

Decides nothing at run time; what it finds is written by hand into accuracy/workloads.py.  Sparsifier and
merges are the product's own (`tune_demo.Butterfly`); only the network is left out, and with it what differs
between ours and the rivals: dense and AdamW are one family for both.  Running averages of batch norm are of
all workers' batches here, where each worker has its own in a run.

    dense    SGD with momentum 0.9 on the mean gradient, clipped        gloo, hivemind, PowerSGD, Dense()
    sparse   gTop-k with DGC's momentum 0.9, its sum clipped, SGD       GTopK(), TopK()
    adamw    AdamW on the mean gradient, clipped                        gloo-adamw; of LocalSteps the rate

    python -m accuracy.tune                                  (in benchmarks/; one CPU thread)
    python -m accuracy.tune --workloads gpt --families sparse --rates 0.2 0.4 --steps 100
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from accuracy.workloads import WORKLOADS, Settings, Workload
from tune_demo import WORKERS, Butterfly

SGD_RATES = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5)
RATES = {"dense": SGD_RATES, "sparse": SGD_RATES, "adamw": (0.001, 0.002, 0.003, 0.006, 0.01)}
"""The same for every workload; those of both SGD families are the same, too."""

STEPS, MEASURE_EVERY, DENSITY = 250, 10, 0.05


@dataclass(frozen=True, slots=True)
class Tried:
    """One setting.  `reached`: the step at which the workload's target was; None: it was not.
    `least`: the lowest held-out loss, of all that were measured."""

    workload: str
    family: str
    rate: float
    reached: int | None
    least: float

    @property
    def rank(self) -> tuple[float, float]:
        """Smaller is better: sooner at the target, and, where it is not reached, lower."""
        return (math.inf if self.reached is None else self.reached, self.least)


def flat_gradient_N(workload: Workload, model: nn.Module, indices: Iterable[int]) -> Tensor:
    """Mean gradient over these samples, (n,) float32."""
    pairs = [workload.train[i] for i in indices]
    model.zero_grad()
    loss = workload.loss(model, torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs]))
    loss.backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def apply(model: nn.Module, update_N: Tensor, optimizer: torch.optim.Optimizer, clip_norm: float) -> None:
    parameters = list(model.parameters())
    for parameter, piece in zip(parameters, update_N.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = piece.view_as(parameter).clone()
    torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    optimizer.step()


def run(
    workload: Workload,
    family: str,
    rate: float,
    steps: int = STEPS,
    measure_every: int = MEASURE_EVERY,
    seed: int = 0,
) -> Tried:
    """Train once, each setting from the same start with the same samples; ends at the target."""
    model = workload.model(seed)
    settings: Settings = replace(workload.settings[family], learning_rate=rate)
    optimizer = settings.build(model, momentum=family != "sparse")
    n = sum(parameter.numel() for parameter in model.parameters())
    butterfly = Butterfly(n, DENSITY) if family == "sparse" else None
    generator = torch.Generator().manual_seed(seed + 1)
    size, order, least = workload.batch_size, [], math.inf
    for step in range(1, steps + 1):
        while len(order) < WORKERS * size:
            order += torch.randperm(len(workload.train), generator=generator).tolist()  # type: ignore[arg-type]
        taken, order = order[: WORKERS * size], order[WORKERS * size :]
        parts = [taken[i : i + size] for i in range(0, len(taken), size)]
        shares = [flat_gradient_N(workload, model, part) / WORKERS for part in parts]
        update_N = torch.stack(shares).sum(0) if butterfly is None else butterfly.exchange(shares)
        apply(model, update_N, optimizer, settings.clip_norm)
        if step % measure_every == 0 or step == steps:
            least = min(least, workload.held_out(model))
            if least <= workload.target:
                return Tried(workload.name, family, rate, step, least)
    return Tried(workload.name, family, rate, None, least)


def table(tried: Sequence[Tried]) -> str:
    """Markdown; the best of each workload and family is marked."""
    best = {
        (t.workload, t.family): min(
            (u for u in tried if (u.workload, u.family) == (t.workload, t.family)), key=lambda u: u.rank
        )
        for t in tried
    }
    lines = ["| workload | family | rate | steps to the target | least held-out loss | |"]
    lines += ["|---|---|---:|---:|---:|---|"]
    for t in tried:
        reached = "-" if t.reached is None else str(t.reached)
        mark = "best" if best[t.workload, t.family] is t else ""
        lines.append(f"| {t.workload} | {t.family} | {t.rate:g} | {reached} | {t.least:.3f} | {mark} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__
    parser = argparse.ArgumentParser(prog="python -m accuracy.tune", description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", default=sorted(WORKLOADS), choices=sorted(WORKLOADS))
    parser.add_argument("--families", nargs="+", default=list(RATES), choices=list(RATES))
    parser.add_argument("--rates", nargs="+", type=float, help="instead of the grid")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tried: list[Tried] = []
    for name in options.workloads:
        workload = WORKLOADS[name]()
        for family in options.families:
            for rate in options.rates or RATES[family]:
                tried.append(run(workload, family, rate, options.steps, seed=options.seed))
                print(f"{tried[-1]}", file=sys.stderr, flush=True)
    print(table(tried))


if __name__ == "__main__":
    main()
