"""Executes one stage's part of a step: its list of the schedule, over a link to the other stages.

    link  --activations of m-->  Stage.forward(m)   --activations-->  link   to stage s + 1
    link  <--gradients of m----  Stage.backward(m)  <--gradients----  link   from stage s + 1

Sending returns at once and receiving goes on in the background, so both overlap with computing.  A link that
breaks ends the step here at once; the next attempt computes it again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gridtrain.core.messages import Channel
from gridtrain.core.stages import schedule as plan
from gridtrain.errors import ConfigError, LineBroken, RemoteProtocolError
from gridtrain.pipeline.stage import Stage
from gridtrain.pipeline.tensor_tree import TensorTreeSpec, split_batch
from gridtrain.pipeline.validation import FaultOrigin, find_fault_origin, sender_fault

log = logging.getLogger("gridtrain")

PayloadBuffers = Sequence[memoryview]
ScheduleFactory = Callable[[int, int], plan.Schedule]


MIN_WAIT_S = 0.0005
"""A payload that takes less time was not waited for."""


class StageLink(Protocol):
    """Connects one stage with the other stages of its pipeline, for one attempt at one step.

    A stage is named by its number in the pipeline of one replica.  A payload is sent from one stage to
    another on one channel (`gridtrain.core.stages.schedule`); each channel is used once.  `receive` must
    never return a payload of another attempt.
    """

    def send(self, stage: int, channel: Channel, buffers: PayloadBuffers) -> None:
        """Send a payload; returns without waiting for the receiver or the network.

        The buffers are contiguous, of format "B", and are not changed until the link is dropped: the link may
        keep them without copying.  `buffers` may be empty, and so may each of them.

        Raises:
            LineBroken: the attempt is over.
        """
        ...

    def receive(self, stage: int, channel: Channel) -> PayloadBuffers:
        """The payload that `stage` sent to this stage on `channel`; waits until it has arrived.

        The caller does not write to the buffers, and checks their number and sizes
        (`TensorTreeSpec.decode`); the link bounds them by what it can hold.

        Raises:
            LineBroken: it will not arrive: a stage failed, left, aborted, or timed out.  All stages that wait
                are told at once, wherever in the pipeline the fault is.
        """
        ...

    def abort(self, reason: str) -> None:
        """This stage cannot go on: `receive` and `send` raise `LineBroken(reason, this stage)` on all stages.

        May be called more than once, and after the link has broken; never raises.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step of one stage.

    Attributes:
        loss: the mini-batch's mean on the last stage; None elsewhere, and without samples.
        computed_s: time in forward and backward.
        waited_s: time waiting for payloads: the bubble and slow links.
        sent_bytes: payload bytes given to the link.
        forward_s, backward_s: mean of a micro-batch, rematerialisation included.
        round_trip_s: from sending the first micro-batch to the next stage until its gradient is back; 0 if
            unknown, because nothing was waited for or there is no next stage.
    """

    loss: float | None
    computed_s: float
    waited_s: float
    sent_bytes: int
    forward_s: float
    backward_s: float
    round_trip_s: float = 0.0


class StageExecutor:
    """Runs the steps of one stage.

    Args:
        stage: in this worker's memory.
        number: of the stage, 0 .. stages - 1.
        stages: S, of the whole pipeline.
        schedule: from S and M to a schedule; equal on all stages.

    Raises:
        ConfigError: the stage was made for another place in the pipeline.
    """

    def __init__(
        self,
        stage: Stage,
        number: int,
        stages: int,
        *,
        schedule: ScheduleFactory = plan.one_forward_one_backward,
    ) -> None:
        if (number == stages - 1) is not (stage.output is None) or (number == 0) is not (stage.input is None):
            raise ConfigError(
                f"stage {number} of {stages} was made with input {stage.input} and output {stage.output}",
                remedy="only the first stage has no `input`, and only the last one no `output`",
            )
        if any(number not in tied.stages for tied in stage.tied):
            raise ConfigError(
                f"stage {number} was given a tied parameter that only stages "
                f"{[tied.stages for tied in stage.tied]} hold",
                remedy="TiedParameter.stages must name every stage that holds a copy",
            )
        self.stage, self.number, self.stages = stage, number, stages
        self._schedule = schedule
        self._cached_schedules: dict[int, plan.Schedule] = {}

    def schedule_for(self, micro_batches: int) -> plan.Schedule:
        """The schedule, cached because it is the same in nearly all steps."""
        if micro_batches not in self._cached_schedules:
            self._cached_schedules = {micro_batches: self._schedule(self.stages, micro_batches)}
        return self._cached_schedules[micro_batches]

    def run(
        self,
        link: StageLink,
        *,
        seed: int,
        sizes: Sequence[int],
        inputs: Any = None,
        targets: Any = None,
        loss_scale: float = 1.0,
    ) -> StepResult:
        """Forward and backward of one mini-batch; afterwards the gradients are in `parameter.grad`.

        Args:
            link: of this attempt.
            seed: of this step and replica, equal on all stages (`random_seeds.derive_step_seed`).
            sizes: of the micro-batches (`schedule.divide_samples`), equal on all stages.
            inputs: of the whole mini-batch, samples first; the first stage computes with them, others use
                them to find out why received values cannot be computed with.
            targets: likewise, for the last stage's loss.
            loss_scale: of a GradScaler, used by the last stage: gradients are multiplied by it.

        Raises:
            LineBroken: the link broke, or a payload is not as agreed.  Gradients are as before.
            Exception: what the model or the loss raised, after the other stages have been told.
        """
        try:
            first, last = self.number == 0, self.number == self.stages - 1
            self.stage.begin(
                seed,
                sizes,
                inputs=inputs if first else None,
                targets=targets if last else None,
                loss_scale=loss_scale,
            )
            with torch.enable_grad():
                return _StepExecution(self, link, sizes, inputs).run()
        except LineBroken as broken:
            self.stage.abort()
            link.abort(broken.reason)
            raise
        except BaseException as error:
            self.stage.abort()
            link.abort(f"stage {self.number}: {type(error).__name__}: {error}")
            raise


class _StepExecution:
    """The state of one `StageExecutor.run`: times and bytes so far."""

    def __init__(
        self, executor: StageExecutor, link: StageLink, sizes: Sequence[int], inputs: Any = None
    ) -> None:
        self._inputs = inputs  # to examine errors
        self._stage, self._number, self._link = executor.stage, executor.number, link
        self._sizes = tuple(sizes)
        self._actions = executor.schedule_for(len(self._sizes)).actions[executor.number]
        self._spent_s = {plan.ActionKind.FORWARD: 0.0, plan.ActionKind.BACKWARD: 0.0}
        self._waited_s, self._sent_bytes = 0.0, 0
        self._first_sent_s = self._round_trip_s = 0.0

    def run(self) -> StepResult:
        for position, action in enumerate(self._actions):
            if action.kind is plan.ActionKind.FORWARD:
                self._forward(action.micro_batch, self._backward_follows(position))
            else:
                self._backward(action.micro_batch)
        self._sum_tied_gradients()
        self._stage.finish()
        count = max(1, len(self._sizes))
        forward_s, backward_s = (
            self._spent_s[plan.ActionKind.FORWARD],
            self._spent_s[plan.ActionKind.BACKWARD],
        )
        return StepResult(
            self._stage.loss,
            forward_s + backward_s,
            self._waited_s,
            self._sent_bytes,
            forward_s / count,
            backward_s / count,
            self._round_trip_s,
        )

    def _backward_follows(self, position: int) -> bool:
        """Whether this micro-batch's backward is the next action, so that nothing is computed again."""
        following = self._actions[position + 1 : position + 2]
        return following == (plan.Action(plan.ActionKind.BACKWARD, self._actions[position].micro_batch),)

    def _forward(self, m: int, backward_follows: bool) -> None:
        samples, received = self._sizes[m], None
        if self._stage.input is not None:
            received = self._receive(
                self._number - 1, plan.activations_channel(m), self._stage.input, samples
            )
        began_s = time.perf_counter()
        try:
            sent = self._stage.forward(m, received, backward_follows=backward_follows)
        except Exception as error:  # a user's code may raise anything
            sent = self._substitute_output(m, received, error)
        self._spent_s[plan.ActionKind.FORWARD] += time.perf_counter() - began_s
        if self._stage.output is not None:
            if m == 0:
                self._first_sent_s = time.perf_counter()
            self._send(
                self._number + 1, plan.activations_channel(m), self._stage.output.encode(sent, samples)
            )

    def _backward(self, m: int) -> None:
        samples, received = self._sizes[m], None
        if self._stage.output is not None:
            agreed, asked_s = self._stage.output.gradients, time.perf_counter()
            received = self._receive(self._number + 1, plan.gradients_channel(m), agreed, samples)
            if m == 0 and (now_s := time.perf_counter()) - asked_s > MIN_WAIT_S:
                self._round_trip_s = now_s - self._first_sent_s
        began_s = time.perf_counter()
        sent = self._stage.backward(m, received)
        self._spent_s[plan.ActionKind.BACKWARD] += time.perf_counter() - began_s
        if self._stage.input is not None:
            self._send(
                self._number - 1, plan.gradients_channel(m), self._stage.input.gradients.encode(sent, samples)
            )

    def _substitute_output(self, m: int, received: Any, error: Exception) -> Any:
        """A forward raised `error`: return a substitute output, or raise what ends the step."""
        source, agreed, samples = self._number - 1, self._stage.input, self._sizes[m]
        own = split_batch(self._inputs, self._sizes)[m]
        origin, found = find_fault_origin(
            error, agreed, received, samples, own, lambda other: self._stage.forward_fails(m, other)
        )
        if origin is FaultOrigin.OWN:
            raise error
        text = "stage %d cannot compute with what stage %d sent, %s: %s"
        log.warning(text, self._number, source, found, f"{type(error).__name__}: {error}", exc_info=error)
        if origin is FaultOrigin.SENDER:
            raise sender_fault(source, found, error) from error
        return self._stage.substitute_forward(m, received)

    def _sum_tied_gradients(self) -> None:
        """Each holder sends its part to all others; all add the parts in the order of the stages."""
        if not self._sizes:
            return
        own = {tied: self._stage.tied_gradient(tied) for tied in self._stage.tied}
        for tied, gradient in own.items():
            for other in tied.stages:
                if other != self._number:
                    self._send(other, plan.tied_gradients_channel(tied.index), tied.spec.encode(gradient, 1))
        for tied, gradient in own.items():
            parts = {
                other: gradient
                if other == self._number
                else self._receive(other, plan.tied_gradients_channel(tied.index), tied.spec, 1)
                for other in tied.stages
            }
            self._stage.sum_tied(tied, parts)

    def _send(self, to: int, channel: Channel, buffers: PayloadBuffers) -> None:
        self._sent_bytes += sum(buffer.nbytes for buffer in buffers)
        self._link.send(to, channel, buffers)

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
        raise LineBroken(
            f"stage {source} sent a payload that is not as agreed: {error.reason}",
            source,
            remedy="all workers must run the same model and the same version of gridtrain",
        ) from error


def share_tied_parameters(stage: Stage, number: int, line: StageLink) -> None:
    """After an update: the lowest stage's copy of every tied parameter replaces the others', bit for bit.

    Needed where the update of a parameter depends on more than its own gradient, so that two stages' copies
    would part: a sparse exchange selects differently in each stage, and a ring over three or more replicas
    adds up in another order at another place of the flat vector.

    Raises:
        LineBroken: the line broke, or what arrived does not fit.
    """
    for tied in stage.tied:
        if number == tied.stages[0]:
            for other in tied.stages[1:]:
                # a copy: the next update may come while the line still holds it
                value = tied.spec.encode(tied.parameter.detach().clone(), 1)
                line.send(other, plan.tied_parameters_channel(tied.index), value)
    for tied in stage.tied:
        if number != tied.stages[0]:
            owner = tied.stages[0]
            buffers = line.receive(owner, plan.tied_parameters_channel(tied.index))
            value = _decode_payload(buffers, owner, tied.spec, 1, stage.device)
            if not bool(torch.isfinite(value).all()):  # it counts at once: no vote is about it
                raise LineBroken(f"stage {owner} sent a tied parameter that is not finite", owner)
            stage.replace_tied(tied, value)
