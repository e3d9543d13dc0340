"""A model's gradients as one flat float32 vector: their order and device, and frozen and tied parameters.

    named_parameters: trainable, without duplicates           flat_N, float32, on one device
    embed.weight (256, 64)   |  block.0.weight (64, 64)  |    ----- views_P -----
    head.weight  = embed.weight                          |    [ embed.weight | block.0.weight | ... | used ]

`used`, which is optional, has one element for each parameter: 1 if the parameter has a gradient, 0 if its
gradient is None.  In a weighted sum over workers, the element is 0 only if the gradient is None on all of
them.

A gradient with a different dtype or device is converted when it is gathered, and the update is converted when
it is scattered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from gridtrain.errors import ConfigError
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.quantities import format_count

_COMPILED = "_orig_mod."
_DATA_PARALLEL = "module."

_BLOCK = 1 << 17
"""The number of elements in a block, per thread.  With smaller blocks, the additional calls would take more
time than is saved in transfers from the third-level cache."""


def canonical_names(names: Sequence[str]) -> list[str]:
    """Return the names of the plain model, without the prefixes of torch.compile and DataParallel.

    `module.` is removed only if all names begin with it; otherwise it is one of the model's own sub-modules.
    """
    plain = [name.replace(_COMPILED, "") for name in names]
    while plain and all(name.startswith(_DATA_PARALLEL) for name in plain):
        plain = [name.removeprefix(_DATA_PARALLEL) for name in plain]
    return plain


def canonical_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `state_dict` under the names of the plain model."""
    return dict(zip(canonical_names(list(state)), state.values(), strict=True))


