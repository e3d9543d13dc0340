"""A full disk during a repartition costs no worker its rank, and no step.

a [0 3), c [3 6) train; d joins: [0 2) [2 4) [4 6), assembled from what a and c write to disk
a cannot write: back to [0 3) [3 6), both in memory, and d stands by until a's disk takes data again
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from staged_run import StagedRun

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.commit.two_phase_commit import EMPTY_HISTORY
from gridtrain.core.commit.verdict import Outcome
from gridtrain.core.group import member_events as io
from gridtrain.core.member.member import MemberCore
from gridtrain.core.stages.rank_placement import RankPlacement
from gridtrain.core.stages.repartition import stage_spans
from gridtrain_coordinator.run.events import RunPhase
from gridtrain_coordinator.stages.checkpoint_catalog import depends_on_unwritten
from gridtrain_coordinator.stages.placement import find_partition

COORDINATOR, A, B, C, D, E = (letter * 32 for letter in (b"0", b"a", b"b", b"c", b"d", b"e"))
AT = m.LedgerState(step=12, cursor=48, consumed=48)
A_HAS, C_HAS = m.Span(0, 3), m.Span(3, 6)
WRITTEN_C = m.CheckpointInfo(11, b"k" * 32, AT, C_HAS, b"\1" * 32)
MODEL = m.StagedModel((0, 2, 4, 6), tuple(m.LayerCosts(1, 1) for _ in range(6)), copies=1.0, micro_batches=8)


def cut_anew_without_b() -> StagedRun:
    """a holds [0 2), c [4 6) and a copy of b's [2 4): two of three stages are left."""
    state = m.LedgerState(step=10, cursor=40, consumed=40)
    has = {A: [m.Span(0, 2)], B: [m.Span(2, 4)], C: [m.Span(2, 4), m.Span(4, 6)]}
    kept = {
        p: tuple(m.CheckpointInfo(9, b"h", state, x, bytes([x.start]) * 32) for x in own)
        for p, own in has.items()
    }
    run = StagedRun(3, A, B, C, model=MODEL, kept=kept)
    run.lose(B)
    run.report(A, C)
    run.now_s += run.core.run.limits.recut_s
    run.core.tick(run.now_s)
    return run


def tells_of_memory(run: StagedRun, peer: m.PeerId, blocks: m.Span) -> None:
    core = run.core
    run.say(peer, m.FreezeReport(core.term, core.generation, True, 11, b"k" * 32, AT, None, b"", 0, blocks))


def joined_by_d() -> StagedRun:
    """After step 12: what a and c have in memory is to be written to disk."""
    run = cut_anew_without_b()
    run.ready()
    joins(run, D)
    view = run.core.run.view
    assert view is not None and view.stage_bounds == (0, 2, 4, 6)
    return run


def joins(run: StagedRun, peer: m.PeerId) -> None:
    run.join(peer)
    run.now_s += 2.0
    run.core.tick(run.now_s)
    if run.last_sent(A, m.Freeze) or not run.core.run.view_change.reports:
        tells_of_memory(run, A, A_HAS)
        tells_of_memory(run, C, C_HAS)


def a_cannot_write(run: StagedRun) -> None:
    generation = run.core.generation
    run.say(A, m.StageCheckpointList((), generation - 1))
    assert not run.last_sent(C, m.Freeze), "said before it had heard the View: it crossed it on the way"
    run.say(C, m.StageCheckpointList((WRITTEN_C,), generation))
    run.say(A, m.StageCheckpointList((), generation))
    (freeze,) = run.last_sent(C, m.Freeze)
    assert isinstance(freeze, m.Freeze)
    assert freeze.reason == "a has no checkpoint of layers 0 to 2, which other workers need"
    view = run.core.run.view
    assert view is not None
    tells_of_memory(run, A, A_HAS)
    # c has begun to load its new stage: what it had is on its disk.
    nothing = replace(AT, step=0, cursor=0, consumed=0)
    term, generation = run.core.term, run.core.generation
    for peer in (C, D):
        run.say(
            peer, m.FreezeReport(term, generation, False, -1, EMPTY_HISTORY, nothing, None, b"", 0, C_HAS)
        )


def test_the_group_stays_in_the_cut_in_which_it_is() -> None:
    run = joined_by_d()
    a_cannot_write(run)
    view = run.core.run.view
    assert view is not None and view.stage_bounds == (0, 3, 6) and view.applied == 11, "no step is lost"
    assert run.roster == "a c" and run.standbys == "d"
    assert {x.name: x.pieces for x in run.core.run.member_list} == {"a": (), "c": ()}
    run.ready()
    assert run.core.phase is RunPhase.TRAINING and not run.notes("rollback")
    assert {worker.name for worker in run.core.run.workers.values()} == {"a", "c", "d"}, "nobody is dismissed"


