"""A short run under faults: every guarantee is checked, with the faults that this machine can inject.

`make chaos MINUTES=20 EVERY=5` is the long run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.execution import Plan, execute
from chaos.report import summary
from chaos.schedule import DISK, NETWORK, Fault
from gridtrain.testing import Faults
from lab.net import why_not

pytestmark = pytest.mark.integration

MAX_STALL_S = 15.0
"""Ten times the usual stall on two cores: a longer one means that the others waited for a worker in vain."""


def test_a_short_storm_violates_no_guarantee(tmp_path: Path) -> None:
    planned = tmp_path / "faults.json"
    planned.write_text(Faults().kill_at("worker-3", 20, "during").text())
    storm = [
        Fault(5.0, "stop", 1, 1.0),
        Fault(8.0, "kill", 0, 0.0),
        Fault(13.0, "coordinator", 0, 1.0),
        Fault(17.0, "cut", 2, 1.0),
        Fault(19.0, "disk-coordinator", 0, 1.0),
        Fault(20.5, "stall", 1, 1.0),
    ]
    impossible = NETWORK | DISK if why_not() else frozenset()
    faults = tuple(fault for fault in storm if fault.kind not in impossible)
    plan = Plan(
        workers=4,
        length_s=22.0,
        loopback=bool(why_not()),
        faults=faults,
        planned=f"@{planned}",
        waits=True,
    )
    result = execute(plan, tmp_path / "run", print)
    figures = summary(plan, result)
    print(figures)
    assert result.broken == [], "\n".join(result.broken)
    done = [fault.kind for fault in result.injected]
    assert sorted(done) == sorted(fault.kind for fault in faults), result.left_out
    assert (tmp_path / "faults.json.struck-0").exists(), "the planned fault happened"
    assert figures["script_starts"] == plan.workers + 2, "the agents restarted both killed scripts once"
    for kind in ("kill", "stop", "coordinator"):
        assert figures["by_kind"][kind]["stall_worst_s"] < MAX_STALL_S, kind
