"""Measures the CPU costs of the planner's cost model on this machine, in seconds of one core.

    processor        selection and codec of 25.6 M parameters, density 0.001
    dense            rounding, adding, copying and hashing 1 MiB slices, the largest of a ring
    socket           ZeroMQ on loopback, both ends in one process: CPU time, half for each end
    message, wake,   real members, four tiny exchanges and a ring of many slices: see `messages_work`
    begin, merge ... and two with sparse payloads

It prints JSON for predictions.py, paper.py and scaling.py: the costs for 2, 4 and 8 members, which share the
machine's cores.

Run:  python benchmarks/calibrate.py > benchmarks/results/cpu.json
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import zmq

from bench.cells import Link
from bench.measurement import hosts_of, why_no_link
from gridtrain.core.collectives.ring import MAX_SLICE_BYTES
from gridtrain.core.planning.cost_model import exchange_cost
from gridtrain.core.planning.exchange_facts import make_exchange
from gridtrain.core.planning.network_model import uniform_network
from gridtrain.core.planning.workload import NO_CPU_COSTS, PACKET_BYTES, CpuCosts, Workload, count_messages
from gridtrain.network.wire.dense_payload import decode_slice, encode_slice
from gridtrain.network.wire.value_encoding import ValueKind
from gridtrain.tools.bench.bench_group import BenchSetting, start_group
from gridtrain.tools.bench.processor_bench import measure_processor
from record import RESULTS, parser
from shared_host import host_exchange_cost

CPU = RESULTS / "cpu.json"
PARAMETERS, ENTRIES = 25_600_000, 25_600
SLICE_BYTES = MAX_SLICE_BYTES
REPEATS = 7
MEMBERS = (2, 4, 8)


def least_s(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the shortest of several runs, because other work of the machine only adds time."""
    best_s = float("inf")
    for _ in range(repeats):
        began_s = time.perf_counter()
        work()
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s


def processor_work() -> dict[str, float]:
    ns = measure_processor(PARAMETERS, ENTRIES / PARAMETERS)
    return {
        "encode_entry_s": 1e-9 * ns["encode_ns"],
        "decode_entry_s": 1e-9 * ns["decode_ns"],
        "select_parameter_s": 1e-9 * ns["select_ns"],
    }


