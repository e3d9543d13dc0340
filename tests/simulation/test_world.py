"""The whole group on the virtual network, with workers that join, leave, crash and lose connections.

Every seed is checked against guarantees 1 (same model), 2 (no gradient silently dropped), 3 (all or none),
4 (every sample counts once) and 5 (no unbounded wait).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations
from random import Random
from typing import Any

import numpy as np
import pytest
from collective_group import CollectiveGroup
from exchange_buffers import NEIGHBOURS

from gridtrain.core import messages as m
from gridtrain_coordinator.membership import member_lists
from simulation import process_restarts
from simulation.commit_coverage import table, unreached_rules
from simulation.faults import Faults
from simulation.toy_trainer import N, ToyTrainer
from simulation.world import Submission, World

SAMPLES = 60
KINDS = ("dense", "topk", "gtopk")
OTHER_KINDS = ("tree", "star", "direct", "dense-star", "dense-int8", "direct-bf16", "dense-star-int8")
ALL_KINDS = (*KINDS, *OTHER_KINDS, "gtopk-direct")
"""The last is not in `OTHER_KINDS`: their number determines the exchange of each seed in `history`."""

WHAT_HAPPENS = (
    "aborts",
    "joins",
    "crashes",
    "generations",
    "state_transfers",
    "passed_on",
    "restarts",
    "rollbacks",
    "restarted_processes",
    "caught_up",
)
COVERING = (33, 35, 46, 66, 241, 264, 287, 316, 443, 521, 555, 660, 751, 769)
"""Seeds that reach every counted rule, each at least twice if two of 800 do (`choose_seeds.py`)."""
Seeds = Any


def build(
    seed: int,
    kind: str,
    workers: int,
    *,
    can_catch_up: bool | None = None,
    samples: int = SAMPLES,
    delay: int = 0,
    shards: tuple[int, ...] = (),
    **more: Any,
) -> tuple[World, dict[m.RoundId, list[ToyTrainer.Attempt]]]:
    book: dict[m.RoundId, list[ToyTrainer.Attempt]] = defaultdict(list)
    if can_catch_up is None:  # whether newcomers catch up while the others train
        can_catch_up = Random(seed).random() < 0.5
    initial_digest = Random(seed ^ 0xA11CE).choice(
        (b"", b"as built")
    )  # whether workers report that all build the same model
    spec = m.LedgerSpec(sum(shards) or samples, 1, epochs=2, delay=delay, shards=shards)
    setup = m.Setup(
        (("kind", kind),), spec, 3, None, can_catch_up=can_catch_up, initial_state_digest=initial_digest
    )
    more = {
        "behind_nat": Random(seed).choice((0.0, 0.0, 0.5, 1.0)),
        "compute_s": (0.001, 0.1),
        "checkpoint_every": 5,
        **more,
    }
    world = World(seed, lambda: ToyTrainer(kind, book), NEIGHBOURS[kind], setup, min_workers=1, **more)
    for _ in range(workers):
        world.join()
    return world, book


class Trouble(Faults):
    """Faults of one history, and their times.  Only `end_all` ends the last member."""

    most = 6

    def __init__(self, world: World, random: Random) -> None:
        super().__init__(world, random)
        # A separate generator, so that a seed's other draws do not depend on it.
        self.in_order = Random(world._seed ^ 0x5EED).random() < 0.7

    def plan(self, events: int) -> None:
        """A run without faults takes a second or two, so faults come early, and in bursts."""
        process_restarts.schedule_restarts(self.world, self.world._seed, lambda: self.members, within_s=3.0)
        if self.random.random() < 0.1:  # no other fault, to reach the rules that need a run without faults
            alone = self.random.choice((Trouble.miss_generation, Trouble.end_all))
            self.world.at(self.random.uniform(0.6, 0.9), partial(alone, self))
            return
        self.plan_some(FAULTS, events)

    def crash(self) -> None:
        if len(self.members) >= 2:
            super().crash()

    def leave(self) -> None:
        if len(self.members) >= 2:
            peer = self.random.choice(self.members).peer
            (self.world.leave_gracefully if self.in_order else self.world.leave)(peer)

    def end_all(self) -> None:
        """A power cut ends all workers; some return with their checkpoints."""
        disks = [worker.disk for worker in self.world.alive]
        for worker in self.world.alive:
            self.world.crash(worker.peer)
        survive = self.random.random() < 0.6
        for disk in disks[:3] or [None]:
            saved = disk if survive and self.random.random() < 0.8 else None
            self.world.at(self.world.now_s + self.random.uniform(0.1, 3.0), partial(self.world.join, saved))

    def block_link(self) -> None:
        if len(self.members) >= 2:
            super().block_link()
            if self.random.random() < 0.5:
                self.join()  # so that a generation forms meanwhile


FAULTS: tuple[Callable[[Trouble], None], ...] = (
    Trouble.join, Trouble.crash, Trouble.leave, Trouble.break_edge, Trouble.break_coordinator,
    Trouble.break_all_coordinator, Trouble.restart, Trouble.restart_from_backup, Trouble.back_up,
    Trouble.restart_and_crash, Trouble.freeze, Trouble.freeze_coordinator, Trouble.flip, Trouble.partition,
    Trouble.end_all, Trouble.lose_decision, Trouble.block_link, Trouble.miss_generation, Trouble.take_over,
)  # fmt: skip


CUTS: tuple[Callable[[Trouble], None], ...] = (
    Trouble.deafen, Trouble.deafen, Trouble.deafen, Trouble.lose_decision, Trouble.miss_generation,
    Trouble.break_edge, Trouble.break_coordinator, Trouble.join, Trouble.freeze,
)  # fmt: skip


def repeat_without_deaths(attempts: list[ToyTrainer.Attempt]) -> list[ToyTrainer.Attempt]:
    """Repeat the exchange among all members, to compute the residual that a dead member would have had.

    Only that part may be lost by a death (guarantee 2).
    """
    again = []
    for old in sorted(attempts, key=lambda attempt: attempt.rank):
        new = ToyTrainer.Attempt(old.rank, old.before, old.contribution, old.make)
        new.left, new.buffer = old.left, old.make()
        again.append(new)
    CollectiveGroup([attempt.buffer for attempt in again], seed=0).run()
    return again


def counted_submissions(
    submissions: list[Submission], book: dict[m.RoundId, list[ToyTrainer.Attempt]], committed: set[m.RoundId]
) -> set[tuple[m.PeerId, m.RoundId]]:
    """The submissions that count; their attempts are added to `book`.

    A retried ring continues where the previous attempt ended (RESUME).  So a step can be committed in an
    attempt that a member never began, if all its parts had arrived before it left: its earlier one counts.
    """
    peers: dict[m.RoundId, set[m.PeerId]] = defaultdict(set)
    for submission in submissions:
        peers[submission.round].add(submission.peer)
    counted = {(peer, round_id) for round_id in committed for peer in peers[round_id]}
    for round_id in committed:
        present, ranks = set(peers[round_id]), {attempt.rank for attempt in book[round_id]}
        for number in range(round_id.attempt - 1, -1, -1):
            earlier = replace(round_id, attempt=number)
            counted |= {(peer, earlier) for peer in peers[earlier] - present}
            present |= peers[earlier]
            book[round_id] += [attempt for attempt in book.get(earlier, ()) if attempt.rank not in ranks]
            ranks = {attempt.rank for attempt in book[round_id]}
    return counted


def exempt(world: World) -> bool:
    """A rollback: the exception to guarantees 3 and 4 (rule 13).

    It is always logged, unless no record is left: the coordinator's disk and all workers are lost, or the
    backup is older than the first generation and a new worker joins before those with the model.
    """
    log = world.log
    return bool(log.rollbacks or log.start_overs or (log.blackouts and log.lost_disks) or log.blank_backups)


def divided(world: World) -> bool:
    """One run became two, which only an operator can prevent: two coordinators with some workers each
    (decision 0017), or a coordinator whose backup knew of no member."""
    if world.log.blank_backups:
        return True
    if not world.log.coordinator_failovers:
        return False
    workers_of: dict[m.RoundId, set[m.PeerId]] = defaultdict(set)
    for peer, round_id, _ in world.log.commits:
        workers_of[round_id].add(peer)
    first: dict[int, m.RoundId] = {}
    for round_id in workers_of:
        other = first.setdefault(round_id.step, round_id)
        if other.term != round_id.term and not workers_of[other] & workers_of[round_id]:
            return True
    return False


def check(
    world: World,
    book: dict[m.RoundId, list[ToyTrainer.Attempt]],
    samples: int = SAMPLES,
    *,
    ended_early: bool = False,
) -> None:
    """Check guarantees 2 to 4; a run that its owner has ended early may leave positions out."""
    log = world.log
    if divided(world) or not (world.finished or world.alive):
        return  # all have left at once, and no worker joined after them
    assert world.finished, f"not finished after {world.now_s:.1f} s: {world.coordinator.status(world.now_s)}"
    survivors = [
        w for w in world.alive if w.core.is_finished
    ]  # without workers that were away when the run ended
    if not survivors:
        return  # the last one died after the end
    check_residuals(world)
    # 3: a step was committed in one round only, and 1: with one history on all workers that committed it.
    rounds_of: dict[int, set[m.RoundId]] = defaultdict(set)
    histories: dict[m.RoundId, set[bytes]] = defaultdict(set)
    for _, round_id, history in log.commits:
        rounds_of[round_id.step].add(round_id)
        histories[round_id].add(history)
    assert all(len(seen) == 1 for seen in histories.values())
    if not exempt(world):
        assert all(len(ids) == 1 for ids in rounds_of.values()), rounds_of
    # After a rollback the latest round of each step counts.
    last = survivors[0].core.applied
    # By time: with a blank backup steps count from 0 again.
    latest_rounds = {round_id.step: round_id for round_id in histories}
    committed = {round_id for step, round_id in latest_rounds.items() if step <= last}
    assert len(committed) == last + 1
    assert len({w.trainer.model.tobytes() for w in survivors}) == 1
    # 4: every position in exactly one committed round.
    seen = [0] * (2 * samples)
    counted = counted_submissions(log.submissions, book, committed)
    for submission in log.submissions:
        if (submission.peer, submission.round) in counted:
            for span in submission.spans:
                for position in range(span.start, span.stop):
                    seen[position] += 1
    wrong = [i for i, count in enumerate(seen) if count != 1 and not (ended_early and count == 0)]
    assert not wrong, f"positions not counted once: {wrong}"
    # 2: no part of a gradient lost or added in any committed round, to the last bit.
    model = np.zeros(N, np.float32)
    committed_by = {(peer, round_id) for peer, round_id, _ in log.commits}
    for round_id in sorted(committed - log.skipped):
        attempts = repeat_without_deaths(book[round_id])
        before = sum(a.before + a.contribution for a in attempts)
        after = attempts[0].update + sum(a.residual for a in attempts)
        assert np.array_equal(before, after), f"round {round_id} does not conserve the sum"
        # The survivors have exactly the residuals of the exchange without deaths.
        left = {attempt.rank: attempt.residual.tobytes() for attempt in attempts}
        for worker in survivors:
            mine = worker.trainer.attempts.get(round_id)
            if (worker.peer, round_id) not in committed_by:
                continue  # it lost its connection before all parts arrived, and has received the state since
            assert mine is None or mine.residual.tobytes() == left[mine.rank]
        model += attempts[0].update
    assert np.array_equal(model, survivors[0].trainer.model)
    check_kept_residuals(world, [attempt for r in committed - log.skipped for attempt in book[r]])


def check_kept_residuals(world: World, counted: Sequence[ToyTrainer.Attempt]) -> None:
    """2: a worker contributes, or transfers, what the last attempt that counts has left it and what it has
    received since.  A residual is missing only where it was cleared, once with each state that replaced its
    worker's, and what a recipient adds is what the leaver has transferred.

    Args:
        counted: the attempts of all workers at rounds that count and were not skipped.
    """
    ids = {id(attempt) for attempt in counted}
    # After a rollback the recipient's residual does not count either.
    leavers = set() if exempt(world) else {leaver for leaver, _ in world.log.added_residuals}
    inherited: dict[m.PeerId, list[bytes]] = defaultdict(list)
    taken: dict[m.PeerId, bytes] = {}
    for worker in world.processes:
        trainer: Any = worker.trainer
        cleared = sum(change is None for change in trainer.changes)
        assert cleared == len(worker.restored) == len(set(worker.restored)), (
            "not cleared once with each restore"
        )
        inherited[worker.peer] += trainer.inherited
        kept_N = np.zeros(N, np.float32)
        for change in trainer.changes:
            match change:
                case None:
                    kept_N = np.zeros(N, np.float32)
                case ToyTrainer.Attempt():
                    if id(change) in ids:
                        assert change.before.tobytes() == kept_N.tobytes(), "sent twice, or lost"
                        kept_N = change.residual
                case bytes():
                    assert worker.peer not in leavers or change == kept_N.tobytes(), "not what it had"
                    taken[worker.peer] = change
                case _:
                    kept_N = kept_N + change
    for leaver, recipient in world.log.added_residuals:
        assert inherited[recipient].pop(0) == taken[leaver], "not what the leaver has transferred"
    assert not any(inherited.values()), "added without a transfer"


def check_residuals(world: World) -> None:
    """A transferred residual counts once or not at all; none is lost without a report."""
    log = world.log
    leavers = [leaver for leaver, _ in log.added_residuals]
    assert len(leavers) == len(set(leavers)), "added twice"
    assert set(log.added_residuals) <= set(log.acknowledged)
    for leaver, recipient in log.acknowledged:
        assert not world.workers[leaver].alive or (
            not world.workers[leaver].core.is_finished or leaver in world.restarted_processes
        )
        settled = (leaver, recipient) in log.added_residuals or (leaver, recipient) in log.void_residuals
        settled = settled or recipient in world.restarted_processes  # it died with the residual
        assert (
            settled or not world.workers[recipient].alive or world.workers[recipient].has_residual_of(leaver)
        ), "the residual is lost"


def once_acknowledged(world: World, do: Callable[[], None]) -> None:
    if world.log.acknowledged:
        do()
    else:
        world.at(world.now_s + 0.001, partial(once_acknowledged, world, do))


@pytest.mark.parametrize("kind", KINDS)
def test_a_leaving_worker_transfers_its_residual(kind: str) -> None:
    """Two of three leave, the second while it may have the first one's residual."""
    passed_on = 0
    for first, second in permutations(range(3), 2):
        world, book = build(3, kind, workers=3, behind_nat=0.0)
        peers = sorted(world.workers)
        world.at(3.8, partial(world.leave_gracefully, peers[first]))
        world.at(3.8, partial(once_acknowledged, world, partial(world.leave_gracefully, peers[second])))
        world.run(60.0)
        check(world, book)
        rounds = {round_id for _, round_id, _ in world.log.commits}
        counted = counted_submissions(world.log.submissions, book, rounds)
        # Void if the step in which it left was committed with its contribution, which counted already.
        contributed_all = {peer for peer, round_id in counted if round_id not in rounds}
        assert (
            world.log.added_residuals
            and {leaver for leaver, _ in world.log.void_residuals} <= contributed_all
        )
        if (peers[first], peers[second]) in world.log.added_residuals:
            passed_on += 1
            assert len(world.log.added_residuals) == 2
            (last,) = [worker for worker in world.alive if worker.core.is_finished]
            contributed = sum(attempt.contribution for round_id in rounds for attempt in book[round_id])
            assert np.array_equal(contributed, last.trainer.model + last.trainer.residual), "nothing is lost"
    assert passed_on, "the second one receives the residual of the first one at least once"


