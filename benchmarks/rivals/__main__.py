"""Installs, lists and measures rivals (in benchmarks/).

python -m rivals setup                      install rivals, each in its own environment
python -m rivals list                       show the rivals, and why some cannot run here
python -m rivals run gloo --op all_reduce --world 4 --rate 100Mbit --delay 0.02 --n 2.56e6
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from lab.net import Host, Net, why_not
from lab.ns import LabError
from lab.shape import rate_Bps
from rivals.contract import DENSITY, NAMES, OPS, REPEATS, TRAINERS, WARMUP, Combined, ContractError
from rivals.environments import available, setup
from rivals.hosts import Job, LinkSettings, hosts_of, measure, measure_on_loopback, train


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    links = argparse.ArgumentParser(add_help=False)
    links.add_argument("--world", type=int, default=4)
    links.add_argument("--rate", default="", help="of each host's link, such as 100Mbit; default: no limit")
    links.add_argument("--delay", type=float, default=0.0, metavar="SECONDS", help="one way")
    links.add_argument("--loss", type=float, default=0.0, help="share of the frames, such as 0.001")
    links.add_argument("--congestion", default="", help="TCP's congestion control; default: the machine's")
    links.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
    parser = argparse.ArgumentParser(prog="python -m rivals", description="other systems, measured")
    commands = parser.add_subparsers(dest="command", required=True)
    install = commands.add_parser("setup", help="install rivals, each in its own environment")
    install.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: all")
    commands.add_parser("list", help="show rivals, their operations, and why some cannot run here")
    training = commands.add_parser(
        "train", parents=[links], help="train a workload; arguments after -- are options of rivals.train"
    )
    training.add_argument("trainer", choices=sorted(TRAINERS))
    training.add_argument("--folder", type=Path, required=True, help="of steps.jsonl and logs")
    run = commands.add_parser("run", parents=[links], help="measure an operation of a rival")
    run.add_argument("rival", choices=NAMES)
    run.add_argument("--op", required=True)
    run.add_argument("--n", type=lambda text: int(float(text)), default=25_600_000, metavar="ELEMENTS")
    run.add_argument("--density", type=float, default=DENSITY)
    run.add_argument("--repeats", type=int, default=REPEATS)
    run.add_argument("--warmup", type=int, default=WARMUP)
    run.add_argument("--loopback", action="store_true", help="run all ranks on this machine, without a lab")
    run.add_argument("--json", type=Path, metavar="FILE", help="file for the figures")
    given = list(sys.argv[1:] if arguments is None else arguments)
    end = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:end])
    options.further = given[end + 1 :]
    if options.further and options.command != "train":
        parser.error(f"{options.command} takes no arguments after --, but got {options.further}")
    if options.command == "setup" and (unknown := set(options.names) - set(NAMES)):
        parser.error(f"there is no rival {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    return options


def bound_s(options: argparse.Namespace) -> float:
    """Return the bound of a dense all-reduce, 2(P-1) alpha + 2(P-1)/P * bytes / rate; 0 without a rate."""
    if not options.rate:
        return 0.0
    hops = options.world - 1
    wire_s = 4 * options.n / rate_Bps(options.rate)
    return float(2 * hops * options.delay + 2 * hops / options.world * wire_s)


def line_of(figures: Combined, options: argparse.Namespace) -> str:
    median_s = statistics.median(figures.seconds)
    spread = f"{min(figures.seconds):.4g}-{max(figures.seconds):.4g}"
    text = f"{figures.rival} {figures.op}: {median_s:.4g} s ({spread})"
    text += f", CPU {statistics.median(figures.cpu_s):.3g} s a process"
    if figures.bytes_sent:
        text += f", {statistics.median(figures.bytes_sent) / 1e6:.4g} MB sent by each"
    if figures.op.startswith("all_reduce") and (bound := bound_s(options)):
        text += f", {median_s / bound:.2f} x the bound of {bound:.4g} s"
    return f"{text}; {figures.version}{'; ' + figures.note if figures.note else ''}"


def run(options: argparse.Namespace) -> Combined:
    """Measure an operation of a rival.  Raises `LabError`, `ContractError`, `ValueError`."""
    _require(options.rival)
    job = Job(
        options.rival,
        options.op,
        options.world,
        options.n,
        options.density,
        options.repeats,
        options.warmup,
    )
    with tempfile.TemporaryDirectory(prefix="gridtrain-rivals-") as place:
        folder = Path(place, "ranks")
        if options.loopback:
            return measure_on_loopback(job, folder, options.timeout)
        with _hosts(options) as hosts:
            return measure(hosts, job, folder, options.timeout)


def _require(rival: str) -> None:
    if reason := available()[rival]:
        raise LabError(f"{rival} cannot run here: {reason}")


@contextlib.contextmanager
def _hosts(options: argparse.Namespace) -> Iterator[list[Host]]:
    if reason := why_not():
        raise LabError(f"the network lab is not available: {reason}")
    with Net(congestion=options.congestion) as net:
        yield hosts_of(net, options.world, LinkSettings(options.rate, options.delay, options.loss))


def run_training(options: argparse.Namespace) -> str:
    """Train with a rival; return the record of the last step.  Raises `LabError`, `ValueError`."""
    _require(TRAINERS[options.trainer])
    with _hosts(options) as hosts:
        train(hosts, options.trainer, options.folder, options.timeout, options.further)
    last: str = (options.folder / "steps.jsonl").read_text().splitlines()[-1]
    return last


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.command in ("setup", "list"):
        reasons = setup(options.names or NAMES) if options.command == "setup" else available()
        for name, reason in reasons.items():
            print(f"{name}: {reason or 'ready'}")
            for op, meaning in OPS[name].items():
                print(f"    {op:20} {meaning}")
        return int(options.command == "setup" and any(reasons.values()))
    try:
        if options.command == "train":
            print(run_training(options))
            return 0
        figures = run(options)
    except (LabError, ContractError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(line_of(figures, options))
    if options.json:
        used = {key: str(value) for key, value in vars(options).items()}
        options.json.write_text(json.dumps({"options": used, **asdict(figures)}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
