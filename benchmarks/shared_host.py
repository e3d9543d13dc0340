"""Predicts the cost of an exchange whose members all run on one machine, as in the lab.

The members share the machine's cores, on which they handle packets, encrypt and compute.  Packets slow down
all other work, so the prediction is repeated with slower CPUs until both agree.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import replace

from gridtrain.core.planning.cost_model import (
    MAX_CORE_SHARE,
    ExchangeCost,
    cpu_bounded_network,
    planned_messages,
    simulated_cost,
    slowest_Bps,
    with_packets,
)
from gridtrain.core.planning.exchange_simulation import CpuOccupancy, ExchangeSimulation
from gridtrain.core.planning.network_model import LinkModel, NetworkModel
from gridtrain.core.planning.workload import (
    MAX_MESSAGES,
    PACKET_BYTES,
    CpuCosts,
    Workload,
    cpu_s_per_byte,
    overlapped_work_s,
    start_work_s,
)

ROUNDS = 4
"""Number of repetitions with slower CPUs."""

HOST_LINK = "the host's cores"
"""The link that all members share: its rate is that at which all cores read, write and encrypt."""

SLOWED = (
    *("message_s", "wake_s", "begin_s", "add_byte_s", "store_byte_s", "hash_byte_s"),
    *("decode_entry_s", "merge_entry_s", "sum_entry_s", "round_element_s", "widen_element_s"),
)
"""The costs of work that handling packets slows down; selecting and encoding precede all packets."""


class SharedCores(CpuOccupancy):
    """Tracks when each member's CPU is free; all of them together use at most `cores` cores."""

    def __init__(self, size: int, cores: int) -> None:
        super().__init__(size)
        self._cores_s = [0.0] * cores

    def reserve(self, rank: int, ready_s: float, seconds: float) -> float:
        if seconds == 0:
            return super().reserve(rank, ready_s, seconds)
        end_s = super().reserve(rank, max(ready_s, heapq.heappop(self._cores_s)), seconds)
        heapq.heappush(self._cores_s, end_s)
        return end_s


class HostSimulation(ExchangeSimulation):
    """Simulates an exchange whose members share `cores` cores."""

    def __init__(self, load: Workload, network: NetworkModel, cpu: CpuCosts, cores: int) -> None:
        messages = planned_messages(load, network, MAX_MESSAGES)
        super().__init__(messages, load, host_bounded_network(load, network, cpu, cores), cpu)
        self._cpus = SharedCores(network.size, cores)

    def last_work_s(self) -> float:
        """Return the time including the work that overlaps on other machines: these cores are never idle."""
        return super().last_work_s() + overlapped_work_s(self.load, self.network.size, self.cpu)


def host_exchange_cost(
    load: Workload, network: NetworkModel, cpu: CpuCosts, cores: int, *, vote: bool = True
) -> ExchangeCost:
    """Predict the cost of one exchange over `network` on a machine with `cores` cores."""
    share = network.size * slowest_Bps(network) / PACKET_BYTES * 2 * cpu.packet_s / cores
    if share >= MAX_CORE_SHARE:  # many packets are then read at once
        cpu = replace(cpu, packet_s=0.0)
    found = first = simulated_cost(HostSimulation(load, network, cpu, cores), vote)
    packets_s = 2 * first.total_bytes / PACKET_BYTES * cpu.packet_s / cores  # of all members
    selecting_s = start_work_s(load, cpu) * math.ceil(network.size / cores)  # before packets
    for _ in range(ROUNDS if first.exchange_s > 0 else 0):
        taken = min(MAX_CORE_SHARE, packets_s / max(found.exchange_s - selecting_s, packets_s, 1e-9))
        slowed = replace(cpu, **{name: getattr(cpu, name) / (1 - taken) for name in SLOWED})
        found = simulated_cost(HostSimulation(load, network, slowed, cores), vote)
    return with_packets(replace(found, cpu_s=first.cpu_s), cpu)


def host_bounded_network(load: Workload, network: NetworkModel, cpu: CpuCosts, cores: int) -> NetworkModel:
    """Return `network` with rates limited by how fast the members' CPUs, and all cores, move bytes."""
    byte_s = cpu_s_per_byte(load, cpu)
    if byte_s == 0:
        return network

    def link(src: int, dst: int) -> LinkModel:
        between = network.link(src, dst)
        return replace(between, shared_links=(*between.shared_links, HOST_LINK))

    shared_Bps = {**network.shared_Bps, HOST_LINK: cores / (2 * byte_s)}
    return replace(cpu_bounded_network(load, network, cpu), link=link, shared_Bps=shared_Bps)
