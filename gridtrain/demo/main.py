"""The demo from its plan to its last sentence.

Decides the order of what a person reads; the work is orchestrate's and report's.
"""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.table import Table

from gridtrain.demo import report
from gridtrain.demo.live import view_for
from gridtrain.demo.orchestrate import Plan, run_all
from gridtrain.demo.recipe import SIZES
from gridtrain.demo.text import load_corpus
from gridtrain.errors import ConfigError


def run_demo(plan: Plan, console: Console) -> list[report.Curve]:
    """Run, show and write everything.  Raises `GridtrainError` with the next thing to do."""
    torch_version = _torch_version()
    corpus = load_corpus()
    size = SIZES[plan.model]
    setting = report.Setting(
        workers=plan.workers,
        cap=plan.cap,
        model=f"byte GPT, {size.parameters:,} parameters",
        machine=f"{os.cpu_count()} CPU cores, Python {platform.python_version()}, torch {torch_version}",
    )
    console.print(
        f"{plan.workers} workers behind {plan.cap} each train a {setting.model}, on "
        f"{len(corpus.train) / 1e6:.1f} MB of Python's own source ({corpus.files} files).",
        highlight=False,
    )
    began_s = time.monotonic()
    curves = run_all(plan, view_for(console))
    paths = report.write(curves, setting, plan.out)
    console.print()
    console.print(_table(report.HEADINGS, report.table(curves)))
    console.print(_table(report.TIME_HEADINGS, report.where_time_went(curves)))
    console.print(report.CLOCK_SENTENCE, highlight=False)
    console.print(report.HONEST_SENTENCE.format(cap=plan.cap), highlight=False)
    console.print(f"Took {time.monotonic() - began_s:.0f} s in all. Written:", highlight=False)
    for path in paths:
        console.print(f"  {path}", highlight=False, soft_wrap=True)
    return curves


def _table(headings: report.Row, rows: list[report.Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="right" if position else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _torch_version() -> str:
    """Without importing it: that costs more than a second, and the workers will."""
    try:
        return version("torch")
    except PackageNotFoundError:
        raise ConfigError(
            "the demo trains with PyTorch, and torch is not installed",
            remedy='pip install "gridtrain[torch]"',
        ) from None
