"""Other partitions over the workers that are left, and uneven stages for uneven cards."""

from __future__ import annotations

import json
import math
from itertools import combinations, pairwise, permutations
from random import Random

import pytest
from scripted_coordinator import sent
from staged_run import StagedRun

from gridtrain.core import messages as m
from gridtrain.core.stages import device_assignment, repartition
from gridtrain.core.stages.rank_placement import StateLocations
from gridtrain.core.stages.repartition import uncovered_spans
from gridtrain.core.stages.stage_cost import Card
from gridtrain.errors import ConfigError, LocalProtocolError
from gridtrain_coordinator.run.events import JournalEntry, RunPhase
from gridtrain_coordinator.run.journal_recovery import generation_entry, recover_run

A, B, C, D = (letter * 32 for letter in (b"a", b"b", b"c", b"d"))


def spans(*ends: int) -> tuple[m.Span, ...]:
    return tuple(m.Span(a, b) for a, b in zip(ends[::2], ends[1::2], strict=True))


def setup(sizes: list[int], *cuts: int, fixed: bool = False) -> m.Setup:
    """Blocks of so many bytes, held twice."""
    blocks = tuple(m.LayerCosts(size, size) for size in sizes)
    model = m.StagedModel(cuts, blocks, copies=1.0, micro_batches=8, fixed=fixed)
    return m.Setup((), m.LedgerSpec(100, 0, epochs=1), 4, None, stages=len(cuts) - 1, model=model)


def test_gaps() -> None:
    assert uncovered_spans(spans(0, 2, 4, 6), 8) == list(spans(2, 4, 6, 8))
    assert uncovered_spans(spans(0, 5, 3, 8), 8) == [] and uncovered_spans((), 3) == list(spans(0, 3))
    assert uncovered_spans(spans(0, 9), 8) == []


def test_the_picture_of_the_module() -> None:
    """Stage 1 of 3 is gone; its copy is on the last one's disk, and the last one's on the first one's."""
    holds = {A: spans(0, 2, 4, 6), C: spans(4, 6, 2, 4)}
    cards = {A: Card(), C: Card()}
    recut = repartition.partition_over_fewer(setup([1] * 6, 0, 2, 4, 6), [A, C], cards, holds)
    assert recut.cuts == (0, 3, 6) and recut.assemblers == {A: 0, C: 1}
    found = repartition.assembler_pieces(recut, (A, C), StateLocations(held_spans=holds))
    assert found == {
        A: ((m.Span(0, 2), 0), (m.Span(2, 4), 1)),
        C: ((m.Span(2, 4), 1), (m.Span(4, 6), 1)),
    }


@pytest.mark.parametrize("is_initial", [True, False])
def test_members_create_the_initial_state_that_only_others_have(is_initial: bool) -> None:
    """Only A has stage 0, and the plan leaves it out: before the first step B creates the stage."""
    holds = {A: spans(0, 1), B: spans(1, 4), C: spans(1, 4)}
    locations = StateLocations({A: 0, B: 1, C: 1}, held_spans=holds, is_initial=is_initial)
    plan = repartition.Repartition((0, 1, 4), (B, C), {B: 0, C: 1})
    left = repartition.restricted_to(locations, plan.members)
    assert set(left.initial_stages) == ({0} if is_initial else set()) and left.exact_stages == {1}
    if is_initial:
        assert repartition.assembler_pieces(plan, (B, C), left) == {}
    else:
        with pytest.raises(LocalProtocolError, match="no member has layer 0 of stage 0"):
            repartition.assembler_pieces(plan, (B, C), left)


def test_of_many_workers_those_are_taken_who_have_the_state() -> None:
    """Eight with memory alike, too many to try all groups of three: the eldest ones have not all blocks."""
    peers = [bytes([number]) * 32 for number in range(8)]
    cards = {peer: Card(memory_bytes=30) for peer in peers}
    holds = {peers[0]: spans(0, 3), peers[4]: spans(3, 6), peers[7]: spans(6, 8)}
    recut = repartition.partition_over_fewer(setup([2, 3, 4, 5, 5, 5, 5, 5], 0, 1, 5, 8), peers, cards, holds)
    assert set(recut.members) == {peers[0], peers[4], peers[7]}


