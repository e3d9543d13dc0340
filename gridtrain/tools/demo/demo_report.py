"""The demo's report: a table and a chart that compare its runs, summary sentences and limitations.

    LossCurve (one per run) --+--> table rows --> report.md, terminal
                              +--> two panels --> loss.svg
                              +--> metrics.json

The first run is the baseline, and its final held-out loss is the target.  Another run reaches the target at
its first measurement at or below the target, without smoothing or interpolation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gridtrain.errors import GridtrainError
from gridtrain.quantities import format_count
from gridtrain.tools.demo.svg_chart import COLOURS, ChartLine, ChartPanel, draw_chart

SINGLE_PROCESS_CAVEAT = (
    "On one machine a single process would be faster than all of these runs, because it needs no network. "
    "The demo shows the cost of the network: how long the same training takes over links of {cap}."
)

CLOCK_NOTE = (
    "Seconds are counted from the first batch of the run to the end of the step; the first worker's held-out "
    "evaluations are not counted."
)

Row = tuple[str, ...]
HEADINGS: Row = (
    "exchange",
    "steps",
    "seconds",
    "held-out loss",
    "kB sent per step",
    "steps to target",
    "seconds to target",
    "MB to target",
    "speedup",
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One held-out evaluation, after `step` steps.

    Attributes:
        step: the number of steps committed so far.
        seconds: the wall-clock time, excluding evaluations.
        held_out: the mean cross entropy in nats per byte on the fixed held-out subset.
        data_bytes: the bytes that the first worker has sent in exchanges so far, counted at the socket.
    """

    step: int
    seconds: float
    held_out: float
    data_bytes: int


@dataclass(frozen=True, slots=True)
class LossCurve:
    """One finished run.

    Attributes:
        exchange: the name "dense", "topk" or "gtopk".
        label: a name for display, such as "gTop-k, density 0.05".
        measurements: the evaluations in the order of their steps; never empty.
        steps: the number of committed steps.
        seconds: the wall-clock time of all steps, excluding evaluations.
        sent_bytes: the bytes sent by one worker (mean over the workers): "data", "votes", "control".
        times_s: the first worker's times, in seconds: "compute", "select", "communicate", "wait".
    """

    exchange: str
    label: str
    measurements: tuple[Measurement, ...]
    steps: int
    seconds: float
    sent_bytes: dict[str, float]
    times_s: dict[str, float]

    @property
    def final(self) -> Measurement:
        return self.measurements[-1]

    @property
    def data_bytes_per_step(self) -> float:
        return self.sent_bytes["data"] / max(1, self.steps)

    def first_at_or_below(self, target: float) -> Measurement | None:
        """Return the first measurement at or below `target`; None if there is none."""
        return next((m for m in self.measurements if m.held_out <= target), None)


@dataclass(frozen=True, slots=True)
class DemoSetting:
    """What the runs have in common: the number of workers and, as text, each worker's cap, the model and the
    machine."""

    workers: int
    cap: str
    model: str
    machine: str


def comparison_rows(curves: Sequence[LossCurve]) -> list[Row]:
    """Return one row of strings per run, with the columns `HEADINGS`; the first run is the baseline."""
    target = curves[0].final.held_out
    return [_row(curve, target, curves[0].final.seconds, baseline=curve is curves[0]) for curve in curves]


def _row(curve: LossCurve, target: float, baseline_s: float, *, baseline: bool) -> Row:
    hit = curve.final if baseline else curve.first_at_or_below(target)
    reached: Row = ("not reached", "-", "-", "-")
    if hit is not None:
        sooner = "1.0x" if baseline else f"{baseline_s / hit.seconds:.1f}x"
        reached = (str(hit.step), f"{hit.seconds:.1f}", f"{hit.data_bytes / 1e6:.1f}", sooner)
    return (
        curve.label,
        str(curve.steps),
        f"{curve.seconds:.1f}",
        f"{curve.final.held_out:.3f}",
        f"{curve.data_bytes_per_step / 1e3:.1f}",
        *reached,
    )


def summary_sentences(curves: Sequence[LossCurve]) -> list[str]:
    """Return one sentence for each run after the baseline: whether it reached the target and, if so,
    when, and how much faster or more slowly."""
    baseline = curves[0]
    target = baseline.final.held_out
    sentences: list[str] = []
    for curve in curves[1:]:
        hit = curve.first_at_or_below(target)
        if hit is None:
            sentences.append(f"{curve.label} did not reach {baseline.label}'s final loss of {target:.3f}.")
            continue
        ratio = baseline.final.seconds / hit.seconds
        compared = f"{ratio:.1f} times faster" if ratio >= 1 else f"{1 / ratio:.1f} times more slowly"
        sentences.append(
            f"{curve.label} reached {baseline.label}'s final loss of {target:.3f} {compared}: "
            f"after {hit.seconds:.1f} s and {format_count(hit.step, 'step')} "
            f"instead of {baseline.final.seconds:.1f} s and {format_count(baseline.final.step, 'step')}."
        )
    return sentences


