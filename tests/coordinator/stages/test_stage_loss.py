"""A pipeline loses workers: replacements, reassigned samples, and rollbacks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from scripted_coordinator import ScriptedCoordinator, receivers, sent
from staged_run import SIX_LAYERS, StagedRun, state_after, stored

from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain.core.commit.two_phase_commit import extend_history
from gridtrain.core.commit.verdict import Outcome, decide_outcome
from gridtrain_coordinator.run.divergence import DivergenceDetector
from gridtrain_coordinator.run.events import (
    DialBackResult,
    PeerDisconnected,
    RecordViolation,
    RunPhase,
    WorkerRemoved,
)
from gridtrain_coordinator.run.journal_recovery import recover_run
from gridtrain_coordinator.stages.checkpoint_quorum import CheckpointQuorum
from gridtrain_coordinator.stages.whole_state import find_restart_point, latest_whole_state

A, B, C, D, E = (letter * 32 for letter in (b"a", b"b", b"c", b"d", b"e"))
SPEC = m.LedgerSpec(100, 0, epochs=1)


def after_the_loss_of_b(
    has: tuple[m.CheckpointInfo, ...] = (), *, step: int = 12, **options: Any
) -> StagedRun:
    """Two stages, of which b had the second; a has these checkpoints, and reports the last step."""
    run = StagedRun(2, A, B, **options)
    run.say(A, m.StageCheckpointList(has))
    run.lose(B)
    run.report(A, applied=step, history=b"h%d" % step, ledger=state_after(step))
    return run


# -- the verdict -------------------------------------------------------------------------------------


def test_an_aborted_step_of_a_pipeline_is_reassigned_as_a_whole() -> None:
    """Without stages survivors keep their positions; a pipeline's gradient is that of all its members."""
    shares = [(A, 4), (B, 4), (C, 0), (D, 0)]
    state = m.LedgerState()
    reports = {
        peer: m.FreezeReport(1, 1, True, -1, b"", state, None, b"", 0, m.Span(stage, stage + 1))
        for peer, stage in ((A, 0), (C, 1), (D, 1))
    }
    unstaged = decide_outcome(reports, SPEC, shares).ledger
    assert unstaged.holders == ((A, (m.Span(0, 4),)),) and unstaged.requeued == (m.Span(4, 8),)
    staged = decide_outcome(reports, SPEC, shares, in_stages=True).ledger
    assert staged.holders is None and staged.requeued == (m.Span(0, 8),)
    assert data_ledger.assign(SPEC, staged, [(A, 4), (C, 0)]) == {A: (m.Span(0, 4),), C: ()}


def test_a_step_that_all_reporters_have_prepared_is_committed() -> None:
    run = StagedRun(2, A, B, C, D)
    round_id = m.RoundId(1, 1, 0, 0)
    run.lose(D)
    order = [member.peer for member in run.core.run.member_list]
    run.report(*(p for p in order if p != D), prepared=round_id, digest=b"all")
    view = run.view
    assert view.verdict is m.Verdict.COMMIT and view.applied == 0
    assert view.history == extend_history(b"", b"all") or view.history != b""
    assert view.ledger.consumed == 8, "two workers of stage 0 with 4 samples each"


# -- replacements ------------------------------------------------------------------------------------


def test_a_standby_replaces_a_lost_member_and_gets_the_state_from_its_replica() -> None:
    run = StagedRun(2, A, B, C, D, E)
    before = {member.peer: run.stage_of(member.peer) for member in run.core.run.member_list}
    (standby,) = {A, B, C, D, E} - set(before)
    lost = next(peer for peer, stage in before.items() if stage == 1)
    run.lose(lost)
    run.report(*(peer for peer in before if peer != lost))
    after = {member.peer: member for member in run.core.run.member_list}
    assert set(after) == set(before) - {lost} | {standby}
    assert {p: run.stage_of(p) for p in after if p != standby} == {
        p: s for p, s in before.items() if p != lost
    }
    assert run.stage_of(standby) == 1 and after[standby].joining
    source = run.core.run.member_list[after[standby].donor].peer
    assert before[source] == 1 and not after[source].joining
    name = standby[:1].decode()
    assert f"{name} gets stage 1 from {source[:1].decode()}" in run.core.status(run.now_s)["plan_reason"]


def test_without_a_standby_the_others_continue_with_one_replica_less() -> None:
    run = StagedRun(2, A, B, C, D)
    stages = {member.peer: run.stage_of(member.peer) for member in run.core.run.member_list}
    lost = [peer for peer, stage in stages.items() if stage == 0][1]
    run.lose(lost)
    at = {"applied": 9, "history": b"h9", "ledger": m.LedgerState(step=10)}
    run.report(*(peer for peer in stages if peer != lost), **at)
    assert len(run.core.run.member_list) == 2 and len(run.standbys.split()) == 1
    assert not any(member.joining for member in run.core.run.member_list)
    (left_over,) = [w.peer for w in run.core.run.workers.values() if w.standby_reason]
    (notice,) = run.last_sent(left_over, m.StandbyNotice)
    assert isinstance(notice, m.StandbyNotice) and "replaces a worker that leaves" in notice.reason
    assert notice.decided_round == m.RoundId(1, 1, 9, 0)


