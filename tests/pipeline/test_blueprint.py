"""A model that is built stage by stage: the same for every partition, and never in memory as a whole."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gridtrain.errors import ConfigError
from gridtrain.pipeline import Blueprint, Sequence
from gridtrain.pipeline.memory_meters import TensorMemoryMeter

WIDTH = 32


class Residual(nn.Module):
    """The kinds of parameters of attention and MLP, and a buffer of each kind."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.batch_norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.batch_norm(self.inner(self.norm(x))))


class Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(x), self.weight)


def tied_model() -> list[Any]:
    embed = nn.Embedding(50, WIDTH)
    middle = nn.Linear(WIDTH, WIDTH)
    again = nn.Linear(WIDTH, WIDTH)
    again.weight = middle.weight
    return [embed, Residual(), lambda x: x * 2, middle, Residual(), again, Residual(), Head(embed.weight)]


def values(blocks: list[nn.Module], first: int = 0) -> dict[str, Tensor]:
    return {
        f"{first + i}.{name}": tensor
        for i, block in enumerate(blocks)
        for name, tensor in (*block.named_parameters(remove_duplicate=False), *block.named_buffers())
    }


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_every_partition_begins_with_the_same_model() -> None:
    """All 128 partitions of 8 blocks."""
    whole = values(Blueprint(tied_model, seed=7).build(0, 8))
    blueprint = Blueprint(tied_model, seed=7)
    for count in range(8):
        for between in combinations(range(1, 8), count):
            cuts = (0, *between, 8)
            union: dict[str, Tensor] = {}
            for start, stop in pairwise(cuts):
                torch.manual_seed(len(union))  # as if a worker had drawn before
                union |= values(blueprint.build(start, stop), start)
            assert_equal(whole, union)
    assert not torch.equal(whole["1.inner.0.weight"], whole["4.inner.0.weight"])
    assert not torch.equal(
        whole["1.inner.0.weight"], values(Blueprint(tied_model, seed=8).build(1, 2), 1)["1.inner.0.weight"]
    )


def test_building_does_not_change_the_generator() -> None:
    blueprint = Blueprint(tied_model)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    blueprint.build(0, 8)
    assert torch.equal(torch.rand(4), expected)


def test_values_are_those_of_the_ordinary_constructor() -> None:
    """Distribution and order of draws: the same seed gives the values of `nn`."""
    from gridtrain.pipeline.blueprint import _seeded_generator

    for make in (
        Residual,
        lambda: nn.Embedding(9, 4, padding_idx=2),
        lambda: nn.Conv2d(3, 5, 3),
        lambda: nn.LSTM(4, 6, num_layers=2),
        lambda: nn.TransformerEncoderLayer(16, 4, 32),
        lambda: nn.MultiheadAttention(16, 4),
    ):
        built = Blueprint(lambda make=make: [make()], seed=5).build(0, 1)  # type: ignore[misc]
        with _seeded_generator(5, 0):
            ordinary = make()
        assert_equal(values(built), values([ordinary]))


def test_built_blocks_compute() -> None:
    blocks = Blueprint(tied_model).build(0, 8)
    x: Any = torch.randint(50, (4,))
    for block in blocks:
        x = block(x)
    x.sum().backward()
    assert x.shape == (4, 50)
    assert all(parameter.grad is not None for block in blocks for parameter in block.parameters())
    lstm = Blueprint(lambda: [nn.LSTM(4, 6)]).build(0, 1)[0]
    assert lstm(torch.ones(3, 2, 4))[0].isfinite().all()


# -- memory ----------------------------------------------------------------------------------------


def test_building_a_stage_takes_memory_for_that_stage_only() -> None:
    def make() -> list[nn.Module]:
        embed = nn.Embedding(200, WIDTH)
        return [embed, *(Residual() for _ in range(14)), Head(embed.weight)]

    blueprint = Blueprint(make)
    sizes = blueprint.parameter_bytes
    cuts = (0, 4, 8, 12, 16)
    for stage, (start, stop) in enumerate(pairwise(cuts)):
        with TensorMemoryMeter() as meter:
            built = blueprint.build(start, stop)
        stage_bytes = sum(t.nbytes for t in values(built).values())
        assert stage_bytes <= meter.peak_bytes <= stage_bytes + 1.25 * max(sizes) + 1000, (
            f"stage {stage}"
        )  # 1/4: the check for NaN
        assert meter.peak_bytes < 0.45 * sum(sizes)
        assert meter.live_bytes() <= stage_bytes + 100
        del built
    with TensorMemoryMeter() as meter:
        whole = blueprint.build(0, 16)
    assert meter.peak_bytes >= sum(sizes) - 200 * WIDTH * 4 - 1000, "the meter counts all tensors"
    del whole


def test_a_blueprint_takes_no_memory() -> None:
    with TensorMemoryMeter() as meter:
        Blueprint(lambda: [nn.Linear(10_000, 10_000) for _ in range(100)])
    assert meter.peak_bytes < 10_000


# -- tied parameters -------------------------------------------------------------------------------


def test_tied_parameters_are_found_on_the_meta_model() -> None:
    blueprint = Blueprint(tied_model)
    assert [str(tied) for tied in blueprint.tied] == ["0.weight = 7.weight", "3.weight = 5.weight"]
    assert [tied.parameter_bytes for tied in blueprint.tied] == [50 * WIDTH * 4, WIDTH * WIDTH * 4]
    cuts = (0, 2, 4, 6, 8)
    assert [tied.stages(cuts) for tied in blueprint.tied] == [(0, 3), (1, 2)]
    assert [tied.stages((0, 3, 8)) for tied in blueprint.tied] == [(0, 1), (1,)]


