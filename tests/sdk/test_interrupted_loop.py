"""A loop that was interrupted, as a cell of a notebook, is run again and continues the run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_group import run
from torch import nn
from torch.utils.data import DataLoader
from training_loop import DATA, backward, flat, linear, sgd, train_batch

import gridtrain
from gridtrain.errors import GridtrainError

STEPS = 6


class Interrupted(Exception):
    """Ctrl-C."""


class Loop:
    """A notebook with a cell that is interrupted once, in the third step, and run again.

    Args:
        where: the place of the interrupt; "" for none.
        tracks: whether it tracks a scheduler.
    """

    def __init__(self, grid: gridtrain.Grid, exchange: Any, where: str, *, tracks: bool = False) -> None:
        self.model = nn.Sequential(nn.BatchNorm1d(2), linear())
        self.optimizer = sgd(grid, self.model, exchange)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        if tracks:
            grid.track(scheduler=self.scheduler)
        self._tracks, self._grid, self._where = tracks, grid, where
        self._last_call = 3 * grid.calls_per_step - 1
        self.calls = 0
        rounds: Any = grid._session._loop.step_rounds
        self._await_submitted = rounds.await_submitted
        rounds.await_submitted = self._finish_round
        self._submit_payload = rounds._mailbox.submit_payload
        rounds._mailbox.submit_payload = self._submit

    def _submit(self, event: Any) -> None:
        self._submit_payload(event)
        self._stop("in the submission")

    def _finish_round(self, mine: Any) -> Any:
        self._stop("before the commit")
        outcome = self._await_submitted(mine)
        self._stop("after the commit")
        return outcome

    def _stop(self, here: str) -> None:
        if here == self._where and self.calls == self._last_call:
            self._where = ""
            raise Interrupted

    def run_cell(self, batches: Any) -> None:
        for batch in batches:
            backward(self.model, batch)
            self._stop("before step()")
            self.optimizer.step()
            self._stop("after step()")
            self.optimizer.zero_grad()
            if self._tracks:
                self.scheduler.step()
            self._stop("after the scheduler")
            self.calls += 1

    def run(self, *, by_loader: bool = False) -> torch.Tensor:
        sizes: Any = {"batch_size": 4, "steps": STEPS}
        if by_loader:
            loader: Any = DataLoader(DATA, batch_sampler=self._grid.sampler(DATA, **sizes))  # type: ignore[arg-type]
        for _ in range(2):
            with suppress(Interrupted):
                self.run_cell(loader if by_loader else self._grid.batches(DATA, **sizes))
                break
        assert self._grid.finished and self._grid.step == STEPS
        return torch.cat([flat(self.model), *(b.flatten().float() for b in self.model.buffers())])


PLACES = ["before step()", "in the submission", "before the commit", "after the commit", "after step()"]
EXCHANGES = [
    gridtrain.Dense(),
    gridtrain.GTopK(density=0.5, momentum=0.9),
    gridtrain.LocalSteps(3, gridtrain.Dense(), outer_momentum=0.9),
]


@pytest.mark.parametrize("by_loader", [False, True], ids=["batches", "loader"])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda each: type(each).__name__)
def test_a_loop_that_is_run_again_continues_as_without_the_interrupt(
    exchange: Any, where: str, by_loader: bool, tmp_path: Path
) -> None:
    (whole,) = run(tmp_path / "whole", 1, lambda grid: Loop(grid, exchange, "").run())
    (again,) = run(tmp_path / "again", 1, lambda grid: Loop(grid, exchange, where).run(by_loader=by_loader))
    assert torch.equal(again, whole)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda each: type(each).__name__)
def test_the_models_stay_equal_if_one_of_two_loops_is_run_again(
    exchange: Any, where: str, tmp_path: Path
) -> None:
    def work(grid: gridtrain.Grid) -> torch.Tensor:
        loop = Loop(grid, exchange, where if grid._config.name == "worker-0" else "")
        loop.run()
        return flat(loop.model)

    first, second = run(tmp_path, 2, work)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("exchange", "where"),
    [
        (EXCHANGES[1], "after the commit"),
        (EXCHANGES[2], "before step()"),
        (EXCHANGES[0], "after step()"),
        (EXCHANGES[0], "after the scheduler"),
    ],
    ids=str,
)
def test_a_step_that_is_finished_or_undone_includes_those_of_a_scheduler(
    exchange: Any, where: str, tmp_path: Path
) -> None:
    def work(grid: gridtrain.Grid, where: str) -> Any:
        loop = Loop(grid, exchange, where, tracks=True)
        return loop.run(), loop.scheduler.last_epoch

    ((whole, epoch),) = run(tmp_path / "whole", 1, lambda grid: work(grid, ""))
    ((again, again_epoch),) = run(tmp_path / "again", 1, lambda grid: work(grid, where))
    assert torch.equal(again, whole) and again_epoch == epoch


def test_a_committed_step_is_not_continued_if_its_scheduler_steps_in_each_local_step(tmp_path: Path) -> None:
    why = "in step 3, which cannot be continued: its schedulers do not step once for each step of the run"
    with pytest.raises(GridtrainError, match=why):
        run(tmp_path, 1, lambda grid: Loop(grid, EXCHANGES[2], "after the commit", tracks=True).run())


def test_an_earlier_iterator_ends_when_the_loop_is_run_again(tmp_path: Path) -> None:
    """A variable may hold it."""

    def work(grid: gridtrain.Grid) -> tuple[int, int]:
        model = linear()
        optimizer = sgd(grid, model)
        earlier, later = (grid.batches(DATA, batch_size=2, steps=STEPS) for _ in range(2))
        next(earlier)
        train_batch(model, optimizer, next(later))
        return len(list(earlier)), grid.step

    assert run(tmp_path, 1, work) == [(0, 1)]


def test_a_step_is_finished_by_another_call_after_an_interrupt(tmp_path: Path) -> None:
    def work(grid: gridtrain.Grid) -> int:
        loop = Loop(grid, gridtrain.Dense(), "after the commit")
        batches = grid.batches(DATA, batch_size=4, steps=STEPS)
        with suppress(Interrupted):
            loop.run_cell(batches)
        loop.optimizer.step()
        return grid.step

    assert run(tmp_path, 1, work) == [3]
