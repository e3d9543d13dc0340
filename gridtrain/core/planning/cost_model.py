"""Predicts the cost of an exchange in seconds, bytes and CPU time, by simulation or by formula.

    Workload: kind and size of the exchange --+
    NetworkModel: latencies and rates --------+--> messages, simulated one by one --> ExchangeCost
    CpuCosts: CPU time of each kind of work --+

The model has a latency and a rate for each directed link (Hockney, 1994), links that several messages share,
and work on the members' CPUs.  An exchange with too many messages to simulate is estimated from its busiest
link or CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import assert_never

from gridtrain.core.planning.exchange_simulation import CpuOccupancy, ExchangeSimulation, vote_end_s
from gridtrain.core.planning.message_schedule import PlannedMessage, scale_to_shares
from gridtrain.core.planning.network_model import NetworkModel
from gridtrain.core.planning.workload import (
    HEADER_BYTES,
    MAX_MESSAGES,
    PACKET_BYTES,
    CpuCosts,
    Workload,
    cpu_s_per_byte,
    end_work_s,
    messages_by_pair,
    messages_of,
    overlapped_work_s,
    receive_work_s,
    receive_works,
    slice_count,
    start_work_s,
)
from gridtrain.errors import LocalProtocolError


@dataclass(frozen=True, slots=True)
class ExchangeCost:
    """The cost of one exchange, from the moment at which all members have their gradients.

    Attributes:
        exchange_s: time until the last member may apply the update, including the vote if it is predicted.
        select_s: the part of `exchange_s` that is spent on selecting and encoding.
        sent_bytes: bytes sent by the member that sends the most.
        received_bytes: bytes received by the member that receives the most.
        total_bytes: bytes sent by all members together.
        cpu_s: CPU time of the busiest member.
    """

    exchange_s: float
    select_s: float
    sent_bytes: float
    received_bytes: float
    total_bytes: float
    cpu_s: float


MAX_CORE_SHARE = 0.75
"""The largest share of a core that handling packets is assumed to take."""

_MIN_SIMULATED_DIRECT = 500
"""A direct exchange of at most this many messages is always simulated; 16 members send 480."""


def exchange_cost(
    load: Workload,
    network: NetworkModel,
    cpu: CpuCosts,
    *,
    vote: bool = True,
    max_messages: int = MAX_MESSAGES,
) -> ExchangeCost:
    """Predict the cost of one exchange over `network`, each of whose members has its own machine.

    Args:
        vote: whether to include the vote at the end.
        max_messages: the maximum number of messages to simulate; see `MAX_MESSAGES`.
    """
    cpu = replace(cpu, packet_s=_packet_s(network, cpu))
    if _is_too_large(load, network.size, max_messages):
        found = _estimated_cost(load, network, cpu, vote)
    else:
        messages = planned_messages(load, network, max_messages)
        bounded = cpu_bounded_network(load, network, cpu)
        found = simulated_cost(ExchangeSimulation(messages, load, bounded, cpu), vote)
    return with_packets(found, cpu)


def _is_too_large(load: Workload, size: int, max_messages: int) -> bool:
    """Return whether the exchange has too many messages to simulate, so that its cost must be estimated.

    For a ring or a direct exchange, the messages of one slice of each segment are counted; for a dense star,
    the messages of all slices.  Other exchanges are always simulated.
    """
    match load.kind.topology:
        case "ring":
            return 2 * (size - 1) * size > max_messages
        case "direct":
            return 2 * (size - 1) * size > max(max_messages, _MIN_SIMULATED_DIRECT)
        case "star":
            return not load.kind.is_sparse and 2 * (size - 1) * slice_count(load, size) > max_messages
        case "all-gather" | "butterfly" | "tree":
            return False


def _packet_s(network: NetworkModel, cpu: CpuCosts) -> float:
    """Return the CPU time per packet; 0 if a core is too slow to handle packets one by one, as it then
    reads many at once.

    All members are assumed to send and receive packets at the rate of the slowest link.
    """
    share = slowest_Bps(network) / PACKET_BYTES * 2 * cpu.packet_s
    return cpu.packet_s if share < MAX_CORE_SHARE else 0.0


def slowest_Bps(network: NetworkModel) -> float:
    """Return the lowest rate of an upload, a download or a shared link."""
    return min(*network.up_Bps, *network.down_Bps, *network.shared_Bps.values())


def with_packets(found: ExchangeCost, cpu: CpuCosts) -> ExchangeCost:
    """Return the cost, with `cpu_s` increased by the CPU time that the busiest member spends on packets."""
    packets = (found.sent_bytes + found.received_bytes) / PACKET_BYTES
    return replace(found, cpu_s=found.cpu_s + packets * cpu.packet_s)


_messages_of = lru_cache(maxsize=4)(messages_of)
"""Cached, because a search simulates the same messages with several orders of ranks."""


def planned_messages(load: Workload, network: NetworkModel, max_messages: int) -> list[PlannedMessage]:
    """Return the messages of one exchange, as long as the members' shares of k make them."""
    messages = _messages_of(load, network.size, max_messages)
    if network.entry_shares and load.kind.is_sparse:
        return scale_to_shares(messages, network.entry_shares)
    return messages


