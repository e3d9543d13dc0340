"""Measures what local steps cost in learning and save in bytes, with a GPT, AdamW and four workers.

docs/local-steps.md has its table.  The groups are real, with workers in threads and connections in memory.
All settings use the same samples in each step.

    setting            exchange a step                            outer
    dense, gtopk       AdamW on the exchanged gradient            -
    local              AdamW alone, one exchange in H steps       averaging, or Nesterov momentum

Run:  python benchmarks/local_steps.py                  (about 6 minutes on two idle CPU cores)
      python benchmarks/local_steps.py --only H=16      (settings whose names contain it)
      python benchmarks/local_steps.py --workload gpt-10m --lr 0.0005 --overlap 4 --only H=16 --steps 384
      python benchmarks/emulated.py local-steps         (share of computing time on slow links)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import record
from accuracy.train import WORKERS, Options, train_in_process
from accuracy.workloads import WORKLOADS

MEASURED = 4
"""Number of measurements of the held-out loss, each directly after an exchange in all settings."""

ROUND_STEPS = 32 * MEASURED
LINK_Bps = 20e6 / 8
DENSE, SPARSE, SPARSER, GATHERED = "Dense", "GTopK 0.03", "GTopK 0.01", "TopK 0.03"
AVERAGING, SOME, DILOCO = (1.0, 0.0), (0.7, 0.5), (0.7, 0.9)  # outer learning rate and momentum
LOCAL: tuple[tuple[int, str, tuple[tuple[float, float], ...]], ...] = (
    *((4, exchange, (AVERAGING,)) for exchange in (DENSE, SPARSE, SPARSER)),
    *((16, exchange, (AVERAGING, SOME, DILOCO)) for exchange in (DENSE, SPARSE)),
    *((16, exchange, (AVERAGING,)) for exchange in (SPARSER, GATHERED)),
    (32, DENSE, (AVERAGING, DILOCO)),
    *((32, exchange, (AVERAGING,)) for exchange in (SPARSE, SPARSER, GATHERED)),
)


def settings(workload: str, steps: int, learning_rate: float, overlap: bool | int) -> dict[str, Options]:
    """Return the options of each setting, by its name."""

    def options(shared: str, family: str) -> Options:
        name, _, density = shared.lower().partition(" ")
        exchange = f"{name}:density={density}" if density else name
        every = steps // MEASURED
        return Options(
            workload, family, exchange, steps=steps, measure_every=every, learning_rate=learning_rate
        )

    rate = f"lr {learning_rate:g}"
    found = {f"{shared}, each step, {rate}": options(shared, "adamw") for shared in (DENSE, SPARSE, SPARSER)}
    for every, shared, outers in LOCAL:
        for outer in outers:
            name = f"{shared}, H={every}, outer lr {outer[0]:g} momentum {outer[1]:g}, {rate}"
            found[name] = replace(options(shared, "local"), every=every, outer=outer)
    if overlap:
        for name, alone in list(found.items()):
            if alone.every >= max(1, overlap):
                steps_of_overlap = alone.every if overlap is True else overlap
                found[f"{name}, overlap {steps_of_overlap}"] = replace(alone, overlap=overlap)
    return found


def measure(name: str, options: Options) -> dict[str, Any]:
    """Train; return the held-out loss and the bytes sent by the first worker at `MEASURED` points."""
    points = {r["step"]: r for r in train_in_process(options) if r["held_out"] is not None}
    return {
        "name": name,
        "exchange": options.make_exchange().describe(),
        "learning_rate": options.learning_rate,
        "steps": list(points),
        "held_out": [point["held_out"] for point in points.values()],
        "sent_bytes": [point["sent_bytes"] for point in points.values()],
        "seconds": round(list(points.values())[-1]["seconds"], 1),
    }


def table(results: list[dict[str, Any]]) -> str:
    """Return a table in Markdown; bytes are compared with a dense exchange in each step."""
    dense = next((r["sent_bytes"][-1] for r in results if r["name"].startswith("Dense, each")), None)
    heads = ["setting", *(f"loss at {taken}" for taken in results[0]["steps"]), "MB sent", "of dense"]
    rows = []
    for r in results:
        sent = r["sent_bytes"][-1]
        part = (
            "" if dense is None else f"1/{dense / sent:.0f}" if sent < 0.6 * dense else f"{sent / dense:.2f}"
        )
        losses = [f"{loss:.3f}" for loss in r["held_out"]]
        rows.append([r["name"], *losses, f"{sent / 1e6:.2f}", part, f"{sent / LINK_Bps:.1f}"])
    return record.table([*heads, "s at 20 Mbit/s"], rows)


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--steps", type=int, default=256, help=f"of each worker; a multiple of {ROUND_STEPS}")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="gpt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", metavar="TEXT", help="may be given several times")
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument(
        "--overlap", type=int, nargs="?", const=True, default=False, metavar="STEPS",
        help="also train local steps with overlap, of STEPS steps or of all",
    )  # fmt: skip
    parser.set_defaults(out=record.RESULTS / "local_steps.json")
    options = parser.parse_args()
    if options.steps % ROUND_STEPS:
        parser.error(f"--steps must be a multiple of {ROUND_STEPS}")
    torch.set_num_threads(1)
    results = []
    for name, chosen in settings(options.workload, options.steps, options.lr, options.overlap).items():
        if any(text in name for text in options.only or [""]):
            results.append(measure(name, replace(chosen, seed=options.seed)))
            print(f"{name:60} {results[-1]['held_out'][-1]:.3f}  {results[-1]['seconds']} s", flush=True)
            of = {"workers": WORKERS, "workload": options.workload, "seed": options.seed}
            record.write(options.out, **of, results=results)
    if results:
        print(table(results))


if __name__ == "__main__":
    main()
