"""What all tests share: seeds that can be swept and replayed, marks, the hypothesis profile.

GRIDTRAIN_TESTS=all     nothing is left out: slow tests, and all seeds of each test (`make test-all`)
GRIDTRAIN_SEEDS=10000   every test over seeds runs seeds 0 to 9999 (`make sweep SEEDS=10000`)
GRIDTRAIN_SEED=123      every test over seeds runs seed 123 alone (replays a failure)

Without any of them, as in `make test`, a test over seeds runs a fifth of its seeds, and the tests that
slow.txt names are left out unless the command line names their file or the test itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("gridtrain", deadline=None, print_blob=True)
hypothesis.settings.load_profile("gridtrain")

SEED = pytest.StashKey[int]()
FULL = os.environ.get("GRIDTRAIN_TESTS") == "all"
FEWEST_SEEDS = 25
SLOW = tuple(
    line.strip()
    for line in (Path(__file__).parent / "slow.txt").read_text().splitlines()
    if line.strip() and not line.startswith("#")
)


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> Callable[[int], Iterator[int]]:
    """`for seed in seeds(2000):` runs a fifth of 2,000 seeds, or those that the environment asks for."""

    def chosen(default: int) -> range:
        if one := os.environ.get("GRIDTRAIN_SEED"):
            return range(int(one), int(one) + 1)
        few = default if FULL else min(default, max(FEWEST_SEEDS, default // 5))
        return range(int(os.environ.get("GRIDTRAIN_SEEDS") or few))

    def run(default: int) -> Iterator[int]:
        for seed in chosen(default):
            request.node.stash[SEED] = seed
            yield seed
        del request.node.stash[SEED]

    return run


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


def _has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())
