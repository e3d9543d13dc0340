"""What travels: one frozen dataclass for each message, and nothing else.

Decides nothing and opens no payload.  How a message becomes bytes, and every
bound on its fields, is `gridtrain.wire.codec`; what it means is PROTOCOL.md.

    worker -> coordinator   Join About Setup Kept Links Rates Beat Report Ready Stalled Accuse Broken NoRoute
                            Leave Pausing Finished StatusRequest BundleAsk
    coordinator -> worker   Welcome Refused Rejoin Reach Admitted Expect BeatReply Freeze Roster View Spared
                            Start RunState StatusReply BundleBlock
    worker <-> worker       Data Vote Decision Progress MeanAsk MeanTell Ping Pong StateRequest StateBlock
                            Copy HandOver TakenOver
    guest -> coordinator    Enrol, answered by Enrolled or Refused; Checkup, by CheckupReply and Reach
    operator -> coordinator Invite Expel Pardon, answered by Done or Refused
    to and from a relay     Relay Relayed RelayLost
    both                    Hello (the first message on every connection: who speaks), Credit
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

PROTOCOL_VERSION = 2

MAX_STAGES = 1024
"""That a model may be cut into."""

MAX_STAGE_CHECKPOINTS = 16
"""Checkpoints of stages that one worker tells of."""

MAX_LAYERS = 256
"""Of a model in stages, whose costs fit into one Setup: above, it is not cut anew."""

MAX_CHECKPOINT_SOURCES = 64
"""Checkpoints that one stage is put together from."""

PeerId = bytes
"""A peer's public key, 32 bytes.  Never an address, never a routing id."""

Facts = tuple[tuple[str, str], ...]
"""Short texts by name, for people and for comparison; see `Setup`."""


RELAY_PREFIX = "relay:"
_KEY = re.compile(r"[0-9a-f]{64}")


def relay_of(way: str) -> PeerId | None:
    """The key of the relay in a member's address; None: it is a direct way."""
    key = way.removeprefix(RELAY_PREFIX)
    return bytes.fromhex(key) if key != way and _KEY.fullmatch(key) else None


class CollectivePhase(IntEnum):
    """Where in its collective a payload belongs (`Place.phase`)."""

    REDUCE = 0  # ring, reduce-scatter half
    GATHER = 1  # ring, all-gather half
    ALL_GATHER = 2  # all-gather of sparse payloads, segment = origin's rank
    FOLD = 3  # butterfly, ranks >= Q hand theirs down
    SWAP = 4  # butterfly, hop h pairs rank with rank XOR 2**h
    UNFOLD = 5  # butterfly, the result goes back up
    RESUME = 6  # ring, to the left: what a retry need not send again
    TO_ROOT = 7  # tree and star, towards rank 0
    FROM_ROOT = 8  # tree and star, the result from rank 0
    ACTIVATION = 9  # hand-off, from a stage to its neighbour


class Verdict(IntEnum):
    ABORT = 0
    COMMIT = 1


@dataclass(frozen=True, slots=True, order=True)
class RoundId:
    """One attempt at one step's exchange, in one generation of one term."""

    term: int
    generation: int
    step: int
    attempt: int


@dataclass(frozen=True, slots=True, order=True)
class Channel:
    """Which collective within a round: a bucket, a micro-batch of a pipeline (`protocol.handoff`)."""

    group: int = 0
    kind: int = 0
    index: int = 0


