"""Random messages of every type are encoded and decoded.  tests/fuzz has the same bytes, damaged."""

from __future__ import annotations

import contextlib
import re
import sys
import tracemalloc
import unicodedata
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_samples import repair

from gridtrain.core import messages as m
from gridtrain.core.messages import declaration
from gridtrain.errors import LocalProtocolError, RemoteProtocolError
from gridtrain.network.wire import field_encoding
from gridtrain.network.wire.codec import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, TYPE_CODES, decode, encode

FEW = 4  # items in a drawn list; how many are allowed is tested in test_limits.py
FILLERS = "\u115f\u1160\u2800\u3164\uffa0"  # letters and a symbol that are not visible


def values_of(kind: declaration.FieldType) -> st.SearchStrategy[Any]:
    match kind:
        case declaration.IntField(low=low, high=high):
            return st.one_of(st.integers(low, high), st.sampled_from([low, high]))
        case declaration.BoolField():
            return st.booleans()
        case declaration.FloatField(low=low, high=high):
            return st.floats(low, high)
        case declaration.AnyFloatField():
            return st.floats(allow_nan=False)
        case declaration.BytesField(low=low, high=high):
            return st.binary(min_size=low, max_size=high)
        case declaration.NameField(max_bytes=max_bytes):
            visible = st.characters(codec="utf-8", exclude_categories=["C", "M", "Z"])
            return st.text(visible.filter(lambda letter: letter not in FILLERS), max_size=max_bytes // 4)
        case declaration.TextField(max_bytes=max_bytes):
            alphabet = st.characters(codec="utf-8", exclude_categories=["Cc"])
            return st.text(alphabet, max_size=max_bytes // 4)
        case declaration.WordField(words=words):
            return st.sampled_from(sorted(words))
        case field_encoding.EnumField(enum=enum):
            return st.sampled_from(enum)
        case field_encoding.OptionalField(item_type=inner):
            return st.none() | values_of(inner)
        case field_encoding.ListField(item_type=inner):
            return st.lists(values_of(inner), max_size=FEW).map(tuple)
        case field_encoding.TupleField(item_types=inners):
            return st.tuples(*map(values_of, inners))
        case declaration.PayloadField():
            return st.binary(max_size=100)
        case field_encoding.RecordField(cls=cls, field_types=fields):
            drawn = st.builds(cls, **{name: values_of(inner) for name, inner in fields.items()})
            return drawn.map(repair)
    raise AssertionError(f"no strategy for {type(kind).__name__}")


ALL_MESSAGES = [pytest.param(record, id=record.name) for record in field_encoding.MESSAGES.values()]


def test_every_message_has_a_code() -> None:
    kinds = (*m.Message.__subclasses__(), *m.GenerationMessage.__subclasses__())
    declared = {kind.__name__ for kind in kinds} - {"GenerationMessage"}
    assert {kind.__name__ for kind in TYPE_CODES} == declared
    assert len(set(TYPE_CODES.values())) == len(TYPE_CODES)
    assert TYPE_CODES[m.Hello] == 1  # for ever


@pytest.mark.parametrize("record", ALL_MESSAGES)
def test_there_and_back(record: field_encoding.RecordField) -> None:
    @settings(max_examples=20)
    @given(values_of(record))
    def check(message: m.Message) -> None:
        frames = encode(message)
        assert decode(frames) == message
        assert decode([memoryview(frame) for frame in frames]) == message
        assert len(frames) == 1 + hasattr(message, "payload")

    check()


# -- payloads ------------------------------------------------------------------------------------


def data(payload: Any) -> m.Data:
    return m.Data(m.RoundId(1, 2, 3, 0), m.Channel(), m.PayloadSlot(m.CollectivePhase.REDUCE), 0, payload)


def test_a_payload_is_not_copied_on_either_side() -> None:
    vector = np.arange(1000, dtype=np.float32)
    frames = encode(data(vector))
    assert np.shares_memory(np.frombuffer(frames[1], np.float32), vector)
    received = memoryview(bytes(frames[1]))
    message = decode([frames[0], received])
    assert isinstance(message, m.Data)
    assert message.payload is received


@pytest.mark.parametrize(
    ("payload", "frame"),
    [
        pytest.param(b"abc", b"abc", id="bytes"),
        pytest.param(bytearray(b"abc"), b"abc", id="bytearray"),
        pytest.param(memoryview(b"xabcx")[1:4], b"abc", id="part of a memoryview"),
        pytest.param(np.array([1], "<f4"), b"\0\0\x80?", id="float32"),
        pytest.param(np.array([[1], [0]], "<f2"), b"\0<\0\0", id="two dimensions of float16"),
        pytest.param(np.array([], np.float32), b"", id="empty array"),
        pytest.param(b"", b"", id="empty"),
    ],
)
def test_any_contiguous_buffer_is_a_payload(payload: Any, frame: bytes) -> None:
    assert bytes(encode(data(payload))[1]) == frame


# -- our own faults ------------------------------------------------------------------------------

ROUND = m.RoundId(1, 2, 3, 0)
LONG_SPANS = tuple(m.Span(2**60 + i, 2**61 + i) for i in range(4096))
LONG_LEDGER = m.LedgerState(requeued=LONG_SPANS, holders=((bytes(32), LONG_SPANS),))
SPEC = m.LedgerSpec(100, 0, epochs=1)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        pytest.param(m.Ping(-1), "Ping.nonce is int -1; it must be an integer 0", id="negative"),
        pytest.param(m.Ping(2**63), "Ping.nonce is int 9223372036854775808", id="over 2^63"),
        pytest.param(m.Ping(True), "Ping.nonce is bool True", id="bool for an int"),
        pytest.param(m.Ping(1.0), "Ping.nonce is float 1.0", id="float for an int"),  # type: ignore[arg-type]
        pytest.param(
            m.Hello(bytes(31), 1, ""), "Hello.peer is 31 bytes; it must be exactly 32", id="short key"
        ),
        pytest.param(
            m.Ready(1, 1, bytes(65)), "Ready.history is 65 bytes; it must be 0 .. 64", id="long digest"
        ),
        pytest.param(m.Join("r", "a\x1b[2J", "tcp://h:1"), "Join.name is 5 bytes", id="terminal escape"),
        pytest.param(m.Join("r", "\ud800", "tcp://h:1"), "Join.name is str .* valid UTF-8", id="surrogate"),
        pytest.param(m.Join("r", "n", "é" * 65), "Join.address is 130 bytes", id="long in bytes"),
        pytest.param(
            m.RunStateUpdate("asleep", ""), "RunStateUpdate.state is str 'asleep'", id="unknown state"
        ),
        pytest.param(m.Decision(ROUND, 1, ""), "Decision.verdict is int 1", id="int for an enum"),  # type: ignore[arg-type]
        pytest.param(m.MemberListPage(1, 1, 2, 2, ()), "MemberListPage is page 2 of 2", id="page over pages"),
        pytest.param(m.StateBlock(1, 1, 3, 3, b""), "StateBlock is block 3 of 3", id="block over total"),
        pytest.param(
            m.Heartbeat(0, 0, 0, (("loss", float("nan")),)),
            r"Heartbeat.metrics\[0\] is float nan",
            id="NaN figure",
        ),
        pytest.param(
            m.RoundStalled(ROUND, (bytes(32), b"x"), 0.0, ""),
            r"RoundStalled.suspects\[1\] is 1 bytes",
            id="path to the item",
        ),
        pytest.param(
            m.Setup((), m.LedgerSpec(1, 0), 1, None),
            "Setup.ledger is LedgerSpec.* must have either epochs or steps",
            id="two ends",
        ),
        pytest.param(
            m.MembershipView(1, 1, 1, m.Verdict.ABORT, None, 0, b"", LONG_LEDGER, ""),
            "header of MembershipView has 155.* at most 131072",
            id="header over 128 KiB",
        ),
        pytest.param(data("text"), "payload of Data is not a contiguous buffer", id="payload is text"),
        pytest.param(
            data(np.zeros((4, 4))[:, 0]), "payload of Data is not a contiguous", id="payload has gaps"
        ),
        pytest.param(
            data(np.empty(MAX_PAYLOAD_BYTES + 1, np.uint8)), "has 67108865 bytes", id="payload over 64 MiB"
        ),
        pytest.param(ROUND, "RoundId is not a message", id="a part of a message"),
    ],
)
def test_our_own_faults_are_loud(message: m.Message, words: str) -> None:
    with pytest.raises(LocalProtocolError, match=words):
        encode(message)


