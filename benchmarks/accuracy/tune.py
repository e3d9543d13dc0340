"""Searches learning rates of the runs to a target on a grid, with four workers in one process.

The best ones are written by hand into accuracy/workloads.py.  Without a network the dense exchanges of
gridtrain and its rivals do not differ, so the families dense and adamw are those of both.

    dense     SGD with momentum 0.9 on the mean gradient, clipped       gloo, PowerSGD, Dense()
    sparse    gTop-k with DGC's momentum 0.9, its sum clipped, SGD      GTopK(), TopK()
    adamw     AdamW on the mean gradient, clipped                       gloo-adamw, Dense()
    local     LocalSteps(H, TopK(d, values="int8")), AdamW
    local-sgd the same with SGD and momentum 0.9

    python -m accuracy.tune                                  (in benchmarks/; one CPU thread)
    python -m accuracy.tune --workloads gpt --families sparse --rates 0.2 0.4 --steps 100
    python -m accuracy.tune --workloads gpt --families local --gathered 4:0.1 8:0.1 --out FILE
    python -m accuracy.tune --workloads gpt --families sparse --rates 0.4 --values fp32 int8
    python -m accuracy.tune --workloads gpt --families dense adamw --values fp32 int8    Dense(values=...)
    python -m accuracy.tune --workloads gpt --families sparse --rates 0.4 --buckets 1 8  selection in buckets
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import record
from accuracy.train import WORKERS, Options, gathered, train_in_process
from accuracy.workloads import WORKLOADS
from gridtrain.network.wire.value_encoding import VALUE_KINDS

SGD_RATES = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 3.0)
ADAMW_RATES = (0.001, 0.002, 0.003, 0.004, 0.006, 0.01, 0.02, 0.03)
RATES = {
    "dense": SGD_RATES,
    "sparse": SGD_RATES,
    "adamw": ADAMW_RATES,
    "local": ADAMW_RATES,
    "local-sgd": SGD_RATES,
}
"""The grids of all workloads."""

GATHERED = ("4:0.1", "8:0.1")
"""Local steps of an exchange, and its density."""

STEPS, DENSITY = 250, 0.05


@dataclass(frozen=True, slots=True)
class Trial:
    """A run with one setting.

    Attributes:
        reached: the step at which the workload's target was reached; None if it was not.
        least: the lowest measured held-out loss.
        gathered: of the local families.
        values: of the sparse family, if not fp16; of the dense ones, if sent through a ring.
        buckets: of the sparse family: at most so many parts select each for itself, as with `Overlap`.
    """

    workload: str
    family: str
    rate: float
    reached: int | None
    least: float
    gathered: str = ""
    seed: int = 0
    values: str = ""
    buckets: int = 0

    @property
    def rank(self) -> tuple[float, float]:
        """The order of trials, best first: sooner at the target, else with a lower loss."""
        return (math.inf if self.reached is None else self.reached, self.least)


def run(
    workload: str,
    family: str,
    rate: float,
    steps: int = STEPS,
    variant: str = "",
    seed: int = 0,
    buckets: int = 0,
) -> Trial:
    """Train once up to the target.

    Args:
        variant: H:density of the local families, the kind of values of the others.
    """
    named: dict[str, Any] = {"gathered": variant} if family.startswith("local") else {"values": variant}
    named |= {"seed": seed, "buckets": buckets}
    if family.startswith("local"):
        every, _, density = variant.partition(":")
        how = gathered(every, density)
    elif family == "sparse":
        exchange = f"gtopk:density={DENSITY},momentum=0.9,values={variant or 'fp16'}"
        how = {"exchange": exchange, "buckets": buckets}
    else:
        how = {"exchange": f"dense:topology=ring,values={variant}" if variant else "dense"}
    target = WORKLOADS[workload].target
    records = train_in_process(
        Options(workload, family, steps=steps, learning_rate=rate, until_loss=target, seed=seed, **how)
    )
    measured = [(each["step"], each["held_out"]) for each in records if each["held_out"] is not None]
    reached = next((int(step) for step, loss in measured if loss <= target), None)
    return Trial(workload, family, rate, reached, min(loss for _, loss in measured), **named)


def markdown(tried: Sequence[Trial]) -> str:
    """Return a table in which the best trial of each workload and family is marked."""
    best: dict[tuple[str, str], Trial] = {}
    for t in sorted(tried, key=lambda trial: trial.rank):
        best.setdefault((t.workload, t.family), t)
    heads = ("workload", "family", "H:density, values, buckets", "rate", "steps to the target")
    rows = [
        (
            *(
                t.workload,
                t.family,
                t.gathered or t.values,
                f"{t.rate:g}",
                t.reached or "-",
                f"{t.least:.3f}",
            ),
            "best" if best[t.workload, t.family] is t else "",
        )
        for t in tried
    ]
    return record.table((*heads, "least held-out loss", ""), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = record.parser(__doc__, "add the trials to this JSON file")
    parser.add_argument("--workloads", nargs="+", default=sorted(WORKLOADS), choices=sorted(WORKLOADS))
    parser.add_argument("--families", nargs="+", default=list(RATES), choices=list(RATES))
    parser.add_argument("--rates", nargs="+", type=float, help="instead of the grid")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--gathered", nargs="+", default=GATHERED, metavar="H:DENSITY", help="of local families"
    )
    parser.add_argument(
        "--values", nargs="+", default=[""], choices=list(VALUE_KINDS), help="of sparse and dense families"
    )
    parser.add_argument("--buckets", nargs="+", type=int, default=[0], help="of the sparse family")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tried: list[Trial] = []
    for name, family in itertools.product(options.workloads, options.families):
        variants = options.gathered if family.startswith("local") else options.values
        grid = itertools.product(options.rates or RATES[family], variants, options.buckets)
        for rate, variant, buckets in grid:
            tried.append(run(name, family, rate, options.steps, variant, options.seed, buckets))
            print(tried[-1], file=sys.stderr, flush=True)
    print(markdown(tried))
    if options.out is not None:
        save(options.out, tried, arguments)


def save(path: Path, tried: Sequence[Trial], arguments: Sequence[str] | None = None) -> None:
    """Add trials to the file, so that a grid can be searched in parts."""
    before = json.loads(path.read_text())["tried"] if path.exists() else []
    fresh = [asdict(one) for one in tried]
    whole = [one for one in before if one not in fresh] + fresh
    whole.sort(key=lambda one: (one["workload"], one["family"], one["gathered"], one["rate"], one["seed"]))
    record.write(path, arguments, workers=WORKERS, tried=whole)


if __name__ == "__main__":
    main()
