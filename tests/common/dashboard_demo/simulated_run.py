"""A simulated run: its status and events once a second, as the daemon passes them to the dashboard.

Members differ in speed, one is slow, some leave and return, one is hostile.  Equal seeds give equal runs.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gridtrain_coordinator.journal.disk_full_mode import DiskFullMode
from gridtrain_coordinator.run.slow_member import find_slow_member
from gridtrain_coordinator.status_report import mean_loss

HOSTILE = "<img src=x onerror=alert(1)>\u202egnp.exe"
DEVICES = ("NVIDIA GeForce RTX 3060", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce GTX 1080 Ti", "CPU, 8 cores")
FIRST = ("anna", "bert", "chloe", "dmitri", "emre", "fatima", "grace", "hugo", "ines", "jun", "kofi", "lena")
EXCHANGES = {
    "ring": "Dense()",
    "star": "GTopK(density=0.001, values=fp16, topology=star)",
    "tree": "GTopK(density=0.001, values=fp16, topology=tree)",
    "butterfly": "GTopK(density=0.001, values=fp16)",
    "all-gather": "TopK(density=0.001, values=fp16)",
}
PARAMETERS = 24_800_000
DENSE_PARAMETERS = 438_000  # a dense exchange of more takes minutes on these links
SLOW_TIMES = 2.6
TURN_S = 100
"""The second from which the run is in the requested state."""

REASONS = {
    "waiting": "waiting for 64 workers",
    "away": "all {} members are disconnected; waiting for them to come back",
    "disk-full": DiskFullMode(
        "the journal /var/lib/gridtrain/byte-gpt/journal.sqlite has no room: No space left on device",
        (), began_s=0.0, core_s=0.0,
    ).reason,
    "finished": "{} workers reached the end of the run",
}  # fmt: skip
"""The reasons of all states but `training` and `resting`, in which a worker has paused."""

Event = tuple[float, str, str, dict[str, Any]]


@dataclass
class _Worker:
    name: str
    peer: str
    compute_s: float
    device: str
    up_Bps: float
    nat: bool
    sent: float = 0.0
    received: float = 0.0
    away_until: int = 0
    strikes: int = 0
    reason: str = ""


@dataclass
class Run:
    """A simulated run, which `statuses` advances.

    Args:
        shape: the topology, one of `EXCHANGES`.
        stages: the number of stages of a partitioned model.
        state: the state of the run after `TURN_S` seconds: `training`, `resting`, or one of `REASONS`.
        hostile: whether one worker has a violation and a name that attacks the page.
    """

    workers: int
    shape: str = "butterfly"
    seed: int = 7
    stages: int = 1
    hostile: bool = True
    state: str = "training"
    started_s: float = 1_790_000_000.0
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._group = [self._make_worker(number) for number in range(self.workers)]
        if self.workers > 2:
            slow = self._group[self.workers // 3]
            slow.compute_s *= SLOW_TIMES
        if self.hostile and self.workers > 3:
            self._group[2].name, self._group[2].strikes = HOSTILE, 1
        self._step, self._generation = 0, 1
        self._steps = 0.0
        self._since = 0
        self._parameters = DENSE_PARAMETERS if EXCHANGES[self.shape] == "Dense()" else PARAMETERS
        self._add_event(0, "info", "started", {"term": 3, "run": "byte-gpt"})
        for worker in self._group[:12]:
            self._add_event(0, "info", "joined", {"name": worker.name, "peer": worker.peer[:12]})
        self._begin_generation(0, "enough workers are there")

    def _make_worker(self, number: int) -> _Worker:
        rng = self._rng
        name = FIRST[number % len(FIRST)] + (f"-{number // len(FIRST) + 1}" if number >= len(FIRST) else "")
        device = rng.choice(DEVICES)
        peer = hashlib.sha256(f"{self.seed} {number}".encode()).hexdigest()
        rate_Bps = rng.choice((2.5e6, 12.5e6, 12.5e6, 125e6)) * rng.uniform(0.7, 1.0)
        return _Worker(name, peer, rng.uniform(0.09, 0.13), device, rate_Bps, rng.random() < 0.2)

    def _add_event(self, second: float, level: str, event: str, fields: dict[str, Any]) -> None:
        self.events.append((self.started_s + second, level, event, fields))

    def _begin_generation(self, second: int, reason: str) -> None:
        workers = len(self._present(second))
        self._since = self._step
        fields = {"generation": self._generation, "workers": workers, "step": self._step, "reason": reason}
        self._add_event(second, "info", "generation", fields | {"verdict": "COMMIT", "plan": ""})
        self._add_event(
            second + 0.4,
            "info",
            "training",
            {"generation": self._generation, "workers": workers, "step": self._step},
        )

    def _present(self, second: int) -> list[_Worker]:
        return [worker for worker in self._group if worker.away_until <= second]

    def statuses(self, seconds: int) -> Iterator[tuple[float, dict[str, Any], list[Event]]]:
        """Yield for each second: time of the wall clock, status, events before it."""
        for second in range(seconds):
            self._change_members(second)
            events, self.events = self.events, []
            yield self.started_s + second, self._status(second), events

    def _change_members(self, second: int) -> None:
        rng = self._rng
        if self.state == "finished" and second == TURN_S:
            self._finish(second)
        if self._has_stopped(second):
            return
        for worker in self._group:
            if worker.away_until == second > 0:
                self._generation += 1
                self._add_event(second, "info", "joined", {"name": worker.name, "peer": worker.peer[:12]})
                self._begin_generation(second, f"{worker.name} joins")
        if self.state == "resting" and second == TURN_S:
            self._pause(second, self._group[-1])
        if second and second % 97 == 0 and self.workers > 2 and self.stages == 1:
            gone = rng.choice(self._present(second)[1:] or self._group)
            gone.away_until = second + 23
            self._generation += 1
            self._add_event(second, "warning", "lost", {"name": gone.name, "reason": "silent for 10.0 s"})
            self._begin_generation(second, f"{gone.name} was lost")
        if second and second % 241 == 0:
            violator = rng.choice(self._group)
            violator.strikes += 1
            self._add_event(
                second,
                "warning",
                "violation",
                {"peer": violator.peer[:12], "reason": "a Data of no open round"},
            )

    def _pause(self, second: int, worker: _Worker) -> None:
        worker.away_until = 1 << 40
        worker.reason = "paused by its owner: the computer is in use"
        self._generation += 1
        self._add_event(second, "info", "left", {"name": worker.name, "reason": worker.reason})
        self._begin_generation(second, f"{worker.name} left")

    def _finish(self, second: int) -> None:
        present = self._present(second)
        for worker in present:
            fields = {"name": worker.name, "step": self._step + 1}
            self._add_event(second, "info", "worker_finished", fields)
        self._step = self._step + 1
        self._steps = float(self._step)
        self._add_event(second, "info", "finished", {"reason": REASONS["finished"].format(len(present))})
        for worker in present:
            self._add_event(second, "info", "left", {"name": worker.name, "reason": "its run is finished"})

    def _has_stopped(self, second: int) -> bool:
        return second >= TURN_S and self.state in REASONS

    def _phase(self, second: int, workers: int) -> tuple[str, str]:
        """Return the run's phase and its reason."""
        if not self._has_stopped(second):
            return "training", f"{workers} workers since step {self._since}"
        phase = "paused" if self.state in ("away", "disk-full") else self.state
        return phase, REASONS[self.state].format(workers)

    def _payload_bytes(self) -> float:
        """Return the payload of one worker in one step."""
        if self.shape == "ring":
            return 8.0 * self._parameters * (1 - 1 / self.workers)
        return self._parameters * 0.001 * 4 * math.log2(max(self.workers, 2))

    def _status(self, second: int) -> dict[str, Any]:
        present = self._present(second)
        slowest_s = max(worker.compute_s for worker in present)
        communicating_s = self._payload_bytes() / min(worker.up_Bps for worker in present)
        stopped = self._has_stopped(second) and self.state != "disk-full"
        steps_per_s = 0.0 if stopped else 1 / (slowest_s * 1.05 + communicating_s + 0.02)
        before = self._step
        self._steps += steps_per_s
        self._step = int(self._steps)
        members = [
            self._member(worker, rank, (slowest_s, communicating_s), self._step - before)
            for rank, worker in enumerate(present)
        ]
        status = self._status_of_members(second, present, members, steps_per_s)
        if self._has_stopped(second) and self.state == "finished":
            status["members"] = []
        elif self._has_stopped(second) and self.state == "waiting":
            status |= {"world_size": 0, "links": [], "relayed": [], "stages": 1, "plan_reason": ""}
            status["members"] = self._unranked(members)
        elif stopped:
            for member in members:
                member |= {"state": "suspect", "last_heard_s": float(second - TURN_S)}
        status["loss"] = mean_loss(member for member in status["members"] if member["rank"] is not None)
        return status

    def _unranked(self, members: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            member | {"rank": None, "stage": None, "share": None, "state": ("joining", "admitted")[at % 2]}
            for at, member in enumerate(members)
        ]

    def _resting(self, second: int) -> list[dict[str, Any]]:
        return [
            {
                "name": worker.name, "peer": worker.peer, "state": "paused", "reason": worker.reason,
                "since_s": float(second - TURN_S),
            }
            for worker in self._group
            if worker.reason
        ]  # fmt: skip

    def _status_of_members(
        self, second: int, present: list[_Worker], members: list[dict[str, Any]], steps_per_s: float
    ) -> dict[str, Any]:
        phase, reason = self._phase(second, len(present))
        return {
            "run": "byte-gpt", "phase": phase, "reason": reason, "term": 3,
            "generation": self._generation, "step": self._step, "world_size": len(present),
            **self._length(steps_per_s),
            "finished": phase == "finished",
            "facts": {
                "model": f"{self._parameters} parameters, digest 3f9a1c22", "exchange": EXCHANGES[self.shape],
                "optimizer": "SGD(lr=0.4)", "data": "65536 samples of bytes",
            },
            "plan_reason": f"{self.shape} of {len(present)} ordered by predicted time: 18.2 ms an exchange "
            "instead of 31.5 ms in join order",
            "stages": self.stages, "links": self._links(present), "relayed": self._relayed(present),
            "drifts": 0, "waited_for": find_slow_member(members) if phase == "training" else None,
            "members": members, "resting": self._resting(second), "events": [],
            "software": "gridtrain (simulated)", "address": "",
            "now_s": float(second), "uptime_s": float(second),
            "steps_per_s": steps_per_s if phase == "training" else None,
        }  # fmt: skip

    def _length(self, steps_per_s: float) -> dict[str, Any]:
        """Return the end of the run: after passes over the data for a ring, otherwise after steps."""
        remaining_s = (200_000 - self._step) / steps_per_s if steps_per_s else None
        samples, rest = 8 * self.workers * self._step, {"remaining_s": remaining_s}
        if self.shape == "ring":
            total = 200_000 * 8 * self.workers
            return rest | {"samples": samples, "total_samples": total, "epochs": 1000, "total_steps": None}
        return rest | {"samples": samples, "total_samples": None, "epochs": None, "total_steps": 200_000}

    def _member(self, worker: _Worker, rank: int, times_s: tuple[float, float], steps: int) -> dict[str, Any]:
        rng = self._rng
        payload = self._payload_bytes()
        slowest_s, communicating_s = times_s
        worker.sent += payload * steps
        worker.received += payload * steps
        computing_s = worker.compute_s * rng.uniform(0.97, 1.04)
        loss = 2.1 + 3.4 * math.exp(-self._step / 900) + rng.gauss(0, 0.05)
        suspect = rng.random() < 0.002
        return {
            "rank": rank, "stage": rank * self.stages // len(self._group), "name": worker.name,
            "peer": worker.peer,
            "state": "suspect" if suspect else "active",
            "address": "tcp://192.0.2.1:7701", "share": 8, "step": self._step, "progress": self._step,
            "last_heard_s": 4.2 if suspect else rng.uniform(0, 1), "strikes": worker.strikes,
            "reach": "behind NAT" if worker.nat else "direct",
            "about": {"device": worker.device, "torch": "2.13.0", "python": "3.11.9"},
            "figures": {
                "loss": loss, "computing_s": computing_s, "selecting_s": rng.uniform(0.002, 0.005),
                "communicating_s": communicating_s * rng.uniform(0.98, 1.1),
                "waiting_s": max(slowest_s - computing_s, 0.0),
                "applying_s": 0.001, "sent_bytes": worker.sent, "received_bytes": worker.received,
                "exchanged_bytes": worker.sent, "accuracy": 0.4 + 0.0001 * self._step,
            },
            "sent_Bps": payload * steps, "received_Bps": payload * steps,
        }  # fmt: skip

    def _links(self, present: list[_Worker]) -> list[list[float | int]]:
        shown = list(enumerate(present[:32]))
        return [
            [a, b, 0.001 + 0.00021 * ((a * 7 + b * 7) % 11), min(one.up_Bps, other.up_Bps)]
            for a, one in shown
            for b, other in shown
            if a != b
        ]

    def _relayed(self, present: list[_Worker]) -> list[list[int]]:
        nat = [rank for rank, worker in enumerate(present[:32]) if worker.nat]
        relay = next((rank for rank, worker in enumerate(present) if not worker.nat), -1)
        return [[a, b, relay] for a in nat for b in nat if a < b]
