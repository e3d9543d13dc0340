"""The load of an exchange: number of messages, bytes of payloads in each format of values, and CPU times."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from gridtrain.config import VALUES, Dense, Exchange, GTopK, TopK
from gridtrain.core.collectives import allgather, butterfly, direct, ring, star, tree
from gridtrain.core.planning import message_schedule
from gridtrain.core.planning.message_schedule import PlannedMessage, ReceiveWork
from gridtrain.errors import ConfigError

HEADER_BYTES = 110
"""Overhead of a Data message: the msgpack header, the ZMTP framing and the transport's own bytes."""

PACKET_BYTES = 1448
"""Bytes of TCP payload in an Ethernet frame, with IPv4 and TCP timestamps."""

VALUE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
INT8_BLOCK_ENTRIES = 256  # entries that share a scale of 2 bytes
LEVEL_BITS = {"int4": 4, "int2": 2}
LEVEL_BLOCK_SHIFT = 6  # with int4 and int2, 2**(low bits + 6) indices share a scale of 2 bytes
LEVEL_ENCODE_FACTOR = 6.0  # and encoding takes this many times as long (measured: 4 to 9, decision 0068)
MAX_MESSAGES = 30_000
"""An exchange with more messages than this is simulated with fewer slices, or estimated if even one slice has
more."""


class ExchangeKind(StrEnum):
    """An exchange and its topology (`_TABLE`); the value is the name that `gridtrain plan` shows."""

    DENSE = "dense"
    DIRECT = "dense-direct"
    TOPK = "topk"
    GTOPK = "gtopk"
    GTOPK_DIRECT = "gtopk-direct"
    TREE = "gtopk-tree"
    STAR = "star"
    STAR_GTOPK = "star-gtopk"

    @property
    def exchange(self) -> type[Exchange]:
        """The class in `gridtrain.config`."""
        return _TABLE[self][0]

    @property
    def topology(self) -> TopologyName:
        return _TABLE[self][1]

    @property
    def is_sparse(self) -> bool:
        """Whether indices are sent with the values."""
        return self.exchange is not Dense

    @property
    def has_density(self) -> bool:
        """Whether members choose a share of the elements to send, and omit the others."""
        return hasattr(self.exchange, "density")


TopologyName = Literal["ring", "direct", "all-gather", "butterfly", "tree", "star"]
"""Who exchanges data with whom.  Each topology has one schedule of messages, regardless of their content."""

NeighboursOf = Callable[[int, int], frozenset[int]]
"""Maps a rank and a world size to the ranks with which that rank exchanges messages."""

NEIGHBOURS: dict[str, NeighboursOf] = {
    "ring": ring.neighbours,
    "direct": direct.neighbours,
    "all-gather": allgather.neighbours,
    "butterfly": butterfly.neighbours,
    "tree": tree.neighbours,
    "star": star.neighbours,
}

_TABLE: dict[ExchangeKind, tuple[type[Exchange], TopologyName]] = {
    ExchangeKind.DENSE: (Dense, "ring"),
    ExchangeKind.DIRECT: (Dense, "direct"),
    ExchangeKind.TOPK: (TopK, "all-gather"),
    ExchangeKind.GTOPK: (GTopK, "butterfly"),
    ExchangeKind.GTOPK_DIRECT: (GTopK, "direct"),
    ExchangeKind.TREE: (GTopK, "tree"),
    ExchangeKind.STAR: (Dense, "star"),
    ExchangeKind.STAR_GTOPK: (GTopK, "star"),
}

DIRECT_KIND_OF = {ExchangeKind.DENSE: ExchangeKind.DIRECT, ExchangeKind.GTOPK: ExchangeKind.GTOPK_DIRECT}
"""The direct kind of each kind whose topology the coordinator may choose ("auto")."""

_KINDS = {(kind.exchange, str(kind.topology)): kind for kind in ExchangeKind}
_KINDS |= {(kind.exchange, "auto"): kind for kind in DIRECT_KIND_OF}


