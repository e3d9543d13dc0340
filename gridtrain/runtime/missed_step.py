"""A committed step from which this worker's stalled trainer was absent, and which it still has to apply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.buffers.buckets import UpdateBuffer
from gridtrain.sparsify.merge import FloatArray, TruncatedEntries


@dataclass(frozen=True, slots=True)
class MissedStep:
    """The effect of a missed step on the model and on this worker's residual.

    Attributes:
        settings: the optimizer settings with which the other members apply the step.
        update: the update, dense or sparse; None for a skipped step.
        truncated: the entries that this worker's merges truncated, which belong to its residual.
        rest_N: this worker's rounding errors in a dense exchange, which belong to its residual; None if the
            exchange does not round or the step is skipped.
    """

    step: int
    settings: bytes
    update: FloatArray | SparseVector | None
    truncated: Sequence[TruncatedEntries] = ()
    rest_N: FloatArray | None = None

    @classmethod
    def of(cls, step: int, settings: bytes, buffer: UpdateBuffer) -> MissedStep:
        """Return the missed step whose complete update is in `buffer`."""
        return cls(step, settings, buffer.update, buffer.truncated, buffer.rest_N)

    @property
    def nbytes(self) -> int:
        """The size of the arrays in memory."""
        arrays = [array for entries in self.truncated for array in entries]
        arrays += [] if self.rest_N is None else [self.rest_N]
        match self.update:
            case None:
                pass
            case SparseVector(indices, values):
                arrays += [indices, values]
            case dense_N:
                arrays.append(dense_N)
        return sum(int(array.nbytes) for array in arrays)
