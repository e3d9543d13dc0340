"""What only groups do: skip steps, average buffers, admit newcomers, wait for evaluations, end a run."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from brisk import WITHIN_S
from torch import nn

import gridtrain
from gridtrain.config import Deadlines
from gridtrain.core.group.member_events import MemberPhase
from gridtrain.errors import ConfigError, JoinRefused
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.in_memory import EndpointKilled, MemoryTransport
from gridtrain.runtime.client.coordinator_client import CoordinatorClient, allow_only
from gridtrain.sdk.local_group import LocalGroup
from gridtrain.training.checkpoint import serialization

DENSE, SPARSE = gridtrain.Dense(), gridtrain.GTopK(density=0.3)
DATA = [(torch.tensor([float(i), 1.0]), torch.tensor([float(i)])) for i in range(-6, 6)]


def net() -> nn.Linear:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, 0.5)
    nn.init.constant_(model.bias, 0.25)
    return model


def wrapped(grid: gridtrain.Grid, model: nn.Module, **options: Any) -> gridtrain.GridOptimizer:
    lr = options.pop("lr", 0.01)
    return grid.optimizer(torch.optim.SGD(model.parameters(), lr=lr), model, **{"exchange": DENSE, **options})


def backward(model: nn.Module, batch: Any) -> None:
    inputs, targets = batch
    (model(inputs) - targets).square().mean().backward()


def client_of(group: LocalGroup) -> CoordinatorClient:
    """A client that asks the group's coordinator for its status without joining."""
    identity = Identity.generate()
    transport = MemoryTransport(identity.public, group.hub, gate=allow_only(group.key))
    return CoordinatorClient(group.ADDRESS, group.key, identity, transport=transport)


def digest(model: nn.Module, optimizer: gridtrain.GridOptimizer) -> str:
    return serialization.replica_digest(model, optimizer.inner).hex()[:12]


# -- one worker, and several ---------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", [DENSE, gridtrain.TopK(density=1.0), gridtrain.GTopK(density=1.0)])
def test_a_single_worker_trains_as_its_optimizer_alone(together: Any, exchange: Any) -> None:
    def loop(grid: gridtrain.Grid | None, inputs: Any) -> torch.Tensor:
        model = net()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
        if grid is not None:
            optimizer = grid.optimizer(optimizer, model, exchange=exchange)
        for batch in inputs(grid):
            backward(model, batch)
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach()

    seen = []

    def batches(grid: gridtrain.Grid) -> Any:
        for batch in grid.batches(DATA, batch_size=3, epochs=2):
            seen.append(batch)
            yield batch

    (alone,) = together(lambda grid, number: loop(grid, batches), 1)
    assert len(seen) == 8
    largest = float((alone - loop(None, lambda _: seen)).abs().max())
    assert largest < (1e-6 if exchange is DENSE else 1e-2), "fp16 rounds, and the rest is in the residual"


def test_all_agree_on_their_ranks_and_steps(together: Any) -> None:
    def train(grid: gridtrain.Grid, number: int) -> list[Any]:
        model = net()
        optimizer = wrapped(grid, model)
        assert (grid.world_size, grid.step, grid.finished) == (0, 0, False), "before the first generation"
        seen = []
        for batch in grid.batches(DATA, batch_size=2, steps=3):
            seen.append((grid.step, grid.rank, grid.world_size, grid.is_first))
            backward(model, batch)
            optimizer.step()
        assert grid.finished and grid.step == 3
        return seen

    results = sorted(together(train, 3), key=lambda seen: seen[0][1])
    assert results == [[(step, rank, 3, rank == 0) for step in range(3)] for rank in range(3)]


def state_bytes_sent(grid: gridtrain.Grid) -> int:
    return grid.traffic.get("StateBlock", (0, 0))[0]


def test_a_worker_with_the_right_initial_state_is_not_sent_it(together: Any) -> None:
    def train(grid: gridtrain.Grid, number: int) -> tuple[int, str]:
        model = net()
        optimizer = wrapped(grid, model)
        for batch in grid.batches(DATA, batch_size=2, steps=2):
            backward(model, batch)
            optimizer.step()
        return state_bytes_sent(grid), digest(model, optimizer)

    results = together(train, 4)
    assert [sent for sent, _ in results] == [0] * 4 and len(set(results)) == 1


