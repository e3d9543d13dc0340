"""What travels: one frozen dataclass for each message, and nothing else.

Decides nothing and opens no payload.  How a message becomes bytes, and every
bound on its fields, is `gridtrain.wire.codec`; what it means is PROTOCOL.md.

    worker -> coordinator   Join Setup Links Rates Beat Report Ready Stalled Accuse Broken NoRoute Leave
                            Finished StatusRequest
    coordinator -> worker   Welcome Refused Rejoin Reach Admitted Expect BeatReply Freeze Roster View Start
                            RunState StatusReply
    worker <-> worker       Data Vote Decision Progress MeanAsk MeanTell Ping Pong StateRequest StateBlock
                            HandOver TakenOver
    guest -> coordinator    Enrol, answered by Enrolled or Refused
    operator -> coordinator Invite Expel Pardon, answered by Done or Refused
    to and from a relay     Relay Relayed RelayLost
    both                    Hello (the first message on every connection: who speaks), Credit
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

PROTOCOL_VERSION = 1

PeerId = bytes
"""A peer's public key, 32 bytes.  Never an address, never a routing id."""


class Phase(IntEnum):
    """Where in its collective a payload belongs (`Place.phase`)."""

    REDUCE = 0  # ring, reduce-scatter half
    GATHER = 1  # ring, all-gather half
    SPREAD = 2  # all-gather of sparse payloads, segment = origin's rank
    FOLD = 3  # butterfly, ranks >= Q hand theirs down
    SWAP = 4  # butterfly, hop h pairs rank with rank XOR 2**h
    UNFOLD = 5  # butterfly, the result goes back up
    RESUME = 6  # ring, to the left: what a retry need not send again
    RAISE = 7  # tree and star, towards rank 0
    LOWER = 8  # tree and star, the result from rank 0


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
    """Which collective within a round: a bucket, later a micro-batch."""

    group: int = 0
    kind: int = 0
    index: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a payload belongs inside one collective."""

    phase: Phase
    hop: int = 0
    segment: int = 0
    slice: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """Data positions start <= p < stop of the run (see `protocol.ledger`)."""

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

    `share` is the batch size in samples; `joining` members must first receive the state.

    `address` is how the worker that this line is sent to reaches the member: "tcp://host:port": dial it;
    "relay:" and a key in hexadecimal: through that member (or the coordinator), end-to-end sealed;
    empty: it will dial us.  The coordinator decides that for each pair (`protocol.routes`).
    """

    peer: PeerId
    name: str
    address: str
    share: int
    joining: bool


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


# -- operator -> coordinator -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Invite:
    """Make a new invitation valid.  `key` is its public key: the token itself never travels."""

    key: PeerId
    uses: int
    expires_s: float


@dataclass(frozen=True, slots=True)
class Expel:
    """Remove a worker for good: its key is refused until it is invited anew, or at all (`ban`)."""

    peer: PeerId
    ban: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Pardon:
    """Lift the ban: the key may be invited again."""

    peer: PeerId


# -- worker -> coordinator ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Join:
    """I want to take part in `run`; peers may reach me at `address`.

    `relay`: I am willing to pass on what other members send one another.
    """

    run: str
    name: str
    address: str
    relay: bool = True


@dataclass(frozen=True, slots=True)
class Held:
    """The state that a worker has read from its checkpoint: after which step, with which history."""

    applied: int
    history: bytes
    ledger: LedgerState


@dataclass(frozen=True, slots=True)
class Setup:
    """What this worker will train.  `facts` must be equal on all workers of a run.

    `facts` are short texts for people and for comparison, such as
    ("model", "120576 parameters, digest 3fa9..."), ("exchange", "GTopK(density=0.05)").
    `held`: from a checkpoint; the run goes on from it if nobody holds a later state.  `follows`: it can take
    over a state while the others train on, and apply their updates after that.
    """

    facts: tuple[tuple[str, str], ...]
    ledger: LedgerSpec
    batch_size: int
    global_batch_size: int | None
    held: Held | None = None
    follows: bool = False


@dataclass(frozen=True, slots=True)
class Links:
    """Round-trip times in seconds from this worker to the peers that it was told to probe."""

    rtt_s: tuple[tuple[PeerId, float], ...]


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast bulk went from this worker to a peer, and from that peer to it, in bytes per second; 0: not
    measured.  Of a link's two ends the more modest one is believed (`protocol.topology`)."""

    rates_Bps: tuple[tuple[PeerId, float, float], ...]