def canonical_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the pairs (name, parameter) in the model's order; tied parameters occur once, under their first
    name."""
    named = list(model.named_parameters(remove_duplicate=True))
    return list(zip(canonical_names([name for name, _ in named]), (p for _, p in named), strict=True))


def describe_parameters(parameters: Sequence[tuple[str, nn.Parameter]]) -> str:
    """Return the number of parameters, and a digest of their names, shapes, dtypes and requires_grad, but
    not of their values."""
    lines = [f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in parameters]
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=32).hexdigest()
    trainable = sum(p.numel() for _, p in parameters if p.requires_grad)
    frozen = sum(p.numel() for _, p in parameters) - trainable
    also = f" (and {frozen} frozen)" if frozen else ""
    return f"{trainable} parameters{also} in {len(parameters)} tensors, digest {digest[:12]}"


class FlatGradient:
    """The flat vector, with a view for every trainable parameter.

    Args:
        model: the model whose trainable parameters take part.
        optimizer: the model's optimizer; it must have all of these parameters, and no others.
        device: the device of the vector: the CPU or, by default, the device of the first parameter.
        has_used: whether the vector ends with `used`; if so, `scatter` sets a parameter's `grad` to None if
            the parameter's element of `used` is 0.
        allows_sparse: whether modules with sparse gradients are accepted; `gather` refuses these gradients.

    Raises:
        ConfigError: model and optimizer do not match, a parameter cannot take part, or `device` is neither of
            these two devices.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str | None = None,
        *,
        has_used: bool = False,
        allows_sparse: bool = False,
    ) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        _check_trainable(model, held, allows_sparse=allows_sparse)
        self._optimizer, self._optimizer_parameters = optimizer, [id(p) for p in held]
        self._model, self._checks = model, 0
        self._named = [(name, p) for name, p in canonical_parameters(model) if p.requires_grad]
        self._frozen = [(name, p) for name, p in canonical_parameters(model) if not p.requires_grad]
        sizes = [p.numel() for _, p in self._named]
        own = self._named[0][1].device
        chosen = own if device is None else exchange_device(device, own)
        self.flat_N = torch.zeros(
            sum(sizes) + has_used * len(sizes),
            dtype=torch.float32,
            device=chosen,
            pin_memory=chosen.type == "cpu" and own.type == "cuda",  # makes the copies in each step faster
        )
        self.swap(self.flat_N)
        self.scale = 1.0  # factor of the gradients when they are gathered
        self._hooks: list[RemovableHandle] = []
        self._accumulators: list[Node] = []  # nodes with the hooks; parameters do not keep them alive

    @property
    def n(self) -> int:
        return self.flat_N.numel()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters in the order of the vector."""
        return [parameter for _, parameter in self._named]

    @property
    def sizes(self) -> list[int]:
        return [view.numel() for view in self._views_P]

    def swap(self, other_N: Tensor) -> Tensor:
        """Use `other_N`, (n,) float32 on the same device, as flat_N, and return the vector used before."""
        before_N, self.flat_N = self.flat_N, other_N
        sizes = [p.numel() for p in self.parameters]
        self.gradient_N, self._used_P = other_N[: sum(sizes)], other_N[sum(sizes) :]
        pieces = torch.split(self.gradient_N, sizes)
        self._views_P = [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]
        return before_N

    def blocks(
        self, *shaped_P: Sequence[Tensor], divided: bool = True
    ) -> Iterator[tuple[slice, list[Tensor]]]:
        """Divide the vector into blocks.  In host memory, a block fits into the processor's cache, so
        consecutive operations on it read main memory once; elsewhere a block is a whole parameter.

        Args:
            shaped_P: sequences of one tensor for each parameter, with the parameter's shape.
            divided: whether to divide parameters; if not, a block is a whole parameter.

        Yields:
            The position of a block in the vector, and from each sequence a view of the same elements; the
            views have the same shape.
        """
        start, most = 0, _BLOCK * torch.get_num_threads()
        for like in zip(*shaped_P, strict=True):
            pieces = [[each.detach()] for each in like]
            is_large = divided and like[0].numel() > most
            if is_large and all(whole.device.type == "cpu" and whole.is_contiguous() for (whole,) in pieces):
                pieces = [[*whole.view(-1).split(most)] for (whole,) in pieces]
            for views in zip(*pieces, strict=True):
                size = views[0].numel()
                if size:
                    yield slice(start, start + size), list(views)
                start += size

    def check_unchanged(self) -> None:
        """Raise `ConfigError` if the script trains parameters that are not in the vector, or has given the
        optimizer other parameters; the first, second, fourth, eighth and every 16th call also checks whether
        parameters were replaced."""
        self._checks += 1
        if self._checks in (1, 2, 4, 8) or self._checks % 16 == 0:
            self._check_not_replaced()
        if unfrozen := [name for name, p in self._frozen if p.grad is not None and p.requires_grad]:
            raise ConfigError(
                f"parameter {unfrozen[0]!r} was frozen when the optimizer was wrapped; now it has a gradient",
                remedy="unfreeze parameters before grid.optimizer(...), in the same way on all workers; to "
                "train some of them later, put them into a separate group with lr=0 until then, or start "
                "another run from the model that this run exports",
            )
        held = [id(p) for group in self._optimizer.param_groups for p in group["params"]]
        if held != self._optimizer_parameters:
            raise ConfigError(
                "the wrapped optimizer was given further parameters, which the other workers do not have",
                remedy="add all groups to the inner optimizer before grid.optimizer(...)",
            )

    def _check_not_replaced(self) -> None:
        known = {id(parameter) for _, parameter in (*self._named, *self._frozen)}
        named = self._model.named_parameters()
        if replaced := canonical_names([n for n, p in named if p.requires_grad and id(p) not in known]):
            raise ConfigError(
                f"parameter {replaced[0]!r} was added or replaced after the optimizer was wrapped, so "
                "the optimizer does not train it",
                remedy="change the model before the optimizer is made, load weights without assign=True, and "
                "freeze what is not to be trained with requires_grad_(False)",
            )

    def _check_not_frozen(self) -> None:
        """Raise `ConfigError` if a parameter was frozen, unless the optimizer skips it: its gradient would be
        zero, but momentum and weight decay would still change the parameter."""
        skips = self._used_P.numel() > 0
        if frozen := [n for n, p in self._named if not p.requires_grad and not (skips and p.grad is None)]:
            cause = ", and still has a gradient" if skips else ""
            raise ConfigError(
                f"parameter {frozen[0]!r} was frozen after the optimizer was wrapped{cause}",
                remedy="freeze it before grid.optimizer(...), or put it into a separate group and set that "
                'group\'s lr to 0 later, in the same way on all workers; or pass unused="skip" and set its '
                "grad to None",
            )

    @torch.no_grad()
    def gather(self, indices: Sequence[int] | None = None) -> None:
        """Set flat_N to the gradients times `scale`, 0 for a gradient of None; set `used` if it is present.

        Args:
            indices: the indices of the parameters whose part of flat_N is set; by default all.

        Raises:
            ConfigError: a gradient is sparse, or the set of trained parameters has changed.
        """
        self.check_unchanged()
        self._check_not_frozen()
        for index in range(len(self._named)) if indices is None else indices:
            view, (name, parameter) = self._views_P[index], self._named[index]
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif gradient.layout is not torch.strided:
                raise sparse_gradient_error(f"parameter {name!r} has")
            else:
                view.copy_(gradient)
                if self.scale != 1.0:
                    view.mul_(self.scale)
        if self._used_P.numel():
            self._used_P.copy_(torch.tensor([float(p.grad is not None) for p in self.parameters]))

    @torch.no_grad()
    def rescale(self, factor: float) -> None:
        """Multiply the gradients of the parameters in place; 0 sets them to 0 even if they are not finite."""
        if factor == 1.0:
            return
        self._separate_gradients()
        for _, parameter in self._named:
            if parameter.grad is not None:
                if factor:
                    parameter.grad.mul_(factor)
                else:
                    parameter.grad.zero_()

    def scale_backward(self, factor: float) -> None:
        """Multiply by `factor`, as `rescale` does, the gradients that later backward passes add.  Results of
        `torch.autograd.grad`, for example within a loss that contains gradients, stay as they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._accumulators.clear()

        def scaled(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
            return tuple(
                each if each is None else each * factor if factor else torch.zeros_like(each)
                for each in gradients
            )

        if factor != 1.0:
            with torch.enable_grad():
                for parameter in self.parameters:
                    is_trained = parameter.requires_grad  # a frozen one may be trained in this backward pass
                    self._accumulators.append(get_gradient_edge(parameter.requires_grad_()).node)
                    parameter.requires_grad_(is_trained)
            self._hooks += [node.register_prehook(scaled) for node in self._accumulators]

    @torch.no_grad()
    def has_changed(self, indices: Sequence[int]) -> bool:
        """Whether a gradient of these parameters differs from the gradient that `gather` read; NaN is
        considered equal to NaN."""
        unlike = []
        for index in indices:
            view, (_, parameter) = self._views_P[index], self._named[index]
            now = torch.zeros_like(view) if parameter.grad is None else parameter.grad.to(view)
            now = now if self.scale == 1.0 else now * self.scale
            if view.device.type == "cpu" and torch.equal(view, now):
                continue  # one pass without temporaries; on a GPU each test would synchronize
            unlike.append(((view != now) & (view == view)).any())
        return bool(torch.stack(unlike).any()) if unlike else False  # synchronizes once

    @torch.no_grad()
    def load_update(self, update: npt.NDArray[np.float32] | SparseVector) -> None:
        """Set flat_N to a committed update, which is dense (n,) or sparse."""
        if isinstance(update, SparseVector):
            self.flat_N.zero_()
            where = torch.from_numpy(update.indices).to(self.flat_N.device)
            self.flat_N[where] = torch.from_numpy(update.values).to(self.flat_N.device)
        else:
            self.flat_N.copy_(torch.from_numpy(update))

    @torch.no_grad()
    def scatter(self) -> None:
        """Set every trainable parameter's `grad` to its part of flat_N, with the parameter's dtype and
        device, or to None if the parameter is unused."""
        self._separate_gradients()
        used = self._used_P.tolist() or [1.0] * len(self._named)
        for view, (_, parameter), is_used in zip(self._views_P, self._named, used, strict=True):
            if not is_used:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(view)

    def _separate_gradients(self) -> None:
        """Replace with copies the gradients that must not be written in place: `torch.autograd.grad` may
        return one tensor, or parts of it, for several parameters, and expanded tensors, whose elements share
        memory."""
        by_storage: dict[int, list[tuple[int, Tensor, Tensor]]] = {}  # address, parameter and gradient
        for _, parameter in self._named:
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided or not gradient.numel():
                continue
            if _span(gradient) < gradient.numel():
                parameter.grad = gradient.clone(memory_format=torch.contiguous_format)
            else:
                found = gradient.data_ptr(), parameter, gradient
                by_storage.setdefault(gradient.untyped_storage().data_ptr(), []).append(found)
        for sharing in by_storage.values():
            end = 0
            for address, owner, gradient in sorted(sharing, key=itemgetter(0)):
                if address < end:
                    owner.grad = gradient.clone(memory_format=torch.contiguous_format)
                else:
                    end = address + _span(gradient) * gradient.element_size()


def _span(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last one in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def finish_queued_work(device: torch.device) -> None:
    """Wait until a GPU has finished the work that this thread has queued, so that a time measured now
    includes that work."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def exchange_device(asked: torch.device | str, own: torch.device) -> torch.device:
    """Return the requested device, which must be the CPU or `own`, the model's device.

    Args:
        asked: the requested device; without an index, it is the current device of its type.

    Raises:
        ConfigError: another device is requested.
    """
    try:
        device = torch.device(asked)
    except RuntimeError:  # not the name of a device
        device = torch.device("meta")
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == own.type and device.index is None:
        device = torch.empty(0, device=device).device
    if device == own:
        return own
    raise ConfigError(
        f"exchange_device is {asked}; it must be the CPU or the model's device, {own}",
        remedy='use exchange_device="cpu" for host memory, or omit exchange_device',
    )


def _check_trainable(model: nn.Module, held: Iterable[Tensor], *, allows_sparse: bool) -> None:
    named = canonical_parameters(model)
    held_ids, model_ids = {id(p) for p in held}, {id(p) for _, p in named}
    unknown = len(held_ids - model_ids)
    if unknown:
        raise ConfigError(
            f"the optimizer has {format_count(unknown, 'parameter')} that the model does not have",
            remedy="build the optimizer from model.parameters() of the model that you pass",
        )
    missing = [name for name, p in named if p.requires_grad and id(p) not in held_ids]
    if missing:
        raise ConfigError(
            f"the optimizer's groups lack {format_count(len(missing), 'trainable parameter')} of the model, "
            f"such as {missing[0]!r}",
            remedy="add them to the optimizer, pass a list that also contains the optimizer that has them, "
            "or freeze them with parameter.requires_grad_(False)",
        )
    if lazy := [name for name, p in named if isinstance(p, nn.parameter.UninitializedParameter)]:
        raise ConfigError(
            f"parameter {lazy[0]!r} of a lazy module has no shape yet",
            remedy="call the model with a batch before grid.optimizer(...)",
        )
    trainable = [(name, p) for name, p in named if p.requires_grad]
    if not any(p.numel() for _, p in trainable):
        raise ConfigError(
            "the model has no trainable parameter", remedy="check requires_grad of its parameters"
        )
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    sparse_ids = {id(module.weight) for module in embeddings if module.sparse}
    normed_ids = {id(module.weight) for module in embeddings if module.max_norm is not None}
    if normed := [name for name, p in named if id(p) in normed_ids]:
        raise ConfigError(
            f"the embedding of {normed[0]!r} has max_norm, so each forward pass changes the rows of "
            "the weight that the worker's own samples use",
            remedy="build it without max_norm and normalize its output",
        )
    for name, parameter in trainable:
        if id(parameter) in sparse_ids and not allows_sparse:
            raise sparse_gradient_error(f"parameter {name!r} has")
        if not parameter.is_floating_point():
            raise ConfigError(
                f"parameter {name!r} is {parameter.dtype}; only real floating-point dtypes can be trained",
                remedy="keep complex parameters as torch.view_as_real(...)",
            )


def sparse_gradient_error(subject: str) -> ConfigError:
    return ConfigError(
        f"{subject} sparse gradients, but only dense gradients can be exchanged",
        remedy="build the embedding with sparse=False and use SGD or AdamW (with exchange=GTopK() only large "
        "entries are sent), or use exchange=LocalSteps(...), which exchanges no gradients",
    )
