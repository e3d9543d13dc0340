r"""Measures the peak memory of a stage with and without re-materialization, in a process for each case.

The stage executes its part of the schedule with random activations and gradients, so its process has no other
stages.  Run as a program, this module measures a case and prints JSON.

    resident memory   ____/\_/\___ steps before: weights, gradients, libraries = the base
                                  \____/^^^^\___ one step: its peak above the base is reported
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from gridtrain.core.stages.schedule import ActionKind, fill_drain, one_forward_one_backward
from gridtrain.pipeline.stage import Stage
from gridtrain.pipeline.tensor_tree import TensorTreeSpec
from gridtrain.tools.demo.byte_gpt import TransformerBlock
from gridtrain.tools.demo.recipe import ModelSize

SHAPE = ModelSize(width=256, layers=4, heads=4, context=128)
SAMPLES, STAGES, MICRO_BATCHES = 4, 4, 8
SCHEDULES = {"fill-drain": fill_drain, "1F1B": one_forward_one_backward}


@dataclass(frozen=True)
class Peak:
    """The peak of the first stage, which stores the most micro-batches (`kept`)."""

    schedule: str
    rematerialise: bool
    kept: int
    peak_bytes: int
    weights_bytes: int


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _step(stage: Stage, name: str, micro_batches: int) -> None:
    x_BTD = torch.randn(SAMPLES, SHAPE.context, SHAPE.width)
    gradient = torch.randn(SAMPLES, SHAPE.context, SHAPE.width)
    schedule = SCHEDULES[name](STAGES, micro_batches)
    stage.begin(1, (SAMPLES,) * micro_batches)
    for action in schedule.actions[0]:
        if action.kind is ActionKind.FORWARD:
            stage.forward(action.micro_batch, x_BTD.clone())
        else:
            stage.backward(action.micro_batch, [gradient])
    stage.finish()
    for parameter in stage.parameters:
        parameter.grad = None


def one(name: str, rematerialise: bool) -> Peak:
    torch.set_num_threads(1)
    spec = TensorTreeSpec.of(torch.zeros(7, SHAPE.context, SHAPE.width), 7)
    blocks = [TransformerBlock(SHAPE) for _ in range(SHAPE.layers)]
    stage = Stage(blocks, input=spec, output=spec, rematerialise=rematerialise)
    _step(stage, name, 1)
    ctypes.CDLL(None).malloc_trim(0)
    base_bytes = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak until now
    _step(stage, name, MICRO_BATCHES)
    peak_bytes = _status_bytes("VmHWM") - base_bytes
    kept = SCHEDULES[name](STAGES, MICRO_BATCHES).max_in_flight(0)
    weights_bytes = sum(p.numel() * p.element_size() for p in stage.parameters)
    return Peak(name, rematerialise, kept, peak_bytes, weights_bytes)


def all_cases() -> list[Peak]:
    found = []
    for name in SCHEDULES:
        for rematerialise in (False, True):
            command = [sys.executable, __file__, name, str(int(rematerialise))]
            path = os.pathsep.join(entry for entry in sys.path if entry)
            done = subprocess.run(
                command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True
            )
            found.append(Peak(**json.loads(done.stdout)))
    return found


if __name__ == "__main__":
    print(json.dumps(asdict(one(sys.argv[1], bool(int(sys.argv[2]))))))
