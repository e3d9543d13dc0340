"""A model's base (frozen parameters, which each worker loads itself), its digest, and a check for changes.

    model.parameters()    trained, or named in send_frozen=   in every state: joins, checkpoints, digests
                          frozen, that is, the base           never sent; a digest of the values is compared
                                                              once, when a worker joins

Which parameters belong to the base is decided when the optimizer is wrapped.  The base of a pipeline is the
base of the whole model, so that each worker can hold any stage.  To compute its digest, a worker that joins
builds the blocks with frozen parameters one at a time.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gridtrain.config import BASES
from gridtrain.core.messages import BASE_FACT, Facts
from gridtrain.errors import ConfigError, RemoteProtocolError, describe_type
from gridtrain.quantities import format_bytes, format_count
from gridtrain.training.checkpoint.flat_gradient import canonical_parameters, describe_parameters

FROZEN_KEY = "frozen"
"""Key of a checkpoint's document: the names of the base's parameters, which no checkpoint contains; in a
stage's checkpoint, also the names of the other frozen parameters, which the document contains."""

_MARK = "_gridtrain_base"
_CHUNK_BYTES = 64 << 20
_SAMPLED_ELEMENTS = 64
_MAX_THREADS = 8
_UNREADABLE = (AttributeError, NotImplementedError, RuntimeError, TypeError)
_OWN_PROCESS = re.compile(r" at 0x[0-9a-fA-F]+|device\(type='\w+'(, index=\d+)?\)")


def is_base(parameter: Tensor) -> bool:
    """Whether the parameter belongs to the base; False before its model's optimizer is wrapped."""
    return getattr(parameter, _MARK, False) is True


def state_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that are part of the state, as `canonical_parameters` returns them."""
    return [(name, parameter) for name, parameter in canonical_parameters(model) if not is_base(parameter)]


def without_base(model: nn.Module, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a state, excluding the base, which states of earlier versions contain.

    Raises:
        RemoteProtocolError: the state's base differs from this worker's.
    """
    base = {name: parameter for name, parameter in canonical_parameters(model) if is_base(parameter)}
    for name in base.keys() & parameters.keys():
        if not _is_equal(base[name], parameters[name]):
            raise RemoteProtocolError(
                f"the state was trained on a different base: its frozen parameter {name!r} differs from "
                "this worker's",
                remedy="load the base with which the run was started, in the same dtype",
            )
    return {name: value for name, value in parameters.items() if name not in base}


