"""Mistakes in training loops: each error is one sentence that says what happened and what to do."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import checkpointed_group
import numpy as np
import pytest
import torch
from brisk import WITHIN_S
from group_status import status_of
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset
from training_loop import DATA, backward, linear, sgd, train_batch, train_steps

import gridtrain
from gridtrain.errors import ConfigError, GridtrainError
from gridtrain.network.transport.in_memory import EndpointKilled
from gridtrain.runtime.missed_step import MissedStep
from gridtrain.sdk import local_group
from gridtrain.training.checkpoint.hyperparameters import hyperparameters_json
from gridtrain.training.local_sgd import OuterOptimizer

SPARSE = gridtrain.GTopK(density=0.5)


# -- one worker, so that no other error hides the sentence ----------------------------------------------


def wrapped(grid: gridtrain.Grid) -> tuple[nn.Module, gridtrain.GridOptimizer]:
    model = linear()
    return model, sgd(grid, model)


def not_wrapped(grid: gridtrain.Grid) -> None:
    next(grid.batches(DATA, batch_size=2, steps=1))


def wrapped_twice(grid: gridtrain.Grid) -> None:
    model, optimizer = wrapped(grid)
    grid.optimizer(optimizer, model)


def half_parameters_with_a_sparse_exchange(grid: gridtrain.Grid) -> None:
    sgd(grid, linear().half(), SPARSE)


def half_parameters_with_sparse_local_steps(grid: gridtrain.Grid) -> None:
    sgd(grid, linear().half(), gridtrain.LocalSteps(2, SPARSE))


def step_before_the_data(grid: gridtrain.Grid) -> None:
    model, optimizer = wrapped(grid)
    train_batch(model, optimizer, DATA[0])


def forgotten_step(grid: gridtrain.Grid) -> None:
    model, _ = wrapped(grid)
    for batch in grid.batches(DATA, batch_size=2, steps=3):
        backward(model, batch)


def forgotten_local_steps(grid: gridtrain.Grid) -> None:
    """With overlap, the optimizer itself sets the parameters at the beginning of a turn."""
    model = linear()
    sgd(grid, model, gridtrain.LocalSteps(2, gridtrain.Dense(), overlap=1))
    for batch in grid.batches(DATA, batch_size=2, steps=3):
        backward(model, batch)


def step_of_the_inner_optimizer(grid: gridtrain.Grid) -> None:
    model, optimizer = wrapped(grid)
    list(train_steps(grid, model, optimizer.inner, steps=3))


def two_steps_for_one_batch(grid: gridtrain.Grid) -> None:
    model, optimizer = wrapped(grid)
    for _ in train_steps(grid, model, optimizer, steps=6):
        optimizer.step()


def a_step_for_each_part_of_one(grid: gridtrain.Grid) -> None:
    model, optimizer = wrapped(grid)
    list(train_steps(grid, model, optimizer, accumulate=3, steps=6))


def an_exchange_for_each_part_of_one(grid: gridtrain.Grid) -> None:
    model, optimizer = wrapped(grid)
    for batch in grid.batches(DATA, batch_size=2, steps=6, accumulate=2, weigh=False):
        backward(model, batch)
        optimizer.exchange()


def a_local_step_for_each_part_of_one(grid: gridtrain.Grid) -> None:
    model = linear()
    optimizer = sgd(grid, model, gridtrain.LocalSteps(2, gridtrain.Dense()))
    list(train_steps(grid, model, optimizer, accumulate=2, steps=6))


def step_after_the_end(grid: gridtrain.Grid) -> None:
    model, optimizer = wrapped(grid)
    list(train_steps(grid, model, optimizer, steps=2))
    optimizer.step()


def a_second_data_set(grid: gridtrain.Grid) -> None:
    model, optimizer = wrapped(grid)
    next(train_steps(grid, model, optimizer, epochs=1))
    next(train_steps(grid, model, optimizer, epochs=2))


def a_loop_for_each_epoch(grid: gridtrain.Grid) -> None:
    model, optimizer = wrapped(grid)
    for _ in range(2):
        list(train_steps(grid, model, optimizer, epochs=1))


def a_loop_after_close(grid: gridtrain.Grid) -> None:
    model, optimizer = wrapped(grid)
    next(train_steps(grid, model, optimizer, epochs=1))
    grid.close()
    next(train_steps(grid, model, optimizer, epochs=1))


def an_average_tracked_in_the_loop(grid: gridtrain.Grid) -> None:
    model, optimizer = wrapped(grid)
    grid.track(average=AveragedModel(model))
    for _ in train_steps(grid, model, optimizer, steps=4):
        grid.track(average=AveragedModel(model))
        if grid.step == 2:
            grid.track(late=AveragedModel(model))


def a_loader_that_reads_ahead(grid: gridtrain.Grid) -> None:
    wrapped(grid)
    indices = iter(grid.sampler(DATA, batch_size=2, steps=3))
    next(indices)
    next(indices)


def a_sampler_of_samples(grid: gridtrain.Grid) -> None:
    wrapped(grid)
    next(iter(DataLoader(DATA, sampler=grid.sampler(DATA, batch_size=2, steps=3))))  # type: ignore[arg-type]


def a_sampler_of_samples_and_a_batch_size(grid: gridtrain.Grid) -> None:
    wrapped(grid)
    loader = DataLoader(DATA, batch_size=2, sampler=grid.sampler(DATA, batch_size=2, steps=3))  # type: ignore[arg-type]
    next(iter(loader))


def a_loader_instead_of_its_data(grid: gridtrain.Grid) -> None:
    wrapped(grid)
    next(grid.batches(DataLoader(DATA), num_workers=2, epochs=1))  # type: ignore[arg-type]


ONE_STEP = (
    "each batch is one step -> call optimizer.step() once per batch, or once per N batches with "
    "grid.batches(..., accumulate=N)"
)
TOO_EARLY = "optimizer.step() was called after only 1 of its 2 batches had been requested"
ERRORS = {
    not_wrapped: "the optimizer has not been wrapped yet -> call optimizer = grid.optimizer(optimizer, model",
    wrapped_twice: "grid.optimizer was called twice -> call grid.optimizer only once: pass several models",
    half_parameters_with_a_sparse_exchange: "a parameter is torch.float16, whose range an update of GTopK "
    "may exceed, because unsent gradients add up in the residual -> keep parameters in float32",
    half_parameters_with_sparse_local_steps: "a parameter is torch.float16, whose range an update of GTopK",
    step_before_the_data: "a step was begun before the data set was given -> iterate over grid.batches(",
    forgotten_step: f"optimizer.step() was called 0 times for the batch of step 1; {ONE_STEP}; to skip a "
    'batch, use grid.optimizer(..., weigh_by="tokens"), and call grid.weigh(0) and optimizer.step() for it',
    forgotten_local_steps: "optimizer.step() was called 0 times for the 2 batches of step 1; "
    f"{ONE_STEP}; to read batches ahead, use grid.batches(..., num_workers=n); if a notebook cell",
    step_of_the_inner_optimizer: f"optimizer.step() was called 0 times for the batch of step 1; {ONE_STEP}; "
    "the script itself has changed the parameters: step the optimizer that grid.optimizer(...) returned, not",
    two_steps_for_one_batch: "optimizer.step() was called twice for the batch of step 1; ",
    a_step_for_each_part_of_one: "optimizer.step() was called after only 1 of its 3 batches had been "
    "requested -> call optimizer.step() once per 3 batches, or remove accumulate=3 from grid.batches(...)",
    an_exchange_for_each_part_of_one: f"{TOO_EARLY} -> call optimizer.step() once per 2 batches",
    a_local_step_for_each_part_of_one: f"{TOO_EARLY} -> call optimizer.step() once per 2 batches",
    step_after_the_end: "optimizer.step() was called after the end of the run -> leave the loop when",
    a_second_data_set: "another data set, size or length was given; a run keeps those of the first call -> c",
    a_loop_for_each_epoch: "the run of 1 epoch has ended -> iterate once, not once for each epoch",
    a_loop_after_close: "this worker has left the run: its grid was closed -> call gridtrain.join()",
    an_average_tracked_in_the_loop: "grid.track was given 'late' after the first batch, so workers that join "
    "later or continue from a checkpoint could not load the state -> create the object, and call grid.track(",
    a_loader_that_reads_ahead: f"optimizer.step() was called 0 times for the batch of step 1; {ONE_STEP}; "
    "a DataLoader with workers reads the next batch too early: use num_workers=0, or replace the loader with "
    "grid.batches(dataset, ..., num_workers=n)",
    a_sampler_of_samples: "the DataLoader has sampler=grid.sampler(...), which yields whole batches -> pass",
    a_sampler_of_samples_and_a_batch_size: "the DataLoader has sampler=grid.sampler(...), which yields whole",
    a_loader_instead_of_its_data: "a DataLoader was passed instead of a data set, but the run itself makes",
}


@pytest.mark.parametrize("loop", ERRORS, ids=lambda loop: loop.__name__)
def test_a_mistake_is_reported_in_one_sentence(outcomes: Any, loop: Callable[[gridtrain.Grid], None]) -> None:
    (error,) = outcomes(lambda grid, number: loop(grid), 1)
    assert isinstance(error, ConfigError), repr(error)
    assert str(error).startswith(ERRORS[loop])
    assert error.remedy


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_reason_of_a_worker_names_the_sample_that_it_cannot_read(
    num_workers: int, new_group: Any
) -> None:
    def train(grid: gridtrain.Grid, number: int) -> None:
        model, optimizer = wrapped(grid)
        try:
            list(train_steps(grid, model, optimizer, Unreadable(), epochs=1, num_workers=num_workers))
        except OSError:  # it refers to the loader, whose processes would be killed when this thread ends
            assert not multiprocessing.active_children()
            raise

    with new_group(workers=1) as group:
        group.start_all(train)
        (error,) = group.ends()
        events = str(status_of(group)["events"])
    assert isinstance(error, OSError)
    assert "its data cannot be read: OSError: cannot identify image file (sample 6 of the data set)" in events


class Unreadable(Dataset[Any]):
    """Sample 6 cannot be read, which comparing the data sets does not find."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if index == 6:
            raise OSError("cannot identify image file")
        return DATA[index % len(DATA)]


