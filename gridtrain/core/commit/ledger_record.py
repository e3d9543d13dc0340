"""The data ledger as JSON, for the coordinator's journal and the headers of checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

from gridtrain.core import messages as m

_DEFERRED = ("late", "pending")
"""Names of the `LedgerState` fields that contain deferred batches."""


def spec_entry(spec: m.LedgerSpec) -> dict[str, Any]:
    """Return `spec` as a JSON object; `parse_spec` reads it back."""
    body = asdict(spec)
    if not spec.delay:  # as in records of earlier versions
        del body["delay"]
    if not spec.shards:
        del body["shards"]
    return body


def parse_spec(body: Mapping[str, Any]) -> m.LedgerSpec:
    """Return the spec that a JSON object written by `spec_entry` describes.

    Raises:
        TypeError: `body` does not describe a spec.
    """
    return m.LedgerSpec(**{**body, "shards": tuple(body.get("shards", ()))})


_LEDGER_FIELDS = [field.name for field in fields(m.LedgerState)]


def ledger_entry(state: m.LedgerState) -> dict[str, Any]:
    """Return `state` as a JSON object; `parse_ledger` reads it back."""
    body: dict[str, Any] = {name: getattr(state, name) for name in _LEDGER_FIELDS}
    body["requeued"] = _span_entries(state.requeued)
    if state.holders is not None:
        body["holders"] = [[peer.hex(), _span_entries(spans)] for peer, spans in state.holders]
    for name in _DEFERRED:
        del body[name]
        if batches := getattr(state, name):  # usually there are none; earlier versions never had any
            body[name] = [asdict(batch) | {"peer": batch.peer.hex()} for batch in batches]
    if not state.restart_generation:  # as in records of earlier versions
        del body["restart_generation"]
    del body["leases"]
    if state.leases:
        body["leases"] = [[peer.hex(), asdict(span)] for peer, span in state.leases]
    return body


def parse_ledger(body: Mapping[str, Any]) -> m.LedgerState:
    """Return the ledger state that a JSON object written by `ledger_entry` describes.

    Raises:
        KeyError, TypeError, ValueError: `body` does not describe a ledger state.
    """
    holders = body["holders"]
    if holders is not None:
        holders = tuple((bytes.fromhex(peer), _spans(spans)) for peer, spans in holders)
    deferred = {
        name: tuple(
            m.DeferredBatch(
                **{**batch, "peer": bytes.fromhex(batch["peer"]), "spans": _spans(batch["spans"])}
            )
            for batch in body.get(name, ())
        )
        for name in _DEFERRED
    }
    leases = tuple((bytes.fromhex(peer), m.Span(**span)) for peer, span in body.get("leases", ()))
    spans = {"requeued": _spans(body["requeued"]), "holders": holders, "leases": leases}
    return m.LedgerState(**{**body, **spans, **deferred})


def _span_entries(spans: m.Spans) -> list[dict[str, int]]:
    return [{"start": span.start, "stop": span.stop} for span in spans]


def _spans(records: Iterable[Mapping[str, int]]) -> tuple[m.Span, ...]:
    return tuple(m.Span(**record) for record in records)
