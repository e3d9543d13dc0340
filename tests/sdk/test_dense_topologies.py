"""Small models with `Dense()` in whole groups: the coordinator names the topology, with the same result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from training_loop import DATA, flat, linear, sgd, train_batch, train_steps

import gridtrain


@pytest.mark.parametrize("values", ["bf16", "int8"])
def test_the_chosen_topology_sends_the_scripts_kind_of_values(together: Any, values: str) -> None:
    def train(grid: gridtrain.Grid, number: int) -> tuple[str, tuple[float, ...], bool]:
        model = linear()
        optimizer = sgd(grid, model, gridtrain.Dense(values=values))
        for batch in grid.batches(DATA, batch_size=2, steps=8):
            chosen = grid._session.snapshot.exchange
            train_batch(model, optimizer, batch)
        has_residual = bool(optimizer.residual_state()["residual"].any())
        return chosen, tuple(flat(model).tolist()), has_residual

    found = together(train, workers=3)
    assert {each[0] for each in found} == {"Dense(topology=direct)"} and len(set(found)) == 1
    assert found[0][2], "the rounding error is in the residual"


@pytest.mark.parametrize("wrap", [lambda e: e, lambda e: gridtrain.LocalSteps(every=2, exchange=e)])
def test_both_topologies_end_with_the_same_bits(together: Any, wrap: Any) -> None:
    found: dict[str, tuple[set[str], torch.Tensor]] = {}
    for topology in ("auto", "ring", "direct"):
        seen: set[str] = set()

        def train(
            grid: gridtrain.Grid, number: int, topology: str = topology, seen: set[str] = seen
        ) -> torch.Tensor:
            model = linear()
            exchange = wrap(gridtrain.Dense(topology=topology))
            optimizer = sgd(grid, model, exchange, lr=0.01, momentum=0.9)
            for _ in train_steps(grid, model, optimizer, steps=8):
                snapshot = grid._session.connection.wait(lambda _: True, 1.0)
                assert snapshot is not None
                seen.add(snapshot.exchange)
            return flat(model)

        first, *others = together(train, workers=3)
        assert all(torch.equal(first, other) for other in others)
        found[topology] = seen, first
    assert {topology: seen for topology, (seen, _) in found.items()} == {
        "auto": {"Dense(topology=direct)"},
        "ring": {""},
        "direct": {""},
    }
    assert len({tuple(model.tolist()) for _, model in found.values()}) == 1
