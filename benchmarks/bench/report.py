"""The report of a bench run: Markdown tables and a chart.

| what | median | min | p90 | x bound | CPU s | CPU s per GB | bytes sent | how |
| goal | wanted | measured | |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.bounds import FLOAT_BYTES
from bench.goals import Verdict, judged
from bench.measurement import by_link
from bench.results import CellResult, Results
from gridtrain.tools.demo.svg_chart import COLOURS, ChartLine, ChartPanel, draw_chart

UNITS = {"seconds": "ms", "x bound": "x bound", "bytes an entry": "bytes", "select_ns": "ns a parameter"}


OURS = "with the vote and its decision"


def markdown(results: Results, chart_name: str = "") -> str:
    """Return the whole report.  `chart_name`: the file name of the SVG, or ""."""
    made, machine = results.made, results.machine
    about = ", ".join(f"{name} {value}" for name, value in machine.items())
    lines = [
        "# Measured exchanges",
        "",
        f"{made['date']}, `{made['command']}`, gridtrain {made['software']}; {about}.",
    ]
    lines += [
        "",
        "Time of the exchange alone, from the common start to the end of the last member. Ours includes",
        "the vote and its decision, which rivals do not have. Only PowerSGD's includes writing the result",
        "into the model's vector. CPU seconds are of one process. Bound: the time that the links alone need.",
    ]
    lines += ["", "## Goals", "", *goal_table(judged(results))]
    lines += ["", "## Figures", ""]
    lines += [f"![exchange time]({chart_name})", ""] if chart_name else []
    for link, _ in by_link([result.cell for result in results.cells]):
        own = [result for result in results.cells if result.cell.link == link]
        for n in dict.fromkeys(result.cell.n for result in own):
            rows = [result for result in own if result.cell.n == n]
            lines += [f"### {link}, n = {n:,} ({FLOAT_BYTES * n / 1e6:.1f} MB)", "", *figure_table(rows), ""]
    lines += local_table(results.local)
    return "\n".join(lines) + "\n"


def goal_table(verdicts: Sequence[Verdict]) -> list[str]:
    rows = [
        (
            verdict.goal.name,
            f"at most {in_unit(verdict.goal.of, verdict.goal.at_most)}",
            "" if verdict.measured is None else in_unit(verdict.goal.of, verdict.measured),
            verdict.word,
        )
        for verdict in verdicts
    ]
    return table(("goal", "wanted", "measured", ""), rows)


def in_unit(of: str, value: float) -> str:
    if of == "seconds":
        return f"{1e3 * value:.1f} ms"
    return f"{value:.2f} {UNITS[of]}" if of in UNITS else f"{value:.3g}"


def figure_table(rows: Sequence[CellResult]) -> list[str]:
    """Return a table, fastest first; a cell that was left out has its reason."""
    heads = (
        "what",
        "median",
        "min",
        "p90",
        "x bound",
        "CPU s",
        "of it merge",
        "CPU s per GB",
        "sent MB",
        "select ms",
        "how",
    )
    done = sorted((row for row in rows if row.samples), key=lambda row: row.median_s)
    cells = [_row(row) for row in done]
    left = [
        (row.cell.label, f"left out: {row.skipped}", *[""] * (len(heads) - 2))
        for row in rows
        if not row.samples
    ]
    return table(heads, [*cells, *left])


def _row(row: CellResult) -> tuple[str, ...]:
    sent, work, prepare = (row.median_of(name) for name in ("sent_bytes", "workspace_s", "prepare_s"))
    aborted = sum(sample.aborts > 0 for sample in row.samples)
    what = "left out" if aborted < len(row.samples) else "which is all of them"
    label = row.cell.label + (f" ({aborted} repeats with aborted attempts, {what})" if aborted else "")
    label += f" ({row.skipped})" if row.skipped else ""
    return (
        label,
        time(row.median_s),
        time(row.least_s),
        time(row.p90_s),
        "" if row.x_bound is None else f"{row.x_bound:.2f}",
        f"{row.cpu_s:.4f}",
        "" if work is None else f"{work:.4f}",
        f"{row.cpu_s_per_GB():.2f}" if row.cell.dense else "",
        "" if sent is None else f"{sent / 1e6:.3f}",
        "" if prepare is None or row.cell.dense else f"{1e3 * prepare:.1f}",
        how(row),
    )


def how(row: CellResult) -> str:
    """Describe a rival's version, algorithm and settings, or what gridtrain's time includes."""
    if not row.cell.rival:
        return OURS
    notes = dict.fromkeys(sample.note for sample in row.samples if sample.note)
    return " / ".join(notes) or "version unknown"


def time(value_s: float) -> str:
    return f"{value_s:.3f} s" if value_s >= 1.0 else f"{1e3 * value_s:.1f} ms"


LOCAL = {
    "copy_ns": "copy of the vector",
    "select_ns": "selection with the residual, CPU, one thread",
    "encode_ns": "encode",
    "decode_ns": "decode",
    "merge_ns": "merge of two payloads",
}


def local_table(local: dict[str, float]) -> list[str]:
    if not local:
        return []
    rows = [(LOCAL.get(name, name), f"{value:.3f}") for name, value in local.items()]
    heads = ("in one process", "ns (a parameter; of codec and merge: an entry)")
    return ["### This machine's processor", "", *table(heads, rows)]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [" | ".join(heads), " | ".join("---" for _ in heads), *(" | ".join(row) for row in rows)]
    return [f"| {line} |" for line in lines]


def chart(results: Results) -> str:
    """Draw the time of each exchange against what varies in this run, P or n; "" if nothing does."""
    done = [result for result in results.cells if result.samples]
    sizes, groups = {r.cell.n for r in done}, {r.cell.link.workers for r in done}
    if max(len(sizes), len(groups)) < 2:
        return ""
    by_workers = len(groups) >= len(sizes)
    panels = [
        _panel([r for r in done if r.cell.dense is dense], title, by_workers)
        for dense, title in ((True, "dense"), (False, "sparse"))
    ]
    kept = [panel for panel in panels if panel is not None]
    made = results.made
    return draw_chart("Time of one exchange", f"{made['date']}, {made['command']}", kept) if kept else ""


def _panel(rows: Sequence[CellResult], title: str, by_workers: bool) -> ChartPanel | None:
    """Draw the cells of the most frequent kind of link; None if nothing varies."""
    kinds = [(row.cell.link.rate, row.cell.link.delay_s, row.cell.link.loss) for row in rows]
    if not kinds:
        return None
    usual = max(kinds, key=kinds.count)
    rows = [row for row, kind in zip(rows, kinds, strict=True) if kind == usual]
    rate, delay_s = usual[0] or "no limit", f", {1e3 * usual[1]:g} ms" if usual[1] else ""
    lines = []
    for label in dict.fromkeys(row.cell.label for row in rows):
        points = {
            float(row.cell.link.workers if by_workers else row.cell.n / 1e6): 1e3 * row.median_s
            for row in rows
            if row.cell.label == label
        }
        if len(points) > 1:
            colour = COLOURS[len(lines) % len(COLOURS)]
            lines.append(ChartLine(label, tuple(sorted(points.items())), colour))
    if not lines:
        return None
    x_label = "members" if by_workers else "million elements"
    return ChartPanel(f"{title}, {rate}{delay_s}", x_label, "milliseconds", tuple(lines), log_x=True)
