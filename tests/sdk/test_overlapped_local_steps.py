"""`LocalSteps(..., overlap=)`: changes are exchanged while the next turn computes.

Newcomers, killed workers and checkpoints are in test_local_steps.py, with and without overlap.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import local_training
import pytest
import torch
from brisk import BRISK, WITHIN_S
from local_training import EVERY, EXCHANGES, OUTER, Numbered, adamw, model_of, train_batch
from next_exchange import choose_next_exchange
from torch import nn

import gridtrain
from gridtrain.runtime.compute_rate import ComputeRate
from gridtrain.training import local_sgd, optimizer

OWN_SHARE = 0.75
"""Share of its own change with which each of two workers begins a turn."""
Loop = partial(local_training.Loop, overlap=True)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def load(model: nn.Module, values_N: torch.Tensor) -> None:
    with torch.no_grad():
        for parameter, values in zip(
            model.parameters(), values_N.split([p.numel() for p in model.parameters()]), strict=True
        ):
            parameter.copy_(values.view_as(parameter))


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda e: e.describe())
@pytest.mark.parametrize(("workers", "overlap"), [(1, True), (3, True), (1, 2), (3, 1), (3, 3)])
def test_workers_have_one_anchor_and_take_every_sample_once(
    together: Any, exchange: Any, workers: int, overlap: int
) -> None:
    size = 3 * 2 * EVERY * workers

    def train(grid: gridtrain.Grid, number: int) -> local_training.Loop:
        loop = local_training.Loop(grid, exchange, overlap=overlap, **OUTER)
        return loop.run(grid.batches(Numbered(size), batch_size=2, epochs=2))

    loops = together(train, workers)
    assert len({(str(loop.digests), loop.last) for loop in loops}) == 1
    first = loops[0]
    assert list(first.digests) == list(range(3 * 2)), "three turns of four batches of two in each pass"
    assert len(set(first.digests.values())) == 6 and first.last not in first.digests.values()
    assert sorted(i for loop in loops for i in loop.taken) == sorted([*range(size), *range(size)])


def test_queued_work_of_a_gpu_counts_as_computing(together: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU only queues local steps: each reading of the clock waits for those before it."""
    told: list[str] = []
    queue: list[str] = []
    pause, end = ComputeRate.pause, ComputeRate.end

    def finish(device: torch.device) -> None:
        assert device == torch.device("cpu")
        queue.clear()

    def read(name: str, then: Any) -> Any:
        def reading(rate: ComputeRate, now_s: float, *more: float) -> Any:
            told.append(f"{name}, {len(queue)} steps queued")
            return then(rate, now_s, *more)

        return reading

    monkeypatch.setattr(optimizer, "finish_queued_work", finish)
    monkeypatch.setattr(local_sgd, "finish_queued_work", finish)
    monkeypatch.setattr(ComputeRate, "pause", read("paused", pause))
    monkeypatch.setattr(ComputeRate, "end", read("ended", end))

    def train(grid: gridtrain.Grid, number: int) -> None:
        loop = local_training.Loop(grid, gridtrain.Dense(), overlap=2)
        loop.run(grid.batches(Numbered(64), batch_size=2, steps=3), lambda loop: queue.append("a step"))

    together(train, 1)
    assert set(told) == {"paused, 0 steps queued", "ended, 0 steps queued"}


