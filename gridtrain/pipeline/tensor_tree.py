"""Describes trees of tensors that are sent between stages, and encodes them as buffers of known size.

A tree consists of tensors, numbers, strings and None in nested tuples, lists and dicts.  Its structure,
shapes and dtypes (its spec) are fixed before each step, and are the same for the sender and the receiver.
Received buffers are checked against the spec; nothing is inferred from a peer's bytes.

    {"x": float32 (n, 8), "pair": (int64 (4 n,), None), "alpha": 0.5}     n samples in this micro-batch
          |                          |                      |
    [ 32 n bytes,               32 n bytes,              8 bytes ]        None is part of the structure

A tensor's first dimension has a fixed number of rows, or of rows per sample; all other dimensions are fixed.
Numbers (bool, int, float) are also sent, but have no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gridtrain.errors import ConfigError, RemoteProtocolError, describe_type
from gridtrain.pipeline.wire_precision import WirePrecision, decode_tensor, encode_tensor, encoded_bytes
from gridtrain.quantities import format_count

_CAST = frozenset((torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool))
"""Dtypes of arrays that numpy and torch can share without a copy."""

_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}


@dataclass(frozen=True, slots=True)
class Leaf:
    """The description of one tensor or number in a tree.

    Attributes:
        dtype: the dtype of the tensor; for a number it is bool, int64 or float64.
        shape: the shape, without the first dimension if that depends on the number of samples.
        rows_per_sample: the number of rows in the first dimension per sample; None if that dimension is
            fixed.
        has_gradient: whether the gradient of the value is sent back.
        wire: the precision at which the value is sent; always EXACT except for floating-point tensors.
        number: the type of a number: bool, int or float; None for a tensor.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    rows_per_sample: int | None = None
    has_gradient: bool = False
    wire: WirePrecision = WirePrecision.EXACT
    number: type | None = None

    def shape_of(self, samples: int) -> tuple[int, ...]:
        if self.rows_per_sample is None:
            return self.shape
        return (samples * self.rows_per_sample, *self.shape)

    def payload_bytes(self, samples: int) -> int:
        return encoded_bytes(math.prod(self.shape_of(samples)), self.dtype, self.wire)

    def __str__(self) -> str:
        if self.number is not None:
            return self.number.__name__
        sizes = list(map(str, self.shape))
        if self.rows_per_sample is not None:
            sizes.insert(0, "n" if self.rows_per_sample == 1 else f"{self.rows_per_sample}n")
        name = str(self.dtype).removeprefix("torch.")
        return f"{name} ({', '.join(sizes)})" + (
            "" if self.wire is WirePrecision.EXACT else f" as {self.wire.value}"
        )


@dataclass(frozen=True, slots=True)
class Constant:
    """None or a string in a tree, which is part of the structure and never sent."""

    value: str | None

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True, slots=True)
class Branch:
    """A tuple, named tuple, list or dict in a tree.

    Attributes:
        keys: the keys of a dict, in the dict's order; empty for the other containers.
    """

    container: type
    keys: tuple[Any, ...]
    children: tuple[Node, ...]

    def __str__(self) -> str:
        if self.container is dict:
            return "{" + ", ".join(f"{k!r}: {c}" for k, c in zip(self.keys, self.children, strict=True)) + "}"
        inside = ", ".join(map(str, self.children))
        return f"[{inside}]" if self.container is list else f"({inside})"


Node = Leaf | Constant | Branch


