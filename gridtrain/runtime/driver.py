"""The worker's only loop: carries effects of the member core to the transport, and events back.

Decides nothing about the protocol.  One thread (this one) owns the transport, the core and the
workspaces while a round is open; the trainer's thread hands in commands and waits for pictures.

    trainer thread          this thread                                    network
      enter, submit ---> commands --> MemberCore.handle --> effects --> Transport.send
      wait   <--- Picture (immutable) <----+     ^------- events <----- Transport.poll
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import SystemRandom
from typing import Any

from gridtrain.config import JoinConfig
from gridtrain.errors import (
    BudgetSpent,
    CoordinatorUnreachable,
    GridtrainError,
    JoinRefused,
    RemoteProtocolError,
    RunPaused,
    TransportError,
)
from gridtrain.protocol import member_io as io
from gridtrain.protocol import messages as m
from gridtrain.protocol.collective import Collective
from gridtrain.protocol.forming import STATE_LEFT
from gridtrain.protocol.member import MemberCore
from gridtrain.protocol.routes import relay_of
from gridtrain.runtime.acquaintances import Acquaintances
from gridtrain.runtime.buckets import BucketedWorkspace, by_channel
from gridtrain.runtime.buffers import ButterflyWorkspace, DenseWorkspace, GatherWorkspace, Workspace
from gridtrain.runtime.bursts import Bursts
from gridtrain.runtime.copies import Copies, CopyDisk
from gridtrain.runtime.donating import Donating, Parts
from gridtrain.runtime.following import Bar, Following, ImageWork, Work
from gridtrain.runtime.handover import Inheritance
from gridtrain.runtime.passing_on import PassingOutlet
from gridtrain.runtime.plan import RoundOutcome
from gridtrain.runtime.probe import Prober
from gridtrain.runtime.statefeed import MAX_STATE_BYTES, StateIntake, StateOutlet, state_digest
from gridtrain.runtime.updates import StepUpdate, vote_digest
from gridtrain.transport import buffering
from gridtrain.transport.base import Denied, PeerDown, PeerUp, Received, TransportEvent, Violation
from gridtrain.transport.credits import CreditTransport, needs_credit
from gridtrain.transport.limits import parse_rate
from gridtrain.wire.sparse import Sparse

log = logging.getLogger("gridtrain")

DENIED_S = 60.0
"""A member that is denied for that long on end gives up."""

CAUGHT_AGAIN_S = 1.0

CHORES_S = 0.005
"""While payloads come and go one after the other, everything that is not theirs waits for so long."""

FROM_PEERS = io.Fill | io.TakeBlock | io.TakeCopy | io.Feed | io.TakePiece
"""What a peer has sent: it answers for what is wrong with it."""

OF_PAYLOADS = io.Fill | io.Ship | io.Reached
"""What follows from a payload while a round goes its way; the trainer is told of it without a picture."""

OF_ROUNDS = (m.Data, m.Vote)
"""Messages that change nothing but the round they are of: a vote, until the last one is there."""

LOUD = ("drifted", "stalled", "offence", "no_route")
LEFT_BEHIND = (
    "this worker was away for so long that the others went on without it; it is back, and takes over "
    "the state of step %d"
)
UNREACHABLE = (
    "nobody from outside can reach this worker: a router or a firewall is in between; "
    "it dials the others itself, or is relayed, so it can train all the same"
)


SAID = {
    "coordinator_away": "the coordinator is away (%(reason)s); this worker tries to reach it again, and the "
    "training goes on until a member is missing",
    "named": "another worker of this run is called %(asked)s: this one is called %(name)s here",
    "namesake": "another worker that wanted this one's name has joined: it is called %(other)s, "
    "this one stays %(name)s",
}
"""Events in words; `named` and `namesake` where two workers want one name, to both of them."""

_NO_LEDGER = m.LedgerState()


@dataclass(frozen=True, slots=True)
class Picture:
    """What the trainer may know, replaced as a whole whenever something changed.

    Attributes:
        open_round: the round that the trainer may submit to now; None: wait.
        spans: this worker's positions in the open step; `total_samples`: everybody's.
        wanted_state: generation for which a joiner waits for our state (0: none), and whether for the whole.
        wanted_image: followers wait for a copy of our state after this step, or a later one.
        compares_next: after the open step all members compare their states.
        offered_work: this follower has an image to load, or updates to replay.
        shares: of the generation's members, in rank order.
        offered_state: the donor's state is complete and waits to be restored.
        inherited: residuals of members that have left wait to be added to this worker's.
        synced: this worker holds the state that `applied` and `history` name.
        touched: the model is not the one any more that the script made, or a checkpoint had.
        heir: this worker takes residuals over, or has acknowledged some that do not count yet.
        doomed: the round that the trainer has submitted to cannot be committed.
        reload: of a model in stages, this worker's checkpoint that is to be loaded.
        donor, due_digest: who gives this worker its state, and what it is known to be; empty: not known.
        wanted_kept: generation, and this worker's checkpoint that another member waits for.
        discard_after: checkpoints after this step are of no use any more.
        name: what the run calls this worker; "": it is in no generation yet.
        exchange: what the coordinator has chosen for this generation, if that is its to do.
        aside: the state in memory, which is to be written to the disk.
        cuts: of a model in stages, where the generation's stages begin, and the number of blocks.
        first_step: of this generation.
    """

    welcomed: bool = False
    stage: io.Stage = io.Stage.APART
    generation: int = 0
    rank: int = 0
    world_size: int = 0
    open_round: m.RoundId | None = None
    spans: tuple[m.Span, ...] = ()
    total_samples: int = 0
    shares: tuple[tuple[m.PeerId, int], ...] = ()
    applied: int = -1
    history: bytes = b""
    ledger: m.LedgerState = _NO_LEDGER
    finished: bool = False
    run_state: tuple[str, str] = ("", "")
    wanted_state: tuple[int, bool] = (0, False)
    offered_state: bool = False
    wanted_image: int | None = None
    offered_work: bool = False
    compares_next: bool = False
    inherited: bool = False
    synced: bool = False
    touched: bool = False
    heir: bool = True
    doomed: m.RoundId | None = None
    reload: io.Reload | None = None
    donor: m.PeerId | None = None
    due_digest: bytes = b""
    wanted_kept: tuple[int, m.Held] | None = None
    discard_after: int | None = None
    name: str = ""
    exchange: str = ""
    aside: m.Held | None = None
    cuts: tuple[int, ...] = ()
    first_step: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """One collective of a round, and its numbers."""

    collective: Collective
    workspace: Workspace


@dataclass(slots=True)
class OpenRound:
    """`workspaces`: those that were submitted, by channel; `whole`: those that are voted on, in order."""

    id: m.RoundId
    workspaces: dict[m.Channel, Workspace]
    whole: Sequence[Workspace | BucketedWorkspace] = ()
    settings: bytes = b""
    outcome: RoundOutcome | None = None
    seals: tuple[bytes, ...] = ()
    spoilt: bool = False  # a payload was refused: nothing more is computed, sent on or sealed
    why: str = ""  # it did not commit
    reached: dict[m.Channel, bool] = field(default_factory=dict)  # complete collectives, and who skips


@dataclass(slots=True)
class _Inbox:
    """Commands of the trainer's thread, guarded by the driver's condition."""

    events: deque[io.Event] = field(default_factory=deque)
    captured: tuple[int, Sequence[bytes | memoryview], bytes] | None = None
    kept: list[tuple[m.Held, int, Sequence[bytes | memoryview] | None]] = field(default_factory=list)


class Driver:
    """Runs a `MemberCore` over a `Transport` in a thread of its own.

    Args:
        transport: owned by this driver's thread from `start` on.
        config: addresses, names and deadlines.
        acquaintances: the transport's gate; this driver keeps it up to date.
    """

    def __init__(self, transport: CreditTransport, config: JoinConfig, acquaintances: Acquaintances) -> None:
        self._transport = transport
        self._config = config
        self._acquaintances = acquaintances
        self._coordinator = bytes.fromhex(config.coordinator_key)
        self._owed: dict[m.PeerId, int] = {}  # bytes read from a peer and not yet given back as credit
        self._core: MemberCore | None = None
        self._changed = threading.Condition()
        self._inbox = _Inbox()
        self._picture = Picture()
        self._error: BaseException | None = None
        self._stopping = False
        self._open: OpenRound | None = None
        self._may_hash = False  # a dense sum has slices to be hashed before the end
        self._awaited: Callable[[Picture], bool] | None = None  # the trainer sleeps until that is so
        self._stale = True  # the picture may have to change
        self._only_payloads = False  # all that came in this turn went into numbers and on to others, or left
        self._chores_s = -math.inf  # when they were done last
        self._ended: list[tuple[OpenRound, RoundOutcome]] = []
        self._mean: list[float | None] = []  # the answer that the trainer waits for
        self._prober = Prober()
        self._bursts = Bursts(SystemRandom())
        self._relayed: set[m.PeerId] = set()  # whom a burst would reach over a third one's line
        self._measured: io.Probed | None = None  # round trips, while bursts are under way
        self._intake = StateIntake()
        self._outlet = StateOutlet()
        self._passing = PassingOutlet(self._intake)
        rate_Bps = parse_rate(config.donate_limit) if config.donate_limit else None
        self._donating = Donating(rate_Bps, self._wake)
        self._following: Following | None = None
        self._bounds = (MAX_STATE_BYTES, 0)  # of the largest state, and elements of the flat gradient
        self._caught_again_s = -math.inf
        self._follow_moved: tuple[object, float] = (None, 0.0)
        self._bar = Bar()
        self._inheritance = Inheritance()
        self._handed: io.Handed | None = None
        self._reload: io.Reload | None = None
        self._aside: m.Held | None = None
        self._copies: Copies | None = None  # of checkpoints of stages
        self._kept_outlets: dict[m.Held, StateOutlet] = {}  # of checkpoints, for members of other stages
        self._asked_in = 0  # the generation of which all that is asked for in the outlets is
        self._discard_after: int | None = None
        self._latest: OpenRound | None = None  # that this worker has submitted to
        self._submitted = False  # since `begin_attempt`
        self._progress = 0
        self._inside = False  # the trainer waits in one of our calls
        self._busy = False  # it is in a long computation that it has announced
        self._moved_bytes = 0
        self._paused_since_s: float | None = None
        self._denied_since_s: float | None = None
        self._figures: dict[str, float] = {}
        self._pulse_s = 0.0
        self.wanted_elsewhere: Callable[[], bool] = lambda: False  # asked while a lost round is waited for
        self.spent: Callable[[], str] = lambda: (
            ""
        )  # asked each turn: why nothing more may be sent or received
        self._assigned: tuple[m.RoundId, tuple[m.Span, ...], int] | None = None
        self._thread = threading.Thread(target=self._main, name="gridtrain-io", daemon=True)

    # -- the trainer's thread --------------------------------------------------------------------

    def start(self) -> None:
        """Listen, dial the coordinator and wait for its welcome.

        Raises `CoordinatorUnreachable`, `JoinRefused`, `TransportError`.
        """
        config = self._config
        address = self._transport.listen(config.listen)
        join = m.Join(config.run, config.name, config.advertise or address, config.relay != "no")
        self._core = MemberCore(self._transport.me, self._coordinator, join, config.deadlines)
        self._transport.dial(self._coordinator, config.coordinator)
        self._thread.start()
        timeout_s = self._config.deadlines.connect_s
        if not self.wait(lambda p: p.welcomed, timeout_s):
            self.stop()
            raise CoordinatorUnreachable(
                f"no coordinator answered at {self._config.coordinator} within {timeout_s:g} s",
                remedy="check the address and the port, and that `gridtrain coordinator` is running there",
            )

    def wait(self, ready: Callable[[Picture], bool], timeout_s: float = math.inf) -> Picture | None:
        """Block until `ready(picture)`; None on time-out.  Raises what stopped the loop."""
        until_s = time.monotonic() + timeout_s
        with self._changed:
            self._inside = True
            self._progress += 1
            try:
                while not ready(self._picture):
                    if self._error is not None:
                        raise self._error
                    if self._stopping:
                        raise GridtrainError("this worker has left the run: its grid was closed")
                    left_s = until_s - time.monotonic()
                    if left_s <= 0:
                        return None
                    self._awaited = ready
                    self._changed.wait(min(left_s, 1.0))  # bounded, so that Ctrl-C is noticed
                return self._picture
            finally:
                self._inside, self._awaited = False, None
                self._progress += 1

    def look(self) -> Picture:
        with self._changed:
            if self._error is not None:
                raise self._error
            return self._picture

    @property
    def last(self) -> Picture:
        """As `look`, also when the loop has ended."""
        with self._changed:
            return self._picture

    def command(self, event: io.Event) -> None:
        with self._changed:
            self._inbox.events.append(event)
        self._wake()

    def _wake(self) -> None:
        """The picture has to change, or this thread has something to do; from any thread."""
        self._stale = True
        self._transport.wake()

    def _bring(self, event: io.Extend | io.Submit) -> None:
        """As `command`, with what changes no picture as long as the round goes its way."""
        with self._changed:
            self._inbox.events.append(event)
        self._transport.wake()

    def begin_round(self, round_id: m.RoundId, channel: m.Channel, workspace: Workspace, skip: bool) -> None:
        """Submit one bucket of this worker's part of a round; `run_round` brings the rest."""
        picture = self.look()
        if picture.open_round != round_id:
            return  # `run_round` will say that the round is over
        collective = workspace.collective(picture.rank, picture.world_size, skip)
        with self._changed:
            if self._open is None or self._open.id != round_id:
                self._open = OpenRound(round_id, {})
            self._open.workspaces[channel] = workspace
        self._bring(io.Submit(round_id, {channel: collective}, whole=False))

    def run_round(
        self,
        round_id: m.RoundId,
        workspaces: Sequence[Workspace | BucketedWorkspace],
        skip: bool,
        settings: bytes,
    ) -> RoundOutcome:
        """Submit this worker's part of a round, or what `begin_round` left, and wait for its outcome."""
        picture = self.look()
        if picture.generation != round_id.generation:
            return RoundOutcome(committed=False, skip=False)
        with self._changed:
            begun = self._open if self._open is not None and self._open.id == round_id else None
            channels = by_channel(workspaces)
            mine = begun or OpenRound(round_id, {}, spoilt=self._spoilt_before(channels.values()))
            rest = {c: w for c, w in channels.items() if c not in mine.workspaces}
        collectives = {
            channel: workspace.collective(picture.rank, picture.world_size, skip)
            for channel, workspace in rest.items()
        }
        with self._changed:
            mine.workspaces |= rest
            mine.whole, mine.settings = workspaces, settings
            self._open = self._latest = mine
            self._submitted = True
        self.command(io.Submit(round_id, collectives))
        if mine.spoilt:
            # The others go on from what they have, and cannot send what is missing here: all begin anew.
            self.command(io.Broke("what came in an earlier attempt was refused here"))
        return self.end_round(mine)

    def open_round(self, round_id: m.RoundId, parts: Mapping[m.Channel, Part], settings: bytes) -> OpenRound:
        """Open a round whose collectives are not all known yet; `extend` brings the others."""
        mine = OpenRound(round_id, {channel: part.workspace for channel, part in parts.items()})
        mine.settings = settings
        with self._changed:
            self._open = self._latest = mine
            self._submitted = True
        self.command(io.Submit(round_id, {channel: p.collective for channel, p in parts.items()}, more=True))
        return mine

    def extend(self, mine: OpenRound, parts: Mapping[m.Channel, Part]) -> None:
        """Further collectives of the round, not the last ones."""
        with self._changed:
            mine.workspaces |= {channel: part.workspace for channel, part in parts.items()}
        self._bring(io.Extend(mine.id, {channel: part.collective for channel, part in parts.items()}))

    def complete_round(self, mine: OpenRound, channel: m.Channel, part: Part) -> RoundOutcome:
        """The last collective: its workspace is sealed and voted on.  Waits for the outcome."""
        with self._changed:
            mine.workspaces[channel] = part.workspace
            mine.whole = (part.workspace,)
        self._bring(io.Extend(mine.id, {channel: part.collective}, more=False))
        return self.end_round(mine)

    def end_round(self, mine: OpenRound) -> RoundOutcome:
        """Wait for the outcome, whatever this worker's part in it was.

        Whoever is wanted elsewhere does not wait for a root that is gone, or for a coordinator that is, to be
        told of a round that it has voted NO on.
        """
        self.wait(lambda here: mine.outcome is not None or self._may_withdraw(mine, here))
        if mine.outcome is None:
            self.command(io.Withdraw())
            self.wait(lambda _: mine.outcome is not None)
        assert mine.outcome is not None
        return mine.outcome

    def _may_withdraw(self, mine: OpenRound, here: Picture) -> bool:
        return here.doomed == mine.id and self.wanted_elsewhere()

    def fail_round(self, mine: OpenRound, reason: str) -> None:
        """Vote NO in this round, unless it is over already or voted on."""
        if mine.outcome is None:
            self.command(io.Extend(mine.id, {}, reason=reason))

    def blame(self, mine: OpenRound, rank: int, reason: str) -> None:
        """What this rank sent in the round is no honest member's, which only the trainer could see."""
        picture = self.look()
        if picture.generation == mine.id.generation and rank < len(picture.shares):
            self.command(io.Offence(picture.shares[rank][0], reason))

    def blame_donor(self, generation: int, reason: str) -> None:
        """What was given as this worker's state is not that."""
        picture = self.look()
        if picture.generation == generation and picture.donor is not None:
            self.command(io.Offence(picture.donor, reason))

    def await_channels(self, mine: OpenRound, channels: Collection[m.Channel]) -> bool:
        """Wait until these collectives are complete; False: they never will be, as the round is lost."""

        def there() -> bool:
            return all(channel in mine.reached for channel in channels)

        def settled(picture: Picture) -> bool:
            return there() or mine.outcome is not None or picture.doomed == mine.id

        if not there():
            self.wait(settled)
        return there()

    def is_lost(self, mine: OpenRound) -> bool:
        """This round cannot be committed."""
        picture = self.look()
        return mine.outcome is not None or picture.doomed == mine.id

    def _spoilt_before(self, workspaces: Iterable[Workspace]) -> bool:
        """A retry is about to go on from numbers of an attempt in which something was refused."""
        latest = self._latest
        if latest is None or not latest.spoilt:
            return False
        return any(mine is theirs for mine in workspaces for theirs in latest.workspaces.values())

    def begin_attempt(self) -> None:
        """What `settle` says is of the round that is submitted next."""
        self._submitted = False

    def settle(self, timeout_s: float) -> RoundOutcome | None:
        """How the latest round ended that this worker submitted to; None: it has not, in that time.

        Of an attempt that was never submitted: not committed.  For whoever was interrupted in `run_round`, or
        on the way to it, and leaves.  Unless it has voted YES it votes NO now: others may be in the middle of
        a long computation.
        """
        latest = self._latest
        if latest is None or not self._submitted:
            return RoundOutcome(committed=False, skip=False)
        self.command(io.Withdraw())
        self.wait(lambda _: latest.outcome is not None, timeout_s)
        return latest.outcome

    def hand_on(self, pieces: tuple[memoryview, ...], timeout_s: float) -> io.Handed | None:
        """Give this worker's residual to another one; None: nobody answered.  No step can follow."""
        self.command(io.HandOn(pieces))
        self.wait(lambda _: self._handed is not None, timeout_s)
        return self._handed

    def allow_residual(self, n: int) -> None:
        """The length of this worker's residual, which another one's may be added to."""
        with self._changed:
            self._inheritance.allow(n)

    def take_inheritance(self) -> list[tuple[m.PeerId, Sparse]]:
        """What members that have left have handed over: to be added to this worker's residual now."""
        with self._changed:
            counting, self._inheritance.counting = self._inheritance.counting, []
        self._wake()  # the picture has to change
        return counting

    def last_call(self, timeout_s: float) -> None:
        """Take no more residuals over, and wait until those that were acknowledged count, or never will."""
        self.command(io.LastCall())
        self.wait(lambda picture: not picture.heir, timeout_s)

    @property
    def open_mass(self) -> float:
        """Sum of magnitudes of the residuals that were acknowledged and are not this worker's yet."""
        with self._changed:
            return self._inheritance.open_mass

    def mean(self, step: int, index: int, value: float, timeout_s: float) -> float | None:
        """The group's average of `value`; None if the generation ended, or nobody answered in time."""
        with self._changed:
            self._mean = []
        self.command(io.AskMean(step, index, value))
        self.wait(lambda _: bool(self._mean), timeout_s)
        return self._mean[0] if self._mean else None

    def give_state(self, generation: int, blobs: Sequence[bytes | memoryview]) -> None:
        """The trainer captured its state for the joiners of `generation`."""
        digest = state_digest(blobs) if len(blobs) > 1 else b""
        with self._changed:
            self._inbox.captured = (generation, blobs, digest)
        self._wake()

    def give_kept(self, held: m.Held, generation: int, blobs: Sequence[bytes | memoryview] | None) -> None:
        """A checkpoint on this worker's disk, read for a member that begins from it; None: it cannot be, and
        nobody is given it."""
        with self._changed:
            self._inbox.kept.append((held, generation, blobs))
        self._wake()

    def attach_copies(self, disk: CopyDisk, max_bytes: int) -> None:
        """Where copies of other stages' checkpoints go, and ours are; before this worker enters the group."""
        if self._copies is not None:
            return
        rate_Bps = parse_rate(self._config.donate_limit) if self._config.donate_limit else None
        self._copies = Copies(disk, rate_Bps, max_bytes)

    def cannot_reload(self, states: tuple[m.Held, ...]) -> None:
        """What was to be loaded cannot be; these are on the disk."""
        with self._changed:
            self._reload = None
        self.command(io.Keeping(states))

    def put_aside(self, held: m.Held) -> None:
        """It is on the disk, or cannot be."""
        with self._changed:
            if self._aside == held:
                self._aside = None
        self._wake()

    def discarded(self, after: int) -> None:
        """No checkpoint after this step is on the disk any more."""
        with self._changed:
            if self._discard_after == after:
                self._discard_after = None
        self._wake()

    def allow_state(self, max_bytes: int) -> None:
        """The largest state that a donor may send."""
        with self._changed:
            self._intake.allow(max_bytes)

    def allow_following(self, max_bytes: int, n: int) -> None:
        """The largest image that a donor may send, and the elements of the flat gradient."""
        with self._changed:
            self._bounds = (max_bytes, n)

    def give_image(self, applied: int, history: bytes, parts: Callable[[], Parts]) -> None:
        """The trainer's copy of its state between two steps; `parts` turns it into bytes."""
        self._donating.fill(applied, history, parts)

    def cannot_replay(self, reason: str) -> None:
        """What this script does in a step is not told by its update: nobody can follow."""
        self._donating.cannot(reason)

    def compare(self, step: int, digest: bytes) -> None:
        """This worker's state after `step`, to be compared with the others'."""
        self.command(io.Compare(step, digest))

    def take_work(self) -> Work | None:
        """What a follower's trainer has to do next; `did_work` is to follow."""
        with self._changed:
            following = self._following
            work = following.work() if following is not None and following.has_work else None
        if isinstance(work, ImageWork):
            self.command(io.Loading())
        return work

    def fail_work(self, reason: str) -> None:
        """What a donor gave cannot be loaded or replayed: this worker takes the whole state instead."""
        with self._changed:
            if self._following is not None:
                self._following.failed = self._following.failed or reason
        self._wake()

    def did_work(self, work: Work) -> None:
        with self._changed:
            self._progress += 1
            if self._following is not None:
                self._following.done(work)
        self._wake()

    def take_state(self) -> tuple[int, int, list[bytes]] | None:
        """Term, generation and blobs of the donor's state, complete; `Restored` is to follow.

        None: the one that was offered is gone, as that of the next generation has begun to come.
        """
        with self._changed:
            return self._intake.blobs() if self._intake.complete else None

    def note(self, figures: Mapping[str, float]) -> None:
        with self._changed:
            self._figures.update(figures)
            self._progress += 1

    @property
    def figures(self) -> dict[str, float]:
        """What was noted so far."""
        with self._changed:
            return dict(self._figures)

    def busy(self, inside: bool) -> None:
        """The trainer is legitimately busy (an evaluation) and counts as making progress."""
        with self._changed:
            self._busy = inside

    @property
    def me(self) -> m.PeerId:
        """This worker's key."""
        return self._transport.me

    @property
    def traffic(self) -> dict[str, tuple[int, int]]:
        """Bytes sent and received so far by message type."""
        counts = self._transport.traffic
        names = set(counts.sent_bytes) | set(counts.received_bytes)
        return {n: (counts.sent_bytes.get(n, 0), counts.received_bytes.get(n, 0)) for n in names}

    def stop(self, reason: str = "", *, pausing: bool = False) -> None:
        """Leave (if `reason` is given), flush and release everything; idempotent.

        `pausing`: this worker means to come back, over another driver.
        """
        if reason and self._error is None and self._thread.is_alive():
            self.command(io.Depart(reason, pausing))
        with self._changed:
            self._stopping = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(timeout=10.0)

    # -- this thread ---------------------------------------------------------------------------

    def _main(self) -> None:
        buffering.keep_pages()
        try:
            while True:
                with self._changed:
                    stopping = self._stopping
                    captured, self._inbox.captured = self._inbox.captured, None
                    kept, self._inbox.kept = self._inbox.kept, []
                self._obey()
                if captured is not None and self._core is not None and captured[0] == self._core.generation:
                    self._outlet.fill(*captured)
                for held, generation, blobs in kept:
                    self._fill_kept(held, generation, blobs)
                if self._stale or self._ended:
                    self._stale = False  # before: what another thread changes meanwhile is published next
                    self._publish()  # before the next wait: a lone worker's round is over already
                if stopping:
                    return
                self._turn()
        except BaseException as error:  # the trainer must hear of it, whatever it is
            if not isinstance(error, GridtrainError):
                log.exception("gridtrain's loop crashed")
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self._transport.close()

    def _fill_kept(self, held: m.Held, generation: int, blobs: Sequence[bytes | memoryview] | None) -> None:
        if blobs is None:
            self._kept_outlets.pop(held, None)
        elif held in self._kept_outlets:
            self._kept_outlets[held].fill(generation, blobs)

    def _obey(self) -> bool:
        """Do what the trainer's thread has brought; True: it was something."""
        with self._changed:
            events, self._inbox.events = self._inbox.events, deque()
        for command in events:
            if not _is_payload(command):
                self._only_payloads = False
            self._handle(command)
        return bool(events)

    def _turn(self) -> None:
        if why := self.spent():
            raise BudgetSpent(why, remedy="nothing: this worker trains again when there are bytes again")
        now_s = time.monotonic()
        deadline_s = min(self._pulse_s, self._core.deadline_s if self._core else math.inf)
        deadline_s = min(deadline_s, self._donating.due_s(self._transport))
        if self._copies is not None:
            deadline_s = min(deadline_s, self._copies.due_s)
        at_once = any(outlet.ready(self._transport) for outlet in self._outlets) or self._may_hash
        at_once = at_once or self._passing.ready(self._transport)
        timeout_s = 0.0 if at_once else max(0.0, deadline_s - now_s)
        events = self._transport.poll(min(timeout_s, self._config.deadlines.beat_s))
        self._only_payloads = self._core is not None
        for event in events:
            if not (type(event) is Received and type(event.message) in OF_ROUNDS):
                self._only_payloads = False
            self._transport_event(event)
        brought = self._obey()  # a payload that is to leave waits for no chore
        self._only_payloads = self._only_payloads and (brought or bool(events))
        if self._ended:
            self._publish()  # nor does the trainer, which waits for the outcome
        self._hash_ahead()
        now_s = time.monotonic()
        if self._only_payloads and now_s < self._chores_s + CHORES_S:
            self._give_credit()
            return
        self._chores_s = now_s
        self._stale = True
        if self._core is not None:
            self._give_credit()
            if now_s >= self._pulse_s:
                self._pulse_s = now_s + self._config.deadlines.beat_s
                self._beat()
            if now_s >= self._core.deadline_s:
                self._carry_out(self._core.tick(now_s))
            rtt_s = self._prober.done(now_s)
            if rtt_s is not None:
                self._measured = io.Probed(rtt_s)
                direct = {peer: seconds for peer, seconds in rtt_s if peer not in self._relayed}
                self._bursts.begin(direct, self._prober.until_s, now_s)
            self._mind_bursts(now_s)
            self._post(self._donating.turn(self._transport, now_s))
            self._mind_following(now_s)
            sent = sum(outlet.pump(self._transport) for outlet in self._outlets)
            sent += self._passing.pump(self._transport)
            if self._copies is not None:
                sent += self._copies.turn(self._transport, now_s, self._core.generation)
            with self._changed:
                self._progress += sent
            if self._core.stage is io.Stage.RUNNING:
                self._outlet.forget()
                self._passing.forget()
                self._kept_outlets.clear()
            self._mind_pause(self._core.paused, now_s)

    @property
    def _outlets(self) -> list[StateOutlet]:
        return [self._outlet, *self._kept_outlets.values()]

    def _hash_ahead(self) -> None:
        """While the wire is busy: one slice each time, so that what comes meanwhile waits for no more."""
        with self._changed:  # the trainer may be adding a bucket
            open_ = self._open if self._open is not None and not self._open.spoilt else None
            workspaces = open_.workspaces.values() if open_ is not None else ()
            dense = [workspace for workspace in workspaces if isinstance(workspace, DenseWorkspace)]
        self._may_hash = any(workspace.hash_ahead() for workspace in dense)

    def _mind_bursts(self, now_s: float) -> None:
        """Rates go to the coordinator before the round trips do, with which it admits this worker."""
        waiting = self._bursts.turn(self._transport, now_s)
        if (news := self._bursts.news()) is not None:
            self._send(self._coordinator, m.Rates(news))
        if self._measured is not None and not waiting:
            measured, self._measured = self._measured, None
            self._handle(measured)

    def _burst(self, peer: m.PeerId, burst: m.Burst, nbytes: int) -> None:
        self._owed[peer] = self._owed.get(peer, 0) + nbytes
        match self._bursts.came(peer, burst, time.monotonic()):
            case m.Landed() as answer:
                self._send(peer, answer)
            case str(reason):
                self._handle(io.Offence(peer, reason))

    def _mind_pause(self, why: str, now_s: float) -> None:
        """Say once that the run is paused, and give up after a long time (rule 10)."""
        if not why:
            if self._paused_since_s is not None:
                log.warning("the coordinator is back")
            self._paused_since_s = None
            return
        if self._paused_since_s is None:
            self._paused_since_s = now_s
            log.warning("paused: %s; waiting for %s to come back", why, self._config.coordinator)
        limit_s = self._config.deadlines.paused_s
        if now_s - self._paused_since_s >= limit_s:
            raise RunPaused(
                f"paused for {limit_s:.0f} s: {why}, and nobody answers at {self._config.coordinator}",
                remedy="start the coordinator again with its journal, then this worker",
            )

    def _beat(self) -> None:
        traffic = self.traffic
        moved = sum(
            sum(traffic.get(kind, (0, 0))) for kind in ("Data", "Relay", "Relayed", "ImageBlock", "Update")
        )
        with self._changed:
            if moved != self._moved_bytes or self._busy:
                self._moved_bytes = moved
                self._progress += 1
            progress, waiting = self._progress, self._inside
            figures = tuple(sorted(self._figures.items()))
        sent = float(sum(out for out, _ in traffic.values()))
        received = float(sum(back for _, back in traffic.values()))
        exchanged = float(sum(traffic.get(kind, (0, 0))[0] for kind in ("Data", "Relay", "Relayed")))
        counts = [("exchanged_bytes", exchanged), ("received_bytes", received), ("sent_bytes", sent)]
        assert self._core is not None
        if left_bytes := self._intake.left_bytes(self._core.generation):
            counts.append((STATE_LEFT, float(left_bytes)))
        self._handle(io.Pulse(progress, waiting, (*figures, *counts)))

    def _transport_event(self, event: TransportEvent) -> None:
        match event:
            case PeerUp(peer):
                if peer == self._coordinator:
                    self._denied_since_s = None
                self._prober.peer_up(peer, self._transport, time.monotonic())
                self._handle(io.EdgeUp(peer))
            case PeerDown(peer, reason):
                self._owed.pop(peer, None)
                self._bursts.forget(peer)
                self._handle(io.EdgeDown(peer, reason))
            case Denied(self._coordinator) if not self._is_denied_for_good(time.monotonic()):
                log.info("the coordinator's address does not let this worker in; it is asked again")
            case Denied(self._coordinator):
                raise JoinRefused(
                    "denied",
                    f"the coordinator at {self._config.coordinator} does not let this worker in (any more)",
                    remedy="ask the run's owner for a new invitation",
                )
            case Violation(self._coordinator, reason):
                raise JoinRefused("version", f"{self._config.coordinator}: {reason}")
            case Violation(None, reason):
                log.info("a stranger broke the protocol: %s", reason)
            case Violation(peer, reason) if peer is not None:
                self._handle(io.Offence(peer, reason))
            case Received(peer, m.Ping(nonce)):
                self._send(peer, m.Pong(nonce))
            case Received(_, m.Pong(nonce)):
                self._prober.pong(nonce, self._transport, time.monotonic())
            case Received(peer, m.Burst() as burst, nbytes):
                self._burst(peer, burst, nbytes)
            case Received(peer, m.BurstAsk(nonce)):
                for burst in self._bursts.asked(peer, nonce, time.monotonic()):
                    self._send(peer, burst)
            case Received(peer, m.Landed() as answer):
                self._bursts.landed(peer, answer, time.monotonic())
            case Received(peer, message, nbytes):
                if needs_credit(message):
                    self._owed[peer] = self._owed.get(peer, 0) + nbytes
                self._handle(io.Heard(peer, message, nbytes))

    def _is_denied_for_good(self, now_s: float) -> bool:
        """A refused handshake proves nothing about who refused it.

        At the start it is believed, as nothing is lost.  A member that was let in before goes on asking for a
        while, since anybody on the way could say no: a coordinator that puts a worker out says so over the
        connection that stands.
        """
        assert self._core is not None
        if self._denied_since_s is None:
            self._denied_since_s = now_s
        return not self._core.term or now_s - self._denied_since_s >= DENIED_S

    def _give_credit(self) -> None:
        """Peers may send on as far as what they sent is dealt with; what is held for later is not."""
        assert self._core is not None
        for peer, owed in list(self._owed.items()):
            held = self._core.held_bytes(peer)
            if owed > held:
                self._transport.done(peer, owed - held)
                self._owed[peer] = held

    def _handle(self, event: io.Event) -> None:
        """What a peer did wrong costs the round and the peer, never this worker."""
        assert self._core is not None
        if _is_payload(event):
            self._handle_payload(event)
            return
        try:
            effects = self._core.handle(event, time.monotonic())
        except RemoteProtocolError as error:
            if not isinstance(event, io.Heard):
                raise
            effects = self._core.handle(io.Offence(event.peer, error.reason), time.monotonic())
        self._acquaintances.replace(self._core.acquaintances)
        self._carry_out(effects)

    def _handle_payload(self, event: io.Event) -> None:
        """The usual thing, hundreds of times in a step: numbers are summed and sent on, and nothing else."""
        assert self._core is not None
        try:
            effects = self._core.handle(event, time.monotonic())
        except RemoteProtocolError as error:
            if not isinstance(event, io.Heard):
                raise
            effects = self._core.handle(io.Offence(event.peer, error.reason), time.monotonic())
        if not all(isinstance(effect, OF_PAYLOADS) for effect in effects):
            self._only_payloads = False
            self._acquaintances.replace(self._core.acquaintances)
        self._carry_out(effects)

    def _carry_out(self, effects: list[io.Effect]) -> None:
        """Effects in order; what an effect leads to comes after the ones already returned."""
        queue = deque(effects)
        while queue:
            effect = queue.popleft()
            assert self._core is not None
            try:
                queue.extend(self._do(effect))
            except RemoteProtocolError as error:
                self._only_payloads = False
                if self._open is not None:
                    self._open.spoilt = True  # else what was refused would be sent on, or missed in the sum
                culprit = effect.peer if isinstance(effect, FROM_PEERS) else None
                event = io.Broke(str(error)) if culprit is None else io.Offence(culprit, error.reason)
                queue.extend(self._core.handle(event, time.monotonic()))
                self._acquaintances.replace(self._core.acquaintances)
            except TransportError as error:
                self._only_payloads = False
                queue.extend(self._core.handle(io.Broke(str(error)), time.monotonic()))

    def _do(self, effect: io.Effect) -> list[io.Effect]:
        assert self._core is not None
        match effect:
            case io.Post(peer, m.StateRequest() as ask):
                self._ask_state(peer, ask)
            case io.Post(peer, message):
                self._send(peer, message)
            case io.Ship(peer, round_id, channel, place, skip):
                workspace = self._workspace(round_id, channel)
                if workspace is not None:
                    data = m.Data(round_id, channel, place, skip, workspace.payload(place))
                    self._transport.send(peer, data)
            case io.Fill(channel, fill):
                if self._open is not None and not self._open.spoilt:
                    self._open.workspaces[channel].apply(fill)
            case io.Reached(channel, skip):
                with self._changed:
                    if self._open is not None and not self._open.spoilt:
                        self._open.reached[channel] = skip
                        self._progress += 1
                        self._wake_trainer()
            case io.Seal(skip):
                return self._seal(skip)
            case io.Resolve(round_id, committed, skip, reason):
                self._resolve(round_id, committed, skip, reason)
            case io.MeanKnown(value):
                with self._changed:
                    self._mean.append(value)
                    self._changed.notify_all()
            case io.Dial(peer, address):
                self._transport.dial(peer, address)
            case io.HangUp(peer):
                self._owed.pop(peer, None)
                self._transport.hang_up(peer)
            case io.Probe(targets):
                self._relayed = {peer for peer, address in targets if relay_of(address) is not None}
                self._prober.begin(targets, self._transport, time.monotonic(), self._config.deadlines.probe_s)
            case io.GiveState(peer, _, generation, whole, kept, have, digest):
                outlet = self._outlet
                if kept is not None:
                    outlet = self._kept_outlets.setdefault(kept, StateOutlet())
                outlet.ask(peer, self._core.term, generation, whole=whole, have=have, digest=digest)
            case io.PassOn(peer, term, generation, have):
                self._passing.ask(peer, term, generation, have)
            case io.TakeDigest(generation, due):
                with self._changed:
                    self._intake.expect(generation, due)
                return self._refuted()
            case io.SendCopy() if self._copies is not None:
                self._copies.send(effect)
            case io.TakeCopy(_, copied) if self._copies is not None:
                with self._changed:
                    self._progress += 1
                self._copies.take(copied)
            case io.PutAside(held):
                self._aside = held
            case io.Reload():
                self._reload = effect
            case io.Discard(after):
                self._discard_after = after
            case io.Follow() | io.DonorUp() | io.DonorDown() | io.Arrive():
                self._follow(effect)
            case io.Feed(peer, message) if self._core.seat is None or not self._core.synced:
                with self._changed:
                    asks = self._following.heard(peer, message, time.monotonic()) if self._following else []
                    self._progress += 1
                self._post(asks)
            case io.Feed(peer, message):
                self._post([(peer, answer) for answer in self._donating.heard(peer, message)])
            case io.Donating():
                self._donating.told(effect)
            case io.TakeBlock(peer, block):
                with self._changed:
                    self._progress += 1
                    self._intake.keeps = self._core.passes_on
                    self._intake.take(block, vouched=peer == self._core.donor)
                return self._refuted()
            case io.TakePiece(peer, piece, world_size):
                with self._changed:
                    self._progress += 1
                    whole = self._inheritance.take(peer, piece, world_size)
                return self._core.handle(io.Inherited(peer), time.monotonic()) if whole else []
            case io.Inherit(peer):
                with self._changed:
                    self._inheritance.count(peer)
            case io.Forget(peer):
                with self._changed:
                    self._inheritance.forget(peer)
            case io.Handed():
                with self._changed:
                    self._handed = effect
                    self._changed.notify_all()
            case io.Stop(error):
                raise error
            case io.Note(event, fields):
                self._log(event, fields)
        return []

    def _ask_state(self, peer: m.PeerId, ask: m.StateRequest) -> None:
        """For what is not here yet."""
        have = self._intake.have(ask.generation) if ask.whole and not ask.digest else 0
        if not have or self._intake.left_bytes(ask.generation):
            self._send(peer, replace(ask, have=have))
        elif self._intake.lacks_word(ask.generation):
            self._send(peer, replace(ask, digest=True))

    def _refuted(self) -> list[io.Effect]:
        """All of a state has come, and the donor's has another digest: begin anew, with the donor itself."""
        assert self._core is not None
        generation = self._core.generation
        with self._changed:
            if not self._intake.is_refuted(generation):
                return []
            self._intake.forget()
            self._passing.stop()
        return self._core.handle(io.Refuted(generation), time.monotonic())

    def _follow(self, effect: io.Follow | io.DonorUp | io.DonorDown | io.Arrive) -> None:
        asks: Sequence[tuple[m.PeerId, m.Message]] = ()
        with self._changed:
            following = self._following
            match effect:
                case io.Follow():
                    self._following = Following(*self._bounds)
                case io.DonorUp(peer) if following is not None:
                    asks = following.donor_up(peer)
                case io.DonorDown(peer) if following is not None:
                    asks = following.donor_down(peer)
                case io.Arrive(applied, history) if following is not None:
                    following.enter(applied, history)
        self._post(asks)

    def _mind_following(self, now_s: float) -> None:
        """Say when it has caught up, or that it cannot; forget it when it is a member with the state."""
        assert self._core is not None
        with self._changed:
            following = self._following
            if following is None:
                return
            if self._core.synced and self._core.seat is not None:
                self._following = None
                return
            asks = following.tick(now_s)
            if self._core.seat is None or following.idle is None or following.idle != self._follow_moved[0]:
                self._follow_moved = (following.idle, now_s)
            elif now_s - self._follow_moved[1] >= self._config.deadlines.ready_s / 4:
                following.failed = following.failed or "nothing more came of what the VIEW names"
            at, caught = following.at, following.caught_up
            failed, arrived = following.failed, following.arrived
            if failed:
                self._following = None
                self._intake.forget()
            progress = following.progress
        self._post(asks)
        if failed:
            self._handle(io.Strayed(failed))
        elif caught and at is not None and self._core.seat is None and now_s >= self._caught_again_s:
            self._caught_again_s = now_s + CAUGHT_AGAIN_S
            self._handle(io.CaughtUp(*at))
        self._bar.show(progress, now_s, over=arrived)

    def _post(self, messages: Sequence[tuple[m.PeerId, m.Message]]) -> None:
        for peer, message in messages:
            self._send(peer, message)

    def _send(self, peer: m.PeerId, message: m.Message) -> None:
        """Control messages: what cannot be sent now is repeated by the protocol or superseded."""
        try:
            self._transport.send(peer, message)
        except TransportError as error:
            log.debug("not sent: %s to %s: %s", type(message).__name__, peer.hex()[:8], error)

    def _workspace(self, round_id: m.RoundId, channel: m.Channel) -> Workspace | None:
        if self._open is None or self._open.id != round_id or self._open.spoilt:
            return None
        return self._open.workspaces[channel]

    def _seal(self, skip: bool) -> list[io.Effect]:
        if self._open is None or self._core is None or self._open.spoilt:
            return []
        seals = [b"" if skip else workspace.seal() for workspace in self._open.whole]
        self._open.seals = tuple(seals)
        digest = vote_digest(self._open.settings, skip, seals)
        return self._core.handle(io.Sealed(digest), time.monotonic())

    def _resolve(self, round_id: m.RoundId, committed: bool, skip: bool, reason: str) -> None:
        if not committed:
            log.info("step %d attempt %d did not commit: %s", round_id.step, round_id.attempt, reason)
        with self._changed:  # the trainer may be adding a bucket
            ended = self._open if self._open is not None and self._open.id == round_id else None
            self._open = None if ended is not None else self._open
        if ended is not None:
            if committed:
                self._remember(ended, skip)
            else:
                ended.why = reason
            self._ended.append((ended, RoundOutcome(committed, skip)))

    def _remember(self, mine: OpenRound, skip: bool) -> None:
        """For followers: only sparse updates are small enough to be kept and sent."""
        workspace = mine.whole[0]
        if isinstance(workspace, BucketedWorkspace) and not workspace.is_sparse:
            return
        if isinstance(workspace, GatherWorkspace | ButterflyWorkspace | BucketedWorkspace):
            update = None if skip else workspace.update
            kept = StepUpdate(mine.id.step, mine.settings, skip, update, () if skip else mine.seals[1:])
            self._donating.committed(kept, workspace.n)

    def _log(self, event: str, fields: Mapping[str, Any]) -> None:
        if event == "run_state":
            quiet = fields["state"] in ("training", "finished")
            log.log(logging.INFO if quiet else logging.WARNING, "the run is %(state)s: %(reason)s", fields)
            return
        if event == "left_behind":
            log.warning(LEFT_BEHIND, fields["step"] + 1)
            return
        if event == "rejoin":
            log.warning("the coordinator has let this worker go while it was away; it joins again")
            return
        if event in SAID:
            log.warning(SAID[event], fields)
            return
        if event == "reach":
            log.info(
                "%s", f"others reach this worker at {fields['address']}" if fields["address"] else UNREACHABLE
            )
            return
        level = logging.WARNING if event in LOUD else logging.INFO
        log.log(level, "%s %s", event, " ".join(f"{k}={v}" for k, v in fields.items()))

    def _publish(self) -> None:
        """Replace the picture if it changed, and wake the trainer."""
        here = self._core
        if here is None:
            return
        self._forget_asked(here.generation)
        seat, open_round = here.seat, here.next_round
        spans: tuple[m.Span, ...] = ()
        total = 0
        if open_round is not None:
            if self._assigned is None or self._assigned[0] != open_round:
                self._assigned = (open_round, *here.positions())
            _, spans, total = self._assigned
        # A follower loads what it lacks when it has replayed all updates: they begin from what it has.
        may_load = self._following is None or self._following.arrived
        reload = self._reload
        if reload is None or here.synced or (reload.term, reload.generation) != (here.term, here.generation):
            reload = self._reload = None
        picture = Picture(
            welcomed=here.welcomed,
            stage=here.stage,
            generation=here.generation,
            rank=seat.rank if seat is not None else 0,
            world_size=seat.world_size if seat is not None else 0,
            open_round=open_round,
            spans=spans,
            total_samples=total,
            shares=seat.shares if seat is not None else (),
            applied=here.applied,
            history=here.history,
            ledger=here.ledger,
            finished=here.finished and here.stage is io.Stage.RUNNING,
            run_state=here.run_state,
            wanted_state=self._outlet.wanted,
            offered_state=(self._intake.complete_for(here.generation) and not here.synced and may_load)
            or reload is not None,
            wanted_image=self._donating.wanted,
            offered_work=self._following is not None and self._following.has_work,
            compares_next=here.compares_next,
            inherited=bool(self._inheritance.counting),
            synced=here.synced,
            touched=here.touched,
            heir=here.takes_over or self._inheritance.open,
            doomed=here.doomed,
            reload=reload,
            donor=here.donor,
            due_digest=seat.roster[seat.rank].digest if seat is not None else b"",
            wanted_kept=next(
                ((outlet.wanted[0], held) for held, outlet in self._kept_outlets.items() if outlet.wanted[0]),
                None,
            ),
            discard_after=self._discard_after,
            name=seat.roster[seat.rank].name if seat is not None else "",
            exchange=here.seat.exchange if here.seat is not None else "",
            aside=self._aside,
            cuts=seat.cuts if seat is not None else (),
            first_step=here.first_step,
        )
        with self._changed:
            if not self._ended and picture == self._picture:
                return
            # Together, so that the trainer never sees an outcome beside the picture from before it.
            self._picture = picture
            for ended, outcome in self._ended:
                ended.outcome = outcome
            self._ended.clear()
            self._wake_trainer()

    def _forget_asked(self, generation: int) -> None:
        """What was asked for in an earlier generation is of another seat, perhaps, and nobody's any more."""
        if generation == self._asked_in:
            return
        self._asked_in = generation
        self._outlet.forget_others(generation)
        for held, outlet in list(self._kept_outlets.items()):
            outlet.forget_others(generation)
            if not outlet.wanted[0]:
                del self._kept_outlets[held]

    def _wake_trainer(self) -> None:
        """Locked.  Not for what it does not wait for, such as what it sent itself."""
        if self._awaited is None or self._awaited(self._picture):
            self._changed.notify_all()


def _is_payload(event: io.Event) -> bool:
    """Of a round alone: what a peer sends for it, what the trainer adds to it or begins before it."""
    if type(event) is io.Heard:
        return type(event.message) in OF_ROUNDS
    return type(event) is io.Extend or (type(event) is io.Submit and not event.whole)
