"""One stage's part of a step: works through its list of the schedule, over a narrow line to the other stages.

Decides nothing: the order is `protocol.schedule`'s, the arithmetic is `stage`'s, how payloads travel is the
line's.  Never opens a socket and never retries; a line that breaks ends the step here at once.

    Line  --activations of m-->  Stage.forward(m)   --activations-->  Line   to stage s + 1
    Line  <--gradients of m----  Stage.backward(m)  <--gradients----  Line   from stage s + 1

Sending returns at once and receiving goes on in the background, so both overlap with computing.
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
"""Whoever gets a payload in less time has not waited for it."""


class StageLink(Protocol):
    """What connects one stage with the other stages of its pipeline, for one attempt at one step.

    A stage is named by its number (`protocol.seats`: the pipeline of one replica).  A payload is what one
    stage says to another on one channel; on each channel it says one thing, once.  The kinds of channels are
    `protocol.schedule.Payload`.  A payload of another attempt must never come out of `receive`.
    """

    def send(self, stage: int, channel: Channel, buffers: PayloadBuffers) -> None:
        """Hand over a payload; returns without waiting for the receiver or the network.

        The buffers are contiguous, of format "B", and stay as they are until the line is dropped; the line
        may keep them without copying, and their memory lives as long as it does.  There may be none
        (`buffers` empty) and empty ones; both arrive as they were sent.

        Raises:
            LineBroken: the attempt is over.
        """
        ...

    def receive(self, stage: int, channel: Channel) -> PayloadBuffers:
        """The payload that `stage` sent to this stage on `channel`; waits until it is there.

        The buffers' memory lives as long as the caller holds them, and the caller does not write to it.
        Number and sizes of the buffers are the caller's to check (`trees.Spec.decode`); the line bounds
        them to what it can hold.

        Raises:
            LineBroken: it will not come: a stage failed, left, aborted, or was silent for too long.  All
                stages that wait are told at once, wherever in the pipeline the fault lies.
        """
        ...

    def abort(self, reason: str) -> None:
        """This stage cannot go on: everyone's `receive` and `send` raise `LineBroken(reason, this stage)`.

        May be called more than once, and after the line has broken; never raises.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """Of one step of one stage.

    Attributes:
        loss: the mini-batch's mean on the last stage, None elsewhere and without samples.
        computed_s: spent in forward and backward.
        waited_s: spent waiting for payloads: the bubble and slow links.
        sent_bytes: payload bytes handed to the line.
        forward_s: the mean of a micro-batch; `backward_s`: likewise, re-materialisation included.
        turn_s: from the first micro-batch's departure to the next stage until its gradient is back; 0: not
            known, as nobody waited for it, or there is no next stage.
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
        stage: what this worker holds.
        number: which stage it is, 0 .. stages - 1.
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
                remedy="the first stage alone has no `input`, the last one alone no `output`",
            )
        if any(number not in tied.stages for tied in stage.tied):
            raise ConfigError(
                f"stage {number} was given a tied parameter that only stages "
                f"{[tied.stages for tied in stage.tied]} hold",
                remedy="Tied.stages names every stage that holds a copy",
            )
        self.stage, self.number, self.stages = stage, number, stages
        self._schedule = schedule
        self._cached_schedules: dict[int, plan.Schedule] = {}

    def schedule_for(self, micro_batches: int) -> plan.Schedule:
        """The schedule; it is the same in nearly all steps."""
        if micro_batches not in self._cached_schedules:
            self._cached_schedules = {micro_batches: self._schedule(self.stages, micro_batches)}
        return self._cached_schedules[micro_batches]

    def run(
        self,
        line: StageLink,
        *,
        seed: int,
        sizes: Sequence[int],
        inputs: Any = None,
        targets: Any = None,
        loss_scale: float = 1.0,
    ) -> StepResult:
        """Forward and backward of one mini-batch; afterwards the gradients are in `parameter.grad`.

        Args:
            line: of this attempt.
            seed: of this step and replica, equal on all stages (`randomness.seed_of_step`).
            sizes: of the micro-batches (`protocol.schedule.divide`), equal on all stages.
            inputs: of the whole mini-batch, samples first; the first stage alone computes with it, others
                look where what they were sent cannot be computed with.
            targets: likewise, for the last stage's loss.
            loss_scale: a GradScaler's, read by the last stage alone; gradients are that much larger.

        Raises:
            LineBroken: from the line, or what arrived does not fit what was agreed.  Gradients are as before.
            Exception: what the model or the loss raised, after the others have been told.
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
                return _StepExecution(self, line, sizes, inputs).run()
        except LineBroken as broken:
            self.stage.abort()
            line.abort(broken.reason)
            raise
        except BaseException as error:
            self.stage.abort()
            line.abort(f"stage {self.number}: {type(error).__name__}: {error}")
            raise


