"""Fault injection for gridtrain's own tests and for users: `from gridtrain.testing import Faults`.

`Faults` (from `gridtrain.network.transport.fault_injection`) makes workers in threads and in processes fail.
`FakeSensors` and `FileSensors` replace the sensors of a machine: battery, GPU, temperature and idle time.
"""

from gridtrain.network.transport.fault_injection import Faults, InjectedFailure, PlannedFault
from gridtrain.testing.fake_sensors import FakeSensors, FileSensors

__all__ = ["FakeSensors", "Faults", "FileSensors", "InjectedFailure", "PlannedFault"]
