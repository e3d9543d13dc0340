"""Wraps `grid.batches` as a loader with a length, for the epoch-based training loops of other packages.

    loop       iter  next next ...  StopIteration     iter  StopIteration     finish
    grid       -----------one generator, made at the first `iter`------------------^ leaves the run

A loop that fetches a batch before it has taken the previous step would start its next turn too early.  The
loader therefore has a length, because Hugging Face's and Lightning's loops fetch ahead only if a loader has
no length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gridtrain.errors import ConfigError
from gridtrain.sdk.grid import Grid


class GridLoader:
    """Yields this worker's batches of a run of `steps` optimizer steps; has the interface of a DataLoader.

    It may be created before the optimizer is wrapped; the data set is described to the group at the first
    `iter`.

    Args:
        steps: the number of calls to `optimizer.step` in the whole run; with `LocalSteps(every=H)`, a
            multiple of H.
        accumulate: the number of batches per call to `optimizer.step`.
        options: the other arguments of `grid.batches`: batch_size or global_batch_size, collate_fn, seed, ...
    """

    batch_sampler = sampler = None  # nothing for a framework to replace

    def __init__(self, grid: Grid, dataset: Any, *, steps: int, accumulate: int = 1, **options: Any) -> None:
        self.dataset = dataset
        self._grid, self._steps, self._accumulate, self._options = grid, steps, accumulate, options
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Return the number of batches in the whole run; a worker that joins late gets fewer."""
        return self._steps * self._accumulate

    def __iter__(self) -> Iterator[Any]:
        """Return the run's only iterator, which continues where it stopped."""
        if self._batches is None:
            self._batches = iter(
                self._grid.batches(
                    self.dataset, steps=self._run_steps(), accumulate=self._accumulate, **self._options
                )
            )
        return self._batches

    def finish(self) -> None:
        """End the loop.  If the run has another batch for this worker, the worker leaves the run; otherwise
        it finishes together with the run."""
        if self._batches is not None and not self._grid.finished and next(self._batches, None) is not None:
            self._grid.close("its training loop ended before the run")
            self._batches = iter(())  # another call has no effect

    def _run_steps(self) -> int:
        calls = self._grid.calls_per_step
        if self._steps < 1 or self._steps % calls:
            raise ConfigError(
                f"steps is {self._steps}; it must be a positive multiple of {calls}",
                remedy=f"set the number of steps (max_steps) to a multiple of {calls}",
            )
        return self._steps // calls