class _StepExecution:
    """The state of one `run`: what the clock showed and what was sent."""

    def __init__(
        self, runner: StageExecutor, line: StageLink, sizes: Sequence[int], inputs: Any = None
    ) -> None:
        self._inputs = inputs  # to look at where something goes wrong
        self._stage, self._number, self._line = runner.stage, runner.number, line
        self._sizes = tuple(sizes)
        schedule = runner.schedule_for(len(self._sizes))
        self._actions = schedule.actions[runner.number]
        self._last = runner.number == runner.stages - 1
        self._spent_s = {plan.ActionKind.FORWARD: 0.0, plan.ActionKind.BACKWARD: 0.0}
        self._waited_s, self._sent_bytes = 0.0, 0
        self._left_s = self._turn_s = 0.0

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
            self._turn_s,
        )

    def _backward_follows(self, position: int) -> bool:
        """Whether the backward follows with nothing between: then nothing is to be computed anew."""
        following = self._actions[position + 1 : position + 2]
        return following == (plan.Action(plan.ActionKind.BACKWARD, self._actions[position].micro_batch),)

    def _forward(self, m: int, backward_follows: bool) -> None:
        samples, received = self._sizes[m], None
        if self._stage.input is not None:
            received = self._receive(
                self._number - 1, plan.activations_channel(m), self._stage.input, samples
            )
        begun_s = time.perf_counter()
        try:
            sent = self._stage.forward(m, received, backward_follows=backward_follows)
        except Exception as error:  # a user's code may raise anything
            sent = self._substitute_output(m, received, error)
        self._spent_s[plan.ActionKind.FORWARD] += time.perf_counter() - begun_s
        if self._stage.output is not None:
            if m == 0:
                self._left_s = time.perf_counter()
            self._send(
                self._number + 1, plan.activations_channel(m), self._stage.output.encode(sent, samples)
            )

    def _backward(self, m: int) -> None:
        samples, received = self._sizes[m], None
        if self._stage.output is not None:
            agreed, asked_s = self._stage.output.gradients, time.perf_counter()
            received = self._receive(self._number + 1, plan.gradients_channel(m), agreed, samples)
            if m == 0 and (now_s := time.perf_counter()) - asked_s > MIN_WAIT_S:
                self._turn_s = now_s - self._left_s
        begun_s = time.perf_counter()
        sent = self._stage.backward(m, received)
        self._spent_s[plan.ActionKind.BACKWARD] += time.perf_counter() - begun_s
        if self._stage.input is not None:
            self._send(
                self._number - 1, plan.gradients_channel(m), self._stage.input.gradients.encode(sent, samples)
            )

    def _substitute_output(self, m: int, received: Any, error: Exception) -> Any:
        """What goes on instead of an output that could not be computed; raises what the step ends with."""
        source, agreed, samples = self._number - 1, self._stage.input, self._sizes[m]
        own = split_batch(self._inputs, self._sizes)[m]
        verdict, found = find_fault_origin(
            error, agreed, received, samples, own, lambda other: self._stage.forward_fails(m, other)
        )
        if verdict is FaultOrigin.OWN:
            raise error
        text = "stage %d cannot compute with what stage %d sent, %s: %s"
        log.warning(text, self._number, source, found, f"{type(error).__name__}: {error}", exc_info=error)
        if verdict is FaultOrigin.SENDER:
            raise sender_fault(source, found, error) from error
        return self._stage.substitute_forward(m, received)

    def _sum_tied_gradients(self) -> None:
        """Each holder tells all others its part; all add them up in the order of the stages."""
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
        self._line.send(to, channel, buffers)

    def _receive(self, source: int, channel: Channel, agreed: TensorTreeSpec, samples: int) -> Any:
        begun_s = time.perf_counter()
        buffers = self._line.receive(source, channel)
        self._waited_s += time.perf_counter() - begun_s
        return _decode_payload(buffers, source, agreed, samples, self._stage.device)


def _decode_payload(
    buffers: PayloadBuffers, source: int, agreed: TensorTreeSpec, samples: int, device: torch.device
) -> Any:
    try:
        return agreed.decode(buffers, samples, device)
    except RemoteProtocolError as error:
        raise LineBroken(
            f"stage {source} sent what was not agreed: {error.reason}",
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
