"""The data ledger as a JSON record: in the coordinator's journal and in the header of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from gridtrain.core import messages as m


def ledger_entry(state: m.LedgerState) -> dict[str, Any]:
    """The record of `state`; `parse_ledger` reads it back."""
    body = asdict(state)
    if state.holders is not None:
        body["holders"] = [[peer.hex(), [asdict(s) for s in spans]] for peer, spans in state.holders]
    return body


def parse_ledger(body: Mapping[str, Any]) -> m.LedgerState:
    """Raises `KeyError`, `TypeError` or `ValueError` for what `ledger_entry` did not make."""
    holders = body["holders"]
    if holders is not None:
        holders = tuple((bytes.fromhex(peer), _spans(spans)) for peer, spans in holders)
    return m.LedgerState(**{**body, "requeued": _spans(body["requeued"]), "holders": holders})


def _spans(records: Iterable[Mapping[str, int]]) -> tuple[m.Span, ...]:
    return tuple(m.Span(**record) for record in records)
