"""A worker that waits in a step for the next generation obeys its owner there.

worker-1    dies in step 6, and the coordinator hangs
worker-0    has its gradient of step 6, and no peer to exchange it with: its owner pauses it; it rejoins
            with its own state of step 6
worker-2    joins, and both go on from that
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from brisk import LOSING, WITHIN_S
from group_snapshot import snapshot_of
from torch import nn

import gridtrain
from gridtrain.runtime.client.agent_link import AgentDirective, NoAgent
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.sdk.grid import Grid
from gridtrain.sdk.local_group import LocalGroup

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

    def hang_after_loss(self, level: str, event: str, fields: Mapping[str, object]) -> None:
        """In the coordinator's thread, which hangs once it has noticed that worker-1 is lost."""
        if event == "lost":
            self.goes_on.wait(WITHIN_S)

    def train(self, grid: Grid, name: str) -> None:
        torch.manual_seed(3)
        model = nn.Linear(8, 4)
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = grid.optimizer(inner, model, exchange=self.exchange)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.9)
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
            if name == "worker-0":
                self.rates.setdefault((step, call), []).append(inner.param_groups[0]["lr"])
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()
            scheduler.step()  # also after a step that did not commit
            if name == "worker-0" and grid.step > step:
                self.committed.append(step)


@pytest.mark.parametrize("kind", EXCHANGES)
def test_a_worker_that_waits_in_a_step_obeys_its_owner(tmp_path: Path, kind: str) -> None:
    loss, owner = LossInStep(*EXCHANGES[kind]), PauseSignal()
    ends: dict[str, BaseException | None] = {}

    def work(name: str, owner: NoAgent | None) -> None:
        try:
            with group.join(name, export_dir=str(tmp_path), owner=owner) as grid:
                loss.train(grid, name)
            ends[name] = None
        except BaseException as error:
            ends[name] = error

    with LocalGroup(min_workers=2, deadlines=QUICK, log=loss.hang_after_loss) as group:
        owners = {"worker-0": owner, "worker-1": None, "worker-2": None}
        first, victim, last = (
            threading.Thread(target=work, args=arguments, daemon=True) for arguments in owners.items()
        )
        first.start()
        victim.start()
        loss.both.wait(WITHIN_S)
        group.hub.kill(group.keys["worker-1"])
        assert loss.waits.wait(WITHIN_S), ends
        owner.directive = AgentDirective(run=False, reason="its owner said so")
        assert owner.paused.wait(WITHIN_S), ends
        assert loss.committed[-1] == 5, "the step was not taken"
        loss.goes_on.set()
        owner.directive = AgentDirective()
        last.start()
        for name, thread in (("worker-0", first), ("worker-2", last)):
            thread.join(WITHIN_S)
            assert ends.get(name, "it hangs") is None
    assert loss.committed == list(range(STEPS)), "each step once"
    for (step, call), at in loss.rates.items():
        assert at == pytest.approx([0.01 * 0.9 ** (step * loss.calls + call)] * len(at)), (step, call)
    assert len(loss.rates[6, 0]) == 2, "its batch was abandoned and repeated"


@pytest.mark.parametrize("kind", EXCHANGES)
def test_a_worker_that_waits_for_a_lost_root_obeys_its_owner(tmp_path: Path, kind: str) -> None:
    """The root dies in an open round, instead of sending its part, and the coordinator hangs."""
    loss, owner = LossInStep(*EXCHANGES[kind]), PauseSignal()
    at_root, dies = threading.Event(), threading.Event()
    ends: dict[str, BaseException | None] = {}
    sessions: dict[str, Any] = {}
    at: dict[str, int] = {}

    def train(grid: Grid, name: str) -> None:
        torch.manual_seed(3)
        model = nn.Linear(8, 4)
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = grid.optimizer(inner, model, exchange=loss.exchange)
        calls = 0
        for batch in grid.batches(DATA, batch_size=2, steps=STEPS):
            calls = calls + 1 if grid.step == 6 else 0
            if name == "root" and calls == loss.calls:
                at_root.set()
                dies.wait(WITHIN_S)
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()
            at[name] = grid.step

    def work(name: str, owner: NoAgent | None) -> None:
        try:
            with group.join(name, export_dir=str(tmp_path), owner=owner) as grid:
                sessions[name] = grid._session
                train(grid, name)
        except BaseException as error:
            ends[name] = error

    with LocalGroup(min_workers=2, deadlines=QUICK, log=loss.hang_after_loss) as group:
        root = threading.Thread(target=work, args=("root", None), daemon=True)
        root.start()
        while not snapshot_of(group)["members"]:
            root.join(0.01)
        other = threading.Thread(target=work, args=("other", owner), daemon=True)
        other.start()
        assert at_root.wait(WITHIN_S), ends
        connection = sessions["other"].connection
        assert connection.loop.mailbox.read().rank == 1

        def waits(here: WorkerSnapshot) -> bool:
            return bool(
                here.applied == 5 and here.open_round is None and connection.loop.step_rounds._submitted
            )

        assert connection.wait(waits, WITHIN_S), ends
        group.hub.kill(group.keys["root"])
        assert connection.wait(lambda here: here.failing_round is not None, WITHIN_S), ends
        owner.directive = AgentDirective(run=False, reason="its owner said so")
        assert owner.paused.wait(WITHIN_S / 2), ends
        assert at["other"] == 6, "the step was not taken"
        loss.goes_on.set()
        dies.set()
        owner.directive = AgentDirective(stop=True)
        other.join(WITHIN_S)
        assert not other.is_alive() and "other" not in ends
