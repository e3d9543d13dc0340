"""Faults of simulated groups: of members, connections and the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

from simulation.world import COORDINATOR, World


class Faults:
    """Faults of one history, drawn from `random`; subclasses plan when they happen, and add others.

    Attributes:
        most: with so many workers alive none joins.
    """

    coordinator_freezes_s: tuple[float, ...] = (0.2, 1.0, 3.0, 8.0)
    most = 7

    def __init__(self, world: World, random: Random) -> None:
        self.world: Any = world
        self.random = random

    @property
    def members(self) -> list[Any]:
        return [worker for worker in self.world.alive if worker.core.is_synced]

    def some(self, count: int = 1) -> list[Any]:
        """`count` members, or none if there are fewer."""
        members = self.members
        return self.random.sample(members, count) if len(members) >= count else []

    def plan_some(self, faults: Sequence[Callable[[Any], None]], events: int) -> None:
        """Plan `events` of these faults at random times; a run without faults ends within two seconds."""
        within_s = self.random.choice((0.6, 1.5, 4.0))
        for _ in range(events):
            fault = self.random.choice(faults)
            self.world.at(0.35 + self.random.uniform(0.0, within_s), partial(fault, self))

    def kill(self, peer: bytes) -> None:
        self.world.crash(peer)

    def join(self) -> None:
        if len(self.world.alive) < self.most:
            self.world.join()

    def crash(self) -> None:
        for worker in self.some():
            self.kill(worker.peer)

    def crash_stage(self) -> None:
        """All replicas of one stage."""
        for worker in self.some():
            assignment = worker.core.rank_assignment
            for other in self.members if assignment is not None else []:
                others = other.core.rank_assignment
                if others is not None and others.stage == assignment.stage:
                    self.kill(other.peer)

    def break_edge(self) -> None:
        if pair := self.some(2):
            self.world.break_edge(pair[0].peer, pair[1].peer, self.random.choice((0.001, 0.02, 0.6)))

    def break_coordinator(self) -> None:
        for worker in self.some():
            self.world.break_edge(worker.peer, COORDINATOR, self.random.choice((0.01, 0.3, 1.5, 4.0)))

    def break_all_coordinator(self) -> None:
        for worker in self.world.alive:
            self.world.break_edge(worker.peer, COORDINATOR, self.random.uniform(0.5, 3.0))

    def block_link(self) -> None:
        if pair := self.some(2):
            self.world.block_link(pair[0].peer, pair[1].peer, self.random.choice((1.0, 30.0)))

    def partition(self) -> None:
        peers = sorted(worker.peer for worker in self.world.alive)
        side = {peer for peer in peers if self.random.random() < 0.5}
        if self.random.random() < 0.2:
            side = {COORDINATOR, *peers} - side
        one_way = self.random.random() < 0.3
        self.world.partition(side, self.random.choice((0.3, 1.5, 5.0)), one_way=one_way)

    def deafen(self) -> None:
        """A member receives nothing from the others, which receive what it sends."""
        for worker in self.some():
            others = {other.peer for other in self.world.alive if other is not worker}
            others |= {COORDINATOR} if self.random.random() < 0.5 else set()
            for_s = self.random.choice((0.3, 1.0, 3.0))
            self.world.partition(others, for_s, one_way=True, rest={worker.peer})

    def freeze(self) -> None:
        for worker in self.some():
            worker.freeze(self.random.choice((0.1, 1.9, 3.0)))

    def freeze_coordinator(self) -> None:
        self.world.freeze_coordinator(self.random.choice(self.coordinator_freezes_s))

    def restart(self) -> None:
        self.world.crash_coordinator(self.random.uniform(0.05, 1.5))

    def restart_and_crash(self) -> None:
        """A member fails while the coordinator is down and cannot plan without it."""
        self.world.crash_coordinator(self.random.uniform(0.3, 2.0))
        self.crash()

    def restart_from_backup(self) -> None:
        self.world.crash_coordinator(self.random.uniform(0.05, 1.5), lose_disk=True)

    def back_up(self) -> None:
        self.world.back_up()

    def take_over(self) -> None:
        """A standby takes over, and the old coordinator goes on; some workers reconnect to the old one."""
        self.world.fail_over_coordinator()
        for worker in self.world.alive:
            if self.random.random() < 0.4:
                for_s = self.random.uniform(0.1, 2.0)
                self.after(3.0, partial(self.world.connect_to_stale_coordinator, worker.peer, for_s))

    def flip(self) -> None:
        for worker in self.some():
            worker.flip_next = True

    def lose_decision(self) -> None:
        self.world.lose_next_decision()

    def miss_generation(self) -> None:
        """A member is away for as long as a generation takes to form; its decision is lost, or not."""
        for worker in self.some():
            away_s = self.random.uniform(1.2, 2.5)
            self.world.slow_next_restore = True
            if self.random.random() < 0.7:
                self.world.lose_next_decision(worker.peer, away_s)
            else:
                self.world.break_edge(worker.peer, COORDINATOR, away_s)
            self.join()

    def after(self, within_s: float, action: Any) -> None:
        self.world.at(self.world.now_s + self.random.uniform(0.05, within_s), action)
