"""Checkpoints count only if the journal or most members confirm them, not on one worker's word."""

from __future__ import annotations

from dataclasses import replace

from staged_run import StagedRun, state_after, stored

from gridtrain.core import messages as m
from gridtrain_coordinator.run.events import RunPhase
from gridtrain_coordinator.run.journal_recovery import recover_run
from gridtrain_coordinator.stages.checkpoint_catalog import failed_to_write, is_impossible
from gridtrain_coordinator.stages.checkpoint_quorum import MAX_CONFIRMED, CheckpointQuorum, majority_states
from gridtrain_coordinator.stages.whole_state import (
    latest_whole_state,
    unconfirmed_reason,
)

A, B, C, D, E = (letter * 32 for letter in (b"a", b"b", b"c", b"d", b"e"))
SPEC = m.LedgerSpec(1000, 0, epochs=1)
STAGES = m.Span(0, 1), m.Span(1, 2)


def report_after_loss(run: StagedRun, step: int, *left: bytes) -> None:
    """The remaining workers report step `step`."""
    run.report(*left, applied=step, history=b"h%d" % step, ledger=state_after(step))


# -- which step is confirmed ------------------------------------------------------------------------


def test_a_newcomer_alone_cannot_roll_the_run_back_to_its_own_state() -> None:
    """a and b reported step 9 while they trained; b is lost at step 23.  d invents a step 19."""
    run = StagedRun(2, A, B)
    run.say(A, m.StageCheckpointList(stored(9, 0, 1)))
    run.say(B, m.StageCheckpointList(stored(9, 1, 0)))
    run.lose(B)
    report_after_loss(run, 23, A)
    run.checkpoints[D] = stored(19, 0, 1, history=b"made up")
    run.join(D)
    view = run.view
    assert (view.applied, view.history) == (9, b"h9")


def test_a_member_alone_cannot_roll_the_run_back_to_its_own_state() -> None:
    run = StagedRun(3, A, B, C)
    for peer, stages in ((A, (0, 2)), (B, (1, 0)), (C, (2, 1))):
        run.say(
            peer,
            m.StageCheckpointList(
                (*stored(9, *stages), *(stored(19, 0, 1, 2, history=b"x") if peer == B else ()))
            ),
        )
    run.lose(C)
    report_after_loss(run, 23, A, B)
    run.join(D)
    view = run.view
    assert (view.applied, view.history) == (9, b"h9")


def test_without_a_confirmed_state_the_run_waits() -> None:
    run = StagedRun(2, A, B)
    run.say(A, m.StageCheckpointList(stored(9, 0)))
    run.lose(B)
    report_after_loss(run, 23, A)
    run.checkpoints |= {D: stored(5, 0, 1), E: stored(5, 1)}
    run.join(D)
    assert run.core.phase is RunPhase.PAUSED
    assert "step 6 is reported, but neither the journal nor most of the connected workers" in run.core.reason
    run.join(E)
    view = run.view
    assert view.applied == 5, "two of three report it"


def test_the_journal_confirms_what_lost_workers_reported() -> None:
    """Only one disk is left; a restarted coordinator confirms its checkpoint from the journal."""
    run = StagedRun(2, A, B)
    run.say(A, m.StageCheckpointList(stored(9, 0, 1)))
    run.say(B, m.StageCheckpointList(stored(9, 1, 0)))
    assert [body["checkpoint"]["step"] for _, body in run.journal if "checkpoint" in body] == [10]
    known = CheckpointQuorum(recover_run(run.journal).checkpoints)
    liar, survivor = stored(19, 0, 1, history=b"x"), stored(9, 0, 1)
    found = latest_whole_state(SPEC, {A: survivor, D: liar, E: ()}, 2, before=23, quorum=known)
    assert found is not None and found.history == b"h9"
    assert latest_whole_state(SPEC, {D: liar, E: ()}, 2, before=23, quorum=known) is None


def test_a_rollback_withdraws_later_checkpoints_also_in_the_journal() -> None:
    run = StagedRun(2, A, B)
    for step in (9, 19):
        run.say(A, m.StageCheckpointList((*stored(9, 0, 1), *(stored(19, 0) if step == 19 else ()))))
        run.say(B, m.StageCheckpointList((*stored(9, 1, 0), *(stored(19, 1) if step == 19 else ()))))
    assert {state[0] for state in run.core._checkpoints.quorum._confirmed} == {9, 19}
    run.lose(B)
    report_after_loss(run, 23, A)
    run.join(D)
    assert run.view.applied == 9
    assert {state[0] for state in run.core._checkpoints.quorum._confirmed} == {9}
    assert {state[0] for state in recover_run(run.journal).checkpoints} == {9}


def test_the_ledger_is_confirmed_too() -> None:
    """A confirmed step with another ledger could omit samples."""
    reported = stored(9, 0, 1)
    other = tuple(replace(checkpoint, ledger=m.LedgerState(10, 400, (), 400)) for checkpoint in reported)
    known = CheckpointQuorum()
    assert len(known.update(SPEC, 1, {A: STAGES[0], B: STAGES[1]}, {A: reported, B: reported})) == 1
    found = latest_whole_state(SPEC, {A: reported, C: other}, 2, before=23, quorum=known)
    assert found is not None and found.ledger == state_after(9)
    assert latest_whole_state(SPEC, {C: other, D: ()}, 2, before=23, quorum=known) is None


def test_stages_of_one_worker_count_as_one_vote() -> None:
    many = {A: stored(19, 0, 1, 2, history=b"x"), B: stored(9, 0, 1), C: stored(9, 2)}
    found = latest_whole_state(SPEC, many, 3, before=23, quorum=CheckpointQuorum())
    assert found is not None and found.history == b"h9"


