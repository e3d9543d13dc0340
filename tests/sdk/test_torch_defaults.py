"""torch's default device and dtype, which a script may change, are not those of gridtrain's own tensors.

Without a GPU, "meta" stands for "cuda" as the default device: its tensors have no values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_loop import digest

import gridtrain
from gridtrain.training.data.fetch_meter import FetchMeter

EXCHANGES = {
    "dense": gridtrain.Dense(),
    "gtopk": gridtrain.GTopK(density=0.3, momentum=0.9, chunk=16),
    "local": gridtrain.LocalSteps(2, gridtrain.GTopK(density=0.3), outer_momentum=0.9),
    "overlap": gridtrain.LocalSteps(2, gridtrain.GTopK(density=0.3), overlap=True),
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def model_of() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)).to("cpu", torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    return model


def train(grid: gridtrain.Grid, exchange: Any, default_device: str | None) -> tuple[str, int]:
    """Train a float32 model on the CPU under torch's default device, which each thread has its own."""
    generator = torch.Generator().manual_seed(0)
    data = list(torch.randn(32, 4, generator=generator, dtype=torch.float32))
    model = model_of()
    with nullcontext() if default_device is None else torch.device(default_device):
        assert FetchMeter().fetched_bytes == 0, "as `grid` makes one, too, where `join` is called"
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = grid.optimizer(inner, model, exchange=exchange, average_buffers_every=2)
        for batch in grid.batches(data, batch_size=4, steps=6, collate_fn=lambda rows: torch.stack(rows)):
            loss: Tensor = model(batch).square().mean()
            grid.mean(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return digest(model, optimizer), optimizer.skipped_steps


@pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)
def test_a_group_trains_in_the_same_way_with_any_defaults(together: Any, exchange: Any) -> None:
    plain = together(lambda grid, number: train(grid, exchange, None))
    assert plain[0] == plain[1] and plain[0][1] == 0
    assert together(lambda grid, number: train(grid, exchange, "meta")) == plain
    with default_dtype(torch.bfloat16):
        assert together(lambda grid, number: train(grid, exchange, None)) == plain
