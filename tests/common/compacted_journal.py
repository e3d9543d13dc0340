"""A journal's entries as they are after a compaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gridtrain_coordinator.run.journal_recovery import SupersededEntries, compacted_entry, recover_run

Entry = tuple[str, Mapping[str, Any]]


def compacted(entries: Sequence[Entry]) -> list[Entry]:
    superseded = SupersededEntries()
    for number, (kind, body) in enumerate(entries):
        superseded.add(number, kind, body)
    first = ("compacted", compacted_entry(recover_run(entries)))
    removed = set(superseded.ids)
    kept = [entry for number, entry in enumerate(entries) if number not in removed]
    return [first, *(entry for entry in kept if entry[0] != "compacted")]
