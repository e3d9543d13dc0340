"""Pipelines over the real runtime: a coordinator and S x R workers in threads, in-memory links.

         replica 0   replica 1
stage 0   worker      worker       the same losses everywhere; replicas of a stage bit-identical;
stage 1   worker      worker       R = 1: parameters bit-identical with the unpartitioned model
"""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import gridtrain
from gridtrain.errors import ConfigError
from gridtrain.pipeline import stage_state
from gridtrain.pipeline.blueprint import Blueprint
from gridtrain.pipeline.boundary_specs import infer_boundary_specs, lone_sample_layer
from gridtrain.pipeline.model_stages import ModelStages
from gridtrain.pipeline.pipeline import Pipeline
from gridtrain.pipeline.stage_state import PipelineOptions, StageState, make_optimizer, schedule_for
from gridtrain.runtime.contribution import Contribution, ContributionReporter
from gridtrain.runtime.group_session import GroupSession
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.sdk.local_group import local

SEED = 5
STEPS = 5
Layers = Callable[[], list[nn.Module]]


def layers() -> list[nn.Module]:
    return [
        nn.Linear(4, 16),
        nn.Tanh(),
        nn.Linear(16, 16),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, 3),
    ]


def built(model: Layers) -> nn.Sequential:
    blueprint = Blueprint(model, seed=SEED)
    return nn.Sequential(*blueprint.build(0, len(blueprint)))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def two(parameters: Any) -> list[torch.optim.Optimizer]:
    """SGD for the matrices and AdamW for the rest; a stage may have neither."""
    listed = list(parameters)
    matrices, rest = ([p for p in listed if (p.ndim == 2) is wanted] for wanted in (True, False))
    return [sgd([{"params": matrices}]), torch.optim.AdamW([{"params": rest}], lr=0.01)]


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    points = torch.randn(60, 4, generator=generator)
    return [(x, (x[0] > 0).long() + (x[1] > 0).long()) for x in points]


loss_fn = nn.functional.cross_entropy
DATA = data()


