"""A run whose workers are all gone continues from their checkpoints."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from brisk import WITHIN_S
from checkpointed_group import run
from group_status import status_of
from safetensors.torch import load_file
from torch import nn
from training_loop import backward, sgd, train_batch, train_steps

import gridtrain
from gridtrain.config import Deadlines
from gridtrain.errors import ConfigError, GridtrainError
from gridtrain.runtime.group_session import WaitInterrupted
from gridtrain.sdk import grid as grid_module
from gridtrain.sdk import run_end
from gridtrain.sdk.local_group import LocalGroup
from gridtrain.training import model_state as model_state_module
from gridtrain.training.checkpoint import checkpoint_store
from gridtrain.training.checkpoint.model_export import export_model
from gridtrain.training.optimizer import GridOptimizer
from gridtrain.training.pause import PauseController
from gridtrain.training.residual_departure import LEFT_FOLDER

DATA = [(torch.tensor([float(i), 1.0]), torch.tensor([2.0 * i])) for i in range(24)]
STEPS = 12
EXCHANGES = [
    gridtrain.Dense(),
    gridtrain.GTopK(density=0.5, momentum=0.9),
    gridtrain.TopK(density=0.5),
    gridtrain.Dense(values="int8"),
]

torch.manual_seed(7)
NET = nn.Linear(2, 1)


def train(
    grid: gridtrain.Grid, exchange: Any, until: int, steps: int = STEPS, *, waits: bool = True
) -> dict[str, Any]:
    """Train up to `until` steps; return the state at the first batch and at the end, and the samples."""
    model = copy.deepcopy(NET)  # seeding in several threads at once would give several models
    optimizer = sgd(grid, model, exchange, lr=0.001, momentum=0.0 if exchange.sparse else 0.9)
    seen: dict[str, Any] = {"steps": [], "first": None, "samples": []}
    for batch in grid.batches(DATA, global_batch_size=6, steps=steps):
        if seen["first"] is None:
            seen["first"] = {name: value.clone() for name, value in model.state_dict().items()}
        seen["steps"].append(grid.step)
        if waits:
            grid._model_state.checkpoints.wait()  # steps are faster here than a disk
        train_batch(model, optimizer, batch)
        if grid.step == until:
            break
    seen["last"] = {name: value.clone() for name, value in model.state_dict().items()}
    return seen


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda e: e.describe())
def test_another_number_of_workers_goes_on_bit_for_bit(exchange: Any, tmp_path: Path) -> None:
    run(tmp_path, 2, lambda grid: train(grid, exchange, until=8))
    written = checkpoint_store.read(tmp_path / "worker-0" / "step-00000006")
    again = run(tmp_path, 3, lambda grid: train(grid, exchange, until=STEPS))
    for seen in again:
        assert seen["steps"] == list(range(6, STEPS))
        parameters = {name: seen["first"][name] for name in ("weight", "bias")}
        assert all(torch.equal(parameters[name], again[0]["first"][name]) for name in parameters)
        assert all(torch.equal(seen["last"][name], again[0]["last"][name]) for name in parameters)
    stored = sorted(
        tuple(t.flatten().tolist()) for t in written.tensors.values() if t.shape in ((1, 2), (1,))
    )
    assert all(tuple(again[0]["first"][name].flatten().tolist()) in stored for name in ("weight", "bias"))


class Interrupted(Exception):
    """The script ends within the inner optimizer's step."""


