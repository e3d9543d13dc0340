"""Runs `lightning.Trainer` as a worker of a run; only the first worker writes checkpoints.

    class Model(L.LightningModule):
        def configure_optimizers(self):
            return grid.optimizer(torch.optim.SGD(self.parameters(), lr=0.4), self, exchange=...)

    loader = GridLoader(grid, dataset, batch_size=8, steps=500)
    trainer = L.Trainer(max_epochs=1, strategy=GridStrategy(grid, loader), ...)
    trainer.fit(model, loader)

Lightning gives `optimizer.step` a closure that computes the gradient.  The gradient is exchanged once per
step, so the closure runs first, with the clipping and hooks that Lightning adds to it, and then the optimizer
takes the step.

    Lightning    optimizer_step(optimizer, closure)
    GridStrategy           closure(): forward, backward, on_before_optimizer_step, clipping
                           optimizer.step(): exchange and apply

Learning rate schedulers from `configure_optimizers` are tracked: newcomers receive their state.
`trainer.global_step` counts the optimizer steps of the whole run; `max_steps` and loggers use this count.
Every worker runs the trainer's loggers; `gridtrain.adapters.loggers` writes on the first worker only.
Lightning treats the worker as one process on one device, so it distributes neither samples nor gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy

from gridtrain.adapters.loader import GridLoader
from gridtrain.errors import ConfigError
from gridtrain.sdk.grid import Grid
from gridtrain.training.checkpoint import serialization
from gridtrain.training.optimizer import GridOptimizer


class GridStrategy(SingleDeviceStrategy):
    """The argument `strategy` of a `lightning.Trainer` that trains as a worker of a run.

    Args:
        grid: the result of `gridtrain.join()`.
        loader: the loader that is passed to `trainer.fit`; this worker leaves the run when `fit` ends.
        device: the device on which the model is trained.
    """

    def __init__(self, grid: Grid, loader: GridLoader, device: str = "cpu") -> None:
        super().__init__(device=device)
        self._grid, self._loader = grid, loader
        self._evaluation = ExitStack()  # holds `grid.evaluation()` during a validation
        self._has_failed = False

    @property
    def is_global_zero(self) -> bool:
        """Whether Lightning should write checkpoints and logs on this worker."""
        return self._grid.world_size == 0 or self._grid.is_first

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        plain = [o for o in self.optimizers if not isinstance(o, GridOptimizer)]
        if plain and trainer.training:
            raise ConfigError(
                f"configure_optimizers returned {type(plain[0]).__name__}, which is not a wrapped optimizer",
                remedy="return grid.optimizer(optimizer, self, exchange=...)",
            )
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ConfigError(
                "precision is 16-mixed, but Lightning's GradScaler would differ from worker to worker",
                remedy="use precision='bf16-mixed', which needs no scaler",
            )
        for optimizer in (*self.optimizers, *self._lightning_optimizers):
            optimizer._step_supports_amp_scaling = False  # with True, Lightning refuses to clip
        if trainer.training and trainer.ckpt_path:
            raise ConfigError(
                f"fit has ckpt_path={str(trainer.ckpt_path)!r}, but a run resumes from its own checkpoints",
                remedy="remove it; to begin a run with these weights, load them before grid.optimizer",
            )
        if trainer.training:  # so that newcomers receive them
            schedulers = [config.scheduler for config in self.lr_scheduler_configs]
            ours = serialization.INTERNAL_PREFIX
            self._grid.track(**{f"{ours}scheduler{n or ''}": each for n, each in enumerate(schedulers)})

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: LightningModule | None = None, **options: Any
    ) -> Any:
        once = _ClosureFirstOptimizer(optimizer)
        return self.precision_plugin.optimizer_step(
            once, model=model or self.lightning_module, closure=closure, **options
        )

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        if self.lightning_module.trainer.training:  # the batch's first hook; grid.step is now known
            self._follow_run()
        return super().batch_to_device(batch, device, dataloader_idx)

    def _follow_run(self) -> None:
        """Set Lightning's step counts, which start at 0, to the run's; with `LocalSteps`, only at the
        start."""
        loop, calls = self.lightning_module.trainer.fit_loop.epoch_loop, self._grid.calls_per_step
        if self.lightning_module.automatic_optimization:
            steps = loop.automatic_optimization.optim_progress.optimizer.step.total
        else:
            steps = loop.manual_optimization.optim_step_progress.total
        if calls == 1 or not steps.completed:
            steps.ready = steps.completed = loop._batches_that_stepped = self._grid.step * calls

    def on_validation_start(self) -> None:
        self._evaluation.enter_context(self._grid.evaluation())
        super().on_validation_start()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._evaluation.close()

    def on_exception(self, exception: BaseException) -> None:
        self._has_failed = True
        self._evaluation.close()
        super().on_exception(exception)

    def teardown(self) -> None:
        try:
            if self._grid.world_size and not self._has_failed:
                self._loader.finish()
        finally:
            super().teardown()


class _ClosureFirstOptimizer:
    """An optimizer whose `step` runs the closure once, and then takes the step without a closure."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def step(self, closure: Callable[[], Any], **options: Any) -> Any:
        result = closure()
        self._optimizer.step(**options)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)
