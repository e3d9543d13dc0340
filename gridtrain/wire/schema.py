"""The bounds of every field of every message, as one table: `MESSAGES`, at the end.

Decides which values may travel.  `codec` applies it, PROTOCOL.md says the same in words (a test
compares the two), and the tests draw their messages from it.
"""

from __future__ import annotations

import sys
from itertools import pairwise

from gridtrain.protocol import messages as m
from gridtrain.wire.kinds import (
    Binary,
    Choice,
    Flag,
    Frame,
    Group,
    Int,
    Many,
    Maybe,
    OneOf,
    Real,
    Reason,
    Record,
    Text,
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

UINT = Int("uint", 0, 2**63 - 1, "an integer 0 .. 2^63-1 (what SQLite holds)")
COUNT = Int("count", 0, 2**31 - 1, "an integer 0 .. 2^31-1")
POSITIVE = Int("positive", 1, 2**31 - 1, "an integer 1 .. 2^31-1")
APPLIED = Int("applied", -1, 2**63 - 1, "an integer -1 .. 2^63-1; -1: no step yet")
FLAG = Flag()
REAL = Real("float", -sys.float_info.max, sys.float_info.max, "a finite 64-bit float")
RATE = Real("rate", 0.0, 1e12, "a 64-bit float 0 .. 10^12, bytes per second")
SECONDS = Real("seconds", 0.0, 1e6, "a 64-bit float 0 .. 10^6")
FLOPS = Real("flops", 0.0, 1e18, "a 64-bit float 0 .. 10^18, operations per second")
FACTOR = Real("factor", 0.0, 1e6, "a 64-bit float 0 .. 10^6, no unit")
STAGES = Int("stages", 1, m.MOST_STAGES, f"an integer 1 .. {m.MOST_STAGES}")
CUT = Int("cut", 0, 2**20, "an integer 0 .. 2^20, a block of the model")
DONOR = Int("donor", -1, 2**31 - 1, "an integer -1 .. 2^31-1, a rank; -1: the lowest that holds the state")
LIFETIME = Real("lifetime", 0.0, 1e10, "a 64-bit float 0 .. 10^10, seconds")
PEER = Binary("peer", 32, 32, "exactly 32 bytes, a public key")
PROOF = Binary("proof", 8, 8, "exactly 8 bytes")
DIGEST = Binary("digest", 0, 64, "0 .. 64 bytes")
NAME = Text("name", 64, "at most 64 bytes of UTF-8 without control characters")
ADDRESS = Text("address", 128, "at most 128 bytes of UTF-8 without control characters")
TEXT = Text("text", 512, "at most 512 bytes of UTF-8 without control characters")
REASON = Reason("reason", 512, "at most 512 bytes of UTF-8 without control characters save newline")
STATE = Choice("state", "waiting", "training", "paused", "finished")
PHASE = OneOf(m.Phase)
VERDICT = OneOf(m.Verdict)
FRAME = Frame()

# -- parts of messages -----------------------------------------------------------------------------


def _span_is_forward(span: m.Span) -> str | None:
    return None if span.start <= span.stop else f"{span}, must not stop before it starts"


def _is_some_block(blocks: m.Span) -> str | None:
    """Of a model: positions of data may be none at all."""
    return None if blocks.start < blocks.stop else f"blocks {blocks}, must be one at least"


def _holds_blocks(held: m.Held | m.PieceAsk) -> str | None:
    return _is_some_block(held.blocks)


def _cuts_ascend(model: m.StagedModel) -> str | None:
    cuts, count = model.cuts, len(model.blocks)
    ascending = cuts[:1] == (0,) and all(a < b for a, b in pairwise(cuts)) and len(cuts) > 1
    if not ascending:
        return f"cuts {cuts[:8]}, must ascend from 0"
    return None if not count or count == cuts[-1] else f"{count} blocks cut at {cuts[:8]}, must end with them"


def _pieces_hold_blocks(member: m.Member) -> str | None:
    if len(member.piece_digests) != len(member.pieces):
        return f"{len(member.piece_digests)} digests of {len(member.pieces)} pieces, must be as many"
    return next((wrong for blocks, _ in member.pieces if (wrong := _is_some_block(blocks))), None)


def _one_end(spec: m.LedgerSpec) -> str | None:
    return None if (spec.epochs is None) != (spec.steps is None) else f"{spec}, must have epochs or steps"


def _page_is_one_of(roster: m.Roster) -> str | None:
    if roster.page < roster.pages <= MAX_ROSTER_PAGES:
        return None
    return f"page {roster.page} of {roster.pages}, must be below that, and that at most {MAX_ROSTER_PAGES}"


def _block_is_one_of(block: m.StateBlock | m.Copy) -> str | None:
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


def _block_is_small(block: m.ImageBlock) -> str | None:
    nbytes = memoryview(block.payload).nbytes
    return None if nbytes <= MAX_BLOCK_BYTES else f"{nbytes} bytes, must be at most {MAX_BLOCK_BYTES}"


def _burst_is_one_of(burst: m.Burst) -> str | None:
    if burst.index >= m.BURSTS:
        return f"index {burst.index}, must be below {m.BURSTS}"
    nbytes = memoryview(burst.payload).nbytes
    return None if nbytes <= m.BURST_BYTES else f"{nbytes} bytes, must be at most {m.BURST_BYTES}"


def _piece_is_one_of(piece: m.HandOver) -> str | None:
    if not piece.index < piece.total <= MAX_PIECES:
        return f"piece {piece.index} of {piece.total}, must be below that, and that at most {MAX_PIECES}"
    nbytes = memoryview(piece.payload).nbytes
    return None if nbytes <= MAX_BLOCK_BYTES else f"{nbytes} bytes, must be at most {MAX_BLOCK_BYTES}"


ROUND = Record(m.RoundId, recurs=True, term=UINT, generation=UINT, step=UINT, attempt=UINT)
CHANNEL = Record(m.Channel, recurs=True, group=COUNT, kind=COUNT, index=COUNT)
PLACE = Record(m.Place, phase=PHASE, hop=COUNT, segment=COUNT, slice=COUNT)
SPAN = Record(m.Span, _span_is_forward, start=UINT, stop=UINT)
SPANS = Many(SPAN, 4096)
LEDGER_SPEC = Record(m.LedgerSpec, _one_end, size=UINT, seed=UINT, epochs=Maybe(UINT), steps=Maybe(UINT))
LEDGER = Record(
    m.LedgerState,
    step=UINT,
    cursor=UINT,
    requeued=SPANS,
    consumed=UINT,
    skipped=UINT,
    holders=Maybe(Many(Group(PEER, SPANS), 1024)),
)
HELD = Record(m.Held, _holds_blocks, applied=UINT, history=DIGEST, ledger=LEDGER, blocks=SPAN, digest=DIGEST)
BLOCK = Record(
    m.Block,
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
CUTS = Many(CUT, m.MOST_STAGES + 1)
STAGED_MODEL = Record(
    m.StagedModel,
    _cuts_ascend,
    cuts=CUTS,
    blocks=Many(BLOCK, m.MOST_BLOCKS),
    samples=POSITIVE,
    micro_batches=POSITIVE,
    copies=FACTOR,
    input_bytes=UINT,
    rematerialise=FLAG,
    fill_drain=FLAG,
    ahead=FACTOR,
    fixed=FLAG,
)
MEMBER = Record(
    m.Member,
    _pieces_hold_blocks,
    peer=PEER,
    name=NAME,
    address=ADDRESS,
    share=COUNT,
    joining=FLAG,
    donor=DONOR,
    pieces=Many(Group(SPAN, COUNT), m.MOST_PIECES),
    digest=DIGEST,
    piece_digests=Many(DIGEST, m.MOST_PIECES),
)

RECORDS: tuple[Record, ...] = (
    ROUND, CHANNEL, PLACE, SPAN, LEDGER_SPEC, LEDGER, HELD, BLOCK, STAGED_MODEL, MEMBER
)  # fmt: skip

# -- messages --------------------------------------------------------------------------------------

MESSAGES: dict[int, Record] = {
    # The first message; its code and layout are the same in every version.
    1: Record(m.Hello, peer=PEER, version=UINT, software=NAME),
    2: Record(m.Credit, total_bytes=UINT),
    # guest -> coordinator
    5: Record(m.Enrol, peer=PEER),
    # operator -> coordinator
    6: Record(m.Invite, key=PEER, uses=POSITIVE, expires_s=LIFETIME),
    7: Record(m.Expel, peer=PEER, ban=FLAG, reason=REASON),
    8: Record(m.Pardon, peer=PEER),
    # worker -> coordinator
    10: Record(m.Join, run=NAME, name=NAME, address=ADDRESS, relay=FLAG, again=FLAG, generation=UINT),
    11: Record(
        m.Setup,
        facts=Many(Group(NAME, TEXT), 64),
        ledger=LEDGER_SPEC,
        batch_size=COUNT,
        global_batch_size=Maybe(COUNT),
        held=Maybe(HELD),
        follows=FLAG,
        stages=STAGES,
        kept=Many(HELD, m.MOST_KEPT),
        model=Maybe(STAGED_MODEL),
        memory_bytes=UINT,
        flops=FLOPS,
        begins=DIGEST,
    ),
    12: Record(m.Links, rtt_s=Many(Group(PEER, SECONDS), 256)),
    13: Record(m.Beat, sequence=UINT, step=APPLIED, progress=UINT, figures=Many(Group(NAME, REAL), 64)),
    14: Record(
        m.Report,
        term=UINT,
        generation=UINT,
        synced=FLAG,
        applied=APPLIED,
        history=DIGEST,
        ledger=LEDGER,
        prepared=Maybe(ROUND),
        digest=DIGEST,
        skip=FLAG,
        blocks=SPAN,
    ),
    15: Record(m.Ready, term=UINT, generation=UINT, history=DIGEST),
    16: Record(m.Stalled, round=ROUND, suspects=Many(PEER, 1024), patience_s=SECONDS, reason=REASON),
    17: Record(m.Leave, reason=REASON),
    18: Record(m.Finished, applied=APPLIED, history=DIGEST),
    19: Record(m.StatusRequest),
    20: Record(m.Accuse, peer=PEER, reason=REASON),
    21: Record(m.NoRoute, term=UINT, generation=UINT, peers=Many(PEER, 1024)),
    22: Record(m.Broken, term=UINT, generation=UINT, peer=PEER),
    23: Record(m.Seated, term=UINT, generation=UINT, members=Many(Group(PEER, COUNT), 1024), cuts=CUTS),
    24: Record(m.Fingerprint, term=UINT, generation=UINT, step=UINT, digest=DIGEST),
    25: Record(m.Caught, applied=APPLIED, history=DIGEST),
    26: Record(m.Rates, rates_Bps=Many(Group(PEER, RATE, RATE), 256)),
    # coordinator -> worker
    30: Record(m.Welcome, term=UINT, run=NAME, software=NAME),
    31: Record(m.Refused, code=NAME, reason=REASON, remedy=REASON),
    32: Record(m.Admitted, probe=Many(Group(PEER, ADDRESS), 256)),
    33: Record(m.BeatReply, term=UINT, sequence=UINT),
    34: Record(m.Freeze, term=UINT, generation=UINT, reason=REASON, without=Many(PEER, 1024)),
    35: Record(
        m.Roster,
        _page_is_one_of,
        term=UINT,
        generation=UINT,
        page=COUNT,
        pages=POSITIVE,
        members=Many(MEMBER, MAX_ROSTER_PAGE),
    ),
    36: Record(
        m.View,
        term=UINT,
        generation=UINT,
        world_size=POSITIVE,
        verdict=VERDICT,
        decided=Maybe(ROUND),
        applied=APPLIED,
        history=DIGEST,
        ledger=LEDGER,
        reason=REASON,
        exchange=TEXT,
        cuts=CUTS,
    ),
    37: Record(m.Start, term=UINT, generation=UINT),
    38: Record(m.RunState, state=STATE, reason=REASON),
    39: Record(m.StatusReply, payload=FRAME),
    40: Record(m.Rejoin, reason=REASON),
    41: Record(m.Enrolled, run=NAME),
    42: Record(m.Done, text=REASON),
    43: Record(m.Reach, address=ADDRESS),
    44: Record(m.Expect, peers=Many(Group(PEER, ADDRESS), 256)),
    45: Record(m.Fetch, term=UINT, donors=Many(Group(PEER, ADDRESS), 16)),
    46: Record(m.Donate, term=UINT, step=APPLIED, to=Many(PEER, 64)),
    47: Record(m.Drifted, term=UINT, generation=UINT, step=UINT),
    # worker <-> worker
    50: Record(m.Data, round=ROUND, channel=CHANNEL, place=PLACE, skip=FLAG, payload=FRAME),
    51: Record(m.Vote, round=ROUND, yes=FLAG, digest=DIGEST, reason=REASON),
    52: Record(m.Decision, round=ROUND, verdict=VERDICT, reason=REASON),
    53: Record(m.Progress, round=ROUND, progress=UINT),
    54: Record(m.Ping, nonce=UINT),
    55: Record(m.Pong, nonce=UINT),
    56: Record(m.StateRequest, term=UINT, generation=UINT, whole=FLAG, have=COUNT, digest=FLAG),
    68: Record(m.StateDigest, term=UINT, generation=UINT, digest=DIGEST),
    57: Record(
        m.StateBlock, _block_is_one_of, term=UINT, generation=UINT, index=COUNT, total=POSITIVE, payload=FRAME
    ),
    58: Record(m.MeanAsk, term=UINT, generation=UINT, step=UINT, index=COUNT, value=REAL),
    59: Record(m.MeanTell, term=UINT, generation=UINT, step=UINT, index=COUNT, value=REAL),
    # of a model in stages: worker -> coordinator, and coordinator -> worker
    77: Record(m.Kept, states=Many(HELD, m.MOST_KEPT), generation=UINT),
    78: Record(
        m.Spared, term=UINT, generation=UINT, applied=APPLIED, history=DIGEST, ledger=LEDGER, reason=REASON
    ),
    79: Record(
        m.Copy,
        _block_is_one_of,
        term=UINT,
        generation=UINT,
        held=HELD,
        index=COUNT,
        total=POSITIVE,
        payload=FRAME,
    ),
    89: Record(m.PieceAsk, _holds_blocks, term=UINT, generation=UINT, blocks=SPAN),
    # a member to a follower, and back
    70: Record(m.ImageAsk),
    71: Record(m.ImageTable, applied=APPLIED, history=DIGEST, payload=FRAME),
    72: Record(m.BlocksAsk, applied=APPLIED, blocks=Many(COUNT, 64)),
    73: Record(m.ImageBlock, _block_is_small, applied=APPLIED, index=COUNT, payload=FRAME),
    74: Record(m.UpdatesAsk, applied=APPLIED),
    75: Record(m.Update, step=UINT, latest=UINT, payload=FRAME),
    76: Record(m.NoImage, reason=REASON),
    # a worker that rests, and `gridtrain doctor`
    83: Record(m.Pausing, reason=REASON),
    84: Record(m.Checkup, peer=PEER, address=ADDRESS),
    85: Record(m.CheckupReply, probe=Many(Group(PEER, ADDRESS), 8), payload=FRAME),
    86: Record(m.BurstAsk, nonce=UINT),
    # of a member that leaves, to another one
    63: Record(
        m.HandOver,
        _piece_is_one_of,
        term=UINT,
        generation=UINT,
        applied=APPLIED,
        history=DIGEST,
        index=COUNT,
        total=POSITIVE,
        payload=FRAME,
    ),
    64: Record(m.TakenOver, term=UINT, generation=UINT, taken=FLAG, reason=REASON),
    65: Record(m.Burst, _burst_is_one_of, nonce=UINT, index=COUNT, payload=FRAME),
    66: Record(m.Landed, nonce=UINT, proof=PROOF),
    # for people
    80: Record(m.About, texts=Many(Group(NAME, TEXT), 16)),
    # of what volunteers run, from the coordinator
    87: Record(m.BundleAsk, digest=DIGEST, index=COUNT),
    88: Record(m.BundleBlock, _bundle_is_one_of, digest=DIGEST, index=COUNT, total=POSITIVE, payload=FRAME),
    # to and from a relay
    60: Record(m.Relay, to=PEER, payload=FRAME),
    61: Record(m.Relayed, origin=PEER, payload=FRAME),
    62: Record(m.RelayLost, to=PEER, reason=REASON),
}
