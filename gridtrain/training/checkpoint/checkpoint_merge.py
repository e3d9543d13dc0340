"""Builds a stage from checkpoints of other stages, parameter by parameter, after a repartition.

    layers 0, 1 at step 20    embed.weight, body.0.*
    layers 2, 3 at step 20    body.1.*, body.2.*
      --> layers 0 to 2       embed.weight, body.0.*, body.1.*

A parameter and its optimizer state are found by the parameter's name in the whole model, and its residual by
the parameter's position in the flat gradient.

Random numbers belong to layers and steps (docs/decisions/0026), so there is no random state to restore.
State that belongs to a stage as a whole, that is, the settings of the optimizer's groups and the trackers,
must be the same in all checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gridtrain.errors import RemoteProtocolError
from gridtrain.quantities import format_count
from gridtrain.training.checkpoint import model_buffers, serialization
from gridtrain.training.checkpoint.checkpoint_store import Checkpoint
from gridtrain.training.checkpoint.flat_gradient import FlatGradient, canonical_parameters
from gridtrain.training.checkpoint.frozen_base import FROZEN_KEY, state_parameters

PARAMETER_ORDER_KEY = "order"
"""Key of a checkpoint's document: the names of the parameters in the optimizer's order."""

_REMEDY = "restart the run with as many workers as it has stages"


_Source = Mapping[str, Mapping[str, Any]]
"""One checkpoint: its parameters and buffers, the optimizer's states and groups (settings) by the parameter's
name, and the trackers."""


def parameter_order(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the parameters in the optimizer's order, for `PARAMETER_ORDER_KEY`."""
    names = {id(parameter): name for name, parameter in canonical_parameters(module)}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def load_merged(
    checkpoints: Sequence[Checkpoint],
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    trackers: serialization.Trackers,
    tied: Sequence[frozenset[str]],
) -> None:
    """Load a newly built stage from checkpoints that together contain the whole stage.

    Args:
        tied: for each tied parameter, all of its names in the whole model.

    Raises:
        RemoteProtocolError: a parameter is missing, a checkpoint does not match the stage, or settings or
            trackers that must be the same differ between checkpoints.
    """
    sources = [_read_source(found) for found in checkpoints]
    names = [name for name, _ in canonical_parameters(module)]
    others = {name: group for group in tied for name in group}

    def of(what: str, name: str) -> Any:
        for known in (name, *sorted(others.get(name, ()))):
            for source in sources:
                if known in source[what]:
                    return source[what][known]
        return None

    parameters = {name: of("parameters", name) for name in names}
    needed = [name for name, _ in state_parameters(module)]
    if missing := [name for name in needed if parameters[name] is None]:
        raise RemoteProtocolError(
            f"no checkpoint contains {missing[0]!r}; missing: {format_count(len(missing), 'parameter')}"
        )
    buffers: dict[str, Any] = {}
    for source in reversed(sources):
        buffers |= source["buffers"]
    own = dict(model_buffers.buffers_of(module))
    order = parameter_order(module, optimizer)
    serialization.load_state(
        {
            "parameters": {name: value for name, value in parameters.items() if value is not None},
            "buffers": {name: buffers[name] for name in own if name in buffers},
            "optimizer": _optimizer_state(optimizer, order, of),
            "trackers": _same_trackers(sources),
        },
        module,
        optimizer,
        trackers,
    )


def _optimizer_state(optimizer: torch.optim.Optimizer, order: Sequence[str], of: Any) -> dict[str, Any]:
    state = optimizer.state_dict()
    found = {index: of("states", name) for index, name in enumerate(order)}
    for group in state["param_groups"]:
        known = [of("groups", order[index]) for index in group["params"]]
        if any(fields is None or not _is_equal(fields, known[0]) for fields in known):
            raise RemoteProtocolError(
                "the parameters of one group have different optimizer settings in the checkpoints",
                remedy=_REMEDY,
            )
        if known:
            group.update(known[0])
    settings = {name: value for name, value in state.items() if name != "state"}
    return {"state": {i: one for i, one in found.items() if one is not None}, **settings}


def _read_source(found: Checkpoint) -> _Source:
    values = serialization.read_state(found.document, found.tensors)
    try:
        order = [str(name) for name in found.document[PARAMETER_ORDER_KEY]]
        optimizer = values["optimizer"]
        groups = {
            order[index]: {k: v for k, v in group.items() if k not in ("params", "param_names")}
            for group in optimizer["param_groups"]
            for index in group["params"]
        }
        states = {order[index]: one for index, one in optimizer["state"].items()}
        named = {what: dict(values[what]) for what in ("parameters", "buffers", "trackers")}
        return named | {"states": states, "groups": groups}
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise RemoteProtocolError(
            f"the checkpoint {found.path} does not name the parameters of its state: {error!r}",
            remedy=_REMEDY,
        ) from error


def _same_trackers(sources: Sequence[_Source]) -> Mapping[str, Any]:
    first = sources[0]["trackers"]
    if any(not _is_equal(source["trackers"], first) for source in sources):
        raise RemoteProtocolError(
            f"the states of {', '.join(sorted(first))} differ from stage to stage", remedy=_REMEDY
        )
    return first


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_is_equal(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    return bool(a == b)


def merged_residual(
    checkpoints: Sequence[Checkpoint], module: nn.Module, flat: FlatGradient
) -> dict[str, Tensor]:
    """Return the flat vectors (n,) of the module's residual by the names that `ErrorFeedback.state` uses; {}
    if no checkpoint contains a residual.  A parameter whose residual is in no checkpoint has zeros."""
    kinds = {kind for found in checkpoints for kind in found.residual}
    trained = {name: p.numel() for name, p in canonical_parameters(module) if p.requires_grad}
    whole = {kind: torch.zeros(flat.n, dtype=torch.float32, device="cpu") for kind in kinds}
    done: set[str] = set()
    for found in checkpoints:
        shapes = serialization.read_state(found.document, found.tensors)["parameters"]
        sizes = {name: int(value.numel()) for name, value in shapes.items()}
        frozen = set(found.document.get(FROZEN_KEY, ()))
        places = _parameter_slices({name: size for name, size in sizes.items() if name not in frozen})
        ends = max((stop for _, stop in places.values()), default=0)
        if any(int(vector.numel()) != ends for vector in found.residual.values()):
            continue  # a residual of a different exchange
        for name, (start, stop) in _parameter_slices(trained).items():
            if name in places and name not in done and found.residual:
                done.add(name)
                for kind, vector in found.residual.items():
                    whole[kind][start:stop] = vector[slice(*places[name])]
    return whole


def _parameter_slices(sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return the position (start, stop) of each parameter in a flat vector, by name."""
    places, at = {}, 0
    for name, size in sizes.items():
        places[name] = (at, at + size)
        at += size
    return places
