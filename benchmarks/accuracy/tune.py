"""Searches learning rates of the runs to a target on a grid, with four workers in one process.

The best ones are written by hand into accuracy/workloads.py.  Exchanges are the product's, without a network
(`accuracy.butterfly`, `accuracy.dense_ring`).  Without it the dense exchanges of gridtrain and its rivals do
not differ, so the families dense and adamw are those of both.  Running averages of batch norm are of all
workers' batches here, while in a run each worker has its own.

    dense     SGD with momentum 0.9 on the mean gradient, clipped       gloo, hivemind, PowerSGD, Dense()
    sparse    gTop-k with DGC's momentum 0.9, its sum clipped, SGD      GTopK(), TopK()
    adamw     AdamW on the mean gradient, clipped                       gloo-adamw, Dense()
    local     LocalSteps(H, TopK(d, values="int8")), AdamW (`gridtrain.local`)
    local-sgd the same with SGD and momentum 0.9

    python -m accuracy.tune                                  (in benchmarks/; one CPU thread)
    python -m accuracy.tune --workloads gpt --families sparse --rates 0.2 0.4 --steps 100
    python -m accuracy.tune --workloads gpt --families local --gathered 4:0.1 8:0.1 --out FILE
    python -m accuracy.tune --workloads gpt --families sparse --rates 0.4 --values fp32 int8
    python -m accuracy.tune --workloads gpt --families dense adamw --values fp32 int8    Dense(values=...)
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import gridtrain
from accuracy.butterfly import WORKERS, Butterfly
from accuracy.dense_ring import DenseRing
from accuracy.train import parse, train
from accuracy.workloads import WORKLOADS, Settings, Workload, trained_of
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

LOCAL_EXCHANGES = {"local": "local-topk", "local-sgd": "local-topk-sgd"}
GATHERED = ("4:0.1", "8:0.1")
"""Local steps of an exchange, and its density."""

STEPS, MEASURE_EVERY, DENSITY = 250, 10, 0.05


@dataclass(frozen=True, slots=True)
class Trial:
    """A run with one setting.

    Attributes:
        reached: the step at which the workload's target was reached; None if it was not.
        least: the lowest measured held-out loss.
        gathered: of the local families.
        values: of the sparse family, if not fp16; of the dense ones, if sent through a ring.
    """

    workload: str
    family: str
    rate: float
    reached: int | None
    least: float
    gathered: str = ""
    seed: int = 0
    values: str = ""

    @property
    def variant(self) -> str:
        return self.gathered or self.values

    @property
    def rank(self) -> tuple[float, float]:
        """The order of trials, best first: sooner at the target, else with a lower loss."""
        return (math.inf if self.reached is None else self.reached, self.least)


def flat_gradient_N(workload: Workload, model: nn.Module, indices: Iterable[int]) -> Tensor:
    """Return the mean gradient of these samples, (n,) float32."""
    pairs = [workload.train[i] for i in indices]
    model.zero_grad()
    loss = workload.loss(model, torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs]))
    loss.backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def apply(model: nn.Module, update_N: Tensor, optimizer: torch.optim.Optimizer, clip_norm: float) -> None:
    parameters = trained_of(model)
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
    values: str = "",
) -> Trial:
    """Train once up to the target; all settings have the same start and the same samples."""
    model = workload.model(seed)
    settings: Settings = replace(workload.settings[family], learning_rate=rate)
    optimizer = settings.build(model, momentum=family != "sparse")
    n = sum(parameter.numel() for parameter in trained_of(model))
    exchange: Butterfly | DenseRing | None = DenseRing(n, values) if values else None
    if family == "sparse":
        exchange = Butterfly(n, DENSITY, VALUE_KINDS[values or "fp16"])
    generator = torch.Generator().manual_seed(seed + 1)
    size, order, least = workload.batch_size, [], math.inf
    for step in range(1, steps + 1):
        while len(order) < WORKERS * size:
            order += torch.randperm(len(workload.train), generator=generator).tolist()  # type: ignore[arg-type]
        taken, order = order[: WORKERS * size], order[WORKERS * size :]
        parts = [taken[i : i + size] for i in range(0, len(taken), size)]
        shares = [flat_gradient_N(workload, model, part) / WORKERS for part in parts]
        update_N = torch.stack(shares).sum(0) if exchange is None else exchange.exchange(shares)
        apply(model, update_N, optimizer, settings.clip_norm)
        if step % measure_every == 0 or step == steps:
            least = min(least, workload.held_out(model))
            if least <= workload.target:
                return Trial(workload.name, family, rate, step, least, seed=seed, values=values)
    return Trial(workload.name, family, rate, None, least, seed=seed, values=values)


def run_local(workload: Workload, family: str, rate: float, steps: int, gathered: str, seed: int) -> Trial:
    """Train once with the script of gridtrain's workers, all in this process (`gridtrain.local`)."""
    every, _, density = gathered.partition(":")
    with tempfile.TemporaryDirectory(prefix="tune-") as folder:
        arguments = ["--workload", workload.name, "--exchange", LOCAL_EXCHANGES[family], "--folder", folder]
        arguments += ["--gathered", every, density, "--until-loss", str(workload.target)]
        arguments += ["--learning-rate", repr(rate), "--steps", str(steps), "--seed", str(seed)]
        options = parse(arguments)
        gridtrain.local(partial(train, options), workers=WORKERS)
        lines = (Path(folder) / "steps.jsonl").read_text().splitlines()
    measured = [record for record in map(json.loads, lines) if record["held_out"] is not None]
    least = min(record["held_out"] for record in measured)
    reached = next(
        (int(record["step"]) for record in measured if record["held_out"] <= workload.target), None
    )
    return Trial(workload.name, family, rate, reached, least, gathered, seed)


