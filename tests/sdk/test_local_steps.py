"""LocalSteps in whole groups: an ordinary loop, every sample once, and the promises for each exchange."""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from brisk import LOSING, WITHIN_S
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import gridtrain
from gridtrain.errors import ConfigError, JoinRefused
from gridtrain.network.transport.in_memory import EndpointKilled
from gridtrain.sdk.local_group import LocalGroup
from gridtrain.testing import Faults
from gridtrain.training.checkpoint import checkpoint_store, serialization

EVERY = 4
EXCHANGES = [
    gridtrain.Dense(),
    gridtrain.TopK(density=0.3),
    gridtrain.GTopK(density=0.3),
    gridtrain.Dense(values="int8"),
]
NAMES = ("anna", "bert", "carl")


@pytest.fixture(autouse=True)
def state_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture(scope="module", autouse=True)
def torch_is_warm() -> None:
    """What torch imports at an optimizer's first step takes seconds on a busy machine."""
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([parameter])
    parameter.square().sum().backward()
    optimizer.step()


class Numbered:
    """Sample i is the number i, so that a batch says which ones it holds."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(index % 7) / 7.0, 1.0]), index


class Streamed(IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return iter([Numbered(self.size)[index] for index in range(self.size)])


def model_of() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))
    return model


def wrapped(
    grid: gridtrain.Grid, model: nn.Module, exchange: Any, every: int = EVERY, **outer: Any
) -> gridtrain.GridOptimizer:
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    return grid.optimizer(inner, model, exchange=gridtrain.LocalSteps(every, exchange, **outer))


def digest(model: nn.Module, optimizer: gridtrain.GridOptimizer) -> str:
    return serialization.replica_digest(model, optimizer.replicated).hex()[:12]


def loop(
    grid: gridtrain.Grid, batches: Any, model: nn.Module, optimizer: gridtrain.GridOptimizer
) -> dict[str, Any]:
    """Digest after each step of the run, and the samples of each batch."""
    seen: dict[str, Any] = {"digests": {}, "samples": []}
    for inputs, indices in batches:
        if (taken := getattr(optimizer, "local_calls", 0)) == 0:
            seen["digests"][grid.step] = digest(model, optimizer)
        seen["samples"].append((grid.step, taken, indices.tolist()))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    seen["last"] = digest(model, optimizer)
    return seen


# -- ordinary loops -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(("workers", "momentum"), [(1, 0.9), (3, 0.0)])
def test_an_ordinary_loop_trains_one_model_and_takes_every_sample_once(
    together: Any, exchange: Any, workers: int, momentum: float
) -> None:
    """Two passes, each with a short step at its end: fewer local steps then, not smaller batches."""

    def train(grid: gridtrain.Grid, number: int) -> dict[str, Any]:
        model = model_of()
        optimizer = wrapped(grid, model, exchange, outer_momentum=momentum)
        return loop(grid, grid.batches(Numbered(37), batch_size=2, epochs=2), model, optimizer)

    results = together(train, workers)
    assert len({str(seen["digests"]) + seen["last"] for seen in results}) == 1
    steps = -(-37 // (2 * EVERY * workers))
    for seen in results:
        assert [calls for _, calls, _ in seen["samples"]] == list(range(EVERY)) * 2 * steps
        assert all(len(samples) <= 2 for _, _, samples in seen["samples"])
        assert len(set(seen["digests"].values())) == 2 * steps
    taken = {(step, tuple(samples)) for seen in results for step, _, samples in seen["samples"]}
    assert sorted(i for _, samples in taken for i in samples) == sorted([*range(37), *range(37)])


def test_sizes_are_of_one_step_of_the_loop(together: Any) -> None:
    def train(grid: gridtrain.Grid, number: int) -> list[int]:
        model = model_of()
        optimizer = wrapped(grid, model, gridtrain.Dense())
        batches = grid.batches(Numbered(100), global_batch_size=6, accumulate=3, steps=2)
        sizes = []
        for position, (inputs, _) in enumerate(batches):
            sizes.append(len(inputs))
            model(inputs).square().mean().backward()
            if position % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        return sizes

    for sizes in together(train, 2):
        assert sizes == [1] * 2 * EVERY * 3, "6 samples for two workers, in three parts, four times a step"


@pytest.mark.parametrize("way", ["prefetched", "streamed", "streamed and prefetched", "sampler"])
def test_other_ways_to_the_data(together: Any, way: str) -> None:
    def train(grid: gridtrain.Grid, number: int) -> dict[str, Any]:
        model = model_of()
        optimizer = wrapped(grid, model, gridtrain.GTopK(density=0.3))
        options: dict[str, Any] = {"batch_size": 2, "epochs": 2}
        if way == "sampler":
            data = Numbered(37)
            batches: Any = DataLoader(data, batch_sampler=grid.sampler(data, **options))
        else:
            data = Numbered(37) if way == "prefetched" else Streamed(37)  # type: ignore[assignment]
            length = None if way == "prefetched" else 37
            ahead = 1 if "prefetched" in way else 0
            batches = grid.batches(data, length=length, num_workers=ahead, **options)
        return loop(grid, batches, model, optimizer)

    results = together(train, 2)
    assert len({str(seen["digests"]) + seen["last"] for seen in results}) == 1
    taken = {(step, tuple(samples)) for seen in results for step, _, samples in seen["samples"]}
    assert sorted(i for _, samples in taken for i in samples) == sorted([*range(37), *range(37)])


def test_schedulers_step_with_the_loop(together: Any) -> None:
    """Also where a pass ends, and on a worker that holds no samples then: the last step has one."""

    def train(grid: gridtrain.Grid, number: int) -> tuple[float, str]:
        model = model_of()
        optimizer = wrapped(grid, model, gridtrain.Dense(), every=2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        grid.track(scheduler=scheduler)
        for inputs, _ in grid.batches(Numbered(5), batch_size=1, epochs=3):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return optimizer.param_groups[0]["lr"], digest(model, optimizer)

    results = together(train, 2)
    assert len(set(results)) == 1
    assert results[0][0] == pytest.approx(0.01 * 0.5 ** (2 * 2 * 3 // 3))


def test_wrong_numbers_of_calls_are_named(outcomes: Any) -> None:
    def train(grid: gridtrain.Grid, number: int, calls: int) -> None:
        model = model_of()
        optimizer = wrapped(grid, model, gridtrain.Dense())
        for position, (inputs, _) in enumerate(grid.batches(Numbered(50), batch_size=2, steps=3)):
            model(inputs).square().mean().backward()
            for _ in range(calls if position == 0 else 1):
                optimizer.step()

    (seldom,) = outcomes(lambda grid, number: train(grid, number, 0), 1)
    (often,) = outcomes(lambda grid, number: train(grid, number, 2), 1)
    assert isinstance(seldom, ConfigError) and isinstance(often, ConfigError)
    assert "called 3 times for the 4 batches of step 0" in str(seldom)
    assert "called 5 times for a step's 4 batches" in str(often)


def test_another_number_of_steps_is_another_training(new_group: Any) -> None:
    began, refused = threading.Event(), threading.Event()

    def train(grid: gridtrain.Grid, number: int) -> str:
        model = model_of()
        optimizer = wrapped(grid, model, gridtrain.Dense(), every=4 + number)
        for inputs, _ in grid.batches(Numbered(50), batch_size=2, steps=10_000):
            began.set()
            if refused.is_set():
                break
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return "trained"

    with new_group(workers=1) as group:
        group.start(train)
        assert began.wait(WITHIN_S)
        other = group.result(group.start(train))
        refused.set()
        assert group.result(0) == "trained"
    assert isinstance(other, JoinRefused) and "exchange is LocalSteps(every=5" in str(other)


# -- workers that come and go -----------------------------------------------------------------


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda e: type(e).__name__)
def test_a_newcomer_enters_between_two_exchanges(new_group: Any, exchange: Any) -> None:
    warm, entered = threading.Event(), threading.Event()
    stop_at = [10**9]

    def train(grid: gridtrain.Grid, number: int) -> dict[int, str]:
        model = model_of()
        optimizer = wrapped(grid, model, exchange, outer_learning_rate=0.7, outer_momentum=0.9)
        digests: dict[int, str] = {}
        for inputs, _ in grid.batches(Numbered(50_000), batch_size=2, steps=100_000):
            if optimizer.local_calls == 0:
                digests[grid.step] = digest(model, optimizer)
                if number == 2 and not entered.is_set():
                    stop_at[0] = grid.step + 8
                    entered.set()
                if grid.step >= stop_at[0]:
                    break
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if grid.step > 5:
                warm.set()
        return digests

    with new_group(workers=2) as group:
        for _ in range(2):
            group.start(train)
        assert warm.wait(WITHIN_S)
        group.start(train)
        assert entered.wait(WITHIN_S)
        results = [group.result(number) for number in range(3)]
        events = [event["event"] for event in group.snapshot()["events"]]
    for result in results:
        assert isinstance(result, dict), result
    common = set.intersection(*(set(seen) for seen in results))
    assert len(common) >= 8
    assert all(len({seen[step] for seen in results}) == 1 for step in common)
    assert ("caught_up" in events) == exchange.sparse and "drifted" not in events
    steps = sorted(results[0])
    assert all(b == a + 1 for a, b in itertools.pairwise(steps)), "a member lost a step"


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda e: type(e).__name__)
def test_a_newcomer_has_the_schedule_of_the_others(new_group: Any, exchange: Any) -> None:
    """It is given the state while the others wait in a step, in which their scheduler has moved already."""
    warm, entered = threading.Event(), threading.Event()
    stop_at = [10**9]

    def train(grid: gridtrain.Grid, number: int) -> dict[int, float]:
        model = model_of()
        optimizer = wrapped(grid, model, exchange)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + step))
        grid.track(scheduler=scheduler)
        rates: dict[int, float] = {}
        for inputs, _ in grid.batches(Numbered(50_000), batch_size=2, steps=100_000):
            if optimizer.local_calls == 0:
                rates[grid.step] = optimizer.param_groups[0]["lr"]
                if number == 2 and not entered.is_set():
                    stop_at[0] = grid.step + 8
                    entered.set()
                if grid.step >= stop_at[0]:
                    break
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if grid.step > 5:
                warm.set()
        return rates

    with new_group(workers=2) as group:
        for _ in range(2):
            group.start(train)
        assert warm.wait(WITHIN_S)
        group.start(train)
        assert entered.wait(WITHIN_S)
        results = [group.result(number) for number in range(3)]
    for result in results:
        assert isinstance(result, dict), result
    assert len(results[2]) >= 8
    for step, rate in results[2].items():
        assert rate == pytest.approx(0.01 / (1 + EVERY * step)), f"step {step}"


class Faulty:
    """Three workers under a plan of faults: what committed attempts took, and how each worker ended."""

    def __init__(self, faults: Faults, exchange: Any, samples: int) -> None:
        self.exchange, self.samples = exchange, samples
        self.ends: dict[str, Any] = {}
        self.taken: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self.committed: set[tuple[int, ...]] = set()
        with LocalGroup(min_workers=3, deadlines=LOSING, faults=faults) as group:
            threads = [threading.Thread(target=self._work, args=(group, name), daemon=True) for name in NAMES]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30.0)
        assert set(self.ends) == set(NAMES), f"only {set(self.ends)} have ended"

    def _work(self, group: LocalGroup, name: str) -> None:
        try:
            with group.join(name) as grid:
                self.ends[name] = self._train(grid)
        except BaseException as error:
            self.ends[name] = error

    def _train(self, grid: gridtrain.Grid) -> str:
        model = model_of()
        optimizer = wrapped(grid, model, self.exchange, outer_momentum=0.5)
        session: Any = grid._session
        run, mine = session.run, set[int]()

        def seen(plan: Any, *rest: Any) -> Any:
            name = session._turn.open_round
            attempt = (name.generation, name.step, name.attempt)
            self.taken[attempt] += sorted(mine) if plan.samples else []
            outcome = run(plan, *rest)
            if outcome.is_committed:
                self.committed.add(attempt)
            return outcome

        session.run = seen
        for inputs, indices in grid.batches(Numbered(self.samples), batch_size=2, epochs=1):
            if optimizer.local_calls == 0:
                mine.clear()
            mine.update(indices.tolist())
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return digest(model, optimizer)


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("point", ["before", "during", "after"])
def test_a_worker_that_is_killed_costs_nobody_a_sample(point: Any, exchange: Any) -> None:
    run = Faulty(Faults().kill_at("bert", 3, point), exchange, samples=200)
    assert isinstance(run.ends["bert"], EndpointKilled), run.ends["bert"]
    digests = [end for end in run.ends.values() if isinstance(end, str)]
    assert len(digests) == 2 and len(set(digests)) == 1, run.ends
    assert sorted(index for name in run.committed for index in run.taken[name]) == list(range(200))
    assert len({name[0] for name in run.committed}) == 2, "the others went on in another generation"


def test_a_slow_worker_shows_life_at_each_local_step(new_group: Any) -> None:
    """Its eight local steps take twice as long as anybody's patience with a silent member."""
    patient = replace(LOSING, first_step_s=1.2, patience_floor_s=1.2, patience_factor=0.0)

    def train(grid: gridtrain.Grid, number: int) -> str:
        model = model_of()
        optimizer = wrapped(grid, model, gridtrain.Dense(), every=8)
        for inputs, _ in grid.batches(Numbered(500), batch_size=2, steps=2):
            if number == 1:
                time.sleep(0.3)  # its processor is slow
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return digest(model, optimizer)

    with new_group(workers=2, deadlines=patient) as group:
        first, second = (group.result(number) for number in [group.start(train) for _ in range(2)])
        events = [event["event"] for event in group.snapshot()["events"]]
    assert isinstance(first, str) and first == second, (first, second)
    assert "stalled" not in events and "lost" not in events


