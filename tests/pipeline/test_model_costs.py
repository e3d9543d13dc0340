"""The description of a staged model: bytes of training."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import gridtrain
from gridtrain.core.stages.schedule import one_forward_one_backward
from gridtrain.pipeline import Blueprint
from gridtrain.pipeline.model_costs import describe_staged_model
from gridtrain.pipeline.model_stages import ModelStages
from gridtrain.pipeline.stage_state import PipelineOptions


@pytest.mark.parametrize(
    ("dtype", "exchange", "optimizer", "bytes_per_parameter"),
    [
        # gradient + states + flat gradient + residual with its copy + the sum or the entries of an exchange
        (torch.float32, gridtrain.Dense(), torch.optim.SGD, 4 + 0 + 4 + 0 + 4),
        (torch.float32, gridtrain.Dense(), torch.optim.AdamW, 4 + 8 + 4 + 0 + 4),
        (torch.bfloat16, gridtrain.Dense(), torch.optim.SGD, 2 + 0 + 4 + 0 + 4),
        (torch.bfloat16, gridtrain.GTopK(0.01), torch.optim.SGD, 2 + 0 + 4 + 8 + 0.24),
        (torch.float32, gridtrain.GTopK(0.01, momentum=0.9), torch.optim.SGD, 4 + 0 + 4 + 16 + 0.24),
    ],
)
def test_the_copies_of_a_stage_count_what_training_holds(
    dtype: torch.dtype, exchange: Any, optimizer: Any, bytes_per_parameter: float
) -> None:
    blueprint = Blueprint(lambda: nn.Sequential(*(nn.Linear(32, 32, dtype=dtype) for _ in range(4))))
    staging = ModelStages(blueprint, 2, cuts=None, device=torch.device("cpu"))
    options = PipelineOptions(
        stages=2, micro_batches=2, exchange=exchange, loss=nn.MSELoss(), schedule=one_forward_one_backward
    )
    make = optimizer if optimizer is torch.optim.AdamW else partial(optimizer, lr=0.1)
    model = describe_staged_model(staging, options, make(staging.whole.parameters()), None, 4, ())
    assert model.copies * dtype.itemsize == pytest.approx(bytes_per_parameter, rel=0.01)
