"""The report of a bench run in Markdown: goals, and a table for each link and size.

| what | median | least | most | x bound | CPU s | CPU s per GB | bytes sent | how |
| goal | wanted | measured | |
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.bounds import FLOAT_BYTES
from bench.goals import goals, judge
from bench.measurement import by_link
from bench.results import CellResult, Results
from record import table

UNITS = {"seconds": "ms", "x bound": "x bound", "bytes an entry": "bytes", "select_ns": "ns a parameter"}
LOCAL = {
    "copy_ns": "copy of the vector",
    "select_ns": "selection with the residual, CPU, one thread",
    "encode_ns": "encode",
    "decode_ns": "decode",
    "merge_ns": "merge of two payloads",
}
OURS = "with the vote and its decision"
HEADS = tuple(
    [
        "what",
        "median",
        "least",
        "most",
        "x bound",
        "CPU s",
        "of it merge",
        "CPU s per GB",
        "sent MB",
        "select ms",
        "how",
    ]
)


def markdown(results: Results) -> str:
    """Return the whole report."""
    made, machine = results.made, results.machine
    about = ", ".join(f"{name} {value}" for name, value in machine.items())
    lines = [
        "# Measured exchanges",
        "",
        f"{made['date']}, `{made['command']}`, gridtrain {made['software']}; {about}.",
        "",
        "Time of the exchange alone, from the common start to the end of the last member. Ours includes",
        "the vote and its decision, which rivals do not have. CPU seconds are of one process. Bound: the",
        "time that the links alone need.",
    ]
    lines += ["", "## Goals", "", goal_table(results), "", "## Figures", ""]
    for link, _ in by_link([result.cell for result in results.cells]):
        own = [result for result in results.cells if result.cell.link == link]
        for n in dict.fromkeys(result.cell.n for result in own):
            rows = [result for result in own if result.cell.n == n]
            lines += [f"### {link}, n = {n:,} ({FLOAT_BYTES * n / 1e6:.1f} MB)", "", figure_table(rows), ""]
    if results.local:
        figures = [(LOCAL.get(name, name), f"{value:.3f}") for name, value in results.local.items()]
        heads = ("in one process", "ns (a parameter; of codec and merge: an entry)")
        lines += ["### This machine's processor", "", table(heads, figures)]
    return "\n".join(lines) + "\n"


def goal_table(results: Results) -> str:
    rows = []
    for verdict in (judge(goal, results) for goal in goals()):
        of, measured = verdict.goal.of, verdict.measured
        shown = "" if measured is None else in_unit(of, measured)
        rows.append((verdict.goal.name, f"at most {in_unit(of, verdict.goal.at_most)}", shown, verdict.word))
    return table(("goal", "wanted", "measured", ""), rows)


def in_unit(of: str, value: float) -> str:
    if of == "seconds":
        return f"{1e3 * value:.1f} ms"
    return f"{value:.2f} {UNITS[of]}" if of in UNITS else f"{value:.3g}"


def figure_table(rows: Sequence[CellResult]) -> str:
    """Return a table, fastest first; a cell that was left out has its reason."""
    done = sorted((row for row in rows if row.samples), key=lambda row: row.median_s)
    left = [row for row in rows if not row.samples]
    blank = [""] * (len(HEADS) - 2)
    cells = [(row.cell.label, f"left out: {row.skipped}", *blank) for row in left]
    return table(HEADS, [*map(_row, done), *cells])


def _row(row: CellResult) -> tuple[str, ...]:
    sent, work, prepare = (row.median_of(name) for name in ("sent_bytes", "workspace_s", "prepare_s"))
    aborted = sum(sample.aborts > 0 for sample in row.samples)
    what = "left out" if aborted < len(row.samples) else "which is all of them"
    label = row.cell.label + (f" ({aborted} repeats with aborted attempts, {what})" if aborted else "")
    return (
        label + (f" ({row.skipped})" if row.skipped else ""),
        time(row.median_s),
        time(row.least_s),
        time(max(sample.seconds for sample in row.clean)),
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
    return (
        " / ".join(dict.fromkeys(sample.note for sample in row.samples if sample.note)) or "version unknown"
    )


def time(value_s: float) -> str:
    return f"{value_s:.3f} s" if value_s >= 1.0 else f"{1e3 * value_s:.1f} ms"