def test_what_was_trained_alone_and_not_exchanged_is_done_by_the_others(new_group: Any) -> None:
    """One leaves after two of its four local steps: its samples are somebody else's then."""
    taken: dict[int, list[Any]] = {}

    def train(grid: gridtrain.Grid, number: int) -> str:
        model = model_of()
        optimizer = wrapped(grid, model, gridtrain.GTopK(density=0.3))
        mine: list[Any] = taken.setdefault(number, [])
        open_turn: set[int] = set()
        for inputs, indices in grid.batches(Numbered(120), batch_size=2, epochs=1):
            if number == 1 and grid.step == 2 and optimizer.local_calls == 2:
                return "left"
            step = grid.step
            open_turn.update(indices.tolist())
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if grid.step > step:
                mine.extend(open_turn)
                open_turn.clear()
        return digest(model, optimizer)

    with new_group(workers=3) as group:
        for _ in range(3):
            group.start(train)
        results = [group.result(number) for number in range(3)]
    assert results[1] == "left" and results[0] == results[2], results
    assert sorted(itertools.chain(*taken.values())) == list(range(120))


# -- checkpoints ------------------------------------------------------------------------------


def run(folder: Path, workers: int, exchange: Any, until: int) -> list[dict[str, Any]]:
    results: dict[int, dict[str, Any]] = {}

    def one(number: int) -> None:
        state = str(folder / f"worker-{number}")
        grid = group.join(f"worker-{number}", checkpoint_every=3, state_dir=state, export_dir=str(folder))
        with grid:
            model = model_of()
            optimizer = wrapped(grid, model, exchange, outer_learning_rate=0.7, outer_momentum=0.9)
            seen: dict[str, Any] = {"steps": []}
            for inputs, _ in grid.batches(Numbered(90), global_batch_size=6, steps=12):
                if optimizer.local_calls == 0:
                    grid._model_state.checkpoints.wait()  # type: ignore[union-attr]
                    if grid.step == until:
                        break
                    seen["steps"].append(grid.step)
                    seen.setdefault("first", digest(model, optimizer))
                model(inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            seen["last"] = digest(model, optimizer)
            seen["moments"] = serialization.replica_digest(model, optimizer.inner)
            results[number] = seen

    with LocalGroup(min_workers=workers) as group:
        threads = [threading.Thread(target=one, args=(n,), daemon=True) for n in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
    assert sorted(results) == list(range(workers)), "a worker failed"
    return [results[number] for number in range(workers)]


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda e: type(e).__name__)
def test_another_number_of_workers_goes_on_from_a_checkpoint(exchange: Any, tmp_path: Path) -> None:
    run(tmp_path, 2, exchange, until=8)
    assert checkpoint_store.read(tmp_path / "worker-0" / "step-00000006").step == 6
    again = run(tmp_path, 3, exchange, until=12)
    assert all(seen["steps"] == list(range(6, 12)) for seen in again)
    assert len({(seen["first"], seen["last"]) for seen in again}) == 1


def test_the_same_workers_end_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Alone, so that the ranks are the same again: parameters, velocity and its own moments."""
    exchange = gridtrain.GTopK(density=0.3)
    (calm,) = run(tmp_path / "calm", 1, exchange, until=12)
    run(tmp_path / "cut", 1, exchange, until=7)
    (resumed,) = run(tmp_path / "cut", 1, exchange, until=12)
    assert resumed["steps"] == list(range(6, 12))
    assert (resumed["last"], resumed["moments"]) == (calm["last"], calm["moments"])
