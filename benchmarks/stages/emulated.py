"""Stages whose computing is waiting, as if each had a machine of its own.

A waiting stage uses no processor, so four stages on two cores are as fast as four machines, but for the work
of the pipeline itself.
"""

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
_MOST_S = 0.001
"""More than that is no overhead of autograd's, but a machine with other work."""

_late_s = _forward_over_s = _backward_over_s = 0.0


def sleep_exactly() -> None:
    """This thread and those that it makes: waits end when they should, not up to 50 us later (Linux).

    What the kernel is late all the same (0.02 to 0.15 ms, most where a virtual processor has to be woken) is
    measured once, and each wait of `compute_until` is so much shorter.  Then a layer is called by itself, as
    one would time any: what torch takes before the layer's own clock begins and after it has ended (0.1 ms
    of a forward, 0.4 ms of a backward) is taken off its time, for ours and for torch's pipelines.
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
    forward_s, backward_s = by_itself(Emulated(_TRIED_S, _TRIED_S))
    _forward_over_s = min(_MOST_S, max(0.0, forward_s - _TRIED_S))
    _backward_over_s = min(_MOST_S, max(0.0, backward_s - _TRIED_S))


def by_itself(layer: Emulated) -> tuple[float, float]:
    """What a forward and a backward take, called with torch alone: medians, in seconds."""
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
    """As a kernel that runs until then and leaves the interpreter alone; never shorter."""
    time.sleep(max(0.0, until_s - _late_s - time.monotonic()))
    while time.monotonic() < until_s:
        pass  # less than the timer's own lateness


class _Clock(threading.local):
    """When this thread's computing ends.

    What autograd, the layer's own tensors and the loss take is part of a forward's 10 ms and a backward's 20,
    as it is of any model's: the layer called by itself takes just that long, and its backward too.
    """

    forward_s = 0.0  # of a last layer, whose loss ends it
    begun_s = 0.0  # a backward's, where the loss has seen it
    until_s = 0.0
    asked = False  # autograd was asked to say when it is through


_clock = _Clock()


def _backward_begins(_: Tensor) -> None:
    _clock.begun_s = time.monotonic()


def _backward_is_through() -> None:
    _clock.asked, _clock.begun_s = False, 0.0
    compute_until(_clock.until_s)


class _Slow(torch.autograd.Function):
    """The identity; or one number for each sample, made so many.  Its backward ends when it should."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, backward_s: float, elements: int) -> Tensor:
        ctx.backward_s, ctx.narrow = backward_s, x.shape[1:] if elements else None
        return x.expand(-1, elements).contiguous() if elements else x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        if not _clock.asked:  # the first of a stage's layers
            _clock.asked, _clock.until_s = True, (_clock.begun_s or time.monotonic()) - _backward_over_s
            torch.autograd.Variable._execution_engine.queue_callback(_backward_is_through)
        _clock.until_s += ctx.backward_s
        return (gradients[0] if ctx.narrow is None else None), torch.zeros(1), None, None


class Emulated(nn.Module):
    """A layer that takes so long for a micro-batch, whatever its size.

    Args:
        elements: of a sample's output, where the input has one; 0: as many as come in.
        last: `loss_of` follows, and is part of the forward.
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
    """float32 elements of a sample's activations."""
    return payload_bytes // 4
