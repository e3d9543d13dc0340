"""A group in which the coordinator gives one worker a smaller share of the entries."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from training_loop import sgd, train_steps

import gridtrain
from gridtrain.core.messages import PeerId
from gridtrain.core.planning.entry_shares import EntryShares
from gridtrain.sparsify.error_feedback import ErrorFeedback
from gridtrain_coordinator.run import generation_plan

STEPS, SIZE, K = 8, 64, 16
DATA = [(torch.randn(SIZE, generator=torch.Generator().manual_seed(i)), torch.ones(1)) for i in range(48)]


@pytest.mark.parametrize(
    "exchange",
    [gridtrain.GTopK(density=K / SIZE, topology="tree"), gridtrain.TopK(density=K / SIZE, values="int8")],
    ids=["tree", "all-gather"],
)
def test_a_worker_with_a_slow_link_selects_fewer_entries_of_one_model(
    together: Any, monkeypatch: pytest.MonkeyPatch, exchange: Any
) -> None:
    selected: dict[str, set[int]] = {}  # by worker

    def choose(
        load: Any, links: Any, peers: Sequence[PeerId], firsts: Any, now: Any, names: Mapping[PeerId, str]
    ) -> EntryShares:
        return EntryShares({peers[-1]: 64}, "given by the test")

    def prepare(self: ErrorFeedback, gradient_N: Any, k: int, *rest: Any, **named: Any) -> Any:
        selected.setdefault(threading.current_thread().name, set()).add(k)
        return original(self, gradient_N, k, *rest, **named)

    original = ErrorFeedback.prepare
    monkeypatch.setattr(generation_plan, "choose_entry_shares", choose)
    monkeypatch.setattr(ErrorFeedback, "prepare", prepare)

    def train(grid: gridtrain.Grid, number: int) -> Any:
        torch.manual_seed(1)
        model = nn.Linear(SIZE, 1, bias=False)
        optimizer = sgd(grid, model, exchange)
        list(train_steps(grid, model, optimizer, DATA, steps=STEPS))
        return model.weight.detach().flatten().tolist()

    found = together(train, 3)
    assert found[0] == found[1] == found[2], "all have the same bits"
    assert sorted(map(tuple, selected.values())) == [(K // 4,), (K,), (K,)]
