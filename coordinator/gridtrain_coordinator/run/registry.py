"""Registered workers: what the coordinator knows of each, and what follows from that alone."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.group.stall_detection import extend_start
from gridtrain.core.planning.batch_shares import BatchShares, WorkerSpeeds

AVOIDED_PAIR_RTT_S = 10.0
"""Round trip assumed for pairs of workers that the ring avoids where it can."""


class StateTransferProgress:
    """How many bytes of its state a worker still lacks, and when that number last changed.

    A state counts as on its way for `patience_s` after each change:

        reported   102e6 .. 87e6 .. 71e6 .. 0         on its way until it is there
                   87e6 .. 87e6 .. (patience_s) 87e6  stalled
    """

    __slots__ = ("left_bytes", "progressed_s")

    def __init__(self) -> None:
        self.left_bytes, self.progressed_s = 0.0, 0.0

    def update(self, left_bytes: float, now_s: float) -> None:
        """With each heartbeat."""
        if left_bytes != self.left_bytes:
            self.left_bytes, self.progressed_s = left_bytes, now_s

    def excuse_stall(self, stalled_s: float) -> None:
        """The coordinator did not read messages for `stalled_s`."""
        self.progressed_s += stalled_s

    def deadline_s(self, patience_s: float) -> float:
        """Until when the state counts as on its way; -inf: nothing is missing."""
        return self.progressed_s + patience_s if self.left_bytes > 0 else -math.inf


@dataclass(slots=True)
class Worker:
    """One worker that has joined.

    Attributes:
        is_addressable: the coordinator knows how others reach it; until then it is not admitted.
        is_admitted: its setup fits, and its links are measured or the time for that is over.
        has_caught_up: it holds the members' state, or cannot catch up while they train (`CatchUp`).
        disconnected_s: when its connection broke; None: the connection is open.
        link_broken_s: when a member last reported that its connection to this worker broke.
        checkpoints: stage checkpoints on its disk.
        is_disk_full: it could not write a state to disk that it alone holds and others need.
        standby_reason: why it has no rank although it may have one; empty: it has, or it may not.
        progress, progressed_s: the latest progress counter of its heartbeats, and when it changed.
        is_loading_state: it receives the state for a generation that forms.  Many workers that load at once
            on few cores miss heartbeats, and only that generation waits for them.
        state_progress: what it reports about a state that it receives.
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
    disconnected_s: float | None = None
    link_broken_s: float = -math.inf
    checkpoints: tuple[m.CheckpointInfo, ...] = ()
    is_disk_full: bool = False
    standby_reason: str = ""
    progress: int = 0
    progressed_s: float = 0.0
    is_loading_state: bool = False
    state_progress: StateTransferProgress = field(default_factory=StateTransferProgress)
    step: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    rtt_s: dict[m.PeerId, float] = field(default_factory=dict)
    info: dict[str, str] = field(default_factory=dict)

    # -- what it reports -----------------------------------------------------------------------------

    def record_connected(self, now_s: float) -> None:
        self.disconnected_s, self.link_broken_s, self.last_heard_s = None, -math.inf, now_s

    def record_disconnected(self, now_s: float) -> None:
        self.disconnected_s = now_s

    def record_message(self, now_s: float) -> None:
        self.last_heard_s = now_s

    def record_link_broken(self, now_s: float) -> None:
        """A member reports that its connection to this worker broke."""
        self.link_broken_s = now_s

    def record_join(self, address: str) -> None:
        self.address, self.disconnected_s = address, None

    def record_setup(self, setup: m.Setup) -> None:
        self.setup, self.checkpoints = setup, setup.stage_checkpoints

    def record_heartbeat(self, beat: m.Heartbeat, now_s: float) -> None:
        if beat.progress > self.progress:
            self.progress, self.progressed_s = beat.progress, now_s
        self.step, self.figures = beat.step, dict(beat.metrics)
        self.state_progress.update(self.figures.get(m.STATE_LEFT, 0.0), now_s)

    def record_round_trips(self, rtt_s: dict[m.PeerId, float]) -> None:
        """It has measured its links."""
        self.rtt_s, self.is_admitted = rtt_s, self.setup is not None

    def record_checkpoints(self, checkpoints: tuple[m.CheckpointInfo, ...]) -> None:
        self.checkpoints = checkpoints

    # -- what it is asked to do --------------------------------------------------------------------

    def begin_probing(self, deadline_s: float) -> None:
        """It is asked to measure its links until then."""
        self.probe_deadline_s = deadline_s

    def admit(self) -> None:
        self.is_admitted = True

    def mark_caught_up(self) -> None:
        self.has_caught_up = True

    def mark_loading(self, is_loading: bool) -> None:
        self.is_loading_state = is_loading

    def roll_back(self, applied: int) -> None:
        """The run continues after step `applied`."""
        self.step = min(self.step, applied + 1)
        self.checkpoints = tuple(x for x in self.checkpoints if x.applied <= applied)

    def clear_initial_state(self) -> None:
        """It no longer holds the initial state that it built."""
        if self.setup is not None:
            self.setup = replace(self.setup, initial_state_digest=b"")

    def excuse_stall(self, stalled_s: float, until_s: float, limits: Deadlines) -> None:
        """The coordinator did not read messages for `stalled_s`: wait at least until `until_s`."""
        self.last_heard_s = extend_start(self.last_heard_s, limits.silence_s, until_s)
        self.probe_deadline_s = max(self.probe_deadline_s, until_s)
        self.progressed_s += stalled_s
        self.state_progress.excuse_stall(stalled_s)
        if self.disconnected_s is not None:
            self.disconnected_s = extend_start(self.disconnected_s, limits.regreet_s, until_s)

    # -- what follows --------------------------------------------------------------------------------

    @property
    def is_catching_up(self) -> bool:
        """It receives the state while the members train, and may not enter a generation yet."""
        can_catch_up = self.setup is not None and self.setup.can_catch_up
        return self.is_admitted and not self.has_caught_up and can_catch_up

    @property
    def is_introduced(self) -> bool:
        """It was asked to measure its links; workers that join later measure theirs to this one."""
        return self.is_admitted or self.probe_deadline_s < math.inf

    @property
    def is_eligible(self) -> bool:
        """It may be in the next generation."""
        return self.is_admitted and not self.is_catching_up

    def failure_reason(self, limits: Deadlines, now_s: float) -> str:
        """Why this worker counts as lost; empty: it does not."""
        if self.disconnected_s is not None and now_s >= self._reconnect_deadline_s(limits):
            if self._is_link_broken(limits):
                return "its connections to this coordinator and to a member broke"
            return "its connection broke and did not come back"
        silence_s = self._heartbeat_timeout_s(limits)
        return f"silent for {silence_s:.1f} s" if now_s >= self.last_heard_s + silence_s else ""

    def deadline_s(self, limits: Deadlines) -> float:
        """When `failure_reason` or its admission may change."""
        probe_s = math.inf if self.is_admitted else self.probe_deadline_s
        silent_s = self.last_heard_s + self._heartbeat_timeout_s(limits)
        return min(silent_s, self._reconnect_deadline_s(limits), probe_s)

    def _heartbeat_timeout_s(self, limits: Deadlines) -> float:
        return max(limits.silence_s, limits.ready_s) if self.is_loading_state else limits.silence_s

    def _reconnect_deadline_s(self, limits: Deadlines) -> float:
        """Until when a broken connection may come back.

        A cut cable or a frozen machine resets no connection.  Where two connections of one worker break at
        once its process has ended, so the wait is short.
        """
        if self.disconnected_s is None:
            return math.inf
        has_ended = self._is_link_broken(limits)
        return self.disconnected_s + (
            min(limits.regreet_s, limits.ended_s) if has_ended else limits.regreet_s
        )

    def _is_link_broken(self, limits: Deadlines) -> bool:
        at_s = self.disconnected_s
        return at_s is not None and abs(self.link_broken_s - at_s) <= limits.regreet_s

    def status_row(self, rank: int | None, roster: Sequence[m.Member], now_s: float) -> dict[str, Any]:
        """For `gridtrain status`; JSON-able."""
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
            "step": self.step,
            "progress": self.progress,
            "last_heard_s": round(now_s - self.last_heard_s, 3),
            "figures": self.figures,
            "about": self.info,
        }


