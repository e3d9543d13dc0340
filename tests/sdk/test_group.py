"""What only groups do: admit newcomers, wait for evaluations, end a run."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from brisk import WITHIN_S
from group_status import status_of
from torch import nn
from training_loop import DATA, digest, linear, sgd, train_batch, train_steps

import gridtrain
from gridtrain.config import Deadlines
from gridtrain.core.group.member_events import LogEvent, MemberPhase
from gridtrain.core.member.peer_links import PeerLinks
from gridtrain.errors import ConfigError, JoinRefused
from gridtrain.network.transport.in_memory import EndpointKilled
from gridtrain.sdk import local_group

# -- several workers -----------------------------------------------------------------------------------


def test_all_agree_on_their_ranks_and_steps(together: Any) -> None:
    def train(grid: gridtrain.Grid, number: int) -> list[Any]:
        model = linear()
        optimizer = sgd(grid, model)
        assert (grid.world_size, grid.step, grid.finished) == (0, 0, False), "before the first generation"
        seen = []
        for batch in grid.batches(DATA, batch_size=2, steps=3):
            seen.append((grid.step, grid.rank, grid.world_size, grid.is_first))
            train_batch(model, optimizer, batch)
        assert grid.finished and grid.step == 3
        return seen

    results = sorted(together(train, 3), key=lambda seen: seen[0][1])
    assert results == [[(step, rank, 3, rank == 0) for step in range(3)] for rank in range(3)]


def test_the_coordinator_knows_the_step_at_which_the_last_worker_left(new_group: Any) -> None:
    """Also if no regular heartbeat has reported it: otherwise another script could define the run anew."""

    def train(grid: gridtrain.Grid, number: int) -> None:
        model = linear()
        optimizer = sgd(grid, model)
        for batch in grid.batches(DATA, batch_size=2, steps=100):
            if grid.step == 3:
                break
            train_batch(model, optimizer, batch)

    with new_group(workers=1) as group:
        group.start_all(train)
        group.finish()
        assert status_of(group)["step"] == 3


def test_a_rank_that_is_read_before_the_loop_is_warned_of(
    together: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def train(grid: gridtrain.Grid, number: int) -> tuple[bool, int]:
        known = grid.is_first, grid.rank
        list(train_steps(grid, model := linear(), sgd(grid, model), steps=1))
        return known

    assert together(train, 2) == [(True, 0)] * 2
    text = (
        "grid.rank is 0, grid.is_first is True and grid.mean returns the worker's own number on all workers"
    )
    assert [message.startswith(text) for message in caplog.messages].count(True) == 2, "once by each worker"


def state_bytes_sent(grid: gridtrain.Grid) -> int:
    return grid.traffic.get("StateBlock", (0, 0))[0]


def test_a_worker_with_the_right_initial_state_is_not_sent_it(together: Any) -> None:
    def train(grid: gridtrain.Grid, number: int) -> tuple[int, str]:
        model = linear()
        optimizer = sgd(grid, model)
        list(train_steps(grid, model, optimizer, steps=2))
        return state_bytes_sent(grid), digest(model, optimizer)

    results = together(train, 4)
    assert [sent for sent, _ in results] == [0] * 4 and len(set(results)) == 1


def test_newcomers_pass_the_state_on(together: Any) -> None:
    """Each member but the last has sent it once: no link carries it for all."""

    def train(grid: gridtrain.Grid, number: int) -> tuple[int, str]:
        model = nn.Linear(200_000, 1)
        nn.init.constant_(model.weight, float(number))
        optimizer = sgd(grid, model, lr=0.0)
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
        optimizer = sgd(grid, model, lr=0.1, momentum=0.9)
        for batch in grid.batches(range(100), batch_size=2, steps=4):
            if grid.step == 2 and grid.is_first and not newcomers:
                group.hub.kill_sender("StateBlock", after=12)
                newcomers.append(group.start(train))
                with grid.evaluation():
                    loop = grid._session.connection.loop
                    assert loop.mailbox.wait(lambda here: here.phase is MemberPhase.FROZEN, WITHIN_S)
            model.own.fill_(number)
            train_batch(model, optimizer, torch.full((2, n), float(batch.sum())))
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


@pytest.mark.parametrize("workers", ["2", 0, 1.5])
def test_an_invalid_number_of_workers_is_refused(workers: Any) -> None:
    with pytest.raises(ConfigError, match=f"^workers is {workers!r}; it must be an integer >= 1"):
        gridtrain.local(lambda grid: None, workers=workers)


def test_workers_that_nobody_can_join_do_not_wait_for_one_that_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_group, "PAUSED_TIMEOUT_S", 0.5)
    monkeypatch.setattr(local_group, "POLL_S", 0.05)

    def train(grid: gridtrain.Grid) -> None:
        if threading.current_thread().name == "worker-1":
            model = linear()
            optimizer = sgd(grid, model)
            for batch in grid.batches(DATA, batch_size=2, steps=100):
                train_batch(model, optimizer, batch)

    with pytest.raises(
        gridtrain.GridtrainError, match=r"the other workers cannot continue: .*1 of 2 has joined"
    ):
        gridtrain.local(train, workers=2)


@pytest.mark.parametrize("late", [False, True], ids=["scaler, optimizer", "optimizer, scaler"])
def test_a_newcomer_receives_the_scale(new_group: Any, late: bool) -> None:
    """Its own scale would overflow, and the whole group would skip steps until all had reduced it."""
    warm, entered = threading.Event(), threading.Event()

    def train(grid: gridtrain.Grid, number: int) -> float:
        options = {"device": "cpu", "init_scale": 8.0 if number == 0 else 65536.0, "growth_interval": 10**6}
        model = linear()
        scaler = grid.scaler(**options) if not late else None
        optimizer = sgd(grid, model)
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


# -- newcomers -----------------------------------------------------------------------------------------


def test_a_newcomer_continues_at_the_others_step(new_group: Any) -> None:
    """It receives parameters, momentum, schedule and step number; from then on the bits are the same.

    worker-0   0 1 2 3 4 5 ........ n   n+1 ... 59
    worker-1         joins here ----^   n+1 ... 59
    """
    come = threading.Event()

    def train(grid: gridtrain.Grid, number: int) -> dict[int, Any]:
        model = linear()
        if number == 1:
            nn.init.zeros_(model.weight)
        inner = torch.optim.SGD(model.parameters(), lr=0.1 if number else 0.01, momentum=0.9)
        inner.param_groups[0]["lr"] = 0.01
        optimizer = grid.optimizer(inner, model, exchange=gridtrain.Dense())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
        grid.track(scheduler=scheduler)
        seen = {}
        for batch in grid.batches(DATA, batch_size=2, steps=60):
            seen[grid.step] = (grid.world_size, scheduler.last_epoch, digest(model, optimizer))
            train_batch(model, optimizer, batch)
            scheduler.step()
            if grid.step == 5 and grid.world_size == 1:
                come.set()
                assert grid._session.connection.wait(lambda snapshot: snapshot.world_size == 2, WITHIN_S)
        return seen

    with new_group(workers=1) as group:
        group.start(train)
        assert come.wait(WITHIN_S)
        group.start(train)
        first, second = group.result(0), group.result(1)
    joined_at = min(second)
    assert joined_at >= 5 and list(second) == list(range(joined_at, 60)) and list(first) == list(range(60))
    assert second[joined_at][1] == joined_at, "the scheduler's state arrived, too"
    assert {step: first[step][1:] for step in second} == {step: seen[1:] for step, seen in second.items()}
    assert (first[0][0], first[59][0]) == (1, 2)


# -- busy, or hung -------------------------------------------------------------------------------------

IMPATIENT = Deadlines(
    beat_s=0.05, settle_s=0.02, probe_s=0.2, generation_gap_s=0.02, patience_floor_s=1.5, patience_factor=1.0
)
PAUSE_S = 2.5
"""Longer than the workers' patience, which is longer than delays on a busy machine."""


