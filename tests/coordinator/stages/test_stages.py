"""Pipelines: ranks, shares and state sources."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from scripted_member import COORDINATOR, SETUP, ScriptedMember, no_neighbours
from staged_run import StagedRun, repartitioned_without_b

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as ev
from gridtrain.core.group.rank_layout import RankLayout, group_by_stage
from gridtrain.core.member.residual_recipients import residual_recipients
from gridtrain.core.stages import repartition
from gridtrain.core.stages.rank_placement import StateLocations, place_ranks, placement_cost_s, stage_shares
from gridtrain.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from gridtrain_coordinator.run.events import RecordViolation
from gridtrain_coordinator.stages.placement import RepartitionCache

A, B, C, D, E, F = (letter * 32 for letter in (b"a", b"b", b"c", b"d", b"e", b"f"))


def names(peers: object) -> str:
    assert isinstance(peers, tuple)
    return " ".join(peer[:1].decode() for peer in peers)


def name_of(peer: m.PeerId) -> str:
    return peer[:1].decode()


# -- placement ---------------------------------------------------------------------------------------


def test_holders_keep_their_stage_and_a_newcomer_gets_the_free_rank() -> None:
    locations = StateLocations(in_memory={A: 0, B: 0, C: 1})
    placement = place_ranks(2, [A, B, C, D, E], locations, name=name_of)
    assert names(placement.order) == "a b c d"
    assert dict(placement.state_sources) == {D: 2} and placement.standbys == (E,)
    assert placement.reason == "2 stages x 2 replicas; d gets stage 1 from c; standby: e"


def test_surplus_replicas_become_standbys_and_the_eldest_of_each_stage_stay() -> None:
    locations = StateLocations(in_memory={A: 1, B: 0, C: 1, D: 0, E: 2})
    placement = place_ranks(3, [A, B, C, D, E], locations, name=name_of)
    assert names(placement.order) == "b a e" and placement.state_sources == {}
    assert placement.standbys == (C, D)
    assert placement.reason == "3 stages x 1 replica; no worker needs to receive a state; standby: c, d"


def test_the_fastest_standby_is_placed() -> None:
    speed = {C: 5.0, D: 50.0}
    placement = place_ranks(
        2, [A, C, D, E], StateLocations(in_memory={A: 0}, initial_stages=(1,)), speed=speed.get
    )
    assert names(placement.order[:2]) == "a d" or D in placement.order
    assert placement.standbys == () and len(placement.order) == 4
    three = place_ranks(2, [A, C, D], StateLocations(in_memory={A: 0}, initial_stages=(1,)), speed=speed.get)
    assert names(three.order) == "a d" and three.standbys == (C,)


def test_a_stage_that_is_only_on_disk_is_placed_on_the_worker_that_stores_it() -> None:
    locations = StateLocations(in_memory={A: 0}, on_disk={C: {1}, D: set()})
    placement = place_ranks(2, [A, B, C], locations, name=name_of)
    assert names(placement.order) == "a c" and placement.state_sources == {}


def test_a_worker_of_another_stage_can_be_the_source_from_its_disk() -> None:
    """The worker of the middle stage is lost; that of the next stage has a copy of its checkpoint."""
    locations = StateLocations(in_memory={A: 0, C: 2}, on_disk={C: {1, 2}})
    placement = place_ranks(3, [A, C, E], locations, name=name_of)
    assert names(placement.order) == "a e c"
    assert dict(placement.state_sources) == {E: 2}
    assert placement.reason == "3 stages x 1 replica; e gets stage 1 from c"


def test_the_first_replica_of_each_stage_initializes_it() -> None:
    placement = place_ranks(2, [A, B, C, D], StateLocations(initial_stages=(0, 1)))
    assert len(set(placement.order)) == 4
    layout = RankLayout.for_world_size(2, 4)
    for rank, peer in enumerate(placement.order):
        first = layout.stage_ranks(layout.stage_of(rank))[0]
        assert placement.state_sources.get(peer) == (None if rank == first else first)


def test_an_impossible_placement_is_an_error() -> None:
    with pytest.raises(LocalProtocolError, match="1 worker cannot be placed in 2 stages"):
        place_ranks(2, [A], StateLocations())
    with pytest.raises(LocalProtocolError, match="no worker has the state of stage 1 of 2"):
        place_ranks(2, [A, B], StateLocations(in_memory={A: 0}))


def test_neighbours_in_a_pipeline_are_near_each_other() -> None:
    """Two sites, 1 ms within a site and 50 ms between them: each pipeline is within a site.

    site 1: a c e          stage 0:  a  b
    site 2: b d f          stage 1:  c  d      or e f, or one of each site
                           stage 2:  e  f
    """
    site = {A: 1, C: 1, E: 1, B: 2, D: 2, F: 2}

    def cost_s(one: m.PeerId, other: m.PeerId) -> float:
        return 0.001 if site[one] == site[other] else 0.050

    locations = StateLocations(in_memory={A: 0, B: 0, C: 1, D: 1, F: 2, E: 2})
    placement = place_ranks(3, [A, B, C, D, F, E], locations, cost_s=cost_s, name=name_of)
    layout = RankLayout.for_world_size(3, 6)
    for replica in range(2):
        assert len({site[placement.order[rank]] for rank in layout.pipeline_ranks(replica)}) == 1
    assert placement.reason.endswith("102 ms along a pipeline and a group of replicas instead of 151 ms")


@pytest.mark.parametrize("seed", range(30))
def test_a_placement_is_complete_and_moves_no_worker_needlessly(seed: int) -> None:
    random = Random(seed)
    stages, surplus = random.randint(2, 4), random.randint(0, 2)
    peers = [bytes([i]) * 32 for i in range(stages * random.randint(1, 3) + surplus)]
    live = {peer: random.randrange(stages) for peer in peers if random.random() < 0.5}
    disks = {peer: {random.randrange(stages)} for peer in peers if random.random() < 0.5}
    known = set(live.values()) | {s for own in disks.values() for s in own}
    links = {frozenset((a, b)): random.uniform(0.001, 0.1) for a in peers for b in peers if a != b}
    locations = StateLocations(live, disks, set(range(stages)) - known)
    placement = place_ranks(stages, peers, locations, cost_s=lambda a, b: links[frozenset((a, b))])
    layout = RankLayout.for_world_size(stages, len(placement.order))
    assert sorted((*placement.order, *placement.standbys)) == sorted(peers), seed
    assert layout.replicas == len(peers) // stages
    for rank, peer in enumerate(placement.order):
        stage, source = layout.stage_of(rank), placement.state_sources.get(peer)
        has = live.get(peer) == stage or stage in disks.get(peer, ())
        if source is None:
            assert has or (stage in locations.initial_stages and rank == layout.stage_ranks(stage)[0]), seed
        else:
            sender = placement.order[source]
            sends = (live.get(sender) == stage and layout.stage_of(source) == stage) or stage in disks.get(
                sender, ()
            )
            assert sends or (stage in locations.initial_stages and source == layout.stage_ranks(stage)[0]), (
                seed
            )
    holders = [sum(live.get(p) == s for p in peers) for s in range(stages)]
    for stage in range(stages):  # no worker moves needlessly
        stay = sum(live.get(placement.order[rank]) == stage for rank in layout.stage_ranks(stage))
        assert stay == min(holders[stage], layout.replicas), seed
    cheap = placement_cost_s(group_by_stage(placement.order, stages), lambda a, b: links[frozenset((a, b))])
    assert cheap[0] < float("inf")


def test_only_the_first_stage_reads_samples() -> None:
    layout, names = RankLayout(3, 2), list("abcdef")
    assert stage_shares(names, [4, 6, 1, 1, 1, 1], layout, None).counts == (4, 6, 0, 0, 0, 0)
    assert stage_shares(names, [4, 999, 9, 9, 9, 9], layout, None).counts == (4, 256, 0, 0, 0, 0)
    shares = stage_shares(names, [0] * 6, layout, 9)
    assert (
        shares.counts == (5, 4, 0, 0, 0, 0) and shares.reason == "9 samples divided evenly over 2 pipelines"
    )


def test_a_residual_goes_to_a_replica_of_the_same_stage() -> None:
    assert [residual_recipients(rank, 6, stages=2) for rank in range(6)] == [
        (1, 2), (2, 0), (0, 1), (4, 5), (5, 3), (3, 4),
    ]  # fmt: skip
    assert residual_recipients(0, 2, stages=2) == ()


# -- the coordinator ---------------------------------------------------------------------------------


def test_a_generation_is_a_whole_number_of_pipelines_and_the_rest_are_standbys() -> None:
    run = StagedRun(2, A, B, C)
    assert run.roster == "a b" and run.standbys == "c"
    shares = [member.share for member in run.core.run.member_list]
    assert shares == [4, 0]
    status = run.core.status(run.now_s)
    rows = {row["name"]: row for row in status["members"]}
    assert (rows["a"]["stage"], rows["b"]["stage"], rows["c"]["stage"]) == (0, 1, None)
    assert rows["c"]["state"] == "spare" and "2 stages x 1 replica use 2 workers" in rows["c"]["spare"]
    assert status["stages"] == 2


def test_the_status_of_a_repartitioned_run_has_the_present_stages() -> None:
    run = repartitioned_without_b()
    status = run.core.status(run.now_s)
    assert status["stages"] == 2
    assert status["facts"]["exchange"].endswith("; now 2 stages cut at [0, 3, 6]")
    run = StagedRun(2, A, B)
    assert "now" not in run.core.status(run.now_s)["facts"].get("exchange", "")


def test_standbys_make_no_generation_until_there_is_one_for_each_stage() -> None:
    run = StagedRun(2, A, B)
    generation = run.core.generation
    run.join(C)
    assert run.core.generation == generation and run.standbys == "c"
    run.join(D)
    run.report(A, B)
    assert run.core.generation == generation + 1
    assert run.roster in ("a c b d", "a d b c")
    sources = {m_.peer: m_.donor for m_ in run.core.run.member_list if m_.joining}
    assert {run.core.run.member_list[rank].peer for rank in sources.values()} == {A, B}


def test_a_run_with_fewer_workers_than_stages_waits() -> None:
    run = StagedRun(3, A, B, start=False)
    status = run.core.status(run.now_s)
    assert (status["phase"], status["generation"]) == ("waiting", 0)
    assert status["reason"] == "waiting for 3 workers, one for each stage of the model; 2 of 3 have joined"
    run.join(C)
    assert run.roster == "a b c"


# -- a member ----------------------------------------------------------------------------------------


class Member(ScriptedMember):
    """The core of one member of a pipeline."""

    def __init__(self, me: m.PeerId, stages: int, stored: tuple[m.CheckpointInfo, ...] = ()) -> None:
        setup = replace(SETUP, stages=stages, stage_checkpoints=stored)
        super().__init__(me, setup, neighbours=no_neighbours)

    def view(
        self,
        generation: int,
        order: tuple[m.PeerId, ...],
        sources: dict[m.PeerId, int],
        applied: int = -1,
        history: bytes | None = None,
    ) -> list[ev.MemberEffect]:
        members = (m.Member(p, name_of(p), "", 0, p in sources, sources.get(p, -1)) for p in order)
        return self.install(generation, members, applied=applied, history=history)


def test_required_peers_are_neighbours_root_source_and_receivers() -> None:
    """3 stages x 2 replicas, ranks 0 .. 5 are a .. f; d (stage 1) gets its state from c, f from c's disk."""
    order, sources = (A, B, C, D, E, F), {D: 2, F: 2}
    needed = {}
    for peer in order:
        member = Member(peer, 3)
        member.view(1, order, sources)
        ranks = member.core.current_generation.required_peers.ranks
        needed[name_of(peer)] = "".join(name_of(order[rank]) for rank in sorted(ranks))
    assert needed == {"a": "bcdef", "b": "adf", "c": "adef", "d": "abcf", "e": "ac", "f": "abcd"}


