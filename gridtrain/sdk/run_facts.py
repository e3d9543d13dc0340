"""The facts of a run as text: the settings of the script that must be equal on all workers.

They are compared as text, also with the facts in a checkpoint, so their wording is part of the format.
"""

from __future__ import annotations

import hashlib
import inspect

import numpy as np
import torch

from gridtrain.core.messages import GROUPS_FACT, Facts
from gridtrain.pipeline.pipeline import Pipeline
from gridtrain.quantities import format_count
from gridtrain.training.checkpoint.flat_gradient import canonical_parameters
from gridtrain.training.checkpoint.hyperparameters import hyperparameter_digest
from gridtrain.training.checkpoint.joint_optimizer import parts_of
from gridtrain.training.checkpoint.pretrained import adapter_facts
from gridtrain.training.optimizer import GridOptimizer


def run_facts(trainer: GridOptimizer | Pipeline, data_text: str) -> Facts:
    """Return the facts of a run.

    Args:
        data_text: the description of the data.
    """
    every = trainer.compare_every
    return (
        ("model", trainer.base.describe_model()),
        ("buffers", trainer.buffer_averaging.describe()),
        ("exchange", trainer.describe_exchange()),
        ("optimizer", describe_optimizer(trainer.inner)),
        ("clip_norm", str(trainer.clip_norm)),
        ("compared", f"every {every} steps" if every else "never"),
        ("data", data_text),
        *((("wait", trainer.wait),) if trainer.wait != "all" else ()),
        *((("weigh_by", "tokens"),) if trainer.weigh_by != "samples" else ()),
        *((("unused", trainer.unused),) if trainer.unused != "zero" else ()),
        *trainer.base.facts(),
        *adapter_facts(trainer.model),
        *_group_facts(trainer),
    )


def _group_facts(trainer: GridOptimizer | Pipeline) -> Facts:
    """Return the fact that describes which parameters are in which of the optimizer's groups, and in which
    order: the optimizer's state identifies parameters by their position."""
    named = canonical_parameters(trainer.model)
    names = {id(parameter): name for name, parameter in named}
    # A parameter that the model lacks is an error in the first step, with a better message.
    groups = [[names.get(id(each), "") for each in group["params"]] for group in trainer.inner.param_groups]
    if groups == [[name for name, parameter in named if parameter.requires_grad]]:
        return ()
    digest = hashlib.blake2b(repr(groups).encode(), digest_size=6).hexdigest()
    return ((GROUPS_FACT, f"{format_count(len(groups), 'group')}, digest {digest}"),)


def describe_optimizer(inner: torch.optim.Optimizer) -> str:
    """Return a description of the optimizer, for comparison between workers.

    It names the class, the learning rate of the first parameter group, and that group's other options that
    are not defaults; with several groups or a long text, it also contains a digest of all settings.
    """
    settings = hyperparameter_digest(inner).hex()[:12]
    text = " + ".join(_describe_one(each) for each in parts_of(inner))
    return text if len(text) <= 400 else f"{text[:360]}... {settings}"


def _describe_one(inner: torch.optim.Optimizer) -> str:
    parameters = inspect.signature(type(inner)).parameters
    # Adam of torch before 2.7 has this field, but no parameter for it (`joint_optimizer.as_one`).
    defaults = {"decoupled_weight_decay": False} | {name: p.default for name, p in parameters.items()}
    first, *others = inner.param_groups
    options = {
        name: v.tolist() if isinstance(v, torch.Tensor | np.generic) else v for name, v in first.items()
    }
    shown = ", ".join(
        f"{name}={value}"
        for name, value in sorted(options.items())
        if name == "lr" or (isinstance(value, int | float | str | tuple) and value != defaults.get(name))
    )
    text = f"{type(inner).__name__}({shown})"
    if others:
        settings = hyperparameter_digest(inner).hex()[:12]
        text += f" and {len(others)} more group{'s' * (len(others) > 1)}, settings {settings}"
    return text
