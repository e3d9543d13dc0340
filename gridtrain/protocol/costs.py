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

from gridtrain.protocol.lines import Link, Network
from gridtrain.protocol.loads import (
    HEADER_BYTES,
    MOST_MOVES,
    PACKET_BYTES,
    Cpu,
    Kind,
    Load,
    ahead_work_s,
    byte_s_of,
    end_work_s,
    moves_of,
    slices_of,
    start_work_s,
)
from gridtrain.protocol.walk import Walk


@dataclass(frozen=True, slots=True)
class Cost:
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


def cost(
    load: Load,
    network: Network,
    cpu: Cpu,
    *,
    host_cores: int | None = None,
    vote: bool = True,
    most_moves: int = MOST_MOVES,
) -> Cost:
    """One exchange over `network`, rank by rank, from walking its moves; with the vote at its end.

    Args:
        host_cores: all members stand on one machine and share so many cores; None: each has its own.
        most_moves: see `loads.MOST_MOVES`.
    """
    size = network.size
    if load.kind is Kind.DENSE and 2 * (size - 1) * size > most_moves:
        return _with_packets(_long_ring(load, network, cpu, vote), cpu)
    if load.kind is Kind.DIRECT and 2 * (size - 1) * size > max(most_moves, _MOST_DIRECT):
        return _with_packets(_wide_direct(load, network, cpu, vote), cpu)
    if load.kind is Kind.STAR and 2 * (size - 1) * slices_of(load, size) > most_moves:
        return _with_packets(_long_star(load, network, cpu, vote), cpu)
    found = first = _walked(load, network, cpu, host_cores, vote, most_moves)
    if host_cores is not None and first.exchange_s > 0:
        packets_s = 2 * first.total_bytes / PACKET_BYTES * cpu.packet_s / host_cores  # of all members
        selecting_s = start_work_s(load, cpu) * math.ceil(size / host_cores)  # before there are packets
        for _ in range(_ROUNDS):
            taken = min(_MOST_TAKEN, packets_s / max(found.exchange_s - selecting_s, packets_s, 1e-9))
            found = _walked(load, network, _slowed(cpu, 1 / (1 - taken)), host_cores, vote, most_moves)
    return _with_packets(replace(found, cpu_s=first.cpu_s), cpu)


def _with_packets(found: Cost, cpu: Cpu) -> Cost:
    """Their CPU time, of the busiest member."""
    packets = (found.sent_bytes + found.received_bytes) / PACKET_BYTES
    return replace(found, cpu_s=found.cpu_s + packets * cpu.packet_s)


_ROUNDS, _MOST_TAKEN = 4, 0.75
"""Of the cores that members share packets take a part: all else there takes longer, and so do packets."""


def _slowed(cpu: Cpu, times: float) -> Cpu:
    names = ("message_s", "wake_s", "begin_s", "add_byte_s", "store_byte_s", "hash_byte_s", *_OF_ENTRIES)
    return replace(cpu, **{name: times * getattr(cpu, name) for name in names})


_OF_ENTRIES = ("decode_entry_s", "merge_entry_s", "sum_entry_s")  # selecting and encoding come before packets


def _walked(
    load: Load, network: Network, cpu: Cpu, host_cores: int | None, vote: bool, most_moves: int
) -> Cost:
    size = network.size
    handled = _handled(network, load, cpu, host_cores)
    walk = Walk(moves_of(load, size, most_moves), load, handled, cpu, host_cores)
    ends_s = walk.run()
    exchange_s = walk.vote(ends_s) if vote and size > 1 else max(ends_s)
    return Cost(
        exchange_s=exchange_s,
        select_s=start_work_s(load, cpu),
        sent_bytes=max(walk.sent_bytes),
        received_bytes=max(walk.received_bytes),
        total_bytes=sum(walk.sent_bytes),
        cpu_s=max(walk.cpu_s),
    )


def _handled(network: Network, load: Load, cpu: Cpu, host_cores: int | None) -> Network:
    """The same lines, none faster than its ends can read, write and encrypt."""
    byte_s = byte_s_of(load, cpu)
    if byte_s == 0:
        return network
    up_Bps = [min(rate, 1 / byte_s) for rate in network.up_Bps]
    down_Bps = [min(rate, 1 / byte_s) for rate in network.down_Bps]
    if host_cores is None:
        return Network(network.link, up_Bps, down_Bps, network.shared_Bps)
    link, shared_Bps = network.link, {**network.shared_Bps, _HOST: host_cores / (2 * byte_s)}

    def on_host(src: int, dst: int) -> Link:
        line = link(src, dst)
        return Link(line.alpha_s, line.bandwidth_Bps, (*line.shared, _HOST))

    return Network(on_host, up_Bps, down_Bps, shared_Bps)


_HOST = "the host's cores"


def _vote_s(ends_s: Sequence[float], network: Network, cpu: Cpu) -> float:
    """As `Walk.vote`, where all end at about the same time: the root's messages one after the other."""
    others = range(1, network.size)
    turn_s = cpu.message_s + cpu.wake_s
    heard_s = max(ends_s[rank] + network.link(rank, 0).alpha_s for rank in others) + turn_s
    decided_s = max(heard_s, ends_s[0]) + (network.size - 1) * 2 * cpu.message_s
    told_s = max(network.link(0, rank).alpha_s for rank in others)
    return decided_s + told_s + turn_s + cpu.begin_s / 2


