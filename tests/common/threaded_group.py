"""A group in this process: the real coordinator with short deadlines, and workers in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from brisk import BRISK, WITHIN_S
from faulty_hub import FaultyHub

from gridtrain.config import Deadlines
from gridtrain.network.transport.fault_injection import Faults
from gridtrain.sdk.grid import Grid
from gridtrain.sdk.local_group import LocalGroup

Train = Callable[[Grid, int], Any]
"""(grid, number of the worker) -> its result."""


class ThreadedGroup(LocalGroup):
    """A `LocalGroup` that starts worker threads; each wait has a limit.

    Args:
        export_dir: of all workers.
        workers: the number that the run needs to start.
        on_event: called in the coordinator's thread with each event that it logs.

    Attributes:
        results: by worker, what it returned or raised.
    """

    def __init__(
        self,
        export_dir: Path,
        *,
        workers: int,
        deadlines: Deadlines = BRISK,
        faults: Faults | None = None,
        on_event: Callable[[str], object] = lambda event: None,
    ) -> None:
        hub = FaultyHub()
        super().__init__(min_workers=workers, hub=hub, deadlines=deadlines, faults=faults, log=self._record)
        self._events: list[str] = []
        self._changed = threading.Condition()
        self._workers, self._on_event = workers, on_event
        self.export_dir = export_dir
        self.results: dict[int, Any] = {}
        self.threads: list[threading.Thread] = []

    def start(self, train: Train, *, name: str = "", **joining: Any) -> int:
        """Start a worker; return its number.  `joining`: other arguments of `join`."""
        number = len(self.threads)
        name = name or f"worker-{number}"
        options = {"export_dir": str(self.export_dir)} | joining
        arguments = (train, number, name, options)
        thread = threading.Thread(target=self._work, args=arguments, name=name, daemon=True)
        self.threads.append(thread)
        thread.start()
        return number

    def start_all(self, train: Train) -> None:
        """Start as many workers as the run needs to start."""
        for _ in range(self._workers):
            self.start(train)

    def result(self, number: int) -> Any:
        """What the worker returned or raised."""
        self.threads[number].join(WITHIN_S)
        assert number in self.results, f"worker {number} still runs after {WITHIN_S:.0f} s"
        return self.results[number]

    def ends(self) -> list[Any]:
        """What each worker returned or raised, in the order of their numbers."""
        return [self.result(number) for number in range(len(self.threads))]

    def finish(self) -> list[Any]:
        """What each worker returned.  Raises the first exception of a worker."""
        ends = self.ends()
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        return ends

    def wait_for(self, *events: str) -> None:
        """Wait until the coordinator has logged these events in this order."""

        def are_logged() -> bool:
            logged = iter(self._events)
            return all(event in logged for event in events)

        with self._changed:
            assert self._changed.wait_for(are_logged, WITHIN_S), f"{events} are not in {self._events}"

    def _record(self, level: str, event: str, fields: Mapping[str, object]) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()
        self._on_event(event)

    def _work(self, train: Train, number: int, name: str, options: dict[str, Any]) -> None:
        try:
            with self.join(name, **options) as grid:
                self.results[number] = train(grid, number)
        except BaseException as error:
            self.results[number] = error
