"""Workers that die, leave and join: no worker hangs, replicas stay equal, every sample counts once.

A process kills itself by SIGKILL at an exact point of the exchange, which the test names.
"""

from __future__ import annotations

import signal
from itertools import chain

import pytest

pytestmark = pytest.mark.integration

KILLED, STOPPED = 128 + signal.SIGKILL, 128 + signal.SIGTERM
SAMPLES, STEP = 800, 10
JOB = {"exchange": "gtopk", "batch_size": 8, "epochs": 1, "samples": SAMPLES}
MAX_STALL_S = 10.0
"""Detection takes 0.4 s, REPORTs at most 2 s, the rest is round trips; tests print the measured stall."""


@pytest.mark.parametrize(
    ("exchange", "how", "rank", "world_size", "verdict"),
    [
        pytest.param("dense", "apply", 2, 4, "ABORT", id="a middle rank in mid-exchange"),
        pytest.param("gtopk", "apply", 0, 4, "ABORT", id="the root in mid-exchange"),
        pytest.param("topk", "votes", 0, 3, "COMMIT", id="the root with all votes and no decision sent"),
    ],
)
def test_sigkill_in_a_round_leaves_no_worker_hanging(
    new_group, exchange: str, how: str, rank: int, world_size: int, verdict: str
) -> None:
    """ABORT: the others repeat the step with the same gradient and residual.  COMMIT: all have its update."""
    death = {"exchange": exchange, "die": how, "die_step": STEP, "die_rank": rank, "die_of": world_size}
    with new_group(min_workers=world_size, codes=frozenset({0, KILLED})) as group:
        for number in range(world_size):
            group.add(f"worker-{number}", **JOB | death)
        ends = group.finish()

        (victim,) = (program for program in group.workers.values() if program.marked("dying"))
        assert victim.code == KILLED
        assert len(ends) == world_size - 1 and one_digest(ends)
        survivors = [program for program in group.workers.values() if program is not victim]

    first, second = group.events("generation")
    assert (first["workers"], second["workers"], second["verdict"]) == (world_size, world_size - 1, verdict)
    assert [fields["name"] for fields in group.events("lost")] == [victim.name]
    (attempt,) = (name for name in group.committed() if name[1] == STEP)  # the same on all workers
    assert attempt[0] == (1 if verdict == "COMMIT" else 2), "its generation"
    for program in survivors:
        tries = [line for line in program.marked("round") if line["round"][1] == STEP]
        assert len(tries) == 1 if verdict == "COMMIT" else len(tries) > 1
        assert all(line["samples"] == tries[0]["samples"] for line in tries), "the same gradient"
        assert all(line["residual"] == tries[0]["residual"] for line in tries), "to the bit"
    assert_every_sample_once(group)

    stalls_s = group.stalls_s(victim.marked("dying")[0]["at_s"])
    print(f"{victim.name} was killed in step {STEP}; from commit to commit the others took {stalls_s} s")
    assert len(stalls_s) == world_size - 1 and max(stalls_s.values()) < MAX_STALL_S


def test_sigkill_before_ready_leaves_no_worker_hanging(new_group) -> None:
    """The last worker to join dies when it receives the state; generation 1 never starts."""
    with new_group(min_workers=3, codes=frozenset({0, KILLED})) as group:
        late = group.gate()
        victim = group.add("clara", **JOB, die="restore", join_gate=late.path)
        group.add("anna", **JOB)
        group.add("bert", **JOB)
        group.wait("two workers", lambda: len(group.events("joined")) == 2)
        late.open()
        ends = group.finish()

        assert victim.code == KILLED and victim.marked("dying")
    assert [fields["workers"] for fields in group.events("generation")] == [3, 2]
    assert [fields["generation"] for fields in group.events("training")] == [2]
    assert len(ends) == 2 and one_digest(ends)
    assert_every_sample_once(group)


def test_sigkill_of_the_only_worker_with_the_state_starts_over(new_group) -> None:
    """The first worker to join dies when it is to send the state; the others have none, and wait."""
    with new_group(min_workers=3, codes=frozenset({0, KILLED})) as group:
        late = group.gate()
        victim = group.add("anna", **JOB, die="capture")
        for name in ("bert", "clara", "dora"):
            group.add(name, **JOB, join_gate=late.path)
        group.wait("the first worker", lambda: len(group.events("joined")) == 1)
        late.open()
        late.open()
        group.wait("a new start", lambda: bool(group.events("waiting")))
        late.open()
        ends = group.finish()

        assert victim.code == KILLED and victim.marked("dying")
    assert [(fields["workers"], fields["step"]) for fields in group.events("generation")] == [(3, 0), (3, 0)]
    assert [fields["generation"] for fields in group.events("training")] == [2]
    assert len(ends) == 3 and one_digest(ends)
    assert_every_sample_once(group)