@dataclass(frozen=True, slots=True)
class PayloadSlot:
    """Where a payload belongs inside one collective."""

    phase: CollectivePhase
    hop: int = 0
    segment: int = 0
    slice: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """Data positions start <= p < stop of the run (see `protocol.ledger`); or blocks of a model."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class LedgerSpec:
    """What fixes the order of the samples: replicated, constant over the run.

    Exactly one of `epochs` and `steps` is not None; it ends the run.
    """

    size: int
    seed: int
    epochs: int | None = None
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class LedgerState:
    """How far the run has come in its data: replicated, changes only at a commit or by a VIEW.

    Attributes:
        step: the next step to commit.
        cursor: the first position not yet handed out.
        requeued: positions handed out to members that were lost; given out first.
        consumed: samples of committed steps, counting skipped ones.
        skipped: samples of committed steps whose update was skipped.
        holders: who holds which positions of step `step`, when a VIEW fixed it; None: by shares.
    """

    step: int = 0
    cursor: int = 0
    requeued: tuple[Span, ...] = ()
    consumed: int = 0
    skipped: int = 0
    holders: tuple[tuple[PeerId, tuple[Span, ...]], ...] | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """One line of a generation's roster; its index in the roster is its rank.

    `share` is the batch size in samples; `joining` members must first receive the state, from the member
    of rank `donor` (-1: the lowest one that holds it).  `digest`: `Held.digest` of the checkpoint that
    the donor gives, as the coordinator knows it; empty: not known.

    `address` is how the worker that this line is sent to reaches the member: "tcp://host:port": dial it;
    "relay:" and a key in hexadecimal: through that member (or the coordinator), end-to-end sealed;
    empty: it will dial us.  The coordinator decides that for each pair (`protocol.routes`).

    `pieces`: of a model in stages that was cut anew: checkpoints from which this member puts its stage
    together, by the blocks in each and the rank that has it (`protocol.recutting`).  `piece_digests`:
    `Held.digest` of each, as the coordinator knows it; empty: not known, as it is not on a disk yet.
    """

    peer: PeerId
    name: str
    address: str
    share: int
    joining: bool
    donor: int = -1
    pieces: tuple[tuple[Span, int], ...] = ()
    digest: bytes = b""
    piece_digests: tuple[bytes, ...] = ()


# -- both directions ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """First message on every connection: who dials, and which protocol is spoken."""

    peer: PeerId
    version: int
    software: str


@dataclass(frozen=True, slots=True)
class Credit:
    """So many bytes of bulk messages from you are dealt with, counted since the connection came up.

    A sender never has more than `transport.credits.WINDOW_BYTES` of them under way.
    """

    total_bytes: int


# -- guest -> coordinator ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Enrol:
    """Whoever holds an invitation asks that `peer`, its own public key, may come in from now on."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class DiagnosticRequest:
    """From `gridtrain doctor`, no member: call `peer` back at `address` (empty: do not), say how the run
    stands, and let some members expect `peer`.  CheckupReply answers, and Reach where there is an address."""

    peer: PeerId
    address: str


# -- operator -> coordinator -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Invite:
    """Make a new invitation valid.  `key` is its public key: the token itself never travels."""

    key: PeerId
    uses: int
    expires_s: float


@dataclass(frozen=True, slots=True)
class RemoveWorker:
    """Remove a worker for good: its key is refused until it is invited anew, or at all (`ban`)."""

    peer: PeerId
    ban: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Unban:
    """Lift the ban: the key may be invited again."""

    peer: PeerId


# -- worker -> coordinator ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Join:
    """I want to take part in `run`; peers may reach me at `address`.

    `relay`: I am willing to pass on what other members send one another.  `again`: this process has been
    welcomed before; `generation`: in which it is, 0: in none.  A process that was started anew with an old
    key knows nothing of what is known of that key.
    """

    run: str
    name: str
    address: str
    can_relay: bool = True
    is_rejoin: bool = False
    generation: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """The state of a checkpoint: after which step, with which history; of which blocks of the model.

    A model in one piece is one block; so is a stage where a run does not say what its blocks are.
    `digest`: of what is in it (`optim.state_sync.content_digest`); empty: not known.
    """

    applied: int
    history: bytes
    ledger: LedgerState
    layers: Span = Span(0, 1)
    digest: bytes = b""

    def matches(self, blocks: Span, applied: int, history: bytes) -> bool:
        """The state of these blocks, after this step of this history; its digest may not be known yet."""
        return (self.layers, self.applied, self.history) == (blocks, applied, history)


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """What one block of a model in stages costs; see `protocol.stage_costs.Layer`, where the units stand."""

    parameter_bytes: int
    trainable_bytes: int
    output_bytes: int = 0
    gradient_bytes: int = 0
    kept_bytes: int = 0
    work_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    overhead_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StagedModel:
    """How a model is cut into stages, and what the coordinator needs to cut it otherwise.

    `cuts`: (stages + 1,) where stages begin, and the number of blocks; `blocks`: (): it stays as it is cut.
    The others are those of `protocol.stage_costs.Running`; `fill_drain` False: 1F1B.  `fixed`: people have
    chosen the cuts; where there are workers for all stages these are taken, whatever their cards are like.
    """

    cuts: tuple[int, ...]
    blocks: tuple[LayerCosts, ...] = ()
    samples: int = 1
    micro_batches: int = 1
    copies: float = 3.0
    input_bytes: int = 0
    rematerialise: bool = True
    fill_drain: bool = False
    ahead: float = 0.0
    fixed: bool = False