@pytest.mark.parametrize("tracks", [False, True], ids=["in the update", "before the scheduler's step"])
def test_a_worker_that_ends_amid_a_step_leaves_no_checkpoint_of_it(
    tracks: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(grid: gridtrain.Grid) -> None:
        model = copy.deepcopy(NET)
        optimizer = sgd(grid, model, lr=0.001)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        if tracks:
            grid.track(scheduler=scheduler)
        else:
            optimizer.inner.register_step_post_hook(lambda *_: fail() if grid.step == 5 else None)
        with suppress(Interrupted):
            for step in train_steps(grid, model, optimizer, DATA, batch_size=6, steps=STEPS):
                if step == 5:
                    return
                scheduler.step()

    def fail() -> None:
        raise Interrupted

    run(tmp_path, 1, work, every=4, saves_on_leaving=True)
    written = sorted(path.name for path in (tmp_path / "worker-0").glob("step-*"))
    assert written == ["step-00000004"]
    why = model_state_module.UNSETTLED if tracks else "was stopped within a step"
    assert f"{why}; step 5 is lost: this worker's latest checkpoint is of step 4" in caplog.text


class FailingData(list[Any]):
    """Samples that cannot be read once `fails()` is true."""

    def __init__(self, fails: Callable[[], bool]) -> None:
        super().__init__(DATA)
        self._fails = fails

    def __getitem__(self, index: Any) -> Any:
        if self._fails():
            raise OSError("cannot identify image file")
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("exchange", "where", "written"),
    [
        (gridtrain.Dense(), "reading the batch", ["step-00000005"]),
        (gridtrain.Dense(), "computing", []),
        (gridtrain.LocalSteps(every=2), "reading the batch", ["step-00000005"]),
        (gridtrain.LocalSteps(every=2), "reading the second batch", ["step-00000005"]),
    ],
    ids=lambda value: value.describe() if hasattr(value, "describe") else None,
)
def test_a_data_error_leaves_a_checkpoint_unless_the_script_computes(
    exchange: Any, where: str, written: list[str], tmp_path: Path
) -> None:
    """A script that waits for its next batch has stepped its schedulers; local steps are undone."""

    def work(grid: gridtrain.Grid) -> None:
        model = copy.deepcopy(NET)
        optimizer = sgd(grid, model, exchange, lr=0.001)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        grid.track(scheduler=scheduler)
        calls = 0
        last_call = 5 * grid.calls_per_step + ("second" in where)
        data = FailingData(lambda: where != "computing" and calls == last_call)
        for batch in grid.batches(data, batch_size=6, steps=STEPS):
            backward(model, batch)
            if where == "computing" and calls == last_call:
                raise OSError("cannot identify image file")
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            calls += 1

    with pytest.raises(OSError, match="cannot identify image file"):
        run(tmp_path, 1, work, every=100, saves_on_leaving=True)
    assert [path.name for path in (tmp_path / "worker-0").glob("step-*")] == written


def load_other_weights(model: nn.Module, *, by_data: bool) -> None:
    other = {name: value + 1 for name, value in model.state_dict().items()}
    if not by_data:
        model.load_state_dict(other)
        return
    for name, parameter in model.named_parameters():
        parameter.data.copy_(other[name])


