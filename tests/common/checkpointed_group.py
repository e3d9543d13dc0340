"""Groups in one process whose workers store checkpoints, from which another group continues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from brisk import WITHIN_S
from threaded_group import ThreadedGroup

import gridtrain

T = TypeVar("T")


def run(
    folder: Path,
    workers: int,
    work: Callable[[gridtrain.Grid], T],
    *,
    every: int = 3,
    urls: Sequence[str] = (),
    saves_on_leaving: bool = False,
) -> list[T]:
    """Let each worker do `work` with its grid; return the results by number.  Checkpoints are written to
    FOLDER/worker-NUMBER every `every` steps, and read from there; the first workers have `urls`.  Unless
    `saves_on_leaving`, a worker that ends before the run has what a killed one has: none of its last step."""

    def train(grid: gridtrain.Grid, number: int) -> T:
        result = work(grid)
        model_state: Any = grid._model_state
        if not saves_on_leaving:
            model_state._keep_for_others = lambda **_: None
        return result

    with ThreadedGroup(folder, workers=workers) as group:
        for number in range(workers):
            state, url = str(folder / f"worker-{number}"), urls[number] if number < len(urls) else ""
            group.start(train, checkpoint_every=every, state_dir=state, checkpoints=url)
        return group.finish()


def wait_for_uploads(grid: gridtrain.Grid) -> None:
    """Wait for the disk and for the storage, because steps are faster in tests."""
    state: Any = grid._model_state
    state.checkpoints.wait()
    if (uploader := state._uploader) is not None:
        with uploader._changed:
            assert uploader._changed.wait_for(lambda: not uploader._waiting, WITHIN_S)
