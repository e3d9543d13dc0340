"""Payloads of the sparse exchanges into `sparse_payload.decode`, and two of them into `merge`.

input:  u8 n, u8 largest K, u8 kind of values (indices of the tables below), then the payload
        merge: the same, u16 length of the first payload, both payloads
"""

from __future__ import annotations

import struct
from random import Random

import numpy as np

from gridfuzz.source import Source
from gridfuzz.targets.base import Target, must
from gridtrain.errors import RemoteProtocolError
from gridtrain.network.wire.sparse_payload import SparseVector, decode, encode
from gridtrain.network.wire.value_encoding import ValueKind
from gridtrain.sparsify.merge import merge

_N = (1, 2, 7, 8, 9, 64, 1000, 65537, 1 << 20, 2**32)
_ENTRIES = (0, 1, 2, 7, 64, 1000, 2**31)
_KINDS = tuple(ValueKind)


def _format(source: Source) -> tuple[int, int, ValueKind]:
    return source.choice(_N), source.choice(_ENTRIES), source.choice(_KINDS)


def _checked(payload: bytes, n: int, most: int, kind: ValueKind) -> SparseVector:
    """Decode and check the result.  Raises `RemoteProtocolError`."""
    sparse = decode(payload, n=n, max_entries=most, kind=kind)
    indices, values = sparse.indices, sparse.values
    must(indices.dtype == np.int64 and values.dtype == np.float32, "the dtype is different")
    must(indices.shape == values.shape and indices.size <= min(most, n), "the number of entries is different")
    must(bool((indices[1:] > indices[:-1]).all()), "indices do not increase")
    must(indices.size == 0 or 0 <= indices[0] <= indices[-1] < n, "an index is out of range")
    must(bool(np.isfinite(values).all()), "a value is not finite")
    must(encode(indices, values, n=n, kind=kind) == payload, "the encoding is not canonical")
    return sparse


def run(data: bytes) -> bool:
    source = Source(data)
    n, most, kind = _format(source)
    try:
        _checked(source.rest(), n, most, kind)
    except RemoteProtocolError:
        return False
    return True


def run_merge(data: bytes) -> bool:
    source = Source(data)
    n, most, kind = _format(source)
    first = source.bytes(min(source.below(1 << 16), 2048))
    try:
        mine, theirs = _checked(first, n, most, kind), _checked(source.rest(), n, most, kind)
        k = max(1, min(most, n))
        merged = merge(mine, theirs, n=n, k=k, kind=kind)
    except RemoteProtocolError:
        return False
    sums: dict[int, np.float32] = {}
    with np.errstate(over="ignore"):
        for side in (mine, theirs):
            for index, number in zip(side.indices, side.values, strict=True):
                sums[int(index)] = np.float32(sums.get(int(index), np.float32(0)) + number)
    after: dict[int, float] = {}
    for indices, values in (
        (merged.sparse.indices, merged.sparse.values),
        (merged.truncated_indices, merged.truncated_values),
    ):
        for index, number in zip(indices, values, strict=True):
            after[int(index)] = after.get(int(index), 0.0) + float(number)
    lost = {i: (float(s), after.get(i, 0.0)) for i, s in sums.items() if float(s) != after.get(i, 0.0)}
    must(not lost and after.keys() <= sums.keys(), f"a merge has lost or added values: {lost}")
    must(merged.sparse.indices.size <= k, "a merge has more than k entries")
    _checked(merged.payload, n, k, kind)
    swapped = merge(theirs, mine, n=n, k=k, kind=kind)
    must(swapped.payload == merged.payload, "the two sides of a merge differ")
    return True


def _payload(random: Random, n: int, most: int, kind: ValueKind) -> bytes:
    k = random.randint(0, min(n, most, 60))
    indices = np.array(sorted(random.sample(range(n), k)), np.int64)
    scale = 2.0 ** random.choice((0, 0, -10, 30, -140, 127))
    few = random.random() < 0.4
    values = [random.choice((-2.0, -1.0, 1.0, 2.0)) if few else random.uniform(-2, 2) for _ in range(k)]
    largest = float(np.finfo(np.float32).max)
    floats = np.array([max(-largest, min(largest, v * scale)) for v in values], np.float32)
    return encode(indices, floats, n=n, kind=kind)


def _drawn_format(random: Random) -> tuple[bytes, int, int, ValueKind]:
    choices = bytes(
        (random.randrange(len(_N)), random.randrange(len(_ENTRIES)), random.randrange(len(_KINDS)))
    )
    return choices, _N[choices[0]], _ENTRIES[choices[1]], _KINDS[choices[2]]


def valid(random: Random) -> bytes:
    choices, n, most, kind = _drawn_format(random)
    return choices + _payload(random, n, most, kind)


def valid_merge(random: Random) -> bytes:
    choices, n, most, kind = _drawn_format(random)
    first = _payload(random, n, most, kind)
    return choices + len(first).to_bytes(2, "little") + first + _payload(random, n, most, kind)


def change(data: bytes, random: Random) -> bytes:
    """Change one field of the first payload's header, or of the format."""
    out = bytearray(data)
    at = 3 if random.random() < 0.8 else random.randrange(3)
    if len(out) < at + 8:
        return data
    if at < 3:
        out[at] = random.randrange(256)
        return bytes(out)
    k, exponent, kind = struct.unpack_from("<IhH", out, at)
    match random.randrange(3):
        case 0:
            k = random.choice((0, k + 1, abs(k - 1), 2 * k, 2**31, 2**32 - 1))
        case 1:
            beside = exponent - 1 if exponent > 0 else exponent + 1
            exponent = random.choice((0, 1, beside, 113, 114, 200, -163, -164, 32767, -32768))
        case _:
            kind = random.choice((0, 1, 2, 3, 4, 5, 6, 256, 65535))
    struct.pack_into("<IhH", out, at, k & 2**32 - 1, exponent, kind)
    return bytes(out)


def change_merge(data: bytes, random: Random) -> bytes:
    """As `change`, in either of the two payloads."""
    size = 5 + int.from_bytes(data[3:5], "little")
    first, second = data[5:size], data[size:]
    if random.random() < 0.5:
        first = change(data[:3] + first, random)[3:]
    else:
        second = change(data[:3] + second, random)[3:]
    return data[:3] + len(first).to_bytes(2, "little") + first + second


_TOKENS = (
    b"\xff\xff\xff\xff",
    b"\0\0\0\x80",
    b"\xff\x7f",
    b"\0\x7c",
    b"\x01\0",
    b"\0\0\xc0\x7f",
    b"\0\0\x80\x7f",
)

_CODEC = (
    "gridtrain.network.wire.sparse_payload",
    "gridtrain.network.wire.elias_fano",
    "gridtrain.network.wire.value_encoding",
)

TARGETS = (
    Target("sparse", "payloads of sparse exchanges", run, valid, _CODEC, change, _TOKENS),
    Target(
        "merge",
        "two payloads, summed and truncated",
        run_merge,
        valid_merge,
        ("gridtrain.sparsify.merge", *_CODEC),
        change_merge,
        _TOKENS,
    ),
)
