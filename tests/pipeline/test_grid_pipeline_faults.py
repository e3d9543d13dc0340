"""Pipelines with faults: an attempt fails, a stage raises, a stage dies."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from brisk import LOSING, WITHIN_S
from pipeline_group import data, layers, loss_fn, pipeline_of, sgd
from threaded_group import ThreadedGroup
from torch import nn

import gridtrain
from gridtrain.errors import ConfigError, GridtrainError, LineBroken
from gridtrain.network.transport.in_memory import EndpointKilled
from gridtrain.pipeline.blueprint import Blueprint
from gridtrain.pipeline.executor import StageExecutor
from gridtrain.pipeline.stage_link import RoundStageLink
from gridtrain.sdk import local_group
from gridtrain.sdk.local_group import local

SEED, STEPS = 3, 6


DATA = data(48)


def unpartitioned(batches: list[Any], micro_batches: int = 4) -> dict[str, torch.Tensor]:
    whole = nn.Sequential(*Blueprint(layers, seed=SEED).build(0, 4))
    optimizer = sgd(whole.parameters())
    for inputs, targets in batches:
        optimizer.zero_grad()
        pieces = zip(inputs.tensor_split(micro_batches), targets.tensor_split(micro_batches), strict=True)
        for x, y in pieces:
            (loss_fn(whole(x), y) * (len(x) / len(inputs))).backward()
        optimizer.step()
    return whole.state_dict()


def test_workers_that_nobody_can_join_do_not_wait_for_one_that_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_group, "PAUSED_TIMEOUT_S", 0.5)
    monkeypatch.setattr(local_group, "POLL_S", 0.05)

    def train(grid: gridtrain.Grid) -> None:
        pipe = pipeline_of(grid, micro_batches=4)
        for inputs, targets in grid.batches(DATA, batch_size=4, steps=STEPS):
            pipe.step(inputs, targets)
            if threading.current_thread().name == "worker-0":
                return

    with pytest.raises(gridtrain.GridtrainError, match=r"the other workers cannot continue: .*worker-0 left"):
        local(train, workers=2)


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("after", ["begin", "end"])
def test_a_failed_attempt_is_repeated_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: int, after: str
) -> None:
    failed = threading.Event()
    seeds: dict[int, list[int]] = {0: [], 1: []}
    real = StageExecutor.run

    def run(self: StageExecutor, link: Any, **kwargs: Any) -> Any:
        seeds[self.number].append(kwargs["seed"])
        first = self.number == where and len(seeds[where]) == 3 and not failed.is_set()
        if not first:
            return real(self, link, **kwargs)
        failed.set()
        if after == "end":
            real(self, link, **kwargs)
        link.abort("an injected fault")
        raise LineBroken("an injected fault")

    monkeypatch.setattr(StageExecutor, "run", run)

    def train(grid: gridtrain.Grid) -> Any:
        pipe, batches, losses = pipeline_of(grid, micro_batches=4), [], []
        for inputs, targets in grid.batches(DATA, batch_size=4, steps=STEPS):
            batches.append((inputs, targets))
            losses.append(pipe.step(inputs, targets))
        return batches, losses, {n: v.clone() for n, v in pipe.module.state_dict().items()}

    (batches, losses, one), (_, others, other) = local(train, workers=2, export_dir=str(tmp_path))
    assert failed.is_set()
    assert losses == others and len(losses) == STEPS and None not in losses
    assert len(seeds[0]) == len(seeds[1]) == STEPS + 1, "both computed one more attempt"
    assert len(set(seeds[0])) == STEPS and seeds[0] == seeds[1]
    for name, value in unpartitioned(batches).items():
        assert torch.equal({**one, **other}[name], value), name


class Fails(nn.Module):
    """Raises in its fifth forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 5:
            raise ArithmeticError("a bug of the user's")
        y: torch.Tensor = self.linear(x)
        return y


def test_an_exception_in_a_stage_ends_its_script_and_wakes_the_others(tmp_path: Path) -> None:
    def model() -> list[nn.Module]:
        return [nn.Linear(2, 8), nn.Tanh(), Fails()]

    broken, raised = threading.Event(), threading.Event()

    def train(grid: gridtrain.Grid) -> None:
        pipe = pipeline_of(grid, model, cuts=(0, 2, 3))
        try:
            for inputs, targets in grid.batches(DATA, batch_size=4, steps=STEPS):
                pipe.step(inputs, targets)
        except ArithmeticError:
            raised.set()
            grid.close("its script failed")
            raise
        finally:
            if not raised.is_set():
                broken.set()

    with pytest.raises((ArithmeticError, EndpointKilled)):
        local(train, workers=2, export_dir=str(tmp_path))
    assert raised.is_set()


