"""The owner of a worker pauses it: the others go on, it rejoins, and all have the same model."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from brisk import WITHIN_S
from group_status import status_of
from safetensors.torch import load_file
from threaded_group import ThreadedGroup
from torch import nn
from training_loop import backward, flat, sgd, train_batch

import gridtrain
from gridtrain.config import Deadlines
from gridtrain.errors import BudgetSpent, CoordinatorUnreachable, DataError
from gridtrain.runtime.client.agent_link import BUDGET_EXHAUSTED, AgentDirective, NoAgent
from gridtrain.runtime.contribution import Contribution
from gridtrain.sdk.grid import Grid
from gridtrain.testing import FakeSensors
from gridtrain.training.checkpoint.model_export import export_model
from gridtrain.training.data.fetch_meter import FetchMeter
from gridtrain.training.pause import CONTROL_RESERVE_BYTES, PauseController
from gridtrain_worker.training_policy import Rules, TrainingPolicy, parse_pairs

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
    """Workers of which the second, or the only one, has an owner; none is ahead of `most_step`.

    seen: by worker, (step, world size) at each of its steps.
    residuals: of the worker with an owner, before each of its steps.
    """

    def __init__(self, new_group: Any, exchange: Any, steps: int = STEPS, workers: int = 3) -> None:
        self.group = new_group(workers=workers)
        self.exchange, self.steps, self.workers = exchange, steps, workers
        self.owner = NoAgent()
        self.owned = min(1, workers - 1)
        self.seen: dict[str, list[tuple[int, int]]] = {}
        self.residuals: list[torch.Tensor] = []
        self.models: dict[str, np.ndarray] = {}
        self.changed = threading.Condition()
        self.most_step = 5

    def train(self, grid: Grid, number: int) -> None:
        torch.manual_seed(3)
        model, name = nn.Linear(8, 4), f"worker-{number}"
        model.bias.requires_grad_(False).zero_()  # never sent, also not to a worker that returns
        optimizer = sgd(grid, model, self.exchange)
        grid._session._contribution.path = self.group.export_dir / f"{name}.json"
        for batch in grid.batches(DATA, batch_size=2, steps=self.steps):
            with self.changed:
                self.seen.setdefault(name, []).append((grid.step, grid.world_size))
                if number == self.owned:
                    self.residuals += [residual.clone() for residual in optimizer.residual.state().values()]
                self.changed.notify_all()
                self.changed.wait_for(lambda: grid.step <= self.most_step, WITHIN_S)
            train_batch(model, optimizer, batch)
        self.models[name] = flat(model).numpy().copy()

    def start(self) -> None:
        owned = {"owner": self.owner, "checkpoint_every": 1000, "state_dir": f"{self.group.export_dir}/state"}
        for number in range(self.workers):
            self.group.start(self.train, **(owned if number == self.owned else {}))

    def allow_up_to(self, step: int) -> None:
        with self.changed:
            self.most_step = step
            self.changed.notify_all()

    def wait_until(self, true: Callable[[], bool]) -> None:
        with self.changed:
            while not self.changed.wait_for(true, 0.05):
                assert not any(self.group.results.values()), self.group.results
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
        lines = status_of(self.group)["resting"]
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
        paused_group.start()
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
        paused_group.group.finish()
        assert paused_group.paused_workers() == []
    first, *others = (paused_group.models[f"worker-{number}"].tobytes() for number in range(3))
    assert others == [first, first], "bit by bit"
    # With local steps a step of the run is two of the loop.
    back = sorted({step for step, size in paused_group.seen["worker-1"] if step > paused_at})
    assert back and back[0] >= 20 and back == list(range(back[0], STEPS)), "it takes part in each step again"
    assert all(size == 3 for step, size in paused_group.seen["worker-0"] if step > back[0])
    assert "worker-1 left: paused by its owner: battery" in _reasons(paused_group)
    assert "the other workers continue without this worker, unless they are also paused" in caplog.text
    assert "this worker has returned after" in caplog.text and "gridtrain worker resume" not in caplog.text
    saved = rf"the state after step ({paused_at}|{paused_at + 1}) is on this worker's disk, in {disk}"
    assert any(re.fullmatch(saved, message) for message in caplog.messages)


def _reasons(paused_group: PausedGroup) -> str:
    events = status_of(paused_group.group)["events"]
    return " | ".join(str(event.get("reason")) for event in events)


def test_a_run_whose_only_worker_is_paused_goes_on_from_its_state(
    new_group: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its residual stays with it, as no other worker can receive it, and counts again at the first step."""
    paused_group = PausedGroup(new_group, EXCHANGES["topk"], steps=12, workers=1)
    with paused_group.group as group:
        paused_group.start()
        paused_group.wait_until(lambda: paused_group.last("worker-0")[0] >= 5)
        paused_group.owner.directive = AgentDirective(run=False, reason="on request")
        paused_group.allow_up_to(12)
        paused_group.wait_until(paused_group.is_paused)
        paused_at = paused_group.last("worker-0")[0]
        shown = Contribution.read(group.export_dir / "worker-0.json")
        assert shown is not None and shown.step == paused_at + 1, "at once, not within a second"
        paused_group.wait_until(lambda: status_of(group)["phase"] == "waiting")
        assert "; no worker is training: 1 is paused (on request, for " in str(status_of(group)["reason"])
        paused_group.owner.directive = AgentDirective()
        group.finish()
    assert "no other worker is training: the run will continue when enough workers have joined" in caplog.text
    assert "paused by its owner: on request (gridtrain worker resume ends the pause)" in caplog.text
    steps = [step for step, _ in paused_group.seen["worker-0"]]
    assert steps == list(range(12)) and paused_at in (5, 6), "no step is repeated or left out"
    assert paused_group.residuals[paused_at + 1].any()