@dataclass(frozen=True, slots=True)
class Setup:
    """What this worker will train.  `facts` must be equal on all workers of a run.

    `facts` are short texts for people and for comparison, such as
    ("model", "120576 parameters, digest 3fa9..."), ("exchange", "GTopK(density=0.05)").
    `held`: from a checkpoint; the run goes on from it if nobody holds a later state.  `follows`: it can take
    over a state while the others train on, and apply their updates after that.  `stages`: how many workers
    hold the model together, each a part (`protocol.seats`); 1: every worker holds all of it.  `kept`: of a
    model in stages, what this worker can load when it knows its stage, or give to others.  `model`: of such
    a model; None: its stages are its blocks.  `memory_bytes`: what training may fill here, `flops`: how
    fast it computes (only compared with the others'); 0: nobody says.  `begins`: digest of all that a
    joining member would be sent, as the script built it here; empty: it is not that any more, or nobody says.
    """

    facts: Facts
    ledger: LedgerSpec
    batch_size: int
    global_batch_size: int | None
    checkpoint: CheckpointInfo | None = None
    can_catch_up: bool = False
    stages: int = 1
    stage_checkpoints: tuple[CheckpointInfo, ...] = ()
    model: StagedModel | None = None
    memory_bytes: int = 0
    flops: float = 0.0
    initial_state_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class StageCheckpointList:
    """The checkpoints of stages on this worker's disk, all of them: replaces what `Setup.kept` said.

    `generation`: of the last View that it had heard by then.
    """

    checkpoints: tuple[CheckpointInfo, ...]
    generation: int = 0


@dataclass(frozen=True, slots=True)
class LinkLatencies:
    """Round-trip times in seconds from this worker to the peers that it was told to probe."""

    rtt_s: tuple[tuple[PeerId, float], ...]


@dataclass(frozen=True, slots=True)
class LinkRates:
    """How fast bulk went from this worker to a peer, and from that peer to it, in bytes per second; 0: not
    measured.  Of a link's two ends the more modest one is believed (`protocol.topology`)."""

    rates_Bps: tuple[tuple[PeerId, float, float], ...]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What this worker is, for people: its device, versions.  Nothing is decided by it."""

    texts: tuple[tuple[str, str], ...]


STATE_LEFT = "state_left_bytes"
"""The metric of a heartbeat that says how many bytes of its state a worker still lacks."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sign of life, twice a second, with what `gridtrain status` shows.

    `progress` grows whenever the trainer or an exchange moved; a hung trainer's does not.
    `figures` are numbers for people: loss, bytes, seconds computing, ...
    """

    sequence: int
    step: int
    progress: int
    metrics: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class FreezeReport:
    """Answer to FREEZE: where I stand (commit rule 5).

    `applied` is the last step applied (-1: none), `history` the chained digest of all applied
    updates, `prepared`/`digest`/`skip` the round that this worker voted YES for, if any.
    A worker that has no state yet says `synced=False`.  `blocks`: of the model, that this state is of.
    """

    term: int
    generation: int
    is_synced: bool
    applied: int
    history: bytes
    ledger: LedgerState
    prepared: RoundId | None
    digest: bytes
    skip: bool
    layers: Span = Span(0, 1)


@dataclass(frozen=True, slots=True)
class CurrentGeneration:
    """Follows every Welcome: the generation I am in, its members and shares in rank order, and its `cuts`.

    A coordinator that was started from a backup may not know it (commit rule 11).
    """

    term: int
    generation: int
    members: tuple[tuple[PeerId, int], ...]
    stage_bounds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ready:
    """I executed the VIEW's verdict, have the state and my edges (commit rule 8)."""

    term: int
    generation: int
    history: bytes


