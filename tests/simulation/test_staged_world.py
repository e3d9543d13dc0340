"""S stages x R replicas on the virtual network, with workers that die, join, are partitioned and come back.

Every seed is checked against the guarantees: replicas of a stage have one state, all stages are at one step,
every sample counts once (after a rollback: in the remaining history), and the run ends, or is paused for a
true reason.  `GRIDTRAIN_SEEDS=500` or `make sweep` for more.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import combinations, pairwise, permutations
from operator import le
from random import Random
from typing import Any

import pytest

from gridtrain.core import messages as m
from gridtrain.core.stages.repartition import defined_cuts, uncovered_spans
from gridtrain_coordinator.run.events import RunPhase
from simulation import process_restarts
from simulation.faults import Faults
from simulation.staged_world import (
    EPOCHS,
    SAMPLES,
    StagedWorker,
    StagedWorld,
    layer_weight,
    model_of,
    random_model,
    setup_of,
)

SEEN = ("finished", "rollbacks", "pauses", "reloads", "state_transfers")
COVERING = (14, 15, 17, 18, 19, 21, 27, 28)
STARVED_COVERING = (1, 8, 11, 14, 15, 18)
"""Seeds in which each counted case happens at least twice (`choose_seeds.py`)."""
Seeds = Any


def build(
    seed: int,
    stages: int,
    workers: int,
    model: m.StagedModel | None = None,
    epochs: int = EPOCHS,
    **more: Any,
) -> StagedWorld:
    world = StagedWorld(seed, setup_of(stages, model, epochs=epochs), **more)
    for _ in range(workers):
        world.join()
    return world


def crash(world: StagedWorld, peer: m.PeerId) -> None:
    world.crash(peer)
    world.watch(peer)


def members(world: StagedWorld) -> list[StagedWorker]:
    return [w for w in world.alive if isinstance(w, StagedWorker) and w.core.is_synced]


def at_stage(world: StagedWorld, stage: int) -> list[StagedWorker]:
    return [
        w
        for w in members(world)
        if w.core.rank_assignment is not None and w.core.rank_assignment.stage == stage
    ]


class Trouble(Faults):
    """Faults of one history, and their times; any worker can be hit."""

    coordinator_freezes_s = (0.2, 1.0, 3.0)
    most = 10

    def plan(self, events: int) -> None:
        process_restarts.schedule_restarts(
            self.world, self.world._seed, partial(members, self.world), within_s=5.0
        )
        self.plan_some(FAULTS, events)
        if self.random.random() < 0.8:  # owners restart their workers
            self.world.at(self.random.uniform(5.0, 30.0), self.revive)
        if self.random.random() < 0.5:
            self.world.at(self.random.uniform(30.0, 60.0), self.revive)

    def revive(self) -> None:
        for peer in sorted(self.world.workers):
            self.come_back(self.world.workers[peer], self.random.random() < 0.9)

    def come_back(self, worker: object, with_disk: bool) -> None:
        assert isinstance(worker, StagedWorker)
        if not worker.alive and not worker.left and not worker.has_returned and len(self.world.alive) < 12:
            worker.has_returned = True
            self.world.join_with(worker.stored_checkpoints if with_disk else {})

    @property
    def members(self) -> list[StagedWorker]:
        return members(self.world)

    def kill(self, peer: m.PeerId) -> None:
        crash(self.world, peer)

    def crash_and_back(self) -> None:
        for worker in self.some():
            crash(self.world, worker.peer)
            when_s = self.world.now_s + self.random.uniform(0.2, 3.0)
            self.world.at(when_s, partial(self.come_back, worker, True))

    def leave(self) -> None:
        for worker in self.some():
            (self.world.leave_gracefully if self.random.random() < 0.7 else self.world.leave)(worker.peer)

    def partition(self) -> None:
        peers = sorted(worker.peer for worker in self.world.alive)
        side = {peer for peer in peers if self.random.random() < 0.5}
        self.world.partition(side, self.random.choice((0.3, 1.5, 5.0)), one_way=self.random.random() < 0.3)

    def power_cut(self) -> None:
        for worker in self.world.alive:
            self.world.crash(worker.peer)


FAULTS: tuple[Callable[[Trouble], None], ...] = (
    Trouble.join, Trouble.join, Trouble.crash, Trouble.crash, Trouble.crash_stage, Trouble.crash_and_back,
    Trouble.leave, Trouble.break_edge, Trouble.break_coordinator, Trouble.restart, Trouble.restart_and_crash,
    Trouble.restart_from_backup, Trouble.freeze, Trouble.freeze_coordinator, Trouble.flip, Trouble.partition,
    Trouble.power_cut, Trouble.lose_decision, Trouble.block_link,
)  # fmt: skip


def fits(world: StagedWorld) -> str:
    """A partition of the model that fits the living workers, by trying all; empty: none fits."""
    model = world.setup.model
    if model is None:
        return ""
    sizes = [2 * block.parameter_bytes for block in model.blocks]
    limits = [w.memory_bytes or math.inf for w in world.alive if isinstance(w, StagedWorker)]
    for count in range(1, min(len(limits), len(sizes), world.setup.stages) + 1):
        for inner in combinations(range(1, len(sizes)), count - 1):
            cuts = (0, *inner, len(sizes))
            stages = [sum(sizes[a:b]) for a, b in pairwise(cuts)]
            if any(all(map(le, stages, some)) for some in permutations(limits, count)):
                return f"it fits at {cuts}"
    return ""


def may_go_on(world: StagedWorld, stages: int) -> str:
    """Why a paused run could go on; empty: it could not."""
    short = len(world.alive) < stages
    if (short or world.setup.model is not None) and not fits(world):
        return ""
    blocks = defined_cuts(world.setup)[-1]
    of: dict[tuple[int, bytes], list[m.Span]] = defaultdict(list)
    votes: Counter[tuple[int, bytes]] = Counter()
    confirmed = {state[:2] for state in world.coordinator._checkpoints.quorum._confirmed}
    for worker in world.alive:
        assert isinstance(worker, StagedWorker)
        for checkpoint in worker.stored_checkpoints:
            of[checkpoint.applied, checkpoint.history].append(checkpoint.layers)
        votes.update({(kept.applied, kept.history) for kept in worker.stored_checkpoints})
        assignment = worker.core.rank_assignment
        if worker.core.is_synced and assignment is not None:
            of[worker.core.applied, worker.core.history].append(assignment.layers)
            confirmed.add((worker.core.applied, worker.core.history))
    confirmed |= {at for at, count in votes.items() if 2 * count > len(world.alive)}
    complete = [at for at, known in of.items() if not uncovered_spans(known, blocks) and at in confirmed]
    # The run waits for all workers before the first step, and if the coordinator's backup knows of no worker.
    has_begun = not world.log.blank_backups or world.coordinator.run.highest_step > 0
    complete = [at for at in complete if not short or (has_begun and at[0] >= 0)]
    return f"every stage of {max(complete)[0]} is here; {fits(world)}" if complete else ""


def check(world: StagedWorld, stages: int) -> None:
    log, samples = world.log, SAMPLES * (world.setup.ledger.epochs or 0)
    rounds: dict[int, list[m.RoundId]] = defaultdict(list)
    histories: dict[m.RoundId, set[bytes]] = defaultdict(set)
    for _, round_id, history in log.commits:  # in the order of the commits
        histories[round_id].add(history)
        # A worker that returns may apply what it prepared before a rollback, if the step was repeated alike.
        if all(history not in histories[other] for other in rounds[round_id.step]):
            rounds[round_id.step].append(round_id)
    assert all(len(seen) == 1 for seen in histories.values()), "one step, and two histories"
    for step, ids in rounds.items():  # all or none, except where the run went back beyond this step
        again = sum(to <= step and (since is None or step < since) for since, to in world.lost_steps)
        known = not (log.lost_disks or log.blackouts or log.start_overs)
        assert len(ids) <= 1 + again or not known, (step, ids, world.lost_steps)
    if not world.finished:
        status = world.coordinator.status(world.now_s)
        assert world.coordinator.phase in (RunPhase.PAUSED, RunPhase.WAITING), status
        assert world.coordinator.reason
        why = may_go_on(world, stages)
        assert not why, f"{why}, but: {status}"
        return
    over = [w for w in members(world) if w.core.is_finished and w.core.rank_assignment is not None]
    assert len({(w.core.applied, w.core.history) for w in over}) <= 1, "stages are at different steps"
    if not over:
        return  # the last one died after the end
    last = over[0].core.applied
    committed = {rounds[step][-1] for step in range(last + 1)}
    assert len(committed) == last + 1
    seen: Counter[int] = Counter()
    counted: set[int] = set()
    for submission in log.submissions:
        if submission.round in committed:
            for span in submission.spans:
                seen.update(range(span.start, span.stop))
                if submission.round not in log.skipped:
                    counted.update(range(span.start, span.stop))
    wrong = {p: seen[p] for p in range(samples) if seen[p] != 1}
    assert not wrong and len(seen) == samples, f"not counted once: {wrong}"
    for worker in over:
        layers = worker.trainer.layers
        assert worker.core.rank_assignment is not None and layers == worker.core.rank_assignment.layers
        for layer, number in zip(range(layers.start, layers.stop), worker.trainer.state, strict=True):
            assert number == sum(layer_weight(p, layer) for p in counted), f"layer {layer}"


def run_to_the_end(world: StagedWorld, stages: int) -> None:
    """Until 400 s; until 150 s if the run is paused then for a true reason, as nothing happens after 60 s."""
    world.run(150.0, max_events=2_000_000)
    if world.coordinator.phase is not RunPhase.PAUSED or may_go_on(world, stages):
        world.run(400.0, max_events=2_000_000)


def history(seed: int) -> tuple[StagedWorld, int]:
    """The history of this seed."""
    random = Random(seed)
    stages, replicas = random.randint(2, 4), random.randint(1, 2)
    standbys = random.choice((0, 0, 1, 2))
    more = {
        "skips": random.choice((0.0, 0.0, 0.02)),
        "behind_nat": random.choice((0.0, 0.0, 0.5)),
        "slow_restore": random.choice((0.0, 0.0, 0.2)),
    }
    model: m.StagedModel | None = None
    memory: tuple[int, ...] = (0,)
    if random.random() < 0.6:
        model, total = random_model(random, stages)
        memory = random.choice(((0,), (0,), (2 * total, total), (total,)))
    world = build(seed, stages, stages * replicas + standbys, model, memory=memory, **more)
    Trouble(world, random).plan(random.randint(1, 7))
    run_to_the_end(world, stages)
    return world, stages


def starved(seed: int) -> tuple[StagedWorld, int]:
    """One replica, no standby: after a death a stage has no worker; some join later."""
    random = Random(seed)
    stages = random.randint(2, 4)
    model, total = random_model(random, stages)
    memory = random.choice(((0,), (0,), (2 * total,), (2 * total, total), (total,), (total, 2 * total // 3)))
    more = {
        "slow_restore": random.choice((0.0, 0.0, 0.2)),
        "behind_nat": random.choice((0.0, 0.0, 0.5)),
        "epochs": 6,
    }
    world = build(seed, stages, stages, model, memory=memory, **more)
    trouble = Trouble(world, random)
    for _ in range(random.randint(1, 3)):
        world.at(random.uniform(0.6, 12.0), trouble.crash)
    for _ in range(random.choice((0, 1, 1, 2, 3))):
        world.at(random.uniform(2.0, 20.0), trouble.join)
    for _ in range(random.choice((0, 0, 1, 2))):
        world.at(random.uniform(0.6, 12.0), partial(random.choice(FAULTS), trouble))
    if random.random() < 0.3:
        world.at(random.uniform(5.0, 30.0), trouble.revive)
    run_to_the_end(world, stages)
    return world, stages


def test_guarantees_hold_when_the_model_is_repartitioned(seeds: Seeds) -> None:
    seen = ("finished", "left paused", "rollbacks", "merges", "repartitioned", "to fewer", "to more")
    sweep(seeds(5, always=STARVED_COVERING, drawn=5), starved, () if seeds.is_replay else seen)


def test_a_stage_that_is_loaded_after_the_freeze_ends_a_pause() -> None:
    """Seed 119: the source of stage 0 dies while its recipient still loads.  The recipient answers Freeze
    without a state, the run pauses, and the state that is loaded then is the only copy of that stage."""
    world, stages = starved(119)
    check(world, stages)
    assert world.finished and world.pauses == 2 and len(world.lost_steps) == 1


def test_guarantees_hold_under_churn(seeds: Seeds) -> None:
    sweep(seeds(60, always=COVERING, drawn=6), history, () if seeds.is_replay else SEEN)


def test_other_workers_create_stages_again_if_no_step_was_committed() -> None:
    """The only worker with stage 0 is left out by a plan for the speeds of the devices."""
    check(*history(798943))


def test_a_coordinator_that_lost_its_journal_receives_a_report_before_any_setup() -> None:
    """A member reports to it that has received no state yet."""
    check(*history(173832))


def reached_by(world: StagedWorld) -> dict[str, int]:
    """What happened in a history, and how often."""
    cuts = list(pairwise(world.stage_bounds))
    logged = ("crashes", "joins", "generations", "state_transfers", "aborts", "restarts")
    return {
        "finished": world.finished,
        "left paused": not world.finished,
        "rollbacks": len(world.lost_steps),
        "pauses": world.pauses,
        "reloads": world.reloads,
        "merges": world.merges,
        "repartitioned": sum(a != b for a, b in cuts),
        "to more": sum(len(a) < len(b) for a, b in cuts),
        "to fewer": sum(len(a) > len(b) for a, b in cuts),
    } | {name: getattr(world.log, name) for name in logged}


def sweep(seeds: Iterable[int], of: Callable[[int], tuple[StagedWorld, int]], seen: Sequence[str]) -> None:
    """Check these histories, in which all of `seen` must have happened."""
    counts: Counter[str] = Counter()
    late: list[float] = []
    done = 0
    for seed in seeds:
        world, stages = of(seed)
        check(world, stages)
        done += 1
        counts.update(reached_by(world))
        late += [notice.took_s for notice in world.notices]
    slowest_s = max(late, default=0.0)
    print(f"\n{done} histories: {dict(counts)}; a death was known to all after {slowest_s:.2f} s at most")
    assert all(counts[name] for name in seen), "choose other seeds: tests/simulation/choose_seeds.py"


def test_a_run_without_faults_ends_in_one_generation() -> None:
    world = build(1, 3, 6)
    world.run(60.0)
    check(world, 3)
    assert world.finished and world.log.generations == 1
    assert len(world.log.commits) == 6 * 20, "steps of 2 x 3 samples, two passes of 60"


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("when_s", (0.9, 1.3, 1.7))
def test_a_standby_replaces_a_dead_worker_of_any_stage(stage: int, when_s: float) -> None:
    """2 x 4 and one standby: the dead worker's replica sends its state, nothing is lost, all know in 2 s."""
    world = build(7, 4, 9)

    def die() -> None:
        crash(world, at_stage(world, stage)[0].peer)

    world.at(when_s, die)
    world.run(60.0)
    check(world, 4)
    assert world.finished and not world.lost_steps
    assert len(world.coordinator.run.member_list) == 8, "the standby is a member"
    assert max(notice.took_s for notice in world.notices) < 2.0


