"""Train batch norms on a single sample, which has no statistics of its own.

    values per channel    running statistics
    2 or more             yes or no              as torch does
    1                     yes                    normalized by them, as for evaluation; they do not change
    1                     no                     normalized by itself, which leaves only the bias

A step has so few samples at the end of a pass, for example, whatever batch size was chosen: no division of a
step's samples prevents that one is left.  A run whose batches all have a single sample is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gridtrain.errors import ConfigError

log = logging.getLogger("gridtrain")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def values_of(inputs: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    """Return the argument of a norm's forward."""
    values: Tensor = inputs[0] if inputs else named["input"]
    return values


def is_single(values: Tensor) -> bool:
    """Return whether there is a single value per channel."""
    return values.dim() > 1 and values.numel() == values.shape[1]


class SingleValueNorms:
    """The batch norms among `modules`, which train on single values within `permitted`, also if compiled.

    Args:
        on_single: called with a norm that is about to normalize a single value.
    """

    def __init__(self, modules: Iterable[nn.Module], on_single: Callable[[nn.Module], None]) -> None:
        # A SyncBatchNorm may have further values in other processes, which would wait for this one.
        norms = {m: None for m in modules if isinstance(m, _BatchNorm) and type(m) is not nn.SyncBatchNorm}
        self._norms, self._on_single = list(norms), on_single
        self._is_changed = False  # the argument, or the mode, of the norm whose forward is running

    @contextmanager
    def permitted(self) -> Iterator[None]:
        hooks = []
        for norm in self._norms:
            if norm.running_mean is None:
                hooks.append(norm.register_forward_pre_hook(self._double, with_kwargs=True))
                hooks.append(norm.register_forward_hook(self._halve))
            else:
                hooks.append(norm.register_forward_pre_hook(self._evaluate, with_kwargs=True))
                # always: a recomputation of a checkpoint ends its last forward with an exception
                hooks.append(norm.register_forward_hook(self._train, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _double(self, norm: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Arguments | None:
        """Pass two zeros instead of a single value; a value normalized by itself is zero in any case."""
        values = values_of(inputs, named)
        self._is_changed = is_single(values)
        if not self._is_changed:
            return None
        self._on_single(norm)
        return (torch.cat((values, values)) * 0,), {}

    def _halve(self, norm: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return output[:1] if self._is_changed else output

    def _evaluate(self, norm: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._is_changed = False
        if norm.training and is_single(values_of(inputs, named)):
            self._on_single(norm)
            self._is_changed, norm.training = True, False

    def _train(self, norm: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        norm.training = norm.training or self._is_changed


class SingleSampleReport:
    """Refuses layers that would never get more than one sample, and warns once of those that now and then do.

    Args:
        recipient: what gets the samples, such as "worker".
    """

    def __init__(self, recipient: str) -> None:
        self._recipient, self._has_warned = recipient, False

    def report(self, layer: str, *, is_chosen: bool) -> None:
        """Report a layer that cannot train on the single sample of a step.

        Raises:
            ConfigError: `is_chosen`, because the run's batch size leaves a single sample in every step.
        """
        if is_chosen:
            raise ConfigError(
                f"{layer}, cannot train on a single sample, but a step has only one for this "
                f"{self._recipient}",
                remedy="use a larger batch_size= or global_batch_size=, so that each batch or micro-batch "
                "has at least 2 samples, or a norm without statistics of the batch (GroupNorm)",
            )
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "a step has a single sample for this %s: %s, normalizes it with running statistics, if it "
                "has any",
                *(self._recipient, layer),
            )


class SingleSampleBatches:
    """A model's batches of one sample in data-parallel training."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._norms = SingleValueNorms(model.modules(), self._record)
        self._report = SingleSampleReport("worker")
        # A compiled forward can raise no error of ours, and cannot log: the first is not compiled, the second
        # is done afterwards.
        self._refuse = torch.compiler.disable(self._report_norm)  # type: ignore[no-untyped-call]
        self._is_chosen = False
        self._found: nn.Module | None = None

    @contextmanager
    def permitted(self, *, is_chosen: bool) -> Iterator[None]:
        """Let batch norms train on a single sample in the `with` block.

        Args:
            is_chosen: whether the run's batch size is the reason, so that they raise `ConfigError` instead.
        """
        self._is_chosen = is_chosen
        try:
            with self._norms.permitted():
                yield
        finally:
            if self._found is not None:
                self._report_norm(self._found)
            self._found = None

    def _record(self, norm: nn.Module) -> None:
        if self._is_chosen:
            self._refuse(norm)
        self._found = norm

    def _report_norm(self, norm: nn.Module) -> None:
        name = next(name for name, module in self._model.named_modules() if module is norm)
        self._report.report(f"the layer {name!r}, {type(norm).__name__}", is_chosen=self._is_chosen)
