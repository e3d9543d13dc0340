"""The seeds for dropout and for initial values in a pipeline; they do not depend on the number of stages.

The seed for a layer's dropout depends on the run's seed, the step, the replica, the micro-batch and the
layer's index in the whole model.  Dropout is therefore the same for every partition, and the same when an
activation is recomputed.

torch's generators are shared by the whole process.  A lock therefore ensures that only one stage at a time
draws from them, and that no stage does so while another worker in the process reads seeded samples.  Before
a stage releases the lock, the previous states of the generators are restored.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gridtrain.training.data import sampler


def _hash_seed(*numbers: int) -> int:
    packed = struct.pack(f"<{len(numbers)}q", *numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def derive_initial_seed(*where: object) -> int:
    """Return a seed for initial values, from 0 to 2**63 - 1.

    Args:
        where: the run's seed, the block's index and, optionally, the path of a module in the block.
    """
    text = " ".join(map(str, ("gridtrain initial values", *where)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def derive_step_seed(seed: int, step: int, replica: int = 0) -> int:
    """Return the seed of one replica in one step, for `StageExecutor.run`.

    The seed is from 0 to 2**63 - 1, and is the same in all attempts at the step.
    """
    return _hash_seed(seed, step, replica)


def derive_layer_seed(step_seed: int, micro_batch: int, layer: int) -> int:
    """Return the seed of the generators for a layer and a micro-batch.

    Args:
        step_seed: the result of `derive_step_seed`.
        layer: the index of the layer in the whole model.
    """
    return _hash_seed(step_seed, micro_batch, layer)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the default generators of the CPU and of `device`."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


@contextmanager
def borrowed_generators(device: torch.device) -> Iterator[None]:
    """Return a context manager that locks the process's random generators, and restores them on exit.

    The generators are that of the CPU and, if `device` is a GPU, that of `device`.
    """
    with sampler.GENERATORS_LOCK:
        host = torch.get_rng_state()
        there = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        try:
            yield
        finally:
            torch.set_rng_state(host)
            if there is not None:
                torch.cuda.set_rng_state(there, device)
