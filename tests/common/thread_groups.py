"""Fixtures for groups whose workers are threads of the test, to be imported by a conftest or a test file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from brisk import BRISK

from gridtrain.sdk import local_group


@pytest.fixture(autouse=True)
def one_thread_for_torch() -> Iterator[None]:
    """Small models are faster without a pool for each worker, and sums keep their order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def brisk_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups whose deadlines a test does not choose do not wait for a network to be measured."""
    monkeypatch.setattr(local_group, "Deadlines", lambda: BRISK)
