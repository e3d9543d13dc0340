"""Stores the registered workers, compares their setups with the run's, and formats the facts to show."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.planning.batch_shares import BatchShares, WorkerSpeeds, own_shares
from gridtrain.quantities import format_count
from gridtrain_coordinator.run.events import LogEvent
from gridtrain_coordinator.run.liveness import HeartbeatIntervals, Liveness, StateTransferProgress
from gridtrain_coordinator.run.recent_dict import RecentDict
from gridtrain_coordinator.run.worker_problems import WorkerProblems

AVOIDED_PAIR_RTT_S = 10.0
"""The round trip assumed for pairs of workers that the ring should avoid if possible."""

MAX_SILENT = 1024
"""The number of timed-out workers whose heartbeat intervals are kept for their return."""


@dataclass(slots=True)
class Worker:
    """One worker that has joined.

    Attributes:
        liveness: when it was last heard from, and when it counts as lost.
        is_addressable: whether the coordinator knows how other workers can reach it; required for admission.
        is_admitted: whether its setup fits, and the measurement of its links is complete or has timed out.
        has_caught_up: whether it holds the members' state, or cannot catch up while they train (`CatchUp`).
        checkpoints: the stage checkpoints on its disk.
        is_disk_full: whether it failed to write to disk a state that only it holds and other workers need.
        standby_reason: the reason why it has no rank although it is eligible; otherwise empty.
        progress, progressed_s: the progress counter in its heartbeats, and when the counter last increased.
        state_progress: the progress of the state transfer that it reports.
        problems: the skipped steps, missed steps and failed checkpoints that it reports.
    """

    peer: m.PeerId
    name: str
    address: str
    joined_s: float
    liveness: Liveness
    setup: m.Setup | None = None
    is_addressable: bool = False
    is_admitted: bool = False
    has_caught_up: bool = False
    probe_deadline_s: float = math.inf
    checkpoints: tuple[m.CheckpointInfo, ...] = ()
    is_disk_full: bool = False
    standby_reason: str = ""
    progress: int = 0
    progressed_s: float = 0.0
    state_progress: StateTransferProgress = field(default_factory=StateTransferProgress)
    problems: WorkerProblems = field(default_factory=WorkerProblems)
    step: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    rtt_s: dict[m.PeerId, float] = field(default_factory=dict)
    info: dict[str, str] = field(default_factory=dict)

    # -- reports -------------------------------------------------------------------------------------

    def record_join(self, address: str) -> None:
        self.address = address
        self.liveness.record_join()

    def record_setup(self, setup: m.Setup) -> None:
        self.setup, self.checkpoints = setup, setup.stage_checkpoints

    def record_heartbeat(self, beat: m.Heartbeat, now_s: float) -> list[LogEvent]:
        """Record a heartbeat; return log events about the problems that it reports."""
        has_progressed = beat.progress > self.progress
        self.liveness.heartbeats.record(now_s, has_progressed=has_progressed)
        if has_progressed:
            self.progress, self.progressed_s = beat.progress, now_s
        self.step, self.figures = beat.step, dict(beat.metrics)
        self.state_progress.update(self.figures.get(m.STATE_LEFT, 0.0), now_s)
        return self.problems.update(self.name, beat.step, self.figures, now_s)

    def record_round_trips(self, rtt_s: dict[m.PeerId, float], known: Collection[m.PeerId]) -> None:
        """Store the round trips measured by the worker, and admit the worker if its setup is known.

        Earlier round trips to the workers in `known` are kept: a member's other messages delay those that it
        measures later.
        """
        kept = {peer: earlier_s for peer, earlier_s in self.rtt_s.items() if peer in known}
        self.rtt_s, self.is_admitted = rtt_s | kept, self.setup is not None

    def record_checkpoints(self, checkpoints: tuple[m.CheckpointInfo, ...]) -> None:
        self.checkpoints = checkpoints

    # -- requests ----------------------------------------------------------------------------------

    def begin_probing(self, deadline_s: float) -> None:
        """Give the worker until `deadline_s` to measure its links, which may differ from those before."""
        self.probe_deadline_s, self.rtt_s = deadline_s, {}

    def admit(self) -> None:
        self.is_admitted = True

    def mark_addressable(self, is_addressable: bool) -> None:
        self.is_addressable = is_addressable

    def mark_caught_up(self) -> None:
        self.has_caught_up = True

    def roll_back(self, applied: int) -> None:
        """Drop the steps and checkpoints after step `applied`; the run continues after that step."""
        self.step = min(self.step, applied + 1)
        self.checkpoints = tuple(x for x in self.checkpoints if x.applied <= applied)

    def clear_initial_state(self) -> None:
        """Record that the worker no longer holds the initial state that it built."""
        if self.setup is not None:
            self.setup = replace(self.setup, initial_state_digest=b"")

    def excuse_stall(self, stalled_s: float, until_s: float, limits: Deadlines) -> None:
        """Postpone deadlines to `until_s` or later, because no message was read for `stalled_s` seconds."""
        self.liveness.excuse_stall(stalled_s, until_s, limits, trains=not self.is_catching_up)
        self.probe_deadline_s = max(self.probe_deadline_s, until_s)
        self.progressed_s += stalled_s
        self.state_progress.excuse_stall(stalled_s)

    # -- derived values ------------------------------------------------------------------------------

    @property
    def checkpoint_step(self) -> int | None:
        """The step of the checkpoint with which the worker joined; None if it has none, or for a pipeline."""
        checkpoint = self.setup.checkpoint if self.setup is not None else None
        return checkpoint.applied + 1 if checkpoint is not None else None

    @property
    def kept_step(self) -> int:
        """The step of the checkpoint that the worker says it keeps when it leaves; 0 if there is none."""
        return int(min(max(0.0, self.figures.get(m.KEPT_STEP, 0.0)), self.step))

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
        return self.liveness.failure_reason(limits, now_s, trains=not self.is_catching_up)

    def deadline_s(self, limits: Deadlines) -> float:
        """Return the next time at which the worker may have to be removed or admitted."""
        probe_s = math.inf if self.is_admitted else self.probe_deadline_s
        return min(self.liveness.deadline_s(limits, trains=not self.is_catching_up), probe_s)

    def status_row(self, rank: int | None, roster: Sequence[m.Member], now_s: float) -> dict[str, Any]:
        """Return the worker's row for `gridtrain status` as a JSON-serializable dictionary."""
        admitted = "spare" if self.standby_reason else "admitted"
        state = "following" if self.is_catching_up else admitted if self.is_admitted else "joining"
        state = "active" if rank is not None else state
        return {
            "rank": rank,
            "name": self.name,
            "peer": self.peer.hex(),
            "state": "suspect" if self.liveness.disconnected_s is not None else state,
            "address": self.address,
            "share": roster[rank].share if rank is not None else 0,
            "spare": self.standby_reason if rank is None else "",
            "reason": self.problems.text(now_s),
            "step": self.step,
            "progress": self.progress,
            "last_heard_s": round(now_s - self.liveness.last_heard_s, 3),
            "figures": self.figures,
            "about": self.info,
        }


