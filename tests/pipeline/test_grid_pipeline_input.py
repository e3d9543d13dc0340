"""Invalid batches, and payloads of hostile or faulty stages: an error that names the culprit, never a crash.

pipe.step(half a batch)     this worker raises; called again with the whole batch, nothing is lost
stage 0 sends token 10**9   stage 1 reports the value; stage 0 is removed, the other pipeline goes on
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from brisk import LOSING, WITHIN_S
from pipeline_group import data, layers, loss_fn, pipeline_of
from threaded_group import ThreadedGroup
from torch import Tensor, nn

import gridtrain
from gridtrain.core.stages.schedule import fill_drain, one_forward_one_backward
from gridtrain.errors import ConfigError, LineBroken
from gridtrain.pipeline.batch_checks import check_in_flight
from gridtrain.pipeline.boundary_specs import lone_sample_layer
from gridtrain.pipeline.executor import StageExecutor, share_tied_parameters
from gridtrain.pipeline.fault_origin import FaultOrigin, find_fault_origin, sender_fault
from gridtrain.pipeline.held_stage import HeldStage
from gridtrain.pipeline.pipeline import Pipeline
from gridtrain.pipeline.stage import Stage, TiedParameter
from gridtrain.pipeline.stage_link import RoundStageLink
from gridtrain.pipeline.tensor_tree import Leaf, TensorTreeSpec
from gridtrain.sdk.local_group import local

SEED, STEPS, BATCH = 4, 10, 4


DATA = data(48)
State = dict[str, Tensor]
Call = Callable[[Pipeline, Any, Any], float | None]


def trained(folder: Path, call: Call, **options: Any) -> tuple[State, list[float | None]]:
    """Train two stages with `call`; return the whole model's parameters and the first worker's losses."""

    def train(grid: gridtrain.Grid) -> tuple[State, list[float | None]]:
        pipe = pipeline_of(grid, seed=SEED, **options)
        losses = [call(pipe, x, y) for x, y in grid.batches(DATA, batch_size=BATCH, steps=STEPS)]
        return {name: value.clone() for name, value in pipe.module.state_dict().items()}, losses

    found = local(train, workers=2, export_dir=str(folder))
    return {name: value for state, _ in found for name, value in state.items()}, found[0][1]


def plainly(pipe: Pipeline, x: Any, y: Any) -> float | None:
    return pipe.step(x, y)


WRONG: dict[str, tuple[Callable[[Pipeline, Any, Any], Any], str]] = {
    "half a batch": (lambda pipe, x, y: pipe.step(x[:2], y[:2]), r"inputs .* shape \(2, 2\).* 4 samples"),
    "targets of another length": (lambda pipe, x, y: pipe.step(x, y[:3]), r"targets .* shape \(3, 1\)"),
    "a scalar": (lambda pipe, x, y: pipe.step(x, torch.tensor(1.0)), r"targets .* shape \(\)"),
    "in a nest": (lambda pipe, x, y: pipe.step({"x": x, "more": [y[1:]]}, y), r"inputs .* shape \(3, 1\)"),
    "an array": (lambda pipe, x, y: pipe.step(np.ones((4, 2)), y), "the inputs contain a ndarray"),
    "another dtype": (
        lambda pipe, x, y: pipe.step(x.double(), y),
        r"dtypes of the inputs are torch\.float64, but in earlier steps they were torch\.float32 -> ",
    ),
    "inputs of inference_mode": (
        lambda pipe, x, y: pipe.step(torch.inference_mode()(x.clone)(), y),
        r"made under torch\.inference_mode.* -> use torch\.no_grad where",
    ),
    "no gradients": (lambda pipe, x, y: torch.no_grad()(pipe.step)(x, y), r"under torch\.no_grad or torch\."),
    "inference": (lambda pipe, x, y: torch.inference_mode()(pipe.step)(x, y), r"outside of both"),
    "another structure": (lambda pipe, x, y: pipe.step([x], y), r"inputs are \[torch\.float32\], but in "),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[State, list[float | None]]:
    """The results of a run without mistakes."""
    return trained(tmp_path_factory.mktemp("plain"), plainly)


def test_a_wrong_batch_is_refused_on_every_stage_and_the_right_one_is_accepted(
    tmp_path: Path, expected: tuple[State, list[float | None]]
) -> None:
    """Each step has a wrong batch of another kind first."""
    refused: dict[int | None, list[str]] = {0: [], 1: []}

    def first_wrongly(pipe: Pipeline, x: Any, y: Any) -> float | None:
        kind = list(WRONG)[len(refused[pipe.stage])]
        wrong, text = WRONG[kind]
        with pytest.raises(ConfigError, match=text):
            wrong(pipe, x, y)
        refused[pipe.stage].append(kind)
        return pipe.step(x, y)

    state, losses = trained(tmp_path, first_wrongly)
    assert refused == {0: list(WRONG), 1: list(WRONG)}
    assert losses == expected[1] and None not in losses
    assert all(torch.equal(state[name], value) for name, value in expected[0].items())


def test_a_step_without_targets_raises_and_may_be_called_again(
    tmp_path: Path, expected: tuple[State, list[float | None]]
) -> None:
    refused: list[int | None] = []

    def forgetful(pipe: Pipeline, x: Any, y: Any) -> float | None:
        if pipe.stage == 1 and not refused:
            with pytest.raises(ConfigError, match=r"no targets.*-> call loss = pipe\.step"):
                pipe.step(x)
            refused.append(pipe.stage)
        return pipe.step(x, y)

    state, losses = trained(tmp_path, forgetful)
    assert refused == [1] and losses == expected[1]
    assert all(torch.equal(state[name], value) for name, value in expected[0].items())


def test_more_micro_batches_than_samples_are_as_many_as_samples(tmp_path: Path) -> None:
    state, losses = trained(tmp_path, plainly, micro_batches=64)
    as_many, its_losses = trained(tmp_path, plainly, micro_batches=BATCH)
    assert losses == its_losses
    assert all(torch.equal(state[name], value) for name, value in as_many.items())


@pytest.mark.parametrize(
    ("schedule", "buffers", "most"),
    [(fill_drain, 1, 2048), (fill_drain, 7, 512), (partial(one_forward_one_backward, ahead=1e9), 1, 2048)],
)
def test_no_more_micro_batches_are_in_flight_than_a_neighbour_stores(
    schedule: Any, buffers: int, most: int
) -> None:
    check_in_flight(schedule(3, most), buffers)
    with pytest.raises(
        ConfigError, match=rf"{most + 1} of them .* stores at most {most} .* micro_batches={most}"
    ):
        check_in_flight(schedule(3, most + 1), buffers)
    check_in_flight(one_forward_one_backward(3, 1 << 14), buffers)  # stores three


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"micro_batches": 2049, "schedule": "fill-drain"}, "2049 of them are in flight"),
        ({"micro_batches": 10**12}, "micro_batches is 1000000000000; it must be at most 16384"),
        ({"rematerialise": "no"}, "rematerialise is 'no'; it must be True or False"),
        ({"device": "cdua"}, r"device is 'cdua', which torch .* cannot use here: Expected one of cpu"),
        ({"device": None}, "device is None, which torch .* cannot use here: .* -> pass"),
        ({"device": "cuda:99"}, "device is 'cuda:99', which torch .* cannot use here: "),
    ],
)
def test_invalid_arguments_are_refused_when_the_pipeline_is_made(option: dict[str, Any], text: str) -> None:
    grid = gridtrain.Grid.__new__(gridtrain.Grid)
    grid._optimizer, grid._session = None, None  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=text):
        grid.pipeline(layers, torch.optim.SGD, stages=2, loss_fn=loss_fn, **option)


def test_a_worker_that_never_held_a_stage_is_told_that_the_run_is_over() -> None:
    held = HeldStage.__new__(HeldStage)
    held.current = None
    for state, told in (("waiting", "before the group has formed"), ("finished", "the run has finished")):
        snapshot = SimpleNamespace(world_size=0, run_state=(state, ""))
        held._session = SimpleNamespace(snapshot=snapshot)  # type: ignore[assignment]
        with pytest.raises(ConfigError, match=told):
            held.in_memory()


def test_a_scaler_and_a_pipeline_are_refused_in_either_order() -> None:
    grid = gridtrain.Grid.__new__(gridtrain.Grid)
    grid._optimizer, grid._session = None, None  # type: ignore[assignment]
    grid.scaler(device="cpu")
    with pytest.raises(
        ConfigError, match=r"grid\.scaler\(\) was called with a pipeline.* -> train in float32"
    ):
        grid.pipeline(layers, torch.optim.SGD, stages=2, loss_fn=loss_fn)
    other = gridtrain.Grid.__new__(gridtrain.Grid)
    other._optimizer = Pipeline.__new__(Pipeline)
    with pytest.raises(ConfigError, match=r"grid\.scaler\(\) was called with a pipeline"):
        other.scaler()


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        (0, "pipe.step(...) was called 0 times for the batch of step 1; each batch is one step -> "),
        (2, "pipe.step(...) was called twice for the batch of step 1; each batch is one step -> "),
        (1, "pipe.step(...) was called after the end of the run -> leave the loop when grid.batches(...)"),
    ],
)
def test_a_wrong_number_of_calls_is_reported_with_the_call_of_a_pipeline(
    tmp_path: Path, calls: int, says: str
) -> None:
    have_raised = threading.Barrier(2)  # neither worker leaves while the other is in a step

    def train(grid: gridtrain.Grid) -> str:
        pipe = pipeline_of(grid)
        with pytest.raises(ConfigError) as refused:
            for x, y in grid.batches(DATA, batch_size=BATCH, steps=2):
                for _ in range(calls):
                    pipe.step(x, y)
            pipe.step(x, y)
        have_raised.wait(WITHIN_S)
        return str(refused.value)

    for text in local(train, workers=2, export_dir=str(tmp_path)):
        assert text.startswith(says)
        assert calls == 1 or text.endswith("-> call pipe.step(...) once for each batch, on all workers")


def test_batches_of_a_pipeline_are_not_accumulated() -> None:
    pipe = Pipeline.__new__(Pipeline)
    pipe.set_backwards_per_step(1)
    with pytest.raises(ConfigError, match=r"accumulate is 2; it must be 1 for a pipeline.* micro_batches="):
        pipe.set_backwards_per_step(2)


IDS = TensorTreeSpec(Leaf(torch.int64, (), rows_per_sample=1))
FLOATS = TensorTreeSpec(Leaf(torch.float32, (), rows_per_sample=1))


def table_of(received: Tensor) -> None:
    """Acts as a layer that looks up rows of a table of eleven."""
    if not bool(((received >= 0) & (received < 11)).all()):
        raise IndexError("bad")


def lengths_of(received: Tensor) -> None:
    """Acts as `pack_padded_sequence`, which requires lengths of at least one."""
    if not bool(((received >= 1) & (received < 11)).all()):
        raise RuntimeError("bad")


def verdict_of(layer: Any, agreed: TensorTreeSpec | None, received: Any, own: Any) -> tuple[FaultOrigin, str]:
    def fails(other: Any) -> bool:
        try:
            layer(other)
        except Exception:
            return True
        return False

    assert fails(received)
    return find_fault_origin(IndexError("bad"), agreed, received, 2, own, fails)


def a_bug(received: Tensor) -> None:
    raise ValueError("a bug of the user's, for any input")


@pytest.mark.parametrize(
    ("layer", "agreed", "received", "own", "verdict", "says"),
    [
        (
            table_of,
            IDS,
            torch.tensor([3, 10**9]),
            torch.tensor([3, 4]),
            FaultOrigin.SENDER,
            "from 3 to 1000000000",
        ),
        (lengths_of, IDS, torch.tensor([3, 10**9]), None, FaultOrigin.SENDER, "3 to 1000000000"),
        (table_of, FLOATS, torch.tensor([1.0, float("nan")]), None, FaultOrigin.NOT_FINITE, "not finite"),
        (table_of, FLOATS, torch.tensor([1.0, float("-inf")]), None, FaultOrigin.NOT_FINITE, "not finite"),
        (
            a_bug,
            IDS,
            torch.arange(2),
            torch.tensor([3, 4]),
            FaultOrigin.OWN,
            "",
        ),  # positions, from the embedding
        (a_bug, FLOATS, torch.tensor([0.0, float("-inf")]), None, FaultOrigin.OWN, ""),  # a mask
        (
            table_of,
            IDS,
            torch.tensor([3, 10**9]),
            {"ids": torch.tensor([3, 10**9])},
            FaultOrigin.OWN,
            "",
        ),  # data
        (table_of, FLOATS, torch.tensor([1.0, 20.0]), None, FaultOrigin.OWN, ""),
        (table_of, None, torch.tensor([1, 20]), torch.tensor([3, 10**9]), FaultOrigin.OWN, ""),
    ],
)
def test_the_origin_of_a_layers_error_is_found(
    layer: Any, agreed: TensorTreeSpec | None, received: Tensor, own: Any, verdict: FaultOrigin, says: str
) -> None:
    found, text = verdict_of(layer, agreed, received, own)
    assert found is verdict and says in text


def test_the_error_names_the_sender() -> None:
    broken = sender_fault(2, "integers from 3 to 1000000000 in int64 (n)", IndexError("bad"))
    assert broken.peer == 2 and "stage 2 sent" in broken.reason and "IndexError: bad" in broken.reason


@pytest.mark.parametrize(
    "error", [MemoryError("none left"), NotImplementedError(), torch.OutOfMemoryError("CUDA out of memory")]
)
def test_errors_that_no_value_causes_are_local(error: Exception) -> None:
    strange = torch.tensor([3, 10**9])
    assert find_fault_origin(error, IDS, strange, 2, None, lambda other: False) == (FaultOrigin.OWN, "")


class Tokens(nn.Module):
    """Sends token ids to the next stage, beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.embed(ids), ids + 0


