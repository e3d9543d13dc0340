"""A newcomer takes over the state while the others train on, and is bit-identical when it enters."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from brisk import BRISK
from torch import nn

import gridtrain
from gridtrain.config import Deadlines
from gridtrain.runtime.state_transfer import state_snapshot
from gridtrain.training.checkpoint import serialization
from gridtrain_coordinator.membership import catch_up

DATA = [(torch.tensor([float(i % 7), 1.0]), torch.tensor([2.0 * (i % 5)])) for i in range(50_000)]
EXCHANGES = [
    gridtrain.GTopK(density=0.01, momentum=0.0),
    gridtrain.TopK(density=0.01, momentum=0.9),
]
WITHIN_S = 60.0


class Stage:
    """What the workers' threads share."""

    def __init__(self) -> None:
        self.warm = threading.Event()
        self.entered = threading.Event()
        self.stop_at = 10**9
        self.first_step = self.step = 0
        self.moved = threading.Condition()


def model_of(width: int) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 1))


def train(
    grid: gridtrain.Grid,
    exchange: Any,
    stage: Stage,
    *,
    late: bool,
    width: int = 160_000,
    explicit: bool = False,
    adam: bool = False,
    shrinks: bool = False,
) -> dict[str, Any]:
    """Until `stage.stop_at`; digests of parameters and optimizer after each step, and how it came in."""
    model = model_of(width)
    if adam:
        inner: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    else:
        inner = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.0 if exchange.momentum else 0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=3, gamma=0.99)
    optimizer = grid.optimizer(inner, model, exchange=exchange, clip_norm=0.5, average_buffers_every=7)
    grid.track(scheduler=scheduler)
    seen: dict[str, Any] = {"digests": {}, "lr": {}, "first": None}
    for x, y in grid.batches(DATA, batch_size=4, steps=100_000):
        if seen["first"] is None:
            seen["first"] = stage.first_step = grid.step
            if late:
                stage.stop_at = 10**9 if shrinks else grid.step + 20
                stage.entered.set()
        seen["digests"][grid.step] = serialization.replica_digest(model, inner)
        seen["lr"][grid.step] = inner.param_groups[0]["lr"]
        with stage.moved:
            stage.step = grid.step
            stage.moved.notify_all()
        if grid.step >= stage.stop_at:
            break
        ((model(x) - y) ** 2).mean().backward()
        if explicit:
            optimizer.exchange()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if shrinks:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.999)
        if grid.step > 10:
            stage.warm.set()
    return seen


def run(
    new_group: Any, exchange: Any, workers: int = 2, deadlines: Deadlines = BRISK, **options: Any
) -> tuple[list[dict[str, Any]], list[Any]]:
    """`workers` train, one more joins; what they saw, and the coordinator's events.

    The others are some steps further when it gets its image, however slow their steps are here.
    """
    stage, image_of = Stage(), state_snapshot.StateSnapshot.build

    def later(applied: int, *parts: Any) -> state_snapshot.StateSnapshot:
        with stage.moved:
            assert stage.moved.wait_for(lambda: stage.step > applied + 5, WITHIN_S)
        return image_of(applied, *parts)

    with pytest.MonkeyPatch.context() as patched, new_group(workers=workers, deadlines=deadlines) as group:
        patched.setattr(state_snapshot.StateSnapshot, "build", later)
        for _ in range(workers):
            group.start(lambda grid, _: train(grid, exchange, stage, late=False, **options))
        assert stage.warm.wait(WITHIN_S)
        late = group.start(lambda grid, _: train(grid, exchange, stage, late=True, **options))
        assert stage.entered.wait(WITHIN_S)
        if options.get("shrinks"):
            group.wait_for("drifted", "training")  # who has what the newcomer lacks stays until it has it
            stage.stop_at = stage.step + 20
        results = [group.result(number) for number in range(workers + 1)]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        events = group.snapshot()["events"]
    assert late == workers
    return results, events


def equal(results: list[dict[str, Any]]) -> int:
    """How many steps all of them saw; they have to be the same in each."""
    steps = set.intersection(*(set(seen["digests"]) for seen in results))
    for step in steps:
        assert len({seen["digests"][step] for seen in results}) == 1, step
        assert len({seen["lr"][step] for seen in results}) == 1, step
    return len(steps)


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda e: type(e).__name__)
def test_the_others_train_on_while_it_takes_over_the_state(new_group: Any, exchange: Any) -> None:
    results, events = run(new_group, exchange)
    assert equal(results) >= 15
    kinds = [event["event"] for event in events]
    assert "following" in kinds and "not_following" not in kinds
    (caught,) = [event for event in events if event["event"] == "caught_up"]
    entered = results[-1]["first"]
    began = next(event["after_step"] for event in events if event["event"] == "following")
    print(f"image after step {began}, caught up at {caught['step']}, entered at {entered}")
    assert caught["step"] >= began, "it was not sent as one that cannot follow"
    assert entered - began >= 5, "the group made no step in the meantime"
    steps = sorted(results[0]["digests"])
    assert all(b == a + 1 for a, b in itertools.pairwise(steps)), "a member lost a step"


def test_adam_follows_too(new_group: Any) -> None:
    with pytest.warns(UserWarning, match="AdamW converges poorly with a sparse exchange"):
        results, events = run(new_group, EXCHANGES[0], width=1000, adam=True)
    assert equal(results) >= 15
    assert any(event["event"] == "caught_up" and event["step"] >= 0 for event in events)


def test_a_script_that_may_change_updates_is_not_replayed(new_group: Any) -> None:
    """What happens between exchange() and step() is the script's own: the others wait for the state then."""
    results, events = run(new_group, EXCHANGES[0], width=1000, explicit=True)
    assert equal(results) >= 15
    (caught,) = [event for event in events if event["event"] == "caught_up"]
    assert caught["step"] == -1


def test_it_is_kept_up_until_it_enters(new_group: Any) -> None:
    """Between Caught and the MembershipView the coordinator may let time pass; the others do not wait."""
    slow = replace(BRISK, generation_gap_s=3.0, ready_s=6.0)
    results, events = run(new_group, EXCHANGES[0], width=1000, deadlines=slow)
    assert equal(results) >= 15
    caught = next(event["step"] for event in events if event["event"] == "caught_up")
    print(f"caught up at {caught}, entered at {results[-1]['first']}")
    assert not any(event["event"] == "lost" for event in events if "not ready" in str(event))


def test_without_an_image_it_enters_as_ever(new_group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise MemoryError("no room for a second copy")

    monkeypatch.setattr(state_snapshot.StateSnapshot, "build", fails)
    monkeypatch.setattr(catch_up, "NO_PROGRESS_TIMEOUT_S", 1.0)
    results, events = run(new_group, EXCHANGES[0], width=1000, deadlines=replace(BRISK, ready_s=4.0))
    assert equal(results) >= 15
    assert any(event["event"] == "not_following" for event in events)


def test_what_a_script_does_besides_is_found_after_the_first_step(new_group: Any) -> None:
    """Updates do not tell of it: the newcomer's model is another one, until the states are compared."""
    results, events = run(new_group, EXCHANGES[0], width=1000, shrinks=True)
    (drifted,) = [event for event in events if event["event"] == "drifted"]
    assert drifted["step"] == results[-1]["first"]
    last = max(set.intersection(*(set(seen["digests"]) for seen in results)))
    assert len({seen["digests"][last] for seen in results}) == 1
