"""The report of a bench run in Markdown: a table for each link and size."""

from __future__ import annotations

from collections.abc import Sequence

from bench.bounds import FLOAT_BYTES
from bench.measurement import by_link
from bench.results import CellResult, Results
from record import table

OURS = "with the vote and its decision"
TIMES = ("what", "median", "least", "most", "x bound")
COSTS = ("CPU s", "of it merge", "CPU s per GB", "sent MB", "select ms", "how")
HEADS = (*TIMES, *COSTS)


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
        "",
    ]
    for link, _ in by_link([result.cell for result in results.cells]):
        own = [result for result in results.cells if result.cell.link == link]
        for n in dict.fromkeys(result.cell.n for result in own):
            rows = [result for result in own if result.cell.n == n]
            lines += [f"## {link}, n = {n:,} ({FLOAT_BYTES * n / 1e6:.1f} MB)", "", figure_table(rows), ""]
    return "\n".join(lines) + "\n"


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
