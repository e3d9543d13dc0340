"""Reads the dtype that torch's autocast uses for a device, and disables autocast temporarily."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return autocast's dtype for the device on this thread; None if autocast is not enabled for it."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context manager that disables autocast for the device.

    torch advises against autocast in backward passes and optimizers.
    """
    if autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
