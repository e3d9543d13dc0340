"""`exchange="auto"` on the virtual network: the coordinator chooses, and later changes the choice; no
gradient is lost.

The workers compute slowly and fast in turns, so that dense and sparse exchanges follow each other.  The
checks are those of `test_world`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from random import Random
from typing import Any

from exchange_buffers import NEIGHBOURS

from gridtrain.core import messages as m
from gridtrain.core.planning.batch_shares import SAMPLES_FIGURE, SECONDS_FIGURE
from gridtrain.core.planning.exchange_choice import FIRST_STEP_FIGURE
from simulation import test_world as group
from simulation.toy_trainer import AUTO, CHOICES, PARAMETERS
from simulation.world import SimWorker, World

Seeds = Callable[[int], Iterator[int]]

EDGES = {description: NEIGHBOURS[kind] for description, kind in CHOICES.items()}
DENSE_KINDS = ("dense", "direct")
RATE_Bps = 12.5e6
SLOW_S, FAST_S = (
    3.0,
    0.001,
)  # computing a sample: a dense exchange is short against the one, long against the other


class Trainer(group.ToyTrainer):
    """Exchanges as its rank assignment says; a dense step sends the residual, as `AutoExchanger` does."""

    used: dict[m.RoundId, str]

    def prepare(self, round_id: m.RoundId, assignment: Any, spans: Sequence[m.Span], skip: bool) -> Any:
        assert assignment.exchange, "a round began before its exchange was chosen"
        assert self.used.setdefault(round_id, assignment.exchange) == assignment.exchange
        return super().prepare(round_id, assignment, spans, skip)


class AutoWorld(World):
    """Workers compute slowly or fast for `turn_s` seconds each; all links are equal."""

    turn_s, slow_first = 1.0, True

    def pace_s(self) -> float:
        return SLOW_S if (int(self.now_s / self.turn_s) % 2 == 0) == self.slow_first else FAST_S

    def figures(self, worker: SimWorker) -> tuple[tuple[str, float], ...]:
        if not worker.has_computed:
            return ()
        pace_s = self.pace_s()
        return (FIRST_STEP_FIGURE, 3 * pace_s), (SAMPLES_FIGURE, 100.0), (SECONDS_FIGURE, 100 * pace_s)

    def rates_Bps(self, peer: m.PeerId, others: Sequence[m.PeerId]) -> Any:
        return tuple((other, RATE_Bps, RATE_Bps) for other in others)


def build(seed: int, workers: int, **more: Any) -> tuple[AutoWorld, Any, dict[m.RoundId, str]]:
    book: Any = defaultdict(list)
    used: dict[m.RoundId, str] = {}
    facts = (("model", f"{PARAMETERS} parameters in 4 tensors"), ("exchange", AUTO.describe()))
    can_catch_up = Random(seed).random() < 0.5
    setup = m.Setup(facts, m.LedgerSpec(group.SAMPLES, 1, epochs=2), 3, None, can_catch_up=can_catch_up)
    min_workers = more.pop("min_workers", 1)

    def made() -> Trainer:
        trainer = Trainer("dense", book)
        trainer.used = used
        return trainer

    world = AutoWorld(
        seed,
        made,
        NEIGHBOURS["dense"],
        setup,
        min_workers=min_workers,
        choices=EDGES,
        reshare_s=0.4,
        checkpoint_every=5,
        **{"compute_s": (0.05, 0.2), **more},
    )
    for _ in range(workers):
        world.join()
    return world, book, used


def switches(world: World, used: dict[m.RoundId, str]) -> Counter[tuple[str, str]]:
    """Counts of (previous, next) exchange over the committed steps."""
    committed = sorted({round_id for _, round_id, _ in world.log.commits}, key=lambda r: (r.step, r.term))
    names = [CHOICES[used[round_id]] for round_id in committed if round_id in used]
    return Counter((a, b) for a, b in pairwise(names) if a != b)


def test_a_slow_first_batch_makes_dense_and_faster_ones_sparse() -> None:
    world, book, used = build(1, workers=4, min_workers=4)
    world.turn_s = 2.5
    world.run(60.0)
    group.check(world, book)
    first = min(used)
    assert CHOICES[used[first]] in DENSE_KINDS
    assert any(a in DENSE_KINDS and b not in DENSE_KINDS for a, b in switches(world, used))
    status = world.coordinator.status(world.now_s)
    assert status["facts"]["exchange"] in EDGES
    assert " computing; " in status["exchange_reason"]


def test_nothing_is_chosen_before_all_have_computed() -> None:
    world, _, used = build(2, workers=3, min_workers=3)
    while not any(worker.has_computed for worker in world.alive):
        world.run(world.now_s + 0.01)
    assert not used and world.coordinator.status(0.0)["exchange_reason"] == "not chosen yet"
    world.run(world.now_s + 5.0)
    assert used


def troubled(seed: int) -> tuple[AutoWorld, Any, dict[m.RoundId, str]]:
    """A history with faults, run to its end."""
    random = Random(seed)
    world, book, used = build(seed, workers=random.randint(1, 5))
    world.turn_s, world.slow_first = random.choice((0.5, 1.0, 2.0)), random.random() < 0.5
    group.Trouble(world, random).plan(events=random.randint(0, 6))
    world.run(900.0)
    return world, book, used


def test_a_process_that_receives_its_predecessors_view_still_reports_its_checkpoint() -> None:
    """Seed 203: a frozen coordinator answers the Join of a process that has died since, and its
    MembershipView reaches the next process.  The run starts over from the checkpoint of this one."""
    world, book, _ = troubled(203)
    group.check(world, book)
    assert world.finished and world.log.restarted_processes == 1 and world.log.rollbacks == 1


def test_guarantees_hold_while_the_exchange_changes(seeds: Seeds) -> None:
    totals: Counter[tuple[str, str]] = Counter()
    count = 0
    for seed in seeds(16):
        world, book, used = troubled(seed)
        group.check(world, book)
        totals += switches(world, used)
        count += 1
    print(f"\n{count} histories; exchanges that followed each other: {dict(totals)}")
    if count >= 16:
        assert any(a in DENSE_KINDS and b not in DENSE_KINDS for a, b in totals)
        assert any(a not in DENSE_KINDS and b in DENSE_KINDS for a, b in totals)
        assert any("direct" in pair for pair in totals)
