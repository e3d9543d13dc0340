"""Registered workers: the data recorded about each worker, and values derived from these data."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.group.stall_detection import extend_start
from gridtrain.core.planning.batch_shares import BatchShares, WorkerSpeeds
from gridtrain.quantities import format_count
from gridtrain_coordinator.run.events import LogEvent
from gridtrain_coordinator.run.worker_problems import WorkerProblems

AVOIDED_PAIR_RTT_S = 10.0
"""The round trip assumed for pairs of workers that the ring avoids where it can."""

MAX_RESTARTS = 2
"""How many times a worker may restart the transfer of its state in one generation."""

LEAST_SILENCE_S, FEWEST_BEATS = 2.0, 40
"""The shortest heartbeat timeout, and the number of heartbeats with progress after which a worker has its own
timeout."""

INTERVALS, INTERVAL_DECAY, MAX_INTERVAL_S = 4.0, 0.9998, 10.0
"""A worker's timeout as a multiple of the longest interval of its heartbeats; the share of that interval that
remains after each heartbeat, so that it counts for more than an hour; and the longest interval."""

JOIN_WAIT_S = 0.25
"""Shortest wait for the Join that a worker sends first over a restored connection; its agent sends none."""

MAX_SILENT = 1024
"""Number of workers lost by their silence whose intervals are kept for their return."""


class HeartbeatIntervals:
    """The intervals at which a worker's heartbeats arrive, from which its timeout follows.

    If it is lost by its silence and returns, the silence is one of them (`Registry.register`).
    """

    __slots__ = ("_arrived_s", "_count", "_longest_s")

    def __init__(self) -> None:
        self._arrived_s, self._count, self._longest_s = math.inf, 0, 0.0

    def record(self, now_s: float, *, has_progressed: bool) -> None:
        """Record a heartbeat, or that the worker is registered."""
        self._count += has_progressed
        interval_s = min(now_s - self._arrived_s, MAX_INTERVAL_S)
        self._longest_s = max(interval_s, self._longest_s * INTERVAL_DECAY)
        self._arrived_s = now_s

    def excuse_stall(self, stalled_s: float) -> None:
        """Leave out the time during which the coordinator read no messages."""
        self._arrived_s += stalled_s

    def timeout_s(self, most_s: float) -> float:
        """Return the silence after which the worker counts as lost; at most `most_s`."""
        if self._count < FEWEST_BEATS:
            return most_s
        return min(most_s, max(LEAST_SILENCE_S, INTERVALS * self._longest_s))


class StateTransferProgress:
    """The number of bytes of its state that a worker still lacks, and the time of its last progress.

    A decrease of at least `step_bytes` since progress was last recorded counts as progress, and so does the
    arrival of the last byte.  An increase counts at most `MAX_RESTARTS` times: a forwarded state may turn out
    to be wrong and is then sent again.

        reported   (begins) 102e6 .. 87e6 .. 71e6 .. 0         in progress until the last byte
                   (begins) 102e6 .. 101e6 .. (patience_s)     stalled
    """

    __slots__ = ("_mark_bytes", "_max_bytes", "_restarts_left", "_step_bytes", "left_bytes", "progressed_s")

    def __init__(self) -> None:
        self.begin(1.0, math.inf, 0.0)

    def begin(self, step_bytes: float, max_bytes: float, now_s: float) -> None:
        """Start over for a new generation, in which the worker receives a state of at most `max_bytes`."""
        self.left_bytes, self.progressed_s = 0.0, now_s
        self._mark_bytes, self._step_bytes, self._max_bytes = math.inf, step_bytes, max_bytes
        self._restarts_left = MAX_RESTARTS

    @property
    def has_begun(self) -> bool:
        """Whether any bytes have arrived."""
        return self._mark_bytes < math.inf

    def update(self, left_bytes: float, now_s: float) -> None:
        """Record the number of missing bytes that a heartbeat reports."""
        self.left_bytes = left_bytes = min(left_bytes, self._max_bytes)
        if left_bytes > self._mark_bytes + self._step_bytes and self._restarts_left > 0:
            self._restarts_left -= 1
        elif left_bytes <= 0:
            if not 0 < self._mark_bytes < math.inf:
                return  # nothing has arrived yet, or the last byte is known to have arrived
        elif self._mark_bytes - left_bytes < self._step_bytes:
            return
        self._mark_bytes, self.progressed_s = left_bytes, now_s

    def excuse_stall(self, stalled_s: float) -> None:
        """Extend the deadline by the time `stalled_s` during which the coordinator read no messages."""
        self.progressed_s += stalled_s

    def deadline_s(self, patience_s: float) -> float:
        """Return the time until which the transfer is considered in progress; -inf if no byte is missing."""
        return self.progressed_s + patience_s if self.left_bytes > 0 else -math.inf


@dataclass(slots=True)
class Worker:
    """One worker that has joined.

    Attributes:
        is_addressable: whether the coordinator knows how other workers reach it; required for admission.
        is_admitted: whether its setup fits, and the measurement of its links is complete or has timed out.
        has_caught_up: whether it holds the members' state, or cannot catch up while they train (`CatchUp`).
        connected_s: the time at which the open connection with its key, from the worker or another program,
            was opened; None if none is open.
        disconnected_s: the time at which its connection broke; None if it has joined since then.
        link_broken_s: the time at which a member last reported a broken connection to this worker.
        checkpoints: the stage checkpoints on its disk.
        is_disk_full: whether it failed to write a state to disk that it alone holds and other workers need.
        standby_reason: the reason why it has no rank although it is eligible; otherwise empty.
        progress, progressed_s: the latest progress counter in its heartbeats, and when the counter changed.
        is_loading_state: whether it is receiving the state for a generation that is forming.  Many workers
            that load a state at once on few cores miss heartbeats, so their timeout is longer.
        state_progress: the progress of the state transfer that it reports.
        problems: the skipped steps, missed steps and failed checkpoints that it reports.
    """

    peer: m.PeerId
    name: str
    address: str
    joined_s: float
    last_heard_s: float
    setup: m.Setup | None = None
    is_addressable: bool = False
    is_admitted: bool = False
    has_caught_up: bool = False
    probe_deadline_s: float = math.inf
    connected_s: float | None = -math.inf
    disconnected_s: float | None = None
    link_broken_s: float = -math.inf
    checkpoints: tuple[m.CheckpointInfo, ...] = ()
    is_disk_full: bool = False
    standby_reason: str = ""
    progress: int = 0
    progressed_s: float = 0.0
    is_loading_state: bool = False
    state_progress: StateTransferProgress = field(default_factory=StateTransferProgress)
    problems: WorkerProblems = field(default_factory=WorkerProblems)
    heartbeats: HeartbeatIntervals = field(default_factory=HeartbeatIntervals)
    step: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    rtt_s: dict[m.PeerId, float] = field(default_factory=dict)
    info: dict[str, str] = field(default_factory=dict)

    # -- reports -------------------------------------------------------------------------------------

    def record_connected(self, now_s: float) -> None:
        """Record a connection with the worker's key.

        Only a `Join` proves that the worker itself is back, because its agent connects with the same key.
        """
        self.connected_s = now_s

    def record_disconnected(self, now_s: float) -> None:
        self.connected_s = None
        if self.disconnected_s is None:
            self.disconnected_s = now_s

    def record_message(self, now_s: float) -> None:
        self.last_heard_s = now_s

    def record_link_broken(self, now_s: float) -> None:
        """Record that a member's connection to this worker broke."""
        self.link_broken_s = now_s

    def record_join(self, address: str) -> None:
        self.address, self.disconnected_s, self.link_broken_s = address, None, -math.inf

    def record_setup(self, setup: m.Setup) -> None:
        self.setup, self.checkpoints = setup, setup.stage_checkpoints

    def record_heartbeat(self, beat: m.Heartbeat, now_s: float) -> list[LogEvent]:
        """Record a heartbeat; return log events about the problems that it reports."""
        has_progressed = beat.progress > self.progress
        self.heartbeats.record(now_s, has_progressed=has_progressed)
        if has_progressed:
            self.progress, self.progressed_s = beat.progress, now_s
        self.step, self.figures = beat.step, dict(beat.metrics)
        self.state_progress.update(self.figures.get(m.STATE_LEFT, 0.0), now_s)
        return self.problems.update(self.name, beat.step, self.figures, now_s)

    def record_round_trips(self, rtt_s: dict[m.PeerId, float]) -> None:
        """Store the round trips that the worker has measured, and admit it if its setup is known."""
        self.rtt_s, self.is_admitted = rtt_s, self.setup is not None

    def record_checkpoints(self, checkpoints: tuple[m.CheckpointInfo, ...]) -> None:
        self.checkpoints = checkpoints

    # -- requests ----------------------------------------------------------------------------------

    def begin_probing(self, deadline_s: float) -> None:
        """Give the worker until `deadline_s` to measure its links."""
        self.probe_deadline_s = deadline_s

    def admit(self) -> None:
        self.is_admitted = True

    def mark_addressable(self, is_addressable: bool) -> None:
        self.is_addressable = is_addressable

    def mark_caught_up(self) -> None:
        self.has_caught_up = True

    def mark_loading(self, is_loading: bool) -> None:
        self.is_loading_state = is_loading

    def roll_back(self, applied: int) -> None:
        """Drop later steps and checkpoints, because the run continues after step `applied`."""
        self.step = min(self.step, applied + 1)
        self.checkpoints = tuple(x for x in self.checkpoints if x.applied <= applied)

    def clear_initial_state(self) -> None:
        """Record that the worker no longer holds the initial state that it built."""
        if self.setup is not None:
            self.setup = replace(self.setup, initial_state_digest=b"")

    def excuse_stall(self, stalled_s: float, until_s: float, limits: Deadlines) -> None:
        """Extend the timeouts to at least `until_s`, because no message was read for `stalled_s` seconds."""
        self.last_heard_s = extend_start(self.last_heard_s, self._heartbeat_timeout_s(limits), until_s)
        self.probe_deadline_s = max(self.probe_deadline_s, until_s)
        self.progressed_s += stalled_s
        self.state_progress.excuse_stall(stalled_s)
        self.heartbeats.excuse_stall(stalled_s)
        if self.disconnected_s is not None:
            self.disconnected_s = extend_start(self.disconnected_s, limits.regreet_s, until_s)
        if self.connected_s is not None:
            self.connected_s = extend_start(self.connected_s, JOIN_WAIT_S, until_s)

    # -- derived values ------------------------------------------------------------------------------

    @property
    def is_catching_up(self) -> bool:
        """Whether the worker is still receiving the state while the members train."""
        can_catch_up = self.setup is not None and self.setup.can_catch_up
        return self.is_admitted and not self.has_caught_up and can_catch_up

    @property
    def is_introduced(self) -> bool:
        """Whether the worker was asked to measure its links.

        Workers that join later measure their links to this worker.
        """
        return self.is_admitted or self.probe_deadline_s < math.inf

    @property
    def is_eligible(self) -> bool:
        """Whether the worker may be in the next generation."""
        return self.is_admitted and not self.is_catching_up

    def failure_reason(self, limits: Deadlines, now_s: float) -> str:
        """Return the reason why this worker is considered lost; empty if it is not lost."""
        if self.disconnected_s is not None and now_s >= self._reconnect_deadline_s(limits):
            if self._is_link_broken(limits):
                return "lost its connections to this coordinator and to a member"
            return "lost its connection and did not reconnect"
        silence_s = self._heartbeat_timeout_s(limits)
        return f"sent nothing for {silence_s:.1f} s" if now_s >= self.last_heard_s + silence_s else ""

    def deadline_s(self, limits: Deadlines) -> float:
        """Return the next time at which the worker may have to be removed or admitted."""
        probe_s = math.inf if self.is_admitted else self.probe_deadline_s
        silent_s = self.last_heard_s + self._heartbeat_timeout_s(limits)
        return min(silent_s, self._reconnect_deadline_s(limits), probe_s)

    def _heartbeat_timeout_s(self, limits: Deadlines) -> float:
        if self.is_loading_state:
            return max(limits.silence_s, limits.ready_s)
        return limits.silence_s if self.is_catching_up else self.heartbeats.timeout_s(limits.silence_s)

    def _reconnect_deadline_s(self, limits: Deadlines) -> float:
        """Return the time until which a broken connection may be restored.

        A cut cable or a frozen machine does not reset connections.  If two connections of one worker break at
        the same time, its process has ended, so the wait is short.  A connection that is open may be its
        return or another program's, for example its agent's: a `Join` is awaited a little longer, not until
        that program ends.
        """
        if self.disconnected_s is None:
            return math.inf
        has_ended = self._is_link_broken(limits)
        wait_s = min(limits.regreet_s, limits.ended_s) if has_ended else limits.regreet_s
        deadline_s = self.disconnected_s + wait_s
        if self.connected_s is None:
            return deadline_s
        return max(deadline_s, self.connected_s + max(wait_s, JOIN_WAIT_S))

    def _is_link_broken(self, limits: Deadlines) -> bool:
        at_s = self.disconnected_s
        return at_s is not None and abs(self.link_broken_s - at_s) <= limits.regreet_s

    def status_row(self, rank: int | None, roster: Sequence[m.Member], now_s: float) -> dict[str, Any]:
        """Return the worker's row in `gridtrain status`, a JSON-serializable dictionary."""
        admitted = "spare" if self.standby_reason else "admitted"
        state = "following" if self.is_catching_up else admitted if self.is_admitted else "joining"
        state = "active" if rank is not None else state
        return {
            "rank": rank,
            "name": self.name,
            "peer": self.peer.hex(),
            "state": "suspect" if self.disconnected_s is not None else state,
            "address": self.address,
            "share": roster[rank].share if rank is not None else 0,
            "spare": self.standby_reason if rank is None else "",
            "reason": self.problems.text(now_s),
            "step": self.step,
            "progress": self.progress,
            "last_heard_s": round(now_s - self.last_heard_s, 3),
            "figures": self.figures,
            "about": self.info,
        }