def test_a_joining_member_requests_the_state_from_the_source_of_its_stage() -> None:
    member = Member(D, 2)
    member.view(1, (A, B, C, D), {D: 2, B: 0})
    assert member.hear(ev.PeerConnected(A)) == []
    (request,) = member.hear(ev.PeerConnected(C))
    assert request == ev.Send(C, m.StateRequest(1, 1, True))


def test_before_the_first_step_the_first_replica_of_each_stage_holds_its_state() -> None:
    for peer, synced in ((A, True), (B, False), (C, True), (D, False)):
        member = Member(peer, 2)
        member.view(1, (A, B, C, D), {B: 0, D: 2})
        assert member.core.is_synced is synced


def test_a_member_moved_to_another_stage_does_not_hold_its_state() -> None:
    member = Member(B, 2)
    member.view(1, (A, B), {})
    assert (
        member.core.is_synced
        and member.core.rank_assignment is not None
        and member.core.rank_assignment.stage == 1
    )
    member.view(2, (B, C), {})
    assert member.core.is_synced  # at step 0 it initializes stage 0
    other = Member(B, 2)
    other.view(1, (A, B), {})
    other.view(2, (A, B, C, D), {B: 0})
    assert not other.core.is_synced, "rank 1 of 4 is stage 0"


def test_a_member_that_initialized_another_stage_no_longer_holds_its_former_one() -> None:
    member = Member(B, 2)
    member.view(1, (A, B), {})
    member.view(2, (B, C), {})
    member.view(3, (A, D, C, B), {B: 2})
    assert (
        member.core.rank_assignment is not None
        and member.core.rank_assignment.stage == 1
        and not member.core.is_synced
    )