def test_it_fits_whenever_it_can(seed: int = 5) -> None:
    """Against all orders and all cuts; who holds what does not matter, as each has all."""
    random = Random(seed)
    fitted = 0
    for _ in range(150):
        sizes = [random.randint(1, 9) for _ in range(random.randint(3, 6))]
        cards = {peer: Card(memory_bytes=random.randint(4, 40)) for peer in (A, B, C)[: random.randint(1, 3)]}
        holds = dict.fromkeys(cards, spans(0, len(sizes)))
        run = setup(sizes, *range(len(sizes) + 1))
        possible = any(
            all(
                2 * sum(sizes[a:b]) <= cards[p].memory_bytes
                for p, (a, b) in zip(line, pairwise(cuts), strict=True)
            )
            for count in range(1, len(cards) + 1)
            for inner in combinations(range(1, len(sizes)), count - 1)
            for cuts in [(0, *inner, len(sizes))]
            for line in permutations(cards, count)
        )  # fmt: skip
        try:
            recut = repartition.partition_over_fewer(run, list(cards), cards, holds)
        except ConfigError:
            assert not possible, (seed, sizes, cards)
            continue
        fitted += 1
        for peer, (a, b) in zip(recut.members, pairwise(recut.cuts), strict=True):
            assert 2 * sum(sizes[a:b]) <= cards[peer].memory_bytes
    assert 20 < fitted < 150


def test_more_stages_pay_where_the_slowest_one_becomes_faster() -> None:
    even, lopsided = setup([1] * 6, 0, 2, 4, 6), setup([20, 1, 1], 0, 1, 2, 3)
    assert repartition.is_worth_more_stages(even, (0, 3, 6), 3)
    assert not repartition.is_worth_more_stages(lopsided, (0, 1, 3), 3), "one block takes nearly all the time"


def test_a_card_twice_as_fast_gets_twice_the_work() -> None:
    run = setup([4] * 8, 0, 3, 6, 8)
    speeds = device_assignment.relative_speeds({A: 10e12, B: 21e12, C: 11e12})
    assert speeds == pytest.approx({A: 1.0, B: 2.0, C: 1.0})
    recut = device_assignment.assign_devices(
        run, [A, B, C], {peer: Card(speed) for peer, speed in speeds.items()}
    )
    sizes = {peer: recut.cuts[n + 1] - recut.cuts[n] for peer, n in recut.assemblers.items()}
    assert sizes[B] == 4 and sizes[A] == sizes[C] == 2


def test_measurements_of_equal_cards_make_no_difference() -> None:
    assert set(device_assignment.relative_speeds({A: 10e12, B: 11.5e12, C: 9e12, D: 0.0}).values()) == {1.0}


def test_a_speed_that_no_card_has_counts_as_a_bounded_one() -> None:
    """The least float divided by any other is 0, and the most by the least infinite: neither has steps."""
    least, most = 5e-324, 1e18
    speeds = device_assignment.relative_speeds({A: least, B: most, C: 1e12})
    assert speeds == pytest.approx({A: 2.0**-10, B: 2.0**10, C: 1.0})
    assert all(
        math.isfinite(speed)
        for speed in device_assignment.relative_speeds({A: least, B: least, C: most}).values()
    )