def test_after_sigkill_of_a_source_no_block_is_sent_twice(new_group) -> None:
    """The source dies before block 15 of 19; the newcomer requests only missing blocks from the next one.

    Their batch norm statistics differ, so the newcomer takes those of the second source.
    """
    width = 1500
    job = {"exchange": "dense", "batch_size": 8, "steps": 6, "width": width, "batch_norm": True}
    with new_group(min_workers=2, codes=frozenset({0, KILLED})) as group:
        step, join = group.gate(), group.gate()
        anna = group.add("anna", **job, gated_step=3, step_gate=step.path, die="block", die_block=15)
        group.wait("the first worker", lambda: len(group.events("joined")) == 1)
        bert = group.add("bert", **job)
        clara = group.add("clara", **job, join_gate=join.path)
        group.wait("step 3 at anna", lambda: bool(anna.marked("at gate") and clara.marked("loaded")))
        join.open()
        group.wait("a change of members", lambda: bool(group.events("freeze")))
        step.open()
        ends = group.finish()

        assert anna.code == KILLED and anna.marked("dying")
        (sender,) = bert.marked("end")
    assert len(ends) == 2 and one_digest(ends)
    state_bytes = 2 * 4 * width * width  # of the middle layer, with its momentum
    assert 2**20 < sender["sent_bytes"]["StateBlock"] < 0.8 * state_bytes


def test_sigterm_makes_a_worker_leave_and_the_others_go_on(new_group) -> None:
    with new_group(min_workers=3, codes=frozenset({0, STOPPED})) as group:
        gate = group.gate()
        anna = group.add("anna", **JOB, gated_step=STEP, step_gate=gate.path)
        group.add("bert", **JOB)
        clara = group.add("clara", **JOB)
        group.wait("step 10 at anna", lambda: bool(anna.marked("at gate")))
        clara.process.terminate()  # the agent's process
        group.wait("a departure", lambda: bool(group.events("left")))
        gate.open()
        ends = group.finish()

        assert clara.code == STOPPED
        assert "(100.0 %) transferred: " in clara.said(), "its residual"
        recipients = [
            program for program in group.workers.values() if "added to this worker's" in program.said()
        ]
        assert len(recipients) == 1 and clara not in recipients
    leaver, *others = group.events("left")
    assert leaver["name"] == "clara" and len(others) == 2, "the others leave when the run is finished"
    assert not group.events("lost")
    assert len(ends) == 2 and one_digest(ends)
    assert_every_sample_once(group)


def test_a_late_joiner_receives_the_state_and_the_scheduler(new_group) -> None:
    job = {"exchange": "dense", "batch_size": 8, "steps": 60, "rates": True, "frozen": True}
    with new_group(min_workers=2) as group:
        step, join = group.gate(), group.gate()
        anna = group.add("anna", **job, gated_step=STEP, step_gate=step.path)
        group.add("bert", **job)
        clara = group.add("clara", **job, join_gate=join.path)
        group.wait("step 10 at anna", lambda: bool(anna.marked("at gate") and clara.marked("loaded")))
        join.open()
        group.wait("a change of members", lambda: bool(group.events("freeze")))
        step.open()
        ends = group.finish()

    first, second = group.events("generation")
    assert (first["workers"], second["workers"]) == (2, 3)
    assert second["step"] in (STEP, STEP + 1), "the open step may be committed before Freeze arrives"
    assert clara.marked("round")[0]["round"] == [2, second["step"], 0]
    assert len(ends) == 3 and one_digest(ends), "parameters, momentum, learning rate"
    assert len({end["parameters"] for end in ends}) == 1, "the frozen parameters, too"
    assert [end["scheduler_steps"] for end in ends] == [60, 60, 60]
    assert [end["lr"] for end in ends] == [pytest.approx(0.05 * 0.99**60)] * 3


def one_digest(ends: list[dict]) -> bool:
    """Parameters, optimizer state and settings are bit-identical, after the same number of steps."""
    return len({(end["digest"], end["step"]) for end in ends}) == 1


def assert_every_sample_once(group) -> None:
    taken = sorted(chain(*group.samples_by_round().values()))
    assert taken == list(range(SAMPLES)), "each sample in exactly one committed step"
