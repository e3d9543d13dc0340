"""Catch-up: a newcomer receives the state while the others train, and is bit-identical when it enters."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from brisk import BRISK, WITHIN_S
from group_status import status_of
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


class Progress:
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
    progress: Progress,
    *,
    late: bool,
    width: int = 40_000,
    explicit: bool = False,
    adam: bool = False,
    shrinks: bool = False,
) -> dict[str, Any]:
    """Train until `progress.stop_at`; return digests and learning rates by step, and the first step."""
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
            seen["first"] = progress.first_step = grid.step
            if late:
                progress.stop_at = grid.step + 20
                progress.entered.set()
        seen["digests"][grid.step] = serialization.replica_digest(model, inner)
        seen["lr"][grid.step] = inner.param_groups[0]["lr"]
        with progress.moved:
            progress.step = grid.step
            progress.moved.notify_all()
        if grid.step >= progress.stop_at:
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
            progress.warm.set()
    return seen


def run(
    new_group: Any, exchange: Any, workers: int = 2, deadlines: Deadlines = BRISK, **options: Any
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Let one worker join `workers` that train; return their results, and the coordinator's events.

    The snapshot is sent some steps after it was taken, also where steps are slow.
    """
    progress, build_snapshot = Progress(), state_snapshot.StateSnapshot.build

    def build_later(applied: int, *parts: Any) -> state_snapshot.StateSnapshot:
        with progress.moved:
            assert progress.moved.wait_for(lambda: progress.step > applied + 5, WITHIN_S)
        return build_snapshot(applied, *parts)

    with pytest.MonkeyPatch.context() as patched, new_group(workers=workers, deadlines=deadlines) as group:
        patched.setattr(state_snapshot.StateSnapshot, "build", build_later)
        for _ in range(workers):
            group.start(lambda grid, _: train(grid, exchange, progress, late=False, **options))
        assert progress.warm.wait(WITHIN_S)
        late = group.start(lambda grid, _: train(grid, exchange, progress, late=True, **options))
        assert progress.entered.wait(WITHIN_S)
        results = group.finish()
        events = status_of(group)["events"]
    assert late == workers
    return results, events


def equal(results: list[dict[str, Any]]) -> int:
    """The number of steps that all workers took; their states must be equal after each."""
    steps = set.intersection(*(set(seen["digests"]) for seen in results))
    for step in steps:
        assert len({seen["digests"][step] for seen in results}) == 1, step
        assert len({seen["lr"][step] for seen in results}) == 1, step
    return len(steps)


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda e: type(e).__name__)
def test_the_others_train_while_a_newcomer_receives_the_state(new_group: Any, exchange: Any) -> None:
    results, events = run(new_group, exchange)
    assert equal(results) >= 15
    kinds = [event["event"] for event in events]
    assert "following" in kinds and "not_following" not in kinds
    (caught,) = [event for event in events if event["event"] == "caught_up"]
    entered = results[-1]["first"]
    began = next(event["after_step"] for event in events if event["event"] == "following")
    print(f"snapshot after step {began}, caught up at {caught['step']}, entered at {entered}")
    assert caught["step"] >= began, "the state was not sent at once"
    assert entered - began >= 5, "the group made no step in the meantime"
    steps = sorted(results[0]["digests"])
    assert all(b == a + 1 for a, b in itertools.pairwise(steps)), "a member lost a step"


def test_a_newcomer_catches_up_with_adam(new_group: Any) -> None:
    with pytest.warns(UserWarning, match="AdamW converges poorly with a sparse exchange"):
        results, events = run(new_group, EXCHANGES[0], width=1000, adam=True)
    assert equal(results) >= 15
    assert any(event["event"] == "caught_up" and event["step"] >= 1 for event in events)


@pytest.mark.parametrize("option", ["explicit", "shrinks"])
def test_updates_that_do_not_determine_a_step_are_not_replayed(new_group: Any, option: str) -> None:
    """The script may change updates, or changes parameters after its steps; the others wait while the state
    is sent."""
    results, events = run(new_group, EXCHANGES[0], width=1000, **{option: True})
    assert equal(results) >= 15
    kinds = [event["event"] for event in events]
    assert kinds.count("not_following") == 1 and "caught_up" not in kinds


def test_a_newcomer_receives_updates_until_it_enters(new_group: Any) -> None:
    """The coordinator may delay the MembershipView after Caught; the others do not wait."""
    slow = replace(BRISK, generation_gap_s=1.0, ready_s=6.0)
    results, events = run(new_group, EXCHANGES[0], width=1000, deadlines=slow)
    assert equal(results) >= 15
    caught = next(event["step"] for event in events if event["event"] == "caught_up")
    print(f"caught up at {caught}, entered at {results[-1]['first']}")
    assert not any(event["event"] == "lost" for event in events if "not ready" in str(event))


def test_a_newcomer_enters_without_catch_up_if_no_snapshot_can_be_taken(
    new_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise MemoryError("no room for a second copy")

    monkeypatch.setattr(state_snapshot.StateSnapshot, "build", fails)
    monkeypatch.setattr(catch_up, "NO_PROGRESS_TIMEOUT_S", 1.0)
    results, events = run(new_group, EXCHANGES[0], width=1000, deadlines=replace(BRISK, ready_s=4.0))
    assert equal(results) >= 15
    assert any(event["event"] == "not_following" for event in events)
