"""The progress of the demo: lines in a pipe, a table on a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from gridtrain.tools.demo.progress_view import LineView, TableView, view_for
from gridtrain.tools.demo.step_records import SentBytes, StepRecord, StepTimes


def record(step: int, held_out: float | None = None) -> StepRecord:
    times = StepTimes(0.02 * step, 0.003 * step, 0.3 * step, 0.001 * step)
    return StepRecord(step, 0.324 * step, 3.25, held_out, SentBytes(720_000 * step), times)


def test_a_pipe_receives_lines_without_control_characters() -> None:
    console = Console(file=io.StringIO(), width=200)
    view = view_for(console)
    assert isinstance(view, LineView)
    view.every_s = 0.0

    view.begin("dense ring", 20)
    view.update(record(10, held_out=3.5))
    view.update(record(11))
    view.end()

    assert console.file.getvalue().splitlines() == [
        "dense ring: 20 steps; the workers are importing torch and joining",
        "dense ring: step 10/20, loss 3.250, held-out 3.500, 7.2 MB sent, 3.2 s; "
        "ms per step: 20 computing, 3 selecting, 300 communicating, 1 waiting",
        "dense ring: step 11/20, loss 3.250, held-out 3.500, 7.9 MB sent, 3.6 s; "
        "ms per step: 20 computing, 3 selecting, 300 communicating, 1 waiting",
    ]


def test_the_last_step_is_always_printed() -> None:
    console = Console(file=io.StringIO(), width=200)
    view = LineView(console, every_s=1e9)
    view._printed_s = float("inf")

    view.begin("gTop-k", 20)
    view.update(record(20))
    assert "20/20" not in console.file.getvalue()
    view.end()

    assert "step 20/20" in console.file.getvalue()


def test_a_terminal_shows_a_row_for_each_run() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    view = view_for(console)
    assert isinstance(view, TableView)
    for label in ("dense ring", "gTop-k, density 0.05"):
        view.begin(label, 250)
        view.update(record(250, held_out=3.1))
        view.end()

    still = Console(file=io.StringIO(), width=80)
    still.print(view._table())
    rows = [line.split() for line in still.file.getvalue().splitlines()]

    assert rows[1] == ["dense", "ring", "250/250", "3.250", "3.100", "180.0", "81.0", "20", "3", "300", "1"]
    assert rows[2][0] == "gTop-k," and rows[0][-4:] == ["comp.", "select", "comm.", "wait"]
