"""Batches of `grid.batches` for training loops of other packages, which count batches and epochs.

    loop       iter  next next ...  StopIteration     iter  StopIteration     finish
    grid       -----------one generator, made at the first `iter`------------------^ leaves the run

A loop that fetches a batch before it has stepped would get its next turn too early.  So the loader has a
length: the loops of Hugging Face and Lightning look ahead only if there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gridtrain.errors import ConfigError
from gridtrain.sdk.grid import Grid


class GridLoader:
    """This worker's batches of a run of `steps` optimizer steps; looks like a DataLoader.

    It may be made before the optimizer is wrapped; the data set is described to the group at the first
    `iter`.

    Args:
        steps: calls of `optimizer.step` in the whole run.  With `LocalSteps(every=H)` a multiple of H.
        accumulate: batches for each of these calls.
        options: others of `grid.batches`: batch_size or global_batch_size, collate_fn, seed, ...
    """

    batch_sampler = sampler = None  # nothing for a framework to replace

    def __init__(self, grid: Grid, dataset: Any, *, steps: int, accumulate: int = 1, **options: Any) -> None:
        self.dataset = dataset
        self._grid, self._steps, self._accumulate, self._options = grid, steps, accumulate, options
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Batches of a worker that takes part from the start to the end, which is the maximum."""
        return self._steps * self._accumulate

    def __iter__(self) -> Iterator[Any]:
        """Continues where the last one stopped."""
        if self._batches is None:
            self._batches = iter(
                self._grid.batches(
                    self.dataset, steps=self._run_steps(), accumulate=self._accumulate, **self._options
                )
            )
        return self._batches

    def finish(self) -> None:
        """The loop is over.  This worker finishes with the run or, before its end, leaves it."""
        if self._batches is not None and not self._grid.finished and next(self._batches, None) is not None:
            self._grid.close("its training loop ended before the run")

    def _run_steps(self) -> int:
        calls = self._grid.calls_per_step
        if self._steps < 1 or self._steps % calls:
            raise ConfigError(
                f"{self._steps} optimizer steps; a step of the run is {calls} of them",
                remedy=f"set the number of steps (max_steps) to a multiple of {calls}",
            )
        return self._steps // calls