def test_the_loss_of_a_member_freezes_all_others_at_once() -> None:
    run = StagedRun(3, A, B, C)
    run.lose(B)
    frozen = set(receivers(run.seen, m.Freeze))
    assert frozen == {A, C}


# -- no member holds a stage -------------------------------------------------------------------------


def test_a_run_with_fewer_members_than_stages_pauses_with_a_reason() -> None:
    run = StagedRun(4, A, B, C, D)
    run.lose(C)
    run.report(A, B, D)
    status = run.core.status(run.now_s)
    assert status["phase"] == "paused"
    assert status["reason"] == (
        "stage 2 of 4 has no worker: 3 workers are present, but 4 are needed; training continues when one "
        "joins; training stopped because c lost its connection and did not reconnect"
    )
    messages = sent(run.seen, to=A)
    assert m.RunStateUpdate("paused", status["reason"]) in messages
    assert run.core.deadline_s > run.now_s, "no busy loop"
    run.say(D, m.Leave("Ctrl-C"))
    assert run.core.reason == (
        "stage 2 of 4 has no worker: 2 workers are present, but 4 are needed; training continues when 2 "
        "join; training stopped because c lost its connection and did not reconnect"
    ), "the first cause is kept"


def test_the_reason_of_a_pause_names_the_worker_that_left_and_why() -> None:
    run = StagedRun(2, A, B)
    for peer, why in ((B, "the loss is (1,), not a scalar"), (C, "the disk is full")):
        run.say(peer, m.Leave(why))
        run.report(A)
        assert run.core.phase is RunPhase.PAUSED
        assert run.core.reason.endswith(f"joins; training stopped because {peer.decode()[0]} left: {why}")
        if peer == B:
            run.join(C)
            run.ready()
            assert run.core.phase is RunPhase.TRAINING


def test_before_the_first_step_a_newcomer_initializes_the_lost_stage() -> None:
    run = StagedRun(3, A, B, C)
    run.lose(B)
    run.report(A, C)
    assert run.core.phase is RunPhase.PAUSED
    run.join(D)
    assert run.roster == "a d c" and not any(member.joining for member in run.core.run.member_list)
    run.ready()
    assert run.core.phase is RunPhase.TRAINING and not run.notes("rollback")


def trained(run: StagedRun, step: int) -> None:
    """All members send heartbeats after so many committed steps."""
    for peer in [member.peer for member in run.core.run.member_list]:
        run.say(peer, m.Heartbeat(1, step + 1, 1, ()))


def test_a_run_without_a_stage_rolls_back_to_the_latest_whole_step() -> None:
    """Of step 9 all stages are present: a has 0 and a copy of 2, b has 1 and a copy of 0.

    Only c, which is lost, had stage 2 of step 19.
    """
    run = StagedRun(3, A, B, C)
    trained(run, 23)
    run.say(A, m.StageCheckpointList((*stored(9, 0, 2), *stored(19, 0))))
    run.say(B, m.StageCheckpointList((*stored(9, 1, 0), *stored(19, 1))))
    run.lose(C)
    run.report(A, B, applied=23, history=b"h23", ledger=state_after(23))
    assert run.core.phase is RunPhase.PAUSED
    run.join(D)
    view = run.view
    assert (view.applied, view.history, view.verdict) == (9, b"h9", m.Verdict.ABORT)
    assert view.ledger == state_after(9), "the ledger is rolled back with the model"
    assert run.roster == "a b d"
    assert [member.joining for member in run.core.run.member_list] == [False, False, True]
    assert run.core.run.member_list[2].donor == 0, "a has stage 2 on its disk"
    (note,) = run.notes("rollback")
    assert note.fields == {"from": 24, "to": 10, "at_least": False}
    journalled = [body["rollback"] for _, body in run.journal if "rollback" in body]
    assert journalled == [{"from": 24, "to": 10, "at_least": False}]
    assert run.core.status(run.now_s)["step"] == 10


def test_a_checkpoint_of_the_last_step_loses_nothing() -> None:
    run = after_the_loss_of_b(stored(23, 0, 1), step=23)
    run.join(C)
    view = run.view
    assert view.applied == 23 and not run.notes("rollback")
    assert run.roster == "a c" and run.core.run.member_list[1].donor == 0


def test_without_a_whole_step_the_run_waits_for_a_worker_with_the_missing_stage() -> None:
    run = after_the_loss_of_b(stored(9, 0), kept={D: stored(9, 1), C: ()})
    run.join(C)
    assert run.core.phase is RunPhase.PAUSED
    assert run.core.reason == (
        "no connected worker holds stage 1 of 2 after step 13, nor do the connected workers have all stages "
        "of an earlier step; training continues when workers that hold what is missing, in memory or on "
        "disk, join: start the stopped workers again with the same command; only if their disks are lost, "
        "end this run with gridtrain finish, and start a new one with another --state; training stopped "
        "because b lost its connection and did not reconnect"
    )
    run.join(D)
    view = run.view
    assert view.applied == 9 and run.roster == "a d" and run.standbys == "c"


