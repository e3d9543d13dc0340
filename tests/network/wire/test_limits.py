"""Each bound of what peers may send: the frames, and the error with which they are refused."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from gridtrain.errors import RemoteProtocolError
from gridtrain.network.wire.codec import (
    MAX_FRAMES,
    MAX_HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_PAYLOAD_BYTES,
    decode,
)

KEY = bytes(32)
ROUND = [1, 2, 3, 0]
LEDGER = [0, 0, [], 0, 0, None, [], [], [], 0]
MEMBER = [KEY, "ada", "tcp://h:1", 8, False, -1, [], b"", [], 256]
DATA = [50, ROUND, [0, 0, 0], [0, 0, 0, 0], 0]


def header(*fields: Any) -> list[bytes | memoryview]:
    return [msgpack.packb(fields)]


def joins(name: str, address: str) -> list[bytes | memoryview]:
    return header(10, "r", name, address, True, False, 0)


def refused(words: str, frames: list[bytes | memoryview], name: str) -> Any:
    """A parameter set: text of the error, frames, and their name."""
    return pytest.param(frames, words, id=name)


FRAMES = [
    refused("the number of frames is 0; it must be 1 .. 2", [], "no frame"),
    refused("the number of frames is 3; it must be 1 .. 2", [b"", b"", b""], "three frames"),
    refused("the header has 131073 bytes; at most 131072", [b"\xc0" * 131073], "long header"),
    refused(
        "the payload has 67108865 bytes",
        [*header(*DATA), memoryview(bytes(MAX_PAYLOAD_BYTES + 1))],
        "long payload",
    ),
    refused("frames of Data is 1; it must be 2", header(*DATA), "Data without its payload"),
    refused("frames of Ping is 2; it must be 1", [*header(54, 1), b"x"], "a payload where none belongs"),
]

MSGPACK = [
    refused("incomplete input", [b""], "empty header"),
    refused("incomplete input", [b"\x92\x36"], "truncated"),
    refused("extra data", [b"\x92\x36\x00\x00"], "bytes after the document"),
    refused("not valid msgpack", [b"\xc1"], "a byte that msgpack never uses"),
    refused("not valid msgpack", [b"\x91" * 131072], "deep nesting"),
    refused("exceeds max_str_len", header(17, "a" * 513), "string of 513 bytes"),
    refused("exceeds max_bin_len", header(15, 1, 1, bytes(65)), "binary of 65 bytes"),
    refused("exceeds max_array_len", header(16, ROUND, [0] * 4097, ""), "array of 4097"),
    refused("exceeds max_array_len", [b"\xdd\xff\xff\xff\xff"], "an array's length is a lie"),
    refused("exceeds max_map_len", header(54, {1: 1}), "map"),
    refused("contains a map", header(54, {}), "empty map"),
    refused("exceeds max_ext_len", [b"\xd4\x05\x00"], "extension type"),
    refused("extension type 5", [b"\xc7\x00\x05"], "empty extension type"),
    refused("max_ext_len", [b"\xd6\xff\0\0\0\0"], "timestamp"),
    refused("utf-8", [b"\x92\x11\xa2\xff\xfe"], "string that is no UTF-8"),
]

CODES = [
    refused("not an array", [b"\xc0"], "nil"),
    refused("not an array", [b"\x90"], "empty array"),
    refused("not an array that begins with a message code", header("Ping", 1), "name for a code"),
    refused("not an array that begins with a message code", header(True, KEY, 1, ""), "true for 1"),
    refused("message code 99 is unknown", header(99), "unknown code"),
    refused("message code -1 is unknown", header(-1), "negative code"),
    refused("Ping is 0 fields; it must be an array of the 1 fields", header(54), "a field too few"),
    refused("Ping is 2 fields; it must be an array of the 1 fields", header(54, 1, 2), "a field too many"),
]

FIELDS = [
    refused("Ping.nonce is int -1;", header(54, -1), "negative"),
    refused("Ping.nonce is int 9223372036854775808;", header(54, 2**63), "2^63"),
    refused("Ping.nonce is bool True;", header(54, True), "true for an int"),
    refused("Ping.nonce is float 1.0;", header(54, 1.0), "float for an int"),
    refused("Ping.nonce is NoneType None;", header(54, None), "nil for an int"),
    refused("Heartbeat.step is int -2;", header(13, 0, -2, 0, []), "step -2"),
    refused("Vote.yes is int 1;", header(51, ROUND, 1, b"", "", None), "int for a bool"),
    refused(
        "Vote.round.attempt is int -1;", header(51, [1, 2, 3, -1], True, b"", "", None), "inside a record"
    ),
    refused("Vote.round is 3 fields;", header(51, [1, 2, 3], True, b"", "", None), "a record too short"),
    refused("Vote.round is int 7;", header(51, 7, True, b"", "", None), "int for a record"),
    refused("Vote.digest is str", header(51, ROUND, True, "ab", "", None), "text for bytes"),
    refused("Vote.reason is bytes", header(51, ROUND, True, b"", b"ab", None), "bytes for text"),
    refused("Decision.verdict is int 2;", header(52, ROUND, 2, ""), "unknown verdict"),
    refused("Decision.verdict is bool True;", header(52, ROUND, True, ""), "true for COMMIT"),
    refused("Data.slot.phase is int 10;", [*header(50, ROUND, [0] * 3, [10, 0, 0, 0], 0), b""], "phase"),
    refused("Data.slot.hop is int 21", [*header(50, ROUND, [0] * 3, [0, 2**31, 0, 0], 0), b""], "hop"),
    refused(
        "Data.flags is bool False;", [*header(50, ROUND, [0] * 3, [0] * 4, False), b""], "bool for flags"
    ),
    refused("Vote.compute_s is float -1.0;", header(51, ROUND, True, b"", "", -1.0), "negative time"),
    refused("frames of Waiting is 1; it must be 2", header(48, ROUND), "Waiting without its payload"),
    refused("frames of ProceedWithout is 1; it must be 2", header(49, ROUND), "ProceedWithout alone"),
    refused("Hello.peer is 31 bytes;", header(1, bytes(31), 1, ""), "short key"),
    refused("Hello.peer is 33 bytes;", header(1, bytes(33), 1, ""), "long key"),
    refused("Hello.software is 65 bytes,", header(1, KEY, 1, "a" * 65), "long name"),
    refused("Join.address is 129 bytes,", joins("n", "a" * 129), "long address"),
    refused(r"Join.name is 1 bytes, '\\x1b'", joins("\x1b", "a"), "escape in a name"),
    refused(r"Join.name is 2 bytes, '\\x9b'", joins("\x9b", "a"), "8-bit escape in a name"),
    refused("Join.name is 1 bytes", joins("\n", "a"), "newline in a name"),
    refused("Leave.reason is 1 bytes", header(17, "\x07"), "bell in a reason"),
    refused("RunStateUpdate.state is str 'asleep';", header(38, "asleep", ""), "unknown state"),
    refused(r"Heartbeat.metrics\[0\] is float nan;", header(13, 0, 0, 0, [["a", float("nan")]]), "NaN"),
    refused(r"Heartbeat.metrics\[0\] is float inf;", header(13, 0, 0, 0, [["a", float("inf")]]), "infinity"),
    refused(r"Heartbeat.metrics\[0\] is int 1;", header(13, 0, 0, 0, [["a", 1]]), "int for a float"),
    refused(r"Heartbeat.metrics\[0\] is tuple", header(13, 0, 0, 0, [["a", 1.0, 2.0]]), "three for a pair"),
    refused("Heartbeat.metrics is 65 items;", header(13, 0, 0, 0, [["a", 1.0]] * 65), "65 figures"),
    refused(r"LinkLatencies.rtt_s\[0\] is float -1.0;", header(12, [[KEY, -1.0]]), "negative seconds"),
    refused(
        "Setup.facts is 65 items;",
        header(11, [["a", "b"]] * 65, [1, 0, 1, None, 0, []], 1, None, None, False, 1, [], None, 0, 0.0, b""),
        "65 facts",
    ),
    refused(
        "Setup.ledger is LedgerSpec",
        header(11, [], [1, 0, None, None, 0, []], 1, None, None, False, 1, [], None, 0, 0.0, b""),
        "a run without end",
    ),
    refused(
        "Setup.ledger is LedgerSpec",
        header(11, [], [1, 0, 1, 1, 0, []], 1, None, None, False, 1, [], None, 0, 0.0, b""),
        "a run with two ends",
    ),
    refused(
        "delay must be 0 or 1",
        header(11, [], [1, 0, 1, None, 2, []], 1, None, None, False, 1, [], None, 0, 0.0, b""),
        "a delay of two steps",
    ),
    refused(
        "2 shards with 3 samples, 1 of them in the smallest shard; each shard must have at least 1 sample, "
        "and all of them together must have 4",
        header(11, [], [4, 0, 1, None, 0, [1, 2]], 1, None, None, False, 1, [], None, 0, 0.0, b""),
        "shards of another data set",
    ),
    refused(
        "MemberListPage.members is 385 items;",
        header(35, 1, 1, 0, 1, [MEMBER] * 385),
        "385 members on a page",
    ),
    *(
        refused(
            rf"MemberListPage.members\[0\].entries_share is int {share}; it must be an integer 1 .. 256",
            header(35, 1, 1, 0, 1, [[*MEMBER[:-1], share]]),
            f"entries share {share!r}",
        )
        for share in (0, -1, 257, 2**40)
    ),
    refused("MemberListPage is page 1 of 1", header(35, 1, 1, 1, 1, []), "page over pages"),
    refused("MemberListPage is page 0 of 257", header(35, 1, 1, 0, 257, []), "257 pages"),
    refused(
        r"MemberListPage.members\[1\].peer is 0 bytes;",
        header(35, 1, 1, 0, 1, [MEMBER, [b"", *MEMBER[1:]]]),
        "path to the field",
    ),
    refused(
        r"FreezeReport.ledger.requeued\[0\] is Span\(start=2, stop=1\)",
        header(14, 1, 1, True, 0, b"", [0, 0, [[2, 1]], 0, 0, None, [], [], [], 0], None, b"", 0, [0, 1]),
        "a span that stops before it starts",
    ),
    refused(
        r"FreezeReport.ledger.late\[0\].peer is 31 bytes;",
        header(
            14,
            1,
            1,
            True,
            0,
            b"",
            [*LEDGER[:-4], [[bytes(31), [[0, 1]], 1, 0]], [], [], 0],
            None,
            b"",
            0,
            [0, 1],
        ),
        "a late batch of nobody",
    ),
    refused(
        "StateBlock is block 1 of 1",
        [*header(57, 1, 1, 1, 1), b""],
        "block over total",
    ),
    refused("Burst is index 16; it must be below 16", [*header(65, 1, 16), b""], "a burst that does not end"),
    refused(
        "Burst is 16385 bytes; it must be at most 16384",
        [*header(65, 1, 0), memoryview(bytes(2**14 + 1))],
        "burst over 16 KiB",
    ),
    refused("exactly 8 bytes", header(66, 1, bytes(7)), "a proof that is too short"),
    refused("StateBlock is block 0 of 65537", [*header(57, 1, 1, 0, 65537), b""], "more than 64 GiB"),
    refused(
        "StateBlock is 1048577 bytes; it must be at most 1048576",
        [*header(57, 1, 1, 0, 1), memoryview(bytes(2**20 + 1))],
        "block over 1 MiB",
    ),
]


@pytest.mark.parametrize(("frames", "words"), FRAMES + MSGPACK + CODES + FIELDS)
def test_refused(frames: list[bytes | memoryview], words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words) as caught:
        decode(frames)
    assert len(str(caught.value)) < 1000  # whatever came, the error stays readable
    assert caught.value.remedy


ACCEPTED = [
    pytest.param([b"\x92\x36\xcf" + (5).to_bytes(8, "big")], id="an int that is not in its shortest form"),
    pytest.param(header(17, "two\nlines"), id="newline in a reason"),
    pytest.param(header(17, "a" * 512), id="string of 512 bytes"),
    pytest.param(header(15, 1, 1, bytes(64)), id="binary of 64 bytes"),
    pytest.param(header(35, 1, 1, 0, 1, [MEMBER] * 384), id="384 members on a page"),
    pytest.param(header(14, 1, 1, True, -1, b"", LEDGER, None, b"", 0, [0, 1]), id="nothing applied yet"),
    pytest.param(
        header(
            14, 1, 1, True, 0, b"", [0, 0, [[0, 1]] * 4096, 0, 0, None, [], [], [], 0], None, b"", 0, [0, 1]
        ),
        id="4096 spans",
    ),
    pytest.param([*header(*DATA), b""], id="empty payload"),
    pytest.param([*header(*DATA), memoryview(bytes(MAX_PAYLOAD_BYTES))], id="payload of 64 MiB"),
]


@pytest.mark.parametrize("frames", ACCEPTED)
def test_just_within(frames: list[bytes | memoryview]) -> None:
    decode(frames)


def test_the_limits_themselves() -> None:
    assert MAX_FRAMES == 2
    assert MAX_HEADER_BYTES == 131_072
    assert MAX_PAYLOAD_BYTES == 67_108_864
    assert MAX_MESSAGE_BYTES == 67_239_936