class Seen:
    """What one worker recorded, and its result."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.losses: list[float | None] = []
        self.stage = -1
        self.state: dict[str, torch.Tensor] = {}
        self.skipped = 0


def run(grid: gridtrain.Grid, model: Layers, **options: Any) -> Seen:
    make, steps = options.pop("make", sgd), options.pop("steps", STEPS)
    pipe = grid.pipeline(model, make, **({"loss_fn": loss_fn, "micro_batches": 3, "seed": SEED} | options))
    seen = Seen()
    for inputs, targets in grid.batches(DATA, batch_size=8, steps=steps):
        seen.batches.append((inputs, targets))
        seen.losses.append(pipe.step(inputs, targets))
        seen.skipped += pipe.last_skipped
    seen.stage = pipe.stage
    seen.state = {name: value.detach().clone() for name, value in pipe.module.state_dict().items()}
    return seen


def divided(samples: int, most: int) -> Iterator[slice]:
    """An independent implementation: near-equal parts, the larger ones first."""
    start = 0
    for i in range(min(samples, most)):
        length = samples // min(samples, most) + (i < samples % min(samples, most))
        yield slice(start, start + length)
        start += length


def unpartitioned(
    model: Layers, batches: list[Any], micro_batches: int, make: Any = sgd
) -> tuple[list[float], nn.Module]:
    """An ordinary loop over the unpartitioned model, micro-batch by micro-batch."""
    whole = built(model)
    optimizer = make_optimizer(make, whole.parameters())
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        total = 0.0
        for piece in divided(len(inputs), micro_batches):
            loss = loss_fn(whole(inputs[piece]), targets[piece]) * (len(inputs[piece]) / len(inputs))
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses, whole


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize(
    ("exchange", "make"),
    [(gridtrain.Dense(), sgd), (gridtrain.GTopK(density=1.0, values="fp32"), sgd), (gridtrain.Dense(), two)],
    ids=["dense", "gtopk", "two optimizers"],
)
def test_parameters_are_those_of_the_unpartitioned_model(
    tmp_path: Path, stages: int, exchange: gridtrain.Dense | gridtrain.GTopK, make: Any
) -> None:
    def train(grid: gridtrain.Grid) -> Seen:
        return run(grid, layers, stages=stages, exchange=exchange, make=make)

    found = local(train, workers=stages, export_dir=str(tmp_path))
    assert sorted(seen.stage for seen in found) == list(range(stages))
    losses, whole = unpartitioned(layers, found[0].batches, 3, make)
    state = {name: value for seen in found for name, value in seen.state.items()}
    for name, value in whole.state_dict().items():
        assert torch.equal(state[name], value), f"{name} differs by {(state[name] - value).abs().max()}"
    for seen in found:
        assert seen.losses == pytest.approx(losses, abs=1e-6) and len(seen.losses) == STEPS
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "exchange",
    [
        gridtrain.Dense(),
        gridtrain.GTopK(density=0.2),
        gridtrain.TopK(density=0.2),
        gridtrain.Dense(values="int8"),
    ],
)
def test_replicas_of_a_stage_are_bit_identical(tmp_path: Path, exchange: Any) -> None:
    def normalized() -> list[nn.Module]:
        return [layer for each in layers()[:-1] for layer in (each, nn.BatchNorm1d(16))] + layers()[-1:]

    def train(grid: gridtrain.Grid) -> Seen:
        return run(grid, normalized, stages=2, exchange=exchange, make=lambda p: torch.optim.SGD(p, lr=0.1))

    found = local(train, workers=4, export_dir=str(tmp_path))
    for one, other in itertools.combinations(found, 2):
        assert one.losses == other.losses
        if one.stage == other.stage:
            assert all(torch.equal(value, other.state[name]) for name, value in one.state.items())
    assert sorted(seen.stage for seen in found) == [0, 0, 1, 1]
    inputs_of = [torch.cat([inputs for inputs, _ in seen.batches]) for seen in found]
    pairs = [
        (i, j) for i, j in itertools.combinations(range(4), 2) if torch.equal(inputs_of[i], inputs_of[j])
    ]
    assert [{found[i].stage, found[j].stage} for i, j in pairs] == [{0, 1}, {0, 1}]  # two pipelines


def test_dense_replicas_train_as_the_unpartitioned_model(tmp_path: Path) -> None:
    def train(grid: gridtrain.Grid) -> Seen:
        return run(grid, layers, stages=2, exchange=gridtrain.Dense())

    found = local(train, workers=4, export_dir=str(tmp_path))
    firsts = [seen for seen in found if seen.stage == 0]
    together = [
        tuple(torch.cat(parts) for parts in zip(*step, strict=True))
        for step in zip(*(seen.batches for seen in firsts), strict=True)
    ]
    losses, whole = unpartitioned(layers, together, 1)
    state = {name: value for seen in found for name, value in seen.state.items()}
    assert found[0].losses == pytest.approx(losses, abs=1e-5)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(state[name], value, atol=1e-5, rtol=1e-5)


def test_the_final_model_is_written_stage_by_stage_with_an_index(tmp_path: Path) -> None:
    found = local(lambda grid: run(grid, layers, stages=3), workers=3, export_dir=str(tmp_path))
    index = json.loads((tmp_path / "final.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(built(layers).state_dict())
    for seen in found:
        for name, value in seen.state.items():
            part = safetensors.torch.load_file(tmp_path / index["weight_map"][name])
            assert torch.equal(part[name], value)
            assert index["weight_map"][name] == f"final-0000{seen.stage + 1}-of-00003.safetensors"
    names = {path.name: path.read_bytes() for path in tmp_path.glob("final*")}
    local(lambda grid: run(grid, layers, stages=3, steps=STEPS + 1), workers=3, export_dir=str(tmp_path))
    assert {path.name: path.read_bytes() for path in (tmp_path / "earlier-1").iterdir()} == names


class Explodes(nn.Module):
    """Its third output is infinite, so that the gradients of all layers are not finite once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y: torch.Tensor = self.linear(x)
        return y * float("inf") if self.calls == 3 else y


