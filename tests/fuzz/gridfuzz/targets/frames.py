"""Frames of one multipart message into `wire.codec.decode`.

input:  u8 frames - 1, then each frame but the last as u16 length and bytes, then the last
"""

from __future__ import annotations

from random import Random

from gridfuzz import drawing
from gridfuzz.mutate import MSGPACK, tree
from gridfuzz.source import Source
from gridfuzz.targets.base import Target, must
from gridtrain.errors import LocalProtocolError, RemoteProtocolError
from gridtrain.network.wire.codec import TYPE_CODES, decode, encode

MAX_HEAD_BYTES = 4096


def frames_of(data: bytes) -> list[bytes]:
    source = Source(data)
    count = (1, 2, 3, 0)[source.byte() % 4]
    frames = [source.bytes(min(source.below(1 << 16), MAX_HEAD_BYTES)) for _ in range(count - 1)]
    return [*frames, source.rest()] if count else []


def input_of(frames: list[bytes]) -> bytes:
    head, last = [frame[:MAX_HEAD_BYTES] for frame in frames[:-1]], frames[-1:]
    sized = b"".join(len(frame).to_bytes(2, "little") + frame for frame in head)
    return bytes([(len(frames) - 1) % 4]) + sized + b"".join(last)


def run(data: bytes) -> bool:
    frames = frames_of(data)
    try:
        message = decode(frames)
    except RemoteProtocolError:
        return False
    again = [bytes(frame) for frame in encode(message)]
    # As text, because NaN, which a MeanRequest may have, does not equal NaN.
    must(repr(decode(again)) == repr(message), f"a message is another after encoding it: {message}")
    must(again[1:] == frames[1:], "a payload has changed")
    return True


def valid(random: Random) -> bytes:
    source = Source(random.randbytes(400))
    while True:
        message = drawing.message(source, list(TYPE_CODES), {})
        try:
            return input_of([bytes(frame) for frame in encode(message)])
        except LocalProtocolError:  # a header of more than the largest size
            source = Source(random.randbytes(400))


def change(data: bytes, random: Random) -> bytes:
    frames = frames_of(data)
    return input_of([tree(frames[0], random), *frames[1:]]) if frames else data


TARGETS = (
    Target(
        "codec",
        "frames into messages",
        run,
        valid,
        (
            "gridtrain.network.wire.codec",
            "gridtrain.core.messages.declaration",
            "gridtrain.network.wire.field_encoding",
        ),
        change,
        MSGPACK,
        memory_bytes=16 << 20,
    ),
)
