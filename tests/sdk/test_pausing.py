"""The owner of a worker pauses it: the others go on, it rejoins, and all have the same model."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from group_snapshot import snapshot_of
from safetensors.torch import load_file
from torch import nn

import gridtrain
from gridtrain.errors import BudgetSpent, CoordinatorUnreachable, DataError
from gridtrain.runtime.client.agent_link import BUDGET_EXHAUSTED, AgentDirective, NoAgent
from gridtrain.sdk.grid import Grid
from gridtrain.testing import FakeSensors
from gridtrain.training.checkpoint.model_export import export_model
from gridtrain.training.data.fetch_meter import FetchMeter
from gridtrain.training.pause import CONTROL_RESERVE_BYTES, PauseController
from gridtrain_worker.training_policy import Rules, TrainingPolicy, parse_pairs

WITHIN_S = 60.0
DATA = [torch.full((8,), float(i % 7) - 3.0) for i in range(64)]
STEPS = 200
NOON = datetime(2026, 3, 2, 12, 0)
EXCHANGES = {
    "gtopk": gridtrain.GTopK(density=0.25, momentum=0.9),
    "topk": gridtrain.TopK(density=0.25),
    "dense": gridtrain.Dense(),
    "local": gridtrain.LocalSteps(every=2, exchange=gridtrain.GTopK(density=0.5)),
}


class PausedGroup:
    """Three workers; worker-1 has an owner.  Workers take no step before `allow_up_to` allows it.

    `seen`: by worker, (step, world size) at each of its steps.
    """

    def __init__(self, new_group: Any, exchange: Any, steps: int = STEPS, **group: Any) -> None:
        self.group = new_group(workers=3, **group)
        self.exchange, self.steps = exchange, steps
        self.owner = NoAgent()
        self.seen: dict[str, list[tuple[int, int]]] = {}
        self.models: dict[str, np.ndarray] = {}
        self.changed = threading.Condition()
        self.most_step = 5  # no worker goes beyond it
        self.results: dict[str, Any] = {}

    def train(self, grid: Grid, name: str) -> None:
        torch.manual_seed(3)
        model = nn.Linear(8, 4)
        model.bias.requires_grad_(False).zero_()  # never sent, also not to a worker that returns
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = grid.optimizer(inner, model, exchange=self.exchange)
        for batch in grid.batches(DATA, batch_size=2, steps=self.steps):
            with self.changed:
                self.seen.setdefault(name, []).append((grid.step, grid.world_size))
                self.changed.notify_all()
                self.changed.wait_for(lambda: grid.step <= self.most_step, WITHIN_S)
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        self.models[name] = flat.numpy().copy()

    def run(self, name: str) -> None:
        try:
            owner = self.owner if name == "worker-1" else None
            folder = self.group.export_dir
            disk = {"checkpoint_every": 1000, "state_dir": str(folder / "state")} if owner else {}
            with self.group.join(name, export_dir=str(folder), owner=owner, **disk) as grid:
                self.train(grid, name)
            self.results[name] = None
        except BaseException as error:
            self.results[name] = error

    def start(self) -> list[threading.Thread]:
        names = [f"worker-{number}" for number in range(3)]
        threads = [threading.Thread(target=self.run, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        return threads

    def allow_up_to(self, step: int) -> None:
        with self.changed:
            self.most_step = step
            self.changed.notify_all()

    def wait_until(self, true: Callable[[], bool]) -> None:
        with self.changed:
            while not self.changed.wait_for(true, 0.05):
                assert all(error is None for error in self.results.values()), self.results
                self._waited = getattr(self, "_waited", 0) + 1
                assert self._waited < 20 * WITHIN_S, (self.seen, self.owner.reported[-3:], self.most_step)

    def wait_step_by_step(self, true: Callable[[], bool]) -> None:
        """As `wait_until`; the others take a step when the first of them waits, and ten a second at most.

        It does not take both: while a generation forms the other one may wait in the step before.
        """
        next_s = [0.0]

        def check() -> bool:
            first = max(self.last("worker-0")[0], self.last("worker-2")[0])
            due = first == self.most_step + 1 and time.monotonic() >= next_s[0]
            if due and self.most_step < self.steps - 3:
                next_s[0] = time.monotonic() + 0.1
                self.most_step += 1
                self.changed.notify_all()
            return true()

        self.wait_until(check)

    def last(self, name: str) -> tuple[int, int]:
        return self.seen.get(name, [(-1, 0)])[-1]

    def is_paused(self) -> bool:
        return bool(self.owner.reported) and self.owner.reported[-1]["state"] == "paused"

    def paused_workers(self) -> list[dict[str, Any]]:
        lines = snapshot_of(self.group)["resting"]
        assert isinstance(lines, list)
        return lines


@pytest.mark.parametrize("kind", EXCHANGES)
def test_the_others_go_on_while_one_is_paused_and_it_rejoins(
    new_group: Any, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """step:      0 .. 5        6 .. 20          21 ..                    end
    worker-0   3 workers     2 workers        3 workers                the same model
    worker-1   battery -->   paused           mains --> joins          the same model
    worker-2   3 workers     2 workers        3 workers                the same model"""
    controls, sensors = (
        TrainingPolicy(Rules().with_settings(parse_pairs(["battery=pause"]))),
        FakeSensors(on_battery=False),
    )

    def lead(paused_group: PausedGroup) -> None:
        decision = controls.decide(sensors.read(()), 0, NOON)
        paused_group.owner.directive = AgentDirective(run=decision.may_train, reason=decision.text())

    paused_group = PausedGroup(new_group, EXCHANGES[kind])
    with paused_group.group:
        threads = paused_group.start()
        paused_group.wait_until(lambda: paused_group.last("worker-1")[0] >= 5)
        sensors.say(on_battery=True)
        lead(paused_group)
        paused_group.allow_up_to(20)
        paused_group.wait_until(
            lambda: (
                paused_group.is_paused()
                and paused_group.last("worker-0") == (21, 2) == paused_group.last("worker-2")
            )
        )
        paused_at = paused_group.last("worker-1")[0]
        assert paused_at in (5, 6), "within a step"
        (line,) = paused_group.paused_workers()
        assert (line["name"], line["state"]) == ("worker-1", "paused")
        assert line["reason"] == "paused by its owner: battery"
        assert paused_group.owner.reported[-1] == {"state": "paused", "reason": "battery"}
        disk = paused_group.group.export_dir / "state"
        paused_group.wait_until(lambda: [*disk.glob("step-*")] != [])  # if no worker returns, nothing is lost

        sensors.say(on_battery=False)
        lead(paused_group)
        paused_group.wait_until(lambda: paused_group.owner.reported[-1]["state"] != "paused")
        paused_group.wait_step_by_step(lambda: paused_group.last("worker-1")[0] > paused_at)
        paused_group.allow_up_to(STEPS)
        for thread in threads:
            thread.join(WITHIN_S)
        assert paused_group.results == {f"worker-{number}": None for number in range(3)}
        assert paused_group.paused_workers() == []
    first, *others = (paused_group.models[f"worker-{number}"].tobytes() for number in range(3))
    assert others == [first, first], "bit by bit"
    # With local steps a step of the run is two of the loop.
    back = sorted({step for step, size in paused_group.seen["worker-1"] if step > paused_at})
    assert back and back[0] >= 20 and back == list(range(back[0], STEPS)), "it takes part in each step again"
    assert all(size == 3 for step, size in paused_group.seen["worker-0"] if step > back[0])
    assert "worker-1 left: paused by its owner: battery" in _reasons(paused_group)
    assert "the other workers continue without this worker, unless they are paused, too" in caplog.text
    assert "this worker has returned after" in caplog.text and "gridtrain worker resume" not in caplog.text


def _reasons(paused_group: PausedGroup) -> str:
    events = snapshot_of(paused_group.group)["events"]
    return " | ".join(str(event.get("reason")) for event in events)


def test_a_run_whose_only_worker_is_paused_goes_on_from_its_state(
    new_group: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its residual stays with it, as no other worker can receive it, and counts again at the first step."""
    paused_group = PausedGroup(new_group, EXCHANGES["topk"], steps=12)
    paused_group.group._min = 1
    residuals: list[np.ndarray] = []

    def train(grid: Grid) -> None:
        model = nn.Linear(8, 4)
        optimizer = grid.optimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), model, exchange=paused_group.exchange
        )
        for batch in grid.batches(DATA, batch_size=2, steps=12):
            with paused_group.changed:
                paused_group.seen.setdefault("one", []).append((grid.step, grid.world_size))
                residuals.append(optimizer.residual_state()["residual"].numpy().copy())
                paused_group.changed.notify_all()
                paused_group.changed.wait_for(lambda: grid.step <= paused_group.most_step, WITHIN_S)
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()

    with new_group(workers=1) as group:
        done: list[Any] = []

        def one() -> None:
            with group.join("one", export_dir=str(group.export_dir), owner=paused_group.owner) as grid:
                train(grid)
            done.append(None)

        thread = threading.Thread(target=one, daemon=True)
        thread.start()
        paused_group.wait_until(lambda: paused_group.last("one")[0] >= 5)
        paused_group.allow_up_to(6)
        paused_group.wait_until(lambda: paused_group.last("one")[0] >= 6)
        before = residuals[-1]
        paused_group.owner.directive = AgentDirective(run=False, reason="on request")
        paused_group.allow_up_to(12)
        paused_group.wait_until(paused_group.is_paused)
        paused = [step for step, _ in paused_group.seen["one"]]
        paused_group.wait_until(lambda: snapshot_of(group)["phase"] == "waiting")
        assert "; no worker trains: 1 is paused (on request, for " in str(snapshot_of(group)["reason"])
        paused_group.owner.directive = AgentDirective()
        thread.join(WITHIN_S)
        assert done == [None]
    assert (
        "no other worker trains: the run continues when enough workers have joined or resumed" in caplog.text
    )
    assert "paused by its owner: on request (gridtrain worker resume ends the pause)" in caplog.text
    steps = [step for step, _ in paused_group.seen["one"]]
    assert steps == list(range(12)) and paused[-1] in (6, 7), "no step is repeated or left out"
    again = residuals[paused[-1] + 1]
    assert again.any() and before.any()