class Registry(dict[m.PeerId, Worker]):
    """The registered workers by key, in the order of joining."""

    def seniority(self, peer: m.PeerId) -> tuple[float, m.PeerId]:
        """Sort key; the longest-serving worker is first."""
        return (self[peer].joined_s, peer)

    def sort_by_seniority(self, peers: Collection[m.PeerId]) -> list[m.PeerId]:
        return sorted(peers, key=self.seniority)

    def display_name(self, peer: m.PeerId) -> str:
        """Name of a worker; of one that is not registered, the beginning of its key."""
        return self[peer].name if peer in self else peer.hex()[:8]


def worker_count_text(count: int) -> str:
    """As in "2 workers"."""
    return "1 worker" if count == 1 else f"{count} workers"


def round_trip_times(
    workers: Sequence[Worker], avoided: Collection[tuple[m.PeerId, m.PeerId]] = ()
) -> dict[tuple[m.PeerId, m.PeerId], float]:
    """Round trips in seconds by directed pair; `avoided` pairs get a long one."""
    links = {(worker.peer, other): rtt_s for worker in workers for other, rtt_s in worker.rtt_s.items()}
    if avoided and not links:  # the planner treats pairs without measurement like the others
        links = {(one.peer, other.peer): 0.0 for one, other in itertools.combinations(workers, 2)}
    return links | {pair: AVOIDED_PAIR_RTT_S for pair in avoided}


