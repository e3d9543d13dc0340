"""Repartitioning over the remaining workers, and uneven stages for uneven devices."""

from __future__ import annotations

import json
import math
from itertools import combinations, pairwise, permutations
from random import Random

import pytest
from scripted_coordinator import sent
from staged_run import SIX_LAYERS, StagedRun, repartitioned_without_b, state_after

from gridtrain.core import messages as m
from gridtrain.core.stages import device_assignment, repartition
from gridtrain.core.stages.rank_placement import StateLocations
from gridtrain.core.stages.repartition import uncovered_spans
from gridtrain.core.stages.stage_cost import Device
from gridtrain.errors import ConfigError, LocalProtocolError
from gridtrain_coordinator.run.events import RunPhase
from gridtrain_coordinator.run.journal_recovery import generation_entry, recover_run

A, B, C, D = (letter * 32 for letter in (b"a", b"b", b"c", b"d"))


def spans(*ends: int) -> tuple[m.Span, ...]:
    return tuple(m.Span(a, b) for a, b in zip(ends[::2], ends[1::2], strict=True))


def setup(sizes: list[int], *bounds: int, fixed: bool = False) -> m.Setup:
    """Layers of so many bytes, each held twice."""
    layers = tuple(m.LayerCosts(size, size) for size in sizes)
    model = m.StagedModel(bounds, layers, copies=1.0, micro_batches=8, fixed=fixed)
    return m.Setup((), m.LedgerSpec(100, 0, epochs=1), 4, None, stages=len(bounds) - 1, model=model)


def test_uncovered_spans_are_found() -> None:
    assert uncovered_spans(spans(0, 2, 4, 6), 8) == list(spans(2, 4, 6, 8))
    assert uncovered_spans(spans(0, 5, 3, 8), 8) == [] and uncovered_spans((), 3) == list(spans(0, 3))
    assert uncovered_spans(spans(0, 9), 8) == []


def test_the_example_of_the_module() -> None:
    """The worker of stage 1 of 3 is lost; the last one has a copy of stage 1, the first one of stage 2."""
    holds = {A: spans(0, 2, 4, 6), C: spans(4, 6, 2, 4)}
    devices = {A: Device(), C: Device()}
    repartitioned = repartition.partition_over_fewer(setup([1] * 6, 0, 2, 4, 6), [A, C], devices, holds)
    assert repartitioned.cuts == (0, 3, 6) and repartitioned.assemblers == {A: 0, C: 1}
    found = repartition.assembler_pieces(repartitioned, (A, C), StateLocations(held_spans=holds))
    assert found == {
        A: ((m.Span(0, 2), 0), (m.Span(2, 4), 1)),
        C: ((m.Span(2, 4), 1), (m.Span(4, 6), 1)),
    }


@pytest.mark.parametrize("is_initial", [True, False])
def test_members_create_the_initial_state_that_only_others_have(is_initial: bool) -> None:
    """Only A has stage 0, and it is no member: before the first step B initializes the stage."""
    holds = {A: spans(0, 1), B: spans(1, 4), C: spans(1, 4)}
    locations = StateLocations({A: 0, B: 1, C: 1}, held_spans=holds, is_initial=is_initial)
    plan = repartition.Repartition((0, 1, 4), (B, C), {B: 0, C: 1})
    remaining = repartition.restricted_to(locations, plan.members)
    assert set(remaining.initial_stages) == ({0} if is_initial else set()) and remaining.exact_stages == {1}
    if is_initial:
        assert repartition.assembler_pieces(plan, (B, C), remaining) == {}
    else:
        with pytest.raises(LocalProtocolError, match="no member has layer 0 of stage 0"):
            repartition.assembler_pieces(plan, (B, C), remaining)


def test_of_many_workers_those_with_the_state_are_chosen() -> None:
    """Eight with equal memory are too many to try all groups of three; the eldest lack some layers."""
    peers = [bytes([number]) * 32 for number in range(8)]
    devices = {peer: Device(memory_bytes=30) for peer in peers}
    holds = {peers[0]: spans(0, 3), peers[4]: spans(3, 6), peers[7]: spans(6, 8)}
    repartitioned = repartition.partition_over_fewer(
        setup([2, 3, 4, 5, 5, 5, 5, 5], 0, 1, 5, 8), peers, devices, holds
    )
    assert set(repartitioned.members) == {peers[0], peers[4], peers[7]}