def test_a_step_that_is_not_finite_on_one_stage_is_skipped_by_all(tmp_path: Path) -> None:
    def model() -> list[nn.Module]:
        return [nn.Linear(4, 16), nn.Linear(16, 16), Explodes(), nn.Linear(16, 3)]

    def train(grid: gridtrain.Grid) -> Seen:
        return run(grid, model, stages=2, exchange=gridtrain.Dense(), rematerialise=False, cuts=(0, 2, 4))

    for seen in local(train, workers=2, export_dir=str(tmp_path)):
        assert seen.skipped == 1
        assert all(bool(value.isfinite().all()) for value in seen.state.values())
        assert sum(loss is not None and loss == loss for loss in seen.losses) == STEPS - 1


def test_clipping_is_by_the_norm_of_the_whole_model(tmp_path: Path) -> None:
    limit = 0.05

    def train(grid: gridtrain.Grid) -> Seen:
        return run(grid, layers, stages=2, exchange=gridtrain.Dense(), clip_norm=limit, steps=1)

    found = local(train, workers=2, export_dir=str(tmp_path))
    start = built(layers).state_dict()
    state = {name: value for seen in found for name, value in seen.state.items()}
    moved = torch.cat([(state[name] - start[name]).reshape(-1) for name in start])
    assert moved.norm().item() == pytest.approx(0.3 * limit, rel=1e-3)


def test_a_checkpoint_has_the_stage_of_its_turn_after_a_change_of_members() -> None:
    """Otherwise a checkpoint of another stage would have that stage's initial values."""
    options = PipelineOptions(stages=2, micro_batches=1, exchange=gridtrain.Dense(), loss=loss_fn)
    session = SimpleNamespace(
        snapshot=WorkerSnapshot(rank=0, world_size=2),
        tasks=SimpleNamespace(resize_residual=lambda n: None),
        increase_figure=None,
    )
    staging = ModelStages(Blueprint(layers), 2, cuts=None, device=torch.device("cpu"))
    pipe = Pipeline(staging, sgd, options, session)  # type: ignore[arg-type]
    turn, trained = session.snapshot, pipe.module
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.fill_(7.0)
    for moved in (WorkerSnapshot(rank=1, world_size=2), WorkerSnapshot()):
        session.snapshot = moved
        _, tensors = pipe.held.pack(turn)
        weights = [value for value in tensors.values() if value.is_floating_point()]
        assert weights and all(bool((value == 7.0).all()) for value in weights)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"stages": 0}, "stages is 0; it must be an integer from 2"),
        ({"stages": 1}, "stages is 1; .* -> .* grid.optimizer"),
        ({"stages": 2.0}, "stages is 2.0"),
        ({"stages": 7}, "6 blocks, of which 4 are trained, cannot be divided into 7 stages"),
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"micro_batches": True}, "micro_batches is True"),
        ({"loss_fn": None}, "loss_fn is None, which is not callable -> pass a function"),
        ({"make": torch.optim.SGD([torch.zeros(1)], lr=0.1)}, "optimizer is a SGD -> pass a function"),
        ({"make": lambda parameters: None}, "returned a NoneType"),
        ({"make": torch.optim.LBFGS}, "LBFGS cannot be used in a run"),
        ({"exchange": gridtrain.GTopK(momentum=0.9)}, "has momentum 0.9, and GTopK"),
        ({"exchange": gridtrain.LocalSteps(every=4)}, "exchange is LocalSteps"),
        ({"exchange": gridtrain.Overlap()}, "exchange is Overlap"),
        ({"clip_norm": -1.0}, "clip_norm is -1.0"),
        ({"ahead": float("nan")}, "ahead=nan is not a valid"),
        ({"seed": 2**70}, "seed is"),
    ],
)
def test_misuse_is_refused_before_waiting_for_others(option: dict[str, Any], text: str) -> None:
    grid = gridtrain.Grid.__new__(gridtrain.Grid)
    grid._optimizer, grid._session = None, None  # type: ignore[assignment]
    options = {
        "stages": 2,
        "loss_fn": loss_fn,
        "exchange": gridtrain.Dense(),
        "make": sgd,
        "base": "any",
    } | option
    with pytest.raises(ConfigError, match=text):
        grid.pipeline(layers, options.pop("make"), **options)