class BriefPause(NoAgent):
    """An owner who resumes the worker as soon as it has paused."""

    def report(self, **state: Any) -> None:
        super().report(**state)
        if state["state"] == "paused":
            self.directive = AgentDirective()


def test_an_error_after_a_pause_leaves_checkpoints_with_the_weights_of_their_steps(new_group: Any) -> None:
    """step:    0 .. 5    6        7     8            9, 10        11
    disk                  pause          checkpoint                the script fails: nothing is written"""
    owner, weights = BriefPause(), {}

    def train(grid: Grid) -> None:
        model = nn.Linear(8, 4)
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = grid.optimizer(sgd, model, exchange=gridtrain.TopK(density=0.25))
        for batch in grid.batches(DATA, batch_size=2, steps=20):
            weights[grid.step] = model.weight.detach().clone()
            if grid.step == 5:
                owner.directive = AgentDirective(run=False, reason="hot")
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            if grid.step == 11:
                raise DataError("the script fails")
            optimizer.step()

    with new_group(workers=1) as group:
        folder = group.export_dir / "state"
        with (
            pytest.raises(DataError),
            group.join("one", owner=owner, checkpoint_every=8, state_dir=str(folder)) as grid,
        ):
            train(grid)
    assert any(report["state"] == "paused" for report in owner.reported)
    steps = {}
    for path in folder.glob("step-*"):
        export_model(path, path / "model.safetensors")
        steps[int(path.name.removeprefix("step-"))] = load_file(path / "model.safetensors")["weight"]
    assert set(steps) in ({6, 8}, {7, 8})
    assert all(torch.equal(written, weights[step]) for step, written in steps.items())


