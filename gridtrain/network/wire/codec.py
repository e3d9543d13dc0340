"""Messages to frames and back.

Decides whether frames from a peer are a message, by `schema`, before anyone else looks at them.
Copies no payload, keeps no state, and touches no socket.

    frame 0   msgpack array [code, field, field, ...]     at most 64 KiB
    frame 1   the payload, of Data, StateBlock, HandOver and StatusReply alone, at most 64 MiB

What `decode` does, in order: count the frames, measure them, parse the header with every limit of
msgpack set, look up the code, check each field.  Its only error is `RemoteProtocolError`; the only
one of `encode` is `LocalProtocolError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import msgpack

from gridtrain.core.messages import Data, Message
from gridtrain.core.messages.declaration import FieldError
from gridtrain.errors import LocalProtocolError, RemoteProtocolError
from gridtrain.network.wire.schema import MESSAGES

MAX_FRAMES = 2
MAX_HEADER_BYTES = 64 * 1024
MAX_PAYLOAD_BYTES = 64 * 1024 * 1024
MAX_MESSAGE_BYTES = MAX_HEADER_BYTES + MAX_PAYLOAD_BYTES

# What msgpack itself enforces while it parses; `schema` is narrower, field by field.
_PARSE_LIMITS: dict[str, int] = {
    "max_str_len": 512,
    "max_bin_len": 64,
    "max_array_len": 4096,
    "max_map_len": 0,
    "max_ext_len": 0,
}

TYPE_CODES: dict[type, int] = {record.cls: code for code, record in MESSAGES.items()}

_REMEDY = "the peer is dropped; see that it runs the same version of gridtrain"


def encode(message: Message) -> list[bytes | memoryview]:
    """The message as one or two frames; a payload's frame is a view of the payload, not a copy.

    Raises:
        LocalProtocolError: a field is out of its bounds, the header exceeds 64 KiB or the payload 64 MiB, or
            the payload is no contiguous buffer.
    """
    code = TYPE_CODES.get(type(message))
    if code is None:
        raise LocalProtocolError(f"{type(message).__name__} is not a message of the protocol")
    record = MESSAGES[code]
    try:
        header: bytes = msgpack.packb([code, *record.pack(message)])
    except FieldError as error:
        raise LocalProtocolError(f"cannot send: {error.prefix_path(record.name)}") from None
    if len(header) > MAX_HEADER_BYTES:
        raise LocalProtocolError(
            f"header of {record.name} takes {len(header)} bytes, at most {MAX_HEADER_BYTES} are allowed",
            remedy="send it in pages",
        )
    if not record.has_frame:
        return [header]
    return [header, _as_frame(message.payload, record.name)]  # type: ignore[union-attr]


def decode(frames: Sequence[bytes | memoryview]) -> Message:
    """The message that these frames of one multipart message are; its payload is frame 1 itself.

    Raises:
        RemoteProtocolError: they are none.
    """
    _check_count(frames, 1, MAX_FRAMES)
    _check_sizes(frames)
    header = _parse(frames[0])
    if type(header) is not tuple or not header or type(header[0]) is not int:
        raise RemoteProtocolError("header is not an array that begins with a message code", remedy=_REMEDY)
    record = MESSAGES.get(header[0])
    if record is None:
        raise RemoteProtocolError(f"message code {header[0]} is not known", remedy=_REMEDY)
    expected = 1 + record.has_frame
    _check_count(frames, expected, expected, f"{record.name} came in ")
    try:
        message: Message = record.unpack(header[1:], *frames[1:expected])
    except FieldError as error:
        raise RemoteProtocolError(str(error.prefix_path(record.name)), remedy=_REMEDY) from None
    return message


def data_bytes(message: Data) -> int:
    """What the frames that `encode` makes of it take together, without making them."""
    at, channel, place = message.round, message.channel, message.slot
    numbers = (at.term, at.generation, at.step, at.attempt, channel.group, channel.kind, channel.index)
    placed = (place.hop, place.segment, place.slice)
    header = _DATA_HEADER_BYTES + sum([1 if x < 0x80 else _msgpack_int_bytes(x) for x in (*numbers, *placed)])
    payload = message.payload
    return header + (len(payload) if type(payload) is bytes else memoryview(payload).nbytes)


_DATA_HEADER_BYTES = 7
"""Four arrays' heads, the code, the phase and the flag: a byte each."""


def _msgpack_int_bytes(number: int) -> int:
    """Of an unsigned integer in msgpack."""
    if number < 0x80:
        return 1
    return 2 if number < 1 << 8 else 3 if number < 1 << 16 else 5 if number < 1 << 32 else 9


def _as_frame(payload: Any, name: str) -> bytes | memoryview:
    try:
        view = memoryview(payload)
        frame = view.cast("B") if view.nbytes else b""  # an empty view cannot be cast
    except (TypeError, ValueError) as error:
        raise LocalProtocolError(f"payload of {name} is no contiguous buffer: {error}") from None
    if len(frame) > MAX_PAYLOAD_BYTES:
        raise LocalProtocolError(
            f"payload of {name} takes {len(frame)} bytes, at most {MAX_PAYLOAD_BYTES} are allowed",
            remedy="send it in slices",
        )
    return frame


def _check_count(frames: Sequence[bytes | memoryview], low: int, high: int, what: str = "") -> None:
    if not low <= len(frames) <= high:
        bound = f"{low} .. {high}" if low < high else f"{low}"
        raise RemoteProtocolError(f"{what}{len(frames)} frames, must be {bound}", remedy=_REMEDY)


def _check_sizes(frames: Sequence[bytes | memoryview]) -> None:
    if len(frames[0]) <= MAX_HEADER_BYTES and len(frames[-1]) <= MAX_HEADER_BYTES:
        return
    for name, frame, limit in zip(
        ("header", "payload"), frames, (MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES), strict=False
    ):
        if len(frame) > limit:
            raise RemoteProtocolError(
                f"{name} of {len(frame)} bytes, at most {limit} are allowed", remedy=_REMEDY
            )


def _parse(header: bytes | memoryview) -> Any:
    try:
        return msgpack.unpackb(
            header,
            raw=False,
            use_list=False,
            strict_map_key=True,
            object_hook=_refuse_map,
            ext_hook=_refuse_ext,
            **_PARSE_LIMITS,
        )
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        problem = str(error) or type(error).__name__
        raise RemoteProtocolError(
            f"header of {len(header)} bytes is no msgpack within the limits: {problem}", remedy=_REMEDY
        ) from None


def _refuse_map(_: dict[Any, Any]) -> NoReturn:
    raise RemoteProtocolError("header holds a map, the protocol has none", remedy=_REMEDY)


def _refuse_ext(code: int, _: bytes) -> NoReturn:
    raise RemoteProtocolError(f"header holds extension type {code}, the protocol has none", remedy=_REMEDY)
