"""A worker whose owner pauses it: two go on, it comes back, and the model is the same everywhere."""

from __future__ import annotations

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
from torch import nn

import gridtrain
from gridtrain.runtime.client.agent_link import BUDGET_EXHAUSTED, AgentDirective, NoAgent
from gridtrain.sdk.grid import Grid
from gridtrain.testing import FakeSensors
from gridtrain.training.pause import PauseController
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


class Scene:
    """Three workers; worker-1 has an owner.  Steps are held back until the scene says so.

    `seen`: by worker, (step, world size) at each of its steps.
    """

    def __init__(self, new_group: Any, exchange: Any, steps: int = STEPS, **group: Any) -> None:
        self.group = new_group(workers=3, **group)
        self.exchange, self.steps = exchange, steps
        self.owner = NoAgent()
        self.seen: dict[str, list[tuple[int, int]]] = {}
        self.models: dict[str, np.ndarray] = {}
        self.changed = threading.Condition()
        self.most_step = 5  # nobody goes beyond it
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
            with self.group.join(name, export_dir=str(self.group.export_dir), owner=owner) as grid:
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

    def let_go_on_to(self, step: int) -> None:
        with self.changed:
            self.most_step = step
            self.changed.notify_all()

    def until(self, true: Callable[[], bool]) -> None:
        with self.changed:
            while not self.changed.wait_for(true, 0.05):
                assert all(error is None for error in self.results.values()), self.results
                self._waited = getattr(self, "_waited", 0) + 1
                assert self._waited < 20 * WITHIN_S, (self.seen, self.owner.reported[-3:], self.most_step)

    def step_by_step(self, true: Callable[[], bool]) -> None:
        """As `until`; the others take a step when the first of them waits, and ten a second at most.

        Not when both do: while a generation forms the other one may be held back in the step before.
        """
        next_s = [0.0]

        def looked() -> bool:
            first = max(self.last("worker-0")[0], self.last("worker-2")[0])
            due = first == self.most_step + 1 and time.monotonic() >= next_s[0]
            if due and self.most_step < self.steps - 3:
                next_s[0] = time.monotonic() + 0.1
                self.most_step += 1
                self.changed.notify_all()
            return true()

        self.until(looked)

    def last(self, name: str) -> tuple[int, int]:
        return self.seen.get(name, [(-1, 0)])[-1]

    def is_paused(self) -> bool:
        return bool(self.owner.reported) and self.owner.reported[-1]["state"] == "paused"

    def resting(self) -> list[dict[str, Any]]:
        lines = self.group.snapshot()["resting"]
        assert isinstance(lines, list)
        return lines


@pytest.mark.parametrize("kind", EXCHANGES)
def test_one_is_paused_two_go_on_and_it_comes_back(
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

    def lead(scene: Scene) -> None:
        decision = controls.decide(sensors.read(()), 0, NOON)
        scene.owner.directive = AgentDirective(run=decision.may_train, reason=decision.text())

    scene = Scene(new_group, EXCHANGES[kind])
    with scene.group:
        threads = scene.start()
        scene.until(lambda: scene.last("worker-1")[0] >= 5)
        sensors.say(on_battery=True)
        lead(scene)
        scene.let_go_on_to(20)
        scene.until(lambda: scene.is_paused() and scene.last("worker-0") == (21, 2) == scene.last("worker-2"))
        paused_at = scene.last("worker-1")[0]
        assert paused_at in (5, 6), "within a step"
        (line,) = scene.resting()
        assert (line["name"], line["state"]) == ("worker-1", "paused")
        assert line["reason"] == "paused by its owner: battery"
        assert scene.owner.reported[-1] == {"state": "paused", "reason": "battery"}

        sensors.say(on_battery=False)
        lead(scene)
        scene.until(lambda: scene.owner.reported[-1]["state"] != "paused")
        scene.step_by_step(lambda: scene.last("worker-1")[0] > paused_at)
        scene.let_go_on_to(STEPS)
        for thread in threads:
            thread.join(WITHIN_S)
        assert scene.results == {f"worker-{number}": None for number in range(3)}
        assert scene.resting() == []
    first, *others = (scene.models[f"worker-{number}"].tobytes() for number in range(3))
    assert others == [first, first], "bit by bit"
    # With local steps a step of the run is two of the loop's.
    back = sorted({step for step, size in scene.seen["worker-1"] if step > paused_at})
    assert back and back[0] >= 20 and back == list(range(back[0], STEPS)), "it takes part in each step again"
    assert all(size == 3 for step, size in scene.seen["worker-0"] if step > back[0])
    assert "worker-1 left: paused by its owner: battery" in _reasons(scene)
    assert "this worker has returned after" in caplog.text


def _reasons(scene: Scene) -> str:
    events = scene.group.snapshot()["events"]
    return " | ".join(str(event.get("reason")) for event in events)


def test_a_run_whose_only_worker_is_paused_goes_on_from_what_it_holds(new_group: Any) -> None:
    """The residual stays with it, as there is nobody to take it over, and comes back at the first step."""
    scene = Scene(new_group, EXCHANGES["topk"], steps=12)
    scene.group._min = 1
    residuals: list[np.ndarray] = []

    def train(grid: Grid) -> None:
        model = nn.Linear(8, 4)
        optimizer = grid.optimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), model, exchange=scene.exchange
        )
        for batch in grid.batches(DATA, batch_size=2, steps=12):
            with scene.changed:
                scene.seen.setdefault("one", []).append((grid.step, grid.world_size))
                residuals.append(optimizer.residual_state()["residual"].numpy().copy())
                scene.changed.notify_all()
                scene.changed.wait_for(lambda: grid.step <= scene.most_step, WITHIN_S)
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()

    with new_group(workers=1) as group:
        done: list[Any] = []

        def one() -> None:
            with group.join("one", export_dir=str(group.export_dir), owner=scene.owner) as grid:
                train(grid)
            done.append(None)

        thread = threading.Thread(target=one, daemon=True)
        thread.start()
        scene.until(lambda: scene.last("one")[0] >= 5)
        scene.let_go_on_to(6)
        scene.until(lambda: scene.last("one")[0] >= 6)
        before = residuals[-1]
        scene.owner.directive = AgentDirective(run=False, reason="its owner said so")
        scene.let_go_on_to(12)
        scene.until(scene.is_paused)
        paused = [step for step, _ in scene.seen["one"]]
        scene.owner.directive = AgentDirective()
        thread.join(WITHIN_S)
        assert done == [None]
    steps = [step for step, _ in scene.seen["one"]]
    assert steps == list(range(12)) and paused[-1] in (6, 7), "no step is done twice, none is left out"
    again = residuals[paused[-1] + 1]
    assert again.any() and before.any()


