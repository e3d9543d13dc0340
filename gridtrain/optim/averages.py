"""Buffers (batch-norm statistics and their counters), made equal every N steps (promise 1).

Decides when they travel, a function of the global step alone, and in which form: as one more dense vector
in the same round, so that they commit or abort together with the update.

    contribution   float buffers | 1.0 | integer buffers of rank 0 as 16-bit words, of others as zeros
    the sum / the middle element: the average            exactly rank 0's words

A worker whose statistics are not finite puts zeros for all, and gets the others' average back.
"""

from __future__ import annotations

import numpy as np
from torch import nn

from gridtrain.optim import state_sync
from gridtrain.runtime.buffers import DenseWorkspace
from gridtrain.runtime.plan import StepPlan
from gridtrain.sparsify.merge import largest_summable


class BufferAverage:
    """The averages of one worker's model; `every`: steps between two of them, 0 for never."""

    def __init__(self, model: nn.Module, every: int) -> None:
        self._model = model
        self._every = every if state_sync.has_buffers(model) else 0

    def describe(self) -> str:
        """For comparison and for people: which buffers there are, and when they are averaged."""
        text, _ = state_sync.buffers_digest(self._model)
        return f"{text}, averaged every {self._every} steps" if self._every else text

    def workspace(self, plan: StepPlan) -> DenseWorkspace | None:
        """This worker's part in the average that is due in this step; None if none is."""
        if not self._every or (plan.step + 1) % self._every:
            return None
        floats_N = state_sync.buffers_vector(self._model)
        usable = bool((np.abs(floats_N) <= largest_summable(plan.world_size)).all())
        words_M = state_sync.integer_buffers_vector(self._model).view(np.uint16).astype(np.float32)
        parts = (
            floats_N if usable else np.zeros_like(floats_N),
            np.full(1, usable, np.float32),
            words_M if plan.rank == 0 else np.zeros_like(words_M),
        )
        return DenseWorkspace(np.concatenate(parts), plan.world_size)

    def load(self, workspace: DenseWorkspace) -> None:
        """After the commit: the average of those who took part, and rank 0's integers."""
        n = state_sync.buffers_vector(self._model).size
        sums_N, contributors, words_M = np.split(workspace.update_N, (n, n + 1))
        if contributors[0] > 0:
            state_sync.load_buffers_vector(self._model, sums_N / contributors[0])
        integers = np.ascontiguousarray(words_M.astype(np.uint16)).view(np.int64)
        state_sync.load_integer_buffers_vector(self._model, integers)
