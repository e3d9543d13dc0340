"""A worker with a different training setup is refused with both values; the run goes on without it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from brisk import WITHIN_S
from torch import nn
from training_loop import sgd, train_batch

import gridtrain
from gridtrain.errors import ConfigError, JoinRefused

DATA = [(torch.tensor([float(i), 1.0]), torch.tensor([float(i)])) for i in range(8)]
SPARSE = gridtrain.GTopK(density=0.5)


@dataclass(frozen=True)
class Script:
    """The choices of a training script."""

    hidden: int = 3
    make: Any = nn.Linear  # a layer
    lr: float = 0.1
    kind: Any = torch.optim.SGD
    exchange: Any = SPARSE
    clip_norm: float | None = None
    seen: int = 0
    average_buffers_every: int = 100
    compare_every: Any = 500
    overlap: Any = None
    unused: str = "zero"
    reported: Any = 0.5
    tracked: Any = None
    data: Any = field(default_factory=lambda: DATA)
    ends: tuple[tuple[str, int], ...] = (("steps", 4),)
    sizes: tuple[tuple[str, int], ...] = (("batch_size", 2),)

    def run(self, grid: gridtrain.Grid, after_step: Any = lambda: None) -> int:
        model = nn.Sequential(self.make(2, self.hidden), self.make(self.hidden, 1))
        if self.seen:
            model.register_buffer("seen", torch.zeros(self.seen))
        inner = self.kind(model.parameters(), lr=self.lr)
        optimizer = grid.optimizer(
            inner,
            model,
            exchange=self.exchange,
            clip_norm=self.clip_norm,
            average_buffers_every=self.average_buffers_every,
            compare_every=self.compare_every,
            overlap=self.overlap,
            unused=self.unused,
        )
        grid.report(loss=self.reported)
        if self.tracked is not None:
            grid.track(object=self.tracked)
        for batch in grid.batches(self.data, **dict(self.ends), **dict(self.sizes)):
            train_batch(model, optimizer, batch)
            after_step()
        return grid.step


def two(parameters: Any, lr: float) -> list[torch.optim.Optimizer]:
    first, *others = parameters
    return [torch.optim.SGD([first], lr), torch.optim.Adagrad(others, lr)]


def backwards(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([*parameters][::-1], lr)


def with_two_groups(parameters: Any, lr: float) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.SGD([{"params": [first]}, {"params": others}], lr)


def with_a_set(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [*parameters], "layers": {0, 1}}], lr)


@torch.inference_mode()
def inference_layer(*sizes: int) -> nn.Module:
    return nn.Linear(*sizes)


@torch.inference_mode()
def with_an_inference_tensor(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [*parameters], "scale": torch.ones(1)}], lr)


@dataclass
class Table:
    """Tracked; its state contains an array."""

    def state_dict(self) -> dict[str, Any]:
        return {"rates": np.ones(2)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@pytest.fixture
def refusal(new_group: Any) -> Any:
    """The first script defines the run; returns the refusal of the second one."""

    def run(first: Script, second: Script) -> JoinRefused:
        defined, over = threading.Event(), threading.Event()

        def hold() -> None:
            defined.set()
            assert over.wait(WITHIN_S)

        with new_group(workers=1) as group:
            group.start(lambda grid, number: first.run(grid, hold))
            assert defined.wait(WITHIN_S)
            group.start(lambda grid, number: second.run(grid))
            error = group.result(1)
            over.set()
            assert group.result(0) == 4, "the run goes on"
        assert isinstance(error, JoinRefused), error
        assert error.code == "different-run"
        assert error.remedy.startswith("start every worker with the same script, data and options; ")
        return error

    return run


OTHER = [*DATA[:-1], (torch.tensor([9.0, 9.0]), torch.tensor([9.0]))]


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (
            Script(hidden=4),
            r"model is 17 parameters in 4 tensors, digest \w+ here and 13 parameters in 4 tensors, digest",
        ),
        (
            Script(seen=3),
            r"buffers is 1 tensor, digest \w+, averaged every 100 steps here and none in the run",
        ),
        (Script(data=DATA[:6]), r"data is 6 samples, digest \w+ here and 8 samples, digest \w+ in the run"),
        (Script(data=OTHER), r"data is 8 samples, digest \w+ here and 8 samples, digest \w+ in the run"),
        (
            Script(exchange=gridtrain.GTopK(density=0.25)),
            r"exchange is GTopK\(density=0\.25, .*\) here and GTopK\(density=0\.5, .*\) in the run",
        ),
        (Script(exchange=gridtrain.Dense()), r"exchange is Dense\(\) here and GTopK\(.*\) in the run"),
        (Script(lr=0.2), r"optimizer is SGD\(lr=0\.2\) here and SGD\(lr=0\.1\) in the run"),
        (Script(kind=torch.optim.Adagrad), r"optimizer is Adagrad\(lr=0\.1\) here and SGD\(lr=0\.1\) in"),
        (Script(kind=two), r"optimizer is SGD\(lr=0\.1\) \+ Adagrad\(lr=0\.1\) here and SGD\(lr=0\.1\) in"),
        (Script(kind=backwards), r"groups is 1 group, digest \w+ here and missing in the run"),
        (Script(clip_norm=1.0), r"clip_norm is 1\.0 here and none in the run"),
        (
            Script(exchange=gridtrain.Dense(), unused="skip"),
            r"exchange is Dense\(\) here and .*; unused is skip here and missing in the run",
        ),
        (
            Script(ends=(("steps", 5),)),
            r"end of the run is 5 steps over 8 samples with data seed 0 here and 4 steps over 8 samples",
        ),
        (Script(ends=(("epochs", 2),)), r"end of the run is 2 epochs over .* here and 4 steps over"),
        (Script(ends=(("steps", 4), ("seed", 1))), r"end of the run is .* data seed 1 here and .* seed 0"),
        (Script(sizes=(("global_batch_size", 4),)), r"global batch size is 4 here and none in the run"),
    ],
    ids=[
        "model", "buffers", "data length", "data", "density", "exchange", "lr", "optimizer", "two optimizers",
        "order", "clip_norm", "unused", "steps", "epochs", "seed", "global_batch_size",
    ],
)  # fmt: skip
def test_a_different_setup_is_refused(refusal: Any, second: Script, expected: str) -> None:
    error = refusal(Script(), second)
    with pytest.raises(
        JoinRefused, match=rf"^this worker's training setup differs from the run's: {expected}"
    ):
        raise error


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (
            Script(seen=4),
            r"buffers is 1 tensor, .* here and 1 tensor, digest \w+, averaged every 100 steps in",
        ),
        (
            Script(seen=3, average_buffers_every=50),
            r"buffers is 1 tensor, digest (\w+), averaged every 50 steps here and 1 tensor, digest \1, "
            r"averaged every 100 steps in the run",
        ),
        (
            Script(seen=3, average_buffers_every=0),
            r"buffers is 1 tensor, digest (\w+) here and 1 tensor, digest \1, ",
        ),
    ],
    ids=["shape", "every 50", "never"],
)
def test_different_buffers_are_refused(refusal: Any, second: Script, expected: str) -> None:
    with pytest.raises(JoinRefused, match=expected):
        raise refusal(Script(seen=3), second)


def test_a_refusal_names_all_differences(refusal: Any) -> None:
    error = refusal(Script(), Script(hidden=4, lr=0.2, clip_norm=1.0))
    assert [part.split(" is ")[0] for part in error.reason.partition(": ")[2].split("; ")] == [
        "model",
        "optimizer",
        "clip_norm",
    ]


def test_the_refusal_of_a_learning_rate_says_how_to_change_it(refusal: Any) -> None:
    error = refusal(Script(), Script(lr=0.2))
    assert "to change the learning rate during the run, set it in the loop, by grid.step" in error.remedy


def test_parameters_in_another_group_are_refused(refusal: Any) -> None:
    def other_groups(parameters: Any, lr: float) -> torch.optim.Optimizer:
        first, second, *others = parameters
        return torch.optim.SGD([{"params": [first, second]}, {"params": others}], lr)

    error = refusal(Script(kind=with_two_groups), Script(kind=other_groups))
    assert [part.split(" is ")[0] for part in error.reason.partition(": ")[2].split("; ")] == ["groups"]
    assert "list the optimizer's parameters in the same order on all of them: a set has none" in error.remedy


def test_a_parameter_that_is_replaced_before_the_data_are_given_is_named(outcomes: Any) -> None:
    """The facts of the run are determined when the data are given."""

    def script(grid: gridtrain.Grid, number: int) -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = grid.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
        model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
        for x, y in grid.batches(DATA, batch_size=1, steps=1):
            (model(x) - y).square().sum().backward()
            optimizer.step()

    [error] = outcomes(script, 1)
    assert isinstance(error, ConfigError) and "'weight' was added or replaced" in error.reason


def test_batch_sizes_may_differ(outcomes: Any) -> None:
    """A slow machine takes a smaller share of each step."""

    def train(grid: gridtrain.Grid, number: int) -> int:
        return Script(sizes=(("batch_size", 1 + 2 * number),)).run(grid)

    assert outcomes(train, 2) == [4, 4]


def test_numbers_of_numpy_are_accepted(outcomes: Any) -> None:
    script = Script(
        sizes=(("batch_size", np.int64(2)), ("seed", np.int64(3))), ends=(("steps", np.int32(4)),)
    )
    assert outcomes(lambda grid, number: script.run(grid), 1) == [4]


# -- mistakes that are found before the script joins ------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            Script(sizes=(("batch_size", 2), ("global_batch_size", 4))),
            "batch_size=2, global_batch_size=4; pass exactly one of them -> pass batch_size=32 for",
        ),
        (Script(sizes=()), "batch_size=None, global_batch_size=None; pass exactly one of them -> "),
        (Script(sizes=(("batch_size", 0),)), "batch_size is 0; it must be >= 1 -> try batch_size=32"),
        (
            Script(sizes=(("batch_size", 2), ("accumulate", 0))),
            "accumulate is 0; it must be >= 1 -> try accumulate=1",
        ),
        (
            Script(ends=()),
            "epochs is None and steps is None; exactly one of them must be given -> pass either",
        ),
        (Script(ends=(("steps", 4), ("epochs", 1))), "epochs is 1 and steps is 4; exactly one"),
        (Script(ends=(("epochs", 0),)), "epochs is 0 and the data set has 8 samples; epochs must be at"),
        (
            Script(ends=(("steps", 1e3),)),
            "steps is 1000.0; it must be an integer -> pass an int: steps=32",
        ),
        (Script(sizes=(("batch_size", "2"),)), "batch_size is '2'; it must be an integer -> "),
        (Script(sizes=(("batch_size", 2), ("seed", None))), "seed is None; it must be an integer -> "),
        (Script(data=[]), "the list has 0 samples; it must have at least 1 -> check the paths and filters"),
        (
            Script(data=iter(DATA)),
            "the list_iterator has no length, so .* -> call grid.batches",
        ),
        (
            Script(sizes=(("batch_size", 2**20), ("accumulate", 2**11))),
            "a step would have 2147483648 samples; at most 2147483647 are possible -> use smaller",
        ),
        (
            Script(clip_norm=-1.0),
            "clip_norm is -1.0; it must be a finite number > 0 -> try clip_norm=1.0",
        ),
        (Script(clip_norm="1"), "clip_norm is '1'; it must be a finite number > 0 -> "),  # type: ignore[arg-type]
        (Script(average_buffers_every=-1), "average_buffers_every is -1; it must be a number of steps, or 0"),
        (Script(compare_every=None), "compare_every is None; it must be a number of steps, or 0 for never"),
        (
            Script(exchange=gridtrain.Dense),
            r"exchange is Dense, which is not an exchange -> call it: Dense\(\)",
        ),
        (Script(exchange=int), r"exchange is int, which is not an exchange -> pass one, such as "),
        (Script(exchange=0.01), r"exchange is 0\.01, which is not an exchange -> pass one, such as "),
        (
            Script(overlap=True),
            r"overlap is True, which is not an Overlap -> pass overlap=gridtrain.Overlap\(\)",
        ),
        (
            Script(kind=lambda *_, **__: None),
            "grid.optimizer was given a NoneType and a Sequential; it needs a torch.optim.Optimizer and a",
        ),  # type: ignore[arg-type]
        (
            Script(reported="low"),
            r"the figure loss is 'low'; it must be a number -> call grid.report\(loss=0.5",
        ),
        (
            Script(tracked=Table()),
            r"object\.rates is a ndarray, which cannot be sent to a newcomer -> store o",
        ),
        (
            Script(kind=with_a_set),
            r"optimizer\.param_groups\[0\]\.layers is a set, which cannot be sent to a n",
        ),
        (
            Script(tracked=inference_layer(2, 1)),
            "object has a tensor made under torch.inference_mode, .* -> make it under torch.no_grad",
        ),
        (
            Script(kind=with_an_inference_tensor),
            "optimizer has a tensor made under torch.inference_mode, into which no state can be loaded -> ",
        ),
        (Script(make=inference_layer), "the model has a tensor made under torch.inference"),
        (Script(tracked=3), "grid.track was given object=3, which does not have state_dict or load_state_"),
        (
            Script(kind=torch.optim.LBFGS),
            "LBFGS cannot be used in a run: it evaluates .* -> use SGD or AdamW",
        ),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(outcomes: Any, script: Script, expected: str) -> None:
    (error,) = outcomes(lambda grid, number: script.run(grid), 1)
    with pytest.raises(ConfigError, match=f"^{expected}"):
        raise error


class Words(nn.Module):
    """A language model of ten tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 2)

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.table(input_ids).square().mean()


@pytest.mark.parametrize(
    ("value", "token", "told"),
    [
        (
            0.0,
            10,
            "^input_ids contains the token id 10, but the model's vocabulary has 10 tokens, 0 to 9 -> ",
        ),
        (float("nan"), 9, "^1 of 20 values of the trained parameter 'table.weight' are NaN or infinite"),
    ],
)
def test_a_language_model_that_cannot_work(outcomes: Any, value: float, token: int, told: str) -> None:
    steps = []

    def train(grid: gridtrain.Grid, number: int) -> None:
        model = Words()
        with torch.no_grad():
            model.table.weight[0, 0] = value
        optimizer = sgd(grid, model, SPARSE, lr=0.1)
        for batch in grid.batches([{"input_ids": torch.tensor([token])}] * 4, batch_size=2, steps=2):
            model(**batch).backward()
            optimizer.step()
            steps.append(grid.step)

    (error,) = outcomes(train, 1)
    assert not steps
    with pytest.raises(ConfigError, match=told):
        raise error
