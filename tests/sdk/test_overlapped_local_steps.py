"""`LocalSteps(..., overlap=True)` in whole groups: changes are exchanged while the next turn computes."""

from __future__ import annotations

import copy
import itertools
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from brisk import BRISK, LOSING, WITHIN_S
from torch import nn

import gridtrain
from gridtrain.core.planning.exchange_choice import ExchangeChoice
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
KEPT = 0.75
"""Share of its own change with which each of two workers begins a turn."""
OUTER = {"outer_learning_rate": 0.7, "outer_momentum": 0.9}


@pytest.fixture(autouse=True)
def state_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


class Numbered:
    """Sample i is made of the number i, so that a batch says which samples it has."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(index % 7) / 7.0, 1.0]), index


def model_of() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def wrapped(grid: gridtrain.Grid, model: nn.Module, exchange: Any, **outer: Any) -> gridtrain.GridOptimizer:
    local = gridtrain.LocalSteps(EVERY, exchange, overlap=True, **outer)
    return grid.optimizer(adamw(model), model, exchange=local)


def digest(model: nn.Module, optimizer: gridtrain.GridOptimizer) -> str:
    return serialization.replica_digest(model, optimizer.replicated).hex()[:12]


def train_batch(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def load(model: nn.Module, values_N: torch.Tensor) -> None:
    with torch.no_grad():
        for parameter, values in zip(
            model.parameters(), values_N.split([p.numel() for p in model.parameters()]), strict=True
        ):
            parameter.copy_(values.view_as(parameter))


class Loop:
    """A training loop that records, for each turn, the anchor at its end and the samples of its batches."""

    def __init__(self, grid: gridtrain.Grid, exchange: Any, **outer: Any) -> None:
        self.grid, self.model = grid, model_of()
        self.optimizer = wrapped(grid, self.model, exchange, **outer)
        self.digests: dict[int, str] = {}
        self.samples: dict[int, list[list[int]]] = {}

    def run(self, batches: Any, each: Any = lambda loop: None) -> Loop:
        for inputs, indices in batches:
            step = self.grid.step
            self.samples.setdefault(step, []).append(indices.tolist())
            each(self)
            train_batch(self.model, self.optimizer, inputs)
            if self.optimizer.local_calls == 0:
                assert self.grid.step == step + 1
                self.digests[step] = digest(self.model, self.optimizer)
        self.last = digest(self.model, self.optimizer)
        return self

    @property
    def taken(self) -> list[int]:
        return [index for turn in self.samples.values() for batch in turn for index in batch]


# -- one training ---------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda e: e.describe())
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_have_one_anchor_and_take_every_sample_once(
    together: Any, exchange: Any, workers: int
) -> None:
    size = 3 * 2 * EVERY * workers

    def train(grid: gridtrain.Grid, number: int) -> Loop:
        loop = Loop(grid, exchange, **OUTER)
        return loop.run(grid.batches(Numbered(size), batch_size=2, epochs=2))

    loops = together(train, workers)
    assert len({(str(loop.digests), loop.last) for loop in loops}) == 1
    first = loops[0]
    assert list(first.digests) == list(range(3 * 2)), "three turns of four batches of two in each pass"
    assert len(set(first.digests.values())) == 6 and first.last not in first.digests.values()
    assert sorted(i for loop in loops for i in loop.taken) == sorted([*range(size), *range(size)])


def test_it_is_the_algorithm_of_the_paper(together: Any) -> None:
    """Two workers, against a loop that has both in turn: anchors, changes one turn late, Nesterov."""
    turns = 5

    def train(grid: gridtrain.Grid, number: int) -> tuple[Loop, torch.Tensor]:
        loop = Loop(grid, gridtrain.Dense(), **OUTER)
        loop.run(grid.batches(Numbered(1000), batch_size=2, steps=turns))
        return loop, flat(loop.model)

    results = together(train, 2)
    data, models, start = Numbered(1000), [model_of(), model_of()], flat(model_of())
    inners = [adamw(model) for model in models]
    anchor, velocity = start.clone(), torch.zeros_like(start)
    changes = [torch.zeros_like(start) for _ in models]
    for turn in range(turns + 1):
        sent = changes
        if turn < turns:
            changes = []
            for (loop, _), model, inner, change in zip(results, models, inners, sent, strict=True):
                start = anchor - KEPT * change
                load(model, start)
                for batch in loop.samples[turn]:
                    train_batch(model, inner, torch.stack([data[index][0] for index in batch]))
                changes.append(start - flat(model))
        update = (sent[0] + sent[1]) / 2
        velocity = 0.9 * velocity + update
        anchor = anchor - 0.7 * (update + 0.9 * velocity)
    for _, values_N in results:
        torch.testing.assert_close(values_N, anchor, rtol=1e-4, atol=1e-6)


def test_alone_it_is_training_alone(together: Any) -> None:
    def train(grid: gridtrain.Grid, number: int) -> torch.Tensor:
        loop = Loop(grid, gridtrain.Dense())
        return flat(loop.run(grid.batches(Numbered(100), batch_size=2, steps=4, seed=3)).model)

    def plainly(grid: gridtrain.Grid, number: int) -> torch.Tensor:
        model = model_of()
        optimizer = grid.optimizer(adamw(model), model, exchange=gridtrain.Dense())
        for inputs, _ in grid.batches(Numbered(100), batch_size=2, steps=4 * EVERY, seed=3):
            train_batch(model, optimizer, inputs)
        return flat(model)

    torch.testing.assert_close(together(train, 1)[0], together(plainly, 1)[0], rtol=1e-4, atol=1e-6)


def test_a_round_commits_while_the_next_turn_computes(together: Any) -> None:
    """Each worker waits in its second local step for the commit of the round that it has just submitted."""

    def train(grid: gridtrain.Grid, number: int) -> list[int]:
        early: list[int] = []

        def await_commit(loop: Loop) -> None:
            if loop.optimizer.local_calls == 1:
                mailbox = grid._session._loop.mailbox
                here = mailbox.wait(lambda p: p.applied >= grid.step, WITHIN_S)
                assert here is not None, "the round did not commit before the end of the turn"
                early.append(grid.step)

        Loop(grid, gridtrain.GTopK(density=0.3)).run(
            grid.batches(Numbered(500), batch_size=2, steps=4), await_commit
        )
        return early

    assert together(train, 2) == [[0, 1, 2, 3]] * 2


def test_schedulers_and_means_follow_the_loop(together: Any) -> None:
    def train(grid: gridtrain.Grid, number: int) -> tuple[list[float], float]:
        means: list[float] = []
        loop = Loop(grid, gridtrain.Dense())
        scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 3, 0.5)
        grid.track(scheduler=scheduler)

        for inputs, _ in grid.batches(Numbered(500), batch_size=2, steps=3):
            time.sleep(0.02 * number)  # one is slower: rounds commit in different local steps of both
            means.append(grid.mean(float(number)))
            train_batch(loop.model, loop.optimizer, inputs)
            scheduler.step()
        return means, loop.optimizer.param_groups[0]["lr"]

    results = together(train, 2)
    assert results[0] == results[1] == ([0.5] * 3 * EVERY, pytest.approx(0.01 * 0.5**4))


def test_a_change_that_is_not_finite_is_skipped_by_all(together: Any) -> None:
    def train(grid: gridtrain.Grid, number: int) -> Loop:
        def each(loop: Loop) -> None:
            if number == 1 and grid.step == 2 and loop.optimizer.local_calls == 2:
                with torch.no_grad():
                    next(loop.model.parameters()).fill_(float("nan"))

        loop = Loop(grid, gridtrain.GTopK(density=0.3))
        return loop.run(grid.batches(Numbered(500), batch_size=2, steps=6), each)

    loops = together(train, 2)
    assert loops[0].digests == loops[1].digests and loops[0].last == loops[1].last
    assert loops[0].digests[3] == loops[0].digests[2], "round 3 has the change of turn 2"
    assert all(bool(torch.isfinite(flat(loop.model)).all()) for loop in loops)
    assert [loop.optimizer.skipped_steps for loop in loops] == [1, 1]


def test_a_change_that_was_lost_with_a_process_is_computed_again(together: Any) -> None:
    """The group counts the batch, and the worker does not have its change: it computes that first."""

    def train(grid: gridtrain.Grid, number: int) -> tuple[list[tuple[int, list[int]]], float, str]:
        model = model_of()
        optimizer = wrapped(grid, model, gridtrain.GTopK(density=0.3))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        grid.track(scheduler=scheduler)
        await_turn, turns = grid._session.await_turn, [0]

        def forget() -> Any:
            snapshot = await_turn()
            turns[0] += 1
            if number == 1 and turns[0] == 4:
                grid._turns._computed = ()  # type: ignore[union-attr]
            return snapshot

        grid._session.await_turn = forget  # type: ignore[method-assign]
        seen = []
        for inputs, indices in grid.batches(Numbered(500), batch_size=2, steps=6):
            seen.append((grid.step, indices.tolist()))
            train_batch(model, optimizer, inputs)
            scheduler.step()
        return seen, optimizer.param_groups[0]["lr"], digest(model, optimizer)

    calm, repeating = together(train, 2)
    assert calm[1:] == repeating[1:], "learning rate and model"
    assert len(calm[0]) == 6 * EVERY and len(repeating[0]) == 7 * EVERY
    again = repeating[0][3 * EVERY : 4 * EVERY]
    assert [samples for _, samples in again] == [
        samples for _, samples in repeating[0][2 * EVERY : 3 * EVERY]
    ]
    assert {step for step, _ in again} == {3}


def test_no_change_is_lost_when_the_exchange_changes(together: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time the coordinator evaluates, it takes the next exchange, perhaps amid a round."""
    turns = 9

    def take_next(choice: ExchangeChoice, *measurements: Any) -> str:
        candidates = choice._candidates()
        choice.chosen = candidates[(candidates.index(choice.chosen) + 1) % len(candidates)]
        choice.reason = choice.chosen_text
        return choice.reason

    monkeypatch.setattr(ExchangeChoice, "reconsider", take_next)

    class Recorded(Loop):
        def begin(self, grid: gridtrain.Grid) -> Any:
            keep, self.brought = self.optimizer._keep_change, torch.zeros_like(flat(self.model))
            self.used: list[str] = []

            def keep_change() -> None:
                keep()
                self.brought.add_(self.optimizer._change_N)

            self.optimizer._keep_change = keep_change
            return grid.batches(Numbered(2 * turns * 2 * EVERY), batch_size=2, epochs=1)

        def each(self, loop: Loop) -> None:
            if self.optimizer.local_calls == 0 and self.grid.step:
                self.used.append(type(self.optimizer.current_exchange.exchange).__name__)
                if self.grid.step % 3 == 1:  # long enough for another evaluation
                    session = self.grid._session
                    before = session.snapshot.generation
                    session._loop.mailbox.wait(lambda p: p.generation > before, 0.5)

    def train(grid: gridtrain.Grid, number: int) -> Any:
        loop = Recorded(grid, gridtrain.Auto(density=0.3, values="fp32"))
        loop.run(loop.begin(grid), loop.each)
        return loop, loop.optimizer.residual_state().get("residual", torch.zeros_like(loop.brought))

    results = together(train, 2, deadlines=replace(BRISK, reshare_s=0.05))
    (first, first_left), (second, second_left) = results
    assert first.digests == second.digests and first.last == second.last
    assert sorted(first.taken + second.taken) == list(range(4 * turns * EVERY))
    assert {*first.used, *second.used} == {"Dense", "GTopK", "TopK"}
    applied = flat(model_of()) - flat(first.model)
    brought = (first.brought + second.brought) / 2
    torch.testing.assert_close(applied + first_left + second_left, brought, rtol=1e-4, atol=1e-6)


