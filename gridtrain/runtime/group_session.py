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
from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain.core.group import member_events as io
from gridtrain.core.planning.exchange_choice import FIRST_STEP_FIGURE
from gridtrain.errors import ConfigError, GridtrainError, JoinRefused, RemoteProtocolError
from gridtrain.network.transport.access_control import PeerAllowlist
from gridtrain.network.transport.flow_control import FlowControlTransport
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.buffers.buckets import BucketedBuffer
from gridtrain.runtime.buffers.collective_buffers import CollectiveBuffer
from gridtrain.runtime.compute_rate import ComputeRate
from gridtrain.runtime.contribution import ContributionReporter
from gridtrain.runtime.io_loop import IoLoop
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.runtime.open_round import PipelineRound, RoundPart
from gridtrain.runtime.state_transfer.blobs import MAX_STATE_BYTES
from gridtrain.runtime.state_transfer.catch_up_receiver import SnapshotWork
from gridtrain.runtime.state_transfer.catch_up_source import SnapshotParts
from gridtrain.runtime.state_transfer.checkpoint_copy import CheckpointDisk
from gridtrain.runtime.state_transfer.update_log import StepUpdate
from gridtrain.runtime.step_plan import RoundOutcome, StepPlan

log = logging.getLogger("gridtrain")

CaptureState = Callable[[WorkerSnapshot, bool], Sequence[bytes | memoryview] | None]
"""Of this worker's seat in the picture, the whole or its first part; None: its state is not in memory."""
RestoreState = Callable[[Sequence[bytes]], None]
ReplayUpdate = Callable[[StepUpdate], None]
CopyState = Callable[[], Callable[[], SnapshotParts]]
AddResidual = Callable[[m.PeerId, SparseVector], None]
PeersOf = Callable[..., frozenset[int]]
"""Of a rank and a world size; of a model in stages also of where it is cut."""

POLL_INTERVAL_S = 0.05  # the loop's thread may not have noticed yet that there is nothing left to do
FINISH_TIMEOUT_S = 15.0  # how long a finished worker stays for the others' sake


class WaitInterrupted(Exception):
    """It is not waited for any longer: this worker is wanted elsewhere, between two steps or attempts."""


def _missing_dataset_error() -> ConfigError:
    return ConfigError(
        "a step was begun before the data was named",
        remedy="iterate over grid.batches(dataset, ...), or use grid.sampler(dataset, ...)",
    )


class StageCheckpointDisk(CheckpointDisk, Protocol):
    """A worker's checkpoints of the stages that it has held."""

    def stored_checkpoints(self) -> tuple[m.CheckpointInfo, ...]: ...

    def discard_after(self, after: int) -> None:
        """Remove those after this step."""
        ...

    def reload(self, held: Sequence[m.CheckpointInfo], blocks: m.Span) -> None:
        """Make this worker's state what it was then.  Raises `ConfigError`, `RemoteProtocolError`."""
        ...

    def save_now(self, held: m.CheckpointInfo) -> None:
        """Write this worker's state as a checkpoint, at once.  Raises `OSError`."""
        ...

    def read_for_peer(self, held: m.CheckpointInfo) -> Sequence[bytes]:
        """For another member's restore.  Raises `ConfigError`."""
        ...

    def verify(self, blobs: Sequence[bytes], digest: bytes) -> None:
        """What another member gave is the state with this digest.  Raises `RemoteProtocolError`."""
        ...


