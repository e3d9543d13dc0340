"""Workers that lose the coordinator for longer than it waits, and reconnect by themselves.

worker-1    step 10 .... away ....           back: receives the others' state, goes on
the others  step 10 . without it . step 25
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from brisk import LOSING, WITHIN_S
from group_status import status_of
from torch import nn
from torch.utils.data import TensorDataset
from training_loop import digest, flat, sgd, train_batch

import gridtrain

SOON = replace(LOSING, regreet_s=0.1, first_step_s=10.0)
DATA = TensorDataset(torch.arange(400.0).reshape(100, 4) / 400, torch.arange(100.0).reshape(100, 1) / 100)
STEPS = 60


class Outage:
    """Worker 1's batch of step 10 breaks the links; they are restored once worker 0 is at step 25.

    Attributes:
        models: by `grid.step` after a step, the workers' parameters.
    """

    def __init__(self, group: Any, broken: tuple[int, ...]) -> None:
        self.group, self.broken = group, broken
        self.away, self.healed, self.ready = threading.Event(), threading.Event(), threading.Barrier(3)
        self.keys: dict[int, bytes] = {}
        self.models: dict[int, set[bytes]] = defaultdict(set)

    def train(self, grid: gridtrain.Grid, number: int) -> tuple[int, int, str, float]:
        coordinator = self.group._transport.me
        self.keys[number] = grid._session.connection.loop._transport.me
        torch.manual_seed(number)
        model = nn.Linear(4, 1)
        optimizer = sgd(grid, model, lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        grid.track(scheduler=scheduler)
        self.ready.wait(WITHIN_S)
        batches = 0
        for batch in grid.batches(DATA, batch_size=2, steps=STEPS):
            batches += 1
            if grid.step == 10 and number == 1 and not self.away.is_set():
                for other in self.broken:
                    self.group.hub.disconnect(self.keys[other], coordinator)
                self.away.set()
                if len(self.broken) > 1:  # without the coordinator no worker gets further than step 10's vote
                    threading.Timer(0.5, self.heal, (coordinator,)).start()
            if len(self.broken) == 1 and grid.step == 25 and number == 0:
                # With or without worker 1: the coordinator needs a moment to notice.
                assert grid._session.connection.wait(lambda snapshot: snapshot.world_size == 2, WITHIN_S)
                self.heal(coordinator)
                self.healed.set()
            if grid.step == 40 and number == 0 and self.healed.is_set():
                # Steps take a millisecond here: without this the run could end before a worker is back.
                assert grid._session.connection.wait(lambda snapshot: snapshot.world_size == 3, WITHIN_S)
            train_batch(model, optimizer, batch)
            self.models[grid.step].add(flat(model).numpy().tobytes())
            scheduler.step()
        return grid.step, batches, digest(model, optimizer), scheduler.get_last_lr()[0]

    def heal(self, coordinator: bytes) -> None:
        for other in self.broken:
            self.group.hub.reconnect(self.keys[other], coordinator)


@pytest.mark.parametrize("broken", [(1,), (0, 1, 2)], ids=["one worker", "all workers"])
def test_a_broken_link_to_the_coordinator_costs_at_most_some_batches(
    new_group: Any, broken: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with new_group(workers=3, deadlines=SOON) as group:
        outage = Outage(group, broken)
        group.start_all(outage.train)
        results = group.finish()
        generation = status_of(group)["generation"]
    steps, batches, digests, rates = zip(*results, strict=True)
    assert steps == (STEPS, STEPS, STEPS)
    assert [step for step, models in outage.models.items() if len(models) > 1] == []
    assert len(set(digests)) == 1
    assert len(set(rates)) == 1
    assert ("this worker has rejoined and is receiving the group" in caplog.text) == (broken == (1,))
    assert "the coordinator is unreachable (" in caplog.text  # a message for volunteers
    if broken == (1,):
        assert generation >= 3  # all, without worker 1, with it again
        assert batches[1] < batches[0] == STEPS
