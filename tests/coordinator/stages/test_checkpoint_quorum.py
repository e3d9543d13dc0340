"""Checkpoints count only if the journal or most members confirm them, not on one worker's word."""

from __future__ import annotations

from dataclasses import replace

from staged_run import StagedRun

from gridtrain.core import messages as m
from gridtrain.core.commit.verdict import Outcome
from gridtrain_coordinator.run.events import JournalEntry, RunPhase
from gridtrain_coordinator.run.journal_recovery import recover_run
from gridtrain_coordinator.stages.checkpoint_catalog import failed_to_write, is_impossible
from gridtrain_coordinator.stages.checkpoint_quorum import MAX_CONFIRMED, CheckpointQuorum, ReporterMajority
from gridtrain_coordinator.stages.whole_state import (
    find_restart_point,
    latest_whole_state,
    unconfirmed_reason,
)

A, B, C, D, E = (letter * 32 for letter in (b"a", b"b", b"c", b"d", b"e"))
SPEC = m.LedgerSpec(1000, 0, epochs=1)
BLOCKS = m.Span(0, 1), m.Span(1, 2)


def state_after(step: int) -> m.LedgerState:
    """Steps of 4 samples each."""
    return m.LedgerState(step=step + 1, cursor=4 * (step + 1), consumed=4 * (step + 1))


def kept(step: int, *stages: int, history: bytes = b"", digest: str = "") -> tuple[m.CheckpointInfo, ...]:
    """`digest`: "x" makes b"x0" of stage 0, b"x1" of stage 1; each stage is one layer."""
    name, state = history or b"h%d" % step, state_after(step)
    return tuple(
        m.CheckpointInfo(step, name, state, m.Span(s, s + 1), f"{digest}{s}".encode() if digest else b"")
        for s in stages
    )


def lost_at(run: StagedRun, step: int, *left: bytes) -> None:
    """The remaining workers report that step."""
    run.report(*left, applied=step, history=b"h%d" % step, ledger=state_after(step))


# -- which step --------------------------------------------------------------------------------------


def test_a_lone_newcomer_cannot_make_the_run_go_back_to_a_state_of_its_own() -> None:
    """a and b reported step 9 while they trained; b dies at 23.  d makes up a step 19."""
    run = StagedRun(2, A, B)
    run.say(A, m.StageCheckpointList(kept(9, 0, 1)))
    run.say(B, m.StageCheckpointList(kept(9, 1, 0)))
    run.lose(B)
    lost_at(run, 23, A)
    run.checkpoints[D] = kept(19, 0, 1, history=b"made up")
    run.join(D)
    view = run.core.run.view
    assert view is not None and (view.applied, view.history) == (9, b"h9")


def test_nor_can_one_that_is_a_member() -> None:
    run = StagedRun(3, A, B, C)
    for peer, stages in ((A, (0, 2)), (B, (1, 0)), (C, (2, 1))):
        run.say(
            peer,
            m.StageCheckpointList(
                (*kept(9, *stages), *(kept(19, 0, 1, 2, history=b"x") if peer == B else ()))
            ),
        )
    run.lose(C)
    lost_at(run, 23, A, B)
    run.join(D)
    view = run.core.run.view
    assert view is not None and (view.applied, view.history) == (9, b"h9")


def test_without_anything_borne_out_the_run_waits_rather_than_believe_one() -> None:
    run = StagedRun(2, A, B)
    run.say(A, m.StageCheckpointList(kept(9, 0)))
    run.lose(B)
    lost_at(run, 23, A)
    run.checkpoints |= {D: kept(5, 0, 1), E: kept(5, 1)}
    run.join(D)
    assert run.core.phase is RunPhase.PAUSED
    assert "step 6 is reported, but neither the journal nor most of the present workers" in run.core.reason
    run.join(E)
    view = run.core.run.view
    assert view is not None and view.applied == 5, "two of three say so"


