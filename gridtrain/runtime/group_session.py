"""What the training thread calls: turns, and the steps in them.

    batches:  await_turn -> spans ----> the user's loop computes -----> optimizer.step
                                                                          begin -> StepPlan
                                                                          run   -> RoundOutcome

While it waits, it does tasks for the group (`trainer_tasks`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from gridtrain.config import JoinConfig
from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain.core.group import member_events as io
from gridtrain.core.planning.exchange_choice import FIRST_STEP_FIGURE
from gridtrain.errors import ConfigError, GridtrainError, JoinRefused
from gridtrain.network.transport.access_control import PeerAllowlist
from gridtrain.network.transport.flow_control import FlowControlTransport
from gridtrain.runtime.buffers.buckets import BucketedBuffer
from gridtrain.runtime.buffers.collective_buffers import CollectiveBuffer
from gridtrain.runtime.compute_rate import ComputeRate
from gridtrain.runtime.contribution import ContributionReporter
from gridtrain.runtime.group_connection import GroupConnection
from gridtrain.runtime.io_loop import IoLoop
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.runtime.mailbox.worker_task import CaptureState, WorkerTask
from gridtrain.runtime.open_round import PipelineRound, RoundPart
from gridtrain.runtime.step_plan import RoundOutcome, StepPlan
from gridtrain.runtime.trainer_tasks import LOAD_TASKS

PeersOf = Callable[..., frozenset[int]]
"""Neighbours of a rank: (rank, world size), and for a model in stages also the stage bounds."""

FINISH_TIMEOUT_S = 15.0
"""How long a finished worker stays for the others."""


class WaitInterrupted(Exception):
    """The wait was given up: this worker is needed elsewhere, between two steps or attempts."""


def _missing_dataset_error() -> ConfigError:
    return ConfigError(
        "a step was begun before the data was named",
        remedy="iterate over grid.batches(dataset, ...), or use grid.sampler(dataset, ...)",
    )


class GroupSession:
    """One worker's place in a run, as the training thread sees it.

    Every method that waits raises `JoinRefused` when the coordinator has dismissed this worker, `RunPaused`
    when the run cannot go on, or whatever else ended the I/O thread.

    Attributes:
        connection: to the group, over all pauses.
        tasks: what this worker does for the group while it waits.
        on_batch_dropped: called when a batch is given up because this worker is needed elsewhere.
    """

    def __init__(
        self,
        transport: FlowControlTransport,
        config: JoinConfig,
        allowlist: PeerAllowlist,
    ) -> None:
        self.config = config
        self.connection = GroupConnection(transport, config, allowlist)
        self.tasks = self.connection.tasks
        self.on_batch_dropped: Callable[[], None] = lambda: None
        self._joined: io.TrainerJoined | None = None
        self._is_standby_at_end = self._has_closed = False
        self._turn: WorkerSnapshot | None = None
        self._is_turn_done = False
        self._turn_began_s = 0.0
        self._early_plan: tuple[m.RoundId, StepPlan] | None = None  # the round for which buckets were sent
        self._is_awaiting_choice = False  # the trainer has its gradient, and needs the choice of an exchange
        self._is_dropping_batch = False  # until this worker has left: buckets of it may be under way
        self._mean_step = self._mean_index = 0
        self._compute_rate = ComputeRate()
        self._contribution = ContributionReporter(Path(config.contribution) if config.contribution else None)

    def join(
        self,
        setup: m.Setup,
        neighbours: PeersOf,
        about: m.WorkerInfo | None = None,
        choices: Mapping[str, PeersOf] = MappingProxyType({}),
    ) -> None:
        """Ask for a place in the run.  The coordinator refuses a set-up that differs from the run's.

        `about`: what this worker is, for people.  `choices`: its `neighbours_by_exchange`.
        """
        self.check_not_joined()
        self._joined = io.TrainerJoined(setup, neighbours, about, choices)
        self.connection.submit(self._joined)

    def check_not_joined(self) -> None:
        """Raises `ConfigError` if this worker has joined; to be called before its disk is read."""
        if self._joined is not None:
            raise ConfigError(
                "a second data set was given to this run; its ledger has one",
                remedy="call grid.batches(...) or grid.sampler(...) once, with epochs= or steps= of the "
                "whole run: one loop goes over all of it",
            )

    def pause(self, reason: str) -> None:
        """See `GroupConnection.pause`."""
        self.connection.pause(reason)
        self._is_dropping_batch = False

    def resume(
        self,
        transport: FlowControlTransport,
        allowlist: PeerAllowlist,
        held: m.CheckpointInfo | None,
        *,
        touched: bool,
    ) -> None:
        """After `pause`: join again, as a new worker does.

        Args:
            held: the state that this worker has; the group's replaces it if the group went on meanwhile.
            touched: the model is no longer the one that the script made.

        Raises as `IoLoop.start`; it can be called again then, with another transport.
        """
        assert self._joined is not None
        self._turn, self._is_turn_done, self._early_plan = None, False, None
        self._compute_rate.discard()
        joined = replace(self._joined, setup=replace(self._joined.setup, checkpoint=held))
        self.connection.resume(transport, allowlist, joined, reset=touched and held is None)

    # -- turns -----------------------------------------------------------------------------------

    def await_turn(self) -> WorkerSnapshot | None:
        """Block until a step is open, and do tasks meanwhile; None when the ledger has ended the run.

        Raises `WaitInterrupted` as soon as this worker is needed elsewhere, unless the run has ended.
        """
        if self._joined is None:
            raise _missing_dataset_error()
        self._turn, self._is_turn_done = None, False
        snapshot = self._wait(lambda _: self._is_interrupted, between_batches=True)
        if snapshot is None or snapshot.is_finished:
            return None
        if self._is_interrupted:
            raise WaitInterrupted
        self._turn = snapshot
        self._turn_began_s = time.monotonic()
        self._compute_rate.begin(self._turn_began_s, data_ledger.count_samples(snapshot.spans))
        return snapshot

    @property
    def is_standby_at_end(self) -> bool:
        """The run has finished, and this worker was not a member at its end."""
        return self._is_standby_at_end

    @property
    def turn_spans(self) -> tuple[m.Span, ...]:
        """This worker's positions of the latest turn; (): it takes part without samples."""
        return self._turn.spans if self._turn is not None else ()

    @property
    def is_turn_done(self) -> bool:
        """The batch of the latest turn went into its step, or was too late for it."""
        return self._is_turn_done

    def predict_spans(self, count: int) -> list[tuple[m.Span, ...]]:
        """This worker's positions in the steps after the latest turn's, unless the group changes."""
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
    def _is_interrupted(self) -> bool:
        return self._is_dropping_batch or self.connection.should_interrupt

    def _wait(
        self, interrupts: Callable[[WorkerSnapshot], bool], *, between_batches: bool
    ) -> WorkerSnapshot | None:
        """Do tasks until a step is open or the run has ended; None: this worker was not a member at its end.

        Args:
            between_batches: tasks that replace the model are done; False: the wait ends where one is due.

        Raises `WaitInterrupted` when `interrupts(snapshot)`, unless the run has ended.
        """
        if self._is_standby_at_end:
            return None

        def is_over(here: WorkerSnapshot) -> bool:
            must_load = not between_batches and any(isinstance(task, LOAD_TASKS) for task in here.tasks)
            return must_load or here.is_finished or self._can_begin(here)

        try:
            while True:
                snapshot = self.connection.wait(
                    lambda here: (
                        is_over(here)
                        or interrupts(here)
                        or self._next_task(here, between_batches=between_batches) is not None
                    )
                )
                assert snapshot is not None
                must_save = any(isinstance(task, io.SaveCheckpoint) for task in snapshot.tasks)
                if interrupts(snapshot) and not snapshot.is_finished and not must_save:
                    raise WaitInterrupted  # others need what is in its memory: that is written first
                task = self._next_task(snapshot, between_batches=between_batches)
                if task is not None:
                    self.tasks.run(task, snapshot, is_pipeline=self._is_pipeline)
                elif is_over(snapshot):
                    return snapshot
        except JoinRefused as refused:
            # A whole model's worker may have been receiving the state; one that joins later is refused.
            was_running = self._loop.mailbox.snapshot.run_state[0] in ("waiting", "training", "paused")
            if refused.code != "finished" or not (self._is_pipeline or was_running):
                raise
            self._is_standby_at_end = True
            return None

    def _next_task(self, snapshot: WorkerSnapshot, *, between_batches: bool) -> WorkerTask | None:
        return self.tasks.next_task(
            snapshot, is_round_begun=self._has_begun(snapshot), between_batches=between_batches
        )

    def _can_begin(self, snapshot: WorkerSnapshot) -> bool:
        return snapshot.open_round is not None and not (self._is_awaiting_choice and not snapshot.exchange)

    # -- one step (gridtrain.training.session_interface) -------------------------------------------

    def predict_plan(self) -> StepPlan | None:
        """See `TrainingSession.predict_plan`."""
        snapshot, turn = self.snapshot, self._turn
        if turn is None or self._is_turn_done or snapshot.open_round is None or snapshot.open_round.attempt:
            return None
        if (snapshot.open_round, snapshot.spans) != (turn.open_round, turn.spans):
            return None
        plan = _make_step_plan(snapshot, snapshot.open_round)
        self._early_plan = snapshot.open_round, plan
        return plan

    def begin_bucket(self, plan: StepPlan, bucket: int, buffer: CollectiveBuffer, skip: bool) -> None:
        """See `TrainingSession.begin_bucket`."""
        if self._early_plan is not None and self._early_plan[1] is plan:
            self._loop.step_rounds.begin_bucket(self._early_plan[0], m.Channel(group=bucket), buffer, skip)

    def _has_begun(self, snapshot: WorkerSnapshot) -> bool:
        """Buckets of the open round were sent: what they were made of may not change."""
        return self._early_plan is not None and self._early_plan[0] == snapshot.open_round

    def begin(self) -> StepPlan | None:
        """See `TrainingSession.begin`.

        While no attempt can begin and this worker is needed elsewhere, the batch is given up:
        `on_batch_dropped` is called, and the next `await_turn` raises `WaitInterrupted`.
        """
        if self._joined is None:
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
        if snapshot is None or not self._is_turn_of(snapshot, step):
            self._is_turn_done = True
            return None
        assert snapshot.open_round is not None
        self._turn = snapshot
        self._loop.step_rounds.begin_attempt()
        if self._early_plan is not None and self._has_begun(snapshot):
            return self._early_plan[1]
        return _make_step_plan(snapshot, snapshot.open_round)

    def _is_turn_of(self, snapshot: WorkerSnapshot, step: int) -> bool:
        """Whether the batch of this turn may go into the open round.

        Otherwise this worker was away and the group went on without the batch, or a state is to be loaded,
        which happens between batches only.
        """
        if snapshot.open_round is None or snapshot.open_round.step != step:
            return False
        if any(isinstance(task, LOAD_TASKS) for task in snapshot.tasks):
            return False
        return snapshot.spans in ((), self.turn_spans)

    def _await_exchange_choice(self) -> None:
        """Where the coordinator chooses the exchange: report how long the batch took here.

        Also where it has chosen already: a generation that is made meanwhile may leave the choice open again.
        """
        assert self._joined is not None
        if self._joined.neighbours_by_exchange and "" not in self._joined.neighbours_by_exchange:
            self._is_awaiting_choice = True
            self.report_figures({FIRST_STEP_FIGURE: max(1e-6, time.monotonic() - self._turn_began_s)})

    def open_round(
        self, plan: StepPlan, parts: Mapping[m.Channel, RoundPart], settings: bytes
    ) -> PipelineRound:
        """For a pipeline, in place of `run`: the round's collectives are added as they become ready."""
        assert self._turn is not None and self._turn.open_round is not None
        self._compute_rate.begin(time.monotonic(), plan.samples)
        return self._loop.step_rounds.open(self._turn.open_round, parts, settings)

    def finish_computing(self) -> None:
        """The gradient of this turn is there; of a pipeline: its last micro-batch has left this stage."""
        if self._compute_rate.end(time.monotonic()):
            self.report_figures(self._compute_rate.figures())

    def end_round(self, outcome: RoundOutcome) -> None:
        """How the round of `open_round` ended."""
        self._is_turn_done = outcome.is_committed
        if outcome.is_committed:
            self._count_contribution()

    def run(
        self,
        plan: StepPlan,
        buffers: Sequence[CollectiveBuffer | BucketedBuffer],
        skip: bool,
        settings: bytes,
    ) -> RoundOutcome:
        """See `TrainingSession.run`."""
        assert self._turn is not None and self._turn.open_round is not None
        self._early_plan = None
        outcome = self._loop.step_rounds.run(self._turn.open_round, buffers, skip, settings)
        self.end_round(outcome)
        return outcome

    def _count_contribution(self) -> None:
        assert self._turn is not None
        self._contribution.step_committed(data_ledger.count_samples(self._turn.spans))
        self._report_contribution(time.monotonic())

    def _report_contribution(self, now_s: float, *, last: bool = False) -> None:
        if self._contribution.path is not None and (last or self._contribution.is_due(now_s)):
            here, traffic = self._loop.mailbox.read(), self.connection.traffic.values()
            self._contribution.report(
                now_s,
                step=here.applied + 1,
                run_samples=here.ledger.consumed,
                sent_bytes=sum(sent for sent, _ in traffic),
                received_bytes=sum(received for _, received in traffic),
                world_size=here.world_size,
                last=last,
            )

    # -- reports -----------------------------------------------------------------------------------

    def report_digest(self, step: int, digest: bytes) -> None:
        """See `TrainingSession.report_digest`."""
        self.connection.submit(io.CompareReplicas(step, digest))

    def report_figures(self, figures: Mapping[str, float]) -> None:
        """Figures for `gridtrain status`."""
        self._loop.heartbeat.add_figures(figures)

    def average(self, value: float) -> float:
        """Average over the workers, for people; `value` itself where the group changes meanwhile."""
        if self._is_dropping_batch:  # the others are at a step in which this worker takes no part
            return value
        step = self.snapshot.applied + 1
        self._mean_index = self._mean_index + 1 if self._mean_step == step else 0
        self._mean_step = step
        mean = self._loop.average(step, self._mean_index, value, self.config.deadlines.first_step_s)
        return value if mean is None else mean

    @property
    def snapshot(self) -> WorkerSnapshot:
        """What this worker knows of the run now."""
        mailbox = self._loop.mailbox
        return mailbox.snapshot if self._is_standby_at_end else mailbox.read()

    def set_busy(self, busy: bool) -> None:
        """The trainer does something else for a while, such as an evaluation; it counts as making
        progress."""
        self._compute_rate.discard()
        self._loop.heartbeat.set_busy(busy)

    def disable_replay(self, reason: str) -> None:
        """See `TrainerTasks.disable_replay`."""
        self.tasks.disable_replay(reason)

    # -- the end -----------------------------------------------------------------------------------

    def wait_for_members(self) -> bool:
        """After the end: stay until all members have finished, so that none misses the last decision.

        Returns whether the coordinator has declared the run finished within `FINISH_TIMEOUT_S`.
        """
        if self._is_standby_at_end:
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
            return False  # the run is over for this worker; nothing depends on what failed

    def _capture_task(self, here: WorkerSnapshot) -> WorkerTask | None:
        captures = tuple(task for task in here.tasks if isinstance(task, CaptureState))
        return self.tasks.next_task(replace(here, tasks=captures))

    def close(self, reason: str = "") -> None:
        """Leave and release everything; idempotent."""
        if not self._has_closed:
            self._has_closed = True
            self._loop.stop(reason)
            with suppress(GridtrainError):  # what ended the I/O thread was raised where it mattered
                self._report_contribution(time.monotonic(), last=True)


def _make_step_plan(snapshot: WorkerSnapshot, open_round: m.RoundId) -> StepPlan:
    return StepPlan(
        step=open_round.step,
        attempt=open_round.attempt,
        rank=snapshot.rank,
        world_size=snapshot.world_size,
        samples=data_ledger.count_samples(snapshot.spans),
        total_samples=snapshot.total_samples,
        compare_after=snapshot.compare_after_step,
        exchange=snapshot.exchange,
        stage_bounds=snapshot.stage_bounds,
        generation=open_round.generation,
        first_step=snapshot.first_step,
    )
