"""gridtrain: train one PyTorch model together, over plain sockets, peer to peer.

    grid = gridtrain.join()
    optimizer = grid.optimizer(optimizer, model, exchange=gridtrain.GTopK(density=0.01, momentum=0.9))
    for batch in grid.batches(dataset, batch_size=32, epochs=3):
        loss = ...; loss.backward(); optimizer.step(); optimizer.zero_grad()

This module is a lazy facade: importing it, or `gridtrain.wire`, never loads torch.
"""

from __future__ import annotations

import importlib
import os as _os
from typing import TYPE_CHECKING, Any

from gridtrain._version import __version__
from gridtrain.config import Auto, Deadlines, Dense, GTopK, LocalSteps, Overlap, TopK
from gridtrain.errors import (
    ConfigError,
    CoordinatorUnreachable,
    GridtrainError,
    JoinRefused,
    LocalProtocolError,
    RemoteProtocolError,
    RunPaused,
)
from gridtrain.extras import require_torch
from gridtrain.protocol.local_steps import propose_local_steps

if TYPE_CHECKING:
    from gridtrain.optim.grid import Grid, join
    from gridtrain.optim.wrapper import GridOptimizer
    from gridtrain.runtime.local import local

_LAZY = {
    "join": "gridtrain.optim.grid",
    "Grid": "gridtrain.optim.grid",
    "GridOptimizer": "gridtrain.optim.wrapper",
    "local": "gridtrain.runtime.local",
}

__all__ = [
    "Auto",
    "ConfigError",
    "CoordinatorUnreachable",
    "Deadlines",
    "Dense",
    "GTopK",
    "Grid",
    "GridOptimizer",
    "GridtrainError",
    "JoinRefused",
    "LocalProtocolError",
    "LocalSteps",
    "Overlap",
    "RemoteProtocolError",
    "RunPaused",
    "TopK",
    "__version__",
    "join",
    "local",
    "propose_local_steps",
]


if "GRIDTRAIN_COORDINATOR" in _os.environ:
    # Started by `gridtrain worker`, which passes Ctrl-C on: it may come while torch is being imported.
    from gridtrain.runtime.hooks import install_error_hook as _speak_plainly

    _speak_plainly()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'gridtrain' has no attribute {name!r}")
    require_torch(f"gridtrain.{name}")
    return getattr(importlib.import_module(_LAZY[name]), name)