def test_many_workers_are_ordered_by_the_middle_of_the_layers_that_they_hold() -> None:
    """Five are too many to try all orders; the first holds two spans."""
    peers = [bytes([number]) * 32 for number in range(5)]
    holds = {peer: spans(number, number + 1) for number, peer in enumerate(peers, 1)}
    holds[peers[0]] = spans(0, 1, 1, 2)
    found = repartition.partition_over_fewer(
        setup([5] * 6, 0, 1, 2, 3, 4, 5, 6), peers[::-1], dict.fromkeys(peers, Device()), holds
    )
    assert found.members == tuple(peers)


def test_a_fitting_partition_is_found_if_there_is_one(seed: int = 5) -> None:
    """Compared with all orders and partitions; each worker holds all layers."""
    random = Random(seed)
    fitted = 0
    for _ in range(150):
        sizes = [random.randint(1, 9) for _ in range(random.randint(3, 6))]
        devices = {
            peer: Device(memory_bytes=random.randint(4, 40)) for peer in (A, B, C)[: random.randint(1, 3)]
        }
        holds = dict.fromkeys(devices, spans(0, len(sizes)))
        run = setup(sizes, *range(len(sizes) + 1))
        possible = any(
            all(
                2 * sum(sizes[a:b]) <= devices[p].memory_bytes
                for p, (a, b) in zip(order, pairwise(bounds), strict=True)
            )
            for count in range(1, len(devices) + 1)
            for inner in combinations(range(1, len(sizes)), count - 1)
            for bounds in [(0, *inner, len(sizes))]
            for order in permutations(devices, count)
        )  # fmt: skip
        try:
            repartitioned = repartition.partition_over_fewer(run, list(devices), devices, holds)
        except ConfigError:
            assert not possible, (seed, sizes, devices)
            continue
        fitted += 1
        for peer, (a, b) in zip(repartitioned.members, pairwise(repartitioned.cuts), strict=True):
            assert 2 * sum(sizes[a:b]) <= devices[peer].memory_bytes
    assert 20 < fitted < 150


def test_more_stages_pay_if_the_slowest_one_becomes_faster() -> None:
    even, lopsided = setup([1] * 6, 0, 2, 4, 6), setup([20, 1, 1], 0, 1, 2, 3)
    assert repartition.is_worth_more_stages(even, (0, 3, 6), 3)
    assert not repartition.is_worth_more_stages(lopsided, (0, 1, 3), 3), "one layer takes nearly all the time"


def test_a_card_twice_as_fast_gets_twice_the_work() -> None:
    run = setup([4] * 8, 0, 3, 6, 8)
    speeds = device_assignment.relative_speeds({A: 10e12, B: 21e12, C: 11e12})
    assert speeds == pytest.approx({A: 1.0, B: 2.0, C: 1.0})
    repartitioned = device_assignment.assign_devices(
        run, [A, B, C], {peer: Device(speed) for peer, speed in speeds.items()}
    )
    sizes = {
        peer: repartitioned.cuts[n + 1] - repartitioned.cuts[n]
        for peer, n in repartitioned.assemblers.items()
    }
    assert sizes[B] == 4 and sizes[A] == sizes[C] == 2


def test_measurements_of_equal_cards_make_no_difference() -> None:
    assert set(device_assignment.relative_speeds({A: 10e12, B: 11.5e12, C: 9e12, D: 0.0}).values()) == {1.0}


def test_a_speed_that_no_card_has_counts_as_a_bounded_one() -> None:
    """The smallest float divided by others is 0, and the largest divided by it is infinite."""
    least, most = 5e-324, 1e18
    speeds = device_assignment.relative_speeds({A: least, B: most, C: 1e12})
    assert speeds == pytest.approx({A: 2.0**-10, B: 2.0**10, C: 1.0})
    assert all(
        math.isfinite(speed)
        for speed in device_assignment.relative_speeds({A: least, B: least, C: most}).values()
    )


