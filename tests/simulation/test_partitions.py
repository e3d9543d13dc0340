"""Partitions, a standby beside the old coordinator, frozen processes: which go on, and which are removed."""

from __future__ import annotations

from typing import Any

import pytest

from simulation import test_world as group
from simulation.commit_coverage import RULES, CommitCoverage
from simulation.world import COORDINATOR, SimWorker, World


def running(workers: int) -> tuple[World, Any]:
    """A group that has committed its first steps."""
    world, book = group.build(2, "dense", workers, compute_s=(0.3, 0.4))
    while len(world.log.commits) < 2 * workers:
        world.run(world.now_s + 0.01)
        assert world.now_s < 10.0
    return world, book


def generations(workers: list[SimWorker]) -> set[int]:
    return {worker.core.generation for worker in workers}


def test_only_the_side_with_the_coordinator_goes_on_and_the_other_rejoins() -> None:
    world, book = running(4)
    first, *_ = ordered = list(world.workers.values())
    here, there = ordered[:2], ordered[2:]
    world.partition({worker.peer for worker in there}, 4.0)
    commits_before = {worker.peer: worker.core.applied for worker in there}
    world.run(world.now_s + 3.5)
    assert generations(here) == {first.core.generation} and first.core.generation > 1
    assert generations(there) == {1}, "the side without the coordinator makes none"
    assert all(worker.core.applied <= commits_before[worker.peer] + 1 for worker in there), (
        "and commits nothing"
    )
    assert all("coordinator" in worker.core.pause_reason or worker.core.pause_reason for worker in there)
    world.run(120.0)
    group.check(world, book)
    assert len({worker.core.history for worker in world.alive}) == 1, "all four have the end of the run"


def test_a_link_that_fails_in_one_direction_ends_as_a_broken_one() -> None:
    world, book = running(3)
    deaf = list(world.workers.values())[2]
    world.partition({deaf.peer}, 3.0, one_way=True)
    world.run(120.0)
    group.check(world, book)
    assert deaf.core.is_finished


@pytest.mark.parametrize("seed", range(8))
def test_a_newcomer_that_reaches_no_member_catches_up_over_a_relay(seed: int) -> None:
    """Once it waited for the members, and they for it, until 60 s without progress were over."""
    world, book = group.build(seed, "gtopk", 3, compute_s=(0.3, 0.4), behind_nat=0.0, can_catch_up=True)
    while len(world.log.commits) < 6:
        world.run(world.now_s + 0.01)
        assert world.now_s < 10.0
    members, joined_s = list(world.workers.values()), world.now_s
    newcomer = world.join()
    for member in members:  # the coordinator can dial each; the newcomer can reach none
        world.block_link(newcomer.peer, member.peer, 1e9)
    while newcomer.core.rank_assignment is None or newcomer.core.next_round is None:
        world.run(world.now_s + 0.01)
        assert world.now_s < joined_s + 15.0, "some times `route_s`, which is 2 s here"
        assert not world.finished
    assert world.log.caught_up == 1 and world.log.generations == 2, "no member waited for its connections"
    relayed = world.coordinator.status(world.now_s)["relayed"]
    ranks = {worker.peer: rank for rank, worker in enumerate(world.coordinator.run.member_list)}
    assert {(min(pair[:2]), max(pair[:2])) for pair in relayed} == {
        tuple(sorted((ranks[newcomer.peer], ranks[member.peer]))) for member in members
    }
    world.run(120.0)
    group.check(world, book)


@pytest.mark.parametrize("seed", range(2))
def test_members_that_cannot_reach_a_newcomer_report_it_in_one_generation(seed: int) -> None:
    """Once the first report ended the wait of the others, so that each generation had one more relay; the
    eight members made more than ten, in which nobody trained, and one was dismissed."""
    world, _ = group.build(
        seed, "direct", 8, samples=4000, compute_s=(0.05, 0.06), behind_nat=0.0, can_catch_up=False
    )
    while len(world.log.commits) < 16:
        world.run(world.now_s + 0.01)
    members, joined_s = list(world.workers.values()), world.now_s
    newcomer = world.join()
    for member in members:
        world.block_link(newcomer.peer, member.peer, 1e9)
    while newcomer.core.next_round is None:
        world.run(world.now_s + 0.01)
        assert world.now_s < joined_s + 10.0, "each direction, and a relay; `route_s` is 2 s here"
    assert generations(members) == {4} and not world.log.refused


def test_workers_do_not_obey_a_replaced_coordinator_and_it_raises_no_term() -> None:
    world, book = running(3)
    world.fail_over_coordinator()
    world.run(world.now_s + 0.3)
    stale = world._stale_coordinator
    assert stale is not None and {worker.core.term for worker in world.alive} == {2}
    for worker in world.alive[:2]:
        world.connect_to_stale_coordinator(worker.peer, 0.5)
    world.run(world.now_s + 0.4)
    assert world.coverage.reached["11 a lower term is refused"] == 2
    assert stale.term == 1 and world.coordinator.term == 2
    world.run(120.0)
    group.check(world, book)
    assert {worker.core.term for worker in world.alive} == {2}


@pytest.mark.parametrize("for_s", [1.0, 3.0, 30.0])
def test_a_coordinator_that_was_frozen_removes_no_worker(for_s: float) -> None:
    world, book = running(4)
    world.freeze_coordinator(for_s)
    world.run(120.0 + for_s)
    group.check(world, book)
    assert world.log.generations == 1, "no worker was considered lost while the coordinator was frozen"


@pytest.mark.parametrize("rank", [0, 2])
def test_a_worker_that_was_frozen_accuses_no_other(rank: int) -> None:
    """Only this worker is removed, or rejoins: the others stay."""
    world, book = running(4)
    frozen = next(
        w for w in world.alive if w.core.rank_assignment is not None and w.core.rank_assignment.rank == rank
    )
    others = [worker for worker in world.alive if worker is not frozen]
    frozen.freeze(3.0)
    world.run(120.0)
    group.check(world, book)
    assert len(world.log.refused) == (not frozen.alive), world.log.refused
    assert all(worker.core.is_finished for worker in others)


def test_an_unknown_rule_is_not_counted() -> None:
    coverage = CommitCoverage()
    coverage.mark(RULES[0])
    with pytest.raises(KeyError):
        coverage.mark("14 anything goes")
    assert coverage.reached == {RULES[0]: 1}


def test_a_group_without_its_coordinator_goes_on_until_a_member_fails() -> None:
    """Guarantee 6."""
    world, book = running(3)
    world.partition({COORDINATOR}, 60.0)
    world.run(40.0)
    finished = [worker.core.is_finished for worker in world.alive]
    assert all(finished), [worker.core.pause_reason for worker in world.alive]
    world.run(200.0)
    group.check(world, book)
