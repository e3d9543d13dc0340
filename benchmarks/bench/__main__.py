"""`make bench`: measure a suite of cells and write JSON and Markdown.

python -m bench --suite goals --out results           exchanges beside those of rivals that are installed
python -m bench --cell "gtopk P=4 n=25.6M rate=100Mbit" "gloo/all_gather P=4 n=25.6M rate=100Mbit"
python -m bench quick                                 what became slower than benchmarks/results/quick.json
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

import record
from bench import quick
from bench.cells import CellError, parse
from bench.measurement import Effort, measure_cells
from bench.report import markdown
from bench.results import Results
from bench.suites import SUITES, cells_of
from gridtrain._version import __version__
from gridtrain.errors import GridtrainError
from rivals.environments import available


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.splitlines()[0])
    parser.add_argument("action", nargs="?", choices=("measure", "quick"), default="measure")
    parser.add_argument("--suite", choices=SUITES, default="goals")
    parser.add_argument(
        "--cell", nargs="+", default=[], metavar="TEXT", help="these cells instead of a suite's"
    )
    parser.add_argument("--blocks", type=int, default=2, help="number of turns of each cell")
    parser.add_argument("--repeats", type=int, default=3, help="repeats in each turn, at least")
    parser.add_argument(
        "--loopback", action="store_true", help="without namespaces; members limit their rates"
    )
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="folder of the two files")
    parser.add_argument("--keep", action="store_true", help="quick: record the figures for later comparisons")
    options = parser.parse_args(arguments)
    if options.blocks < 1 or options.repeats < 1:
        parser.error("--blocks and --repeats must be at least 1")
    return options


def measure(options: argparse.Namespace, made: dict[str, object]) -> Results:
    """Measure, and write the results after each link, so that a stopped run leaves the ones so far."""
    cells = [parse(text) for text in options.cell] or cells_of(options.suite)
    reasons = available()
    results = Results(made, record.machine(), reasons)
    effort = Effort(options.blocks, options.repeats, loopback=options.loopback)
    options.out.mkdir(parents=True, exist_ok=True)

    def log(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    for result in measure_cells(cells, effort, reasons, log):
        results.cells.append(result)
        (options.out / "bench.json").write_text(results.to_json())
        (options.out / "bench.md").write_text(markdown(results))
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    command, date = record.command(arguments), f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
    made = {"date": date, "command": command, "software": __version__, "blocks": options.blocks}
    try:
        if options.action == "quick":
            return quick.main(keep=options.keep)
        print(markdown(measure(options, made)), end="")
        print(f"written to {options.out}", file=sys.stderr)
    except (CellError, OSError, GridtrainError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