def test_newcomers_pass_the_state_on(together: Any) -> None:
    """Each member but the last has sent it once: no link carries it for all."""

    def train(grid: gridtrain.Grid, number: int) -> tuple[int, str]:
        model = nn.Linear(200_000, 1)
        nn.init.constant_(model.weight, float(number))
        optimizer = wrapped(grid, model, lr=0.0)
        for batch in grid.batches(range(8), batch_size=2, steps=1):
            model(batch.new_ones(1, 200_000, dtype=torch.float32)).sum().backward()
            optimizer.step()
        return round(state_bytes_sent(grid) / 800_000), digest(model, optimizer)

    results = together(train, 4)
    assert sorted(sent for sent, _ in results) == [0, 1, 1, 1]
    assert len({digest for _, digest in results}) == 1


def test_after_a_source_is_killed_no_block_is_sent_twice(new_group: Any) -> None:
    """The first source to send 12 of 17 blocks dies; the other sends the rest, and the buffers, which differ.

    worker-0, worker-1    train, and are frozen before step 2
    worker-2              joins, loads, trains with the one that is left
    """
    n = 2 << 20  # parameters; with their momentum 16 MiB
    newcomers: list[int] = []

    def train(grid: gridtrain.Grid, number: int) -> tuple[int, int, str]:
        model = nn.Linear(n, 1, bias=False)
        model.register_buffer("own", torch.zeros(1000))
        optimizer = grid.optimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, exchange=DENSE
        )
        for batch in grid.batches(range(100), batch_size=2, steps=4):
            if grid.step == 2 and grid.is_first and not newcomers:
                group.hub.kill_sender("StateBlock", after=12)
                newcomers.append(group.start(train))
                with grid.evaluation():
                    loop = grid._session.connection.loop
                    assert loop.mailbox.wait(lambda here: here.phase is MemberPhase.FROZEN, WITHIN_S)
            model.own.fill_(number)
            optimizer.zero_grad()
            model(torch.full((2, n), float(batch.sum()))).sum().backward()
            optimizer.step()
        received = grid.traffic.get("StateBlock", (0, 0))[1]
        return state_bytes_sent(grid), received, digest(model, optimizer)

    with new_group(workers=2) as group:
        results = [group.result(number) for number in [group.start(train), group.start(train)]]
        results.append(group.result(newcomers[0]))
    assert sum(isinstance(result, EndpointKilled) for result in results) == 1, results
    survivor, newcomer = (result for result in results if not isinstance(result, EndpointKilled))
    assert survivor[2] == newcomer[2]
    # Blocks that the newcomer had not read yet are dropped with the connection, so their number varies.
    assert survivor[0] < 16 << 20, "the missing shared blocks and the buffers, not all"
    assert newcomer[1] < 20 << 20


def test_all_start_from_the_state_of_one_worker(together: Any) -> None:
    """Every script builds a different model; the group trains one."""

    def train(grid: gridtrain.Grid, number: int) -> tuple[float, str]:
        model = net()
        nn.init.constant_(model.weight, float(number))
        optimizer = wrapped(grid, model)
        started = math.nan
        for batch in grid.batches(DATA, batch_size=2, steps=2):
            started = model.weight[0, 0].item() if math.isnan(started) else started
            backward(model, batch)
            optimizer.step()
        return started, digest(model, optimizer)

    results = together(train, 3)
    assert len(set(results)) == 1 and results[0][0] in (0.0, 1.0, 2.0)


@pytest.mark.parametrize("workers", ["2", 0, 1.5])
def test_an_invalid_number_of_workers_is_refused(workers: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"workers is {workers!r}; it must be a number from 1")):
        gridtrain.local(lambda grid: None, workers=workers)


# -- clipping ----------------------------------------------------------------------------------------


def test_each_way_to_clip_bounds_the_step(together: Any) -> None:
    """With lr=1 a step moves the model by the applied gradient, with each way not further than the bound."""

    def train(grid: gridtrain.Grid, number: int, way: str) -> list[float]:
        model = net()
        optimizer = wrapped(grid, model, lr=1.0, clip_norm=0.1 if way == "clip_norm=" else None)
        moved = []
        for batch in grid.batches(DATA, batch_size=2, steps=3):
            before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
            optimizer.zero_grad()
            backward(model, batch)
            if way == "the exchanged gradient by hand":
                assert optimizer.exchange()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            elif way == "the local gradient":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            after = nn.utils.parameters_to_vector(model.parameters()).detach()
            moved.append(round(float((after - before).norm()), 5))
        return moved

    moved = {
        way: together(lambda grid, number, way=way: train(grid, number, way), 2)
        for way in ("clip_norm=", "the exchanged gradient by hand", "the local gradient")
    }
    assert moved["clip_norm="] == moved["the exchanged gradient by hand"] == [[0.1, 0.1, 0.1]] * 2
    first, second = moved["the local gradient"]
    assert first == second and max(first) <= 0.1, "the mean of clipped gradients is no longer than they are"


