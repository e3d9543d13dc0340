"""The bounds of every field of every message, as one table: `MESSAGES`, at the end.

Decides which values may travel.  `codec` applies it, PROTOCOL.md says the same in words (a test
compares the two), and the tests draw their messages from it.
"""

from __future__ import annotations

import sys
from itertools import pairwise

from gridtrain.core import messages as m
from gridtrain.network.wire.field_types import (
    BoolField,
    BytesField,
    EnumField,
    FloatField,
    IntField,
    ListField,
    OptionalField,
    PayloadField,
    ReasonField,
    RecordField,
    TextField,
    TupleField,
    WordField,
)

MAX_ROSTER_PAGE = 192
"""Members of one Roster page: a page of the longest names and addresses still fits a header."""

MAX_ROSTER_PAGES = 256
MAX_BLOCK_BYTES = 1 << 20
MAX_BLOCKS = 1 << 16
"""Of a state: 64 GiB.  What a joiner really takes is bounded by its own model (`runtime.statefeed`)."""

MAX_BUNDLE_BLOCKS = 8
MAX_PIECES = 16
"""Of a residual that is handed over: 16 MiB, which is within a window of credit."""

# -- leaves ----------------------------------------------------------------------------------------

UINT = IntField("uint", 0, 2**63 - 1, "an integer 0 .. 2^63-1 (what SQLite holds)")
COUNT = IntField("count", 0, 2**31 - 1, "an integer 0 .. 2^31-1")
POSITIVE = IntField("positive", 1, 2**31 - 1, "an integer 1 .. 2^31-1")
APPLIED = IntField("applied", -1, 2**63 - 1, "an integer -1 .. 2^63-1; -1: no step yet")
FLAG = BoolField()
REAL = FloatField("float", -sys.float_info.max, sys.float_info.max, "a finite 64-bit float")
RATE = FloatField("rate", 0.0, 1e12, "a 64-bit float 0 .. 10^12, bytes per second")
SECONDS = FloatField("seconds", 0.0, 1e6, "a 64-bit float 0 .. 10^6")
FLOPS = FloatField("flops", 0.0, 1e18, "a 64-bit float 0 .. 10^18, operations per second")
FACTOR = FloatField("factor", 0.0, 1e6, "a 64-bit float 0 .. 10^6, no unit")
STAGES = IntField("stages", 1, m.MAX_STAGES, f"an integer 1 .. {m.MAX_STAGES}")
STAGE_BOUND = IntField("cut", 0, 2**20, "an integer 0 .. 2^20, a block of the model")
SOURCE_RANK = IntField(
    "donor", -1, 2**31 - 1, "an integer -1 .. 2^31-1, a rank; -1: the lowest that holds the state"
)
LIFETIME = FloatField("lifetime", 0.0, 1e10, "a 64-bit float 0 .. 10^10, seconds")
PEER = BytesField("peer", 32, 32, "exactly 32 bytes, a public key")
PROOF = BytesField("proof", 8, 8, "exactly 8 bytes")
DIGEST = BytesField("digest", 0, 64, "0 .. 64 bytes")
NAME = TextField("name", 64, "at most 64 bytes of UTF-8 without control characters")
ADDRESS = TextField("address", 128, "at most 128 bytes of UTF-8 without control characters")
TEXT = TextField("text", 512, "at most 512 bytes of UTF-8 without control characters")
REASON = ReasonField("reason", 512, "at most 512 bytes of UTF-8 without control characters save newline")
STATE = WordField("state", "waiting", "training", "paused", "finished")
COLLECTIVE_PHASE = EnumField(m.CollectivePhase)
VERDICT = EnumField(m.Verdict)
FRAME = PayloadField()

# -- parts of messages -----------------------------------------------------------------------------


def _span_is_forward(span: m.Span) -> str | None:
    return None if span.start <= span.stop else f"{span}, must not stop before it starts"


def _is_some_block(blocks: m.Span) -> str | None:
    """Of a model: positions of data may be none at all."""
    return None if blocks.start < blocks.stop else f"blocks {blocks}, must be one at least"


