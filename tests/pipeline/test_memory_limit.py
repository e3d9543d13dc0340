"""The memory that a stage may use."""

from __future__ import annotations

from pathlib import Path

import torch

from gridtrain.pipeline.memory_limit import training_memory_bytes


def test_training_may_use_most_of_the_free_memory() -> None:
    cpu = torch.device("cpu")
    assert training_memory_bytes(5, cpu) == 5
    assert 2**20 < training_memory_bytes(None, cpu) < 1024 * int(Path("/proc/meminfo").read_text().split()[1])
    assert training_memory_bytes(None, torch.device("meta")) == 0