def test_a_stage_knows_its_tied_parameters() -> None:
    blueprint = Blueprint(tied_model)
    cuts = (0, 2, 4, 6, 8)
    built = [blueprint.build(cuts[s], cuts[s + 1]) for s in range(4)]
    found = [blueprint.tied_in(s, cuts, built[s]) for s in range(4)]
    assert [[(tied.index, tied.stages) for tied in of] for of in found] == [
        [(0, (0, 3))],
        [(1, (1, 2))],
        [(1, (1, 2))],
        [(0, (0, 3))],
    ]
    assert found[3][0].parameter is built[3][1].weight
    assert torch.equal(found[0][0].parameter, found[3][0].parameter)
    assert blueprint.tied_in(1, (0, 3, 8), blueprint.build(3, 8))[0].index == 0


def test_ties_within_a_stage_stay_one_parameter() -> None:
    built = Blueprint(tied_model).build(2, 7)
    assert built[1].weight is built[3].weight
    inside = Blueprint(lambda: [nn.ModuleList([shared := nn.Linear(2, 2), shared])]).build(0, 1)[0]
    assert inside[0].weight is inside[1].weight


# -- parameters without values --------------------------------------------------------------------


class Scale(nn.Module):
    """No reset_parameters: values of an ordinary constructor, which the meta device drops."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.register_buffer("steps", torch.arange(4))
        self.register_buffer("mask", torch.ones(2, 2, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.steps


class Small(nn.Module):
    """A constructor as GPT-2's, with another distribution than reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        nn.init.normal_(self.linear.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_a_block_without_reset_parameters_is_refused_with_the_remedy() -> None:
    blueprint = Blueprint(lambda: Sequence(nn.Linear(4, 4), Scale()))
    blueprint.build(0, 1)
    with pytest.raises(ConfigError) as refused:
        blueprint.build(0, 2)
    assert refused.value.reason == (
        '"gain", "steps", "mask" of block 1 ("1", Scale) got no value from reset_parameters'
    )
    assert refused.value.remedy.startswith("pass init=, a function of (block, its number)")


def test_init_sets_missing_values() -> None:
    def init(block: nn.Module, number: int) -> None:
        if isinstance(block, Scale):
            block.gain.data.normal_()
            block.steps.copy_(torch.arange(4))
            block.mask = torch.ones(2, 2, dtype=torch.bool)

    make = lambda: Sequence(nn.Linear(4, 4), Scale(), Scale())  # noqa: E731
    built = Blueprint(make, init=init).build(0, 3)
    assert built[1].steps.tolist() == [0, 1, 2, 3] and bool(built[1].mask.all())
    assert not torch.equal(built[1].gain, built[2].gain)
    assert_equal(values(built[2:], 2), values(Blueprint(make, init=init).build(2, 3), 2))


def test_a_partly_set_value_is_refused() -> None:
    def init(block: nn.Module, number: int) -> None:
        block.gain.data[:2] = 1.0
        block.steps.zero_()
        block.mask.fill_(True)

    with pytest.raises(ConfigError, match=r'"gain" of block 0 .* from reset_parameters or init'):
        Blueprint(lambda: [Scale()], init=init).build(0, 1)


def test_values_of_a_constructor_are_not_lost_without_an_error() -> None:
    with pytest.raises(ConfigError, match=r'the constructor gives "linear.weight" of block 1'):
        Blueprint(lambda: [nn.Linear(4, 4), Small()])
    plain = Blueprint(lambda: [Small()], init=lambda block, number: None).build(0, 1)[0]
    assert plain.linear.weight.std() > 0.1

    def init(block: nn.Module, number: int) -> None:
        nn.init.normal_(block.linear.weight, std=0.02)

    assert Blueprint(lambda: [Small()], init=init).build(0, 1)[0].linear.weight.std() < 0.05


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Blueprint([nn.Linear(2, 2)]), "is on cpu"),
        (lambda: Blueprint(lambda: [nn.LazyLinear(2)]), "is a lazy tensor"),
        (lambda: Blueprint(lambda: []), "no blocks"),
        (lambda: Blueprint(lambda: nn.Linear(2, 2)), "has its own forward"),
        (lambda: Blueprint(lambda: [nn.Linear(2, 2)]).build(0, 2), "has 1 block, so blocks 0 to 1 cannot"),
        (lambda: Blueprint(lambda: [nn.Linear(2, 2)]).build(1, 1), "has 1 block, so blocks 1 to 0 cannot"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


@pytest.mark.gpu
def test_values_are_the_same_on_a_gpu() -> None:
    on_gpu = values(Blueprint(tied_model).build(0, 8, "cuda"))
    assert_equal(
        {name: tensor.cpu() for name, tensor in on_gpu.items()}, values(Blueprint(tied_model).build(0, 8))
    )


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.frequencies = nn.Linear(4, 4), torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) * self.frequencies
        return y


def test_a_tensor_that_would_stay_on_the_meta_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'"1.frequencies" of block 0 .*neither a parameter') as caught:
        Blueprint(lambda: [Outer(Rotary())])
    assert 'register_buffer("frequencies"' in caught.value.remedy


class Outer(nn.Module):
    """A module with its part under another name."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.add_module("1", inner)

    def forward(self, x: torch.Tensor) -> Any:
        return self.get_submodule("1")(x)