@pytest.mark.parametrize("overlap", [1, 3, EVERY])
def test_two_workers_follow_the_algorithm_of_the_paper(together: Any, overlap: int) -> None:
    """Two workers, against a loop that computes both: anchors, changes `overlap` steps late, Nesterov."""
    turns = 5

    def train(grid: gridtrain.Grid, number: int) -> tuple[local_training.Loop, torch.Tensor]:
        loop = local_training.Loop(grid, gridtrain.Dense(), overlap=overlap, **OUTER)
        loop.run(grid.batches(Numbered(1000), batch_size=2, steps=turns))
        return loop, flat(loop.model)

    results = together(train, 2)
    data, models, start = Numbered(1000), [model_of(), model_of()], flat(model_of())
    inners = [adamw(model) for model in models]
    anchor, velocity = start.clone(), torch.zeros_like(start)
    changes = [torch.zeros_like(start) for _ in models]

    def train_some(turn: int, first: int, last: int) -> list[torch.Tensor]:
        """The changes of both models in some local steps."""
        found = []
        for (loop, _), model, inner in zip(results, models, inners, strict=True):
            before = flat(model)
            for batch in loop.samples[turn][first:last]:
                train_batch(model, inner, torch.stack([data[index][0] for index in batch]))
            found.append(before - flat(model))
        return found

    for turn in range(turns + 1):
        sent = changes
        if turn < turns:
            for model, change in zip(models, sent, strict=True):
                load(model, anchor - OWN_SHARE * change)
            changes = train_some(turn, 0, overlap)
        update = (sent[0] + sent[1]) / 2
        velocity = 0.9 * velocity + update
        anchor = anchor - 0.7 * (update + 0.9 * velocity)
        if turn < turns:
            for model, change in zip(models, changes, strict=True):
                load(model, anchor - change)
            changes = [sum(both) for both in zip(changes, train_some(turn, overlap, EVERY), strict=True)]
    for _, values_N in results:
        torch.testing.assert_close(values_N, anchor, rtol=1e-4, atol=1e-6)


def test_a_single_worker_trains_as_without_a_group(together: Any) -> None:
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

        def await_commit(loop: local_training.Loop) -> None:
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


def test_schedulers_and_means_count_local_steps(together: Any) -> None:
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
    def train(grid: gridtrain.Grid, number: int) -> local_training.Loop:
        def each(loop: local_training.Loop) -> None:
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
    """The group counts the batch, but the worker does not have its change: it computes that first."""

    def train(grid: gridtrain.Grid, number: int) -> tuple[list[tuple[int, list[int]]], float, str]:
        loop = Loop(grid, gridtrain.GTopK(density=0.3))
        model, optimizer = loop.model, loop.optimizer
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
        return seen, optimizer.param_groups[0]["lr"], loop.digest

    calm, repeating = together(train, 2)
    assert calm[1:] == repeating[1:], "learning rate and model"
    assert len(calm[0]) == 6 * EVERY and len(repeating[0]) == 7 * EVERY
    again = repeating[0][3 * EVERY : 4 * EVERY]
    assert [samples for _, samples in again] == [
        samples for _, samples in repeating[0][2 * EVERY : 3 * EVERY]
    ]
    assert {step for step, _ in again} == {3}


def test_no_change_is_lost_when_the_exchange_changes(together: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each evaluation the coordinator chooses the next exchange, possibly during a round."""
    turns = 9

    choose_next_exchange(monkeypatch)

    class Recorded(local_training.Loop):
        def begin(self, grid: gridtrain.Grid) -> Any:
            keep, self.brought = self.optimizer._keep_change, torch.zeros_like(flat(self.model))
            self.used: list[str] = []

            def record_change() -> None:
                keep()
                self.brought.add_(self.optimizer._change_N)

            self.optimizer._keep_change = record_change
            return grid.batches(Numbered(2 * turns * 2 * EVERY), batch_size=2, epochs=1)

        def each(self, loop: local_training.Loop) -> None:
            if self.optimizer.local_calls == 0 and self.grid.step:
                self.used.append(type(self.optimizer.current_exchange.exchange).__name__)
                if self.grid.step % 3 == 1:  # long enough for another evaluation
                    session = self.grid._session
                    before = session.snapshot.generation
                    session._loop.mailbox.wait(lambda p: p.generation > before, 0.5)

    def train(grid: gridtrain.Grid, number: int) -> Any:
        loop = Recorded(grid, gridtrain.Auto(density=0.3, values="fp32"), overlap=True)
        loop.run(loop.begin(grid), loop.each)
        return loop, loop.optimizer.residual.state().get("residual", torch.zeros_like(loop.brought))

    results = together(train, 2, deadlines=replace(BRISK, reshare_s=0.05))
    (first, first_left), (second, second_left) = results
    assert first.digests == second.digests and first.last == second.last
    assert sorted(first.taken + second.taken) == list(range(4 * turns * EVERY))
    assert {*first.used, *second.used} == {"Dense", "GTopK", "TopK"}
    applied = flat(model_of()) - flat(first.model)
    brought = (first.brought + second.brought) / 2
    torch.testing.assert_close(applied + first_left + second_left, brought, rtol=1e-4, atol=1e-6)
