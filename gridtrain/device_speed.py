"""Measures a device's floating-point operations per second, so that workers can be compared."""

from __future__ import annotations

import math
import time

import torch

MEASURE_DURATION_S = 0.1
CPU_SIZE, DEVICE_SIZE = 512, 2048


def device_flops(device: torch.device) -> float:
    """Return a device's float32 operations per second, measured by multiplying square matrices.

    The measurement takes at least `MEASURE_DURATION_S` seconds, including a warm-up.
    """
    n = CPU_SIZE if device.type == "cpu" else DEVICE_SIZE
    least_s, ends_s = math.inf, time.perf_counter() + MEASURE_DURATION_S
    with torch.no_grad():
        a = torch.ones(n, n, dtype=torch.float32, device=device)
        (a @ a).sum().item()
        while (began_s := time.perf_counter()) < ends_s or least_s == math.inf:
            product = a @ a
            product[0, 0].item()  # waits for this device, which need not be the current one
            # The fastest product counts; other processes, often started simultaneously, delay most products.
            least_s = min(least_s, time.perf_counter() - began_s)
        del product
    return 2.0 * n**3 / least_s