@pytest.mark.parametrize("by_data", [False, True], ids=["load_state_dict", "data.copy_"])
@pytest.mark.parametrize("ends", ["after a step", "in a step", "waiting", "by its agent"])
def test_weights_that_a_script_loads_after_its_loop_are_not_saved_as_those_of_the_last_step(
    ends: str,
    by_data: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(grid: gridtrain.Grid, *, loads: bool) -> None:
        model = copy.deepcopy(NET)
        optimizer = sgd(grid, model, lr=0.001)
        with suppress(Interrupted):
            for batch in grid.batches(DATA, batch_size=6, steps=STEPS):
                if ends == "in a step" and grid.step == 5:
                    break
                train_batch(model, optimizer, batch)
                grid._model_state.checkpoints.wait()
                with torch.no_grad():
                    model.bias.clamp_(-1.0, 1.0)  # a change in the loop belongs to the step
                if ends == "after a step" and grid.step == 5:
                    break
                if ends in ("waiting", "by its agent") and grid.step == 5:
                    error = Interrupted if ends == "waiting" else WaitInterrupted
                    monkeypatch.setattr(grid._session, "await_turn", Mock(side_effect=error))
                    monkeypatch.setattr(grid._turns, "_pause", lambda: False)
        if loads:
            load_other_weights(model, by_data=by_data)

    written = {}
    for loads in (False, True):
        run(tmp_path / str(loads), 1, partial(work, loads=loads), every=4, saves_on_leaving=True)
        written[loads] = {path.name for path in (tmp_path / str(loads) / "worker-0").glob("step-*")}
    assert written == {False: {"step-00000004", "step-00000005"}, True: {"step-00000004"}}
    text = "its script has changed the parameters since then (call grid.close() before loading other weights)"
    assert f"and {text}; step 5 is lost: this worker's latest checkpoint is of step 4" in caplog.text


@pytest.mark.parametrize("by_data", [False, True], ids=["load_state_dict", "data.copy_"])
def test_weights_that_a_script_loads_while_a_variable_holds_its_loop_are_not_saved_as_those_of_the_last_step(
    by_data: bool, tmp_path: Path
) -> None:
    """As a progress bar does; unless the loop changes parameters after its steps."""

    def work(grid: gridtrain.Grid) -> None:
        model = copy.deepcopy(NET)
        optimizer = sgd(grid, model, lr=0.001)
        batches = grid.batches(DATA, batch_size=6, steps=STEPS)
        for batch in batches:
            train_batch(model, optimizer, batch)
            if grid.step == 5:
                break
        load_other_weights(model, by_data=by_data)
        batches.close()

    run(tmp_path, 1, work, every=4, saves_on_leaving=True)
    assert [path.name for path in (tmp_path / "worker-0").glob("step-*")] == ["step-00000004"]


@pytest.mark.parametrize("where", ["backward", "exchange", "wait"])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_worker_that_ends_before_its_next_update_leaves_a_checkpoint_with_its_scheduler(
    where: str, passes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It continues as without the end, although each pass changes the batch norm's statistics, and the
    script steps its scheduler after each pass."""

    def work(grid: gridtrain.Grid, *, ends: bool) -> dict[str, torch.Tensor]:
        model = nn.Sequential(nn.BatchNorm1d(2), copy.deepcopy(NET))
        optimizer = sgd(grid, model, lr=0.01, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        grid.track(scheduler=scheduler)
        session: Any = grid._session

        def stop(here: str) -> None:
            if ends and here == where and session.snapshot.applied == 4 and count % passes == 0:
                raise Interrupted

        def stop_before(name: str, here: str) -> None:
            call = getattr(session, name)
            monkeypatch.setattr(session, name, lambda *args, **named: (stop(here), call(*args, **named))[1])

        count = 0
        stop_before("begin", "exchange")
        stop_before("_wait", "wait")
        with suppress(Interrupted):
            for batch in grid.batches(DATA, global_batch_size=6, steps=9, accumulate=passes):
                backward(model, batch)
                count += 1
                stop("backward")
                if count % passes == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                scheduler.step()
        return dict(model.state_dict())

    (whole,) = run(tmp_path / "whole", 1, lambda grid: work(grid, ends=False), every=100)
    run(tmp_path / "cut", 1, lambda grid: work(grid, ends=True), every=100, saves_on_leaving=True)
    assert [path.name for path in (tmp_path / "cut" / "worker-0").glob("step-*")] == ["step-00000005"]
    (resumed,) = run(tmp_path / "cut", 1, lambda grid: work(grid, ends=False), every=100)
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


@pytest.mark.parametrize(
    ("exchange", "where"),
    [
        (gridtrain.Dense(), "after the commit"),
        (gridtrain.GTopK(density=0.5), "after the commit"),
        (gridtrain.LocalSteps(every=3), "after the commit"),
        (gridtrain.LocalSteps(every=3), "in the first update"),
        (gridtrain.LocalSteps(every=3), "in the second update"),
        (gridtrain.LocalSteps(every=3), "after the second update"),
        (gridtrain.LocalSteps(every=3, outer_momentum=0.9), "before the exchange"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.describe(),
)
def test_a_worker_that_ends_before_the_groups_update_leaves_the_state_before_the_step(
    exchange: Any, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last worker continues as without the end, with its residual."""

    def work(grid: gridtrain.Grid, *, ends: bool) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(NET)
        optimizer = sgd(grid, model, exchange, lr=0.001)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        grid.track(scheduler=scheduler)
        calls = grid.calls_per_step
        count = 0
        rounds: Any = grid._session._loop.step_rounds

        def stop(here: str, call: int) -> None:
            if ends and here == where and count == 5 * calls + call:
                raise Interrupted

        def finish_round(mine: Any) -> Any:
            stop("before the exchange", calls - 1)
            outcome = await_submitted(mine)
            stop("after the commit", calls - 1)
            return outcome

        await_submitted = rounds.await_submitted
        monkeypatch.setattr(rounds, "await_submitted", finish_round)
        optimizer.inner.register_step_post_hook(
            lambda *_: (stop("in the first update", 0), stop("in the second update", 1))
        )
        with suppress(Interrupted):
            for _ in train_steps(grid, model, optimizer, DATA, batch_size=2, steps=9):
                scheduler.step()
                stop("after the second update", 1)
                count += 1
        return dict(model.state_dict())

    (whole,) = run(tmp_path / "whole", 1, lambda grid: work(grid, ends=False), every=100)
    run(tmp_path / "cut", 1, lambda grid: work(grid, ends=True), every=100, saves_on_leaving=True)
    folder = tmp_path / "cut" / "worker-0"
    assert [path.name for path in folder.glob("step-*")] == ["step-00000005"]
    (resumed,) = run(tmp_path / "cut", 1, lambda grid: work(grid, ends=False), every=100)
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_local_steps_are_undone_without_the_missed_steps_that_were_applied_since(tmp_path: Path) -> None:
    """With `wait="auto"` these are applied before the exchange, in which the worker is stopped."""

    def work(grid: gridtrain.Grid) -> tuple[nn.Module, torch.Tensor]:
        model = copy.deepcopy(NET)
        optimizer = sgd(grid, model, gridtrain.LocalSteps(every=2), wait="auto")
        session: Any = grid._session
        begin = session.begin

        def begin_after_missed_step() -> Any:
            plan = begin()
            if plan.step == 3:
                optimizer.apply_update(np.ones(3, np.float32))
                raise Interrupted
            return plan

        session.begin = begin_after_missed_step
        with suppress(Interrupted):
            list(train_steps(grid, model, optimizer, DATA, batch_size=6, steps=STEPS))
        return model, model.weight.detach().clone()

    ((model, common),) = run(tmp_path, 1, work, every=100, saves_on_leaving=True)
    (folder,) = (tmp_path / "worker-0").glob("step-*")
    assert any(torch.equal(each, common) for each in checkpoint_store.read(folder).tensors.values())
    assert torch.equal(model.weight, common)


@pytest.mark.parametrize("runs_again", [False, True])
def test_local_steps_are_not_undone_if_the_script_has_moved_a_frozen_teacher(
    runs_again: bool, tmp_path: Path
) -> None:
    """The anchor does not contain it."""

    def work(grid: gridtrain.Grid) -> None:
        model = nn.Sequential(copy.deepcopy(NET), copy.deepcopy(NET).requires_grad_(False))
        inner = torch.optim.SGD(model[0].parameters(), lr=0.001)
        optimizer = grid.optimizer(inner, model, exchange=gridtrain.LocalSteps(3), send_frozen=["1.*"])
        count = 0

        def stop(*_: Any) -> None:
            if count == 7:
                raise Interrupted

        inner.register_step_post_hook(stop)
        with suppress(Interrupted):
            for batch in grid.batches(DATA, batch_size=2, steps=STEPS):
                backward(model[0], batch)
                optimizer.step()
                with torch.no_grad():
                    model[1].weight.lerp_(model[0].weight, 0.1)
                count += 1
        if runs_again:
            with pytest.raises(GridtrainError, match="its script changes frozen parameters in local steps"):
                next(iter(grid.batches(DATA, batch_size=2, steps=STEPS)))

    run(tmp_path, 1, work, every=100, saves_on_leaving=True)
    assert not list((tmp_path / "worker-0").glob("step-*"))


def test_a_checkpoint_of_a_worker_that_ends_within_local_steps_has_no_moments_of_these_steps(
    tmp_path: Path,
) -> None:
    def work(grid: gridtrain.Grid) -> None:
        model = copy.deepcopy(NET)
        optimizer = sgd(grid, model, gridtrain.LocalSteps(every=2), momentum=0.9)
        for count, _ in enumerate(train_steps(grid, model, optimizer, DATA, batch_size=6, steps=STEPS)):
            if count == 8:
                break

    run(tmp_path, 1, work, every=100, saves_on_leaving=True)
    (folder,) = (tmp_path / "worker-0").glob("step-*")
    assert folder.name == "step-00000004"
    assert "moments" not in checkpoint_store.read(folder).document


@pytest.mark.parametrize("when", ["before the first", "after the first"])
def test_weights_that_a_script_loads_within_local_steps_are_not_saved_or_replaced(
    when: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(grid: gridtrain.Grid) -> tuple[nn.Module, torch.Tensor]:
        model = copy.deepcopy(NET)
        optimizer = sgd(grid, model, gridtrain.LocalSteps(every=3), lr=0.001)
        for count, batch in enumerate(grid.batches(DATA, batch_size=6, steps=STEPS)):
            if when == "before the first" and count == 6:
                load_other_weights(model, by_data=False)
            train_batch(model, optimizer, batch)
            if count == 6:
                break
        if when == "after the first":
            load_other_weights(model, by_data=False)
        return model, model.weight.detach().clone()

    ((model, weight),) = run(tmp_path, 1, work, every=100, saves_on_leaving=True)
    assert not list((tmp_path / "worker-0").glob("step-*"))
    assert torch.equal(model.weight, weight)
    assert f"{model_state_module.CHANGED}; steps 1 to 2 are lost" in caplog.text


@pytest.mark.parametrize("every", [100, 0], ids=["every 100 steps", "none"])
@pytest.mark.parametrize(
    "exchange", [*EXCHANGES[:2], gridtrain.LocalSteps(every=2)], ids=lambda e: e.describe()
)
def test_a_loop_that_all_workers_leave_early_keeps_its_model(
    exchange: Any, every: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen = run(tmp_path, 2, lambda grid: train(grid, exchange, until=8), every=every, saves_on_leaving=True)
    for number in range(2):
        folder = tmp_path / f"worker-{number}"
        if not every:
            assert not folder.exists()
            continue
        export_model(folder, tmp_path / "model.safetensors")
        model = load_file(tmp_path / "model.safetensors")
        assert all(torch.equal(model[name], seen[number]["last"][name]) for name in ("weight", "bias"))
        assert f"the state after step 8 is in {folder}" in caplog.text
    if every:
        again = run(tmp_path, 2, lambda grid: train(grid, exchange, until=STEPS), every=every)
        assert [each["steps"][0] for each in again] == [8, 8]
        assert caplog.messages.count("the run is continuing from the checkpoint of step 8") == 2


@pytest.mark.parametrize(
    "steps_first", [True, False], ids=["after scheduler.step()", "before scheduler.step()"]
)
def test_a_loop_that_all_workers_leave_after_a_step_keeps_its_scheduler(
    steps_first: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint after a step in which the scheduler has not been stepped would change the rates."""

    def work(grid: gridtrain.Grid, until: int) -> tuple[int, int, dict[str, Any]]:
        model = copy.deepcopy(NET)
        inner = torch.optim.SGD(model.parameters(), lr=0.001)
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 3)
        optimizer = grid.optimizer(inner, model, exchange=gridtrain.Dense())
        grid.track(scheduler=scheduler)
        first = -1
        for batch in grid.batches(DATA, global_batch_size=6, steps=STEPS):
            first = grid.step if first < 0 else first
            train_batch(model, optimizer, batch)
            if grid.step == until and not steps_first:
                break
            scheduler.step()
            if grid.step == until:
                break
        return first, scheduler.last_epoch, dict(model.state_dict())

    (whole, _) = run(tmp_path / "whole", 2, lambda grid: work(grid, STEPS), every=100)
    run(tmp_path / "cut", 2, lambda grid: work(grid, 8), every=100, saves_on_leaving=True)
    again = run(tmp_path / "cut", 2, lambda grid: work(grid, STEPS), every=100)
    assert [first for first, _, _ in again] == ([8, 8] if steps_first else [0, 0])
    assert {last for _, last, _ in again} == {STEPS if steps_first else STEPS - 1}
    if steps_first:
        states = [state for _, _, state in (whole, *again)]
        assert all(torch.equal(state[name], whole[2][name]) for state in states for name in state)


def test_the_others_do_not_wait_for_what_a_leaving_worker_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for a copy of its model nor for the residual that nobody has accepted."""
    goes_on, is_in_time = threading.Event(), {}

    def after_the_next_step(write: Any) -> Any:
        def wait_and_write(*args: Any) -> Any:
            is_in_time.setdefault(write.__name__, goes_on.wait(WITHIN_S / 4))
            return write(*args)

        return wait_and_write

    def work(grid: gridtrain.Grid) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(NET)
        optimizer = sgd(grid, model, EXCHANGES[1], lr=0.001)
        model_state: Any = grid._model_state
        model_state._options = replace(model_state._options, max_transfer_bytes=0)
        for batch in grid.batches(DATA, global_batch_size=6, steps=STEPS):
            train_batch(model, optimizer, batch)
            if grid.step == 5 and grid._config.name == "worker-1":
                break
            if grid.step == 6:
                goes_on.set()
        return {name: value.clone() for name, value in model.state_dict().items()}

    for module, name in ((GridOptimizer, "pack"), (model_state_module, "save_left_residual")):
        monkeypatch.setattr(module, name, after_the_next_step(getattr(module, name)))
    _, left = run(tmp_path, 2, work, every=100, saves_on_leaving=True)
    assert is_in_time == {"pack": True, "save_left_residual": True}
    export_model(tmp_path / "worker-1", tmp_path / "model.safetensors")
    model = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(model[name], left[name]) for name in ("weight", "bias"))
    assert (tmp_path / "worker-1" / LEFT_FOLDER).is_dir()


@pytest.mark.parametrize("exchange", EXCHANGES[:2], ids=lambda e: e.describe())
def test_a_finished_run_has_a_checkpoint_of_its_last_step(
    exchange: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = run(tmp_path, 2, lambda grid: train(grid, exchange, until=-1, steps=8))
    for number in range(2):
        done = export_model(tmp_path / f"worker-{number}", tmp_path / "exported.safetensors")
        assert done.step == 8
        exported, final = (load_file(tmp_path / f"{name}.safetensors") for name in ("exported", "final"))
        assert exported.keys() == final.keys() == first[number]["last"].keys()
        assert all(torch.equal(exported[name], final[name]) for name in final)
    # The same run is finished at once, and a longer one goes on.
    again = run(tmp_path, 2, lambda grid: train(grid, exchange, until=-1, steps=8))
    assert [seen["steps"] for seen in again] == [[], []]
    longer = run(tmp_path, 3, lambda grid: train(grid, exchange, until=-1, steps=10))
    assert [seen["steps"] for seen in longer] == [[8, 9]] * 3
    earlier = load_file(tmp_path / "earlier-2" / "final.safetensors")
    assert all(torch.equal(earlier[name], first[0]["last"][name]) for name in earlier)
    final = load_file(tmp_path / "final.safetensors")
    assert all(torch.equal(final[name], longer[0]["last"][name]) for name in final)
    assert (
        f"the run has finished; the model is in {tmp_path / 'final.safetensors'}; the one that was there "
        f"before is in {tmp_path / 'earlier-2'}"
    ) in caplog.messages


@pytest.mark.parametrize("values", ["bf16", "int8"])
def test_a_dense_residual_is_part_of_a_checkpoint(tmp_path: Path, values: str) -> None:
    def work(grid: gridtrain.Grid, until: int) -> list[torch.Tensor]:
        model = copy.deepcopy(NET)
        optimizer = sgd(grid, model, gridtrain.Dense(values=values), lr=0.001)
        residuals = []
        for batch in grid.batches(DATA, global_batch_size=6, steps=STEPS):
            residuals.append(optimizer.residual.state()["residual"])
            grid._model_state.checkpoints.wait()
            train_batch(model, optimizer, batch)
            if grid.step == until:
                break
        return residuals

    before = run(tmp_path, 2, lambda grid: work(grid, 7))
    after = run(tmp_path, 2, lambda grid: work(grid, STEPS))
    for first, resumed in zip(before, after, strict=True):
        assert first[6].any() and torch.equal(first[6], resumed[0])


def test_the_latest_checkpoint_of_all_workers_is_used(tmp_path: Path) -> None:
    run(tmp_path, 2, lambda grid: train(grid, gridtrain.Dense(), until=8))
    for path in (tmp_path / "worker-1").glob("step-00000006"):
        path.rename(path.with_name("moved-away"))
    first, second = run(tmp_path, 2, lambda grid: train(grid, gridtrain.Dense(), until=STEPS))
    assert first["steps"] == second["steps"] == list(range(6, STEPS))
    assert all(torch.equal(first["first"][name], second["first"][name]) for name in first["first"])


def test_the_same_number_of_workers_ends_as_without_the_restart(tmp_path: Path) -> None:
    calm = run(tmp_path / "calm", 2, lambda grid: train(grid, gridtrain.Dense(), until=STEPS))
    run(tmp_path / "cut", 2, lambda grid: train(grid, gridtrain.Dense(), until=7))
    resumed = run(tmp_path / "cut", 2, lambda grid: train(grid, gridtrain.Dense(), until=STEPS))
    for name, value in calm[0]["last"].items():
        assert torch.equal(resumed[0]["last"][name], value), name


def test_only_the_latest_checkpoints_are_stored_and_none_is_partly_written(tmp_path: Path) -> None:
    run(tmp_path, 1, lambda grid: train(grid, gridtrain.Dense(), until=STEPS), every=2)
    assert sorted(path.name for path in (tmp_path / "worker-0").glob("step-*")) == [
        "step-00000008",
        "step-00000010",
    ]


def test_a_damaged_checkpoint_is_skipped_with_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, 1, lambda grid: train(grid, gridtrain.Dense(), until=8))
    tensors = tmp_path / "worker-0" / "step-00000006" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-5])
    (seen,) = run(tmp_path, 1, lambda grid: train(grid, gridtrain.Dense(), until=STEPS))
    assert seen["steps"][0] == 3
    assert "step-00000006 cannot be read: SafetensorError" in caplog.text


def test_a_worker_with_only_checkpoints_of_other_settings_does_not_begin(tmp_path: Path) -> None:
    run(tmp_path, 1, lambda grid: train(grid, gridtrain.Dense(), until=8))
    text = (
        r"step-00000006 was .* different training settings \(exchange: Dense\(\), now TopK.*undo the change"
    )
    with pytest.raises(ConfigError, match=text):
        run(tmp_path, 1, lambda grid: train(grid, gridtrain.TopK(density=0.5), until=4))
    (seen,) = run(tmp_path, 1, lambda grid: train(grid, gridtrain.Dense(), until=8))
    assert seen["steps"][0] == 6


def test_checkpoints_of_other_settings_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, 1, lambda grid: train(grid, gridtrain.Dense(), until=8))
    written = (tmp_path / "worker-0" / "step-00000003" / "tensors.safetensors").read_bytes()
    monkeypatch.setattr(checkpoint_store, "check_not_refused", lambda *_: None)  # as in the default folder
    (seen,) = run(tmp_path, 1, lambda grid: train(grid, gridtrain.TopK(density=0.5), until=4))
    assert seen["steps"][0] == 0
    assert "was written with different training settings" in caplog.text
    kept = tmp_path / "worker-0" / "earlier-1"
    assert f"different training settings are now in {kept}" in caplog.text
    assert sorted(path.name for path in kept.iterdir()) == ["step-00000003", "step-00000006"]
    assert (kept / "step-00000003" / "tensors.safetensors").read_bytes() == written
    assert [path.name for path in (tmp_path / "worker-0").glob("step-*")] == ["step-00000003"]


def test_a_full_disk_costs_the_checkpoint_but_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_store, "_write_file", full)
    monkeypatch.setattr(PauseController, "await_stop", lambda self, timeout_s: True)
    (seen,) = run(tmp_path, 1, lambda grid: train(grid, gridtrain.Dense(), until=-1))
    assert seen["steps"] == list(range(STEPS))
    assert caplog.text.count("cannot be written to") == 1
    assert not list((tmp_path / "worker-0").glob("step-*"))
    assert "can continue from" not in caplog.text, "there is no checkpoint"


