"""Divides a model into blocks (`split_at`, `Sequence`) for partitioning; rejects indivisible models.

The blocks of a model are

    nn.Sequential, a list     its members; an nn.Sequential among them is itself divided
    Sequence                  its members, which can also be functions
    any other module          the parts that `split_at` names, if its `forward` only calls them, in this order

    split_at=["embed", "body.0", "body.1", "head"]:   input -> embed -> body.0 -> body.1 -> head -> output

One value passes from block to block: a tensor, or tensors in tuples, lists and dicts.  A trial on the meta
device checks whether the forward pass is a chain: the pass must call each part once, with exactly the tensors
that the previous part returned.
"""

from __future__ import annotations

import copy
import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from types import CellType, CodeType
from typing import Any

import torch
from torch import Tensor, nn

from gridtrain.errors import ConfigError, describe_type
from gridtrain.pipeline.boundary_specs import trial_remedy
from gridtrain.pipeline.tensor_tree import map_tensors, tensors_in
from gridtrain.quantities import format_count

Block = nn.Module | Callable[[Any], Any]


class Function(nn.Module):
    """A function without parameters as a block, such as `torch.relu` or `lambda x: x.flatten(1)`.

    Raises:
        ConfigError: the function uses a module or a tensor, which would be missing when another worker builds
            the stage.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        held = [
            describe_type(value)
            for value in _captured_values(function)
            if isinstance(value, nn.Module | Tensor)
        ]
        if held:
            raise ConfigError(
                f"the function {_name(function)} uses {held[0]} from outside, which no stage would contain",
                remedy="write it as an nn.Module that owns what it uses",
            )
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)

    def extra_repr(self) -> str:
        return _name(self.function)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def _captured_values(value: Any, known: set[int] | None = None) -> Iterator[Any]:
    """Yield all values that a function could use: from its closure, its arguments' defaults, and its module's
    globals, and the values that these contain."""
    known = set() if known is None else known
    if id(value) in known:
        return
    known.add(id(value))
    yield value
    for inner in _contained_values(value):
        yield from _captured_values(inner, known)


def _contained_values(value: Any) -> Iterator[Any]:
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif inspect.ismethod(value):
        yield from (value.__self__, value.__func__)
    elif inspect.isfunction(value):
        yield from (cell.cell_contents for cell in value.__closure__ or () if _is_set(cell))
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        named = (value.__globals__.get(name) for name in _globals_of(value.__code__))
        # Functions of other modules are not followed.
        yield from (it for it in named if not inspect.isfunction(it) or it.__module__ == value.__module__)
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
    elif callable(value) and not isinstance(value, type | nn.Module | Tensor):
        yield from getattr(value, "__dict__", {}).values()


def _is_set(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # it is assigned later in the script
        return False


def _globals_of(code: CodeType) -> Iterator[str]:
    """Yield the names of the globals that the code, and all code nested in it, reads."""
    found = (each for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")
    yield from (each.argval for each in found)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_of(constant)


class Sequence(nn.Sequential):
    """An `nn.Sequential` that also accepts functions, for example
    `Sequence(embed, lambda x: x.flatten(1), *layers, head)`."""

    def __init__(self, *blocks: Block) -> None:
        super().__init__(*(block if isinstance(block, nn.Module) else Function(block) for block in blocks))


def blocks_of(
    model: nn.Module | Many[Block], *, split_at: Many[str] = (), example: Any = None
) -> dict[str, nn.Module]:
    """Return the blocks of a model by name, in the order in which `forward` calls them.

    Args:
        model: see the module's docstring.
        split_at: the names of all parts in the order in which `forward` calls them, for a module that is not
            a sequence.
        example: an input for the trial on the meta device that checks whether `forward` is a chain; required
            with `split_at`.

    Raises:
        ConfigError: the model is not a chain of at least one block.
    """
    if isinstance(model, nn.Module) and split_at:
        return _split_parts(model, split_at, example)
    if isinstance(model, nn.Module) and not _is_plain(model):
        raise ConfigError(
            f"{describe_type(model)} has its own forward, so gridtrain cannot tell where to partition it",
            remedy="list its parts in split_at=, in the order in which forward calls them, or write it "
            "as a gridtrain.pipeline.Sequence of modules and functions",
        )
    found = dict(_flattened(model if isinstance(model, nn.Module) else Sequence(*model), ""))
    if not found:
        raise ConfigError("the model has no blocks", remedy="pass a model with at least one block")
    return found


def _is_plain(module: nn.Module) -> bool:
    """Return whether calling the module only calls its children in order."""
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and not hooked


def _flattened(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():  # named_children leaves out a child that occurs twice
        if child is not None:
            if _is_plain(child) and len(list(child.children())) > 0:
                yield from _flattened(child, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", child


# -- a module with its own forward -----------------------------------------------------------------


def _split_parts(model: nn.Module, names: Many[str], example: Any) -> dict[str, nn.Module]:
    known = dict(model.named_modules(remove_duplicate=False))
    unknown = [name for name in names if name not in known or not name]
    if unknown or len(set(names)) != len(names):
        raise ConfigError(
            f"split_at has unknown or duplicate names: {unknown or list(names)}",
            remedy=f"list each part once; the first parts of this model are {', '.join(list(known)[1:9])}",
        )
    if example is None:
        raise ConfigError(
            "split_at= requires example=, an input for checking the order of the calls in forward",
            remedy="pass a small input, such as one with two samples",
        )
    parts = {name: known[name] for name in names}
    inside = {id(p) for part in parts.values() for p in (*part.parameters(), *part.buffers())}
    own = [n for n, p in (*model.named_parameters(), *model.named_buffers()) if id(p) not in inside]
    if own:
        raise ConfigError(
            f"no part in split_at= contains {', '.join(own[:4])}",
            remedy="add the module that contains it to split_at=, or move it into a part of the model",
        )
    _ChainTrial(model, names).run(example)
    return parts


class _ChainTrial:
    """Runs one forward pass on the meta device, and checks the calls to the parts and their tensors."""

    def __init__(self, model: nn.Module, names: Many[str]) -> None:
        self._model = copy.deepcopy(model).to("meta")
        self._names = names
        self._seen: list[str] = []
        self._last: list[Any] = []
        self._before = "the model's input"

    def run(self, example: Any) -> None:
        known = dict(self._model.named_modules(remove_duplicate=False))
        for name in self._names:
            known[name].register_forward_pre_hook(self._record_call(name), with_kwargs=True)
            known[name].register_forward_hook(self._record_return(name))
        meta = map_tensors(example, lambda x: x.to("meta"))
        self._last = _tensor_versions(meta)
        try:
            with torch.no_grad():
                result = self._model(meta)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise ConfigError(
                f"forward cannot run without data on the meta device: {error}",
                remedy=trial_remedy(
                    error, "write the model as a gridtrain.pipeline.Sequence instead of split_at="
                ),
            ) from error
        if self._seen != list(self._names):
            raise ConfigError(
                f"forward calls {', '.join(self._seen) or 'none of the parts'}, but split_at lists "
                f"{', '.join(self._names)}",
                remedy="list all parts, each once, in the order in which forward calls them",
            )
        self._check_same_tensors(_tensor_versions(result), "the model's output")

    def _record_call(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._seen.append(name)
            if len(args) != 1 or kwargs:
                raise ConfigError(
                    f'forward calls "{name}" with {format_count(len(args) + len(kwargs), "argument")}',
                    remedy="pass exactly one value to each block; it may be a tuple of several values",
                )
            self._check_same_tensors(_tensor_versions(args[0]), f'"{name}"')

        return hook

    def _record_return(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            self._last, self._before = _tensor_versions(result), f'"{name}"'

        return hook

    def _check_same_tensors(self, marks: list[Any], what: str) -> None:
        """Raise `ConfigError` unless these are the tensors that the previous part returned, unchanged.

        Args:
            marks: the result of `_tensor_versions`.
            what: the part that gets the tensors, or the model's output, for the message.
        """
        same = len(marks) == len(self._last) and all(
            a is b and va == vb for (a, va), (b, vb) in zip(marks, self._last, strict=True)
        )
        if not same:
            raise ConfigError(
                f"between {self._before} and {what}, forward computes something outside the parts",
                remedy="move it into a module, or write the model as a gridtrain.pipeline.Sequence, which "
                "can contain functions between modules",
            )


def _tensor_versions(tree: Any) -> list[Any]:
    """Return each tensor of a tree with the number of times that it was written to."""
    return [(tensor, tensor._version) for tensor in tensors_in(tree)]