@pytest.mark.parametrize("far", [1, 150])
def test_a_worker_whose_steps_are_lost_to_a_newcomer_during_its_pause_says_so(
    new_group: Any, caplog: pytest.LogCaptureFixture, far: int
) -> None:
    """one: steps 0 .. 99, paused                                back, with the state of the other
    two:                       steps 0, 1, 2 ... `far` ...       the same state"""
    owner, is_back, is_far = NoAgent(), threading.Event(), threading.Event()

    def train(name: str, agent: NoAgent | None) -> None:
        folder = str(group.export_dir / name)
        with group.join(name, owner=agent, checkpoint_every=1000, state_dir=folder) as grid:
            model = nn.Linear(8, 4)
            sgd = torch.optim.SGD(model.parameters(), lr=0.01)
            optimizer = grid.optimizer(sgd, model, exchange=gridtrain.Dense())
            for batch in grid.batches(DATA, batch_size=2, steps=10_000):
                if agent is not None and grid.step == 100:
                    agent.directive = AgentDirective(run=False, reason="hot")
                if agent is not None and agent.reported[-1]["state"] == "training" and grid.world_size == 2:
                    is_back.set()
                optimizer.zero_grad()
                model(batch).pow(2).mean().backward()
                optimizer.step()
                if agent is None and grid.step >= far:
                    is_far.set()
                if is_back.wait(0.05 if is_far.is_set() else 0.0):
                    break

    def await_phase(phase: str) -> None:
        until_s = time.monotonic() + WITHIN_S
        while snapshot_of(group)["phase"] != phase:
            assert time.monotonic() < until_s
            is_back.wait(0.05)

    with new_group(workers=1) as group:
        threads = [threading.Thread(target=train, args=("one", owner), daemon=True)]
        threads[0].start()
        await_phase("training")
        await_phase("waiting")
        threads.append(threading.Thread(target=train, args=("two", None), daemon=True))
        threads[1].start()
        assert is_far.wait(WITHIN_S)
        owner.directive = AgentDirective()
        assert is_back.wait(WITHIN_S)
        for thread in threads:
            thread.join(WITHIN_S)
        folder = group.export_dir / "one"
    said = re.search(r"this worker paused after step (\d+), but the group has begun again (.*)", caplog.text)
    assert said is not None and said[1] in ("100", "101"), caplog.text
    found = re.fullmatch(
        rf"without its steps, and this worker continues after its step (\d+); gridtrain export writes the "
        rf"model of step {said[1]} from its checkpoint in {folder}, until later checkpoints replace it",
        said[2],
    )
    assert found is not None and int(found[1]) >= far


