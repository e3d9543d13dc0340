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

ROUTED_WITHIN_S = 30.0
"""The time within which a worker that no other worker can reach is connected by relays; 15 s is usual."""

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


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_no_member_is_dismissed_because_of_links_that_drop_everything(tmp_path: Path) -> None:
    """A worker that reaches the coordinator but no other worker is relayed, and back without a restart."""
    faults = (Fault(3.0, "links", 1, ROUTED_WITHIN_S),)
    plan = Plan(workers=3, length_s=ROUTED_WITHIN_S + 5.0, loopback=False, faults=faults, waits=True)
    result = execute(plan, tmp_path / "run", print)
    assert result.broken == [], "\n".join(result.broken)
    (fault,) = result.injected
    figures = summary(plan, result)
    print(figures)
    assert figures["script_starts"] == plan.workers, "no member was dismissed"
    record = result.record
    later = {step for step, at_s in record.committed_s.items() if fault.at_s + 1.0 < at_s < fault.until_s}
    assert later and {record.world_sizes[name] for step in later for name in record.committed[step]} == {3}
