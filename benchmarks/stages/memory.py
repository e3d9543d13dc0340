r"""Measures the memory of a stage with and without re-materialization.

    one stage executes its part of the schedule with random activations and gradients
              ____/\_/\___ steps before: weights, gradients, libraries = the base
                          \____/^^^^\___ one step: its peak above the base is reported

The peak is of resident memory (VmHWM).
"""

from __future__ import annotations

import ctypes
from itertools import product
from typing import Any

import torch

from gridtrain.core.stages.schedule import ActionKind, fill_drain, one_forward_one_backward
from gridtrain.pipeline.stage import Stage
from gridtrain.pipeline.tensor_tree import TensorTreeSpec
from gridtrain.tools.demo.demo_model import TransformerBlock
from gridtrain.tools.demo.recipe import ModelSize
from procfs import forget_peak, in_own_process, memory_bytes

STAGES, MICRO_BATCHES = 4, 8
STAGE_SHAPE, STAGE_SAMPLES = ModelSize(width=256, layers=4, heads=4, context=128), 4
SCHEDULES = {"fill-drain": fill_drain, "1F1B": one_forward_one_backward}


def _step(stage: Stage, name: str, micro_batches: int) -> None:
    x_BTD, gradient = torch.randn(2, STAGE_SAMPLES, STAGE_SHAPE.context, STAGE_SHAPE.width)
    stage.begin(1, (STAGE_SAMPLES,) * micro_batches)
    for action in SCHEDULES[name](STAGES, micro_batches).actions[0]:
        if action.kind is ActionKind.FORWARD:
            stage.forward(action.micro_batch, x_BTD.clone())
        else:
            stage.backward(action.micro_batch, [gradient])
    stage.finish()
    for parameter in stage.parameters:
        parameter.grad = None


def of_a_stage(name: str, rematerialise: bool) -> dict[str, Any]:
    """Return the peak of the first stage, which stores the most micro-batches (`kept`)."""
    torch.set_num_threads(1)
    spec = TensorTreeSpec.of(torch.zeros(7, STAGE_SHAPE.context, STAGE_SHAPE.width), 7)
    blocks = [TransformerBlock(STAGE_SHAPE) for _ in range(STAGE_SHAPE.layers)]
    stage = Stage(blocks, input=spec, output=spec, rematerialise=rematerialise)
    _step(stage, name, 1)
    ctypes.CDLL(None).malloc_trim(0)
    base_bytes = memory_bytes("VmRSS")
    forget_peak()
    _step(stage, name, MICRO_BATCHES)
    return {
        "schedule": name,
        "rematerialise": rematerialise,
        "kept": SCHEDULES[name](STAGES, MICRO_BATCHES).max_in_flight(0),
        "peak_bytes": memory_bytes("VmHWM") - base_bytes,
        "weights_bytes": sum(p.numel() * p.element_size() for p in stage.parameters),
    }


def stages() -> dict[str, Any]:
    cases = product(SCHEDULES, (False, True))
    return {"rows": [in_own_process(of_a_stage, *case) for case in cases]}