class EndedPause(NoAgent):
    """An owner who stops the worker, or its script, as soon as `is_known` says that it has paused."""

    def __init__(self, end: BaseException | None, is_known: Callable[[], bool]) -> None:
        super().__init__()
        self._end, self._is_known = end, is_known

    def wait(self, timeout_s: float) -> None:
        super().wait(timeout_s)
        if not self._is_known():
            return
        if self._end is not None:
            raise self._end
        self.directive = AgentDirective(run=False, stop=True)


@pytest.mark.parametrize("end", [None, KeyboardInterrupt()])
def test_a_worker_that_ends_while_it_is_paused_no_longer_counts_as_paused(
    new_group: Any, end: BaseException | None
) -> None:
    def train(grid: Grid) -> None:
        model = nn.Linear(8, 4)
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = grid.optimizer(sgd, model, exchange=gridtrain.Dense())
        for batch in grid.batches(DATA, batch_size=2, steps=20):
            if grid.step == 5:
                owner.directive = AgentDirective(run=False, reason="hot")
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()

    with new_group(workers=1) as group:
        owner = EndedPause(end, lambda: bool(snapshot_of(group)["resting"]))
        with suppress(KeyboardInterrupt), group.join("one", owner=owner) as grid:
            train(grid)
        assert owner.reported[-1]["state"] == "paused"
        until_s = time.monotonic() + WITHIN_S
        while snapshot_of(group)["resting"]:
            assert time.monotonic() < until_s
            threading.Event().wait(0.05)
        status = snapshot_of(group)
    left = [event["reason"] for event in status["events"] if event["event"] == "left"]  # type: ignore[attr-defined]
    assert left == ["paused by its owner: hot", "it has ended while it was paused"]
    assert "no worker trains" not in str(status["reason"])