def time_rows(curves: Sequence[LossCurve]) -> list[Row]:
    """Return one row of strings per run, with the columns `TIME_HEADINGS`; all figures are per step."""
    rows: list[Row] = []
    for curve in curves:
        steps = max(1, curve.steps)
        times = [curve.times_s.get(name, 0.0) for name in ("compute", "select", "communicate", "wait")]
        extra = [curve.sent_bytes.get(name, 0.0) for name in ("votes", "control")]
        rows.append(
            (
                curve.label,
                *(f"{1e3 * seconds / steps:.1f}" for seconds in times),
                *(f"{size / steps / 1e3:.2f}" for size in extra),
            )
        )
    return rows


TIME_HEADINGS: Row = (
    "ms per step",
    "compute",
    "select",
    "communicate",
    "wait",
    "kB votes",
    "kB control",
)


def loss_chart(curves: Sequence[LossCurve], setting: DemoSetting) -> str:
    """Return an SVG chart of held-out loss against wall-clock time and against bytes sent by a worker."""
    target = curves[0].final.held_out
    by_time: list[ChartLine] = []
    by_bytes: list[ChartLine] = []
    for curve, colour in zip(curves, COLOURS, strict=False):
        hit = curve.final if curve is curves[0] else curve.first_at_or_below(target)
        at = None if hit is None else curve.measurements.index(hit)
        times = tuple((m.seconds, m.held_out) for m in curve.measurements)
        volumes = tuple((m.data_bytes / 1e6, m.held_out) for m in curve.measurements if m.data_bytes > 0)
        at_s = () if at is None else ((at, f"{curve.measurements[at].seconds:.0f} s"),)
        at_mb = () if at is None else ((at, f"{curve.measurements[at].data_bytes / 1e6:.3g} MB"),)
        by_time.append(ChartLine(curve.label, times, colour, at_s))
        by_bytes.append(ChartLine(curve.label, volumes, colour, at_mb if len(volumes) == len(times) else ()))
    mark = (target, f"{curves[0].label}'s final loss: {target:.3f}")
    loss = "held-out loss (nats per byte)"
    panels = [ChartPanel("Against wall time", "seconds", loss, tuple(by_time), mark)]
    if all(line.points for line in by_bytes):
        panels.append(
            ChartPanel(
                "Against bytes sent", "MB sent by one worker (log scale)", loss, tuple(by_bytes), mark, True
            )
        )
    title = "The same model and link, another exchange"
    subtitle = f"{format_count(setting.workers, 'worker')}, each {setting.cap} up and down; {setting.model}"
    return draw_chart(title, subtitle, panels)


def write_report(curves: Sequence[LossCurve], setting: DemoSetting, folder: Path) -> list[Path]:
    """Write report.md, loss.svg and metrics.json into `folder`; return their paths.

    Raises:
        GridtrainError: there is no curve, or a curve has no measurement.
    """
    if not curves or not all(curve.measurements for curve in curves):
        raise GridtrainError(
            f"the report on {format_count(len(curves), 'run')} needs a held-out measurement of each run",
            remedy="run more steps (--steps)",
        )
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "report.md": report_markdown(curves, setting),
        "loss.svg": loss_chart(curves, setting),
        "metrics.json": json.dumps(
            {"setting": asdict(setting), "runs": [asdict(curve) for curve in curves]}, indent=1
        ),
    }
    for name, text in contents.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in contents]


def report_markdown(curves: Sequence[LossCurve], setting: DemoSetting) -> str:
    """Return the report as Markdown."""
    target = curves[0].final.held_out
    return "\n".join(
        [
            "# gridtrain demo",
            "",
            f"{format_count(setting.workers, 'worker')}, each {setting.cap} up and down; {setting.model}. "
            f"{setting.machine}.",
            f"Target: {curves[0].label}'s final held-out loss, {target:.3f}. Bytes: counted at the socket, "
            "mean over the workers.",
            "",
            *_markdown_table(HEADINGS, comparison_rows(curves)),
            "",
            *summary_sentences(curves),
            "",
            "![held-out loss](loss.svg)",
            "",
            "Milliseconds per step on the first worker, and kB per step sent in addition to the exchange:",
            "",
            *_markdown_table(TIME_HEADINGS, time_rows(curves)),
            "",
            CLOCK_NOTE,
            "",
            SINGLE_PROCESS_CAVEAT.format(cap=setting.cap),
            "",
        ]
    )


def _markdown_table(headings: Row, rows: Sequence[Row]) -> list[str]:
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return ["| " + " | ".join(cells) + " |" for cells in (headings, rule, *rows)]
