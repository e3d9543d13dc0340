"""Gradients are those of torch.distributed.pipelining on the same partition, without any difference.

`oracle.py` runs it in separate processes, over gloo on loopback.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from memory_stage_link import memory_stage_links, run_in_threads
from pipeline_models import bounds_of
from torch import Tensor, nn

from gridtrain.core.stages.schedule import divide_samples, fill_drain, one_forward_one_backward
from gridtrain.pipeline.boundary_specs import infer_boundary_specs
from gridtrain.pipeline.executor import StageExecutor
from gridtrain.pipeline.stage import Stage

pytestmark = pytest.mark.integration

OURS = {"GPipe": fill_drain, "1F1B": one_forward_one_backward}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[str, Tensor]]:
    pytest.importorskip(
        "torch.distributed.pipelining", reason="this torch has no torch.distributed.pipelining"
    )
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("this torch has no gloo")
    path = tmp_path_factory.mktemp("oracle") / "gradients.pt"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, str(Path(oracle.__file__)), str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[Any, dict[str, Tensor]] = torch.load(path)
    return found


def ours(stages: int, micro_batches: int, schedule: str, rematerialise: bool) -> dict[str, Tensor]:
    layers = oracle.layers_of()
    inputs, targets = oracle.batch()
    specs = infer_boundary_specs(layers, inputs)
    own_stages = [
        Stage(
            copy.deepcopy(layers[start:stop]),
            input=specs[start - 1] if start else None,
            output=specs[stop - 1] if stop < len(layers) else None,
            loss=nn.functional.mse_loss if stop == len(layers) else None,
            first_layer=start,
            rematerialise=rematerialise,
        )
        for start, stop in bounds_of(stages)
    ]
    links, sizes = memory_stage_links(stages), divide_samples(oracle.SAMPLES, micro_batches)

    def work(s: int) -> None:
        runner = StageExecutor(own_stages[s], s, stages, schedule=OURS[schedule])
        runner.run(links[s], seed=oracle.SEED, sizes=sizes, inputs=inputs, targets=targets)

    run_in_threads([lambda s=s: work(s) for s in range(stages)])  # type: ignore[misc]
    own = [layer for stage in own_stages for layer in stage.layers]
    return {f"{i}.{n}": p.grad for i, layer in enumerate(own) for n, p in layer.named_parameters()}


def test_no_difference_to_torch(theirs: dict[Any, dict[str, Tensor]]) -> None:
    largest = 0.0
    for (stages, micro_batches, schedule), expected in theirs.items():
        for rematerialise in (True, False):
            got = ours(stages, micro_batches, schedule, rematerialise)
            assert got.keys() == expected.keys()
            difference = max((got[name] - gradient).abs().max().item() for name, gradient in expected.items())
            largest = max(largest, difference)
            assert difference == 0.0, (stages, micro_batches, schedule, rematerialise)
    print(f"\ntorch.distributed.pipelining, {len(theirs)} cases: largest difference {largest:g}")
    assert {(stages, m) for stages, m, _ in theirs} == set(oracle.CASES)
