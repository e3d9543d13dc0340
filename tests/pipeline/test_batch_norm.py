"""Batch norm with a single value per channel, and in a layer whose forward is repeated in the backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from gridtrain.pipeline.batch_norm import MiniBatchStatistics
from gridtrain.pipeline.stage import Stage


@pytest.mark.parametrize("size", [1.0, 1e6])
def test_of_a_single_value_exactly_the_bias_remains(size: float) -> None:
    norm = nn.BatchNorm1d(3, track_running_stats=False)
    nn.init.normal_(norm.bias)
    before = norm.forward
    statistics = MiniBatchStatistics([norm])
    single = (size * torch.randn(1, 3)).requires_grad_()
    with statistics.observe(first_time=True):
        output = norm(single)
        output.sum().backward()
        several = norm(torch.randn(2, 3))
    assert torch.equal(output[0], norm.bias) and statistics.lone is norm
    assert several.shape == (2, 3) and norm.forward == before
    assert single.grad is not None and not single.grad.any()
    assert norm.weight.grad is not None and not norm.weight.grad.any()
    assert norm.bias.grad is not None and norm.bias.grad.tolist() == [1.0, 1.0, 1.0]


def test_a_value_that_is_not_finite_is_not_hidden() -> None:
    norm = nn.BatchNorm1d(3, track_running_stats=False)
    with MiniBatchStatistics([norm]).observe(first_time=True):
        assert norm(torch.full((1, 3), float("nan"))).isnan().all()


class Scaled(nn.BatchNorm1d):
    """A batch norm with a forward, and arguments, of its own."""

    def forward(self, values: Tensor, *, scale: float = 1.0) -> Tensor:  # type: ignore[override]
        return super().forward(values) * scale


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Scaled(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(values=x, scale=2.0)  # type: ignore[no-any-return]


@pytest.mark.parametrize("rematerialise", [True, False])
def test_a_norm_with_its_own_forward_changes_as_other_layers_do(rematerialise: bool) -> None:
    plain, layer = Scaling(), Scaling()
    inputs = torch.randn(6, 2)
    for part in inputs.split(3):
        plain(part)
    stage = Stage([layer, nn.Linear(2, 1)], loss=lambda output, _: output.mean(), rematerialise=rematerialise)
    for is_committed in (False, True):
        stage.begin(0, [3, 3], inputs=inputs)
        for m in range(2):
            stage.forward(m)
            stage.backward(m)
        stage.finish()
        stage.commit() if is_committed else stage.abort()
        expected = plain if is_committed else Scaling()
        for name, buffer in layer.named_buffers():
            assert torch.equal(buffer, expected.get_buffer(name)), name


@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_for_an_average_are_undone_if_the_step_is_not_committed(momentum: float | None) -> None:
    norm, plain = nn.BatchNorm1d(2, momentum=momentum), nn.BatchNorm1d(2, momentum=momentum)
    stage = Stage([norm, nn.Linear(2, 1)], loss=lambda output, _: output.mean())
    for is_committed in (True, False, True):
        inputs = torch.randn(6, 2)
        before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
        stage.begin(0, [2, 4], inputs=inputs)
        for m in range(2):
            stage.forward(m)
            stage.backward(m)
        stage.finish()
        assert all(torch.equal(buffer, before[name]) for name, buffer in norm.named_buffers())
        stage.update_statistics()
        stage.update_statistics()  # a second attempt to exchange the same mini-batch
        if is_committed:
            plain(inputs)
        updated = {name: buffer.clone() for name, buffer in norm.named_buffers()}
        stage.commit() if is_committed else stage.abort()
        expected = updated if is_committed else before
        for name, buffer in norm.named_buffers():
            assert torch.equal(buffer, expected[name]) and not torch.equal(updated[name], before[name]), name
            torch.testing.assert_close(buffer, plain.get_buffer(name))


class Counter(nn.Module):
    """A layer with a buffer that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1  # type: ignore[operator]
        return x * self.forwards


class Repeated(nn.Sequential):
    """Layers whose forward is repeated in the backward."""

    reentrant: bool | None = None  # None: it is not

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return super().forward(x)
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


def train_stage(
    reentrant: bool | None, samples: int, has_running: bool, rematerialise: bool
) -> tuple[Stage, list[Tensor]]:
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(8, track_running_stats=has_running)
    layers = Repeated(norm, Counter(), nn.Linear(8, 1))
    layers.reentrant = reentrant
    stage = Stage([nn.Linear(2, 8), layers], loss=nn.functional.mse_loss, rematerialise=rematerialise)
    inputs, targets = torch.randn(3 * samples, 2), torch.randn(3 * samples, 1)
    stage.begin(0, [samples] * 3, inputs=inputs, targets=targets)
    for m in range(3):
        stage.forward(m, backward_follows=m == 2)
        stage.backward(m)
    stage.finish()
    if norm.running_mean is not None:
        assert not norm.running_mean.any(), "the running statistics changed before the commit"
    stage.commit()
    buffers = [buffer for layer in stage.layers for buffer in layer.buffers()]
    return stage, [*(p.grad for p in stage.parameters if p.grad is not None), *buffers]


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("has_running", [True, False])
@pytest.mark.parametrize("rematerialise", [True, False])
def test_a_checkpoint_in_a_layer_changes_neither_gradients_nor_buffers(
    samples: int, has_running: bool, rematerialise: bool
) -> None:
    plain, expected = train_stage(None, samples, has_running, rematerialise)
    for reentrant in (True, False):
        stage, found = train_stage(reentrant, samples, has_running, rematerialise)
        assert stage.loss == plain.loss and len(found) == len(expected) >= 7
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("rematerialise", [True, False])
def test_compiled_layers_are_compiled_only_in_the_first_step(rematerialise: bool, fullgraph: bool) -> None:
    torch._dynamo.reset()
    backend = CompileCounter()
    layers = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(3)]
    plain = Stage(copy.deepcopy(layers), loss=lambda output, _: output.mean(), rematerialise=rematerialise)
    compiled = [torch.compile(layer, backend=backend, fullgraph=fullgraph) for layer in layers]
    stage = Stage(compiled, loss=lambda output, _: output.mean(), rematerialise=rematerialise)
    compilations = []
    for _ in range(4):
        inputs = torch.randn(9, 2)
        for each in (plain, stage):
            each.begin(0, [4, 4, 1], inputs=inputs)
            for m in range(3):
                each.forward(m, backward_follows=m == 2)
                each.backward(m)
            each.finish()
            each.commit()
        compilations.append(backend.frame_count)
    limit = torch._dynamo.config.cache_size_limit  # afterwards torch compiles no more
    assert 0 < compilations[0] == compilations[-1] < limit, compilations
    for layer, expected in zip(layers, plain.layers, strict=True):
        for name, buffer in layer.named_buffers():
            torch.testing.assert_close(buffer, expected.get_buffer(name))
