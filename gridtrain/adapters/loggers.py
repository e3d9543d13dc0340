"""Write figures of a run to TensorBoard, to Weights & Biases, or to any object with `write` and `close`.

    log = Log(grid, TensorBoard("runs/mine"), WeightsAndBiases(project="mine"))
    for batch in grid.batches(...):
        ...
        log(loss=grid.mean(loss))
    log.close()

Only the first worker of the generation writes, so that a run yields one curve.  When that worker leaves, the
next first worker continues with its own writers, which it opens only then.  All workers report the figures to
the group (`grid.report`).  The packages are imported at the first write.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from gridtrain.extras import require


class Writer(Protocol):
    """Writes the figures of one step, by name."""

    def write(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Worker(Protocol):
    """The part of `Grid` that `Log` uses."""

    @property
    def is_first(self) -> bool: ...

    @property
    def step(self) -> int: ...

    @property
    def traffic(self) -> dict[str, tuple[int, int]]: ...

    def report(self, **figures: float) -> None: ...


class Log:
    """A logger that every worker calls with figures, but only the first worker passes them to its writers.

    Values that are not finite are left out.  The logger adds the figure `sent_bytes`, the bytes that this
    worker has sent so far.
    """

    def __init__(self, grid: Worker, *writers: Writer) -> None:
        self._grid, self._writers = grid, writers

    def __call__(self, **figures: float) -> None:
        finite = {name: float(value) for name, value in figures.items() if math.isfinite(float(value))}
        self._grid.report(**finite)
        if self._grid.is_first:
            sent_bytes = sum(sent for sent, _ in self._grid.traffic.values())
            for writer in self._writers:
                writer.write(self._grid.step, {**finite, "sent_bytes": float(sent_bytes)})

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


class TensorBoard:
    """Writes scalars to a folder for `tensorboard --logdir`; needs the package `tensorboard`."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._open: Any = None

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        if self._open is None:
            require("tensorboard", "gridtrain.adapters.loggers.TensorBoard")
            from torch.utils.tensorboard import SummaryWriter

            self._open = SummaryWriter(self._folder)
        for name, value in figures.items():
            self._open.add_scalar(name, value, step)

    def close(self) -> None:
        if self._open is not None:
            self._open.close()


class WeightsAndBiases:
    """Writes figures to a run of `wandb.init(**options)`; needs the package `wandb`."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._open: Any = None

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        if self._open is None:
            require("wandb", "gridtrain.adapters.loggers.WeightsAndBiases")
            import wandb

            self._open = wandb.init(**self._options)
        self._open.log(dict(figures), step=step)

    def close(self) -> None:
        if self._open is not None:
            self._open.finish()
