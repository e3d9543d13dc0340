"""Restores batch norm's running statistics after a batch with values that are not finite.

begin_turn            the statistics are copied
the batch             values that are not finite reach the statistics (in the forward pass) and the gradient
the step is skipped   the copy is restored; otherwise all later batches and the final model would be affected
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
        """Copy the statistics; call this method before each step."""
        buffers = [buffer for norm in self._norms for buffer in norm.buffers(recurse=False)]
        if [id(buffer) for buffer in buffers] != [id(buffer) for buffer, _ in self._saved]:
            self._saved = [(buffer, buffer.clone()) for buffer in buffers]
        elif self._saved:
            torch._foreach_copy_([copy for _, copy in self._saved], buffers)

    @torch.no_grad()
    def restore(self) -> None:
        """Load the copies made by the latest `save`."""
        for buffer, copy in self._saved:
            buffer.copy_(copy)