@dataclass(frozen=True, slots=True)
class Beat:
    """Sign of life, twice a second, with what `gridtrain status` shows.

    `progress` grows whenever the trainer or an exchange moved; a hung trainer's does not.
    `figures` are numbers for people: loss, bytes, seconds computing, ...
    """

    sequence: int
    step: int
    progress: int
    figures: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Answer to FREEZE: where I stand (commit rule 5).

    `applied` is the last step applied (-1: none), `history` the chained digest of all applied
    updates, `prepared`/`digest`/`skip` the round that this worker voted YES for, if any.
    A worker that has no state yet says `synced=False`.
    """

    term: int
    generation: int
    synced: bool
    applied: int
    history: bytes
    ledger: LedgerState
    prepared: RoundId | None
    digest: bytes
    skip: bool


@dataclass(frozen=True, slots=True)
class Seated:
    """Follows every Welcome: the generation I am in, its members and shares in rank order.

    A coordinator that was started from a backup may not know it (commit rule 11).
    """

    term: int
    generation: int
    members: tuple[tuple[PeerId, int], ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """I executed the VIEW's verdict, have the state and my edges (commit rule 8)."""

    term: int
    generation: int
    history: bytes


@dataclass(frozen=True, slots=True)
class Stalled:
    """A round does not come to an end; these peers are waited for, are not connected, or disagree.

    `patience_s`: for how long the suspects showed no sign of life; 0: that is not what they are suspected of.
    """

    round: RoundId
    suspects: tuple[PeerId, ...]
    patience_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Accuse:
    """`peer` broke the protocol towards this worker, which has dropped it."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Broken:
    """The connection to this member of the running generation broke, for a reason that is not mine."""

    term: int
    generation: int
    peer: PeerId


@dataclass(frozen=True, slots=True)
class NoRoute:
    """These members of the generation cannot be reached at the addresses that the Roster gave."""

    term: int
    generation: int
    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Digest of this member's parameters, optimizer and settings after step `step`."""

    term: int
    generation: int
    step: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Caught:
    """This worker, which is no member, holds the state after step `applied` and follows the updates."""

    applied: int
    history: bytes


@dataclass(frozen=True, slots=True)
class Leave:
    """Departure, not silence."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The ledger ended the run on this worker."""

    applied: int
    history: bytes


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """From `gridtrain status`: no member, changes nothing."""


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
class Done:
    """Answer to an operator's order, in words."""

    text: str


@dataclass(frozen=True, slots=True)
class Reach:
    """The coordinator called back: `address` reaches this worker; empty: nobody from outside can."""

    address: str


@dataclass(frozen=True, slots=True)
class Drifted:
    """This member's fingerprint of `step` is not that of most: it has to get the state anew."""

    term: int
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Take over the state of these members while they train on, and follow; then say `Caught`."""

    term: int
    donors: tuple[tuple[PeerId, str], ...]


@dataclass(frozen=True, slots=True)
class Donate:
    """Take an image of the state after step `step` or the first one later; `to`: who may have it, and the
    updates since.  The whole list: who is not in it gets no more."""

    term: int
    step: int
    to: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Expect:
    """Workers that will measure their links to you.  Connect to those with an address (see `Member`)."""

    peers: tuple[tuple[PeerId, str], ...]


@dataclass(frozen=True, slots=True)
class Admitted:
    """The set-up fits; measure the round trip to `probe` and answer with Links.  Addresses as in `Member`."""

    probe: tuple[tuple[PeerId, str], ...]


@dataclass(frozen=True, slots=True)
class BeatReply:
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
    without: tuple[PeerId, ...] = ()


@dataclass(frozen=True, slots=True)
class Roster:
    """One page of the members of a coming VIEW, in rank order; pages precede the View."""

    term: int
    generation: int
    page: int
    pages: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class View:
    """The next generation, and the verdict on the step that was open (commit rules 6 and 7).

    `decided` is the round the verdict is about (None: no round was open).  `applied`, `history`
    and `ledger` are those after the verdict: what every member must hold before READY.
    """

    term: int
    generation: int
    world_size: int
    verdict: Verdict
    decided: RoundId | None
    applied: int
    history: bytes
    ledger: LedgerState
    reason: str


@dataclass(frozen=True, slots=True)
class Start:
    term: int
    generation: int


@dataclass(frozen=True, slots=True)
class RunState:
    """The run is `waiting`, `training`, `paused` or `finished`, and why."""

    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class Rejoin:
    """You are no member (any more): introduce yourself again with Join."""

    reason: str


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
    place: Place
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
class Progress:
    """I am alive and working on this round; extends the root's deadline."""

    round: RoundId
    progress: int


