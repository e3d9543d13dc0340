"""The trainer's place in the group: turns, rounds and chores, seen from the training thread.

Decides when the training thread may go on and which chore it does while it waits (capture its state
for a joiner, restore a donor's).  Never touches a socket, a protocol rule or a tensor.

    batches:  await_turn -> spans ----> the user's loop computes -----> optimizer.step
                                                                          begin -> StepPlan
                                                                          run   -> RoundOutcome
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from gridtrain.config import JoinConfig
from gridtrain.errors import ConfigError, GridtrainError, JoinRefused, RemoteProtocolError
from gridtrain.protocol import ledger
from gridtrain.protocol import member_io as io
from gridtrain.protocol import messages as m
from gridtrain.protocol.exchanging import FIRST_FIGURE
from gridtrain.runtime.acquaintances import Acquaintances
from gridtrain.runtime.buckets import BucketedWorkspace
from gridtrain.runtime.buffers import Workspace
from gridtrain.runtime.contribution import Tally
from gridtrain.runtime.copies import CopyDisk
from gridtrain.runtime.donating import Parts
from gridtrain.runtime.driver import Driver
from gridtrain.runtime.following import ImageWork
from gridtrain.runtime.opened import OpenedRound, Part
from gridtrain.runtime.pace import Pace
from gridtrain.runtime.picture import Picture
from gridtrain.runtime.plan import RoundOutcome, StepPlan
from gridtrain.runtime.statefeed import MAX_STATE_BYTES
from gridtrain.runtime.updates import StepUpdate
from gridtrain.transport.credits import CreditTransport
from gridtrain.wire.sparse import Sparse

log = logging.getLogger("gridtrain")

Capture = Callable[[Picture, bool], Sequence[bytes | memoryview] | None]
"""Of this worker's seat in the picture, the whole or its first part; None: its state is not in memory."""
Restore = Callable[[Sequence[bytes]], None]
Replay = Callable[[StepUpdate], None]
CopyParts = Callable[[], Callable[[], Parts]]
Inherit = Callable[[m.PeerId, Sparse], None]
Edges = Callable[..., frozenset[int]]
"""Of a rank and a world size; of a model in stages also of where it is cut."""

LOOK_AGAIN_S = 0.05  # the loop's thread may not have noticed yet that there is nothing left to do
FAREWELL_S = 15.0  # how long a finished worker stays for the others' sake


class Interrupted(Exception):
    """It is not waited for any longer: this worker is wanted elsewhere, between two steps or attempts."""


def _no_data_named() -> ConfigError:
    return ConfigError(
        "a step was begun before the data was named",
        remedy="iterate over grid.batches(dataset, ...), or use grid.sampler(dataset, ...)",
    )


class StageDisk(CopyDisk, Protocol):
    """A worker's checkpoints of the stages that it has held."""

    def held(self) -> tuple[m.Held, ...]: ...

    def discard(self, after: int) -> None:
        """Remove those after this step."""
        ...

    def reload(self, held: Sequence[m.Held], blocks: m.Span) -> None:
        """Make this worker's state what it was then.  Raises `ConfigError`, `RemoteProtocolError`."""
        ...

    def put_aside(self, held: m.Held) -> None:
        """Write this worker's state as a checkpoint, at once.  Raises `OSError`."""
        ...

    def give(self, held: m.Held) -> Sequence[bytes]:
        """For another member's restore.  Raises `ConfigError`."""
        ...

    def check(self, blobs: Sequence[bytes], digest: bytes) -> None:
        """What another member gave is the state with this digest.  Raises `RemoteProtocolError`."""
        ...


