"""What `GridTrainer` counts, logs, refuses and warns of, with a model of one layer."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
import torch
from brisk import WITHIN_S
from threaded_group import ThreadedGroup
from torch import nn

import gridtrain
from gridtrain.errors import ConfigError
from gridtrain.runtime.client.agent_link import AgentDirective, NoAgent
from gridtrain.sdk.local_group import LocalGroup

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-adapters")
pytest.importorskip("accelerate", reason="accelerate is not installed: make test-adapters")

from gridtrain.adapters import hugging_face  # noqa: E402  it needs transformers
from gridtrain.adapters.hugging_face import GridTrainer  # noqa: E402

STEPS = 8


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def forward(self, x, labels):
        loss = (self.net(x) - labels).square().mean()
        return {"loss": loss, "logits": loss[None]}


def samples() -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.tensor([n / 90, 1.0]), "labels": torch.tensor([n / 30])} for n in range(90)]


def arguments(folder: Path, **options):
    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    return transformers.TrainingArguments(output_dir=str(folder), **{"max_steps": STEPS} | quiet | options)


class Recording(GridTrainer):
    """Notes, for each step, the step of the run, Trainer's, and the loss."""

    def training_step(self, *args, **options):
        loss = super().training_step(*args, **options)
        self.seen.append((self.grid.step, self.state.global_step, float(loss)))
        return loss


class StopAfter(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args, state, control, **_) -> None:
        control.should_training_stop = state.global_step >= self._step


@pytest.mark.parametrize("every", [1, 2])
def test_a_worker_that_joins_a_begun_run_logs_the_mean_of_its_own_losses(every: int, tmp_path: Path) -> None:
    exchange = gridtrain.LocalSteps(every=2, exchange=gridtrain.Dense()) if every > 1 else gridtrain.Dense()

    def life(stop_after: int):
        with (
            LocalGroup(min_workers=1) as group,
            group.join("anna", state_dir=str(tmp_path / "anna"), checkpoint_every=1) as grid,
        ):
            model = Line()
            trainer = Recording(
                grid=grid,
                grid_options={"exchange": exchange},
                model=model,
                args=arguments(tmp_path, logging_steps=2),
                train_dataset=samples(),
                optimizers=(torch.optim.SGD(model.parameters(), lr=0.01), None),
                callbacks=[StopAfter(stop_after)],
            )
            trainer.seen = []
            train_loss = trainer.train().training_loss
            return trainer, train_loss

    life(4)
    trainer, train_loss = life(STEPS)
    assert [entry[:2] for entry in trainer.seen] == [(number // every, number) for number in range(4, STEPS)]
    losses = [loss for *_, loss in trainer.seen]
    logged = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    means = {6: sum(losses[:2]) / 2, 8: sum(losses[2:]) / 2}
    assert logged == pytest.approx(means, rel=1e-3)
    assert train_loss == pytest.approx(sum(losses) / 4, rel=1e-3)


class PauseInStep(NoAgent):
    """Requests a pause while the worker waits in a step, so that its batch is dropped; ends it afterwards."""

    waits: pytest.MonkeyPatch | None = None

    def begin(self, grid) -> None:
        self.waits = pytest.MonkeyPatch()
        self.waits.setattr(grid._session, "_can_begin", lambda _: False)
        self.directive = AgentDirective(run=False, reason="its owner said so")

    def report(self, **state) -> None:
        super().report(**state)
        if state["state"] == "paused":
            self.waits.undo()
            self.directive = AgentDirective()


@pytest.mark.parametrize("every", [1, 2])
def test_a_dropped_batch_does_not_end_training_before_the_run(every: int, tmp_path: Path) -> None:
    owner = PauseInStep()

    class Pausing(Recording):
        def training_step(self, *args, **options):
            if self.grid.step * every == 4 and owner.waits is None and len(self.seen) % every == every - 1:
                owner.begin(self.grid)
            return super().training_step(*args, **options)

    exchange = gridtrain.LocalSteps(every=2, exchange=gridtrain.Dense()) if every > 1 else gridtrain.Dense()
    with LocalGroup(min_workers=1) as group, group.join("anna", owner=owner) as grid:
        model = Line()
        trainer = Pausing(
            grid=grid,
            grid_options={"exchange": exchange},
            model=model,
            args=arguments(tmp_path),
            train_dataset=samples(),
            optimizers=(torch.optim.SGD(model.parameters(), lr=0.01), None),
        )
        trainer.seen = []
        trainer.train()
        assert grid.finished and grid.step * every == trainer.state.global_step == STEPS
    computed = [*range(4), *range(4, 4 + every), *range(4, STEPS)]
    assert [step for _, step, _ in trainer.seen] == computed


def test_a_checkpoint_of_trainer_is_refused(tmp_path: Path) -> None:
    trainer = GridTrainer(grid=None, model=Line(), args=arguments(tmp_path), train_dataset=samples())
    with pytest.raises(ConfigError, match="resume_from_checkpoint='there', but a run resumes") as caught:
        trainer.train(resume_from_checkpoint="there")
    assert "load them before train" in caught.value.remedy


IN_ORDER = (
    {"train_sampling_strategy": "sequential"}
    if hasattr(transformers.TrainingArguments, "train_sampling_strategy")
    else {"group_by_length": True}
)


@pytest.mark.parametrize("options", [IN_ORDER, {"auto_find_batch_size": True}], ids=["order", "batch size"])
def test_arguments_without_effect_are_refused(options: dict, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"TrainingArguments has {next(iter(options))}"):
        GridTrainer(grid=None, model=Line(), args=arguments(tmp_path, **options))


@pytest.mark.parametrize(
    ("options", "seed"),
    [({"seed": 7}, 7), ({"seed": 7, "data_seed": 0}, 0), ({"seed": 7, "data_seed": 3}, 3)],
)
def test_samples_are_drawn_with_the_data_seed_or_the_seed(options, seed, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(hugging_face, "GridLoader", lambda *args, **loading: loading)
    args = arguments(tmp_path, **options)
    trainer = GridTrainer(grid=None, model=Line(), args=args, train_dataset=samples())
    assert trainer.get_train_dataloader()["seed"] == seed


def test_a_worker_that_has_not_saved_the_best_model_warns(tmp_path, caplog) -> None:
    one_at_a_time, all_made = threading.Lock(), threading.Barrier(2)
    best: list[bool] = []

    def work(grid, number: int) -> None:
        model = Line()
        with one_at_a_time:  # each constructor resets the state of Accelerate in this process
            trainer = GridTrainer(
                grid=grid,
                grid_options={"exchange": gridtrain.Dense()},
                model=model,
                args=arguments(
                    tmp_path / str(number),
                    eval_strategy="steps",
                    eval_steps=4,
                    save_strategy="steps",
                    save_steps=4,
                    load_best_model_at_end=True,
                ),
                train_dataset=samples(),
                eval_dataset=samples()[:4],
                optimizers=(torch.optim.SGD(model.parameters(), lr=0.01), None),
            )
        all_made.wait(WITHIN_S)
        trainer.train()
        best.append(trainer.state.best_model_checkpoint is not None)

    with caplog.at_level(logging.WARNING), ThreadedGroup(tmp_path, workers=2) as group:
        group.start_all(work)
        group.finish()
    assert sorted(best) == [False, True]
    warnings = [each for each in caplog.messages if "load_best_model_at_end had no effect" in each]
    assert len(warnings) == 1
