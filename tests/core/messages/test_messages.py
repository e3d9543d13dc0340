"""Bounds and defaults that messages declare."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from gridtrain.core import messages as m
from gridtrain.core.messages import declaration
from gridtrain.core.messages.transfer import MAX_RESIDUAL_BLOCKS, MAX_STATE_BLOCKS
from gridtrain.core.messages.types import MAX_BLOCK_BYTES

CHECKPOINT = m.CheckpointInfo(4, b"h" * 32, m.LedgerState(), m.Span(0, 2))
FULL, TOO_LARGE = bytes(MAX_BLOCK_BYTES), bytes(MAX_BLOCK_BYTES + 1)


@pytest.mark.parametrize("kind", ["state", "checkpoint", "residual"])
def test_the_index_and_the_size_of_a_block_are_bounded(kind: str) -> None:
    def problem(index: int, total: int, payload: bytes) -> str | None:
        if kind == "state":
            return m.StateBlock(1, 1, index, total, payload).find_problem()
        if kind == "residual":
            return m.ResidualBlock(1, 1, 4, b"h" * 32, index, total, payload).find_problem()
        return m.CheckpointBlock(1, 1, CHECKPOINT, index, total, payload).find_problem()

    most = MAX_RESIDUAL_BLOCKS if kind == "residual" else MAX_STATE_BLOCKS
    assert problem(0, 1, FULL) is problem(most - 1, most, b"") is None
    assert problem(1, 1, b"") and problem(0, most + 1, b"") and problem(0, 1, TOO_LARGE)


def test_a_block_of_a_snapshot_has_at_most_a_mebibyte() -> None:
    assert m.SnapshotBlock(4, 0, FULL).find_problem() is None
    assert m.SnapshotBlock(4, 0, TOO_LARGE).find_problem() == "1048577 bytes; it must be at most 1048576"


def test_the_length_of_a_changed_member_list_is_bounded() -> None:
    def problem(count: int) -> str | None:
        spans = (m.Span(1, count), m.Span(0, 1))
        return m.MemberListChanges(1, 2, 1, spans, (), b"h" * 32).find_problem()

    assert problem(m.MAX_GENERATION_MEMBERS) is None
    assert problem(m.MAX_GENERATION_MEMBERS + 1) == "2049 members; there may be at most 2048"


def test_seconds_are_from_zero_to_a_million() -> None:
    (seconds,) = declaration.Seconds.__metadata__
    assert [seconds.pack(value) for value in (0.0, 1e6)] == [0.0, 1e6]
    for value in (-0.001, 1_000_000.1, float("nan")):
        with pytest.raises(declaration.FieldError):
            seconds.pack(value)


def test_the_text_of_a_reason_is_cleaned() -> None:
    reason = declaration.ReasonField("reason", 20, "a sentence")
    assert reason.pack("two\nlines\x00") == "two\nlines "
    with pytest.raises(declaration.FieldError, match="a sentence"):
        reason.pack(5)


def test_omitted_fields_are_zero_or_false() -> None:
    slot = m.PayloadSlot(m.CollectivePhase.FOLD)
    assert (slot.hop, slot.segment, slot.slice) == (0, 0, 0)
    assert not m.Join("r", "anna", "").is_rejoin
    assert not m.StagedModel((0, 1), ()).fill_drain


def number(text: str) -> int:
    """The number of a text such as "2^63-1"."""
    power, *less = text.lstrip("-").split("-")
    base, *exponent = map(int, power.split("^"))
    value = int(base ** exponent[0] if exponent else base) - sum(map(int, less))
    return -value if text.startswith("-") else value


NUMBERS = {
    name: annotated.__metadata__[0]
    for name, annotated in vars(declaration).items()
    if isinstance(getattr(annotated, "__metadata__", [0])[0], declaration.IntField | declaration.FloatField)
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_refusal_names_the_real_bounds(name: str) -> None:
    field = NUMBERS[name]
    match = re.search(r"(?:integer|float) (\S+) \.\. ([0-9^-]+)", field.bounds)
    assert match
    for bound, beyond in ((number(match[1]), -1), (number(match[2]), 1)):
        kind = type(field.low)
        assert field.pack(kind(bound)) == field.unpack(kind(bound)) == bound
        outside = kind(bound + beyond) if kind is int else math.nextafter(bound, beyond * math.inf)
        with pytest.raises(declaration.FieldError, match=re.escape(field.bounds)):
            field.pack(outside)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("PeerId", 32, 32),
        ("Proof", 8, 8),
        ("Digest", 0, 64),
        ("Name", 0, 64),
        ("Address", 0, 128),
        ("Text", 0, 512),
    ],
)
def test_lengths_of_texts_and_keys_are_bounded(name: str, least: int, most: int) -> None:
    (field,) = getattr(declaration, name).__metadata__
    letter = b"x" if isinstance(field, declaration.BytesField) else "x"
    for length in (least, most):
        assert field.pack(letter * length) == letter * length
    for length in {least - 1, most + 1} - {-1}:
        with pytest.raises(declaration.FieldError, match=f"^ is {length} bytes"):
            field.pack(letter * length)
    with pytest.raises(declaration.FieldError, match=r"^ is int 5; it must be"):
        field.pack(5)


def test_a_text_has_no_control_characters_and_its_bytes_are_counted() -> None:
    (field,) = declaration.Name.__metadata__
    assert field.pack("é" * 32) == "é" * 32
    for text in ("é" * 33, "a\x1b[2J", "\x7f", "\x9b", "a\nb"):
        with pytest.raises(declaration.FieldError, match=f"^ is {len(text.encode())} bytes"):
            field.unpack(text)
    with pytest.raises(declaration.FieldError, match="valid UTF-8"):
        field.pack("\ud800")


def test_a_long_reason_is_shortened_when_sent_and_refused_when_received() -> None:
    (field,) = declaration.Reason.__metadata__
    assert field.pack("x" * 512) == field.unpack("x" * 512) == "x" * 512
    assert field.pack("x" * 513) == "x" * 509 + "..."
    assert field.pack("é" * 300) == "é" * 254 + "..."
    assert field.pack("words " * 100) == ("words " * 84).strip() + "...", "no word is truncated"
    with pytest.raises(declaration.FieldError, match=r"^ is 513 bytes"):
        field.unpack("x" * 513)


def test_a_member_has_a_digest_for_each_of_its_pieces() -> None:
    pieces = ((m.Span(0, 1), 0), (m.Span(1, 2), 1))
    member = m.Member(bytes(32), "", "", 1, False, pieces=pieces, piece_digests=(b"", b"x"))
    assert member.find_problem() is None
    problem = replace(member, piece_digests=(b"x",)).find_problem()
    assert problem == "1 digest for 2 pieces; each piece must have a digest"
    assert replace(member, pieces=((m.Span(2, 2), 0),), piece_digests=(b"",)).find_problem()


def test_a_model_is_cut_from_0_to_the_number_of_its_blocks() -> None:
    blocks = (m.LayerCosts(1, 1),) * 3
    assert m.StagedModel((0, 1, 3), blocks).find_problem() is m.StagedModel((0, 9)).find_problem() is None
    problem = m.StagedModel((0, 1, 2), blocks).find_problem()
    assert problem == "3 blocks cut at (0, 1, 2); the last cut must be the number of blocks"
    for cuts in ((), (0,), (1, 3), (0, 2, 2, 3), (0, 2, 1, 3)):
        assert m.StagedModel(cuts, blocks).find_problem() == f"cuts {cuts}; they must ascend from 0"
