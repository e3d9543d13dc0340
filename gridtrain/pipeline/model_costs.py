"""Describes a model to the coordinator: the sizes and times of its layers, and of training.

A profile contains the times of the layers and the sizes of parameters and activations.  Without a profile,
only the sizes of parameters are known, which are counted on the meta device.  The run uses the first worker's
values; the sizes must be the same on all workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from gridtrain.config import Exchange
from gridtrain.core.messages import MAX_LAYERS, LayerCosts, StagedModel
from gridtrain.core.planning.worker_memory_estimate import estimate_worker_memory
from gridtrain.core.stages.stage_cost import Layer
from gridtrain.errors import ConfigError
from gridtrain.pipeline.model_partition import optimizer_state_copies
from gridtrain.pipeline.model_stages import ModelStages
from gridtrain.pipeline.profiler import Profile
from gridtrain.pipeline.stage_state import PipelineOptions
from gridtrain.training.checkpoint import serialization

DEFAULT_OPTIMIZER_COPIES = 2.0
"""The assumed size of an unknown optimizer's state, as a multiple of the parameters; it is the size of Adam's
state."""

MIN_DIVIDED_SAMPLES = 4
"""The number of micro-batches per stage that is assumed for the costs if `micro_batches` is "auto"."""


def describe_staged_model(
    staging: ModelStages,
    options: PipelineOptions,
    optimizer: torch.optim.Optimizer,
    profile: Profile | Sequence[Layer] | None,
    batch_size: int,
    trackers: Iterable[serialization.Stateful],
) -> StagedModel:
    """Return the description of the model for `Setup.model`.

    Args:
        optimizer: the optimizer of the whole model, on the meta device.
        profile: the measured costs of the layers.  If None, the description contains no times or sizes of
            activations, and the coordinator assumes that times are proportional to the bytes of parameters.
        batch_size: the number of samples that a replica of the model processes in each step.
        trackers: the tracked objects.  If one of them has tensors, these belong to one stage; the description
            then omits the layers, so that the model is not repartitioned.
    """
    measured = None if profile is None else Profile.of(profile, len(staging.blueprint.blocks))
    layers = _unmeasured_layers(staging) if measured is None else measured.layers
    divided = options.micro_batches or MIN_DIVIDED_SAMPLES * staging.stages
    keeps = any(_has_tensors(tracker.state_dict()) for tracker in trackers)
    known = len(layers) <= MAX_LAYERS and not keeps
    return StagedModel(
        cuts=staging.cuts,
        blocks=tuple(map(_block, layers)) if known else (),
        samples=-(-max(1, batch_size) // divided),
        micro_batches=divided,
        copies=_copies(options.exchange, optimizer),
        input_bytes=0 if measured is None else measured.input_bytes,
        rematerialise=options.rematerialise,
        fill_drain=options.schedule_name == "fill-drain",
        ahead=options.ahead,
        fixed=staging.has_explicit_cuts,
    )


def _unmeasured_layers(staging: ModelStages) -> Sequence[Layer]:
    model = staging.blueprint
    return [
        Layer(name, 0.0, 0.0, parameter_bytes=nbytes, output_bytes=0, trainable_bytes=_trainable(block))
        for name, nbytes, block in zip(model.names, model.parameter_bytes, model.blocks, strict=True)
    ]


def _block(layer: Layer) -> LayerCosts:
    return LayerCosts(
        parameter_bytes=layer.parameter_bytes,
        trainable_bytes=layer.trainable,
        output_bytes=layer.output_bytes,
        gradient_bytes=layer.gradient,
        kept_bytes=layer.kept_bytes,
        work_bytes=(layer.work_bytes or 0),
        forward_s=layer.forward_s,
        backward_s=layer.backward_s,
        overhead_s=layer.overhead_s,
    )


def _copies(exchange: Exchange, optimizer: torch.optim.Optimizer) -> float:
    """Return how many bytes training needs per byte of trainable parameters, in addition to the parameters.

    The bytes hold the gradients, flat vector, optimizer state, residual and buffers of the exchange.
    """
    try:
        states = optimizer_state_copies(optimizer)
    except ConfigError:
        states = DEFAULT_OPTIMIZER_COPIES
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    count = max(1, sum(p.numel() for p in trained))
    held = estimate_worker_memory(
        exchange,
        parameters=count,
        workers=2,  # the number of replicas is not known yet
        optimizer_values=states,
        parameter_bytes=sum(p.numel() * p.element_size() for p in trained) / count or 1.0,
        logged_steps=0,  # a stage keeps no log
    )
    return (held.always + held.exchange - held.parameter) / held.parameter


def _trainable(block: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in block.parameters() if p.requires_grad)


def _has_tensors(state: object) -> bool:
    if isinstance(state, dict):
        return any(map(_has_tensors, state.values()))
    if isinstance(state, list | tuple):
        return any(map(_has_tensors, state))
    return isinstance(state, Tensor) and state.numel() > 1