@dataclass(frozen=True, slots=True)
class CpuCosts:
    """The CPU time of each kind of work, in seconds on one core.

    The defaults are the times that `benchmarks/calibrate.py` measured on two cores of a cloud machine
    (2026-11-22), mostly rounded up by 10 to 60 %, because other machines are slower.  Measured: message 190
    us, wake 140 us, begin 1.7 ms; in ns per byte 0.11, encrypted 0.52, add 0.08, store 0.09, hash 0.56; in ns
    per entry encode 9.6, decode 7.2, merge 46, sum 69; in ns per parameter select 1.4.

    Attributes:
        message_s: sending or receiving one message, at one end.
        wake_s: the time from a message's arrival until its receiver's thread handles it; it does not use CPU
            time.
        begin_s: starting and ending an exchange: the training thread submits its part and is woken at the
            end.
        packet_s: handling one packet at one end of a link that is slower than the processor, so that each
            packet wakes a thread; not counted on faster links.  This work does not delay exchanges, but
            takes CPU time from members that share the core.
        byte_s: moving one byte through one end's socket.
        crypt_byte_s: encrypting or decrypting one byte (CURVE), in addition to `byte_s`.
        add_byte_s, store_byte_s: adding or copying one byte of a dense slice.
        hash_byte_s: hashing one byte for the update's digest (SHA-256 of each dense slice).
        encode_entry_s: encoding one entry of a sparse payload.
        decode_entry_s: decoding and checking one entry of a sparse payload.
        merge_entry_s: decoding, summing, truncating and encoding one of the k entries of a gTop-k hop.
        sum_entry_s: adding one entry of a payload to a sum, at the end of TopK, at the root of a star and in
            direct gTop-k.
        select_parameter_s: examining one parameter in the selection of the k largest.
        round_element_s, widen_element_s: encoding and decoding one element of a dense slice as int8; bf16
            takes a third.
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
    round_element_s: float = 4e-9
    widen_element_s: float = 1.2e-9


NO_CPU_COSTS = CpuCosts(*(0.0,) * 16)
"""Zero costs, for a prediction in which only the network matters."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The load of one exchange of `parameters` elements.

    Attributes:
        density: the share of the elements that a member selects, for sparse kinds.
        values: the format of transferred values, for sparse kinds: a name in `config.VALUES`.
        encrypted: whether messages are encrypted with CURVE.
        dense_values: the format of transferred values, for dense kinds: fp32, bf16 or int8.

    Raises:
        ConfigError: a value is out of range.
    """

    kind: ExchangeKind
    parameters: int
    density: float = 0.001
    values: str = "fp16"
    encrypted: bool = True
    dense_values: str = "fp32"

    def __post_init__(self) -> None:
        if self.parameters < 1 or not 0 < self.density <= 1 or self.values not in VALUES:
            raise ConfigError(
                f"parameters is {self.parameters}, density is {self.density} and values is {self.values!r}; "
                "at least one of them is out of range",
                remedy="use at least 1 parameter, a density > 0 and <= 1, and one of these formats for "
                f"values: {', '.join(VALUES)}",
            )
        if self.values == "int2" and self.kind.is_sparse and self.kind.topology not in ("all-gather", "star"):
            raise ConfigError(
                f'values is "int2", which {self.kind} does not support, because it rounds at each merge',
                remedy="use int4, or compare only exchanges that round once: topk, star-gtopk and dense ones",
            )

    @classmethod
    def of(cls, exchange: Exchange, parameters: int, encrypted: bool = True) -> Workload:
        """Return the workload of `exchange` for a model of `parameters` parameters."""
        kind = _KINDS[type(exchange), exchange.topology]
        if isinstance(exchange, Dense):
            return cls(kind, parameters, encrypted=encrypted, dense_values=exchange.values)
        return cls(kind, parameters, exchange.density, exchange.values, encrypted)

    @property
    def entries(self) -> int:
        """Number of entries in a sparse payload, k."""
        return min(self.parameters, max(1, round(self.density * self.parameters)))

    @property
    def unit_bytes(self) -> int:
        """Size of the dense vector as it is sent, or of one sparse payload, in bytes."""
        if not self.kind.is_sparse:
            return dense_payload_bytes(self.parameters, self.dense_values)
        return sparse_payload_bytes(self.parameters, self.entries, self.values)

    @property
    def vector_bytes(self) -> int:
        """Size of the dense vector in memory, or of one sparse payload, in bytes."""
        return self.unit_bytes if self.kind.is_sparse else 4 * self.parameters

    @property
    def is_rounded(self) -> bool:
        """Whether the exchange is dense and its values are rounded."""
        return not self.kind.is_sparse and self.dense_values != "fp32"

    @property
    def name(self) -> str:
        """The name of the exchange in `gridtrain plan`, for example "dense", "dense:int8" or "gtopk"."""
        return f"{self.kind}:{self.dense_values}" if self.is_rounded else str(self.kind)

    def payload_bytes(self, fraction: float) -> float:
        """Return the size in bytes of a payload with this fraction of the whole payload's elements."""
        if fraction == 1.0 or not self.kind.is_sparse or self.kind.topology == "direct":
            return fraction * self.unit_bytes  # the parts of a direct exchange are as dense as the whole
        return sparse_payload_bytes(self.parameters, max(1, round(fraction * self.entries)), self.values)


