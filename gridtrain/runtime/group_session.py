"""The training thread's interface to a run: waits for turns, runs steps, and waits at the end.

    batches:  await_turn -> spans ----> the user's loop computes -----> optimizer.step
                                                                          begin -> StepPlan
                                                                          run   -> RoundOutcome

While the training thread waits, it performs tasks for the group (`trainer_tasks`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from gridtrain.config import JoinConfig
from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain.core.group import member_events as ev
from gridtrain.core.planning.exchange_choice import FIRST_STEP_FIGURE
from gridtrain.errors import (
    VERSION,
    ConfigError,
    CoordinatorUnreachable,
    GridtrainError,
    JoinRefused,
    RunPaused,
)
from gridtrain.network.transport.access_control import PeerAllowlist
from gridtrain.network.transport.flow_control import FlowControlTransport
from gridtrain.quantities import format_count
from gridtrain.runtime.buffers.buckets import RoundBuffers
from gridtrain.runtime.buffers.collective_buffers import CollectiveBuffer
from gridtrain.runtime.compute_rate import ComputeRate
from gridtrain.runtime.contribution import Contribution, ContributionReporter
from gridtrain.runtime.event_log import describe_awaited, describe_run_state
from gridtrain.runtime.group_connection import GroupConnection
from gridtrain.runtime.group_means import GroupMeans
from gridtrain.runtime.io_loop import IoLoop
from gridtrain.runtime.mailbox.mailbox import WaitCondition
from gridtrain.runtime.mailbox.step_plan import NOT_COMMITTED, RoundOutcome, StepPlan
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.runtime.mailbox.worker_task import (
    AddResiduals,
    ApplyMissedSteps,
    CaptureState,
    CopyStateSnapshot,
    ReadCheckpoint,
    WorkerTask,
)
from gridtrain.runtime.open_round import OpenRound, PipelineRound, RoundPart
from gridtrain.runtime.trainer_tasks import LOAD_TASKS

log = logging.getLogger("gridtrain")

PeersOf = Callable[..., frozenset[int]]
"""Returns a rank's neighbours; called with the rank, the world size and, in a pipeline, the stage bounds."""

FINISH_TIMEOUT_S = 15.0
"""Maximum time for which a worker that has finished waits for the other members."""

ABSENCE_WARNING_INTERVAL_S = 60.0
"""Minimum time between two warnings that the group went on without this worker."""


class WaitInterrupted(Exception):
    """Raised when a wait ends early because this worker has to leave the group or drop its batch."""


def _missing_dataset_error() -> ConfigError:
    return ConfigError(
        "a step was begun before the data set was given",
        remedy="iterate over grid.batches(dataset, ...), or use grid.sampler(dataset, ...)",
    )


