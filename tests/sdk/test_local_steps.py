"""LocalSteps in whole groups: an ordinary loop, every sample once, and the guarantees for each exchange.

test_overlapped_local_steps.py tests what only `overlap=` does.
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpointed_group
import pytest
import torch
from brisk import LOSING, WITHIN_S
from group_status import status_of
from local_training import EVERY, EXCHANGES, OUTER, Loop, Numbered, adamw, train_batch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import gridtrain
from gridtrain.errors import ConfigError, JoinRefused
from gridtrain.network.transport.in_memory import EndpointKilled
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.runtime.mailbox.worker_task import CaptureState
from gridtrain.testing import Faults
from gridtrain.training.checkpoint import checkpoint_store, serialization

every_exchange = pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda e: e.describe())
with_and_without_overlap = pytest.mark.parametrize(
    "overlap", [False, True, 2], ids=["waiting", "overlapped", "overlapped in part"]
)


@pytest.fixture(scope="module", autouse=True)
def torch_is_warm() -> None:
    """An optimizer's first step imports modules of torch for seconds on a busy machine."""
    model = nn.Linear(2, 1)
    train_batch(model, adamw(model), torch.ones(1, 2))


class Streamed(IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return iter([Numbered(self.size)[index] for index in range(self.size)])


def assert_each_once(loops: list[Loop], size: int) -> None:
    """All have one model after each turn, and each sample is in two batches: one in each pass."""
    assert len({str(loop.digests) + loop.last for loop in loops}) == 1
    turns = {(step, tuple(batch)) for loop in loops for step, turn in loop.samples.items() for batch in turn}
    assert sorted(i for _, batch in turns for i in batch) == sorted([*range(size), *range(size)])


# -- ordinary loops -----------------------------------------------------------------------------------------


@every_exchange
@pytest.mark.parametrize(("workers", "momentum"), [(1, 0.9), (3, 0.0)])
def test_an_ordinary_loop_trains_one_model_and_takes_every_sample_once(
    together: Any, exchange: Any, workers: int, momentum: float
) -> None:
    """Two passes, each with a short last step: it has fewer local steps, not smaller batches."""

    def train(grid: gridtrain.Grid, number: int) -> Loop:
        loop = Loop(grid, exchange, outer_momentum=momentum)
        return loop.run(grid.batches(Numbered(37), batch_size=2, epochs=2))

    loops = together(train, workers)
    assert_each_once(loops, 37)
    turns = 2 * -(-37 // (2 * EVERY * workers))
    for loop in loops:
        assert [len(turn) for turn in loop.samples.values()] == [EVERY] * turns
        assert all(len(batch) <= 2 for turn in loop.samples.values() for batch in turn)
        assert len(set(loop.digests.values())) == turns


def test_batch_sizes_are_those_of_one_local_step(together: Any) -> None:
    def train(grid: gridtrain.Grid, number: int) -> list[int]:
        loop = Loop(grid, gridtrain.Dense())
        batches = grid.batches(Numbered(100), global_batch_size=6, accumulate=3, steps=2)
        sizes = []
        for position, (inputs, _) in enumerate(batches):
            sizes.append(len(inputs))
            loop.model(inputs).square().mean().backward()
            if position % 3 == 2:
                loop.optimizer.step()
                loop.optimizer.zero_grad()
        return sizes

    for sizes in together(train, 2):
        assert sizes == [1] * 2 * EVERY * 3, "6 samples for two workers, in three parts, four times a step"


@pytest.mark.parametrize("way", ["prefetched", "streamed", "streamed and prefetched", "sampler"])
def test_local_steps_read_data_in_each_way(together: Any, way: str) -> None:
    def train(grid: gridtrain.Grid, number: int) -> Loop:
        loop = Loop(grid, gridtrain.GTopK(density=0.3))
        options: dict[str, Any] = {"batch_size": 2, "epochs": 2}
        if way == "sampler":
            data = Numbered(37)
            batches: Any = DataLoader(data, batch_sampler=grid.sampler(data, **options))
        else:
            data = Numbered(37) if way == "prefetched" else Streamed(37)  # type: ignore[assignment]
            length = None if way == "prefetched" else 37
            ahead = 1 if "prefetched" in way else 0
            batches = grid.batches(data, length=length, num_workers=ahead, **options)
        return loop.run(batches)

    assert_each_once(together(train, 2), 37)


def test_schedulers_step_with_the_loop(together: Any) -> None:
    """Also at the end of a pass, and on a worker without samples there: the last step has one sample."""

    def train(grid: gridtrain.Grid, number: int) -> tuple[float, str]:
        loop = Loop(grid, gridtrain.Dense(), every=2)
        scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 3, 0.5)
        grid.track(scheduler=scheduler)
        for inputs, _ in grid.batches(Numbered(5), batch_size=1, epochs=3):
            train_batch(loop.model, loop.optimizer, inputs)
            scheduler.step()
        return loop.optimizer.param_groups[0]["lr"], loop.digest

    results = together(train, 2)
    assert len(set(results)) == 1
    assert results[0][0] == pytest.approx(0.01 * 0.5 ** (2 * 2 * 3 // 3))


def test_an_embedding_may_have_sparse_gradients(together: Any) -> None:
    """They are not exchanged.  The workers are equal, and train as with dense gradients."""

    def train(grid: gridtrain.Grid, is_sparse: bool) -> list[float]:
        embedding, head = nn.Embedding(6, 2, sparse=is_sparse), nn.Linear(2, 1)
        for parameter in (*embedding.parameters(), *head.parameters()):
            nn.init.constant_(parameter, 0.5)
        adam = torch.optim.SparseAdam if is_sparse else torch.optim.Adam
        inner = [adam(embedding.parameters(), lr=0.1), adamw(head)]
        model, exchange = nn.Sequential(embedding, head), gridtrain.LocalSteps(every=2)
        optimizer = grid.optimizer(inner, model, exchange=exchange)
        for ids in grid.batches(torch.arange(6), batch_size=6, steps=1):
            head(embedding(ids)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return nn.utils.parameters_to_vector(model.parameters()).tolist()

    first, second = together(lambda grid, _: train(grid, True))
    assert first == second
    (dense, _) = together(lambda grid, _: train(grid, False))
    assert first == pytest.approx(dense, rel=1e-5)


def test_a_wrong_number_of_step_calls_is_refused(outcomes: Any) -> None:
    def train(grid: gridtrain.Grid, number: int, calls: int) -> None:
        loop = Loop(grid, gridtrain.Dense())
        for position, (inputs, _) in enumerate(grid.batches(Numbered(50), batch_size=2, steps=3)):
            loop.model(inputs).square().mean().backward()
            for _ in range(calls if position == 0 else 1):
                loop.optimizer.step()

    (seldom,) = outcomes(lambda grid, number: train(grid, number, 0), 1)
    (often,) = outcomes(lambda grid, number: train(grid, number, 2), 1)
    assert isinstance(seldom, ConfigError) and isinstance(often, ConfigError)
    assert "called 3 times for the 4 batches of step 1" in str(seldom)
    assert "called 5 times for a step's 4 batches" in str(often)


def test_a_different_number_of_local_steps_is_refused(new_group: Any) -> None:
    began, refused = threading.Event(), threading.Event()

    def train(grid: gridtrain.Grid, number: int) -> str:
        def until_refused(loop: Loop) -> bool:
            began.set()
            return refused.is_set()

        loop = Loop(grid, gridtrain.Dense(), every=4 + number)
        loop.run(grid.batches(Numbered(50), batch_size=2, steps=10_000), until_refused)
        return "trained"

    with new_group(workers=1) as group:
        group.start(train)
        assert began.wait(WITHIN_S)
        other = group.result(group.start(train))
        refused.set()
        assert group.result(0) == "trained"
    assert isinstance(other, JoinRefused) and "exchange is LocalSteps(every=5" in str(other)


# -- workers that join and leave --------------------------------------------------------------


@every_exchange
@with_and_without_overlap
def test_a_newcomer_enters_between_two_exchanges(new_group: Any, exchange: Any, overlap: int) -> None:
    """It receives the state while the others wait in a step, in which their scheduler has moved already."""
    warm, entered = threading.Event(), threading.Event()
    stop_at = [10**9]

    def train(grid: gridtrain.Grid, number: int) -> tuple[dict[int, str], dict[int, float]]:
        loop = Loop(grid, exchange, overlap=overlap, **OUTER)
        scheduler = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda step: 1.0 / (1.0 + step))
        grid.track(scheduler=scheduler)
        rates: dict[int, float] = {}
        for inputs, _ in grid.batches(Numbered(50_000), batch_size=2, steps=100_000):
            step = grid.step
            if loop.optimizer.local_calls == 0:
                rates[step] = loop.optimizer.param_groups[0]["lr"]
                if number == 2 and not entered.is_set():
                    stop_at[0] = step + 8
                    entered.set()
                if step >= stop_at[0]:
                    break
            grid.mean(1.0)  # would wait for the newcomer if the calls of a turn were counted differently
            train_batch(loop.model, loop.optimizer, inputs)
            scheduler.step()
            if loop.optimizer.local_calls == 0:
                loop.digests[step] = loop.digest
            if step > 5:
                warm.set()
        return loop.digests, rates

    with new_group(workers=2) as group:
        group.start_all(train)
        assert warm.wait(WITHIN_S)
        group.start(train)
        assert entered.wait(WITHIN_S)
        results = group.finish()
        events = [event["event"] for event in status_of(group)["events"]]
    common = set.intersection(*(set(digests) for digests, _ in results))
    assert len(common) >= 7
    assert all(len({digests[step] for digests, _ in results}) == 1 for step in common)
    for step, rate in results[2][1].items():
        assert rate == pytest.approx(0.01 / (1 + EVERY * step)), f"step {step}"
    assert "drifted" not in events and "lost" not in events
    assert overlap or ("caught_up" in events) == exchange.sparse
    steps = sorted(results[0][0])
    assert all(b == a + 1 for a, b in itertools.pairwise(steps)), "a member lost a step"


def test_a_newcomer_receives_the_state_during_a_turn(new_group: Any) -> None:
    """The member makes the rest of its local steps only when the newcomer computes, too."""
    warm, entered = threading.Event(), threading.Event()

    def is_asked(here: WorkerSnapshot) -> bool:
        return any(isinstance(task, CaptureState) for task in here.tasks)

    def train(grid: gridtrain.Grid, number: int) -> tuple[int, str]:
        calls = []

        def each(loop: Loop) -> None:
            calls.append((grid.step, loop.optimizer.local_calls))
            if number == 1:
                entered.set()
            elif calls[-1] == (1, 1):
                warm.set()
                assert grid._session.connection.wait(is_asked, WITHIN_S) is not None
            elif calls[-1] == (1, 2):
                assert entered.wait(WITHIN_S)

        loop = Loop(grid, gridtrain.Dense(), **OUTER)
        loop.run(grid.batches(Numbered(100), batch_size=2, steps=4), each)
        return calls[0][0], loop.last

    with new_group(workers=1) as group:
        group.start(train)
        assert warm.wait(WITHIN_S)
        group.start(train)
        (first, model), (step, same) = group.finish()
    assert (first, step) == (0, 1) and model == same


def test_an_error_of_the_connection_ends_no_turn_before_its_exchange(new_group: Any) -> None:
    """A run that has ended ends its loops in order, also if the coordinator has gone since."""
    calls = []

    def train(grid: gridtrain.Grid, number: int) -> None:
        def each(loop: Loop) -> None:
            calls.append(loop.optimizer.local_calls)
            grid._session.connection.loop.mailbox.fail(EndpointKilled("the test"))

        Loop(grid, gridtrain.Dense(), **OUTER).run(grid.batches(Numbered(100), batch_size=2, steps=4), each)

    with new_group(workers=1) as group, pytest.raises(EndpointKilled):
        group.start(train)
        group.finish()
    assert calls == [*range(EVERY)]


@every_exchange
@pytest.mark.parametrize("point", ["before", "during", "after"])
@with_and_without_overlap
def test_no_sample_is_lost_with_a_killed_worker(
    new_group: Any, overlap: int, point: Any, exchange: Any
) -> None:
    """The others compute again what the killed worker had computed and the group had not committed."""
    consumed: list[int] = []
    taken: dict[tuple[int, ...], list[int]] = {}
    committed: set[tuple[int, ...]] = set()

    def train(grid: gridtrain.Grid, number: int) -> Loop:
        loop = Loop(grid, exchange, overlap=overlap, outer_momentum=0.5)
        session: Any = grid._session
        run = session.run

        def seen(plan: Any, *rest: Any) -> Any:
            open_round = session._turn.open_round
            attempt = (open_round.generation, open_round.step, open_round.attempt)
            taken.setdefault(attempt, []).extend(set(loop.turn) if plan.samples else ())
            outcome = run(plan, *rest)
            if outcome.is_committed:
                committed.add(attempt)
            return outcome

        if not overlap:
            session.run = seen
        loop.run(grid.batches(Numbered(200), batch_size=2, epochs=1))
        consumed.append(session.snapshot.ledger.consumed)
        return loop

    faults = Faults().kill_at("worker-1", 3, point)
    with new_group(workers=3, deadlines=LOSING, faults=faults) as group:
        group.start_all(train)
        ends = group.ends()
    assert isinstance(ends[1], EndpointKilled), ends[1]
    loops = [end for end in ends if isinstance(end, Loop)]
    assert len(loops) == 2 and len({loop.last for loop in loops}) == 1, ends
    assert consumed == [200, 200]
    if overlap:
        missing = set(range(200)) - {index for loop in loops for index in loop.taken}
        assert len(missing) <= 3 * 2 * EVERY, "those of the killed worker's first turns"
    else:
        assert sorted(index for name in committed for index in taken[name]) == list(range(200))
        assert len({name[0] for name in committed}) == 2, "the others went on in another generation"


def test_a_slow_worker_reports_progress_at_each_local_step(new_group: Any) -> None:
    """Its eight local steps take twice as long as the others' patience with a stalled member."""
    patient = replace(LOSING, first_step_s=1.2, patience_floor_s=1.2, patience_factor=0.0)

    def train(grid: gridtrain.Grid, number: int) -> str:
        def be_slow(loop: Loop) -> None:
            time.sleep(0.3 * number)  # its processor is slow

        batches = grid.batches(Numbered(500), batch_size=2, steps=1)
        return Loop(grid, gridtrain.Dense(), every=8).run(batches, be_slow).last

    with new_group(workers=2, deadlines=patient) as group:
        group.start_all(train)
        first, second = group.finish()
        events = [event["event"] for event in status_of(group)["events"]]
    assert first == second
    assert "stalled" not in events and "lost" not in events


def test_the_others_take_over_local_steps_that_were_not_exchanged(new_group: Any) -> None:
    """A worker leaves after two of its four local steps: the others train on its samples."""
    loops: dict[int, Loop] = {}

    def train(grid: gridtrain.Grid, number: int) -> str:
        def is_leaving(loop: Loop) -> bool:
            return number == 1 and grid.step == 2 and loop.optimizer.local_calls == 2

        loops[number] = Loop(grid, gridtrain.GTopK(density=0.3))
        return loops[number].run(grid.batches(Numbered(120), batch_size=2, epochs=1), is_leaving).last

    with new_group(workers=3) as group:
        group.start_all(train)
        results = group.finish()
    assert results[0] == results[2]
    assert list(loops[1].digests) == [0, 1], "it has left in its third turn"
    whole = [set().union(*loop.samples[step]) for loop in loops.values() for step in loop.digests]
    assert sorted(itertools.chain(*whole)) == list(range(120))


# -- checkpoints ------------------------------------------------------------------------------


def run(folder: Path, workers: int, exchange: Any, until: int, overlap: int = False) -> list[dict[str, Any]]:
    def train(grid: gridtrain.Grid) -> dict[str, Any]:
        seen: dict[str, Any] = {"steps": []}

        def look(loop: Loop) -> bool:
            if loop.optimizer.local_calls == 0:
                grid._model_state.checkpoints.wait()  # type: ignore[union-attr]
                if grid.step == until:
                    return True
                seen["steps"].append(grid.step)
                seen.setdefault("first", loop.digest)
            return False

        loop = Loop(grid, exchange, overlap=overlap, **OUTER)
        loop.run(grid.batches(Numbered(90), global_batch_size=6, steps=12), look)
        moments = serialization.replica_digest(loop.model, loop.optimizer.inner)
        return {**seen, "last": loop.last, "moments": moments}

    return checkpointed_group.run(folder, workers, train)


@every_exchange
@with_and_without_overlap
def test_another_number_of_workers_goes_on_from_a_checkpoint(
    overlap: int, exchange: Any, tmp_path: Path
) -> None:
    run(tmp_path, 2, exchange, until=8, overlap=overlap)
    checkpoint = checkpoint_store.read(tmp_path / "worker-0" / "step-00000006")
    assert checkpoint.step == 6
    assert bool(checkpoint.position.ledger.pending) == bool(overlap), "a batch was being exchanged"
    again = run(tmp_path, 3, exchange, until=13, overlap=overlap)
    assert all(seen["steps"] == list(range(6, 12)) for seen in again)
    assert len({seen["last"] for seen in again}) == 1
    assert overlap or len({seen["first"] for seen in again}) == 1


def test_a_worker_ends_as_without_the_restart(tmp_path: Path) -> None:
    """A single worker, so that ranks do not change: parameters, velocity and moments."""
    exchange = gridtrain.GTopK(density=0.3)
    (calm,) = run(tmp_path / "calm", 1, exchange, until=12)
    run(tmp_path / "cut", 1, exchange, until=7)
    (resumed,) = run(tmp_path / "cut", 1, exchange, until=12)
    assert resumed["steps"] == list(range(6, 12))
    assert (resumed["last"], resumed["moments"]) == (calm["last"], calm["moments"])