def batch_limits(workers: Sequence[Worker]) -> list[int]:
    """With a global batch size, the largest number of samples of a step for each worker; 0: no limit."""
    return [worker.setup.batch_size if worker.setup is not None else 0 for worker in workers]


def assign_shares(
    workers: Sequence[Worker], global_batch_size: int | None, sharing: WorkerSpeeds
) -> BatchShares:
    """Batch sizes in the workers' order: their own, or the global batch size divided by speed."""
    if global_batch_size is None:
        return BatchShares(tuple(batch_limits(workers)), "each worker takes its own batch size")
    peers, names = [worker.peer for worker in workers], [worker.name for worker in workers]
    return sharing.plan_shares(peers, names, global_batch_size, batch_limits(workers))


def setup_differences(reference: m.Setup, setup: m.Setup) -> list[str]:
    """Sentences about what differs from the run as the first worker defined it."""
    run, here = _described(reference), _described(setup)
    return [
        f"{name} is {here.get(name, 'missing')} here and {run.get(name, 'missing')} in the run"
        for name in dict.fromkeys((*run, *here))
        if run.get(name) != here.get(name)
    ]


def _model_lines(model: m.StagedModel | None) -> dict[str, str]:
    """What the stages consist of.  Measured times may differ; those of the first worker are used."""
    if model is None:
        return {}
    sizes = ", ".join(f"{b.parameter_bytes} {b.trainable_bytes}" for b in model.blocks)
    digest = hashlib.blake2b(sizes.encode(), digest_size=6).hexdigest()
    return {"cuts": str(list(model.cuts)), "blocks": f"{len(model.blocks)}, digest {digest}"}


def _described(setup: m.Setup) -> dict[str, str]:
    spec = setup.ledger
    length = f"{spec.epochs} epochs" if spec.epochs is not None else f"{spec.steps} steps"
    return {
        **dict(setup.facts),
        "end of the run": f"{length} over {spec.size} samples with data seed {spec.seed}",
        "global batch size": str(setup.global_batch_size),
        "stages": str(setup.stages),
        **_model_lines(setup.model),
    }