def test_the_most_replicas_that_fit_are_found_in_few_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256 cards 40 can hold a stage: the coordinator does not try 128 numbers in all orders."""
    run, asked = setup([5] * 8, 0, 4, 8), []
    peers = [bytes([n]) * 32 for n in range(256)]
    cards = {peer: Card(memory_bytes=80.0 if n < 40 else 20.0) for n, peer in enumerate(peers)}
    cut = repartition.partition.best_partition
    monkeypatch.setattr(
        repartition.partition, "best_partition", lambda *a, **k: asked.append(a) or cut(*a, **k)
    )
    recut = device_assignment.assign_devices(run, peers, cards)
    assert set(peers[:40]) <= set(recut.members)
    needs = device_assignment.stage_bytes(run, recut.cuts)
    assert all(needs[n] <= cards[peer].memory_bytes for peer, n in recut.assemblers.items())
    assert len(asked) <= 4, "one for each pair of different rows"


def test_no_memory_is_exceeded_and_replicas_are_alike() -> None:
    run = setup([5] * 8, 0, 4, 8)
    memory = {A: 20, B: 80, C: 20, D: 60}
    cards = {peer: Card(memory_bytes=nbytes) for peer, nbytes in memory.items()}
    recut = device_assignment.assign_devices(run, [A, B, C, D], cards)
    assert {recut.assemblers[A], recut.assemblers[B]} == {0, 1} and recut.assemblers[A] == recut.assemblers[C]
    needs = device_assignment.stage_bytes(run, recut.cuts)
    assert all(needs[n] <= cards[peer].memory_bytes for peer, n in recut.assemblers.items())
    with pytest.raises(ConfigError, match="no partition of 8 layers into 2 stages fits"):
        device_assignment.assign_devices(run, [A, C], {A: cards[A], C: cards[C]})


def test_the_coordinator_cuts_for_the_cards_that_join() -> None:
    """8 blocks of 2 bytes each; as it is defined two stages have 3 of them."""
    model = setup([1] * 8, 0, 3, 6, 8).model
    run = StagedRun(3, A, B, C, model=model, memory={A: 4, B: 24, C: 4})
    sizes = {peer: run.layers_of(peer).stop - run.layers_of(peer).start for peer in (A, B, C)}
    assert sizes == {A: 2, B: 4, C: 2}
    assert "stages of" in run.core._planner.plan_reason and "memory" in run.core._planner.plan_reason


def test_cards_that_cannot_hold_it_are_told_so() -> None:
    model = setup([1] * 8, 0, 4, 8).model
    run = StagedRun(2, A, B, model=model, memory={A: 6, B: 6}, start=False)
    assert run.core.phase is RunPhase.PAUSED
    assert "no partition of 8 layers into 2 stages fits" in run.core.reason


def test_costs_that_cannot_be_are_refused() -> None:
    model = m.StagedModel((0, 1, 2), (m.LayerCosts(1, 1), m.LayerCosts(1, 1)))
    run = StagedRun(3, A, model=model, start=False)
    refused = sent(run.seen, m.Refused)
    assert [message.code for message in refused] == ["ledger"]


def test_a_stage_with_nothing_to_train_is_refused() -> None:
    """Else a newcomer would make the coordinator look for a cut that is not there."""
    blocks = (m.LayerCosts(1, 1), m.LayerCosts(1, 0), m.LayerCosts(1, 0), m.LayerCosts(1, 1))
    run = StagedRun(3, A, model=m.StagedModel((0, 1, 2, 4), blocks), start=False)
    (refused,) = sent(run.seen, m.Refused)
    assert "no trainable parameters" in refused.reason


def test_who_fits_into_no_stage_is_not_left_out_with_the_only_state() -> None:
    """a alone has block 0, and its memory holds one block; the run as it is defined has two in each stage."""
    at = m.LedgerState(step=10, cursor=40, consumed=40)
    kept = {
        A: (m.CheckpointInfo(9, b"h", at, m.Span(0, 1)),),
        B: (m.CheckpointInfo(9, b"h", at, m.Span(1, 6)),),
    }
    model = setup([1] * 6, 0, 2, 4, 6).model
    run = StagedRun(3, A, B, C, D, model=model, memory={A: 2}, kept=kept)
    assert run.core.phase is RunPhase.TRAINING and run.core.run.view is not None
    assert run.layers_of(A) == m.Span(0, 1) and run.core.run.view.stage_bounds[-1] == 6
    assert run.core.run.view.applied == 9, "nothing is lost"


def test_who_has_a_whole_stage_and_no_memory_for_it_pauses_the_run() -> None:
    at = m.LedgerState(step=10, cursor=40, consumed=40)
    kept = {
        A: (m.CheckpointInfo(9, b"h", at, m.Span(0, 2)),),
        B: (m.CheckpointInfo(9, b"h", at, m.Span(2, 6)),),
    }
    model = setup([1] * 6, 0, 2, 4, 6).model
    run = StagedRun(3, A, B, C, D, model=model, memory={A: 1}, kept=kept, start=False)
    assert run.core.phase is RunPhase.PAUSED and "memory" in run.core.reason


def test_a_recut_run_comes_back_from_the_journal() -> None:
    kept = tuple(
        m.CheckpointInfo(9, b"h", m.LedgerState(step=10, cursor=40, consumed=40), span)
        for span in spans(0, 2, 2, 4, 4, 6)
    )
    run = StagedRun(3, A, B, C, model=setup([1] * 6, 0, 2, 4, 6).model, kept={A: kept, B: kept, C: kept})
    run.lose(B)
    run.report(A, C)
    assert "repartitioned" in run.core.reason
    run.now_s += run.core.run.limits.recut_s
    run.core.tick(run.now_s)
    assert run.core.run.view is not None and run.core.run.view.stage_bounds == (0, 3, 6)
    entries = [(e.kind, e.body) for e in run.seen if isinstance(e, JournalEntry)]
    assert math.isfinite(run.now_s) and recover_run(entries).view is not None


def cut_anew_without_b() -> StagedRun:
    """a holds [0 2), c [4 6) and a copy of b's [2 4): two of three stages are left, [0 3) and [3 6)."""
    state = m.LedgerState(step=10, cursor=40, consumed=40)
    has = {A: spans(0, 2), B: spans(2, 4), C: spans(2, 4, 4, 6)}
    kept = {
        peer: tuple(m.CheckpointInfo(9, b"h", state, span, bytes([span.start]) * 32) for span in told)
        for peer, told in has.items()
    }
    run = StagedRun(3, A, B, C, model=setup([1] * 6, 0, 2, 4, 6).model, kept=kept)
    run.lose(B)
    run.report(A, C)
    run.now_s += run.core.run.limits.recut_s
    run.core.tick(run.now_s)
    assert run.core.run.view is not None and run.core.run.view.stage_bounds == (0, 3, 6)
    return run