def test_the_largest_number_of_replicas_is_found_with_few_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 of 256 devices can hold a stage; the coordinator does not try 128 numbers in all orders."""
    run, calls = setup([5] * 8, 0, 4, 8), []
    peers = [bytes([n]) * 32 for n in range(256)]
    devices = {peer: Device(memory_bytes=80.0 if n < 40 else 20.0) for n, peer in enumerate(peers)}
    partition = repartition.partition.best_partition
    monkeypatch.setattr(
        repartition.partition, "best_partition", lambda *a, **k: calls.append(a) or partition(*a, **k)
    )
    repartitioned = device_assignment.assign_devices(run, peers, devices)
    assert set(peers[:40]) <= set(repartitioned.members)
    needs = device_assignment.stage_bytes(run, repartitioned.cuts)
    assert all(needs[n] <= devices[peer].memory_bytes for peer, n in repartitioned.assemblers.items())
    assert len(calls) <= 4, "one for each pair of different devices"


def test_no_memory_is_exceeded_and_replicas_have_equal_stages() -> None:
    run = setup([5] * 8, 0, 4, 8)
    memory = {A: 20, B: 80, C: 20, D: 60}
    devices = {peer: Device(memory_bytes=nbytes) for peer, nbytes in memory.items()}
    repartitioned = device_assignment.assign_devices(run, [A, B, C, D], devices)
    assert {repartitioned.assemblers[A], repartitioned.assemblers[B]} == {0, 1} and repartitioned.assemblers[
        A
    ] == repartitioned.assemblers[C]
    needs = device_assignment.stage_bytes(run, repartitioned.cuts)
    assert all(needs[n] <= devices[peer].memory_bytes for peer, n in repartitioned.assemblers.items())
    with pytest.raises(ConfigError, match="no partition of 8 layers into 2 stages fits"):
        device_assignment.assign_devices(run, [A, C], {A: devices[A], C: devices[C]})


def test_the_memory_that_a_worker_lacks_is_shown_with_units() -> None:
    words = r"^stage 1 needs 4 GB of memory, but the device of b has only 1\.5 GB -> wait"
    devices = {A: Device(memory_bytes=1e10), B: Device(memory_bytes=1.5e9)}
    with pytest.raises(ConfigError, match=words):
        device_assignment.check_memory_fit(
            setup([10**9] * 4, 0, 2, 4), (0, 2, 4), [A, B], devices, lambda peer: peer.decode()[0]
        )


def test_the_coordinator_partitions_for_the_joined_cards() -> None:
    """8 layers of 2 bytes each; by definition two stages have 3 of them."""
    model = setup([1] * 8, 0, 3, 6, 8).model
    run = StagedRun(3, A, B, C, model=model, memory={A: 4, B: 24, C: 4})
    sizes = {peer: run.layers_of(peer).stop - run.layers_of(peer).start for peer in (A, B, C)}
    assert sizes == {A: 2, B: 4, C: 2}
    assert "stages of" in run.core._planner.plan_reason and "memory" in run.core._planner.plan_reason


def test_the_reason_says_that_the_cards_cannot_hold_the_model() -> None:
    model = setup([1] * 8, 0, 4, 8).model
    run = StagedRun(2, A, B, model=model, memory={A: 6, B: 6}, start=False)
    assert run.core.phase is RunPhase.PAUSED
    assert "no partition of 8 layers into 2 stages fits" in run.core.reason


def test_a_model_with_fewer_layers_than_stages_is_refused() -> None:
    model = m.StagedModel((0, 1, 2), (m.LayerCosts(1, 1), m.LayerCosts(1, 1)))
    run = StagedRun(3, A, model=model, start=False)
    refused = sent(run.seen, m.Refused)
    assert [message.code for message in refused] == ["ledger"]


def test_a_stage_with_nothing_to_train_is_refused() -> None:
    """Otherwise a newcomer would make the coordinator search for a partition that does not exist."""
    layers = (m.LayerCosts(1, 1), m.LayerCosts(1, 0), m.LayerCosts(1, 0), m.LayerCosts(1, 1))
    run = StagedRun(3, A, model=m.StagedModel((0, 1, 2, 4), layers), start=False)
    (refused,) = sent(run.seen, m.Refused)
    assert "no trainable parameters" in refused.reason


def test_the_only_holder_of_a_layer_gets_a_stage_that_fits_it() -> None:
    """Only a has layer 0, and its memory holds one layer; by definition each stage has two."""
    at = state_after(9)
    stored = {
        A: (m.CheckpointInfo(9, b"h", at, m.Span(0, 1)),),
        B: (m.CheckpointInfo(9, b"h", at, m.Span(1, 6)),),
    }
    model = SIX_LAYERS
    run = StagedRun(3, A, B, C, D, model=model, memory={A: 2}, kept=stored)
    assert run.core.phase is RunPhase.TRAINING
    assert run.layers_of(A) == m.Span(0, 1) and run.view.stage_bounds[-1] == 6
    assert run.view.applied == 9, "nothing is lost"


def test_the_run_pauses_if_the_only_holder_of_a_stage_lacks_memory() -> None:
    at = state_after(9)
    stored = {
        A: (m.CheckpointInfo(9, b"h", at, m.Span(0, 2)),),
        B: (m.CheckpointInfo(9, b"h", at, m.Span(2, 6)),),
    }
    model = SIX_LAYERS
    run = StagedRun(3, A, B, C, D, model=model, memory={A: 1}, kept=stored, start=False)
    assert run.core.phase is RunPhase.PAUSED and "memory" in run.core.reason


def test_a_repartitioned_run_is_recovered_from_the_journal() -> None:
    stored = tuple(m.CheckpointInfo(9, b"h", state_after(9), span) for span in spans(0, 2, 2, 4, 4, 6))
    run = StagedRun(3, A, B, C, model=SIX_LAYERS, kept={A: stored, B: stored, C: stored})
    run.lose(B)
    run.report(A, C)
    assert "repartitioned" in run.core.reason
    run.now_s += run.core.run.limits.recut_s
    run.core.tick(run.now_s)
    assert run.view.stage_bounds == (0, 3, 6)
    assert math.isfinite(run.now_s) and recover_run(run.journal).view is not None


def test_the_eldest_waits_a_limited_time_for_a_missing_piece() -> None:
    """C reports a checkpoint that it does not send; A, the longest-serving one, needs it to be ready."""
    run = repartitioned_without_b()
    view = run.view
    run.say(C, m.Ready(view.term, view.generation, view.history))
    for _ in range(20):
        run.now_s = min(run.core.deadline_s, run.now_s + 1e3)
        run.core.tick(run.now_s)
        if C not in run.core.run.workers:
            break
    assert C not in run.core.run.workers and A in run.core.run.workers


def test_a_piece_that_is_no_longer_on_disk_is_not_awaited() -> None:
    """A assembles [0 3) from its own disk and C's; C has lost [2 4), and no other worker has it."""
    run = repartitioned_without_b()
    assert {x.name: x.pieces for x in run.core.run.member_list} == {
        "a": ((m.Span(0, 2), 0), (m.Span(2, 4), 1)),
        "c": ((m.Span(2, 4), 1), (m.Span(4, 6), 1)),
    }
    run.say(A, m.StageCheckpointList(run.checkpoints[A]))
    assert not run.last_sent(C, m.Freeze), "A has the pieces that it has to send"
    run.say(C, m.StageCheckpointList(run.checkpoints[C][1:]))
    (freeze,) = run.last_sent(A, m.Freeze)
    assert isinstance(freeze, m.Freeze)
    assert freeze.reason == "c has no checkpoint of layers 2 to 3, which the pipeline needs"
    for peer in (A, C):
        view = run.view
        run.say(
            peer,
            m.FreezeReport(1, view.generation, False, 9, b"h", view.ledger, None, b"", 0, m.Span(0, 3)),
        )
    assert run.core.phase is RunPhase.PAUSED and "no connected worker holds" in run.core.reason


