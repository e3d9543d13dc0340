"""Runs `transformers.Trainer` as a worker of a run, and rejects arguments that cannot be used in a run.

    exchange = gridtrain.GTopK(density=0.05, momentum=0.9)
    trainer = GridTrainer(grid=grid, grid_options={"exchange": exchange}, model=model,
                          args=TrainingArguments(max_steps=500, ...), train_dataset=dataset,
                          optimizers=(torch.optim.SGD(model.parameters(), lr=0.4), None))
    trainer.train()

Trainer runs its own loop, but with the group's optimizer, samples and steps:

    Trainer calls                        and gets
    create_optimizer                     its own or the given one, wrapped by grid.optimizer
    create_scheduler                     its own; newcomers receive its state
    get_train_dataloader                 GridLoader: this worker's samples of each step, until the run ends
    get_batch_samples                    its own; with weigh_by="tokens", the number of tokens is the weight
    evaluate                             its own metrics; meanwhile, this worker is reported as busy

Only the first worker saves.  `state.global_step` is the step of the run, so that a worker that joins late
stops with the group.

`max_steps` ends the run, for all workers together.  It counts steps of the optimizer: with
`LocalSteps(every=H)`, it must be a multiple of H, because H of these steps are one step of the run.

`max_grad_norm` clips the local gradient, as usual; to clip the exchanged gradient, pass `clip_norm=` in
`grid_options` and set max_grad_norm=0.

`GridTrainerMixin` does this for any subclass of Trainer: `class Mine(GridTrainerMixin, DPOTrainer)`; see also
`gridtrain.adapters.trl`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import has_length

from gridtrain.adapters.loader import GridLoader
from gridtrain.errors import ConfigError, describe_type
from gridtrain.sdk.grid import Grid
from gridtrain.training.data import readers
from gridtrain.training.optimizer import GridOptimizer

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # the mixin's base is the class that follows it

log = logging.getLogger("gridtrain")


class GridTrainerMixin(_Trainer):
    """Makes a subclass of `transformers.Trainer` a worker of a run; list this class first among the bases.

    Args:
        grid: the result of `gridtrain.join()`.
        grid_options: the keyword arguments of `grid.optimizer`, such as `exchange=`.  The default exchange is
            GTopK(), with which Trainer's default optimizer, AdamW, converges poorly; use `LocalSteps(...)`
            with AdamW.
        options: the arguments of the subclass.

    Raises:
        ConfigError: an argument cannot be used in a run; the message names it.
    """

    def __init__(self, *, grid: Grid, grid_options: dict[str, Any] | None = None, **options: Any) -> None:
        _refuse_stream_or_empty(options.get("train_dataset"))
        super().__init__(**options)
        _refuse_misfits(self.args)
        self.grid = grid
        self._grid_options = grid_options or {}
        self._loader: GridLoader | None = None
        self.add_callback(_StepCallback(self))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        if resume_from_checkpoint:
            raise ConfigError(
                f"train has resume_from_checkpoint={resume_from_checkpoint!r}, but a run resumes from its "
                "own checkpoints",
                remedy="remove it; to begin a run with these weights, load them before train()",
            )
        return super().train(resume_from_checkpoint, *args, **options)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        given = () if model is None else (model,)  # older versions have no argument
        made: torch.optim.Optimizer = super().create_optimizer(*given)
        if not isinstance(made, GridOptimizer):
            made = self.grid.optimizer(made, self.model, **self._grid_options)
        self.optimizer = self.grid_optimizer = made  # Trainer wraps its own later
        return made

    def set_initial_training_values(self, *args: Any, **options: Any) -> Any:
        """Return what Trainer does, but with no limit on epochs: the run ends the training loop, and a batch
        that is dropped because this worker pauses does not count."""
        _, *values = super().set_initial_training_values(*args, **options)
        return sys.maxsize, *values

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        self.grid.track(scheduler=scheduler)
        return scheduler

    def get_train_dataloader(self) -> GridLoader:
        if self.train_dataset is None:
            raise ConfigError(
                "GridTrainer has no train_dataset", remedy="pass the same train_dataset on all workers"
            )
        dataset, collate = self.train_dataset, self.data_collator
        if hasattr(dataset, "column_names"):  # of the `datasets` package; Trainer does the same
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        if self.data_collator.__module__.partition(".")[0] in ("transformers", "trl"):
            collate = partial(_collated, collate)
        self._loader = GridLoader(
            self.grid,
            dataset,
            steps=self.args.max_steps,
            accumulate=self.args.gradient_accumulation_steps,
            batch_size=self._train_batch_size,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            num_workers=self.args.dataloader_num_workers,
            collate_fn=collate,
            weigh=False,  # Trainer reads all batches of a step first, and weights them itself
        )
        return self._loader

    def get_batch_samples(self, *args: Any, **options: Any) -> Any:
        """Read the batches of a step as Trainer does, and end the training loop if there are none; with
        weigh_by="tokens", the number of their tokens is the weight of this worker's gradient."""
        batches, count = super().get_batch_samples(*args, **options)
        self.control.should_training_stop |= not batches
        if count is not None and self._grid_options.get("weigh_by") == "tokens":
            self.grid.weigh(count)
        return batches, count

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        with self.grid.evaluation():
            figures: dict[str, float] = super().evaluate(*args, **options)
        return figures

    def _load_best_model(self) -> None:
        self.finish()  # before the model changes: a member's model may be sent to a worker that joins
        super()._load_best_model()

    def finish(self) -> None:
        if self._loader is not None:
            self._loader.finish()


