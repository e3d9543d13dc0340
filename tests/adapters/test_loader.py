"""What a loop that is not ours sees of the run: a length, any number of `iter`s, an end."""

import threading

import pytest
import torch
from torch import nn

import gridtrain
from gridtrain.adapters.loader import GridLoader
from gridtrain.errors import ConfigError
from gridtrain.sdk.local_group import LocalGroup

STEPS, ACCUMULATE, BATCH = 6, 2, 3


def net() -> nn.Linear:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, 0.5)
    nn.init.zeros_(model.bias)
    return model


def points(count: int = 90) -> list[torch.Tensor]:
    return list(torch.arange(2.0 * count).view(count, 2) / count)


def wrapped(grid, exchange=None):
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, grid.optimizer(inner, model, exchange=exchange or gridtrain.Dense())


def take(model, optimizer, batches) -> None:
    for x_BF in batches:
        (model(x_BF).square().mean() / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_loop_of_epochs_goes_on_with_one_run(tmp_path) -> None:
    def train(grid):
        """As Hugging Face's loop: an `iter` for each epoch, micro-batches fetched together."""
        model, optimizer = wrapped(grid)
        loader = GridLoader(grid, points(), steps=STEPS, accumulate=ACCUMULATE, batch_size=BATCH)
        assert len(loader) == STEPS * ACCUMULATE
        sizes = []
        for _ in range(3):
            batches = iter(loader)
            for _ in range(STEPS // 3):
                micro = [next(batches) for _ in range(ACCUMULATE)]
                sizes += [len(x_BF) for x_BF in micro]
                take(model, optimizer, micro)
        assert not grid.finished
        loader.finish()
        assert grid.finished and list(loader) == []
        return sizes, model.weight.tolist()

    (sizes, weights), (others, theirs) = gridtrain.local(train, workers=2, export_dir=str(tmp_path))
    assert sizes == others == [BATCH] * STEPS * ACCUMULATE
    assert weights == theirs


def test_a_loop_that_ends_early_leaves_and_the_other_goes_on(tmp_path) -> None:
    def train(grid):
        first = grid.rank  # known when the first turn comes
        model, optimizer = wrapped(grid)
        loader = GridLoader(grid, points(), steps=STEPS, batch_size=BATCH)
        done = 0
        for x_BF in loader:
            take(model, optimizer, [x_BF])
            done, first = done + 1, grid.rank if done == 0 else first
            if first == 1 and done == 2:
                break
        loader.finish()
        return first, done, grid.finished

    results = sorted(gridtrain.local(train, workers=2, export_dir=str(tmp_path)))
    assert results[1] == (1, 2, False)
    assert results[0] == (0, STEPS, True)


def test_steps_must_fit_the_local_steps(tmp_path) -> None:
    def train(grid):
        wrapped(grid, gridtrain.LocalSteps(every=4, exchange=gridtrain.Dense()))
        assert grid.calls_per_step == 4
        with pytest.raises(ConfigError, match="it must be a positive multiple of 4"):
            iter(GridLoader(grid, points(), steps=6, batch_size=2))

    gridtrain.local(train, workers=1, export_dir=str(tmp_path))


def test_trainer_arguments_that_cannot_be_a_workers_are_refused(tmp_path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: make test-adapters")
    from transformers import TrainingArguments

    from gridtrain.adapters.hugging_face import GridTrainer

    args = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    with pytest.raises(ConfigError, match="has no max_steps"):
        GridTrainer(grid=None, model=net(), args=args)


def test_lightning_with_a_plain_optimizer_is_refused(tmp_path) -> None:
    L = pytest.importorskip("lightning", reason="lightning is not installed: make test-adapters")
    from gridtrain.adapters.lightning import GridStrategy

    class Plain(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, x_BF, index):
            raise AssertionError("it must not train")

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def train(grid):
        loader = GridLoader(grid, points(), steps=2, batch_size=2)
        quiet = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar")}
        trainer = L.Trainer(
            max_epochs=1, strategy=GridStrategy(grid, loader), enable_model_summary=False, **quiet
        )
        with pytest.raises(ConfigError, match="SGD, which is not a wrapped optimizer"):
            trainer.fit(Plain(), loader)

    gridtrain.local(train, workers=1, export_dir=str(tmp_path))


def test_newcomers_receive_what_lightning_schedules(tmp_path) -> None:
    L = pytest.importorskip("lightning", reason="lightning is not installed: make test-adapters")
    from gridtrain.adapters.lightning import GridStrategy

    class Scheduled(L.LightningModule):
        def __init__(self, grid) -> None:
            super().__init__()
            self.net, self.grid, self.seen = net(), grid, []

        def training_step(self, x_BF, index):
            return self.net(x_BF).square().mean()

        def on_train_batch_start(self, batch, index):
            rate = self.optimizers().param_groups[0]["lr"]
            self.seen.append((self.grid.step, rate))
            if len(self.seen) > 3:
                self.grid.warm.set()

        def on_train_batch_end(self, *_):
            if self.grid.number == 1 and len(self.seen) > 2:
                self.grid.over.set()
            self.trainer.should_stop = self.grid.over.is_set()

        def configure_optimizers(self):
            inner = torch.optim.SGD(self.parameters(), lr=0.1)
            optimizer = self.grid.optimizer(inner, self, exchange=gridtrain.Dense())
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + step))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    warm, over = threading.Event(), threading.Event()
    seen = {}

    def train(number):
        with group.join(f"worker-{number}", export_dir=str(tmp_path)) as grid:
            grid.number, grid.warm, grid.over = number, warm, over
            loader = GridLoader(grid, points(), steps=100_000, batch_size=2)
            quiet = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar")}
            strategy = GridStrategy(grid, loader)
            trainer = L.Trainer(max_epochs=1, strategy=strategy, enable_model_summary=False, **quiet)
            model = Scheduled(grid)
            trainer.fit(model, loader)
            seen[number] = model.seen

    with LocalGroup(min_workers=1) as group:
        threads = [threading.Thread(target=train, args=(number,), daemon=True) for number in range(2)]
        threads[0].start()
        assert warm.wait(60.0)
        threads[1].start()
        for thread in threads:
            thread.join(60.0)
    assert set(seen) == {0, 1}
    for step, rate in seen[1]:
        assert rate == pytest.approx(0.1 / (1 + step)), f"step {step}"


def test_a_checkpoint_from_before_schedulers_were_tracked_is_resumed(tmp_path, monkeypatch) -> None:
    L = pytest.importorskip("lightning", reason="lightning is not installed: make test-adapters")
    from gridtrain.adapters.lightning import GridStrategy

    class Scheduled(L.LightningModule):
        def __init__(self, grid) -> None:
            super().__init__()
            self.net, self.grid = net(), grid

        def training_step(self, x_BF, index):
            return self.net(x_BF).square().mean()

        def configure_optimizers(self):
            inner = torch.optim.SGD(self.parameters(), lr=0.1)
            optimizer = self.grid.optimizer(inner, self, exchange=gridtrain.Dense())
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1000)]

    def life(steps: int) -> int:
        with (
            LocalGroup(min_workers=1) as group,
            group.join("anna", state_dir=str(tmp_path), checkpoint_every=1) as grid,
        ):
            loader = GridLoader(grid, points(), steps=1000, batch_size=2)
            quiet = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar")}
            strategy = GridStrategy(grid, loader)
            trainer = L.Trainer(max_steps=steps, strategy=strategy, enable_model_summary=False, **quiet)
            trainer.fit(Scheduled(grid), loader)
            return grid.step

    with monkeypatch.context() as before:
        before.setattr(gridtrain.Grid, "track", lambda self, **trackers: None)
        first = life(5)
    assert life(5) > first, "it goes on where the first one has ended"
