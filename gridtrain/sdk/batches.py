"""`grid.batches`: divides a turn's samples among calls to `step()`; handles stand-ins and pauses.

In a turn without samples, each call gets a few of the latest samples (at first, of the data set) as a
stand-in, which is not counted; if a turn has too few samples, its last calls repeat its latest batch.  A loop
that omits a call to `step()` gets an error.  The agent is the process of `gridtrain worker`, which can pause
or stop this worker.

GroupSession.await_turn --> a snapshot with the open step and this worker's positions in the data
     ModelState.begin_turn      adds a residual, writes a checkpoint that is due
     yield spans                one item for each call to `optimizer.step` in the turn
the agent requests a pause  --> ModelState.rest, PauseController.pause, and the next turn after it
the run has ended           --> stop; `is_finished`
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext

from gridtrain.core.commit import data_ledger
from gridtrain.core.commit.spans import take_first
from gridtrain.core.messages import LedgerSpec, Span
from gridtrain.errors import ConfigError, JoinRefused
from gridtrain.pipeline.pipeline import Pipeline
from gridtrain.quantities import format_count
from gridtrain.runtime.group_session import GroupSession, WaitInterrupted
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.training.data import sampler
from gridtrain.training.data.batch_sizes import BatchSizes
from gridtrain.training.model_state import ModelState
from gridtrain.training.optimizer import GridOptimizer, interrupted_error
from gridtrain.training.overlapped_local_sgd import OverlappedLocalSGDOptimizer
from gridtrain.training.pause import PauseController
from gridtrain.training.single_samples import SingleSampleBatches

log = logging.getLogger("gridtrain")

Spans = tuple[Span, ...]
LOADER_REMEDY = (
    "; a DataLoader with workers reads the next batch too early: use num_workers=0, or replace the loader "
    "with grid.batches(dataset, ..., num_workers=n)"
)

SKIP_REMEDY = (
    '; to skip a batch, use grid.optimizer(..., weigh_by="tokens"), and call grid.weigh(0) and '
    "optimizer.step() for it"
)

NEXT_REMEDY = (
    "; to read batches ahead, use grid.batches(..., num_workers=n); if a notebook cell was interrupted, call "
    "grid.batches(...) again to repeat this batch"
)

INNER_REMEDY = (
    "; the script itself has changed the parameters: step the optimizer that grid.optimizer(...) returned, "
    "not the one that it wraps"
)


class Turns:
    """The turns of one worker in one run.  Use it on the training thread.

    Args:
        optimizer: the optimizer or pipeline whose steps the script takes.
        sizes: the numbers of samples that the script requests.

    Attributes:
        is_finished: whether the run has ended.
        is_stopped: whether the agent has stopped this worker, or the run ended while this worker was paused.
        is_stand_in: whether the batch of the current call is a stand-in; True before the first call.
        feeds_loader: whether the script reads the batches with a `DataLoader`.
    """

    def __init__(
        self,
        session: GroupSession,
        optimizer: GridOptimizer | Pipeline,
        model_state: ModelState,
        pauses: PauseController,
        spec: LedgerSpec,
        sizes: BatchSizes,
    ) -> None:
        self._session, self._optimizer = session, optimizer
        self._model_state, self._pauses = model_state, pauses
        self.spec, self._sizes = spec, sizes
        self._calls = optimizer.calls_per_turn
        # A pipeline's stages handle single samples themselves.
        is_whole = isinstance(optimizer, GridOptimizer)
        single = SingleSampleBatches(optimizer.model, batch_size_is_one=sizes.is_one) if is_whole else None
        self._allow_single_samples = single.allow if single else nullcontext
        self._full_share = 0  # this worker's share of a full step, in samples
        self._pending: deque[Spans] = deque()  # of the turn, for the next calls to step()
        self._computed: Spans = ()  # the positions of the latest turn
        self._rollback = TurnRollback(optimizer.capture_turn_state)
        session.on_batch_dropped = self._rollback.drop_turn
        self.is_finished = self.is_stopped = self.feeds_loader = False
        self.is_stand_in = True
        self._latest: Generator[Spans, None, None] | None = None

    def __iter__(self) -> Iterator[Sequence[Span]]:
        """Return an iterator over this worker's positions in the data for each call to `optimizer.step`, or
        stand-in positions if it has no samples.

        This ends the iterator of an earlier call, and continues the run where that iterator stopped.  A batch
        whose step was not taken is yielded again.

        Raises, in the iterator:
            ConfigError: the number of calls to `step` differs from the number of batches.
            GridtrainError: a step was interrupted and can neither be finished nor undone.
        """
        if self._latest is not None:
            self._latest.close()
        self._latest = self._positions()
        return self._latest

    def _positions(self) -> Generator[Spans, None, None]:
        self._resume()
        try:
            yield from self._iterate()
        except GeneratorExit:  # the script has left the loop
            # If the turn is not done, changes since its start do not belong to a step.
            if self._session.is_turn_done and isinstance(self._optimizer, GridOptimizer):
                self._optimizer.parameter_watch.record_end()
            raise

    def _resume(self) -> None:
        """End the turn in which the script has left an earlier iteration, if any."""
        session, optimizer = self._session, self._optimizer
        if self.is_finished or self.is_stopped:
            return
        if session.is_in_task:
            raise interrupted_error(session.step, "a transfer of the group's state was interrupted")
        if session.is_in_turn and isinstance(optimizer, GridOptimizer):
            optimizer.resume()
        elif session.is_in_turn and not session.is_turn_done:
            raise interrupted_error(session.step, "its model has stages")

    def _iterate(self) -> Iterator[Spans]:
        # The group also waits for a stand-in.  Each batch has two samples, so that batch norm has statistics.
        most = 2 * self._sizes.accumulate
        stand_in: Spans = (Span(0, min(self.spec.size, most)),)
        while (snapshot := self._next_turn()) is not None:
            assert snapshot.open_round is not None
            self._full_share = snapshot.shares[snapshot.rank][1]
            if (pending := _pending_spans(snapshot)) not in ((), self._computed):
                yield from self._repeat(pending)
                continue
            self._model_state.begin_turn(snapshot)
            if self._pauses.is_controlled:
                self._rollback.begin_turn(saves_now=self._calls > 1)
            self._optimizer.begin_turn(self._calls_with_samples(snapshot.spans))
            if isinstance(self._optimizer, OverlappedLocalSGDOptimizer) and self._is_empty(snapshot):
                self._optimizer.end_empty_turn()
                continue
            spans = self._divide(snapshot.spans) if snapshot.spans else [stand_in] * self._calls
            stand_in = take_first(deque(spans[-1]), most)
            yield from self._call_by_call(spans, self._calls_with_samples(snapshot.spans))
            self._computed = snapshot.spans
            # With overlapped local steps, a turn's round may be done before the turn's last call.
            if not self._session.is_turn_done or self._optimizer.local_calls:
                raise self._missing_call_error(snapshot.open_round.step + 1)

    def _repeat(self, spans: Spans) -> Iterator[Spans]:
        """Yield, call by call, a batch that the group counts in this step but that must be recomputed,
        because its result was lost when this worker's process restarted."""
        assert isinstance(self._optimizer, OverlappedLocalSGDOptimizer)
        log.warning("this worker is recomputing its latest batch, which was not exchanged before its restart")
        restore = self._optimizer.capture_turn_state()
        with_samples = self._calls_with_samples(spans)
        self._optimizer.begin_repeated_turn(with_samples)
        yield from self._call_by_call(self._divide(spans), with_samples)
        if self._optimizer.local_calls:
            raise self._missing_call_error(self._session.step + 1)
        restore()  # schedulers: the other workers do not repeat the turn
        self._computed = spans

    def _call_by_call(self, spans: Sequence[Spans], with_samples: int) -> Iterator[Spans]:
        """Yield the spans of each call; the first `with_samples` calls have samples.  While a batch has a
        single sample, the model's batch norms can train on that sample."""
        self._pending = deque(spans)
        while self._pending:
            now = self._pending.popleft()
            self.is_stand_in = len(spans) - len(self._pending) > with_samples
            has_single = data_ledger.count_samples(now) < 2 * self._sizes.accumulate
            with self._allow_single_samples() if has_single else nullcontext():
                yield now

    @property
    def length_text(self) -> str:
        """The length of the run, such as "2 epochs"."""
        spec = self.spec
        return format_count(spec.epochs or spec.steps or 0, "step" if spec.epochs is None else "epoch")

    @property
    def has_samples(self) -> bool:
        """Whether this worker has samples of its own in the current turn."""
        return bool(self._session.turn_spans)

    def predict(self, count: int) -> list[Spans]:
        """Return the items that the iterator will yield next if the group does not change: the rest of this
        turn, and the turns that contain the next `count` calls, unless the run ends earlier.  A turn in
        which this worker has no samples is one empty item."""
        found = list(self._pending)
        for spans in self._session.predict_spans(-(-count // self._calls)):
            found += self._divide(spans) if spans else [()]
        return found

    # -- the next turn ---------------------------------------------------------------------------------

    def _next_turn(self) -> WorkerSnapshot | None:
        """Wait for the next turn and pause if the agent requests it; return None if the run has ended or the
        agent has stopped this worker."""
        self._rollback.end_turn()
        if not self.is_finished and not self.is_stopped:
            self._optimizer.record_turn()
        while not self.is_finished and not self.is_stopped:
            try:
                snapshot = self._session.await_turn()
            except WaitInterrupted:
                self.is_stopped = not self._pause()
                self.is_finished = self._pauses.has_missed_end
                continue
            except JoinRefused as refusal:
                if not self._pauses.is_run_over(refusal):
                    raise
                self.is_finished = self.is_stopped = True
                continue
            if snapshot is None:
                self.is_finished = True
                continue
            self._pauses.begin_turn()
            return snapshot
        return None

    def _pause(self) -> bool:
        """Leave the run between two steps, wait until the agent ends the pause, and rejoin.

        Returns False if this worker must not rejoin.
        """
        if self._pauses.should_stop:
            log.warning(
                "this worker is being stopped; its training loop will end after step %d",
                self._session.step,
            )
            return False
        snapshot = self._session.snapshot
        others_wait = self._model_state.others_wait
        held = self._model_state.rest(self._pauses.residual_budget_bytes)
        touched = snapshot.is_modified or snapshot.applied >= 0
        return self._pauses.pause(
            held, touched=touched, on_left=self._model_state.save_paused, others_wait=others_wait
        )

    def _is_empty(self, snapshot: WorkerSnapshot) -> bool:
        """Whether no worker has samples in this turn, as in the last turn of a run with a delay, which only
        exchanges the batches of the previous turn (see `data_ledger`)."""
        return not any(data_ledger.assign(self.spec, snapshot.ledger, snapshot.shares).values())

    # -- the calls of a turn -----------------------------------------------------------------------------

    def _calls_with_samples(self, spans: Sequence[Span]) -> int:
        """Return how many of a turn's calls have samples; a short step has fewer such calls rather than
        smaller batches."""
        samples = data_ledger.count_samples(spans)
        return min(self._calls, samples, -(-self._calls * samples // max(1, self._full_share)))

    def _divide(self, spans: Sequence[Span]) -> list[Spans]:
        """Return the spans of each call; calls without samples repeat the last spans."""
        pieces = sampler.split_spans(spans, self._calls_with_samples(spans))
        return pieces + [pieces[-1]] * (self._calls - len(pieces))

    def _missing_call_error(self, step: int) -> ConfigError:
        batches = "the batch" if self._calls == 1 else f"the {self._calls} batches"
        called = f"{self._optimizer.local_calls} times for {batches} of step {step}"
        more = LOADER_REMEDY if self.feeds_loader else ""
        if not self._optimizer.local_calls and isinstance(self._optimizer, GridOptimizer):
            if self._optimizer.delay:  # it has set the parameters itself, and does not weight by tokens
                more += NEXT_REMEDY
            elif self._optimizer.parameter_watch.has_changed:
                more += INNER_REMEDY
            else:
                more += SKIP_REMEDY + NEXT_REMEDY
        return self._session.calls_error(called, more)


def _pending_spans(snapshot: WorkerSnapshot) -> Spans:
    """Return the positions of this worker's pending batch, which the open step exchanges in a run with a
    delay (see `data_ledger`); () if there is none."""
    own = snapshot.shares[snapshot.rank][0]
    return next((batch.spans for batch in snapshot.ledger.pending if batch.peer == own), ())


class TurnRollback:
    """Undoes what a script changes after a step that is dropped because this worker pauses.

        optimizer.step()    the agent requests a pause before an attempt can begin: the step is dropped
        scheduler.step()    the script is not informed, and continues as after any step
        grid.batches        tracked objects (schedulers) are restored to the last committed step

    Args:
        capture: a function that copies the state that the script changes between two steps, and returns a
            function that restores this state.
    """

    def __init__(self, capture: Callable[[], Callable[[], None]]) -> None:
        self._capture = capture
        self._restore: Callable[[], None] | None = None
        self._is_dropped = False

    def begin_turn(self, *, saves_now: bool) -> None:
        """Begin a turn.

        Args:
            saves_now: whether to copy the state now, because the turn has several calls and the script
                changes the state before the last one.
        """
        self._restore = self._capture() if saves_now else None

    def drop_turn(self) -> None:
        """Record that the turn's step was dropped."""
        self._is_dropped = True
        self._restore = self._restore or self._capture()

    def end_turn(self) -> None:
        """End the turn, before the script gets the next one; restore the copied state if the turn's step was
        dropped."""
        restore, self._restore = self._restore, None
        if self._is_dropped and restore is not None:
            restore()
        self._is_dropped = False
