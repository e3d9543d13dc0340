"""Random names that contain no personal data, and the usable CPUs."""

from __future__ import annotations

import os
import socket

from gridtrain_worker.machine_info import MachineInfo


def test_a_random_name_by_default() -> None:
    names = {MachineInfo.detect().name for _ in range(20)}
    assert len(names) > 10
    assert not any(socket.gethostname() in name for name in names)
    assert MachineInfo.detect("anna").name == "anna"


def test_only_usable_cpus_are_counted() -> None:
    assert 1 <= MachineInfo.detect().cpus <= (os.cpu_count() or 1)