def test_pieces_have_the_digests_that_their_holders_reported() -> None:
    run = repartitioned_without_b()
    digests = {x.name: x.piece_digests for x in run.core.run.member_list}
    assert digests == {"a": (bytes(32), b"\2" * 32), "c": (b"\2" * 32, b"\4" * 32)}
    entries = [*run.journal, ("generation", generation_entry(run.view, run.core.run.member_list))]
    assert recover_run(json.loads(json.dumps(entries))).roster == run.core.run.member_list, (
        "also in the journal"
    )


def test_a_shortage_without_workers_sets_no_deadline() -> None:
    run = StagedRun(3)
    run.core.run.view_change.deadline_s = run.now_s  # as set by a shortage before the first generation
    run.core.tick(run.now_s + 1.0)
    assert run.core.deadline_s > run.now_s + 1.0


def short_of_one(run: StagedRun) -> None:
    """B is lost; A and C have all layers on disk and wait for another worker before repartitioning."""
    run.lose(B)
    run.report(A, C)
    assert "or, repartitioned over 2 workers, after 15 s" in run.core.reason


def run_with_all_on_disk() -> tuple[StagedRun, tuple[m.CheckpointInfo, ...]]:
    state = state_after(9)
    stored = tuple(m.CheckpointInfo(9, b"h", state, span) for span in spans(0, 2, 2, 4, 4, 6))
    all_have = dict.fromkeys((A, B, C), stored)
    return StagedRun(3, A, B, C, model=SIX_LAYERS, kept=all_have), stored