# -- workers that come and go ----------------------------------------------------------------------


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda e: e.describe())
def test_a_new_worker_enters_between_two_turns(new_group: Any, exchange: Any) -> None:
    warm, entered = threading.Event(), threading.Event()
    stop_at = [10**9]

    def train(grid: gridtrain.Grid, number: int) -> tuple[dict[int, str], dict[int, float]]:
        loop = Loop(grid, exchange, **OUTER)
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
            train_batch(loop.model, loop.optimizer, inputs)
            scheduler.step()
            if loop.optimizer.local_calls == 0:
                loop.digests[step] = digest(loop.model, loop.optimizer)
            if step > 5:
                warm.set()
        return loop.digests, rates

    with new_group(workers=2) as group:
        for _ in range(2):
            group.start(train)
        assert warm.wait(WITHIN_S)
        group.start(train)
        assert entered.wait(WITHIN_S)
        results = [group.result(number) for number in range(3)]
        events = [event["event"] for event in group.snapshot()["events"]]
    for result in results:
        assert isinstance(result, tuple), result
    common = set.intersection(*(set(digests) for digests, _ in results))
    assert len(common) >= 7
    assert all(len({digests[step] for digests, _ in results}) == 1 for step in common)
    for step, rate in results[2][1].items():
        assert rate == pytest.approx(0.01 / (1 + EVERY * step)), f"step {step}"
    steps = sorted(results[0][0])
    assert all(b == a + 1 for a, b in itertools.pairwise(steps)), "a member lost a step"
    assert "diverged" not in events and "lost" not in events


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda e: e.describe())
@pytest.mark.parametrize("point", ["before", "during", "after"])
def test_a_killed_worker_costs_no_sample(point: Any, exchange: Any) -> None:
    """The others redo what the killed worker has computed and the group has not committed."""
    ends: dict[str, Any] = {}
    counts: list[int] = []

    def work(group: LocalGroup, name: str) -> None:
        try:
            with group.join(name) as grid:
                loop = Loop(grid, exchange, outer_momentum=0.5)
                loop.run(grid.batches(Numbered(200), batch_size=2, epochs=1))
                counts.append(grid._session.snapshot.ledger.consumed)
                ends[name] = loop
        except BaseException as error:
            ends[name] = error

    names = ("anna", "bert", "carl")
    with LocalGroup(min_workers=3, deadlines=LOSING, faults=Faults().kill_at("bert", 3, point)) as group:
        threads = [threading.Thread(target=work, args=(group, name), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WITHIN_S)
    assert set(ends) == set(names), f"only {set(ends)} have ended"
    assert isinstance(ends["bert"], EndpointKilled), ends["bert"]
    loops = [end for end in ends.values() if isinstance(end, Loop)]
    assert len(loops) == 2 and len({loop.last for loop in loops}) == 1, ends
    assert counts == [200, 200]
    seen = {index for loop in loops for index in loop.taken}
    missing = set(range(200)) - seen
    assert len(missing) <= 3 * 2 * EVERY, "bert's committed samples are those of its first turns"


# -- checkpoints -----------------------------------------------------------------------------------


def run(folder: Path, workers: int, exchange: Any, until: int) -> list[dict[str, Any]]:
    results: dict[int, dict[str, Any]] = {}

    def one(number: int) -> None:
        state = str(folder / f"worker-{number}")
        grid = group.join(f"worker-{number}", checkpoint_every=3, state_dir=state, export_dir=str(folder))
        with grid:
            loop = Loop(grid, exchange, **OUTER)
            steps: list[int] = []
            for inputs, _ in grid.batches(Numbered(90), global_batch_size=6, steps=12):
                if loop.optimizer.local_calls == 0:
                    grid._model_state.checkpoints.wait()  # type: ignore[union-attr]
                    if grid.step == until:
                        break
                    steps.append(grid.step)
                train_batch(loop.model, loop.optimizer, inputs)
            results[number] = {"steps": steps, "last": digest(loop.model, loop.optimizer)}

    with LocalGroup(min_workers=workers) as group:
        threads = [threading.Thread(target=one, args=(n,), daemon=True) for n in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WITHIN_S)
    assert sorted(results) == list(range(workers)), "a worker failed"
    return [copy.copy(results[number]) for number in range(workers)]


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda e: e.describe())
def test_another_number_of_workers_goes_on_from_a_checkpoint(exchange: Any, tmp_path: Path) -> None:
    run(tmp_path, 2, exchange, until=8)
    checkpoint = checkpoint_store.read(tmp_path / "worker-0" / "step-00000006")
    assert checkpoint.step == 6 and checkpoint.position.ledger.pending, "a batch was being exchanged"
    again = run(tmp_path, 3, exchange, until=13)
    assert all(seen["steps"] == list(range(6, 12)) for seen in again)
    assert len({seen["last"] for seen in again}) == 1
