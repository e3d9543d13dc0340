"""The replicated state as bytes for newcomers and checkpoints, and the digests that compare replicas.

    private part   buffers:      {name: tensor}
                   trackers:     {name: state_dict} of schedulers, weight averages, ...
                   settings:     the settings of the optimizer's groups
    shared part    parameters:   {name: tensor}
                   optimizer:    the state_dict of the optimizer that applies updates

    each part      u64 J | u64 T | J bytes of JSON | T bytes of safetensors

In the JSON, {"tensor": "7"} stands for tensor 7.  Parameters of the model's base, which are frozen, are in
neither part (see `frozen_base`).

The shared part is bit-identical on all members.  The private part may differ until buffers are next averaged;
a worker that has replayed all updates needs only this part.  Neither part contains residuals: every
worker has its own, and a newcomer starts without a residual.  Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from gridtrain.errors import ConfigError, RemoteProtocolError, describe_type
from gridtrain.training.checkpoint.flat_gradient import canonical_parameters, canonical_state
from gridtrain.training.checkpoint.frozen_base import (
    FROZEN_KEY,
    is_base,
    state_parameters,
    without_base,
)
from gridtrain.training.checkpoint.hyperparameters import (
    hyperparameter_digest,
    load_hyperparameters,
    plain_groups,
)
from gridtrain.training.checkpoint.model_buffers import assign, buffers_of
from gridtrain.training.checkpoint.nested_values import DTYPES, Packer, tensor_bytes, unpack

_T = TypeVar("_T")

_MAX_DIMENSIONS = 64  # as in numpy

_LENGTHS, _WORD = struct.Struct("<2Q"), struct.Struct("<Q")
_PARTS = ("parameters", "buffers", "optimizer", "settings")
_PACKED = ("parameters", "buffers", "optimizer", "trackers")


class Stateful(Protocol):
    """An object with a state_dict, such as a scheduler, a weight average or a GradScaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


Trackers = Mapping[str, Stateful]


@dataclass(frozen=True, slots=True)
class TurnStartState:
    """Optimizer settings and trackers at the start of a turn; see `turn_start_state`.

    Attributes:
        param_groups: the optimizer's groups as in a state_dict, where parameters are numbers.
        trackers: the trackers' state_dicts by name.
    """

    param_groups: list[dict[str, Any]]
    trackers: Mapping[str, Any]


def check_stateful(trackers: Trackers) -> None:
    """Raise `ConfigError` for an object without `state_dict` or `load_state_dict`, or whose state cannot be
    sent or loaded: the run would fail when the first newcomer joins, and could not save its state either."""
    for name, each in trackers.items():
        if not all(callable(getattr(each, method, None)) for method in ("state_dict", "load_state_dict")):
            raise ConfigError(
                f"grid.track was given {name}={each!r:.80}, which does not have state_dict or "
                "load_state_dict",
                remedy="track an object that has both, such as a scheduler",
            )
        packer = Packer(copies=False)
        packer.pack(each.state_dict(), name)
        check_loadable(name, packer.tensors.values())


def check_loadable(name: str, tensors: Iterable[Tensor]) -> None:
    """Raise `ConfigError` if one of the tensors cannot receive another value."""
    if any(tensor.is_inference() for tensor in tensors):
        raise ConfigError(
            f"{name} has a tensor made under torch.inference_mode, into which no state can be loaded",
            remedy="make it under torch.no_grad instead",
        )


INTERNAL_PREFIX = ":"
"""The prefix of the names of trackers that no script has named.  A worker may have no such tracker.  If it
has one that a received state lacks (because the state comes from an older version, or from a worker without a
loss scale), the tracker stays as it is."""


def _invalid_state(reason: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"this is not a training state: {reason}", remedy="request the state from another worker"
    )