def test_the_reason_names_only_the_stages_of_which_no_worker_has_the_state() -> None:
    """Also of one that waits for further workers, and whose former members are all restarted."""
    run = StagedRun(3, A, B, C)
    run.lose(B)
    run.report(A, C, applied=12, history=b"h12", ledger=state_after(12))
    assert run.core.reason == (
        "no connected worker holds stage 1 of 3 after step 13, nor do the connected workers have all stages "
        "of an earlier step; 2 workers are present, but 3 are needed; no checkpoint of this run is known: "
        "the steps are lost, unless a worker rejoins that still holds what is missing, in memory or in a "
        "checkpoint that it wrote when it left; if they are lost, end this run with gridtrain finish, and "
        "start a new one with another --state; training stopped because b lost its connection and did not "
        "reconnect"
    )
    assert m.RunStateUpdate("paused", run.core.reason) in sent(run.seen, to=A)
    trained(run, 12)
    run.checkpoints |= {A: (*stored(9, 0), *stored(12, 0)), C: (*stored(9, 2), *stored(12, 2)), D: ()}
    for peer in (A, C):
        run.say(peer, m.Leave("Ctrl-C"))
    for peer in (A, C, D):
        run.join(peer)
    assert run.core.reason.startswith("no connected worker holds stage 1 of 3 after step 13, nor do")


# -- the owner ends a run of which a stage is missing ------------------------------------------------


def end(run: StagedRun) -> str:
    effects, answer = run.core.end_run(run.now_s)
    run.keep(effects)
    assert isinstance(answer, m.OperatorReply)
    return answer.text


MISSING = (
    "no connected worker holds stage 1 of 2 after step 13, nor do the connected workers have all stages of "
    "an earlier step; gridtrain export, given the state folders of all workers in one folder, writes the "
    "latest step for which they hold all stages, if there is one"
)
TWO_LAYERS = replace(SIX_LAYERS, cuts=(0, 1, 2), blocks=SIX_LAYERS.blocks[:2])


def test_the_owner_ends_a_run_of_which_a_stage_is_missing() -> None:
    run = after_the_loss_of_b()
    run.join(C)
    assert run.core.phase is RunPhase.PAUSED
    waits = "ends in 60 s without a model, unless workers with the missing part join first"
    assert end(run) == f'the run "r" {waits}: {MISSING}'
    run.tick(58.5)
    assert end(run) == f'the run "r" {waits}: {MISSING}'.replace("in 60 s", "in 2 s"), "the time that is left"
    run.tick(0.5)
    assert run.core.phase is RunPhase.PAUSED
    run.tick(1)
    assert run.core.phase is RunPhase.FINISHED and not run.core.run.workers
    assert run.core.reason == "its owner has ended it after 13 steps"
    for peer in (A, C):
        (refused,) = sent(run.effects, m.Refused, to=peer)
        assert refused.code == "finished" and refused.reason.endswith(MISSING)
    assert sent(run.join(B), m.Refused, to=B)[0].reason == refused.reason
    assert run.core.status(run.now_s)["alert"] == f"the final model was not written: {MISSING}"
    assert recover_run(run.journal).end_reason == (
        f"its owner has ended it after 13 steps; the final model was not written: {MISSING}"
    ), "also after a restart"


def test_the_missing_stage_comes_after_the_owners_order() -> None:
    run = after_the_loss_of_b()
    end(run)
    run.tick(30)
    run.join(B)
    run.report(B, applied=12, history=b"h12", ledger=state_after(12))
    run.ready()
    assert run.core.phase is RunPhase.FINISHED and not run.core.run.missing_model
    assert run.view is not None and run.view.applied == 12


@pytest.mark.parametrize("has_left", [False, True])
def test_a_run_whose_members_are_all_away_does_not_end(has_left: bool) -> None:
    run = StagedRun(2, A, B)
    _, _ = run.say(A, CTRL_C) if has_left else run.lose(A), run.lose(B)
    who = "its member, which is" if has_left else "one of its 2 members, all of which are"
    assert end(run) == (
        f'the run "r" ends when {who} disconnected, or a worker with a checkpoint joins; if a stage is then '
        "missing, 60 s later, without a model"
    )
    run.tick(1000)
    assert run.core.phase is RunPhase.PAUSED
    if has_left:
        run.join(B)
        run.report(B, applied=12, history=b"h12", ledger=state_after(12))
        run.tick(60)
        assert run.core.phase is RunPhase.FINISHED and run.core.run.missing_model


