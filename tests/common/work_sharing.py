"""Three pytest processes run one suite together, file by file (scripts/test-suite).

    GRIDTRAIN_PART=plain      runs the files that start no process, from the front
    GRIDTRAIN_PART=back       runs these from the back
    GRIDTRAIN_PART=process    runs the tests marked `integration`, then the files that are left
    GRIDTRAIN_CLAIMS=FOLDER   before it runs a file, a process makes one of its name here

Tests with real processes run one at a time, as they need the processors; while they wait, the others compute.
Each file is run, or claimed, by one part that it belongs to: if all exit with 0, all tests have passed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

PART, CLAIMS = "GRIDTRAIN_PART", "GRIDTRAIN_CLAIMS"
PLAIN, BACK, PROCESS = "plain", "back", "process"

Batch = list[pytest.Item]


class WorkSharing:
    """The plugin of one part."""

    def __init__(self, part: str, claims: Path) -> None:
        self._part = part
        self._claims = claims

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """As pytest's own, over the batches of this process."""
        if session.testsfailed or session.config.option.collectonly:
            return None
        before: pytest.Item | None = None
        for item in (item for batch in self.batches(session.items) for item in batch):
            if before is not None:
                _run(session, before, item)
            before = item
        if before is not None:
            _run(session, before, None)
        return True

    def batches(self, items: list[pytest.Item]) -> Iterator[Batch]:
        """The batches to run, each claimed when the previous one has begun its last test."""
        plain, process = split(items)
        ordered = {PLAIN: plain, BACK: plain[::-1], PROCESS: process + plain[::-1]}
        for batch in ordered[self._part]:
            if self._claim(batch):
                yield batch

    def _claim(self, batch: Batch) -> bool:
        name = f"{_file(batch[0])} {_is_process(batch[0])}"
        try:
            (self._claims / hashlib.sha256(name.encode()).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def split(items: list[pytest.Item]) -> tuple[list[Batch], list[Batch]]:
    """By file, each once: the tests that start no processes, and those that do."""
    plain: dict[str, Batch] = {}
    process: dict[str, Batch] = {}
    for item in items:
        (process if _is_process(item) else plain).setdefault(_file(item), []).append(item)
    return [*plain.values()], [*process.values()]


def plugin() -> WorkSharing | None:
    """The plugin for the part that the environment names; none in a pytest that a test starts."""
    part, claims = os.environ.pop(PART, ""), os.environ.pop(CLAIMS, "")
    return WorkSharing(part, Path(claims)) if part else None


def _run(session: pytest.Session, item: pytest.Item, next_item: pytest.Item | None) -> None:
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _is_process(item: pytest.Item) -> bool:
    return item.get_closest_marker("integration") is not None
