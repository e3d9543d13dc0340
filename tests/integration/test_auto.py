"""`exchange="auto"` in real processes: one choice, from what was measured on limited lines, for all who come.

19,592 parameters are 78 kB: over 4 Mbit/s a ring of three takes a fifth of a second, sparse payloads a few
milliseconds, and a batch of these is computed in one.
"""

from __future__ import annotations

import signal

import pytest

pytestmark = pytest.mark.integration

KILLED = 128 + signal.SIGKILL
LIMITED = ("--upload-limit", "4Mbit")
JOB = {"exchange": "auto", "batch_size": 8, "steps": 250, "samples": 2000, "seed": 3}
DEATH = {"die": "apply", "die_step": 5, "die_rank": 2, "die_of": 3}


def test_a_thin_line_makes_the_exchange_sparse_for_all(new_group) -> None:
    with new_group(min_workers=3, codes=frozenset({0, KILLED})) as group:
        late, held = group.gate(), group.gate()
        for name in ("anna", "bert", "carl"):
            group.add(name, flags=LIMITED, step_gate=held.path, held_step=12, **JOB | DEATH)
        group.add("dora", flags=LIMITED, join_gate=late.path, **JOB)
        first = [group.workers[name] for name in ("anna", "bert", "carl")]
        group.wait("two that hold", lambda: sum(bool(program.marked("holding")) for program in first) == 2)
        late.open()
        # It has measured its lines: all steps that are left are over in a few seconds.
        group.wait("the newcomer", lambda: any("dora" in told["names"] for told in group.events("following")))
        held.open()
        held.open()
        ends = group.finish()
        opened, *chosen = [fields["exchange"] for fields in group.events("generation")]

    (victim,) = (program for program in first if program.marked("dying"))
    assert victim.code == KILLED
    assert len(ends) == 3 and len({end["digest"] for end in ends}) == 1
    (used,) = {end["used"] for end in ends}
    assert "TopK(density=0.05" in used
    assert opened == "not chosen yet"
    # Whichever of the two sparse ones it was: it said so with the others' times, and stayed.
    assert len({text.partition(":")[0] for text in chosen}) == 1
    assert "TopK(density=0.05" in chosen[0] and "dense " in chosen[0]
    assert all(program.marked("round")[0]["round"][0] > 1 for program in first), "none before the choice"
