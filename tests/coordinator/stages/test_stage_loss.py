"""A pipeline loses workers: who takes over, which samples are reassigned, when the run rolls back."""

from __future__ import annotations

import math
from dataclasses import replace

from scripted_coordinator import receivers, sent
from staged_run import StagedRun

from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain.core.commit.two_phase_commit import extend_history
from gridtrain.core.commit.verdict import Outcome, decide_outcome
from gridtrain_coordinator.run.divergence import DivergenceDetector
from gridtrain_coordinator.run.events import DialBackResult, JournalEntry, RecordViolation, RunPhase
from gridtrain_coordinator.run.journal_recovery import recover_run
from gridtrain_coordinator.stages.whole_state import find_restart_point, latest_whole_state

A, B, C, D, E = (letter * 32 for letter in (b"a", b"b", b"c", b"d", b"e"))
SPEC = m.LedgerSpec(100, 0, epochs=1)


def state_after(step: int) -> m.LedgerState:
    """Steps of 4 samples each."""
    return m.LedgerState(step=step + 1, cursor=4 * (step + 1), consumed=4 * (step + 1))


def kept(step: int, *stages: int, history: bytes = b"") -> tuple[m.CheckpointInfo, ...]:
    return tuple(
        m.CheckpointInfo(step, history or b"h%d" % step, state_after(step), m.Span(n, n + 1)) for n in stages
    )


# -- the verdict -------------------------------------------------------------------------------------


def test_an_aborted_step_is_handed_out_anew_as_a_whole() -> None:
    """With one stage survivors keep their positions; a pipeline's gradient is that of all its members."""
    shares = [(A, 4), (B, 4), (C, 0), (D, 0)]
    state = m.LedgerState()
    reports = {
        peer: m.FreezeReport(1, 1, True, -1, b"", state, None, b"", 0, m.Span(stage, stage + 1))
        for peer, stage in ((A, 0), (C, 1), (D, 1))
    }
    apart = decide_outcome(reports, SPEC, shares).ledger
    assert apart.holders == ((A, (m.Span(0, 4),)),) and apart.requeued == (m.Span(4, 8),)
    anew = decide_outcome(reports, SPEC, shares, in_stages=True).ledger
    assert anew.holders is None and anew.requeued == (m.Span(0, 8),)
    assert data_ledger.assign(SPEC, anew, [(A, 4), (C, 0)]) == {A: (m.Span(0, 4),), C: ()}


def test_a_step_that_all_are_prepared_for_is_committed() -> None:
    run = StagedRun(2, A, B, C, D)
    round_id = m.RoundId(1, 1, 0, 0)
    run.lose(D)
    order = [member.peer for member in run.core.run.member_list]
    run.report(*(p for p in order if p != D), prepared=round_id, digest=b"all")
    view = run.core.run.view
    assert view is not None and view.verdict is m.Verdict.COMMIT and view.applied == 0
    assert view.history == extend_history(b"", b"all") or view.history != b""
    assert view.ledger.consumed == 8, "two first workers of 4 samples each"


# -- who goes on -------------------------------------------------------------------------------------


def test_a_spare_takes_the_seat_of_the_dead_and_gets_the_state_from_its_replica() -> None:
    run = StagedRun(2, A, B, C, D, E)
    before = {member.peer: run.stage_of(member.peer) for member in run.core.run.member_list}
    (spare,) = {A, B, C, D, E} - set(before)
    dead = next(peer for peer, stage in before.items() if stage == 1)
    run.lose(dead)
    run.report(*(peer for peer in before if peer != dead))
    after = {member.peer: member for member in run.core.run.member_list}
    assert set(after) == set(before) - {dead} | {spare}
    assert {p: run.stage_of(p) for p in after if p != spare} == {p: s for p, s in before.items() if p != dead}
    assert run.stage_of(spare) == 1 and after[spare].joining
    donor = run.core.run.member_list[after[spare].donor].peer
    assert before[donor] == 1 and not after[donor].joining
    name = spare[:1].decode()
    assert f"{name} gets stage 1 from {donor[:1].decode()}" in run.core.snapshot(run.now_s)["plan_reason"]


