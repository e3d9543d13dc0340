"""The real cores over the lines of a network, a payload being a byte count.

Decides nothing: the cores of `protocol` say who sends what to whom, `protocol.lines` says when it is there.
The planner walks moves that were written down beforehand (`protocol.moves`); here they come out of the cores
as they run, so the two can be held against one another.

    core.start --> SendTo --> lines --> Arrived --> core.handle --> SendTo, work ...
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gridtrain.protocol.allgather import AllGather
from gridtrain.protocol.collective import (
    AddSlice,
    Adopt,
    Arrived,
    Collective,
    CollectiveEffect,
    Complete,
    MergeIn,
    SendTo,
    StoreOf,
    StoreSlice,
)
from gridtrain.protocol.direct import Direct
from gridtrain.protocol.gtopk import Butterfly
from gridtrain.protocol.lines import Network, Traffic
from gridtrain.protocol.loads import HEADER_BYTES, Kind, Load, slices_of
from gridtrain.protocol.moves import Work
from gridtrain.protocol.ring import Ring
from gridtrain.protocol.star import DenseStar, SparseStar
from gridtrain.protocol.tree import Tree

WorkTime = Callable[[Work], float]  # seconds of a receiver for one payload


def cores_of(load: Load, world_size: int) -> list[Collective]:
    """The collective that runs such a load, one for each rank."""
    match load.kind:
        case Kind.DENSE:
            slices = slices_of(load, world_size)
            return [Ring(rank, world_size, slices, False) for rank in range(world_size)]
        case Kind.DIRECT:
            slices = slices_of(load, world_size)
            return [Direct(rank, world_size, slices, False) for rank in range(world_size)]
        case Kind.TOPK:
            return [AllGather(rank, world_size, False) for rank in range(world_size)]
        case Kind.GTOPK:
            return [Butterfly(rank, world_size, False) for rank in range(world_size)]
        case Kind.TREE:
            return [Tree(rank, world_size, False) for rank in range(world_size)]
        case Kind.STAR:
            slices = slices_of(load, world_size)
            return [DenseStar(rank, world_size, slices, False) for rank in range(world_size)]
        case Kind.STAR_GTOPK:
            return [SparseStar(rank, world_size, False) for rank in range(world_size)]


@dataclass(slots=True)
class Exchange:
    """One exchange in virtual time.

    Attributes:
        cores: one for each rank.
        payload_bytes: of one message.
        work: seconds that a receiver takes for one payload, by what it does with it.
        sent: (sender, receiver) of all messages so far, in the order in which they were ready.
        complete_s: when each rank had everything; (P,) once it has run.
    """

    cores: Sequence[Collective]
    network: Network
    payload_bytes: float
    work: WorkTime = lambda work: 0.0
    sent: list[tuple[int, int]] = field(default_factory=list)
    complete_s: dict[int, float] = field(default_factory=dict)
    _agenda: list[tuple[float, int, int, Arrived, float | None]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)
    _free_s: dict[int, float] = field(default_factory=dict)
    _traffic: Traffic = field(init=False)

    def run(self) -> list[float]:
        """When each rank had everything, in seconds after all began."""
        self._traffic = Traffic(self.network)
        for rank, core in enumerate(self.cores):
            self._carry_out(rank, core.start(0.0), 0.0)
        while self._agenda:
            now_s, _, rank, event, not_before_s = heapq.heappop(self._agenda)
            if not_before_s is not None:  # its first byte is there
                there_s = self._traffic.reach(rank, self.payload_bytes, now_s, not_before_s)
                self._schedule(there_s, rank, event, None)
            else:
                self._carry_out(rank, self.cores[rank].handle(event, now_s), now_s)
        return [self.complete_s[rank] for rank in range(len(self.cores))]

    def _carry_out(self, rank: int, effects: Sequence[CollectiveEffect], now_s: float) -> None:
        now_s = max(now_s, self._free_s.get(rank, 0.0))
        for effect in effects:
            match effect:
                case SendTo(to_rank, place, skip):
                    self.sent.append((rank, to_rank))
                    reached_s, last_s = self._traffic.leave(rank, to_rank, self.payload_bytes, now_s)
                    self._schedule(reached_s, to_rank, Arrived(rank, place, skip, None), last_s)
                case Complete():
                    self.complete_s[rank] = now_s
                case AddSlice():
                    now_s += self.work(Work.ADD)
                case StoreSlice():
                    now_s += self.work(Work.STORE)
                case StoreOf():
                    now_s += self.work(Work.POOL if isinstance(self.cores[rank], SparseStar) else Work.KEEP)
                case MergeIn():
                    now_s += self.work(Work.MERGE)
                case Adopt():
                    now_s += self.work(Work.ADOPT)
        self._free_s[rank] = now_s

    def _schedule(self, at_s: float, rank: int, event: Arrived, not_before_s: float | None) -> None:
        heapq.heappush(self._agenda, (at_s, next(self._order), rank, event, not_before_s))


def simulate(load: Load, network: Network, work: WorkTime = lambda work: 0.0) -> Exchange:
    """Run the real cores of `load` over `network` to the end; no vote, no work before or after."""
    size = network.size
    slices = slices_of(load, size)
    parts = {Kind.DENSE: size * slices, Kind.DIRECT: size * slices, Kind.STAR: slices}.get(load.kind, 1)
    exchange = Exchange(cores_of(load, size), network, load.unit_bytes / parts + HEADER_BYTES, work)
    exchange.run()
    return exchange
