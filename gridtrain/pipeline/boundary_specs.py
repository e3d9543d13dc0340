"""Infers the shapes and dtypes of the tensors between stages before a step, on torch's meta device.

Tensors on the meta device have shapes and dtypes but no values, so a model can run there even if it does not
fit into the worker's memory.

    example input --> layer 0 --> spec 0 --> layer 1 --> spec 1 --> layer 2 --> spec 2

Each spec is a `TensorTreeSpec`, the same on all workers.  Each layer runs with 2 and with 3 samples; the
difference between its outputs shows which dimensions depend on the number of samples.

Autocast has no effect on the meta device.  If it is enabled, all layers run instead on fake tensors of the
worker's device, which have no values either.  If only a layer enables autocast, all layers first run on the
meta device.

The run with 3 samples also shows which buffers every forward pass changes.  Layers that share such a buffer
are refused, because each stage would change its own copy; a table that is computed once is accepted.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gridtrain.errors import ConfigError, GridtrainError
from gridtrain.pipeline.autocast import autocast_dtype
from gridtrain.pipeline.batch_norm import MiniBatchStatistics
from gridtrain.pipeline.tensor_tree import TensorTreeSpec, map_tensors, tensors_in
from gridtrain.pipeline.wire_precision import WirePrecision
from gridtrain.training.single_samples import is_torch_norm

_SAMPLES = (2, 3)


def infer_boundary_specs(
    layers: Sequence[nn.Module],
    example: Any,
    *,
    wire: WirePrecision = WirePrecision.EXACT,
    device: torch.device | str = "cpu",
) -> tuple[TensorTreeSpec, ...]:
    """Infer the spec of each layer's output.

    `result[i]` describes the output of layer i, so a stage of layers a .. b - 1 has `input=result[a - 1]`.
    Autocast determines the dtypes if the caller or a layer enables it; the caller must use the same autocast
    as in the steps.

    Args:
        layers: all layers of the model in order, on any device; each is copied to the meta device.
        example: an input of the model with at least one sample, and the samples in the first dimension.
        wire: the precision at which floating-point tensors and their gradients are sent.
        device: the device on which the layers will run.

    Raises:
        ConfigError: a layer cannot run on the meta device, for example because shapes depend on values;
            anything in its output other than the number of rows of a tensor depends on the number of samples;
            or its forward pass changes a buffer that another layer also holds.
    """
    at = torch.device(device)
    is_cast = autocast_dtype(at) is not None
    if not is_cast:
        try:
            with _AutocastWatch(at) as autocast:
                specs = _infer_on(torch.device("meta"), layers, example, wire)
        except ConfigError:
            if not autocast.was_enabled:
                raise
        is_cast = autocast.was_enabled
    if is_cast:
        with _EAGER, _without_compiled_code(), FakeTensorMode(allow_non_fake_inputs=True):
            specs = _infer_on(at, layers, example, wire)
    return specs


_EAGER = threading.Lock()
"""Held while compiled code is disabled, which affects the whole process."""


def _without_compiled_code() -> AbstractContextManager[object]:
    """Return a context manager in which torch.compile has no effect, because compiled code would read the
    memory that fake tensors do not have."""
    set_stance = getattr(torch.compiler, "set_stance", nullcontext)  # from torch 2.6 on
    stance: AbstractContextManager[object] = set_stance("force_eager")
    return stance


class _AutocastWatch(TorchFunctionMode):
    """Finds out whether autocast is enabled for a device during any call to a torch function."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.was_enabled = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.was_enabled = self.was_enabled or autocast_dtype(self._device) is not None
        return func(*args, **(kwargs or {}))


def _infer_on(
    device: torch.device, layers: Sequence[nn.Module], example: Any, wire: WirePrecision
) -> tuple[TensorTreeSpec, ...]:
    """Infer the specs on the meta device or, under a `FakeTensorMode`, on another device."""
    outputs = [_with_sample_count(example, samples, device) for samples in _SAMPLES]
    shared = _shared_buffers(layers)
    specs = []
    for i, layer in enumerate(layers):
        copied = _without_values(layer, device)
        changes = _BufferChanges(copied, shared[i])
        try:
            with MiniBatchStatistics([copied]).observe(first_time=False):
                first = copied(outputs[0])
                with changes if shared[i] else nullcontext():
                    outputs = [first, copied(outputs[1])]
        except GridtrainError:
            raise
        except Exception as error:  # a user's code may raise anything
            raise ConfigError(
                f"layer {i}, {type(layer).__name__}, cannot run {_place_text(device)}, without data: "
                f"{type(error).__name__}: {error}",
                remedy=f"layer {i - 1}, {type(layers[i - 1]).__name__}, returns a tuple: wrap it in a module "
                "that returns the part that the next layer needs, such as out[0]"
                if i and isinstance(error, TypeError) and isinstance(outputs[0], tuple)
                else trial_remedy(
                    error,
                    "check the shapes of the inputs; avoid .item(), .numpy() and `if` on tensors in forward, "
                    "so that shapes do not depend on values; or, if you use Stage alone, describe the "
                    "boundaries with TensorTreeSpec.of(...)",
                ),
            ) from error
        for place in changes.found():
            _refuse_change(i, layer, place, shared)
        specs.append(TensorTreeSpec.between(outputs[0], _SAMPLES[0], outputs[1], _SAMPLES[1], wire=wire))
        outputs = [_detached(output) for output in outputs]
    return tuple(specs)


