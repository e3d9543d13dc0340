"""Draws the learning curves of a result file, as docs/images/gpt-10m-loss.svg: over seconds and over steps.

python -m accuracy.chart results/accuracy_gpt_10m.json --out ../docs/images/gpt-10m-loss.svg --title "..."
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from gridtrain.tools.demo.svg_chart import COLOURS, ChartLine, ChartPanel, draw_chart

LABELS = {
    "one-adamw": "one process",
    "gloo-adamw": "gloo, dense",
    "local-topk": "gridtrain, LocalSteps",
}


def points(run: dict[str, Any], one: dict[str, Any] | None) -> list[tuple[int, float, float]]:
    """Return (step, seconds, loss) of a run.

    A dense run that ended earlier than `one`, which applies the same mean gradients, gets the losses of `one`
    at the times of as many of its own steps.
    """
    curve = [(step, seconds, loss) for step, seconds, loss in run["curve"]]
    if one is None or run["contender"].startswith("local") or curve[-1][0] >= one["curve"][-1][0]:
        return curve
    return [(step, step * run["step_s"], loss) for step, _, loss in one["curve"]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m accuracy.chart", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--title", required=True)
    parser.add_argument("--subtitle", default="")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    runs = [run for path in options.results for run in json.loads(path.read_text())["runs"]]
    one = next((run for run in runs if run["contender"].startswith("one")), None)
    lines: list[tuple[ChartLine, ChartLine]] = []
    for run, colour in zip(runs, COLOURS, strict=False):
        label, curve = LABELS.get(run["contender"], run["contender"]), points(run, one)
        by_time = ChartLine(label, tuple((seconds, loss) for _, seconds, loss in curve), colour)
        lines.append((by_time, ChartLine(label, tuple((float(s), loss) for s, _, loss in curve), colour)))
    by_times, by_steps = (tuple(column) for column in zip(*lines, strict=True))
    loss = "held-out loss (nats per byte)"
    panels = [
        ChartPanel("Against wall time", "seconds (log scale)", loss, by_times, log_x=True),
        ChartPanel("Against steps", "steps of each worker", loss, by_steps),
    ]
    options.out.write_text(draw_chart(options.title, options.subtitle, panels))


if __name__ == "__main__":
    main()