@dataclass(frozen=True, slots=True)
class Candidates:
    """The workers outside the generation, as far as the next one depends on them.

    Attributes:
        newcomers: workers that may enter the next generation, in the order of joining.
        catching_up: workers that are still receiving the state, in the order of joining.
        admitted: number of all admitted workers.
        measured_s: the time until which the first of the workers that are not admitted yet may measure its
            links; None if there are none.
    """

    newcomers: list[Worker]
    catching_up: list[Worker]
    admitted: int
    measured_s: float | None


class Registry(dict[m.PeerId, Worker]):
    """The registered workers by key, in the order of joining."""

    def __init__(self, workers: Mapping[m.PeerId, Worker] = MappingProxyType({})) -> None:
        super().__init__(workers)
        self._silent: dict[m.PeerId, HeartbeatIntervals] = {}

    def register(self, peer: m.PeerId, name: str, address: str, now_s: float) -> Worker:
        """Register a worker, and return it."""
        worker = self[peer] = Worker(peer, name, address, now_s, now_s)
        worker.heartbeats = self._silent.pop(peer, worker.heartbeats)
        worker.heartbeats.record(now_s, has_progressed=False)
        return worker

    def record_lost(self, worker: Worker) -> None:
        """Keep the heartbeat intervals of a worker that is lost, if it is lost by its silence."""
        if worker.disconnected_s is None:
            self._silent[worker.peer] = worker.heartbeats
            if len(self._silent) > MAX_SILENT:
                del self._silent[next(iter(self._silent))]

    def candidates(self, members: Collection[m.PeerId]) -> Candidates:
        """Return what the next generation after that of `members` depends on, by one look at each worker."""
        newcomers: list[Worker] = []
        catching_up: list[Worker] = []
        measured_s: list[float] = []
        admitted = 0
        for peer, worker in self.items():  # after nearly each message; properties would double the time
            setup = worker.setup
            if not worker.is_admitted:
                measured_s += [worker.probe_deadline_s] if setup is not None else []
                continue
            admitted += 1
            if peer not in members:
                lacks_state = setup is not None and setup.can_catch_up and not worker.has_caught_up
                (catching_up if lacks_state else newcomers).append(worker)
        return Candidates(newcomers, catching_up, admitted, min(measured_s, default=None))

    def seniority(self, peer: m.PeerId) -> tuple[float, m.PeerId]:
        """Return a sort key that puts the longest-serving worker first."""
        return (self[peer].joined_s, peer)

    def sort_by_seniority(self, peers: Collection[m.PeerId]) -> list[m.PeerId]:
        return sorted(peers, key=self.seniority)

    def display_name(self, peer: m.PeerId) -> str:
        """Return the worker's name, or the beginning of its key if it is not registered."""
        return self[peer].name if peer in self else peer.hex()[:8]


