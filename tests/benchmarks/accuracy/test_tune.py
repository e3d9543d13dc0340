"""The search of learning rates: each family learns from the same start, and the best trial is marked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from accuracy.tune import RATES, Trial, markdown, run, save
from accuracy.workloads import WORKLOADS, Settings, Workload


class Line(Workload):
    """A linear model of an exactly linear function."""

    name, batch_size, target = "line", 4, 0.05
    settings: ClassVar = {
        "dense": Settings("sgd", 9.0, 0.9, clip_norm=10.0),
        "sparse": Settings("sgd", 9.0, 0.9, clip_norm=10.0),
        "adamw": Settings("adamw", 9.0),
        "local-sgd": Settings("sgd", 9.0, 0.5, clip_norm=10.0),
    }

    def __init__(self) -> None:
        self._x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
        self.train = TensorDataset(self._x, self._x.sum(1, keepdim=True))

    def model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return nn.Linear(5, 1)

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (model(x) - y).square().mean()

    @torch.no_grad()
    def held_out(self, model: nn.Module) -> float:
        return float(self.loss(model, self._x, self._x.sum(1, keepdim=True)))


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setitem(WORKLOADS, "line", Line)


@pytest.mark.parametrize(
    ("family", "variant"),
    [("dense", ""), ("dense", "int8"), ("sparse", ""), ("adamw", "bf16"), ("local-sgd", "2:0.5")],
)
def test_each_family_reaches_the_target_unless_the_rate_is_nearly_zero(
    line: None, family: str, variant: str
) -> None:
    good = run("line", family, 0.05, 400, variant)
    assert good.reached is not None and good.least <= Line.target
    assert variant in (good.gathered or good.values)
    unchanged = run("line", family, 1e-9, 20, variant)
    assert unchanged.reached is None and unchanged.least > 1.0


def test_trials_are_added_to_a_file(tmp_path: Path) -> None:
    good = Trial("line", "local-sgd", 0.05, 40, 0.04, "2:0.5")
    save(tmp_path / "tried.json", [good])
    save(tmp_path / "tried.json", [good, Trial("line", "dense", 0.1, None, 2.0)])
    saved = json.loads((tmp_path / "tried.json").read_text())["tried"]
    assert [one["family"] for one in saved] == ["dense", "local-sgd"]


def test_the_best_of_each_family_is_marked() -> None:
    tried = [
        Trial("gpt", "dense", 0.1, 200, 2.3),
        Trial("gpt", "dense", 0.2, 150, 2.34),
        Trial("gpt", "sparse", 0.1, None, 2.5),
        Trial("gpt", "sparse", 0.4, None, 2.4),
    ]
    marked = [line for line in markdown(tried).splitlines() if line.endswith("| best |")]
    assert marked == [
        "| gpt | dense |  | 0.2 | 150 | 2.340 | best |",
        "| gpt | sparse |  | 0.4 | - | 2.400 | best |",
    ]


def test_the_settings_of_workloads_are_in_the_grid() -> None:
    for workload in WORKLOADS.values():
        for family, settings in workload.settings.items():
            assert settings.learning_rate in RATES[family], (workload, family)