@dataclass(frozen=True, slots=True)
class RoundStalled:
    """A round does not come to an end; these peers are waited for, are not connected, or disagree.

    `patience_s`: for how long the suspects showed no sign of life; 0: that is not what they are suspected of.
    """

    round: RoundId
    suspects: tuple[PeerId, ...]
    silent_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class ViolationReport:
    """`peer` broke the protocol towards this worker, which has dropped it."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The connection to this member of the running generation broke, for a reason that is not mine."""

    term: int
    generation: int
    peer: PeerId


@dataclass(frozen=True, slots=True)
class PeersUnreachable:
    """These members of the generation cannot be reached at the addresses that the Roster gave."""

    term: int
    generation: int
    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class ReplicaDigest:
    """Digest of this member's parameters, optimizer and settings after step `step`."""

    term: int
    generation: int
    step: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class CatchUpReport:
    """This worker, which is no member, holds the state after step `applied` and follows the updates."""

    applied: int
    history: bytes


@dataclass(frozen=True, slots=True)
class Leave:
    """Departure, not silence."""

    reason: str


@dataclass(frozen=True, slots=True)
class TemporaryLeave:
    """As Leave; its owner wants the machine for something else, and the worker means to come back."""

    reason: str


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The ledger ended the run on this worker."""

    applied: int
    history: bytes


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """From `gridtrain status`: no member, changes nothing."""


@dataclass(frozen=True, slots=True)
class BundleRequest:
    """One block of the run's bundle; `digest` is the SHA-256 of the whole, as the status told it."""

    digest: bytes
    index: int


# -- coordinator -> worker ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    term: int
    run: str
    software: str


@dataclass(frozen=True, slots=True)
class Refused:
    code: str
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Enrolled:
    """Answer to Enrol: the key may now connect, and join `run`."""

    run: str


@dataclass(frozen=True, slots=True)
class OperatorReply:
    """Answer to an operator's order, in words."""

    text: str


@dataclass(frozen=True, slots=True)
class Reachability:
    """The coordinator called back: `address` reaches this worker; empty: nobody from outside can."""

    address: str


@dataclass(frozen=True, slots=True)
class ReplicaDiverged:
    """This member's fingerprint of `step` is not that of most: it has to get the state anew."""

    term: int
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class CatchUpFrom:
    """Take over the state of these members while they train on, and follow; then say `Caught`."""

    term: int
    sources: tuple[tuple[PeerId, str], ...]


@dataclass(frozen=True, slots=True)
class ServeCatchUp:
    """Take an image of the state after step `step` or the first one later; `to`: who may have it, and the
    updates since.  The whole list: who is not in it gets no more."""

    term: int
    step: int
    receivers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class ExpectProbes:
    """Workers that will measure their links to you.  Connect to those with an address (see `Member`)."""

    peers: tuple[tuple[PeerId, str], ...]


@dataclass(frozen=True, slots=True)
class Admitted:
    """The set-up fits; measure the round trip to `probe` and answer with Links.  Addresses as in `Member`."""

    probe_targets: tuple[tuple[PeerId, str], ...]


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    term: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Freeze:
    """From now on neither vote nor apply in this generation; report (commit rule 5).

    `without`: members that left or were put out; they are to be cut off now, not only by the next VIEW.
    """

    term: int
    generation: int
    reason: str
    removed: tuple[PeerId, ...] = ()


@dataclass(frozen=True, slots=True)
class MemberListPage:
    """One page of the members of a coming VIEW, in rank order; pages precede the View."""

    term: int
    generation: int
    page: int
    pages: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class MembershipView:
    """The next generation, and the verdict on the step that was open (commit rules 6 and 7).

    `decided` is the round the verdict is about (None: no round was open).  `applied`, `history`
    and `ledger` are those after the verdict: what every member must hold before READY.  `exchange`: where
    the run's script leaves it to the coordinator, what it has chosen, as `Exchange.describe` says it; empty:
    nothing yet, and no round begins.  `cuts`: of a model in stages, where they begin in this generation, and
    the number of its blocks.
    """

    term: int
    generation: int
    world_size: int
    verdict: Verdict
    decided_round: RoundId | None
    applied: int
    history: bytes
    ledger: LedgerState
    reason: str
    exchange: str = ""
    stage_bounds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StandbyNotice:
    """You are admitted and in no seat of this generation: the model has stages for so many only.

    `applied`, `history` and `ledger` are the View's: who was a member before executes the same verdict.
    """

    term: int
    generation: int
    applied: int
    history: bytes
    ledger: LedgerState
    reason: str


