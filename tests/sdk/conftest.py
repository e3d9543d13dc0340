"""Whole groups in this process, with short deadlines: the real coordinator, workers in threads.

together(train, 3)    [what train(grid, number) returned on each worker]; raises the first worker's exception
outcomes(train, 3)    the same, with a worker's exception in the place of its result
new_group(workers=3)  for tests that start and end workers themselves
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from thread_groups import brisk_groups, one_thread_for_torch  # noqa: F401
from threaded_group import ThreadedGroup, Train


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the keys of this test's workers."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def new_group(tmp_path: Path) -> Callable[..., ThreadedGroup]:
    return partial(ThreadedGroup, tmp_path)


@pytest.fixture
def outcomes(new_group: Callable[..., ThreadedGroup]) -> Callable[..., list[Any]]:
    def run(train: Train, workers: int = 2, **options: Any) -> list[Any]:
        with new_group(workers=workers, **options) as group:
            group.start_all(train)
            return group.ends()

    return run


@pytest.fixture
def together(new_group: Callable[..., ThreadedGroup]) -> Callable[..., list[Any]]:
    def run(train: Train, workers: int = 2, **options: Any) -> list[Any]:
        with new_group(workers=workers, **options) as group:
            group.start_all(train)
            return group.finish()

    return run
