"""Measures what a join storm, heartbeats and a status cost a coordinator with many workers on one core.

    simulated workers --bytes--> decode -> Membership.handle -> encode --bytes--> simulated workers
                                 \\------- timed, one event after the other -------/

Workers send messages in virtual time.  The coordinator's code takes real CPU time (of the process, so that
other processes matter little), during which other messages wait.  So a latency includes waiting and work,
from the arrival of a message until all messages that it caused are encoded.  It does not include sockets,
CURVE, and the journal's fsync, which other threads or the disk execute.

    join storm   all join within --storm seconds; it ends when a generation of all workers trains
    heartbeat    all workers send one per `Deadlines.beat_s`, in the storm and for --calm s after it
    a change     one worker leaves; it ends when a generation of all others trains
    status       once a second, as JSON
    memory       of the process, including the simulated workers

Run:  python benchmarks/crowd.py [--workers 100 300 1000 2000] [--out FILE]
"""

from __future__ import annotations

import heapq
import json
import math
import os
import random
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import record
from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.network.wire.codec import decode, encode
from gridtrain_coordinator.membership.membership import Membership
from gridtrain_coordinator.membership.worker_admission import MAX_WORKERS
from gridtrain_coordinator.message_batch import MessageBatch
from gridtrain_coordinator.run.events import (
    DialBack,
    DialBackResult,
    Effect,
    Event,
    MessageReceived,
    RunPhase,
    Send,
)
from procfs import in_own_process

NETWORK_S = 0.02
"""Latency of a message, one way."""

SETUP = m.Setup(
    (("model", "crowd"),),
    m.LedgerSpec(10_000_000, 0, epochs=1),
    4,
    None,
    initial_state_digest=bytes(32),  # all workers have the same seed
)


@dataclass(frozen=True, slots=True)
class Part:
    """The figures of a part of a measurement, in seconds and bytes.

    Attributes:
        took_s: in virtual time, including the waiting for the coordinator.
        core_s, longest_s: CPU time of all events, and of the longest one.
        bytes: the most bytes that one event sent to all workers together.
        beat_s: p50 and p99 of heartbeats.
    """

    took_s: float
    core_s: float
    longest_s: float
    bytes: int
    beat_s: tuple[float, float]


class Crowd:
    """A coordinator, correct simulated workers, and their events in virtual time."""

    def __init__(self, workers: int, storm_s: float, seed: int) -> None:
        self._random = random.Random(seed)
        self.limits = Deadlines()
        self.core = Membership(
            me=b"c" * 32, run="crowd", term=1, deadlines=self.limits, software="", min_workers=workers
        )
        self.peers = [number.to_bytes(2, "big") * 16 for number in range(1, workers + 1)]
        self._due_s = math.inf
        self._clock_s = min(-time.process_time() + time.process_time() for _ in range(1000))
        self._left = b""
        self.now_s = self.free_s = self.core_s = self.longest_s = 0.0
        self.longest_bytes = 0
        self.heartbeats_s: list[tuple[float, float]] = []  # arrival, latency
        self._view: m.MembershipView | None = None
        self.statuses_s: list[float] = []
        self._queue: list[tuple[float, int, str, Event | m.PeerId]] = []
        self._count = self._sequence = 0
        for peer in self.peers:
            self._at(self._random.uniform(0, storm_s), "join", peer)
        self._at(1.0, "status", b"")

    def run(self, is_over: Callable[[float], bool], what: str, at_most_s: float = 600.0) -> Part:
        """Run until `is_over` at a time.  Raises `SystemExit` after `at_most_s`."""
        began_s, core_s, first = self.now_s, self.core_s, len(self.heartbeats_s)
        self.longest_s, self.longest_bytes = 0.0, 0
        while not is_over(self.now_s):
            if self.now_s > began_s + at_most_s:
                raise SystemExit(
                    f"{len(self.peers)} workers, {what}: not over after {at_most_s:g} s; {self.core.reason}"
                )
            at_s, _, kind, event = heapq.heappop(self._queue)
            while self._due_s <= at_s:
                self._work(max(self._due_s, self.free_s), None)
            self._execute(at_s, kind, event)
        heartbeats_s = percentiles([latency_s for _, latency_s in self.heartbeats_s[first:]])
        return Part(
            max(self.now_s, self.free_s) - began_s,
            self.core_s - core_s,
            self.longest_s,
            self.longest_bytes,
            heartbeats_s,
        )

    def trains(self, workers: int) -> bool:
        """Return whether a generation of so many workers trains."""
        run = self.core.run
        is_whole = len(run.member_list) == workers and run.view_change.is_idle and not run.view_change.reason
        return self.core.phase is RunPhase.TRAINING and is_whole

    def leave(self, peer: m.PeerId) -> None:
        """Let a worker leave now."""
        self._left = peer
        self._schedule(self.now_s, peer, m.Leave("end of this worker"))

    def _execute(self, at_s: float, kind: str, what: Event | m.PeerId) -> None:
        if kind == "status":
            began_s = time.process_time()
            json.dumps(self.core.status(at_s))
            self.statuses_s.append(self._busy(at_s, time.process_time() - began_s))
            self._at(at_s + 1.0, "status", b"")
        elif kind == "join":
            assert isinstance(what, bytes)
            number = int.from_bytes(what[:2], "big")
            join = m.Join("crowd", f"worker-{number}", f"tcp://10.0.{number % 250}.{number // 250 + 1}:7000")
            self._schedule(at_s, what, join, SETUP)
            self._at(at_s + self._random.uniform(0, self.limits.beat_s), "heartbeat", what)
        elif kind == "heartbeat":
            assert isinstance(what, bytes)
            if what == self._left:
                return
            self._sequence += 1
            heartbeat = m.Heartbeat(self._sequence, 0, self._sequence, ())
            self.heartbeats_s.append((at_s, self._work(at_s, MessageReceived(what, heartbeat))))
            self._at(at_s + self.limits.beat_s, "heartbeat", what)
        else:
            assert not isinstance(what, bytes)
            self._work(at_s, what)

    def _work(self, at_s: float, event: Event | None) -> float:
        """Let the coordinator handle an event as soon as it is free; return the time from arrival to end."""
        begins_s = max(at_s, self.free_s)
        raw = encode(event.message) if isinstance(event, MessageReceived) else None
        began_s = time.process_time()
        if raw is not None and isinstance(event, MessageReceived):
            event = MessageReceived(event.peer, decode(raw))
        effects = self.core.tick(begins_s) if event is None else self.core.handle(event, begins_s)
        if not self._queue or self._queue[0][0] > self.free_s or event is None:
            self._due_s = self.core.deadline_s  # the daemon's loop reads it when its queue is empty
        batch, sent_bytes = MessageBatch(), 0  # as in the daemon's loop
        for effect in effects:
            if isinstance(effect, Send):
                sent_bytes += sum(map(len, batch.encode(effect.message)))
        self.longest_bytes = max(self.longest_bytes, sent_bytes)
        latency_s = self._busy(at_s, time.process_time() - began_s)
        for effect in effects:
            self._answer(effect)
        return latency_s

    def _busy(self, at_s: float, taken_s: float) -> float:
        taken_s = max(0.0, taken_s - self._clock_s)  # reading this clock is a system call
        self.free_s = max(at_s, self.free_s) + taken_s
        self.now_s = at_s
        self.core_s += taken_s
        self.longest_s = max(self.longest_s, taken_s)
        return self.free_s - at_s

    def _answer(self, effect: Effect) -> None:
        """Schedule the answer of a worker to a message."""
        if isinstance(effect, DialBack):
            self._at(self.free_s + 2 * NETWORK_S, "event", DialBackResult(effect.peer, effect.addresses[0]))
        if not isinstance(effect, Send):
            return
        peer, message = effect.peer, effect.message
        if isinstance(message, m.Admitted):
            self._schedule(self.free_s + 0.5, peer, m.LinkLatencies(()))  # after it has measured its links
        elif isinstance(message, m.Freeze) and self._view is not None:
            view = self._view  # the worker has taken no step in it
            report = m.FreezeReport(
                message.term, view.generation, True, view.applied, view.history, view.ledger, None, b"", 0
            )
            self._schedule(self.free_s + 2 * NETWORK_S, peer, report)
        elif isinstance(message, m.MembershipView):
            self._view = message
            ready = m.Ready(message.term, message.generation, message.history)
            self._schedule(self.free_s + 2 * NETWORK_S, peer, ready)

    def _schedule(self, at_s: float, peer: m.PeerId, *messages: m.Message) -> None:
        for message in messages:
            self._at(at_s, "event", MessageReceived(peer, message))

    def _at(self, at_s: float, kind: str, what: Event | m.PeerId) -> None:
        self._count += 1
        heapq.heappush(self._queue, (at_s, self._count, kind, what))


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """Return p50 and p99."""
    if len(values) < 2:
        return (values[0], values[0]) if values else (0.0, 0.0)
    quantiles = statistics.quantiles(values, n=100)
    return quantiles[49], quantiles[98]