def test_without_a_standby_the_other_replica_goes_on_alone() -> None:
    world = build(8, 2, 4)
    world.at(1.2, lambda: crash(world, at_stage(world, 1)[0].peer))
    world.run(60.0)
    check(world, 2)
    assert world.finished and not world.lost_steps
    assert len(world.coordinator.run.member_list) == 2


def test_a_newcomer_continues_a_stage_from_the_copy_on_the_next_stages_disk() -> None:
    world = build(9, 3, 3)
    world.at(1.6, lambda: crash(world, at_stage(world, 1)[0].peer))
    world.at(8.0, world.join)
    world.run(7.9)
    assert world.coordinator.phase is RunPhase.PAUSED
    assert "2 workers are present, but 3 are needed" in world.coordinator.reason
    world.run(120.0)
    check(world, 3)
    assert world.finished and len(world.lost_steps) == 1
    since, to = world.lost_steps[0]
    assert since is not None and 0 < since - to <= 4, "checkpoints are 4 steps apart"


def test_survivors_go_on_with_fewer_stages_until_a_newcomer_joins() -> None:
    """Three stages of two layers; the worker of the middle stage dies for good.

    0 2 4 6  ->  0 3 6, from the disks, which have a copy of the middle stage  ->  0 2 4 6, from memory
    """
    world = build(9, 3, 3, model_of([1] * 6, 0, 2, 4, 6))
    world.at(1.6, lambda: crash(world, at_stage(world, 1)[0].peer))
    world.run(8.0)  # loading takes up to 3 s
    assert world.stage_bounds == [(0, 2, 4, 6), (0, 3, 6)] and world.merges == 2
    assert world.coordinator.phase is RunPhase.TRAINING and len(world.lost_steps) == 1
    since, to = world.lost_steps[0]
    assert since is not None and 0 < since - to <= 4, "checkpoints are 4 steps apart"
    world.join()
    world.run(120.0)
    check(world, 3)
    assert world.stage_bounds[1:] == [(0, 3, 6), (0, 2, 4, 6)]
    assert world.finished and len(world.lost_steps) == 1, "repartitioning again costs no step"