def test_a_new_shortage_has_its_full_waiting_time() -> None:
    """D is the third worker, while no worker has the state; when D leaves, the wait restarts."""
    run, stored = run_with_all_on_disk()
    short_of_one(run)
    run.say(A, m.StageCheckpointList(())), run.say(C, m.StageCheckpointList(()))
    run.join(D)
    assert run.core.phase is RunPhase.PAUSED and "no connected worker holds" in run.core.reason
    run.now_s += run.core.run.limits.recut_s
    run.lose(D)
    run.say(A, m.StageCheckpointList(stored)), run.say(C, m.StageCheckpointList(stored))
    assert run.core.phase is RunPhase.PAUSED and "over 2 workers, after 15 s" in run.core.reason
    run.now_s += run.core.run.limits.recut_s
    run.core.tick(run.now_s)
    assert run.view.stage_bounds == (0, 3, 6)


def test_the_first_worker_to_return_waits_for_the_others() -> None:
    run, _ = run_with_all_on_disk()
    short_of_one(run)
    run.lose(A), run.lose(C)
    run.now_s += 2 * run.core.run.limits.recut_s
    run.core.tick(run.now_s)
    run.join(A)
    run.report(A)
    assert run.core.phase is RunPhase.PAUSED and "over 1 worker, after 15 s" in run.core.reason


def test_newcomers_without_room_for_a_stage_do_not_stop_the_run() -> None:
    """Stages need 26 and 40 bytes; two more workers with 33 bytes join, which have room for stage 0 only."""
    layers = tuple(m.LayerCosts(size, size) for size in (4, 9, 10, 10))
    model = m.StagedModel((0, 2, 4), layers, copies=1.0, fixed=True)
    run = StagedRun(2, A, B, model=model, memory=dict.fromkeys((A, B), 66) | dict.fromkeys((C, D), 33))
    run.join(C), run.join(D)
    run.report(A, B, applied=0, history=b"h" * 32, ledger=m.LedgerState(step=1, cursor=8, consumed=8))
    assert (run.roster, run.standbys) == ("a b", "c d")
    run.ready()
    assert run.core.phase is RunPhase.TRAINING
    made = run.core.generation
    for _ in range(5):  # the same two cause no further generations
        run.now_s += 10.0
        run.core.tick(run.now_s)
    assert run.core.generation == made and run.core.phase is RunPhase.TRAINING
    assert run.core.run.view_change.is_idle