@pytest.mark.parametrize("loses_disk", [False, True])
@pytest.mark.parametrize("seed", [*range(1, 7), 9, 11, 16])
def test_an_update_equal_to_that_of_an_aborted_round_does_not_commit_that_round(
    seed: int, loses_disk: bool
) -> None:
    """The root is frozen in step 0; the other worker and a newcomer repeat it without the root's samples.

    None of their values is among the 5 entries of the update, so both updates are equal, and the root returns
    prepared.  Its new residual contains the samples, but they are assigned to other workers.  If the
    coordinator loses its disk, it no longer knows in which generation the step was committed.
    """

    def gradient(position: int) -> np.ndarray:
        values = np.zeros(N, np.float32)
        batch, value = ((10, 1), (0, 8), (5, 3), (5, 4))[position // 3]
        values[batch : batch + 5] = value
        return values

    def compute_s(peer: m.PeerId) -> float:
        core = world.workers[peer].core
        if core.generation != 1 or core.step:
            return (3.6 if loses_disk else 0.3) if core.step else 0.0
        return 0.05 if core.rank_assignment is not None and core.rank_assignment.rank == 0 else 0.3

    def freeze_root() -> None:
        for worker in workers:
            at = worker.core.rank_assignment
            if at is not None and at.rank == 0 and worker.core.next_round is None and worker.has_computed:
                worker.freeze(6.0 if loses_disk else 4.0)
                world.back_up()
                world.slow_next_restore = True
                world.join()
                return
        world.at(world.now_s + 0.001, freeze_root)

    def lose_disk() -> None:
        if any(round_id.step == 0 for _, round_id, _ in world.log.commits):
            world.crash_coordinator(0.02, lose_disk=True)
        else:
            world.at(world.now_s + 0.002, lose_disk)

    book: dict[m.RoundId, list[ToyTrainer.Attempt]] = defaultdict(list)
    setup = m.Setup((("kind", "star"),), m.LedgerSpec(12, 1, epochs=1), 3, None)
    make = partial(ToyTrainer, "star", book, gradient)
    world = World(seed, make, NEIGHBOURS["star"], setup, min_workers=1, delay_s=(0.0005, 0.002))
    world.compute_s = compute_s  # type: ignore[method-assign]
    workers = [world.join(), world.join()]
    freeze_root()
    if loses_disk:
        lose_disk()
    world.run(60.0)
    assert world.finished and len(world.alive) == 3
    rounds = {round_id for _, round_id, _ in world.log.commits}
    assert len({round_id.step for round_id in rounds}) == len(rounds)
    trainers: list[Any] = [worker.trainer for worker in world.alive]
    counted = trainers[0].model + sum(trainer.residual for trainer in trainers)
    assert np.array_equal(counted, sum(map(gradient, range(12))))


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_group_without_faults_trains_to_the_end(kind: str) -> None:
    world, book = build(1, kind, workers=4)
    world.run(60.0)
    check(world, book)
    # 120 samples in steps of 4 x 3: two passes of five steps, in one generation.
    assert world.log.generations == 1
    assert len(world.log.commits) == 4 * 10
    assert world.log.aborts == world.log.voided == 0


def history(seed: int, kind: str) -> tuple[World, dict[m.RoundId, list[ToyTrainer.Attempt]]]:
    """The history of this seed."""
    random = Random(seed)
    skips, slow = random.choice((0.0, 0.0, 0.02)), random.choice((0.0, 0.0, 0.2))
    world, book = build(seed, kind, workers=random.randint(1, 5), skips=skips, slow_restore=slow)
    Trouble(world, random).plan(events=random.randint(1, 8))
    world.run(900.0)
    return world, book


def reached_by(world: World) -> dict[str, int]:
    """How often a history has reached each counted rule, and counts of its events."""
    return {name: getattr(world.log, name) for name in WHAT_HAPPENS} | world.coverage.reached


def churn(seed: int) -> World:
    world, book = history(seed, KINDS[seed % len(KINDS)])
    check(world, book)
    return world


def test_guarantees_hold_under_churn(seeds: Seeds) -> None:
    """Histories over the three exchanges: those of `COVERING` and 50 others in `make test`, all in a sweep.

    Prints a table of the commit rules that they have reached.
    """
    totals: Counter[str] = Counter()
    reached = []
    for seed in seeds(750, always=COVERING, drawn=50):
        world = churn(seed)
        reached.append(world.coverage.reached)
        totals.update(reached_by(world))
    print(f"\n{len(reached)} histories: {dict(totals)}\n{table(reached)}")
    if seeds.is_replay:
        return
    assert all(totals[name] > 0 for name in WHAT_HAPPENS), dict(totals)
    assert unreached_rules(reached) == [], "choose other seeds: tests/simulation/choose_seeds.py"
    if len(reached) >= 750:
        assert totals["rollbacks"] < 0.2 * len(reached)


def test_a_run_that_its_owner_ends_under_churn_ends_with_one_model(seeds: Seeds) -> None:
    ended_early = 0
    for seed in seeds(200, drawn=12):
        random = Random(seed)
        world, book = build(seed, KINDS[seed % len(KINDS)], workers=random.randint(1, 5))
        Trouble(world, random).plan(events=random.randint(0, 4))
        world.at(random.uniform(0.3, 4.0), world.end_run)
        world.run(900.0)
        check(world, book, ended_early=True)
        ended_early += len(world.log.commits) > 0 and world.coordinator.run.is_ending
    assert ended_early or seeds.is_replay


def test_a_coordinator_takes_back_the_workers_that_a_later_one_has_lost() -> None:
    """Seed 60966: a restarted coordinator that a standby has replaced raises its term above the standby's,
    because the only worker connects to it.  Back at the standby, it waited for the other one forever.
    """
    assert churn(60966).log.coordinator_failovers == 1


def test_guarantees_hold_on_the_other_topologies(seeds: Seeds) -> None:
    for seed in seeds(150, always=range(len(OTHER_KINDS)), drawn=14):
        world, book = history(seed, OTHER_KINDS[seed % len(OTHER_KINDS)])
        check(world, book)


def test_guarantees_hold_if_members_are_cut_off_and_return(seeds: Seeds) -> None:
    """In these seeds a step is committed with the contribution of a member that cannot prepare it, and
    that takes part again: what it had sent of its residual must not be sent again."""
    for seed in seeds(200, always=(41, 52, 81, 82), drawn=4):
        random, kinds = Random(seed), KINDS + OTHER_KINDS
        workers, skips = random.randint(2, 5), random.choice((0.0, 0.0, 0.02))
        more: dict[str, Any] = {"samples": 120, "compute_s": (0.02, 0.05), "skips": skips}
        world, book = build(seed, kinds[seed % len(kinds)], workers, **more)
        trouble = Trouble(world, random)
        for _ in range(random.randint(2, 8)):
            world.at(random.uniform(0.5, 8.0), partial(random.choice(CUTS), trouble))
        world.run(900.0)
        check(world, book, 120)


def test_guarantees_hold_if_member_lists_are_sent_as_changes(
    seeds: Seeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in groups of more than a page: here a page has one member."""
    monkeypatch.setattr(member_lists, "MEMBERS_PER_PAGE", 1)
    made: list[m.MemberListChanges] = []
    make = m.MemberListChanges.apply

    def apply(changes: m.MemberListChanges, base: Sequence[m.Member]) -> tuple[m.Member, ...] | None:
        made.append(changes)
        members = make(changes, base)
        assert members is not None, "the coordinator knows which list a member has"
        return members

    monkeypatch.setattr(m.MemberListChanges, "apply", apply)
    for seed in seeds(150, always=COVERING[:5], drawn=10):
        churn(seed)
    assert made