@pytest.mark.parametrize("exchange", [gridtrain.Dense(), gridtrain.GTopK(density=1.0, values="fp32")])
def test_a_tied_parameter_counts_once_in_the_norm(
    tmp_path: Path, exchange: gridtrain.Dense | gridtrain.GTopK
) -> None:
    limit = 0.05

    def tied() -> list[nn.Module]:
        first, last = nn.Linear(4, 4), nn.Linear(4, 4)
        last.weight = first.weight
        return [first, nn.Tanh(), nn.Linear(4, 4), last]

    def train(grid: gridtrain.Grid) -> Seen:
        return run(grid, tied, stages=2, exchange=exchange, clip_norm=limit, steps=1)

    found = local(train, workers=2, export_dir=str(tmp_path))
    start = dict(built(tied).named_parameters())
    assert len(start) == 5
    state = {name: value for seen in found for name, value in seen.state.items()}
    moved = torch.cat([(state[name] - value).reshape(-1) for name, value in start.items()])
    assert moved.norm().item() == pytest.approx(0.3 * limit, rel=1e-3)


def test_the_contribution_of_a_stage_is_reported(tmp_path: Path) -> None:
    def train(grid: gridtrain.Grid) -> Contribution | None:
        path = tmp_path / f"{threading.get_ident()}.json"
        session = grid._session
        assert isinstance(session, GroupSession)
        session._contribution = ContributionReporter(path)
        run(grid, layers, stages=2, exchange=gridtrain.Dense())
        grid.close()
        return Contribution.read(path)

    for contribution in local(train, workers=2, export_dir=str(tmp_path)):
        assert contribution is not None and (contribution.steps, contribution.samples) == (STEPS, 8 * STEPS)


def test_a_model_in_memory_is_refused(tmp_path: Path) -> None:
    def train(grid: gridtrain.Grid) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        grid.pipeline(model, sgd, stages=2, loss_fn=loss_fn)

    with pytest.raises(ConfigError, match="is on cpu"):
        local(train, workers=1, export_dir=str(tmp_path))


class Learned(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (output * self.temperature - targets).square().mean()


def test_a_loss_with_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="Learned with parameters, which no stage's optimizer would update"):
        PipelineOptions(2, 1, gridtrain.Dense(), Learned())


def test_an_optimizer_may_iterate_over_the_parameters_twice() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        decayed = [p for p in parameters if p.dim() > 1]
        return torch.optim.AdamW([{"params": decayed}, {"params": [p for p in parameters if p.dim() < 2]}])

    groups = make_optimizer(make, nn.Linear(2, 2).parameters()).param_groups
    assert [len(group["params"]) for group in groups] == [1, 1]


def test_an_optimizer_of_a_list_without_parameters_in_a_stage_is_refused_with_the_stage() -> None:
    def make(parameters: Any) -> list[torch.optim.Optimizer]:
        matrices, rest = ([p for p in parameters if (p.dim() == 2) is wanted] for wanted in (True, False))
        return [torch.optim.SGD(matrices, lr=0.1), torch.optim.AdamW(rest)]

    blueprint = Blueprint(lambda: [nn.Linear(2, 2), nn.Linear(2, 2, bias=False)])
    staging = ModelStages(blueprint, 2, cuts=None, device=torch.device("cpu"))
    options = PipelineOptions(2, 1, gridtrain.Dense(), loss_fn)
    assert len(StageState(0, staging, make, options, ignore_figure).inner.param_groups) == 2
    with pytest.raises(ConfigError, match=r"without parameters for stage 1 -> .*\{\"params\": parameters\}"):
        StageState(1, staging, make, options, ignore_figure)


@pytest.mark.parametrize("ahead", [-1.0, math.inf, math.nan])
def test_an_invalid_ahead_is_refused_at_once(ahead: float) -> None:
    with pytest.raises(ConfigError, match="fill-drain"):
        schedule_for("1f1b", ahead)


def test_a_model_with_one_trained_block_has_one_stage() -> None:
    def frozen() -> list[nn.Module]:
        made = layers()
        for layer in made[:-1]:
            layer.requires_grad_(False)
        return made

    with pytest.raises(
        ConfigError, match=r"^6 blocks, of which 1 is trained, cannot be divided into 2 stages"
    ):
        ModelStages(Blueprint(frozen), 2, cuts=None, device=torch.device("cpu"))


