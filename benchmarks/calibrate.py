"""Seconds of one core for the work of an exchange, measured on this machine: the CPU term of the planner.

Decides what is timed, and takes the least of several repeats.  Never uses a network but loopback.

    codec + merge    25,600 of 25.6 M entries, as a gTop-k hop at density 0.001 has them
    selection        the product's own, with its residual, over 25.6 M parameters (less with --quick)
    dense            add, store and hash of 1 MiB slices, the largest that a ring has
    socket           ZeroMQ on loopback, both ends in one process: CPU time, half for each end

Run:  python benchmarks/calibrate.py [--quick]         prints JSON that predictions.py and paper_table.py take
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import torch
import zmq

from gridtrain.protocol.loads import Cpu
from gridtrain.protocol.messages import Channel, Data, Phase, Place, RoundId
from gridtrain.protocol.ring import LARGEST_SLICE_BYTES
from gridtrain.sparsify.feedback import ErrorFeedback
from gridtrain.sparsify.merge import merge, sum_in_rank_order
from gridtrain.transport.base import Received, open_gate
from gridtrain.transport.curve import Identity
from gridtrain.transport.stack import over
from gridtrain.transport.zeromq import ZeroMQTransport
from gridtrain.wire.sparse import ValueKind, decode, encode

PARAMETERS, ENTRIES = 25_600_000, 25_600
SLICE_BYTES = LARGEST_SLICE_BYTES
REPEATS = 7
KIND = ValueKind.FP16


def least_s(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """The shortest of several runs: what else the machine does only ever adds."""
    best_s = float("inf")
    for _ in range(repeats):
        began_s = time.perf_counter()
        work()
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s


def sparse_work(rng: np.random.Generator) -> dict[str, float]:
    parts = []
    for _ in range(8):
        indices = np.unique(rng.integers(0, PARAMETERS, int(1.01 * ENTRIES)))[:ENTRIES]
        values = rng.standard_normal(indices.size).astype(np.float32)
        payload = encode(indices, values, n=PARAMETERS, kind=KIND)
        parts.append((payload, decode(payload, n=PARAMETERS, max_entries=ENTRIES, kind=KIND)))
    (payload, mine), (_, theirs) = parts[:2]
    decoding_s = least_s(lambda: decode(payload, n=PARAMETERS, max_entries=ENTRIES, kind=KIND))
    merging_s = least_s(lambda: merge(mine, theirs, n=PARAMETERS, k=ENTRIES, kind=KIND))
    summing_s = least_s(lambda: sum_in_rank_order([part for _, part in parts]))
    encoding_s = least_s(lambda: encode(mine.indices, mine.values, n=PARAMETERS, kind=KIND))
    return {
        "encode_entry_s": encoding_s / ENTRIES,
        "decode_entry_s": decoding_s / ENTRIES,
        "merge_entry_s": (decoding_s + merging_s) / ENTRIES,
        "sum_entry_s": summing_s / (len(parts) * ENTRIES),
    }


def selection(parameters: int) -> dict[str, float]:
    """On one thread; the first round has no threshold to begin from, and is not counted."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        feedback = ErrorFeedback(parameters, "cpu")
        gradient_N = torch.randn(parameters, generator=torch.Generator().manual_seed(0))
        k = max(1, parameters // 1000)

        def one() -> None:
            feedback.commit(feedback.prepare(gradient_N, k, KIND), [])

        one()
        return {"select_parameter_s": least_s(one, 3) / parameters}
    finally:
        torch.set_num_threads(threads)


def dense_work() -> dict[str, float]:
    from hashlib import sha256

    here = np.ones(64 * SLICE_BYTES // 4, np.float32).reshape(64, -1)
    there = np.ones_like(here)

    def add() -> None:
        for row, other in zip(here, there, strict=True):
            row += other

    def store() -> None:
        for row, other in zip(here, there, strict=True):
            row[:] = other

    def digest() -> None:
        for row in here:
            sha256(row.data).digest()

    return {
        "add_byte_s": least_s(add) / here.nbytes,
        "store_byte_s": least_s(store) / here.nbytes,
        "hash_byte_s": least_s(digest) / here.nbytes,
    }


def socket_work() -> dict[str, float]:
    small_s, _ = _through(64, 4000, None)
    big_s, nbytes = _through(SLICE_BYTES, 200, None)
    sealed_s, _ = _through(SLICE_BYTES, 200, zmq.curve_keypair())
    byte_s = max(0.0, big_s - small_s) / nbytes / 2
    return {
        "message_s": min(_message_s() for _ in range(3)),
        "byte_s": byte_s,
        "crypt_byte_s": max(0.0, (sealed_s - big_s) / nbytes / 2),
    }


def _message_s(messages: int = 400) -> float:
    """One small message at one end, through the whole of our transport, polled for as in a worker."""
    ends = [
        over(ZeroMQTransport(identity, "calibrate", gate=open_gate, encrypted=False), identity)
        for identity in (Identity.generate(), Identity.generate())
    ]
    (left, right), arrived = ends, 0
    try:
        left.dial(right.me, right.listen("tcp://127.0.0.1:0"))
        until_s = time.monotonic() + 10
        while not (left.connected(right.me) and right.connected(left.me)):
            if time.monotonic() > until_s:
                raise SystemExit("calibrate: two ends on loopback did not connect within 10 s")
            for end in ends:
                end.poll(0.01)
        began_s = time.process_time()
        for index in range(messages):
            source, target = ends[index % 2], ends[1 - index % 2]
            source.send(target.me, _data(index))
            while arrived <= index:
                source.poll(0.0)
                for event in target.poll(0.1):
                    if isinstance(event, Received) and isinstance(event.message, Data):
                        arrived += 1
                        target.done(event.peer, event.nbytes)
        return (time.process_time() - began_s) / messages / 2
    finally:
        for end in ends:
            end.close()


def _data(step: int) -> Data:
    return Data(RoundId(1, 1, step, 0), Channel(0, 0, 0), Place(Phase.REDUCE, 1, 1, 1), False, b"\0" * 64)


def _through(nbytes: int, messages: int, keys: tuple[bytes, bytes] | None) -> tuple[float, int]:
    """CPU seconds of both ends for one message, and its bytes."""
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


def measure(*, quick: bool = False) -> Cpu:
    """Takes about 10 seconds, 2 with `quick`."""
    rng = np.random.default_rng(0)
    parts = (
        sparse_work(rng),
        selection(PARAMETERS // 10 if quick else PARAMETERS),
        dense_work(),
        socket_work(),
    )
    return Cpu(**{name: value for part in parts for name, value in part.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer parameters")
    found = measure(quick=parser.parse_args().quick)
    json.dump(asdict(found), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
