"""One stay of a worker in a run: its owner's rules, restarts and contributions together."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from live_coordinator import LiveCoordinator

from gridtrain.core.group.invitation import Invitation
from gridtrain.core.messages import EndRun
from gridtrain.runtime.contribution import Contribution
from gridtrain_worker import policy_enforcer
from gridtrain_worker.agent import Job, supervise
from gridtrain_worker.console import Console

pytestmark = pytest.mark.integration

# The agent ends the first process, as it does not obey; the second fails; the third succeeds.
SCRIPT = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
assert os.path.exists(os.environ["GRIDTRAIN_CONTROL"])
assert not {"GRIDTRAIN_SENSORS", "GRIDTRAIN_SET"} & set(os.environ)
life = len(list(folder.glob("life-*")))
(folder / f"life-{life}").touch()
given = dict(step=10 * life + 10, steps=10, samples=40, run_samples=160, sent_bytes=5, received_bytes=7)
given["world_size"] = 1
pathlib.Path(os.environ["GRIDTRAIN_CONTRIBUTION"]).write_text(json.dumps(given))
if life == 0:
    (folder / "new").write_text(json.dumps({"on_battery": True}))
    os.replace(folder / "new", folder / "sensors")
    time.sleep(60)
sys.exit(3 if life == 1 else 0)
"""


class RecordingConsole(Console):
    def __init__(self) -> None:
        self.ended: list[tuple[Contribution, Contribution]] = []

    def show_summary(self, given: Contribution, total: Contribution) -> None:
        self.ended.append((given, total))


def test_contributions_add_up_over_a_pause_and_a_failure(
    invitation: Invitation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_enforcer, "OBEY_TIMEOUT_S", 0.1)
    monkeypatch.setenv("GRIDTRAIN_SET", "battery=pause")  # which is the agent's, not the script's
    said: list[str] = []
    sensors, console = tmp_path / "sensors", RecordingConsole()
    sensors.write_text(json.dumps({"on_battery": False}))

    def record(line: str) -> None:
        said.append(line)
        if "started again when training is allowed" in line:
            (tmp_path / "new").write_text(json.dumps({"on_battery": False}))
            os.replace(tmp_path / "new", sensors)

    job = Job(
        (sys.executable, "-c", SCRIPT, str(tmp_path)),
        invitation,
        name="anna",
        restarts=1,
        controls=(("battery", "pause"),),
        sensors=str(sensors),
        backoff_s=0.01,
    )
    assert supervise(job, record, console=console) == 0
    assert len(list(tmp_path.glob("life-*"))) == 3
    order = [
        "is joining the run",
        "paused: battery",
        "started again when",
        "training is allowed again",
        "exit code 3",
        "restart 1",
    ]
    found = [[i for i, line in enumerate(said) if words in line] for words in order]
    assert all(found) and [first for first, *_ in found] == sorted(first for first, *_ in found), said
    ((given, total),) = console.ended
    assert (given.steps, given.samples, given.sent_bytes, given.step) == (30, 120, 15, 30) and total == given


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_script_that_ends_before_its_run_is_named_as_such(
    coordinator: LiveCoordinator, tmp_path: Path, is_finished: bool
) -> None:
    """The third process of the script succeeds at once, after step 30."""
    said: list[str] = []
    for life in range(2):
        (tmp_path / f"life-{life}").touch()

    def record(line: str) -> None:
        said.append(line)
        if is_finished and "is joining the run" in line:
            coordinator.daemon._membership.run.generation = 1  # the script only seems to train
            coordinator.operator_client().order(EndRun())

    job = Job((sys.executable, "-c", SCRIPT, str(tmp_path)), coordinator.invitation())
    assert supervise(job, record, console=RecordingConsole()) == 0
    expected = (
        "the script ended after step 30, before the end of the run; start this worker again to contribute "
        "more"
    )
    assert said.count(expected) == (not is_finished), said