@dataclass(frozen=True, slots=True)
class MeanAsk:
    """To the root: my number for the `index`-th average of this step; for people, not for the model."""

    term: int
    generation: int
    step: int
    index: int
    value: float


@dataclass(frozen=True, slots=True)
class MeanTell:
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


BURSTS, BURST_BYTES = 16, 16 * 1024
"""Messages of one burst, and bytes of each: 256 KiB."""


@dataclass(frozen=True, slots=True)
class Burst:
    """Message `index` of a burst that measures a link; only the last 8 bytes of the last one matter."""

    nonce: int
    index: int
    payload: Any


@dataclass(frozen=True, slots=True)
class Landed:
    """The last message of this burst is here: `proof` is how it ends."""

    nonce: int
    proof: bytes


@dataclass(frozen=True, slots=True)
class StateRequest:
    """A joining member asks its donor for the state; `whole` False: only what followers do not have."""

    term: int
    generation: int
    whole: bool = True


@dataclass(frozen=True, slots=True)
class StateBlock:
    """Block `index` of `total` of the donor's state, at most 1 MiB."""

    term: int
    generation: int
    index: int
    total: int
    payload: Any


@dataclass(frozen=True, slots=True)
class ImageAsk:
    """A follower asks a donor for the table of its image."""


@dataclass(frozen=True, slots=True)
class ImageTable:
    """The donor's image is of the state after step `applied`.

    `payload`: u64 bytes of the common part, u64 bytes of the donor's own part, then for each block of at most
    1 MiB of the one and of the other 16 bytes of blake2b.
    """

    applied: int
    history: bytes
    payload: Any


@dataclass(frozen=True, slots=True)
class BlocksAsk:
    """The follower wants these blocks of the image of `applied`."""

    applied: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ImageBlock:
    applied: int
    index: int
    payload: Any


@dataclass(frozen=True, slots=True)
class UpdatesAsk:
    """The follower wants the updates of all steps after `applied`, and each one to come."""

    applied: int


@dataclass(frozen=True, slots=True)
class Update:
    """What step `step` did; `latest`: the donor's last one.  `payload`: see `runtime.updates`."""

    step: int
    latest: int
    payload: Any


@dataclass(frozen=True, slots=True)
class NoImage:
    """The donor cannot give what was asked for (any more)."""

    reason: str


@dataclass(frozen=True, slots=True)
class HandOver:
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
class TakenOver:
    """Answer to HandOver, once: all of it is there and fits, or is not wanted."""

    term: int
    generation: int
    taken: bool
    reason: str


# -- to and from a relay -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Relay:
    """Pass `payload` on to `to`.  It is sealed for `to`: the relay can neither read nor alter it."""

    to: PeerId
    payload: Any


@dataclass(frozen=True, slots=True)
class Relayed:
    """What `origin` gave to the relay that sends this."""

    origin: PeerId
    payload: Any


@dataclass(frozen=True, slots=True)
class RelayLost:
    """The relay could not pass something on to `to`."""

    to: PeerId
    reason: str


Message = (
    Hello
    | Credit
    | Enrol
    | Invite
    | Expel
    | Pardon
    | Join
    | Setup
    | Links
    | Rates
    | Beat
    | Report
    | Seated
    | Ready
    | Stalled
    | Accuse
    | Broken
    | NoRoute
    | Leave
    | Finished
    | StatusRequest
    | Welcome
    | Refused
    | Enrolled
    | Done
    | Reach
    | Expect
    | Admitted
    | BeatReply
    | Freeze
    | Roster
    | View
    | Start
    | RunState
    | Rejoin
    | StatusReply
    | Data
    | Vote
    | Decision
    | Progress
    | MeanAsk
    | MeanTell
    | Ping
    | Pong
    | Burst
    | Landed
    | StateRequest
    | StateBlock
    | ImageAsk
    | ImageTable
    | BlocksAsk
    | ImageBlock
    | UpdatesAsk
    | Update
    | NoImage
    | Fingerprint
    | Drifted
    | Caught
    | Fetch
    | Donate
    | HandOver
    | TakenOver
    | Relay
    | Relayed
    | RelayLost
)