def test_a_member_that_may_have_begun_to_load_another_stage_no_longer_holds_its_own() -> None:
    is_held = {}
    for chunks in (1, 2):  # of the two of the other stage's state
        member = Member(B, 2)
        member.view(1, (A, B), {B: 0}, 9, b"h")
        member.hear(ev.StateLoaded(1, 1))
        member.view(2, (A, B, C, D), {B: 0}, 9, b"h")
        assert not member.core.is_synced
        for index in range(chunks):
            member.say(m.StateBlock(1, 2, index, 2, b""), A)
        (report,) = [e.message for e in member.say(m.Freeze(1, 2, "why")) if isinstance(e, ev.Send)]
        assert isinstance(report, m.FreezeReport)
        member.view(3, (A, B), {}, 9, b"h")
        is_held[chunks] = report.is_synced, member.core.is_synced
    assert is_held == {1: (True, True), 2: (False, False)}


def test_a_report_names_the_layers_of_its_state() -> None:
    member = Member(B, 2)
    member.view(1, (A, B), {})
    reports = [e.message for e in member.say(m.Freeze(1, 1, "why")) if isinstance(e, ev.Send)]
    assert [r.layers for r in reports if isinstance(r, m.FreezeReport)] == [m.Span(1, 2)]


def test_a_checkpoint_on_the_members_own_disk_is_loaded_without_a_request() -> None:
    stored = m.CheckpointInfo(9, b"h", m.LedgerState(step=10), layers=m.Span(1, 2))
    member = Member(B, 2, (stored,))
    effects = member.view(4, (A, B), {}, 9, b"h")
    assert ev.LoadCheckpoints(1, 4, (stored,), m.Span(1, 2)) in effects
    assert not member.core.is_synced
    member.hear(ev.PeerConnected(A))
    ready = member.hear(ev.StateLoaded(1, 4))
    assert ev.Send(COORDINATOR, m.Ready(1, 4, b"h")) in ready


