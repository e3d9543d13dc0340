"""Pipelines: ranks, shares and state sources."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from staged_run import StagedRun

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.group import member_events as io
from gridtrain.core.group.rank_layout import RankLayout, group_by_stage
from gridtrain.core.member.member import MemberCore
from gridtrain.core.member.residual_transfer import residual_recipients
from gridtrain.core.stages.rank_placement import StateLocations, place_ranks, placement_cost_s, stage_shares
from gridtrain.errors import LocalProtocolError, RemoteProtocolError
from gridtrain_coordinator.run.events import RecordViolation

A, B, C, D, E, F = (letter * 32 for letter in (b"a", b"b", b"c", b"d", b"e", b"f"))
COORDINATOR = b"0" * 32


def names(peers: object) -> str:
    assert isinstance(peers, tuple)
    return " ".join(peer[:1].decode() for peer in peers)


def called(peer: m.PeerId) -> str:
    return peer[:1].decode()


# -- seating -----------------------------------------------------------------------------------------


def test_who_holds_a_stage_keeps_it_and_a_newcomer_gets_the_free_seat() -> None:
    hands = StateLocations(in_memory={A: 0, B: 0, C: 1})
    seating = place_ranks(2, [A, B, C, D, E], hands, name=called)
    assert names(seating.order) == "a b c d"
    assert dict(seating.state_sources) == {D: 2} and seating.standbys == (E,)
    assert seating.reason == "2 stages x 2 replicas; d gets stage 1 from c; standby: e"


def test_with_too_few_for_all_replicas_the_eldest_of_each_stage_stay() -> None:
    hands = StateLocations(in_memory={A: 1, B: 0, C: 1, D: 0, E: 2})
    seating = place_ranks(3, [A, B, C, D, E], hands, name=called)
    assert names(seating.order) == "b a e" and seating.state_sources == {}
    assert seating.standbys == (C, D)
    assert seating.reason == "3 stages x 1 replica; no worker needs to receive a state; standby: c, d"


def test_the_fastest_spare_is_taken() -> None:
    speed = {C: 5.0, D: 50.0}
    seating = place_ranks(
        2, [A, C, D, E], StateLocations(in_memory={A: 0}, initial_stages=(1,)), speed=speed.get
    )
    assert names(seating.order[:2]) == "a d" or D in seating.order
    assert seating.standbys == () and len(seating.order) == 4
    three = place_ranks(2, [A, C, D], StateLocations(in_memory={A: 0}, initial_stages=(1,)), speed=speed.get)
    assert names(three.order) == "a d" and three.standbys == (C,)


def test_of_a_stage_that_is_only_on_a_disk_its_keeper_takes_the_seat() -> None:
    hands = StateLocations(in_memory={A: 0}, on_disk={C: {1}, D: set()})
    seating = place_ranks(2, [A, B, C], hands, name=called)
    assert names(seating.order) == "a c" and seating.state_sources == {}


def test_a_disk_of_another_seat_gives_to_the_newcomer() -> None:
    """Of three stages the middle one died; the worker of the next one has a copy of it."""
    hands = StateLocations(in_memory={A: 0, C: 2}, on_disk={C: {1, 2}})
    seating = place_ranks(3, [A, C, E], hands, name=called)
    assert names(seating.order) == "a e c"
    assert dict(seating.state_sources) == {E: 2}
    assert seating.reason == "3 stages x 1 replica; e gets stage 1 from c"


def test_at_the_beginning_each_stage_begins_at_its_first_replica() -> None:
    seating = place_ranks(2, [A, B, C, D], StateLocations(initial_stages=(0, 1)))
    assert len(set(seating.order)) == 4
    seats = RankLayout.for_world_size(2, 4)
    for rank, peer in enumerate(seating.order):
        first = seats.stage_ranks(seats.stage_of(rank))[0]
        assert seating.state_sources.get(peer) == (None if rank == first else first)


def test_it_is_said_who_cannot_be_seated() -> None:
    with pytest.raises(LocalProtocolError, match="1 workers cannot be placed in 2 stages"):
        place_ranks(2, [A], StateLocations())
    with pytest.raises(LocalProtocolError, match="no worker has the state of stage 1 of 2"):
        place_ranks(2, [A, B], StateLocations(in_memory={A: 0}))


def test_neighbours_in_a_pipeline_are_near_each_other() -> None:
    """Two sites; between them 50 ms, within one 1 ms.  A pipeline lies within a site.

    site 1: a c e          stage 0:  a  b
    site 2: b d f          stage 1:  c  d      or e f, or one of each site
                           stage 2:  e  f
    """
    site = {A: 1, C: 1, E: 1, B: 2, D: 2, F: 2}

    def cost_s(one: m.PeerId, other: m.PeerId) -> float:
        return 0.001 if site[one] == site[other] else 0.050

    hands = StateLocations(in_memory={A: 0, B: 0, C: 1, D: 1, F: 2, E: 2})
    seating = place_ranks(3, [A, B, C, D, F, E], hands, cost_s=cost_s, name=called)
    seats = RankLayout.for_world_size(3, 6)
    for replica in range(2):
        assert len({site[seating.order[rank]] for rank in seats.pipeline_ranks(replica)}) == 1
    assert seating.reason.endswith("102 ms along a pipeline and a group of replicas instead of 151 ms")


@pytest.mark.parametrize("seed", range(30))
def test_a_seating_is_whole_and_no_dearer_than_the_order_of_joining(seed: int) -> None:
    random = Random(seed)
    stages, spare = random.randint(2, 4), random.randint(0, 2)
    peers = [bytes([i]) * 32 for i in range(stages * random.randint(1, 3) + spare)]
    live = {peer: random.randrange(stages) for peer in peers if random.random() < 0.5}
    disks = {peer: {random.randrange(stages)} for peer in peers if random.random() < 0.5}
    known = set(live.values()) | {s for own in disks.values() for s in own}
    links = {frozenset((a, b)): random.uniform(0.001, 0.1) for a in peers for b in peers if a != b}
    hands = StateLocations(live, disks, set(range(stages)) - known)
    seating = place_ranks(stages, peers, hands, cost_s=lambda a, b: links[frozenset((a, b))])
    seats = RankLayout.for_world_size(stages, len(seating.order))
    assert sorted((*seating.order, *seating.standbys)) == sorted(peers), seed
    assert seats.replicas == len(peers) // stages
    for rank, peer in enumerate(seating.order):
        stage, donor = seats.stage_of(rank), seating.state_sources.get(peer)
        has = live.get(peer) == stage or stage in disks.get(peer, ())
        if donor is None:
            assert has or (stage in hands.initial_stages and rank == seats.stage_ranks(stage)[0]), seed
        else:
            giver = seating.order[donor]
            gives = (live.get(giver) == stage and seats.stage_of(donor) == stage) or stage in disks.get(
                giver, ()
            )
            assert gives or (stage in hands.initial_stages and donor == seats.stage_ranks(stage)[0]), seed
    holders = [sum(live.get(p) == s for p in peers) for s in range(stages)]
    for stage in range(stages):  # nobody moves who need not
        stay = sum(live.get(seating.order[rank]) == stage for rank in seats.stage_ranks(stage))
        assert stay == min(holders[stage], seats.replicas), seed
    cheap = placement_cost_s(group_by_stage(seating.order, stages), lambda a, b: links[frozenset((a, b))])
    assert cheap[0] < float("inf")


def test_only_the_first_stage_reads_samples() -> None:
    seats = RankLayout(3, 2)
    assert stage_shares([4, 6, 1, 1, 1, 1], seats, None).counts == (4, 6, 0, 0, 0, 0)
    dealt = stage_shares([0] * 6, seats, 9)
    assert dealt.counts == (5, 4, 0, 0, 0, 0) and dealt.reason == "9 samples divided evenly over 2 pipelines"


def test_a_residual_goes_to_a_replica_of_the_same_stage() -> None:
    assert [residual_recipients(rank, 6, stages=2) for rank in range(6)] == [
        (1, 2), (2, 0), (0, 1), (4, 5), (5, 3), (3, 4),
    ]  # fmt: skip
    assert residual_recipients(0, 2, stages=2) == ()


# -- the coordinator ---------------------------------------------------------------------------------


def test_a_generation_is_a_whole_number_of_pipelines_and_the_rest_is_spare() -> None:
    run = StagedRun(2, A, B, C)
    assert run.roster == "a b" and run.standbys == "c"
    shares = [member.share for member in run.core.run.member_list]
    assert shares == [4, 0]
    snapshot = run.core.snapshot(run.now_s)
    lines = {line["name"]: line for line in snapshot["members"]}
    assert (lines["a"]["stage"], lines["b"]["stage"], lines["c"]["stage"]) == (0, 1, None)
    assert lines["c"]["state"] == "spare" and "2 stages x 1 replicas use 2 workers" in lines["c"]["spare"]
    assert snapshot["stages"] == 2


def test_a_spare_changes_nothing_until_there_is_one_for_each_stage() -> None:
    run = StagedRun(2, A, B)
    generation = run.core.generation
    run.join(C)
    assert run.core.generation == generation and run.standbys == "c"
    run.join(D)
    run.report(A, B)
    assert run.core.generation == generation + 1
    assert run.roster in ("a c b d", "a d b c")
    donors = {m_.peer: m_.donor for m_ in run.core.run.member_list if m_.joining}
    assert {run.core.run.member_list[rank].peer for rank in donors.values()} == {A, B}


def test_fewer_workers_than_stages_wait() -> None:
    run = StagedRun(3, A, B, start=False)
    snapshot = run.core.snapshot(run.now_s)
    assert (snapshot["phase"], snapshot["generation"]) == ("waiting", 0)
    assert snapshot["reason"] == "waiting for 3 workers, one for each stage of the model; 2 of 3 have joined"
    run.join(C)
    assert run.roster == "a b c"


# -- a member ----------------------------------------------------------------------------------------


class Member:
    """A member core in a pipeline; its key is the given letter."""

    def __init__(self, me: m.PeerId, stages: int, kept: tuple[m.CheckpointInfo, ...] = ()) -> None:
        self.core = MemberCore(me, COORDINATOR, m.Join("r", called(me), ""), Deadlines())
        self.hear(io.PeerConnected(COORDINATOR))
        self.say(m.Welcome(1, "r", ""))
        setup = m.Setup(
            (("model", "tiny"),),
            m.LedgerSpec(100, 0, epochs=1),
            4,
            None,
            stages=stages,
            stage_checkpoints=kept,
        )
        self.hear(io.TrainerJoined(setup, lambda rank, size, cuts: frozenset()))

    def hear(self, event: io.MemberEvent) -> list[io.MemberEffect]:
        return self.core.handle(event, 0.0)

    def say(self, message: m.Message, peer: m.PeerId = COORDINATOR) -> list[io.MemberEffect]:
        return self.hear(io.MessageReceived(peer, message))

    def view(
        self,
        generation: int,
        order: tuple[m.PeerId, ...],
        donors: dict[m.PeerId, int],
        applied: int = -1,
        history: bytes | None = None,
    ) -> list[io.MemberEffect]:
        members = tuple(m.Member(p, called(p), "", 0, p in donors, donors.get(p, -1)) for p in order)
        self.say(m.MemberListPage(1, generation, 0, 1, members))
        then = self.core.history if history is None else history
        ledger = m.LedgerState(step=applied + 1)
        return self.say(
            m.MembershipView(
                1, generation, len(order), m.Verdict.ABORT, None, applied, then, ledger, "because"
            )
        )


def test_edges_are_the_pipeline_the_root_the_donor_and_who_gets_the_state_here() -> None:
    """S = 3, R = 2, ranks 0 .. 5 are a .. f; d (stage 1) gets its state from c, f from a disk of c."""
    order, donors = (A, B, C, D, E, F), {D: 2, F: 2}
    needed = {}
    for peer in order:
        member = Member(peer, 3)
        member.view(1, order, donors)
        ranks = member.core.current_generation.required_peers.ranks
        needed[called(peer)] = "".join(called(order[rank]) for rank in sorted(ranks))
    assert needed == {"a": "bcdef", "b": "adf", "c": "adef", "d": "abcf", "e": "ac", "f": "abcd"}


def test_a_joining_member_asks_the_donor_of_its_own_stage() -> None:
    member = Member(D, 2)
    member.view(1, (A, B, C, D), {D: 2, B: 0})
    assert member.hear(io.PeerConnected(A)) == []
    (asked,) = member.hear(io.PeerConnected(C))
    assert asked == io.Send(C, m.StateRequest(1, 1, True))


def test_at_the_beginning_the_first_replica_of_each_stage_holds_it() -> None:
    for peer, synced in ((A, True), (B, False), (C, True), (D, False)):
        member = Member(peer, 2)
        member.view(1, (A, B, C, D), {B: 0, D: 2})
        assert member.core.is_synced is synced


def test_who_is_moved_to_another_stage_does_not_hold_its_state() -> None:
    member = Member(B, 2)
    member.view(1, (A, B), {})
    assert (
        member.core.is_synced
        and member.core.rank_assignment is not None
        and member.core.rank_assignment.stage == 1
    )
    member.view(2, (B, C), {})
    assert member.core.is_synced  # at step 0 it begins anew as stage 0
    other = Member(B, 2)
    other.view(1, (A, B), {})
    other.view(2, (A, B, C, D), {B: 0})
    assert not other.core.is_synced, "rank 1 of 4 is stage 0"


def test_who_began_anew_as_another_stage_does_not_hold_what_it_was_before() -> None:
    member = Member(B, 2)
    member.view(1, (A, B), {})
    member.view(2, (B, C), {})
    member.view(3, (A, D, C, B), {B: 2})
    assert (
        member.core.rank_assignment is not None
        and member.core.rank_assignment.stage == 1
        and not member.core.is_synced
    )


def test_who_may_have_begun_to_load_another_stage_does_not_hold_its_own() -> None:
    held = {}
    for blocks in (1, 2):  # of 2 that the state of the other stage has
        member = Member(B, 2)
        member.view(1, (A, B), {B: 0}, 9, b"h")
        member.hear(io.StateLoaded(1, 1))
        member.view(2, (A, B, C, D), {B: 0}, 9, b"h")
        assert not member.core.is_synced
        for index in range(blocks):
            member.say(m.StateBlock(1, 2, index, 2, b""), A)
        (report,) = [e.message for e in member.say(m.Freeze(1, 2, "why")) if isinstance(e, io.Send)]
        assert isinstance(report, m.FreezeReport)
        member.view(3, (A, B), {}, 9, b"h")
        held[blocks] = report.is_synced, member.core.is_synced
    assert held == {1: (True, True), 2: (False, False)}


def test_a_report_says_of_which_stage_the_state_is() -> None:
    member = Member(B, 2)
    member.view(1, (A, B), {})
    reports = [e.message for e in member.say(m.Freeze(1, 1, "why")) if isinstance(e, io.Send)]
    assert [r.layers for r in reports if isinstance(r, m.FreezeReport)] == [m.Span(1, 2)]


def test_a_checkpoint_on_the_own_disk_is_loaded_and_nobody_is_asked() -> None:
    held = m.CheckpointInfo(9, b"h", m.LedgerState(step=10), layers=m.Span(1, 2))
    member = Member(B, 2, (held,))
    effects = member.view(4, (A, B), {}, 9, b"h")
    assert io.LoadCheckpoints(1, 4, (held,), m.Span(1, 2)) in effects
    assert not member.core.is_synced
    member.hear(io.PeerConnected(A))
    ready = member.hear(io.StateLoaded(1, 4))
    assert io.Send(COORDINATOR, m.Ready(1, 4, b"h")) in ready


def test_what_cannot_be_loaded_is_asked_for() -> None:
    held = m.CheckpointInfo(9, b"h", m.LedgerState(step=10), layers=m.Span(1, 2))
    member = Member(D, 2, (held,))
    member.view(4, (A, B, C, D), {D: 2}, 9, b"h")
    assert member.hear(io.PeerConnected(C)) == []
    effects = member.hear(io.StageCheckpointsChanged(()))
    assert io.Send(COORDINATOR, m.StageCheckpointList((), 4)) in effects
    assert io.Send(C, m.StateRequest(1, 4, True)) in effects


def test_a_donor_gives_a_checkpoint_of_another_stage_from_its_disk() -> None:
    held = m.CheckpointInfo(9, b"h", m.LedgerState(step=10), layers=m.Span(0, 1))
    member = Member(B, 2, (held,))
    member.view(4, (A, B), {A: 1}, 9, b"h")
    effects = member.say(m.StateRequest(1, 4), A)
    assert effects == [io.SendState(A, 1, 4, True, held)]


def test_who_has_not_what_others_are_to_get_from_it_tells_the_coordinator() -> None:
    """Else nobody would know why the receiver waits."""
    held = m.CheckpointInfo(9, b"h", m.LedgerState(step=10), layers=m.Span(1, 2))
    told = io.Send(COORDINATOR, m.StageCheckpointList((held,), 4))
    member = Member(B, 2, (held,))
    assert told not in member.view(4, (A, B), {A: 1}, 9, b"h")
    assert told in member.say(m.StateRequest(1, 4), A), "a checkpoint of stage 0"

    for blocks, lacks in ((m.Span(0, 1), True), (m.Span(1, 2), False)):
        member = Member(B, 2, (held,))
        a = m.Member(A, "a", "", 0, False, pieces=((blocks, 1),), piece_digests=(b"",))
        member.say(m.MemberListPage(1, 4, 0, 1, (a, m.Member(B, "b", "", 0, False))))
        ledger = m.LedgerState(step=10)
        effects = member.say(m.MembershipView(1, 4, 2, m.Verdict.ABORT, None, 9, b"h", ledger, "because"))
        assert (told in effects) is lacks


def test_a_donor_that_loads_itself_answers_when_it_has() -> None:
    held = m.CheckpointInfo(9, b"h", m.LedgerState(step=10), layers=m.Span(1, 2))
    member = Member(C, 2, (held,))
    member.view(4, (A, B, C, D), {D: 2}, 9, b"h")
    assert member.say(m.StateRequest(1, 4), D) == []
    assert io.SendState(D, 1, 4, True, None) in member.hear(io.StateLoaded(1, 4))


def test_checkpoints_beyond_a_rollback_are_given_up() -> None:
    early = m.CheckpointInfo(9, b"h", m.LedgerState(step=10), layers=m.Span(1, 2))
    late = m.CheckpointInfo(19, b"i", m.LedgerState(step=20), layers=m.Span(1, 2))
    member = Member(B, 2, (early, late))
    member.view(4, (A, B), {}, 9, b"h")
    member.hear(io.PeerConnected(A))
    assert io.Send(COORDINATOR, m.Ready(1, 4, b"h")) in member.hear(io.StateLoaded(1, 4))
    effects = member.say(m.StartGeneration(1, 4))
    assert (
        io.DiscardCheckpoints(9) in effects
        and io.Send(COORDINATOR, m.StageCheckpointList((early,), 4)) in effects
    )


def test_a_view_that_is_repeated_to_one_that_comes_back_takes_nothing_from_its_disk() -> None:
    """It left at step 15 of a generation that began at step 14, and is back before the next one is made."""
    early = m.CheckpointInfo(13, b"h", m.LedgerState(step=14), layers=m.Span(1, 2))
    late = m.CheckpointInfo(14, b"i", m.LedgerState(step=15), layers=m.Span(1, 2))
    member = Member(B, 2, (early, late))
    told = [*member.view(3, (A, B), {}, 13, b"h"), *member.say(m.Freeze(1, 3, "b left", ()))]
    told += member.view(4, (A, B), {}, 14, b"i")
    assert not [effect for effect in told if isinstance(effect, io.DiscardCheckpoints)]
    assert io.LoadCheckpoints(1, 4, (late,), m.Span(1, 2)) in told


def test_a_spare_lets_go_of_the_group_and_comes_back_as_a_joiner() -> None:
    member = Member(B, 2)
    member.view(1, (A, B), {})
    member.hear(io.PeerConnected(A))
    spared = m.StandbyNotice(1, 2, -1, member.core.history, m.LedgerState(), "no seat")
    member.core._context.peer_links._dialled_addresses[A] = "tcp://a"
    assert io.Disconnect(A) in member.say(spared)
    assert member.core.phase is io.MemberPhase.APART and not member.core.is_synced
    member.view(3, (A, B), {B: 0}, 5, b"x")
    assert member.core.phase is io.MemberPhase.FORMING and not member.core.is_synced


def test_a_new_checkpoint_goes_to_the_next_stages_disk_and_the_last_ones_to_the_first() -> None:
    """2 x 2: a and b hold stage 0, c and d stage 1; a's copies are sent to c, and c's to a."""
    for me, other, stage in ((A, C, 0), (C, A, 1), (D, B, 1)):
        member = Member(me, 2)
        for peer in (A, B, C, D):
            member.hear(io.PeerConnected(peer))
        member.view(1, (A, B, C, D), {})
        member.say(m.StartGeneration(1, 1))
        member.core.replica_state.applied, member.core.replica_state.is_synced = 9, True  # ten steps later
        held = m.CheckpointInfo(9, b"h", m.LedgerState(step=10), m.Span(stage, stage + 1))
        effects = member.hear(io.StageCheckpointsChanged((held,)))
        assert io.SendCheckpoint(other, 1, 1, held) in effects
        assert not [
            e for e in member.hear(io.StageCheckpointsChanged((held,))) if isinstance(e, io.SendCheckpoint)
        ]


def test_a_copy_is_taken_of_the_stage_before_alone() -> None:
    member = Member(C, 2)
    member.view(1, (A, B, C, D), {})
    good = m.CheckpointBlock(1, 1, m.CheckpointInfo(0, b"h", m.LedgerState(step=1)), 0, 1, b"state")
    assert member.say(good, A) == [io.StoreCheckpointBlock(A, good)]
    for wrong, sender in (
        (good, B),
        (replace(good, checkpoint=replace(good.checkpoint, layers=m.Span(1, 2))), A),
        (replace(good, checkpoint=replace(good.checkpoint, applied=7)), A),
    ):
        with pytest.raises(RemoteProtocolError, match="sent a checkpoint of"):
            member.say(wrong, sender)
    assert member.say(replace(good, generation=0), B) == []


@pytest.mark.parametrize("known", [b"d" * 32, b""], ids=["known", "not known yet"])
def test_a_piece_of_another_content_than_the_coordinator_knows_is_an_offence(known: bytes) -> None:
    """A assembles its stage from B's checkpoint of layers 1 and 2 of the old partition."""
    blocks = m.Span(1, 2)
    member = Member(A, 3)
    a = m.Member(A, "a", "", 0, False, pieces=((blocks, 1),), piece_digests=(known,))
    member.say(m.MemberListPage(1, 4, 0, 1, (a, m.Member(B, "b", "", 0, False))))
    state = m.LedgerState(step=10)
    member.say(
        m.MembershipView(1, 4, 2, m.Verdict.ABORT, None, 9, b"h", state, "because", stage_bounds=(0, 2, 3))
    )
    good, wrong = (
        m.CheckpointBlock(1, 4, m.CheckpointInfo(9, b"h", state, blocks, digest * 32), 0, 1, b"")
        for digest in (b"d", b"x")
    )
    assert member.say(good, B) == [io.StoreCheckpointBlock(B, good)]
    if known:
        with pytest.raises(
            RemoteProtocolError, match="rank 1 sent a checkpoint of layers 1 to 1 with the digest 7878"
        ):
            member.say(wrong, B)
    else:
        assert member.say(wrong, B) == [io.StoreCheckpointBlock(B, wrong)]