def _has_layers(held: m.CheckpointInfo | m.CheckpointRequest) -> str | None:
    return _is_some_block(held.layers)


def _bounds_ascend(model: m.StagedModel) -> str | None:
    cuts, count = model.cuts, len(model.blocks)
    ascending = cuts[:1] == (0,) and all(a < b for a, b in pairwise(cuts)) and len(cuts) > 1
    if not ascending:
        return f"cuts {cuts[:8]}, must ascend from 0"
    return None if not count or count == cuts[-1] else f"{count} blocks cut at {cuts[:8]}, must end with them"


def _pieces_have_layers(member: m.Member) -> str | None:
    if len(member.piece_digests) != len(member.pieces):
        return f"{len(member.piece_digests)} digests of {len(member.pieces)} pieces, must be as many"
    return next((wrong for blocks, _ in member.pieces if (wrong := _is_some_block(blocks))), None)


def _has_one_limit(spec: m.LedgerSpec) -> str | None:
    return None if (spec.epochs is None) != (spec.steps is None) else f"{spec}, must have epochs or steps"


def _page_is_one_of(roster: m.MemberListPage) -> str | None:
    if roster.page < roster.pages <= MAX_ROSTER_PAGES:
        return None
    return f"page {roster.page} of {roster.pages}, must be below that, and that at most {MAX_ROSTER_PAGES}"


def _block_is_one_of(block: m.StateBlock | m.CheckpointBlock) -> str | None:
    if not block.index < block.total <= MAX_BLOCKS:
        return f"block {block.index} of {block.total}, must be below that, and that at most {MAX_BLOCKS}"
    nbytes = memoryview(block.payload).nbytes
    return None if nbytes <= MAX_BLOCK_BYTES else f"{nbytes} bytes, must be at most {MAX_BLOCK_BYTES}"


def _bundle_is_one_of(block: m.BundleBlock) -> str | None:
    if not block.index < block.total <= MAX_BUNDLE_BLOCKS:
        return (
            f"block {block.index} of {block.total}, must be below that, and that at most {MAX_BUNDLE_BLOCKS}"
        )
    nbytes = memoryview(block.payload).nbytes
    return None if nbytes <= MAX_BLOCK_BYTES else f"{nbytes} bytes, must be at most {MAX_BLOCK_BYTES}"


def _block_is_small(block: m.SnapshotBlock) -> str | None:
    nbytes = memoryview(block.payload).nbytes
    return None if nbytes <= MAX_BLOCK_BYTES else f"{nbytes} bytes, must be at most {MAX_BLOCK_BYTES}"


def _burst_is_one_of(burst: m.Burst) -> str | None:
    if burst.index >= m.BURST_MESSAGES:
        return f"index {burst.index}, must be below {m.BURST_MESSAGES}"
    nbytes = memoryview(burst.payload).nbytes
    return (
        None
        if nbytes <= m.BURST_MESSAGE_BYTES
        else f"{nbytes} bytes, must be at most {m.BURST_MESSAGE_BYTES}"
    )


def _piece_is_one_of(piece: m.ResidualBlock) -> str | None:
    if not piece.index < piece.total <= MAX_PIECES:
        return f"piece {piece.index} of {piece.total}, must be below that, and that at most {MAX_PIECES}"
    nbytes = memoryview(piece.payload).nbytes
    return None if nbytes <= MAX_BLOCK_BYTES else f"{nbytes} bytes, must be at most {MAX_BLOCK_BYTES}"


