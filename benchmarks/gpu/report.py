"""The report of `make gpu` in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import selection as bench
from record import table

Figures = dict[str, Any]


def markdown(record: Figures) -> str:
    """Return the report of gpu.json."""
    machine = ", ".join(f"{name} {value}" for name, value in record["machine"].items() if value)
    lines = ["# Measurements on a GPU", "", f"`make gpu`, device {record['device']}: {machine}."]
    lines += ["", "**Small sizes, which tell nothing about speed.**"] if record["small"] else []
    parts = record["parts"].items()
    heads = ("part", "seconds", "result")
    lines += ["", table(heads, [(name, part.get("seconds"), verdict(part)) for name, part in parts])]
    for name, part in parts:
        for figure, value in part.get("figures", {}).items():
            lines += ["", f"## {name}: {figure}", "", *of_figure(figure, value, record["device"])]
    return "\n".join(lines) + "\n"


def verdict(part: Figures) -> str:
    """Return the outcome of a part in a few words."""
    if "error" in part:
        return f"FAILED: {part['error']}"
    return f"skipped: {part['skipped']}" if "skipped" in part else "done"


def of_figure(figure: str, value: Any, device: str) -> Iterator[str]:
    """Yield the lines of a figure of a part: a dict, or a dict of dicts with a row for each."""
    if figure == "blocks":
        for block in value:
            yield bench.table(block, device) if "cases" in block else f"n = {block['n']}: {block['error']}"
        return
    if not isinstance(value, Mapping):
        yield str(value)
        return
    rows = value if all(isinstance(row, Mapping) for row in value.values()) else {figure: value}
    flat = {name: dict(flattened(row)) for name, row in rows.items()}
    heads = list(dict.fromkeys(head for row in flat.values() for head in row))
    yield table(("", *heads), [(name, *map(row.get, heads)) for name, row in flat.items()])


def flattened(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}: ")
        else:
            yield f"{prefix}{name}", value
