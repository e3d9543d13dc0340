"""The real collectives over the links of a network, with a byte count as payload.

The planner simulates messages that are listed beforehand (`core.planning.message_schedule`).  Here the
collectives send them as they run, so that tests can compare the two.

    core.start --> SendTo --> links --> payload --> core.handle --> SendTo, work ...
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gridtrain.core.collectives.allgather import AllGather
from gridtrain.core.collectives.butterfly import ButterflyExchange
from gridtrain.core.collectives.collective import (
    AddSlice,
    Collective,
    CollectiveComplete,
    CollectiveEffect,
    MergePayload,
    ReplacePayload,
    SendTo,
    StoreFromRank,
    StoreSlice,
)
from gridtrain.core.collectives.direct import DirectAllReduce
from gridtrain.core.collectives.ring import RingAllReduce
from gridtrain.core.collectives.star import DenseStar, SparseStar
from gridtrain.core.collectives.tree import TreeExchange
from gridtrain.core.messages import PayloadSlot
from gridtrain.core.planning.message_schedule import ReceiveWork
from gridtrain.core.planning.network_model import LinkOccupancy, NetworkModel
from gridtrain.core.planning.workload import HEADER_BYTES, Workload, slice_count

WorkTime = Callable[[ReceiveWork], float]  # seconds of a receiver for one payload


def make_cores(load: Workload, world_size: int) -> list[Collective]:
    """The collective of such a load, one for each rank."""
    slices, ranks = slice_count(load, world_size), range(world_size)
    match load.kind.topology:
        case "ring":
            return [RingAllReduce(rank, world_size, slices, 0) for rank in ranks]
        case "direct":
            return [DirectAllReduce(rank, world_size, slices, 0) for rank in ranks]
        case "all-gather":
            return [AllGather(rank, world_size, 0) for rank in ranks]
        case "butterfly":
            return [ButterflyExchange(rank, world_size, 0) for rank in ranks]
        case "tree":
            return [TreeExchange(rank, world_size, 0) for rank in ranks]
        case "star" if load.kind.is_sparse:
            return [SparseStar(rank, world_size, 0) for rank in ranks]
        case "star":
            return [DenseStar(rank, world_size, slices, 0) for rank in ranks]


Arrival = tuple[int, PayloadSlot, int]
"""A payload on its way: its sender's rank, its slot and its flags."""


@dataclass(slots=True)
class CollectiveSimulation:
    """One exchange in virtual time.

    Attributes:
        cores: one for each rank.
        payload_bytes: of one message.
        work: seconds of a receiver for one payload, by kind of work.
        sent: (sender, receiver) of all messages so far, in the order in which they were ready.
        complete_s: by rank, when it had everything; (P,) once it has run.
    """

    cores: Sequence[Collective]
    network: NetworkModel
    payload_bytes: float
    work: WorkTime = lambda work: 0.0
    sent: list[tuple[int, int]] = field(default_factory=list)
    complete_s: dict[int, float] = field(default_factory=dict)
    _agenda: list[tuple[float, int, int, Arrival, float | None]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)
    _free_s: dict[int, float] = field(default_factory=dict)
    _traffic: LinkOccupancy = field(init=False)

    def run(self) -> list[float]:
        """(P,) seconds from the start until each rank has everything."""
        self._traffic = LinkOccupancy(self.network)
        for rank, core in enumerate(self.cores):
            self._execute(rank, core.start(), 0.0)
        while self._agenda:
            now_s, _, rank, event, not_before_s = heapq.heappop(self._agenda)
            if not_before_s is not None:  # its first byte has arrived
                arrived_s = self._traffic.arrive(rank, self.payload_bytes, now_s, not_before_s)
                self._schedule(arrived_s, rank, event, None)
            else:
                self._execute(rank, self.cores[rank].handle(*event, None), now_s)
        return [self.complete_s[rank] for rank in range(len(self.cores))]

    def _execute(self, rank: int, effects: Sequence[CollectiveEffect], now_s: float) -> None:
        now_s = max(now_s, self._free_s.get(rank, 0.0))
        for effect in effects:
            match effect:
                case SendTo(to_rank, slot, flags):
                    self.sent.append((rank, to_rank))
                    reached_s, last_s = self._traffic.depart(rank, to_rank, self.payload_bytes, now_s)
                    self._schedule(reached_s, to_rank, (rank, slot, flags), last_s)
                case CollectiveComplete():
                    self.complete_s[rank] = now_s
                case AddSlice():
                    now_s += self.work(ReceiveWork.ADD)
                case StoreSlice():
                    now_s += self.work(ReceiveWork.STORE)
                case StoreFromRank():
                    now_s += self.work(
                        ReceiveWork.POOL if isinstance(self.cores[rank], SparseStar) else ReceiveWork.KEEP
                    )
                case MergePayload():
                    now_s += self.work(ReceiveWork.MERGE)
                case ReplacePayload():
                    now_s += self.work(ReceiveWork.ADOPT)
        self._free_s[rank] = now_s

    def _schedule(self, at_s: float, rank: int, event: Arrival, not_before_s: float | None) -> None:
        heapq.heappush(self._agenda, (at_s, next(self._order), rank, event, not_before_s))


def simulate_exchange(
    load: Workload, network: NetworkModel, work: WorkTime = lambda work: 0.0
) -> CollectiveSimulation:
    """Run the collectives of `load` over `network` to the end, without the vote and the work before and
    after."""
    size = network.size
    segments = size if load.kind.topology in ("ring", "direct") else 1
    parts = segments * slice_count(load, size)
    exchange = CollectiveSimulation(
        make_cores(load, size), network, load.unit_bytes / parts + HEADER_BYTES, work
    )
    exchange.run()
    return exchange
