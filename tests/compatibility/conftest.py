"""`oldformats` is no installed package: it lies beside the tests that use it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def one_thread_for_torch() -> Iterator[None]:
    """Workers are threads here; small models are faster without a pool, and sums keep their order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
