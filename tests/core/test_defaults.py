"""Default arguments, bounds and other constants of the core."""

from __future__ import annotations

from pathlib import Path

from declared_defaults import constants, unusual_defaults
from recorded_results import compare

RECORDED = Path(__file__).with_name("recorded_constants.json")


def test_defaults_and_constants_are_those_that_were_recorded() -> None:
    compare(RECORDED, "core", constants("gridtrain.core"))
    compare(RECORDED, "core defaults", unusual_defaults("gridtrain.core"))