@dataclass(frozen=True)  # without slots, because cached properties need a __dict__
class TensorTreeSpec:
    """Describes the tree that is passed between two layers, for any number of samples."""

    root: Node

    @classmethod
    def of(cls, tree: Any, samples: int, *, wire: WirePrecision = WirePrecision.EXACT) -> TensorTreeSpec:
        """Return the spec of an example with `samples` samples.

        A first dimension that is a multiple of `samples` is assumed to grow with the number of samples; any
        other is fixed.  Floating-point and complex tensors have a gradient.  If a fixed first dimension may
        be a multiple of `samples`, use `infer_boundary_specs`, which tries two numbers of samples.

        Raises:
            ConfigError: the tree contains a value that cannot be sent.
        """
        return cls(_describe_tree(tree, "", samples, wire))

    @classmethod
    def between(
        cls, tree: Any, samples: int, other: Any, other_samples: int, *, wire: WirePrecision
    ) -> TensorTreeSpec:
        """Return the spec that describes two examples with different numbers of samples.

        Tensors with `requires_grad` have a gradient.

        Raises:
            ConfigError: anything other than the first dimensions of tensors depends on the number of samples,
                or a value cannot be sent.
        """
        one = list(_iterate_leaves(_describe_tree(tree, "", samples, wire), tree, ""))
        two = list(_iterate_leaves(_describe_tree(other, "", other_samples, wire), other, ""))
        if [path for path, *_ in one] != [path for path, *_ in two]:
            raise ConfigError(
                "the structure of the values between two layers depends on the number of samples",
                remedy=_REMEDY,
            )
        leaves = iter(
            [
                _unify_leaf(path, leaf, value, samples, value_of_other, other_samples)
                for (path, leaf, value), (_, _, value_of_other) in zip(one, two, strict=True)
            ]
        )
        return cls(_map_nodes(_describe_tree(tree, "", samples, wire), lambda leaf: next(leaves)))

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        return tuple(_leaves(self.root))

    @cached_property
    def gradients(self) -> TensorTreeSpec:
        """The spec of the gradients: a tuple with one tensor for each leaf that has a gradient."""
        return TensorTreeSpec(
            Branch(tuple, (), tuple(replace(leaf, has_gradient=False) for leaf in self.gradient_leaves))
        )

    @property
    def gradient_leaves(self) -> tuple[Leaf, ...]:
        return tuple(leaf for leaf in self.leaves if leaf.has_gradient)

    def payload_bytes(self, samples: int) -> int:
        return sum(leaf.payload_bytes(samples) for leaf in self.leaves)

    def __str__(self) -> str:
        return str(self.root)

    def values(self, tree: Any, samples: int) -> list[tuple[Leaf, Any]]:
        """Return a tree's pairs (leaf, value) in order; raise `ConfigError` if the tree does not match."""
        found = []
        for path, leaf, value in _iterate_leaves(self.root, tree, ""):
            if leaf.number is None:
                _check(path, leaf, value, samples)
            found.append((leaf, value))
        return found

    def tensors(self, tree: Any, samples: int) -> list[Tensor]:
        """Return those tensors of a tree that have a gradient, in order."""
        return [value for leaf, value in self.values(tree, samples) if leaf.has_gradient]

    def map_leaves(self, tree: Any, change: Callable[[Leaf, Any], Any]) -> Any:
        """Return the same tree with `change(leaf, value)` in place of each tensor and number.

        Raises:
            ConfigError: the structure of the tree differs from this spec.
        """
        values = iter([change(leaf, value) for _, leaf, value in _iterate_leaves(self.root, tree, "")])
        return _build_tree(self.root, values)

    def nan_tree(self, samples: int, device: torch.device) -> Any:
        """Return a tree that matches this spec: NaN in floating-point and complex tensors, 0 elsewhere."""

        def value_of(leaf: Leaf) -> Any:
            if leaf.number is not None:
                return leaf.number(0)
            fill = torch.nan if leaf.dtype.is_floating_point or leaf.dtype.is_complex else 0
            return torch.full(leaf.shape_of(samples), fill, dtype=leaf.dtype, device=device)

        return _build_tree(self.root, map(value_of, self.leaves))

    def encode(self, tree: Any, samples: int) -> list[memoryview]:
        """Encode a tree as one buffer for each leaf; a contiguous EXACT tensor in host memory is not copied.

        Raises:
            ConfigError: the tree does not match this spec.
        """
        return [_encode_leaf(leaf, value) for leaf, value in self.values(tree, samples)]

    def decode(self, buffers: Sequence[memoryview], samples: int, device: torch.device | None = None) -> Any:
        """Decode buffers into a tree that does not share their memory.

        Raises:
            RemoteProtocolError: the number of buffers, a size or a value does not match this spec.
        """
        leaves = self.leaves
        if len(buffers) != len(leaves):
            got = format_count(len(buffers), "buffer")
            raise RemoteProtocolError(f"got {got}; expected {len(leaves)} for {self}")
        values = []
        for i, (leaf, buffer) in enumerate(zip(leaves, buffers, strict=True)):
            due_bytes = leaf.payload_bytes(samples)
            if memoryview(buffer).nbytes != due_bytes:
                raise RemoteProtocolError(
                    f"buffer {i} has {memoryview(buffer).nbytes} bytes; expected {due_bytes} for "
                    f"{leaf} with n = {samples}"
                )
            values.append(_decode_leaf(leaf, buffer, samples, device))
        return _build_tree(self.root, iter(values))


