"""A model partitioned into stages on different workers (GPipe): activations go forward, gradients come back.

    partition(model, 4, example=x)       where to partition, how long a step takes, and why
    Blueprint(make_model, seed=0)        the model without memory; `build` makes one stage of it
    Sequence(embed, lambda x: ..., head) a chain of modules and functions
    profile(model, x)                    what each block costs here

In a run: `pipeline` takes the steps, `executor` executes a stage's schedule over a `stage_link`, `stage`
computes, `held_stage` has the stage in memory, `stage_model_state` saves and exports it.  Before:
`model_blocks` finds the blocks, `profiler` measures them, `model_partition` and `model_stages` divide them,
`blueprint` builds them.

Importing this loads no torch: names are looked up when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gridtrain.extras import require_torch

if TYPE_CHECKING:
    from gridtrain.core.stages.stage_cost import Card, Layer
    from gridtrain.pipeline.blueprint import Blueprint
    from gridtrain.pipeline.model_blocks import Sequence
    from gridtrain.pipeline.model_partition import Partition, partition
    from gridtrain.pipeline.profiler import Profile, profile

_LAZY = {
    "Blueprint": "gridtrain.pipeline.blueprint",
    "Card": "gridtrain.core.stages.stage_cost",
    "Layer": "gridtrain.core.stages.stage_cost",
    "Partition": "gridtrain.pipeline.model_partition",
    "Profile": "gridtrain.pipeline.profiler",
    "Sequence": "gridtrain.pipeline.model_blocks",
    "partition": "gridtrain.pipeline.model_partition",
    "profile": "gridtrain.pipeline.profiler",
}

__all__ = ["Blueprint", "Card", "Layer", "Partition", "Profile", "Sequence", "partition", "profile"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'gridtrain.pipeline' has no attribute {name!r}")
    if _LAZY[name].startswith("gridtrain.pipeline"):
        require_torch(f"gridtrain.pipeline.{name}")
    return getattr(importlib.import_module(_LAZY[name]), name)