def test_a_hanging_disk_costs_the_last_checkpoint_but_not_the_final_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers, true_save = threading.Event(), checkpoint_store.save

    def save(content: Any, path: Path) -> None:
        assert answers.wait(WITHIN_S)
        true_save(content, path)

    monkeypatch.setattr(checkpoint_store, "save", save)
    monkeypatch.setattr(run_end, "FINAL_CHECKPOINT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(grid_module, "CHECKPOINT_TIMEOUT_S", 0.05)
    (seen,) = run(tmp_path, 1, lambda grid: train(grid, gridtrain.Dense(), until=-1, waits=False))
    answers.set()
    assert seen["steps"] == list(range(STEPS)) and (tmp_path / "final.safetensors").exists()
    assert "the checkpoint of the last step was not written" in caplog.text
    assert "can continue from" not in caplog.text


def test_a_state_of_another_format_is_refused(tmp_path: Path) -> None:
    run(tmp_path, 1, lambda grid: train(grid, gridtrain.Dense(), until=8))
    path = tmp_path / "worker-0" / "step-00000006"
    body = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(body | {"format": 99}))
    with pytest.raises(ConfigError, match="its format is 99; this version of gridtrain reads format 1"):
        checkpoint_store.read(path)


def test_every_sample_counts_once_over_a_restart(tmp_path: Path) -> None:
    """Two workers write their position in the data; three go on from there, with other shares."""
    counted: list[tuple[int, list[int]]] = []

    def work(grid: gridtrain.Grid, until: int) -> None:
        model = nn.Linear(2, 1)
        optimizer = sgd(grid, model, lr=0.001)
        numbers = [(x, number) for number, (x, _) in enumerate(DATA)]
        for x, indices in grid.batches(numbers, global_batch_size=6, epochs=3):
            step = grid.step
            grid._model_state.checkpoints.wait()
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            counted.append((step, indices.tolist()))
            if grid.step == until:
                break

    run(tmp_path, 2, lambda grid: work(grid, until=7))
    position = checkpoint_store.read(tmp_path / "worker-0" / "step-00000006").position
    assert (position.ledger.step, position.ledger.consumed, position.ledger.cursor) == (6, 36, 36)
    undone = [entry for entry in counted if entry[0] >= 6]
    assert sum(len(indices) for _, indices in undone) == 6, "step 6, of which there is no checkpoint"
    counted[:] = [entry for entry in counted if entry[0] < 6]
    run(tmp_path, 3, lambda grid: work(grid, until=-1))
    taken = sorted(index for _, indices in counted for index in indices)
    assert taken == sorted(list(range(len(DATA))) * 3)


