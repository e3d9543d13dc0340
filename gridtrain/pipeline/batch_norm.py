"""Updates batch norm's running mean and variance in a pipeline; restores other buffers after aborted steps.

Batch norm normalizes each micro-batch with that micro-batch's statistics, and stores those of the whole
mini-batch (GPipe, arXiv 1811.06965, section 2.2: "the sufficient statistics are computed over each
micro-batch"; "the moving average ... over the entire mini-batch" is stored for evaluation).

    micro-batch 0..M-1  --(count, mean, squared deviations)-->  merged  --commit-->  running_mean, running_var

The statistics are merged by the method of Chan, Golub and LeVeque (1979), which does not subtract large sums
from each other; the variance is unbiased, as in torch.  The running statistics do not change before `commit`,
so an aborted step has no effect.

A micro-batch with a single value per channel is normalized as `training.single_samples` describes.  There is
such a micro-batch only if a replica has one sample in a step; otherwise, the micro-batches of a model with
batch norm are larger (`boundary_specs.lone_sample_layer`).

Other buffers, such as a moving average, a counter, or the buffers of a norm with its own `forward`, change
with each micro-batch, as in a model that is not partitioned.  A repeated forward pass uses the values that
the first one used, and does not change the buffers.  For example, let b1, b2 and b3 be a buffer's values
after the forward passes of micro-batches 0, 1 and 2: a repeated pass of micro-batch 1 reads b1, and
afterwards the buffer has the value b3 again.  If a step is not committed, the buffers are restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gridtrain.errors import ConfigError
from gridtrain.training.single_samples import SingleValueNorms, is_torch_norm

_COLLECTED = "collected_moments"


@dataclass
class _Moments:
    """Statistics of one layer.

    Attributes:
        count: the number of values per channel.
        mean_C, deviations_C: (C,) the means and the sums of squared deviations of each channel.
    """

    count: int
    mean_C: Tensor
    deviations_C: Tensor

    def add(self, other: _Moments) -> None:
        total = self.count + other.count
        difference_C = other.mean_C - self.mean_C
        self.mean_C = self.mean_C + difference_C * (other.count / total)
        self.deviations_C = (
            self.deviations_C
            + other.deviations_C
            + difference_C.square() * (self.count * other.count / total)
        )
        self.count = total


def _collect(norm: nn.Module, values: Tensor) -> None:
    """Collect the statistics of a micro-batch in the norm itself, so that compiled layers of the same kind
    share their code."""
    if (collected := getattr(norm, _COLLECTED, None)) is not None:
        values = values.detach().float().transpose(0, 1).flatten(1)  # (C, count)
        mean_C = values.mean(dim=1)
        deviations_C = (values - mean_C[:, None]).square().sum(dim=1)
        collected.append(_Moments(values.shape[1], mean_C, deviations_C))


class MiniBatchStatistics:
    """Collects the statistics of all batch norms in `layers` for each mini-batch.

    Attributes:
        lone: a batch norm whose input had a single value per channel; None if there was none.

    Raises:
        ConfigError: a layer contains a SyncBatchNorm.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        found = {module: None for layer in layers for module in layer.modules()}
        if any(isinstance(module, nn.SyncBatchNorm) for module in found):
            raise ConfigError(
                "a pipeline cannot contain SyncBatchNorm, which communicates during a stage's forward pass",
                remedy="use BatchNorm1d, 2d or 3d; replicas average their running statistics every few steps",
            )
        self._norms = [m for m in found if is_torch_norm(m) and m.running_mean is not None]
        self._single_values = SingleValueNorms(found, self._record_lone, _collect)
        self._sums: dict[_BatchNorm, _Moments] = {}
        self._before: list[tuple[Tensor, Tensor]] = []  # running statistics, and their values before `update`
        self.lone: nn.Module | None = None

    def _record_lone(self, norm: nn.Module) -> None:
        self.lone = norm

    @contextmanager
    def observe(self, *, first_time: bool) -> Iterator[None]:
        """Return a context manager in which to run a micro-batch's forward or backward pass.

        A backward pass needs it, because activation checkpointing may repeat the forward pass.

        Args:
            first_time: whether this is the micro-batch's first forward pass, the only pass whose
                statistics are collected.
        """
        training = [norm for norm in self._norms if norm.training and norm.track_running_stats]
        for norm in training:
            norm.track_running_stats = False  # torch then neither reads nor changes the running statistics
        observed = training if first_time else []
        for norm in observed:
            vars(norm)[_COLLECTED] = []
        try:
            with self._single_values.allow():
                yield
        finally:
            for norm in observed:
                for found in vars(norm).pop(_COLLECTED):
                    if norm in self._sums:
                        self._sums[norm].add(found)
                    else:
                        self._sums[norm] = found
            for norm in training:
                norm.track_running_stats = True

    @torch.no_grad()
    def discard(self) -> None:
        """Drop the statistics of the mini-batch, and restore the running statistics that `update` changed."""
        for statistic, value in reversed(self._before):
            statistic.copy_(value)
        self._before.clear()
        self._sums.clear()

    def commit(self) -> None:
        """Update the running statistics with the statistics of the mini-batch."""
        self.update()
        self._before.clear()

    @torch.no_grad()
    def update(self) -> None:
        """Update the running statistics as `commit` does; before `commit`, `discard` can restore them."""
        for norm, sums in self._sums.items():
            assert norm.running_mean is not None and norm.running_var is not None
            running = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
            self._before += [(each, each.clone()) for each in running if each is not None]
            factor = norm.momentum
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked.add_(1)
                if factor is None:  # torch's cumulative average
                    factor = 1.0 / float(norm.num_batches_tracked)
            factor = 0.0 if factor is None else factor
            variance_C = sums.deviations_C / max(1, sums.count - 1)
            norm.running_mean.mul_(1 - factor).add_(sums.mean_C.to(norm.running_mean.dtype), alpha=factor)
            norm.running_var.mul_(1 - factor).add_(variance_C.to(norm.running_var.dtype), alpha=factor)
        self._sums.clear()