def test_without_a_spare_the_rest_goes_on_with_one_replica_less() -> None:
    run = StagedRun(2, A, B, C, D)
    stages = {member.peer: run.stage_of(member.peer) for member in run.core.run.member_list}
    dead = [peer for peer, stage in stages.items() if stage == 0][1]
    run.lose(dead)
    run.report(*(peer for peer in stages if peer != dead))
    assert len(run.core.run.member_list) == 2 and len(run.standbys.split()) == 1
    assert not any(member.joining for member in run.core.run.member_list)
    (left_over,) = [w.peer for w in run.core.run.workers.values() if w.standby_reason]
    (spared,) = run.last_sent(left_over, m.StandbyNotice)
    assert isinstance(spared, m.StandbyNotice) and "replaces a worker that leaves" in spared.reason


def test_the_death_of_one_freezes_all_at_once() -> None:
    run = StagedRun(3, A, B, C)
    run.lose(B)
    frozen = set(receivers(run.seen, m.Freeze))
    assert frozen == {A, C}


# -- nobody has a stage ------------------------------------------------------------------------------


def test_fewer_than_stages_pause_and_say_so() -> None:
    run = StagedRun(4, A, B, C, D)
    run.lose(C)
    run.report(A, B, D)
    snapshot = run.core.snapshot(run.now_s)
    assert snapshot["phase"] == "paused"
    assert snapshot["reason"] == (
        "stage 2 of 4 has no worker: 3 workers are present, but 4 are needed; "
        "training continues when one joins"
    )
    told = sent(run.seen, to=A)
    assert m.RunStateUpdate("paused", snapshot["reason"]) in told
    assert run.core.deadline_s > run.now_s, "it does not spin"


def test_at_step_0_a_newcomer_begins_the_lost_stage_anew() -> None:
    run = StagedRun(3, A, B, C)
    run.lose(B)
    run.report(A, C)
    assert run.core.phase is RunPhase.PAUSED
    run.join(D)
    assert run.roster == "a d c" and not any(member.joining for member in run.core.run.member_list)
    run.ready()
    assert run.core.phase is RunPhase.TRAINING and not run.notes("rollback")


def trained(run: StagedRun, step: int) -> None:
    """As if all had committed that many steps: the next reports say so."""
    for peer in [member.peer for member in run.core.run.member_list]:
        run.say(peer, m.Heartbeat(1, step + 1, 1, ()))


def test_a_stage_that_nobody_holds_brings_the_run_back_to_a_whole_step() -> None:
    """a has 0, b has 1 and a copy of 0, c (dead) had 2, and a a copy of 2: of step 9 all stages are here.

    Of step 19 only c had stage 2.
    """
    run = StagedRun(3, A, B, C)
    trained(run, 23)
    run.say(A, m.StageCheckpointList((*kept(9, 0, 2), *kept(19, 0))))
    run.say(B, m.StageCheckpointList((*kept(9, 1, 0), *kept(19, 1))))
    run.lose(C)
    run.report(A, B, applied=23, history=b"h23", ledger=state_after(23))
    assert run.core.phase is RunPhase.PAUSED
    run.join(D)
    view = run.core.run.view
    assert view is not None and (view.applied, view.history, view.verdict) == (9, b"h9", m.Verdict.ABORT)
    assert view.ledger == state_after(9), "the ledger goes back with the model"
    assert run.roster == "a b d"
    assert [member.joining for member in run.core.run.member_list] == [False, False, True]
    assert run.core.run.member_list[2].donor == 0, "a has stage 2 on its disk"
    (note,) = run.notes("rollback")
    assert note.fields == {"from": 24, "to": 10, "at_least": False}
    journalled = [
        e.body["rollback"] for e in run.seen if isinstance(e, JournalEntry) and "rollback" in e.body
    ]
    assert journalled == [{"from": 24, "to": 10, "at_least": False}]
    assert run.core.snapshot(run.now_s)["step"] == 10


def test_a_checkpoint_of_the_last_step_loses_nothing() -> None:
    run = StagedRun(2, A, B)
    run.say(A, m.StageCheckpointList(kept(23, 0, 1)))
    run.lose(B)
    run.report(A, applied=23, history=b"h23", ledger=state_after(23))
    run.join(C)
    view = run.core.run.view
    assert view is not None and view.applied == 23 and not run.notes("rollback")
    assert run.roster == "a c" and run.core.run.member_list[1].donor == 0


