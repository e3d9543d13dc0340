"""Every defence: the attack fails, and without the defence the same attack succeeds.

Each attack acts as a hostile member would, and returns the harm that it has done; `harm_of` says what None
and exceptions mean.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
from defences import DEFENCES, disable_defences

from gridtrain.core import messages as m
from gridtrain.core.collectives.collective import AddSlice, Provenance
from gridtrain.core.collectives.ring import RingAllReduce
from gridtrain.core.commit.attempts import MAX_STALE_MESSAGES, Attempts
from gridtrain.core.commit.two_phase_commit import (
    Decided,
    DecisionReceived,
    Prepared,
    TwoPhaseCommit,
    VoteReceived,
)
from gridtrain.core.group.member_events import DeliverMean
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.core.member.residual_transfer import ResidualTransfer
from gridtrain.core.member.scalar_means import MAX_OPEN_MEANS, ScalarMeans
from gridtrain.errors import ConfigError, RemoteProtocolError
from gridtrain.network.wire.codec import MAX_PAYLOAD_BYTES, decode
from gridtrain.network.wire.sparse_payload import decode as decode_sparse
from gridtrain.network.wire.sparse_payload import encode
from gridtrain.network.wire.value_encoding import ValueKind
from gridtrain.runtime.buffers.collective_buffers import DenseRingBuffer
from gridtrain.runtime.state_transfer.blobs import MAX_STATE_REQUESTS, BlobReceiver, BlobSender, split_blocks
from gridtrain.runtime.state_transfer.residual_pieces import IncomingResiduals

A, B, C = (letter * 32 for letter in (b"a", b"b", b"c"))
ROSTER = tuple(m.Member(peer, "", "", 1, False) for peer in (A, B, C))
ROUND = m.RoundId(1, 5, 7, 0)
DATA = [50, [1, 2, 3, 0], [0, 0, 0], [0, 0, 0, 0], 0]
N, K = 64, 4


def header(*fields: Any) -> bytes:
    packed: bytes = msgpack.packb(fields)
    return packed


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


# -- wire ------------------------------------------------------------------------------------------


def frames_of_unchecked_size() -> Any:
    return decode([header(*DATA), b"", bytes(2**20)])


def a_payload_of_65_mib() -> Any:
    return decode([header(*DATA), memoryview(bytes(MAX_PAYLOAD_BYTES + 1))])


def a_map_is_built() -> Any:
    """A map that is built before a field refuses it: 300 strings of 100 bytes as keys."""
    try:
        decode([header(54, {f"{i:0100}": i for i in range(300)})])
    except RemoteProtocolError as error:
        return "contains a map" in error.reason or None


def a_cursor_that_moves() -> Any:
    return decode([header(10, "run", "\x1b[2J", "tcp://h:1", True, False, 0)])


def a_negative_count() -> Any:
    return decode([header(54, -(2**63))])


def a_nan_as_loss() -> Any:
    return decode([header(13, 0, 0, 0, [["loss", float("nan")]])])


def a_state_of_too_many_blocks() -> Any:
    return decode([header(57, 1, 1, 0, 2**31 - 1), b""])


def sparse(change: Callable[[bytearray], None], kind: ValueKind = ValueKind.FP32, k: int = K) -> Any:
    """Entries 3, 10, 11, 40 of 64: header 8 bytes, low bits a3 8b, high bits 27, then the values."""
    honest = encode(np.array([3, 10, 11, 40]), floats(1, -2, 0.5, 3), n=N, kind=kind)
    hostile = bytearray(honest)
    change(hostile)
    return decode_sparse(bytes(hostile), n=N, max_entries=k, kind=kind)


def put(at: int, value: bytes) -> Callable[[bytearray], None]:
    return lambda buffer: buffer.__setitem__(slice(at, at + len(value)), value)


def values_of_another_kind() -> Any:
    """The mark of fp16 on fp32 values."""
    return sparse(put(6, b"\x01\x00"))


def more_entries_than_k() -> Any:
    return sparse(lambda _: None, k=3)


def bytes_after_the_last_value() -> Any:
    return sparse(lambda buffer: buffer.extend(bytes(4096)))


def bits_after_the_last_index() -> Any:
    return sparse(put(10, b"\xa7"))


def a_unary_part_of_too_few_entries() -> Any:
    return sparse(put(10, b"\x07"))


def the_same_index_twice() -> Any:
    return sparse(put(8, b"\xaa"))  # 10, 10 instead of 3, 10


def a_nan_as_value() -> Any:
    return sparse(put(11, struct.pack("<f", float("nan"))))


def a_nan_as_fp16_value() -> Any:
    return sparse(put(11, b"\x00\x7e"), ValueKind.FP16)


def an_unused_scale() -> Any:
    return sparse(put(4, b"\x07\x00"))


def a_scale_beyond_float32() -> Any:
    """2^200, for the only block."""
    return sparse(put(11, b"\xc8\x00"), ValueKind.INT8)


def a_scale_of_levels_beyond_float32() -> Any:
    """2^200, for the only block."""
    return sparse(put(11, b"\xc8\x00"), ValueKind.INT4)


def bits_after_the_last_code() -> Any:
    """Three entries of 2 bits, and padding bits in the fourth place of their byte."""
    hostile = bytearray(encode(np.array([3, 10, 40]), floats(1, -1, 1), n=N, kind=ValueKind.INT2))
    hostile[-1] |= 0x40
    return decode_sparse(bytes(hostile), n=N, max_entries=K, kind=ValueKind.INT2)


# -- the exchange ----------------------------------------------------------------------------------


def a_slice_of_one_value() -> Any:
    """Broadcast over the segment: one value is added to all."""
    work = DenseRingBuffer(floats(1, 2, 3, 4), 2)
    work.apply(AddSlice(0, 0, floats(9).tobytes(), Provenance(1, 1, 2, 1)))
    return work.update.tolist() != [1, 2, 3, 4] or None


def a_nan_in_the_sum() -> Any:
    work = DenseRingBuffer(floats(1, 2, 3, 4), 2)
    work.apply(AddSlice(0, 0, floats(np.nan, 0).tobytes(), Provenance(1, 1, 2, 1)))
    return np.isnan(work.update).any() or None


def a_payload_of_another_rank() -> Any:
    """Rank 0 of three: the payload of rank 2 is due; rank 1 sends it."""
    ring = RingAllReduce(0, 3, slices=1, flags=0)
    ring.start()
    return ring.handle(1, m.PayloadSlot(m.CollectivePhase.REDUCE, 0, 2), 0, "mine")


def a_state(blobs: list[bytes], *, total: int | None = None) -> list[m.StateBlock]:
    blocks = split_blocks(blobs)
    return [m.StateBlock(1, 5, i, total or len(blocks), block) for i, block in enumerate(blocks)]


def a_state_too_large() -> Any:
    intake = BlobReceiver(max_bytes=1000)
    for block in a_state([bytes(3000)]):
        intake.receive(block)
    return intake.held_bytes > 1000 or None


def a_state_with_a_false_total() -> Any:
    intake = BlobReceiver(max_bytes=1000)
    for block in a_state([b"abc"], total=40_000):
        intake.receive(block)
    return "taken"


def a_block_of_another_size() -> Any:
    intake = BlobReceiver(max_bytes=1000)
    table, block = a_state([b"abc"])
    intake.receive(table)
    intake.receive(m.StateBlock(1, 5, 1, block.total, bytes(2**20)))
    return intake.held_bytes > 1000 or None


def repeated_state_requests() -> Any:
    outlet, wire = BlobSender(), Wire()
    outlet.store(5, [b"own", bytes(1000)])
    for _ in range(10 * MAX_STATE_REQUESTS):
        outlet.request(C, 1, 5)
        outlet.send_pending(wire)  # type: ignore[arg-type]
    return wire.sent > 3 * MAX_STATE_REQUESTS or None


class Wire:
    """Counts the bytes that a state source sends."""

    sent = 0

    def backlog_bytes(self, peer: m.PeerId) -> int:
        return 0

    def send(self, peer: m.PeerId, message: m.Message) -> None:
        self.sent += 1


# -- the vote --------------------------------------------------------------------------------------


def round_of(rank: int) -> TwoPhaseCommit:
    return TwoPhaseCommit(ROUND, rank, 3, timeout_s=5.0, now_s=0.0)


def a_vote_at_a_member() -> Any:
    """Two votes NO at a member other than the root, which would abort a round that the root may commit."""
    return round_of(1).handle(VoteReceived(2, False, b"", ""), 0.0)


def a_commit_of_a_member() -> Any:
    mine = round_of(1)
    mine.handle(Prepared(b"u"), 0.0)
    return mine.handle(DecisionReceived(2, m.Verdict.COMMIT, ""), 0.0)


def a_changed_vote() -> Any:
    root = round_of(0)
    root.handle(VoteReceived(2, True, b"u", ""), 0.0)
    root.handle(VoteReceived(2, True, b"v", ""), 0.0)
    root.handle(VoteReceived(1, True, b"v", ""), 0.0)
    decided = root.handle(Prepared(b"v"), 0.0)
    return [effect for effect in decided if isinstance(effect, Decided)] or None


def attempts_of_rank_1(voted: bool = False) -> Attempts:
    mine = Attempts(RankAssignment(B, 1, 5, ROSTER), step=7)
    if voted:
        mine.submit(ROUND, {m.Channel(): RingAllReduce(1, 3, 1, 0)}, 5.0, 0.0)
        mine.advance(Prepared(b"u"), 0.0)
    return mine


def data(round_id: m.RoundId, payload: bytes = b"") -> m.Data:
    return m.Data(round_id, m.Channel(), m.PayloadSlot(m.CollectivePhase.REDUCE), 0, payload)


def a_step_that_others_did_not_commit() -> Any:
    """Rank 2 pretends to be at the next step; the root has decided nothing."""
    mine = attempts_of_rank_1(voted=True)
    mine.receive(C, data(m.RoundId(1, 5, 8, 0)), 100, 0.0)
    return None if mine.prepared_attempt is not None else "applied alone"


def stored_bytes_of(round_id: m.RoundId, count: int = 1, nbytes: int = 100) -> Any:
    mine = attempts_of_rank_1(voted=True)
    for _ in range(count):
        mine.receive(C, data(round_id), nbytes, 0.0)
    return mine.early_bytes(C) or None


def a_generation_that_never_begins() -> Any:
    return stored_bytes_of(m.RoundId(1, 2**62, 0, 0))


def a_round_that_is_over() -> Any:
    return stored_bytes_of(m.RoundId(1, 5, 6, 0))


def stale_messages_at_line_rate() -> Any:
    """Stale messages are not stored, but reading them costs as much as reading current ones."""
    mine = attempts_of_rank_1(voted=True)
    for _ in range(MAX_STALE_MESSAGES + 1):
        mine.receive(C, data(m.RoundId(1, 4, 6, 0)), 100, 0.0)
    return "all stale messages were read"


def a_step_that_never_begins() -> Any:
    return stored_bytes_of(m.RoundId(1, 5, 2**62, 0))


def more_messages_than_fit() -> Any:
    return stored_bytes_of(m.RoundId(1, 5, 8, 0), count=20, nbytes=60 << 20)


def an_average_that_a_member_made() -> Any:
    mine = ScalarMeans(RankAssignment(B, 1, 5, ROSTER))
    mine.request((7, 0), 1.0)
    return DeliverMean(7, 0, 9.0) in mine.receive(C, m.MeanReply(1, 5, 7, 0, 9.0)) or None


def means_for_steps_that_never_begin() -> Any:
    root = ScalarMeans(RankAssignment(A, 1, 5, ROSTER))
    for step in range(2 * MAX_OPEN_MEANS):
        root.receive(C, m.MeanRequest(1, 5, 2**40 + step, 0, 1.0))
    return len(root._values) > MAX_OPEN_MEANS or None


# -- a residual transfer -------------------------------------------------------------------------------


def transferred(payload: bytes, total: int = 1) -> Any:
    recipient = IncomingResiduals()
    recipient.n = N
    accepted = recipient.receive_piece(C, m.ResidualBlock(1, 5, 6, b"", 0, total, payload), 3)
    return accepted or recipient._incoming or None


def a_residual_larger_than_the_model() -> Any:
    return transferred(bytes(1 << 20), total=16)


def a_residual_of_too_large_values() -> Any:
    return transferred(encode(np.array([3]), floats(2.0**127), n=N, kind=ValueKind.FP32))


def a_residual_of_a_rank_that_is_no_neighbour() -> Any:
    """Of four, rank 0 sends its residual to rank 2, which is no neighbour."""
    four = (*ROSTER, m.Member(b"d" * 32, "", "", 1, False))
    return ResidualTransfer().receive_block(
        RankAssignment(C, 1, 5, four), A, m.ResidualBlock(1, 5, 6, b"", 0, 1, b""), 6, True
    )


ATTACKS: dict[str, Callable[[], Any]] = {
    "residual-size": a_residual_larger_than_the_model,
    "residual-values": a_residual_of_too_large_values,
    "heir": a_residual_of_a_rank_that_is_no_neighbour,
    "frame-count": frames_of_unchecked_size,
    "frame-size": a_payload_of_65_mib,
    "parse-limits": a_map_is_built,
    "plain-text": a_cursor_that_moves,
    "number-bounds": a_negative_count,
    "finite-figures": a_nan_as_loss,
    "record-rules": a_state_of_too_many_blocks,
    "sparse-kind": values_of_another_kind,
    "sparse-count": more_entries_than_k,
    "sparse-length": bytes_after_the_last_value,
    "sparse-padding": bits_after_the_last_index,
    "sparse-popcount": a_unary_part_of_too_few_entries,
    "sparse-order": the_same_index_twice,
    "sparse-finite": a_nan_as_value,
    "sparse-scale": a_nan_as_fp16_value,
    "sparse-unscaled": an_unused_scale,
    "sparse-blocks": a_scale_beyond_float32,
    "sparse-levels": a_scale_of_levels_beyond_float32,
    "sparse-code-padding": bits_after_the_last_code,
    "dense-length": a_slice_of_one_value,
    "honest-values": a_nan_in_the_sum,
    "turn": a_payload_of_another_rank,
    "state-size": a_state_too_large,
    "state-total": a_state_with_a_false_total,
    "state-block": a_block_of_another_size,
    "state-asks": repeated_state_requests,
    "root-counts": a_vote_at_a_member,
    "root-decides": a_commit_of_a_member,
    "one-vote": a_changed_vote,
    "commit-proof": a_step_that_others_did_not_commit,
    "generation-fence": a_generation_that_never_begins,
    "stale-flood": stale_messages_at_line_rate,
    "stale": a_round_that_is_over,
    "reach": a_step_that_never_begins,
    "held-room": more_messages_than_fit,
    "mean-role": an_average_that_a_member_made,
    "mean-room": means_for_steps_that_never_begin,
}


def harm_of(attack: Callable[[], Any]) -> Any:
    """The harm of the attack: its own report, or a crash of this process; None: it was prevented."""
    try:
        return attack()
    except RemoteProtocolError as error:
        assert error.remedy, "a refusal says what to do next"
        return None
    except Exception as error:
        return f"crashed: {error!r}"


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_the_attack_fails(name: str) -> None:
    assert harm_of(ATTACKS[name]) is None


@pytest.mark.parametrize("name", sorted(ATTACKS))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_without_the_defence_the_attack_succeeds(name: str) -> None:
    with disable_defences(name):
        assert harm_of(ATTACKS[name]) is not None
    assert harm_of(ATTACKS[name]) is None  # the defence is restored


# -- the switches themselves -----------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(DEFENCES))
def test_every_defence_exists_in_the_product(name: str) -> None:
    defence = DEFENCES[name]
    holder, attribute = defence.resolve()
    before = getattr(holder, attribute)
    with disable_defences(name):
        assert getattr(holder, attribute) is not before
    assert getattr(holder, attribute) is before or getattr(holder, attribute) == before
    assert defence.name == name and defence.attack


def test_every_defence_of_the_protocol_has_an_attack() -> None:
    modules = {defence.module for name, defence in DEFENCES.items() if name in ATTACKS}
    mine = {name for name, defence in DEFENCES.items() if defence.module in modules}
    assert mine == set(ATTACKS)


def test_several_defences_are_restored_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), disable_defences("turn", "one-vote"):
        a_payload_of_another_rank()
        1 / 0  # noqa: B018
    with pytest.raises(RemoteProtocolError):
        a_payload_of_another_rank()


def test_an_unknown_defence_is_refused_with_the_known_ones() -> None:
    with (
        pytest.raises(ConfigError, match=r"no defence 'tunr' -> choose from: .*turn"),
        disable_defences("tunr"),
    ):
        pass


def test_the_same_defence_cannot_be_disabled_twice() -> None:
    with disable_defences("turn"):
        with pytest.raises(ConfigError, match="'turn' is disabled already"), disable_defences("turn"):
            pass
        assert a_payload_of_another_rank()  # the outer context is still active