def test_a_state_that_cannot_be_loaded_is_requested() -> None:
    stored = m.CheckpointInfo(9, b"h", m.LedgerState(step=10), layers=m.Span(1, 2))
    member = Member(D, 2, (stored,))
    member.view(4, (A, B, C, D), {D: 2}, 9, b"h")
    assert member.hear(ev.PeerConnected(C)) == []
    effects = member.hear(ev.StageCheckpointsChanged(()))
    assert ev.Send(COORDINATOR, m.StageCheckpointList((), 4)) in effects
    assert ev.Send(C, m.StateRequest(1, 4, True)) in effects


def test_a_source_sends_a_checkpoint_of_another_stage_from_its_disk() -> None:
    stored = m.CheckpointInfo(9, b"h", m.LedgerState(step=10), layers=m.Span(0, 1))
    member = Member(B, 2, (stored,))
    member.view(4, (A, B), {A: 1}, 9, b"h")
    effects = member.say(m.StateRequest(1, 4), A)
    assert effects == [ev.SendState(A, 1, 4, True, stored)]


def test_a_source_without_the_requested_state_reports_it_to_the_coordinator() -> None:
    """Otherwise the coordinator would not know why the receiver waits."""
    stored = m.CheckpointInfo(9, b"h", m.LedgerState(step=10), layers=m.Span(1, 2))
    notice = ev.Send(COORDINATOR, m.StageCheckpointList((stored,), 4))
    member = Member(B, 2, (stored,))
    assert notice not in member.view(4, (A, B), {A: 1}, 9, b"h")
    assert notice in member.say(m.StateRequest(1, 4), A), "it has no checkpoint of stage 0"

    for layers, lacks in ((m.Span(0, 1), True), (m.Span(1, 2), False)):
        member = Member(B, 2, (stored,))
        a = m.Member(A, "a", "", 0, False, pieces=((layers, 1),), piece_digests=(b"",))
        member.say(m.MemberListPage(1, 4, 0, 1, (a, m.Member(B, "b", "", 0, False))))
        ledger = m.LedgerState(step=10)
        effects = member.say(m.MembershipView(1, 4, 2, m.Verdict.ABORT, None, 9, b"h", ledger, "because"))
        assert (notice in effects) is lacks