def test_a_coordinator_without_a_journal_accepts_unconfirmed_checkpoints() -> None:
    """Nothing can be confirmed; one worker has checkpoints, the others are new."""
    disks = {A: stored(9, 0, 1), B: (), C: ()}
    assert latest_whole_state(SPEC, disks, 2, before=None) is not None
    assert latest_whole_state(SPEC, disks, 2, before=None, quorum=CheckpointQuorum()) is None
    assert majority_states(SPEC, {A: stored(9, 0), B: stored(19, 0), C: ()}) == frozenset()


def test_confirmed_states_are_bounded() -> None:
    known = CheckpointQuorum()
    for step in range(3 * MAX_CONFIRMED):
        known.update(SPEC, 1, {A: STAGES[0]}, {A: stored(step % 200, 0)})
    assert len(known._confirmed) == MAX_CONFIRMED


# -- which digest is trusted -------------------------------------------------------------------------


def test_a_checkpoint_with_another_digest_than_that_trained_is_not_used() -> None:
    """c reported stage 2 while it trained it; a reports a copy with another digest, b with the same one."""
    run = StagedRun(3, A, B, C)
    run.say(A, m.StageCheckpointList((*stored(9, 0, digest="t"), *stored(9, 2, digest="false"))))
    run.say(B, m.StageCheckpointList(stored(9, 1, 0, digest="t")))
    run.say(C, m.StageCheckpointList(stored(9, 2, 1, digest="t")))
    run.lose(C)
    report_after_loss(run, 23, A, B)
    run.join(D)
    assert run.core.phase is RunPhase.PAUSED and "stage 2" in run.core.reason
    run.say(B, m.StageCheckpointList(stored(9, 1, 0, 2, digest="t")))
    assert run.view.applied == 9
    (newcomer,) = [member for member in run.core.run.member_list if member.peer == D]
    assert run.core.run.member_list[newcomer.donor].peer == B and newcomer.digest == b"t2", (
        "the newcomer can verify what it receives"
    )
    again = CheckpointQuorum(recover_run(run.journal).checkpoints)
    assert not again.is_trusted(stored(9, 2, digest="false")[0]) and again.is_trusted(
        stored(9, 2, digest="t")[0]
    )
    members = recover_run(run.journal).roster
    assert [member.digest for member in members if member.peer == D] == [b"t2"]


def test_a_later_worker_of_a_stage_cannot_change_its_confirmed_digest() -> None:
    known = CheckpointQuorum()
    reported = {A: stored(9, 0, digest="t"), B: stored(9, 1, digest="t"), C: stored(9, 0, digest="false")}
    known.update(SPEC, 1, {A: STAGES[0], B: STAGES[1]}, reported)
    known.update(SPEC, 2, {C: STAGES[0], B: STAGES[1]}, reported)
    assert known.is_trusted(stored(9, 0, digest="t")[0]) and not known.is_trusted(
        stored(9, 0, digest="false")[0]
    )


def test_an_unconfirmed_whole_state_is_named_unless_its_history_was_abandoned() -> None:
    for step, last, is_named in ((9, 9, True), (9, 10, True), (9, 8, False), (10, 9, False)):
        reason = unconfirmed_reason(SPEC, {A: stored(step, 0), B: stored(step, 1)}, 2, last)
        assert reason.startswith(f"; step {step + 1} is reported") is is_named and bool(reason) is is_named
    assert unconfirmed_reason(SPEC, {A: stored(9, 0)}, 2, 9) == "", "the state is not whole"
    both = {A: (*stored(5, 0, 1), *stored(9, 0, 1))}
    assert unconfirmed_reason(SPEC, both, 2, 9).startswith("; step 10 ")


def test_a_checkpoint_of_another_run_is_impossible() -> None:
    setup = m.Setup((), SPEC, 4, None, stages=2)
    (checkpoint,) = stored(9, 1)
    assert not is_impossible(checkpoint, setup) and is_impossible(checkpoint, None)
    for wrong in (
        replace(checkpoint, layers=m.Span(1, 3)),
        replace(checkpoint, ledger=state_after(8)),
        replace(checkpoint, applied=8),
        replace(checkpoint, ledger=m.LedgerState(10, 40, (), 41)),
    ):
        assert is_impossible(wrong, setup)


def test_a_member_has_failed_to_write_if_others_need_its_state() -> None:
    """a holds stage 0 in memory, and b assembles its own stage from it."""
    members = (
        m.Member(A, "a", "", 1, False),
        m.Member(B, "b", "", 1, True, pieces=((STAGES[0], 0),), piece_digests=(b"",)),
    )
    ledger, history = state_after(9), b"h9"
    view = m.MembershipView(1, 3, 2, m.Verdict.ABORT, None, 9, history, ledger, "")
    usual = m.FreezeReport(1, 2, True, 9, history, ledger, None, b"", 0, STAGES[0])

    def failed(
        peer: bytes = A, report: m.FreezeReport | None = usual, on_disk: tuple[m.CheckpointInfo, ...] = ()
    ) -> bool:
        return failed_to_write(view, members, peer, report, on_disk)

    assert failed() and failed(on_disk=stored(9, 1)) and failed(on_disk=stored(8, 0))
    assert not failed(on_disk=stored(9, 0)), "the checkpoint is written"
    assert not failed(report=None) and not failed(report=replace(usual, is_synced=False))
    assert not failed(peer=C) and not failed(peer=B), "no other member needs a state of these"
    assert not failed(report=replace(usual, layers=STAGES[1]))
