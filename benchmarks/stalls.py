"""The emulated computing and stalls of `stragglers.py`, which hivemind's workers import, too."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from random import Random

import torch
from torch import nn

from rivals.contract import Rank

WARM_UP_BATCHES, BATCH_SIZE = 20, 8
ONE_COMPUTE_S, ONE_STALL_S, ONE_EVERY = 0.02, 3.0, 40


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))


@dataclass(frozen=True, kw_only=True)
class Straggling(Rank):
    """A worker of hivemind, the last of which may stall."""

    batches: int
    is_stalled: bool


class Stalls:
    """The emulated computation of a worker, and its stalls."""

    def __init__(self, *, every: int = 0, stall_s: float = 0.0, share: float = 0.0, seed: int = 0) -> None:
        self._every, self._stall_s, self._share, self._dice = every, stall_s, share, Random(seed)
        self._awake_s = self._next_awake_s() if share else math.inf
        self._batches = 0

    def _next_awake_s(self) -> float:
        return self._dice.expovariate(self._share / (self._stall_s * (1 - self._share)))

    def batch(self, compute_s: float) -> None:
        self._batches += 1
        time.sleep(compute_s)  # the emulated computation
        self._awake_s -= compute_s
        if self._every and self._batches > WARM_UP_BATCHES and self._batches % self._every == 0:
            time.sleep(self._stall_s)  # the stall
        if self._awake_s <= 0:
            time.sleep(self._dice.expovariate(1 / self._stall_s))
            self._awake_s = self._next_awake_s()