_BufferLocation = tuple[nn.Module, str]
"""A buffer as (owning module, name), because a forward pass may replace the tensor."""


class MutatedBuffers:
    """Saves and restores the buffers that a forward pass changes, except those of torch's batch norms.

    When a layer runs for the first time, all of its buffers are copied to determine which ones change; later,
    only those are copied.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        known: set[_BufferLocation] = set()
        self._locations: list[list[_BufferLocation]] = []
        for layer in layers:
            owners = [m for m in layer.modules() if not is_torch_norm(m)]
            places = dict.fromkeys((module, name) for module in owners for name in module._buffers)
            self._locations.append([place for place in places if place not in known])
            known |= set(places)
        self._observed_layers = [False] * len(layers)
        self._mutated: set[_BufferLocation] = set()
        # Each changed buffer's tensor, and its value, at the beginning of the mini-batch:
        self._at_begin: dict[_BufferLocation, tuple[Tensor | None, Tensor | None]] = {}
        self._before: dict[int, dict[_BufferLocation, Tensor | None]] = {}  # by micro-batch

    @contextmanager
    def observe(self, layer: int, m: int) -> Iterator[None]:
        """Return a context manager in which to run a layer's first forward pass with micro-batch m.

        It saves the values of the layer's buffers from before the pass.
        """
        found = {place: _buffer(place) for place in self._locations[layer]}
        versions = {place: None if tensor is None else tensor._version for place, tensor in found.items()}
        wanted = self._mutated & found.keys() if self._observed_layers[layer] else found.keys()
        values = {place: _value(found[place]) for place in wanted}
        try:
            yield
        finally:
            for place, tensor in found.items():
                same = _buffer(place) is tensor and (tensor is None or tensor._version == versions[place])
                # writing through `.data` leaves a tensor's version unchanged
                same &= self._observed_layers[layer] or tensor is None or torch.equal(tensor, values[place])  # type: ignore[arg-type]
                if not same:
                    self._mutated.add(place)
                if place in self._mutated and place in values:
                    self._at_begin.setdefault(place, (tensor, values[place]))
                    self._before.setdefault(m, {})[place] = values[place]
            self._observed_layers[layer] = True

    @contextmanager
    def restore_during(self, m: int) -> Iterator[None]:
        """Return a context manager in which to repeat the forward pass of micro-batch m.

        Inside it, the buffers have the values from before m's first forward pass; on exit, they get back the
        values that they had on entry.
        """
        before = self._before.get(m, {})
        now = {place: _buffer(place) for place in self._mutated}
        for place, tensor in now.items():
            place[0]._buffers[place[1]] = _value(before.get(place, tensor))
        try:
            yield
        finally:
            for (module, name), tensor in now.items():
                module._buffers[name] = tensor

    @torch.no_grad()
    def discard(self) -> None:
        """Restore the values that the buffers had at the beginning of the mini-batch."""
        for (module, name), (tensor, value) in self._at_begin.items():
            if tensor is not None and value is not None:
                tensor.copy_(value)
            module._buffers[name] = tensor
        self.commit()

    def commit(self) -> None:
        """Keep the current values of the buffers and discard the saved values."""
        self._at_begin.clear()
        self._before.clear()


def _buffer(place: _BufferLocation) -> Tensor | None:
    module, name = place
    return module._buffers.get(name)


def _value(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