def trial_remedy(error: Exception, otherwise: str) -> str:
    """Return what to do after an error in a trial without data; `otherwise`, unless tensors were on different
    devices."""
    if any(part in str(error) for part in ("device cpu", "two devices", "different devices")):
        return "create tensors in forward on the device of its input, such as torch.ones(n, device=x.device)"
    return otherwise


def _place_text(device: torch.device) -> str:
    if device.type == "meta":
        return "on torch's meta device"
    dtype = autocast_dtype(device)  # None if only a layer enables autocast
    text = f"under autocast{f' to {dtype}' if dtype else ''} on {device}"
    if hasattr(torch.compiler, "set_stance"):
        return text
    return f"{text} (compiled layers can from torch 2.6 on; this is {torch.__version__})"


def _without_values(layer: nn.Module, device: torch.device) -> nn.Module:
    """Copy a layer to a device, without the values of its tensors."""
    with unset_fake_temporarily():  # a copy of a tensor fails in a FakeTensorMode
        copied = copy.deepcopy(layer).to("meta")
    return copied if device.type == "meta" else copied.to_empty(device=device)


def lone_sample_layer(layers: Sequence[nn.Module], example: Any) -> tuple[str, bool]:
    """Return a layer that expects several samples, and whether it can nevertheless process a single one.

    The result is a pair such as ("layer 3, BatchNorm1d", True), or ("", True) if there is no such layer.  A
    layer that cannot process a single sample takes precedence over layers that can.
    """
    meta = torch.device("meta")
    output = _with_sample_count(example, 1, meta)
    found = ""
    for i, layer in enumerate(layers):
        copied = _without_values(layer, meta)
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


_Place = tuple[str, str]
"""A buffer as (path of its module in the layer, name)."""


def _shared_buffers(layers: Sequence[nn.Module]) -> list[dict[_Place, tuple[int, ...]]]:
    """Return, for each layer, the buffers that other layers also hold, with the numbers of these layers."""
    held: list[dict[_Place, object]] = []
    holders: dict[object, dict[int, None]] = {}
    for i, layer in enumerate(layers):
        held.append({})
        for path, module in layer.named_modules():
            for name, buffer in module._buffers.items():
                key = (id(module), name) if buffer is None else id(buffer)  # None: set in a forward pass
                held[i][path, name] = key
                holders.setdefault(key, {})[i] = None
    return [
        {place: tuple(holders[key]) for place, key in places.items() if len(holders[key]) > 1}
        for places in held
    ]


class _BufferChanges(TorchDispatchMode):
    """Finds out which of a layer's buffers are written or replaced while the mode is active.

    A write through `.data`, which leaves a tensor's version unchanged, is included.
    """

    def __init__(self, layer: nn.Module, places: Iterable[_Place]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._modules = {place: layer.get_submodule(place[0]) for place in places}
        self._written: set[int] = set()
        self._norms = [p for p, m in self._modules.items() if is_torch_norm(m) and _collects(m)]
        self._before: dict[_Place, Tensor | None] = {}

    def __enter__(self) -> _BufferChanges:
        self._before = {place: module._buffers[place[1]] for place, module in self._modules.items()}
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | (kwargs or {})
        for one in func._schema.arguments:
            if one.alias_info is not None and one.alias_info.is_write:
                self._written |= {t.untyped_storage()._cdata for t in tensors_in(given.get(one.name))}
        return func(*args, **(kwargs or {}))

    def found(self) -> list[_Place]:
        """Return the places of the changed buffers, including the running statistics of batch norms."""
        changed = [
            place
            for place, before in self._before.items()
            if self._modules[place]._buffers.get(place[1]) is not before
            or (before is not None and before.untyped_storage()._cdata in self._written)
        ]
        return [*self._norms, *changed]


def _collects(norm: nn.Module) -> bool:
    """Return whether a batch norm updates its running statistics."""
    return norm.training and bool(norm.track_running_stats)


def _refuse_change(
    i: int, layer: nn.Module, place: _Place, shared: Sequence[dict[_Place, tuple[int, ...]]]
) -> None:
    name = ".".join(part for part in place if part)
    numbers = " and ".join(map(str, shared[i][place]))
    raise ConfigError(
        f'each forward pass of layer {i}, {type(layer).__name__}, changes its buffer "{name}", which layers '
        f"{numbers} share; each of them would change its own copy",
        remedy="use a separate module for each layer; these may share parameters, and buffers that do not "
        "change",
    )


def _with_sample_count(tree: Any, samples: int, device: torch.device) -> Any:
    def resized(tensor: Tensor) -> Tensor:
        return torch.empty((samples, *tensor.shape[1:]), dtype=tensor.dtype, device=device)

    return map_tensors(tree, resized)


def _detached(tree: Any) -> Any:
    """Copy the tensors of a tree so that they are not leaves, because a layer may overwrite its input."""
    return map_tensors(tree, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad).clone())