@pytest.mark.parametrize("stages", [1, 2])
def test_a_run_ends_whose_workers_have_all_left(stages: int) -> None:
    """The only member of one stage leaves without a view change."""
    run = stopped_run(CTRL_C, CTRL_C) if stages == 2 else run_of_one_stage()
    if stages == 1:
        run.say(A, CTRL_C)
    lost = "stages 0, 1 of 2 after step 13" if stages == 2 else "stage 0 of 1 after step 21"
    incomplete = MISSING.replace("stage 1 of 2 after step 13", lost)
    waits = "ends in 60 s without a model, unless workers with the missing part join first"
    assert end(run) == f'the run "r" {waits}: {incomplete}'
    run.tick(60)
    assert run.core.phase is RunPhase.FINISHED
    assert run.core.run.missing_model == f"the final model was not written: {incomplete}"


def test_a_part_of_the_model_that_a_worker_could_not_write_needs_the_state_folders_of_all_workers() -> None:
    run = StagedRun(2, A, B)
    for peer in (A, B):
        run.say(peer, m.RunFinished(9, b"history"))
    run.say(B, m.Leave(f"{m.MODEL_NOT_WRITTEN}: its disk is full"))
    (note,) = run.notes("model_not_written")
    assert note.fields["remedy"] == MISSING.partition("; ")[2]
    assert run.core.status(run.now_s)["alert"] == (
        f"the final model was not written: b: its disk is full; {note.fields['remedy']}"
    )


def test_a_run_ends_whose_first_members_are_lost_together_after_the_owners_order() -> None:
    run = StagedRun(2, A, B, start=False)
    end(run)
    run.event_s = 0.0
    for peer in (A, B):
        run.hear(PeerDisconnected(peer, "died"))
    run.tick(run.core.run.limits.regreet_s)
    assert run.core.phase is RunPhase.FINISHED and not run.core.run.missing_model


def test_the_owner_ends_a_run_without_members_of_which_a_stage_is_missing() -> None:
    """The journal says that no worker held the model when the coordinator stopped after step 13."""
    entries = [*StagedRun(2, A, B).journal, ("state", {"state": "waiting", "reason": "", "reached": 13})]
    run = StagedRun(2, recovered=recover_run(entries), term=2, start=False)
    run.checkpoints |= {A: stored(12, 0), D: stored(24, 1)}  # nobody has confirmed step 25
    run.join(A), run.join(C), run.join(D)
    assert not run.core.run.members and MISSING.partition("; gridtrain export")[0] in run.core.reason
    assert MISSING in end(run)
    assert run.core.phase is RunPhase.FINISHED and not run.core.run.workers


@pytest.mark.parametrize("step", [10, 13])
def test_the_owner_ends_a_run_whose_stages_do_not_fit_into_memory(step: int) -> None:
    """The survivor has too little memory for both stages, which are on its disk."""
    model = m.StagedModel((0, 1, 2), (m.LayerCosts(4, 4),) * 2, copies=1.0, micro_batches=8)
    run = after_the_loss_of_b(stored(step - 1, 0, 1), model=model, memory={A: 12, B: 12})
    assert run.core.phase is RunPhase.PAUSED
    lacks = "do not hold all stages of step 13" if step == 10 else "could not continue from step 13"
    assert end(run).endswith(
        f": the connected workers {lacks}; gridtrain export, given the state folder of a, writes the model "
        f"of step {step}"
    )
    run.tick(60)
    assert run.core.phase is RunPhase.FINISHED


@pytest.mark.parametrize("back", [False, True])
def test_a_run_that_its_owner_ends_waits_for_a_stage_before_it_returns_to_an_earlier_step(back: bool) -> None:
    run = after_the_loss_of_b(stored(9, 0, 1), model=TWO_LAYERS)
    assert run.core.phase is RunPhase.PAUSED and "after 15 s" in run.core.reason
    later = "or of a later one if a worker that holds it joins first"
    assert end(run) == f'the run "r" ends in 15 s with the model of step 10, {later}'
    assert run.core.phase is RunPhase.PAUSED
    if back:
        run.join(B)
        run.report(B, applied=12, history=b"h12", ledger=state_after(12))
    else:
        run.tick(15)
    run.ready()
    assert run.core.phase is RunPhase.FINISHED and not run.core.run.missing_model
    assert run.view is not None and run.view.applied == (12 if back else 9)


def test_a_returning_member_with_its_state_in_memory_ends_the_pause_without_a_rollback() -> None:
    run = after_the_loss_of_b(stored(9, 0, 1))
    assert run.core.phase is RunPhase.PAUSED
    run.join(B)
    run.report(B, applied=12, history=b"h12", ledger=state_after(12))
    view = run.view
    assert view.applied == 12 and run.roster == "a b" and not run.notes("rollback")


