"""Workers of one pipeline in threads, by name, which a test can delay, kill, pause and inspect.

with Workers(tmp_path, 2, checkpoint_every=5) as workers:
    workers.before = lambda seen, grid, pipe: ...      before each step, in the worker's thread
    workers.add("anna", "bert")
    workers.wait(lambda: ...)                          until this is true
    workers.finish("anna", "bert")
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from brisk import LOSING
from group_status import status_of
from integration.scripts.pipeline import SAMPLES
from torch import nn

import gridtrain
from gridtrain.config import Deadlines
from gridtrain.pipeline.pipeline import Pipeline
from gridtrain.runtime.client.agent_link import NoAgent
from gridtrain.sdk.local_group import LocalGroup

WITHIN_S = 60.0
loss_fn = nn.functional.mse_loss


def data(samples: int = SAMPLES) -> list[tuple[torch.Tensor, torch.Tensor]]:
    points = torch.randn(samples, 2, generator=torch.Generator().manual_seed(1))
    return [(x, x[:1] * 2 - x[1:]) for x in points]


DATA = data()


def layers() -> list[nn.Module]:
    return [nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def pipeline_of(
    grid: gridtrain.Grid, model: Callable[[], list[nn.Module]] = layers, **options: Any
) -> Pipeline:
    """Two stages with two micro-batches, unless the options say otherwise."""
    defaults: dict[str, Any] = {"stages": 2, "loss_fn": loss_fn, "micro_batches": 2, "seed": 3}
    return grid.pipeline(model, sgd, **({"exchange": gridtrain.Dense()} | defaults | options))


class Seen:
    """What one worker recorded: by step its loss, its stage, its batch and, from `Numbered`, its samples."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.losses: dict[int, float] = {}
        self.stages: dict[int, int | None] = {}
        self.batches: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.samples: dict[int, list[int]] = {}
        self.more: dict[int, Any] = {}
        self.state: dict[str, torch.Tensor] = {}
        self.owner = NoAgent()
        self.end: BaseException | str | None = None

    @property
    def step(self) -> int:
        """The last committed step; -1: none."""
        return max(self.losses, default=-1)

    @property
    def stage(self) -> int | None:
        """That of the last committed step."""
        return self.stages[self.step]


class Workers:
    """Workers in threads, as the module shows; started by `add`."""

    def __init__(
        self,
        folder: Path,
        min_workers: int,
        *,
        steps: int = 40,
        data: Any = DATA,
        epochs: int = 0,
        checkpoint_every: int = 0,
        model: Callable[[], list[nn.Module]] = layers,
        deadlines: Deadlines = LOSING,
        **options: Any,
    ) -> None:
        self.folder, self.steps, self.every, self.options = folder, steps, checkpoint_every, options
        self.model, self.data = model, data
        self.until = {"epochs": epochs} if epochs else {"steps": steps}
        self.group = LocalGroup(min_workers=min_workers, deadlines=deadlines)
        self.seen: dict[str, Seen] = {}
        self.threads: dict[str, threading.Thread] = {}
        self.changed = threading.Condition()
        self.made: Callable[[Seen, gridtrain.Grid, Pipeline], None] = lambda seen, grid, pipe: None
        self.before: Callable[[Seen, gridtrain.Grid, Pipeline], Any] = lambda seen, grid, pipe: None
        self.after: Callable[[Seen, gridtrain.Grid, Pipeline], Any] = lambda seen, grid, pipe: None

    def __enter__(self) -> Workers:
        self.group.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.group.__exit__(*exc_info)

    def add(self, *names: str, url: str = "") -> None:
        """Start these workers; `url` is that of their checkpoints."""
        for name in names:
            self.seen[name] = Seen(name)
            self.threads[name] = threading.Thread(target=self._work, args=(name, url), daemon=True)
            self.threads[name].start()

    def kill(self, name: str) -> None:
        self.group.hub.kill(self.group.keys[name])

    def wait(self, true: Callable[[], bool], dead: Sequence[str] = ()) -> None:
        """Wait until `true()`; it is checked after each step of a worker, and ten times a second."""
        until_s = time.monotonic() + WITHIN_S
        with self.changed:
            while not self.changed.wait_for(true, 0.1):
                ends = {n: (s.end, s.step) for n, s in self.seen.items() if n not in dead}
                assert time.monotonic() < until_s, f"not within the limit: {ends}"

    def finish(self, *names: str) -> None:
        """Wait until these workers have reached the end of the run."""
        self.join(*names)
        assert [self.seen[name].end for name in names] == ["finished"] * len(names)

    def join(self, *names: str) -> None:
        """Wait until these workers have ended in any way."""
        for name in names:
            self.threads[name].join(WITHIN_S)
            assert not self.threads[name].is_alive(), f"{name} hangs at step {self.seen[name].step}"

    def status(self) -> dict[str, Any]:
        """The coordinator's status."""
        shown: dict[str, Any] = status_of(self.group)
        return shown

    def assembled(self) -> dict[str, torch.Tensor]:
        """The model, assembled from all stages."""
        return {name: value for seen in self.seen.values() for name, value in seen.state.items()}

    def _work(self, name: str, url: str) -> None:
        seen = self.seen[name]
        try:
            with self.group.join(
                name,
                export_dir=str(self.folder),
                checkpoint_every=self.every,
                state_dir=str(self.folder / name),
                checkpoints=url,
                owner=seen.owner,
            ) as grid:
                self._train(seen, grid)
            seen.end = "finished"
        except BaseException as error:
            seen.end = error
        finally:
            with self.changed:
                self.changed.notify_all()

    def _train(self, seen: Seen, grid: gridtrain.Grid) -> None:
        pipe = pipeline_of(grid, self.model, **self.options)
        self.made(seen, grid, pipe)
        for inputs, targets, *numbers in grid.batches(self.data, batch_size=4, **self.until, seed=3):
            self.before(seen, grid, pipe)
            has_samples = bool(grid._session.turn_spans)
            step = grid.step
            loss = pipe.step(inputs, targets)
            if loss is None:
                continue
            with self.changed:
                seen.losses[step], seen.stages[step] = loss, pipe.stage
                seen.batches[step] = inputs, targets
                seen.samples[step] = numbers[0].tolist() if numbers and has_samples else []
                seen.state = {n: v.clone() for n, v in pipe.module.state_dict().items()}
                self.after(seen, grid, pipe)
                self.changed.notify_all()


def undisturbed(folder: Path, **options: Any) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """Losses by step and the final model of two workers without faults."""
    with Workers(folder, 2, **options) as workers:
        workers.add("anna", "bert")
        workers.finish("anna", "bert")
        return workers.seen["anna"].losses, workers.assembled()
