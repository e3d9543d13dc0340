"""Infers the shapes and dtypes of the tensors between stages before the first step, on torch's meta device.

Tensors on the meta device have shapes and dtypes but no values, so a model can run there even if it does not
fit into the worker's memory.

    example input --> layer 0 --> spec 0 --> layer 1 --> spec 1 --> layer 2 --> spec 2

Each spec is a `TensorTreeSpec`, the same on all workers.  Each layer runs with 2 and with 3 samples; the
difference between its outputs shows which dimensions depend on the number of samples.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gridtrain.errors import ConfigError, GridtrainError
from gridtrain.pipeline.batch_norm import MiniBatchStatistics
from gridtrain.pipeline.tensor_tree import TensorTreeSpec, map_tensors
from gridtrain.pipeline.wire_precision import WirePrecision

_SAMPLES = (2, 3)


def infer_boundary_specs(
    layers: Sequence[nn.Module], example: Any, *, wire: WirePrecision = WirePrecision.EXACT
) -> tuple[TensorTreeSpec, ...]:
    """Infer the spec of each layer's output.

    `result[i]` describes the output of layer i, so a stage of layers a .. b - 1 has `input=result[a - 1]`.

    Args:
        layers: all layers of the model in order, on any device; each is copied to the meta device.
        example: an input of the model with at least one sample, samples first.
        wire: the precision in which floating-point tensors and their gradients are sent.

    Raises:
        ConfigError: a layer cannot run on the meta device, for example because shapes depend on values; or
            anything in its output other than the number of rows of a tensor depends on the number of samples.
    """
    meta = torch.device("meta")
    outputs = [_with_sample_count(example, samples, meta) for samples in _SAMPLES]
    specs = []
    for i, layer in enumerate(layers):
        copied = copy.deepcopy(layer).to(meta)
        try:
            with MiniBatchStatistics([copied]).observe(first_time=False):
                outputs = [copied(output) for output in outputs]
        except GridtrainError:
            raise
        except Exception as error:  # a user's code may raise anything
            raise ConfigError(
                f"layer {i}, {type(layer).__name__}, cannot run on torch's meta device, without data: "
                f"{type(error).__name__}: {error}",
                remedy="avoid .item(), .numpy() and `if` on tensors in forward, so that shapes do not depend "
                "on values; or, if you use Stage alone, describe the boundaries with TensorTreeSpec.of(...)",
            ) from error
        specs.append(TensorTreeSpec.between(outputs[0], _SAMPLES[0], outputs[1], _SAMPLES[1], wire=wire))
        outputs = [_detached(output) for output in outputs]
    return tuple(specs)


def lone_sample_layer(layers: Sequence[nn.Module], example: Any) -> tuple[str, bool]:
    """Return a layer for which a single sample is too few, and whether it can nevertheless process one.

    The result is a pair such as ("layer 3, BatchNorm1d", True), or ("", True) if there is no such layer.  A
    layer that cannot process a single sample takes precedence over layers that can.
    """
    meta = torch.device("meta")
    output = _with_sample_count(example, 1, meta)
    found = ""
    for i, layer in enumerate(layers):
        copied = copy.deepcopy(layer).to(meta)
        statistics = MiniBatchStatistics([copied])
        try:
            with torch.no_grad(), statistics.observe(first_time=False):
                output = copied(output)
        except ValueError:  # a user's layer, for example
            return f"layer {i}, {type(layer).__name__}", False
        except Exception:  # a user's code may raise anything
            break
        if statistics.lone is not None:
            found = found or f"layer {i}, {type(statistics.lone).__name__}"
    return found, True


def _with_sample_count(tree: Any, samples: int, device: torch.device) -> Any:
    def resized(tensor: Tensor) -> Tensor:
        return torch.empty((samples, *tensor.shape[1:]), dtype=tensor.dtype, device=device)

    return map_tensors(tree, resized)


def _detached(tree: Any) -> Any:
    """Copy the tensors of a tree so that they are not leaves, because a layer may overwrite its input."""
    return map_tensors(tree, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad).clone())
