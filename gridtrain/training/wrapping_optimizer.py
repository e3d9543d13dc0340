"""The base class of optimizers that wrap another optimizer and expose its groups and state.

Schedulers, GradScaler and checkpoints read `param_groups`, `state` and `state_dict`, which must be those of
the inner optimizer.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from gridtrain.errors import ConfigError


class WrappingOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` without parameter groups of its own; a subclass defines `step`."""

    inner: torch.optim.Optimizer

    def _wrap(self, inner: torch.optim.Optimizer) -> None:
        # Optimizer.__init__ would build groups.  __setstate__, which unpickling uses, sets up everything
        # else (hooks, profiling).
        self.__setstate__({"inner": inner})

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            "the group's optimizer cannot be copied or pickled",
            remedy="copy or save optimizer.state_dict()",
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)