def test_stop_ends_the_loop_after_the_step_and_leaves(new_group: Any) -> None:
    paused_group = PausedGroup(new_group, EXCHANGES["gtopk"], steps=20)
    with paused_group.group:
        threads = paused_group.start()
        paused_group.wait_until(lambda: paused_group.last("worker-1")[0] >= 5)
        paused_group.owner.directive = replace(paused_group.owner.directive, stop=True)
        paused_group.allow_up_to(20)
        for thread in threads:
            thread.join(WITHIN_S)
    assert paused_group.results == {f"worker-{number}": None for number in range(3)}
    assert paused_group.last("worker-1")[0] in (5, 6) and paused_group.last("worker-0")[0] == 19


def test_a_paused_worker_ends_when_the_run_is_finished(
    new_group: Any, caplog: pytest.LogCaptureFixture
) -> None:
    paused_group = PausedGroup(new_group, EXCHANGES["dense"], steps=10)
    with paused_group.group:
        threads = paused_group.start()
        paused_group.wait_until(lambda: paused_group.last("worker-1")[0] >= 5)
        paused_group.owner.directive = AgentDirective(run=False, reason="hot")
        paused_group.allow_up_to(10)
        threads[0].join(WITHIN_S)
        threads[2].join(WITHIN_S)
        paused_group.owner.directive = AgentDirective()
        threads[1].join(WITHIN_S)
    assert paused_group.results == {f"worker-{number}": None for number in range(3)}
    assert "the run was finished while this worker was paused" in caplog.text
    assert re.search(r"the state after step [67] is in \S+: gridtrain export writes its model\n", caplog.text)
    assert "continue from it" not in caplog.text


def test_the_daily_traffic_budget_is_never_exceeded(new_group: Any) -> None:
    """The budget is used up in the middle of the run; the next day it goes on."""
    paused_group = PausedGroup(new_group, EXCHANGES["dense"], steps=STEPS)
    grids: dict[str, Grid] = {}
    join = paused_group.group.join

    def joined(name: str, **options: Any) -> Grid:
        grids[name] = join(name, **options)
        return grids[name]

    paused_group.group.join = joined
    with paused_group.group:
        threads = paused_group.start()
        paused_group.wait_until(lambda: paused_group.last("worker-1")[0] >= 5)
        budget = grids["worker-1"].moved_bytes() + 150_000
        paused_group.owner.directive = AgentDirective(most_bytes=budget)
        paused_group.allow_up_to(STEPS)
        threads[0].join(WITHIN_S)
        threads[2].join(WITHIN_S)
        spent = grids["worker-1"].moved_bytes()
        paused = paused_group.is_paused()
        paused_group.owner.directive = AgentDirective()
        threads[1].join(WITHIN_S)
    assert paused_group.results == {f"worker-{number}": None for number in range(3)}
    assert spent <= budget
    assert paused or paused_group.last("worker-1")[0] == STEPS - 1, (
        "the budget was used up, or the run ended before"
    )