@pytest.mark.parametrize("cuts", [(0, 3.0, 6), (0, 7), (0, 3, 3), np.array([0, 3, 6])], ids=str)
def test_cuts_that_are_not_ascending_integers_are_refused(cuts: Any) -> None:
    with pytest.raises(ConfigError, match=r"^cuts \[.* -> pass 3 ascending integers from 0 to 6"):
        ModelStages(Blueprint(layers), 2, cuts=cuts, device=torch.device("cpu"))


# -- inputs of several shapes --------------------------------------------------------------------------


class Pool(nn.Module):
    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return x_BTD.mean(dim=1)


def pooling_layers() -> list[nn.Module]:
    return [nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), Pool(), nn.Linear(16, 3)]


def of_lengths() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Samples of 2 to 6 rows."""
    generator = torch.Generator().manual_seed(7)
    rows = [torch.randn(2 + i % 5, 4, generator=generator) for i in range(60)]
    return [(x, (x.sum() > 0).long()) for x in rows]


def padded(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    rows, targets = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.stack(targets)


@pytest.mark.parametrize(("workers", "remembered"), [(2, 256), (2, 1), (4, 256)])
def test_batches_may_be_padded_to_the_longest_of_their_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, remembered: int
) -> None:
    inferred: list[str] = []  # the workers' threads

    def infer(*args: Any, **options: Any) -> Any:
        inferred.append(threading.current_thread().name)
        return infer_boundary_specs(*args, **options)

    monkeypatch.setattr(stage_state, "infer_boundary_specs", infer)
    monkeypatch.setattr(stage_state, "MAX_SHAPES", remembered)

    def train(grid: gridtrain.Grid) -> tuple[Seen, int]:
        pipe = grid.pipeline(
            pooling_layers, sgd, stages=2, loss_fn=loss_fn, micro_batches=2, cuts=[0, 2, 5], seed=SEED
        )
        seen = Seen()
        for x, y in grid.batches(of_lengths(), batch_size=2, steps=12, collate_fn=padded):
            seen.batches.append((x, y))
            seen.losses.append(pipe.step(x, y))
        seen.state = {name: value.detach().clone() for name, value in pipe.module.state_dict().items()}
        return seen, inferred.count(threading.current_thread().name)

    found = local(train, workers=workers, export_dir=str(tmp_path))
    assert all(seen.losses == found[0][0].losses for seen, _ in found) and None not in found[0][0].losses
    lengths = [x.shape[1] for x, _ in found[0][0].batches]
    assert len(set(lengths)) > 2 and len(set(lengths)) < 12
    if workers == 2:
        changes = sum(1 for _ in itertools.groupby(lengths))
        assert [count for _, count in found] == [changes if remembered == 1 else len(set(lengths))] * 2
        losses, whole = unpartitioned(pooling_layers, found[0][0].batches, 2)
        assert found[0][0].losses == losses
        state = {name: value for seen, _ in found for name, value in seen.state.items()}
        assert all(torch.equal(state[name], value) for name, value in whole.state_dict().items())
    else:
        others = [[x.shape[1] for x, _ in seen.batches] for seen, _ in found]
        assert any(other != lengths for other in others), "replicas have batches of different lengths"


@pytest.mark.parametrize(
    ("samples", "number", "sizes", "is_examined"),
    [(8, 4, [2, 2, 2, 2], False), (7, 4, [3, 2, 2], True), (2, 4, [2], True), (1, 4, [1], False)],
)
def test_a_layer_for_which_one_sample_is_too_few_is_found_when_it_matters(
    monkeypatch: pytest.MonkeyPatch, samples: int, number: int, sizes: list[int], is_examined: bool
) -> None:
    examined: list[Any] = []

    def lone(layers: Any, example: Any) -> tuple[str, bool]:
        examined.append(example)
        return lone_sample_layer(layers, example)

    monkeypatch.setattr(stage_state, "lone_sample_layer", lone)
    state, staging = first_of_two_stages(lambda: [nn.Linear(4, 4), nn.BatchNorm1d(4)])
    for _ in range(2):
        state.prepare_executor(staging, torch.ones(samples, 4))
        assert sorted(state.micro_batch_sizes(samples, number), reverse=True) == sizes
    assert len(examined) == is_examined


def test_the_shapes_that_were_used_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    inferred: list[int] = []

    def infer(layers: Any, example: Any, **options: Any) -> Any:
        inferred.append(example.shape[1])
        return infer_boundary_specs(layers, example, **options)

    monkeypatch.setattr(stage_state, "infer_boundary_specs", infer)
    monkeypatch.setattr(stage_state, "MAX_SHAPES", 2)
    state, staging = first_of_two_stages(lambda: [nn.Linear(4, 4), nn.Linear(4, 4)])
    for length in (1, 2, 1, 3, 1, 2):
        state.prepare_executor(staging, torch.ones(2, length, 4))
    assert inferred == [1, 2, 3, 2]


def first_of_two_stages(model: Layers) -> tuple[StageState, ModelStages]:
    staging = ModelStages(Blueprint(model), 2, cuts=None, device=torch.device("cpu"))
    options = PipelineOptions(stages=2, micro_batches=2, exchange=gridtrain.Dense(), loss=loss_fn)
    return StageState(0, staging, sgd, options, ignore_figure), staging


def ignore_figure(name: str, amount: float) -> None:
    pass


# -- autocast ------------------------------------------------------------------------------------------


class Rotated(torch.autograd.Function):
    """Multiplies the gradient by a matrix, which autocast would do in bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        matrix = torch.linspace(-1, 1, gradient.shape[1] ** 2).view(gradient.shape[1], -1)
        return torch.mm(gradient.float(), matrix).to(gradient.dtype)


