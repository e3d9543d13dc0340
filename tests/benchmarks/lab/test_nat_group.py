"""Four workers train together with none, half and all of them behind NAT, and end with the same parameters.

All homes have the same private addresses (see lab.group).  test_nat.py shows that hosts behind NAT cannot be
dialled.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.group import Plan, start
from lab.net import Net

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).parents[2] / "integration" / "scripts" / "train.py"
STEPS = 40
TIMEOUT_S = 150.0


def ends_of(output: str) -> list[dict[str, Any]]:
    """Return what the script reports at the end of its run."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return [line for line in lines if line.get("mark") == "end"]


@pytest.mark.parametrize(
    ("nat", "exchange"),
    [("none", "gtopk"), ("half", "gtopk"), ("all", "gtopk"), ("all", "dense")],
)
def test_all_finish_with_the_same_parameters(
    net: Net, whole_group: None, tmp_path: Path, nat: str, exchange: str
) -> None:
    run = json.dumps({"exchange": exchange, "batch_size": 8, "steps": STEPS})
    plan = Plan(workers=4, nat=nat)
    group = start(net, plan, tmp_path, lambda name: (sys.executable, str(SCRIPT), run))
    group.wait(TIMEOUT_S)
    ends = [end for worker in group.workers.values() for end in ends_of(worker.stdout_path.read_text())]
    assert sorted(end["rank"] for end in ends) == [0, 1, 2, 3]
    assert {end["of"] for end in ends} == {4}
    assert {end["step"] for end in ends} == {STEPS}
    assert len({end["digest"] for end in ends}) == 1, "parameters and optimizer state, bit for bit"
    assert {end["skipped_steps"] for end in ends} == {0}
    assert len(plan.behind_nat) == {"none": 0, "half": 2, "all": 4}[nat]
    for name in plan.behind_nat:
        assert group.uplinks[name] is not group.hosts[name], "a router connects it to the others"