def round_trip_times(
    workers: Sequence[Worker], avoided: Collection[tuple[m.PeerId, m.PeerId]] = ()
) -> dict[tuple[m.PeerId, m.PeerId], float]:
    """Return round trips in seconds by directed pair, with `AVOIDED_PAIR_RTT_S` for `avoided` pairs."""
    links = {(worker.peer, other): rtt_s for worker in workers for other, rtt_s in worker.rtt_s.items()}
    if avoided and not links:  # else the planner would treat all pairs like the avoided pairs
        links = {(one.peer, other.peer): 0.0 for one, other in itertools.combinations(workers, 2)}
    return links | {pair: AVOIDED_PAIR_RTT_S for pair in avoided}


def batch_limits(workers: Sequence[Worker]) -> list[int]:
    """Return each worker's batch size.

    With a global batch size, this is the largest number of samples that the worker takes in a step; 0 means
    no limit.
    """
    return [worker.setup.batch_size if worker.setup is not None else 0 for worker in workers]


def assign_shares(
    workers: Sequence[Worker], global_batch_size: int | None, sharing: WorkerSpeeds
) -> BatchShares:
    """Return the shares in the workers' order.

    A share is the worker's own batch size, or the part of the global batch size that fits the worker's speed.
    """
    if global_batch_size is None:
        return BatchShares(tuple(batch_limits(workers)), "each worker takes its own batch size")
    peers, names = [worker.peer for worker in workers], [worker.name for worker in workers]
    return sharing.plan_shares(peers, names, global_batch_size, batch_limits(workers))


