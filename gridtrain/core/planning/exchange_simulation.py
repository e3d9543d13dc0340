"""Simulates the messages of one exchange on a network's links and the members' CPUs, event by event.

    ready --> [sender's CPU] --> links --latency--> [download] --> [receiver's CPU: work] --> handled

A message is ready once its sender has handled all messages that it needs (`PlannedMessage.needs`).  A
member's CPU does one thing at a time, while its links transfer data.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from gridtrain.core.planning.message_schedule import PlannedMessage, ReceiveWork
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


class CpuOccupancy:
    """Tracks when each member's CPU, which does one thing at a time, is free."""

    def __init__(self, size: int) -> None:
        self._free_s = [0.0] * size

    def reserve(self, rank: int, ready_s: float, seconds: float) -> float:
        """Queue work that can begin at `ready_s` for the CPU of `rank`; return the time when it is done."""
        end_s = self._free_s[rank] = max(ready_s, self._free_s[rank]) + seconds
        return end_s


def vote_end_s(ends_s: Sequence[float], network: NetworkModel, cpu: CpuCosts, cpus: CpuOccupancy) -> float:
    """Return the time at which the last member has handled the result of the vote after an exchange.

    All members send their votes to the root (rank 0), which handles them one by one and then sends the
    decision to the members one by one.

    Args:
        ends_s: by rank, the time at which the member has the complete update.
    """
    work, others = cpus.reserve, range(1, network.size)
    votes_s = []
    for rank in others:
        out_s = work(rank, ends_s[rank], cpu.message_s)
        votes_s.append(out_s + network.link(rank, 0).alpha_s + cpu.wake_s)
    decided_s = max([ends_s[0], *(work(0, arrived_s, cpu.message_s) for arrived_s in sorted(votes_s))])
    decisions = []
    for rank in others:
        out_s = work(0, decided_s, cpu.message_s)
        decisions.append((out_s + network.link(0, rank).alpha_s + cpu.wake_s, rank))
    known_s = [
        work(rank, arrived_s, cpu.message_s + cpu.begin_s / 2) for arrived_s, rank in sorted(decisions)
    ]
    return max([work(0, decided_s, cpu.begin_s / 2), *known_s])


_DEPART, _REACH, _ARRIVE = range(3)


class MessageCost(NamedTuple):
    """The cost of a message, which is the same for all messages with the same size and `work`.

    Attributes:
        wire_bytes: size of the message, including headers.
        handling_s: CPU time at each end, for writing or reading the message.
        work_s: CPU time of the receiver for processing the contents of the message.
    """

    wire_bytes: float
    handling_s: float
    work_s: float


