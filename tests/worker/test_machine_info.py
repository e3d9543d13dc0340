"""Names that say nothing about a person."""

from __future__ import annotations

import os
import socket

from gridtrain_worker.machine_info import MachineInfo


def test_a_random_name_by_default() -> None:
    names = {MachineInfo.detect().name for _ in range(20)}
    assert len(names) > 10
    assert not any(socket.gethostname() in name for name in names)
    assert MachineInfo.detect("anna").name == "anna"


def test_only_the_cpus_that_we_may_use() -> None:
    assert 1 <= MachineInfo.detect().cpus <= (os.cpu_count() or 1)
