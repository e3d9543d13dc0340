"""A single value per channel in a batch norm without running statistics."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gridtrain.pipeline.batch_norm import MiniBatchStatistics


@pytest.mark.parametrize("size", [1.0, 1e6])
def test_of_a_single_value_exactly_the_bias_remains(size: float) -> None:
    norm = nn.BatchNorm1d(3, track_running_stats=False)
    nn.init.normal_(norm.bias)
    before = norm.forward
    statistics = MiniBatchStatistics([norm])
    single = (size * torch.randn(1, 3)).requires_grad_()
    with statistics.forward(first_time=True):
        output = norm(single)
        output.sum().backward()
        several = norm(torch.randn(2, 3))
    assert torch.equal(output[0], norm.bias) and statistics.lone is norm
    assert several.shape == (2, 3) and norm.forward == before
    assert single.grad is not None and not single.grad.any()
    assert norm.weight.grad is not None and not norm.weight.grad.any()
    assert norm.bias.grad is not None and norm.bias.grad.tolist() == [1.0, 1.0, 1.0]


def test_a_value_that_is_not_finite_is_not_hidden() -> None:
    norm = nn.BatchNorm1d(3, track_running_stats=False)
    with MiniBatchStatistics([norm]).forward(first_time=True):
        assert norm(torch.full((1, 3), float("nan"))).isnan().all()
