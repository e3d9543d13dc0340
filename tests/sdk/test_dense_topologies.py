"""Small models with `Dense()` in whole groups: the coordinator names the topology, with the same result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gridtrain

DATA = [(torch.tensor([float(i), 1.0]), torch.tensor([float(i)])) for i in range(-6, 6)]


def net() -> nn.Linear:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, 0.3)
    nn.init.constant_(model.bias, -0.7)
    return model


@pytest.mark.parametrize("values", ["bf16", "int8"])
def test_the_chosen_topology_sends_the_scripts_kind_of_values(outcomes: Any, values: str) -> None:
    def train(grid: gridtrain.Grid, number: int) -> tuple[str, tuple[float, ...], bool]:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = grid.optimizer(inner, model, exchange=gridtrain.Dense(values=values))
        for inputs, targets in grid.batches(DATA, batch_size=2, steps=8):
            chosen = grid._session.snapshot.exchange
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        parameters = torch.cat([model.weight.detach().flatten(), model.bias.detach()])
        has_residual = bool(optimizer.residual_state()["residual"].any())
        return chosen, tuple(parameters.tolist()), has_residual

    found = outcomes(train, workers=3)
    assert {each[0] for each in found} == {"Dense(topology=direct)"} and len(set(found)) == 1
    assert found[0][2], "the rounding error is in the residual"


@pytest.mark.parametrize("wrap", [lambda e: e, lambda e: gridtrain.LocalSteps(every=2, exchange=e)])
def test_both_topologies_end_with_the_same_bits(outcomes: Any, wrap: Any) -> None:
    found: dict[str, tuple[set[str], torch.Tensor]] = {}
    for topology in ("auto", "ring", "direct"):
        seen: set[str] = set()

        def train(
            grid: gridtrain.Grid, number: int, topology: str = topology, seen: set[str] = seen
        ) -> torch.Tensor:
            model = net()
            exchange = wrap(gridtrain.Dense(topology=topology))
            inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            optimizer = grid.optimizer(inner, model, exchange=exchange)
            for inputs, targets in grid.batches(DATA, batch_size=2, steps=8):
                (model(inputs) - targets).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                snapshot = grid._session.connection.wait(lambda _: True, 1.0)
                assert snapshot is not None
                seen.add(snapshot.exchange)
            return torch.cat([model.weight.detach().flatten(), model.bias.detach()])

        first, *others = outcomes(train, workers=3)
        assert isinstance(first, torch.Tensor), first
        assert all(torch.equal(first, other) for other in others)
        found[topology] = seen, first
    assert {topology: seen for topology, (seen, _) in found.items()} == {
        "auto": {"Dense(topology=direct)"},
        "ring": {""},
        "direct": {""},
    }
    assert len({tuple(model.tolist()) for _, model in found.values()}) == 1