def test_a_whole_number_is_a_float_too() -> None:
    assert decode(encode(m.Heartbeat(0, 0, 0, (("loss", 3),)))) == m.Heartbeat(0, 0, 0, (("loss", 3.0),))


def test_our_own_reasons_are_made_to_fit() -> None:
    """A long reason, or one with control characters from a traceback, must not raise."""
    sent = m.Leave("line 1\nline 2\t\x1b[31m" + "é" * 1000)
    received = decode(encode(sent))
    assert isinstance(received, m.Leave)
    assert received.reason.startswith("line 1\nline 2  [31méé")
    assert len(received.reason.encode()) in (511, 512)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("anna\u200b", "U+200B"),
        ("\u202eanna", "U+202E"),
        ("an\ufe0fna", "U+FE0F"),
        ("an\xa0na", "U+00A0"),
        ("an\U000e0061na", "U+E0061"),
        ("anna\u3164", "U+3164"),
        ("anna ", "U+0020"),
        (" anna", "U+0020"),
    ],
)
def test_a_name_that_looks_like_another_because_of_an_invisible_character_is_refused(
    name: str, found: str
) -> None:
    for accepted in ("anna", "an na", "Zoë", "ann\u0430", "\U0001f600", ""):
        assert declaration.NAME.unpack(accepted) == accepted
    with pytest.raises(declaration.FieldError, match=rf", with {re.escape(found)}; it must be at most 64"):
        declaration.NAME.unpack(name)


