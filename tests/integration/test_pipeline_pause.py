"""A volunteer pauses the only worker of a stage: real processes, the real command.

anna   stage 0   ... 11 | 12 |  waits, the reason is shown  | 13  14 ...     every step once, the same losses,
bert   stage 1   ... 11 | 12 |  paused by its owner         | 13  14 ...     no step goes back
                        both wait until bert's agent has the command, however long it takes to start
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).parent / "scripts" / "pipeline_paused.py"
STEPS, GATED_STEP = 200, 12


def command(group: Any, *words: str) -> None:
    """Run a `gridtrain worker` command as the owner of that machine."""
    done = subprocess.run(
        (sys.executable, "-m", "gridtrain.cli", "worker", *words),
        capture_output=True,
        text=True,
        timeout=60.0,
        env=os.environ | {"XDG_STATE_HOME": str(group.folder)},
    )
    assert done.returncode == 0, done.stderr


def test_the_run_waits_for_a_paused_stage_and_loses_no_step(new_group: Any) -> None:
    with new_group(min_workers=2) as group:
        gate = group.gate()
        job = {"steps": STEPS, "gated_step": GATED_STEP, "step_gate": gate.path}
        anna, bert = (group.add(name, script=SCRIPT, **job) for name in ("anna", "bert"))
        group.wait("step 12", lambda: all(worker.marked("at gate") for worker in (anna, bert)))
        command(group, "pause", "--worker", "bert")
        for _ in (anna, bert):
            gate.open()
        group.wait("the pause", lambda: bool(group.events("paused")))
        paused_at = len(anna.marked("step"))
        assert "1 worker is present, but 2 are needed" in group.events("paused")[-1]["reason"]
        command(group, "resume", "--worker", "bert")
        group.finish()
        assert group.events("rollback") == []
        assert "is held only by this worker" in bert.said()
    assert GATED_STEP <= paused_at < STEPS
    for worker in (anna, bert):
        assert [line["step"] for line in worker.marked("step")] == list(range(STEPS))
    assert [line["loss"] for line in anna.marked("step")] == [line["loss"] for line in bert.marked("step")]