def test_a_generation_waits_for_the_dial_back_of_a_returning_member() -> None:
    """B returns from a pause with its stage on disk; its setup may arrive before the dial-back result."""
    run = StagedRun(2, A, B)
    for peer in (A, B):
        run.say(peer, m.StageCheckpointList(stored(9, 0) if peer == A else ()))
    run.say(B, m.TemporaryLeave("its owner said so"))
    run.report(A, applied=12, history=b"h12", ledger=state_after(12))
    assert run.core.phase is RunPhase.PAUSED
    made = run.core.generation
    run.say(B, m.Join("r", "b", "memory://elsewhere"))
    setup = m.Setup(run.setup.facts, run.setup.ledger, 4, None, stages=2, stage_checkpoints=stored(12, 1))
    run.say(B, setup)
    run.core.tick(run.now_s)
    assert run.core.generation == made, "otherwise it would measure its links as a member"
    run.hear(DialBackResult(B, "memory://elsewhere"))
    assert run.core.generation == made + 1 and run.roster == "a b"


def test_a_worker_that_returns_from_a_pause_receives_no_view_of_its_former_generation() -> None:
    """That view names the step at which the generation began, before the steps on this worker's disk."""
    run = StagedRun(2, A, B)
    run.say(B, m.TemporaryLeave("its owner said so"))
    effects = run.say(B, m.Join("r", "b", "memory://elsewhere"))
    assert not sent(effects, m.MembershipView | m.Freeze)


def test_a_missing_checkpoint_is_not_awaited() -> None:
    """B returns from a pause and should load its checkpoint from disk, but it is missing."""
    run = StagedRun(2, A, B)
    run.say(A, m.StageCheckpointList(stored(9, 0, 1)))
    run.say(B, m.TemporaryLeave("its owner said so"))
    run.report(A, applied=12, history=b"h12", ledger=state_after(12))
    run.checkpoints[B] = stored(12, 1)
    run.join(B)
    assert run.view.applied == 12
    run.say(B, m.StageCheckpointList(()))
    (note,) = run.notes("no_such_piece")
    assert note.fields["name"] == "b"


def test_a_restarted_coordinator_reads_the_placement_from_the_journal() -> None:
    again = StagedRun(2, recovered=recover_run(StagedRun(2, A, B).journal), term=2, start=False)
    again.join(A), again.join(B)
    assert {again.layers_of(A), again.layers_of(B)} == {m.Span(0, 1), m.Span(1, 2)}
    wrong = m.Span(2, 3)  # no such stage
    view = again.view
    report = m.FreezeReport(2, 1, True, -1, view.history, view.ledger, None, b"", 0, wrong)
    assert any(isinstance(effect, RecordViolation) for effect in again.say(A, report))


def test_an_impossible_checkpoint_is_a_violation() -> None:
    run = StagedRun(2, A, B)
    for wrong in (
        replace(stored(9, 1)[0], layers=m.Span(2, 3)),
        replace(stored(9, 1)[0], applied=10),
        replace(stored(9, 1)[0], ledger=m.LedgerState(step=10, cursor=5)),
    ):
        assert any(
            isinstance(effect, RecordViolation) for effect in run.say(A, m.StageCheckpointList((wrong,)))
        ), wrong


def test_the_run_is_finished_when_each_stage_has_reported_it_although_some_members_are_lost() -> None:
    run = StagedRun(2, A, B)
    order = [member.peer for member in run.core.run.member_list]
    final = m.LedgerState(step=25, cursor=100, consumed=100)
    run.say(order[1], m.RunFinished(24, b"h24"))
    run.lose(order[1])
    run.report(order[0], applied=24, history=b"h24", ledger=final)
    assert run.core.phase is RunPhase.FINISHED
    (notice,) = run.last_sent(order[0], m.StandbyNotice)
    assert isinstance(notice, m.StandbyNotice) and notice.ledger == final
    assert notice.decided_round == m.RoundId(1, 1, 24, 0)


def test_the_run_is_not_finished_while_a_stage_lacks_its_final_state() -> None:
    run = StagedRun(2, A, B)
    final = m.LedgerState(step=25, cursor=100, consumed=100)
    run.lose(B)
    run.report(A, applied=24, history=b"h24", ledger=final)
    assert run.core.phase is RunPhase.PAUSED


# -- which step to continue from ---------------------------------------------------------------------


def test_the_latest_whole_step_is_chosen_and_none_of_an_abandoned_history() -> None:
    disks = {
        A: (*stored(9, 0), *stored(19, 0), *stored(29, 0)),
        B: (*stored(9, 1), *stored(19, 1), *stored(29, 1)),
    }
    found = latest_whole_state(SPEC, disks, 2, before=24)
    assert found is not None and found.applied == 19
    for history, applied in ((b"h19", 19), (b"another", 9)):
        found = latest_whole_state(SPEC, disks, 2, before=19, history=history)
        assert found is not None and found.applied == applied
    assert latest_whole_state(SPEC, {A: disks[A]}, 2, before=None) is None
    forked = {A: stored(9, 0, history=b"x"), B: stored(9, 1, history=b"y")}
    assert latest_whole_state(SPEC, forked, 2, before=None) is None


