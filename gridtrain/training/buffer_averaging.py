"""Averages batch norm's statistics and other buffers of a model over the workers every N steps.

They are also averaged in the last step of the run, so that all workers evaluate the same model.  The buffers
are summed as one more dense vector in the step's round, so that they commit or abort together with the
update.  The vector consists of:

    elements              the contribution of a member             what the sum shows
    float buffers         their values, or zeros                   the sum over the contributors
    1                     1.0                                      the number of members
    1 per float buffer    1.0 if its values are sent, else 0.0     the number of contributors
    32 per float buffer   the bits of the buffer's digest          whether the digests of all members agree
    integer buffers       rank 0: 16-bit words; others: zeros      the words of rank 0

The contributors of a float buffer are the members that send its values.  A worker on which a buffer is not
finite, or too large to be summed, sends zeros in place of this buffer and receives the average of the
contributors.  A buffer that is equal on all workers (a mask, frequencies) is left unchanged, which preserves
infinite values and full precision.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor, nn

from gridtrain.runtime.buffers.collective_buffers import DenseRingBuffer
from gridtrain.runtime.mailbox.step_plan import StepPlan
from gridtrain.sparsify.merge import FloatArray, largest_summable
from gridtrain.training.checkpoint import model_buffers, nested_values

_DIGEST_BITS = 32
_HEAD = 1 + _DIGEST_BITS


class BufferAveraging:
    """Averages the buffers of one model every `every` steps and in the last one; 0 disables averaging."""

    def __init__(self, model: nn.Module, every: int) -> None:
        self._model = model
        self._every = every if model_buffers.buffers_of(model) else 0

    def describe(self) -> str:
        """Return a description of the buffers and of the averaging interval, which must be equal on all
        workers."""
        text = model_buffers.describe_buffers(self._model)
        return f"{text}, averaged every {self._every} steps" if self._every else text

    def is_due(self, plan: StepPlan) -> bool:
        """Whether the buffers are averaged in this step."""
        return bool(self._every) and (plan.is_last or (plan.step + 1) % self._every == 0)

    def make_collective_buffer(self, plan: StepPlan) -> DenseRingBuffer | None:
        """Return the collective buffer with this worker's contribution to the averages; None if no averages
        are due in this step."""
        if not self.is_due(plan):
            return None
        limit = largest_summable(plan.world_size)
        floats: list[FloatArray] = []
        heads: list[FloatArray] = [np.ones(1, np.float32)]
        for buffer in model_buffers.float_buffers(self._model):
            values_N = buffer.detach().cpu().reshape(-1).to(torch.float32).numpy()
            usable = bool((np.abs(values_N) <= limit).all())
            floats.append(values_N if usable else np.zeros_like(values_N))
            heads += [np.full(1, usable, np.float32), _digest_bits(buffer)]
        words_M = model_buffers.integer_buffers_vector(self._model).view(np.uint16).astype(np.float32)
        parts = (*floats, *heads, words_M if plan.rank == 0 else np.zeros_like(words_M))
        return DenseRingBuffer(np.concatenate(parts), plan.world_size)

    def apply(self, buffer: DenseRingBuffer) -> None:
        """After the round is committed, load the integer buffers of rank 0 and, for each float buffer that
        differs between the members, the average over its contributors."""
        buffers = model_buffers.float_buffers(self._model)
        n = sum(buffer.numel() for buffer in buffers)
        sums_N, members, heads, words_M = np.split(buffer.update, (n, n + 1, n + 1 + _HEAD * len(buffers)))
        pieces = np.split(sums_N, np.cumsum([buffer.numel() for buffer in buffers])[:-1]) if buffers else []
        for own, sum_N, head in zip(buffers, pieces, heads.reshape(-1, _HEAD), strict=True):
            contributors, ones = head[0], head[1:]
            if contributors > 0 and not np.isin(ones, (0.0, members[0])).all():
                model_buffers.assign(own, torch.from_numpy(sum_N / contributors).view(own.shape))
        integers = np.ascontiguousarray(words_M.astype(np.uint16)).view(np.int64)
        model_buffers.load_integer_buffers_vector(self._model, integers)


def _digest_bits(buffer: Tensor) -> FloatArray:
    """Return the bits of a buffer's digest as (32,) zeros and ones.  If the buffer is equal on all members,
    the sum of each bit over the members is 0 or their number."""
    digest = hashlib.blake2b(nested_values.tensor_bytes(buffer).data, digest_size=_DIGEST_BITS // 8).digest()
    return np.unpackbits(np.frombuffer(digest, np.uint8)).astype(np.float32)
