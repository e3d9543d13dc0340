"""What an exchange costs: seconds, bytes and CPU, before anybody runs it.

Decides nothing about a run; `planner` compares what comes out here.  Never measures and never sends.

    what is exchanged (loads.Load) -----+
    who can send how fast (lines) ------+--> moves, walked one by one over the lines --> Cost
    what work takes (loads.Cpu) --------+

The model is alpha and beta for each directed link (Hockney, 1994), lines that several messages share, and
work on the members' processors.  On even links the walk gives the closed formulas of `closed_s`; on uneven
ones there is no formula, and only the walk counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gridtrain.core.planning.exchange_simulation import ExchangeSimulation
from gridtrain.core.planning.network_model import LinkModel, NetworkModel
from gridtrain.core.planning.workload import (
    HEADER_BYTES,
    MAX_MESSAGES,
    PACKET_BYTES,
    CpuCosts,
    ExchangeKind,
    Workload,
    cpu_s_per_byte,
    end_work_s,
    messages_of,
    overlapped_work_s,
    slice_count,
    start_work_s,
)


@dataclass(frozen=True, slots=True)
class ExchangeCost:
    """Of one exchange, from the moment at which all members have their gradient.

    Attributes:
        exchange_s: until the last member may apply it, the vote included.
        select_s: of that, finding and encoding what to send.
        sent_bytes: by the member that sends most.
        received_bytes: by the member that receives most.
        total_bytes: by all.
        cpu_s: of the busiest member.
    """

    exchange_s: float
    select_s: float
    sent_bytes: float
    received_bytes: float
    total_bytes: float
    cpu_s: float


def exchange_cost(
    load: Workload,
    network: NetworkModel,
    cpu: CpuCosts,
    *,
    host_cores: int | None = None,
    vote: bool = True,
    most_moves: int = MAX_MESSAGES,
) -> ExchangeCost:
    """One exchange over `network`, rank by rank, from walking its moves; with the vote at its end.

    Args:
        host_cores: all members stand on one machine and share so many cores; None: each has its own.
        most_moves: see `loads.MOST_MOVES`.
    """
    size = network.size
    if load.kind is ExchangeKind.DENSE and 2 * (size - 1) * size > most_moves:
        return _with_packets(_long_ring(load, network, cpu, vote), cpu)
    if load.kind is ExchangeKind.DIRECT and 2 * (size - 1) * size > max(most_moves, _MOST_DIRECT):
        return _with_packets(_wide_direct(load, network, cpu, vote), cpu)
    if load.kind is ExchangeKind.STAR and 2 * (size - 1) * slice_count(load, size) > most_moves:
        return _with_packets(_long_star(load, network, cpu, vote), cpu)
    found = first = _simulated_cost(load, network, cpu, host_cores, vote, most_moves)
    if host_cores is not None and first.exchange_s > 0:
        packets_s = 2 * first.total_bytes / PACKET_BYTES * cpu.packet_s / host_cores  # of all members
        selecting_s = start_work_s(load, cpu) * math.ceil(size / host_cores)  # before there are packets
        for _ in range(_CONTENTION_ROUNDS):
            taken = min(_MAX_CORE_SHARE, packets_s / max(found.exchange_s - selecting_s, packets_s, 1e-9))
            found = _simulated_cost(
                load, network, _slowed_cpu(cpu, 1 / (1 - taken)), host_cores, vote, most_moves
            )
    return _with_packets(replace(found, cpu_s=first.cpu_s), cpu)


def _with_packets(found: ExchangeCost, cpu: CpuCosts) -> ExchangeCost:
    """Their CPU time, of the busiest member."""
    packets = (found.sent_bytes + found.received_bytes) / PACKET_BYTES
    return replace(found, cpu_s=found.cpu_s + packets * cpu.packet_s)


_CONTENTION_ROUNDS, _MAX_CORE_SHARE = 4, 0.75
"""Of the cores that members share packets take a part: all else there takes longer, and so do packets."""


def _slowed_cpu(cpu: CpuCosts, times: float) -> CpuCosts:
    names = ("message_s", "wake_s", "begin_s", "add_byte_s", "store_byte_s", "hash_byte_s", *_ENTRY_COSTS)
    return replace(cpu, **{name: times * getattr(cpu, name) for name in names})


_ENTRY_COSTS = (
    "decode_entry_s",
    "merge_entry_s",
    "sum_entry_s",
)  # selecting and encoding come before packets


def _simulated_cost(
    load: Workload, network: NetworkModel, cpu: CpuCosts, host_cores: int | None, vote: bool, most_moves: int
) -> ExchangeCost:
    size = network.size
    handled = _cpu_bounded_network(network, load, cpu, host_cores)
    walk = ExchangeSimulation(messages_of(load, size, most_moves), load, handled, cpu, host_cores)
    ends_s = walk.run()
    exchange_s = walk.finish_vote_s(ends_s) if vote and size > 1 else max(ends_s)
    return ExchangeCost(
        exchange_s=exchange_s,
        select_s=start_work_s(load, cpu),
        sent_bytes=max(walk.sent_bytes),
        received_bytes=max(walk.received_bytes),
        total_bytes=sum(walk.sent_bytes),
        cpu_s=max(walk.cpu_s),
    )


def _cpu_bounded_network(
    network: NetworkModel, load: Workload, cpu: CpuCosts, host_cores: int | None
) -> NetworkModel:
    """The same lines, none faster than its ends can read, write and encrypt."""
    byte_s = cpu_s_per_byte(load, cpu)
    if byte_s == 0:
        return network
    up_Bps = [min(rate, 1 / byte_s) for rate in network.up_Bps]
    down_Bps = [min(rate, 1 / byte_s) for rate in network.down_Bps]
    if host_cores is None:
        return NetworkModel(network.link, up_Bps, down_Bps, network.shared_Bps)
    link, shared_Bps = network.link, {**network.shared_Bps, _HOST_LINK: host_cores / (2 * byte_s)}

    def on_host(src: int, dst: int) -> LinkModel:
        line = link(src, dst)
        return LinkModel(line.alpha_s, line.bandwidth_Bps, (*line.shared_links, _HOST_LINK))

    return NetworkModel(on_host, up_Bps, down_Bps, shared_Bps)


_HOST_LINK = "the host's cores"


def _vote_s(ends_s: Sequence[float], network: NetworkModel, cpu: CpuCosts) -> float:
    """As `Walk.vote`, where all end at about the same time: the root's messages one after the other."""
    others = range(1, network.size)
    turn_s = cpu.message_s + cpu.wake_s
    heard_s = max(ends_s[rank] + network.link(rank, 0).alpha_s for rank in others) + turn_s
    decided_s = max(heard_s, ends_s[0]) + (network.size - 1) * 2 * cpu.message_s
    told_s = max(network.link(0, rank).alpha_s for rank in others)
    return decided_s + told_s + turn_s + cpu.begin_s / 2