@pytest.mark.parametrize("quorum", [(), (CheckpointQuorum(),)], ids=["no digests", "digests"])
def test_a_state_in_memory_counts_with_the_checkpoints_of_the_same_step(
    quorum: tuple[CheckpointQuorum, ...],
) -> None:
    """It needs no digest."""
    outcome = Outcome(m.Verdict.ABORT, None, 19, b"h19", state_after(19), frozenset({A}))
    memory, bounds = {A: m.Span(0, 1)}, (0, 1, 2)
    begin = find_restart_point(SPEC, outcome, 19, memory, {A: (), B: stored(19, 1)}, bounds, *quorum)
    assert begin.outcome is outcome and begin.state_locations.in_memory == {A: 0}
    begin = find_restart_point(SPEC, outcome, 19, memory, {A: (), B: ()}, bounds, *quorum)
    assert begin.outcome is None


def test_a_finish_reported_by_a_non_member_does_not_count() -> None:
    run = StagedRun(2, start=False)
    run.join(C)
    run.say(C, m.RunFinished(10, bytes(32)))
    run.join(A)
    assert "after step" not in run.core.reason and run.roster == "c a"


def test_a_report_of_another_last_step_than_that_of_the_members_is_ignored() -> None:
    """Otherwise one worker that reports all stages after the last step would supply them all."""
    outcome = Outcome(m.Verdict.ABORT, None, 19, b"h19", state_after(19), frozenset({A}))
    disks = {A: stored(9, 0), B: stored(9, 1), C: stored(19, 0, 1, history=b"false")}
    begin = find_restart_point(SPEC, outcome, 19, {A: m.Span(0, 1)}, disks, (0, 1, 2))
    assert begin.outcome is not None and (begin.outcome.applied, begin.outcome.history) == (9, b"h9")


def test_digests_are_compared_within_a_stage() -> None:
    detector = DivergenceDetector()
    detector.begin_generation([[A, B, C], [D, E]])
    assert detector.add(A, 5, b"one") == detector.add(B, 5, b"one") == detector.add(D, 5, b"two") == []
    assert detector.add(E, 5, b"two") == []
    assert detector.add(C, 5, b"other") == [C]


def test_a_returning_member_that_does_not_report_is_dismissed() -> None:
    run = StagedRun(2, A, B)
    run.lose(B)
    run.report(A)
    assert run.core.phase is RunPhase.PAUSED and run.core.run.view_change.deadline_s == math.inf
    run.join(B)
    until_s = run.core.run.view_change.deadline_s
    assert until_s <= run.now_s + run.core.run.limits.report_s
    for now_s, present in ((until_s - 0.1, {A, B}), (until_s, {A})):
        run.core.tick(now_s)
        assert set(run.core.run.workers) == present


# -- workers that left with a later step on their disks ------------------------------------------------


def stopped_run(*leaves: m.Message) -> StagedRun:
    """a and b leave after step 13, which each has on its disk; a has a copy of b's stage of step 10."""
    run = StagedRun(2, A, B, model=TWO_LAYERS)
    trained(run, 12)
    run.checkpoints |= {A: (*stored(9, 0, 1), *stored(12, 0)), B: (*stored(9, 1), *stored(12, 1))}
    for peer in (A, B):
        run.say(peer, m.StageCheckpointList(run.checkpoints[peer]))
    for peer, leave in zip((A, B), leaves, strict=True):
        run.say(peer, leave)
    return run


CTRL_C, PAUSE = m.Leave("the training script was interrupted"), m.TemporaryLeave("its owner said so")
AWAITED = (
    "b left with a stage of step 13 on its disk; training continues when it rejoins, or, from step 10, "
    "after gridtrain kick b"
)


@pytest.mark.parametrize("leave", [CTRL_C, PAUSE])
def test_stopped_workers_are_awaited_rather_than_steps_lost(leave: m.Message) -> None:
    run = stopped_run(leave, leave)
    run.join(A)
    run.tick(10 * run.core.run.limits.recut_s)
    assert (run.core.phase, run.core.reason) == (RunPhase.PAUSED, AWAITED)
    assert run.core.deadline_s > run.now_s, "no busy loop"
    run.join(B)
    assert run.view.applied == 12 and not run.notes("rollback")


def restarted(run: StagedRun) -> StagedRun:
    """A coordinator that is started again on the journal; no worker has joined it."""
    again = StagedRun(2, recovered=recover_run(run.journal), term=2, start=False, model=TWO_LAYERS)
    again.checkpoints = run.checkpoints
    return again


def join_anew(run: StagedRun, peer: m.PeerId) -> None:
    """A new process joins, which knows no generation."""
    ScriptedCoordinator.join(run, peer, setup=replace(run.setup, stage_checkpoints=run.checkpoints[peer]))