@contextmanager
def _reading() -> Iterator[None]:
    """Raise `RemoteProtocolError` in place of errors caused by a state that `pack_state` did not write."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _invalid_state(f"{type(error).__name__}: {error}") from error


def capture_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    trackers: Trackers,
    *,
    whole: bool = True,
    start: TurnStartState | None = None,
    anchors: Mapping[Tensor, Tensor] = MappingProxyType({}),
) -> list[memoryview]:
    """Copy and serialize the state: the private part and, if `whole`, the shared part.

    Args:
        start: the settings and trackers to use instead of the current ones.
        anchors: by parameter, the values to use instead of the current ones.

    Raises:
        ConfigError: a state_dict contains a value that is neither a tensor nor plain data.
    """
    own, common = Packer(copies=False), Packer(copies=False)
    private = {
        "buffers": own.pack(dict(buffers_of(model)), "model"),
        "trackers": {name: own.pack(state, name) for name, state in _states_of(trackers, start)},
        "settings": own.pack(plain_groups((start or optimizer).param_groups), "optimizer"),
    }
    if not whole:
        return [_frame(private, own.tensors)]
    shared = {
        "parameters": common.pack({name: anchors.get(p, p) for name, p in state_parameters(model)}, "model"),
        "optimizer": common.pack(_state_of(optimizer, start), "optimizer"),
    }
    return [_frame(private, own.tensors), _frame(shared, common.tensors)]


def _state_of(optimizer: torch.optim.Optimizer, start: TurnStartState | None) -> dict[str, Any]:
    """Return the optimizer's state_dict with the settings of `start`.  The rest of the state_dict does not
    change during a turn."""
    state = optimizer.state_dict()
    return state if start is None else {"state": state["state"], "param_groups": start.param_groups}


def _states_of(trackers: Trackers, start: TurnStartState | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each tracker's name and its state_dict: the one in `start`, if any, or else the current one."""
    earlier = start.trackers if start is not None else {}
    for name, item in trackers.items():
        yield name, earlier[name] if name in earlier else item.state_dict()


def safetensors_pieces(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """Yield what `safetensors.torch.save` returns: the header, then the bytes of each tensor, uncopied if the
    tensor is contiguous and in host memory.

    `safetensors.torch.save` needs memory for two copies of all tensors.
    """
    kinds = list(DTYPES)
    order = sorted(tensors, key=lambda name: (-kinds.index(tensors[name].dtype), name))
    table: dict[str, dict[str, Any]] = {}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        shape, dtype = list(tensors[name].shape), DTYPES[tensors[name].dtype]
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % _WORD.size)
    yield memoryview(_WORD.pack(len(header)) + header)
    for name in order:
        yield tensor_bytes(tensors[name]).data


