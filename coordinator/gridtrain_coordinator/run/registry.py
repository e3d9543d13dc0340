"""The coordinator's roll: what it knows of each worker, and what follows from that alone.

Decides when a worker is held for gone, what it takes of a step, and whether it trains the same thing
as the others.  Never decides who is a member: that is `protocol.membership`.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.planning.batch_shares import BatchShares, WorkerSpeeds
from gridtrain_coordinator.run.forming_deadline import StateTransferProgress

MAX_NAME_BYTES = 64
AVOIDED_PAIR_RTT_S = 10.0
"""A round trip that the planner of the ring avoids where it can."""


@dataclass(slots=True)
class Worker:
    """One worker that has joined.

    Attributes:
        admitted: its set-up fits, and its links are known or the time for measuring them is over.
        caught: it has followed up to the members, or cannot (`protocol.followers`).
        placed: it is known how others reach it (`protocol.routes`); until then it is not admitted.
        lost_s: when its connection broke; None: it has one.
        missed_s: when another member last said that its connection to this worker broke.
        kept: checkpoints of stages on its disk.
        unwritten: what it had in memory alone, and others were to have, it could not write to its disk.
        spare: why it has no seat although it may enter; empty: it has, or may not.
        progress, moved_s: the latest of its beats that showed progress, and when.
        loading: it takes over a state for a generation that forms, and is READY when it has: many that load
            at once on few cores fall silent, and nobody waits for them but the generation itself.
        feed: what it tells of a state that is on its way to it.
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

    @property
    def is_catching_up(self) -> bool:
        """It takes over the state while the members train on, and may not enter yet."""
        return (
            self.is_admitted and not self.has_caught_up and self.setup is not None and self.setup.can_catch_up
        )

    @property
    def is_introduced(self) -> bool:
        """It was told to measure its links; whoever comes later measures its own to this one."""
        return self.is_admitted or self.probe_deadline_s < math.inf

    @property
    def is_eligible(self) -> bool:
        """It may be in the next generation."""
        return self.is_admitted and not self.is_catching_up

    def failure_reason(self, limits: Deadlines, now_s: float) -> str:
        """Why this worker is held for gone; empty: it is not."""
        if self.disconnected_s is not None and now_s >= self._reconnect_deadline_s(limits):
            both = self._is_link_broken(limits)
            return (
                "its connections to this coordinator and to a member broke"
                if both
                else "its connection broke and did not come back"
            )
        silence_s = self._heartbeat_timeout_s(limits)
        return f"silent for {silence_s:.1f} s" if now_s >= self.last_heard_s + silence_s else ""

    def deadline_s(self, limits: Deadlines) -> float:
        """When to look at this worker again."""
        measured_by_s = math.inf if self.is_admitted else self.probe_deadline_s
        return min(
            self.last_heard_s + self._heartbeat_timeout_s(limits),
            self._reconnect_deadline_s(limits),
            measured_by_s,
        )

    def _heartbeat_timeout_s(self, limits: Deadlines) -> float:
        return max(limits.silence_s, limits.ready_s) if self.is_loading_state else limits.silence_s

    def _reconnect_deadline_s(self, limits: Deadlines) -> float:
        """Until when a broken connection may come back.

        A connection is reset by an end that is alive: where two of one worker break at once, its process has
        ended, as a cut cable or a frozen machine resets nothing.
        """
        if self.disconnected_s is None:
            return math.inf
        return self.disconnected_s + min(
            limits.regreet_s, limits.ended_s if self._is_link_broken(limits) else math.inf
        )

    def _is_link_broken(self, limits: Deadlines) -> bool:
        return (
            self.disconnected_s is not None
            and abs(self.link_broken_s - self.disconnected_s) <= limits.regreet_s
        )

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


def worker_count_text(count: int) -> str:
    """For people."""
    return "1 worker" if count == 1 else f"{count} workers"


def unique_name(name: str, taken: Collection[str]) -> str:
    """For people, who have to tell workers apart: "anna", "anna-2", "anna-3"; at most `MOST_NAME_BYTES`."""
    free, number = name, 1
    while free in taken:
        number += 1
        end = f"-{number}"
        free = name.encode()[: MAX_NAME_BYTES - len(end)].decode(errors="ignore") + end
    return free


def round_trip_times(
    workers: Sequence[Worker], avoided: Collection[tuple[m.PeerId, m.PeerId]] = ()
) -> dict[tuple[m.PeerId, m.PeerId], float]:
    """Round trips in seconds by directed pair; `avoided` pairs are not to be neighbours where possible."""
    links = {(worker.peer, other): rtt_s for worker in workers for other, rtt_s in worker.rtt_s.items()}
    if avoided and not links:  # as the ring's planner counts what is not measured like the others
        links = {(one.peer, other.peer): 0.0 for one, other in itertools.combinations(workers, 2)}
    return links | {pair: AVOIDED_PAIR_RTT_S for pair in avoided}


def batch_limits(workers: Sequence[Worker]) -> list[int]:
    """With a global batch size: the most samples of a step that each can take; 0: any number."""
    return [worker.setup.batch_size if worker.setup is not None else 0 for worker in workers]


def assign_shares(
    workers: Sequence[Worker], global_batch_size: int | None, sharing: WorkerSpeeds
) -> BatchShares:
    """Batch sizes in the workers' order: each one's own, or the global one dealt out by speed."""
    if global_batch_size is None:
        return BatchShares(tuple(batch_limits(workers)), "each worker takes its own batch size")
    peers, names = [worker.peer for worker in workers], [worker.name for worker in workers]
    return sharing.plan_shares(peers, names, global_batch_size, batch_limits(workers))


def setup_differences(reference: m.Setup, setup: m.Setup) -> list[str]:
    """What differs from the run as the first worker defined it, in words."""
    run, here = _described(reference), _described(setup)
    return [
        f"{name} is {here.get(name, 'missing')} here and {run.get(name, 'missing')} in the run"
        for name in dict.fromkeys((*run, *here))
        if run.get(name) != here.get(name)
    ]


def _model_lines(model: m.StagedModel | None) -> dict[str, str]:
    """What its stages are made of; measured times may differ, and the first worker's count."""
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