def test_a_budget_that_is_lowered_below_the_traffic_so_far_lets_the_worker_leave_in_order(
    new_group: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It finishes the step, in which it waits for the others, and transfers its residual."""
    paused_group = PausedGroup(new_group, EXCHANGES["topk"])
    with paused_group.group:
        threads = paused_group.start()
        paused_group.wait_until(lambda: paused_group.last("worker-1")[0] >= 5)
        paused_group.owner.directive = AgentDirective(
            run=False, reason="the day's traffic budget is used up", most_bytes=1.0
        )
        paused_group.allow_up_to(20)
        paused_group.wait_until(
            lambda: (
                paused_group.is_paused()
                and paused_group.last("worker-0") == (21, 2) == paused_group.last("worker-2")
            )
        )
        (line,) = paused_group.paused_workers()
        assert line["reason"] == "paused by its owner: the day's traffic budget is used up"
        paused_group.owner.directive = AgentDirective()
        paused_group.allow_up_to(STEPS)
        for thread in threads:
            thread.join(WITHIN_S)
    assert paused_group.results == {f"worker-{number}": None for number in range(3)}
    assert "(100.0 %) transferred: 32 entries" in caplog.text
    assert "the step makes no progress" not in caplog.text


def test_the_agent_learns_that_a_step_exceeds_the_budget() -> None:
    """A little of the day is left: without a report the agent would take the script's end for a failure."""
    session, owner = (
        SimpleNamespace(connection=SimpleNamespace(moved_bytes=900_000, received_bytes=1)),
        NoAgent(),
    )
    asked: list[Callable[[], str]] = []
    session.connection.set_control = lambda interrupts, exhausted: asked.append(exhausted)
    PauseController(session, owner, lambda: None, lambda up, down: None)  # type: ignore[arg-type,return-value]
    owner.directive = AgentDirective(most_bytes=10_000_000)
    assert asked[0]() == "" and not owner.reported
    owner.directive = AgentDirective(most_bytes=0)
    assert asked[0]() == "" and not owner.reported, "a lowered budget lets it leave in order"
    session.connection.moved_bytes += CONTROL_RESERVE_BYTES
    assert asked[0]() == "paused in the middle of a step: the day's traffic budget is used up"
    assert owner.reported == [{"state": BUDGET_EXHAUSTED}]


@pytest.mark.parametrize(("left_bytes", "tries"), [(math.inf, 1), (1000, 0)], ids=["a budget", "no budget"])
def test_a_worker_that_is_interrupted_while_it_saves_its_state_tries_to_leave(
    left_bytes: float, tries: int
) -> None:
    """Otherwise it would count as paused, though nobody can resume it."""
    session, owner = SimpleNamespace(connection=SimpleNamespace(moved_bytes=0, received_bytes=0)), NoAgent()
    tried: list[str] = []

    def leave(transport: None, allowlist: None, reason: str, timeout_s: float) -> None:
        tried.append(reason)
        raise CoordinatorUnreachable("it is away", remedy="")

    def save() -> None:
        raise KeyboardInterrupt

    session.connection.set_control = lambda interrupts, exhausted: None
    session.connection.leave_paused, session.pause = leave, lambda reason: 1
    connect: Any = lambda: (None, None)  # noqa: E731
    owner.directive = AgentDirective(run=False, reason="hot", most_bytes=left_bytes)
    paused = PauseController(session, owner, connect, lambda up, down: None)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        paused.pause(None, touched=True, on_left=save)
    assert len(tried) == tries


def test_a_new_rate_limit_applies_in_the_middle_of_a_step() -> None:
    """Also while a newcomer receives the state, which may take hours without a new turn."""
    session, owner = SimpleNamespace(connection=SimpleNamespace(moved_bytes=0, received_bytes=0)), NoAgent()
    asked: list[Callable[[], str]] = []
    limits: list[tuple[float | None, float | None]] = []
    session.connection.set_control = lambda interrupts, exhausted: asked.append(exhausted)
    PauseController(session, owner, lambda: None, lambda up, down: limits.append((up, down)))  # type: ignore[arg-type,return-value]
    owner.directive = AgentDirective(upload_Bps=1e6)
    assert asked[0]() == "" == asked[0]()
    owner.directive = AgentDirective(download_Bps=2e6)
    assert asked[0]() == ""
    assert limits == [(None, None), (1e6, None), (None, 2e6)]


def test_what_the_data_sets_fetch_obeys_the_budget_of_a_day() -> None:
    session, owner = SimpleNamespace(connection=SimpleNamespace(moved_bytes=0, received_bytes=0)), NoAgent()
    asked: list[Callable[[], str]] = []
    session.connection.set_control = lambda interrupts, exhausted: asked.append(exhausted)
    fetches = FetchMeter()
    PauseController(session, owner, lambda: None, lambda up, down: None, fetches)  # type: ignore[arg-type,return-value]
    fetches.check_undivided("a shard", 5_000_000)
    owner.directive = AgentDirective(most_bytes=3_000_000, day_bytes=4_000_000)
    assert asked[0]() == ""
    with pytest.raises(DataError, match=r"a shard of 5 MB, .* the traffic budget of a day, 4 MB"):
        fetches.check_undivided("a shard", 5_000_000)
    with pytest.raises(BudgetSpent, match=r"needs more than the 2\.93 MB"):
        fetches.check_undivided("a shard", 4_000_000)
