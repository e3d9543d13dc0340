"""Runs to a target: while the held-out loss is measured, no worker trains and the clock is paused."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from brisk import BRISK
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from accuracy import recorder as recorder_module
from accuracy import train as worker
from accuracy.workloads import WORKLOADS, Settings, Workload
from gridtrain.sdk.grid import Grid
from gridtrain.sdk.local_group import LocalGroup
from rivals import train as rival

WITHIN_S = 30.0


class Tiny(Workload):
    """A linear model; `on_measure` is called while it is measured."""

    name, batch_size, target = "gpt", 2, 0.0
    settings: ClassVar = dict.fromkeys(
        ("dense", "sparse", "local", "local-sgd", "adamw"), Settings("sgd", 0.01)
    )
    on_measure: ClassVar[Any]

    def __init__(self) -> None:
        x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
        self.train = TensorDataset(x, x.sum(1, keepdim=True))

    def model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = nn.Linear(3, 1)
        models.append(model)
        return model

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (model(x) - y).square().mean()

    def held_out(self, model: nn.Module) -> float:
        Tiny.on_measure()
        return 1.0


models: list[nn.Module] = []


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setitem(WORKLOADS, "gpt", Tiny)  # type: ignore[arg-type]
    models.clear()


@pytest.mark.parametrize(
    ("family", "exchange", "every", "measured_after"),
    [
        ("dense", "dense", 0, [5, 10, 12]),
        ("sparse", "gtopk:density=0.5,momentum=0.9", 0, [5, 10, 12]),
        ("local", "gtopk:density=0.5", 4, [4, 8, 12]),
    ],
)
def test_workers_wait_with_equal_parameters_while_the_first_measures(
    family: str,
    exchange: str,
    every: int,
    measured_after: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = worker.Options("gpt", family, exchange, every, steps=12, measure_every=5, folder=str(tmp_path))
    waiting = threading.Semaphore(0)
    are_equal: list[bool] = []
    mean = Grid.mean

    def counted_mean(grid: Grid, value: float | Tensor) -> float:
        if not grid.is_first:
            waiting.release()
        return mean(grid, value)

    def on_measure() -> None:
        assert waiting.acquire(timeout=WITHIN_S), "the other worker does not wait while the first measures"
        first, second = (nn.utils.parameters_to_vector(model.parameters()) for model in models)
        are_equal.append(torch.equal(first, second))

    monkeypatch.setattr(Grid, "mean", counted_mean)
    monkeypatch.setattr(Tiny, "on_measure", staticmethod(on_measure), raising=False)
    failed: list[BaseException] = []

    def work(name: str) -> None:
        try:
            with group.join(name, export_dir=str(tmp_path)) as grid:
                worker.train(options, grid)
        except BaseException as error:
            failed.append(error)

    with LocalGroup(min_workers=2, deadlines=BRISK) as group:
        threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in ("anna", "bert")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WITHIN_S)
    assert not failed, failed
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["step"] for line in lines if line["held_out"] is not None] == measured_after
    assert are_equal == [True] * 3


def test_the_clock_of_rivals_is_paused_until_all_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]

    def pass_time(seconds: float) -> None:
        now_s[0] += seconds

    class SingleRank:
        """A rank whose exchange takes a second, and whose wait for the others takes long."""

        def __init__(self, options: Any, workload: Workload, model: nn.Module) -> None:
            self.workload, self.model = workload, model

        def backward(self, x: Tensor, y: Tensor) -> float:
            pass_time(1.0)
            loss = self.workload.loss(self.model, x, y)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.item()

        def stepped(self) -> None: ...

        def stop(self, own: bool) -> bool:
            pass_time(1000.0)
            return own

        def close(self) -> None: ...

    monkeypatch.setitem(rival.EXCHANGES, "gloo", SingleRank)
    monkeypatch.setattr(recorder_module.time, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(Tiny, "on_measure", staticmethod(lambda: pass_time(100.0)), raising=False)
    out = str(tmp_path / "rank-0.json")
    rival.train(rival.Training(trainer="gloo", steps=5, measure_every=2, interface="lo", out=out))
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["seconds"] for line in lines] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [line["held_out"] for line in lines] == [None, 1.0, None, 1.0, 1.0]
    assert {line["sent_bytes"] for line in lines} == {None}  # on loopback they are not known
