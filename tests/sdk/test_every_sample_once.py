"""Every sample counts in exactly one committed step, for each way to read data, while workers join and leave.

worker-0   step 0 ....................................................... the end
worker-1   step 0 ............ leaves after step 8
worker-2   step 0 ......................... is killed in step 20
worker-3                                joins at step 12 ............... the end
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from brisk import LOSING, WITHIN_S
from group_status import status_of
from sharded_data import write_shards
from torch import nn
from torch.utils.data import IterableDataset
from training_loop import sgd, train_batch

import gridtrain
from gridtrain.core.messages import RoundId

SIZE, EPOCHS, LEAVES, COMES, DIES = 240, 3, 8, 12, 20
QUICK = replace(LOSING, silence_s=2.0)


class Points:
    """(x, its own number), by index."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(index % 7), 1.0]), index


class Stream(IterableDataset[tuple[torch.Tensor, int]]):
    """The same points as a stream, in another order in each pass."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        points = Points()
        return (points[(number * 7 + self.epoch) % SIZE] for number in range(SIZE))


def shards(folder: Path) -> gridtrain.Shards:
    """The same points in eight files of 1 to 60."""
    points = Points()
    return gridtrain.Shards(folder / "index.json", decode=lambda sample: points[sample["number"]])


class Recording:
    """The samples of each attempt, and the committed attempts."""

    def __init__(self, group: Any, dataset: Callable[[], Any], options: dict[str, Any]) -> None:
        self.group, self.dataset, self.options = group, dataset, options
        self.brought: dict[RoundId, list[int]] = defaultdict(list)
        self.committed: set[RoundId] = set()
        self.come, self.here, self.lock = threading.Event(), threading.Event(), threading.Lock()

    def watch(self, grid: gridtrain.Grid, in_hand: list[int]) -> None:
        session = grid._session
        run = session.run

        def run_recorded(plan: Any, *rest: Any) -> Any:
            round_id = session._turn.open_round
            if plan.samples:
                with self.lock:
                    self.brought[round_id] += in_hand
            outcome = run(plan, *rest)
            if outcome.is_committed:
                self.committed.add(round_id)
            return outcome

        session.run = run_recorded

    def train(self, grid: gridtrain.Grid, number: int) -> int:
        model = nn.Linear(2, 1)
        optimizer = sgd(grid, model, lr=0.001)
        in_hand: list[int] = []
        self.watch(grid, in_hand)
        for x, indices in grid.batches(self.dataset(), global_batch_size=12, epochs=EPOCHS, **self.options):
            in_hand[:] = indices.tolist()
            if number == 0 and grid.step == COMES and not self.come.is_set():
                self.come.set()
                assert self.here.wait(WITHIN_S)
                assert grid._session.connection.wait(lambda snapshot: snapshot.world_size == 3, WITHIN_S)
            if number == 2 and grid.step >= DIES:
                self.group.hub.kill(self.group.keys[f"worker-{number}"])
            train_batch(model, optimizer, x)
            if number == 1 and grid.step > LEAVES:
                break
        return grid.step


WAYS: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "by index": (lambda _: Points(), {}),
    "by index, two processes read ahead": (lambda _: Points(), {"num_workers": 2}),
    "as a stream": (lambda _: Stream(), {"length": SIZE}),
    "as a stream, a process reads ahead": (
        lambda _: Stream(),
        {"length": SIZE, "num_workers": 1, "prefetch_factor": 3},
    ),
    "by shards": (shards, {}),
    "by shards, two processes read ahead": (shards, {"num_workers": 2}),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_sample_counts_once(new_group: Any, way: str, tmp_path: Path) -> None:
    (dataset, options), folder = WAYS[way], tmp_path / "data"
    write_shards(folder)
    with new_group(workers=3, deadlines=QUICK) as group:
        recording = Recording(group, lambda: dataset(folder), options)
        for _ in range(3):
            group.start(recording.train)
        assert recording.come.wait(WITHIN_S), group.results
        group.start(recording.train)
        recording.here.set()
        results = {number: group.result(number) for number in (0, 1, 3)}
        shown = status_of(group)
    last = max(round_id.step for round_id in recording.committed)
    assert shown["finished"] and results[0] == results[3] == last + 1, results
    assert shown["generation"] >= 4, "all, without 1, with 3, without 2"
    steps = Counter(round_id.step for round_id in recording.committed)
    assert set(steps.values()) == {1}, "a step is committed in one round"
    taken = Counter(index for round_id in recording.committed for index in recording.brought[round_id])
    assert taken == Counter({index: EPOCHS for index in range(SIZE)})
