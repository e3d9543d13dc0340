"""One worker of `gridtrain bench`: a real run that only exchanges synthetic gradients, to time the exchange.

This module defines where each measurement begins and ends.  Admission, generations, rounds, votes and
transport are the same as in every run; only the model's work is left out: the forward and backward
passes and the update.  The members wait for each other at three points: "ready", "done" and "settled".

    prepare_s          before "ready": select the entries to send, and encode them
    start_s .. end_s   from "ready" to "done": the collective, votes and decision; cpu_s is its CPU time
    workspace_s        the part of end_s - start_s spent on decoding, merging, encoding and digests
    sent_bytes         bytes sent from "ready" until all members have arrived at "done"

    python -m gridtrain.tools.bench.bench_member --invitation ... --name worker-1 --exchange gtopk --n 256000
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

import gridtrain
from gridtrain.tools.bench.exchange_names import parse_exchange
from gridtrain.tools.bench.process_barrier import BarrierClient
from gridtrain.training.exchangers import ExchangePart

SAMPLES, STEPS = 4096, 1_000_000
"""The run has more steps than any measurement needs, so that `BarrierServer` ends it, not the data ledger."""

_NET = Path("/proc/self/net/dev")
_WORK_METHODS = ("apply", "payload", "compute_digest")


class VectorModel(nn.Module):
    """A model of n parameters, whose memory pages are never accessed, so that it takes up no memory."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.zeros(n))


class BufferWork:
    """Measures how long a collective buffer's methods take, and counts the payloads that it sends.

    Attributes:
        seconds: the time spent on decoding, adding, merging, encoding and digests.
        payloads, payload_bytes: the number and the bytes of the payloads, excluding the transport's framing.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.payloads = self.payload_bytes = 0

    def instrument(self, workspace: Any) -> None:
        # A weak reference: a buffer that refers to itself keeps its memory until Python looks for cycles, and
        # the next exchanges get new pages from the kernel, which takes longer than merging.
        for name in _WORK_METHODS:
            setattr(workspace, name, self._measured(name, WeakMethod(getattr(workspace, name))))

    def _measured(self, name: str, reference: WeakMethod[Callable[..., Any]]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            method = reference()
            assert method is not None, "the workspace calls its own method"
            began_s = time.perf_counter()
            try:
                found = method(*arguments)
            finally:
                self.seconds += time.perf_counter() - began_s
            if name == "payload":
                self.payloads += 1
                self.payload_bytes += len(found)
            return found

        return call


def sent_bytes(grid: gridtrain.Grid, interface: str) -> int:
    """Return how many bytes have been sent over the interface, headers included; if `interface` is "", return
    how many bytes this worker has written to its sockets."""
    if not interface:
        return sum(sent for sent, _ in grid.traffic.values())
    line = next(line for line in _NET.read_text().splitlines() if line.strip().startswith(f"{interface}:"))
    return int(line.partition(":")[2].split()[8])


def run_repeats(grid: gridtrain.Grid, player: BarrierClient, options: argparse.Namespace) -> None:
    """Repeat the exchange until the barrier's server ends the measurement."""
    model = VectorModel(options.n)
    exchange = parse_exchange(options.exchange)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    wrapped = grid.optimizer(inner, model, exchange=exchange, average_buffers_every=0, compare_every=0)
    generator = torch.Generator().manual_seed(options.seed)
    contribution_N = torch.randn(options.n, generator=generator)
    for _ in grid.batches(range(SAMPLES), batch_size=1, steps=STEPS):
        if not run_repeat(grid, wrapped, contribution_N, player, options.interface):
            return


def run_repeat(
    grid: gridtrain.Grid, wrapped: Any, contribution_N: Tensor, player: BarrierClient, interface: str
) -> bool:
    """Perform one step's exchange; return False if the barrier's server has ended the measurement.

    An aborted attempt is repeated within the measured time, as in a training step.
    """
    session, exchanger, work = grid._session, wrapped._exchanger, BufferWork()
    aborts, word, start_s, cpu_s, sent, prepare_s, prepare_cpu_s = -1, "", 0.0, 0.0, 0, 0.0, 0.0
    while True:
        plan = session.begin()
        if plan is None:
            return True  # the group continued without this worker, so this repeat is not counted
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        part: ExchangePart = exchanger.prepare_bucket(0, contribution_N, plan, usable=True)
        work.instrument(part.buffer)
        if not word:
            prepare_s, prepare_cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
            session.set_busy(True)  # so that no timeout expires while this member waits
            word = player.wait_at("ready", world_size=plan.world_size)
            session.set_busy(False)
            if word == "end":
                return False
            sent, cpu_s, start_s = sent_bytes(grid, interface), time.process_time(), time.monotonic()
        outcome = session.run(plan, [part.buffer], part.skip, b"")
        aborts += 1
        if outcome.is_committed:
            break
    # All members have voted, so all bytes have arrived.
    cpu_s, end_s = time.process_time() - cpu_s, time.monotonic()
    player.wait_at("done", start_s=start_s, end_s=end_s)
    figures = {
        "cpu_s": cpu_s,
        "sent_bytes": sent_bytes(grid, interface) - sent,
        "workspace_s": work.seconds,
        "payloads": work.payloads,
        "payload_bytes": work.payload_bytes,
        "aborts": aborts,
    }
    exchanger.commit(part)
    player.wait_at("settled", prepare_s=prepare_s, prepare_cpu_s=prepare_cpu_s, **figures)
    return True


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gridtrain.tools.bench.bench_member")
    parser.add_argument("--invitation", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--exchange", required=True)
    parser.add_argument("--n", type=int, required=True, help="elements of the vector")
    parser.add_argument("--referee", type=Path, required=True, help="socket of the barrier's server")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the synthetic gradient, different for each member"
    )
    parser.add_argument("--interface", default="", help="interface whose bytes are counted, such as eth0")
    parser.add_argument("--limit", default="", help="upload and download limit, such as 100Mbit")
    parser.add_argument("--listen", default="")
    parser.add_argument("--unencrypted", action="store_true")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    player = BarrierClient(options.referee)
    grid = gridtrain.join(
        options.invitation,
        name=options.name,
        listen=options.listen or None,
        upload_limit=options.limit or None,
        download_limit=options.limit or None,
        checkpoint_every=0,
        handover_mib=0,
        unencrypted=options.unencrypted,
    )
    run_repeats(grid, player, options)


if __name__ == "__main__":
    main()
    os._exit(0)  # the whole group ends now, so no member is left to be informed
