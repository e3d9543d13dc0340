"""Asks the members to measure their links again when exchanges take much longer or shorter than predicted.

    exchanges take 1.9 s instead of 0.2 s       anna measures her links to all others, then bert, then carl ..
    LinkRates                                   the plan may change, and the status can name a slow link
    exchanges still take 1.9 s, not 0.2 s       not because of a link: no measurement until this changes

Without this, links would be measured only when a worker joins (`WorkerAdmission`), and nobody would notice
that a line becomes slow, or fast again, during the run.  The members measure one after the other, so that
their bursts do not share a line, and each pair of members at most once.  Nobody measures in pipelines, in
groups whose rank order is not replanned, or with `LocalSteps(overlap=...)`, whose exchanges are rarely timed.
"""

from __future__ import annotations

import math
from statistics import median, median_low

from gridtrain.core.messages import MEMBER_PROBE_S, PeerId, relay_of
from gridtrain.core.planning.rank_order import MAX_REPLANNED_MEMBERS
from gridtrain_coordinator.run.addressing import AddressBook
from gridtrain_coordinator.run.events import Effect, LogEvent, RunPhase
from gridtrain_coordinator.run.generation_plan import GenerationPlanner
from gridtrain_coordinator.run.run_state import RunState
from gridtrain_coordinator.run.slow_member import exchange_duration_s

WINDOW_STEPS, WINDOW_S = 3, 10.0
"""The median duration of at least so many exchanges, reported in at least this time, is compared."""

CHANGE = 2.0
"""A measurement begins if the ratio of measured to predicted duration has changed by this factor."""

NOTICEABLE_S = 0.1
"""Shorter durations are treated as this long, because processor load changes them more than links do."""

PAUSE_S, MAX_PAUSE_S = 60.0, 3600.0
"""Pause after a measurement, which doubles if the next one follows within `MAX_PAUSE_S` of the pause's end.
Members that measured less than `PAUSE_S` ago would report the same rates again
(`bandwidth_probe.RATE_LIFETIME_S`)."""

SPARSE_INTERVAL_S = 1800.0
"""Members measure again after this time if the coordinator has chosen a sparse exchange.  Its duration hardly
shows that lines have become faster, and a dense exchange may then be better."""


class LinkRemeasurement:
    """Compares the durations of exchanges with the planner's prediction."""

    def __init__(self, run: RunState, planner: GenerationPlanner, addresses: AddressBook) -> None:
        self._run, self._planner, self._addresses = run, planner, addresses
        self._durations_s: list[float] = []  # of exchanges of one generation, since `_began_s`
        self._began_s = 0.0
        self._latest = 0, 0  # generation and step of the latest duration
        self._usual_ratio = 1.0  # of the measured to the predicted duration
        self._ratio_before: float | None = None  # what caused the latest measurement; None once compared
        self._pending: list[PeerId] = []  # members that have not been asked to measure yet
        self._asked: list[PeerId] = []  # members that have been asked, the latest last
        self._next_s = -math.inf  # when the next member is asked, or durations are recorded again
        self._ended_s, self._pause_s = -math.inf, PAUSE_S  # of the latest measurement

    def is_measuring(self, now_s: float) -> bool:
        """Whether rates are still arriving: some may be new, and others not."""
        return bool(self._pending) or now_s < self._ended_s + MEMBER_PROBE_S

    def record_end(self, peer: PeerId, now_s: float) -> None:
        """Record that a member has reported its round trips, which it does last."""
        if self._pending and peer == self._asked[-1]:
            self._next_s = now_s

    def poll(self, now_s: float) -> list[Effect]:
        """Record the latest exchange; return messages that start a member's measurement, if one is due.

        Called after each heartbeat of the member with rank 0, unless a generation is forming.
        """
        run, size = self._run, len(self._run.member_order)
        if run.partition.is_pipeline or not 1 < size <= MAX_REPLANNED_MEMBERS:
            self._pending.clear()
            return []
        if run.phase is not RunPhase.TRAINING or now_s < self._next_s:
            return []
        if self._pending:
            return self._measure_next(now_s)
        return self._begin_if_changed(now_s) if self._observe(now_s) else []

    def _observe(self, now_s: float) -> bool:
        """Record the duration of the latest exchange; return whether enough of them have been recorded."""
        run = self._run
        workers = [run.workers[peer] for peer in run.member_order if peer in run.workers]
        latest = run.generation, median_low([worker.step for worker in workers] or [0])
        if latest[0] != self._latest[0] or not self._durations_s:
            self._durations_s, self._began_s = [], now_s
        figures = [worker.figures for worker in workers if "communicating_s" in worker.figures]
        if latest != self._latest and len(figures) == len(run.member_order):
            self._durations_s.append(exchange_duration_s(figures))
        self._latest = latest
        return len(self._durations_s) >= WINDOW_STEPS and now_s >= self._began_s + WINDOW_S

    def _begin_if_changed(self, now_s: float) -> list[Effect]:
        measured_s, predicted_s = median(self._durations_s), self._planner.predicted_exchange_s()
        self._durations_s = []
        if predicted_s is None:
            return []
        ratio, before = max(NOTICEABLE_S, measured_s) / max(NOTICEABLE_S, predicted_s), self._ratio_before
        if before is not None:
            self._usual_ratio, self._ratio_before = ratio if _is_similar(ratio, before) else 1.0, None
        order, choice = self._run.member_order, self._planner.exchange_choice
        asked_s = [self._planner.reorder_limits.introduced_s(peer) for peer in order]
        is_changed = not _is_similar(ratio, self._usual_ratio)
        if not is_changed and not (
            choice.is_auto and choice.is_sparse and now_s >= min(asked_s) + SPARSE_INTERVAL_S
        ):
            return []
        may_measure = [peer for peer, at_s in zip(order, asked_s, strict=True) if now_s >= at_s + PAUSE_S]
        if len(may_measure) < len(order) - 1:  # nobody would measure the links between the others
            return []
        self._pending, self._asked = may_measure, []
        self._ratio_before = ratio if is_changed else None
        fields = {"measured_s": round(measured_s, 3), "predicted_s": round(predicted_s, 3)}
        return [LogEvent("info", "links_remeasured", fields), *self._measure_next(now_s)]

    def _measure_next(self, now_s: float) -> list[Effect]:
        """Ask the next member to measure its links to those that have not measured theirs to it.

        Relayed links are left out: no bursts are sent over them, and the members would replace them if
        `introduce`, which chooses among fewer relays, names another relay.
        """
        run, peer = self._run, self._pending.pop()
        self._asked.append(peer)
        is_member = peer in run.members
        self._next_s = now_s + (MEMBER_PROBE_S if is_member else 0.0)
        if not self._pending:
            is_repeated = now_s < self._ended_s + self._pause_s + MAX_PAUSE_S
            if self._ratio_before is not None:
                self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S) if is_repeated else PAUSE_S
            self._next_s, self._ended_s = now_s + self._pause_s, now_s
        if not is_member:
            return []
        others = [
            other
            for other in run.member_order
            if other not in self._asked and relay_of(self._addresses.address(peer, other)) is None
        ]
        self._planner.reorder_limits.record_introduction(peer, now_s)
        return self._addresses.introduce(peer, others)


def _is_similar(ratio: float, other: float) -> bool:
    return 1 / CHANGE < ratio / other < CHANGE
