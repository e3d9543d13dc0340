"""Layers that wait instead of computing, so that four stages on two cores are as fast as on four machines."""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from typing import Any

import torch
from torch import Tensor, nn

FORWARD_S, BACKWARD_S = 0.010, 0.020

_PR_SET_TIMERSLACK = 29
_TRIED_S, _TRIES = 0.010, 15
_MAX_S = 0.001
"""The largest overhead of autograd that is subtracted; more is caused by other work of the machine."""

_late_s = _forward_over_s = _backward_over_s = 0.0


def sleep_exactly() -> None:
    """Make waits of this thread and of those that it starts exact (Linux).

    The kernel may not delay timers by the usual 50 us any more.  Its remaining delay (0.02 to 0.15 ms, most
    on virtual processors) is measured once, and each wait of `compute_until` is shorter by it.  Then a layer
    is timed alone: torch's time before the layer's clock starts and after it has ended (0.1 ms of a forward,
    0.4 ms of a backward) is subtracted from the layer's time, for gridtrain's and torch's pipelines.
    """
    global _late_s, _forward_over_s, _backward_over_s
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    late_s = []
    for _ in range(_TRIES):
        begun_s = time.monotonic()
        time.sleep(_TRIED_S)
        late_s.append(time.monotonic() - begun_s - _TRIED_S)
    _late_s = min(_TRIED_S, statistics.median(late_s))
    _forward_over_s = _backward_over_s = 0.0
    forward_s, backward_s = time_alone(Waiting(_TRIED_S, _TRIED_S))
    _forward_over_s = min(_MAX_S, max(0.0, forward_s - _TRIED_S))
    _backward_over_s = min(_MAX_S, max(0.0, backward_s - _TRIED_S))


def time_alone(layer: Waiting) -> tuple[float, float]:
    """Return the median durations of forward and backward without a pipeline."""
    forward_s, backward_s = [], []
    row = torch.zeros(1, elements_of(125_000))
    for _ in range(_TRIES):
        x = row.clone().requires_grad_()
        begun_s = time.monotonic()
        out = layer(x)
        between_s = time.monotonic()
        torch.autograd.backward([out], [row])
        forward_s.append(between_s - begun_s)
        backward_s.append(time.monotonic() - between_s)
    return statistics.median(forward_s), statistics.median(backward_s)


def compute_until(until_s: float) -> None:
    """Wait until a time, never shorter, without using the interpreter, like a kernel on a GPU."""
    time.sleep(max(0.0, until_s - _late_s - time.monotonic()))
    while time.monotonic() < until_s:
        pass  # less than the timer's own lateness


class _Clock(threading.local):
    """When this thread's emulated computing ends.

    The durations of a forward and a backward include the time of autograd, of the layer's tensors and of the
    loss, as they do for any model.
    """

    forward_s = 0.0  # the end of the forward of a last layer, for which the loss waits
    begun_s = 0.0  # the begin of a backward, if the loss has seen it
    until_s = 0.0
    is_queued = False  # whether autograd will call `_backward_ends`


_clock = _Clock()


def _backward_begins(_: Tensor) -> None:
    _clock.begun_s = time.monotonic()


def _backward_ends() -> None:
    _clock.is_queued, _clock.begun_s = False, 0.0
    compute_until(_clock.until_s)


class _Slow(torch.autograd.Function):
    """The identity, or an expansion of one number per sample, whose backward takes a given time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, backward_s: float, elements: int) -> Tensor:
        ctx.backward_s, ctx.narrow = backward_s, x.shape[1:] if elements else None
        return x.expand(-1, elements).contiguous() if elements else x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        if not _clock.is_queued:  # the first of a stage's layers
            _clock.is_queued, _clock.until_s = True, (_clock.begun_s or time.monotonic()) - _backward_over_s
            torch.autograd.Variable._execution_engine.queue_callback(_backward_ends)
        _clock.until_s += ctx.backward_s
        return (gradients[0] if ctx.narrow is None else None), torch.zeros(1), None, None


class Waiting(nn.Module):
    """A layer with a given duration for a micro-batch of any size.

    Args:
        elements: elements of a sample's output, if the input has one; 0: as many as the input.
        last: whether `loss_of` follows as a part of the forward.
    """

    def __init__(
        self,
        forward_s: float = FORWARD_S,
        backward_s: float = BACKWARD_S,
        elements: int = 0,
        last: bool = False,
    ) -> None:
        super().__init__()
        self.forward_s, self.backward_s, self.elements, self.last = forward_s, backward_s, elements, last
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        until_s = time.monotonic() + self.forward_s - _forward_over_s
        out: Tensor = _Slow.apply(x, self.weight, self.backward_s, self.elements)  # type: ignore[no-untyped-call]
        if self.last:
            _clock.forward_s = until_s
        elif x.device.type != "meta":
            compute_until(until_s)
        return out


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    loss = out.mean()
    if loss.requires_grad:
        loss.register_hook(_backward_begins)  # type: ignore[no-untyped-call]
    compute_until(_clock.forward_s)
    return loss


def elements_of(payload_bytes: int) -> int:
    """Return the float32 elements of a sample's activations."""
    return payload_bytes // 4
