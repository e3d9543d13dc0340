"""Mutants that tests/mutation sets aside are possible changes of the present sources."""

from __future__ import annotations

import tomllib
from pathlib import Path

from mutation.mutators import mutants

ROOT = Path(__file__).parents[2]


def test_every_mutant_that_is_set_aside_exists() -> None:
    entries = tomllib.loads((ROOT / "tests/mutation/equivalent.toml").read_text())["equivalent"]
    exist = {mutant.key() for file in {each["file"] for each in entries} for mutant in mutants(ROOT, file)}
    named = [tuple(each[key] for key in ("file", "function", "before", "after")) for each in entries]
    assert [each for each in named if each not in exist] == []
