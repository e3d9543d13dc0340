"""Fault injection, for our tests and for users: `from gridtrain.testing import Faults`.

Decides nothing: `Faults` (gridtrain/transport/injection.py) for workers in threads and in processes; the plan
of faults of the network between threads is `gridtrain.transport.faults`.
"""

from gridtrain.transport.injection import Faults, InjectedFailure, Planned

__all__ = ["Faults", "InjectedFailure", "Planned"]