@pytest.mark.parametrize("full", [True, False])
def test_it_is_cut_anew_once_the_disk_takes_something(full: bool) -> None:
    run = joined_by_d()
    a_cannot_write(run)
    run.ready()
    if not full:
        run.say(A, m.StageCheckpointList((m.CheckpointInfo(11, b"k" * 32, AT, A_HAS, b"\2" * 32),)))
    joins(run, E)
    view = run.core.run.view
    assert view is not None and view.generation > 4 and view.applied == 11
    assert view.stage_bounds == ((0, 3, 6) if full else (0, 2, 4, 6))


def test_what_a_plan_leans_on() -> None:
    outcome = Outcome(m.Verdict.ABORT, None, 11, b"k" * 32, AT, frozenset({A, C}))
    seated = RankPlacement((A, D, C), {}, (), "", {A: ((A_HAS, 0),), D: ((A_HAS, 0), (C_HAS, 2))})
    live, disks = {A: A_HAS, C: C_HAS}, {C: (WRITTEN_C,)}
    assert depends_on_unwritten(seated, outcome, {A}, live, disks)
    assert not depends_on_unwritten(seated, outcome, {C}, live, disks), "what it had is written"
    assert not depends_on_unwritten(seated, outcome, {A}, {}, disks), "it is not from memory"
    assert (
        find_partition([A_HAS], (0, 2, 4, 6), (0, 3, 6)) == (0, 3, 6)
        and find_partition([m.Span(1, 2)], (0, 3, 6)) == ()
    )
    assert stage_spans((0, 3, 6)) == [A_HAS, C_HAS]


# -- the member's side --------------------------------------------------------------------------


class Staged:
    """a, in a model of six layers."""

    def __init__(self) -> None:
        self.core = MemberCore(A, COORDINATOR, m.Join("r", "a", ""), Deadlines())
        self.hear(io.PeerConnected(COORDINATOR))
        self.say(m.Welcome(1, "r", ""))
        setup = m.Setup((), m.LedgerSpec(100, 0, epochs=1), 4, None, stages=3, model=MODEL)
        self.hear(io.TrainerJoined(setup, lambda rank, size, cuts=(): frozenset()))

    def hear(self, event: io.MemberEvent) -> list[io.MemberEffect]:
        return self.core.handle(event, 0.0)

    def say(self, message: m.Message) -> list[io.MemberEffect]:
        return self.hear(io.MessageReceived(COORDINATOR, message))

    def cut(
        self,
        generation: int,
        order: tuple[m.PeerId, ...],
        cuts: tuple[int, ...],
        pieces: dict[m.PeerId, tuple[tuple[m.Span, int], ...]],
    ) -> list[io.MemberEffect]:
        members = tuple(
            m.Member(p, p[:1].decode(), "", 0, False, -1, given, b"", tuple(b"" for _ in given))
            for p, given in ((p, pieces.get(p, ())) for p in order)
        )
        self.say(m.MemberListPage(1, generation, 0, 1, members))
        core = self.core
        view = m.MembershipView(
            1, generation, len(order), m.Verdict.ABORT, None, core.applied, core.history,
            core.replica_state.ledger, "why", "", cuts,
        )  # fmt: skip
        return self.say(view)


def put_aside() -> tuple[Staged, m.CheckpointInfo]:
    member = Staged()
    member.cut(1, (A, B), (0, 3, 6), {})
    holding = member.core.replica_state
    holding.applied, holding.history, holding.ledger = 0, b"k" * 32, m.LedgerState(step=1)
    pieces = {A: ((A_HAS, 0),), D: ((A_HAS, 0), (C_HAS, 2))}
    effects = member.cut(2, (A, D, B), (0, 2, 4, 6), pieces)
    (aside,) = [effect.checkpoint for effect in effects if isinstance(effect, io.SaveCheckpoint)]
    assert not any(isinstance(effect, io.Send) for effect in effects)
    return member, aside


def test_a_member_that_cannot_write_says_so_and_keeps_what_it_has() -> None:
    member, aside = put_aside()
    other = m.CheckpointInfo(0, b"k" * 32, m.LedgerState(step=1), m.Span(5, 6))
    assert member.hear(io.StageCheckpointsChanged((other,))) == [], "it is not known yet whether it can"
    assert member.hear(io.StageCheckpointsChanged((other,), aside)) == [
        io.Send(COORDINATOR, m.StageCheckpointList((other,), 2))
    ]
    (report,) = [e.message for e in member.say(m.Freeze(1, 2, "why")) if isinstance(e, io.Send)]
    assert isinstance(report, m.FreezeReport) and report.is_synced and report.layers == A_HAS
    member.cut(3, (A, B), (0, 3, 6), {})
    assert member.core.is_synced, "nothing was loaded meanwhile"


def test_a_member_that_has_written_loads_its_new_stage() -> None:
    """On disk it has a digest."""
    member, aside = put_aside()
    written = replace(aside, digest=b"d" * 32)
    effects = member.hear(io.StageCheckpointsChanged((written,)))
    assert io.Send(COORDINATOR, m.StageCheckpointList((written,), 2)) in effects
    assert io.LoadCheckpoints(1, 2, (written,), m.Span(0, 2)) in effects
