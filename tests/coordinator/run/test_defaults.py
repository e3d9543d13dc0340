"""What a caller gets that does not say, in all pure packages of the coordinator."""

from __future__ import annotations

import math
from pathlib import Path

from declared_defaults import constants, unusual_defaults
from recorded_results import compare

PACKAGES = "run", "stages", "membership", "access"


def test_defaults_are_zero_or_no_besides_these() -> None:
    found = {
        f"{package}.{name}": default
        for package in PACKAGES
        for name, default in unusual_defaults(f"gridtrain_coordinator.{package}").items()
    }
    assert found == {
        "run.registry.Worker.probe_deadline_s": math.inf,
        "run.registry.Worker.is_connected": True,
        "run.registry.Worker.link_broken_s": -math.inf,
        "run.route_table.PeerLocation.can_relay": True,
        "run.run_state.RunState.__init__(min_workers)": 1,
        "run.worker_problems.StepCounter._grew_s": -math.inf,
        "run.worker_problems.StepCounter._event_s": -math.inf,
        "run.worker_problems.WorkerProblems._next_checkpoint_event_s": -math.inf,
        "membership.departures.Departures.dismiss(notify)": True,
        "membership.departures.Departures._unregister(is_final)": True,
        "membership.departures.Departures._record_departure(is_final)": True,
        "membership.membership.Membership.__init__(min_workers)": 1,
        "membership.membership.Membership.__init__(plans)": True,
        "membership.pipeline_recovery.PipelineRecovery._find_restart_point(has_committed)": True,
    }


def test_bounds_and_other_constants_are_those_that_were_recorded() -> None:
    compare(
        Path(__file__).with_name("recorded_constants.json"),
        "coordinator",
        [(package, constants(f"gridtrain_coordinator.{package}")) for package in PACKAGES],
    )
