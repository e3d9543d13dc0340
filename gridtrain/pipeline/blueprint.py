"""Builds a model stage by stage, with initial values from the seed, so that no worker holds the whole model.

    with torch.device("meta"): model = ...     the tensors have shapes, but use no memory
                |
    blueprint = Blueprint(model, seed=0)       finds the blocks and the tied parameters
                |
    blueprint.build(start, stop)               allocates and initializes only these blocks

A block's values depend only on the run's seed and the block's index, so the initial model is the same for
every partition, bit for bit.  Values are drawn on the CPU, whose generator gives the same numbers on all
machines, and then moved to the device.  A tied parameter gets its value from the first block that holds it.

Values that a constructor writes on the meta device are lost, so initial values come from each module's
`reset_parameters` and from `init`.  Tensors are first filled with NaN; it is an error if a tensor still
has no value afterwards.  Without `init`, it is also an error if a constructor writes to a parameter more
often than `reset_parameters` does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gridtrain.core.messages import Facts
from gridtrain.errors import ConfigError
from gridtrain.pipeline.model_blocks import Block, blocks_of
from gridtrain.pipeline.random_seeds import borrowed_generators, derive_initial_seed
from gridtrain.pipeline.stage import TiedParameter
from gridtrain.quantities import format_count

Init = Callable[[nn.Module, int], None]
Model = nn.Module | Sequence[Block]


@dataclass(frozen=True, slots=True)
class TiedParameterName:
    """A parameter that several blocks share.

    Attributes:
        index: the index of this parameter among the model's tied parameters.
        places: the pairs (block, name of the parameter in that block), in ascending order; the first block
            determines the value.
        parameter_bytes: the size of one copy.
    """

    index: int
    places: tuple[tuple[int, str], ...]
    parameter_bytes: int

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(block for block, _ in self.places))

    def stages(self, cuts: Sequence[int]) -> tuple[int, ...]:
        """Return, in ascending order, the stages that hold a copy if the model is cut at `cuts`."""
        spans = enumerate(pairwise(cuts))
        return tuple(s for s, (start, stop) in spans if any(start <= b < stop for b in self.blocks))

    def __str__(self) -> str:
        return " = ".join(f"{block}.{name}" for block, name in self.places)


class Blueprint:
    """A model on the meta device, whose blocks can be built one at a time.

    Args:
        model: a model created under `torch.device("meta")`, or a function that creates it, which is called
            under that device.  The model must be a chain of blocks; see `model_blocks`.
        seed: the seed of the run's initial values.
        init: a function that is called with each block and its index after `reset_parameters`, under that
            block's seed.  It may set any value in the block.
        split_at, example: see `model_blocks.blocks_of`; needed for a model that is not a sequence.
        reset: whether to call `reset_parameters`, which is unnecessary if `init` sets every value.
        pretrained: a `PretrainedLayout` as JSON; it describes the folder that `gridtrain export` writes.
        facts: properties that the parameters do not reveal, and that must be the same on all workers.

    Raises:
        ConfigError: the model's tensors are not on the meta device, the model is not a chain of blocks, or
            its constructor writes values that would be lost.
    """

    def __init__(
        self,
        model: Model | Callable[[], Model],
        *,
        seed: int = 0,
        init: Init | None = None,
        split_at: Sequence[str] = (),
        example: Any = None,
        reset: bool = True,
        pretrained: Any = None,
        facts: Facts = (),
    ) -> None:
        self.pretrained, self.facts, self._reset = pretrained, facts, reset
        if callable(model) and not isinstance(model, nn.Module):
            with torch.device("meta"):
                model = model()
        self._named = blocks_of(model, split_at=split_at, example=example)
        self.blocks = tuple(self._named.values())
        self.names = tuple(self._named)
        self._seed, self._init = seed, init
        self._refuse_memory()
        self.tied = find_tied_parameters(self.blocks)
        if init is None:
            for index in range(len(self.blocks)):
                self._refuse_lost_values(index)

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def parameter_bytes(self) -> tuple[int, ...]:
        """The size in bytes of each block's parameters and buffers.

        A tied parameter is counted in every block that holds it.
        """
        return tuple(sum(t.nbytes for _, t in _tensors(block)) for block in self.blocks)

    def build(self, start: int, stop: int, device: torch.device | str = "cpu") -> list[nn.Module]:
        """Build blocks `start` to `stop` - 1 on `device`, with their initial values.

        At most one additional block is in memory at any time.  Blocks that hold a tied parameter share one
        parameter object.

        Raises:
            ConfigError: the range of blocks is invalid, or a parameter or buffer has no value.
        """
        if not 0 <= start < stop <= len(self.blocks):
            raise ConfigError(
                f"the model has {format_count(len(self.blocks), 'block')}, so blocks {start} to {stop - 1} "
                "cannot be built",
                remedy="use 0 <= start < stop <= number of blocks",
            )
        shared = self._values_from_earlier_blocks(start, stop)
        built = []
        for index in range(start, stop):
            block = self._initialised_block(index)
            for tied in self.tied:
                for place, name in tied.places:
                    if place == index:
                        one = shared.setdefault(tied.index, block.get_parameter(name))
                        _set_parameter(block, name, one)
            built.append(block.to(device))
        return built

    def tied_in(self, stage: int, cuts: Sequence[int], built: Sequence[nn.Module]) -> list[TiedParameter]:
        """Return the trained parameters that this stage shares with other stages, for `Stage(tied=)`.

        Args:
            cuts: the index of each stage's first block, followed by the total number of blocks.
            built: the result of `build(cuts[stage], cuts[stage + 1])`.
        """
        found = []
        for tied in self.tied:
            stages = tied.stages(cuts)
            if stage in stages and len(stages) > 1:
                block, name = next(p for p in tied.places if cuts[stage] <= p[0] < cuts[stage + 1])
                parameter = built[block - cuts[stage]].get_parameter(name)
                if parameter.requires_grad:
                    found.append(TiedParameter(tied.index, stages, parameter))
        return found

    def _values_from_earlier_blocks(self, start: int, stop: int) -> dict[int, nn.Parameter]:
        """Return, by index, the tied parameters of these blocks whose first block is before `start`.

        To obtain the values, these first blocks are built, one at a time.
        """
        owners: dict[int, list[TiedParameterName]] = {}
        for tied in self.tied:
            if tied.blocks[0] < start and any(start <= block < stop for block in tied.blocks):
                owners.setdefault(tied.blocks[0], []).append(tied)
        found = {}
        for owner, those in owners.items():
            block = self._initialised_block(owner)
            found.update({tied.index: block.get_parameter(tied.places[0][1]) for tied in those})
            del block
        return found

    def _initialised_block(self, index: int) -> nn.Module:
        """Return an allocated block with initial values, which do not depend on other blocks."""
        block = copy.deepcopy(self.blocks[index])
        _materialise(block)
        counted = {name: (tensor, tensor._version) for name, tensor in _tensors(block)}
        with _seeded_generator(self._seed, index):
            if self._reset:
                _reset_parameters(block)
            if self._init is not None:
                self._init(block, index)
        self._refuse_unset(index, block, counted)
        return block

    def _values_from_earlier(self, index: int) -> set[str]:
        """Return the names of this block's parameters whose values come from an earlier block."""
        places = (place for tied in self.tied for place in tied.places if tied.blocks[0] < index)
        return {name for block, name in places if block == index}

    # -- refusals ----------------------------------------------------------------------------------

    def _block_label(self, index: int) -> str:
        return f'block {index} ("{self.names[index]}", {type(self.blocks[index]).__name__})'

    def _refuse_memory(self) -> None:
        for index, block in enumerate(self.blocks):
            for name, tensor in _tensors(block):
                if is_lazy(tensor):
                    raise ConfigError(
                        f'"{name}" of {self._block_label(index)} is a lazy tensor, whose shape is unknown',
                        remedy="use modules whose shapes are known when they are created",
                    )
                if tensor.device.type != "meta":
                    raise ConfigError(
                        f'"{name}" of {self._block_label(index)} is on {tensor.device}; its values would be '
                        "lost",
                        remedy='create the model under torch.device("meta"), or pass a function that '
                        "creates it",
                    )
            for path, module in block.named_modules():
                for name, value in vars(module).items():
                    if isinstance(value, Tensor) and value.device.type == "meta":
                        raise ConfigError(
                            f'"{f"{path}.{name}".lstrip(".")}" of {self._block_label(index)} is a tensor '
                            "that is neither a parameter nor a buffer, so no stage would have its values",
                            remedy=f'use self.register_buffer("{name}", ..., persistent=False), with its '
                            "values from init=; or create it in forward",
                        )

    def _refuse_lost_values(self, index: int) -> None:
        """Raise `ConfigError` if the constructor of a block has written values that would be lost.

        This is assumed if it has written to a parameter more often than `reset_parameters` does.
        """
        fresh = copy.deepcopy(self.blocks[index])
        before = {name: parameter._version for name, parameter in fresh.named_parameters()}
        _reset_parameters(fresh)
        after = {name: parameter._version - before[name] for name, parameter in fresh.named_parameters()}
        made = dict(self.blocks[index].named_parameters())
        lost = [name for name, count in after.items() if made[name]._version > count > 0]
        lost = [name for name in lost if name not in self._values_from_earlier(index)]
        if lost:
            raise ConfigError(
                f"the constructor gives {_abbreviate_names(lost)} of {self._block_label(index)} values "
                "that reset_parameters does not set; they are lost on the meta device",
                remedy="pass init=, a function of (block, its number) that sets them; to use the values of "
                "reset_parameters, pass init=lambda block, number: None",
            )

    def _refuse_unset(self, index: int, block: nn.Module, before: dict[str, tuple[Tensor, int]]) -> None:
        unset = [name for name, tensor in _tensors(block) if _is_unset(tensor, *before[name])]
        unset = [name for name in unset if name not in self._values_from_earlier(index)]
        if unset:
            raise ConfigError(
                f"{_abbreviate_names(unset)} of {self._block_label(index)} got no value from reset_parameters"
                f"{' or init' if self._init else ''}",
                remedy="pass init=, a function of (block, its number) that sets them; values that a "
                "constructor writes on the meta device are lost",
            )


