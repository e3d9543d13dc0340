"""Workers of a `LocalGroup` in threads, whose errors a test sees at once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gridtrain.sdk.grid import Grid
from gridtrain.sdk.local_group import LocalGroup

WITHIN_S = 120.0


class ThreadedWorkers:
    """Runs `work(grid, number)` for each of `count` workers, called worker-0, worker-1, ...

    Models are exported to `folder`; each worker's checkpoints, if any, are in a folder of it.
    """

    def __init__(
        self,
        group: LocalGroup,
        work: Callable[[Grid, int], Any],
        count: int,
        folder: Path,
        checkpoint_every: int = 0,
    ) -> None:
        self._count = count
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def one(number: int) -> None:
            name = f"worker-{number}"
            options = {"export_dir": str(folder), "state_dir": str(folder / name)}
            try:
                with group.join(name, checkpoint_every=checkpoint_every, **options) as grid:
                    work(grid, number)
            except BaseException as error:
                self._ended.put(error)
            else:
                self._ended.put(None)

        for number in range(count):
            threading.Thread(target=one, args=(number,), daemon=True).start()

    def finish(self) -> None:
        """Wait until all have ended; raise the first error."""
        for _ in range(self._count):
            if (error := self._ended.get(timeout=WITHIN_S)) is not None:
                raise error
