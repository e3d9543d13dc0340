"""Makes `pipeline_models` importable, here and in the processes that the oracle starts."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def one_thread_for_each_stage() -> Iterator[None]:
    """Eight stages in one process would otherwise start a pool of threads each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