def _long_ring(load: Load, network: Network, cpu: Cpu, vote: bool) -> Cost:
    """A ring of too many messages to walk: its busiest line, or its way round, whichever is longer.

    Each line passes all of its neighbour's slices in every round, and each slice passes all members.  Where
    lines are even this is `closed_s`.
    """
    size = network.size
    rounds, slices = 2 * (size - 1), slices_of(load, size)
    slice_bytes = load.unit_bytes / (size * slices) + HEADER_BYTES
    handled = _handled(network, load, cpu, None)
    shared: dict[str, int] = {}
    busy_s = way_s = longest_s = 0.0
    for rank in range(size):
        link = handled.link(rank, (rank + 1) % size)
        for name in link.shared:
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
    handling_s = 2 * rounds * slices * (cpu.message_s + slice_bytes * byte_s_of(load, cpu))
    hashing_s = end_work_s(load, size, cpu) + ahead_work_s(load, size, cpu)
    return Cost(exchange_s, 0.0, sent, sent, sent * size, handling_s + work + hashing_s + cpu.begin_s)


_MOST_DIRECT = 500
"""Moves of a direct exchange that are walked in any case: those of 16 members."""


def _wide_direct(load: Load, network: Network, cpu: Cpu, vote: bool) -> Cost:
    """A direct exchange of too many messages to walk: its busiest line, or a member's work; and two hops."""
    size, slices = network.size, slices_of(load, network.size)
    handled = _handled(network, load, cpu, None)
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
            for name in link.shared:
                shared[name] = shared.get(name, 0.0) + 2 * half_bytes / handled.shared_Bps[name]
    messages = 2 * (size - 1) * slices
    work_s = load.unit_bytes * (cpu.add_byte_s + cpu.store_byte_s)
    handling_s = 2 * messages * (cpu.message_s + half_bytes / slices * byte_s_of(load, cpu))
    busy_s = max([busy_s, 2 * messages * cpu.message_s + work_s, *shared.values()])
    exchange_s = busy_s + 2 * (longest_s + cpu.wake_s) + end_work_s(load, size, cpu) + cpu.begin_s / 2
    if vote:
        exchange_s = _vote_s([exchange_s] * size, network, cpu)
    sent = 2 * (size - 1) * half_bytes
    hashing_s = end_work_s(load, size, cpu) + ahead_work_s(load, size, cpu)
    return Cost(exchange_s, 0.0, sent, sent, sent * size, handling_s + work_s + hashing_s + cpu.begin_s)


def _long_star(load: Load, network: Network, cpu: Cpu, vote: bool) -> Cost:
    """A star of too many messages to walk: its busiest line, or the centre's work; then a last slice."""
    size, slices = network.size, slices_of(load, network.size)
    nbytes = load.unit_bytes + slices * HEADER_BYTES
    handled = _handled(network, load, cpu, None)
    others = range(1, size)
    lines = {"in": (size - 1) * nbytes / handled.down_Bps[0], "out": (size - 1) * nbytes / handled.up_Bps[0]}
    for rank in others:
        lines["in"] = max(lines["in"], nbytes / handled.path_Bps(rank, 0))
        lines["out"] = max(lines["out"], nbytes / handled.path_Bps(0, rank))
        for name in handled.link(rank, 0).shared + handled.link(0, rank).shared:
            lines[name] = lines.get(name, 0.0) + nbytes / handled.shared_Bps[name]
    trips_s = max(handled.link(rank, 0).alpha_s + handled.link(0, rank).alpha_s for rank in others)
    handling_s = slices * cpu.message_s + nbytes * byte_s_of(load, cpu)
    adding_s = load.unit_bytes * cpu.add_byte_s
    work_s = (size - 1) * (2 * slices * cpu.message_s + adding_s)
    end_s = end_work_s(load, size, cpu)
    trips_s += 2 * cpu.wake_s + cpu.begin_s / 2
    exchange_s = max(work_s, *lines.values()) + trips_s + lines["out"] / slices + end_s
    if vote:
        exchange_s = _vote_s([exchange_s] * size, network, cpu)
    total, most = 2.0 * (size - 1) * nbytes, float((size - 1) * nbytes)
    cpu_s = (size - 1) * (2 * handling_s + adding_s) + end_s + cpu.begin_s
    return Cost(exchange_s, 0.0, most, most, total, cpu_s)


def closed_s(load: Load, world_size: int, alpha_s: float, bandwidth_Bps: float) -> float:
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
        case Kind.DENSE:
            rounds, slices = 2 * (size - 1), slices_of(load, size)
            slice_s = unit_s / (size * slices)
            flowing_s = rounds * slices * slice_s + alpha_s
            return max(flowing_s, rounds * (alpha_s + slice_s) + (slices - 1) * slice_s)
        case Kind.DIRECT:
            half_s = (size - 1) / size * unit_s
            return max(2 * half_s + alpha_s, 2 * alpha_s + half_s * (1 + 1 / slices_of(load, size)))
        case Kind.TOPK:
            return (log2 + (not exact)) * alpha_s + (size - 1) * unit_s
        case Kind.GTOPK:
            return (log2 + 2 * (not exact)) * (alpha_s + unit_s)
        case Kind.TREE:
            return 2 * (log2 + (not exact)) * (alpha_s + unit_s)
        case Kind.STAR | Kind.STAR_GTOPK:
            slices = slices_of(load, size) if load.kind is Kind.STAR else 1
            return 2 * alpha_s + (size - 1) * unit_s * (1 + 1 / slices)
