"""Groups in one process whose workers store checkpoints, from which another group continues."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import gridtrain
from gridtrain.sdk.local_group import LocalGroup

T = TypeVar("T")
WITHIN_S = 60.0


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
    results: dict[int, T] = {}

    def one(number: int) -> None:
        state = folder / f"worker-{number}"
        grid = group.join(
            f"worker-{number}",
            checkpoint_every=every,
            state_dir=str(state),
            checkpoints=urls[number] if number < len(urls) else "",
            export_dir=str(folder),
        )
        with grid:
            results[number] = work(grid)
            model_state: Any = grid._model_state
            if not saves_on_leaving:
                model_state._keep_for_others = lambda: None

    with LocalGroup(min_workers=workers) as group:
        threads = [threading.Thread(target=one, args=(n,), daemon=True) for n in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WITHIN_S)
    assert sorted(results) == list(range(workers)), "a worker failed"
    return [results[number] for number in range(workers)]


def wait_for_uploads(grid: gridtrain.Grid) -> None:
    """Wait for the disk and for the storage, because steps are faster in tests."""
    state: Any = grid._model_state
    state.checkpoints.wait()
    if (uploader := state._uploader) is not None:
        with uploader._changed:
            assert uploader._changed.wait_for(lambda: not uploader._waiting, WITHIN_S)
