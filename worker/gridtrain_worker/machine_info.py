"""What the agent knows of its own machine.

Decides what a worker is called if nobody says.  Never reads the host's or the user's name: they are
personal.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from gridtrain.runtime.client.worker_naming import random_name


@dataclass(frozen=True, slots=True)
class MachineInfo:
    """This machine, under the name it goes by in the run.  `cpus`: those this process may use."""

    name: str
    cpus: int

    @classmethod
    def detect(cls, name: str = "") -> MachineInfo:
        affinity = getattr(os, "sched_getaffinity", None)
        cpus = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
        return cls(name or random_name(), cpus)