def test_a_worker_without_checkpoints_says_so_when_it_pauses(
    new_group: Any, caplog: pytest.LogCaptureFixture
) -> None:
    owner = BriefPause()

    def train(grid: Grid, number: int) -> None:
        model = nn.Linear(8, 4)
        optimizer = sgd(grid, model, gridtrain.TopK(density=0.25))
        for batch in grid.batches(DATA, batch_size=2, steps=8):
            if grid.step == 5:
                owner.directive = AgentDirective(run=False, reason="hot")
            train_batch(model, optimizer, batch)

    with new_group(workers=1) as group:
        group.start(train, owner=owner, checkpoint_every=0)
        group.finish()
    assert "this worker has written no checkpoint since it started" in caplog.messages


def test_the_state_takes_a_quarter_of_the_present_upload_limit_also_after_a_pause(new_group: Any) -> None:
    """No limit, 20 Mbit/s, 8 Mbit/s before and after a pause, no limit: at most 25 Mbit/s."""
    owner, shares_Mbit = BriefPause(), []

    def train(grid: Grid, number: int) -> None:
        model = nn.Linear(8, 4)
        optimizer = sgd(grid, model, gridtrain.TopK(density=0.25))
        limits_Mbit = {1: 20.0, 2: 8.0, 4: None}
        for batch in grid.batches(DATA, batch_size=2, steps=7):
            loop = grid._session.connection.loop
            assert loop.catch_up_source.rate_Bps == loop.checkpoint_copier.rate_Bps
            shares_Mbit.append((loop.catch_up_source.rate_Bps or 0.0) * 8 / 1e6)
            if grid.step in limits_Mbit:
                upload_Mbit = limits_Mbit[grid.step]
                upload_Bps = None if upload_Mbit is None else upload_Mbit * 1e6 / 8
                owner.directive = replace(owner.directive, upload_Bps=upload_Bps)
            if grid.step == 3:
                owner.directive = replace(owner.directive, run=False, reason="hot")
            train_batch(model, optimizer, batch)

    with new_group(workers=1) as group:
        group.start(train, owner=owner)
        group.finish()
    assert shares_Mbit == [25.0, 25.0, 5.0, 2.0, 2.0, 25.0, 25.0]


class BriefPause(NoAgent):
    """An owner who resumes the worker as soon as it has paused."""

    def report(self, **state: Any) -> None:
        super().report(**state)
        if state["state"] == "paused":
            self.directive = replace(self.directive, run=True, reason="")