def test_a_worker_that_rejoins_soon_avoids_a_repartition() -> None:
    world = build(9, 3, 3, model_of([1] * 6, 0, 2, 4, 6))
    world.at(1.6, lambda: crash(world, at_stage(world, 1)[0].peer))
    world.at(3.0, world.join)
    world.run(120.0)
    check(world, 3)
    assert world.finished and set(world.stage_bounds) == {(0, 2, 4, 6)}


def test_a_run_whose_model_does_not_fit_waits_and_shows_the_reason() -> None:
    """The model has 12 bytes with gradients, and each device 4: two cannot hold it."""
    world = build(9, 3, 3, model_of([1] * 6, 0, 2, 4, 6), memory=(4,))
    world.at(1.6, lambda: crash(world, at_stage(world, 1)[0].peer))
    world.run(60.0)
    assert world.coordinator.phase is RunPhase.PAUSED
    assert "stage 1 of 3 has no worker" in world.coordinator.reason
    assert "no partition of 6 layers into 2 stages fits" in world.coordinator.reason
    world.join()
    world.run(120.0)
    check(world, 3)
    assert world.finished and set(world.stage_bounds) == {(0, 2, 4, 6)}


def test_a_worker_that_rejoins_a_paused_run_brings_its_state() -> None:
    """It had lost its connections, not its memory."""
    world = build(10, 3, 3)

    def break_connections() -> None:
        side = {at_stage(world, 1)[0].peer}
        world.partition(side, 6.0)

    world.at(1.4, break_connections)
    world.run(120.0)
    check(world, 3)
    assert world.finished and not world.lost_steps


def test_a_run_continues_from_the_disks_after_a_power_cut() -> None:
    world = build(11, 3, 6)
    random = Random(1)
    trouble = Trouble(world, random)
    world.at(2.0, trouble.power_cut)
    world.at(3.0, trouble.revive)
    world.run(200.0)
    check(world, 3)
    assert world.finished and world.reloads >= 3
