"""Executes one stage's part of a step (forward, backward, send, receive) in the order of the schedule.

    stage s - 1  --activations of m-->  Stage.forward(m)   --activations of m-->  stage s + 1
    stage s - 1  <--gradients of m----  Stage.backward(m)  <--gradients of m----  stage s + 1

The middle column is stage s, and m is a micro-batch.  Sending returns immediately and payloads are received
in the background, so both overlap with computation.  If the link to the other stages breaks, the step ends
immediately on this stage; the next attempt recomputes the step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from gridtrain.core.messages import Channel
from gridtrain.core.stages import schedule as plan
from gridtrain.errors import LineBroken, RemoteProtocolError
from gridtrain.pipeline.fault_origin import FaultOrigin, find_fault_origin, sender_fault
from gridtrain.pipeline.stage import Stage
from gridtrain.pipeline.stage_link import RoundStageLink
from gridtrain.pipeline.tensor_tree import TensorTreeSpec, split_batch
from gridtrain.training.checkpoint.flat_gradient import finish_queued_work

log = logging.getLogger("gridtrain")

PayloadBuffers = Sequence[memoryview]
ScheduleFactory = Callable[[int, int], plan.Schedule]


MIN_WAIT_S = 0.0005
"""A stage that waits for a payload for at most this many seconds is considered not to have waited."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step on one stage.

    Attributes:
        loss: the mean loss of the mini-batch on the last stage; None on other stages, or without samples.
        computed_s: the time spent in forward and backward passes.
        waited_s: the time spent waiting for payloads, because of the pipeline's bubble or slow links.
        forward_s, backward_s: the mean times per micro-batch; `backward_s` includes repeated forward passes.
        round_trip_s: the time from sending the first micro-batch to the next stage until receiving its
            gradient; 0 if unknown because this stage did not wait for the gradient or is the last one.
    """

    loss: float | None
    computed_s: float
    waited_s: float
    forward_s: float
    backward_s: float
    round_trip_s: float = 0.0


class OtherSizes(LineBroken):
    """Another stage sent a payload whose sizes this worker does not expect: the workers differ in model,
    autocast or type of device, or the sender is dishonest."""


class StageExecutor:
    """Runs the steps of one stage.

    Args:
        stage: the stage in this worker's memory.
        number: the index of the stage, 0 .. stages - 1.
        stages: S, the number of stages in the pipeline.
        schedule: a function of the numbers of stages and of micro-batches that returns the schedule; the same
            on all stages.
    """

    def __init__(
        self,
        stage: Stage,
        number: int,
        stages: int,
        *,
        schedule: ScheduleFactory = plan.one_forward_one_backward,
    ) -> None:
        self.stage, self.number, self.stages = stage, number, stages
        self.schedule_for = lru_cache(1)(partial(schedule, stages))  # the number rarely changes

    def run(
        self,
        link: RoundStageLink,
        *,
        seed: int,
        sizes: Sequence[int],
        inputs: Any = None,
        targets: Any = None,
    ) -> StepResult:
        """Run the forward and backward passes of one mini-batch; leave the gradients in `parameter.grad`.

        Args:
            link: the link of this attempt.
            seed: the seed of this step and replica (`random_seeds.derive_step_seed`), the same on all stages.
            sizes: the sizes of the micro-batches (`schedule.divide_samples`), the same on all stages.
            inputs: the inputs of the whole mini-batch, with the samples in the first dimension.  The first
                stage computes with them; the other stages use them only to find out why a computation with
                received values has failed.
            targets: the targets of the whole mini-batch, with the samples in the first dimension, for the
                loss on the last stage.

        Raises:
            LineBroken: the link broke, or another stage sent a payload that does not match its spec or
                that this stage cannot process.  The gradients are then unchanged.
            Exception: the exception that the model or the loss raised; the other stages have been informed.
        """
        try:
            own_inputs = inputs if self.number == 0 else None
            own_targets = targets if self.number == self.stages - 1 else None
            self.stage.begin(seed, sizes, inputs=own_inputs, targets=own_targets)
            with torch.enable_grad():
                return _StepExecution(self, link, sizes, inputs).run()
        except BaseException as error:
            self.stage.abort()
            own_fault = f"stage {self.number}: {type(error).__name__}: {error}"
            link.abort(error.reason if isinstance(error, LineBroken) else own_fault)
            raise


class _StepExecution:
    """One `StageExecutor.run` in progress, with its times so far."""

    def __init__(
        self, executor: StageExecutor, link: RoundStageLink, sizes: Sequence[int], inputs: Any = None
    ) -> None:
        self._inputs = inputs  # to examine errors
        self._stage, self._number, self._link = executor.stage, executor.number, link
        self._sizes = tuple(sizes)
        self._actions = executor.schedule_for(len(self._sizes)).actions[executor.number]
        self._forward_s = self._backward_s = 0.0
        self._waited_s = self._first_sent_s = self._round_trip_s = 0.0

    def run(self) -> StepResult:
        for position, action in enumerate(self._actions):
            if action.kind is plan.ActionKind.FORWARD:
                self._forward(action.micro_batch, self._backward_follows(position))
            else:
                self._backward(action.micro_batch)
        self._sum_tied_gradients()
        self._stage.finish()
        count = max(1, len(self._sizes))
        return StepResult(
            self._stage.loss,
            self._forward_s + self._backward_s,
            self._waited_s,
            self._forward_s / count,
            self._backward_s / count,
            self._round_trip_s,
        )

    def _backward_follows(self, position: int) -> bool:
        """Return whether the forward pass at `position` is followed by the same micro-batch's backward pass.

        If so, the forward pass need not be repeated.
        """
        following = self._actions[position + 1 : position + 2]
        return following == (plan.Action(plan.ActionKind.BACKWARD, self._actions[position].micro_batch),)

    def _forward(self, m: int, backward_follows: bool) -> None:
        samples, received = self._sizes[m], None
        if self._stage.input is not None:
            channel, agreed = plan.activations_channel(m), self._stage.input
            received = self._receive(self._number - 1, channel, agreed, samples)
        began_s = time.perf_counter()
        try:
            sent = self._stage.forward(m, received, backward_follows=backward_follows)
        except Exception as error:  # a user's code may raise anything
            sent = self._substitute_output(m, received, error)
        finish_queued_work(self._stage.device)
        self._forward_s += time.perf_counter() - began_s
        if self._stage.output is not None:
            if m == 0:
                self._first_sent_s = time.perf_counter()
            payload = self._stage.output.encode(sent, samples)
            self._link.send(self._number + 1, plan.activations_channel(m), payload)

    def _backward(self, m: int) -> None:
        samples, received = self._sizes[m], None
        if self._stage.output is not None:
            agreed, asked_s = self._stage.output.gradients, time.perf_counter()
            received = self._receive(self._number + 1, plan.gradients_channel(m), agreed, samples)
            if m == 0 and (now_s := time.perf_counter()) - asked_s > MIN_WAIT_S:
                self._round_trip_s = now_s - self._first_sent_s
        began_s = time.perf_counter()
        sent = self._stage.backward(m, received)
        finish_queued_work(self._stage.device)
        self._backward_s += time.perf_counter() - began_s
        if self._stage.input is not None:
            payload = self._stage.input.gradients.encode(sent, samples)
            self._link.send(self._number - 1, plan.gradients_channel(m), payload)

    def _substitute_output(self, m: int, received: Any, error: Exception) -> Any:
        """Handle an exception in a forward pass.

        If the cause is that received values are not finite, return an output of NaN, so that the step is
        skipped.  Otherwise, raise `LineBroken` if the values from the previous stage are the cause, and
        `error` itself if they are not.
        """
        source, agreed, samples = self._number - 1, self._stage.input, self._sizes[m]
        own = split_batch(self._inputs, self._sizes)[m]
        origin, found = find_fault_origin(
            error, agreed, received, samples, own, lambda other: self._stage.forward_fails(m, other)
        )
        if origin is FaultOrigin.OWN:
            raise error
        text = "stage %d cannot compute with the values that stage %d sent, %s: %s"
        log.warning(text, self._number, source, found, f"{type(error).__name__}: {error}", exc_info=error)
        if origin is FaultOrigin.SENDER:
            raise sender_fault(source, found, error) from error
        return self._stage.substitute_forward(m, received)

    def _sum_tied_gradients(self) -> None:
        """Exchange the gradients of tied parameters with the other stages that hold them, and add them in the
        order of the stages."""
        if not self._sizes:
            return
        own = {tied: self._stage.tied_gradient(tied) for tied in self._stage.tied}
        for tied, gradient in own.items():
            channel, payload = plan.tied_gradients_channel(tied.index), tied.spec.encode(gradient, 1)
            for other in tied.stages:
                if other != self._number:
                    self._link.send(other, channel, payload)
        for tied, gradient in own.items():
            parts = {
                other: gradient
                if other == self._number
                else self._receive(other, plan.tied_gradients_channel(tied.index), tied.spec, 1)
                for other in tied.stages
            }
            self._stage.sum_tied(tied, parts)

    def _receive(self, source: int, channel: Channel, agreed: TensorTreeSpec, samples: int) -> Any:
        began_s = time.perf_counter()
        buffers = self._link.receive(source, channel)
        self._waited_s += time.perf_counter() - began_s
        return _decode_payload(buffers, source, agreed, samples, self._stage.device)


def _decode_payload(
    buffers: PayloadBuffers, source: int, agreed: TensorTreeSpec, samples: int, device: torch.device
) -> Any:
    try:
        return agreed.decode(buffers, samples, device)
    except RemoteProtocolError as error:
        due_bytes = [leaf.payload_bytes(samples) for leaf in agreed.leaves]
        has_sizes = [memoryview(buffer).nbytes for buffer in buffers] == due_bytes
        raise (LineBroken if has_sizes else OtherSizes)(
            f"stage {source} sent a payload that does not match its spec: {error.reason}",
            source,
            remedy="run the same model and the same version of gridtrain on all workers, with the same "
            "autocast on devices of the same type",
        ) from error


def share_tied_parameters(stage: Stage, number: int, line: RoundStageLink) -> None:
    """Replace all copies of each tied parameter with the copy of the first stage that holds it, bit for bit.

    This is necessary if the update of a parameter depends on more than its gradient, because the stages'
    copies would then diverge: a sparse exchange selects different elements in each stage, and a ring of three
    or more replicas adds in an order that depends on the position in the flat vector.

    Raises:
        LineBroken: the link broke, or a received copy does not match its spec or is not finite.
    """
    for tied in stage.tied:
        if number == tied.stages[0]:
            for other in tied.stages[1:]:
                # a copy, because the next update may be applied while the link still holds it
                value = tied.spec.encode(tied.parameter.detach().clone(), 1)
                line.send(other, plan.tied_parameters_channel(tied.index), value)
    for tied in stage.tied:
        if number != tied.stages[0]:
            owner = tied.stages[0]
            buffers = line.receive(owner, plan.tied_parameters_channel(tied.index))
            value = _decode_payload(buffers, owner, tied.spec, 1, stage.device)
            if not bool(torch.isfinite(value).all()):  # it takes effect immediately, without a vote
                raise LineBroken(f"stage {owner} sent a tied parameter that is not finite", owner)
            stage.replace_tied(tied, value)