def find_tied_parameters(blocks: Sequence[nn.Module]) -> tuple[TiedParameterName, ...]:
    """Return the parameters that more than one block holds, in the order in which they first occur."""
    places: dict[int, list[tuple[int, str]]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for index, block in enumerate(blocks):
        for name, parameter in block.named_parameters(remove_duplicate=False):
            places.setdefault(id(parameter), []).append((index, name))
            parameters[id(parameter)] = parameter
    several = [key for key, where in places.items() if len({block for block, _ in where}) > 1]
    return tuple(
        TiedParameterName(number, tuple(places[key]), parameters[key].nbytes)
        for number, key in enumerate(several)
    )


def _tensors(block: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from block.named_parameters()
    yield from block.named_buffers()


def _abbreviate_names(names: Sequence[str]) -> str:
    quoted = ", ".join(f'"{name}"' for name in names[:4])
    return f"{quoted} and {len(names) - 4} more" if len(names) > 4 else quoted


@torch.no_grad()
def _materialise(block: nn.Module) -> None:
    """Allocate all tensors of a block on the CPU; fill floating-point and complex tensors with NaN.

    Unlike `to_empty`, this keeps shared tensors shared.
    """
    made: dict[int, Any] = {}
    for module in block.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in list(held.items()):
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    empty = torch.empty_like(tensor, device="cpu")
                    if empty.is_floating_point() or empty.is_complex():
                        empty.fill_(torch.nan)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                setattr(module, name, made[id(tensor)])  # an LSTM also keeps its weights in a list


def _set_parameter(block: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, last = name.rpartition(".")
    setattr(block.get_submodule(path), last, parameter)


@torch.no_grad()
def _reset_parameters(module: nn.Module) -> None:
    """Call `reset_parameters` of all modules with tensors, children first and in order, as constructors do.

    `nn.MultiheadAttention` calls this method `_reset_parameters`.
    """
    for child in module.children():
        _reset_parameters(child)
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    held = (*module._parameters.values(), *module._buffers.values())
    if callable(reset) and any(tensor is not None for tensor in held):
        reset()


def _is_unset(tensor: Tensor, before: Tensor, version: int) -> bool:
    """Return whether a tensor has no value yet.

    A floating-point or complex tensor has none if it contains NaN.  Any other tensor has none if it is still
    the object `before` and has not been written to since its version was `version`.
    """
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return tensor is before and tensor._version == version and tensor.numel() > 0


@contextmanager
def _seeded_generator(seed: int, index: int) -> Iterator[None]:
    """Return a context manager that seeds the CPU's generator for a block and restores it on exit."""
    with borrowed_generators(torch.device("cpu")):
        torch.default_generator.manual_seed(derive_initial_seed(seed, index))
        yield