def dense_payload_bytes(elements: int, values: str) -> int:
    """Return the exact length in bytes of a dense slice of `elements` elements (PROTOCOL.md, 5.1)."""
    scales = 2 * -(-elements // INT8_BLOCK_ENTRIES) if values == "int8" else 0
    return elements * VALUE_BYTES[values] + scales


def sparse_payload_bytes(parameters: int, entries: int, values: str) -> int:
    """Return the exact length in bytes of a payload of `entries` entries (PROTOCOL.md, 5.2).

    With int4 and int2, a payload may have fewer entries than were selected.
    """
    if entries == 0:
        return 8
    low = int(math.log2(parameters // entries)) if parameters >= entries else 0
    high = entries + ((parameters - 1) >> low)
    if values in LEVEL_BITS:
        blocks = ((parameters - 1) >> (low + LEVEL_BLOCK_SHIFT)) + 1
        value_bytes = 2 * blocks + -(-entries * LEVEL_BITS[values] // 8)
    else:
        value_bytes = dense_payload_bytes(entries, values)
    return 8 + -(-entries * low // 8) + -(-high // 8) + value_bytes


def slice_count(load: Workload, world_size: int) -> int:
    """Return the number of slices of a segment (in a dense star: of the vector); 1 if `load` is sparse."""
    if load.kind.is_sparse:
        return 1
    if load.kind.topology == "star":
        return ring.count_slices(load.unit_bytes)
    slices = direct.count_slices if load.kind.topology == "direct" else ring.count_slices
    return slices(math.ceil(load.unit_bytes / world_size))


# -- messages --------------------------------------------------------------------------------------


def _messages_per_slice(kind: ExchangeKind, world_size: int) -> int:
    """Return the number of messages that all members together send for one slice in a ring, a direct exchange
    or a star."""
    return 2 * (world_size - 1) * (1 if kind.topology == "star" else world_size)


def simulated_slices(load: Workload, world_size: int, max_messages: int) -> int:
    """Return the number of slices to simulate for a dense exchange, at least 1.

    With more than one slice, the simulation has at most `max_messages` messages.
    """
    most = max(1, max_messages // max(1, _messages_per_slice(load.kind, world_size)))
    return min(slice_count(load, world_size), most)


def messages_of(load: Workload, world_size: int, max_messages: int = MAX_MESSAGES) -> list[PlannedMessage]:
    """Return the messages of the exchange, with `simulated_slices` slices if it is dense."""
    slices = simulated_slices(load, world_size, max_messages)
    match load.kind.topology:
        case "ring":
            return message_schedule.ring(world_size, slices)
        case "direct":
            return message_schedule.direct(world_size, slices, *receive_works(load.kind))
        case "all-gather":
            return message_schedule.all_gather(world_size)
        case "butterfly":
            return message_schedule.butterfly(world_size)
        case "tree":
            return message_schedule.tree(world_size)
        case "star":
            return message_schedule.star(world_size, slices, *receive_works(load.kind))


def receive_works(kind: ExchangeKind) -> tuple[ReceiveWork, ReceiveWork]:
    """Return the work on a part that a member sums for others, and on the sum."""
    return (ReceiveWork.POOL, ReceiveWork.ADOPT) if kind.is_sparse else (ReceiveWork.ADD, ReceiveWork.STORE)


def count_messages(load: Workload, world_size: int, max_messages: int = MAX_MESSAGES) -> int:
    """Return the length of `messages_of` without building the list, which may have millions of messages."""
    others = world_size - 1
    match load.kind.topology:
        case "ring" | "direct" | "star":
            each = _messages_per_slice(load.kind, world_size)
            return each * simulated_slices(load, world_size, max_messages)
        case "all-gather":
            bundled = world_size > message_schedule.BUNDLING_MIN_RANKS
            return world_size * (others.bit_length() if bundled else others)
        case "butterfly":
            log2 = world_size.bit_length() - 1
            return (log2 << log2) + 2 * (world_size - (1 << log2))
        case "tree":
            return 2 * others


def messages_by_pair(load: Workload, world_size: int) -> Counter[tuple[int, int]]:
    """Count the messages by (sender, receiver); of a dense exchange, count one slice of each segment."""
    ranks = range(world_size)
    if load.kind.topology == "ring":
        hops = 2 * (world_size - 1)
        return Counter({(rank, (rank + 1) % world_size): hops for rank in ranks if hops})
    if load.kind.topology == "direct":
        return Counter({(src, dst): 2 for src in ranks for dst in ranks if src != dst})
    return Counter((message.src, message.dst) for message in messages_of(load, world_size, 1))


# -- CPU time --------------------------------------------------------------------------------------


def _is_hashed_in_slices(kind: ExchangeKind) -> bool:
    """Return whether each member sums one segment and hashes it slice by slice."""
    return not kind.is_sparse and kind.topology != "star"


def receive_work_s(work: ReceiveWork, load: Workload, part: float, cpu: CpuCosts) -> float:
    """Return a receiver's CPU time for a payload whose size is the fraction `part` of the exchange's unit.

    A merge is counted with all k entries, regardless of `part`.
    """
    match work:
        case ReceiveWork.ADD:
            return part * (load.vector_bytes * cpu.add_byte_s + _recoding_s(load, cpu, is_sent_on=True))
        case ReceiveWork.STORE:
            return part * (load.vector_bytes * cpu.store_byte_s + _recoding_s(load, cpu, is_sent_on=False))
        case ReceiveWork.MERGE:
            return load.entries * (cpu.merge_entry_s + _level_entry_s(load, cpu))
        case ReceiveWork.POOL:
            return part * load.entries * (cpu.decode_entry_s + cpu.sum_entry_s)
        case ReceiveWork.KEEP | ReceiveWork.ADOPT:
            return part * load.entries * cpu.decode_entry_s


def _recoding_s(load: Workload, cpu: CpuCosts, is_sent_on: bool) -> float:
    """Return the CPU time for decoding the whole dense vector and, if a ring sends it on, for rounding it."""
    if not load.is_rounded:
        return 0.0
    rounding_s = cpu.round_element_s if is_sent_on and load.kind.topology == "ring" else 0.0
    return load.parameters * (cpu.widen_element_s + rounding_s)


def start_work_s(load: Workload, cpu: CpuCosts) -> float:
    """Return the CPU time for selecting and encoding, or rounding, before anything is sent."""
    if not load.kind.is_sparse:  # in a ring a member rounds only its own segment before it sends
        is_rounding = load.is_rounded and load.kind.topology != "ring"
        return load.parameters * cpu.round_element_s if is_rounding else 0.0
    encode_entry_s = cpu.encode_entry_s + _level_entry_s(load, cpu)
    return load.parameters * cpu.select_parameter_s + load.entries * encode_entry_s


def _level_entry_s(load: Workload, cpu: CpuCosts) -> float:
    """Return the additional time for encoding an entry as int4 or int2."""
    return (LEVEL_ENCODE_FACTOR - 1.0) * cpu.encode_entry_s if load.values in LEVEL_BITS else 0.0


def end_work_s(load: Workload, world_size: int, cpu: CpuCosts) -> float:
    """Return the CPU time after the last message: summing for TopK, and hashing for the vote.

    If each member sums one segment, only the last slice remains to be hashed.
    """
    if _is_hashed_in_slices(load.kind):
        return load.vector_bytes / (world_size * slice_count(load, world_size)) * cpu.hash_byte_s
    if not load.kind.is_sparse:
        return load.vector_bytes * cpu.hash_byte_s
    is_gathered = load.kind.topology == "all-gather"
    entries = load.entries * (world_size if is_gathered else 1)
    summing_s = entries * cpu.sum_entry_s if is_gathered else 0.0
    return summing_s + 12 * min(entries, load.parameters) * cpu.hash_byte_s


def overlapped_work_s(load: Workload, world_size: int, cpu: CpuCosts) -> float:
    """Return the CPU time for hashing final slices; it overlaps with transfers if the core is idle."""
    if not _is_hashed_in_slices(load.kind):
        return 0.0
    return load.vector_bytes * cpu.hash_byte_s - end_work_s(load, world_size, cpu)


def cpu_s_per_byte(load: Workload, cpu: CpuCosts) -> float:
    """Return the CPU time per byte at each end, in seconds."""
    return cpu.byte_s + (cpu.crypt_byte_s if load.encrypted else 0.0)