def test_the_journal_bears_out_what_the_dead_have_told() -> None:
    """All die but one disk: a restarted coordinator knows from its journal what is true."""
    run = StagedRun(2, A, B)
    run.say(A, m.StageCheckpointList(kept(9, 0, 1)))
    run.say(B, m.StageCheckpointList(kept(9, 1, 0)))
    entries = [(e.kind, e.body) for e in run.seen if isinstance(e, JournalEntry)]
    assert [body["checkpoint"]["step"] for _, body in entries if "checkpoint" in body] == [10]
    known = CheckpointQuorum(recover_run(entries).checkpoints)
    liar, survivor = kept(19, 0, 1, history=b"x"), kept(9, 0, 1)
    found = latest_whole_state(SPEC, {A: survivor, D: liar, E: ()}, 2, before=23, quorum=known)
    assert found is not None and found.history == b"h9"
    assert latest_whole_state(SPEC, {D: liar, E: ()}, 2, before=23, quorum=known) is None


def test_a_rollback_takes_back_what_came_after_also_in_the_journal() -> None:
    run = StagedRun(2, A, B)
    for step in (9, 19):
        run.say(A, m.StageCheckpointList((*kept(9, 0, 1), *(kept(19, 0) if step == 19 else ()))))
        run.say(B, m.StageCheckpointList((*kept(9, 1, 0), *(kept(19, 1) if step == 19 else ()))))
    assert {state[0] for state in run.core._checkpoints.quorum._confirmed} == {9, 19}
    run.lose(B)
    lost_at(run, 23, A)
    run.join(D)
    assert run.core.run.view is not None and run.core.run.view.applied == 9
    assert {state[0] for state in run.core._checkpoints.quorum._confirmed} == {9}
    entries = [(e.kind, e.body) for e in run.seen if isinstance(e, JournalEntry)]
    assert {state[0] for state in recover_run(entries).checkpoints} == {9}


def test_the_ledger_is_borne_out_too() -> None:
    """A true step with another ledger would let samples be left out."""
    told = kept(9, 0, 1)
    other = tuple(replace(held, ledger=m.LedgerState(10, 400, (), 400)) for held in told)
    known = CheckpointQuorum()
    assert len(known.update(SPEC, 1, {A: BLOCKS[0], B: BLOCKS[1]}, {A: told, B: told})) == 1
    found = latest_whole_state(SPEC, {A: told, C: other}, 2, before=23, quorum=known)
    assert found is not None and found.ledger == state_after(9)
    assert latest_whole_state(SPEC, {C: other, D: ()}, 2, before=23, quorum=known) is None


def test_stages_of_one_worker_are_one_voice() -> None:
    many = {A: kept(19, 0, 1, 2, history=b"x"), B: kept(9, 0, 1), C: kept(9, 2)}
    found = latest_whole_state(SPEC, many, 3, before=23, quorum=CheckpointQuorum())
    assert found is not None and found.history == b"h9"


def test_a_new_coordinator_believes_those_who_have_anything() -> None:
    """Its journal is lost, so nothing can be confirmed: one worker has checkpoints, others are new."""
    disks = {A: kept(9, 0, 1), B: (), C: ()}
    assert latest_whole_state(SPEC, disks, 2, before=None) is not None
    assert latest_whole_state(SPEC, disks, 2, before=None, quorum=CheckpointQuorum()) is None
    assert ReporterMajority().confirmed_states(SPEC, {A: kept(9, 0), B: kept(19, 0), C: ()}) == frozenset()


def test_what_is_known_is_bounded() -> None:
    known = CheckpointQuorum()
    for step in range(3 * MAX_CONFIRMED):
        known.update(SPEC, 1, {A: BLOCKS[0]}, {A: kept(step % 200, 0)})
    assert len(known._confirmed) == MAX_CONFIRMED


# -- which bits --------------------------------------------------------------------------------------


def test_a_checkpoint_with_other_bits_than_were_trained_is_nobodys() -> None:
    """c reported stage 2 while it trained it; a reports a copy with another digest, b a true one."""
    run = StagedRun(3, A, B, C)
    run.say(A, m.StageCheckpointList((*kept(9, 0, digest="t"), *kept(9, 2, digest="false"))))
    run.say(B, m.StageCheckpointList(kept(9, 1, 0, digest="t")))
    run.say(C, m.StageCheckpointList(kept(9, 2, 1, digest="t")))
    run.lose(C)
    lost_at(run, 23, A, B)
    run.join(D)
    assert run.core.phase is RunPhase.PAUSED and "stage 2" in run.core.reason
    run.say(B, m.StageCheckpointList(kept(9, 1, 0, 2, digest="t")))
    assert run.core.run.view is not None and run.core.run.view.applied == 9
    (line,) = [member for member in run.core.run.member_list if member.peer == D]
    assert run.core.run.member_list[line.donor].peer == B and line.digest == b"t2", (
        "it can compare what comes"
    )
    entries = [(e.kind, e.body) for e in run.seen if isinstance(e, JournalEntry)]
    again = CheckpointQuorum(recover_run(entries).checkpoints)
    assert not again.is_trusted(kept(9, 2, digest="false")[0]) and again.is_trusted(kept(9, 2, digest="t")[0])
    roster = recover_run(entries).roster
    assert [member.digest for member in roster if member.peer == D] == [b"t2"]