def test_a_source_that_is_still_loading_answers_afterwards() -> None:
    stored = m.CheckpointInfo(9, b"h", m.LedgerState(step=10), layers=m.Span(1, 2))
    member = Member(C, 2, (stored,))
    member.view(4, (A, B, C, D), {D: 2}, 9, b"h")
    assert member.say(m.StateRequest(1, 4), D) == []
    assert ev.SendState(D, 1, 4, True, None) in member.hear(ev.StateLoaded(1, 4))


def test_checkpoints_after_a_rollback_are_discarded() -> None:
    early = m.CheckpointInfo(9, b"h", m.LedgerState(step=10), layers=m.Span(1, 2))
    late = m.CheckpointInfo(19, b"i", m.LedgerState(step=20), layers=m.Span(1, 2))
    member = Member(B, 2, (early, late))
    member.view(4, (A, B), {}, 9, b"h")
    member.hear(ev.PeerConnected(A))
    assert ev.Send(COORDINATOR, m.Ready(1, 4, b"h")) in member.hear(ev.StateLoaded(1, 4))
    effects = member.say(m.StartGeneration(1, 4))
    assert (
        ev.DiscardCheckpoints(9) in effects
        and ev.Send(COORDINATOR, m.StageCheckpointList((early,), 4)) in effects
    )


def test_a_repeated_view_discards_no_checkpoint_of_a_returning_member() -> None:
    """It left at step 15 of a generation that began at step 14, and returns before the next one is made."""
    early = m.CheckpointInfo(13, b"h", m.LedgerState(step=14), layers=m.Span(1, 2))
    late = m.CheckpointInfo(14, b"i", m.LedgerState(step=15), layers=m.Span(1, 2))
    member = Member(B, 2, (early, late))
    effects = [*member.view(3, (A, B), {}, 13, b"h"), *member.say(m.Freeze(1, 3, "b left", ()))]
    effects += member.view(4, (A, B), {}, 14, b"i")
    assert not [effect for effect in effects if isinstance(effect, ev.DiscardCheckpoints)]
    assert ev.LoadCheckpoints(1, 4, (late,), m.Span(1, 2)) in effects


def test_a_standby_leaves_the_group_and_returns_as_a_joining_member() -> None:
    member = Member(B, 2)
    member.view(1, (A, B), {})
    member.hear(ev.PeerConnected(A))
    notice = m.StandbyNotice(1, 2, None, -1, member.core.history, m.LedgerState(), "no rank")
    member.core._context.peer_links._dialled_addresses[A] = "tcp://a"
    assert ev.Disconnect(A) in member.say(notice)
    assert member.core.phase is ev.MemberPhase.APART and not member.core.is_synced
    member.view(3, (A, B), {B: 0}, 5, b"x")
    assert member.core.phase is ev.MemberPhase.FORMING and not member.core.is_synced