def test_what_is_written_after_the_group_went_back_is_thrown_away() -> None:
    member = Member(B, 2)
    member.view(4, (A, B), {}, -1)
    late = m.CheckpointInfo(19, b"i", m.LedgerState(step=20), layers=m.Span(1, 2))
    assert io.DiscardCheckpoints(-1) in member.hear(io.StageCheckpointsChanged((late,)))


def test_a_thousand_workers_are_seated() -> None:
    peers = [i.to_bytes(2, "big") * 16 for i in range(1003)]
    live = {peer: at % 4 for at, peer in enumerate(peers[:800])}
    seating = place_ranks(
        4, peers, StateLocations(in_memory=live), cost_s=lambda a, b: 0.001 * (1 + (a[1] ^ b[1]))
    )
    assert len(seating.order) == 1000 and len(seating.standbys) == 3 and len(seating.state_sources) == 200


def test_a_newcomer_that_is_spare_keeps_what_it_has_on_its_disk() -> None:
    """It was a member a moment ago, and has later checkpoints than the step at which the generation began."""
    held = m.CheckpointInfo(19, b"i", m.LedgerState(step=20), layers=m.Span(1, 2))
    member = Member(C, 2, (held,))
    effects = member.say(m.StandbyNotice(1, 3, 5, b"g", m.LedgerState(step=6), "no seat"))
    assert not [effect for effect in effects if isinstance(effect, io.DiscardCheckpoints)]
    assert member.core._context.checkpoints.stored == (held,)


