"""Costs of a block: bytes exactly, seconds from a clock of the test."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gridtrain.errors import ConfigError
from gridtrain.pipeline import Blueprint, Layer, Profile, profile
from gridtrain.pipeline.profiler import _fit_line


class Clock:
    """Advances only while a `Slow` block computes."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Slow) -> Tensor:
        ctx.block, ctx.rows = block, len(x)
        block.clock.now_s += block.overhead_s + block.sample_s * len(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.block.clock.now_s += ctx.block.overhead_s + 2 * ctx.block.sample_s * ctx.rows
        return gradient, None


class Slow(nn.Module):
    """Forward takes overhead_s and sample_s for each row; backward twice as long for each row."""

    def __init__(self, clock: Clock, sample_s: float, overhead_s: float = 0.0) -> None:
        super().__init__()
        self.clock, self.sample_s, self.overhead_s = clock, sample_s, overhead_s
        self.gain = nn.Parameter(torch.ones(()))

    def __deepcopy__(self, memo: Any) -> Slow:
        return Slow(self.clock, self.sample_s, self.overhead_s)

    def forward(self, x: Tensor) -> Tensor:
        return _Slow.apply(x * self.gain, self)


def layers(model: Any, example: Any, **options: Any) -> tuple[Layer, ...]:
    return profile(model, example, device="cpu", repeats=2, **options).layers


def test_seconds_are_divided_into_those_of_samples_and_of_calls() -> None:
    clock = Clock()
    found = layers([Slow(clock, 0.25), Slow(clock, 0.5, overhead_s=1.0)], torch.ones(4, 3), clock=clock)
    assert [each.forward_s for each in found] == pytest.approx([0.25, 0.5])
    assert [each.backward_s for each in found] == pytest.approx([0.5, 1.0])
    assert [each.overhead_s for each in found] == pytest.approx([0.0, 1.0])


def test_noise_gives_no_negative_costs() -> None:
    assert _fit_line(4, 1.0, 1.9) == pytest.approx((0.225, 0.1))
    assert _fit_line(4, 1.0, 2.5) == pytest.approx((0.25, 0.0))
    assert _fit_line(4, 1.0, 0.5) == pytest.approx((0.0, 1.0))


def test_bytes_are_those_counted_by_hand() -> None:
    """Linear stores its input (the ReLU's output, which the ReLU stores as well: counted there, once)."""
    model = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)]
    first, middle, last = layers(model, torch.ones(4, 8))
    assert [each.parameter_bytes for each in (first, middle, last)] == [4 * (8 * 16 + 16), 0, 4 * (32 + 2)]
    assert [each.output_bytes for each in (first, middle, last)] == [64, 64, 8]
    assert [each.gradient for each in (first, middle, last)] == [64, 64, 8]
    assert [each.kept_bytes for each in (first, middle, last)] == [0, 64, 0]


def test_an_input_that_only_the_next_block_stores_counts_for_the_previous_one() -> None:
    first, last = layers([nn.Linear(8, 16), nn.Linear(16, 2)], torch.ones(4, 8))
    assert (first.kept_bytes, last.kept_bytes) == (64, 0)


def test_whole_numbers_have_no_gradient_and_frozen_parameters_no_copies() -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    model = [nn.Embedding(9, 4), frozen, nn.BatchNorm1d(4), lambda x: (x, x.argmax(1)), lambda xs: xs[0]]
    found = layers(model, torch.zeros(4, dtype=torch.int64))
    assert [each.trainable for each in found] == [144, 0, 32, 0, 0]
    assert [each.parameter_bytes for each in found] == [144, 80, 32 + 40, 0, 0]
    assert [each.output_bytes for each in found] == [16, 16, 16, 24, 16]
    assert [each.gradient for each in found] == [16, 16, 16, 16, 16]


def test_a_profile_has_the_boundaries() -> None:
    found = profile([nn.Embedding(9, 4), nn.Flatten()], torch.zeros(3, 5, dtype=torch.int64), device="cpu")
    assert [str(spec) for spec in found.boundaries] == ["float32 (n, 5, 4)", "float32 (n, 20)"]
    assert (found.input_bytes, found.samples) == (40, 3)


def test_a_measurement_does_not_change_the_model() -> None:
    model = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 4)]
    before = [tensor.clone() for block in model for tensor in block.state_dict().values()]
    layers(model, torch.randn(4, 4))
    after = [tensor for block in model for tensor in block.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(parameter.grad is None for block in model for parameter in block.parameters())


def test_a_blueprint_is_measured_one_block_at_a_time() -> None:
    blueprint = Blueprint(lambda: [nn.Embedding(9, 4), nn.ReLU(inplace=True), nn.Linear(4, 9)])
    alive: list[int] = []
    build = blueprint.build

    def build_recorded(start: int, stop: int, device: Any = "cpu") -> list[nn.Module]:
        alive.append(stop - start)
        return build(start, stop, device)

    blueprint.build = build_recorded  # type: ignore[method-assign]
    found = profile(blueprint, torch.zeros(3, dtype=torch.int64), device="cpu", repeats=1)
    assert isinstance(found, Profile) and [each.name for each in found.layers] == ["0", "1", "2"]
    assert alive == [1, 1, 1]
    assert all(each.forward_s + each.overhead_s > 0 for each in found.layers)


@pytest.mark.parametrize("example", [None, torch.ones(()), torch.ones(0, 3), (torch.ones(2), torch.ones(3))])
def test_an_example_without_samples_is_refused(example: Any) -> None:
    with pytest.raises(ConfigError, match="the example's tensors have"):
        profile([nn.ReLU()], example, device="cpu")


@pytest.mark.parametrize("device", ["cdua", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=f"device is '{device}', which torch .* cannot use here: .* -> "):
        profile([nn.ReLU()], torch.ones(4, 3), device=device)


@pytest.mark.gpu
def test_a_gpu_is_measured() -> None:
    found = profile([nn.Linear(64, 64), nn.ReLU()], torch.ones(4, 64), repeats=3)
    assert found.device.startswith("cuda") and found.layers[0].parameter_bytes == 4 * 65 * 64