class GridTrainer(GridTrainerMixin, Trainer):
    """A `transformers.Trainer` that trains as a worker of a run."""


class _StepCallback(TrainerCallback):
    """Sets Trainer's step count, which starts at 0, to the run's; with `LocalSteps`, between two exchanges.

    It also ends the training loop when the run ends, lets only the first worker save, and reports the losses.
    """

    def __init__(self, trainer: GridTrainerMixin) -> None:
        self._trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._follow_run(state)

    def _follow_run(self, state: Any) -> None:
        """Add the steps that this worker did not take, and subtract those that the group dropped, also in the
        count at the last log, so that Trainer does not average its losses over them."""
        trainer = self._trainer
        if not trainer.grid_optimizer.local_calls:
            missed = trainer.grid.step * trainer.grid.calls_per_step - state.global_step
            state.global_step += missed
            trainer._globalstep_last_logged += missed
            initial = getattr(trainer, "_initial_global_step", 0)  # transformers 4 has none
            trainer._initial_global_step = initial + missed

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        grid = self._trainer.grid
        self._follow_run(state)
        if state.global_step >= state.max_steps:
            control.should_training_stop = True
        control.should_save = control.should_save and grid.is_first

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        figures = {name: float(v) for name, v in (logs or {}).items() if isinstance(v, int | float)}
        self._trainer.grid.report(
            **{name: figures[name] for name in ("loss", "eval_loss") if name in figures}
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.finish()
        if args.load_best_model_at_end and state.best_model_checkpoint is None:
            log.warning(
                "load_best_model_at_end had no effect: this worker has not saved the best model, and keeps "
                "the last one"
            )


def _collated(collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    """Return the batch that `collate`, a library's function, makes of the samples.

    Raises `ConfigError` if it rejects the samples or returns an empty batch.
    """
    cause: Exception | None = None
    try:
        batch = collate(samples)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        cause = error
    else:
        if batch:
            return batch
    raise ConfigError(
        f"the data collator cannot make a batch of samples such as {samples[0]!r:.80}"
        + (f": {type(cause).__name__}: {cause}" if cause else ""),
        remedy='make each sample a dict such as {"input_ids": ..., "labels": ...}, with decode= of '
        "gridtrain.Shards; or pass data_collator=",
    ) from cause


def _refuse_stream_or_empty(dataset: Any) -> None:
    if dataset is not None and has_length(dataset) and not len(dataset):
        raise ConfigError(
            f"train_dataset, {describe_type(dataset)}, has no samples",
            remedy="check the paths and filters that define it",
        )
    if dataset is not None and readers.is_iterable(dataset) and not has_length(dataset):
        raise ConfigError(
            f"train_dataset is {describe_type(dataset)} without a length: every worker would read it all",
            remedy="pass gridtrain.Shards(index), or gridtrain.adapters.datasets.StreamShards(stream, index) "
            "for a stream of the datasets package; see docs/data.md",
        )


def _refuse_misfits(args: TrainingArguments) -> None:
    if args.max_steps < 1:
        raise ConfigError(
            "TrainingArguments has no max_steps, but the number of steps in an epoch depends on the members",
            remedy="set TrainingArguments(max_steps=...) to the same value on all workers",
        )
    if args.fp16:
        raise ConfigError(
            "TrainingArguments has fp16=True, but Trainer's GradScaler would differ from worker to worker",
            remedy="use bf16=True, which needs no scaler",
        )
    # "group_by_length" was an argument of its own before transformers 5.
    order = getattr(args, "train_sampling_strategy", "random")
    if order != "random" or getattr(args, "group_by_length", False):
        name = f"train_sampling_strategy={order!r}" if order != "random" else "group_by_length=True"
        raise ConfigError(
            f"TrainingArguments has {name}, but the group assigns the samples in random order",
            remedy="remove it",
        )
    if args.auto_find_batch_size:
        raise ConfigError(
            "TrainingArguments has auto_find_batch_size=True, but a run cannot start again with another size",
            remedy="set per_device_train_batch_size, which may differ from worker to worker",
        )
    if args.world_size > 1 or args.n_gpu > 1:
        raise ConfigError(
            f"Trainer itself would train on {max(args.world_size, args.n_gpu)} processes or GPUs",
            remedy="start one worker for each GPU (CUDA_VISIBLE_DEVICES), without torchrun",
        )