def _long_ring(load: Workload, network: NetworkModel, cpu: CpuCosts, vote: bool) -> ExchangeCost:
    """A ring of too many messages to walk: its busiest line, or its way round, whichever is longer.

    Each line passes all of its neighbour's slices in every round, and each slice passes all members.  Where
    lines are even this is `closed_s`.
    """
    size = network.size
    rounds, slices = 2 * (size - 1), slice_count(load, size)
    slice_bytes = load.unit_bytes / (size * slices) + HEADER_BYTES
    handled = _cpu_bounded_network(network, load, cpu, None)
    shared: dict[str, int] = {}
    busy_s = way_s = longest_s = 0.0
    for rank in range(size):
        link = handled.link(rank, (rank + 1) % size)
        for name in link.shared_links:
            shared[name] = shared.get(name, 0) + 1
        alone_s = slice_bytes / handled.path_Bps(rank, (rank + 1) % size)
        busy_s, longest_s = max(busy_s, alone_s), max(longest_s, link.alpha_s)
        way_s += (link.alpha_s + alone_s + 2 * cpu.message_s + cpu.wake_s) / size
    together = (edges * slice_bytes / handled.shared_Bps[name] for name, edges in shared.items())
    busy_s = max([busy_s, *together])
    work = load.unit_bytes * (cpu.add_byte_s + cpu.store_byte_s)
    way_s += work / (2 * size * slices)
    exchange_s = max(rounds * slices * busy_s + longest_s, rounds * way_s + (slices - 1) * busy_s)
    exchange_s += end_work_s(load, size, cpu) + cpu.begin_s / 2
    if vote:
        exchange_s = _vote_s([exchange_s] * size, network, cpu)
    sent = rounds * slices * slice_bytes
    handling_s = 2 * rounds * slices * (cpu.message_s + slice_bytes * cpu_s_per_byte(load, cpu))
    hashing_s = end_work_s(load, size, cpu) + overlapped_work_s(load, size, cpu)
    return ExchangeCost(exchange_s, 0.0, sent, sent, sent * size, handling_s + work + hashing_s + cpu.begin_s)


_MOST_DIRECT = 500
"""Moves of a direct exchange that are walked in any case: those of 16 members."""


