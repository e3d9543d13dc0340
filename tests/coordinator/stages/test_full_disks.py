"""A full disk during a repartition costs no worker its rank, and no step.

a [0 3), c [3 6) train; d joins: [0 2) [2 4) [4 6), assembled from what a and c write to disk
a cannot write: back to [0 3) [3 6), both in memory; d is a standby until a's disk has room
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from scripted_coordinator import sent
from scripted_member import COORDINATOR, ScriptedMember, no_neighbours
from staged_run import SIX_LAYERS, StagedRun, repartitioned_without_b, state_after

from gridtrain.core import messages as m
from gridtrain.core.commit.two_phase_commit import EMPTY_HISTORY
from gridtrain.core.commit.verdict import Outcome
from gridtrain.core.group import member_events as ev
from gridtrain.core.stages.rank_placement import RankPlacement
from gridtrain.core.stages.repartition import stage_spans
from gridtrain_coordinator.run.events import RunPhase
from gridtrain_coordinator.stages.checkpoint_catalog import depends_on_unwritten
from gridtrain_coordinator.stages.placement import find_partition

A, B, C, D, E = (letter * 32 for letter in (b"a", b"b", b"c", b"d", b"e"))
AT = state_after(11)
A_HAS, C_HAS = m.Span(0, 3), m.Span(3, 6)
WRITTEN_C = m.CheckpointInfo(11, b"k" * 32, AT, C_HAS, b"\1" * 32)


def report_memory(run: StagedRun, peer: m.PeerId, layers: m.Span) -> None:
    core = run.core
    run.say(peer, m.FreezeReport(core.term, core.generation, True, 11, b"k" * 32, AT, None, b"", 0, layers))


def repartitioned_with_d() -> StagedRun:
    """After step 12 a and c have to write to disk what they hold in memory."""
    run = repartitioned_without_b()
    run.ready()
    join(run, D)
    view = run.view
    assert view.stage_bounds == (0, 2, 4, 6)
    return run


def join(run: StagedRun, peer: m.PeerId) -> None:
    run.join(peer)
    run.now_s += 2.0
    run.core.tick(run.now_s)
    if run.last_sent(A, m.Freeze) or not run.core.run.view_change.freeze_reports:
        report_memory(run, A, A_HAS)
        report_memory(run, C, C_HAS)


def fail_to_write_on_a(run: StagedRun) -> None:
    generation = run.core.generation
    run.say(A, m.StageCheckpointList((), generation - 1))
    assert not run.last_sent(C, m.Freeze), "the list was sent before the view arrived"
    run.say(C, m.StageCheckpointList((WRITTEN_C,), generation))
    run.say(A, m.StageCheckpointList((), generation))
    (freeze,) = run.last_sent(C, m.Freeze)
    assert isinstance(freeze, m.Freeze)
    assert freeze.reason == "a has no checkpoint of layers 0 to 2, which the pipeline needs"
    report_memory(run, A, A_HAS)
    # c has begun to load its new stage; its former state is on its disk.
    nothing = replace(AT, step=0, cursor=0, consumed=0)
    term, generation = run.core.term, run.core.generation
    for peer in (C, D):
        run.say(
            peer, m.FreezeReport(term, generation, False, -1, EMPTY_HISTORY, nothing, None, b"", 0, C_HAS)
        )


def test_the_group_keeps_its_partition() -> None:
    run = repartitioned_with_d()
    fail_to_write_on_a(run)
    view = run.view
    assert view.stage_bounds == (0, 3, 6) and view.applied == 11, "no step is lost"
    assert run.roster == "a c" and run.standbys == "d"
    assert {x.name: x.pieces for x in run.core.run.member_list} == {"a": (), "c": ()}
    before = len(run.seen)
    run.ready()
    assert run.core.phase is RunPhase.TRAINING and not run.notes("rollback")
    assert {worker.name for worker in run.core.run.workers.values()} == {"a", "c", "d"}, (
        "no worker is dismissed"
    )
    assert not sent(run.seen[before:] + run.tick(2 * run.core.run.limits.recut_s), m.Freeze), (
        "the same workers would be placed in the same way"
    )


@pytest.mark.parametrize("is_full", [True, False])
def test_the_model_is_repartitioned_once_the_disk_has_room(is_full: bool) -> None:
    run = repartitioned_with_d()
    fail_to_write_on_a(run)
    run.ready()
    if not is_full:
        earlier = m.LedgerState(
            step=11, cursor=44, consumed=44
        )  # not what it holds, which can be written too
        run.say(A, m.StageCheckpointList((m.CheckpointInfo(10, b"j" * 32, earlier, A_HAS, b"\2" * 32),)))
    join(run, E)
    view = run.view
    assert view.generation > 4 and view.applied == 11
    assert view.stage_bounds == ((0, 3, 6) if is_full else (0, 2, 4, 6))


def test_a_placement_depends_on_states_that_are_not_written() -> None:
    outcome = Outcome(m.Verdict.ABORT, None, 11, b"k" * 32, AT, frozenset({A, C}))
    placement = RankPlacement((A, D, C), {}, (), "", {A: ((A_HAS, 0),), D: ((A_HAS, 0), (C_HAS, 2))})
    live, disks = {A: A_HAS, C: C_HAS}, {C: (WRITTEN_C,)}
    assert depends_on_unwritten(placement, outcome, {A}, live, disks)
    assert not depends_on_unwritten(placement, outcome, {C}, live, disks), "its state is written"
    assert not depends_on_unwritten(placement, outcome, {A}, {}, disks), "the state is not in memory"
    assert (
        find_partition([A_HAS], (0, 2, 4, 6), (0, 3, 6)) == (0, 3, 6)
        and find_partition([m.Span(1, 2)], (0, 3, 6)) == ()
    )
    assert stage_spans((0, 3, 6)) == [A_HAS, C_HAS]


# -- the member's side --------------------------------------------------------------------------


class StagedMember(ScriptedMember):
    """Member a of a model with six layers."""

    def __init__(self) -> None:
        setup = m.Setup((), m.LedgerSpec(100, 0, epochs=1), 4, None, stages=3, model=SIX_LAYERS)
        super().__init__(A, setup, neighbours=no_neighbours)

    def repartition(
        self,
        generation: int,
        order: tuple[m.PeerId, ...],
        bounds: tuple[int, ...],
        pieces: dict[m.PeerId, tuple[tuple[m.Span, int], ...]],
    ) -> list[ev.MemberEffect]:
        members = (
            m.Member(p, p[:1].decode(), "", 0, False, -1, sources, b"", tuple(b"" for _ in sources))
            for p, sources in ((p, pieces.get(p, ())) for p in order)
        )
        ledger = self.core.replica_state.ledger
        return self.install(generation, members, applied=self.core.applied, ledger=ledger, bounds=bounds)


def repartitioned_member() -> tuple[StagedMember, m.CheckpointInfo]:
    member = StagedMember()
    member.repartition(1, (A, B), (0, 3, 6), {})
    state = member.core.replica_state
    state.applied, state.history, state.ledger = 0, b"k" * 32, m.LedgerState(step=1)
    pieces = {A: ((A_HAS, 0),), D: ((A_HAS, 0), (C_HAS, 2))}
    effects = member.repartition(2, (A, D, B), (0, 2, 4, 6), pieces)
    (to_write,) = [effect.checkpoint for effect in effects if isinstance(effect, ev.SaveCheckpoint)]
    assert not any(isinstance(effect, ev.Send) for effect in effects)
    return member, to_write


def test_a_member_that_cannot_write_reports_it_and_keeps_its_state() -> None:
    member, to_write = repartitioned_member()
    other = m.CheckpointInfo(0, b"k" * 32, m.LedgerState(step=1), m.Span(5, 6))
    assert member.hear(ev.StageCheckpointsChanged((other,))) == [], "the write has not failed yet"
    assert member.hear(ev.StageCheckpointsChanged((other,), to_write)) == [
        ev.Send(COORDINATOR, m.StageCheckpointList((other,), 2))
    ]
    (report,) = [e.message for e in member.say(m.Freeze(1, 2, "why")) if isinstance(e, ev.Send)]
    assert isinstance(report, m.FreezeReport) and report.is_synced and report.layers == A_HAS
    member.repartition(3, (A, B), (0, 3, 6), {})
    assert member.core.is_synced, "nothing was loaded meanwhile"


def test_a_member_that_has_written_loads_its_new_stage() -> None:
    """A checkpoint on disk has a digest."""
    member, to_write = repartitioned_member()
    written = replace(to_write, digest=b"d" * 32)
    effects = member.hear(ev.StageCheckpointsChanged((written,)))
    assert ev.Send(COORDINATOR, m.StageCheckpointList((written,), 2)) in effects
    assert ev.LoadCheckpoints(1, 2, (written,), m.Span(0, 2)) in effects