# -- a gradient that is not finite ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "exchange", [DENSE, SPARSE, gridtrain.Dense(values="int8")], ids=["dense", "gtopk", "dense int8"]
)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_skips_the_step_on_all(
    together: Any, exchange: Any, bad: float
) -> None:
    """Worker 1 of 3 has it in step 2.  No worker applies it or changes its residual; all count it."""

    def train(grid: gridtrain.Grid, number: int) -> list[Any]:
        model = net()
        optimizer = wrapped(grid, model, exchange=exchange)
        seen = []
        for batch in grid.batches(DATA, batch_size=2, steps=4):
            step, before = grid.step, state_of(model, optimizer)
            optimizer.zero_grad()
            backward(model, batch)
            if (step, number) == (2, 1):
                assert model.weight.grad is not None
                model.weight.grad[0, 1] = bad
            optimizer.step()
            unchanged = before == state_of(model, optimizer)
            seen.append((step, optimizer.last_skipped, unchanged, optimizer.skipped_steps))
        return [seen, digest(model, optimizer)]

    def state_of(model: nn.Module, optimizer: gridtrain.GridOptimizer) -> Any:
        residual = {name: value.tolist() for name, value in optimizer.residual_state().items()}
        return digest(model, optimizer), residual

    results = together(train, 3)
    # step, skipped, unchanged, skipped so far
    assert results[0][0] == [
        (0, False, False, 0),
        (1, False, False, 0),
        (2, True, True, 1),
        (3, False, False, 1),
    ]
    assert results[0] == results[1] == results[2]


def test_one_overflow_halves_the_scale_of_all(together: Any) -> None:
    def train(grid: gridtrain.Grid, number: int) -> list[float]:
        model = net()
        optimizer = wrapped(grid, model)
        scaler = grid.scaler(device="cpu", init_scale=8.0, growth_interval=2)
        scales = []
        for inputs, targets in grid.batches(DATA, batch_size=2, steps=4):
            loss = (model(inputs) - targets).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss * math.inf if (grid.step, number) == (1, 0) else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    assert together(train, 2) == [[8.0, 4.0, 4.0, 8.0]] * 2