def dense_work() -> dict[str, float]:
    row = np.random.default_rng(0).standard_normal(SLICE_BYTES // 4).astype(np.float32)
    section = np.frombuffer(encode_slice(row, ValueKind.INT8)[0], np.uint8)
    total, content = np.zeros_like(row), row.tobytes()
    return {
        "add_byte_s": least_s(lambda: np.add(total, row, out=total)) / row.nbytes,
        "store_byte_s": least_s(lambda: np.copyto(total, row)) / row.nbytes,
        "hash_byte_s": least_s(lambda: hashlib.sha256(content).digest()) / row.nbytes,
        "round_element_s": least_s(lambda: encode_slice(row, ValueKind.INT8)) / row.size,
        "widen_element_s": least_s(lambda: decode_slice(section, row.size, ValueKind.INT8)) / row.size,
    }


def socket_work() -> dict[str, float]:
    small_s, _ = _message_cpu_s(64, 4000, None)
    large_s, nbytes = _message_cpu_s(SLICE_BYTES, 200, None)
    encrypted_s, _ = _message_cpu_s(SLICE_BYTES, 200, zmq.curve_keypair())
    byte_s = max(0.0, large_s - small_s) / nbytes / 2
    return {
        "byte_s": byte_s,
        "crypt_byte_s": max(0.0, (encrypted_s - large_s) / nbytes / 2),
    }


BUTTERFLY, RING = "gtopk:topology=butterfly", "dense:topology=ring"
TINY = (BUTTERFLY, "topk", "gtopk:topology=tree", RING)
TINY_PARAMETERS = 2000


def messages_work(loops: CpuCosts, members: int, repeats: int = 30) -> dict[str, float]:
    """Measure the costs of messages of real members, and of sparse entries.

    It uses the lab's namespaces if they are available (the kernel's work for a link counts for the sender),
    else loopback, without rate limits.  The CPU time of a member is
        begin + ends * message + the work on its payloads,
    where ends is the number of messages that it sends and receives.  A ring of many slices beside one of few
    bytes gives message, the exchanges in `TINY` then give begin, and wake is chosen so that the cost model
    predicts their durations.

    Args:
        loops: the costs of `processor_work`, `dense_work` and `socket_work`, which are subtracted.
        members: more of them than cores find the caches filled by each other after each message.
    """
    tiny_ones = {what: BenchSetting(what, members, TINY_PARAMETERS) for what in TINY}
    large_ones = {name: BenchSetting(what, members, n) for name, (what, n) in LARGE.items()}
    medians = measure_in_turns(Link(members), tiny_ones | large_ones, repeats)
    found = solved(
        members,
        os.cpu_count() or 1,
        {what: medians[what].seconds for what in TINY},
        {what: medians[what].cpu_s for what in TINY},
        medians["ring"].cpu_s - ring_work_s(members, loops),
    )
    return found | works(members, medians, loops)


def ring_work_s(members: int, cpu: CpuCosts) -> float:
    """Return the CPU time of a member of the ring in `LARGE` for its bytes, without that for its messages."""
    nbytes, share = 4 * LARGE["ring"][1], (members - 1) / members
    moved_s = share * (cpu.add_byte_s + cpu.store_byte_s + 4 * cpu.byte_s)  # twice sent, twice received
    return nbytes * (moved_s + cpu.hash_byte_s)


LARGE = {
    "merge": (f"{BUTTERFLY},density=0.01", 2_560_000),
    "sum": ("topk:density=0.01", 2_560_000),
    "ring": (RING, 500_000),
}
"""Exchanges with payloads.  Merging takes longer on memory that was just received than in a loop."""


@dataclass(frozen=True, slots=True)
class Median:
    """The medians of the repeats of an exchange; `cpu_s` and `work_s` are means of the members."""

    seconds: float
    cpu_s: float
    work_s: float


def measure_in_turns(link: Link, settings: Mapping[str, BenchSetting], repeats: int) -> dict[str, Median]:
    """Measure the exchanges in turn; the first three turns are warm-ups.

    Each exchange finds the caches filled by others, as after a training step.
    """
    samples: dict[str, list[tuple[float, float, float]]] = {name: [] for name in settings}
    with (
        tempfile.TemporaryDirectory(prefix="calibrate-") as folder,
        hosts_of(link, loopback=bool(why_no_link(link))) as hosts,
        contextlib.ExitStack() as stack,
    ):
        groups = {
            name: stack.enter_context(start_group(setting, hosts, Path(folder) / str(index)))
            for index, (name, setting) in enumerate(settings.items())
        }
        for turn in range(-3, repeats):
            for name, group in groups.items():
                repeat = group.repeat()
                if turn >= 0:
                    samples[name].append((repeat.seconds, repeat.cpu_s, repeat.workspace_s))
    return {
        name: Median(*(statistics.median(column) for column in zip(*rows, strict=True)))
        for name, rows in samples.items()
    }


def works(members: int, medians: Mapping[str, Median], loops: CpuCosts) -> dict[str, float]:
    """Return the CPU costs of an entry merged or summed, beyond those of tiny exchanges and of `loops`.

    They are CPU time, because wall time on shared cores includes other members' work.
    """
    hops = count_messages(workload_of(BUTTERFLY), members) / members
    entries = 25_600

    def more_s(large: str, tiny: str) -> float:
        what, parameters = LARGE[large]
        network = uniform_network(members, 0.0, 1e12)
        known = exchange_cost(workload_of(what, parameters), network, prepared)
        return medians[large].cpu_s - medians[tiny].cpu_s - known.cpu_s

    prepared = replace(loops, select_parameter_s=0.0, encode_entry_s=0.0)  # before the exchange
    merging_s, summing_s = more_s("merge", BUTTERFLY), more_s("sum", "topk")
    return {
        "merge_entry_s": max(0.0, merging_s / (hops * entries)),
        "sum_entry_s": max(0.0, summing_s / (members * entries)),
    }


def packets_work(repeats: int = 8) -> dict[str, float]:
    """Measure the cost of a packet on a link slower than the processor: a ring of two at 50 Mbit/s."""
    link = Link(2, "50Mbit")
    if why_no_link(link):
        return {"packet_s": CpuCosts().packet_s}
    n = 500_000
    slow = measure_in_turns(
        link, {"ring": BenchSetting("dense", 2, n), "dense": BenchSetting("dense", 2, 2000)}, repeats
    )
    spent_s = (slow["ring"].cpu_s - slow["ring"].work_s) - (slow["dense"].cpu_s - slow["dense"].work_s)
    return {"packet_s": max(0.0, spent_s / (2 * 4 * n / PACKET_BYTES))}


def workload_of(what: str, parameters: int = TINY_PARAMETERS) -> Workload:
    name, _, options = what.partition(":")
    exchange = make_exchange(name, f"density=0.001,{options}")
    assert exchange is not None
    return Workload.of(exchange, parameters, encrypted=False)


def ends_of(what: str, members: int, parameters: int = TINY_PARAMETERS) -> float:
    """Return the mean number of messages that a member sends or receives, with vote and decision."""
    return 2 * (count_messages(workload_of(what, parameters), members) + 2 * (members - 1)) / members


def solved(
    members: int,
    cores: int,
    seconds: Mapping[str, float],
    cpu_s: Mapping[str, float],
    ring_cpu_s: float,
) -> dict[str, float]:
    """Return `begin_s`, `message_s` and `wake_s`, at least 0.

    Args:
        seconds, cpu_s: medians of the exchanges in `TINY`, by name.
        ring_cpu_s: the CPU time of the ring in `LARGE`, without the work on its bytes.
    """
    what, parameters = LARGE["ring"]
    more_ends = ends_of(what, members, parameters) - ends_of(RING, members)
    message_s = max(0.0, ring_cpu_s - cpu_s[RING]) / more_ends
    begins_s = [spent_s - message_s * ends_of(name, members) for name, spent_s in cpu_s.items()]
    begin_s = max(0.0, statistics.fmean(begins_s))
    found = replace(NO_CPU_COSTS, message_s=message_s, begin_s=begin_s)

    def predicted_s(wake_s: float) -> float:
        cpu, network = replace(found, wake_s=wake_s), uniform_network(members, 0.0, 1e12)
        return sum(host_exchange_cost(workload_of(what), network, cpu, cores).exchange_s for what in seconds)

    low, high, measured_s = 0.0, max(seconds.values()), sum(seconds.values())
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted_s(middle) < measured_s else (low, middle)
    return {"message_s": found.message_s, "wake_s": low, "begin_s": found.begin_s}


def _message_cpu_s(nbytes: int, messages: int, keys: tuple[bytes, bytes] | None) -> tuple[float, int]:
    """Return the CPU seconds of both ends for one message, and its bytes."""
    context = zmq.Context()
    receiver, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    try:
        for socket in (receiver, sender):
            socket.linger = 0
        if keys is not None:
            public, secret = keys
            receiver.curve_server, receiver.curve_secretkey = True, secret
            sender.curve_serverkey = public
            sender.curve_publickey, sender.curve_secretkey = zmq.curve_keypair()
        port = receiver.bind_to_random_port("tcp://127.0.0.1")
        sender.connect(f"tcp://127.0.0.1:{port}")
        sender.send(b"first")
        receiver.recv()
        payload = bytes(nbytes)
        best_s = float("inf")
        for _ in range(3):
            thread = threading.Thread(target=_send_all, args=(sender, payload, messages))
            began_s = time.process_time()
            thread.start()
            for _ in range(messages):
                receiver.recv(copy=False)
            thread.join()
            best_s = min(best_s, time.process_time() - began_s)
        return best_s / messages, nbytes
    finally:
        sender.close()
        receiver.close()
        context.term()


def _send_all(sender: zmq.Socket[bytes], payload: bytes, messages: int) -> None:
    for _ in range(messages):
        sender.send(payload, copy=False)


def measure() -> dict[int, CpuCosts]:
    """Measure all costs for groups of `MEMBERS`, in three minutes."""
    loops = processor_work() | dense_work() | socket_work()
    known, packets = replace(NO_CPU_COSTS, **loops), packets_work()
    return {members: CpuCosts(**loops, **messages_work(known, members), **packets) for members in MEMBERS}


def read_cpu(path: Path) -> CpuCosts:
    """Return the costs of members with a core of their own from the output of this program."""
    costs = read_by_members(path)
    return costs[min(costs)]


def read_by_members(path: Path) -> dict[int, CpuCosts]:
    """Return the output of this program: costs by the number of members on the machine."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return {int(members): CpuCosts(**costs) for members, costs in found.items()}


def main() -> None:
    parser(__doc__, out="").parse_args()
    print(json.dumps({members: asdict(costs) for members, costs in measure().items()}, indent=1))


if __name__ == "__main__":
    main()