class ExchangeSimulation:
    """Simulates all messages of one exchange in chronological order, and then the vote.

    Attributes:
        sent_bytes, received_bytes: bytes sent and received by each member, by rank; complete after `run`.
        cpu_s: CPU time of each member in seconds, by rank; complete after `run`.
    """

    def __init__(
        self, messages: Sequence[PlannedMessage], load: Workload, network: NetworkModel, cpu: CpuCosts
    ) -> None:
        self.messages, self.load, self.network, self.cpu = messages, load, network, cpu
        self._cpus = CpuOccupancy(network.size)
        self.sent_bytes, self.received_bytes = [0.0] * network.size, [0.0] * network.size
        self.cpu_s = [start_work_s(load, cpu) + cpu.begin_s] * network.size
        self._events: list[tuple[float, int, int, float]] = []
        # For each message: the number of `needs` not handled yet, and the same for `after_messages`.
        self._pending_needs = [len(message.needs) for message in messages]
        self._pending_predecessors = [len(message.after_messages) for message in messages]
        self._dependents: list[list[int]] = [[] for _ in messages]
        self._successors: list[list[int]] = [[] for _ in messages]
        self._arrived_s: dict[int, float] = {}
        self._costs: dict[tuple[int, float, ReceiveWork], MessageCost] = {}
        for index, message in enumerate(self.messages):
            for need in message.needs:
                self._dependents[need].append(index)
            for first in message.after_messages:
                self._successors[first].append(index)

    def run(self) -> list[float]:
        """Simulate the exchange; return, by rank, the seconds until the member has the update's digest."""
        size = self.network.size
        start_s = start_work_s(self.load, self.cpu) + self.cpu.begin_s / 2
        begin_s = [self._cpus.reserve(rank, 0.0, start_s) for rank in range(size)]
        self._ends_s = list(begin_s)
        traffic = LinkOccupancy(self.network)
        for index, message in enumerate(self.messages):
            if not message.needs:
                self._queue_to_send(index, begin_s[message.src])
        while self._events:
            now_s, key, event, until_s = heapq.heappop(self._events)
            index = abs(key)
            message = self.messages[index]
            if event == _DEPART:
                if (turn_s := traffic.earliest_departure_s(message.src, message.dst)) > now_s:
                    heapq.heappush(self._events, (turn_s, index, _DEPART, 0.0))
                    continue
                cost = self._cost_of(message)
                reached_s, last_s = traffic.depart(message.src, message.dst, cost.wire_bytes, now_s)
                self._count_bytes(message, cost)
                # Two messages that share a download end together: of these the message with the lower index,
                # which is needed sooner, comes second.
                heapq.heappush(self._events, (reached_s, -index, _REACH, last_s))
            elif event == _REACH:
                arrived_s = traffic.arrive(message.dst, self._cost_of(message).wire_bytes, now_s, until_s)
                heapq.heappush(self._events, (arrived_s + self.cpu.wake_s, index, _ARRIVE, 0.0))
            else:
                self._arrive(index, now_s)
        end_s, overlapped_s = (work(self.load, size, self.cpu) for work in (end_work_s, overlapped_work_s))
        self.cpu_s = [spent_s + end_s + overlapped_s for spent_s in self.cpu_s]
        last_s = self.last_work_s()
        return [self._cpus.reserve(rank, ready_s, last_s) for rank, ready_s in enumerate(self._ends_s)]

    def last_work_s(self) -> float:
        """Return the CPU time of each member's work after it has handled its last message."""
        return end_work_s(self.load, self.network.size, self.cpu)

    def run_vote(self, ends_s: Sequence[float]) -> float:
        """Simulate the vote after `run`; return the time at which it ends (`vote_end_s`)."""
        message_s = self.cpu.message_s
        self.cpu_s = [spent_s + 2 * message_s for spent_s in self.cpu_s]
        self.cpu_s[0] += 2 * (self.network.size - 2) * message_s
        return vote_end_s(ends_s, self.network, self.cpu, self._cpus)

    def _queue_to_send(self, index: int, now_s: float) -> None:
        """Reserve the sender's CPU for sending the message, ahead of arrived messages not yet handled."""
        message = self.messages[index]
        out_s = self._cpus.reserve(message.src, now_s, message.count * self.cpu.message_s)
        heapq.heappush(self._events, (out_s, index, _DEPART, 0.0))

    def _cost_of(self, message: PlannedMessage) -> MessageCost:
        """Return the message's cost, computed once for all messages with the same size and `work`."""
        key = message.count, message.fraction, message.work
        if key not in self._costs:
            load, cpu = self.load, self.cpu
            nbytes = message.count * (load.payload_bytes(message.fraction) + HEADER_BYTES)
            handling_s = message.count * cpu.message_s + nbytes * cpu_s_per_byte(load, cpu)
            work_s = message.count * receive_work_s(message.work, load, message.fraction, cpu)
            self._costs[key] = MessageCost(nbytes, handling_s, work_s)
        return self._costs[key]

    def _count_bytes(self, message: PlannedMessage, cost: MessageCost) -> None:
        self.sent_bytes[message.src] += cost.wire_bytes
        self.received_bytes[message.dst] += cost.wire_bytes
        self.cpu_s[message.src] += cost.handling_s
        self.cpu_s[message.dst] += cost.handling_s

    def _arrive(self, index: int, now_s: float) -> None:
        """Handle a message that has arrived, and then the messages that waited for it.

        The arrival of a message whose `after_messages` have not all been handled is only recorded.
        """
        self._arrived_s[index] = now_s
        ready = [index] if self._pending_predecessors[index] == 0 else []
        while ready:
            done = ready.pop()
            message = self.messages[done]
            work_s = self._cost_of(message).work_s
            handled_s = work_s + message.count * self.cpu.message_s
            end_s = self._cpus.reserve(message.dst, max(now_s, self._arrived_s[done]), handled_s)
            self.cpu_s[message.dst] += work_s
            self._ends_s[message.dst] = max(self._ends_s[message.dst], end_s)
            for dependent in self._dependents[done]:
                self._pending_needs[dependent] -= 1
                if self._pending_needs[dependent] == 0:
                    self._queue_to_send(dependent, end_s)
            for successor in self._successors[done]:
                self._pending_predecessors[successor] -= 1
                if self._pending_predecessors[successor] == 0 and successor in self._arrived_s:
                    ready.append(successor)