class FrozenBase:
    """The base of one model.

    Args:
        model: the model, in which the script has already frozen parameters.
        sent: patterns (`fnmatch`) of the names of frozen parameters that are part of the state, because each
            process initializes or changes them.
        rule: "exact" if all workers must have the same values; "any" if each worker may have its own.
        pieces: for a model without values, a function that yields modules one at a time; together they
            contain its frozen parameters, with their values and under their names in the model.

    Raises:
        ConfigError: `rule` is unknown, or a pattern matches no frozen parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sent: Sequence[str] = (),
        rule: str = "exact",
        pieces: Callable[[], Iterable[nn.Module]] | None = None,
    ) -> None:
        if rule not in BASES:
            raise ConfigError(
                f"base is {rule!r}; it must be one of {', '.join(BASES)}", remedy='use base="exact"'
            )
        patterns = (sent,) if isinstance(sent, str) else tuple(sent)
        frozen = [(name, p) for name, p in canonical_parameters(model) if not p.requires_grad]
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name, _ in frozen):
                raise ConfigError(
                    f"send_frozen contains {pattern!r}, but no frozen parameter matches it",
                    remedy="use names of model.named_parameters() with requires_grad=False, or patterns such "
                    'as "*.embed_tokens.weight"',
                )
        self.rule = rule
        self._model = model
        self._named = [
            (name, p) for name, p in frozen if not any(fnmatchcase(name, pattern) for pattern in patterns)
        ]
        self._pieces = pieces or (lambda: (model,))
        self._is_worth_reading = rule != "any" or pieces is None  # building the pieces takes time
        first = {id(parameter): name for name, parameter in self._named}
        named = model.named_parameters(remove_duplicate=False)
        self._names = {name: first[id(p)] for name, p in named if id(p) in first}  # also of tied ones
        self.mark(model)
        self._digest: bytes | None = None
        self._samples: dict[str, bytes] = {}
        self._checks = 0

    def mark(self, module: nn.Module) -> None:
        """Mark the parameters of the base in the model, or in a part of it that was rebuilt."""
        for name, parameter in module.named_parameters():
            if name in self._names:
                setattr(parameter, _MARK, True)
            elif is_base(parameter):  # of an earlier run in this process
                delattr(parameter, _MARK)

    def _parameters_in(self, module: nn.Module) -> dict[str, nn.Parameter]:
        found = module.named_parameters()
        return {self._names[name]: parameter for name, parameter in found if name in self._names}

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors of the base, including the scales of quantized ones."""
        moved = _moved_scales(self._model)
        return sum(_nbytes(parameter, moved.get(id(parameter))) for _, parameter in self._named)

    def digest(self) -> bytes:
        """Return a 32-byte digest of names, shapes, dtypes and values.  It is computed once, at about 1 GB a
        second on each of up to 8 cores.

        Raises:
            ConfigError: the values of a parameter cannot be read.
        """
        if self._digest is None:
            digests: dict[str, bytes] = {}
            with ThreadPoolExecutor(max(1, min(_MAX_THREADS, os.cpu_count() or 1))) as pool:
                for piece in self._pieces():
                    moved, held = _moved_scales(piece), self._parameters_in(piece)
                    scales = [moved.get(id(parameter)) for parameter in held.values()]
                    found = pool.map(_digest_of, held, held.values(), scales)
                    digests |= dict(zip(held, found, strict=True))
                    self._samples |= {name: _sample_bytes(p) for name, p in held.items()}
            total = hashlib.sha256()
            for name, digest in sorted(digests.items()):
                total.update(f"{len(name)} {name} ".encode() + digest)
            self._digest = total.digest()
        return self._digest

    def describe(self) -> str:
        """Return the size and the digest; "" if there is no base.

        Raises the same errors as `digest`, unless each worker may have its own base.
        """
        if not self._named:
            return ""
        try:
            digest = self.digest().hex()[:12] if self._is_worth_reading else "unknown"
        except ConfigError:
            if self.rule != "any":
                raise
            digest = "unknown"
        count = len(self._named)
        return f"{format_bytes(self.nbytes)} in {count} frozen tensor{'s' * (count > 1)}, digest {digest}"

    @property
    def origin(self) -> str:
        """The model's name on the Hub with its revision, or the name of its folder, as transformers records
        it; "" if there is no base, or if the model has no such record."""
        config = getattr(self._model, "config", None)
        name, revision = getattr(config, "_name_or_path", ""), getattr(config, "_commit_hash", None)
        if not self._named or not isinstance(name, str) or not name:
            return ""
        is_path = os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") > 1
        if is_path or os.path.isdir(name):  # a folder may have been removed
            return os.path.basename(os.path.abspath(name))
        return f"{name}@{revision[:12]}" if isinstance(revision, str) else name

    def facts(self) -> Facts:
        """Return the fact about the base that must be equal on all workers.  Returns no fact for a model
        without a base, unless each worker may have its own base.  Raises the same errors as `describe`."""
        if self.rule == "any":
            return ((BASE_FACT, "any"),)
        return ((BASE_FACT, self.describe()),) if self._named else ()

    def describe_model(self) -> str:
        """Return the description of the model that must be equal on all workers."""
        compared = state_parameters if self.rule == "any" else canonical_parameters
        return describe_parameters(compared(self._model))

    def check_unchanged(self, part: nn.Module | None = None) -> None:
        """Raise `ConfigError` if values of the base, or of its part in `part`, have changed since the digest
        was computed.

        Only some elements of each floating-point tensor are compared, which is enough to detect changes to
        whole tensors.
        """
        if self._digest is None or self.rule == "any":
            return
        held = self._parameters_in(self._model if part is None else part)
        if changed := [name for name, p in held.items() if _sample_bytes(p) != self._samples[name]]:
            raise ConfigError(
                f"{format_count(len(changed), 'frozen parameter')} changed after the worker joined, such as "
                f"{changed[0]!r}; they are not part of the state that other workers receive",
                remedy="name the parameters that the script changes in grid.optimizer(..., send_frozen=...), "
                "or register them as buffers; if the script calls PEFT's merge_adapter() and "
                "unmerge_adapter() to evaluate, which rounds the base, evaluate without merging, or "
                "on a copy",
            )

    def check_sometimes(self, part: nn.Module | None = None) -> None:
        """Call `check_unchanged` on the first, second, fourth, ... call to this method."""
        self._checks += 1
        if self._checks & (self._checks - 1) == 0:
            self.check_unchanged(part)