ROUND = RecordField(m.RoundId, recurs=True, term=UINT, generation=UINT, step=UINT, attempt=UINT)
CHANNEL = RecordField(m.Channel, recurs=True, group=COUNT, kind=COUNT, index=COUNT)
PLACE = RecordField(m.PayloadSlot, phase=COLLECTIVE_PHASE, hop=COUNT, segment=COUNT, slice=COUNT)
SPAN = RecordField(m.Span, _span_is_forward, start=UINT, stop=UINT)
SPANS = ListField(SPAN, 4096)
LEDGER_SPEC = RecordField(
    m.LedgerSpec, _has_one_limit, size=UINT, seed=UINT, epochs=OptionalField(UINT), steps=OptionalField(UINT)
)
LEDGER = RecordField(
    m.LedgerState,
    step=UINT,
    cursor=UINT,
    requeued=SPANS,
    consumed=UINT,
    skipped=UINT,
    holders=OptionalField(ListField(TupleField(PEER, SPANS), 1024)),
)
HELD_STATE = RecordField(
    m.CheckpointInfo, _has_layers, applied=UINT, history=DIGEST, ledger=LEDGER, layers=SPAN, digest=DIGEST
)
LAYER = RecordField(
    m.LayerCosts,
    parameter_bytes=UINT,
    trainable_bytes=UINT,
    output_bytes=UINT,
    gradient_bytes=UINT,
    kept_bytes=UINT,
    work_bytes=UINT,
    forward_s=SECONDS,
    backward_s=SECONDS,
    overhead_s=SECONDS,
)
STAGE_BOUNDS = ListField(STAGE_BOUND, m.MAX_STAGES + 1)
STAGED_MODEL = RecordField(
    m.StagedModel,
    _bounds_ascend,
    cuts=STAGE_BOUNDS,
    blocks=ListField(LAYER, m.MAX_LAYERS),
    samples=POSITIVE,
    micro_batches=POSITIVE,
    copies=FACTOR,
    input_bytes=UINT,
    rematerialise=FLAG,
    fill_drain=FLAG,
    ahead=FACTOR,
    fixed=FLAG,
)
MEMBER = RecordField(
    m.Member,
    _pieces_have_layers,
    peer=PEER,
    name=NAME,
    address=ADDRESS,
    share=COUNT,
    joining=FLAG,
    donor=SOURCE_RANK,
    pieces=ListField(TupleField(SPAN, COUNT), m.MAX_CHECKPOINT_SOURCES),
    digest=DIGEST,
    piece_digests=ListField(DIGEST, m.MAX_CHECKPOINT_SOURCES),
)

RECORDS: tuple[RecordField, ...] = (
    ROUND, CHANNEL, PLACE, SPAN, LEDGER_SPEC, LEDGER, HELD_STATE, LAYER, STAGED_MODEL, MEMBER
)  # fmt: skip

# -- messages --------------------------------------------------------------------------------------

