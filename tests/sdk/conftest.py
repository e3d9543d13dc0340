"""Whole groups in this process, brisk ones: the real coordinator, workers in threads, memory between them.

together(train, 3)    [what train(grid, number) returned on each worker]; raises what the first one raised
outcomes(train, 3)    the same, with the exception in the place of a worker that raised one
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
from thread_groups import brisk_groups, one_thread_for_torch  # noqa: F401

from gridtrain.config import Deadlines
from gridtrain.sdk.grid import Grid
from gridtrain.sdk.local_group import LocalGroup

WITHIN_S = 60.0

Train = Callable[[Grid, int], Any]


class Group(LocalGroup):
    """A `LocalGroup` that starts worker threads and never waits for them without end."""

    def __init__(self, export_dir: Path, *, workers: int, deadlines: Deadlines = BRISK) -> None:
        super().__init__(min_workers=workers, deadlines=deadlines, log=self._hear)
        self._events: list[str] = []
        self._came = threading.Condition()
        self.export_dir = export_dir
        self.results: dict[int, Any] = {}
        self.threads: list[threading.Thread] = []

    def start(self, train: Train, *, hidden: bool = False) -> int:
        """One more worker; its number.  `hidden`: nobody can dial it, as behind NAT."""
        number = len(self.threads)
        thread = threading.Thread(
            target=self._work, args=(train, number, hidden), name=f"worker-{number}", daemon=True
        )
        self.threads.append(thread)
        thread.start()
        return number

    def result(self, number: int) -> Any:
        """What it returned or raised."""
        self.threads[number].join(WITHIN_S)
        assert number in self.results, f"worker-{number} still runs after {WITHIN_S:.0f} s"
        return self.results[number]

    def wait_for(self, *events: str) -> None:
        """Until the coordinator has told of them in this order."""

        def came() -> bool:
            told = iter(self._events)
            return all(event in told for event in events)

        with self._came:
            assert self._came.wait_for(came, WITHIN_S), f"{events} never came: {self._events}"

    def _hear(self, level: str, event: str, fields: Mapping[str, object]) -> None:
        with self._came:
            self._events.append(event)
            self._came.notify_all()

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
