"""`gridtrain demo`: trains with one exchange after another, and prints progress, tables and a summary."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import version

from rich.console import Console
from rich.table import Table

from gridtrain.errors import disk_errors
from gridtrain.network.transport.rate_limiter import parse_rate
from gridtrain.tools.demo import demo_report
from gridtrain.tools.demo.orchestrator import DemoPlan, run_all
from gridtrain.tools.demo.progress_view import view_for
from gridtrain.tools.demo.recipe import SIZES
from gridtrain.tools.demo.text_corpus import load_corpus

BUSY_LOAD = 0.3
"""The load average per core at or above which the demo warns that the machine is busy."""


def run_demo(plan: DemoPlan, console: Console) -> list[demo_report.LossCurve]:
    """Run the demo, print its results, and write the report.

    Raises:
        ConfigError: the standard library's source is missing, the rate cap is invalid, or the folder for the
            results cannot be created.
        GridtrainError: a process failed, or no step was committed for too long; the message contains the last
            lines of the logs.
    """
    corpus = load_corpus()
    size = SIZES[plan.model]
    setting = demo_report.DemoSetting(
        workers=plan.workers,
        cap=f"{parse_rate(plan.cap) * 8 / 1e6:g} Mbit/s",
        model=f"byte GPT, {size.parameters:,} parameters",
        machine=f"{os.cpu_count()} CPU cores, Python {platform.python_version()}, torch {version('torch')}",
    )
    with disk_errors(f"cannot create the folder {plan.out}", "choose another folder with --out"):
        plan.out.mkdir(parents=True, exist_ok=True)
    console.print(
        f"{plan.workers} workers, each behind a {setting.cap} link, train one {setting.model}, "
        f"on {len(corpus.train) / 1e6:.1f} MB of Python's own source ({corpus.files} files).",
        highlight=False,
    )
    if note := load_note(os.getloadavg()[0], os.cpu_count() or 1):
        console.print(note, style="yellow", highlight=False)
    began_s = time.monotonic()
    curves = run_all(plan, view_for(console))
    paths = demo_report.write_report(curves, setting, plan.out)
    console.print()
    console.print(transposed_table(demo_report.HEADINGS, demo_report.comparison_rows(curves)))
    console.print(transposed_table(demo_report.TIME_HEADINGS, demo_report.time_rows(curves)))
    for sentence in demo_report.summary_sentences(curves):
        console.print(sentence, style="bold", highlight=False)
    console.print(demo_report.CLOCK_NOTE, highlight=False)
    console.print(demo_report.SINGLE_PROCESS_CAVEAT.format(cap=setting.cap), highlight=False)
    console.print(f"Took {time.monotonic() - began_s:.0f} s in total. Files written:", highlight=False)
    for path in paths:
        console.print(f"  {path}", highlight=False, soft_wrap=True)
    return curves


def load_note(load: float, cores: int) -> str:
    """Return a warning if other programs keep this machine busy, otherwise "".  `load` is the one-minute load
    average."""
    if load < BUSY_LOAD * cores:
        return ""
    return (
        f"Other programs keep this machine busy (load {load:.1f} on {cores} cores): this slows down "
        "computation more than the capped network, so the sparse exchange gains less than on an idle machine."
    )


def transposed_table(headings: demo_report.Row, rows: list[demo_report.Row]) -> Table:
    """Return a table with a row for each figure and a column for each run.

    It fits in 80 columns with up to four runs.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(headings[0], no_wrap=True)
    for row in rows:
        table.add_column(row[0].replace(", ", ",\n"), justify="right", no_wrap=True)
    for position, heading in enumerate(headings[1:], 1):
        table.add_row(heading, *(row[position] for row in rows))
    return table