def table(tried: Sequence[Trial]) -> str:
    """Return a table in Markdown, in which the best trial of each workload and family is marked."""
    best = {
        (t.workload, t.family): min(
            (u for u in tried if (u.workload, u.family) == (t.workload, t.family)), key=lambda u: u.rank
        )
        for t in tried
    }
    lines = ["| workload | family | H:density, values | rate | steps to the target | least held-out loss | |"]
    lines += ["|---|---|---|---:|---:|---:|---|"]
    for t in tried:
        reached = "-" if t.reached is None else str(t.reached)
        mark = "best" if best[t.workload, t.family] is t else ""
        lines.append(
            f"| {t.workload} | {t.family} | {t.variant} | {t.rate:g} | {reached} | {t.least:.3f} | {mark} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__
    parser = argparse.ArgumentParser(prog="python -m accuracy.tune", description=__doc__.splitlines()[0])
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
    parser.add_argument("--out", type=Path, help="add the trials to this JSON file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tried: list[Trial] = []
    for name in options.workloads:
        workload = WORKLOADS[name]()
        for family in options.families:
            for rate in options.rates or RATES[family]:
                for variant in variants_of(family, options):
                    if family in LOCAL_EXCHANGES:
                        found = run_local(workload, family, rate, options.steps, variant, options.seed)
                    else:
                        found = run(workload, family, rate, options.steps, seed=options.seed, values=variant)
                    tried.append(found)
                    print(f"{found}", file=sys.stderr, flush=True)
    print(table(tried))
    if options.out is not None:
        save(options.out, tried)


def variants_of(family: str, options: argparse.Namespace) -> Sequence[str]:
    """Return the variants of a family: H:density of local steps, kinds of values of the others."""
    return list(options.gathered) if family in LOCAL_EXCHANGES else list(options.values)


def save(path: Path, tried: Sequence[Trial]) -> None:
    """Add trials to the file, so that a grid can be searched in parts."""
    before = json.loads(path.read_text())["tried"] if path.exists() else []
    fresh = [asdict(one) for one in tried]
    whole = [one for one in before if one not in fresh] + fresh
    whole.sort(key=lambda one: (one["workload"], one["family"], one["gathered"], one["rate"], one["seed"]))
    made = {"command": "python -m accuracy.tune", "date": datetime.date.today().isoformat()}
    path.write_text(json.dumps({**made, "workers": WORKERS, "tried": whole}, indent=1) + "\n")


if __name__ == "__main__":
    main()
