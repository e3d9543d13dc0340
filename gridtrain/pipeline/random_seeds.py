"""Seeds of the random numbers that a layer draws for a micro-batch.

They depend on the run's seed, the step, the replica, the micro-batch and the layer's number in the whole
model,
not on the number of stages: dropout is the same for every partition, and when an activation is computed
again.

torch's generators belong to the process, so one stage at a time draws from them; afterwards they are
restored.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_GENERATORS_LOCK = threading.RLock()


def _hash_seed(*numbers: int) -> int:
    packed = struct.pack(f"<{len(numbers)}q", *numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def derive_step_seed(seed: int, step: int, replica: int = 0) -> int:
    """Of one step of one replica, for `StageExecutor.run`; 0 <= seed < 2**63.  The same in each attempt."""
    return _hash_seed(seed, step, replica)


def derive_layer_seed(step_seed: int, micro_batch: int, layer: int) -> int:
    """The generators' seed for this layer; `layer` counts from the model's first."""
    return _hash_seed(step_seed, micro_batch, layer)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the default generators of the CPU and of `device`."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


@contextmanager
def borrowed_generators(device: torch.device) -> Iterator[None]:
    """Hold the lock of the process's generators, and restore their states afterwards."""
    with _GENERATORS_LOCK:
        host = torch.get_rng_state()
        there = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        try:
            yield
        finally:
            torch.set_rng_state(host)
            if there is not None:
                torch.cuda.set_rng_state(there, device)