def test_with_no_whole_step_the_run_waits_for_who_has_it() -> None:
    run = StagedRun(2, A, B, kept={D: kept(9, 1), C: ()})
    run.say(A, m.StageCheckpointList(kept(9, 0)))
    run.lose(B)
    run.report(A, applied=12, history=b"h12", ledger=state_after(12))
    run.join(C)
    assert run.core.phase is RunPhase.PAUSED
    assert run.core.reason.startswith(
        "no present worker holds stage 1 of 2 after step 12, and no earlier step has"
    )
    run.join(D)
    view = run.core.run.view
    assert view is not None and view.applied == 9 and run.roster == "a d" and run.standbys == "c"


def test_who_was_away_and_still_has_its_memory_ends_the_pause_without_loss() -> None:
    run = StagedRun(2, A, B)
    run.say(A, m.StageCheckpointList(kept(9, 0, 1)))
    run.lose(B)
    run.report(A, applied=12, history=b"h12", ledger=state_after(12))
    assert run.core.phase is RunPhase.PAUSED
    run.join(B)
    run.report(B, applied=12, history=b"h12", ledger=state_after(12))
    view = run.core.run.view
    assert view is not None and view.applied == 12 and run.roster == "a b" and not run.notes("rollback")


def test_a_generation_waits_until_it_is_known_where_a_member_is_now() -> None:
    """B is back from a pause with its stage on disk; its setup may arrive before the dial-back result."""
    run = StagedRun(2, A, B)
    for peer in (A, B):
        run.say(peer, m.StageCheckpointList(kept(9, 0) if peer == A else ()))
    run.say(B, m.TemporaryLeave("its owner said so"))
    run.report(A, applied=12, history=b"h12", ledger=state_after(12))
    assert run.core.phase is RunPhase.PAUSED
    made = run.core.generation
    run.say(B, m.Join("r", "b", "memory://elsewhere"))
    setup = m.Setup(run.setup.facts, run.setup.ledger, 4, None, stages=2, stage_checkpoints=kept(12, 1))
    run.say(B, setup)
    run.core.tick(run.now_s)
    assert run.core.generation == made, "it would be told to measure its lines when it is a member already"
    run.hear(DialBackResult(B, "memory://elsewhere"))
    assert run.core.generation == made + 1 and run.roster == "a b"


def test_who_comes_back_after_a_pause_is_told_nothing_of_the_generation_that_it_left() -> None:
    """Its view says where that generation began: steps before what is on this worker's disk."""
    run = StagedRun(2, A, B)
    run.say(B, m.TemporaryLeave("its owner said so"))
    told = run.say(B, m.Join("r", "b", "memory://elsewhere"))
    assert not sent(told, m.MembershipView | m.Freeze)


def test_what_a_member_was_to_load_and_has_not_any_more_is_not_waited_for() -> None:
    """B, back from a pause, is to continue from its disk; then its checkpoint turns out to be missing."""
    run = StagedRun(2, A, B)
    run.say(A, m.StageCheckpointList(kept(9, 0, 1)))
    run.say(B, m.TemporaryLeave("its owner said so"))
    run.report(A, applied=12, history=b"h12", ledger=state_after(12))
    run.checkpoints[B] = kept(12, 1)
    run.join(B)
    assert run.core.run.view is not None and run.core.run.view.applied == 12
    run.say(B, m.StageCheckpointList(()))
    (note,) = run.notes("no_such_piece")
    assert note.fields["name"] == "b"


def test_after_a_restart_the_journal_knows_the_seats() -> None:
    first = StagedRun(2, A, B)
    entries = [(e.kind, e.body) for e in first.seen if isinstance(e, JournalEntry)]
    again = StagedRun(2, recovered=recover_run(entries), term=2, start=False)
    again.join(A), again.join(B)
    assert {again.layers_of(A), again.layers_of(B)} == {m.Span(0, 1), m.Span(1, 2)}
    wrong = m.Span(2, 3)  # there is none such
    view = again.core.run.view
    assert view is not None
    report = m.FreezeReport(2, 1, True, -1, view.history, view.ledger, None, b"", 0, wrong)
    assert any(isinstance(effect, RecordViolation) for effect in again.say(A, report))


def test_a_checkpoint_that_cannot_be_is_an_offence() -> None:
    run = StagedRun(2, A, B)
    for wrong in (
        replace(kept(9, 1)[0], layers=m.Span(2, 3)),
        replace(kept(9, 1)[0], applied=10),
        replace(kept(9, 1)[0], ledger=m.LedgerState(step=10, cursor=5)),
    ):
        assert any(
            isinstance(effect, RecordViolation) for effect in run.say(A, m.StageCheckpointList((wrong,)))
        ), wrong