def _wide_direct(load: Workload, network: NetworkModel, cpu: CpuCosts, vote: bool) -> ExchangeCost:
    """A direct exchange of too many messages to walk: its busiest line, or a member's work; and two hops."""
    size, slices = network.size, slice_count(load, network.size)
    handled = _cpu_bounded_network(network, load, cpu, None)
    half_bytes = load.unit_bytes / size + slices * HEADER_BYTES  # from one member to another, each way twice
    busy_s = max(2 * (size - 1) * half_bytes / min(rate) for rate in (handled.up_Bps, handled.down_Bps))
    shared: dict[str, float] = {}
    longest_s = 0.0
    for src in range(size):
        for dst in range(size):
            if src == dst:
                continue
            link = handled.link(src, dst)
            longest_s = max(longest_s, link.alpha_s)
            busy_s = max(busy_s, 2 * half_bytes / handled.path_Bps(src, dst))
            for name in link.shared_links:
                shared[name] = shared.get(name, 0.0) + 2 * half_bytes / handled.shared_Bps[name]
    messages = 2 * (size - 1) * slices
    work_s = load.unit_bytes * (cpu.add_byte_s + cpu.store_byte_s)
    handling_s = 2 * messages * (cpu.message_s + half_bytes / slices * cpu_s_per_byte(load, cpu))
    busy_s = max([busy_s, 2 * messages * cpu.message_s + work_s, *shared.values()])
    exchange_s = busy_s + 2 * (longest_s + cpu.wake_s) + end_work_s(load, size, cpu) + cpu.begin_s / 2
    if vote:
        exchange_s = _vote_s([exchange_s] * size, network, cpu)
    sent = 2 * (size - 1) * half_bytes
    hashing_s = end_work_s(load, size, cpu) + overlapped_work_s(load, size, cpu)
    return ExchangeCost(
        exchange_s, 0.0, sent, sent, sent * size, handling_s + work_s + hashing_s + cpu.begin_s
    )


def _long_star(load: Workload, network: NetworkModel, cpu: CpuCosts, vote: bool) -> ExchangeCost:
    """A star of too many messages to walk: its busiest line, or the centre's work; then a last slice."""
    size, slices = network.size, slice_count(load, network.size)
    nbytes = load.unit_bytes + slices * HEADER_BYTES
    handled = _cpu_bounded_network(network, load, cpu, None)
    others = range(1, size)
    lines = {"in": (size - 1) * nbytes / handled.down_Bps[0], "out": (size - 1) * nbytes / handled.up_Bps[0]}
    for rank in others:
        lines["in"] = max(lines["in"], nbytes / handled.path_Bps(rank, 0))
        lines["out"] = max(lines["out"], nbytes / handled.path_Bps(0, rank))
        for name in handled.link(rank, 0).shared_links + handled.link(0, rank).shared_links:
            lines[name] = lines.get(name, 0.0) + nbytes / handled.shared_Bps[name]
    trips_s = max(handled.link(rank, 0).alpha_s + handled.link(0, rank).alpha_s for rank in others)
    handling_s = slices * cpu.message_s + nbytes * cpu_s_per_byte(load, cpu)
    adding_s = load.unit_bytes * cpu.add_byte_s
    work_s = (size - 1) * (2 * slices * cpu.message_s + adding_s)
    end_s = end_work_s(load, size, cpu)
    trips_s += 2 * cpu.wake_s + cpu.begin_s / 2
    exchange_s = max(work_s, *lines.values()) + trips_s + lines["out"] / slices + end_s
    if vote:
        exchange_s = _vote_s([exchange_s] * size, network, cpu)
    total, most = 2.0 * (size - 1) * nbytes, float((size - 1) * nbytes)
    cpu_s = (size - 1) * (2 * handling_s + adding_s) + end_s + cpu.begin_s
    return ExchangeCost(exchange_s, 0.0, most, most, total, cpu_s)


def closed_form_s(load: Workload, world_size: int, alpha_s: float, bandwidth_Bps: float) -> float:
    """The textbook's seconds on even links, where work takes no time and headers no bytes; no vote.

    Ring: Patarasuk and Yuan (2009), with slices, of which the next ones hide alpha.  gTop-k and TopK: Shi et
    al., arXiv 1901.04359, section III; the butterfly's one way replaces the tree's way up and down.
    """
    size, unit_s = world_size, load.unit_bytes / bandwidth_Bps
    if size == 1:
        return 0.0
    log2 = size.bit_length() - 1
    exact = size == 1 << log2
    match load.kind:
        case ExchangeKind.DENSE:
            rounds, slices = 2 * (size - 1), slice_count(load, size)
            slice_s = unit_s / (size * slices)
            flowing_s = rounds * slices * slice_s + alpha_s
            return max(flowing_s, rounds * (alpha_s + slice_s) + (slices - 1) * slice_s)
        case ExchangeKind.DIRECT:
            half_s = (size - 1) / size * unit_s
            return max(2 * half_s + alpha_s, 2 * alpha_s + half_s * (1 + 1 / slice_count(load, size)))
        case ExchangeKind.TOPK:
            return (log2 + (not exact)) * alpha_s + (size - 1) * unit_s
        case ExchangeKind.GTOPK:
            return (log2 + 2 * (not exact)) * (alpha_s + unit_s)
        case ExchangeKind.TREE:
            return 2 * (log2 + (not exact)) * (alpha_s + unit_s)
        case ExchangeKind.STAR | ExchangeKind.STAR_GTOPK:
            slices = slice_count(load, size) if load.kind is ExchangeKind.STAR else 1
            return 2 * alpha_s + (size - 1) * unit_s * (1 + 1 / slices)
