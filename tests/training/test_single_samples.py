"""Batch norms that get a single value per channel, outside of a run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from gridtrain.errors import ConfigError
from gridtrain.training.single_samples import SingleSampleBatches

NORMS = pytest.mark.parametrize("has_running", [True, False])


def model_with(**options: Any) -> nn.Sequential:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8, **options), nn.ReLU(), nn.Linear(8, 1))
    for _ in range(3):
        model(torch.randn(6, 2) + 1)
    return model


def train_on(model: nn.Module, x: Tensor, forward: Any = None) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    output: Tensor = (forward or model)(x)
    output.sum().backward()
    return output.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1, 1)])
def test_a_single_value_is_normalized_by_the_running_statistics(shape: tuple[int, ...]) -> None:
    kind: type[_BatchNorm] = nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d
    norm = kind(3)
    norm(torch.randn(5, *shape[1:]) + 2)
    before, x = copy.deepcopy(norm), torch.randn(shape)
    with SingleSampleBatches(norm).permitted(is_chosen=False):
        output = norm(x)
    assert torch.equal(output, copy.deepcopy(norm).eval()(x)) and norm.training
    for buffer, unchanged in zip(norm.buffers(), before.buffers(), strict=True):
        assert torch.equal(buffer, unchanged)
    with pytest.raises(ValueError, match="more than 1 value per channel"):  # outside of it: as torch does
        norm(x)


def test_several_values_and_norms_in_evaluation_are_left_to_torch() -> None:
    mine, theirs = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    frozen = nn.BatchNorm1d(3).eval()
    several, single = torch.randn(1, 3, 2, 2), torch.randn(1, 3)
    with SingleSampleBatches(nn.ModuleList([mine, frozen])).permitted(is_chosen=True):
        assert torch.equal(mine(several), theirs(several))
        assert torch.equal(frozen(single), frozen(single)) and not frozen.training
    assert mine.running_mean is not None and theirs.running_mean is not None
    assert torch.equal(mine.running_mean, theirs.running_mean)


def test_a_norm_that_communicates_is_left_to_torch() -> None:
    norm = nn.SyncBatchNorm(3)
    with SingleSampleBatches(norm).permitted(is_chosen=False):
        assert not norm._forward_pre_hooks and not norm._forward_hooks


@NORMS
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_repeats_the_forward_of_a_single_sample(has_running: bool, reentrant: bool) -> None:
    model, plain = (model_with(track_running_stats=has_running) for _ in range(2))
    x = torch.randn(1, 2, requires_grad=True)
    with SingleSampleBatches(model).permitted(is_chosen=False):
        repeated = train_on(model, x, lambda x: checkpoint(model, x, use_reentrant=reentrant))
    with SingleSampleBatches(plain).permitted(is_chosen=False):
        once = train_on(plain, x)
    assert torch.equal(repeated[0], once[0]) and len(repeated[1]) == len(once[1]) == 6
    assert all(torch.equal(a, b) for a, b in zip(repeated[1], once[1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))
    assert all(module.training for module in model.modules())


@NORMS
def test_a_compiled_model_trains_on_single_samples(
    has_running: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plain = model_with(track_running_stats=has_running)
    model = torch.compile(copy.deepcopy(plain), backend="eager", fullgraph=True)
    batches = SingleSampleBatches(model), SingleSampleBatches(plain)
    for samples in (8, 1, 5, 1, 8):
        x = torch.randn(samples, 2)
        with batches[0].permitted(is_chosen=False), batches[1].permitted(is_chosen=False):
            (output, gradients), (expected, exact) = train_on(model, x), train_on(plain, x)
        assert torch.equal(output, expected)
        assert all(torch.equal(a, b) for a, b in zip(gradients, exact, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))
    assert caplog.text.count("the layer '_orig_mod.1', BatchNorm1d, normalizes it with running") == 1


@pytest.mark.parametrize("is_compiled", [False, True])
def test_what_would_always_get_single_samples_is_refused(is_compiled: bool) -> None:
    model = model_with()
    called = torch.compile(model, backend="eager") if is_compiled else model
    with (
        SingleSampleBatches(model).permitted(is_chosen=True),
        pytest.raises(ConfigError, match=r"^the layer '1', BatchNorm1d, cannot train on a single sample"),
    ):
        called(torch.randn(1, 2))
    assert all(module.training for module in model.modules())
