"""Models that are a chain of blocks, and models that are refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridtrain.errors import ConfigError
from gridtrain.pipeline import Blueprint, Sequence
from gridtrain.pipeline.model_blocks import blocks_of


class Net(nn.Module):
    """A forward that is a chain, unless `between` says otherwise."""

    def __init__(self, between: Any = lambda x: x, order: tuple[str, ...] = ("a", "b")) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.body = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        self.head = nn.Linear(4, 2)
        self.between, self.order = between, order

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for name in self.order:
            x = self.body[name](x)
        return self.head(self.between(x))


PARTS = ("embed", "body.a", "body.b", "head")
EXAMPLE = torch.zeros(2, dtype=torch.int64)


def test_sequences_are_divided_into_their_blocks() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = nn.Sequential(nn.Linear(2, 2), inner, nn.Sequential(nn.Sequential(nn.Tanh())))
    assert list(blocks_of(model)) == ["0", "1.0", "1.1", "2.0.0"]
    assert list(blocks_of([nn.Linear(2, 2), inner])) == ["0", "1.0", "1.1"]


def test_a_sequence_with_a_hook_or_its_own_forward_is_one_block() -> None:
    class Twice(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x))

    hooked = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    hooked.register_forward_hook(lambda module, args, result: result * 2)
    assert list(blocks_of([Twice(nn.Linear(2, 2)), hooked, nn.Tanh()])) == ["0", "1", "2"]


def test_a_block_that_is_used_twice_is_two_blocks() -> None:
    linear = nn.Linear(2, 2)
    assert list(blocks_of(nn.Sequential(linear, nn.ReLU(), linear))) == ["0", "1", "2"]


def test_functions_between_modules_are_blocks() -> None:
    model = Sequence(nn.Linear(4, 4), torch.relu, lambda x: (x, x.sum(1)), lambda xs: xs[0] + xs[1][:, None])
    x = torch.randn(3, 4)
    whole = model(x)
    for block in blocks_of(model).values():
        x = block(x)
    assert torch.equal(x, whole)


@pytest.mark.parametrize("kind", ["closure", "partial", "method", "default"])
def test_a_function_that_holds_parameters_is_refused(kind: str) -> None:
    embed = nn.Embedding(3, 4)
    functions = {
        "closure": lambda x: x @ embed.weight.T,
        "partial": functools.partial(torch.nn.functional.linear, weight=embed.weight),
        "method": embed.forward,
        "default": lambda x, weight=embed.weight: x @ weight.T,
    }
    with pytest.raises(ConfigError, match="from outside, which no stage would contain"):
        Sequence(functions[kind])


def test_a_module_is_split_at_the_named_parts() -> None:
    assert list(blocks_of(Net(), split_at=PARTS, example=EXAMPLE)) == list(PARTS)
    blueprint = Blueprint(Net, split_at=PARTS, example=EXAMPLE)
    x: Any = EXAMPLE
    for block in blueprint.build(0, 4):
        x = block(x)
    assert x.shape == (2, 2)


@pytest.mark.parametrize(
    ("model", "names", "says"),
    [
        (Net(), (), "has its own forward"),
        (Net(), ("embed", "tail"), r"split_at has unknown or duplicate names: \['tail'\]"),
        (Net(), ("embed", "embed"), "split_at has unknown or duplicate names"),
        (Net(), ("embed", "body.a", "head"), "no part in split_at= contains body.b.weight, body.b.bias"),
        (Net(lambda x: x * 2), PARTS, 'between "body.b" and "head", forward computes something'),
        (Net(lambda x: x.add_(1)), PARTS, 'between "body.b" and "head", forward computes something'),
        (Net(order=("b", "a")), PARTS, 'between "embed" and "body.b"|forward calls embed, body.b, body.a'),
        (Net(order=("a", "b", "a")), PARTS, "forward calls embed, body.a, body.b, body.a, head"),
        (Net(order=("a",)), PARTS, "forward calls embed, body.a, head"),
        (Net(lambda x: x if x.sum() > 0 else -x), PARTS, "forward cannot run without data.*Sequence"),
        (Net(lambda x: x + torch.ones(1)), PARTS, r"forward cannot run without data.*device=x\.device"),
    ],
)
def test_a_forward_that_is_no_chain_is_refused(model: nn.Module, names: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        blocks_of(model, split_at=names, example=EXAMPLE)


def test_named_parts_require_an_example() -> None:
    with pytest.raises(ConfigError, match="requires example="):
        blocks_of(Net(), split_at=PARTS)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Bilinear(2, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x), x)


def test_a_part_with_two_arguments_is_refused() -> None:
    with pytest.raises(ConfigError, match='forward calls "b" with 2 arguments'):
        blocks_of(TwoInputs(), split_at=("a", "b"), example=torch.ones(2, 2))


SCRIPTS_OWN = nn.Linear(2, 2)


def helper(x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = SCRIPTS_OWN(x)
    return y


class Holder:
    def __init__(self) -> None:
        self.inside = {"layer": nn.Linear(2, 2)}

    def __call__(self, x: torch.Tensor) -> Any:
        return self.inside["layer"](x)


def of_a_list(layers: list[nn.Module]) -> Any:
    return lambda x: layers[0](x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: SCRIPTS_OWN(x),
        lambda x: helper(x),
        lambda x: [SCRIPTS_OWN(y) for y in x],
        of_a_list([nn.Linear(2, 2)]),
        Holder(),
        functools.partial(lambda layer, x: layer(x), nn.Linear(2, 2)),
    ],
)
def test_a_function_that_uses_a_module_of_its_script_is_refused(function: Any) -> None:
    with pytest.raises(ConfigError, match=r"uses a Linear from outside"):
        Sequence(function)


def test_functions_without_modules_are_accepted() -> None:
    weight = 3  # also the name of a module's attribute
    fine = [torch.relu, F.gelu, lambda x: F.softmax(x.flatten(1), dim=-1), lambda x: x * weight]
    assert len(Sequence(*fine, functools.partial(F.dropout, p=0.1))) == 5