class GroupSession:
    """One worker's place in a run, over a `Driver`.  All methods belong to the training thread.

    Raises, from every method that waits: `JoinRefused` when the coordinator dismissed this worker,
    `RunPaused` when the run cannot go on, or whatever else ended the loop's thread.
    """

    def __init__(self, transport: CreditTransport, config: JoinConfig, acquaintances: Acquaintances) -> None:
        self.config = config
        self._driver = Driver(transport, config, acquaintances)
        self._capture: Capture | None = None
        self._restore: Restore | None = None
        self._given_for = (0, False)
        self._copy: CopyParts | None = None
        self._replay: Replay | None = None
        self._image_of = -1
        self._inherit: Inherit | None = None
        self._turn: Picture | None = None
        self._turn_taken = False
        self._early: tuple[m.RoundId, StepPlan] | None = None  # the round that buckets were sent for
        self._spec: m.LedgerSpec | None = None
        self._entered: tuple[m.Setup, Edges, m.About | None, Mapping[str, Edges]] | None = None
        self._turn_began_s = 0.0
        self._awaits_choice = False  # the trainer has its gradient, and goes on with an exchange alone
        self._max_state_bytes = MAX_STATE_BYTES
        self._following, self._residual_n = (MAX_STATE_BYTES, 0), 0
        self._no_replay = ""
        self._before: dict[str, tuple[int, int]] = {}  # what drivers before this one have moved
        self.spent: Callable[[], str] = lambda: ""
        self.wanted_elsewhere: Callable[[], bool] = lambda: False
        self.given_up: Callable[[], None] = lambda: None
        self._gives_up = False  # a batch, until this worker has left: its buckets may be on their way
        self._away = False  # this driver's traffic is among `_before` already
        self._is_pipeline = self._spare_at_end = False
        self._disk: StageDisk | None = None
        self._gave: tuple[int, m.Held] | None = None
        self._ended = False
        self._mean_step = self._mean_index = 0
        self._pace = Pace()
        self._tally = Tally(Path(config.contribution) if config.contribution else None)

    def start(self) -> None:
        """See `Driver.start`."""
        self._driver.start()

    def attach(self, capture: Capture, restore: Restore, max_state_bytes: int = MAX_STATE_BYTES) -> None:
        """How to take a copy of this worker's state, and how to load another's, which is no larger."""
        self._capture, self._restore = capture, restore
        self._max_state_bytes = max_state_bytes
        self._equip(self._driver)

    def attach_following(self, copy: CopyParts, replay: Replay, max_state_bytes: int, elements: int) -> None:
        """How to copy this worker's state between two steps (bytes are made of it in another thread), and how
        to apply what the members did in a step; `elements`: of the flat gradient."""
        self._copy, self._replay = copy, replay
        self._following = (max_state_bytes, elements)
        self._equip(self._driver)

    def cannot_replay(self, reason: str) -> None:
        """See `optim.session.Session.cannot_replay`."""
        self._no_replay = reason
        self._equip(self._driver)

    def attach_stages(self, checkpoints: StageDisk) -> None:
        """Where this worker's checkpoints of stages are, and those of the stage before."""
        self._disk = checkpoints
        self._equip(self._driver)

    def keeping(self, states: tuple[m.Held, ...]) -> None:
        """These checkpoints are on the disk now."""
        self._driver.command(io.Keeping(states))

    def attach_residual(self, n: int, inherit: Inherit) -> None:
        """How to add what another worker has not sent to what this one has not: of n elements each."""
        self._inherit, self._residual_n = inherit, n
        self._equip(self._driver)

    def resize_residual(self, n: int) -> None:
        """This worker holds another stage now, whose residual has so many elements."""
        self._residual_n = n
        self._driver.residuals.allow(n)

    def _equip(self, driver: Driver) -> None:
        """Tell a driver all that this worker's script has said so far: the first one piece by piece, one
        after a pause all at once.  To be told again changes nothing."""
        driver.taking.allow(self._max_state_bytes)
        driver.catching_up.allow(*self._following)
        driver.residuals.allow(self._residual_n)
        driver.spent = self.spent
        driver.meeting.wanted_elsewhere = lambda: self.wanted_elsewhere()
        if self._no_replay:
            driver.donating.cannot(self._no_replay)
        if self._disk is not None:
            driver.disk.attach(self._disk, self._max_state_bytes)

    def enter(
        self,
        setup: m.Setup,
        edges: Edges,
        about: m.About | None = None,
        choices: Mapping[str, Edges] = MappingProxyType({}),
    ) -> None:
        """Ask for a place in the run.  The coordinator refuses a set-up that differs from the run's.

        `about`: what this worker is, for people.  `choices`: see `member_io.Enter`.
        """
        self.refuse_second()
        self._spec, self._entered = setup.ledger, (setup, edges, about, choices)
        self._is_pipeline = setup.stages > 1
        self._driver.command(io.Enter(setup, edges, about, choices))

    def refuse_second(self) -> None:
        """Raises `ConfigError` if this worker has entered; to be asked before its disk is read."""
        if self._spec is not None:
            raise ConfigError(
                "a second data set was given to this run; its ledger has one",
                remedy="call grid.batches(...) or grid.sampler(...) once, with epochs= or steps= of the "
                "whole run: one loop goes over all of it",
            )

    # -- away, and back ----------------------------------------------------------------------------

    def depart(self, reason: str) -> None:
        """Leave the run between two steps, and mean to come back: nothing is sent or received any more."""
        self._driver.stop(reason, pausing=True)
        self._before = self.traffic
        self._away, self._gives_up = True, False

    def come_back(
        self,
        transport: CreditTransport,
        acquaintances: Acquaintances,
        held: m.Held | None,
        *,
        touched: bool,
    ) -> None:
        """After `depart`: ask for a place again, by the joiner's road.

        Args:
            held: the state that this worker has had since; the group's replaces it if it went on meanwhile.
            touched: the model is not the one any more that the script made, and it is of no step either.

        Raises as `Driver.start`; it can be called again then, with another transport.
        """
        assert self._entered is not None
        driver = Driver(transport, self.config, acquaintances)
        self._equip(driver)
        driver.signs.note(self._driver.signs.figures)
        self._given_for, self._image_of, self._gave = (0, False), -1, None
        self._turn, self._turn_taken, self._early = None, False, None
        self._pace.drop()
        try:
            driver.start()
        except BaseException:
            driver.stop()
            transport.close()
            raise
        setup, edges, about, choices = self._entered
        self._driver, self._away = driver, False
        if touched and held is None:
            driver.command(io.Loading())
        kept = self._disk.held() if self._disk is not None else setup.kept
        driver.command(io.Enter(replace(setup, held=held, kept=kept), edges, about, choices))

    def spend_while(self, spent: Callable[[], str]) -> None:
        """`spent` is asked by the loop's thread, often: once it says why, everything ends at once."""
        self.spent = spent
        self._equip(self._driver)

    # -- turns -----------------------------------------------------------------------------------

    def await_turn(self) -> Picture | None:
        """Block until a step is open; None when the ledger has ended the run.  Does chores meanwhile.

        Raises `Interrupted` as soon as `wanted_elsewhere()`, unless the run has ended.
        """
        if self._spec is None:
            raise _no_data_named()
        self._turn, self._turn_taken = None, False
        while (
            picture := self._wait_unless_spare(lambda _: self._is_wanted())
        ) is not None and picture.offered_state:
            self._take_state()
        if picture is None or picture.finished:
            return None
        if self._is_wanted():
            raise Interrupted
        self._turn = picture
        self._turn_began_s = time.monotonic()
        self._pace.begin(self._turn_began_s, sum(span.stop - span.start for span in picture.spans))
        return picture

    def _is_wanted(self) -> bool:
        return self._gives_up or self.wanted_elsewhere()

    @property
    def spare_at_end(self) -> bool:
        """The run is finished, and this worker held no stage then."""
        return self._spare_at_end

    @property
    def turn_spans(self) -> tuple[m.Span, ...]:
        """This worker's positions of the latest turn; (): it takes part without samples."""
        return self._turn.spans if self._turn is not None else ()

    def foresee(self, count: int) -> list[tuple[m.Span, ...]]:
        """This worker's positions in the steps after the latest turn's, unless the group changes."""
        turn = self._turn
        if turn is None or self._spec is None or self._is_pipeline:
            return []
        return ledger.foresee(self._spec, turn.ledger, turn.shares, self._driver.me, count)

    def _wait_unless_spare(self, elsewhere: Callable[[Picture], bool]) -> Picture | None:
        """As `_wait_for_more`; None: the run has ended while all seats were taken."""
        try:
            return None if self._spare_at_end else self._wait_for_more(elsewhere)
        except JoinRefused as refused:
            if not (self._is_pipeline and refused.code == "finished"):
                raise
            self._spare_at_end = True
            return None

    def _wait_for_more(self, elsewhere: Callable[[Picture], bool]) -> Picture:
        """Until a step is open, the run has ended, or a state is offered; hands out its own meanwhile."""
        while True:
            picture = self._driver.wait(lambda p: self._has_something(p) or elsewhere(p))
            assert picture is not None
            if elsewhere(picture) and not picture.finished and picture.aside is None:
                raise Interrupted  # what others need of this worker's memory is on its disk first
            if not self._has_something(picture):
                continue  # it was wanted elsewhere, and is not any more
            self._driver.signs.busy(True)  # what follows may take long, and others wait for it
            try:
                if not self._do_chores(picture):
                    return picture
            finally:
                self._driver.signs.busy(False)

    def _do_chores(self, picture: Picture) -> bool:
        """What others wait for, and what this worker lacks; True: the picture is another one now."""
        if picture.offered_work and self._replay is not None:
            self._follow()
        elif picture.inherited and self._inherit is not None and not self._has_begun(picture):
            for peer, entries in self._driver.residuals.take():  # between two rounds: none is prepared
                self._inherit(peer, entries)
            self._driver.wait(lambda p: not p.inherited, LOOK_AGAIN_S)  # or more has come meanwhile
        elif picture.discard_after is not None and self._disk is not None:
            self._disk.discard(picture.discard_after)
            self._driver.disk.discarded(picture.discard_after)
            self._driver.wait(lambda p: p.discard_after != picture.discard_after, LOOK_AGAIN_S)
        elif picture.aside is not None and self._disk is not None:
            self._put_aside(picture.aside)
        elif self._owes_kept(picture):
            self._give_kept(picture)
        elif picture.offered_state:
            return False
        elif self._owes_state(picture):
            self._give_state(picture)
        elif self._owes_image(picture):
            self._give_image(picture)
        else:
            return False
        return True

    def _follow(self) -> None:
        """Load an image, or replay updates: the members go on meanwhile."""
        assert self._restore is not None and self._replay is not None
        while (work := self._driver.catching_up.take_work()) is not None:
            try:
                if isinstance(work, ImageWork):
                    self._restore([bytes(work.own), bytes(work.common)])
                else:
                    for step in work.steps:
                        self._replay(step)
            except RemoteProtocolError as error:
                self._driver.catching_up.fail_work(error.reason)
                break
            self._driver.catching_up.did_work(work)
        self._driver.wait(lambda p: not p.offered_work, LOOK_AGAIN_S)

    def _owes_image(self, picture: Picture) -> bool:
        wanted = picture.wanted_image
        return wanted is not None and self._copy is not None and wanted <= picture.applied != self._image_of

    def _give_image(self, picture: Picture) -> None:
        assert self._copy is not None
        self._image_of = picture.applied
        self._driver.donating.fill(picture.applied, picture.history, self._copy())

    def _has_something(self, picture: Picture) -> bool:
        return (
            self._may_begin(picture)
            or picture.finished
            or picture.offered_state
            or picture.offered_work
            or picture.inherited
            or (picture.discard_after is not None and self._disk is not None)
            or (picture.aside is not None and self._disk is not None)
            or self._owes_kept(picture)
            or self._owes_state(picture)
            or self._owes_image(picture)
        )

    def _may_begin(self, picture: Picture) -> bool:
        return picture.open_round is not None and not (self._awaits_choice and not picture.exchange)

    def _owes_state(self, picture: Picture) -> bool:
        return picture.wanted_state > self._given_for and self._capture is not None

    def _give_state(self, picture: Picture) -> None:
        """Of the generation in which it was asked for, whatever this worker's seat is by now."""
        assert self._capture is not None
        self._given_for = generation, whole = picture.wanted_state
        blobs = self._capture(picture, whole)
        if blobs is not None:
            self._driver.giving.give(generation, blobs)

    def _owes_kept(self, picture: Picture) -> bool:
        return (
            picture.wanted_kept is not None and picture.wanted_kept != self._gave and self._disk is not None
        )

    def _give_kept(self, picture: Picture) -> None:
        assert picture.wanted_kept is not None and self._disk is not None
        self._gave = generation, held = picture.wanted_kept
        try:
            self._driver.giving.give_kept(held, generation, self._disk.give(held))
        except ConfigError as error:
            log.warning("%s", error)
            self.keeping(self._disk.held())  # first: behind it nobody is sent here for this one any more
            self._driver.giving.give_kept(held, generation, None)

    def _put_aside(self, held: m.Held) -> None:
        assert self._disk is not None
        try:
            self._disk.put_aside(held)
        except OSError as error:
            log.error("the state of step %d cannot be written: %s", held.applied + 1, error)
        self._driver.disk.put_aside(held)
        states = self._disk.held()
        written = any(each.is_of(held.blocks, held.applied, held.history) for each in states)
        self._driver.command(io.Keeping(states, None if written else held))
        self._driver.wait(lambda p: p.aside != held, LOOK_AGAIN_S)

    def _reload(self, asked: io.Reload) -> None:
        """The state is on this worker's disk; where it cannot be read, another member gives it."""
        assert self._disk is not None
        try:
            self._disk.reload(asked.held, asked.blocks)
        except (ConfigError, RemoteProtocolError) as error:
            log.warning("%s", error)
            self._driver.disk.cannot_reload(tuple(x for x in self._disk.held() if x not in asked.held))
            self._driver.wait(lambda p: p.reload != asked, LOOK_AGAIN_S)
            return
        self._driver.command(io.Restored(asked.term, asked.generation))
        self._driver.wait(lambda p: p.reload != asked)

    def _take_state(self) -> None:
        reload = self._driver.look().reload
        if reload is not None:
            self._driver.signs.busy(True)
            try:
                self._reload(reload)
            finally:
                self._driver.signs.busy(False)
            return
        if self._restore is None:
            raise ConfigError(
                "a state arrived before the optimizer was wrapped",
                remedy="call grid.optimizer(optimizer, model, ...) before grid.batches(...)",
            )
        taken = self._driver.taking.take()
        if taken is None:
            self._driver.wait(lambda p: not p.offered_state, LOOK_AGAIN_S)
            return
        term, generation, blobs = taken
        self._driver.signs.busy(True)
        try:
            due = self._driver.look().due_digest
            if due and self._disk is not None:
                self._disk.check(blobs, due)
            self._restore(blobs)
        except RemoteProtocolError as error:
            if not self._is_pipeline:
                raise
            log.warning("the state of this worker's stage is not taken: %s", error)
            self._driver.taking.blame_donor(
                generation, f"gave a state that is not this stage's: {error.reason}"
            )
            self._driver.wait(lambda p: p.generation != generation, LOOK_AGAIN_S)
            return
        finally:
            self._driver.signs.busy(False)
        self._driver.command(io.Restored(term, generation))
        # Not for ever: if the group has gone on meanwhile, the next generation's state may be there already.
        self._driver.wait(lambda p: not p.offered_state, LOOK_AGAIN_S)

    # -- one step (gridtrain.optim.session.Session) ------------------------------------------------

    def early(self) -> StepPlan | None:
        """See `optim.session.Session.early`."""
        picture, turn = self._driver.look(), self._turn
        if turn is None or self._turn_taken or picture.open_round is None or picture.open_round.attempt:
            return None
        if (picture.open_round, picture.spans) != (turn.open_round, turn.spans):
            return None
        plan = _plan(picture, picture.open_round)
        self._early = picture.open_round, plan
        return plan

    def send_early(self, plan: StepPlan, bucket: int, workspace: Workspace, skip: bool) -> None:
        """See `optim.session.Session.send_early`."""
        if self._early is not None and self._early[1] is plan:
            self._driver.rounds.begin(self._early[0], m.Channel(group=bucket), workspace, skip)

    def _has_begun(self, picture: Picture) -> bool:
        """Buckets of the open round are under way: what they were made of may not change."""
        return self._early is not None and self._early[0] == picture.open_round

    def begin(self) -> StepPlan | None:
        """See `optim.session.Session.begin`.

        Where no attempt can begin, nothing of the step is applied: as soon as `wanted_elsewhere()` the batch
        is given up, `given_up()` is called, and the next `await_turn` raises `Interrupted`.
        """
        if self._spec is None:
            raise _no_data_named()
        if self._turn is None or self._turn.open_round is None:
            raise ConfigError(
                "optimizer.step() was called after the end of the run",
                remedy="leave the loop when grid.batches(...) ends; it ends the run",
            )
        step = self._turn.open_round.step
        if self._turn_taken:
            raise ConfigError(
                f"optimizer.step() was called 2 times for the batch of step {step}; each batch is one step",
                remedy="call it once for each batch, or once for every a batches of "
                "grid.batches(..., accumulate=a)",
            )
        if not self._is_pipeline and self._pace.end(time.monotonic()):
            self._driver.signs.note(self._pace.figures())
        self._await_choice()
        try:
            waited = self._wait_unless_spare(
                lambda here: not self._may_begin(here) and self.wanted_elsewhere()
            )
        except Interrupted:
            self._gives_up, waited = True, None
            self.given_up()
        finally:
            self._awaits_choice = False
        if waited is None:
            self._turn_taken = True
            return None
        picture = waited
        moved_on = picture.open_round is None or picture.open_round.step != step
        other_samples = picture.spans not in ((), self._turn.spans)
        if picture.offered_state or moved_on or other_samples:
            # Away for a while: the group went on without this batch.  A state is loaded between batches only.
            self._turn_taken = True
            return None
        assert picture.open_round is not None
        self._turn = picture
        self._driver.rounds.begin_attempt()
        if self._early is not None and self._has_begun(picture):
            return self._early[1]
        return _plan(picture, picture.open_round)

    def _await_choice(self) -> None:
        """Where the coordinator chooses the exchange: tell it how long the batch took here.

        Also where it has chosen: the generation that is made meanwhile may leave that open again.
        """
        assert self._entered is not None
        if self._entered[3] and "" not in self._entered[3]:
            self._awaits_choice = True
            self._driver.signs.note({FIRST_FIGURE: max(1e-6, time.monotonic() - self._turn_began_s)})

    def open(self, plan: StepPlan, parts: Mapping[m.Channel, Part], settings: bytes) -> OpenedRound:
        """Instead of `run`, for a pipeline: the round's collectives are added as they are ready."""
        assert self._turn is not None and self._turn.open_round is not None
        self._pace.begin(time.monotonic(), plan.samples)
        return self._driver.rounds.open(self._turn.open_round, parts, settings)

    def computed(self) -> None:
        """The pipeline has drained here."""
        if self._pace.end(time.monotonic()):
            self._driver.signs.note(self._pace.figures())

    def ended(self, outcome: RoundOutcome) -> None:
        """How the round of `open` ended."""
        self._turn_taken = outcome.committed
        if outcome.committed:
            self._count_step()

    def run(
        self,
        plan: StepPlan,
        workspaces: Sequence[Workspace | BucketedWorkspace],
        skip: bool,
        settings: bytes,
    ) -> RoundOutcome:
        """See `optim.session.Session.run`."""
        assert self._turn is not None and self._turn.open_round is not None
        self._early = None
        outcome = self._driver.rounds.run(self._turn.open_round, workspaces, skip, settings)
        self._turn_taken = outcome.committed
        if outcome.committed:
            self._count_step()
        return outcome

    def _count_step(self) -> None:
        assert self._turn is not None
        self._tally.step_committed(ledger.samples(self._turn.spans))
        self._tell_what_is_given(time.monotonic())

    def _tell_what_is_given(self, now_s: float, *, last: bool = False) -> None:
        if self._tally.path is not None and (last or self._tally.due(now_s)):
            here, traffic = self._driver.look(), self.traffic.values()
            self._tally.tell(
                now_s,
                step=here.applied + 1,
                run_samples=here.ledger.consumed,
                sent_bytes=sum(sent for sent, _ in traffic),
                received_bytes=sum(received for _, received in traffic),
                world_size=here.world_size,
                last=last,
            )

    @property
    def turn_taken(self) -> bool:
        """The batch of the latest turn went into its step, or came too late for it."""
        return self._turn_taken

    def compare(self, step: int, digest: bytes) -> None:
        """See `optim.session.Session.compare`."""
        self._driver.command(io.Compare(step, digest))

    def note(self, figures: Mapping[str, float]) -> None:
        """Figures for `gridtrain status`."""
        self._driver.signs.note(figures)

    def mean(self, value: float) -> float:
        """Average over the workers, for people: `value` itself where the group changes meanwhile."""
        if self._gives_up:  # the others are at a step that this worker does not take any more
            return value
        picture = self._driver.look()
        step = picture.applied + 1
        self._mean_index = self._mean_index + 1 if self._mean_step == step else 0
        self._mean_step = step
        mean = self._driver.mean(step, self._mean_index, value, self.config.deadlines.first_step_s)
        return value if mean is None else mean

    # -- what people ask ---------------------------------------------------------------------------

    @property
    def picture(self) -> Picture:
        return self._driver.last if self._spare_at_end else self._driver.look()

    @property
    def traffic(self) -> dict[str, tuple[int, int]]:
        """Bytes (sent, received) so far by message type, framing included."""
        total = dict(self._before)
        for kind, (sent, received) in ({} if self._away else self._driver.traffic).items():
            before = total.get(kind, (0, 0))
            total[kind] = (before[0] + sent, before[1] + received)
        return total

    @property
    def moved_bytes(self) -> int:
        """Sent and received so far, all in all; for any thread."""
        while True:
            try:
                return sum(sent + received for sent, received in self.traffic.values())
            except RuntimeError:  # a new kind of message came while the table was read
                continue

    def busy(self, inside: bool) -> None:
        self._pace.drop()  # an evaluation is no computing of samples
        self._driver.signs.busy(inside)

    def settle(self, timeout_s: float) -> RoundOutcome | None:
        """See `Rounds.settle`."""
        return self._driver.rounds.settle(timeout_s)

    def last_inheritance(self, timeout_s: float) -> tuple[list[tuple[m.PeerId, Sparse]], float]:
        """Before this worker leaves: what others have handed over to it and it has not added yet; and the
        mass of what was acknowledged, but does not count within `timeout_s`."""
        driver = self._driver
        try:
            driver.residuals.last_call(timeout_s)
        except GridtrainError as error:
            log.debug("what was handed over to this worker is not waited for: %s", error)
        return driver.residuals.take(), driver.residuals.open_mass

    def hand_on(self, pieces: tuple[memoryview, ...], timeout_s: float) -> tuple[bool | None, str]:
        """Give this worker's residual away before it leaves: whether somebody has it (None: perhaps); who, or
        why not."""
        until_s = time.monotonic() + timeout_s
        if self._driver.wait(lambda p: p.stage is io.Stage.RUNNING, timeout_s) is None:
            return False, "no generation is running"
        handed = self._driver.residuals.hand_on(pieces, max(0.0, until_s - time.monotonic()))
        return (
            (None, f"no answer within {timeout_s:.1f} s") if handed is None else (handed.taken, handed.text)
        )

    def farewell(self) -> bool:
        """After the end: stay until all members have finished, so that none misses the last decision.

        Returns whether the coordinator declared the run finished in time.
        """
        if self._spare_at_end:
            return True
        until_s = time.monotonic() + FAREWELL_S
        try:
            while True:
                picture = self._driver.wait(
                    lambda p: p.run_state[0] == "finished" or self._owes_state(p),
                    until_s - time.monotonic(),
                )
                if picture is None or picture.run_state[0] == "finished":
                    return picture is not None
                self._give_state(picture)
        except GridtrainError:
            return False  # the run is over for this worker; nothing depends on what failed

    def close(self, reason: str = "") -> None:
        """Leave and release everything; idempotent."""
        if not self._ended:
            self._ended = True
            self._driver.stop(reason)
            with suppress(GridtrainError):  # what ended the loop's thread was told where it mattered
                self._tell_what_is_given(time.monotonic(), last=True)


def _plan(picture: Picture, open_round: m.RoundId) -> StepPlan:
    return StepPlan(
        step=open_round.step,
        attempt=open_round.attempt,
        rank=picture.rank,
        world_size=picture.world_size,
        samples=sum(span.stop - span.start for span in picture.spans),
        total_samples=picture.total_samples,
        compare=picture.compares_next,
        exchange=picture.exchange,
        cuts=picture.cuts,
        generation=open_round.generation,
        first_step=picture.first_step,
    )
