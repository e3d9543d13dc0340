"""Small models with `Dense()` in whole groups: the coordinator names the topology, with the same result."""

from __future__ import annotations

from typing import Any

import pytest
from training_loop import DATA, flat, linear, sgd, train_batch

import gridtrain
from gridtrain.core.planning import topology_choice


@pytest.mark.parametrize("values", ["bf16", "int8"])
def test_the_chosen_topology_sends_the_scripts_kind_of_values(
    together: Any, values: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine, the rates that are measured in memory differ, as those of unequal links.
    monkeypatch.setattr(topology_choice, "MIN_LINK_SHARE", 0.0)

    def train(grid: gridtrain.Grid, number: int) -> tuple[str, tuple[float, ...], bool]:
        model = linear()
        optimizer = sgd(grid, model, gridtrain.Dense(values=values))
        for batch in grid.batches(DATA, batch_size=2, steps=8):
            chosen = grid._session.snapshot.exchange
            train_batch(model, optimizer, batch)
        has_residual = bool(optimizer.residual.state()["residual"].any())
        return chosen, tuple(flat(model).tolist()), has_residual

    found = together(train, workers=3)
    assert {each[0] for each in found} == {"Dense(topology=direct)"} and len(set(found)) == 1
    assert found[0][2], "the rounding error is in the residual"