def test_a_tale_of_a_generation_that_cannot_be_ends_no_coordinator() -> None:
    run = StagedRun(2, start=False)
    run.join(A)
    run.say(A, m.CurrentGeneration(1, 7, ((A, 4), (B, 4), (C, 4))))
    snapshot = run.core.snapshot(run.now_s)
    assert snapshot["world_size"] == 3 and snapshot["phase"] == "paused"
    assert group_by_stage([1, 2, 3], 2) == [[1, 2, 3]] and group_by_stage([1, 2, 3, 4], 2) == [[1, 2], [3, 4]]


@pytest.mark.parametrize("stages, cuts", [(1, (0, 3, 6)), (3, (0, 1, 4))], ids=["one piece", "3 blocks"])
def test_a_tale_of_cuts_that_this_model_cannot_have_is_an_offence(stages: int, cuts: tuple[int, ...]) -> None:
    run = StagedRun(stages, *(A, B, C)[:stages])
    effects = run.say(A, m.CurrentGeneration(1, 7, ((A, 4), (B, 4)), cuts))
    assert any(isinstance(effect, RecordViolation) for effect in effects)
    assert run.core.snapshot(run.now_s)["stages"] == stages


def test_a_tale_from_before_the_run_was_defined_does_not_cut_a_model_in_one_piece() -> None:
    """The journal is lost, so at first nobody can know better; B is right."""
    run = StagedRun(1, start=False)
    run.say(A, m.Join("r", "a", "memory://a"))
    run.say(A, m.CurrentGeneration(1, 7, ((A, 4), (C, 4)), (0, 3, 6)))
    assert run.core.snapshot(run.now_s)["stages"] == 2, "as it was told"
    run.join(A)
    assert run.core.snapshot(run.now_s)["stages"] == 1
    run.say(B, m.Join("r", "b", "memory://b"))
    run.say(B, m.CurrentGeneration(1, 6, ((B, 4),), ()))
    assert run.core.snapshot(run.now_s)["world_size"] == 1, "nobody follows a tale that cannot be"


@pytest.mark.parametrize("cuts", [(0,), (5,), (1, 2), (0, 2, 2), (0, 3, 1)])
def test_a_tale_of_cuts_that_cannot_be_is_an_offence(cuts: tuple[int, ...]) -> None:
    run = StagedRun(2, start=False)
    run.join(A)
    effects = run.say(A, m.CurrentGeneration(1, 7, ((A, 4), (B, 4)), cuts))
    assert any(isinstance(effect, RecordViolation) for effect in effects)
    assert run.core.snapshot(run.now_s)["world_size"] == 0