@dataclass(frozen=True, slots=True)
class StartGeneration:
    term: int
    generation: int


@dataclass(frozen=True, slots=True)
class RunStateUpdate:
    """The run is `waiting`, `training`, `paused` or `finished`, and why."""

    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class Rejoin:
    """You are no member (any more): introduce yourself again with Join."""

    reason: str


@dataclass(frozen=True, slots=True)
class DiagnosticReply:
    """`probe`: members that expect the asker's key, and where; `payload`: as of StatusReply."""

    probe_targets: tuple[tuple[PeerId, str], ...]
    payload: Any


@dataclass(frozen=True, slots=True)
class BundleBlock:
    """Answer to BundleAsk: block `index` of `total`, 1 MiB but for the last one."""

    digest: bytes
    index: int
    total: int
    payload: Any


@dataclass(frozen=True, slots=True)
class StatusReply:
    """`payload` is one frame of UTF-8 JSON."""

    payload: Any


# -- worker <-> worker -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Data:
    """A piece of an exchange.  `payload` is a token: one frame on the wire, anything in a simulator.

    `skip` is ORed along the exchange: somebody's gradient was not finite.
    """

    round: RoundId
    channel: Channel
    slot: PayloadSlot
    skip: bool
    payload: Any


@dataclass(frozen=True, slots=True)
class Vote:
    round: RoundId
    yes: bool
    digest: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The root's, once for each attempt (commit rule 3)."""

    round: RoundId
    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """I am alive and working on this round; extends the root's deadline."""

    round: RoundId
    progress: int


@dataclass(frozen=True, slots=True)
class MeanRequest:
    """To the root: my number for the `index`-th average of this step; for people, not for the model."""

    term: int
    generation: int
    step: int
    index: int
    value: float


@dataclass(frozen=True, slots=True)
class MeanReply:
    """From the root: the average over the generation."""

    term: int
    generation: int
    step: int
    index: int
    value: float


@dataclass(frozen=True, slots=True)
class Ping:
    nonce: int


@dataclass(frozen=True, slots=True)
class Pong:
    nonce: int


BURST_MESSAGES, BURST_MESSAGE_BYTES = 16, 16 * 1024
"""Messages of one burst, and bytes of each: 256 KiB."""


@dataclass(frozen=True, slots=True)
class Burst:
    """Message `index` of a burst that measures a link; only the last 8 bytes of the last one matter."""

    nonce: int
    index: int
    payload: Any


@dataclass(frozen=True, slots=True)
class BurstReceived:
    """The last message of this burst is here: `proof` is how it ends."""

    nonce: int
    proof: bytes


@dataclass(frozen=True, slots=True)
class BurstRequest:
    """Send me a burst with this nonce: `gridtrain doctor` measures the way back."""

    nonce: int


@dataclass(frozen=True, slots=True)
class StateRequest:
    """A joining member asks for the state; `whole` False: only what followers do not have.

    `have`: so many of its blocks are here.  `digest`: only that is wanted, as another member gives the rest.
    """

    term: int
    generation: int
    is_whole: bool = True
    blocks_received: int = 0
    digest_only: bool = False


@dataclass(frozen=True, slots=True)
class StateDigest:
    """A donor's answer to StateRequest before any block: blake2b-256 over the payloads of all blocks."""

    term: int
    generation: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class StateBlock:
    """Block `index` of `total` of the donor's state, at most 1 MiB."""

    term: int
    generation: int
    index: int
    total: int
    payload: Any


@dataclass(frozen=True, slots=True)
class CheckpointRequest:
    """Send me, with Copy, your checkpoint of these blocks after the View's step.

    By the Roster I put my stage together from it.
    """

    term: int
    generation: int
    layers: Span


