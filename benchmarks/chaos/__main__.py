"""`python -m chaos`: a calm run, a run under faults, and a report that compares their rates.

    python -m chaos --minutes 2 --every 5 --seed 1 --workers 6 --out FOLDER

Exit code 1: a guarantee was violated, or no step was committed for 60 s.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import record
from chaos import report
from chaos.execution import RATE, Plan, execute, possible_kinds
from chaos.schedule import LASTS_S, draw
from lab.net import why_not


def parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="duration of the run under faults")
    parser.add_argument("--calm", type=float, metavar="MINUTES", help="of the calm run (as long, at most 5)")
    parser.add_argument("--every", type=float, default=30.0, help="seconds from one fault to the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--exchange", default="dense", choices=("dense", "topk", "gtopk", "local"))
    parser.add_argument("--kinds", default="", help="inject only these, separated by commas")
    parser.add_argument("--loopback", action="store_true", help="without namespaces, cuts and holes")
    parser.add_argument("--out", type=Path, help="folder of logs and reports (default: a new one)")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = parsed(argv)
    folder = options.out or Path(tempfile.mkdtemp(prefix="chaos-"))
    kinds = set(options.kinds.split(",")) if options.kinds else set(LASTS_S)
    missing = why_not() if not options.loopback else "--loopback was given"
    kinds &= possible_kinds(bool(missing))
    if missing:
        say(f"no namespaces ({missing}): loopback with rate caps, without {sorted(set(LASTS_S) - kinds)}")
    length_s = 60.0 * options.minutes
    schedule = draw(
        options.seed, length_s=length_s, every_s=options.every, workers=options.workers, kinds=kinds
    )
    summaries: dict[str, Any] = {}
    calm_s = min(length_s, 300.0) if options.calm is None else 60.0 * options.calm
    for name, lasts_s, faults in (("calm", calm_s, ()), ("chaos", length_s, tuple(schedule))):
        plan = Plan(
            workers=options.workers,
            length_s=lasts_s,
            loopback=bool(missing),
            faults=faults,
            exchange=options.exchange,
        )
        say(f"-- {name}: {plan.workers} workers, {lasts_s:.0f} s, {len(faults)} faults, in {folder / name}")
        summaries[name] = report.summary(plan, execute(plan, folder / name, say))
    return finish(options, argv, missing, summaries, folder)


def finish(
    options: argparse.Namespace, argv: list[str], missing: str, summaries: dict[str, Any], folder: Path
) -> int:
    where = "loopback, capped" if missing else "a namespace for each worker"
    hosts = f"{where}, {RATE} each way, {options.exchange}"
    result = report.whole(hosts, summaries["calm"], summaries["chaos"])
    record.write(folder / "report.json", argv, **result)
    (folder / "report.md").write_text(report.markdown(result))
    say(report.markdown(result))
    say(f"report in {folder}")
    return 1 if result["calm"]["broken"] or result["chaos"]["broken"] else 0


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
