"""Batch norms that get a single value per channel, outside of a run."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from gridtrain.errors import ConfigError
from gridtrain.training.single_samples import SingleSampleBatches, is_torch_norm

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


def single_sample_batches(model: nn.Module) -> SingleSampleBatches:
    return SingleSampleBatches(model, batch_size_is_one=False)


@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1, 1)])
def test_a_single_value_is_normalized_by_the_running_statistics(shape: tuple[int, ...]) -> None:
    kind: type[_BatchNorm] = nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d
    norm = kind(3)
    norm(torch.randn(5, *shape[1:]) + 2)
    before, x = copy.deepcopy(norm), torch.randn(shape)
    with single_sample_batches(norm).allow():
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
    with SingleSampleBatches(nn.ModuleList([mine, frozen]), batch_size_is_one=True).allow():
        assert torch.equal(mine(several), theirs(several))
        assert torch.equal(frozen(single), frozen(single)) and not frozen.training
    assert mine.running_mean is not None and theirs.running_mean is not None
    assert torch.equal(mine.running_mean, theirs.running_mean)


class Communicating(nn.SyncBatchNorm):
    pass


class Modulated(nn.BatchNorm1d):
    """A norm with a second argument and a second result."""

    def forward(self, input: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(input) * scale, scale


@pytest.mark.parametrize("norm", [nn.SyncBatchNorm(3), Communicating(3), Modulated(3)])
def test_norms_with_a_forward_of_their_own_are_left_to_torch(norm: nn.Module) -> None:
    with single_sample_batches(norm).allow():
        assert not is_torch_norm(norm) and type(norm) in (nn.SyncBatchNorm, Communicating, Modulated)
        if isinstance(norm, Modulated):
            assert norm(torch.ones(2, 3), torch.zeros(3))[0].tolist() == [[0.0] * 3] * 2
            with pytest.raises(ValueError, match="more than 1 value per channel"):
                norm(torch.ones(1, 3), scale=torch.ones(3))


def test_classes_of_removed_parametrizations_are_released() -> None:
    norm, classes = nn.BatchNorm1d(8), []
    batches = single_sample_batches(norm)
    for _ in range(3):
        parametrizations.weight_norm(norm, dim=0)
        with batches.allow():
            norm(torch.randn(1, 8))
        classes.append(weakref.ref(type(norm)))
        parametrize.remove_parametrizations(norm, "weight")
    with batches.allow():
        norm(torch.randn(1, 8))
    gc.collect()
    assert [made() for made in classes] == [None] * 3


def test_the_argument_of_a_norm_may_be_named() -> None:
    norm = nn.BatchNorm1d(3)
    with single_sample_batches(norm).allow():
        assert torch.equal(norm(input=torch.ones(1, 3)), norm(torch.ones(1, 3)))


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    assert b"gridtrain" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


@NORMS
@pytest.mark.parametrize("copied", [pickled, copy.deepcopy])
def test_a_copy_is_a_model_of_torch(copied: Any, has_running: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = model_with(track_running_stats=has_running)
    before = copy.deepcopy(model.state_dict())
    with single_sample_batches(model).allow():
        model(torch.randn(1, 2))
        copies, state = [copied(model), copied(model[1])], model.state_dict()
        model(torch.randn(1, 2))  # the original still trains on single samples
    copies.append(copied(model))
    for own in copies:
        norm = own if isinstance(own, _BatchNorm) else own[1]
        assert type(norm) is nn.BatchNorm1d and vars(norm).keys() == vars(nn.BatchNorm1d(8)).keys()
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            norm(torch.randn(1, 8))
        norm(torch.randn(5, 8))
        if norm.running_mean is not None:
            assert not torch.equal(norm.running_mean, model[1].running_mean)  # type: ignore[arg-type]
    assert state.keys() == before.keys() and all(torch.equal(state[name], before[name]) for name in state)
    assert caplog.text.count("has only one sample") == 1


class CopiesItself(nn.BatchNorm1d):
    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        return self.__class__(self.num_features)


@pytest.mark.parametrize("norm", [parametrizations.weight_norm(nn.BatchNorm1d(8), dim=0), CopiesItself(8)])
def test_a_copy_that_the_norm_makes_itself_is_a_model_of_torch(norm: nn.Module) -> None:
    with single_sample_batches(norm).allow():
        copied = copy.deepcopy(norm)
        norm(torch.randn(1, 8))
    assert type(copied) is type(norm)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        copied(torch.randn(1, 8))


def test_a_norm_may_be_parametrized_within_a_batch_of_one_sample() -> None:
    norm = nn.BatchNorm1d(8)
    batches, weight = single_sample_batches(norm), norm.weight
    with batches.allow():
        parametrizations.weight_norm(norm, dim=0)
        norm(torch.ones(1, 8)).sum().backward()
    assert type(norm).__bases__ == (nn.BatchNorm1d,)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm(torch.randn(1, 8))
    with batches.allow():
        copied = copy.deepcopy(norm)
        assert type(copied).__bases__ == (nn.BatchNorm1d,)
        expected = copied.eval()(torch.ones(1, 8))
        assert torch.equal(norm(torch.ones(1, 8)), expected)
        parametrize.remove_parametrizations(norm, "weight")
        assert torch.equal(norm(torch.ones(1, 8)), expected)
    assert type(norm) is nn.BatchNorm1d and torch.equal(norm.weight, weight)


def test_a_replica_of_a_norm_trains_on_single_samples(caplog: pytest.LogCaptureFixture) -> None:
    norm = nn.BatchNorm1d(8)
    with single_sample_batches(norm).allow():
        replica = norm._replicate_for_data_parallel()  # of DataParallel, which then sets the parameters
        replica.weight, replica.bias = norm.weight.detach(), norm.bias.detach()
        assert torch.equal(replica(torch.ones(1, 8)), norm.eval()(torch.ones(1, 8)))
    assert "only one sample: a layer, BatchNorm1d, normalizes" in caplog.text


class Final(nn.BatchNorm1d):
    def __init_subclass__(cls) -> None:
        raise TypeError("Final has no subclasses")


def test_a_norm_whose_class_refuses_subclasses_trains_on_single_samples() -> None:
    norm = Final(3)
    with single_sample_batches(norm).allow():
        assert norm(torch.ones(1, 3)).isfinite().all()


def test_two_at_once_are_ended_in_turn() -> None:
    norm = nn.BatchNorm1d(3)
    one, other = single_sample_batches(norm), single_sample_batches(norm)
    with one.allow():
        with other.allow():
            norm(torch.ones(1, 3))
        norm(torch.ones(1, 3))
    assert type(norm) is nn.BatchNorm1d


def test_an_exception_of_the_script_is_not_replaced(caplog: pytest.LogCaptureFixture) -> None:
    model = model_with()
    with pytest.raises(KeyError, match="own"), single_sample_batches(model).allow():
        model(torch.randn(1, 2))
        raise KeyError("own")
    assert caplog.text.count("a batch of this worker has only one sample: the layer '1', BatchNorm1d") == 1


@NORMS
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_repeats_the_forward_of_a_single_sample(has_running: bool, reentrant: bool) -> None:
    model, plain = (model_with(track_running_stats=has_running) for _ in range(2))
    x = torch.randn(1, 2, requires_grad=True)
    with single_sample_batches(model).allow():
        repeated = train_on(model, x, lambda x: checkpoint(model, x, use_reentrant=reentrant))
    with single_sample_batches(plain).allow():
        once = train_on(plain, x)
    assert torch.equal(repeated[0], once[0]) and len(repeated[1]) == len(once[1]) == 6
    assert all(torch.equal(a, b) for a, b in zip(repeated[1], once[1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))
    assert all(module.training for module in model.modules())


@NORMS
def test_a_compiled_model_trains_on_single_samples(
    has_running: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    plain = model_with(track_running_stats=has_running)
    model = torch.compile(copy.deepcopy(plain), backend="eager", fullgraph=True)
    batches = single_sample_batches(model), single_sample_batches(plain)
    for samples in (8, 1, 5, 1, 8):
        x = torch.randn(samples, 2)
        with batches[0].allow(), batches[1].allow():
            (output, gradients), (expected, exact) = train_on(model, x), train_on(plain, x)
        assert torch.equal(output, expected)
        assert all(torch.equal(a, b) for a, b in zip(gradients, exact, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))
    assert caplog.text.count("the layer '_orig_mod.1', BatchNorm1d, normalizes it with running") == 1


@NORMS
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_model_is_compiled_once_for_full_batches_and_once_for_single_samples(
    fullgraph: bool, has_running: bool
) -> None:
    torch._dynamo.reset()
    model, backend = model_with(track_running_stats=has_running), CompileCounter()
    compiled = torch.compile(model, backend=backend, fullgraph=fullgraph)
    batches = single_sample_batches(model)
    for _ in range(10):
        for samples in (8, 8, 1):
            with batches.allow() if samples == 1 else nullcontext():
                compiled(torch.randn(samples, 2)).sum().backward()
    assert backend.frame_count == 2


@pytest.mark.parametrize("is_compiled", [False, True])
def test_batches_of_one_sample_that_the_script_asks_for_are_refused(is_compiled: bool) -> None:
    model = model_with()
    called = torch.compile(model, backend="eager") if is_compiled else model
    with (
        SingleSampleBatches(model, batch_size_is_one=True).allow(),
        pytest.raises(ConfigError, match=r"^the layer '1', BatchNorm1d, cannot train on a single sample"),
    ):
        called(torch.randn(1, 2))
    assert all(module.training for module in model.modules())