def simulated_cost(simulation: ExchangeSimulation, vote: bool) -> ExchangeCost:
    """Run a simulation; return the cost without packets."""
    ends_s = simulation.run()
    exchange_s = simulation.run_vote(ends_s) if vote and simulation.network.size > 1 else max(ends_s)
    return ExchangeCost(
        exchange_s=exchange_s,
        select_s=start_work_s(simulation.load, simulation.cpu),
        sent_bytes=max(simulation.sent_bytes),
        received_bytes=max(simulation.received_bytes),
        total_bytes=sum(simulation.sent_bytes),
        cpu_s=max(simulation.cpu_s),
    )


def cpu_bounded_network(load: Workload, network: NetworkModel, cpu: CpuCosts) -> NetworkModel:
    """Return `network` with rates limited by how fast the members' CPUs read, write and encrypt."""
    byte_s = cpu_s_per_byte(load, cpu)
    if byte_s == 0:
        return network
    up_Bps = [min(rate, 1 / byte_s) for rate in network.up_Bps]
    down_Bps = [min(rate, 1 / byte_s) for rate in network.down_Bps]
    return replace(network, up_Bps=up_Bps, down_Bps=down_Bps)


def _estimated_cost(load: Workload, network: NetworkModel, cpu: CpuCosts, vote: bool) -> ExchangeCost:
    """Estimate a dense or direct exchange that has too many messages to simulate.

    The estimate is the time for which the busiest link or CPU is in use, plus the work before the first
    message and after the last; for a ring it is at least the time that one slice takes to pass through all
    members.
    """
    size, slices = network.size, slice_count(load, network.size)
    fraction = 1 / slices if load.kind.topology == "star" else 1 / (size * slices)
    slice_bytes = fraction * load.unit_bytes + HEADER_BYTES
    bounded = cpu_bounded_network(load, network, cpu)
    message_s = cpu.message_s + slice_bytes * cpu_s_per_byte(load, cpu)
    add_s, store_s = (receive_work_s(work, load, fraction, cpu) for work in receive_works(load.kind))
    out, into = [0.0] * size, [0.0] * size  # bytes
    cpu_s, handling_s = [0.0] * size, [0.0] * size  # with and without the CPU time of the sockets
    shared_s = dict.fromkeys(bounded.shared_Bps, 0.0)
    pair_s = longest_s = 0.0
    for (src, dst), count in messages_by_pair(load, size).items():
        times = count * slices
        nbytes = times * slice_bytes
        if load.kind.topology == "star":
            work_s = times * (store_s if dst else add_s)
        else:
            work_s = times * (add_s + store_s) / 2
        out[src], into[dst] = out[src] + nbytes, into[dst] + nbytes
        cpu_s[src], cpu_s[dst] = cpu_s[src] + times * message_s, cpu_s[dst] + times * message_s + work_s
        handling_s[src] += times * cpu.message_s
        handling_s[dst] += times * cpu.message_s + work_s
        link = bounded.link(src, dst)
        pair_s, longest_s = max(pair_s, nbytes / bounded.path_Bps(src, dst)), max(longest_s, link.alpha_s)
        for name in link.shared_links:
            shared_s[name] += nbytes / bounded.shared_Bps[name]
    ends_s = [x / r for x, r in zip(out + into, [*bounded.up_Bps, *bounded.down_Bps], strict=True)]
    busy_s = max(pair_s, *ends_s, *handling_s, *shared_s.values())
    match load.kind.topology:
        case "ring":
            rounds, ranks = 2 * (size - 1), range(size)
            hops = [(rank, (rank + 1) % size) for rank in ranks]
            hop_s = (
                math.fsum(bounded.link(*hop).alpha_s + slice_bytes / bounded.path_Bps(*hop) for hop in hops)
                / size
            )
            hop_s += 2 * cpu.message_s + cpu.wake_s + (add_s + store_s) / 2
            slice_s = busy_s / (rounds * slices)
            exchange_s = max(busy_s + longest_s, rounds * hop_s + (slices - 1) * slice_s)
        case "direct":
            exchange_s = busy_s + 2 * (longest_s + cpu.wake_s)
        case "star":
            alpha_s = [network.link(r, 0).alpha_s + network.link(0, r).alpha_s for r in range(1, size)]
            exchange_s = busy_s + max(alpha_s) + 2 * cpu.wake_s + out[0] / bounded.up_Bps[0] / slices
        case "all-gather" | "butterfly" | "tree":
            raise LocalProtocolError(f"{load.kind} is always simulated, not estimated")
        case never:
            assert_never(never)
    end_s = end_work_s(load, size, cpu)
    select_s = start_work_s(load, cpu) if load.kind.is_sparse else 0.0
    exchange_s += select_s + end_s + cpu.begin_s / 2
    if vote:
        exchange_s = vote_end_s([exchange_s] * size, network, cpu, CpuOccupancy(size))
    busiest_s = max(cpu_s) + select_s + end_s + overlapped_work_s(load, size, cpu) + cpu.begin_s
    return ExchangeCost(exchange_s, select_s, max(out), max(into), sum(out), busiest_s)
