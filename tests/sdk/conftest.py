"""Whole groups in this process, with short deadlines: the real coordinator, workers in threads.

together(train, 3)    [what train(grid, number) returned on each worker]; raises the first worker's exception
outcomes(train, 3)    the same, with a worker's exception in the place of its result
new_group(workers=3)  for tests that start and end workers themselves
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from brisk import BRISK
from faulty_hub import FaultyHub
from thread_groups import brisk_groups, one_thread_for_torch  # noqa: F401

from gridtrain.config import Deadlines
from gridtrain.sdk.grid import Grid
from gridtrain.sdk.local_group import LocalGroup

WITHIN_S = 60.0

Train = Callable[[Grid, int], Any]


class Group(LocalGroup):
    """A `LocalGroup` that starts worker threads; each wait has a limit."""

    def __init__(self, export_dir: Path, *, workers: int, deadlines: Deadlines = BRISK) -> None:
        super().__init__(min_workers=workers, hub=FaultyHub(), deadlines=deadlines, log=self._record)
        self._events: list[str] = []
        self._changed = threading.Condition()
        self.export_dir = export_dir
        self.results: dict[int, Any] = {}
        self.threads: list[threading.Thread] = []

    def start(self, train: Train, *, hidden: bool = False) -> int:
        """Start a worker; return its number.  `hidden`: no peer can dial it, as behind NAT."""
        number = len(self.threads)
        thread = threading.Thread(
            target=self._work, args=(train, number, hidden), name=f"worker-{number}", daemon=True
        )
        self.threads.append(thread)
        thread.start()
        return number

    def result(self, number: int) -> Any:
        """What the worker returned or raised."""
        self.threads[number].join(WITHIN_S)
        assert number in self.results, f"worker-{number} still runs after {WITHIN_S:.0f} s"
        return self.results[number]

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

    def _work(self, train: Train, number: int, hidden: bool) -> None:
        try:
            grid = self.join(f"worker-{number}", export_dir=str(self.export_dir), hidden=hidden)
            try:
                self.results[number] = train(grid, number)
            except BaseException as error:
                grid.close(f"{type(error).__name__} in the training function")
                raise
            finally:
                grid.close()
        except BaseException as error:
            self.results[number] = error


@pytest.fixture
def new_group(tmp_path: Path) -> Callable[..., Group]:
    return partial(Group, tmp_path)


@pytest.fixture
def outcomes(tmp_path: Path) -> Callable[..., list[Any]]:
    def run(train: Train, workers: int = 2, *, deadlines: Deadlines = BRISK) -> list[Any]:
        with Group(tmp_path, workers=workers, deadlines=deadlines) as group:
            numbers = [group.start(train) for _ in range(workers)]
            return [group.result(number) for number in numbers]

    return run


@pytest.fixture
def together(outcomes: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def run(*args: Any, **options: Any) -> list[Any]:
        results = outcomes(*args, **options)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    return run
