"""One coordinator and very many workers: what a join storm, a heartbeat and a status take on one core.

    simulated workers --bytes--> decode -> Membership.handle -> encode --bytes--> simulated workers
                                 \\------- timed, one event after the other -------/

Decides when simulated workers speak, in virtual time; what the coordinator's own code takes for it is real
CPU time of this core, and whoever comes meanwhile waits in line.  So a latency here is waiting and work, from
the arrival of a message until all that it caused is encoded.  Not in it: sockets, CURVE, and the journal's
fsync, which another process or the disk does.

    join storm   all within --storm seconds; over when a generation of all of them trains
    heartbeat    all of them, once in each `Deadlines.beat_s`, in the storm and for --calm s after it
    status       once a second, as JSON

Run:  python benchmarks/crowd.py [--workers 100 300 1000] [--out FILE]
"""

from __future__ import annotations

import argparse
import datetime
import heapq
import json
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

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

NETWORK_S = 0.02
"""From a worker to the coordinator or back."""

SETUP = m.Setup((("model", "crowd"),), m.LedgerSpec(10_000_000, 0, epochs=1), 4, None)


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds; `storm_s` of virtual time, with the waiting for the busy core; the others p50 and p99."""

    workers: int
    generations: int
    storm_s: float
    core_s: float
    longest_s: float
    storm_beat_s: tuple[float, float]
    calm_beat_s: tuple[float, float]
    status_s: tuple[float, float]
    calm_core_share: float


class Crowd:
    """Virtual time, one busy core, and workers that do as they are told."""

    def __init__(self, workers: int, storm_s: float, seed: int) -> None:
        self._random = random.Random(seed)
        self.limits = Deadlines()
        self.core = Membership(
            me=b"c" * 32, run="crowd", term=1, deadlines=self.limits, software="", min_workers=workers
        )
        self.peers = [number.to_bytes(2, "big") * 16 for number in range(1, workers + 1)]
        self._due_s = math.inf
        self.now_s = self.free_s = self.core_s = self.longest_s = 0.0
        self.training_s: float | None = None
        self.storm_core_s = 0.0  # of core_s, until then
        self.beats_s: list[tuple[float, float]] = []  # arrival, latency
        self.statuses_s: list[float] = []
        self._queue: list[tuple[float, int, str, Event | m.PeerId]] = []
        self._count = self._sequence = 0
        for peer in self.peers:
            self._at(self._random.uniform(0, storm_s), "join", peer)
        self._at(1.0, "status", b"")

    def run(self, calm_s: float, at_most_s: float = 600.0) -> None:
        """Until `calm_s` after all train."""
        while self._queue and self.now_s < at_most_s:
            at_s, _, kind, what = heapq.heappop(self._queue)
            if self.training_s is not None and at_s > self.training_s + calm_s:
                return
            while self._due_s <= at_s:
                self._work(max(self._due_s, self.free_s), None)
            self._happen(at_s, kind, what)
            if self.core.phase is RunPhase.TRAINING and self.training_s is None:
                self.training_s, self.storm_core_s = self.free_s, self.core_s

    def _happen(self, at_s: float, kind: str, what: Event | m.PeerId) -> None:
        if kind == "status":
            began_s = time.perf_counter()
            json.dumps(self.core.snapshot(at_s))
            self.statuses_s.append(self._busy(at_s, time.perf_counter() - began_s))
            self._at(at_s + 1.0, "status", b"")
        elif kind == "join":
            assert isinstance(what, bytes)
            number = int.from_bytes(what[:2], "big")
            join = m.Join("crowd", f"worker-{number}", f"tcp://10.0.{number % 250}.{number // 250 + 1}:7000")
            self._says(at_s, what, join, SETUP)
            self._at(at_s + self._random.uniform(0, self.limits.beat_s), "beat", what)
        elif kind == "beat":
            assert isinstance(what, bytes)
            step = 0 if self.training_s is None else max(0, int(at_s - self.training_s))
            self._sequence += 1
            beat = m.Heartbeat(self._sequence, step, self._sequence, ())
            self.beats_s.append((at_s, self._work(at_s, MessageReceived(what, beat))))
            self._at(at_s + self.limits.beat_s, "beat", what)
        else:
            assert not isinstance(what, bytes)
            self._work(at_s, what)

    def _work(self, at_s: float, event: Event | None) -> float:
        """The coordinator deals with it as soon as it is free; returns arrival to end."""
        begins_s = max(at_s, self.free_s)
        raw = encode(event.message) if isinstance(event, MessageReceived) else None
        began_s = time.perf_counter()
        if raw is not None and isinstance(event, MessageReceived):
            event = MessageReceived(event.peer, decode(raw))
        effects = self.core.tick(begins_s) if event is None else self.core.handle(event, begins_s)
        if not self._queue or self._queue[0][0] > self.free_s or event is None:
            self._due_s = (
                self.core.deadline_s
            )  # as the daemon's loop asks when it has dealt with all that came
        batch = MessageBatch()  # as the daemon's loop encodes them
        for effect in effects:
            if isinstance(effect, Send):
                batch.encode(effect.message)
        latency_s = self._busy(at_s, time.perf_counter() - began_s)
        for effect in effects:
            self._answer(effect)
        return latency_s

    def _busy(self, at_s: float, taken_s: float) -> float:
        self.free_s = max(at_s, self.free_s) + taken_s
        self.now_s = at_s
        self.core_s += taken_s
        self.longest_s = max(self.longest_s, taken_s)
        return self.free_s - at_s

    def _answer(self, effect: Effect) -> None:
        """What a worker does about it."""
        if isinstance(effect, DialBack):
            self._at(self.free_s + 2 * NETWORK_S, "event", DialBackResult(effect.peer, effect.addresses[0]))
        if not isinstance(effect, Send):
            return
        peer, message = effect.peer, effect.message
        if isinstance(message, m.Admitted):
            self._says(self.free_s + 0.5, peer, m.LinkLatencies(()))  # it has measured its lines meanwhile
        elif isinstance(message, m.MembershipView):
            ready = m.Ready(message.term, message.generation, message.history)
            self._says(self.free_s + 2 * NETWORK_S, peer, ready)

    def _says(self, at_s: float, peer: m.PeerId, *messages: m.Message) -> None:
        for message in messages:
            self._at(at_s, "event", MessageReceived(peer, message))

    def _at(self, at_s: float, kind: str, what: Event | m.PeerId) -> None:
        self._count += 1
        heapq.heappush(self._queue, (at_s, self._count, kind, what))


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """p50 and p99."""
    if len(values) < 2:
        return (values[0], values[0]) if values else (0.0, 0.0)
    cuts = statistics.quantiles(values, n=100)
    return cuts[49], cuts[98]


def measure(workers: int, storm_s: float, calm_s: float, seed: int = 0) -> Result:
    """Raises `SystemExit` if they never train together."""
    crowd = Crowd(workers, storm_s, seed)
    crowd.run(calm_s)
    if crowd.training_s is None:
        raise SystemExit(f"{workers} workers: no generation of all of them trains: {crowd.core.reason}")
    until_s = crowd.training_s
    during = [latency_s for at_s, latency_s in crowd.beats_s if at_s < until_s]
    after = [latency_s for at_s, latency_s in crowd.beats_s if at_s >= until_s]
    return Result(
        workers,
        crowd.core.generation,
        until_s,
        crowd.storm_core_s,
        crowd.longest_s,
        percentiles(during),
        percentiles(after),
        percentiles(crowd.statuses_s),
        (crowd.core_s - crowd.storm_core_s) / calm_s,
    )


def table(results: Sequence[Result]) -> str:
    """Markdown; times in ms where not said."""
    heads = ("workers", "storm over after", "its work", "longest event", "beat in the storm p50, p99")
    heads += ("beat p50, p99", "status p50, p99", "core in use")
    lines = ["| " + " | ".join(heads) + " |", "|---:" * len(heads) + "|"]
    for r in results:
        pairs = " | ".join(
            f"{1e3 * p50:.2f}, {1e3 * p99:.2f}" for p50, p99 in (r.storm_beat_s, r.calm_beat_s, r.status_s)
        )
        lines.append(
            f"| {r.workers} | {r.storm_s:.1f} s | {r.core_s:.2f} s | {1e3 * r.longest_s:.0f} | {pairs} | "
            f"{100 * r.calm_core_share:.0f} % |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[100, 300, MAX_WORKERS])
    parser.add_argument("--storm", type=float, default=10.0, help="seconds in which all join")
    parser.add_argument("--calm", type=float, default=10.0, help="seconds of training after it")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if not all(2 <= count <= MAX_WORKERS for count in options.workers):
        parser.error(f"--workers {options.workers}: a coordinator admits 2 to {MAX_WORKERS}")
    results = [measure(count, options.storm, options.calm) for count in options.workers]
    print(table(results))
    if options.out is not None:
        counts = " ".join(map(str, options.workers))
        asked = f"--workers {counts} --storm {options.storm:g} --calm {options.calm:g}"
        made = {
            "command": f"python benchmarks/crowd.py {asked}",
            "date": datetime.date.today().isoformat(),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        }
        rows = [asdict(result) for result in results]
        options.out.write_text(json.dumps({**made, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