class Autocast(nn.Module):
    """A linear layer in bfloat16."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.tanh(self.linear(x))


class Rotation(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rotated: torch.Tensor = Rotated.apply(x.float())
        return rotated


def autocast_layers(inside: bool) -> list[nn.Module]:
    if inside:
        return [Autocast(4), Autocast(16), Rotation(), nn.Linear(16, 3)]
    return [nn.Linear(4, 16), nn.Tanh(), Rotation(), nn.Linear(16, 16), nn.Linear(16, 3)]


class WatchedSGD(torch.optim.SGD):
    are_cast: ClassVar[list[bool]] = []

    def step(self, closure: Any = None) -> Any:
        self.are_cast.append(torch.is_autocast_enabled("cpu"))
        return super().step(closure)


@pytest.mark.parametrize("where", ["inside the layers", "around each step", "around the loop"])
def test_with_autocast_a_pipeline_is_bit_for_bit_as_torch(tmp_path: Path, where: str) -> None:
    WatchedSGD.are_cast.clear()

    def model() -> list[nn.Module]:
        return autocast_layers(where == "inside the layers")

    def cast(here: str) -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16) if where == here else nullcontext()

    def train(grid: gridtrain.Grid) -> Seen:
        pipe = grid.pipeline(
            model,
            lambda p: WatchedSGD(p, lr=0.3, momentum=0.9),
            stages=2,
            loss_fn=loss_fn,
            micro_batches=3,
            cuts=[0, 2, len(model())],
            seed=SEED,
        )
        seen = Seen()
        with cast("around the loop"):
            for x, y in grid.batches(DATA, batch_size=8, steps=STEPS):
                seen.batches.append((x, y))
                with cast("around each step"):
                    seen.losses.append(pipe.step(x, y))
        seen.state = {name: value.detach().clone() for name, value in pipe.module.state_dict().items()}
        return seen

    found = local(train, workers=2, export_dir=str(tmp_path))
    whole = built(model)
    optimizer = sgd(whole.parameters())
    losses = []
    for x, y in found[0].batches:
        optimizer.zero_grad()
        total = 0.0
        for piece in divided(len(x), 3):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where != "inside the layers"):
                loss = loss_fn(whole(x[piece]), y[piece])
            loss = loss * (len(x[piece]) / len(x))
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    assert [seen.losses for seen in found] == [losses] * 2
    state = {name: value for seen in found for name, value in seen.state.items()}
    assert all(torch.equal(state[name], value) for name, value in whole.state_dict().items())
    assert WatchedSGD.are_cast == [False] * (2 * STEPS)
