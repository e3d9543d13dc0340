"""Draws a value for every field type from the choices of the input's bytes.

Likely values are those of the current state (`Hints`), the bounds, and anything between.  All values are
within the declared bounds; the target `codec` covers values outside of them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gridfuzz.source import Source
from gridtrain.core import messages as m
from gridtrain.core.messages import declaration
from gridtrain.errors import LocalProtocolError
from gridtrain.network.wire import field_encoding
from gridtrain.network.wire.codec import TYPE_CODES, encode

Hints = Mapping[str, Sequence[Any]]
"""Plausible values in the current state, by a field's name or the name of its kind."""

_TEXTS = (
    "",
    "a",
    "run",
    "tcp://127.0.0.1:7700",
    "tcp://[::1]:1",
    "relay:" + "ab" * 32,
    "memory://x",
    "../../etc",
    "\u202e\u00e9\U0001f600",
    "%s%n{0}",
    "a" * 64,
    "\u00e9" * 32,
    "x" * 512,
)
_PEERS = tuple(bytes([letter]) * 32 for letter in b"abcdef")


def record_of(cls: type) -> field_encoding.RecordField:
    return field_encoding.MESSAGES[TYPE_CODES[cls]]


def message(source: Source, classes: Sequence[type], hints: Hints) -> m.Message:
    drawn: m.Message = value(record_of(source.choice(classes)), source, hints)
    return drawn


def flags(source: Source) -> int:
    """Flags of a payload: mostly none, sometimes the skip flag, those of a few ranks, or any."""
    drawn = source.byte()
    return 0 if drawn < 208 else drawn & 15 if drawn < 248 else source.integer(0, 2**63 - 1)


def nbytes(message: m.Message) -> int | None:
    """Size of its frames; None: its header is too large although each field is within its bounds."""
    try:
        return sum(map(len, encode(message)))
    except LocalProtocolError:
        return None


def value(kind: declaration.FieldType, source: Source, hints: Hints, name: str = "") -> Any:
    known = hints.get(name) or hints.get(kind.name)
    if known and source.byte() < 208:
        return source.choice(known)
    match kind:
        case declaration.IntField(low=low, high=high):
            return source.integer(low, high)
        case declaration.BoolField():
            return bool(source.byte() & 1)
        case declaration.FloatField(low=low, high=high):
            return _real(source, low, high)
        case declaration.AnyFloatField():
            return source.choice((math.inf, -math.inf, 0.5))
        case declaration.BytesField(low=low, high=high):
            if low == high == 32:
                return source.bytes(32) if source.one_in(8) else source.choice(_PEERS)
            size = min(high, low + source.choice((0, 32, 1, high - low)))
            return source.bytes(size)
        case declaration.TextField(max_bytes=max_bytes):
            return source.choice(_TEXTS).encode()[:max_bytes].decode(errors="ignore")
        case declaration.WordField(words=words):
            return source.choice(sorted(words))
        case field_encoding.EnumField(enum=enum):
            return source.choice(list(enum))
        case field_encoding.OptionalField(item_type=inner):
            return value(inner, source, hints, name) if source.byte() & 1 else None
        case field_encoding.ListField(item_type=inner, max_items=most):
            count = min(most, source.byte() % 5)
            return tuple(value(inner, source, hints, name) for _ in range(count))
        case field_encoding.TupleField(item_types=inners):
            return tuple(value(inner, source, hints, name) for inner in inners)
        case declaration.PayloadField():
            return source.bytes(source.choice((0, 8, 40, 200)))
        case field_encoding.RecordField(cls=cls, field_types=inner_kinds):
            fields = {name: value(inner, source, hints, name) for name, inner in inner_kinds.items()}
            return _repaired(cls(**fields))
    raise TypeError(f"nothing draws a {type(kind).__name__}")


def _real(source: Source, low: float, high: float) -> float:
    how = source.byte() % 8
    if how < 5:
        return min(high, max(low, (0.0, 1.0, low, high, 0.01)[how]))
    (drawn,) = struct.unpack("<d", source.bytes(8))
    return drawn if low <= drawn <= high else low


def _repaired(drawn: Any) -> Any:
    """The value, repaired if it breaks a rule about several fields."""
    match drawn:
        case m.Span(start, stop):
            return m.Span(min(start, stop), max(start, stop))
        case m.LedgerSpec(size=size, epochs=epochs, steps=steps, delay=delay, shards=shards):
            steps = None if epochs is not None else 7 if steps is None else steps
            shards = tuple(1 + samples % 1000 for samples in shards)
            size = sum(shards) or size
            return replace(drawn, size=size, steps=steps, delay=delay % 2, shards=shards)
        case m.MemberListPage(page=page, pages=pages):
            return replace(drawn, page=page % pages)
        case m.MemberListChanges(order=order):
            short = (m.Span(span.start, min(span.stop, span.start + 2)) for span in order)
            return replace(drawn, order=tuple(short)[: m.MAX_GENERATION_MEMBERS // 2])
        case m.StateBlock(index=index, total=total) | m.CheckpointBlock(index=index, total=total):
            return replace(drawn, index=index % total)
        case m.BundleBlock(index=index, total=total):
            return replace(drawn, index=index % min(total, 8), total=min(total, 8))
        case m.Burst(index=index):
            return replace(drawn, index=index % m.BURST_MESSAGES)
    return drawn
