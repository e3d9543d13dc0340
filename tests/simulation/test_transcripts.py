"""The cores behave as recorded in transcripts/baseline.json: every event, effect and deadline of a history.

A refactoring leaves all digests as they are.  If a change of behaviour is meant, record again and say so:

    PYTHONPATH=tests:tests/common python tests/simulation/record_transcripts.py --out FILE
"""

from __future__ import annotations

from pathlib import Path

import pytest

from simulation.record_transcripts import HISTORIES, load, record

BASELINE = load(Path(__file__).parent / "transcripts" / "baseline.json")


@pytest.mark.parametrize("name", sorted(HISTORIES))
@pytest.mark.parametrize("number", range(3))
def test_histories_are_as_recorded(number: int, name: str) -> None:
    """The first three seeds of each kind, one of them in `make test`; the script checks all of them."""
    seed, digest = list(BASELINE[name].items())[number]
    assert record(name, seed).digest == digest, f"compare `--show {name} {seed}` of both trees"
