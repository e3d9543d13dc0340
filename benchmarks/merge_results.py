"""Merges result files of one program into one, so that a suite can be run in pieces.

Lists of the same name are joined; of two entries for the same case the later one counts; the command and date
of each piece are recorded.

    python merge_results.py results/accuracy_lstm.json first.json second.json

    first.json    {"command": A, "date": D, "runs": [a, b]}
    second.json   {"command": B, "date": D, "runs": [c]}
    result        {"pieces": [{"command": A, "date": D}, {"command": B, "date": D}], "runs": [a, b, c]}
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LISTS = ("runs", "cells", "rows", "outcomes", "tried")
MEASURED = {
    "runs": ("workload", "rate", "contender"),
    "cells": ("cell",),
    "rows": ("model", "workers", "rate", "exchange", "contender"),
    "outcomes": ("case", "order"),
    "tried": ("workload", "family", "gathered", "rate", "seed"),
}
"""The keys that name the case of an entry, by list."""


def merged(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge documents with the same list.  Raises `ValueError` if they have none, or different ones."""
    names = {name for piece in pieces for name in LISTS if name in piece}
    if len(names) != 1:
        raise ValueError(f"the pieces have {sorted(names) or 'no list'}; all must have the same of {LISTS}")
    (name,) = names
    entries: dict[str, dict[str, Any]] = {}
    for piece in pieces:
        for entry in piece[name]:
            entries[json.dumps([entry.get(key) for key in MEASURED[name]])] = entry
    heads = [{key: value for key, value in piece.items() if key != name} for piece in pieces]
    same = {k: v for k, v in heads[0].items() if all(k in head and head[k] == v for head in heads)}
    own = [{k: v for k, v in head.items() if k not in same} for head in heads]
    return {**same, "pieces": [head for head in own if head], name: list(entries.values())}


def main(arguments: Sequence[str]) -> int:
    if len(arguments) < 2:
        print("usage: python merge_results.py RESULT PIECE...", file=sys.stderr)
        return 2
    target, *paths = map(Path, arguments)
    pieces = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    target.write_text(json.dumps(merged(pieces), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