def test_who_sits_in_a_stage_later_cannot_say_what_it_was() -> None:
    known = CheckpointQuorum()
    told = {A: kept(9, 0, digest="t"), B: kept(9, 1, digest="t"), C: kept(9, 0, digest="false")}
    known.update(SPEC, 1, {A: BLOCKS[0], B: BLOCKS[1]}, told)
    known.update(SPEC, 2, {C: BLOCKS[0], B: BLOCKS[1]}, told)
    assert known.is_trusted(kept(9, 0, digest="t")[0]) and not known.is_trusted(kept(9, 0, digest="false")[0])


def test_a_state_in_memory_needs_no_digest() -> None:
    outcome = Outcome(m.Verdict.ABORT, None, 19, b"h19", state_after(19), frozenset({A}))
    begin = find_restart_point(
        SPEC, outcome, 19, {A: BLOCKS[0]}, {A: (), B: kept(19, 1)}, (0, 1, 2), CheckpointQuorum()
    )
    assert begin.outcome is outcome and begin.state_locations.in_memory == {A: 0}


def test_a_whole_state_that_nobody_confirms_is_named_unless_it_is_of_a_history_given_up() -> None:
    for step, last, is_named in ((9, 9, True), (9, 10, True), (9, 8, False), (10, 9, False)):
        reason = unconfirmed_reason(SPEC, {A: kept(step, 0), B: kept(step, 1)}, 2, last)
        assert reason.startswith(f"; step {step + 1} is reported") is is_named and bool(reason) is is_named
    assert unconfirmed_reason(SPEC, {A: kept(9, 0)}, 2, 9) == "", "it is not whole"
    both = {A: (*kept(5, 0, 1), *kept(9, 0, 1))}
    assert unconfirmed_reason(SPEC, both, 2, 9).startswith("; step 10 ")


def test_a_checkpoint_of_another_run_is_impossible() -> None:
    setup = m.Setup((), SPEC, 4, None, stages=2)
    (held,) = kept(9, 1)
    assert not is_impossible(held, setup) and is_impossible(held, None)
    for wrong in (
        replace(held, layers=m.Span(1, 3)),
        replace(held, ledger=state_after(8)),
        replace(held, applied=8),
        replace(held, ledger=m.LedgerState(10, 40, (), 41)),
    ):
        assert is_impossible(wrong, setup)


def test_who_has_failed_to_write_its_memory() -> None:
    """a holds stage 0 in memory, which b assembles its own from."""
    members = (
        m.Member(A, "a", "", 1, False),
        m.Member(B, "b", "", 1, True, pieces=((BLOCKS[0], 0),), piece_digests=(b"",)),
    )
    ledger, history = state_after(9), b"h9"
    view = m.MembershipView(1, 3, 2, m.Verdict.ABORT, None, 9, history, ledger, "")
    report = m.FreezeReport(1, 2, True, 9, history, ledger, None, b"", 0, BLOCKS[0])

    def failed(
        peer: bytes = A, told: m.FreezeReport | None = report, stored: tuple[m.CheckpointInfo, ...] = ()
    ) -> bool:
        return failed_to_write(view, members, peer, told, stored)

    assert failed() and failed(stored=kept(9, 1)) and failed(stored=kept(8, 0))
    assert not failed(stored=kept(9, 0)), "it is written"
    assert not failed(told=None) and not failed(told=replace(report, is_synced=False))
    assert not failed(peer=C) and not failed(peer=B), "nobody needs it from these"
    assert not failed(told=replace(report, layers=BLOCKS[1]))