class GroupSession:
    """One worker's place in a run, over a `Driver`.  All methods belong to the training thread.

    Raises, from every method that waits: `JoinRefused` when the coordinator dismissed this worker,
    `RunPaused` when the run cannot go on, or whatever else ended the loop's thread.
    """

    def __init__(
        self, transport: FlowControlTransport, config: JoinConfig, acquaintances: PeerAllowlist
    ) -> None:
        self.config = config
        self._io_loop = IoLoop(transport, config, acquaintances)
        self._capture: CaptureState | None = None
        self._restore: RestoreState | None = None
        self._state_sent_for = (0, False)
        self._copy: CopyState | None = None
        self._replay: ReplayUpdate | None = None
        self._snapshot_step = -1
        self._add_residual: AddResidual | None = None
        self._turn: WorkerSnapshot | None = None
        self._is_turn_done = False
        self._early_plan: tuple[m.RoundId, StepPlan] | None = None  # the round that buckets were sent for
        self._spec: m.LedgerSpec | None = None
        self._join_arguments: tuple[m.Setup, PeersOf, m.WorkerInfo | None, Mapping[str, PeersOf]] | None = (
            None
        )
        self._turn_began_s = 0.0
        self._is_awaiting_choice = False  # the trainer has its gradient, and goes on with an exchange alone
        self._max_state_bytes = MAX_STATE_BYTES
        self._catch_up_limits, self._residual_n = (MAX_STATE_BYTES, 0), 0
        self._replay_obstacle = ""
        self._earlier_traffic: dict[str, tuple[int, int]] = {}  # what drivers before this one have moved
        self.budget_exhausted: Callable[[], str] = lambda: ""
        self.should_interrupt: Callable[[], bool] = lambda: False
        self.on_batch_dropped: Callable[[], None] = lambda: None
        self._is_dropping_batch = (
            False  # a batch, until this worker has left: its buckets may be on their way
        )
        self._is_paused = False  # this driver's traffic is among `_before` already
        self._is_pipeline = self._is_standby_at_end = False
        self._disk: StageCheckpointDisk | None = None
        self._checkpoint_sent_for: tuple[int, m.CheckpointInfo] | None = None
        self._has_ended = False
        self._mean_step = self._mean_index = 0
        self._compute_rate = ComputeRate()
        self._contribution = ContributionReporter(Path(config.contribution) if config.contribution else None)

    def start(self) -> None:
        """See `Driver.start`."""
        self._io_loop.start()

    def attach_state(
        self, capture: CaptureState, restore: RestoreState, max_state_bytes: int = MAX_STATE_BYTES
    ) -> None:
        """How to take a copy of this worker's state, and how to load another's, which is no larger."""
        self._capture, self._restore = capture, restore
        self._max_state_bytes = max_state_bytes
        self._configure(self._io_loop)

    def attach_catch_up(
        self, copy: CopyState, replay: ReplayUpdate, max_state_bytes: int, elements: int
    ) -> None:
        """How to copy this worker's state between two steps (bytes are made of it in another thread), and how
        to apply what the members did in a step; `elements`: of the flat gradient."""
        self._copy, self._replay = copy, replay
        self._catch_up_limits = (max_state_bytes, elements)
        self._configure(self._io_loop)

    def disable_replay(self, reason: str) -> None:
        """See `optim.session.Session.cannot_replay`."""
        self._replay_obstacle = reason
        self._configure(self._io_loop)

    def attach_stage_checkpoints(self, checkpoints: StageCheckpointDisk) -> None:
        """Where this worker's checkpoints of stages are, and those of the stage before."""
        self._disk = checkpoints
        self._configure(self._io_loop)

    def report_checkpoints(self, states: tuple[m.CheckpointInfo, ...]) -> None:
        """These checkpoints are on the disk now."""
        self._io_loop.submit(io.StageCheckpointsChanged(states))

    def attach_residual(self, n: int, inherit: AddResidual) -> None:
        """How to add what another worker has not sent to what this one has not: of n elements each."""
        self._add_residual, self._residual_n = inherit, n
        self._configure(self._io_loop)

    def resize_residual(self, n: int) -> None:
        """This worker holds another stage now, whose residual has so many elements."""
        self._residual_n = n
        self._io_loop.residuals.set_length(n)

    def _configure(self, driver: IoLoop) -> None:
        """Tell a driver all that this worker's script has said so far: the first one piece by piece, one
        after a pause all at once.  To be told again changes nothing."""
        driver.state_receiver.set_limit(self._max_state_bytes)
        driver.catch_up.set_limits(*self._catch_up_limits)
        driver.residuals.set_length(self._residual_n)
        driver.budget_exhausted = self.budget_exhausted
        driver.mailbox.should_interrupt = lambda: self.should_interrupt()
        if self._replay_obstacle:
            driver.catch_up_source.disable(self._replay_obstacle)
        if self._disk is not None:
            driver.checkpoint_requests.attach(self._disk, self._max_state_bytes)

    def join(
        self,
        setup: m.Setup,
        edges: PeersOf,
        about: m.WorkerInfo | None = None,
        choices: Mapping[str, PeersOf] = MappingProxyType({}),
    ) -> None:
        """Ask for a place in the run.  The coordinator refuses a set-up that differs from the run's.

        `about`: what this worker is, for people.  `choices`: see `member_io.Enter`.
        """
        self.check_not_joined()
        self._spec, self._join_arguments = setup.ledger, (setup, edges, about, choices)
        self._is_pipeline = setup.stages > 1
        self._io_loop.submit(io.TrainerJoined(setup, edges, about, choices))

    def check_not_joined(self) -> None:
        """Raises `ConfigError` if this worker has entered; to be asked before its disk is read."""
        if self._spec is not None:
            raise ConfigError(
                "a second data set was given to this run; its ledger has one",
                remedy="call grid.batches(...) or grid.sampler(...) once, with epochs= or steps= of the "
                "whole run: one loop goes over all of it",
            )

    # -- away, and back ----------------------------------------------------------------------------

    def pause(self, reason: str) -> None:
        """Leave the run between two steps, and mean to come back: nothing is sent or received any more."""
        self._io_loop.stop(reason, pausing=True)
        self._earlier_traffic = self.traffic
        self._is_paused, self._is_dropping_batch = True, False

    def resume(
        self,
        transport: FlowControlTransport,
        acquaintances: PeerAllowlist,
        held: m.CheckpointInfo | None,
        *,
        touched: bool,
    ) -> None:
        """After `depart`: ask for a place again, by the joiner's road.

        Args:
            held: the state that this worker has had since; the group's replaces it if it went on meanwhile.
            touched: the model is not the one any more that the script made, and it is of no step either.

        Raises as `Driver.start`; it can be called again then, with another transport.
        """
        assert self._join_arguments is not None
        driver = IoLoop(transport, self.config, acquaintances)
        self._configure(driver)
        driver.heartbeat.add_figures(self._io_loop.heartbeat.figures)
        self._state_sent_for, self._snapshot_step, self._checkpoint_sent_for = (0, False), -1, None
        self._turn, self._is_turn_done, self._early_plan = None, False, None
        self._compute_rate.discard()
        try:
            driver.start()
        except BaseException:
            driver.stop()
            transport.close()
            raise
        setup, edges, about, choices = self._join_arguments
        self._io_loop, self._is_paused = driver, False
        if touched and held is None:
            driver.submit(io.SnapshotLoading())
        kept = self._disk.stored_checkpoints() if self._disk is not None else setup.stage_checkpoints
        driver.submit(
            io.TrainerJoined(replace(setup, checkpoint=held, stage_checkpoints=kept), edges, about, choices)
        )

    def set_budget_check(self, spent: Callable[[], str]) -> None:
        """`spent` is asked by the loop's thread, often: once it says why, everything ends at once."""
        self.budget_exhausted = spent
        self._configure(self._io_loop)

    # -- turns -----------------------------------------------------------------------------------

    def await_turn(self) -> WorkerSnapshot | None:
        """Block until a step is open; None when the ledger has ended the run.  Does chores meanwhile.

        Raises `Interrupted` as soon as `wanted_elsewhere()`, unless the run has ended.
        """
        if self._spec is None:
            raise _missing_dataset_error()
        self._turn, self._is_turn_done = None, False
        while (
            picture := self._wait_unless_standby(lambda _: self._is_interrupted())
        ) is not None and picture.is_state_complete:
            self._restore_state()
        if picture is None or picture.is_finished:
            return None
        if self._is_interrupted():
            raise WaitInterrupted
        self._turn = picture
        self._turn_began_s = time.monotonic()
        self._compute_rate.begin(self._turn_began_s, sum(span.stop - span.start for span in picture.spans))
        return picture

    def _is_interrupted(self) -> bool:
        return self._is_dropping_batch or self.should_interrupt()

    @property
    def is_standby_at_end(self) -> bool:
        """The run is finished, and this worker was not a member at its end."""
        return self._is_standby_at_end

    @property
    def turn_spans(self) -> tuple[m.Span, ...]:
        """This worker's positions of the latest turn; (): it takes part without samples."""
        return self._turn.spans if self._turn is not None else ()

    def predict_spans(self, count: int) -> list[tuple[m.Span, ...]]:
        """This worker's positions in the steps after the latest turn's, unless the group changes."""
        turn = self._turn
        if turn is None or self._spec is None or self._is_pipeline:
            return []
        return data_ledger.predict_assignments(self._spec, turn.ledger, turn.shares, self._io_loop.me, count)

    def _wait_unless_standby(self, elsewhere: Callable[[WorkerSnapshot], bool]) -> WorkerSnapshot | None:
        """As `_wait_for_event`; None: the run has ended, and this worker was not a member at its end."""
        try:
            return None if self._is_standby_at_end else self._wait_for_event(elsewhere)
        except JoinRefused as refused:
            # A whole model's worker may have been receiving the state; one that came later is refused.
            was_running = self._io_loop.last_snapshot.run_state[0] in ("waiting", "training", "paused")
            if refused.code != "finished" or not (self._is_pipeline or was_running):
                raise
            self._is_standby_at_end = True
            return None

    def _wait_for_event(self, elsewhere: Callable[[WorkerSnapshot], bool]) -> WorkerSnapshot:
        """Until a step is open, the run has ended, or a state is offered; hands out its own meanwhile."""
        while True:
            picture = self._io_loop.wait(lambda p: self._has_event(p) or elsewhere(p))
            assert picture is not None
            if elsewhere(picture) and not picture.is_finished and picture.save_requested is None:
                raise WaitInterrupted  # what others need of this worker's memory is on its disk first
            if not self._has_event(picture):
                continue  # it was wanted elsewhere, and is not any more
            self._io_loop.heartbeat.set_busy(True)  # what follows may take long, and others wait for it
            try:
                if not self._serve_requests(picture):
                    return picture
            finally:
                self._io_loop.heartbeat.set_busy(False)

    def _serve_requests(self, picture: WorkerSnapshot) -> bool:
        """What others wait for, and what this worker lacks; True: the picture is another one now."""
        if picture.has_catch_up_work and self._replay is not None:
            self._apply_catch_up_work()
        elif (
            picture.has_incoming_residuals and self._add_residual is not None and not self._has_begun(picture)
        ):
            for (
                peer,
                entries,
            ) in self._io_loop.residuals.take_confirmed():  # between two rounds: none is prepared
                self._add_residual(peer, entries)
            self._io_loop.wait(
                lambda p: not p.has_incoming_residuals, POLL_INTERVAL_S
            )  # or more has come meanwhile
        elif picture.discard_after is not None and self._disk is not None:
            self._disk.discard_after(picture.discard_after)
            self._io_loop.checkpoint_requests.finish_discard(picture.discard_after)
            self._io_loop.wait(lambda p: p.discard_after != picture.discard_after, POLL_INTERVAL_S)
        elif picture.save_requested is not None and self._disk is not None:
            self._save_now(picture.save_requested)
        elif self._must_send_checkpoint(picture):
            self._send_checkpoint(picture)
        elif picture.is_state_complete:
            return False
        elif self._must_send_state(picture):
            self._send_state(picture)
        elif self._must_copy_snapshot(picture):
            self._copy_snapshot(picture)
        else:
            return False
        return True

    def _apply_catch_up_work(self) -> None:
        """Load an image, or replay updates: the members go on meanwhile."""
        assert self._restore is not None and self._replay is not None
        while (work := self._io_loop.catch_up.take_work()) is not None:
            try:
                if isinstance(work, SnapshotWork):
                    self._restore([bytes(work.own), bytes(work.common)])
                else:
                    for step in work.steps:
                        self._replay(step)
            except RemoteProtocolError as error:
                self._io_loop.catch_up.fail_work(error.reason)
                break
            self._io_loop.catch_up.finish_work(work)
        self._io_loop.wait(lambda p: not p.has_catch_up_work, POLL_INTERVAL_S)

    def _must_copy_snapshot(self, picture: WorkerSnapshot) -> bool:
        wanted = picture.requested_snapshot
        return (
            wanted is not None and self._copy is not None and wanted <= picture.applied != self._snapshot_step
        )

    def _copy_snapshot(self, picture: WorkerSnapshot) -> None:
        assert self._copy is not None
        self._snapshot_step = picture.applied
        self._io_loop.catch_up_source.store_copy(picture.applied, picture.history, self._copy())

    def _has_event(self, picture: WorkerSnapshot) -> bool:
        return (
            self._can_begin(picture)
            or picture.is_finished
            or picture.is_state_complete
            or picture.has_catch_up_work
            or picture.has_incoming_residuals
            or (picture.discard_after is not None and self._disk is not None)
            or (picture.save_requested is not None and self._disk is not None)
            or self._must_send_checkpoint(picture)
            or self._must_send_state(picture)
            or self._must_copy_snapshot(picture)
        )

    def _can_begin(self, picture: WorkerSnapshot) -> bool:
        return picture.open_round is not None and not (self._is_awaiting_choice and not picture.exchange)

    def _must_send_state(self, picture: WorkerSnapshot) -> bool:
        return picture.requested_state > self._state_sent_for and self._capture is not None

    def _send_state(self, picture: WorkerSnapshot) -> None:
        """Of the generation in which it was asked for, whatever this worker's seat is by now."""
        assert self._capture is not None
        self._state_sent_for = generation, whole = picture.requested_state
        blobs = self._capture(picture, whole)
        if blobs is not None:
            self._io_loop.state_sender.supply_state(generation, blobs)

    def _must_send_checkpoint(self, picture: WorkerSnapshot) -> bool:
        return (
            picture.requested_checkpoint is not None
            and picture.requested_checkpoint != self._checkpoint_sent_for
            and self._disk is not None
        )

    def _send_checkpoint(self, picture: WorkerSnapshot) -> None:
        assert picture.requested_checkpoint is not None and self._disk is not None
        self._checkpoint_sent_for = generation, held = picture.requested_checkpoint
        try:
            self._io_loop.state_sender.supply_checkpoint(held, generation, self._disk.read_for_peer(held))
        except ConfigError as error:
            log.warning("%s", error)
            self.report_checkpoints(
                self._disk.stored_checkpoints()
            )  # first: behind it nobody is sent here for this one any more
            self._io_loop.state_sender.supply_checkpoint(held, generation, None)

    def _save_now(self, held: m.CheckpointInfo) -> None:
        assert self._disk is not None
        try:
            self._disk.save_now(held)
        except OSError as error:
            log.error("the state of step %d cannot be written: %s", held.applied + 1, error)
        self._io_loop.checkpoint_requests.finish_save(held)
        states = self._disk.stored_checkpoints()
        written = any(each.matches(held.layers, held.applied, held.history) for each in states)
        self._io_loop.submit(io.StageCheckpointsChanged(states, None if written else held))
        self._io_loop.wait(lambda p: p.save_requested != held, POLL_INTERVAL_S)

    def _reload(self, asked: io.LoadCheckpoints) -> None:
        """The state is on this worker's disk; where it cannot be read, another member gives it."""
        assert self._disk is not None
        try:
            self._disk.reload(asked.checkpoints, asked.layers)
        except (ConfigError, RemoteProtocolError) as error:
            log.warning("%s", error)
            self._io_loop.checkpoint_requests.fail_reload(
                tuple(x for x in self._disk.stored_checkpoints() if x not in asked.checkpoints)
            )
            self._io_loop.wait(lambda p: p.reload != asked, POLL_INTERVAL_S)
            return
        self._io_loop.submit(io.StateLoaded(asked.term, asked.generation))
        self._io_loop.wait(lambda p: p.reload != asked)

    def _restore_state(self) -> None:
        reload = self._io_loop.snapshot().reload
        if reload is not None:
            self._io_loop.heartbeat.set_busy(True)
            try:
                self._reload(reload)
            finally:
                self._io_loop.heartbeat.set_busy(False)
            return
        if self._restore is None:
            raise ConfigError(
                "a state arrived before the optimizer was wrapped",
                remedy="call grid.optimizer(optimizer, model, ...) before grid.batches(...)",
            )
        taken = self._io_loop.state_receiver.take_state()
        if taken is None:
            self._io_loop.wait(lambda p: not p.is_state_complete, POLL_INTERVAL_S)
            return
        term, generation, blobs = taken
        self._io_loop.heartbeat.set_busy(True)
        try:
            due = self._io_loop.snapshot().expected_digest
            if due and self._disk is not None:
                self._disk.verify(blobs, due)
            self._restore(blobs)
        except RemoteProtocolError as error:
            if not self._is_pipeline:
                raise
            log.warning("the state of this worker's stage is not taken: %s", error)
            self._io_loop.state_receiver.reject_state(
                generation, f"gave a state that is not this stage's: {error.reason}"
            )
            self._io_loop.wait(lambda p: p.generation != generation, POLL_INTERVAL_S)
            return
        finally:
            self._io_loop.heartbeat.set_busy(False)
        self._io_loop.submit(io.StateLoaded(term, generation))
        # Not for ever: if the group has gone on meanwhile, the next generation's state may be there already.
        self._io_loop.wait(lambda p: not p.is_state_complete, POLL_INTERVAL_S)

    # -- one step (gridtrain.training.session_interface.Session) ------------------------------------------------

    def predict_plan(self) -> StepPlan | None:
        """See `optim.session.Session.early`."""
        picture, turn = self._io_loop.snapshot(), self._turn
        if turn is None or self._is_turn_done or picture.open_round is None or picture.open_round.attempt:
            return None
        if (picture.open_round, picture.spans) != (turn.open_round, turn.spans):
            return None
        plan = _make_step_plan(picture, picture.open_round)
        self._early_plan = picture.open_round, plan
        return plan

    def begin_bucket(self, plan: StepPlan, bucket: int, workspace: CollectiveBuffer, skip: bool) -> None:
        """See `optim.session.Session.send_early`."""
        if self._early_plan is not None and self._early_plan[1] is plan:
            self._io_loop.step_rounds.begin_bucket(
                self._early_plan[0], m.Channel(group=bucket), workspace, skip
            )

    def _has_begun(self, picture: WorkerSnapshot) -> bool:
        """Buckets of the open round are under way: what they were made of may not change."""
        return self._early_plan is not None and self._early_plan[0] == picture.open_round

    def begin(self) -> StepPlan | None:
        """See `optim.session.Session.begin`.

        Where no attempt can begin, nothing of the step is applied: as soon as `wanted_elsewhere()` the batch
        is given up, `given_up()` is called, and the next `await_turn` raises `Interrupted`.
        """
        if self._spec is None:
            raise _missing_dataset_error()
        if self._turn is None or self._turn.open_round is None:
            raise ConfigError(
                "optimizer.step() was called after the end of the run",
                remedy="leave the loop when grid.batches(...) ends; it ends the run",
            )
        step = self._turn.open_round.step
        if self._is_turn_done:
            raise ConfigError(
                f"optimizer.step() was called 2 times for the batch of step {step}; each batch is one step",
                remedy="call it once for each batch, or once for every a batches of "
                "grid.batches(..., accumulate=a)",
            )
        if not self._is_pipeline and self._compute_rate.end(time.monotonic()):
            self._io_loop.heartbeat.add_figures(self._compute_rate.figures())
        self._await_exchange_choice()
        try:
            waited = self._wait_unless_standby(
                lambda here: not self._can_begin(here) and self.should_interrupt()
            )
        except WaitInterrupted:
            self._is_dropping_batch, waited = True, None
            self.on_batch_dropped()
        finally:
            self._is_awaiting_choice = False
        if waited is None:
            self._is_turn_done = True
            return None
        picture = waited
        moved_on = picture.open_round is None or picture.open_round.step != step
        other_samples = picture.spans not in ((), self._turn.spans)
        if picture.is_state_complete or moved_on or other_samples:
            # Away for a while: the group went on without this batch.  A state is loaded between batches only.
            self._is_turn_done = True
            return None
        assert picture.open_round is not None
        self._turn = picture
        self._io_loop.step_rounds.begin_attempt()
        if self._early_plan is not None and self._has_begun(picture):
            return self._early_plan[1]
        return _make_step_plan(picture, picture.open_round)

    def _await_exchange_choice(self) -> None:
        """Where the coordinator chooses the exchange: tell it how long the batch took here.

        Also where it has chosen: the generation that is made meanwhile may leave that open again.
        """
        assert self._join_arguments is not None
        if self._join_arguments[3] and "" not in self._join_arguments[3]:
            self._is_awaiting_choice = True
            self._io_loop.heartbeat.add_figures(
                {FIRST_STEP_FIGURE: max(1e-6, time.monotonic() - self._turn_began_s)}
            )

    def open_round(
        self, plan: StepPlan, parts: Mapping[m.Channel, RoundPart], settings: bytes
    ) -> PipelineRound:
        """Instead of `run`, for a pipeline: the round's collectives are added as they are ready."""
        assert self._turn is not None and self._turn.open_round is not None
        self._compute_rate.begin(time.monotonic(), plan.samples)
        return self._io_loop.step_rounds.open(self._turn.open_round, parts, settings)

    def finish_computing(self) -> None:
        """The pipeline has drained here."""
        if self._compute_rate.end(time.monotonic()):
            self._io_loop.heartbeat.add_figures(self._compute_rate.figures())

    def end_round(self, outcome: RoundOutcome) -> None:
        """How the round of `open` ended."""
        self._is_turn_done = outcome.is_committed
        if outcome.is_committed:
            self._count_contribution()

    def run(
        self,
        plan: StepPlan,
        workspaces: Sequence[CollectiveBuffer | BucketedBuffer],
        skip: bool,
        settings: bytes,
    ) -> RoundOutcome:
        """See `optim.session.Session.run`."""
        assert self._turn is not None and self._turn.open_round is not None
        self._early_plan = None
        outcome = self._io_loop.step_rounds.run(self._turn.open_round, workspaces, skip, settings)
        self._is_turn_done = outcome.is_committed
        if outcome.is_committed:
            self._count_contribution()
        return outcome

    def _count_contribution(self) -> None:
        assert self._turn is not None
        self._contribution.step_committed(data_ledger.count_samples(self._turn.spans))
        self._report_contribution(time.monotonic())

    def _report_contribution(self, now_s: float, *, last: bool = False) -> None:
        if self._contribution.path is not None and (last or self._contribution.is_due(now_s)):
            here, traffic = self._io_loop.snapshot(), self.traffic.values()
            self._contribution.report(
                now_s,
                step=here.applied + 1,
                run_samples=here.ledger.consumed,
                sent_bytes=sum(sent for sent, _ in traffic),
                received_bytes=sum(received for _, received in traffic),
                world_size=here.world_size,
                last=last,
            )

    @property
    def is_turn_done(self) -> bool:
        """The batch of the latest turn went into its step, or came too late for it."""
        return self._is_turn_done

    def report_digest(self, step: int, digest: bytes) -> None:
        """See `optim.session.Session.compare`."""
        self._io_loop.submit(io.CompareReplicas(step, digest))

    def report_figures(self, figures: Mapping[str, float]) -> None:
        """Figures for `gridtrain status`."""
        self._io_loop.heartbeat.add_figures(figures)

    def average(self, value: float) -> float:
        """Average over the workers, for people: `value` itself where the group changes meanwhile."""
        if self._is_dropping_batch:  # the others are at a step that this worker does not take any more
            return value
        picture = self._io_loop.snapshot()
        step = picture.applied + 1
        self._mean_index = self._mean_index + 1 if self._mean_step == step else 0
        self._mean_step = step
        mean = self._io_loop.average(step, self._mean_index, value, self.config.deadlines.first_step_s)
        return value if mean is None else mean

    # -- what people ask ---------------------------------------------------------------------------

    @property
    def snapshot(self) -> WorkerSnapshot:
        return self._io_loop.last_snapshot if self._is_standby_at_end else self._io_loop.snapshot()

    @property
    def traffic(self) -> dict[str, tuple[int, int]]:
        """Bytes (sent, received) so far by message type, framing included."""
        total = dict(self._earlier_traffic)
        for kind, (sent, received) in ({} if self._is_paused else self._io_loop.traffic).items():
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

    def set_busy(self, inside: bool) -> None:
        self._compute_rate.discard()  # an evaluation is no computing of samples
        self._io_loop.heartbeat.set_busy(inside)

    def resolve_last_round(self, timeout_s: float) -> RoundOutcome | None:
        """See `Rounds.settle`."""
        return self._io_loop.step_rounds.resolve_last(timeout_s)

    def take_last_residuals(self, timeout_s: float) -> tuple[list[tuple[m.PeerId, SparseVector]], float]:
        """Before this worker leaves: what others have handed over to it and it has not added yet; and the
        mass of what was acknowledged, but does not count within `timeout_s`."""
        driver = self._io_loop
        try:
            driver.residuals.stop_accepting(timeout_s)
        except GridtrainError as error:
            log.debug("what was handed over to this worker is not waited for: %s", error)
        return driver.residuals.take_confirmed(), driver.residuals.unconfirmed_magnitude

    def transfer_residual(self, pieces: tuple[memoryview, ...], timeout_s: float) -> tuple[bool | None, str]:
        """Give this worker's residual away before it leaves: whether somebody has it (None: perhaps); who, or
        why not."""
        until_s = time.monotonic() + timeout_s
        if self._io_loop.wait(lambda p: p.phase is io.MemberPhase.RUNNING, timeout_s) is None:
            return False, "no generation is running"
        handed = self._io_loop.residuals.transfer(pieces, max(0.0, until_s - time.monotonic()))
        return (
            (None, f"no answer within {timeout_s:.1f} s")
            if handed is None
            else (handed.is_accepted, handed.text)
        )

    def wait_for_members(self) -> bool:
        """After the end: stay until all members have finished, so that none misses the last decision.

        Returns whether the coordinator declared the run finished in time.
        """
        if self._is_standby_at_end:
            return True
        until_s = time.monotonic() + FINISH_TIMEOUT_S
        try:
            while True:
                picture = self._io_loop.wait(
                    lambda p: p.run_state[0] == "finished" or self._must_send_state(p),
                    until_s - time.monotonic(),
                )
                if picture is None or picture.run_state[0] == "finished":
                    return picture is not None
                self._send_state(picture)
        except GridtrainError:
            return False  # the run is over for this worker; nothing depends on what failed

    def close(self, reason: str = "") -> None:
        """Leave and release everything; idempotent."""
        if not self._has_ended:
            self._has_ended = True
            self._io_loop.stop(reason)
            with suppress(GridtrainError):  # what ended the loop's thread was told where it mattered
                self._report_contribution(time.monotonic(), last=True)


def _make_step_plan(picture: WorkerSnapshot, open_round: m.RoundId) -> StepPlan:
    return StepPlan(
        step=open_round.step,
        attempt=open_round.attempt,
        rank=picture.rank,
        world_size=picture.world_size,
        samples=sum(span.stop - span.start for span in picture.spans),
        total_samples=picture.total_samples,
        compare_after=picture.compare_after_step,
        exchange=picture.exchange,
        stage_bounds=picture.stage_bounds,
        generation=open_round.generation,
        first_step=picture.first_step,
    )