def test_the_eldest_does_not_wait_for_ever_for_a_piece_that_nobody_gives() -> None:
    """C tells of a checkpoint that it does not give; A, which serves longest, cannot be ready without it."""
    run = cut_anew_without_b()
    view = run.core.run.view
    assert view is not None
    run.say(C, m.Ready(view.term, view.generation, view.history))
    for _ in range(20):
        run.now_s = min(run.core.deadline_s, run.now_s + 1e3)
        run.core.tick(run.now_s)
        if C not in run.core.run.workers:
            break
    assert C not in run.core.run.workers and A in run.core.run.workers


def test_a_piece_that_is_not_on_its_disk_any_more_is_not_waited_for() -> None:
    """A puts [0 3) together from its own disk and C's; C has lost [2 4), and nobody else has it."""
    run = cut_anew_without_b()
    assert {x.name: x.pieces for x in run.core.run.member_list} == {
        "a": ((m.Span(0, 2), 0), (m.Span(2, 4), 1)),
        "c": ((m.Span(2, 4), 1), (m.Span(4, 6), 1)),
    }
    run.say(A, m.StageCheckpointList(run.checkpoints[A]))
    assert not run.last_sent(C, m.Freeze), "A has what it is to give"
    run.say(C, m.StageCheckpointList(run.checkpoints[C][1:]))
    (freeze,) = run.last_sent(A, m.Freeze)
    assert isinstance(freeze, m.Freeze)
    assert freeze.reason == "c has no checkpoint of layers 2 to 3, which other workers need"
    for peer in (A, C):
        view = run.core.run.view
        assert view is not None
        run.say(
            peer,
            m.FreezeReport(1, view.generation, False, 9, b"h", view.ledger, None, b"", 0, m.Span(0, 3)),
        )
    assert run.core.phase is RunPhase.PAUSED and "no present worker holds" in run.core.reason


