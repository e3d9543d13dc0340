"""What is to be exchanged, and what working on it takes.

Decides the size of payloads and the seconds of work.  Never times an exchange (`walk`, `costs`).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from gridtrain.core.collectives import direct, ring
from gridtrain.core.planning import message_schedule
from gridtrain.core.planning.message_schedule import PlannedMessage, ReceiveWork
from gridtrain.errors import ConfigError

HEADER_BYTES = 110
"""Of a Data message: the msgpack header, the framing of ZMTP, and what a transport adds."""

PACKET_BYTES = 1448
"""Of an Ethernet frame those of a message: TCP with timestamps over IPv4."""

VALUE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
INT8_BLOCK_ENTRIES = 256  # entries that share a scale of 2 bytes
MAX_MESSAGES = 30_000
"""A ring of more is walked with fewer slices, and one of more than that even so is not walked any more."""


class ExchangeKind(StrEnum):
    """How gradients are shared, as people write it."""

    DENSE = "dense"
    DIRECT = "dense-direct"
    TOPK = "topk"
    GTOPK = "gtopk"
    TREE = "gtopk-tree"
    STAR = "star"
    STAR_GTOPK = "star-gtopk"

    @property
    def is_sparse(self) -> bool:
        return self not in (ExchangeKind.DENSE, ExchangeKind.DIRECT, ExchangeKind.STAR)


@dataclass(frozen=True, slots=True)
class CpuCosts:
    """Seconds of one core.  The defaults are what `benchmarks/calibrate.py` found on two cores of a cloud
    machine (2026-11-22), most rounded up by 10 to 60 %, as other machines are slower; it measures the machine
    at hand.  Found: message 190 us, wake 140 us, begin 1.7 ms; in ns a byte 0.11, sealed 0.52, add 0.08,
    store 0.09, hash 0.56; in ns an entry encode 9.6, decode 7.2, merge 46, sum 69; in ns a parameter select
    1.4.

    Attributes:
        message_s: one message at one end, sent or received.
        wake_s: from a message's arrival until its receiver's thread looks at it; no core works meanwhile.
        begin_s: an exchange as such: the trainer's thread hands its part over, and is woken at the end.
        packet_s: one packet of a line that is slower than the processor, at one end: each wakes a thread.  It
            takes no time of an exchange, but a core from members that share it.
        byte_s: one byte through one end's socket.
        crypt_byte_s: one byte sealed or opened (CURVE), beside `byte_s`.
        add_byte_s, store_byte_s: one byte of a dense slice added, or copied, to its place.
        hash_byte_s: one byte of the update's digest (SHA-256 of each dense slice).
        encode_entry_s, decode_entry_s: one entry of a sparse payload made, or read and checked.
        merge_entry_s: one of k entries of a gTop-k hop: their payload read, summed, cut to k, encoded.
        sum_entry_s: one entry of all payloads in the sum that ends TopK.
        select_parameter_s: one parameter looked at while the k largest are selected.
    """

    message_s: float = 250e-6
    wake_s: float = 200e-6
    begin_s: float = 2e-3
    packet_s: float = 12e-6
    byte_s: float = 0.15e-9
    crypt_byte_s: float = 0.7e-9
    add_byte_s: float = 0.1e-9
    store_byte_s: float = 0.12e-9
    hash_byte_s: float = 0.7e-9
    encode_entry_s: float = 12e-9
    decode_entry_s: float = 10e-9
    merge_entry_s: float = 55e-9
    sum_entry_s: float = 70e-9
    select_parameter_s: float = 1.8e-9


NO_CPU_COSTS = CpuCosts(*(0.0,) * 14)
"""Work takes no time: what the wire alone costs."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One exchange of `parameters` elements.

    Attributes:
        density: share of the elements that a member selects, of sparse kinds.
        values: fp32, fp16, bf16 or int8, how values of sparse kinds travel.
        encrypted: by CURVE.
    """

    kind: ExchangeKind
    parameters: int
    density: float = 0.001
    values: str = "fp16"
    encrypted: bool = True

    def __post_init__(self) -> None:
        if self.parameters < 1 or not 0 < self.density <= 1 or self.values not in VALUE_BYTES:
            raise ConfigError(
                f"{self.parameters} parameters at density {self.density} with values {self.values!r}",
                remedy=f"at least 1 parameter, 0 < density <= 1, values one of {', '.join(VALUE_BYTES)}",
            )

    @property
    def entries(self) -> int:
        """k of a sparse kind."""
        return min(self.parameters, max(1, round(self.density * self.parameters)))

    @property
    def unit_bytes(self) -> int:
        """The dense vector, or one sparse payload."""
        if not self.kind.is_sparse:
            return 4 * self.parameters
        return sparse_payload_bytes(self.parameters, self.entries, self.values)


def sparse_payload_bytes(parameters: int, entries: int, values: str) -> int:
    """Length of a payload of that many entries, exactly (PROTOCOL.md, 5.2)."""
    if entries == 0:
        return 8
    low = int(math.log2(parameters // entries)) if parameters >= entries else 0
    high = entries + ((parameters - 1) >> low)
    scales = 2 * -(-entries // INT8_BLOCK_ENTRIES) if values == "int8" else 0
    return 8 + -(-entries * low // 8) + -(-high // 8) + scales + VALUE_BYTES[values] * entries


def slice_count(load: Workload, world_size: int) -> int:
    """In how many slices a dense segment (star: the vector) travels."""
    if load.kind is ExchangeKind.STAR:
        return ring.count_slices(load.unit_bytes)
    slices = direct.count_slices if load.kind is ExchangeKind.DIRECT else ring.count_slices
    return slices(math.ceil(load.unit_bytes / world_size))


def messages_of(load: Workload, world_size: int, most_moves: int = MAX_MESSAGES) -> list[PlannedMessage]:
    """The exchange's messages.  Slices are fewer than they are where there would be too many to walk."""
    match load.kind:
        case ExchangeKind.DENSE | ExchangeKind.DIRECT:
            most = max(1, most_moves // max(1, 2 * (world_size - 1) * world_size))
            make = message_schedule.ring if load.kind is ExchangeKind.DENSE else message_schedule.direct
            return make(world_size, min(slice_count(load, world_size), most))
        case ExchangeKind.TOPK:
            return message_schedule.all_gather(world_size)
        case ExchangeKind.GTOPK:
            return message_schedule.butterfly(world_size)
        case ExchangeKind.TREE:
            return message_schedule.tree(world_size)
        case ExchangeKind.STAR:
            most = max(1, most_moves // max(1, 2 * (world_size - 1)))
            return message_schedule.star(
                world_size, min(slice_count(load, world_size), most), ReceiveWork.ADD, ReceiveWork.STORE
            )
        case ExchangeKind.STAR_GTOPK:
            return message_schedule.star(world_size, 1, ReceiveWork.POOL, ReceiveWork.ADOPT)


def count_messages(load: Workload, world_size: int, most_moves: int = MAX_MESSAGES) -> int:
    """How many `moves_of` would make, without making them: a ring of 1000 has two million."""
    others = world_size - 1
    match load.kind:
        case ExchangeKind.DENSE | ExchangeKind.DIRECT:
            rounds = 2 * others * world_size
            return rounds * min(slice_count(load, world_size), max(1, most_moves // max(1, rounds)))
        case ExchangeKind.TOPK:
            bundled = world_size > message_schedule.BUNDLING_MIN_RANKS
            return world_size * (others.bit_length() if bundled else others)
        case ExchangeKind.GTOPK:
            log2 = world_size.bit_length() - 1
            return (log2 << log2) + 2 * (world_size - (1 << log2))
        case ExchangeKind.STAR:
            rounds = 2 * others
            return rounds * min(slice_count(load, world_size), max(1, most_moves // max(1, rounds)))
        case ExchangeKind.TREE | ExchangeKind.STAR_GTOPK:
            return 2 * others


def messages_by_pair(load: Workload, world_size: int) -> Counter[tuple[int, int]]:
    """Directed pairs of ranks between which anything goes, with the number of messages of one slice."""
    if load.kind is ExchangeKind.DENSE:
        hops = 2 * (world_size - 1)
        return Counter({(rank, (rank + 1) % world_size): hops for rank in range(world_size) if hops})
    return Counter((move.src, move.dst) for move in messages_of(load, world_size, 1))


_SEGMENTED = (ExchangeKind.DENSE, ExchangeKind.DIRECT)
"""A segment for each member, hashed slice by slice."""


def receive_work_s(work: ReceiveWork, load: Workload, part: float, cpu: CpuCosts) -> float:
    """What a receiver does with one payload."""
    match work:
        case ReceiveWork.ADD:
            return part * load.unit_bytes * cpu.add_byte_s
        case ReceiveWork.STORE:
            return part * load.unit_bytes * cpu.store_byte_s
        case ReceiveWork.MERGE:
            return load.entries * cpu.merge_entry_s
        case ReceiveWork.POOL:
            return load.entries * (cpu.decode_entry_s + cpu.sum_entry_s)
        case ReceiveWork.KEEP | ReceiveWork.ADOPT:
            return load.entries * cpu.decode_entry_s


def start_work_s(load: Workload, cpu: CpuCosts) -> float:
    """Before anything is sent."""
    if not load.kind.is_sparse:
        return 0.0
    return load.parameters * cpu.select_parameter_s + load.entries * cpu.encode_entry_s


def end_work_s(load: Workload, world_size: int, cpu: CpuCosts) -> float:
    """When everything is there: TopK's sum, and the digest that is voted on (of a ring its last slice's)."""
    if load.kind in _SEGMENTED:
        return load.unit_bytes / (world_size * slice_count(load, world_size)) * cpu.hash_byte_s
    if load.kind is ExchangeKind.STAR:
        return load.unit_bytes * cpu.hash_byte_s
    entries = load.entries * (world_size if load.kind is ExchangeKind.TOPK else 1)
    summing_s = entries * cpu.sum_entry_s if load.kind is ExchangeKind.TOPK else 0.0
    return summing_s + 12 * min(entries, load.parameters) * cpu.hash_byte_s


def overlapped_work_s(load: Workload, world_size: int, cpu: CpuCosts) -> float:
    """While the lines are busy, if the core has nothing else to do: a ring's slices that are final."""
    if load.kind not in _SEGMENTED:
        return 0.0
    return load.unit_bytes * cpu.hash_byte_s - end_work_s(load, world_size, cpu)


def cpu_s_per_byte(load: Workload, cpu: CpuCosts) -> float:
    """Seconds of a core for a byte, at each end."""
    return cpu.byte_s + (cpu.crypt_byte_s if load.encrypted else 0.0)
