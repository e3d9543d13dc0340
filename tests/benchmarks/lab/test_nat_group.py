"""Four workers train together with none, half and all of them behind NAT, and end with the same parameters.

All homes have the same private addresses (see lab.group).  test_nat.py shows that hosts behind NAT cannot be
dialled.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lab.group import LabHosts, lab_group

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).parents[2] / "integration" / "scripts" / "train.py"
STEPS = 40
TIMEOUT_S = 150.0


@pytest.mark.parametrize(
    ("nat", "exchange"),
    [("none", "gtopk"), ("half", "gtopk"), ("all", "gtopk"), ("all", "dense")],
)
def test_all_finish_with_the_same_parameters(
    lab: None, whole_group: None, tmp_path: Path, nat: str, exchange: str
) -> None:
    run = json.dumps({"exchange": exchange, "batch_size": 8, "steps": STEPS})
    names = [f"worker-{number}" for number in range(1, 5)]
    with lab_group(names, tmp_path, nat=nat) as group:
        for name in names:
            group.add(name, (sys.executable, str(SCRIPT), run))
        group.finish(TIMEOUT_S)
        assert (
            isinstance(group.hosts, LabHosts)
            and len(group.hosts.behind_nat) == {"none": 0, "half": 2, "all": 4}[nat]
        )
    ends = [end for worker in group.workers.values() for end in worker.marked("end")]
    assert sorted(end["rank"] for end in ends) == [0, 1, 2, 3]
    assert {end["of"] for end in ends} == {4}
    assert {end["step"] for end in ends} == {STEPS}
    assert len({end["digest"] for end in ends}) == 1, "parameters and optimizer state, bit for bit"
    assert {end["skipped_steps"] for end in ends} == {0}
