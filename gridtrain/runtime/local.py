"""A whole group in one process: the real coordinator and real workers, in threads, over memory.

Decides nothing new.  For tests, notebooks and first steps; threads share one interpreter and one set
of random numbers, so nothing here is fast.  The one module of `runtime` that looks upwards (to the
coordinator and to `Grid`), because it puts all of them together.

    local(train, workers=4)      coordinator thread
                                 4 x thread: train(grid)  --> [result of each]
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gridtrain.config import Deadlines, JoinConfig
from gridtrain.optim.grid import Grid
from gridtrain.transport.memory import MemoryHub, MemoryTransport
from gridtrain_coordinator.daemon import Coordinator
from gridtrain_coordinator.store import Store

Result = TypeVar("Result")


class LocalGroup:
    """A coordinator in a thread, and as many workers as are asked for.  A context manager.

    Args:
        min_workers: the run starts with so many.
        hub: the network; give one with a `FaultPlan` to see what happens.
    """

    ADDRESS = "memory://coordinator"

    def __init__(
        self, *, min_workers: int = 1, hub: MemoryHub | None = None, deadlines: Deadlines | None = None
    ) -> None:
        self.hub = hub or MemoryHub()
        self._deadlines = deadlines or Deadlines()
        self._transport = MemoryTransport(secrets.token_bytes(32), self.hub)
        self._transport.listen(self.ADDRESS)
        self._stop = threading.Event()
        self._joined = 0
        store = Store.open(":memory:")
        self.coordinator = Coordinator.of_run(
            self._transport, store, run="local", min_workers=min_workers, deadlines=self._deadlines
        )
        self._thread = threading.Thread(
            target=self.coordinator.run, args=(self._stop,), name="gridtrain-coordinator", daemon=True
        )

    def __enter__(self) -> LocalGroup:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._transport.wake()
        self._thread.join(timeout=10.0)

    def join(self, name: str = "", *, export_dir: str = "") -> Grid:
        """One more worker; to be used from one thread."""
        self._joined += 1
        name = name or f"worker-{self._joined}"
        config = JoinConfig(
            coordinator=self.ADDRESS,
            run="local",
            name=name,
            listen=f"memory://{name}",
            export_dir=export_dir,
            deadlines=self._deadlines,
        )
        return Grid(MemoryTransport(secrets.token_bytes(32), self.hub), config)


def local(train: Callable[[Grid], Result], workers: int = 4, *, export_dir: str = "") -> list[Result]:
    """Run `train(grid)` on `workers` workers at once and return what each returned.

    Raises the first exception that a worker raised, after the others have gone on to the end of the run.
    """
    with (
        LocalGroup(min_workers=workers) as group,
        ThreadPoolExecutor(max_workers=workers, thread_name_prefix="worker") as pool,
    ):

        def one(number: int) -> Result:
            grid = group.join(f"worker-{number}", export_dir=export_dir)
            try:
                return train(grid)
            except BaseException as error:
                grid.close(f"{type(error).__name__} in the training function")
                raise
            finally:
                grid.close()

        futures = [pool.submit(one, number) for number in range(workers)]
        return [future.result() for future in futures]
