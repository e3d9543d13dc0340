"""Encodes messages as frames and decodes them without copying payloads, and limits the size of a message.

    frame 0   msgpack array [code, field, field, ...]     at most 128 KiB
    frame 1   the payload, if the message has one         at most 64 MiB

`decode` checks, in this order, the number of frames, their sizes, the msgpack encoding with all limits set,
the message code, and each field (`field_encoding`).  It raises only `RemoteProtocolError`; `encode` raises
only `LocalProtocolError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import msgpack

from gridtrain.core.messages import Message
from gridtrain.core.messages.declaration import FieldError
from gridtrain.errors import LocalProtocolError, RemoteProtocolError
from gridtrain.network.wire.field_encoding import MESSAGES

MAX_FRAMES = 2
MAX_HEADER_BYTES = 128 * 1024
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

_invalid = partial(RemoteProtocolError, remedy="check that the peer runs the same version of gridtrain")


def encode(message: Message) -> list[bytes | memoryview]:
    """Encode a message as one or two frames; the second frame is a view of the payload, not a copy.

    Raises:
        LocalProtocolError: a field is out of its bounds, the header exceeds 128 KiB or the payload 64 MiB, or
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
            f"the header of {record.name} has {len(header)} bytes; at most {MAX_HEADER_BYTES} are allowed",
            remedy="divide the message into pages",
        )
    if not record.has_frame:
        return [header]
    return [header, _as_frame(message.payload, record.name)]  # type: ignore[attr-defined]


def decode(frames: Sequence[bytes | memoryview]) -> Message:
    """Decode a message from its frames; the payload of the message is frame 1, which is not copied.

    Raises:
        RemoteProtocolError: the frames do not contain a message within the bounds.
    """
    _check_count(frames, 1, MAX_FRAMES)
    _check_sizes(frames)
    header = _parse(frames[0])
    if type(header) is not tuple or not header or type(header[0]) is not int:
        raise _invalid("the header is not an array that begins with a message code")
    record = MESSAGES.get(header[0])
    if record is None:
        raise _invalid(f"message code {header[0]} is unknown")
    expected = 1 + record.has_frame
    _check_count(frames, expected, expected, f" of {record.name}")
    try:
        message: Message = record.unpack(header[1:], *frames[1:expected])
    except FieldError as error:
        raise _invalid(str(error.prefix_path(record.name))) from None
    return message


def _as_frame(payload: Any, name: str) -> bytes | memoryview:
    try:
        view = memoryview(payload)
        frame = view.cast("B") if view.nbytes else b""  # an empty view cannot be cast
    except (TypeError, ValueError) as error:
        raise LocalProtocolError(f"the payload of {name} is not a contiguous buffer: {error}") from None
    if len(frame) > MAX_PAYLOAD_BYTES:
        raise LocalProtocolError(
            f"the payload of {name} has {len(frame)} bytes; at most {MAX_PAYLOAD_BYTES} are allowed",
            remedy="divide the payload into slices",
        )
    return frame


def _check_count(frames: Sequence[bytes | memoryview], low: int, high: int, what: str = "") -> None:
    if not low <= len(frames) <= high:
        bound = f"{low} .. {high}" if low < high else f"{low}"
        raise _invalid(f"the number of frames{what} is {len(frames)}; it must be {bound}")


def _check_sizes(frames: Sequence[bytes | memoryview]) -> None:
    if len(frames[0]) <= MAX_HEADER_BYTES and len(frames[-1]) <= MAX_HEADER_BYTES:
        return
    for name, frame, limit in zip(
        ("header", "payload"), frames, (MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES), strict=False
    ):
        if len(frame) > limit:
            raise _invalid(f"the {name} has {len(frame)} bytes; at most {limit} are allowed")


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
        raise _invalid(
            f"the header of {len(header)} bytes is not valid msgpack or exceeds a limit: {problem}"
        ) from None


def _refuse_map(_: dict[Any, Any]) -> NoReturn:
    raise _invalid("the header contains a map, which the protocol does not allow")


def _refuse_ext(code: int, _: bytes) -> NoReturn:
    raise _invalid(f"the header contains extension type {code}, which the protocol does not allow")