def wait(run: StagedRun) -> None:
    """Let the next ten deadlines pass."""
    for _ in range(10):
        run.now_s = min(run.core.deadline_s, run.now_s + 1000)
        run.tick()


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("leave", [CTRL_C, PAUSE])
def test_stopped_workers_are_awaited_by_a_restarted_coordinator(leave: m.Message, is_back: bool) -> None:
    first = stopped_run(leave, leave)
    if is_back:
        first.join(A)
    run = restarted(first)
    assert run.core.run.left_workers == first.core.run.left_workers
    assert run.core.run.highest_step == first.core.run.highest_step == 13
    join_anew(run, A)
    wait(run)
    assert (run.core.phase, run.core.reason) == (RunPhase.PAUSED, AWAITED)
    first.hear(WorkerRemoved(B, "kicked", "was removed from the run", "ask for an invitation"))
    join_anew(run, B)
    assert run.view.applied == 12 and not run.notes("rollback")
    assert (run.core.phase, run.core.reason) == (
        RunPhase.PAUSED,
        "the run continues from step 13 when 2 workers are ready",
    )
    run = restarted(first)
    join_anew(run, A)
    wait(run)
    (note,) = run.notes("rollback")
    assert note.fields == {"from": 13, "to": 10, "at_least": True}, "the removed worker is not awaited"


def run_of_one_stage() -> StagedRun:
    """a has the whole model of step 21 after b has left; b's disk has that of step 10."""
    run = StagedRun(2, A, B, model=TWO_LAYERS)
    trained(run, 9)
    run.checkpoints |= {A: stored(9, 0, 1), B: stored(9, 0, 1)}
    for peer in (A, B):
        run.say(peer, m.StageCheckpointList(run.checkpoints[peer]))
    run.say(B, CTRL_C)
    run.report(A, applied=9, history=b"h9", ledger=state_after(9))
    run.tick(run.core.run.limits.recut_s)
    assert run.roster == "a" and run.core.run.partition.stage_count == 1
    trained(run, 20)
    run.checkpoints[A] = (m.CheckpointInfo(20, b"h20", state_after(20), m.Span(0, 2)),)
    run.say(A, m.StageCheckpointList(run.checkpoints[A]))
    return run


def test_the_worker_that_has_the_whole_repartitioned_model_is_awaited() -> None:
    """The other one is not enough to go on from its older copy."""
    run = run_of_one_stage()
    run.say(A, CTRL_C)
    run.join(B)
    run.tick(10 * run.core.run.limits.recut_s)
    assert run.core.phase is RunPhase.PAUSED and "a left with a stage of step 21" in run.core.reason
    again = restarted(run)
    join_anew(again, B)
    wait(again)
    assert (again.core.phase, again.core.reason) == (RunPhase.PAUSED, run.core.reason)
    end(run)
    run.tick(59)
    assert run.core.phase is RunPhase.PAUSED
    run.tick(1)
    assert run.core.phase is RunPhase.FINISHED and "the model of step 21" in run.core.run.missing_model


def test_the_owner_removes_an_awaited_worker_and_the_run_continues_without_it() -> None:
    run = stopped_run(CTRL_C, CTRL_C)
    run.join(A)
    assert run.core.reason == AWAITED
    run.hear(WorkerRemoved(B, "kicked", "was removed from the run", "ask for an invitation"))
    run.tick(run.core.run.limits.recut_s)
    assert run.view.applied == 9 and run.roster == "a"
    (note,) = run.notes("rollback")
    assert note.fields == {"from": 13, "to": 10, "at_least": True}


@pytest.mark.parametrize("event", ["none", "join", "kick"])
def test_a_run_that_its_owner_ends_waits_for_workers_that_left(event: str) -> None:
    run = stopped_run(CTRL_C, CTRL_C)
    run.join(A)
    cause = (
        "b left with a stage of step 13 on its disk; gridtrain export, given the state folders of all "
        "workers in one folder, writes the model of step 13"
    )
    waits = "ends in 60 s without a model, unless workers with the missing part join first"
    assert end(run) == f'the run "r" {waits}: {cause}'
    assert run.core.status(run.now_s)["reason"].endswith(
        f"; its owner has ended the run, which {waits}: {cause}"
    )
    run.tick(50)
    assert run.core.phase is RunPhase.PAUSED and not run.notes("rollback")
    if event == "join":
        run.join(B)
    elif event == "kick":
        run.hear(WorkerRemoved(B, "kicked", "was removed from the run", "ask for an invitation"))
        assert "ends in 15 s with the model of step 10" in run.core.status(run.now_s)["reason"]
        run.tick(15)
    else:
        run.tick(10)
        assert run.core.phase is RunPhase.FINISHED and not run.notes("rollback")
        assert run.core.run.missing_model == f"the final model was not written: {cause}"
        return
    run.ready()
    assert run.core.phase is RunPhase.FINISHED and not run.core.run.missing_model
    assert run.view.applied == (12 if event == "join" else 9)


@pytest.mark.parametrize("leave", [CTRL_C, PAUSE])
def test_others_do_not_wait_for_a_worker_that_left(leave: m.Message) -> None:
    """Not if a member holds a state, and not if there are workers for all stages."""
    run = StagedRun(2, A, B, model=TWO_LAYERS)
    run.say(A, m.StageCheckpointList(stored(9, 0, 1)))
    run.say(B, m.StageCheckpointList((*stored(9, 1), *stored(12, 1))))
    run.say(B, leave)
    run.report(A, applied=12, history=b"h12", ledger=state_after(12))
    run.tick(run.core.run.limits.recut_s)
    assert run.view.applied == 9 and run.notes("rollback")
    run = stopped_run(leave, leave)
    run.join(A)
    assert run.core.reason == AWAITED
    run.join(C)
    assert run.view.applied == 9 and run.roster == "a c"


