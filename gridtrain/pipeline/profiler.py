"""`profile(model, x)`: measures the time, memory and output size of each block on this machine.

    example (n samples) --> block 0 --> block 1 --> ...

Each block runs on n and on 2 n samples.  The two times determine its overhead and its time per sample, by
time(n) = overhead + n * time per sample.

Only one block of a `Blueprint` is in memory at a time.  A block's time is the shortest of several runs,
because other programs can only slow a run down.  The bytes that autograd stores for a block exclude
parameters and the block's input, which is counted as the previous block's output.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gridtrain.core.stages.stage_cost import Layer
from gridtrain.errors import ConfigError
from gridtrain.pipeline.blueprint import Blueprint, Model
from gridtrain.pipeline.memory_meters import TensorMemoryMeter
from gridtrain.pipeline.model_blocks import blocks_of
from gridtrain.pipeline.tensor_tree import TensorTreeSpec, map_tensors, tensors_in
from gridtrain.pipeline.wire_precision import WirePrecision
from gridtrain.quantities import format_count

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Profile:
    """The result of `profile`.

    Attributes:
        layers: each block's costs, as measured on this machine.
        boundaries: the specs of the blocks' outputs; `boundaries[i]` describes the output of block i.
        input_bytes: the size of the model's input in bytes per sample.
        samples: the number of samples in the example.
        device: the device on which the blocks were measured.
    """

    layers: tuple[Layer, ...]
    boundaries: tuple[TensorTreeSpec, ...]
    input_bytes: int
    samples: int
    device: str

    @classmethod
    def of(cls, given: Profile | Sequence[Layer], blocks: int) -> Profile:
        """Return `given` as a profile; raise `ConfigError` unless it has `blocks` layers."""
        found = given if isinstance(given, Profile) else cls(tuple(given), (), 0, 1, "elsewhere")
        if len(found.layers) != blocks:
            raise ConfigError(
                f"the profile has {format_count(len(found.layers), 'layer')}, but the model has "
                f"{format_count(blocks, 'block')}",
                remedy="measure this model again with gridtrain.pipeline.profile",
            )
        return found

    def toml(self) -> str:
        """Return the profile as TOML, with times in seconds, for `gridtrain plan --layers`."""
        lines = [f"# measured on {self.device}, with {self.samples} samples", f"input = {self.input_bytes}"]
        for each in self.layers:
            lines += ["", "[[layer]]", f"name = {json.dumps(each.name)}"]
            lines += [f"forward = {each.forward_s!r}", f"backward = {each.backward_s!r}"]
            lines += [f"overhead = {each.overhead_s!r}", f"parameters = {each.parameter_bytes}"]
            lines += [f"trainable = {each.trainable}", f"output = {each.output_bytes}"]
            lines += [f"gradient = {each.gradient}", f"kept = {each.kept_bytes}"]
            lines += [f"work = {each.work_bytes or 0}", f"fixed_work = {each.fixed_work_bytes}"]
        return "\n".join([*lines, ""])


def profile(
    model: Model | Blueprint,
    example: Any,
    *,
    device: torch.device | str | None = None,
    repeats: int = 5,
    wire: WirePrecision = WirePrecision.EXACT,
    clock: Clock = time.perf_counter,
) -> Profile:
    """Measure the forward and backward passes of each block, on the example and on twice as many samples.

    Args:
        model: a `Blueprint`, whose blocks are allocated one at a time, or a chain of allocated blocks,
            which are copied, and not changed.
        example: an input with at least one sample, and as many samples as a micro-batch if possible; the
            samples are in the first dimension.
        device: the device to measure on; by default CUDA if it is available.
        repeats: the number of runs of each block, of which the fastest is used.
        wire: the precision at which activations are sent, which determines their size.
        clock: a function that returns the time in seconds.

    Raises:
        ConfigError: torch cannot use the device, the example has no samples, its tensors differ in their
            numbers of rows, or a block's output cannot be sent.
    """
    at = to_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    samples = _samples(example)
    doubled = map_tensors(example, lambda x: torch.cat([x, x]))
    flows = [map_tensors(each, lambda x: x.to(at)) for each in (example, doubled)]
    input_bytes = math.ceil(_nbytes(flows[0]) / samples)
    layers: list[Layer] = []
    boundaries: list[TensorTreeSpec] = []
    kept_after: list[bool] = []
    for name, block in _materialised_blocks(model, at):
        runs = [_time_block(block, flow, at, clock, repeats) for flow in flows]
        spec = TensorTreeSpec.between(runs[0].result, samples, runs[1].result, 2 * samples, wire=wire)
        if layers and runs[0].keeps_input and not kept_after[-1]:
            before_bytes = layers[-1].kept_bytes + math.ceil(_nbytes(flows[0]) / samples)
            layers[-1] = replace(layers[-1], kept_bytes=before_bytes)
        layers.append(_layer(name, block, runs, samples, spec))
        boundaries.append(spec)
        kept_after.append(runs[0].keeps_output)
        flows = [map_tensors(run.result, _detached) for run in runs]
    return Profile(tuple(layers), tuple(boundaries), input_bytes, samples, str(at))


def to_device(device: object) -> torch.device:
    """Return the device as torch names it; raise `ConfigError` unless this torch can use it."""
    try:
        at: torch.device = torch.device(device)  # type: ignore[call-overload]
        torch.empty(0, device=at)
    except (TypeError, RuntimeError, AssertionError) as error:  # without CUDA, torch raises AssertionError
        first, *_ = str(error).splitlines() or [""]
        raise ConfigError(
            f"device is {device!r}, which torch {torch.__version__} cannot use here: {first}",
            remedy='pass "cuda" on a machine with a GPU and a torch that supports it, otherwise "cpu"',
        ) from None
    return at


def _samples(example: Any) -> int:
    rows = {x.shape[0] if x.dim() else 0 for x in tensors_in(example)}
    if len(rows) != 1 or 0 in rows:
        raise ConfigError(
            f"the example's tensors have {sorted(rows) or 'no'} rows",
            remedy="pass an input whose tensors have one row per sample, and at least one row",
        )
    return rows.pop()


def _materialised_blocks(model: Model | Blueprint, device: torch.device) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(model, Blueprint):
        for index, name in enumerate(model.names):
            yield name, model.build(index, index + 1, device)[0]
    else:
        for name, block in blocks_of(model).items():
            yield name, copy.deepcopy(block).to(device)  # so that statistics and gradients do not change


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _nbytes(tree: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(tree))


def _layer(name: str, block: nn.Module, runs: list[_BlockRun], samples: int, spec: TensorTreeSpec) -> Layer:
    (forward_s, before_s), (backward_s, after_s) = (
        _fit_line(samples, *(getattr(run, what) for run in runs)) for what in ("forward_s", "backward_s")
    )
    parameters = list(block.parameters())
    fixed_bytes = min(max(0, 2 * runs[0].work_bytes - runs[1].work_bytes), runs[0].work_bytes)
    return Layer(
        name,
        forward_s,
        backward_s,
        parameter_bytes=sum(tensor.nbytes for tensor in (*parameters, *block.buffers())),
        output_bytes=math.ceil(spec.payload_bytes(samples) / samples),
        kept_bytes=math.ceil(runs[0].kept_bytes / samples),
        overhead_s=(before_s + after_s) / 2,
        trainable_bytes=sum(tensor.nbytes for tensor in parameters if tensor.requires_grad),
        gradient_bytes=math.ceil(spec.gradients.payload_bytes(samples) / samples),
        work_bytes=math.ceil((runs[0].work_bytes - fixed_bytes) / samples),
        fixed_work_bytes=fixed_bytes,
    )


def _fit_line(samples: int, once_s: float, twice_s: float) -> tuple[float, float]:
    """Return the time per sample and the overhead, both in seconds and at least 0.

    Args:
        once_s, twice_s: the times for `samples` and for 2 * `samples` samples.
    """
    overhead_s = min(max(0.0, 2 * once_s - twice_s), once_s)
    return (once_s - overhead_s) / samples, overhead_s


@dataclass(slots=True)
class _BlockRun:
    """The measurements of one block on one input.

    Attributes:
        result: the output.
        forward_s, backward_s: the shortest times.
        kept_bytes: the bytes that autograd stores for the backward pass, excluding parameters and the input.
        work_bytes: the additional peak memory while the block runs.
        keeps_input, keeps_output: whether autograd stores the input, and whether it stores the output.
    """

    result: Any
    forward_s: float
    backward_s: float
    kept_bytes: int
    work_bytes: int
    keeps_input: bool
    keeps_output: bool


def _time_block(block: nn.Module, inputs: Any, at: torch.device, clock: Clock, repeats: int) -> _BlockRun:
    def now_s() -> float:
        if at.type == "cuda":
            torch.cuda.synchronize(at)
        return clock()

    run = _measure_saved(block, _fresh_inputs(inputs))
    for _ in range(max(1, repeats)):
        given = _fresh_inputs(inputs)
        began_s = now_s()
        result = block(given)
        forward_end_s = now_s()
        backward = _prepare_backward(result)
        backward_began_s = now_s()
        backward()
        run.backward_s = min(run.backward_s, now_s() - backward_began_s)
        run.forward_s = min(run.forward_s, forward_end_s - began_s)
    given = _fresh_inputs(inputs)
    # By now parameters have gradients, as they do from the second micro-batch on.
    with TensorMemoryMeter() as meter:
        _prepare_backward(block(given))()
    run.work_bytes = max(0, meter.peak_bytes - run.kept_bytes) + _nbytes(given)
    block.zero_grad(set_to_none=True)
    return run


def _prepare_backward(result: Any) -> Callable[[], None]:
    roots = [leaf for leaf in tensors_in(result) if leaf.requires_grad]
    seeds = [torch.ones_like(root) for root in roots]
    return lambda: torch.autograd.backward(roots, seeds) if roots else None


def _fresh_inputs(inputs: Any) -> Any:
    """Return copies of leaves, as in a stage, because a block may overwrite its input but not a leaf."""
    return map_tensors(inputs, lambda tensor: _detached(tensor).clone())


def _measure_saved(block: nn.Module, given: Any) -> _BlockRun:
    """Run one forward pass; return a `_BlockRun` with the bytes that autograd stores, but without times."""
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[_storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = block(given)
    own = {_storage_key(tensor) for tensor in (*block.parameters(), *block.buffers())}
    entered, left = ({_storage_key(leaf) for leaf in tensors_in(tree)} for tree in (given, result))
    kept_bytes = sum(nbytes for place, nbytes in saved.items() if place not in own | entered)
    keeps = [bool(places & set(saved)) for places in (entered, left - entered)]
    return _BlockRun(result, math.inf, math.inf, kept_bytes, 0, *keeps)


def _storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
