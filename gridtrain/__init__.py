"""gridtrain: several machines train one PyTorch model together, over plain sockets, peer to peer.

    grid = gridtrain.join()
    optimizer = grid.optimizer(optimizer, model, exchange=gridtrain.GTopK(density=0.01, momentum=0.9))
    for batch in grid.batches(dataset, batch_size=32, epochs=3):
        loss = ...; loss.backward(); optimizer.step(); optimizer.zero_grad()

The subpackages, from the interface for scripts to the network:

    sdk          `Grid`; a whole group in one process   training    optimizers, data, checkpoints
    pipeline     models in stages                       sparsify    top-k selection, error feedback
    runtime      the I/O thread and its modules         core        state machines that decide, without I/O
    network      message encoding, transports           cli, tools  the command line
    adapters     training loops of other packages       testing     fault injection

Names that need torch are imported when they are first used, so importing this module or
`gridtrain.network.wire` does not import torch.
"""

from __future__ import annotations

import importlib
import os as _os
from typing import TYPE_CHECKING, Any

try:
    from gridtrain._version import __version__
    from gridtrain.config import Auto, Deadlines, Dense, GTopK, LocalSteps, Overlap, TopK
    from gridtrain.core.planning.local_steps_proposal import propose_local_steps
    from gridtrain.errors import (
        ConfigError,
        CoordinatorUnreachable,
        DataError,
        GridtrainError,
        JoinRefused,
        LocalProtocolError,
        RemoteProtocolError,
        RunPaused,
    )
    from gridtrain.extras import require_torch
except KeyboardInterrupt:
    raise SystemExit(130) from None  # Ctrl-C just after a command was started

if TYPE_CHECKING:
    from gridtrain import pipeline as pipeline
    from gridtrain import testing as testing
    from gridtrain.sdk.grid import Grid
    from gridtrain.sdk.join import join
    from gridtrain.sdk.local_group import local
    from gridtrain.training.data.shards import ShardedDataset, Shards
    from gridtrain.training.optimizer import GridOptimizer

_LAZY = {
    "join": "gridtrain.sdk.join",
    "Grid": "gridtrain.sdk.grid",
    "GridOptimizer": "gridtrain.training.optimizer",
    "ShardedDataset": "gridtrain.training.data.shards",
    "Shards": "gridtrain.training.data.shards",
    "local": "gridtrain.sdk.local_group",
}

_SUBPACKAGES = ("pipeline", "testing")
"""The subpackages that scripts use as attributes of this module."""

__all__ = [
    "Auto",
    "ConfigError",
    "CoordinatorUnreachable",
    "DataError",
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
    "ShardedDataset",
    "Shards",
    "TopK",
    "__version__",
    "join",
    "local",
    "propose_local_steps",
]


if "GRIDTRAIN_COORDINATOR" in _os.environ:
    # `gridtrain worker` started this process and forwards Ctrl-C, perhaps while torch is being imported.
    from gridtrain.runtime.process_hooks import install_error_hook as _speak_plainly

    _speak_plainly()


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"gridtrain.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'gridtrain' has no attribute {name!r}")
    require_torch(f"gridtrain.{name}")
    return getattr(importlib.import_module(_LAZY[name]), name)