_REMEDY = (
    "return only values with the samples in the first dimension, such as out[0] of an LSTM; or, if you use "
    "Stage alone, describe the boundary with TensorTreeSpec.of(...)"
)


def split_batch(tree: Any, sizes: Sequence[int]) -> list[Any]:
    """Divide a mini-batch along the first dimension; copy numbers, strings and None into every part.

    The caller must have checked the first dimensions with `check_batch`.
    """
    rows = [slice(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]
    return [map_tensors(tree, itemgetter(part)) for part in rows]


def map_tree(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return the same tree with `change(value)` in place of every value that is not a tuple, list or dict."""
    if isinstance(tree, dict):
        return {key: map_tree(value, change) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return _make_container(type(tree), [map_tree(value, change) for value in tree])
    return change(tree)


def map_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return the same tree with `change(tensor)` in place of every tensor."""
    return map_tree(tree, lambda value: change(value) if isinstance(value, Tensor) else value)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree, in order."""
    found: list[Tensor] = []
    map_tensors(tree, found.append)
    return found


def _make_container(container: type, values: list[Any]) -> Any:
    return container(*values) if hasattr(container, "_fields") else container(values)


def _describe_tree(tree: Any, path: str, samples: int, wire: WirePrecision) -> Node:
    match tree:
        case Tensor():
            return _describe_leaf(tree, samples, wire)
        case None | str():
            return Constant(tree)
        case bool() | int() | float():
            return Leaf(_NUMBERS[type(tree)], (), number=type(tree))
        case dict() if type(tree) is dict:
            inside = [_describe_tree(tree[key], f"{path}[{key!r}]", samples, wire) for key in tree]
            return Branch(dict, tuple(tree), tuple(inside))
        case tuple() | list():
            inside = [_describe_tree(value, f"{path}[{i}]", samples, wire) for i, value in enumerate(tree)]
            return Branch(type(tree), (), tuple(inside))
    raise ConfigError(
        f"{_path_text(path)} is {describe_type(tree)}, which cannot be sent from one stage to the next",
        remedy="use tensors, numbers, strings and None, in tuples, lists and dicts",
    )


def _describe_leaf(tensor: Tensor, samples: int, wire: WirePrecision) -> Leaf:
    floating = tensor.is_floating_point()
    counts = tensor.dim() > 0 and tensor.shape[0] > 0 and tensor.shape[0] % samples == 0
    return Leaf(
        tensor.dtype,
        tuple(tensor.shape[1:] if counts else tensor.shape),
        rows_per_sample=tensor.shape[0] // samples if counts else None,
        has_gradient=floating or tensor.is_complex(),
        wire=wire if floating and wire.is_narrower_than(tensor.dtype) else WirePrecision.EXACT,
    )


def _unify_leaf(path: str, leaf: Leaf, one: Any, samples: int, two: Any, other_samples: int) -> Leaf:
    """Return the leaf that describes both examples; raise `ConfigError` if there is none."""
    if leaf.number is not None:
        return leaf
    leaf = replace(leaf, has_gradient=one.requires_grad)
    if one.dtype != two.dtype or one.dim() != two.dim() or one.shape[1:] != two.shape[1:]:
        raise ConfigError(
            f"{_path_text(path)} is {one.dtype} {tuple(one.shape)} for {samples} samples and {two.dtype} "
            f"{tuple(two.shape)} for {other_samples}; only the first dimension may depend on the samples",
            remedy=_REMEDY,
        )
    if one.shape == two.shape:
        return replace(leaf, shape=tuple(one.shape), rows_per_sample=None)
    if leaf.rows_per_sample is None or two.shape[0] != leaf.rows_per_sample * other_samples:
        raise ConfigError(
            f"{_path_text(path)} has {one.shape[0]} rows for {samples} samples and {two.shape[0]} for "
            f"{other_samples}; the number of rows per sample must be fixed",
            remedy=_REMEDY,
        )
    return leaf


def _map_nodes(node: Node, change: Callable[[Leaf], Leaf]) -> Node:
    match node:
        case Leaf():
            return change(node)
        case Branch():
            return replace(node, children=tuple(_map_nodes(child, change) for child in node.children))
    return node


def _leaves(node: Node) -> Iterator[Leaf]:
    if isinstance(node, Leaf):
        yield node
    elif isinstance(node, Branch):
        for child in node.children:
            yield from _leaves(child)


def _iterate_leaves(node: Node, tree: Any, path: str) -> Iterator[tuple[str, Leaf, Any]]:
    """Yield the triples (path, leaf, value) in order; raise `ConfigError` if the structure differs."""
    match node:
        case Leaf():
            fits = type(tree) is node.number if node.number is not None else isinstance(tree, Tensor)
            if not fits:
                raise _structure_error(path, node, describe_type(tree))
            yield path, node, tree
        case Constant():
            if tree != node.value:
                raise _structure_error(path, node, repr(tree))
        case Branch():
            for key, child in zip(_keys_of(node, tree, path), node.children, strict=True):
                yield from _iterate_leaves(child, tree[key], f"{path}[{key!r}]")


def _keys_of(node: Branch, tree: Any, path: str) -> Sequence[Any]:
    container: object = type(tree)
    if container is not node.container:
        raise _structure_error(path, node, describe_type(tree))
    if node.container is dict:
        if set(tree) != set(node.keys):
            raise _structure_error(path, node, f"a dict with the keys {list(tree)}")
        return node.keys
    if len(tree) != len(node.children):
        raise _structure_error(path, node, f"{describe_type(tree)} of {len(tree)}")
    return range(len(node.children))


def _build_tree(node: Node, values: Iterator[Any]) -> Any:
    match node:
        case Leaf():
            return next(values)
        case Constant():
            return node.value
        case Branch(container=container):
            inside = [_build_tree(child, values) for child in node.children]
            if container is dict:
                return dict(zip(node.keys, inside, strict=True))
            return _make_container(container, inside)


def _check(path: str, leaf: Leaf, tensor: Tensor, samples: int) -> None:
    if tensor.dtype != leaf.dtype or tuple(tensor.shape) != leaf.shape_of(samples):
        raise _structure_error(path, leaf, f"{tensor.dtype} {tuple(tensor.shape)} for n = {samples}")


def _structure_error(path: str, node: Node, seen: str) -> ConfigError:
    return ConfigError(
        f"between two stages {_path_text(path)} is {seen}, but {node} was agreed before the step",
        remedy="return the same structure, shapes and dtypes from this layer in every micro-batch",
    )


def _path_text(path: str) -> str:
    return f"the value at {path}" if path else "the value"


def _encode_leaf(leaf: Leaf, value: Any) -> memoryview:
    if isinstance(value, Tensor) and _is_plain(leaf, value.device) and value.numel():
        own = value.detach() if value.requires_grad else value
        return own.contiguous().view(-1).numpy().data.cast("B")
    tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=leaf.dtype, device="cpu")
    return encode_tensor(tensor, leaf.wire).cpu().numpy().data


def _decode_leaf(leaf: Leaf, buffer: memoryview, samples: int, device: torch.device | None) -> Any:
    if leaf.dtype == torch.bool and (most := int(np.frombuffer(buffer, np.uint8).max(initial=0))) > 1:
        raise RemoteProtocolError(f"a boolean is encoded as {most}; it must be 0 or 1: {leaf}")
    if _is_plain(leaf, device) and len(buffer):
        tensor = torch.frombuffer(bytearray(buffer), dtype=leaf.dtype).view(leaf.shape_of(samples))
    else:
        own = torch.from_numpy(np.frombuffer(buffer, np.uint8).copy()).to(device)
        tensor = decode_tensor(own, leaf.shape_of(samples), leaf.dtype, leaf.wire)
    return leaf.number(tensor.item()) if leaf.number is not None else tensor


def _is_plain(leaf: Leaf, device: torch.device | None) -> bool:
    """Return whether numpy can read and write the leaf directly in host memory, which takes fewer calls."""
    return (
        leaf.wire is WirePrecision.EXACT and leaf.dtype in _CAST and (device is None or device.type == "cpu")
    )
