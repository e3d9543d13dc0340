"""A model cut into stages that different workers hold (GPipe): activations go down, gradients come back.

    partition(model, 4, example=x)       where to cut, how long a step takes, and why
    Blueprint(make_model, seed=0)        the model without memory; `build` makes one stage of it
    Sequence(embed, lambda x: ..., head) a chain of modules and functions
    profile(model, x)                    what each block costs here

Importing this loads no torch: names are looked up when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gridtrain.extras import require_torch

if TYPE_CHECKING:
    from gridtrain.pipeline.blocks import Sequence
    from gridtrain.pipeline.building import Blueprint
    from gridtrain.pipeline.partitioning import Partition, partition
    from gridtrain.pipeline.profiling import Profile, profile
    from gridtrain.protocol.stage_costs import Card, Layer

_LAZY = {
    "Blueprint": "gridtrain.pipeline.building",
    "Card": "gridtrain.protocol.stage_costs",
    "Layer": "gridtrain.protocol.stage_costs",
    "Partition": "gridtrain.pipeline.partitioning",
    "Profile": "gridtrain.pipeline.profiling",
    "Sequence": "gridtrain.pipeline.blocks",
    "partition": "gridtrain.pipeline.partitioning",
    "profile": "gridtrain.pipeline.profiling",
}

__all__ = ["Blueprint", "Card", "Layer", "Partition", "Profile", "Sequence", "partition", "profile"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'gridtrain.pipeline' has no attribute {name!r}")
    if _LAZY[name].startswith("gridtrain.pipeline"):
        require_torch(f"gridtrain.pipeline.{name}")
    return getattr(importlib.import_module(_LAZY[name]), name)