def setup_differences(reference: m.Setup, setup: m.Setup) -> list[str]:
    """Return sentences that describe how `setup` differs from `reference`, the run's definition."""
    run, here = _described(reference), _described(setup)
    return [
        f"{name} is {here.get(name, 'missing')} here and {run.get(name, 'missing')} in the run"
        for name in dict.fromkeys((*run, *here))
        if run.get(name) != here.get(name)
    ]


def shown_facts(facts: m.Facts) -> dict[str, str]:
    """Return facts for display; the text that is compared has Python's None for an option that is not set."""
    return {name: "none" if text == "None" else text for name, text in facts}


def _model_lines(model: m.StagedModel | None) -> dict[str, str]:
    """Describe the stages, for a comparison with the stages of another setup.

    Measured times are left out, because they may differ; the run uses the first worker's times.
    """
    if model is None:
        return {}
    sizes = ", ".join(f"{b.parameter_bytes} {b.trainable_bytes}" for b in model.blocks)
    digest = hashlib.blake2b(sizes.encode(), digest_size=6).hexdigest()
    return {"cuts": str(list(model.cuts)), "blocks": f"{len(model.blocks)}, digest {digest}"}


def _shards_text(spec: m.LedgerSpec) -> str:
    if not spec.shards:
        return ""
    digest = hashlib.blake2b(str(spec.shards).encode(), digest_size=6).hexdigest()
    return f" in {len(spec.shards)} shards (sizes {digest})"


def _described(setup: m.Setup) -> dict[str, str]:
    spec = setup.ledger
    epochs, samples = spec.epochs, format_count(spec.size, "sample")
    length = format_count(spec.steps or 0, "step") if epochs is None else format_count(epochs, "epoch")
    return {
        **shown_facts(setup.facts),
        "end of the run": f"{length} over {samples}{_shards_text(spec)} with data seed {spec.seed}",
        "global batch size": "none" if setup.global_batch_size is None else str(setup.global_batch_size),
        "stages": str(setup.stages),
        **_model_lines(setup.model),
    }
