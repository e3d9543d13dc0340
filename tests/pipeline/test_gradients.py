"""GPipe's guarantee: gradients do not depend on the number of stages.

They are bit for bit those of the unpartitioned model, micro-batch by micro-batch with the same random
numbers: the same operations on the same values, added in ascending order of the micro-batches.  The exception
is a tied parameter in two stages: each stage adds its own uses first, so the order of the sum differs.

`pytest -s` prints the largest differences.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from memory_stage_link import memory_stage_links, run_in_threads
from pipeline_models import (
    largest_difference,
    layers_of,
    loss_of,
    named,
    result_of,
    run,
    stages_of,
    tokens,
    unpartitioned,
)
from torch import Tensor, nn

from gridtrain.core.stages.schedule import Schedule, divide_samples, fill_drain, one_forward_one_backward
from gridtrain.pipeline.boundary_specs import infer_boundary_specs
from gridtrain.pipeline.executor import ScheduleFactory, StageExecutor
from gridtrain.pipeline.model_blocks import Sequence
from gridtrain.pipeline.stage import Stage
from gridtrain.pipeline.tensor_tree import TensorTreeSpec

STAGES = (1, 2, 3, 4, 8)
MICRO_BATCHES = (1, 2, 3, 8)
ROUNDING = 8 * 2.0**-23  # a few roundings of the largest gradient
SAMPLES = 12  # eight micro-batches then have 2 and 1 samples, three have 4


def further_ahead(stages: int, micro_batches: int) -> Schedule:
    return one_forward_one_backward(stages, micro_batches, ahead=0.7)


VARIANTS: dict[str, tuple[ScheduleFactory, bool]] = {  # the schedule, and whether to re-materialise
    "fill-drain": (fill_drain, True),
    "1F1B": (one_forward_one_backward, True),
    "1F1B, all stored": (one_forward_one_backward, False),
    "1F1B, ahead": (further_ahead, True),
}
MODELS = {
    "plain": {},
    "dropout": {"dropout": True},
    "batch norm": {"batch_norm": True},
    "dropout, batch norm": {"dropout": True, "batch_norm": True},
    "tied": {"tied": True},
    "tied, dropout, batch norm": {"tied": True, "dropout": True, "batch_norm": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_the_unpartitioned_model(model: str, variant: str) -> None:
    layers, largest = layers_of(**MODELS[model]), 0.0
    specs, (schedule, rematerialise) = infer_boundary_specs(layers, tokens(1)[0]), VARIANTS[variant]
    for micro_batches in MICRO_BATCHES:
        sizes = divide_samples(SAMPLES, micro_batches)
        expected = unpartitioned(layers, sizes)
        scale = max(g.abs().max().item() for g in expected.gradients.values())
        for count in STAGES:
            stages = stages_of(layers, count, rematerialise=rematerialise, specs=specs)
            got = result_of(stages, run(stages, sizes, schedule=schedule))
            difference = largest_difference(got, expected)
            largest = max(largest, difference)
            assert got.loss == pytest.approx(expected.loss, rel=1e-6)
            if "tied" in model and count > 1:
                assert difference <= ROUNDING * scale, (count, micro_batches)
                assert torch.equal(got.gradients["0.weight"], got.gradients["8.weight"])
            else:
                assert difference == 0.0, (count, micro_batches)
    print(f"\n{model}, {variant}: largest difference {largest:g}, largest gradient of all {scale:g}")


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    cuts=st.sets(st.integers(1, 8), max_size=5),
    samples=st.integers(1, 9),
    micro_batches=st.integers(1, 6),
    ahead=st.sampled_from([0.0, 0.3, 2.0, math.inf]),
    rematerialise=st.booleans(),
)
def test_gradients_of_any_partition_are_those_of_the_unpartitioned_model(
    cuts: set[int], samples: int, micro_batches: int, ahead: float, rematerialise: bool
) -> None:
    layers, sizes = layers_of(dropout=True, batch_norm=True), divide_samples(samples, micro_batches)
    bounds = list(itertools.pairwise([0, *sorted(cuts), 9]))
    stages = stages_of(layers, len(bounds), rematerialise=rematerialise, specs=specs_of_all(), bounds=bounds)
    schedule = functools.partial(one_forward_one_backward, ahead=ahead)
    got = result_of(stages, run(stages, sizes, schedule=schedule))
    assert largest_difference(got, unpartitioned(layers, sizes)) == 0.0


@functools.cache
def specs_of_all() -> tuple[TensorTreeSpec, ...]:
    return infer_boundary_specs(layers_of(dropout=True, batch_norm=True), tokens(1)[0])


@pytest.mark.parametrize("rematerialise", [True, False])
def test_under_autocast_activations_are_sent_as_bfloat16(rematerialise: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8)]
    x, y = torch.randn(6, 8), torch.randn(6, 8)

    def loss(out: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(out.float(), target)

    plain = copy.deepcopy(layers)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cut = TensorTreeSpec.of(layers[1](layers[0](x)), 6)
        for i in range(0, 6, 2):
            out = x[i : i + 2]
            for layer in plain:
                out = layer(out)
            (loss(out, y[i : i + 2]) * (2 / 6)).backward()
    assert str(cut) == "bfloat16 (n, 8)"
    stages = [
        Stage(layers[:2], output=cut, rematerialise=rematerialise),
        Stage(layers[2:], input=cut, loss=loss, first_layer=2, rematerialise=rematerialise),
    ]
    links = memory_stage_links(2)

    def work(s: int) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            runner = StageExecutor(stages[s], s, 2, schedule=fill_drain)
            runner.run(links[s], seed=0, sizes=(2, 2, 2), inputs=x, targets=y)

    run_in_threads([lambda s=s: work(s) for s in range(2)])  # type: ignore[misc]
    for got, expected in zip(named(layers).values(), named(plain).values(), strict=True):
        assert torch.equal(got.grad, expected.grad)


def whole_mini_batch(layers: list[nn.Module]) -> dict[str, Tensor]:
    layers = copy.deepcopy(layers)
    x, targets = tokens(SAMPLES)
    for layer in layers:
        x = layer(x)
    loss_of(x, targets).backward()
    return {name: p.grad for name, p in named(layers).items() if p.grad is not None}


def test_gradients_are_those_of_the_whole_mini_batch_to_float32_rounding() -> None:
    layers = layers_of()
    specs, expected = infer_boundary_specs(layers, tokens(1)[0]), whole_mini_batch(layers)
    scale, largest = max(g.abs().max().item() for g in expected.values()), 0.0
    for micro_batches in MICRO_BATCHES:
        for count in STAGES:
            stages = stages_of(layers, count, specs=specs)
            got = result_of(stages, run(stages, divide_samples(SAMPLES, micro_batches)))
            for name, gradient in expected.items():
                largest = max(largest, (got.gradients[name] - gradient).abs().max().item())
    print(f"\nwhole mini-batch: largest difference {largest:g} where the largest gradient is {scale:g}")
    assert largest <= ROUNDING * scale


@pytest.mark.parametrize(
    ("samples", "micro_batches", "sizes"),
    [(7, 3, (3, 2, 2)), (2, 4, (1, 1)), (1, 8, (1,)), (9, 8, (2, 1, 1, 1, 1, 1, 1, 1))],
)
def test_an_uneven_mini_batch_gives_its_mean(
    samples: int, micro_batches: int, sizes: tuple[int, ...]
) -> None:
    layers = layers_of(dropout=True)
    assert divide_samples(samples, micro_batches) == sizes
    stages = stages_of(layers, 3)
    got = result_of(stages, run(stages, sizes))
    assert largest_difference(got, unpartitioned(layers, sizes)) == 0.0


def test_a_mini_batch_without_samples_has_no_gradient_and_no_loss() -> None:
    stages = stages_of(layers_of(tied=True), 3)
    outcomes = run(stages, divide_samples(0, 4))
    assert [outcome.loss for outcome in outcomes] == [None, None, None]
    assert all(p.grad is None for stage in stages for p in stage.parameters)


def test_a_mini_batch_of_other_size_needs_no_new_agreement() -> None:
    layers = layers_of(dropout=True)
    stages = stages_of(layers, 4)
    for sizes in [(3, 2, 2), (1,), (5, 5)]:
        for stage in stages:
            for parameter in stage.parameters:
                parameter.grad = None
        got = result_of(stages, run(stages, sizes))
        assert largest_difference(got, unpartitioned(layers, sizes)) == 0.0


def test_gradients_are_added_to_existing_ones() -> None:
    layers, sizes = layers_of(), divide_samples(6, 3)
    stages = stages_of(layers, 2)
    once = result_of(stages, run(stages, sizes))
    once.gradients = {name: gradient.clone() for name, gradient in once.gradients.items()}
    twice = result_of(stages, run(stages, sizes))
    assert all(torch.equal(twice.gradients[name], 2 * g) for name, g in once.gradients.items())


def test_the_random_generators_of_the_process_do_not_change() -> None:
    stages = stages_of(layers_of(dropout=True), 3)
    torch.manual_seed(9)
    expected = torch.rand(4)
    torch.manual_seed(9)
    run(stages, (2, 2))
    assert torch.equal(torch.rand(4), expected)


def test_a_frozen_first_stage_is_sent_no_gradients() -> None:
    layers = layers_of()
    for layer in layers[:5]:
        layer.requires_grad_(False)
    stages = stages_of(layers, 2)
    assert bool(stages[0].output.gradient_leaves) is False
    got = result_of(stages, run(stages, (2, 2)))
    assert largest_difference(got, unpartitioned(layers, (2, 2))) == 0.0
    assert not any(p.grad is not None for p in stages[0].parameters)


def batch_norms(layers: list[nn.Module]) -> list[tuple[str, nn.BatchNorm1d]]:
    return [
        (f"{i}.{name}", module)
        for i, layer in enumerate(layers)
        for name, module in layer.named_modules()
        if isinstance(module, nn.BatchNorm1d)
    ]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_those_of_the_mini_batch(momentum: float | None) -> None:
    layers, sizes = layers_of(batch_norm=True), divide_samples(SAMPLES, 5)
    for _, norm in batch_norms(layers):
        norm.momentum = momentum
    plain = copy.deepcopy(layers)
    seen: dict[str, list[Tensor]] = {name: [] for name, _ in batch_norms(plain)}
    for name, norm in batch_norms(plain):
        norm.register_forward_pre_hook(lambda _, args, name=name: seen[name].append(args[0].detach()))
    inputs, _ = tokens(SAMPLES)
    with torch.no_grad():
        for x in inputs.split(list(sizes)):
            for layer in plain:
                x = layer(x)
    stages = stages_of(layers, 4)
    run(stages, sizes)
    own = [layer for stage in stages for layer in stage.layers]
    assert all(torch.equal(norm.running_mean, torch.zeros(6)) for _, norm in batch_norms(own)), (
        "before commit"
    )
    for stage in stages:
        stage.commit()
    factor = 1.0 if momentum is None else momentum
    for name, norm in batch_norms(own):
        values = torch.cat(seen[name])
        torch.testing.assert_close(norm.running_mean, factor * values.mean(0))
        torch.testing.assert_close(norm.running_var, (1 - factor) + factor * values.var(0))
        assert int(norm.num_batches_tracked) == 1


def test_a_single_sample_is_normalized_by_the_running_statistics_which_stay() -> None:
    layers = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)]
    layers[1].running_mean.fill_(0.5)
    layers[1].running_var.fill_(2.0)
    x, y = MOVED_X[:1], MOVED_Y[:1]
    norm = copy.deepcopy(layers[1]).eval()
    wanted = F.mse_loss(layers[2](norm(layers[0](x))), y)
    wanted.backward()
    norms = [parameter.grad for parameter in norm.parameters()]
    between = infer_boundary_specs(layers, MOVED_X)
    stages = [
        Stage(layers[:1], output=between[0]),
        Stage(layers[1:], input=between[0], loss=F.mse_loss, first_layer=1),
    ]
    expected = [*(p.grad for p in layers[0].parameters()), *norms, *(p.grad for p in layers[2].parameters())]
    for layer in layers:
        layer.zero_grad()
    links, arguments = memory_stage_links(2), {"seed": 1, "sizes": (1,), "inputs": x, "targets": y}
    works = [
        lambda s=s: StageExecutor(stages[s], s, 2, schedule=fill_drain).run(links[s], **arguments)
        for s in (0, 1)
    ]
    assert run_in_threads(works)[1].loss == float(wanted.detach())
    for stage in stages:
        stage.commit()
    got = [p.grad for layer in layers for p in layer.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert layers[1].training and layers[1].track_running_stats and not layers[1].num_batches_tracked
    assert torch.equal(layers[1].running_var, torch.full((6,), 2.0))


def test_an_aborted_step_does_not_change_running_statistics() -> None:
    stages = stages_of(layers_of(batch_norm=True), 2)
    run(stages, (2, 2))
    run(stages, (2, 2))  # the first step was not committed
    for stage in stages:
        stage.commit()
        stage.commit()  # a second commit of the same step changes nothing
    for _, norm in batch_norms([layer for stage in stages for layer in stage.layers]):
        assert int(norm.num_batches_tracked) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("rematerialise", [True, False])
def test_gradients_are_the_same_on_cuda(rematerialise: bool) -> None:
    layers = [layer.cuda() for layer in layers_of(dropout=True)]
    sizes = divide_samples(7, 3)
    one, three = stages_of(layers, 1, rematerialise=False), stages_of(layers, 3, rematerialise=rematerialise)
    expected, got = result_of(one, run(one, sizes)), result_of(three, run(three, sizes))
    assert largest_difference(got, expected) == 0.0


class Moving(nn.Module):
    """A layer whose forward depends on buffers that it writes: in place, as new tensors, and hidden."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        for name in ("in_place", "renewed", "hidden"):
            self.register_buffer(name, torch.zeros(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("fixed", torch.ones(width))
        self.register_buffer("none", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean(0)
        self.calls += 1
        self.in_place.lerp_(mean, 0.1)
        self.renewed = 0.9 * self.renewed + 0.1 * mean
        self.hidden.data.lerp_(mean, 0.1)
        y: torch.Tensor = self.linear(x - self.in_place - self.renewed - self.hidden) * self.fixed
        return y


def moving_layers() -> list[nn.Module]:
    torch.manual_seed(3)
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6))
    instance = nn.InstanceNorm1d(1, track_running_stats=True)
    between = Sequence(lambda x: x[:, None], instance, lambda x: x[:, 0])
    return [spectral, Moving(6), between, nn.Linear(6, 6), Moving(6), nn.Linear(6, 1)]


MOVED_X = torch.randn(8, 4, generator=torch.Generator().manual_seed(4))
MOVED_Y = torch.randn(8, 1, generator=torch.Generator().manual_seed(5))
MOVED_SIZES = (2, 2, 2, 2)


def moved(stages: list[Stage], links: Any = None) -> None:
    links = links or memory_stage_links(2)
    runners = [StageExecutor(stage, s, 2, schedule=fill_drain) for s, stage in enumerate(stages)]
    arguments = {"seed": 1, "sizes": MOVED_SIZES, "inputs": MOVED_X, "targets": MOVED_Y}
    run_in_threads([lambda s=s: runners[s].run(links[s], **arguments) for s in range(2)])  # type: ignore[misc]


@pytest.mark.parametrize("rematerialise", [True, False])
def test_buffers_that_a_forward_writes_change_once_per_step(rematerialise: bool) -> None:
    layers, whole = moving_layers(), moving_layers()
    cut = infer_boundary_specs(layers, MOVED_X)[2]
    stages = [
        Stage(layers[:3], output=cut, rematerialise=rematerialise),
        Stage(layers[3:], input=cut, loss=F.mse_loss, first_layer=3, rematerialise=rematerialise),
    ]
    for step in range(2):
        begun = [buffer.clone() for layer in layers for buffer in layer.buffers()]
        moved(stages)  # finished and not committed, as an attempt that the vote aborts
        for stage in stages:
            stage.abort()
        after = [buffer for layer in layers for buffer in layer.buffers()]
        assert all(map(torch.equal, begun, after)), f"step {step}: an aborted attempt has changed a buffer"
        for layer in (*layers, *whole):
            layer.zero_grad()
        moved(stages)
        for stage in stages:
            stage.commit()
        for x, y in zip(MOVED_X.split(2), MOVED_Y.split(2), strict=True):
            for layer in whole:
                x = layer(x)
            (F.mse_loss(x, y) * 0.25).backward()
        mine, theirs = nn.ModuleList(layers), nn.ModuleList(whole)
        for (name, one), (_, other) in zip(mine.named_buffers(), theirs.named_buffers(), strict=True):
            assert torch.equal(one, other), f"step {step}: {name}"
        for (name, p), (_, q) in zip(mine.named_parameters(), theirs.named_parameters(), strict=True):
            assert p.grad is not None and torch.equal(p.grad, q.grad), f"step {step}: {name}"  # type: ignore[arg-type]


def masked(logits_BTV: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
    """A masked loss as in docs/pipeline.md."""
    y_BT, weights_BT = targets
    each_BT = F.cross_entropy(logits_BTV.transpose(1, 2), y_BT, reduction="none")
    return (each_BT * weights_BT).sum(1).mean()


def test_weights_of_the_batch_give_its_masked_loss() -> None:
    torch.manual_seed(6)
    layers = [nn.Embedding(7, 5), nn.Linear(5, 7)]
    x_BT, y_BT = torch.randint(0, 7, (2, 7, 4))
    mask_BT = torch.rand(7, 4) > 0.6
    mask_BT[:3] = False  # the first micro-batch of three has no targets
    plain = F.cross_entropy(layers[1](layers[0](x_BT))[mask_BT], y_BT[mask_BT])
    plain.backward()  # type: ignore[no-untyped-call]
    wanted = [p.grad for layer in layers for p in layer.parameters()]
    for layer in layers:
        layer.zero_grad()
    cut = infer_boundary_specs(layers, x_BT)[0]
    stages = [Stage(layers[:1], output=cut), Stage(layers[1:], input=cut, loss=masked, first_layer=1)]
    links, targets = memory_stage_links(2), (y_BT, mask_BT * (len(mask_BT) / mask_BT.sum()))
    arguments = {"seed": 1, "sizes": divide_samples(7, 3), "inputs": x_BT, "targets": targets}
    works = [lambda s=s: StageExecutor(stages[s], s, 2).run(links[s], **arguments) for s in range(2)]
    assert run_in_threads(works)[1].loss == pytest.approx(float(plain.detach()), rel=1e-6)
    for one, other in zip(wanted, [p.grad for layer in layers for p in layer.parameters()], strict=True):
        assert one is not None and other is not None
        assert (one - other).abs().max() <= ROUNDING * one.abs().max()


def test_a_batch_norm_may_be_called_with_a_keyword_argument() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.norm(input=x)
            return y

    stage = Stage([Named(), nn.Linear(4, 1)], loss=F.mse_loss)
    arguments = {"seed": 1, "sizes": (4, 4), "inputs": MOVED_X, "targets": MOVED_Y}
    StageExecutor(stage, 0, 1, schedule=fill_drain).run(memory_stage_links(1)[0], **arguments)  # type: ignore[arg-type]
    stage.commit()
    assert torch.allclose(stage.layers[0].norm.running_mean, 0.1 * MOVED_X.mean(0))
