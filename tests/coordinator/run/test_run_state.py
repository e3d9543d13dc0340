"""The state of a run: what it needs to start, and what a restart and another term change."""

from __future__ import annotations

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain_coordinator.run.events import RunPhase
from gridtrain_coordinator.run.journal_recovery import LeftWorker, RecoveredRun
from gridtrain_coordinator.run.liveness import Liveness
from gridtrain_coordinator.run.registry import Worker
from gridtrain_coordinator.run.run_state import MAX_STEPS, RunState

A, B = (letter * 32 for letter in (b"a", b"b"))
SETUP = m.Setup((("model", "tiny"),), m.LedgerSpec(100, 0, epochs=1), 4, None, stages=3)


def run(min_workers: int = 1) -> RunState:
    return RunState("r", 1, Deadlines(), min_workers=min_workers)


def test_a_pipeline_needs_a_worker_for_each_stage_until_its_first_step() -> None:
    pipeline = run(min_workers=2)
    assert pipeline.required_workers == 2
    pipeline.define(SETUP)
    assert pipeline.required_workers == 3
    pipeline.record_step(1)
    assert pipeline.required_workers == 2, "then it can be repartitioned among fewer workers"


def test_the_reason_says_how_many_workers_are_awaited() -> None:
    for min_workers, reason in (
        (2, "waiting for 3 workers, one for each stage of the model"),
        (3, "waiting for 3 workers"),
        (4, "waiting for 4 workers"),
    ):
        pipeline = run(min_workers)
        pipeline.define(SETUP)
        assert pipeline.reason == reason


def test_a_higher_term_applies_to_the_view_too() -> None:
    started = run()
    started.raise_term(3)
    assert started.term == 4 and started.view is None
    members = tuple(m.Member(peer, "", "", 4, False) for peer in (A, B))
    started.install(
        m.MembershipView(4, 1, 2, m.Verdict.ABORT, None, -1, bytes(32), m.LedgerState(), ""), members
    )
    for reported, term in ((9, 10), (2, 11)):
        started.raise_term(reported)
        assert started.term == term and started.view is not None and started.view.term == term
        assert started.is_current(term, 1)


def test_a_restarted_coordinator_continues_with_the_partition_of_the_latest_generation() -> None:
    members = tuple(m.Member(peer, "", "", 4, False) for peer in (A, B))
    ledger = m.LedgerState(step=6, cursor=24, consumed=24)
    view = m.MembershipView(4, 9, 2, m.Verdict.ABORT, None, 5, bytes(32), ledger, "", stage_bounds=(0, 2, 3))
    restarted = run()
    restarted.restore(RecoveredRun(SETUP, 9, view, members, has_started=True))
    assert restarted.partition.bounds == (0, 2, 3), "its third worker was lost"
    assert restarted.phase is RunPhase.PAUSED and restarted.highest_step == 6
    assert [restarted.stage_of(peer) for peer in (A, B)] == [0, 1]
    assert restarted.view is not None and restarted.view.term == 1, "this coordinator's"


def test_who_left_is_unknown_if_the_journal_is_older_than_the_run() -> None:
    view = m.MembershipView(4, 9, 2, m.Verdict.ABORT, None, 5, bytes(32), m.LedgerState(), "")
    members = tuple(m.Member(peer, "", "", 4, False) for peer in (A, B))
    left = {B: LeftWorker("b", (m.CheckpointInfo(5, bytes(32), m.LedgerState()),))}
    restarted = run()
    restarted.restore(RecoveredRun(SETUP, 9, view, members, has_started=True, left_workers=left))
    assert restarted.departed_members == {B}
    restarted.adopt_reported(12, members, ())
    assert not restarted.departed_members and not restarted.left_workers, "b may be training again"


def test_a_coordinator_that_restarts_after_the_end_says_so() -> None:
    restarted = run()
    restarted.restore(RecoveredRun(SETUP, 9, end_reason="2 workers reached the end", highest_step=25))
    assert restarted.is_finished and restarted.highest_step == 25
    assert restarted.reason == "2 workers reached the end"


def test_eligible_workers_are_those_for_the_next_generation() -> None:
    """a is a member, b a member whose process was restarted, c a newcomer, d not admitted yet."""
    state = run()
    *_, C, D = peers = [letter.encode() * 32 for letter in "abcd"]
    for joined_s, peer in enumerate(reversed(peers)):
        state.workers[peer] = Worker(
            peer, "", "", float(joined_s), Liveness(0.0), setup=SETUP, is_admitted=peer not in (B, D)
        )
    state._set_members(tuple(m.Member(peer, "", "", 4, False) for peer in (A, B, b"x" * 32)))
    assert state.eligible_workers() == [C, B, A]
    state.workers[B].setup = None
    assert state.eligible_workers() == [C, A]
    assert [w.peer for w in state.workers.candidates(state.members).newcomers] == [C]
    assert state.present_members == [A, B] == state.connected_members
    state.workers[A].liveness.record_disconnected(1.0)
    assert state.connected_members == [B]


def test_an_installed_generation_counts_the_steps_before_it() -> None:
    state = run()
    for applied, highest_step in ((-1, 0), (5, 6)):
        view = m.MembershipView(1, 1, 0, m.Verdict.ABORT, None, applied, bytes(32), m.LedgerState(), "")
        state.install(view, ())
        assert state.highest_step == highest_step and state.has_committed is (highest_step > 0)


def test_ranks_that_do_not_fill_all_stages_count_as_the_first_stage() -> None:
    state = run()
    state.define(SETUP)
    for count, stages in ((3, [0, 1, 2]), (6, [0, 0, 1, 1, 2, 2]), (4, [0, 0, 0, 0])):
        peers = [bytes([number]) * 32 for number in range(count)]
        state._set_members(tuple(m.Member(peer, "", "", 4, False) for peer in peers))
        assert [state.stage_of(peer) for peer in peers] == stages and state.stage_of(A) == 0


def test_only_members_finish_steps_and_a_lost_model_leaves_no_members() -> None:
    state = run()
    state._set_members((m.Member(A, "", "", 4, False),))
    state.record_finish(B, 40)
    assert state.highest_step == 0 and state.finished_members == {B}
    state.record_finish(A, 2**63 - 1)
    assert state.highest_step == MAX_STEPS + 1
    state.roll_back(7)
    state.record_step(6)
    assert state.highest_step == 8
    state.has_started = True
    state.record_departure(A)
    state.lose_model(0.0)
    assert not state.has_started and not state.members and not state.departed_members
    assert state.enter_phase(RunPhase.TRAINING, "") and state.has_started
