"""A worker that waits in a step for the next generation obeys its owner there.

worker-1    dies in step 6, and the coordinator hangs
worker-0    has its gradient of step 6, and no peer to exchange it with: its owner pauses it; it rejoins
            with its own state of step 6
worker-2    joins, and both go on from that
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from brisk import LOSING, WITHIN_S
from group_status import status_of
from torch import nn
from training_loop import sgd, train_batch

import gridtrain
from gridtrain.runtime.client.agent_link import AgentDirective, NoAgent
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.sdk.grid import Grid

DATA = [torch.full((8,), float(i % 7) - 3.0) for i in range(64)]
STEPS = 10
QUICK = replace(LOSING, handover_s=0.2, regather_s=0.5)  # there is no other worker to wait for
EXCHANGES = {
    "topk": (gridtrain.TopK(density=0.25), 1),
    "local": (gridtrain.LocalSteps(every=2, exchange=gridtrain.GTopK(density=0.5)), 2),
}


class PauseSignal(NoAgent):
    """An agent that signals when the worker reports a pause."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = threading.Event()

    def report(self, **state: Any) -> None:
        super().report(**state)
        if state["state"] == "paused":
            self.paused.set()


class LossInStep:
    """Two workers; in the last call of step 6 one dies and the other waits until that is noticed."""

    def __init__(self, exchange: Any, calls: int) -> None:
        self.exchange, self.calls = exchange, calls
        self.both, self.waits = threading.Barrier(3), threading.Event()
        self.goes_on = threading.Event()
        self.rates: dict[tuple[int, int], list[float]] = {}  # of worker-0, by step and call
        self.committed: list[int] = []

    def hang_after_loss(self, event: str) -> None:
        """In the coordinator's thread, which hangs once it has noticed that a worker is lost."""
        if event == "lost":
            self.goes_on.wait(WITHIN_S)

    def train(self, grid: Grid, number: int) -> None:
        torch.manual_seed(3)
        model = nn.Linear(8, 4)
        optimizer = sgd(grid, model, self.exchange)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        grid.track(scheduler=scheduler)
        step, call = -1, 0
        for batch in grid.batches(DATA, batch_size=2, steps=STEPS):
            call = (call + 1) % self.calls if grid.step == step else 0
            step = grid.step
            if step == 6 and call == self.calls - 1 and not self.waits.is_set():
                self.both.wait(WITHIN_S)
                gone = grid._session.connection.wait(lambda p: p.open_round is None, WITHIN_S)
                assert gone is not None
                self.waits.set()
            if number == 0:
                self.rates.setdefault((step, call), []).append(optimizer.param_groups[0]["lr"])
            train_batch(model, optimizer, batch)
            scheduler.step()  # also after a step that did not commit
            if number == 0 and grid.step > step:
                self.committed.append(step)


@pytest.mark.parametrize("kind", EXCHANGES)
def test_a_worker_that_waits_in_a_step_obeys_its_owner(new_group: Any, kind: str) -> None:
    loss, owner = LossInStep(*EXCHANGES[kind]), PauseSignal()
    with new_group(workers=2, deadlines=QUICK, on_event=loss.hang_after_loss) as group:
        first, victim = group.start(loss.train, owner=owner), group.start(loss.train)
        loss.both.wait(WITHIN_S)
        group.hub.kill(group.keys[f"worker-{victim}"])
        assert loss.waits.wait(WITHIN_S), group.results
        owner.directive = AgentDirective(run=False, reason="its owner said so")
        assert owner.paused.wait(WITHIN_S), group.results
        assert loss.committed[-1] == 5, "the step was not taken"
        loss.goes_on.set()
        owner.directive = AgentDirective()
        last = group.start(loss.train)
        assert (group.result(first), group.result(last)) == (None, None)
    assert loss.committed == list(range(STEPS)), "each step once"
    for (step, call), at in loss.rates.items():
        assert at == pytest.approx([0.01 * 0.9 ** (step * loss.calls + call)] * len(at)), (step, call)
    assert len(loss.rates[6, 0]) == 2, "its batch was abandoned and repeated"


@pytest.mark.parametrize("kind", EXCHANGES)
def test_a_worker_that_waits_for_a_lost_root_obeys_its_owner(new_group: Any, kind: str) -> None:
    """The root dies in an open round, instead of sending its part, and the coordinator hangs."""
    loss, owner = LossInStep(*EXCHANGES[kind]), PauseSignal()
    at_root, dies = threading.Event(), threading.Event()
    sessions: dict[int, Any] = {}
    at: dict[int, int] = {}

    def train(grid: Grid, number: int) -> None:
        sessions[number] = grid._session
        torch.manual_seed(3)
        model = nn.Linear(8, 4)
        optimizer = sgd(grid, model, loss.exchange)
        calls = 0
        for batch in grid.batches(DATA, batch_size=2, steps=STEPS):
            calls = calls + 1 if grid.step == 6 else 0
            if number == 0 and calls == loss.calls:
                at_root.set()
                dies.wait(WITHIN_S)
            train_batch(model, optimizer, batch)
            at[number] = grid.step

    with new_group(workers=2, deadlines=QUICK, on_event=loss.hang_after_loss) as group:
        root = group.start(train)
        while not status_of(group)["members"]:
            group.threads[root].join(0.01)
        other = group.start(train, owner=owner)
        assert at_root.wait(WITHIN_S), group.results
        connection = sessions[other].connection
        assert connection.loop.mailbox.read().rank == 1

        def waits(here: WorkerSnapshot) -> bool:
            return bool(
                here.applied == 5 and here.open_round is None and connection.loop.step_rounds._submitted
            )

        assert connection.wait(waits, WITHIN_S), group.results
        group.hub.kill(group.keys[f"worker-{root}"])
        assert connection.wait(lambda here: here.failing_round is not None, WITHIN_S), group.results
        owner.directive = AgentDirective(run=False, reason="its owner said so")
        assert owner.paused.wait(WITHIN_S / 2), group.results
        assert at[other] == 6, "the step was not taken"
        loss.goes_on.set()
        dies.set()
        owner.directive = AgentDirective(stop=True)
        assert group.result(other) is None