class Again(nn.Module):
    """A table for the same ids; raises IndexError for an id beyond it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, 1)

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        y: Tensor = self.out(x[0] + self.embed(x[1]))
        return y


TOKENS = [(torch.tensor(i % 11), torch.tensor([float(i % 3)])) for i in range(64)]


def test_a_stage_that_sends_an_unknown_token_is_removed_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lock = RoundStageLink.send, threading.Lock()
    culprit: list[str] = []

    def send(self: RoundStageLink, to: int, channel: Any, buffers: Any) -> None:
        if culprit == [threading.current_thread().name] and self._stage == 0:
            numbers = np.frombuffer(buffers[1], np.int64).copy()
            numbers[0] = 10**9
            buffers = [buffers[0], numbers.view(np.uint8).data]
        real(self, to, channel, buffers)

    def train(grid: gridtrain.Grid, number: int) -> str:
        pipe = pipeline_of(grid, lambda: [Tokens(), Again()])
        for taken, (x, y) in enumerate(grid.batches(TOKENS, batch_size=4, steps=8)):
            with lock:
                if taken == 2 and pipe.stage == 0 and not culprit:
                    culprit.append(threading.current_thread().name)
            pipe.step(x, y)
        return "finished"

    monkeypatch.setattr(RoundStageLink, "send", send)
    with ThreadedGroup(tmp_path, workers=4, deadlines=LOSING) as group:
        group.start_all(train)
        ended = {f"worker-{number}": str(end) for number, end in enumerate(group.ends())}
    removed = {name: said for name, said in ended.items() if said != "finished"}
    assert list(removed) == culprit, ended
    assert "integers from" in removed[culprit[0]] and "1000000000" in removed[culprit[0]]


def test_activations_that_are_not_finite_skip_the_step_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, skipped = RoundStageLink.send, list[bool]()
    sent: list[int] = []

    def send(self: RoundStageLink, to: int, channel: Any, buffers: Any) -> None:
        if self._stage == 0:
            sent.append(1)
            if len(sent) == 3:  # the second step's first micro-batch
                buffers = [np.full(buffers[0].nbytes // 4, np.nan, np.float32).view(np.uint8).data]
        real(self, to, channel, buffers)

    monkeypatch.setattr(RoundStageLink, "send", send)

    def step_recorded(pipe: Pipeline, x: Any, y: Any) -> float | None:
        loss = pipe.step(x, y)
        skipped.append(pipe.last_skipped)
        return loss

    state, losses = trained(tmp_path, step_recorded)
    assert skipped.count(True) == 2 and len(skipped) == 2 * STEPS, "one step, on both workers"
    assert all(bool(value.isfinite().all()) for value in state.values())
    assert [step for step, loss in enumerate(losses) if loss != loss] == [1]


def test_a_tied_parameter_that_is_not_finite_is_refused() -> None:
    linear = nn.Linear(2, 2)
    before = linear.weight.detach().clone()
    tied = TiedParameter(0, (0, 1), linear.weight)
    stage = Stage([linear], input=TensorTreeSpec(Leaf(torch.float32, (2,), 1)), loss=loss_fn, tied=[tied])
    assert StageExecutor(stage, 1, 2).stage is stage

    class Link:
        def receive(self, source: int, channel: Any) -> Any:
            return tied.spec.encode(torch.full((2, 2), float("inf")), 1)

    with pytest.raises(LineBroken, match="stage 0 sent a tied parameter that is not finite") as caught:
        share_tied_parameters(stage, 1, Link())  # type: ignore[arg-type]
    assert caught.value.peer == 0 and torch.equal(linear.weight, before)


class Positions(nn.Module):
    """Sends positions, which are not in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), torch.arange(len(x), device=x.device)


