"""Measures what local steps cost in learning and save in bytes, with a GPT, AdamW and four workers.

docs/local-steps.md has its table.  The groups are real, with workers in threads and connections in memory.
All settings use the same samples in each step.

    setting            exchange a step                            outer
    dense, gtopk       AdamW on the exchanged gradient            -
    local              AdamW alone, one exchange in H steps       averaging, or Nesterov momentum

Run:  python benchmarks/local_steps.py                  (about 6 minutes on two idle CPU cores)
      python benchmarks/local_steps.py --only H=16      (settings whose names contain it)
      python benchmarks/local_steps.py --workload gpt-10m --lr 0.0005 --overlap 4 --only H=16 --steps 384
      python benchmarks/local_steps.py --table          (the latest results as a table)
      python benchmarks/local_steps_lab.py              (share of computing time on slow links)
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import gridtrain
from accuracy.workloads import WORKLOADS, Workload
from gridtrain import Dense, GTopK, LocalSteps, TopK
from gridtrain.config import Exchange

WORKERS = 4
STEPS = 256
MEASURED = 4
"""Number of measurements of the held-out loss, each directly after an exchange in all settings."""
ROUND_STEPS = 32 * MEASURED
RESULTS = Path(__file__).parent / "results" / "local_steps.json"
LINK_Bps = 20e6 / 8

DENSE, SPARSE, SPARSER, GATHERED = (
    Dense(),
    GTopK(density=0.03),
    GTopK(density=0.01),
    TopK(density=0.03),
)
AVERAGING, SOME, DILOCO = (1.0, 0.0), (0.7, 0.5), (0.7, 0.9)  # outer learning rate and momentum
LOCAL: tuple[tuple[int, Exchange, tuple[tuple[float, float], ...]], ...] = (
    (4, DENSE, (AVERAGING,)),
    (4, SPARSE, (AVERAGING,)),
    (4, SPARSER, (AVERAGING,)),
    (16, DENSE, (AVERAGING, SOME, DILOCO)),
    (16, SPARSE, (AVERAGING, SOME, DILOCO)),
    (16, SPARSER, (AVERAGING,)),
    (16, GATHERED, (AVERAGING,)),
    (32, DENSE, (AVERAGING, DILOCO)),
    (32, SPARSE, (AVERAGING,)),
    (32, SPARSER, (AVERAGING,)),
    (32, GATHERED, (AVERAGING,)),
)


@dataclass(frozen=True)
class Setting:
    exchange: Exchange | LocalSteps
    learning_rate: float = 0.003

    @property
    def name(self) -> str:
        shared = self.exchange.exchange if isinstance(self.exchange, LocalSteps) else self.exchange
        kind = type(shared).__name__
        text = kind if isinstance(shared, Dense) else f"{kind} {shared.density:g}"
        if not isinstance(self.exchange, LocalSteps):
            return f"{text}, each step, lr {self.learning_rate:g}"
        outer = f"outer lr {self.exchange.outer_learning_rate:g} momentum {self.exchange.outer_momentum:g}"
        overlap = f", overlap {self.exchange.overlapped_steps}" if self.exchange.overlap else ""
        return f"{text}, H={self.exchange.every}, {outer}, lr {self.learning_rate:g}{overlap}"


def settings(learning_rate: float, overlap: bool | int) -> list[Setting]:
    each = [Setting(exchange, learning_rate) for exchange in (DENSE, SPARSE, SPARSER)]
    local = (LocalSteps(h, shared, *outer) for h, shared, outers in LOCAL for outer in outers)
    found = each + [Setting(exchange, learning_rate) for exchange in local]
    if overlap:
        found += [
            replace(setting, exchange=replace(setting.exchange, overlap=overlap))
            for setting in found
            if isinstance(setting.exchange, LocalSteps) and setting.exchange.every >= overlap
        ]
    return found


def train(workload: Workload, setting: Setting, steps: int, seed: int) -> dict[str, Any]:
    """Train; return the held-out loss and the bytes sent by a worker at `MEASURED` points."""
    every = setting.exchange.every if isinstance(setting.exchange, LocalSteps) else 1

    def loop(grid: gridtrain.Grid) -> list[tuple[int, float, int]]:
        model = workload.model(seed)
        inner = torch.optim.AdamW(model.parameters(), lr=setting.learning_rate)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of the effects that are measured here
            optimizer = grid.optimizer(inner, model, exchange=setting.exchange)

        def held_out_loss() -> float:
            if not grid.is_first:
                return float("nan")
            with grid.evaluation():
                return workload.held_out(model)

        curve: list[tuple[int, float, int]] = []
        batches = grid.batches(
            workload.train, batch_size=workload.batch_size, steps=steps // every, seed=seed
        )
        for taken, (x_BT, y_BT) in enumerate(batches, 1):
            workload.loss(model, x_BT, y_BT).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if taken % (steps // MEASURED) == 0:
                curve.append((taken, held_out_loss(), grid.traffic.get("Data", (0, 0))[0]))
        # With overlap, the last changes are exchanged after the last local step.
        return [*curve[:-1], (taken, held_out_loss(), grid.traffic.get("Data", (0, 0))[0])]

    began_s = time.perf_counter()
    curves = gridtrain.local(loop, workers=WORKERS)
    measured = [next(loss for _, loss, _ in at if loss == loss) for at in zip(*curves, strict=True)]
    sent = [sum(sent for _, _, sent in at) / WORKERS for at in zip(*curves, strict=True)]
    return {
        "name": setting.name,
        "exchange": setting.exchange.describe(),
        "learning_rate": setting.learning_rate,
        "steps": [taken for taken, _, _ in curves[0]],
        "held_out": measured,
        "sent_bytes": sent,
        "seconds": round(time.perf_counter() - began_s, 1),
    }


def table(results: list[dict[str, Any]]) -> str:
    """Return a table in Markdown; bytes are compared with a dense exchange in each step."""
    dense = next((r["sent_bytes"][-1] for r in results if r["name"].startswith("Dense, each")), None)
    steps = results[0]["steps"]
    head = ["setting", *(f"loss at {taken}" for taken in steps), "MB sent", "of dense", "s at 20 Mbit/s"]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for r in results:
        sent = r["sent_bytes"][-1]
        part = (
            "" if dense is None else f"1/{dense / sent:.0f}" if sent < 0.6 * dense else f"{sent / dense:.2f}"
        )
        cells = [r["name"], *(f"{loss:.3f}" for loss in r["held_out"]), f"{sent / 1e6:.2f}", part]
        lines.append("| " + " | ".join([*cells, f"{sent / LINK_Bps:.1f}"]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=STEPS, help=f"of each worker; a multiple of {ROUND_STEPS}"
    )
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="gpt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", metavar="TEXT", help="may be given several times")
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument(
        "--overlap", type=int, nargs="?", const=True, default=False, metavar="STEPS",
        help="also train local steps with overlap, of STEPS steps or of all",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="only print the results in --out")
    options = parser.parse_args()
    if options.steps % ROUND_STEPS:
        parser.error(f"--steps must be a multiple of {ROUND_STEPS}")
    if options.table:
        print(table(json.loads(options.out.read_text())["results"]))
        return
    torch.set_num_threads(1)
    results, workload = [], WORKLOADS[options.workload]()
    chosen = settings(options.lr, options.overlap)
    for setting in (s for s in chosen if any(text in s.name for text in options.only or [""])):
        results.append(train(workload, setting, options.steps, options.seed))
        print(f"{setting.name:60} {results[-1]['held_out'][-1]:.3f}  {results[-1]['seconds']} s", flush=True)
        document = {
            "date": datetime.date.today().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
            "workers": WORKERS,
            "workload": workload.name,
            "batch_size": workload.batch_size,
            "seed": options.seed,
            "results": results,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    if results:
        print(table(results))


if __name__ == "__main__":
    main()