def test_a_new_checkpoint_is_copied_to_the_next_stage_and_that_of_the_last_to_the_first() -> None:
    """2 x 2: a and b hold stage 0, c and d stage 1; a sends its copies to c, and c to a."""
    for me, other, stage in ((A, C, 0), (C, A, 1), (D, B, 1)):
        member = Member(me, 2)
        for peer in (A, B, C, D):
            member.hear(ev.PeerConnected(peer))
        member.view(1, (A, B, C, D), {})
        member.say(m.StartGeneration(1, 1))
        member.core.replica_state.applied, member.core.replica_state.is_synced = 9, True  # ten steps later
        stored = m.CheckpointInfo(9, b"h", m.LedgerState(step=10), m.Span(stage, stage + 1))
        effects = member.hear(ev.StageCheckpointsChanged((stored,)))
        assert ev.SendCheckpoint(other, 1, 1, stored) in effects
        assert not [
            e for e in member.hear(ev.StageCheckpointsChanged((stored,))) if isinstance(e, ev.SendCheckpoint)
        ]


def test_a_copy_is_accepted_only_of_the_preceding_stage() -> None:
    member = Member(C, 2)
    member.view(1, (A, B, C, D), {})
    good = m.CheckpointBlock(1, 1, m.CheckpointInfo(0, b"h", m.LedgerState(step=1)), 0, 1, b"state")
    assert member.say(good, A) == [ev.StoreCheckpointBlock(A, good)]
    for wrong, sender in (
        (good, B),
        (replace(good, checkpoint=replace(good.checkpoint, layers=m.Span(1, 2))), A),
        (replace(good, checkpoint=replace(good.checkpoint, applied=7)), A),
    ):
        with pytest.raises(RemoteProtocolError, match="sent a checkpoint of"):
            member.say(wrong, sender)
    assert member.say(replace(good, generation=0), B) == []


@pytest.mark.parametrize("known", [b"d" * 32, b""], ids=["confirmed", "not confirmed yet"])
def test_a_piece_with_another_digest_than_the_confirmed_one_is_a_violation(known: bytes) -> None:
    """A assembles its stage from B's checkpoint of layers 1 and 2 of the old partition."""
    layers = m.Span(1, 2)
    member = Member(A, 3)
    a = m.Member(A, "a", "", 0, False, pieces=((layers, 1),), piece_digests=(known,))
    member.say(m.MemberListPage(1, 4, 0, 1, (a, m.Member(B, "b", "", 0, False))))
    state = m.LedgerState(step=10)
    member.say(
        m.MembershipView(1, 4, 2, m.Verdict.ABORT, None, 9, b"h", state, "because", stage_bounds=(0, 2, 3))
    )
    good, wrong = (
        m.CheckpointBlock(1, 4, m.CheckpointInfo(9, b"h", state, layers, digest * 32), 0, 1, b"")
        for digest in (b"d", b"x")
    )
    assert member.say(good, B) == [ev.StoreCheckpointBlock(B, good)]
    if known:
        with pytest.raises(
            RemoteProtocolError, match="rank 1 sent a checkpoint of layers 1 to 1 with the digest 7878"
        ):
            member.say(wrong, B)
    else:
        assert member.say(wrong, B) == [ev.StoreCheckpointBlock(B, wrong)]


def test_a_checkpoint_written_after_a_rollback_is_discarded() -> None:
    member = Member(B, 2)
    member.view(4, (A, B), {}, -1)
    late = m.CheckpointInfo(19, b"i", m.LedgerState(step=20), layers=m.Span(1, 2))
    assert ev.DiscardCheckpoints(-1) in member.hear(ev.StageCheckpointsChanged((late,)))