@dataclass(frozen=True, slots=True)
class Candidates:
    """The registered workers that determine whether the next generation is made.

    Attributes:
        newcomers: workers that may enter the next generation, in joining order.
        catching_up: workers that are still receiving the state, in joining order.
        admitted: the number of admitted workers, including members.
        measured_s: the earliest deadline for measuring links, among workers that have sent a setup and are
            not yet admitted; None if there is no such worker.
    """

    newcomers: list[Worker]
    catching_up: list[Worker]
    admitted: int
    measured_s: float | None


class Registry(dict[m.PeerId, Worker]):
    """The registered workers by key, in the order in which they joined."""

    def __init__(self) -> None:
        super().__init__()
        self._silent: RecentDict[m.PeerId, HeartbeatIntervals] = RecentDict(MAX_SILENT)

    def register(self, peer: m.PeerId, name: str, address: str, now_s: float) -> Worker:
        """Register a worker and return it."""
        liveness = Liveness(now_s, self._silent.pop(peer, HeartbeatIntervals()))
        liveness.heartbeats.record(now_s, has_progressed=False)
        worker = self[peer] = Worker(peer, name, address, now_s, liveness)
        return worker

    def record_lost(self, worker: Worker) -> None:
        """Keep the heartbeat intervals of a lost worker if it was lost because it timed out."""
        if worker.liveness.disconnected_s is None:
            self._silent[worker.peer] = worker.liveness.heartbeats

    def candidates(self, members: Collection[m.PeerId]) -> Candidates:
        """Return the candidates for the generation that follows the one formed by `members`."""
        newcomers: list[Worker] = []
        catching_up: list[Worker] = []
        measured_s: list[float] = []
        admitted = 0
        for peer, worker in self.items():  # runs after nearly every message; properties would double the time
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
    if avoided and not links:  # otherwise the planner would treat all pairs like the avoided ones
        links = {(one.peer, other.peer): 0.0 for one, other in itertools.combinations(workers, 2)}
    return links | {pair: AVOIDED_PAIR_RTT_S for pair in avoided}


def batch_limits(workers: Sequence[Worker]) -> list[int]:
    """Return each worker's batch size.

    If there is a global batch size, this is the maximum number of samples that the worker takes per step; 0
    means no limit.
    """
    return [worker.setup.batch_size if worker.setup is not None else 0 for worker in workers]


def assign_shares(
    workers: Sequence[Worker], global_batch_size: int | None, sharing: WorkerSpeeds
) -> BatchShares:
    """Return the workers' shares, in the order of `workers`.

    A share is the worker's own batch size, or the part of the global batch size that suits its speed.
    """
    peers, names = [worker.peer for worker in workers], [worker.name for worker in workers]
    if global_batch_size is None:
        return own_shares(names, batch_limits(workers), "each worker takes its own batch size")
    return sharing.plan_shares(peers, names, global_batch_size, batch_limits(workers))


def setup_differences(reference: m.Setup, setup: m.Setup) -> list[str]:
    """Return a clause for each value of `setup` that differs from the run's definition, `reference`."""
    run, here = _described(reference), _described(setup)
    return [
        f"{name} is {here.get(name, 'missing')} here and {run.get(name, 'missing')} in the run"
        for name in dict.fromkeys((*run, *here))
        if run.get(name) != here.get(name)
    ]


def shown_facts(facts: m.Facts, bounds: tuple[int, ...] = ()) -> dict[str, str]:
    """Return the facts as they are shown; an option that is not set is shown as "none", not as "None".

    Args:
        bounds: the current stage bounds if the model was repartitioned, because the facts contain the initial
            bounds; otherwise ().
    """
    shown = {name: "none" if text == "None" else text for name, text in facts}
    if bounds:
        stages = len(bounds) - 1
        shown["stages"] = f"{stages} ({shown.get('stages')} at the beginning)"
        shown["exchange"] = f"{shown.get('exchange')}; now {stages} stages cut at {list(bounds)}"
    return shown


def _model_lines(model: m.StagedModel | None) -> dict[str, str]:
    """Describe a model's stages and layers, for comparison with another setup.

    Measured times are omitted: they differ between workers, and the run uses those of the first worker.
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
    return f" in {format_count(len(spec.shards), 'shard')} (sizes {digest})"


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