class GroupSession:
    """One worker's place in a run, as the training thread sees it.

    Every method that waits raises `JoinRefused` if the coordinator has dismissed this worker, `RunPaused` if
    the run cannot continue, or any other error that ended the I/O thread.

    Attributes:
        connection: the connection to the group, which is kept across pauses.
        tasks: performs tasks for the group while this worker waits.
        on_batch_dropped: a function that is called when a batch is abandoned because this worker has to leave
            the group.
        on_turn_begun: a function that is called before the loop gets a batch, with this worker's rank and the
            step.
        is_state_unchanged: a function that returns whether this worker's parameters are still the same as
            after the last step, although the script already has the next batch.
        is_in_task: whether a task for the group has been interrupted, which may have left the model
            incomplete.
        is_turn_done: whether the batch of the latest turn was used in its step or came too late for it.
        end_reason: the coordinator's reason for refusing this worker after the end of the run (the worker was
            on standby, or the run was ended without a model); otherwise "".
        failure: why this worker leaves, if its data cannot be read or its final model cannot be written;
            otherwise "".
    """

    def __init__(self, transport: FlowControlTransport, config: JoinConfig, allowlist: PeerAllowlist) -> None:
        self.config = config
        self.connection = GroupConnection(transport, config, allowlist)
        self.tasks = self.connection.tasks
        self.on_batch_dropped: Callable[[], None] = lambda: None
        self.on_turn_begun: Callable[[int, int], None] = lambda rank, step: None
        self.is_state_unchanged: Callable[[], bool] = lambda: False
        self._joined: ev.TrainerJoined | None = None
        self.is_turn_done = self._has_closed = False
        self.is_in_task = False  # still set after a task that an exception has ended
        self.end_reason = self.failure = ""
        self._turn: WorkerSnapshot | None = None
        self._early_plan: tuple[m.RoundId, StepPlan] | None = None  # the round for which buckets were sent
        self._submitted: OpenRound | None = None  # the round whose outcome the trainer has not taken yet
        self._is_awaiting_choice = False  # the trainer has its gradient, and needs the choice of an exchange
        self._is_dropping_batch = False  # until this worker has left: its buckets may be in transit
        self._next_absence_warning_s = -math.inf
        self._means = GroupMeans(self.connection, self._await_generation_of)
        self._compute_rate = ComputeRate()
        self._contribution = ContributionReporter(Path(config.contribution) if config.contribution else None)

    def join(
        self,
        setup: m.Setup,
        neighbours: PeersOf,
        about: m.WorkerInfo | None = None,
        choices: Mapping[str, PeersOf] = MappingProxyType({}),
        *,
        may_be_absent: bool = False,
    ) -> None:
        """Request a place in the run.  The coordinator refuses a set-up that differs from the run's.

        Args:
            setup: the set-up of the training script.
            neighbours: a function that returns the neighbours of a rank.
            about: the description of this worker that users see.
            choices: the value of `ev.TrainerJoined.neighbours_by_exchange`.
            may_be_absent: the value of `ev.TrainerJoined.may_be_absent`.

        Raises `ConfigError` if this worker has already joined.
        """
        self.check_not_joined()
        if setup.checkpoint is not None:
            self.tasks.applied = setup.checkpoint.applied
        self._joined = ev.TrainerJoined(setup, neighbours, about, choices, may_be_absent)
        self.connection.submit(self._joined)

    def check_not_joined(self) -> None:
        """Raise `ConfigError` if this worker has joined.  Call this method before reading from the disk."""
        if self._joined is not None:
            raise ConfigError(
                "another data set, size or length was given; a run keeps those of the first call",
                remedy="call grid.batches(...) or grid.sampler(...) again only with the same arguments, to "
                "continue the run; epochs= or steps= is the length of the whole run",
            )

    def pause(self, reason: str) -> int:
        """Leave the run until `resume`.  See `GroupConnection.pause`.

        Returns the number of members of the last generation, including this worker; 0 if there was none.
        """
        self.connection.pause(reason)
        with suppress(GridtrainError):  # the error that ended the I/O thread is raised at the rejoin
            self._report_contribution(time.monotonic(), last=True)
        self._is_dropping_batch = False
        return self._loop.mailbox.snapshot.world_size

    def resume(
        self,
        transport: FlowControlTransport,
        allowlist: PeerAllowlist,
        held: m.CheckpointInfo | None,
        *,
        touched: bool,
    ) -> None:
        """Rejoin the run after `pause`, in the same way as a new worker.

        Args:
            transport: the transport of the new I/O loop.
            allowlist: the access policy of the transport.
            held: the state that this worker holds, or None; the group's state replaces it if the group has
                continued.
            touched: whether the model has changed since the script created it.

        Raises the same errors as `IoLoop.start`.  After an error, the call can be repeated with another
        transport.
        """
        assert self._joined is not None
        self._turn, self.is_turn_done, self._early_plan, self._submitted = None, False, None, None
        self._compute_rate.discard()
        joined = replace(self._joined, setup=replace(self._joined.setup, checkpoint=held))
        self.connection.resume(transport, allowlist, joined, reset=touched and held is None)

    # -- turns -----------------------------------------------------------------------------------

    def await_turn(self) -> WorkerSnapshot | None:
        """Perform tasks until a step is open; return the snapshot, or None if the run has ended.

        Raises `WaitInterrupted` as soon as this worker has to leave the group, unless the run has ended, and
        `ConfigError` if `join` has not been called.
        """
        if self._joined is None:
            raise _missing_dataset_error()
        self._turn, self.is_turn_done = None, False
        snapshot = self._wait(lambda _: self._is_interrupted, between_batches=True)
        if snapshot is None:
            return None
        if snapshot.is_ended_early:
            log.warning("the run has finished: %s", snapshot.run_state[1])
        if snapshot.is_finished:
            return None
        if self._is_interrupted:
            raise WaitInterrupted
        self._turn = snapshot
        if not self._has_delay:
            self.tasks.applied = snapshot.applied  # even if a pipeline begins again at step 0
        self._means.begin_turn(self._group_step)
        self._compute_rate.begin(time.monotonic(), data_ledger.count_samples(snapshot.spans))
        if snapshot.open_round is not None:
            self.on_turn_begun(snapshot.rank, snapshot.open_round.step)
        return snapshot

    @property
    def is_joined(self) -> bool:
        """Whether `join` has been called."""
        return self._joined is not None

    @property
    def is_in_turn(self) -> bool:
        """Whether the script has received a turn's batch and has not requested the next one."""
        return self._turn is not None

    def snapshot_of_model(self, snapshot: WorkerSnapshot) -> WorkerSnapshot | None:
        """Return the snapshot whose last applied step is the last step in the model: `snapshot` or, if the
        step of the turn in progress is committed, but its update not applied yet, the snapshot of that turn.

        Returns None if the model's last step is not known, or its update may be applied in part.  The turn
        may have changed the model (see `GridOptimizer.abort_turn`).
        """
        if self.is_in_task or snapshot.tasks or self.is_turn_done:
            return None
        turn = self._turn
        if turn is None:
            return snapshot
        if turn.open_round is None or turn.open_round.step > snapshot.applied + 1:
            return None
        if turn.open_round.step == snapshot.applied + 1:
            return snapshot
        is_latest = turn.open_round.step == snapshot.applied == turn.applied + 1 == self.tasks.applied + 1
        return turn if is_latest else None

    @property
    def turn_spans(self) -> tuple[m.Span, ...]:
        """This worker's positions in the latest turn; empty if the worker takes part without samples."""
        return self._turn.spans if self._turn is not None else ()

    def predict_spans(self, count: int) -> list[tuple[m.Span, ...]]:
        """Predict this worker's positions in the next `count` steps, assuming that the group does not change.

        Returns an empty list in a pipeline, or if no turn has begun.
        """
        turn = self._turn
        if turn is None or self._joined is None or self._is_pipeline:
            return []
        ledger = self._joined.setup.ledger
        return data_ledger.predict_assignments(ledger, turn.ledger, turn.shares, self._loop.me, count)

    @property
    def _loop(self) -> IoLoop:
        return self.connection.loop

    @property
    def _is_pipeline(self) -> bool:
        return self._joined is not None and self._joined.setup.stages > 1

    @property
    def _step_call(self) -> str:
        """The call that takes a step in this worker's script."""
        return "pipe.step(...)" if self._is_pipeline else "optimizer.step()"

    def calls_error(self, called: str, more: str = "") -> ConfigError:
        """Return the error for a script that does not take one step for each batch.

        Args:
            called: how often, and for which batch, the script has called `step`.
            more: text to append to the remedy.
        """
        remedy = "once per batch, or once per N batches with grid.batches(..., accumulate=N)"
        if self._is_pipeline:
            remedy = "once for each batch, on all workers"
        return ConfigError(
            f"{self._step_call} was called {called}; each batch is one step",
            remedy=f"call {self._step_call} {remedy}{more}",
        )

    @property
    def batch_size_is_one(self) -> bool:
        """Whether the batch size or the global batch size in this worker's script is one sample."""
        setup = self._joined.setup if self._joined is not None else None
        return setup is not None and 1 in (setup.batch_size, setup.global_batch_size)

    @property
    def _is_interrupted(self) -> bool:
        return self._is_dropping_batch or self.connection.should_interrupt

    def _wait(self, interrupts: WaitCondition, *, between_batches: bool) -> WorkerSnapshot | None:
        """Perform tasks until a step is open or the run has ended.

        Returns the snapshot, or None if this worker was not a member at the end of the run.

        Args:
            interrupts: a function that returns whether to stop waiting.
            between_batches: whether to perform tasks that replace the model.  If False, the wait ends when
                a task that replaces the model is due.

        Raises `WaitInterrupted` if `interrupts(snapshot)` is true, unless the run has ended.
        """
        if self.end_reason:
            return None

        def is_over(here: WorkerSnapshot) -> bool:
            must_load = not between_batches and any(isinstance(task, LOAD_TASKS) for task in here.tasks)
            return must_load or here.is_finished or self._can_begin(here)

        with self._ends_as_standby():
            while True:
                snapshot = self.connection.wait(
                    lambda here: (
                        is_over(here)
                        or interrupts(here)
                        or self._next_task(here, between_batches=between_batches) is not None
                    )
                )
                assert snapshot is not None
                must_save = any(
                    isinstance(task, ev.SaveCheckpoint | ApplyMissedSteps) for task in snapshot.tasks
                )
                if interrupts(snapshot) and not snapshot.is_finished and not must_save:
                    raise WaitInterrupted  # a due checkpoint is written first, because others need the state
                task = self._next_task(snapshot, between_batches=between_batches)
                if task is not None:
                    self._run_task(task, snapshot)
                elif is_over(snapshot):
                    return snapshot
        return None

    @contextmanager
    def _ends_as_standby(self) -> Iterator[None]:
        """Record that the run has ended without this worker, instead of raising the coordinator's refusal.

        Without stages, this applies only to a worker that had already joined, such as a worker that was still
        receiving the state or had lost its connection; a worker that joins after the end is refused.
        """
        try:
            yield
        except JoinRefused as refused:
            was_running = self._loop.mailbox.snapshot.run_state[0] in ("waiting", "training", "paused")
            if refused.code != "finished" or not (self._is_pipeline or was_running):
                raise
            self.end_reason = refused.reason

    def serve_state(self, may_copy: Callable[[], bool]) -> None:
        """Within a turn, perform the tasks that copy the state after the last step, without waiting.

        Args:
            may_copy: a function that returns whether the function that captures the state omits this
                turn's changes.  `may_copy` is called only if a copy is due.

        If the I/O loop has ended, `begin` raises its error, unless the run has ended, too.
        """
        while True:
            snapshot = self._loop.mailbox.snapshot
            tasks = [task for task in snapshot.tasks if not isinstance(task, AddResiduals)]
            is_latest = snapshot.applied == self.tasks.applied  # otherwise an update is not applied yet
            is_due = tasks and is_latest and isinstance(tasks[0], CaptureState | CopyStateSnapshot)
            if not (is_due and may_copy()):
                return
            self._run_task(tasks[0], snapshot)

    def _next_task(self, snapshot: WorkerSnapshot, *, between_batches: bool) -> WorkerTask | None:
        has_begun = self._has_begun(snapshot) or self._submitted is not None
        return self.tasks.next_task(snapshot, is_round_begun=has_begun, between_batches=between_batches)

    def _run_task(self, task: WorkerTask, snapshot: WorkerSnapshot) -> None:
        self.is_in_task = True
        self.tasks.run(task, snapshot, is_pipeline=self._is_pipeline)
        self.is_in_task = False

    def _can_begin(self, snapshot: WorkerSnapshot) -> bool:
        return snapshot.open_round is not None and not (self._is_awaiting_choice and not snapshot.exchange)

    # -- one step, for `gridtrain.training.optimizer` ----------------------------------------------

    def predict_plan(self) -> StepPlan | None:
        """Return the plan of the step whose batch is being computed, without waiting; None if the plan is not
        known yet.

        `begin` returns the same object if the buckets that were sent for this plan are still valid.
        """
        snapshot, turn = self.snapshot, self._turn
        if turn is None or self.is_turn_done or snapshot.open_round is None or snapshot.open_round.attempt:
            return None
        if (snapshot.open_round, snapshot.spans) != (turn.open_round, turn.spans):
            return None
        if self._is_exchange_chosen_for_it and not snapshot.exchange:
            return None
        if (plan := snapshot.plan) is not None:
            self._early_plan = snapshot.open_round, plan
        return plan

    def begin_bucket(self, plan: StepPlan, bucket: int, buffer: CollectiveBuffer, skip: bool) -> None:
        """Start exchanging a bucket before `run` is called, and return immediately.

        The first buffer passed to `run` must be a `BucketedBuffer` with `buffer` as this bucket.
        """
        if self._early_plan is not None and self._early_plan[1] is plan:
            with self._ends_as_standby():
                self._loop.step_rounds.begin_bucket(
                    self._early_plan[0], m.Channel(group=bucket), buffer, skip
                )

    def _has_begun(self, snapshot: WorkerSnapshot) -> bool:
        """Return whether buckets of the open round have been sent; if so, the residual must not change."""
        return self._early_plan is not None and self._early_plan[0] == snapshot.open_round

    def begin(self) -> StepPlan | None:
        """Wait until a generation runs and the next attempt can start; return the plan of the attempt.

        Returns None if no attempt with this turn's batch can start, because the group has continued without
        the batch, the run has ended, or this worker has to leave the group.  While this method waits,
        this worker's state may be captured for a newcomer.

        If no attempt can begin and this worker has to leave the group, the batch is abandoned:
        `on_batch_dropped` is called, and the next `await_turn` raises `WaitInterrupted`.

        Raises `ConfigError` if no data set was given, the run has ended, or the turn's step is already done.
        """
        if self._joined is None:
            raise _missing_dataset_error()
        if self._turn is None or self._turn.open_round is None:
            raise ConfigError(
                f"{self._step_call} was called after the end of the run",
                remedy="leave the loop when grid.batches(...) ends, because the run ends with it",
            )
        step = self._turn.open_round.step
        if self.is_turn_done:
            raise self.calls_error(f"twice for the batch of step {step + 1}")
        if not self._is_pipeline:
            self.finish_computing()
        self._await_exchange_choice()
        try:
            snapshot = self._wait(
                lambda here: not self._can_begin(here) and self.connection.should_interrupt,
                between_batches=False,
            )
        except WaitInterrupted:
            self._is_dropping_batch, snapshot = True, None
            self.on_batch_dropped()
        finally:
            self._is_awaiting_choice = False
        if snapshot is not None and snapshot.is_ended_early and snapshot.applied < step:
            self.on_batch_dropped()
        if snapshot is None or not self._is_turn_of(snapshot, step):
            self.is_turn_done = True
            return None
        assert snapshot.open_round is not None
        if (missed := snapshot.open_round.step - step) > 0:
            self._log_absence(step, missed, is_dropped=snapshot.spans != self.turn_spans)
        self._turn = snapshot
        self._means.repeat(snapshot.generation)
        self._loop.step_rounds.begin_attempt()
        if self._early_plan is not None and self._has_begun(snapshot):
            return self._early_plan[1]
        return snapshot.plan

    def _is_turn_of(self, snapshot: WorkerSnapshot, step: int) -> bool:
        """Return whether the batch of this turn can be used in the open round.

        It cannot be used if the group continued without it while this worker was disconnected, or if a state
        has to be loaded, because states are loaded only between batches.  A batch of a step that was
        committed without this worker can be used in a later step.
        """
        if snapshot.open_round is None or (snapshot.open_round.step != step and not snapshot.is_late):
            return False
        if any(isinstance(task, LOAD_TASKS) for task in snapshot.tasks):
            return False
        return snapshot.spans in ((), self.turn_spans)

    def _log_absence(self, step: int, missed: int, *, is_dropped: bool) -> None:
        """Log, as a warning at most once in `ABSENCE_WARNING_INTERVAL_S`, that the group committed `missed`
        steps from `step` on without this worker, and what becomes of its batch."""
        now_s = time.monotonic()
        is_due = now_s >= self._next_absence_warning_s
        if is_due:
            self._next_absence_warning_s = now_s + ABSENCE_WARNING_INTERVAL_S
        fate = f"; its batch of step {step + 1} "
        if is_dropped:
            fate += "came too late and is dropped, and other workers get the samples"
        else:
            fate += f"is used in step {step + missed + 1}"
        log.log(
            logging.WARNING if is_due else logging.INFO,
            "the group went on for %s without this worker, whose training loop had stalled%s",
            format_count(missed, "step"),
            fate if self.turn_spans else "",  # a worker with a share of 0 has no samples
        )

    def _await_exchange_choice(self) -> None:
        """If the coordinator chooses the exchange, report how long the batch took, and make `begin` wait for
        the choice.

        The time is also reported after the coordinator has chosen, because a new generation may have to
        choose again.
        """
        if self._is_exchange_chosen_for_it:
            self._is_awaiting_choice = True
            computed_s = self._compute_rate.turn_s(time.monotonic())
            self.report_figures({FIRST_STEP_FIGURE: max(1e-6, computed_s)})

    @property
    def _is_exchange_chosen_for_it(self) -> bool:
        """Whether the coordinator chooses the exchange; if so, no round can begin before the choice."""
        choices = self._joined.neighbours_by_exchange if self._joined is not None else {}
        return bool(choices) and "" not in choices

    def open_round(
        self, plan: StepPlan, parts: Mapping[m.Channel, RoundPart], settings: bytes
    ) -> PipelineRound:
        """Open a pipeline's round; collectives are added to it as they become ready.

        A pipeline calls this method instead of `run`.
        """
        assert self._turn is not None and self._turn.open_round is not None
        self._compute_rate.begin(time.monotonic(), plan.samples)
        return self._loop.step_rounds.open(self._turn.open_round, parts, settings)

    def pause_computing(self, share: float) -> None:
        """Exclude the time until `resume_computing` from this turn's compute figures.

        Args:
            share: the fraction of the turn's samples computed so far, 0 < share <= 1.
        """
        self._compute_rate.pause(time.monotonic(), share)

    def resume_computing(self) -> None:
        """See `pause_computing`."""
        self._compute_rate.resume(time.monotonic())

    @property
    def is_computing_unreported(self) -> bool:
        """Whether this turn has been computed for longer than the interval of heartbeats since the latest
        `finish_computing`."""
        return self._compute_rate.uncounted_s(time.monotonic()) >= self.config.deadlines.beat_s

    def finish_computing(self, share: float = 1.0) -> None:
        """Report this turn's compute figures.  Call this method when the gradient of the turn's samples is
        complete, or earlier with the fraction of the samples that have been computed, 0 < share <= 1.

        Later calls in the same turn, and calls between `pause_computing` and `resume_computing`, have no
        effect.  `await_submitted` and, without stages, `begin` also call this method.  A pipeline calls it
        when the last micro-batch has left its stage.

        A turn for which the group did not wait is not counted, because it may include a pause.
        """
        if self._loop.mailbox.snapshot.is_late:
            self._compute_rate.discard()
        if self._compute_rate.end(time.monotonic(), share):
            self.report_figures(self._compute_rate.figures())

    def end_round(self, outcome: RoundOutcome) -> None:
        """Record the outcome of a round."""
        self.is_turn_done = outcome.is_committed
        turn = self._turn
        if outcome.is_committed and turn is not None and turn.open_round is not None:
            self.tasks.applied = turn.open_round.step
            self._contribution.step_committed(turn.open_round.step, data_ledger.count_samples(turn.spans))
            self._report_contribution(time.monotonic())

    def run(self, plan: StepPlan, buffers: RoundBuffers, skip: bool, settings: bytes) -> RoundOutcome:
        """Submit the buffers to the open round, wait until it ends, and return its outcome.

        Args:
            plan: the plan that `begin` has returned.
            buffers: the buffers with this worker's contribution.
            skip: whether this worker's gradient is not finite; the step is skipped if any member sets this
                flag.
            settings: the optimizer's settings, which the vote's digest covers and all members must share.
        """
        assert self._turn is not None and self._turn.open_round is not None
        self._early_plan = None
        open_round, rounds = self._turn.open_round, self._loop.step_rounds

        def submit_and_wait() -> RoundOutcome:
            self._submitted = rounds.submit(open_round, buffers, skip, settings, is_awaited=True)
            return rounds.await_submitted(self._submitted)

        return self._outcome_of(submit_and_wait)

    def _outcome_of(self, run: Callable[[], RoundOutcome]) -> RoundOutcome:
        """Call `run`, and record and return the outcome of the round.

        If the run ends without this worker, the outcome is `NOT_COMMITTED`, and `begin` then returns None.
        """
        outcome = NOT_COMMITTED
        with self._ends_as_standby():
            outcome = run()
        self.end_round(outcome)
        self._submitted = None  # only now, so that an interrupted wait can be continued
        return outcome

    def submit(self, plan: StepPlan, buffers: RoundBuffers, skip: bool, settings: bytes) -> None:
        """Submit this worker's buffers for the plan that `predict_plan` has returned, without waiting.

        The arguments are those of `run`.  `await_submitted` returns the outcome.
        """
        assert self._early_plan is not None and self._early_plan[1] is plan
        self._loop.step_rounds.begin_attempt()
        with self._ends_as_standby():
            self._submitted = self._loop.step_rounds.submit(self._early_plan[0], buffers, skip, settings)

    def await_submitted(self) -> RoundOutcome:
        """Wait for the outcome of the round that `submit`, or an interrupted `run`, has submitted.  After an
        abort, call `begin`."""
        self.finish_computing()
        self._early_plan = None
        rounds, mine = self._loop.step_rounds, self._submitted
        last = rounds.last_submitted
        if mine is None and last is not None and self._turn is not None and last.id == self._turn.open_round:
            mine = last  # the call to `submit` was interrupted
        return self._outcome_of(lambda: rounds.await_submitted(mine))

    def _report_contribution(self, now_s: float, *, last: bool = False) -> None:
        if self._contribution.path is not None and (last or self._contribution.is_due(now_s)):
            here, (sent_bytes, received_bytes) = self.snapshot, self.connection.total_bytes
            run = Contribution(
                step=here.applied + 1,
                run_samples=here.ledger.consumed,
                sent_bytes=sent_bytes,
                received_bytes=received_bytes,
                world_size=here.world_size,
            )
            self._contribution.report(now_s, run, last=last)

    # -- reports -----------------------------------------------------------------------------------

    def report_digest(self, step: int, digest: bytes) -> None:
        """Report a 32-byte digest of the parameters and the optimizer's state after `step`.

        The members' digests are compared.  A worker whose digest differs from the majority's receives the
        state before its next step.
        """
        self.connection.submit(ev.CompareReplicas(step, digest))

    def report_figures(self, figures: Mapping[str, float]) -> None:
        """Add or replace figures, which the heartbeats send and `gridtrain status` shows."""
        self._loop.heartbeat.add_figures(figures)

    def increase_figure(self, name: str, amount: float) -> None:
        """Add to a figure that is the total since the script began to take part."""
        self._loop.heartbeat.increase_figure(name, amount)

    def average(self, value: float) -> float:
        """Return the mean of the workers' values.

        Returns `value` if this worker leaves the group, the run ends, or the group continues from another
        step during the call.  Outside the loop, also returns `value` if the group changes during the call.
        """
        if self._is_dropping_batch:  # the other workers run a step in which this worker takes no part
            return value
        is_before_step = self._turn is not None and not self.is_turn_done
        generation = self.snapshot.generation
        if not self.end_reason:
            with self._ends_as_standby():
                return self._means.average(self._group_step, generation, value, is_before_step=is_before_step)
        return value

    def _await_generation_of(self, step: int) -> int | None:
        """Wait until a generation runs; return its number, or None if `step` is not its open step.

        Also returns None if no turn has begun, if this worker has to leave, or if it has a task that changes
        the state or cannot be performed at this point of the loop: the generation cannot start before `begin`
        performs that task.
        """
        if self._turn is None:
            return None
        may_copy = not self.is_turn_done and self.is_state_unchanged()
        copies = (CaptureState, CopyStateSnapshot, ev.SaveCheckpoint, ReadCheckpoint) if may_copy else ()

        def due(here: WorkerSnapshot) -> list[WorkerTask]:  # no generation waits for added residuals
            return [task for task in here.tasks if not isinstance(task, AddResiduals)]

        with self._ends_as_standby():
            while True:
                snapshot = self.connection.wait(
                    lambda here: (
                        self._can_begin(here) or here.is_finished or bool(due(here)) or self._is_interrupted
                    )
                )
                assert snapshot is not None
                tasks = due(snapshot)
                if tasks and isinstance(tasks[0], copies):
                    self._run_task(tasks[0], snapshot)
                elif self._can_begin(snapshot) and not self._is_interrupted and self._group_step == step:
                    return snapshot.generation
                else:
                    return None
        return None

    def announce_weight(self, weight: int) -> None:
        """Send the weight of this worker's batch to the other members, without waiting for their weights.

        `weight` is a count of at least 0.
        """
        turn = self._turn
        if turn is not None and turn.open_round is not None and not self._is_dropping_batch:
            weight = weight if turn.spans else 0
            self._means.announce_weight(turn.open_round.generation, turn.open_round.step, weight)

    def total_weight(self, plan: StepPlan, weight: int) -> int | None:
        """Return the sum of the weights of all members' batches in the plan's step.

        Returns None if the generation has ended, or if a member's weight is wrong or did not arrive in time.
        `weight` is sent unless `announce_weight` has already sent it for this step.
        """
        return self._means.total_weight(plan, weight)

    @property
    def step(self) -> int:
        """The number of steps whose updates this worker's model contains."""
        return self.tasks.applied + 1

    @property
    def _group_step(self) -> int:
        """The number of the next step, for calls to `grid.mean`.

        It counts the group's committed steps, including those that this worker has missed; with a delay, only
        the steps whose updates were applied, because the calls in between belong to the same turn.
        """
        return self.step if self._has_delay else self.snapshot.applied + 1

    @property
    def _has_delay(self) -> bool:
        return self._joined is not None and self._joined.setup.ledger.delay > 0

    @property
    def snapshot(self) -> WorkerSnapshot:
        """This worker's current view of the run."""
        if not self.end_reason:
            with self._ends_as_standby():
                return self._loop.mailbox.read()
        return self._loop.mailbox.snapshot

    @property
    def last_snapshot(self) -> WorkerSnapshot:
        """Like `snapshot`, but does not raise an error that `has_ended_by` recognizes."""
        if self.has_ended_by(self._loop.mailbox.error):
            return self._loop.mailbox.snapshot
        return self.snapshot

    def has_ended_by(self, error: BaseException | None) -> bool:
        """Return whether this error ended the I/O loop because the coordinator does not answer, uses another
        protocol version, or has paused the run.  The model then has the state after the last step."""
        is_version = isinstance(error, JoinRefused) and error.code == VERSION
        is_away = isinstance(error, CoordinatorUnreachable | RunPaused)
        return error is self._loop.mailbox.error and (is_version or is_away)

    @property
    def why_waiting(self) -> str:
        """Why this worker is not training, or why, according to the coordinator, no worker is; "" if nothing
        is known to prevent it.  Thread-safe."""
        if reason := self._loop.waiting_reason:
            return reason
        snapshot = self._loop.mailbox.snapshot
        if snapshot.awaited_newcomers:
            return describe_awaited(snapshot.awaited_newcomers)
        if snapshot.phase is ev.MemberPhase.RUNNING or snapshot.run_state[0] not in ("waiting", "paused"):
            return ""
        return describe_run_state(*snapshot.run_state)

    def set_busy(self, busy: bool) -> None:
        """Set whether the trainer is busy with other work, such as an evaluation.

        As long as it is busy, this worker counts as making progress.  The current turn is left out of the
        compute figures.
        """
        self._compute_rate.discard()
        self._loop.heartbeat.is_busy = busy

    # -- end of the run ----------------------------------------------------------------------------

    def wait_for_members(self) -> bool:
        """Wait until all members have finished the run, so that every member receives the last decision.

        Returns whether the coordinator has declared the run finished within `FINISH_TIMEOUT_S`; False if an
        error has ended the wait.
        """
        if self.end_reason:
            return True
        until_s = time.monotonic() + FINISH_TIMEOUT_S
        try:
            while True:
                here = self.connection.wait(
                    lambda p: p.run_state[0] == "finished" or self._capture_task(p) is not None,
                    until_s - time.monotonic(),
                )
                if here is None or here.run_state[0] == "finished":
                    return here is not None
                if (task := self._capture_task(here)) is not None:
                    self.tasks.run(task, here, is_pipeline=self._is_pipeline)
        except GridtrainError:
            return False  # the run is over for this worker, so the error no longer matters

    def _capture_task(self, here: WorkerSnapshot) -> WorkerTask | None:
        captures = tuple(task for task in here.tasks if isinstance(task, CaptureState))
        return self.tasks.next_task(replace(here, tasks=captures))

    def close(self, reason: str = "") -> None:
        """Leave the run and release all resources.  Further calls have no effect.

        The coordinator receives `failure` as the reason, or `reason` if `failure` is empty.
        """
        if not self._has_closed:
            self._has_closed = True
            self._loop.stop(self.failure or reason)
            with suppress(GridtrainError):  # the error that ended the I/O thread was raised earlier
                self._report_contribution(time.monotonic(), last=True)