def test_of_all_format_characters_a_name_may_contain_only_visible_signs() -> None:
    allowed = set()
    for letter in (
        chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) == "Cf"
    ):
        with contextlib.suppress(declaration.FieldError):
            allowed.add(unicodedata.name(declaration.NAME.unpack(letter)).split()[0])
    assert allowed == {"ARABIC", "KAITHI", "SYRIAC"}, (
        "signs that enclose the numbers after them, or end verses"
    )


def test_a_full_page_of_a_roster_fits_a_header() -> None:
    member = m.Member(bytes(32), "n" * 64, "a" * 128, 2**31 - 1, True, 2**31 - 1, digest=bytes(64))
    last = m.MAX_MEMBER_PAGES - 1
    page = m.MemberListPage(
        2**63 - 1, 2**63 - 1, last, m.MAX_MEMBER_PAGES, (member,) * m.MAX_MEMBERS_PER_PAGE
    )
    frames = encode(page)
    assert len(frames[0]) < MAX_HEADER_BYTES
    assert decode(frames) == page


def test_a_hello_of_another_version_is_still_a_hello() -> None:
    assert decode([msgpack.packb([1, bytes(32), 99, "gridtrain 9"])]) == m.Hello(bytes(32), 99, "gridtrain 9")


@pytest.mark.parametrize(
    "item", [b"\xc0", b"\x90", b"\x91\xc0", b"\x80", b"\xcd\xff\xff", b"\xa1a", b"\xc4\x01a"]
)
def test_a_full_header_costs_little_memory(item: bytes) -> None:
    """128 KiB of the items that grow most when parsed, in arrays of the longest length allowed."""
    inner = b"\xdc\x0f\xff" + item * 4095
    header = b"\xdc\x0f\xff" + inner * (MAX_HEADER_BYTES // len(inner))
    header += item * ((MAX_HEADER_BYTES - len(header)) // len(item))
    tracemalloc.start()
    with pytest.raises(RemoteProtocolError):
        decode([header])
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 8 * 2**20