def test_a_thousand_workers_are_placed() -> None:
    peers = [i.to_bytes(2, "big") * 16 for i in range(1003)]
    live = {peer: at % 4 for at, peer in enumerate(peers[:800])}
    placement = place_ranks(
        4, peers, StateLocations(in_memory=live), cost_s=lambda a, b: 0.001 * (1 + (a[1] ^ b[1]))
    )
    assert (
        len(placement.order) == 1000 and len(placement.standbys) == 3 and len(placement.state_sources) == 200
    )


def test_a_standby_keeps_its_checkpoints() -> None:
    """It was a member until now, and has later checkpoints than the step at which the generation began."""
    stored = m.CheckpointInfo(19, b"i", m.LedgerState(step=20), layers=m.Span(1, 2))
    member = Member(C, 2, (stored,))
    effects = member.say(m.StandbyNotice(1, 3, None, 5, b"g", m.LedgerState(step=6), "no rank"))
    assert not [effect for effect in effects if isinstance(effect, ev.DiscardCheckpoints)]
    assert member.core._context.checkpoints.stored == (stored,)


def test_a_report_of_an_impossible_generation_pauses_the_run() -> None:
    run = StagedRun(2, start=False)
    run.join(A)
    run.say(A, m.CurrentGeneration(1, 7, ((A, 4), (B, 4), (C, 4))))
    status = run.core.status(run.now_s)
    assert status["world_size"] == 3 and status["phase"] == "paused"
    assert group_by_stage([1, 2, 3], 2) == [[1, 2, 3]] and group_by_stage([1, 2, 3, 4], 2) == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    "stages, bounds", [(1, (0, 3, 6)), (3, (0, 1, 4))], ids=["not partitioned", "3 layers"]
)
def test_a_report_of_a_partition_that_does_not_fit_the_model_is_a_violation(
    stages: int, bounds: tuple[int, ...]
) -> None:
    run = StagedRun(stages, *(A, B, C)[:stages])
    effects = run.say(A, m.CurrentGeneration(1, 7, ((A, 4), (B, 4)), bounds))
    assert any(isinstance(effect, RecordViolation) for effect in effects)
    assert run.core.status(run.now_s)["stages"] == stages


def test_a_report_before_the_run_is_defined_does_not_partition_the_model() -> None:
    """The journal is lost, so A's report counts at first; B's is true."""
    run = StagedRun(1, start=False)
    run.say(A, m.Join("r", "a", "memory://a"))
    run.say(A, m.CurrentGeneration(1, 7, ((A, 4), (C, 4)), (0, 3, 6)))
    assert run.core.status(run.now_s)["stages"] == 2, "as A reported"
    run.join(A)
    assert run.core.status(run.now_s)["stages"] == 1
    run.say(B, m.Join("r", "b", "memory://b"))
    run.say(B, m.CurrentGeneration(1, 6, ((B, 4),), ()))
    assert run.core.status(run.now_s)["world_size"] == 1, "A's report is dropped"


@pytest.mark.parametrize("bounds", [(0,), (5,), (1, 2), (0, 2, 2), (0, 3, 1)])
def test_a_report_of_impossible_bounds_is_a_violation(bounds: tuple[int, ...]) -> None:
    run = StagedRun(2, start=False)
    run.join(A)
    effects = run.say(A, m.CurrentGeneration(1, 7, ((A, 4), (B, 4)), bounds))
    assert any(isinstance(effect, RecordViolation) for effect in effects)
    assert run.core.status(run.now_s)["world_size"] == 0


def test_a_partition_that_does_not_fit_is_searched_once_for_the_same_workers_and_setup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched = []

    def search(setup: m.Setup, peers: tuple[m.PeerId, ...], *_: object) -> None:
        searched.append(names(peers))
        raise ConfigError("it does not fit", remedy="none")

    monkeypatch.setattr(repartition, "partition_over_fewer", search)
    cache, other = RepartitionCache(), replace(SETUP, facts=(*SETUP.facts, "layers=2"))
    for setup, peers in ((SETUP, (A, B)), (SETUP, (A, B)), (SETUP, (A, C)), (other, (A, C))):
        with pytest.raises(ConfigError):
            cache.fit_fewer_stages(setup, peers, {}, {})
    assert searched == ["a b", "a c", "a c"], "before step 1, the same workers can define another setup"