def test_the_run_is_over_when_each_stage_has_told_so_although_some_are_gone() -> None:
    run = StagedRun(2, A, B)
    order = [member.peer for member in run.core.run.member_list]
    over = m.LedgerState(step=25, cursor=100, consumed=100)
    run.say(order[1], m.RunFinished(24, b"h24"))
    run.lose(order[1])
    run.report(order[0], applied=24, history=b"h24", ledger=over)
    assert run.core.phase is RunPhase.FINISHED
    (told,) = run.last_sent(order[0], m.StandbyNotice)
    assert isinstance(told, m.StandbyNotice) and told.ledger == over


def test_it_is_not_over_while_nobody_has_the_last_state_of_a_stage() -> None:
    run = StagedRun(2, A, B)
    over = m.LedgerState(step=25, cursor=100, consumed=100)
    run.lose(B)
    run.report(A, applied=24, history=b"h24", ledger=over)
    assert run.core.phase is RunPhase.PAUSED


# -- which step --------------------------------------------------------------------------------------


def test_the_latest_whole_step_counts_and_none_of_a_history_that_was_given_up() -> None:
    disks = {A: (*kept(9, 0), *kept(19, 0), *kept(29, 0)), B: (*kept(9, 1), *kept(19, 1), *kept(29, 1))}
    found = latest_whole_state(SPEC, disks, 2, before=24)
    assert found is not None and found.applied == 19
    assert latest_whole_state(SPEC, {A: disks[A]}, 2, before=None) is None
    forked = {A: kept(9, 0, history=b"x"), B: kept(9, 1, history=b"y")}
    assert latest_whole_state(SPEC, forked, 2, before=None) is None


def test_a_state_in_memory_counts_with_the_checkpoints_of_the_same_step() -> None:
    outcome = Outcome(m.Verdict.ABORT, None, 19, b"h19", state_after(19), frozenset({A}))
    begin = find_restart_point(SPEC, outcome, 19, {A: m.Span(0, 1)}, {A: (), B: kept(19, 1)}, (0, 1, 2))
    assert begin.outcome is outcome and begin.state_locations.in_memory == {A: 0}
    assert find_restart_point(SPEC, outcome, 19, {A: m.Span(0, 1)}, {A: (), B: ()}, (0, 1, 2)).outcome is None


def test_who_is_no_member_has_finished_no_step_that_others_had_to_hold() -> None:
    run = StagedRun(2, start=False)
    run.join(C)
    run.say(C, m.RunFinished(10, bytes(32)))
    run.join(A)
    assert "after step" not in run.core.reason and run.roster == "c a"


def test_a_tale_of_another_last_step_than_the_members_have_counts_for_nothing() -> None:
    """A worker that reports all stages after the last step would else supply them all, whatever they are."""
    outcome = Outcome(m.Verdict.ABORT, None, 19, b"h19", state_after(19), frozenset({A}))
    disks = {A: kept(9, 0), B: kept(9, 1), C: kept(19, 0, 1, history=b"told")}
    begin = find_restart_point(SPEC, outcome, 19, {A: m.Span(0, 1)}, disks, (0, 1, 2))
    assert begin.outcome is not None and (begin.outcome.applied, begin.outcome.history) == (9, b"h9")


def test_states_are_compared_within_a_stage() -> None:
    drifts = DivergenceDetector()
    drifts.begin_generation([[A, B, C], [D, E]])
    assert drifts.add(A, 5, b"one") == drifts.add(B, 5, b"one") == drifts.add(D, 5, b"two") == []
    assert drifts.add(E, 5, b"two") == []
    assert drifts.add(C, 5, b"other") == [C]


def test_a_member_that_comes_back_to_a_paused_run_and_does_not_report_is_given_up() -> None:
    run = StagedRun(2, A, B)
    run.lose(B)
    run.report(A)
    assert run.core.phase is RunPhase.PAUSED and run.core.run.view_change.deadline_s == math.inf
    run.join(B)
    until_s = run.core.run.view_change.deadline_s
    assert until_s <= run.now_s + run.core.run.limits.report_s
    for now_s, here in ((until_s - 0.1, {A, B}), (until_s, {A})):
        run.core.tick(now_s)
        assert set(run.core.run.workers) == here