MESSAGES: dict[int, RecordField] = {
    # The first message; its code and layout are the same in every version.
    1: RecordField(m.Hello, peer=PEER, version=UINT, software=NAME),
    2: RecordField(m.Credit, total_bytes=UINT),
    # guest -> coordinator
    5: RecordField(m.Enrol, peer=PEER),
    # operator -> coordinator
    6: RecordField(m.Invite, key=PEER, uses=POSITIVE, expires_s=LIFETIME),
    7: RecordField(m.RemoveWorker, peer=PEER, ban=FLAG, reason=REASON),
    8: RecordField(m.Unban, peer=PEER),
    # worker -> coordinator
    10: RecordField(
        m.Join, run=NAME, name=NAME, address=ADDRESS, can_relay=FLAG, is_rejoin=FLAG, generation=UINT
    ),
    11: RecordField(
        m.Setup,
        facts=ListField(TupleField(NAME, TEXT), 64),
        ledger=LEDGER_SPEC,
        batch_size=COUNT,
        global_batch_size=OptionalField(COUNT),
        checkpoint=OptionalField(HELD_STATE),
        can_catch_up=FLAG,
        stages=STAGES,
        stage_checkpoints=ListField(HELD_STATE, m.MAX_STAGE_CHECKPOINTS),
        model=OptionalField(STAGED_MODEL),
        memory_bytes=UINT,
        flops=FLOPS,
        initial_state_digest=DIGEST,
    ),
    12: RecordField(m.LinkLatencies, rtt_s=ListField(TupleField(PEER, SECONDS), 256)),
    13: RecordField(
        m.Heartbeat, sequence=UINT, step=APPLIED, progress=UINT, metrics=ListField(TupleField(NAME, REAL), 64)
    ),
    14: RecordField(
        m.FreezeReport,
        term=UINT,
        generation=UINT,
        is_synced=FLAG,
        applied=APPLIED,
        history=DIGEST,
        ledger=LEDGER,
        prepared=OptionalField(ROUND),
        digest=DIGEST,
        skip=FLAG,
        layers=SPAN,
    ),
    15: RecordField(m.Ready, term=UINT, generation=UINT, history=DIGEST),
    16: RecordField(
        m.RoundStalled, round=ROUND, suspects=ListField(PEER, 1024), silent_s=SECONDS, reason=REASON
    ),
    17: RecordField(m.Leave, reason=REASON),
    18: RecordField(m.RunFinished, applied=APPLIED, history=DIGEST),
    19: RecordField(m.StatusRequest),
    20: RecordField(m.ViolationReport, peer=PEER, reason=REASON),
    21: RecordField(m.PeersUnreachable, term=UINT, generation=UINT, peers=ListField(PEER, 1024)),
    22: RecordField(m.ConnectionLost, term=UINT, generation=UINT, peer=PEER),
    23: RecordField(
        m.CurrentGeneration,
        term=UINT,
        generation=UINT,
        members=ListField(TupleField(PEER, COUNT), 1024),
        stage_bounds=STAGE_BOUNDS,
    ),
    24: RecordField(m.ReplicaDigest, term=UINT, generation=UINT, step=UINT, digest=DIGEST),
    25: RecordField(m.CatchUpReport, applied=APPLIED, history=DIGEST),
    26: RecordField(m.LinkRates, rates_Bps=ListField(TupleField(PEER, RATE, RATE), 256)),
    # coordinator -> worker
    30: RecordField(m.Welcome, term=UINT, run=NAME, software=NAME),
    31: RecordField(m.Refused, code=NAME, reason=REASON, remedy=REASON),
    32: RecordField(m.Admitted, probe_targets=ListField(TupleField(PEER, ADDRESS), 256)),
    33: RecordField(m.HeartbeatReply, term=UINT, sequence=UINT),
    34: RecordField(m.Freeze, term=UINT, generation=UINT, reason=REASON, removed=ListField(PEER, 1024)),
    35: RecordField(
        m.MemberListPage,
        _page_is_one_of,
        term=UINT,
        generation=UINT,
        page=COUNT,
        pages=POSITIVE,
        members=ListField(MEMBER, MAX_ROSTER_PAGE),
    ),
    36: RecordField(
        m.MembershipView,
        term=UINT,
        generation=UINT,
        world_size=POSITIVE,
        verdict=VERDICT,
        decided_round=OptionalField(ROUND),
        applied=APPLIED,
        history=DIGEST,
        ledger=LEDGER,
        reason=REASON,
        exchange=TEXT,
        stage_bounds=STAGE_BOUNDS,
    ),
    37: RecordField(m.StartGeneration, term=UINT, generation=UINT),
    38: RecordField(m.RunStateUpdate, state=STATE, reason=REASON),
    39: RecordField(m.StatusReply, payload=FRAME),
    40: RecordField(m.Rejoin, reason=REASON),
    41: RecordField(m.Enrolled, run=NAME),
    42: RecordField(m.OperatorReply, text=REASON),
    43: RecordField(m.Reachability, address=ADDRESS),
    44: RecordField(m.ExpectProbes, peers=ListField(TupleField(PEER, ADDRESS), 256)),
    45: RecordField(m.CatchUpFrom, term=UINT, sources=ListField(TupleField(PEER, ADDRESS), 16)),
    46: RecordField(m.ServeCatchUp, term=UINT, step=APPLIED, receivers=ListField(PEER, 64)),
    47: RecordField(m.ReplicaDiverged, term=UINT, generation=UINT, step=UINT),
    # worker <-> worker
    50: RecordField(m.Data, round=ROUND, channel=CHANNEL, slot=PLACE, skip=FLAG, payload=FRAME),
    51: RecordField(m.Vote, round=ROUND, yes=FLAG, digest=DIGEST, reason=REASON),
    52: RecordField(m.Decision, round=ROUND, verdict=VERDICT, reason=REASON),
    53: RecordField(m.RoundProgress, round=ROUND, progress=UINT),
    54: RecordField(m.Ping, nonce=UINT),
    55: RecordField(m.Pong, nonce=UINT),
    56: RecordField(
        m.StateRequest, term=UINT, generation=UINT, is_whole=FLAG, blocks_received=COUNT, digest_only=FLAG
    ),
    68: RecordField(m.StateDigest, term=UINT, generation=UINT, digest=DIGEST),
    57: RecordField(
        m.StateBlock, _block_is_one_of, term=UINT, generation=UINT, index=COUNT, total=POSITIVE, payload=FRAME
    ),
    58: RecordField(m.MeanRequest, term=UINT, generation=UINT, step=UINT, index=COUNT, value=REAL),
    59: RecordField(m.MeanReply, term=UINT, generation=UINT, step=UINT, index=COUNT, value=REAL),
    # of a model in stages: worker -> coordinator, and coordinator -> worker
    77: RecordField(
        m.StageCheckpointList, checkpoints=ListField(HELD_STATE, m.MAX_STAGE_CHECKPOINTS), generation=UINT
    ),
    78: RecordField(
        m.StandbyNotice,
        term=UINT,
        generation=UINT,
        applied=APPLIED,
        history=DIGEST,
        ledger=LEDGER,
        reason=REASON,
    ),
    79: RecordField(
        m.CheckpointBlock,
        _block_is_one_of,
        term=UINT,
        generation=UINT,
        checkpoint=HELD_STATE,
        index=COUNT,
        total=POSITIVE,
        payload=FRAME,
    ),
    89: RecordField(m.CheckpointRequest, _has_layers, term=UINT, generation=UINT, layers=SPAN),
    # a member to a follower, and back
    70: RecordField(m.SnapshotRequest),
    71: RecordField(m.SnapshotDigests, applied=APPLIED, history=DIGEST, payload=FRAME),
    72: RecordField(m.SnapshotBlocksRequest, applied=APPLIED, blocks=ListField(COUNT, 64)),
    73: RecordField(m.SnapshotBlock, _block_is_small, applied=APPLIED, index=COUNT, payload=FRAME),
    74: RecordField(m.UpdatesRequest, applied=APPLIED),
    75: RecordField(m.UpdateLogEntry, step=UINT, latest_step=UINT, payload=FRAME),
    76: RecordField(m.SnapshotUnavailable, reason=REASON),
    # a worker that rests, and `gridtrain doctor`
    83: RecordField(m.TemporaryLeave, reason=REASON),
    84: RecordField(m.DiagnosticRequest, peer=PEER, address=ADDRESS),
    85: RecordField(m.DiagnosticReply, probe_targets=ListField(TupleField(PEER, ADDRESS), 8), payload=FRAME),
    86: RecordField(m.BurstRequest, nonce=UINT),
    # of a member that leaves, to another one
    63: RecordField(
        m.ResidualBlock,
        _piece_is_one_of,
        term=UINT,
        generation=UINT,
        applied=APPLIED,
        history=DIGEST,
        index=COUNT,
        total=POSITIVE,
        payload=FRAME,
    ),
    64: RecordField(m.ResidualReply, term=UINT, generation=UINT, is_accepted=FLAG, reason=REASON),
    65: RecordField(m.Burst, _burst_is_one_of, nonce=UINT, index=COUNT, payload=FRAME),
    66: RecordField(m.BurstReceived, nonce=UINT, proof=PROOF),
    # for people
    80: RecordField(m.WorkerInfo, texts=ListField(TupleField(NAME, TEXT), 16)),
    # of what volunteers run, from the coordinator
    87: RecordField(m.BundleRequest, digest=DIGEST, index=COUNT),
    88: RecordField(
        m.BundleBlock, _bundle_is_one_of, digest=DIGEST, index=COUNT, total=POSITIVE, payload=FRAME
    ),
    # to and from a relay
    60: RecordField(m.RelayRequest, to=PEER, payload=FRAME),
    61: RecordField(m.RelayedMessage, origin=PEER, payload=FRAME),
    62: RecordField(m.RelayFailed, to=PEER, reason=REASON),
}
