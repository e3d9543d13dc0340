"""Slices of dense exchanges whose values are rounded, into `RoundedRingBuffer.apply`.

input:  u8 elements, u8 kind of values, u8 whether it is added or stored, then the payload (indices of the
        tables below)
"""

from __future__ import annotations

from random import Random

import numpy as np

from gridfuzz.source import Source
from gridfuzz.targets.base import Target, must
from gridtrain.core.collectives.collective import AddSlice, Provenance, StoreSlice
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.errors import RemoteProtocolError
from gridtrain.network.wire.dense_payload import decode_slice, encode_slice
from gridtrain.network.wire.value_encoding import ValueKind
from gridtrain.runtime.buffers.rounded_buffers import RoundedRingBuffer, largest_contribution

_ELEMENTS = (1, 2, 255, 256, 257, 700)
_KINDS = (ValueKind.BF16, ValueKind.INT8)
_SLOT = PayloadSlot(CollectivePhase.GATHER, 0, 0)


def run(data: bytes) -> bool:
    """Two members; the other one sends segment 0, to be added as the last part or stored as the sum."""
    source = Source(data)
    elements, kind, stores = source.choice(_ELEMENTS), source.choice(_KINDS), source.byte() & 1
    payload = source.rest()
    own_N = np.full(2 * elements, largest_contribution(2, kind), np.float32)
    buffer = RoundedRingBuffer(own_N.copy(), 2, kind)
    effect = StoreSlice(0, 0, payload, Provenance(1, 2, 2, 2))
    try:
        buffer.apply(effect if stores else AddSlice(0, 0, payload, Provenance(1, 1, 2, 1)))
    except RemoteProtocolError:
        must(buffer.update.tobytes() == own_N.tobytes(), "a refused payload has changed the vector")
        must(not buffer.rest_N.any(), "a refused payload has left a rest")
        return False
    theirs_B = decode_slice(np.frombuffer(payload, np.uint8), elements, kind)
    found_B, rest_B = buffer.update[:elements], buffer.rest_N[:elements]
    sent = bytes(buffer.payload(_SLOT))
    must(bool(np.isfinite(buffer.update).all() and np.isfinite(buffer.rest_N).all()), "not finite")
    must(encode_slice(found_B, kind)[0] == sent, "the update is not what is sent")
    if stores:
        must(sent == payload and not rest_B.any(), "a stored sum is not forwarded as it is")
    else:
        sums_B = own_N[:elements] + theirs_B
        must(
            bool((found_B.astype(np.float64) + rest_B == sums_B).all()),
            "a rounding has lost a part of the sum",
        )
    return True


def valid(random: Random) -> bytes:
    head = bytes((random.randrange(len(_ELEMENTS)), random.randrange(len(_KINDS)), random.randrange(2)))
    elements, kind = _ELEMENTS[head[0]], _KINDS[head[1]]
    scale = 2.0 ** random.choice((0, 0, -10, 30, -140, 120, 127.9))  # the last is refused
    values = [random.uniform(-1, 1) * scale for _ in range(elements)]
    return head + encode_slice(np.array(values, np.float32), kind)[0]


_TOKENS = (
    b"\xff\xff",
    b"\xff\x7f",
    b"\x7f\x7f",
    b"\x80\x7f",
    b"\0\x80",
    b"\x6b\xff",
    b"\x79\0",
    b"\x80",
    b"\x7f",
)

TARGETS = (
    Target(
        "slices",
        "slices of rounded dense exchanges",
        run,
        valid,
        ("gridtrain.runtime.buffers.rounded_buffers", "gridtrain.network.wire.value_encoding"),
        tokens=_TOKENS,
    ),
)
