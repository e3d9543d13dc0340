"""Runs to a target: nobody trains while the held-out loss is measured, and the clock stands still for all."""

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
from accuracy import train as ours
from accuracy.workloads import WORKLOADS, Settings, Workload
from gridtrain.sdk.grid import Grid
from gridtrain.sdk.local_group import LocalGroup
from rivals import train as theirs

WITHIN_S = 30.0


class Tiny(Workload):
    """A linear model; what is to be known while it is measured is asked of `seen`."""

    name, batch_size, target = "gpt", 2, 0.0
    settings: ClassVar = dict.fromkeys(
        ("dense", "sparse", "local", "local-sgd", "adamw"), Settings("sgd", 0.01)
    )
    seen: ClassVar[Any]

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
        Tiny.seen()
        return 1.0


models: list[nn.Module] = []


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setitem(WORKLOADS, "gpt", Tiny)  # type: ignore[arg-type]
    models.clear()


@pytest.mark.parametrize(
    ("road", "measured_after"), [("dense", [5, 10, 12]), ("gtopk", [5, 10, 12]), ("local", [4, 8, 12])]
)
def test_ours_wait_with_the_same_parameters_while_the_first_measures(
    road: str, measured_after: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--workload", "gpt", "--road", road, "--folder", str(tmp_path), "--density", "0.5"]
    options = ours.parse([*words, "--steps", "12", "--every", "4", "--measure-every", "5"])
    waiting = threading.Semaphore(0)
    agreed: list[bool] = []
    mean = Grid.mean

    def noted(grid: Grid, value: float | Tensor) -> float:
        if not grid.is_first:
            waiting.release()
        return mean(grid, value)

    def seen() -> None:
        assert waiting.acquire(timeout=WITHIN_S), "the other worker does not wait while the first measures"
        first, second = (nn.utils.parameters_to_vector(model.parameters()) for model in models)
        agreed.append(torch.equal(first, second))

    monkeypatch.setattr(Grid, "mean", noted)
    monkeypatch.setattr(Tiny, "seen", staticmethod(seen), raising=False)
    failed: list[BaseException] = []

    def work(name: str) -> None:
        try:
            with group.join(name, export_dir=str(tmp_path)) as grid:
                ours.train(options, grid)
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
    assert agreed == [True] * 3


def test_the_clock_of_rivals_stands_still_until_all_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]

    def passes(seconds: float) -> None:
        now_s[0] += seconds

    class Alone:
        """One rank whose exchange takes a second, and whose others are slow to answer."""

        def __init__(self, options: Any, workload: Workload, model: nn.Module) -> None:
            self.workload, self.model = workload, model

        def backward(self, x: Tensor, y: Tensor) -> float:
            passes(1.0)
            loss = self.workload.loss(self.model, x, y)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.item()

        def stepped(self) -> None: ...

        def stop(self, mine: bool) -> bool:
            passes(1000.0)
            return mine

        def close(self) -> None: ...

    monkeypatch.setitem(theirs.EXCHANGES, "gloo", Alone)
    monkeypatch.setattr(recorder_module.time, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(Tiny, "seen", staticmethod(lambda: passes(100.0)), raising=False)
    words = ["--rival", "gloo", "--rank", "0", "--world", "1", "--master", "h:1", "--interface", "lo"]
    theirs.train(theirs.parse([*words, "--folder", str(tmp_path), "--steps", "5", "--measure-every", "2"]))
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["seconds"] for line in lines] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [line["held_out"] for line in lines] == [None, 1.0, None, 1.0, 1.0]
    assert {line["sent_bytes"] for line in lines} == {None}  # on loopback nobody's are known