@dataclass(frozen=True, slots=True)
class CheckpointBlock:
    """Part `index` of `total` of a checkpoint on the sender's disk, at most 1 MiB.

    The receiver, which holds the next stage (after the last one the first), or has asked for it with
    PieceAsk, keeps it on its disk as well.
    """

    term: int
    generation: int
    checkpoint: CheckpointInfo
    index: int
    total: int
    payload: Any


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """A follower asks a donor for the table of its image."""


@dataclass(frozen=True, slots=True)
class SnapshotDigests:
    """The donor's image is of the state after step `applied`.

    `payload`: u64 bytes of the common part, u64 bytes of the donor's own part, then for each block of at most
    1 MiB of the one and of the other 16 bytes of blake2b.
    """

    applied: int
    history: bytes
    payload: Any


@dataclass(frozen=True, slots=True)
class SnapshotBlocksRequest:
    """The follower wants these blocks of the image of `applied`."""

    applied: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SnapshotBlock:
    applied: int
    index: int
    payload: Any


@dataclass(frozen=True, slots=True)
class UpdatesRequest:
    """The follower wants the updates of all steps after `applied`, and each one to come."""

    applied: int


@dataclass(frozen=True, slots=True)
class UpdateLogEntry:
    """What step `step` did; `latest`: the donor's last one.  `payload`: see `runtime.updates`."""

    step: int
    latest_step: int
    payload: Any


@dataclass(frozen=True, slots=True)
class SnapshotUnavailable:
    """The donor cannot give what was asked for (any more)."""

    reason: str


@dataclass(frozen=True, slots=True)
class ResidualBlock:
    """Piece `index` of `total` of the residual of a member that leaves, as it stood after step `applied`.

    Together they are one sparse payload of fp32 values.  To a neighbour in the ring (`protocol.handover`).
    """

    term: int
    generation: int
    applied: int
    history: bytes
    index: int
    total: int
    payload: Any


@dataclass(frozen=True, slots=True)
class ResidualReply:
    """Answer to HandOver, once: all of it is there and fits, or is not wanted."""

    term: int
    generation: int
    is_accepted: bool
    reason: str


# -- to and from a relay -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RelayRequest:
    """Pass `payload` on to `to`.  It is sealed for `to`: the relay can neither read nor alter it."""

    to: PeerId
    payload: Any


@dataclass(frozen=True, slots=True)
class RelayedMessage:
    """What `origin` gave to the relay that sends this."""

    origin: PeerId
    payload: Any


@dataclass(frozen=True, slots=True)
class RelayFailed:
    """The relay could not pass something on to `to`."""

    to: PeerId
    reason: str


Message = (
    Hello
    | Credit
    | Enrol
    | Invite
    | RemoveWorker
    | Unban
    | Join
    | Setup
    | LinkLatencies
    | LinkRates
    | WorkerInfo
    | StageCheckpointList
    | Heartbeat
    | FreezeReport
    | CurrentGeneration
    | Ready
    | RoundStalled
    | ViolationReport
    | ConnectionLost
    | PeersUnreachable
    | Leave
    | TemporaryLeave
    | DiagnosticRequest
    | DiagnosticReply
    | BurstRequest
    | RunFinished
    | StatusRequest
    | BundleRequest
    | BundleBlock
    | Welcome
    | Refused
    | Enrolled
    | OperatorReply
    | Reachability
    | ExpectProbes
    | Admitted
    | HeartbeatReply
    | Freeze
    | MemberListPage
    | MembershipView
    | StandbyNotice
    | StartGeneration
    | RunStateUpdate
    | Rejoin
    | StatusReply
    | Data
    | Vote
    | Decision
    | RoundProgress
    | MeanRequest
    | MeanReply
    | Ping
    | Pong
    | Burst
    | BurstReceived
    | StateRequest
    | StateDigest
    | StateBlock
    | CheckpointRequest
    | CheckpointBlock
    | SnapshotRequest
    | SnapshotDigests
    | SnapshotBlocksRequest
    | SnapshotBlock
    | UpdatesRequest
    | UpdateLogEntry
    | SnapshotUnavailable
    | ReplicaDigest
    | ReplicaDiverged
    | CatchUpReport
    | CatchUpFrom
    | ServeCatchUp
    | ResidualBlock
    | ResidualReply
    | RelayRequest
    | RelayedMessage
    | RelayFailed
)
