"""Shows the demo's progress as a table that is redrawn on a terminal and as plain lines elsewhere.

This module decides only how records are displayed.

    exchange                step  loss held-out    MB    s comp. select comm. wait
    dense ring           250/250 2.471    2.481 180.9 80.1    21      0   297    2
    gTop-k, density 0.05 112/450 2.702    2.688   3.9  5.4    21      3    23    1
"""

from __future__ import annotations

import time
from dataclasses import astuple, dataclass, field

from rich.console import Console
from rich.live import Live
from rich.table import Table

from gridtrain.quantities import format_count
from gridtrain.tools.demo.step_records import StepRecord

PLAIN_EVERY_S = 5.0
COLUMNS = ("step", "loss", "held-out", "MB", "s", "comp.", "select", "comm.", "wait")
"""Headings that fit into a terminal of 80 columns; the last four are those of `gridtrain status`."""


def view_for(console: Console) -> TableView | LineView:
    """Return a view that redraws a table on a terminal, or prints lines to a file, a pipe or a CI log."""
    return TableView(console) if console.is_terminal else LineView(console)


@dataclass(slots=True)
class _ProgressRow:
    label: str
    steps: int
    record: StepRecord | None = None
    held_out: float | None = None

    def update(self, record: StepRecord) -> None:
        self.record = record
        self.held_out = self.held_out if record.held_out is None else record.held_out


def ms_per_step(record: StepRecord) -> tuple[float, float, float, float]:
    """Return the mean times of a step so far, in ms: computing, selecting, communicating and waiting."""
    compute, select, communicate, wait = (1e3 * s / max(1, record.step) for s in astuple(record.times))
    return compute, select, communicate, wait


class TableView:
    """Shows one row per run, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: list[_ProgressRow] = []
        self._live: Live | None = None

    def begin(self, label: str, steps: int) -> None:
        self._rows.append(_ProgressRow(label, steps))
        self._live = Live(
            get_renderable=self._table, console=self._console, refresh_per_second=4, transient=True
        )
        self._live.start()

    def update(self, record: StepRecord) -> None:
        self._rows[-1].update(record)

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self) -> Table:
        starting = any(row.record is None for row in self._rows)
        table = Table(
            box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim", caption_justify="left"
        )
        units = "MB sent by a worker; s: seconds of the run; comp. to wait: ms per step"
        table.caption = "the workers are importing torch and joining" if starting else units
        table.add_column("exchange", no_wrap=True)
        for name in COLUMNS:
            table.add_column(name, justify="right", min_width=len(name))
        for row in self._rows:
            table.add_row(row.label, *_cells(row))
        return table


def _cells(row: _ProgressRow) -> tuple[str, ...]:
    record = row.record
    if record is None:
        return (f"0/{row.steps}",)
    return (
        f"{record.step}/{row.steps}",
        f"{record.loss:.3f}",
        "-" if row.held_out is None else f"{row.held_out:.3f}",
        f"{record.sent.data / 1e6:.1f}",
        f"{record.seconds:.1f}",
        *(f"{value:.0f}" for value in ms_per_step(record)),
    )


@dataclass(slots=True)
class LineView:
    """Prints a line at most every `every_s` seconds, and a last line when a run ends."""

    console: Console
    every_s: float = PLAIN_EVERY_S
    _row: _ProgressRow | None = None
    _printed_s: float = field(default=0.0)
    _has_unprinted: bool = False

    def begin(self, label: str, steps: int) -> None:
        self._row = _ProgressRow(label, steps)
        self._print(f"{label}: {format_count(steps, 'step')}; the workers are importing torch and joining")

    def update(self, record: StepRecord) -> None:
        assert self._row is not None
        self._row.update(record)
        self._has_unprinted = True
        if time.monotonic() - self._printed_s >= self.every_s:
            self._print_row()

    def end(self) -> None:
        if self._has_unprinted:
            self._print_row()
        self._row = None

    def _print_row(self) -> None:
        assert self._row is not None and self._row.record is not None
        record, held_out = self._row.record, self._row.held_out
        compute, select, communicate, wait = ms_per_step(record)
        measured = "" if held_out is None else f", held-out {held_out:.3f}"
        sent_mb = record.sent.data / 1e6
        self._print(
            f"{self._row.label}: step {record.step}/{self._row.steps}, loss {record.loss:.3f}{measured}, "
            f"{sent_mb:.1f} MB sent, {record.seconds:.1f} s; ms per step: {compute:.0f} computing, "
            f"{select:.0f} selecting, {communicate:.0f} communicating, {wait:.0f} waiting"
        )
        self._printed_s = time.monotonic()
        self._has_unprinted = False

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)
