"""What all tests share: seeds that can be swept and replayed, marks, the hypothesis profile.

GRIDTRAIN_TESTS=all     nothing is left out: slow tests, and all seeds of each test (`make test-all`)
GRIDTRAIN_SEEDS=10000   every test over seeds runs seeds 0 to 9999 (`make sweep SEEDS=10000`)
GRIDTRAIN_SEEDS=500-900 every test over seeds runs seeds 500 to 899
GRIDTRAIN_SEED=123      every test over seeds runs seed 123 alone (replays a failure)

Without any of them, as in `make test`, a test over seeds runs a fifth of its seeds, or those that it names
and some that the sources draw; the tests that slow.txt names are left out unless the command line names their
file or the test itself; and Python programs that tests start are forked (`forkserver.py`), where the test has
no mark `executed`.
"""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random

import forkserver
import hypothesis
import pytest
import work_sharing

hypothesis.settings.register_profile("gridtrain", deadline=None, print_blob=True)
hypothesis.settings.load_profile("gridtrain")

SEED = pytest.StashKey[int]()
CLIENT = pytest.StashKey[forkserver.Client]()
FULL = os.environ.pop("GRIDTRAIN_TESTS", "") == "all"  # not passed on: gridtrain refuses unknown variables
FEWEST_SEEDS = 25
SIMULATED = ("gridtrain/core", "coordinator", "tests/simulation")  # whose digest draws seeds
SLOW = tuple(
    line.strip()
    for line in (Path(__file__).parent / "slow.txt").read_text().splitlines()
    if line.strip() and not line.startswith("#")
)


class Seeds:
    """`for seed in seeds(2000):` runs a fifth of 2,000 seeds, or those that the environment asks for.

    `seeds(2000, always=(3, 14), drawn=40)`: these two, unless one is replayed, and instead of the fifth 40
    that a digest of the sources draws: others after each change, the same for the same sources.
    """

    def __init__(self, stash: pytest.Stash) -> None:
        self._stash = stash

    @property
    def is_replay(self) -> bool:
        """One seed is asked for, so that nothing can be said of all."""
        return "GRIDTRAIN_SEED" in os.environ

    def __call__(self, default: int, *, always: Sequence[int] = (), drawn: int = 0) -> Iterator[int]:
        for seed in self._chosen(default, always, drawn):
            self._stash[SEED] = seed
            yield seed
        del self._stash[SEED]

    @staticmethod
    def _chosen(default: int, always: Sequence[int], drawn: int) -> Iterable[int]:
        if one := os.environ.get("GRIDTRAIN_SEED"):
            return [int(one)]
        if swept := os.environ.get("GRIDTRAIN_SEEDS"):
            first, _, end = swept.rpartition("-")
            more: Iterable[int] = range(int(first or 0), int(end))
        elif FULL:
            more = range(default)
        elif drawn:
            more = Random(_digest_of_sources()).sample(range(10**6), drawn)
        else:
            more = range(min(default, max(FEWEST_SEEDS, default // 5)))
        return dict.fromkeys([*always, *more])


@cache
def _digest_of_sources() -> bytes:
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for folder in SIMULATED:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.digest()


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> Seeds:
    return Seeds(request.node.stash)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[pytest.TestReport | None]:
    """A test that fails inside `for seed in seeds(...)` says how to replay that seed."""
    report: pytest.TestReport = yield
    if report.failed and (seed := item.stash.get(SEED, None)) is not None:
        command = f"GRIDTRAIN_SEED={seed} make sweep TESTS='{item.nodeid}'"
        report.sections.append(("replay", command))
    return report


def pytest_collection(session: pytest.Session) -> None:
    """Nothing that is collected is garbage: looking for some takes a third of the time."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # what is collected is not looked at again
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[CLIENT] = forkserver.Client()
    if (sharing := work_sharing.plugin()) is not None:
        config.pluginmanager.register(sharing)


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[CLIENT].close()


@pytest.fixture
def client(pytestconfig: pytest.Config) -> forkserver.Client:
    """Of the server that forks the programs of all tests."""
    return pytestconfig.stash[CLIENT]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Around fixtures, too."""
    if FULL or item.get_closest_marker("executed") or not item.get_closest_marker("integration"):
        return (yield)
    with item.config.stash[CLIENT].forking():
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = any("::" in argument or argument.endswith(".py") for argument in config.args)
    if not (FULL or named):
        left_out = [item for item in items if item.nodeid.startswith(SLOW)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.nodeid.startswith(SLOW)]
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests and not _has_cuda():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs CUDA: torch.cuda.is_available() is False"))
    for item in items:
        if "seeds" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.sweep)
            if FULL:  # five times as many seeds as the configured timeout is for
                item.add_marker(pytest.mark.timeout(5 * float(config.getini("timeout"))))


def _has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())
