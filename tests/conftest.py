"""What all tests share: seeds that can be swept and replayed, marks, the hypothesis profile.

GRIDTRAIN_SEEDS=10000   every test over seeds runs seeds 0 to 9999 (`make sweep SEEDS=10000`)
GRIDTRAIN_SEED=123      every test over seeds runs seed 123 alone (replays a failure)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import hypothesis
import pytest

hypothesis.settings.register_profile("gridtrain", deadline=None, print_blob=True)
hypothesis.settings.load_profile("gridtrain")

SEED = pytest.StashKey[int]()


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> Callable[[int], Iterator[int]]:
    """`for seed in seeds(2000):` runs 2,000 seeds, or those that the environment names."""

    def chosen(default: int) -> range:
        if one := os.environ.get("GRIDTRAIN_SEED"):
            return range(int(one), int(one) + 1)
        return range(int(os.environ.get("GRIDTRAIN_SEEDS") or default))

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
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