def test_an_update_of_a_stage_that_was_not_applied_ends_its_script(tmp_path: Path) -> None:
    """The optimizer of stage 1 raises an exception in step 3, which the script catches."""
    errors: list[GridtrainError] = []
    raised = threading.Event()

    def apply_half(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def train(grid: gridtrain.Grid, number: int) -> None:
        pipe = pipeline_of(grid)
        try:
            for inputs, targets in grid.batches(DATA, batch_size=4, steps=STEPS):
                if pipe.stage == 1 and grid.step == 2:
                    pipe.optimizer.inner.step = apply_half  # type: ignore[method-assign]
                with suppress(torch.OutOfMemoryError):
                    pipe.step(inputs, targets)
        except GridtrainError as error:
            errors.append(error)
            raised.set()
            raise

    with ThreadedGroup(tmp_path, workers=2, deadlines=LOSING) as group:
        group.start_all(train)
        assert raised.wait(WITHIN_S)
    assert "the update of step 3 was committed, but this worker has not applied it completely" in str(
        errors[0]
    )


def test_a_stage_that_violates_the_agreed_spec_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would be a member of each generation, and each attempt would fail."""
    real, hostile = RoundStageLink.send, threading.Event()
    culprit: list[str] = []

    def send(self: RoundStageLink, to: int, channel: Any, buffers: Any) -> None:
        if hostile.is_set() and culprit == [threading.current_thread().name]:
            buffers = [buffers[0][:-4]]
        real(self, to, channel, buffers)

    def train(grid: gridtrain.Grid, number: int) -> str:
        pipe = pipeline_of(grid, micro_batches=4)
        for taken, (inputs, targets) in enumerate(grid.batches(DATA, batch_size=4, steps=8)):
            if taken == 2 and pipe.stage == 0 and not grid.is_first:
                culprit.append(threading.current_thread().name)
                hostile.set()
            pipe.step(inputs, targets)
        return "finished"

    monkeypatch.setattr(RoundStageLink, "send", send)
    with ThreadedGroup(tmp_path, workers=4, deadlines=LOSING) as group:
        group.start_all(train)
        ended = {f"worker-{number}": str(end) for number, end in enumerate(group.ends())}
    removed = {name: said for name, said in ended.items() if said != "finished"}
    assert list(removed) == culprit, "the sender, not the stage that voted NO"
    assert "does not match its spec" in removed[culprit[0]]


@pytest.mark.parametrize("cast", [0, 1])
def test_workers_with_different_autocast_accuse_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cast: int
) -> None:
    """Neither of them can know which one is right."""

    def train(grid: gridtrain.Grid) -> None:
        pipe = pipeline_of(grid)
        for inputs, targets in grid.batches(DATA, batch_size=4, steps=STEPS):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=pipe.stage == cast):
                pipe.step(inputs, targets)

    sizes, state = [
        (r"32 bytes; expected 64 for float32 \(n, 8\)", "without autocast"),
        (r"64 bytes; expected 32 for bfloat16 \(n, 8\)", r"with autocast to torch\.bfloat16"),
    ][cast]
    message = f"stage 0 sent .* {sizes} .*has committed no step {state} on cpu -> .* the same autocast"
    with pytest.raises(ConfigError, match=message):
        local(train, workers=2, export_dir=str(tmp_path))
    assert "violated the protocol" not in caplog.text


def test_the_death_of_a_stage_wakes_a_waiting_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted, real = threading.Event(), StageExecutor.run
    dying, computing = threading.Event(), threading.Semaphore(0)

    def run(self: StageExecutor, link: Any, **kwargs: Any) -> Any:
        try:
            if self.number == 0:
                computing.release()
            return real(self, link, **kwargs)
        except LineBroken:
            if dying.is_set() and self.number == 0:
                interrupted.set()
            raise

    monkeypatch.setattr(StageExecutor, "run", run)

    def train(grid: gridtrain.Grid, number: int) -> None:
        pipe = pipeline_of(grid, micro_batches=4)
        for taken, (inputs, targets) in enumerate(grid.batches(DATA, batch_size=4, steps=1000)):
            if pipe.stage == 1 and computing.acquire(timeout=WITHIN_S) and taken == 3:
                dying.set()  # while the first stage is in the step
                group.hub.kill(group.keys[f"worker-{number}"])
            pipe.step(inputs, targets)

    with ThreadedGroup(tmp_path, workers=2, deadlines=LOSING) as group:
        group.start_all(train)
        assert dying.wait(WITHIN_S)
        assert interrupted.wait(WITHIN_S), "the first stage still waits for the gradient of the dead stage"
    assert all(isinstance(end, gridtrain.GridtrainError) for end in group.ends())


class Counts(nn.Module):
    """Counts its forwards in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y: torch.Tensor = self.linear(x)
        return y


@pytest.mark.parametrize("spoilt", ["aborted", "skipped"])
def test_buffers_change_only_in_committed_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoilt: str
) -> None:
    ran: list[int] = []
    real = StageExecutor.run

    def run(self: StageExecutor, link: Any, **kwargs: Any) -> Any:
        outcome = real(self, link, **kwargs)
        ran.append(self.number)
        if self.number == 1 and ran.count(1) == 3:
            if spoilt == "skipped":
                self.stage.parameters[0].grad.fill_(torch.nan)  # type: ignore[union-attr]
            else:
                link.abort("an injected fault")
                raise LineBroken("an injected fault")
        return outcome

    def model() -> list[nn.Module]:
        return [nn.Linear(2, 8), Counts(), Counts(), nn.Linear(8, 1)]

    def train(grid: gridtrain.Grid) -> Any:
        pipe = pipeline_of(
            grid,
            model,
            micro_batches=4,
            cuts=(0, 2, 4),
            init=lambda block, number: [buffer.zero_() for buffer in block.buffers()],
        )
        for inputs, targets in grid.batches(DATA, batch_size=4, steps=STEPS):
            pipe.step(inputs, targets)
        return [int(buffer) for buffer in pipe.module.buffers()]

    monkeypatch.setattr(StageExecutor, "run", run)
    applied = STEPS - 1 if spoilt == "skipped" else STEPS
    assert local(train, workers=2, export_dir=str(tmp_path)) == [[4 * applied]] * 2
    assert ran.count(1) == (STEPS if spoilt == "skipped" else STEPS + 1)
