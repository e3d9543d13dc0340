"""Fault injection, for our tests and for users: `from gridtrain.testing import Faults`.

Decides nothing: `Faults` (gridtrain/network/transport/fault_injection.py) for workers in threads and in processes; the plan
of faults of the network between threads is `gridtrain.network.transport.message_faults`.  `FakeSensors` stands for a
machine's battery, GPU, heat and people.
"""

from gridtrain.network.transport.fault_injection import Faults, InjectedFailure, PlannedFault
from gridtrain.testing.fake_sensors import FakeSensors, FileSensors

__all__ = ["FakeSensors", "Faults", "FileSensors", "InjectedFailure", "PlannedFault"]
