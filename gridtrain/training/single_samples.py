"""Trains batch-norm layers on a single sample, which has no statistics of its own.

    values per channel    running statistics
    2 or more             yes or no              as torch does
    1                     yes                    normalized by them, as in evaluation; they do not change
    1                     no                     normalized by itself, which leaves only the bias

At the end of a pass, for example, a batch (with `accumulate`, a micro-batch) may have a single sample,
regardless of the chosen size: no way of dividing a step's samples can rule this out.  Only sizes that give
every batch a single sample, such as `batch_size=1`, are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from gridtrain.errors import ConfigError

log = logging.getLogger("gridtrain")


def is_torch_norm(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Return whether a module normalizes as torch's BatchNorm1d, 2d and 3d do.  A SyncBatchNorm, or a
    subclass with its own `forward`, does not."""
    return isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward


class _SingleValueNorm(_BatchNorm):
    """The class of a batch norm while `SingleValueNorms.allow` is active.

    The norm's attribute `__class__` still returns its own class, which is the second base: copies and pickled
    norms have that class, and a parametrization replaces it.
    """

    on_single: Callable[[], None]
    on_several: Callable[[Tensor], None]

    def __init_subclass__(cls) -> None:
        """Do nothing, because the norm's own class may define this method to refuse subclasses."""

    def forward(self, input: Tensor) -> Tensor:
        is_single = input.dim() > 1 and input.numel() == input.shape[1]  # a single value per channel
        if not is_single or (not self.training and self.running_mean is not None):
            self.on_several(input)
            return _BatchNorm.forward(self, input)
        self.on_single()
        if self.running_mean is None:  # two zeros: a value normalized by itself is zero in any case
            return _BatchNorm.forward(self, torch.cat((input, input)) * 0)[:1]
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(1)  # later protocols do not use `__class__`


_set_class = vars(object)["__class__"].__set__


class SingleValueNorms:
    """The batch norms among `modules`; while `allow` is active they train on single values, even if compiled.

    Args:
        on_single: a function that is called with a norm that is about to normalize a single value.
        on_several: a function that is called with a norm and its input in all other cases.  A hook instead
            would have a new id in each `with` block, so that a compiled model would be compiled again.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        on_single: Callable[[nn.Module], None],
        on_several: Callable[[nn.Module, Tensor], None] = lambda norm, values: None,
    ) -> None:
        self._norms = [module for module in modules if is_torch_norm(module)]
        self._contents = {  # functions, because torch before 2.8 cannot compile a bound method in a class
            "on_single": lambda norm: on_single(norm),
            "on_several": lambda norm, values: on_several(norm, values),
        }
        # created once, because a compiled model is compiled again for a new class
        self._kinds: dict[type, type] = {}

    @contextmanager
    def allow(self) -> Iterator[None]:
        norms = [norm for norm in self._norms if is_torch_norm(norm)]
        # each registration of a parametrization creates a new class
        own = {norm.__class__ for norm in self._norms}
        self._kinds = {kind: made for kind, made in self._kinds.items() if kind in own}
        for norm in norms:
            self._replace(norm, type(norm))
        try:
            yield
        finally:
            for norm in norms:
                _set_class(norm, norm.__class__)

    def _replace(self, norm: nn.Module, kind: type[nn.Module]) -> None:
        """Set a norm's own class to `kind`, and its actual class to the subclass of `kind` that trains on
        single values, unless `kind` has its own `forward`."""
        if kind.forward is _BatchNorm.forward and kind not in self._kinds:
            own = property(lambda norm: kind, self._replace)
            contents = {"__class__": own, **self._contents}
            self._kinds[kind] = type(kind.__name__, (_SingleValueNorm, kind), contents)
        _set_class(norm, self._kinds.get(kind, kind))


class SingleSampleReport:
    """Refuses layers that cannot train on one sample or would never get more; warns once about other layers.

    Args:
        recipient: what receives the samples, such as "worker".
    """

    def __init__(self, recipient: str) -> None:
        self._recipient, self._has_warned = recipient, False

    def report(self, layer: str, *, batch_size_is_one: bool, is_normalized: bool = True) -> None:
        """Report a layer for which a batch of one sample is too small.

        Args:
            layer: the layer's name and class, as the beginning of a sentence.
            batch_size_is_one: whether every batch has only one sample.
            is_normalized: whether the layer can normalize the sample with running statistics in place of the
                batch's.

        Raises:
            ConfigError: the layer cannot train on one sample, or every batch has only one sample.
        """
        if batch_size_is_one:
            raise ConfigError(
                f"{layer}, cannot train on a single sample, but with the script's batch sizes every batch of "
                f"this {self._recipient} has only one",
                remedy="use batch_size=2 or more, or larger values of global_batch_size and max_batch_size, "
                "or a norm without batch statistics (GroupNorm)",
            )
        if not is_normalized:
            raise ConfigError(
                f"{layer}, cannot train on a single sample, but this step has only one for this "
                f"{self._recipient}",
                remedy="use batch sizes that leave no step with one sample, even at the end of a pass, a "
                "layer without batch statistics (GroupNorm), or a batch norm with the forward of torch",
            )
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "a batch of this %s has only one sample: %s, normalizes it with running statistics, if it "
                "has any",
                *(self._recipient, layer),
            )


class SingleSampleBatches:
    """Lets a model's batch norms train on batches of one sample in data-parallel training, and reports them.

    Args:
        batch_size_is_one: whether every batch has one sample; if so, a batch norm raises `ConfigError`.
    """

    def __init__(self, model: nn.Module, *, batch_size_is_one: bool) -> None:
        self._model, self._batch_size_is_one = model, batch_size_is_one
        self._norms = SingleValueNorms(model.modules(), self._record)
        self._report = SingleSampleReport("worker")
        self._found: nn.Module | None = None

    @contextmanager
    def allow(self) -> Iterator[None]:
        """Let batch norms train on a single sample in the `with` block.  If every batch has one sample, a
        batch norm raises `ConfigError` there instead."""
        try:
            with self._norms.allow():
                yield
        finally:
            if self._found is not None:
                self._report.report(self._describe(self._found), batch_size_is_one=False)
            self._found = None

    def _record(self, norm: nn.Module) -> None:
        if self._batch_size_is_one:
            self._report.report(self._describe(norm), batch_size_is_one=True)
        self._found = norm  # reported afterwards, because a compiled forward cannot log

    def _describe(self, norm: nn.Module) -> str:
        named = (f"the layer {name!r}" for name, module in self._model.named_modules() if module is norm)
        return f"{next(named, 'a layer')}, {type(norm).__name__}"  # a replica of DataParallel has no name
