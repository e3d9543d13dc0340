"""Values for the fields of messages, and repair of drawn values that break a rule about several fields."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

from gridtrain.core import messages as m
from gridtrain.core.messages import declaration
from gridtrain.core.messages.transfer import MAX_STATE_BLOCKS
from gridtrain.network.wire import field_encoding


def repair(drawn: Any) -> Any:
    """The value itself, or a similar one that satisfies the `find_problem` of its class."""
    match drawn:
        case m.Span(start, stop):
            return m.Span(min(start, stop), max(start, stop))
        case m.CheckpointInfo(layers=layers) | m.CheckpointRequest(layers=layers):
            return replace(drawn, layers=_not_empty(layers))
        case m.Member(pieces=pieces, piece_digests=digests):
            return replace(
                drawn,
                pieces=tuple((_not_empty(layers), rank) for layers, rank in pieces),
                piece_digests=(*digests, *(b"",) * len(pieces))[: len(pieces)],
            )
        case m.StagedModel(blocks=blocks):
            return replace(drawn, cuts=(0, len(blocks) or 3))
        case m.LedgerSpec(size=size, epochs=epochs, delay=delay, shards=shards):
            shards = tuple(1 + samples % 1000 for samples in shards)
            steps = 7 if epochs is None else None
            return replace(drawn, size=sum(shards) or size, steps=steps, delay=delay % 2, shards=shards)
        case m.MemberListPage(page=page, pages=pages):
            return replace(drawn, page=page % min(pages, 256), pages=min(pages, 256))
        case m.MemberListChanges(order=order):
            return replace(drawn, order=tuple(m.Span(span.start, span.start) for span in order))
        case m.ResidualBlock():
            return _with_index(drawn, m.MAX_RESIDUAL_BLOCKS)
        case m.BundleBlock():
            return _with_index(drawn, 8)
        case m.StateBlock() | m.CheckpointBlock():
            return _with_index(drawn, MAX_STATE_BLOCKS)
        case m.Burst(index=index):
            return replace(drawn, index=index % m.BURST_MESSAGES)
    return drawn


def _not_empty(layers: m.Span) -> m.Span:
    return layers if layers.start < layers.stop else m.Span(0, 1)


def _with_index(block: Any, max_blocks: int) -> Any:
    total = min(block.total, max_blocks)
    return replace(block, index=block.index % total, total=total)


def layout(kind: declaration.FieldType) -> Any:
    """The values and bytes that a field allows, without names, as JSON."""
    match kind:
        case declaration.IntField(low=low, high=high):
            return f"int {low} .. {high}"
        case declaration.FloatField(low=low, high=high):
            return f"float {low!r} .. {high!r}"
        case declaration.AnyFloatField():
            return "float"
        case declaration.BytesField(low=low, high=high):
            return f"bytes {low} .. {high}"
        case declaration.ReasonField(max_bytes=max_bytes):
            return f"reason {max_bytes}"
        case declaration.TextField(max_bytes=max_bytes):
            return f"text {max_bytes}"
        case declaration.WordField() | declaration.BoolField() | declaration.PayloadField():
            return kind.bounds
        case field_encoding.EnumField(enum=enum):
            return f"one of {[member.value for member in enum]}"
        case field_encoding.OptionalField(item_type=inner):
            return {"optional": layout(inner)}
        case field_encoding.ListField(item_type=inner, max_items=most):
            return {f"0 .. {most}": layout(inner)}
        case field_encoding.TupleField(item_types=inners):
            return [layout(inner) for inner in inners]
        case field_encoding.RecordField(field_types=fields):
            return [layout(inner) for inner in fields.values()]
    raise TypeError(f"no layout for {type(kind).__name__}")


def sample(kind: declaration.FieldType, random: Random) -> Any:
    """A value within the bounds; it depends on the state of `random`, but not on names of fields."""
    match kind:
        case declaration.IntField(low=low, high=high):
            return random.choice((low, high, min(high, 300)))
        case declaration.BoolField():
            return random.choice((False, True))
        case declaration.FloatField(low=low, high=high):
            return random.choice((low, high, 0.25))
        case declaration.AnyFloatField():
            return random.choice((math.inf, -math.inf, 0.25))  # NaN is not equal to itself
        case declaration.BytesField(low=low, high=high):
            return random.randbytes(random.choice((low, high)))
        case declaration.TextField(max_bytes=max_bytes):
            return random.choice(("", "é" * 3, "x" * max_bytes))
        case declaration.WordField(words=words):
            return random.choice(sorted(words))
        case declaration.PayloadField():
            return random.randbytes(20)
        case field_encoding.EnumField(enum=enum):
            return random.choice(list(enum))
        case field_encoding.OptionalField(item_type=inner):
            return random.choice((None, sample(inner, random)))
        case field_encoding.ListField(item_type=inner):
            return tuple(sample(inner, random) for _ in range(random.randrange(4)))
        case field_encoding.TupleField(item_types=inners):
            return tuple(sample(inner, random) for inner in inners)
        case field_encoding.RecordField(cls=cls, field_types=fields):
            return repair(cls(**{name: sample(inner, random) for name, inner in fields.items()}))
    raise TypeError(f"no sample for {type(kind).__name__}")
