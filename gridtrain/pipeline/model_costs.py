"""Describes a model in stages to the coordinator, which partitions it again when workers are lost.

Sizes are counted on the meta device; times and activations come from a profile, if there is one.  The first
worker's numbers count for the run; the sizes must be equal on all workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from gridtrain.config import Exchange, GTopK, TopK
from gridtrain.core.messages import MAX_LAYERS, LayerCosts, StagedModel
from gridtrain.core.stages.stage_cost import Layer
from gridtrain.errors import ConfigError
from gridtrain.pipeline.model_partition import optimizer_state_copies
from gridtrain.pipeline.model_stages import ModelStages
from gridtrain.pipeline.profiler import Profile
from gridtrain.pipeline.stage_state import PipelineOptions
from gridtrain.training.checkpoint import serialization

DEFAULT_OPTIMIZER_COPIES = 2.0
"""State of an unknown optimizer as a multiple of the parameters, as Adam's."""

MIN_DIVIDED_SAMPLES = 4
"""Micro-batches for each stage with which "auto" begins, and may stay."""

USABLE_MEMORY_SHARE = 0.9
"""Of a GPU's memory: the rest is the framework's."""


def describe_staged_model(
    staging: ModelStages,
    options: PipelineOptions,
    optimizer: torch.optim.Optimizer,
    profile: Profile | Sequence[Layer] | None,
    batch_size: int,
    trackers: Iterable[serialization.Stateful],
) -> StagedModel:
    """The value of `Setup.model`.

    Args:
        optimizer: of the whole model, on the meta device.
        profile: measured; None: a block's time counts as its bytes, and activations are not counted.
        batch_size: samples of a replica's step.
        trackers: if one has tensors, the model is not partitioned again, because they belong to one stage.
    """
    layers, divided = _layers(staging, profile), options.micro_batches or MIN_DIVIDED_SAMPLES * staging.stages
    keeps = any(_has_tensors(tracker.state_dict()) for tracker in trackers)
    known = len(layers) <= MAX_LAYERS and not keeps
    return StagedModel(
        cuts=staging.cuts,
        blocks=tuple(map(_block, layers)) if known else (),
        samples=-(-max(1, batch_size) // divided),
        micro_batches=divided,
        copies=_copies(options.exchange, optimizer),
        input_bytes=profile.input_bytes if isinstance(profile, Profile) else 0,
        rematerialise=options.rematerialise,
        fill_drain=options.schedule_name == "fill-drain",
        ahead=options.ahead,
        fixed=staging.has_explicit_cuts,
    )


def training_memory_bytes(declared: int | None, device: torch.device) -> int:
    """Bytes that training may fill: what was declared, else of the GPU's memory; 0: unknown.

    Raises:
        ConfigError: `declared` is not a positive number of bytes.
    """
    if declared is not None:
        if isinstance(declared, bool) or not isinstance(declared, int) or declared < 1:
            raise ConfigError(f"memory_bytes is {declared!r}", remedy="give a whole number of bytes, or None")
        return declared
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties(device).total_memory * USABLE_MEMORY_SHARE)


def _layers(staging: ModelStages, profile: Profile | Sequence[Layer] | None) -> Sequence[Layer]:
    blocks, names = staging.blueprint.blocks, staging.blueprint.names
    if profile is None:
        return [
            Layer(name, 0.0, 0.0, parameter_bytes=nbytes, output_bytes=0, trainable_bytes=_trainable(block))
            for name, nbytes, block in zip(names, staging.blueprint.parameter_bytes, blocks, strict=True)
        ]
    layers = profile.layers if isinstance(profile, Profile) else tuple(profile)
    if len(layers) != len(blocks):
        raise ConfigError(
            f"the profile has {len(layers)} layers, the model {len(blocks)} blocks",
            remedy="measure this model again with gridtrain.pipeline.profile",
        )
    return layers


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
    """As a multiple of the parameters: gradients, flat vector, optimizer state, residual."""
    try:
        states = optimizer_state_copies(optimizer)
    except ConfigError:
        states = DEFAULT_OPTIMIZER_COPIES
    unsent = (2.0 if exchange.momentum else 1.0) if isinstance(exchange, TopK | GTopK) else 0.0
    return 2.0 + states + unsent


def _trainable(block: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in block.parameters() if p.requires_grad)


def _has_tensors(state: object) -> bool:
    if isinstance(state, dict):
        return any(map(_has_tensors, state.values()))
    if isinstance(state, list | tuple):
        return any(map(_has_tensors, state))
    return isinstance(state, Tensor) and state.numel() > 1
