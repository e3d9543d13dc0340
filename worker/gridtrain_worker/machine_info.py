"""Determine the name and the number of CPU cores of this machine.

The default name is random: host and user names are personal data and are never read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from gridtrain.runtime.client.worker_naming import random_name


@dataclass(frozen=True, slots=True)
class MachineInfo:
    """A description of this machine.

    Attributes:
        name: the machine's name in the run.
        cpus: the number of cores that this process may use.
    """

    name: str
    cpus: int

    @classmethod
    def detect(cls, name: str = "") -> MachineInfo:
        affinity = getattr(os, "sched_getaffinity", None)
        cpus = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
        return cls(name or random_name(), cpus)