def _digest_of(name: str, parameter: Tensor, moved_scales: Tensor | None = None) -> bytes:
    """Return the SHA-256 of a parameter's shapes, dtypes, bytes in logical order and wrappers' contexts.

    Raises:
        ConfigError: the values cannot be read; the message contains `name`.
    """
    total = hashlib.sha256()
    try:
        for part in _parts(parameter, moved_scales):
            if isinstance(part, str):
                total.update(f"{part};".encode())
                continue
            total.update(f"{part.dtype} {tuple(part.shape)};".encode())
            for chunk in _chunks(part):
                total.update(chunk)
    except _UNREADABLE as error:
        said = (str(error).splitlines() or [""])[0][:200]
        raise ConfigError(
            f"the values of the frozen parameter {name!r} cannot be read: it is {describe_type(parameter)} "
            f"on {parameter.device}: {said}",
            remedy='load the model completely before grid.batches(...), or pass base="any"',
        ) from error
    return total.digest()


def _moved_scales(model: nn.Module) -> dict[int, Tensor]:
    """Return the scales of bitsandbytes' 8-bit weights that a first forward pass has moved from the weight to
    the layer's `state`, by the weight's `id`."""
    found = {}
    for module in model.modules():
        scales, weight = getattr(vars(module).get("state"), "SCB", None), module._parameters.get("weight")
        if isinstance(scales, Tensor) and weight is not None:
            found[id(weight)] = scales
    return found


def _parts(tensor: Tensor, moved_scales: Tensor | None = None) -> Iterator[Tensor | str]:
    """Yield the tensors and strings that determine the values of `tensor`.

    A plain tensor yields itself; bitsandbytes' 4-bit and 8-bit tensors also yield their scales; a wrapper,
    such as a quantized tensor of torchao, yields its inner tensors, and its context as a string.
    """
    if (state := getattr(tensor, "quant_state", None)) is not None:
        yield from (value for _, value in sorted(state.as_dict(packed=True).items()))
    if isinstance(scales := getattr(tensor, "SCB", None), Tensor):
        yield scales
    elif moved_scales is not None:
        yield moved_scales
    values = getattr(tensor, "CB", None)
    if isinstance(values, Tensor) and not _is_same(values, tensor.detach()):
        yield values
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor.detach()
        return
    names, context = flatten()
    yield _OWN_PROCESS.sub("", repr(context))
    for name in names:
        yield from _parts(getattr(tensor, name))


def _is_same(copied: Tensor, values: Tensor) -> bool:
    """Whether an 8-bit tensor's `CB`, which the first forward pass removes, only duplicates the values."""
    if (copied.shape, copied.dtype, copied.device) != (values.shape, values.dtype, values.device):
        return False
    return copied.is_meta or torch.equal(copied, values)


@torch.no_grad()
def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes in logical order, without copying a contiguous tensor on the CPU."""
    flat = tensor.reshape(-1)
    step = max(1, _CHUNK_BYTES // flat.element_size())
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step].cpu().contiguous().view(torch.uint8).numpy().data


@torch.no_grad()
def _sample_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of some elements; b"" for quantized values, because no script trains them, and
    libraries repack them."""
    if not tensor.is_floating_point() or hasattr(tensor, "__tensor_flatten__"):
        return b""
    flat = tensor.reshape(-1)
    piece = flat[:: max(1, flat.numel() // _SAMPLED_ELEMENTS)]
    return piece.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _nbytes(parameter: Tensor, moved_scales: Tensor | None = None) -> int:
    try:
        parts = list(_parts(parameter, moved_scales))
    except _UNREADABLE:  # `digest` reports it
        parts = [parameter]
    return sum(part.numel() * part.element_size() for part in parts if isinstance(part, Tensor))


def _is_equal(own: Tensor, value: Any) -> bool:
    """Whether `value` is a tensor of the same shape, dtype and bits; False for wrappers."""
    if not isinstance(value, Tensor) or hasattr(own, "__tensor_flatten__"):
        return False
    is_alike = (value.shape, value.dtype) == (own.shape, own.dtype)
    return is_alike and all(map(np.array_equal, _chunks(own.detach()), _chunks(value)))
