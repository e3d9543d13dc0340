"""Mutation of inputs.

`damage` changes bytes.  `tree` changes a msgpack document so that the result is a document again: a field out
of bounds, one too many, one of another type.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from random import Random
from typing import Any

import msgpack

MSGPACK = (
    *(
        bytes([code])
        for code in (0xC0, 0xC1, 0xC2, 0xC3, 0x80, 0x81, 0x90, 0x91, 0x9F, 0xA0, 0xBF, 0xE0, 0x7F)
    ),
    b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1 items, which do not follow
    b"\xdf\xff\xff\xff\xff",  # a map
    b"\xdb\xff\xff\xff\xff",  # a string
    b"\xc6\xff\xff\xff\xff",  # a binary
    b"\xdc\x10\x00",
    b"\xdc\x10\x01",
    b"\xd9\xff",
    b"\xc4\x20",
    b"\xc4\x40",
    b"\xc4\x41",
    b"\xc7\x00\x01",
    b"\xd4\x00\x00",
    b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",  # NaN
    b"\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00",  # infinity
    b"\xca\xff\x80\x00\x00",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\xcf\x7f\xff\xff\xff\xff\xff\xff\xff",
    b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00",
    b"\xcc\x00",  # 0, longer than needed
    b"\xd3\x00\x00\x00\x00\x00\x00\x00\x00",
    b"\xa1\xff",  # no UTF-8
    b"\xa3\xed\xa0\x80",  # a surrogate
    b"\x91" * 600,
    b"\xdc\x10\x00" * 300,  # nested arrays of 4096 items, all of which are missing
)
JSON = (
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b":",
        b",",
        b"null",
        b"true",
        b"NaN",
        b"Infinity",
        b"-0",
        b"1e999",
        b"\\ud800",
    ),
    b'"__class__"',
    b"[" * 2000,
    b'{"a":' * 600,
    b"9" * 5000,
    b"\xef\xbb\xbf",
)
_INTS = (0, 1, -1, 2, 3, 4, 7, 8, 127, 128, 255, 256, 4095, 4096, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1)
_ODD = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.0, -0.0, 1e308),
    *(float("nan"), float("inf"), 5e-324, "", "a", "\0", "\x1b[31m", "\u202e", "x" * 64, "x" * 65, "x" * 513),
    *(b"", b"\0" * 32, b"\xff" * 31, b"a" * 64, b"a" * 65, (), (0,), ((),), {}, {1: 2}),
    msgpack.ExtType(1, b"x"),
)


def damage(data: bytes, random: Random, tokens: Sequence[bytes], others: Sequence[bytes], most: int) -> bytes:
    """`data` with one to six changes; at most `most` bytes."""
    out = bytearray(data)
    for _ in range(1 + min(5, int(random.expovariate(0.9)))):
        _change(out, random, tokens, others)
    return bytes(out[:most])


def _change(out: bytearray, random: Random, tokens: Sequence[bytes], others: Sequence[bytes]) -> None:
    at = random.randrange(len(out) + 1)
    size = min(len(out) - at, 1 << random.randrange(7))
    here = slice(at, at + size)
    match random.randrange(11):
        case 0 | 1 if at < len(out):
            out[at] ^= 1 << random.randrange(8)
        case 2 | 3 if at < len(out):
            out[at] = random.choice((0, 255, out[at] - 1 & 255, out[at] + 1 & 255, random.randrange(256)))
        case 4:
            del out[here]
        case 5:
            out[at:at] = out[here]
        case 6:
            out[at:at] = random.randbytes(1 + size // 2)
        case 7 if tokens:
            token = random.choice(tokens)
            out[at : at + random.choice((0, len(token)))] = token
        case 8 if others:
            other = random.choice(others)
            start = random.randrange(len(other) + 1)
            if random.random() < 0.5:
                out[at:] = other[start:]
            else:
                out[here] = other[start : start + size]
        case 9:  # a number, as lengths and counts are written
            form = random.choice(("<B", "<H", "<I", "<Q", ">H", ">I", ">Q"))
            width = struct.calcsize(form)
            number = random.choice((*_INTS, len(out), len(out) - at)) & (1 << 8 * width) - 1
            out[at : at + width] = struct.pack(form, number)
        case _:
            to = random.randrange(len(out) + 1)
            piece = out[here]
            del out[here]
            out[to:to] = piece


def tree(document: bytes, random: Random) -> bytes:
    """A msgpack document, changed in one to three places; other bytes as they are."""
    try:
        plain = msgpack.unpackb(document, use_list=True, strict_map_key=False)
    except Exception:  # fuzzed input can fail in any way; it is not a tree
        return document
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        plain = _altered(plain, random)
    try:
        packed: bytes = msgpack.packb(plain)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return document
    return packed


def _altered(node: Any, random: Random) -> Any:
    if isinstance(node, list) and node and random.random() < 0.85:
        at = random.randrange(len(node))
        match random.randrange(12):
            case 0:
                del node[at]
            case 1:
                node.insert(at, node[random.randrange(len(node))])
            case 2:
                to = random.randrange(len(node))
                node[at], node[to] = node[to], node[at]
            case 3:
                flat = not any(isinstance(item, list) for item in node)
                node[:] = node * random.choice((2, 3, 300) if flat else (2, 3))
                del node[5000:]
            case _:
                node[at] = _altered(node[at], random)
        return node
    if isinstance(node, bool) or node is None or random.random() < 0.3:
        return random.choice(_ODD)
    if isinstance(node, int):
        return random.choice(
            (node + 1, node - 1, -node, node * 2, node ^ 1 << random.randrange(63), float(node))
        )
    if isinstance(node, float):
        return random.choice((-node, node * 1e300, int(node) if abs(node) < 2**60 else 0, float("nan")))
    if isinstance(node, str | bytes) and node:
        at = random.randrange(len(node))
        return random.choice((node[:at], node + node, node[at:], node * 40, node[:at] + node[at + 1 :]))
    return [node, node] if random.random() < 0.5 else random.choice(_ODD)