def test_a_standby_takes_the_stage_of_a_paused_worker() -> None:
    run = StagedRun(2, A, B, C, model=TWO_LAYERS)
    run.say(A, m.StageCheckpointList(stored(9, 0, 1)))
    run.say(B, m.StageCheckpointList((*stored(9, 1), *stored(12, 1))))
    run.say(B, PAUSE)
    run.report(A, applied=12, history=b"h12", ledger=state_after(12))
    assert run.view.applied == 9 and run.roster == "a c"


def test_members_whose_processes_were_all_replaced_are_not_awaited() -> None:
    """After a power cut: the coordinator is restarted, too, and no former process can return."""
    first = StagedRun(2, A, B, model=TWO_LAYERS)
    run = StagedRun(2, recovered=recover_run(first.journal), term=2, start=False, model=TWO_LAYERS)
    for stage, peer in enumerate((A, B)):
        setup = replace(run.setup, stage_checkpoints=stored(9, stage))
        ScriptedCoordinator.join(run, peer, setup=setup)
    assert run.view.applied == 9 and run.now_s < run.core.run.limits.regather_s
    assert [note.fields for note in run.notes("restored")] == [{"step": 10}]


@pytest.mark.parametrize("sends_setup", [True, False])
def test_the_checkpoints_of_a_killed_member_that_comes_back_are_awaited(sends_setup: bool) -> None:
    """a was killed with the whole model of step 21, and b is back with that of step 10; before a minute has
    passed, a's next process joins, which first has to build its model."""
    run = run_of_one_stage()
    run.report(A, applied=20, history=b"h20", ledger=state_after(20))
    run.start(A)
    run.lose(A)
    until_s = run.now_s + run.core.run.limits.regather_s - 10
    join_anew(run, B)
    ScriptedCoordinator.join(run, A, setup=None)
    run.pass_to(until_s, A, B)
    assert run.core.phase is RunPhase.PAUSED and not run.notes("rollback")
    if sends_setup:
        join_anew(run, A)
        assert run.view.applied == 20 and not run.notes("rollback")
    else:
        run.pass_to(until_s + 10, A, B)
        assert run.view.applied == 9 and run.notes("rollback")


def test_a_killed_member_that_comes_back_is_awaited_although_a_member_is_present() -> None:
    """The coordinator was restarted: b is back with its stage in memory, c with older ones of all stages."""
    first = StagedRun(2, A, B, C, model=TWO_LAYERS)
    assert first.roster == "a b"
    trained(first, 12)
    first.checkpoints = {p: (*stored(9, n), *stored(12, n)) for n, p in enumerate((A, B))}
    first.checkpoints[C] = stored(9, 0, 1)
    for peer, kept in first.checkpoints.items():
        first.say(peer, m.StageCheckpointList(kept))
    run = restarted(first)
    limits = run.core.run.limits = replace(run.core.run.limits, report_s=1.0)
    for peer in (B, C):
        run.join(peer)
    run.pass_to(run.now_s + limits.report_s + limits.regreet_s, B, C)
    run.report(B, applied=12, history=b"h12", ledger=state_after(12))
    assert sent(run.seen, m.Freeze, to=B) and run.now_s < limits.regather_s
    ScriptedCoordinator.join(run, A, setup=None)
    assert run.core.phase is RunPhase.PAUSED and not run.notes("rollback")
    join_anew(run, A)
    assert run.view.applied == 12 and not run.notes("rollback")


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("with_older", [False, True])
def test_an_ended_run_waits_for_the_only_member_of_its_one_stage(
    is_restarted: bool, with_older: bool
) -> None:
    run = run_of_one_stage()
    run.ready()
    run.say(A, CTRL_C)
    if is_restarted:
        run = restarted(run)
    if with_older:
        join_anew(run, B)
        run.tick(1000)
    end(run)
    run.tick(5)
    assert run.core.phase is RunPhase.PAUSED and run.core.deadline_s > run.now_s
    join_anew(run, A)
    run.tick(1)
    run.ready()
    assert (run.core.phase, run.core.run.highest_step, run.core.run.missing_model) == (
        RunPhase.FINISHED,
        21,
        "",
    )


def test_an_ended_run_does_not_wait_for_kicked_members() -> None:
    run = stopped_run(CTRL_C, CTRL_C)
    for peer in (A, B):
        run.join(peer)
    run.ready()
    run.say(A, CTRL_C)
    run.lose(B)
    end(run)
    for peer in (A, B):
        run.hear(WorkerRemoved(peer, "kicked", "", ""))
    wait(run)
    assert run.core.phase is RunPhase.FINISHED