def _frame(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> memoryview:
    """Serialize a part of the state, with the tensors as `safetensors.torch.save` writes them.

    Each tensor is copied once, into the result, because the state may need most of the memory.  Other threads
    run meanwhile: numpy releases the interpreter lock while it copies, a memoryview does not.
    """
    text = json.dumps(document, separators=(",", ":")).encode()
    pieces = safetensors_pieces(tensors)
    header = next(pieces)
    tensors_bytes = len(header) + sum(tensor.nbytes for tensor in tensors.values())
    head = b"".join((_LENGTHS.pack(len(text), tensors_bytes), text, header))
    frame = np.empty(len(head) - len(header) + tensors_bytes, np.uint8)  # not filled with zeros first
    frame[: len(head)] = np.frombuffer(head, np.uint8)
    at = len(head)
    for piece in pieces:
        frame[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
    return frame.data.toreadonly()


def pack_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    trackers: Trackers,
    *,
    start: TurnStartState | None = None,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Copy the state; return a JSON document and the tensors that it names.  The arguments and the errors are
    those of `capture_state`."""
    packer = Packer()
    document = {
        "parameters": packer.pack(dict(state_parameters(model)), "model"),
        "buffers": packer.pack(dict(buffers_of(model)), "model"),
        "optimizer": packer.pack(_state_of(optimizer, start), "optimizer"),
        "trackers": {name: packer.pack(state, name) for name, state in _states_of(trackers, start)},
        "aliases": _aliases(model),
    }
    if base := [name for name, parameter in canonical_parameters(model) if is_base(parameter)]:
        document[FROZEN_KEY] = base
    return document, packer.tensors


def _aliases(model: nn.Module) -> dict[str, str]:
    """Return a mapping from the additional names of tied tensors to the names under which they are packed."""
    packed = {id(tensor): name for name, tensor in (*state_parameters(model), *buffers_of(model))}
    state = {name: x for name, x in model.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
    named = canonical_state(state)
    return {name: packed[id(x)] for name, x in named.items() if packed.get(id(x), name) != name}


def frame_state(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """Serialize the result of `pack_state` for `restore_state`."""
    return [_frame({name: document[name] for name in document if name in _PACKED}, tensors), b""]


def content_digest(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """Return a 32-byte digest of the result of `pack_state`.  Raises the same errors as `read_state`."""
    return _digest_of(read_state(document, tensors))


def initial_digest(model: nn.Module, optimizer: torch.optim.Optimizer, trackers: Trackers) -> bytes:
    """Return a 32-byte digest of the state's bits, without copying the state.  This takes about a second per
    gigabyte.

    The digest is equal on workers that have built the same model.  If a state_dict contains a value that is
    neither a tensor nor plain data, and therefore cannot be sent, the digest may differ between workers.
    """
    values = {
        "parameters": dict(state_parameters(model)),
        "buffers": dict(buffers_of(model)),
        "optimizer": optimizer.state_dict(),
        "trackers": {name: item.state_dict() for name, item in script_trackers(trackers).items()},
    }
    return _digest_of(values)


def script_trackers(trackers: Mapping[str, _T]) -> dict[str, _T]:
    """Return the trackers that all workers must have."""
    return {name: item for name, item in trackers.items() if not name.startswith(INTERNAL_PREFIX)}


def check_content(blobs: Sequence[bytes | memoryview], digest: bytes) -> None:
    """Check that the `content_digest` of a state from another worker is `digest`.

    Raises:
        RemoteProtocolError: the digests differ, or the blobs are not a state.
    """
    received = _digest_of(_parse_values(blobs))
    if received != digest:
        raise RemoteProtocolError(
            f"the received state has the digest {received.hex()[:12]}; the group's state has "
            f"{digest.hex()[:12]}",
            remedy="request the state from another worker",
        )


def _digest_of(values: Mapping[str, Any]) -> bytes:
    total = hashlib.blake2b(digest_size=32)
    for part in _PACKED:
        _hash(values.get(part), total)
    return total.digest()


def _hash(value: Any, total: hashlib.blake2b) -> None:
    """Add `value` to the digest `total`, unambiguously.  Values that were decoded from JSON and safetensors
    have the same digest as the originals."""
    match value:
        case Tensor():
            total.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
            total.update(tensor_bytes(value).data)
        case Mapping():
            total.update(f"dict {len(value)};".encode())
            for key in sorted(value, key=repr):
                total.update(f"key {key!r};".encode())
                _hash(value[key], total)
        case list() | tuple():
            total.update(f"{type(value).__name__} {len(value)};".encode())
            for item in value:
                _hash(item, total)
        case _:
            total.update(f"{type(value).__name__} {value!r};".encode())


@_reading()
def model_tensors(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return parameters and buffers by name, as a plain state_dict.  Raises `RemoteProtocolError` if a tensor
    is missing."""
    named = unpack(document["parameters"], tensors) | unpack(document["buffers"], tensors)
    named |= {alias: named[name] for alias, name in document.get("aliases", {}).items()}
    return {str(name): tensor for name, tensor in named.items()}


def restore_state(
    blobs: bytes | memoryview | Sequence[bytes | memoryview],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    trackers: Trackers,
) -> None:
    """Make model, optimizer and trackers bit-identical to a captured state.  A private part alone restores
    only buffers, trackers and the optimizer's settings.

    Args:
        blobs: the parts that `capture_state` returned, separate or joined.

    Raises:
        RemoteProtocolError: the blobs are not a state, or the state does not match the model, the optimizer
            or the trackers.  Nothing is changed before parameters and buffers have been checked.
    """
    parts = [blobs] if isinstance(blobs, bytes | memoryview) else blobs
    load_state(_parse_values(parts), model, optimizer, trackers)


def _parse_values(blobs: Sequence[bytes | memoryview]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    parts = 0
    for blob in blobs:
        data, end = memoryview(blob).cast("B"), 0
        while end < len(data) or not parts:
            if parts == 2:
                raise _invalid_state(f"{len(data) - end} bytes follow its end")
            part, end = _parse(data, end)
            values, parts = values | part, parts + 1
    return values


def load_state(
    values: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, trackers: Trackers
) -> None:
    """Load the result of `read_state`, or values that were built from it.  Raises the same errors as
    `restore_state`."""
    whole = "parameters" in values
    try:
        parameters = values["parameters"] if whole else {}
        buffers, tracked = values["buffers"], values["trackers"]
        optimizer_state = values["optimizer"] if whole else None
        settings = None if whole else values["settings"]
    except KeyError as error:
        raise _invalid_state(f"{error} is missing") from error
    if whole and not _has_named_groups(optimizer_state):
        raise _invalid_state("the optimizer's groups are not a list of named values")
    if not isinstance(tracked, dict) or not all(isinstance(name, str) for name in tracked):
        raise _invalid_state("the trackers are not named values")
    theirs, mine = script_trackers(tracked), script_trackers(trackers)
    if theirs.keys() != mine.keys():
        raise RemoteProtocolError(
            f"the state tracks {sorted(theirs)}, but this worker tracks {sorted(mine)}",
            remedy="call grid.track(...) with the same names on all workers before the first batch",
        )
    own_parameters, own_buffers = dict(state_parameters(model)), dict(buffers_of(model))
    if whole:
        parameters = without_base(model, parameters) if isinstance(parameters, dict) else parameters
        _check_same("parameters", parameters, own_parameters)
    _check_same("buffers", buffers, own_buffers)
    with torch.no_grad():
        for name, parameter in own_parameters.items() if whole else ():
            parameter.copy_(parameters[name])
        for name, buffer in own_buffers.items():
            assign(buffer, buffers[name])
    try:
        if optimizer_state is not None:
            optimizer.load_state_dict(optimizer_state)
            keep_dtypes(optimizer, optimizer_state.get("state"))
        else:
            load_hyperparameters(optimizer, settings)
        for name, item in trackers.items():
            if name in tracked:
                item.load_state_dict(tracked[name])
    except Exception as error:  # a user's classes with a peer's state may raise anything
        raise RemoteProtocolError(
            f"the optimizer's or a tracker's state cannot be loaded: {type(error).__name__}: {error}",
            remedy="build optimizer and schedulers in the same way on all workers",
        ) from error


def keep_dtypes(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Restore the original dtypes after `load_state_dict`, which casts tensors to their parameters' dtype.

    NAdam and ASGD keep float32 scalars for parameters of any dtype, and some other optimizers may keep
    float32 moments for bfloat16 parameters.
    """
    _keep_dtypes(optimizer.state_dict().get("state"), state)


def _keep_dtypes(own: Any, came: Any) -> None:
    if isinstance(own, dict) and isinstance(came, Mapping):
        places: Any = own.keys() & came.keys()
    elif isinstance(own, list) and isinstance(came, list | tuple):
        places = range(min(len(own), len(came)))
    else:
        return
    for place in places:
        mine, theirs = own[place], came[place]
        if not isinstance(mine, Tensor) or not isinstance(theirs, Tensor):
            _keep_dtypes(mine, theirs)
        elif mine.is_floating_point() and theirs.is_floating_point() and mine.dtype != theirs.dtype:
            own[place] = theirs.detach().to(mine.device, copy=True)


def _parse(data: memoryview, start: int) -> tuple[dict[str, Any], int]:
    """Parse the part that begins at `start`; return the part and its end."""
    if len(data) - start < _LENGTHS.size:
        raise _invalid_state(f"it ends after {len(data)} bytes, in the header of a part")
    text_bytes, tensors_bytes = _LENGTHS.unpack_from(data, start)
    begin = start + _LENGTHS.size
    if text_bytes + tensors_bytes > len(data) - begin:
        raise _invalid_state(
            f"it is {len(data)} bytes long; according to its header, it must be at least "
            f"{begin + text_bytes + tensors_bytes} bytes long"
        )
    end = begin + text_bytes
    try:
        document = json.loads(bytes(data[begin:end]))
        tensors = _read_tensors(data[end : end + tensors_bytes])
    except (ValueError, RuntimeError) as error:  # among them RecursionError
        raise _invalid_state(str(error)) from error
    if not isinstance(document, dict):
        raise _invalid_state(f"its JSON is {describe_type(document)}")
    return read_state(document, tensors), end + tensors_bytes


@_reading()
def _read_tensors(data: memoryview) -> dict[str, Tensor]:
    """Return copies of the tensors that `safetensors_pieces` has written.

    Other threads run meanwhile; `safetensors.torch.load` holds the interpreter lock.
    """
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    begin = _WORD.size + int.from_bytes(data[: _WORD.size], "little")
    table = json.loads(bytes(data[_WORD.size : begin]))
    tensors: dict[str, Tensor] = {}
    at = begin
    for name, entry in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = dtypes[entry["dtype"]], entry["shape"]
        if len(shape) > _MAX_DIMENSIONS or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"a tensor has the shape {str(shape)[:80]}")
        end = at + math.prod(shape) * dtype.itemsize
        if entry["data_offsets"] != [at - begin, end - begin] or end > len(data):
            raise ValueError(f"the bytes of tensor {name!r:.80} are not where its shape puts them")
        copy = np.frombuffer(data[at:end], np.uint8).copy()
        tensors[name] = torch.from_numpy(copy).view(dtype).reshape(shape)
        at = end
    if at != len(data):
        raise ValueError(f"the tensors end at byte {at} of {len(data)}")
    return tensors


@_reading()
def read_state(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Unpack the values and return them by part: parameters, buffers, ...  Raises the same errors as
    `restore_state`."""
    trackers = document.get("trackers")
    values = {name: unpack(document[name], tensors) for name in _PARTS if name in document}
    if trackers is not None:
        values["trackers"] = {name: unpack(state, tensors) for name, state in trackers.items()}
    return values


def _has_named_groups(state: Any) -> bool:
    """Whether the groups are a list of dicts whose keys are names, as in every `Optimizer.state_dict()`;
    torch would also accept other groups."""
    groups = state.get("param_groups") if isinstance(state, dict) else None
    return isinstance(groups, list) and all(
        isinstance(group, dict) and all(isinstance(name, str) for name in group) for group in groups
    )


def _check_same(what: str, theirs: Any, own: Mapping[str, Tensor]) -> None:
    if not isinstance(theirs, dict) or not all(
        isinstance(name, str) and isinstance(t, Tensor) for name, t in theirs.items()
    ):
        raise _invalid_state(f"{what} are not named tensors")
    described = {name: (tuple(t.shape), t.dtype) for name, t in theirs.items()}
    expected = {name: (tuple(t.shape), t.dtype) for name, t in own.items()}
    different = sorted(n for n in described.keys() | expected.keys() if described.get(n) != expected.get(n))
    if different:
        first = different[0]
        raise RemoteProtocolError(
            f"{what} differ ({len(different)} in all); the first is {first!r}: "
            f"{described.get(first, 'absent')} in the state, {expected.get(first, 'absent')} on this worker",
            remedy="run the same model code on all workers",
        )


def pack_private(state: Mapping[str, Any], tensors: dict[str, Tensor]) -> Any:
    """Pack an additional state for a checkpoint: return its JSON, and add copies of its tensors to
    `tensors`."""
    return Packer(tensors).pack(state, "optimizer")


@_reading()
def unpack_private(node: Any, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the state that was passed to `pack_private`.  Raises `RemoteProtocolError` if `node` is not its
    result."""
    return dict(unpack(node, tensors))


def replica_digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    """Return a 32-byte digest of the bits of the parameters in the state, the optimizer's state and its
    hyperparameters.

    Buffers are left out, because they may differ until they are next averaged.
    """
    packer = Packer(copies=False)
    layout = {
        "parameters": packer.pack(dict(state_parameters(model)), "model"),
        "state": packer.pack(_sorted(optimizer.state_dict()["state"]), "optimizer"),
    }
    total = hashlib.blake2b(json.dumps(layout).encode(), digest_size=32)
    for tensor in packer.tensors.values():
        total.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor_bytes(tensor).data)
    total.update(hyperparameter_digest(optimizer))
    return total.digest()


def _sorted(state: Any) -> Any:
    return {k: _sorted(state[k]) for k in sorted(state, key=str)} if isinstance(state, dict) else state
