"""Trains a model that is partitioned into stages on different workers (GPipe).

    partition(model, 4, example=x)        divides the model into 4 stages, and estimates the step time
    Blueprint(make_model, seed=0)         a model without memory until `build` allocates some of its blocks
    Sequence(embed, lambda x: ..., head)  a chain of modules and functions
    profile(model, x)                     measures the cost of each block on this machine

Before a run, `model_blocks` finds the blocks, `profiler` measures them, `model_partition` and `model_stages`
divide them into stages, and `blueprint` builds them.  During a run, `pipeline` takes the steps, `executor`
executes a stage's schedule over a `stage_link`, `stage` computes, `held_stage` keeps the stage in memory, and
`stage_model_state` saves and exports it.  The other modules belong to these tasks:

- partition: `model_costs` (for the coordinator), `boundary_specs` (tensors between layers)
- stage: `stage_state`, `stage_optimizer`, `autocast`, `batch_norm`, `random_seeds`
- memory: `memory_meters` (in use), `memory_limit` (how much a stage may use)
- transfer between stages: `tensor_tree`, `wire_precision`
- step: `micro_batch_count`, `batch_checks`, `fault_origin`

Importing this package does not import torch; each name is imported when it is first used.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from gridtrain.extras import require_torch

if TYPE_CHECKING:
    from gridtrain.core.stages.stage_cost import Device, Layer
    from gridtrain.pipeline.blueprint import Blueprint
    from gridtrain.pipeline.model_blocks import Sequence
    from gridtrain.pipeline.model_partition import Partition, partition
    from gridtrain.pipeline.profiler import Profile, profile

_LAZY = {
    "Blueprint": "gridtrain.pipeline.blueprint",
    "Device": "gridtrain.core.stages.stage_cost",
    "Layer": "gridtrain.core.stages.stage_cost",
    "Partition": "gridtrain.pipeline.model_partition",
    "Profile": "gridtrain.pipeline.profiler",
    "Sequence": "gridtrain.pipeline.model_blocks",
    "partition": "gridtrain.pipeline.model_partition",
    "profile": "gridtrain.pipeline.profiler",
}

__all__ = ["Blueprint", "Device", "Layer", "Partition", "Profile", "Sequence", "partition", "profile"]


def __getattr__(name: str) -> Any:
    if name == "Card":
        text = "gridtrain.pipeline.Card is called Device now; the next version drops the old name"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        name = "Device"
    if name not in _LAZY:
        raise AttributeError(f"module 'gridtrain.pipeline' has no attribute {name!r}")
    if _LAZY[name].startswith("gridtrain.pipeline"):
        require_torch(f"gridtrain.pipeline.{name}")
    return getattr(importlib.import_module(_LAZY[name]), name)