def test_stop_after_the_step_ends_the_loop_and_leaves(new_group: Any) -> None:
    scene = Scene(new_group, EXCHANGES["gtopk"], steps=20)
    with scene.group:
        threads = scene.start()
        scene.until(lambda: scene.last("worker-1")[0] >= 5)
        scene.owner.directive = replace(scene.owner.directive, stop=True)
        scene.let_go_on_to(20)
        for thread in threads:
            thread.join(WITHIN_S)
    assert scene.results == {f"worker-{number}": None for number in range(3)}
    assert scene.last("worker-1")[0] in (5, 6) and scene.last("worker-0")[0] == 19


def test_who_rests_until_the_run_is_finished_ends_too(
    new_group: Any, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(new_group, EXCHANGES["dense"], steps=10)
    with scene.group:
        threads = scene.start()
        scene.until(lambda: scene.last("worker-1")[0] >= 5)
        scene.owner.directive = AgentDirective(run=False, reason="hot")
        scene.let_go_on_to(10)
        threads[0].join(WITHIN_S)
        threads[2].join(WITHIN_S)
        scene.owner.directive = AgentDirective()
        threads[1].join(WITHIN_S)
    assert scene.results == {f"worker-{number}": None for number in range(3)}
    assert "the run was finished while this worker was paused" in caplog.text


def test_the_days_bytes_are_never_exceeded(new_group: Any) -> None:
    """The budget is used up in the middle of the run; the next day it goes on."""
    scene = Scene(new_group, EXCHANGES["dense"], steps=STEPS)
    grids: dict[str, Grid] = {}
    join = scene.group.join

    def joined(name: str, **options: Any) -> Grid:
        grids[name] = join(name, **options)
        return grids[name]

    scene.group.join = joined
    with scene.group:
        threads = scene.start()
        scene.until(lambda: scene.last("worker-1")[0] >= 5)
        budget = grids["worker-1"].moved_bytes() + 150_000
        scene.owner.directive = AgentDirective(most_bytes=budget)
        scene.let_go_on_to(STEPS)
        threads[0].join(WITHIN_S)
        threads[2].join(WITHIN_S)
        spent = grids["worker-1"].moved_bytes()
        paused = scene.is_paused()
        scene.owner.directive = AgentDirective()
        threads[1].join(WITHIN_S)
    assert scene.results == {f"worker-{number}": None for number in range(3)}
    assert spent <= budget
    assert paused or scene.last("worker-1")[0] == STEPS - 1, "it was small enough to matter, or never reached"


def test_the_agent_is_told_that_a_step_does_not_fit() -> None:
    """A little of the day is left: without a word the agent would take the script's end for a failure."""
    session, owner = (
        SimpleNamespace(connection=SimpleNamespace(moved_bytes=900_000, received_bytes=1)),
        NoAgent(),
    )
    asked: list[Callable[[], str]] = []
    session.connection.set_control = lambda interrupts, exhausted: asked.append(exhausted)
    PauseController(session, owner, lambda: None, lambda up, down: None)  # type: ignore[arg-type,return-value]
    owner.directive = AgentDirective(most_bytes=10_000_000)
    assert asked[0]() == "" and not owner.reported
    owner.directive = AgentDirective(most_bytes=910_000)
    assert asked[0]() == "paused in the middle of a step: the day's traffic budget is used up"
    assert owner.reported == [{"state": BUDGET_EXHAUSTED}]


def test_a_cap_is_obeyed_in_the_middle_of_a_step() -> None:
    """Also while a newcomer takes over the state, which may last for hours: no turn begins then."""
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