class Fails(nn.Module):
    """Raises an exception of the user's from its third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.calls = nn.Linear(8, 1), 0

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        self.calls += 1
        if self.calls > 4:
            raise ValueError("a bug of the user's own")
        y: Tensor = self.out(x[0])
        return y


def together(tmp_path: Path, model: Any, **options: Any) -> tuple[list[Any], dict[int, str]]:
    """Train two workers; return the results of their steps, and the errors that ended scripts, by stage."""
    results: list[Any] = []
    ended: dict[int, str] = {}
    over = threading.Event()

    def train(grid: gridtrain.Grid, number: int) -> None:
        stage = -1
        try:
            pipe = pipeline_of(grid, model, **options)
            for x, y in grid.batches(DATA, batch_size=4, steps=4):
                stage = pipe.stage if pipe.stage is not None else -1
                results.append((pipe.step(x, y), pipe.last_skipped))
            ended[stage] = "finished"
        except Exception as error:
            ended[stage] = f"{type(error).__name__}: {error}"
            raise
        finally:
            if stage in ended and (ended[stage] != "finished" or len(ended) == 2):
                over.set()

    with ThreadedGroup(tmp_path, workers=2, deadlines=LOSING) as group:
        group.start_all(train)
        assert over.wait(WITHIN_S), f"no script has ended: {ended}"
        return results, dict(ended)


def test_no_stage_is_blamed_for_a_bug_of_the_user(tmp_path: Path) -> None:
    results, ended = together(tmp_path, lambda: [Positions(), Fails()])
    assert ended == {1: "ValueError: a bug of the user's own"} and len(results) == 4


def careful(output: Tensor, targets: Tensor) -> Tensor:
    loss = loss_fn(output, targets)
    if not bool(loss.isfinite()) and loss.device.type != "meta":
        raise ValueError("the loss is not finite")
    return loss


def test_an_overflow_skips_the_step_and_no_stage_is_removed(tmp_path: Path) -> None:
    def init(block: nn.Module, number: int) -> None:
        for parameter in block.parameters():
            nn.init.constant_(parameter, 1e25 if number < 2 else 0.1)

    def model() -> list[nn.Module]:
        return [nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 1)]

    results, ended = together(tmp_path, model, loss_fn=careful, init=init, cuts=(0, 2, 3))
    assert [skipped for _, skipped in results] == [True] * 8
    assert ended == {0: "finished", 1: "finished"}


def batch_norm_model(**options: Any) -> list[nn.Module]:
    return [nn.Linear(2, 8), nn.BatchNorm1d(8, **options), nn.Linear(8, 1)]


@pytest.mark.parametrize(
    ("samples", "tail", "options"),
    [(21, 5, {}), (17, 1, {}), (17, 1, {"track_running_stats": False})],
    ids=["8, 8, 5", "8, 8, 1", "8, 8, 1, no running statistics"],
)
def test_the_tail_of_a_pass_has_no_micro_batch_that_batch_norm_refuses(
    tmp_path: Path, samples: int, tail: int, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    sizes: list[int] = []

    def train(grid: gridtrain.Grid) -> list[float | None]:
        pipe = pipeline_of(grid, partial(batch_norm_model, **options), micro_batches=4)
        losses = []
        for x, y in grid.batches(DATA[:samples], batch_size=8, epochs=1):  # 5 samples: not as 2, 1, 1, 1
            sizes.append(len(x))
            losses.append(pipe.step(x, y))
        return losses

    one, other = local(train, workers=2, export_dir=str(tmp_path))
    assert sorted(sizes) == [tail, tail, 8, 8, 8, 8]
    assert one == other and len(one) == 3 and None not in one
    assert caplog.text.count(
        "a batch of this replica of the model has only one sample: layer 1, BatchNorm1d, normal"
    ) == (2 if tail == 1 else 0)


@pytest.mark.parametrize("sizes", [{"batch_size": 1}, {"global_batch_size": 1}])
def test_a_run_with_steps_of_one_sample_is_refused_by_all_stages_if_a_layer_needs_two(
    tmp_path: Path, sizes: dict[str, int]
) -> None:
    are_refused = threading.Barrier(2)

    def train(grid: gridtrain.Grid) -> None:
        pipe = pipeline_of(grid, batch_norm_model)
        with pytest.raises(
            ConfigError, match=r"^layer 1, BatchNorm1d, cannot train on a single sample, but .* -> "
        ):
            for x, y in grid.batches(DATA, steps=4, **sizes):
                pipe.step(x, y)
        are_refused.wait(WITHIN_S)

    local(train, workers=2, export_dir=str(tmp_path))


class Modulated(nn.BatchNorm1d):
    """A norm with a forward of its own, which torch's error for a single sample ends."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_a_step_of_one_sample_is_refused_by_all_stages_if_a_layer_cannot_compute_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    are_refused = threading.Barrier(2)

    def train(grid: gridtrain.Grid) -> int:
        pipe = pipeline_of(grid, lambda: [nn.Linear(2, 8), nn.BatchNorm1d(8), Modulated(8), nn.Linear(8, 1)])
        with pytest.raises(
            ConfigError,
            match=r"^layer 2, Modulated, cannot train on a single sample, but this step has only one for "
            "this replica of the model -> ",
        ):
            for x, y in grid.batches(DATA[:17], batch_size=8, epochs=1):
                pipe.step(x, y)
        are_refused.wait(WITHIN_S)
        return grid.step

    assert local(train, workers=2, export_dir=str(tmp_path)) == [2, 2]
    assert "has only one sample" not in caplog.text


@pytest.mark.parametrize(
    ("layer", "found"),
    [
        (nn.BatchNorm1d(2), ("layer 1, BatchNorm1d", True)),
        (nn.Sequential(nn.BatchNorm1d(2)), ("layer 1, BatchNorm1d", True)),
        (nn.BatchNorm1d(2, track_running_stats=False), ("layer 1, BatchNorm1d", True)),
        (Modulated(2), ("layer 1, Modulated", False)),
        (nn.LayerNorm(2), ("", True)),
        (nn.BatchNorm1d(2).eval(), ("", True)),
        (nn.Sequential(nn.Unflatten(1, (1, 2)), nn.BatchNorm1d(1)), ("", True)),
    ],
)
def test_the_layer_that_cannot_train_on_one_sample(layer: nn.Module, found: tuple[str, bool]) -> None:
    assert lone_sample_layer([nn.Linear(2, 2), layer], torch.ones(4, 2)) == found
    assert layer.training or not found[0]
