"""Fault injection, for our tests and for users: `from gridtrain.testing import Faults`.

Decides nothing: `Faults` (gridtrain/transport/injection.py) for workers in threads and in processes; the plan
of faults of the network between threads is `gridtrain.transport.faults`.  `FakeSensors` stands for a
machine's battery, GPU, heat and people.
"""

from gridtrain.testing.sensors import FakeSensors, FileSensors
from gridtrain.transport.injection import Faults, InjectedFailure, PlannedFault

__all__ = ["FakeSensors", "Faults", "FileSensors", "InjectedFailure", "PlannedFault"]