# -- a warning with the remedy ---------------------------------------------------------------------------


def test_a_second_iteration_after_the_end_gets_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """But the first one of a script that was restarted after the end of its run does not."""
    told = "yields nothing, because the run of 2 epochs has ended -> iterate once, not once for each epoch"

    def train(grid: gridtrain.Grid, passes: int) -> list[int]:
        model, optimizer = wrapped(grid)
        sampler: Any = grid.sampler(DATA, batch_size=2, epochs=2)
        loader = DataLoader(DATA, batch_sampler=sampler)  # type: ignore[arg-type]
        counts = []
        for _ in range(passes):
            counts.append(0)
            for batch in loader:
                train_batch(model, optimizer, batch)
                counts[-1] += 1
        return counts

    def run(passes: int) -> list[int]:
        (counts,) = checkpointed_group.run(tmp_path, 1, lambda grid: train(grid, passes))
        return counts

    assert run(1) == [12] and told not in caplog.text
    assert run(1) == [0] and told not in caplog.text
    assert run(3) == [0, 0, 0] and caplog.text.count(told) == 1


def test_adam_with_a_sparse_exchange_warns_with_the_remedy(together: Any) -> None:
    """It runs, but a warning names the line to change."""

    def train(grid: gridtrain.Grid, number: int) -> None:
        model = nn.Linear(2, 1)
        grid.optimizer(torch.optim.AdamW(model.parameters()), model, exchange=SPARSE)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        together(train, 1)
    (warning,) = caught
    assert str(warning.message) == (
        "AdamW converges poorly with a sparse exchange, because most elements of an update are zero -> "
        "use exchange=Dense(), SGD with GTopK(momentum=0.9), or LocalSteps(every=32, exchange=GTopK())"
    )
    assert warning.filename == __file__