def measure(workers: int, storm_s: float, calm_s: float, seed: int = 0) -> dict[str, Any]:
    """Measure one number of workers.  Raises `SystemExit` if they do not train together in time."""
    crowd = Crowd(workers, storm_s, seed)
    storm = crowd.run(lambda now_s: crowd.trains(workers), "join storm")
    until_s = crowd.now_s + calm_s
    calm = crowd.run(lambda now_s: now_s >= until_s, "calm")
    crowd.leave(crowd.peers[workers // 2])
    change = crowd.run(lambda now_s: crowd.trains(workers - 1), "a change")
    return {
        "workers": workers,
        "generations": crowd.core.generation,
        "storm_s": storm.took_s,
        "core_s": storm.core_s,
        "longest_s": storm.longest_s,
        "storm_bytes": storm.bytes,
        "storm_beat_s": storm.beat_s,
        "calm_beat_s": calm.beat_s,
        "calm_core_share": calm.core_s / calm_s,
        "change_s": change.took_s,
        "change_longest_s": change.longest_s,
        "change_bytes": change.bytes,
        "change_beat_s": change.beat_s,
        "status_s": percentiles(crowd.statuses_s),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return a table in Markdown with a row for each figure; pairs are p50 and p99."""
    rows = []
    for name in results[0].keys() - {"workers"}:
        values = (each[name] if isinstance(each[name], tuple) else (each[name],) for each in results)
        rows.append((name, *(", ".join(f"{value:.4g}" for value in pair) for pair in values)))
    return record.table(("workers", *(str(each["workers"]) for each in results)), sorted(rows))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[100, 300, 1000, MAX_WORKERS])
    parser.add_argument("--storm", type=float, default=10.0, help="seconds in which all join")
    parser.add_argument("--calm", type=float, default=10.0, help="seconds of training after the storm")
    options = parser.parse_args(arguments)
    if not all(2 <= count <= MAX_WORKERS for count in options.workers):
        parser.error(f"--workers {options.workers}: a coordinator admits 2 to {MAX_WORKERS}")
    load = round(os.getloadavg()[0], 2)
    results = [in_own_process(measure, each, options.storm, options.calm) for each in options.workers]
    print(table(results))
    record.write(options.out, arguments, load_before=load, results=results)


if __name__ == "__main__":
    main()
