"""Groups whose trainers stall, with steps that do not wait for them, under the checks of `test_world`."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from gridtrain.core import messages as m
from simulation import test_world as group
from simulation.world import World

SAMPLES = 360
COVERING = (35, 37, 51, 91, 93, 171, 189)
"""Seeds with absences in retries and in skipped steps."""
Seeds = Any
Book = dict[m.RoundId, list[group.ToyTrainer.Attempt]]


def build(seed: int, kind: str, workers: int, **more: Any) -> tuple[World, Book]:
    more = {"compute_s": (0.02, 0.03), "behind_nat": 0.0, "may_be_absent": True, **more}
    return group.build(seed, kind, workers, samples=SAMPLES, **more)


@pytest.mark.parametrize("kind", group.ALL_KINDS)
@pytest.mark.parametrize("stalled", [0, 2])
def test_a_stalled_trainer_does_not_delay_the_group(kind: str, stalled: int) -> None:
    """Of four workers one stalls for much longer than the others need for several steps, the root or not."""
    world, book = build(5, kind, workers=4)
    world.run(2.0)
    worker = next(w for w in world.alive if w.core.rank_assignment.rank == stalled)  # type: ignore[union-attr]
    before = worker.core.step
    worker.stall(1.0)
    world.run(3.0)
    assert worker.core.step >= before + 5, "the group did not wait"
    world.run(120.0)
    group.check(world, book, SAMPLES)
    assert {peer for peer, _ in world.log.absences} == {worker.peer}
    assert world.log.late_submissions == 1, "its batch was used late"
    assert world.log.aborts == world.log.voided == 0 and world.log.generations == 1


def test_the_group_waits_for_a_trainer_that_does_not_allow_absence() -> None:
    world, book = build(5, "gtopk", workers=4, may_be_absent=False)
    world.run(2.0)
    worker = world.alive[1]
    before = worker.core.step
    worker.stall(2.0)
    world.run(4.0)
    assert worker.core.step <= before + 1
    world.run(120.0)
    group.check(world, book, SAMPLES)
    assert not world.log.absences


def test_a_group_without_stalls_sends_no_message_about_absence() -> None:
    world, book = build(7, "gtopk", workers=4)
    sent: Counter[str] = Counter()
    send = world.send

    def count(src: m.PeerId, dst: m.PeerId, message: m.Message) -> None:
        sent[type(message).__name__] += 1
        send(src, dst, message)

    world.send = count  # type: ignore[method-assign]
    world.run(120.0)
    group.check(world, book, SAMPLES)
    assert sent["Vote"] > 100 and not sent["Waiting"] and not sent["ProceedWithout"]


def test_half_of_the_samples_is_a_quorum_and_less_is_not() -> None:
    for stalled, waits in ((2, False), (3, True)):
        world, book = build(5, "gtopk", workers=4)
        world.run(2.0)
        before = world.alive[0].core.step
        for worker in world.alive[-stalled:]:
            worker.stall(2.0)
        world.run(4.0)
        assert (world.alive[0].core.step <= before + 1) == waits
        world.run(120.0)
        group.check(world, book, SAMPLES)


def test_a_batch_that_is_too_late_is_assigned_again() -> None:
    world, book = build(5, "gtopk", workers=4, compute_s=(0.005, 0.006))
    world.run(1.5)
    worker = world.alive[1]
    worker.stall(3.0)
    world.run(120.0)
    group.check(world, book, SAMPLES)
    assert len(world.log.absences) > 17 and world.log.late_submissions == 0


class Trouble(group.Trouble):
    """The faults of `test_world`, and stalls, which are the most frequent."""

    def plan(self, events: int) -> None:
        for _ in range(self.random.randint(1, 12)):
            self.world.at(self.random.uniform(0.2, 5.0), self.stall)
        super().plan(events)

    def stall(self) -> None:
        for worker in self.some():
            worker.stall(self.random.choice((0.05, 0.3, 1.0, 3.0)))


def history(seed: int, kind: str) -> tuple[World, Book]:
    random = Random(seed)
    world, book = build(
        seed,
        kind,
        workers=random.randint(2, 5),
        skips=random.choice((0.0, 0.0, 0.02)),
        slow_restore=random.choice((0.0, 0.0, 0.2)),
        declines=random.choice((0.0, 0.0, 0.3)),
        behind_nat=random.choice((0.0, 0.0, 0.5)),
    )
    Trouble(world, random).plan(random.choice((0, 0, 1, 3)))
    world.run(900.0)
    for worker in world.alive:
        worker.wake()
    return world, book


def test_guarantees_hold_with_stalls(seeds: Seeds) -> None:
    """Histories over all exchanges; every case of an absence occurs in some of them."""
    kinds = group.KINDS + group.OTHER_KINDS
    totals: Counter[str] = Counter()
    for seed in seeds(400, always=COVERING, drawn=8):
        world, book = history(seed, kinds[seed % len(kinds)])
        group.check(world, book, SAMPLES)
        totals.update(
            absences=len(world.log.absences),
            late=world.log.late_submissions,
            declined=world.log.declined,
            aborted=sum(round_id.attempt > 0 for _, round_id in world.log.absences),
            skipped=sum(round_id in world.log.skipped for _, round_id in world.log.absences),
        )
    print(dict(totals))
    if not seeds.is_replay:
        assert all(totals[name] for name in ("absences", "late", "declined", "aborted", "skipped")), totals


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(862, id="a member whose received state is lost stops instead of waiting"),
        pytest.param(4633, id="a leaver is killed when its residual is accepted, and comes back"),
    ],
)
def test_guarantees_hold_when_all_members_restart(seed: int) -> None:
    kinds = group.KINDS + group.OTHER_KINDS
    world, book = history(seed, kinds[seed % len(kinds)])
    group.check(world, book, SAMPLES)
