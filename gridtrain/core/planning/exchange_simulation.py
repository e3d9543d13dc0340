"""One exchange in virtual time: each move over the lines of a network, in the order of events.

Decides when each message leaves, reaches its receiver, is there, and is dealt with.  Never chooses anything.

    needs dealt with --> [sender's turn] --> lines --alpha--> [download] --> [receiver's turn: work] --> more

A member works on one thing at a time; its lines go on beside it.  With `host_cores` all members stand on one
machine and share so many cores, as in the lab.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from gridtrain.core.planning.message_schedule import PlannedMessage
from gridtrain.core.planning.network_model import LinkOccupancy, NetworkModel
from gridtrain.core.planning.workload import (
    HEADER_BYTES,
    CpuCosts,
    Workload,
    cpu_s_per_byte,
    end_work_s,
    overlapped_work_s,
    receive_work_s,
    start_work_s,
)


class _CpuOccupancy:
    """Who computes when: each member one thing at a time, all together on no more cores than there are."""

    def __init__(self, size: int, host_cores: int | None) -> None:
        self._free_s = [0.0] * size
        self._cores_s = [0.0] * host_cores if host_cores else None

    def reserve(self, rank: int, ready_s: float, seconds: float) -> float:
        """When it is done."""
        start_s = max(ready_s, self._free_s[rank])
        if self._cores_s is not None and seconds > 0:
            start_s = max(start_s, heapq.heappop(self._cores_s))
        end_s = self._free_s[rank] = start_s + seconds
        if self._cores_s is not None and seconds > 0:
            heapq.heappush(self._cores_s, end_s)
        return end_s


_LEAVE, _REACH, _ARRIVE = range(3)


@dataclass(slots=True)
class ExchangeSimulation:
    """All moves of one exchange in the order of time; the vote is not among them."""

    messages: Sequence[PlannedMessage]
    load: Workload
    network: NetworkModel
    cpu: CpuCosts
    host_cores: int | None = None
    sent_bytes: list[float] = field(init=False)
    received_bytes: list[float] = field(init=False)
    cpu_s: list[float] = field(init=False)
    _events: list[tuple[float, int, int, float]] = field(default_factory=list)
    _pending_needs: list[int] = field(init=False)  # needs of each move that are still to come
    _pending_predecessors: list[int] = field(init=False)  # moves that its receiver deals with first
    _dependents: list[list[int]] = field(init=False)
    _successors: list[list[int]] = field(init=False)
    _arrived_s: dict[int, float] = field(default_factory=dict)
    _ends_s: list[float] = field(init=False)
    _workers: _CpuOccupancy = field(init=False)

    def __post_init__(self) -> None:
        size = self.network.size
        self._workers = _CpuOccupancy(size, self.host_cores)
        self.sent_bytes, self.received_bytes = [0.0] * size, [0.0] * size
        self.cpu_s = [start_work_s(self.load, self.cpu) + self.cpu.begin_s] * size
        self._pending_needs = [len(move.needs) for move in self.messages]
        self._pending_predecessors = [len(move.after_messages) for move in self.messages]
        self._dependents = [[] for _ in self.messages]
        self._successors = [[] for _ in self.messages]
        for index, move in enumerate(self.messages):
            for need in move.needs:
                self._dependents[need].append(index)
            for first in move.after_messages:
                self._successors[first].append(index)

    def run(self) -> list[float]:
        """When each member has everything, and the digest of it; in seconds from the start."""
        size = self.network.size
        start_s = start_work_s(self.load, self.cpu) + self.cpu.begin_s / 2
        begin_s = [self._workers.reserve(rank, 0.0, start_s) for rank in range(size)]
        self._ends_s = list(begin_s)
        traffic = LinkOccupancy(self.network)
        for index, move in enumerate(self.messages):
            if not move.needs:
                self._ready(index, begin_s[move.src])
        while self._events:
            now_s, key, stage, until_s = heapq.heappop(self._events)
            index = abs(key)
            move = self.messages[index]
            if stage == _LEAVE:
                if (turn_s := traffic.earliest_departure_s(move.src, move.dst)) > now_s:
                    heapq.heappush(self._events, (turn_s, index, _LEAVE, 0.0))
                    continue
                reached_s, last_s = traffic.depart(move.src, move.dst, self._wire_bytes(move), now_s)
                self._count_bytes(move)
                # Two that share a download end together: at a tie the one that is needed sooner comes second.
                heapq.heappush(self._events, (reached_s, -index, _REACH, last_s))
            elif stage == _REACH:
                there_s = traffic.arrive(move.dst, self._wire_bytes(move), now_s, until_s) + self.cpu.wake_s
                heapq.heappush(self._events, (there_s, index, _ARRIVE, 0.0))
            else:
                self._arrive(index, now_s)
        end_s = end_work_s(self.load, size, self.cpu)
        ahead_s = overlapped_work_s(self.load, size, self.cpu)
        self.cpu_s = [spent_s + end_s + ahead_s for spent_s in self.cpu_s]
        if self.host_cores is not None:
            end_s += ahead_s  # on cores that all members share there is no idle moment for it
        return [self._workers.reserve(rank, ready_s, end_s) for rank, ready_s in enumerate(self._ends_s)]

    def finish_vote_s(self, ends_s: Sequence[float]) -> float:
        """After `run`: all tell the root (rank 0) that they are prepared, and it tells all what is decided.

        It deals with one vote after the other, and sends one decision after the other.  Returns when the last
        member knows.
        """
        size, cpu, work = self.network.size, self.cpu, self._workers.reserve
        heard = []
        for rank in range(1, size):
            out_s = work(rank, ends_s[rank], cpu.message_s)
            heard.append(out_s + self.network.link(rank, 0).alpha_s + cpu.wake_s)
        decided_s = max([ends_s[0], *(work(0, there_s, cpu.message_s) for there_s in sorted(heard))])
        told = []
        for rank in range(1, size):
            out_s = work(0, decided_s, cpu.message_s)
            told.append((out_s + self.network.link(0, rank).alpha_s + cpu.wake_s, rank))
        self.cpu_s = [spent_s + 2 * cpu.message_s for spent_s in self.cpu_s]
        self.cpu_s[0] += 2 * (size - 2) * cpu.message_s
        known = [work(rank, there_s, cpu.message_s + cpu.begin_s / 2) for there_s, rank in sorted(told)]
        return max([work(0, decided_s, cpu.begin_s / 2), *known])

    def _ready(self, index: int, now_s: float) -> None:
        """Its sender takes its turn, before it deals with anything else that has come."""
        move = self.messages[index]
        out_s = self._workers.reserve(move.src, now_s, move.count * self.cpu.message_s)
        heapq.heappush(self._events, (out_s, index, _LEAVE, 0.0))

    def _wire_bytes(self, move: PlannedMessage) -> float:
        return move.count * (move.fraction * self.load.unit_bytes + HEADER_BYTES)

    def _handling_s(self, move: PlannedMessage) -> float:
        """Of the CPU, at each end."""
        return move.count * self.cpu.message_s + self._wire_bytes(move) * cpu_s_per_byte(self.load, self.cpu)

    def _count_bytes(self, move: PlannedMessage) -> None:
        self.sent_bytes[move.src] += self._wire_bytes(move)
        self.received_bytes[move.dst] += self._wire_bytes(move)
        self.cpu_s[move.src] += self._handling_s(move)
        self.cpu_s[move.dst] += self._handling_s(move)

    def _arrive(self, index: int, now_s: float) -> None:
        """It is dealt with, unless another one comes first; then whatever waited for it."""
        self._arrived_s[index] = now_s
        ready = [index] if self._pending_predecessors[index] == 0 else []
        while ready:
            done = ready.pop()
            move = self.messages[done]
            seconds = move.count * receive_work_s(move.work, self.load, move.fraction, self.cpu)
            handled_s = seconds + move.count * self.cpu.message_s
            end_s = self._workers.reserve(move.dst, max(now_s, self._arrived_s[done]), handled_s)
            self.cpu_s[move.dst] += seconds
            self._ends_s[move.dst] = max(self._ends_s[move.dst], end_s)
            for follower in self._dependents[done]:
                self._pending_needs[follower] -= 1
                if self._pending_needs[follower] == 0:
                    self._ready(follower, end_s)
            for successor in self._successors[done]:
                self._pending_predecessors[successor] -= 1
                if self._pending_predecessors[successor] == 0 and successor in self._arrived_s:
                    ready.append(successor)
