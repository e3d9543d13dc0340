"""How runs are compared: by the first measurement at or below the baseline's final loss."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from gridtrain.errors import GridtrainError
from gridtrain.tools.demo import main
from gridtrain.tools.demo.demo_report import (
    HEADINGS,
    SINGLE_PROCESS_CAVEAT,
    DemoSetting,
    LossCurve,
    Measurement,
    comparison_rows,
    report_markdown,
    summary_sentences,
    write_report,
)

SETTING = DemoSetting(4, "20Mbit", "byte GPT, 120,576 parameters", "2 CPU cores")


def curve(label: str, losses: list[float], *, step_s: float, step_bytes: int) -> LossCurve:
    """Measured every 10 steps."""
    steps = [10 * (i + 1) for i in range(len(losses))]
    measurements = tuple(
        Measurement(s, s * step_s, loss, s * step_bytes) for s, loss in zip(steps, losses, strict=True)
    )
    last = steps[-1]
    sent = {"data": float(last * step_bytes), "votes": 40.0 * last, "control": 8.0 * last}
    times = {"compute": 0.02 * last, "select": 0.001 * last, "communicate": 0.3 * last, "wait": 0.002 * last}
    return LossCurve(label, label, measurements, last, last * step_s, sent, times)


DENSE = curve("dense ring", [4.0, 3.0, 2.5], step_s=0.3, step_bytes=720_000)
SPARSE = curve("gTop-k", [4.0, 3.0, 2.6, 2.5, 2.4], step_s=0.05, step_bytes=36_000)


def test_the_table_shows_steps_seconds_and_megabytes_to_the_baselines_final_loss() -> None:
    assert comparison_rows([DENSE, SPARSE]) == [
        # label, steps, seconds, held-out, kB per step, to target: steps, seconds, MB, speedup
        ("dense ring", "30", "9.0", "2.500", "720.0", "30", "9.0", "21.6", "1.0x"),
        ("gTop-k", "50", "2.5", "2.400", "36.0", "40", "2.0", "1.4", "4.5x"),
    ]


def test_a_run_that_stays_above_the_target_says_so() -> None:
    short = curve("gTop-k", [4.0, 2.51], step_s=0.05, step_bytes=36_000)

    assert comparison_rows([DENSE, short])[1][5:] == ("not reached", "-", "-", "-")


def test_the_finding_is_one_sentence() -> None:
    short = curve("TopK", [4.0, 2.51], step_s=0.05, step_bytes=36_000)

    assert summary_sentences([DENSE, SPARSE, short]) == [
        "gTop-k reached dense ring's final loss of 2.500 4.5 times faster: "
        "after 2.0 s and 40 steps instead of 9.0 s and 30 steps.",
        "TopK did not reach dense ring's final loss of 2.500.",
    ]
    slow = curve("TopK", [4.0, 3.0, 2.5], step_s=0.45, step_bytes=36_000)
    assert "2.500 1.5 times more slowly: after 13.5 s" in summary_sentences([DENSE, slow])[0]


def test_the_baselines_target_is_its_last_loss_even_if_an_earlier_one_was_lower() -> None:
    noisy = curve("dense ring", [4.0, 2.4, 2.5], step_s=0.3, step_bytes=720_000)

    assert comparison_rows([noisy, SPARSE])[0][5:7] == ("30", "9.0")


def test_the_report_names_the_clock_and_the_honest_sentence() -> None:
    text = report_markdown([DENSE, SPARSE], SETTING)

    assert SINGLE_PROCESS_CAVEAT.format(cap="20Mbit") in text
    assert "| gTop-k | 50 | 2.5 | 2.400 | 36.0 | 40 | 2.0 | 1.4 | 4.5x |" in text
    assert "| dense ring | 20.0 | 1.0 | 300.0 | 2.0 | 0.04 | 0.01 |" in text
    assert "evaluations are not counted" in text


def test_three_files_are_written_and_the_numbers_can_be_read_back(tmp_path: Path) -> None:
    paths = write_report([DENSE, SPARSE], SETTING, tmp_path / "results")

    assert [path.name for path in paths] == ["report.md", "loss.svg", "metrics.json"]
    read = json.loads(paths[2].read_text())
    assert read["setting"]["cap"] == "20Mbit"
    assert [m["held_out"] for m in read["runs"][1]["measurements"]] == [4.0, 3.0, 2.6, 2.5, 2.4]


def test_a_single_run_and_a_single_worker_make_a_picture(tmp_path: Path) -> None:
    alone = curve("gTop-k", [4.0, 3.0], step_s=0.05, step_bytes=0)  # a worker alone sends nothing

    text = write_report([alone], SETTING, tmp_path)[1].read_text()

    assert "Against wall time" in text and "Against bytes sent" not in text


def test_no_measurement_is_no_report(tmp_path: Path) -> None:
    empty = LossCurve("dense", "dense ring", (), 0, 0.0, {"data": 0.0}, {})

    with pytest.raises(GridtrainError, match="the report on 1 run needs a held-out measurement"):
        write_report([empty], SETTING, tmp_path)


def test_the_terminals_tables_fit_80_columns() -> None:
    labels = ("dense ring", "gTop-k, density 0.05", "TopK, density 0.05", "gTop-k tree, density 0.05")
    runs = [curve(label, [4.0, 3.0], step_s=0.05, step_bytes=36_000) for label in labels]
    out = io.StringIO()
    console = Console(file=out, width=80)
    console.print(main.transposed_table(HEADINGS, comparison_rows(runs)))
    lines = out.getvalue().splitlines()
    assert len(lines) == 1 + len(HEADINGS), "nothing is wrapped but labels, at their comma"
    assert lines[-2].split()[:3] == ["MB", "to", "target"]


def test_a_busy_machine_is_named() -> None:
    assert main.load_note(0.2, 2) == ""
    assert main.load_note(1.5, 2).startswith("Other programs keep this machine busy (load 1.5 on 2 cores)")
