"""How much memory a stage may use: as declared, or a share of the GPU's memory or the host's free memory."""

from __future__ import annotations

import math

import torch

from gridtrain.errors import ConfigError
from gridtrain.runtime.free_memory import free_memory_bytes

USABLE_MEMORY_SHARE = 0.9
"""The share of a GPU's memory, or of the free memory of the host, that training may use; the framework needs
the rest."""


def training_memory_bytes(declared: int | None, device: torch.device) -> int:
    """Return the number of bytes of memory that training may use on this worker; 0 if unknown.

    The result is `declared` or, if that is None, most of the GPU's memory or of the host's free memory.

    Raises:
        ConfigError: `declared` is not a positive number of bytes.
    """
    if declared is not None:
        if isinstance(declared, bool) or not isinstance(declared, int) or declared < 1:
            raise ConfigError(
                f"memory_bytes is {declared!r}; it must be a positive integer of bytes or None",
                remedy="leave it out to use most of the memory of the GPU or of the host",
            )
        return declared
    if device.type == "cuda" and torch.cuda.is_available():
        usable_bytes = torch.cuda.get_device_properties(device).total_memory
    else:
        usable_bytes = free_memory_bytes() if device.type == "cpu" else 0
    return math.ceil(usable_bytes * USABLE_MEMORY_SHARE)
