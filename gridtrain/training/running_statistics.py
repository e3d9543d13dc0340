"""Restores batch norm's running statistics after a batch that must not change them.

begin_turn            the worker copies the statistics
the batch             values that are not finite reach the statistics (in the forward pass) and the gradient
the step is skipped   a worker whose gradient caused this restores the copy; otherwise the values would
                      affect all later batches and the final model

In a turn without samples, the worker restores the copy in each call, because the two samples of a stand-in,
repeated for many local steps, would replace the statistics.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class RunningStatistics:
    """The running statistics and batch counters of the batch norms and instance norms in `model`."""

    def __init__(self, model: nn.Module) -> None:
        self._norms = [module for module in model.modules() if isinstance(module, _NormBase)]
        self._saved: list[tuple[Tensor, Tensor]] = []  # each buffer, and its copy

    @torch.no_grad()
    def save(self) -> None:
        """Copy the statistics.  Call this method at the beginning of each turn."""
        buffers = [buffer for norm in self._norms for buffer in norm.buffers(recurse=False)]
        if [id(buffer) for buffer in buffers] != [id(buffer) for buffer, _ in self._saved]:
            self._saved = [(buffer, buffer.clone()) for buffer in buffers]
        elif self._saved:
            torch._foreach_copy_([copy for _, copy in self._saved], buffers)

    @torch.no_grad()
    def restore(self) -> None:
        """Set the statistics to the copies that the latest `save` made."""
        for buffer, copy in self._saved:
            buffer.copy_(copy)