def test_pieces_come_with_the_digests_that_their_holders_told() -> None:
    run = cut_anew_without_b()
    digests = {x.name: x.piece_digests for x in run.core.run.member_list}
    assert digests == {"a": (bytes(32), b"\2" * 32), "c": (b"\2" * 32, b"\4" * 32)}
    entries = [(e.kind, e.body) for e in run.effects + run.seen if isinstance(e, JournalEntry)]
    entries += [("generation", generation_entry(run.core.run.view, run.core.run.member_list))]
    assert recover_run(json.loads(json.dumps(entries))).roster == run.core.run.member_list, (
        "and in the journal"
    )


def test_a_shortage_that_all_have_left_asks_for_no_further_turns() -> None:
    run = StagedRun(3)
    run.core.run.view_change.deadline_s = run.now_s  # as a shortage sets it, before the first generation
    run.core.tick(run.now_s + 1.0)
    assert run.core.deadline_s > run.now_s + 1.0


def short_of_one(run: StagedRun) -> None:
    """B is gone; A and C, who have all of it on their disks, wait for another before it is repartitioned."""
    run.lose(B)
    run.report(A, C)
    assert "or, repartitioned over 2 workers, after 15 s" in run.core.reason


def with_all_on_their_disks() -> tuple[StagedRun, tuple[m.CheckpointInfo, ...]]:
    state = m.LedgerState(step=10, cursor=40, consumed=40)
    kept = tuple(m.CheckpointInfo(9, b"h", state, span) for span in spans(0, 2, 2, 4, 4, 6))
    all_have = dict.fromkeys((A, B, C), kept)
    return StagedRun(3, A, B, C, model=setup([1] * 6, 0, 2, 4, 6).model, kept=all_have), kept


def test_a_shortage_that_was_over_is_waited_for_anew() -> None:
    """D makes the third, while nobody has the state; when D leaves, the wait begins again."""
    run, kept = with_all_on_their_disks()
    short_of_one(run)
    run.say(A, m.StageCheckpointList(())), run.say(C, m.StageCheckpointList(()))
    run.join(D)
    assert run.core.phase is RunPhase.PAUSED and "no present worker holds" in run.core.reason
    run.now_s += run.core.run.limits.recut_s
    run.lose(D)
    run.say(A, m.StageCheckpointList(kept)), run.say(C, m.StageCheckpointList(kept))
    assert run.core.phase is RunPhase.PAUSED and "over 2 workers, after 15 s" in run.core.reason
    run.now_s += run.core.run.limits.recut_s
    run.core.tick(run.now_s)
    assert run.core.run.view is not None and run.core.run.view.stage_bounds == (0, 3, 6)


def test_who_is_back_first_after_all_were_gone_waits_for_the_others() -> None:
    run, _ = with_all_on_their_disks()
    short_of_one(run)
    run.lose(A), run.lose(C)
    run.now_s += 2 * run.core.run.limits.recut_s
    run.core.tick(run.now_s)
    run.join(A)
    run.report(A)
    assert run.core.phase is RunPhase.PAUSED and "over 1 worker, after 15 s" in run.core.reason


def test_newcomers_without_room_for_a_seat_stop_nobody() -> None:
    """Stages of 26 and 40 bytes; two more workers come, with 33 each: there is room for them in stage 0, and
    none in stage 1.  The run went on without them or not at all."""
    blocks = tuple(m.LayerCosts(size, size) for size in (4, 9, 10, 10))
    model = m.StagedModel((0, 2, 4), blocks, copies=1.0, fixed=True)
    run = StagedRun(2, A, B, model=model, memory=dict.fromkeys((A, B), 66) | dict.fromkeys((C, D), 33))
    run.join(C), run.join(D)
    run.report(A, B, applied=0, history=b"h" * 32, ledger=m.LedgerState(step=1, cursor=8, consumed=8))
    assert (run.roster, run.standbys) == ("a b", "c d")
    run.ready()
    assert run.core.phase is RunPhase.TRAINING
    made = run.core.generation
    for _ in range(5):  # nobody is stopped again and again for the same two
        run.now_s += 10.0
        run.core.tick(run.now_s)
    assert run.core.generation == made and run.core.phase is RunPhase.TRAINING
    assert run.core.run.view_change.is_idle
