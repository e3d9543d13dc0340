"""Residual transfer: the entries that are sent, and those that a recipient accepts."""

from __future__ import annotations

import numpy as np
import pytest

from gridtrain.core.messages import ResidualBlock
from gridtrain.errors import RemoteProtocolError
from gridtrain.network.wire.sparse_payload import decode, encode
from gridtrain.network.wire.value_encoding import ValueKind
from gridtrain.runtime.state_transfer.residual_pieces import (
    IncomingResiduals,
    ResidualSelection,
    select_entries,
    split_pieces,
)
from gridtrain.sparsify.merge import largest_summable

A = b"a" * 32
MIB = 1 << 20


def pieces_of(payload: bytes) -> list[ResidualBlock]:
    parts = split_pieces(payload)
    return [ResidualBlock(1, 2, 5, b"h", index, len(parts), part) for index, part in enumerate(parts)]


def received(payload: bytes, n: int) -> np.ndarray:
    recipient = IncomingResiduals()
    recipient.n = n
    is_complete = [recipient.receive_piece(A, piece, 3) for piece in pieces_of(payload)]
    assert is_complete == [False] * (len(is_complete) - 1) + [True] and not recipient.confirmed
    recipient.confirm(A, "anna")
    ((name, entries),) = recipient.confirmed
    assert name == "anna"
    dense = np.zeros(n, np.float32)
    dense[entries.indices] = entries.values
    return dense


def random_residual(n: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (random.standard_normal(n) * 10.0 ** random.integers(-30, 30, n)).astype(np.float32)


def remainder(chosen: ResidualSelection, n: int) -> np.ndarray:
    return np.zeros(n, np.float32) if chosen.remainder_N is None else chosen.remainder_N


@pytest.mark.parametrize("seed", range(5))
def test_sent_and_remaining_entries_make_up_the_residual(seed: int) -> None:
    residual_N = random_residual(5000, seed)
    for budget_bytes in (0, 100, 5000, 1 << 20):
        chosen = select_entries(residual_N, budget_bytes, world_size=3)
        assert len(chosen.payload) <= max(budget_bytes, 8)
        sent, left = received(chosen.payload, 5000), remainder(chosen, 5000)
        assert np.array_equal((sent + left).view(np.int32), residual_N.view(np.int32)), "bit for bit"
        if sent.any() and left.any():
            assert np.abs(sent[sent != 0]).min() >= np.abs(left).max(), "the largest are sent first"
        assert chosen.magnitude_sum == pytest.approx(np.abs(sent.astype(np.float64)).sum())
    assert chosen.remainder_N is None and chosen.magnitude_sum == chosen.total_magnitude_sum


def test_a_large_residual_is_sent_in_several_pieces() -> None:
    n = 3 * MIB // 4
    residual_N = random_residual(n, 1)
    chosen = select_entries(residual_N, 16 * MIB, world_size=3)
    assert [len(part) for part in split_pieces(chosen.payload)][:-1] == [MIB] * (len(chosen.payload) // MIB)
    assert len(split_pieces(chosen.payload)) == 4
    assert np.array_equal(received(chosen.payload, n), residual_N)


def test_values_that_are_too_large_to_send_remain() -> None:
    limit = largest_summable(3)
    residual_N = np.array([1.0, np.float32(limit) * 1.5, -2.0, 0.0], np.float32)
    chosen = select_entries(residual_N, MIB, world_size=3)
    assert received(chosen.payload, 4).tolist() == [1.0, 0.0, -2.0, 0.0]
    assert remainder(chosen, 4).tolist() == [0.0, residual_N[1], 0.0, 0.0]


def test_pieces_after_a_gap_are_dropped_and_the_first_piece_restarts_the_transfer() -> None:
    payload = select_entries(random_residual(3 * MIB // 4, 2), 16 * MIB, 3).payload
    recipient = IncomingResiduals()
    recipient.n = 3 * MIB // 4
    pieces = pieces_of(payload)
    for piece in (pieces[0], pieces[2], pieces[3]):
        assert not recipient.receive_piece(A, piece, 3)
    assert [recipient.receive_piece(A, piece, 3) for piece in pieces] == [False, False, False, True]


def entries(indices: list[int], values: list[float], n: int = 64, kind: ValueKind = ValueKind.FP32) -> bytes:
    return encode(np.array(indices), np.array(values, np.float32), n=n, kind=kind)


NOT_FINITE = entries([3], [1.0])[:-4] + np.float32(np.nan).tobytes()
HOSTILE = {
    "no payload": b"",
    "not finite": NOT_FINITE,
    "too large to send": entries([3], [largest_summable(3) * 1.01]),
    "values of another kind": entries([3], [1.0], kind=ValueKind.FP16),
    "of a larger model": entries([100], [1.0], n=128),
    "truncated": entries([3, 7], [1.0, 2.0])[:-1],
    "bytes after the end": entries([3, 7], [1.0, 2.0]) + b"\0",
}


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE.keys())
def test_an_invalid_residual_is_refused(payload: bytes) -> None:
    recipient = IncomingResiduals()
    recipient.n = 64
    with pytest.raises(RemoteProtocolError):
        recipient.receive_piece(A, ResidualBlock(1, 2, 5, b"h", 0, 1, payload), 3)
    assert not recipient._complete


def test_a_residual_with_too_many_pieces_is_refused_at_its_first_piece() -> None:
    recipient = IncomingResiduals()
    recipient.n = 64
    with pytest.raises(RemoteProtocolError, match="a residual has 2 pieces; for the 64 elements"):
        recipient.receive_piece(A, ResidualBlock(1, 2, 5, b"h", 0, 2, b""), 3)
    dense = IncomingResiduals()
    with pytest.raises(RemoteProtocolError, match="at most"):
        dense.receive_piece(A, ResidualBlock(1, 2, 5, b"h", 0, 1, b""), 3)


def test_the_payload_is_an_ordinary_sparse_payload() -> None:
    chosen = select_entries(np.array([0.0, 3.0, 0.0, -1.0], np.float32), MIB, 2)
    sparse = decode(chosen.payload, n=4, max_entries=4, kind=ValueKind.FP32)
    assert (sparse.indices.tolist(), sparse.values.tolist()) == ([1, 3], [3.0, -1.0])