def test_an_error_after_a_pause_leaves_checkpoints_with_the_weights_of_their_steps(new_group: Any) -> None:
    """step:    0 .. 5    6        7     8            9, 10        11
    disk                  pause          checkpoint                the script fails: nothing is written"""
    owner, weights = BriefPause(), {}

    def train(grid: Grid, number: int) -> None:
        model = nn.Linear(8, 4)
        optimizer = sgd(grid, model, gridtrain.TopK(density=0.25))
        for batch in grid.batches(DATA, batch_size=2, steps=20):
            weights[grid.step] = model.weight.detach().clone()
            grid._model_state.checkpoints.wait()  # type: ignore[union-attr]  steps are faster here than a disk
            if grid.step == 5:
                owner.directive = AgentDirective(run=False, reason="hot")
            backward(model, batch)
            if grid.step == 11:
                raise DataError("the script fails")
            optimizer.step()
            optimizer.zero_grad()

    with new_group(workers=1) as group:
        folder = group.export_dir / "state"
        group.start(train, owner=owner, checkpoint_every=8, state_dir=str(folder))
        with pytest.raises(DataError):
            group.finish()
    assert any(report["state"] == "paused" for report in owner.reported)
    steps = {}
    for path in folder.glob("step-*"):
        export_model(path, path / "model.safetensors")
        steps[int(path.name.removeprefix("step-"))] = load_file(path / "model.safetensors")["weight"]
    assert set(steps) in ({6, 8}, {7, 8})
    assert all(torch.equal(written, weights[step]) for step, written in steps.items())