@pytest.mark.parametrize("late", [False, True], ids=["scaler, optimizer", "optimizer, scaler"])
def test_a_newcomer_receives_the_scale(new_group: Any, late: bool) -> None:
    """Its own scale would overflow, and the whole group would skip steps until all had reduced it."""
    warm, entered = threading.Event(), threading.Event()

    def train(grid: gridtrain.Grid, number: int) -> float:
        options = {"device": "cpu", "init_scale": 8.0 if number == 0 else 65536.0, "growth_interval": 10**6}
        model = net()
        scaler = grid.scaler(**options) if not late else None
        optimizer = wrapped(grid, model)
        scaler = scaler or grid.scaler(**options)
        for inputs, targets in grid.batches(DATA, batch_size=2, steps=100_000):
            if number == 1:
                entered.set()
            if entered.is_set():
                break
            optimizer.zero_grad()
            scaler.scale((model(inputs) - targets).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            if grid.step > 3:
                warm.set()
        return scaler.get_scale()

    with new_group(workers=1) as group:
        group.start(train)
        assert warm.wait(WITHIN_S)
        group.start(train)
        assert entered.wait(WITHIN_S)
        assert [group.result(0), group.result(1)] == [8.0, 8.0]


# -- batch norm ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "equal"), [(2, True), (0, False)])
def test_batch_statistics_are_averaged_at_the_given_interval(together: Any, every: int, equal: bool) -> None:
    def train(grid: gridtrain.Grid, number: int) -> Any:
        model = nn.Sequential(nn.BatchNorm1d(2), net())
        optimizer = wrapped(grid, model, exchange=SPARSE, average_buffers_every=every)
        for batch in grid.batches(DATA, batch_size=2, steps=4):
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()
        return tuple(model[0].running_mean.tolist()), int(model[0].num_batches_tracked)

    results = together(train, 3)
    assert (len({mean for mean, _ in results}) == 1) is equal
    assert {count for _, count in results} == {4}


# -- newcomers -----------------------------------------------------------------------------------------


def test_a_newcomer_continues_at_the_others_step(new_group: Any) -> None:
    """It receives parameters, momentum, schedule and step number; from then on the bits are the same.

    worker-0   0 1 2 3 4 5 ........ n   n+1 ... 599
    worker-1         joins here ----^   n+1 ... 599
    """
    come = threading.Event()

    def train(grid: gridtrain.Grid, number: int) -> dict[int, Any]:
        model = net() if number == 0 else seeded_differently()
        inner = torch.optim.SGD(model.parameters(), lr=0.1 if number else 0.01, momentum=0.9)
        inner.param_groups[0]["lr"] = 0.01
        optimizer = grid.optimizer(inner, model, exchange=DENSE)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
        grid.track(scheduler=scheduler)
        seen = {}
        for batch in grid.batches(DATA, batch_size=2, steps=600):
            seen[grid.step] = (grid.world_size, scheduler.last_epoch, digest(model, optimizer))
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()
            scheduler.step()
            if grid.step == 5 and grid.world_size == 1:
                come.set()
                assert grid._session.connection.wait(lambda snapshot: snapshot.world_size == 2, WITHIN_S)
        return seen

    def seeded_differently() -> nn.Linear:
        model = net()
        nn.init.zeros_(model.weight)
        return model

    with new_group(workers=1) as group:
        group.start(train)
        assert come.wait(WITHIN_S)
        group.start(train)
        first, second = group.result(0), group.result(1)
    joined_at = min(second)
    assert joined_at >= 5 and list(second) == list(range(joined_at, 600)) and list(first) == list(range(600))
    assert second[joined_at][1] == joined_at, "the scheduler's state arrived, too"
    assert {step: first[step][1:] for step in second} == {step: seen[1:] for step, seen in second.items()}
    assert (first[0][0], first[599][0]) == (1, 2)


# -- busy, or hung -------------------------------------------------------------------------------------

IMPATIENT = Deadlines(
    beat_s=0.05, settle_s=0.02, probe_s=0.2, generation_gap_s=0.02, patience_floor_s=1.5, patience_factor=1.0
)
PAUSE_S = 2.5
"""Longer than the workers' patience, which is longer than delays on a busy machine."""


def pausing(grid: gridtrain.Grid, number: int, pause: Callable[[], object]) -> int:
    """Worker 1 pauses after two steps."""
    model = net()
    optimizer = wrapped(grid, model)
    for batch in grid.batches(DATA, batch_size=2, steps=4):
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
        if grid.step == 2 and number == 1:
            pause()
    return grid.world_size


def test_the_others_wait_for_an_evaluation(outcomes: Any) -> None:
    def train(grid: gridtrain.Grid, number: int) -> int:
        def evaluation() -> None:
            with grid.evaluation():
                threading.Event().wait(PAUSE_S)

        return pausing(grid, number, evaluation)

    assert outcomes(train, 2, deadlines=IMPATIENT) == [2, 2]


def test_the_others_go_on_without_a_worker_that_hangs(outcomes: Any) -> None:
    over = threading.Event()

    def train(grid: gridtrain.Grid, number: int) -> int:
        try:
            return pausing(grid, number, lambda: over.wait(WITHIN_S))
        finally:
            over.set()

    stayed, hung = outcomes(train, 2, deadlines=IMPATIENT)
    assert stayed == 1
    assert isinstance(hung, JoinRefused) and hung.code == "dismissed"
    assert "made no progress while other members waited -> " in str(hung)


# -- status and results ------------------------------------------------------------------------------


def test_the_status_shows_the_workers_figures(new_group: Any) -> None:
    reported, seen = threading.Event(), threading.Event()

    def train(grid: gridtrain.Grid, number: int) -> None:
        model = net()
        optimizer = wrapped(grid, model)
        for batch in grid.batches(DATA, batch_size=2, steps=2):
            backward(model, batch)
            optimizer.step()
            grid.report(loss=0.5, accuracy=torch.tensor(0.25), norm=math.inf, other=math.nan)
            reported.set()
            assert seen.wait(WITHIN_S)

    with new_group(workers=1) as group:
        group.start(train)
        assert reported.wait(WITHIN_S)
        with client_of(group) as client:
            until_s = time.monotonic() + WITHIN_S
            figures: dict[str, float] = {}
            while "loss" not in figures and time.monotonic() < until_s:
                (member,) = client.status(5.0)["members"]
                figures = member["figures"]
        seen.set()
        assert group.result(0) is None
    assert (figures["loss"], figures["accuracy"]) == (0.5, 0.25)
    assert not figures.keys() & {"norm", "other"}, "neither JSON nor the wire has such numbers"


def test_the_ledger_ends_the_run_and_one_model_is_exported(new_group: Any, tmp_path: Path) -> None:
    def train(grid: gridtrain.Grid, number: int) -> tuple[int, dict[str, torch.Tensor]]:
        model = net()
        optimizer = wrapped(grid, model)
        steps = 0
        for batch in grid.batches(DATA, batch_size=2, epochs=3):
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()
            steps += 1
        assert grid.finished
        return steps, {name: value.clone() for name, value in model.state_dict().items()}

    with new_group(workers=2) as group:
        group.start(train), group.start(train)
        (steps, model), (other_steps, _) = group.result(0), group.result(1)
        with client_of(group) as client:
            status = client.status(5.0)
    assert (steps, other_steps) == (9, 9), "12 samples, 4 a step, 3 passes"
    assert (status["phase"], status["reason"]) == (
        "finished",
        "2 workers reached the end of the run",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["final.safetensors"]
    exported = safetensors.torch.load_file(tmp_path / "final.safetensors")
    assert exported.keys() == model.keys() and all(torch.equal(exported[name], model[name]) for name in model)


class WithExtraState(nn.Module):
    """A module with extra state that is no tensor, as layers in 8 bits have."""

    def get_extra_state(self) -> dict[str, int]:
        return {"bits": 8}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_the_final_model_is_exported_plainly_from_any_memory_format(new_group: Any, tmp_path: Path) -> None:
    """In channels_last, with extra state in its state_dict, and compiled."""

    def train(grid: gridtrain.Grid, number: int) -> dict[str, torch.Tensor]:
        plain = nn.Sequential(nn.Conv2d(2, 4, 3), WithExtraState(), nn.Flatten(), nn.Linear(16, 1))
        plain = plain.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model = torch.compile(plain, backend="eager")
        optimizer = grid.optimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model, exchange=gridtrain.Dense()
        )
        for images in grid.batches(
            [torch.full((2, 4, 4), float(i)) for i in range(4)], batch_size=2, steps=2
        ):
            plain(images).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return dict(plain.named_parameters())

    with new_group(workers=1) as group:
        model = group.result(group.start(train))
    assert isinstance(model, dict), model
    exported = safetensors.torch.load_file(tmp_path / "final.safetensors")
    assert set(exported) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert all(torch.equal(exported[name], model[name]) for name in model)


def test_the_model_is_exported_if_the_first_worker_is_lost_at_the_end(new_group: Any, tmp_path: Path) -> None:
    """It dies with the last step committed everywhere, before it reports that or exports the model."""

    def train(grid: gridtrain.Grid, number: int) -> dict[str, torch.Tensor]:
        model = net()
        optimizer = wrapped(grid, model)
        for batch in grid.batches(DATA, batch_size=2, steps=3):
            if grid.is_first:
                me = group.keys[f"worker-{number}"]
                group.hub.kill_sender("RunFinished", source=me)
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    with new_group(workers=3) as group:
        numbers = [group.start(train) for _ in range(3)]
        results = [group.result(number) for number in numbers]
    assert sum(isinstance(result, EndpointKilled) for result in results) == 1, results
    (model, other) = (result for result in results if isinstance(result, dict))
    exported = safetensors.torch.load_file(tmp_path / "final.safetensors")
    assert all(
        torch.equal(exported[name], model[name]) and torch.equal(other[name], model[name]) for name in model
    )


def test_a_worker_that_joins_after_the_end_is_refused(new_group: Any) -> None:
    def train(grid: gridtrain.Grid, number: int) -> None:
        model = net()
        optimizer = wrapped(grid, model)
        for batch in grid.batches(DATA, batch_size=2, steps=1):
            backward(model, batch)
            optimizer.step()

    with new_group(workers=1) as group:
        group.start(train)
        assert group.result(0) is None
        group.start(train)
        late = group.result(1)
    assert isinstance(late, JoinRefused) and late.code == "finished"
    assert str(late) == 'the run "local" is finished -> ask the run\'s owner for the result'
