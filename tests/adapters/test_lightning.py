"""What `GridStrategy` does with Lightning's errors, precision, validation, checkpoints and step counts."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from torch import nn

import gridtrain
from gridtrain.adapters.loader import GridLoader
from gridtrain.errors import ConfigError
from gridtrain.sdk.local_group import LocalGroup

L = pytest.importorskip("lightning", reason="lightning is not installed: make test-adapters")

from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from gridtrain.adapters.lightning import GridStrategy  # noqa: E402  it needs lightning

QUIET = {
    name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
}


class Line(L.LightningModule):
    """A layer; `seen` has the step of the run and of Lightning at each batch."""

    def __init__(self, grid, exchange=None, is_manual: bool = False) -> None:
        super().__init__()
        self.net, self.grid, self.seen = nn.Linear(2, 1), grid, []
        self.exchange, self.automatic_optimization = exchange or gridtrain.Dense(), not is_manual

    def training_step(self, x_BF, index):
        self.seen.append((self.grid.step, self.trainer.global_step))
        loss = self.net(x_BF).square().mean()
        self.log("loss", loss)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()
        return loss

    def configure_optimizers(self):
        return self.grid.optimizer(torch.optim.SGD(self.parameters(), lr=1.0), self, exchange=self.exchange)


def points() -> list[torch.Tensor]:
    return list(torch.arange(1.0, 181.0).view(90, 2) / 90)


def fit(model, loader, *, validation=None, ckpt_path=None, **options):
    trainer = L.Trainer(max_epochs=1, strategy=GridStrategy(model.grid, loader), **QUIET | options)
    trainer.fit(model, loader, validation, ckpt_path=ckpt_path)
    return trainer


class Failing(Line):
    def training_step(self, x_BF, index):
        if index == 2:
            raise ValueError("a fault of the script")
        return super().training_step(x_BF, index)


def test_an_exception_of_the_module_is_raised(tmp_path: Path) -> None:
    def train(grid) -> None:
        loader = GridLoader(grid, points(), steps=5, batch_size=2)
        with pytest.raises(ValueError, match="a fault of the script"):
            fit(Failing(grid), loader)

    gridtrain.local(train, workers=1, export_dir=str(tmp_path))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_local_gradient_is_clipped(precision: str, tmp_path: Path) -> None:
    def train(grid) -> None:
        model = Line(grid)
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        loader = GridLoader(grid, [100.0 * x_F for x_F in points()], steps=1, batch_size=2)
        fit(model, loader, precision=precision, gradient_clip_val=0.25)
        change = nn.utils.parameters_to_vector(model.parameters()).detach() - before
        assert change.norm().item() == pytest.approx(0.25, rel=1e-3)

    gridtrain.local(train, workers=1, export_dir=str(tmp_path))


class Manual(Line):
    """Clips its gradient itself."""

    def training_step(self, x_BF, index):
        self.manual_backward(self.net(x_BF).square().mean())
        self.clip_gradients(self.optimizers(), gradient_clip_val=0.25)
        self.optimizers().step()


def test_a_module_with_manual_optimization_can_clip(tmp_path: Path) -> None:
    def train(grid) -> None:
        model = Manual(grid, is_manual=True)
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        loader = GridLoader(grid, [100.0 * x_F for x_F in points()], steps=1, batch_size=2)
        fit(model, loader, precision="bf16-mixed")
        change = nn.utils.parameters_to_vector(model.parameters()).detach() - before
        assert change.norm().item() == pytest.approx(0.25, rel=1e-2)

    gridtrain.local(train, workers=1, export_dir=str(tmp_path))


def test_a_precision_with_a_scaler_is_refused(tmp_path: Path) -> None:
    def train(grid) -> None:
        loader = GridLoader(grid, points(), steps=1, batch_size=2)
        with pytest.raises(ConfigError, match="precision is 16-mixed"):
            fit(Line(grid), loader, plugins=MixedPrecision("16-mixed", "cpu"))

    gridtrain.local(train, workers=1, export_dir=str(tmp_path))


class Validating(Line):
    """Notes whether the group knows that this worker is busy, in validation and in training."""

    def __init__(self, grid) -> None:
        super().__init__(grid)
        self.busy: list[tuple[str, bool]] = []

    def note(self, where: str) -> None:
        self.busy.append((where, self.grid._session._loop.heartbeat.is_busy))

    def training_step(self, x_BF, index):
        self.note("training")
        return super().training_step(x_BF, index)

    def validation_step(self, x_BF, index) -> None:
        self.note("validation")


def test_a_worker_is_reported_as_busy_while_it_validates(tmp_path: Path) -> None:
    def train(grid) -> None:
        model = Validating(grid)
        loader = GridLoader(grid, points(), steps=4, batch_size=2)
        validation = torch.utils.data.DataLoader(points()[:4], batch_size=2)
        fit(model, loader, validation=validation, val_check_interval=2, num_sanity_val_steps=0)
        trains, validates = [("training", False)] * 2, [("validation", True)] * 2
        assert model.busy == (trains + validates) * 2

    gridtrain.local(train, workers=1, export_dir=str(tmp_path))


def test_a_checkpoint_of_lightning_is_refused(tmp_path: Path) -> None:
    def train(grid) -> None:
        plain = Line(grid)
        plain.configure_optimizers = lambda: torch.optim.SGD(plain.parameters(), lr=0.1)
        trainer = L.Trainer(max_steps=1, accelerator="cpu", **QUIET)
        trainer.fit(plain, torch.utils.data.DataLoader(points(), batch_size=2))
        trainer.save_checkpoint(tmp_path / "plain.ckpt")
        loader = GridLoader(grid, points(), steps=4, batch_size=2)
        with pytest.raises(
            ConfigError, match=r"fit has ckpt_path='.*plain.ckpt', but a run resumes"
        ) as caught:
            fit(Line(grid), loader, ckpt_path=tmp_path / "plain.ckpt")
        assert "load them before grid.optimizer" in caught.value.remedy

    gridtrain.local(train, workers=1, export_dir=str(tmp_path))


@pytest.mark.parametrize("kind", ["automatic", "manual", "accumulate", "local steps"])
def test_lightning_counts_the_steps_of_the_run_after_a_restart(kind: str, tmp_path: Path) -> None:
    accumulate = 2 if kind == "accumulate" else 1
    every = 2 if kind == "local steps" else 1
    exchange = gridtrain.LocalSteps(every=2, exchange=gridtrain.Dense()) if every > 1 else gridtrain.Dense()

    def life(max_steps: int, **options):
        with (
            LocalGroup(min_workers=1) as group,
            group.join("anna", state_dir=str(tmp_path / "anna"), checkpoint_every=1) as grid,
        ):
            model = Line(grid, exchange, is_manual=kind == "manual")
            loader = GridLoader(grid, points(), steps=100, accumulate=accumulate, batch_size=2)
            options = {"accumulate_grad_batches": accumulate, "max_steps": max_steps} | options
            trainer = fit(model, loader, **options)
            return model.seen, trainer.global_step, grid.step

    assert life(4)[1:] == (4, 4 // every)
    logger = CSVLogger(tmp_path / "log")
    seen, global_step, step = life(8, logger=logger, log_every_n_steps=1)
    assert (global_step, step) == (8, 8 // every)
    expected = [(number // every, number) for number in range(4, 8) for _ in range(accumulate)]
    assert seen == expected
    rows = csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines())
    assert [int(row["step"]) for row in rows] == [4, 5, 6, 7]