def wait_for_status(group: ThreadedGroup, is_met: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    until_s = time.monotonic() + WITHIN_S
    while not is_met(status := status_of(group)):
        assert time.monotonic() < until_s, status
        threading.Event().wait(0.05)
    return status


@pytest.mark.parametrize("far", [1, 150])
def test_a_worker_whose_steps_are_lost_to_a_newcomer_during_its_pause_says_so(
    new_group: Any, caplog: pytest.LogCaptureFixture, far: int
) -> None:
    """one: steps 0 .. 99, paused                                back, with the state of the other
    two:                       steps 0, 1, 2 ... `far` ...       the same state"""
    owner, is_back, is_far = NoAgent(), threading.Event(), threading.Event()

    def train(grid: Grid, number: int) -> None:
        model = nn.Linear(8, 4)
        optimizer = sgd(grid, model)
        for batch in grid.batches(DATA, batch_size=2, steps=10_000):
            if number == 0 and grid.step == 100:
                owner.directive = AgentDirective(run=False, reason="hot")
            if number == 0 and owner.reported[-1]["state"] == "training" and grid.world_size == 2:
                is_back.set()
            train_batch(model, optimizer, batch)
            if number == 1 and grid.step >= far:
                is_far.set()
            if is_back.wait(0.05 if is_far.is_set() else 0.0):
                break

    with new_group(workers=1, deadlines=Deadlines(regather_s=0.5)) as group:
        folder = group.export_dir / "one"
        group.start(train, owner=owner, checkpoint_every=1000, state_dir=str(folder))
        wait_for_status(group, lambda status: status["phase"] == "training")
        wait_for_status(group, lambda status: status["phase"] == "waiting")
        group.start(train, checkpoint_every=1000, state_dir=str(group.export_dir / "two"))
        assert is_far.wait(WITHIN_S)
        owner.directive = AgentDirective()
        assert is_back.wait(WITHIN_S)
        group.finish()
    said = re.search(r"this worker paused after step (\d+), but the group has restarted (.*)", caplog.text)
    assert said is not None and said[1] in ("100", "101"), caplog.text
    found = re.fullmatch(
        rf"without this worker's steps; this worker is continuing after the group's step (\d+); gridtrain "
        rf"export writes the model of step {said[1]} from its checkpoint in {folder}, until later "
        "checkpoints replace it",
        said[2],
    )
    assert found is not None and int(found[1]) >= far


class EndedPause(NoAgent):
    """An owner who stops the worker, or its script, as soon as `is_known` says that it has paused."""

    def __init__(self, end: BaseException | None, is_known: Callable[[], bool]) -> None:
        super().__init__()
        self._end, self._is_known = end, is_known

    def wait(self, timeout_s: float, known: AgentDirective) -> None:
        super().wait(timeout_s, known)
        if not self._is_known():
            return
        if self._end is not None:
            raise self._end
        self.directive = AgentDirective(run=False, stop=True)


def reasons_of_leaving(status: dict[str, Any]) -> list[str]:
    return [event["reason"] for event in status["events"] if event["event"] == "left"]


@pytest.mark.parametrize("end", [None, KeyboardInterrupt()])
def test_a_worker_that_ends_while_it_is_paused_no_longer_counts_as_paused(
    new_group: Any, end: BaseException | None
) -> None:
    def train(grid: Grid, number: int) -> None:
        model = nn.Linear(8, 4)
        optimizer = sgd(grid, model)
        for batch in grid.batches(DATA, batch_size=2, steps=20):
            if grid.step == 5:
                owner.directive = AgentDirective(run=False, reason="hot")
            train_batch(model, optimizer, batch)

    with new_group(workers=1) as group:
        owner = EndedPause(end, lambda: bool(status_of(group)["resting"]))
        assert group.result(group.start(train, owner=owner)) is end
        assert owner.reported[-1]["state"] == "paused"
        status = wait_for_status(
            group, lambda status: not status["resting"] and len(reasons_of_leaving(status)) > 1
        )
    assert reasons_of_leaving(status) == ["paused by its owner: hot", "it has ended while it was paused"]
    assert "no worker is training" not in str(status["reason"])


def test_stop_ends_the_loop_after_the_step_and_leaves(new_group: Any) -> None:
    paused_group = PausedGroup(new_group, EXCHANGES["gtopk"], steps=20)
    with paused_group.group:
        paused_group.start()
        paused_group.wait_until(lambda: paused_group.last("worker-1")[0] >= 5)
        paused_group.owner.directive = replace(paused_group.owner.directive, stop=True)
        paused_group.allow_up_to(20)
        paused_group.group.finish()
    assert paused_group.last("worker-1")[0] in (5, 6) and paused_group.last("worker-0")[0] == 19


def test_a_paused_worker_ends_when_the_run_is_finished(
    new_group: Any, caplog: pytest.LogCaptureFixture
) -> None:
    paused_group = PausedGroup(new_group, EXCHANGES["dense"], steps=10)
    with paused_group.group:
        paused_group.start()
        paused_group.wait_until(lambda: paused_group.last("worker-1")[0] >= 5)
        paused_group.owner.directive = AgentDirective(run=False, reason="hot")
        paused_group.allow_up_to(10)
        assert (paused_group.group.result(0), paused_group.group.result(2)) == (None, None)
        paused_group.owner.directive = AgentDirective()
        paused_group.group.finish()
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
        paused_group.start()
        paused_group.wait_until(lambda: paused_group.last("worker-1")[0] >= 5)
        budget = grids["worker-1"].moved_bytes() + 150_000
        paused_group.owner.directive = AgentDirective(most_bytes=budget)
        paused_group.allow_up_to(STEPS)
        assert (paused_group.group.result(0), paused_group.group.result(2)) == (None, None)
        spent = grids["worker-1"].moved_bytes()
        paused = paused_group.is_paused()
        paused_group.owner.directive = AgentDirective()
        paused_group.group.finish()
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
        paused_group.start()
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
        paused_group.group.finish()
    assert "(100.0 %) transferred: 32 entries" in caplog.text
    assert "the step is making no progress" not in caplog.text


class Controller:
    """A `PauseController` of a session that has sent `moved_bytes`, and its owner.

    exhausted: what the I/O loop asks between two messages.
    limits: the rate limits that were set.
    """

    def __init__(
        self, moved_bytes: int = 0, fetches: FetchMeter | None = None, directive: AgentDirective | None = None
    ) -> None:
        self.owner, self.limits = NoAgent(), list[tuple[float | None, float | None]]()
        self.owner.directive = directive or AgentDirective()
        self.session: Any = SimpleNamespace(
            connection=SimpleNamespace(total_bytes=(moved_bytes - 1, 1), set_control=self._keep)
        )
        connect: Any = lambda: (None, None)  # noqa: E731
        limit = lambda up, down: self.limits.append((up, down))  # noqa: E731
        self.pauses = PauseController(self.session, self.owner, connect, limit, fetches or FetchMeter())

    def _keep(self, interrupts: object, exhausted: Callable[[], str]) -> None:
        self.exhausted = exhausted


def test_the_agent_learns_that_a_step_exceeds_the_budget() -> None:
    """A little of the day is left: without a report the agent would take the script's end for a failure."""
    controller = Controller(moved_bytes=900_000)
    controller.owner.directive = AgentDirective(most_bytes=10_000_000)
    assert controller.exhausted() == "" and not controller.owner.reported
    controller.owner.directive = AgentDirective(most_bytes=0)
    assert controller.exhausted() == "" and not controller.owner.reported, (
        "a lowered budget lets it leave in order"
    )
    controller.session.connection.total_bytes = 900_000 - 1, 1 + CONTROL_RESERVE_BYTES
    assert controller.exhausted() == "paused in the middle of a step: the day's traffic budget is used up"
    assert controller.owner.reported == [{"state": BUDGET_EXHAUSTED}]


@pytest.mark.parametrize(("left_bytes", "tries"), [(math.inf, 1), (1000, 0)], ids=["a budget", "no budget"])
def test_a_worker_that_is_interrupted_while_it_saves_its_state_tries_to_leave(
    left_bytes: float, tries: int
) -> None:
    """Otherwise it would count as paused, though nobody can resume it."""
    controller = Controller(directive=AgentDirective(run=False, reason="hot", most_bytes=left_bytes))
    tried: list[str] = []

    def leave(transport: None, allowlist: None, reason: str, timeout_s: float) -> None:
        tried.append(reason)
        raise CoordinatorUnreachable("it is away", remedy="")

    def save() -> None:
        raise KeyboardInterrupt

    controller.session.connection.leave_paused, controller.session.pause = leave, lambda reason: 1
    with pytest.raises(KeyboardInterrupt):
        controller.pauses.pause(None, touched=True, on_left=save)
    assert len(tried) == tries


@pytest.mark.parametrize(
    ("members", "text"),
    [
        (0, "this worker had not yet become a member"),
        (1, "no other worker is training: the run will continue when enough workers have joined or resumed"),
        (2, "the other workers continue without this worker, unless they are also paused"),
    ],
)
def test_a_worker_that_pauses_says_who_continues(
    members: int, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    controller = Controller(directive=AgentDirective(run=False, reason="hot", stop=True))
    controller.session.pause = lambda reason: members
    controller.session.connection.leave_paused = lambda *_: None
    assert not controller.pauses.pause(None, touched=True, on_left=lambda: None)
    assert caplog.messages == ["paused by its owner: hot", text]


def test_a_new_rate_limit_applies_in_the_middle_of_a_step() -> None:
    """Also while a newcomer receives the state, which may take hours without a new turn."""
    controller = Controller()
    controller.owner.directive = AgentDirective(upload_Bps=1e6)
    assert controller.exhausted() == "" == controller.exhausted()
    controller.owner.directive = AgentDirective(download_Bps=2e6)
    assert controller.exhausted() == ""
    assert controller.limits == [(None, None), (1e6, None), (None, 2e6)]


def test_what_the_data_sets_fetch_obeys_the_budget_of_a_day() -> None:
    fetches = FetchMeter()
    controller = Controller(fetches=fetches)
    fetches.check_undivided("a shard", 5_000_000)
    controller.owner.directive = AgentDirective(most_bytes=3_000_000, day_bytes=4_000_000)
    assert controller.exhausted() == ""
    with pytest.raises(DataError, match=r"a shard of 5 MB, .* the traffic budget of a day, 4 MB"):
        fetches.check_undivided("a shard", 5_000_000)
    with pytest.raises(BudgetSpent, match=r"needs more than the 2\.93 MB"):
        fetches.check_undivided("a shard", 4_000_000)