def test_a_sync_batch_norm_warns_with_the_remedy(together: Any, caplog: pytest.LogCaptureFixture) -> None:
    def train(grid: gridtrain.Grid, number: int) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2), nn.Linear(2, 1), nn.BatchNorm1d(1))
        sgd(grid, model)

    together(train, 1)
    assert (
        "the model has 1 SyncBatchNorm, such as '1'; without a process group of torch, it normalizes each "
        "worker's batch separately -> use BatchNorm1d, 2d or 3d, or GroupNorm"
    ) in caplog.text


# -- in a group: the others go on ----------------------------------------------------------------------


def alone_at(step: int, number: int, do: Callable[[Any], None]) -> Callable[[gridtrain.Grid, int], list[int]]:
    """A loop of 6 steps in which worker `number` alone does something at `step`; world size at each step."""

    def train(grid: gridtrain.Grid, me: int) -> list[int]:
        model = linear()
        optimizer = sgd(grid, model, SPARSE)
        sizes = []
        for batch in grid.batches(DATA, batch_size=1, steps=6):
            optimizer.zero_grad()
            backward(model, batch)
            if (grid.step, me) == (step, number):
                do(optimizer)
            optimizer.step()
            sizes.append(grid.world_size)
        return sizes

    return train


def change_lr(optimizer: gridtrain.GridOptimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.002


def spoil_gradient(optimizer: gridtrain.GridOptimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.fill_(float("nan"))


def raise_value_error(optimizer: gridtrain.GridOptimizer) -> None:
    raise ValueError("no such column")


def test_a_worker_that_alone_changes_its_learning_rate_is_removed(outcomes: Any) -> None:
    """Worker 1 of 3 alone changes it at step 3, as ReduceLROnPlateau on a local loss does."""
    first, changed, third = outcomes(alone_at(3, 1, change_lr), 3)
    assert isinstance(changed, ConfigError)
    with pytest.raises(
        ConfigError,
        match=r"^step 4 cannot be committed: rank \d has lr=0\.002, but 2 of 3 workers \(ranks \d, \d\) have "
        r"lr=0\.01; the run continues without rank \d -> "
        r"change the optimizer's settings in the same way on all workers: "
        r"compute them from grid\.step instead of a counter, "
        r"step ReduceLROnPlateau with grid\.mean\(loss\), and name schedulers in grid\.track\(scheduler=",
    ):
        raise changed
    assert first == third == [3, 3, 3, 2, 2, 2]


def test_a_different_learning_rate_is_found_in_a_skipped_step(outcomes: Any) -> None:
    """Worker 0 has a NaN in the same step in which worker 1 changes its learning rate."""

    def train(grid: gridtrain.Grid, me: int) -> list[int]:
        spoil = change_lr if me else spoil_gradient
        return alone_at(3, me, spoil)(grid, me) if me < 2 else alone_at(3, -1, spoil)(grid, me)

    first, changed, third = outcomes(train, 3)
    assert isinstance(changed, ConfigError) and "have lr=0.01; the run continues" in str(changed)
    assert first == third == [3, 3, 3, 2, 2, 2]


def test_a_newcomer_with_an_untracked_scheduler_is_refused(new_group: Any) -> None:
    """It received the optimizer's state but, without `grid.track`, not the scheduler's."""
    come = threading.Event()

    def train(grid: gridtrain.Grid, number: int) -> int:
        model, optimizer = wrapped(grid)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        for step in train_steps(grid, model, optimizer, steps=400):
            scheduler.step()
            if number == 0 and step == 3:
                come.set()
                assert grid._session.connection.wait(lambda snapshot: snapshot.world_size == 2, WITHIN_S)
        return grid.step

    with new_group(workers=1) as group:
        group.start(train)
        assert come.wait(WITHIN_S)
        group.start(train)
        error = group.result(1)
        assert group.result(0) == 400
    assert isinstance(error, ConfigError)
    assert "has lr=0.005, but 1 of 2 workers (rank 0) has lr=" in str(error)
    assert "name schedulers in grid.track(scheduler=...) for workers that join later" in str(error)


def test_the_others_go_on_after_a_script_raises(outcomes: Any) -> None:
    first, raised, third = outcomes(alone_at(3, 1, raise_value_error), 3)
    assert isinstance(raised, ValueError) and str(raised) == "no such column"
    assert first == third == [3, 3, 3, 2, 2, 2]


def test_local_ends_workers_that_wait_for_one_that_raised(tmp_path: Path) -> None:
    """The run begins with three workers, and the third never joins."""
    numbers, waited = itertools.count(), list[BaseException]()

    def train(grid: gridtrain.Grid) -> None:
        if (number := next(numbers)) == 2:
            raise ValueError("no such file")
        try:
            alone_at(0, -1, raise_value_error)(grid, number)
        except BaseException as error:
            waited.append(error)
            raise

    with pytest.raises(ValueError, match=r"^no such file$"):
        gridtrain.local(train, 3, export_dir=str(tmp_path))
    assert [type(error) for error in waited] == [EndpointKilled] * 2


def test_local_does_not_wait_for_a_worker_that_does_not_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_group, "SHUTDOWN_TIMEOUT_S", 0.2)
    numbers, over, returned = itertools.count(), threading.Event(), threading.Event()

    def train(grid: gridtrain.Grid) -> None:
        if next(numbers) == 1:
            raise ValueError("no such file")
        over.wait(WITHIN_S)
        returned.set()

    with pytest.raises(ValueError, match=r"^no such file$"):
        gridtrain.local(train, 2, export_dir=str(tmp_path))
    assert not returned.is_set()
    over.set()


# -- an exception after the commit, which the script catches ---------------------------------------------


class Failing(torch.optim.SGD):
    """Raises in the second half of one step, as for a lack of memory."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory")


EXCHANGED = {
    "dense": (gridtrain.Dense(), {}),
    "sparse": (SPARSE, {}),
    "overlap": (gridtrain.Dense(), {"overlap": gridtrain.Overlap(adaptive=False, least=1)}),
}
NOT_APPLIED = (
    "the update of step 4 was committed, but this worker has not applied it completely, because of an "
    "exception or because step() was not called after exchange(); its model may differ from that of the "
    "others -> let the exception end this script, and start it again"
)


@pytest.mark.parametrize("exchange", EXCHANGED)
def test_a_worker_whose_update_was_not_applied_does_not_go_on(outcomes: Any, exchange: str) -> None:
    """Worker 1 of 2 catches the exception; neither its state nor its gradients reach the other worker."""
    config, options = EXCHANGED[exchange]

    def train(grid: gridtrain.Grid, number: int) -> int:
        model = linear()
        inner = Failing(model.parameters(), lr=0.01)
        optimizer = grid.optimizer(inner, model, exchange=config, compare_every=1, **options)
        for batch in grid.batches(DATA, batch_size=1, steps=6):
            inner.fails = (grid.step, number) == (3, 1)
            with suppress(torch.OutOfMemoryError):
                train_batch(model, optimizer, batch)
        return grid.step

    steps, failed = outcomes(train)
    assert steps == 6
    assert isinstance(failed, GridtrainError) and str(failed).startswith(NOT_APPLIED)


def test_a_second_call_after_an_update_that_was_not_applied_is_refused(outcomes: Any) -> None:
    def train(grid: gridtrain.Grid, number: int) -> None:
        model = linear()
        inner = Failing(model.parameters(), lr=0.01)
        optimizer = grid.optimizer(inner, model, exchange=gridtrain.Dense())
        for batch in grid.batches(DATA, batch_size=1, steps=6):
            inner.fails = grid.step == 3
            try:
                train_batch(model, optimizer, batch)
            except torch.OutOfMemoryError:
                optimizer.step()

    (failed,) = outcomes(train, 1)
    assert isinstance(failed, GridtrainError) and str(failed).startswith(NOT_APPLIED)


def test_a_missing_step_after_an_exchange_is_reported_at_the_next_batch(outcomes: Any) -> None:
    def train(grid: gridtrain.Grid, number: int) -> None:
        model, optimizer = wrapped(grid)
        for batch in grid.batches(DATA, batch_size=2, steps=4):
            backward(model, batch)
            optimizer.exchange()
            if grid.step < 4:
                optimizer.step()

    (failed,) = outcomes(train, 1)
    assert isinstance(failed, GridtrainError) and str(failed).startswith(NOT_APPLIED)


@pytest.mark.parametrize("overlap", [False, True, 1])
def test_a_round_of_local_steps_that_was_not_applied_ends_the_script(
    outcomes: Any, monkeypatch: pytest.MonkeyPatch, overlap: bool | int
) -> None:
    """The outer optimizer fails once, in worker 1's fourth round."""
    apply, failing = OuterOptimizer.step, threading.local()

    def fail(outer: OuterOptimizer) -> None:
        apply(outer)
        if getattr(failing, "now", False):
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(OuterOptimizer, "step", fail)

    def train(grid: gridtrain.Grid, number: int) -> int:
        model = linear()
        exchange = gridtrain.LocalSteps(2, gridtrain.Dense(), overlap=overlap)
        optimizer = sgd(grid, model, exchange)
        for batch in grid.batches(DATA, batch_size=1, steps=6):
            failing.now = (grid.step, number) == (3, 1)
            with suppress(torch.OutOfMemoryError):
                train_batch(model, optimizer, batch)
        return grid.step

    steps, failed = outcomes(train)
    assert steps == 6 + bool(overlap)
    assert isinstance(failed, GridtrainError) and str(failed).startswith(NOT_APPLIED)


def test_the_last_local_step_of_a_turn_cannot_be_left_out(outcomes: Any) -> None:
    """With `overlap=1` the round is exchanged in the first of the four calls."""

    def train(grid: gridtrain.Grid, number: int) -> None:
        model = linear()
        optimizer = sgd(grid, model, gridtrain.LocalSteps(4, gridtrain.Dense(), overlap=1))
        for calls, batch in enumerate(grid.batches(DATA, batch_size=1, steps=6)):
            if (calls + 1) % 4:
                train_batch(model, optimizer, batch)

    (left_out,) = outcomes(train, 1)
    assert isinstance(left_out, ConfigError)
    assert str(left_out).startswith("optimizer.step() was called 3 times for the 4 batches of step ")


def test_a_missed_step_that_was_not_applied_ends_the_script(outcomes: Any) -> None:
    """With `wait="auto"` a worker applies the steps that it has missed before it takes its own."""

    def train(grid: gridtrain.Grid, number: int) -> None:
        model = linear()
        inner = Failing(model.parameters(), lr=0.01)
        optimizer = grid.optimizer(inner, model, exchange=gridtrain.Dense(), wait="auto")
        for batch in grid.batches(DATA, batch_size=1, steps=6):
            inner.fails = grid.step == 3
            missed = MissedStep(3, hyperparameters_json(inner), np.ones(3, np.float32))
            if inner.fails:
                with suppress(torch.OutOfMemoryError):
                    optimizer.absence.apply([missed])
            train_batch(model, optimizer, batch)

    (failed,) = outcomes(train, 1)
    assert isinstance(failed, GridtrainError) and str(failed).startswith(NOT_APPLIED)