def test_a_checkpoint_folder_belongs_to_one_worker(tmp_path: Path) -> None:
    folder = str(tmp_path / "ours")
    with LocalGroup(min_workers=1) as group:
        first = group.join("first", checkpoint_every=3, state_dir=folder)
        other = group.join("other", checkpoint_every=3, state_dir=folder)
        with first, other:
            next(steps_of(first))
            with pytest.raises(ConfigError, match="ours is in use by another worker"):
                next(steps_of(other))


def test_checkpoints_of_another_history_are_not_deleted(
    new_group: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker without a checkpoint begins the run; a worker that joins later has one."""
    run(tmp_path, 1, lambda grid: train(grid, gridtrain.Dense(), until=5))
    folder = tmp_path / "worker-0" / "step-00000003"
    assert folder.exists()
    started, over = threading.Event(), threading.Event()

    def fresh(grid: gridtrain.Grid, number: int) -> None:
        for step in steps_of(grid):
            if step == 5:  # beyond the step of the checkpoint, which no other may replace
                started.set()
            if over.is_set():
                break

    def old(grid: gridtrain.Grid, number: int) -> None:
        for _ in zip(range(6), steps_of(grid), strict=False):
            grid._model_state.checkpoints.wait()
        over.set()

    with new_group(workers=1) as group:
        group.start(fresh)
        assert started.wait(WITHIN_S)
        group.start(old, checkpoint_every=1, state_dir=str(tmp_path / "worker-0"))
        group.finish()
    assert folder.exists()
    assert "not from the checkpoint of step 3, which stays in" in caplog.text


def test_checkpoints_from_before_a_start_at_step_0_are_moved_out_of_the_reach_of_later_ones(
    new_group: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All have left; a worker without a checkpoint begins again, and then the old one returns, twice."""
    started, over = threading.Event(), threading.Event()

    def work(grid: gridtrain.Grid, number: int) -> None:
        for step in steps_of(grid):
            grid._model_state.checkpoints.wait()
            if number == 1 and step == 5:
                started.set()
            if step >= 3 and (number != 1 or over.is_set()):
                break

    old = {"checkpoint_every": 1, "state_dir": str(tmp_path / "worker-0")}
    with new_group(workers=1, deadlines=Deadlines(regather_s=0.5)) as group:
        group.result(group.start(work, **old))
        group.wait_for("waiting")
        group.start(work)
        assert started.wait(WITHIN_S)
        for _ in range(2):
            group.result(group.start(work, **old))
        over.set()
        group.finish()
    kept = tmp_path / "worker-0" / "earlier-1"
    assert sorted(path.name for path in kept.iterdir()) == ["step-00000002", "step-00000003"]
    assert f"not from the checkpoint of step 3, which is now in {kept}" in caplog.text
    assert [path.name for path in kept.parent.glob("earlier-*")] == ["earlier-1"], "no more at each return"
    assert len(list(kept.parent.glob("step-*"))) <= 3


def test_the_checkpoint_of_the_worker_that_left_last_is_awaited(
    new_group: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first to come back has taken no step, and would begin again at step 0."""
    begun: list[int] = []

    def work(grid: gridtrain.Grid, number: int) -> None:
        for step in steps_of(grid):
            begun.append(step)
            if step >= 3:
                break

    old = {"checkpoint_every": 1000, "state_dir": str(tmp_path / "worker-0")}
    with new_group(workers=1) as group:
        group.result(group.start(work, **old))
        group.wait_for("waiting")
        newcomer = group.start(work)
        until_s = time.monotonic() + WITHIN_S
        while "awaiting a worker with the checkpoint of step 3" not in (said := status_of(group)["reason"]):
            assert time.monotonic() < until_s, said
        group.result(group.start(work, **old))
        group.result(newcomer)
    assert begun == [1, 2, 3, 4, 4], "both continue after step 3"


def steps_of(grid: gridtrain.Grid) -> Iterator[int]:
    model = copy.deepcopy(NET)
    optimizer = sgd(grid, model, lr=0.001, momentum=0.9)
    return train_steps(grid, model, optimizer, DATA, batch_size=6, steps=100_000)


@pytest.mark.parametrize("every", [0, 1])
def test_a_second_loop_is_refused_and_changes_neither_model_nor_disk(every: int, tmp_path: Path) -> None:
    run(tmp_path, 1, lambda grid: train(grid, gridtrain.Dense(), until=5))
    with (
        LocalGroup(min_workers=1) as group,
        group.join("again", checkpoint_every=every, state_dir=str(tmp_path / "worker-0")) as grid,
    ):
        next(steps_of(grid))
        wrapped = grid._optimizer
        assert wrapped is not None
        before = wrapped.model.weight.detach().clone()
        with pytest.raises(ConfigError, match="another data set, size or length was given; a run keeps"):
            next(iter(grid.batches(DATA, global_batch_size=6, steps=100_000)))
        assert torch.equal(wrapped.model.weight, before)


def test_a_data_loader_is_empty_after_the_end_of_the_run(tmp_path: Path) -> None:
    with LocalGroup(min_workers=1) as group, group.join("anna", export_dir=str(tmp_path)) as grid:
        model = nn.Linear(2, 1)
        optimizer = sgd(grid, model, lr=0.001)
        loader = torch.utils.data.DataLoader(DATA, batch_sampler=grid.sampler(DATA, batch_size=6, steps=2))  # type: ignore[arg-type]
        for batch in loader:
            train_batch(model, optimizer, batch)
        (tmp_path / "final.safetensors").unlink()
        assert list(loader) == []
        assert not (tmp_path / "final.safetensors").exists(), "the run ends only once"


def test_a_transferred_residual_is_in_no_checkpoint_that_is_still_being_written(
    new_group: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would return with this worker, and two would send it."""
    waited_for, gone = threading.Event(), threading.Event()
    true_save, true_wait = checkpoint_store.save, checkpoint_store.CheckpointStore.wait

    def slow_save(snapshot: Any, path: Path) -> None:
        assert waited_for.wait(WITHIN_S)
        true_save(snapshot, path)

    def wait(self: Any, timeout_s: float | None = None) -> bool:
        if self._is_writing():
            waited_for.set()
        return true_wait(self, timeout_s)

    def work(grid: gridtrain.Grid, number: int) -> int:
        model = nn.Linear(2, 1)
        optimizer = sgd(grid, model, gridtrain.GTopK(density=0.3), lr=0.001)
        for batch in grid.batches(DATA, global_batch_size=6, steps=100_000):
            backward(model, batch)
            if gone.is_set() if number else grid.step == 3:
                break
            optimizer.step()
            optimizer.zero_grad()
        return grid.step

    monkeypatch.setattr(checkpoint_store, "save", slow_save)
    monkeypatch.setattr(checkpoint_store.CheckpointStore, "wait", wait)
    with new_group(workers=2) as group:
        anna = group.start(work, checkpoint_every=3, state_dir=str(tmp_path / "anna"))
        group.start(work)
        assert group.result(anna) == 3
        gone.set()
        group.finish()
    folder = tmp_path / "anna" / "step-00000003"
    assert (folder / "state.json").exists()
    assert not (folder / "residual.safetensors").exists(), "the other worker has it"
