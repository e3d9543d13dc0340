"""A short chaos run in `make test`: every promise is checked, under the faults that this machine can do.

`make chaos MINUTES=20 EVERY=5` is the long one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.play import Plan, play
from chaos.report import summary
from chaos.schedule import DISK, NETWORK, Fault
from gridtrain.testing import Faults
from lab.net import why_not

pytestmark = pytest.mark.integration

MOST_STALL_S = 15.0
"""A tenth of it on a machine of two cores; more means that the others waited for somebody who does not come,
and how long it takes where nothing else runs is for `make chaos`."""


def test_a_short_storm_breaks_no_promise(tmp_path: Path) -> None:
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
        rate="100Mbit",
        loopback=bool(why_not()),
        faults=faults,
        planned=f"@{planned}",
        waits=True,
    )
    played = play(plan, tmp_path / "run", print)
    figures = summary(plan, played)
    print(figures)
    assert played.broken == [], "\n".join(played.broken)
    done = [struck.kind for struck in played.struck]
    assert sorted(done) == sorted(fault.kind for fault in faults), played.left_out
    assert (tmp_path / "faults.json.struck-0").exists(), "the planned fault struck"
    assert figures["script_starts"] == plan.workers + 2, "the agents started both killed ones again, once"
    for kind in ("kill", "stop", "coordinator"):
        assert figures["by_kind"][kind]["stall_worst_s"] < MOST_STALL_S, kind
