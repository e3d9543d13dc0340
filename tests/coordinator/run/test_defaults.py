"""Default arguments and constants of all pure packages of the coordinator."""

from __future__ import annotations

from pathlib import Path

from declared_defaults import constants, unusual_defaults
from recorded_results import compare

RECORDED = Path(__file__).with_name("recorded_constants.json")
PACKAGES = [(name, f"gridtrain_coordinator.{name}") for name in ("run", "stages", "membership", "access")]


def test_defaults_and_constants_are_those_that_were_recorded() -> None:
    compare(RECORDED, "coordinator", [(name, constants(package)) for name, package in PACKAGES])
    compare(RECORDED, "defaults", [(name, unusual_defaults(package)) for name, package in PACKAGES])
