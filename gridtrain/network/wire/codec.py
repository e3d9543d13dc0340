"""Messages to frames and back.  Payloads are not copied.

    frame 0   msgpack array [code, field, field, ...]     at most 64 KiB
    frame 1   the payload, of messages that have one      at most 64 MiB

`decode` checks in this order: number of frames, their sizes, msgpack with every limit set, message code, each
field (`schema`).  Its only error is `RemoteProtocolError`, that of `encode` is `LocalProtocolError`.
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

# Enforced by msgpack while it parses; the bounds of the fields are narrower.
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
    """The message as one or two frames; the second one is a view of the payload, not a copy.

    Raises:
        LocalProtocolError: a field is out of its bounds, the header exceeds 64 KiB or the payload 64 MiB, or
            the payload is not a contiguous buffer.
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
    """The message of these frames; its payload is frame 1 itself.

    Raises:
        RemoteProtocolError: they are not a message within the bounds.
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
    _check_count(frames, expected, expected, f"{record.name} has ")
    try:
        message: Message = record.unpack(header[1:], *frames[1:expected])
    except FieldError as error:
        raise RemoteProtocolError(str(error.prefix_path(record.name)), remedy=_REMEDY) from None
    return message


def data_bytes(message: Data) -> int:
    """Total size of the frames that `encode` returns, without encoding."""
    rnd, channel, slot = message.round, message.channel, message.slot
    numbers = (rnd.term, rnd.generation, rnd.step, rnd.attempt, channel.group, channel.kind, channel.index)
    slot_numbers = (slot.hop, slot.segment, slot.slice)
    header = _DATA_HEADER_BYTES + sum(
        [1 if x < 0x80 else _msgpack_int_bytes(x) for x in (*numbers, *slot_numbers)]
    )
    payload = message.payload
    return header + (len(payload) if type(payload) is bytes else memoryview(payload).nbytes)


_DATA_HEADER_BYTES = 7
"""The heads of four arrays, the code, the phase and `skip`: a byte each."""


def _msgpack_int_bytes(number: int) -> int:
    """Size of an unsigned integer in msgpack."""
    if number < 0x80:
        return 1
    return 2 if number < 1 << 8 else 3 if number < 1 << 16 else 5 if number < 1 << 32 else 9


def _as_frame(payload: Any, name: str) -> bytes | memoryview:
    try:
        view = memoryview(payload)
        frame = view.cast("B") if view.nbytes else b""  # an empty view cannot be cast
    except (TypeError, ValueError) as error:
        raise LocalProtocolError(f"payload of {name} is not a contiguous buffer: {error}") from None
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
            f"header of {len(header)} bytes is not msgpack within the limits: {problem}", remedy=_REMEDY
        ) from None


def _refuse_map(_: dict[Any, Any]) -> NoReturn:
    raise RemoteProtocolError("header holds a map, the protocol has none", remedy=_REMEDY)


def _refuse_ext(code: int, _: bytes) -> NoReturn:
    raise RemoteProtocolError(f"header holds extension type {code}, the protocol has none", remedy=_REMEDY)
