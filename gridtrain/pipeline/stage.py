"""Computes one stage: forward and backward passes of micro-batches, recomputation, loss, tied parameters.

    begin           starts a mini-batch
    forward(m)      runs the forward pass of micro-batch m; with `rematerialise`, stores only its input
    backward(m)     repeats the forward pass, if necessary, with the same random numbers; then runs the
                    backward pass
    finish          adds the mini-batch's gradients to `parameter.grad`
    commit          updates the running statistics of batch norm

`forward` and `backward` are called in the order of the schedule.

The loss of n samples in a mini-batch of N has the weight n / N, so gradients and loss are means over the
mini-batch, regardless of how it is divided.  If a mini-batch is not committed, `abort` or the next `begin`
restores the buffers and, if the mini-batch is unfinished, the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gridtrain.errors import ConfigError, LocalProtocolError
from gridtrain.pipeline import random_seeds
from gridtrain.pipeline.autocast import without_autocast
from gridtrain.pipeline.batch_norm import MiniBatchStatistics, MutatedBuffers
from gridtrain.pipeline.tensor_tree import Leaf, TensorTreeSpec, map_tensors, split_batch, tensors_in

LossFunction = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, eq=False)
class TiedParameter:
    """A parameter of which several stages hold copies.

    Attributes:
        index: the index of this parameter among the model's tied parameters, the same on all stages.
        stages: the stages that hold a copy, in ascending order.
        parameter: this stage's copy.
    """

    index: int
    stages: tuple[int, ...]
    parameter: nn.Parameter

    @property
    def spec(self) -> TensorTreeSpec:
        """The spec of the parameter and of its gradient, which are always sent as EXACT."""
        return TensorTreeSpec(Leaf(self.parameter.dtype, tuple(self.parameter.shape)))


@dataclass(slots=True)
class _MicroBatchState:
    """A micro-batch between its forward and backward passes.

    Attributes:
        received: the input of the stage.
        result: the output, or the loss on the last stage; None if the forward pass must be repeated.
        has_overflowed: whether the forward pass failed because `received` is not finite.
    """

    received: Any
    result: Any
    has_overflowed: bool = False


class Stage:
    """Consecutive layers of a model, each called with the result of the previous one, as in `nn.Sequential`.

    Args:
        layers: the layers in order, on one device.
        input: the spec of the values received from the previous stage; None for the first stage.
        output: the spec of the values that are sent to the next stage; None for the last stage.
        loss: a function of (output, targets) that returns the mean over the samples as a scalar tensor; only
            for the last stage.
        first_layer: the index of this stage's first layer in the whole model.
        tied: the parameters of which other stages also hold copies.
        rematerialise: whether to store only inputs and repeat the forward pass before the backward pass
            (GPipe, section 2.3).

    Attributes:
        loss: the mean loss of the latest mini-batch on the last stage; None on other stages, or while a
            mini-batch is unfinished.
        parameters: the parameters of all layers.
        device: the device of the parameters.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        input: TensorTreeSpec | None = None,
        output: TensorTreeSpec | None = None,
        loss: LossFunction | None = None,
        first_layer: int = 0,
        tied: Sequence[TiedParameter] = (),
        rematerialise: bool = True,
    ) -> None:
        self.layers, self.input, self.output = list(layers), input, output
        self.tied = tuple(sorted(tied, key=lambda one: one.index))
        self.loss: float | None = None
        self._loss, self._first_layer = loss, first_layer
        self._rematerialise = rematerialise
        self.parameters = list(dict.fromkeys(p for layer in self.layers for p in layer.parameters()))
        self.device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self._statistics = MiniBatchStatistics(self.layers)
        self._buffers = MutatedBuffers(self.layers)
        self._gradients_before: list[Tensor | None] | None = None
        self._clear_mini_batch()

    def _clear_mini_batch(self) -> None:
        self._kept: dict[int, _MicroBatchState] = {}
        self._losses: list[Tensor] = []
        self._inputs: list[Any] = []
        self._targets: list[Any] = []

    def begin(self, seed: int, sizes: Sequence[int], *, inputs: Any = None, targets: Any = None) -> None:
        """Start a mini-batch of sum(sizes) samples; an earlier, uncommitted mini-batch is dropped.

        The caller must have checked inputs and targets with `batch_checks.check_batch`.

        Args:
            seed: the seed of this step and replica (`random_seeds.derive_step_seed`).
            sizes: the number of samples in each micro-batch, at least 1.
            inputs: the inputs of the whole mini-batch; only the first stage uses them.
            targets: the targets of the whole mini-batch; only the last stage uses them.
        """
        self.abort()
        self._sizes = tuple(sizes)
        self._weights = [size / sum(sizes) for size in sizes]
        self._seed = seed
        self._inputs = self._split(inputs) if self.input is None else []
        self._targets = self._split(targets) if self.output is None else []
        self.loss = None
        self._gradients_before = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def _split(self, tree: Any) -> list[Any]:
        """Divide a mini-batch into micro-batches on the stage's device."""
        parts = split_batch(tree, self._sizes)
        return [map_tensors(part, lambda tensor: tensor.to(self.device)) for part in parts]

    def forward(self, m: int, received: Any = None, *, backward_follows: bool = False) -> Any:
        """Run the forward pass of micro-batch m; return its output, or None on the last stage.

        Args:
            m: the index of the micro-batch, which must increase from call to call.
            received: the values from the previous stage, which must match `input`; unused on the first stage.
            backward_follows: whether the next call is m's backward pass; if so, the forward pass need not
                be repeated.

        Raises:
            LocalProtocolError: the forward pass of m has already run.
            ConfigError: the input or the output does not match its spec, a layer overwrote an input that has
                no gradient, or the loss cannot be computed, is not a scalar, or has no gradient.
        """
        if m in self._kept:
            raise LocalProtocolError(f"`forward` of micro-batch {m} was called twice")
        received = self._inputs[m] if self.input is None else self._leaves(received, m)
        again, versions = self._rematerialise and not backward_follows, _tensor_versions(received)
        with torch.no_grad() if again else nullcontext():
            result = self._compute(m, received, first_time=True)
        if _tensor_versions(received) != versions:
            raise ConfigError(
                "a layer at the start of this stage overwrote its input, which is still needed",
                remedy="use inplace=False in this layer",
            )
        self._kept[m] = _MicroBatchState(received, None if again else result)
        if self.output is None:
            self._losses.append(result.detach())
            return None
        return self.output.map_leaves(result, lambda leaf, value: _without_subclass(value))

    def forward_fails(self, m: int, received: Any) -> bool:
        """Return whether the forward pass of micro-batch m fails with these values.

        The stage's state does not change.
        """
        try:
            with torch.no_grad():
                self._compute(m, received, first_time=False)
        except Exception:  # a user's code may raise anything
            return True
        return False

    def substitute_forward(self, m: int, received: Any) -> Any:
        """Replace a forward pass that fails because `received` is not finite.

        Return an output of NaN, or None on the last stage, where the loss becomes NaN.  The values that later
        stages compute from the output are not finite either, so the step is skipped.
        """
        self._kept[m] = _MicroBatchState(self._leaves(received, m), None, has_overflowed=True)
        if self.output is not None:
            return self.output.nan_tree(self._sizes[m], self.device)
        self._losses.append(torch.full((), torch.nan, device=self.device))
        return None

    def _leaves(self, received: Any, m: int) -> Any:
        """Check that the received values match `input`, and return them as leaves of this stage's graph."""
        assert self.input is not None

        def leaf_of(leaf: Leaf, value: Any) -> Any:
            return value.detach().requires_grad_() if leaf.has_gradient else value

        self.input.values(received, self._sizes[m])
        return self.input.map_leaves(received, leaf_of)

    def _compute(self, m: int, x: Any, *, first_time: bool) -> Any:
        """Run the layers on x; return the output or, on the last stage, the loss times the weight of m."""
        if self.input is not None:  # copies of leaves: a first layer may overwrite them (ReLU(inplace=True))
            x = self.input.map_leaves(x, lambda leaf, value: value.clone() if leaf.has_gradient else value)
        torch.clear_autocast_cache()  # it may hold parameters cast before an update or without gradient
        again = nullcontext() if first_time else self._buffers.restore_during(m)
        generators = random_seeds.borrowed_generators(self.device)
        with generators, self._statistics.observe(first_time=first_time), again:
            for i, layer in enumerate(self.layers):
                self._seed_layer(m, i)
                with self._buffers.observe(i, m) if first_time else nullcontext():
                    x = layer(x)
            if self._loss is None:
                assert self.output is not None
                self.output.values(x, self._sizes[m])
                return x
            self._seed_layer(m, len(self.layers))
            # copies, because a loss may overwrite its targets
            loss = self._loss_of(x, map_tensors(self._targets[m], Tensor.clone))
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            raise ConfigError(
                f"the loss is {tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__}, "
                "not a scalar",
                remedy="return the mean over the samples, as a tensor without dimensions",
            )
        is_trained = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters)
        if is_trained and not loss.requires_grad:
            raise ConfigError(
                "the loss has no gradient, so nothing would be trained",
                remedy="compute it from the output with torch functions only: no .item(), .detach() or numpy",
            )
        return loss * self._weights[m]

    def _loss_of(self, output: Any, targets: Any) -> Any:
        assert self._loss is not None
        try:
            return self._loss(output, targets)
        except Exception as error:  # a user's function may raise anything
            if targets is not None:
                raise
            raise ConfigError(
                f"the loss cannot be computed, and this step has no targets: {type(error).__name__}: {error}",
                remedy="call loss = pipe.step(inputs, targets) on all workers",
            ) from error

    def _seed_layer(self, m: int, i: int) -> None:
        """Seed the generators for micro-batch m and the stage's layer i, or for the loss after its layers."""
        seed = random_seeds.derive_layer_seed(self._seed, m, self._first_layer + i)
        random_seeds.seed_generators(seed, self.device)

    def backward(self, m: int, gradients: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
        """Run the backward pass of micro-batch m and add its gradients to `parameter.grad`.

        Args:
            m: the index of the micro-batch, whose forward pass must have run; it must increase from call to
                call.
            gradients: the gradient of each leaf of `output` that has a gradient; None on the last stage.

        Returns:
            The gradient of each leaf of `input` that has a gradient; zeros if the output does not depend on
            the leaf.

        Raises:
            LocalProtocolError: the forward pass of m has not run.
        """
        if m not in self._kept:
            raise LocalProtocolError(f"`backward` of micro-batch {m} was called before its `forward`")
        kept = self._kept.pop(m)
        if kept.has_overflowed:
            assert self.input is not None
            for parameter in self.parameters:
                if parameter.requires_grad:
                    parameter.grad = torch.full_like(parameter, torch.nan)
            nothing: tuple[Tensor, ...] = self.input.gradients.nan_tree(self._sizes[m], self.device)
            return nothing
        result = self._compute(m, kept.received, first_time=False) if kept.result is None else kept.result
        if self.output is None:
            roots, seeds = [result], [None]
        else:
            roots, seeds = self.output.tensors(result, self._sizes[m]), list(gradients or ())  # type: ignore[arg-type]
        pairs = [(root, seed) for root, seed in zip(roots, seeds, strict=True) if root.requires_grad]
        if pairs:
            # Activation checkpointing in a user's layer repeats its forward pass in this context.
            repeated = self._statistics.observe(first_time=False), self._buffers.restore_during(m)
            with repeated[0], repeated[1], without_autocast(self.device):
                torch.autograd.backward([root for root, _ in pairs], [seed for _, seed in pairs])
        if self.input is None:
            return ()
        leaves = self.input.tensors(kept.received, self._sizes[m])
        return tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)

    def tied_gradient(self, tied: TiedParameter) -> Tensor:
        """Return the gradient of this stage's copy of a tied parameter; zeros if there is none."""
        gradient = tied.parameter.grad
        return torch.zeros_like(tied.parameter) if gradient is None else gradient

    @torch.no_grad()
    def sum_tied(self, tied: TiedParameter, parts: Mapping[int, Tensor]) -> None:
        """Set the tied parameter's gradient to the sum of the gradients of all copies.

        They are added in the same order on all stages.

        Args:
            parts: the gradient of each stage's copy, by stage.
        """
        total = parts[tied.stages[0]]
        for stage in tied.stages[1:]:
            total = total + parts[stage]
        tied.parameter.grad = total

    @torch.no_grad()
    def replace_tied(self, tied: TiedParameter, value: Tensor) -> None:
        """Replace this stage's copy of a tied parameter with `value`, another stage's copy."""
        tied.parameter.copy_(value)

    def finish(self) -> None:
        """End the mini-batch: add its gradients to any earlier ones and, on the last stage, set `loss`.

        Raises:
            LocalProtocolError: no mini-batch was begun, or the backward pass of a micro-batch has not run.
        """
        if self._kept or self._gradients_before is None:
            raise LocalProtocolError(
                f"a mini-batch ended before the backward pass of {len(self._kept)} of its micro-batches"
            )
        for parameter, before in zip(self.parameters, self._gradients_before, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        if self._losses:
            self.loss = float(torch.stack(self._losses).double().sum())
        self._gradients_before = None
        self._clear_mini_batch()

    def update_statistics(self) -> None:
        """Update batch norm's running statistics with those of the mini-batch; `abort` undoes this."""
        self._statistics.update()

    def commit(self) -> None:
        """Update batch norm's running statistics with those of the mini-batch; keep the changed buffers."""
        self._statistics.commit()
        self._buffers.commit()

    def abort(self) -> None:
        """Drop a mini-batch that is not committed.

        This discards its statistics, and restores the buffers.  If the mini-batch is unfinished,
        the gradients are also restored.
        """
        if self._gradients_before is not None:
            for parameter, before in zip(self.parameters, self._gradients_before, strict=True):
                parameter.grad = before
        self._gradients_before = None
        self._statistics.discard()
        self._buffers.discard()
        self._clear_mini_batch()


def _without_subclass(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _tensor_versions(tree: Any) -> list[int]:
    """Return, for each tensor of a tree, the number of times that it has been written to."""
    return [tensor._version for tensor in tensors_in(tree)]