def pausing(grid: gridtrain.Grid, number: int, pause: Callable[[], object]) -> int:
    """Worker 1 pauses after two steps."""
    model = linear()
    optimizer = sgd(grid, model)
    for step in train_steps(grid, model, optimizer, steps=4):
        if step == 2 and number == 1:
            pause()
    return grid.world_size


def test_the_others_wait_for_an_evaluation(outcomes: Any) -> None:
    def train(grid: gridtrain.Grid, number: int) -> int:
        def evaluation() -> None:
            with grid.evaluation():
                threading.Event().wait(PAUSE_S)

        return pausing(grid, number, evaluation)

    assert outcomes(train, 2, deadlines=IMPATIENT) == [2, 2]


@pytest.mark.parametrize("hidden", [False, True], ids=["direct", "relayed"])
def test_a_worker_whose_loop_stalls_is_left_out_and_rejoins(
    new_group: Any, hidden: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1 stalls until the other one trains alone, which goes on until both have done three steps."""
    is_alone, reaches_nobody, last_step = threading.Event(), threading.Event(), math.inf

    def log_unreachable(links: PeerLinks, names: Sequence[str]) -> LogEvent:
        reaches_nobody.set()
        return log_as_usual(links, names)

    log_as_usual = PeerLinks.log_unreachable
    monkeypatch.setattr(PeerLinks, "log_unreachable", log_unreachable)

    def train(grid: gridtrain.Grid, number: int) -> tuple[int, str]:
        nonlocal last_step
        model = linear()
        optimizer = sgd(grid, model)
        for batch in grid.batches(DATA, batch_size=2, steps=1_000_000):
            if number == 1 and not is_alone.is_set():
                if grid.step >= 2:
                    assert is_alone.wait(WITHIN_S)
                    until_s = time.monotonic() + WITHIN_S
                    while "made no progress in time" not in grid.why_waiting():
                        assert time.monotonic() < until_s
                        threading.Event().wait(0.01)
                    assert not hidden or reaches_nobody.wait(WITHIN_S)
            elif number == 0 and grid.world_size == 1:
                is_alone.set()
            elif number == 0 and is_alone.is_set():
                last_step = min(last_step, grid.step + 3)
            if grid.step == last_step:
                break
            train_batch(model, optimizer, batch)
        return grid.step, digest(model, optimizer)

    with new_group(workers=2, deadlines=IMPATIENT) as group:
        for _ in range(2):
            group.start(train, hidden=hidden)
        stayed, stalled = group.finish()
    assert stayed == stalled
    text = (
        r"the group continues without this worker, which made no progress for \d+\.\d s \(limit \d\.\d s\) "
        r"while other members waited; its share of a step is 2 samples; it will rejoin when its training "
        r"loop continues \(if its batches take that long: "
    )
    assert any(re.match(text, message) for message in caplog.messages)
    assert not any("its own network is probably down" in message for message in caplog.messages)


# -- status and results ------------------------------------------------------------------------------


def test_the_status_shows_the_workers_figures(new_group: Any) -> None:
    reported, seen = threading.Event(), threading.Event()

    def train(grid: gridtrain.Grid, number: int) -> None:
        model = linear()
        optimizer = sgd(grid, model)
        for _ in train_steps(grid, model, optimizer, steps=2):
            grid.report(loss=0.5, accuracy=torch.tensor(0.25), norm=math.inf, other=math.nan)
            reported.set()
            assert seen.wait(WITHIN_S)

    with new_group(workers=1) as group:
        group.start(train)
        assert reported.wait(WITHIN_S)
        until_s = time.monotonic() + WITHIN_S
        figures: dict[str, float] = {}
        while "loss" not in figures and time.monotonic() < until_s:
            (member,) = status_of(group)["members"]
            figures = member["figures"]
        seen.set()
        assert group.result(0) is None
    assert (figures["loss"], figures["accuracy"]) == (0.5, 0.25)
    assert not figures.keys() & {"norm", "other"}, "neither JSON nor the wire has such numbers"


def test_the_ledger_ends_the_run_and_one_model_is_exported(new_group: Any, tmp_path: Path) -> None:
    def train(grid: gridtrain.Grid, number: int) -> tuple[int, dict[str, torch.Tensor]]:
        model = linear()
        optimizer = sgd(grid, model)
        steps = list(train_steps(grid, model, optimizer, epochs=3))
        assert grid.finished
        return len(steps), {name: value.clone() for name, value in model.state_dict().items()}

    with new_group(workers=2) as group:
        group.start(train), group.start(train)
        (steps, model), (other_steps, _) = group.finish()
        status = status_of(group)
    assert (steps, other_steps) == (9, 9), "12 samples, 4 a step, 3 passes"
    assert (status["phase"], status["reason"]) == ("finished", "2 workers reached the end of the run")
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


def test_the_final_model_is_exported_plainly_from_any_memory_format(together: Any, tmp_path: Path) -> None:
    """In channels_last, with extra state in its state_dict, and compiled."""

    def train(grid: gridtrain.Grid, number: int) -> dict[str, torch.Tensor]:
        plain = nn.Sequential(nn.Conv2d(2, 4, 3), WithExtraState(), nn.Flatten(), nn.Linear(16, 1))
        plain = plain.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model = torch.compile(plain, backend="eager")
        optimizer = sgd(grid, model, lr=0.1)
        images = [torch.full((2, 4, 4), float(i)) for i in range(4)]
        list(train_steps(grid, plain, optimizer, images, steps=2))
        return dict(plain.named_parameters())

    (model,) = together(train, 1)
    exported = safetensors.torch.load_file(tmp_path / "final.safetensors")
    assert set(exported) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert all(torch.equal(exported[name], model[name]) for name in model)


def test_the_model_is_exported_if_the_first_worker_is_lost_at_the_end(new_group: Any, tmp_path: Path) -> None:
    """It dies with the last step committed everywhere, before it reports that or exports the model."""

    def train(grid: gridtrain.Grid, number: int) -> dict[str, torch.Tensor]:
        model = linear()
        optimizer = sgd(grid, model)
        for batch in grid.batches(DATA, batch_size=2, steps=3):
            if grid.is_first:
                me = group.keys[f"worker-{number}"]
                group.hub.kill_sender("RunFinished", source=me)
            train_batch(model, optimizer, batch)
        return {name: value.clone() for name, value in model.state_dict().items()}

    with new_group(workers=3) as group:
        group.start_all(train)
        results = group.ends()
    assert sum(isinstance(result, EndpointKilled) for result in results) == 1, results
    (model, other) = (result for result in results if isinstance(result, dict))
    exported = safetensors.torch.load_file(tmp_path / "final.safetensors")
    assert all(
        torch.equal(exported[name], model[name]) and torch.equal(other[name], model[name]) for name in model
    )


def test_a_worker_that_joins_after_the_end_is_refused(new_group: Any) -> None:
    def train(grid: gridtrain.Grid, number: int) -> None:
        model = linear()
        optimizer = sgd(grid, model)
        list(train_steps(grid, model, optimizer, steps=1))

    with new_group(workers=1) as group:
        group.start(train)
        assert group.result(0) is None
        group.start(train)
        late = group.result(1)
    assert isinstance(late, JoinRefused) and late.code == "finished"
    assert str(late) == 'the run "local" is finished -> ask the run\'s owner for the result'
