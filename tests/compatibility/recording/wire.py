"""Records bytes of the wire: every message, sparse payloads, and what else travels inside of a payload.

Written for commit 330f465; never adapted to a later one.
"""

from __future__ import annotations

import io
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from oldformats.positions import plain
from oldformats.tiny_training import tiny_training, tree

from gridtrain.optim import state_sync
from gridtrain.pipeline.narrow import Wire
from gridtrain.pipeline.trees import Spec
from gridtrain.protocol import messages as m
from gridtrain.runtime import handover, updates
from gridtrain.runtime.handoffs import HandOffWorkspace
from gridtrain.runtime.images import Image
from gridtrain.runtime.statefeed import cut, state_digest
from gridtrain.transport.curve import Identity
from gridtrain.transport.sealed import Channel
from gridtrain.wire import kinds, schema
from gridtrain.wire.codec import encode
from gridtrain.wire.sparse import ValueKind, encode_once

INTEGERS = (1, 127, 128, 255, 256, 65_535, 65_536, 4_294_967_295, 4_294_967_296, 2**62)
"""One for each length that msgpack has for unsigned integers."""


class Examples:
    """Values for the kinds of the schema, the same ones at every run."""

    def __init__(self) -> None:
        self._drawn = 0

    def _next(self) -> int:
        self._drawn += 1
        return self._drawn

    def full(self, kind: kinds.Kind) -> Any:
        """Every option is present and every list has two items."""
        number = self._next()
        match kind:
            case kinds.Int(low=low, high=high):
                within = [n for n in INTEGERS if low <= n <= high]
                return within[number % len(within)]
            case kinds.Flag():
                return True
            case kinds.Real(high=high):
                return min(0.125 * number, high)
            case kinds.Binary(high=high):
                return bytes((number + i) % 256 for i in range(min(high, 32)))
            case kinds.Text(max_bytes=max_bytes):
                return f"text {number} \u00e4\u2192"[: max_bytes // 4]
            case kinds.Choice(words=words):
                return sorted(words)[number % len(words)]
            case kinds.OneOf(enum=enum):
                return list(enum)[number % len(enum)]
            case kinds.Maybe(kind=inner):
                return self.full(inner)
            case kinds.Many(kind=inner):
                return (self.full(inner), self.full(inner))
            case kinds.Group(kinds=inners):
                return tuple(self.full(inner) for inner in inners)
            case kinds.Frame():
                return bytes((7 * number + i) % 256 for i in range(12))
            case kinds.Record(cls=cls, kinds=inner_kinds):
                return self._sound(cls(*(self.full(inner) for inner in inner_kinds.values())))
        raise AssertionError(type(kind).__name__)

    def bare(self, kind: kinds.Kind) -> Any:
        """Every option is absent, every list is empty, every number is its smallest."""
        match kind:
            case kinds.Int(low=low) | kinds.Real(low=low):
                return low
            case kinds.Flag():
                return False
            case kinds.Binary(low=low):
                return bytes(low)
            case kinds.Text():
                return ""
            case kinds.Choice(words=words):
                return min(words)
            case kinds.OneOf(enum=enum):
                return next(iter(enum))
            case kinds.Maybe():
                return None
            case kinds.Many():
                return ()
            case kinds.Group(kinds=inners):
                return tuple(self.bare(inner) for inner in inners)
            case kinds.Frame():
                return b""
            case kinds.Record(cls=cls, kinds=inner_kinds):
                return self._sound(cls(*(self.bare(inner) for inner in inner_kinds.values())))
        raise AssertionError(type(kind).__name__)

    def _sound(self, value: Any) -> Any:
        """With the rule of its record kept."""
        match value:
            case m.Span(start, stop):
                return m.Span(min(start, stop), max(start, stop))
            case m.Held() | m.PieceAsk() if value.blocks.start == value.blocks.stop:
                return replace(value, blocks=m.Span(value.blocks.start, value.blocks.start + 1))
            case m.Member():
                pieces = tuple((m.Span(b.start, max(b.stop, b.start + 1)), rank) for b, rank in value.pieces)
                digests = tuple(bytes([number]) * 32 for number in range(len(pieces)))
                return replace(value, pieces=pieces, piece_digests=digests)
            case m.StagedModel():
                return replace(value, cuts=(0, 1, 2) if value.blocks else (0, 3))
            case m.LedgerSpec():
                return m.LedgerSpec(value.size, value.seed, steps=value.steps or 9)
            case m.Roster():
                return replace(value, page=min(1, value.pages - 1), pages=min(2, value.pages))
            case m.HandOver() | m.BundleBlock() | m.StateBlock() | m.Copy():
                return replace(value, index=min(1, value.total - 1), total=min(2, value.total))
            case m.Burst():
                return replace(value, index=value.index % m.BURSTS)
        return value


def messages() -> list[dict[str, Any]]:
    """Each message of the schema: code, name at that time, and examples as fields by position and frames."""
    recorded = []
    for code, record in schema.MESSAGES.items():
        examples = Examples()
        values = [examples.full(record), examples.bare(record), *_more(record.cls)]
        unique = {repr(value): value for value in values}.values()
        recorded.append(
            {
                "code": code,
                "name": record.name,
                "examples": [
                    {"fields": plain(value), "frames": [bytes(frame).hex() for frame in encode(value)]}
                    for value in unique
                ],
            }
        )
    return recorded


def _more(cls: type) -> Iterator[m.Message]:
    """Every value of an enumeration, and every word of a choice."""
    at = m.RoundId(3, 14, 159, 2)
    if cls is m.Data:
        for phase in m.Phase:
            yield m.Data(at, m.Channel(1, 2, 3), m.Place(phase, 1, 2, 3), False, b"\x00\x01\x02\x03")
    if cls is m.Decision:
        for verdict in m.Verdict:
            yield m.Decision(at, verdict, "two lines\nof a reason")
    if cls is m.RunState:
        for word in ("waiting", "training", "paused", "finished"):
            yield m.RunState(word, "a reason")
    if cls is m.Setup:
        yield m.Setup((("model", "25 parameters"),), m.LedgerSpec(48, 5, epochs=3), 6, 12)


# -- payloads --------------------------------------------------------------------------------------


def sparse() -> list[dict[str, Any]]:
    """Payloads of each kind of values: what went in, the bytes, and what everybody who reads them has."""
    random = np.random.RandomState(7)
    many = np.sort(random.choice(100_000, 300, replace=False)).astype(np.int64)
    some = np.sort(random.choice(1000, 20, replace=False)).astype(np.int64)
    tiny = np.array([1e-45, -1e-45, 1e-39, -0.0, 0.0, 1.5, -3.0e-5, 2.0e-38], np.float32)
    cases = [
        ("none of 10", 10, np.zeros(0, np.int64), np.zeros(0, np.float32)),
        ("all of 5", 5, np.arange(5), np.array([1, -2, 0.5, -0.25, 8], np.float32)),
        ("20 of 1000", 1000, some, random.standard_normal(20).astype(np.float32)),
        ("subnormal values", 64, np.arange(0, 64, 8), tiny),
        ("300 of 100000", 100_000, many, (random.standard_normal(300) * 1e-3).astype(np.float32)),
        (
            "the largest vector",
            2**32,
            np.array([0, 2**31, 2**32 - 1]),
            np.array([3e38, -1, 1e-3], np.float32),
        ),
    ]
    recorded = []
    for kind in ValueKind:
        for name, n, indices, values in cases:
            made = encode_once(indices, values, n=n, kind=kind)
            recorded.append(
                {
                    "kind": [kind.name.lower(), kind.value],
                    "case": name,
                    "n": n,
                    "indices": indices.tolist(),
                    "values": values.astype("<f4").tobytes().hex(),
                    "payload": made.payload.hex(),
                    "decoded": made.sparse.values.astype("<f4").tobytes().hex(),
                }
            )
    return recorded


def states() -> dict[str, Any]:
    """The replicated state as a joining worker gets it, and digests of it."""
    model, optimizer, trackers = tiny_training()
    own, common = state_sync.capture(model, optimizer, trackers)
    document, tensors = state_sync.pack(model, optimizer, trackers)
    image = Image.of(41, bytes(range(32)), own, common)
    return {
        "own": own.hex(),
        "common": common.hex(),
        "first block": bytes(cut([own, common])[0]).hex(),
        "digest of blocks": state_digest([own, common]).hex(),
        "image table": image.table.hex(),
        "content digest": state_sync.content_digest(document, tensors).hex(),
        "digest of the initial state": state_sync.begins(model, optimizer, trackers).hex(),
        "digest of replicas": state_sync.digest(model, optimizer).hex(),
        "settings": state_sync.settings(optimizer).decode(),
        "digest of settings": state_sync.hyper_digest(optimizer).hex(),
        "lines of settings": state_sync.hyper_lines(optimizer),
    }


def steps() -> dict[str, Any]:
    """What a committed step did, as members send it to a worker that catches up; a residual on its way."""
    indices = np.array([0, 3, 17, 29], np.int64)
    values = np.array([0.5, -0.25, 4.0, -1.125], np.float32)
    settings = b'["SGD", [{"lr": 0.25}]]'
    update = updates.StepUpdate(7, settings, False, updates.Sparse(indices, values), (bytes(range(32)),))
    skipped = updates.StepUpdate(8, settings, True, None, (bytes(32),))
    residual = np.zeros(40, np.float32)
    residual[[1, 5, 9, 30]] = [0.125, -7.0, 0.5, 2.0]
    chosen = handover.choose(residual, 64, 2)
    return {
        "n": 30,
        "update": updates.write(update, 30).hex(),
        "fields of update": [
            7,
            settings.hex(),
            False,
            indices.tolist(),
            values.tolist(),
            [bytes(range(32)).hex()],
        ],
        "digest of update": update.digest.hex(),
        "skipped": updates.write(skipped, 30).hex(),
        "digest of skipped": skipped.digest.hex(),
        "residual": residual.tolist(),
        "budget": 64,
        "payload of residual": chosen.payload.hex(),
        "rest of residual": [] if chosen.rest_N is None else chosen.rest_N.tolist(),
    }


def activations() -> list[dict[str, Any]]:
    """A nest of tensors as it passes from a stage to the next one, in each form."""
    recorded = []
    for wire in Wire:
        spec = Spec.of(tree(), 4, wire=wire)
        buffers = spec.encode(tree(), 4)
        joined = HandOffWorkspace([memoryview(bytes(buffer)) for buffer in buffers])
        recorded.append(
            {
                "wire": wire.value,
                "text": str(spec),
                "digest": spec.digest.hex(),
                "buffers": [bytes(buffer).hex() for buffer in buffers],
                "joined": bytes(joined.payload(m.Place(m.Phase.PASS))).hex(),
            }
        )
    return recorded


# -- sealed packets --------------------------------------------------------------------------------

ANNA, BERT = bytes(range(1, 33)), bytes(range(101, 133))


@contextmanager
def drawn_in_order() -> Iterator[None]:
    """`secrets.token_bytes` gives numbered bytes, so that a sealed conversation is the same at every run."""
    real, source = secrets.token_bytes, io.BytesIO(bytes(i * i % 251 for i in range(4096)))
    fake: Callable[[int], bytes] = source.read
    secrets.token_bytes = fake  # type: ignore[assignment]
    try:
        yield
    finally:
        secrets.token_bytes = real


def sealed() -> dict[str, Any]:
    """Anna calls Bert through a relay, both greet, and each sends the other two messages."""
    anna, bert = Identity.from_secret(ANNA), Identity.from_secret(BERT)
    with drawn_in_order():
        ours, theirs = Channel(anna, bert.public, b"anna greets"), Channel(bert, anna.public, b"bert greets")
        call = ours.call()
        first = theirs.answer(call).packets
        second = ours.answer(first[0]).packets
        third = theirs.answer(second[0]).packets
        assert ours.session is not None and theirs.session is not None
        control = ours.session.seal([b"control", b"payload"], bulk=False)
        bulk = theirs.session.seal([b"header", bytes(range(256))], bulk=True)
    return {
        "secrets": [ANNA.hex(), BERT.hex()],
        "public": [anna.public.hex(), bert.public.hex()],
        "packets": [[p.hex() for p in packets] for packets in ((call,), first, second, third)],
        "control": [p.hex() for p in control],
        "bulk": [p.hex() for p in bulk],
    }
