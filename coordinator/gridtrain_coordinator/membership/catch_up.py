"""Chooses the members that send newcomers the state while training goes on, and detects stalled newcomers.

admitted --CatchUpFrom(sources)--> catching up --CatchUpReport--> enters the next generation
                                      | +-- PeersUnreachable: CatchUpFrom with other routes
                                      |
                                      +-- no progress for `NO_PROGRESS_TIMEOUT_S`: enters nevertheless,
                                          and the members wait for it
sources <--ServeCatchUp(step, newcomers)-- the longest-serving members; sent again when its content changes
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_low

from gridtrain.core import messages as m
from gridtrain_coordinator.run.addressing import AddressBook
from gridtrain_coordinator.run.events import Effect, LogEvent, Send
from gridtrain_coordinator.run.registry import Worker
from gridtrain_coordinator.run.run_state import MAX_STEPS, RunState

MAX_STATE_SOURCES = 3
MAX_CATCHING_UP = 64
NO_PROGRESS_TIMEOUT_S = 60.0
"""How long a newcomer may make no progress before it enters the next generation without having caught up.

Until the state sources have reached the snapshot step, which may take minutes, their progress counts, too.
"""

SNAPSHOT_LEAD_S, SNAPSHOT_LEAD_STEPS = 1.5, 1
"""The minimum lead of the snapshot step over the latest step, in seconds and in steps.

All sources take their snapshots after the same step, so `ServeCatchUp` must reach every source before the
source begins that step.
"""

SNAPSHOT_LATE_S = 4.0
"""If the group has not reached the snapshot step within this time, a nearer step is chosen."""


class CatchUp:
    """Introduces newcomers and state sources to each other, and records the messages sent to them."""

    def __init__(self, run: RunState, addresses: AddressBook) -> None:
        self._run, self._addresses = run, addresses
        self._started_s: dict[m.PeerId, float] = {}
        self._state_sources: tuple[m.PeerId, ...] = ()
        self._announced: tuple[m.PeerId, ...] = ()  # newcomers known to the sources
        self._fetch_sent_s: dict[m.PeerId, float] = {}  # when newcomers were sent their sources
        self._snapshot_step: tuple[int, float] | None = None  # the snapshot step, and when it was sent

    @property
    def is_active(self) -> bool:
        """Whether a worker is catching up, or a state source must still be notified that catch-up is over."""
        return bool(self._announced or self._state_sources or self._started_s)

    def advance(self, newcomers: Sequence[Worker], now_s: float) -> list[Effect]:
        """Notify newcomers and state sources of changes; called while the members train.

        Args:
            newcomers: the workers that are still catching up (`Candidates.catching_up`).
        """
        run = self._run
        if not newcomers and not self.is_active:
            return []  # the common case; this method is called after every message
        # All members were ready, so those that joined with this generation hold the state by now.
        holders = run.connected_members
        if run.present_members and not holders:
            return []  # for example after a short failure of the coordinator's link; they may reconnect
        if not holders or run.view is None:
            for worker in newcomers:
                worker.mark_caught_up()  # no member can send the state
            newcomers = ()
        # The median of the reported steps, so that a single liar has no influence.
        latest = min(median_low([run.workers[x].step for x in holders] or [-1]), MAX_STEPS)
        before = run.view.applied if run.view is not None else -1
        step = choose_snapshot_step(latest, latest - before, now_s - run.view_change.last_installed_s)
        return self._update(newcomers, run.workers.sort_by_seniority(holders), step, latest, now_s)

    def _update(
        self, newcomers: Sequence[Worker], holders: Sequence[m.PeerId], step: int, latest: int, now_s: float
    ) -> list[Effect]:
        """Return log events, and the messages to the newcomers and state sources that a change affects.

        Args:
            newcomers: admitted workers that have not caught up.
            holders: members that hold the state, longest-serving first.
            step: the step after which snapshots are to be taken.
            latest: the members' last step.
        """
        candidates = self._run.workers.candidates(self._run.members)
        entering = [worker for worker in candidates.newcomers if worker.has_caught_up]
        effects: list[Effect] = []
        catching_up: list[Worker] = []
        for worker in newcomers[:MAX_CATCHING_UP]:
            self._started_s.setdefault(worker.peer, now_s)
            if now_s - self._progressed_s(worker.peer) >= NO_PROGRESS_TIMEOUT_S:
                worker.mark_caught_up()
                fields = {"name": worker.name, "reason": f"no progress for {NO_PROGRESS_TIMEOUT_S:.0f} s"}
                effects.append(LogEvent("warning", "not_following", fields))
            else:
                catching_up.append(worker)
        self._started_s = {worker.peer: self._started_s[worker.peer] for worker in catching_up}
        catching_up += [worker for worker in entering if worker.peer in self._announced]
        peers = tuple(worker.peer for worker in catching_up)
        sources = tuple(holders[:MAX_STATE_SOURCES]) if catching_up else ()
        is_late = self._is_snapshot_step_late(step, latest, now_s)
        if (sources, peers) == (self._state_sources, self._announced) and not is_late:
            return effects
        gone = [peer for peer in self._state_sources if peer not in sources]
        effects += [Send(peer, m.ServeCatchUp(self._run.term, -1, ())) for peer in gone]
        effects += [Send(peer, m.ServeCatchUp(self._run.term, step, peers)) for peer in sources]
        for worker in catching_up:
            if sources != self._state_sources or worker.peer not in self._announced:
                effects += self._send_fetch(worker.peer, sources, now_s)
        new = [worker.name for worker in catching_up if worker.peer not in self._announced]
        if new:
            following: dict[str, object] = {
                "names": ", ".join(new),
                "donors": len(sources),
                "after_step": step,
            }
            effects.append(LogEvent("info", "following", following))
        self._state_sources, self._announced = sources, peers
        self._fetch_sent_s = {peer: sent_s for peer, sent_s in self._fetch_sent_s.items() if peer in peers}
        self._snapshot_step = (step, now_s) if sources and step > latest else None
        return effects

    def _send_fetch(self, peer: m.PeerId, sources: Sequence[m.PeerId], now_s: float) -> list[Effect]:
        """Send a newcomer and its state sources the routes between them.

        The sources also receive routes, because the generation may have changed since routes were last sent.
        """
        self._fetch_sent_s[peer] = now_s
        addresses = tuple((source, self._addresses.address(peer, source)) for source in sources)
        return [*self._addresses.connect(peer, sources), Send(peer, m.CatchUpFrom(self._run.term, addresses))]

    def handle_no_route(self, worker: Worker, message: m.PeersUnreachable, now_s: float) -> list[Effect]:
        """Send other routes to a newcomer that cannot connect to its state sources.

        This does not require another generation.
        """
        run, peer, limits = self._run, worker.peer, self._run.limits
        sent_s = self._fetch_sent_s.get(peer)
        missed = run.members & set(message.peers) - {peer}
        if message.term != run.term or peer not in self._announced or not missed & set(self._state_sources):
            return []
        if sent_s is None or now_s < sent_s + limits.route_s / 2:
            return []  # the newcomer has since received new routes that it has not tried yet
        tried = self._addresses.reroute(peer, sorted(missed))
        names = ", ".join(run.workers.display_name(other) for other in self._state_sources if other in missed)
        note = LogEvent("warning", "no_route", {"name": worker.name, "to": names, "tried": tried})
        return [note, *self._send_fetch(peer, self._state_sources, now_s)]

    def handle_catch_up_report(self, worker: Worker, applied: int) -> list[Effect]:
        """Record that a newcomer has caught up, or that it cannot catch up while the members train.

        Args:
            applied: the last step of the state that the newcomer holds; negative if it cannot catch up.
        """
        if worker.has_caught_up:
            return []  # it repeats the report until it is a member
        worker.mark_caught_up()
        if applied >= 0:
            return [LogEvent("info", "caught_up", {"name": worker.name, "step": applied + 1})]
        reason = "it cannot catch up while the others train; it receives the state in the next generation"
        return [LogEvent("info", "not_following", {"name": worker.name, "reason": reason})]

    def on_reconnected(self, peer: m.PeerId) -> None:
        """Discard the record of what was sent to a worker that has reconnected, so that lost messages are
        sent again."""
        self._state_sources = tuple(source for source in self._state_sources if source != peer)
        self._announced = tuple(known for known in self._announced if known != peer)

    def _is_snapshot_step_late(self, step: int, latest: int, now_s: float) -> bool:
        """Return whether the chosen snapshot step is overdue and `step`, which is nearer, should replace it.

        Clears the chosen step once the group has reached it; until then, returns True at most once per
        `SNAPSHOT_LATE_S`.
        """
        if self._snapshot_step is None or latest >= self._snapshot_step[0]:
            self._snapshot_step = None  # the snapshots have been taken
            return False
        chosen, since_s = self._snapshot_step
        if now_s < since_s + SNAPSHOT_LATE_S:
            return False
        self._snapshot_step = chosen, now_s  # to be checked again later
        return step < chosen

    def deadline_s(self) -> float:
        """Return the earliest time at which a newcomer may have stalled or the snapshot step may be late."""
        late_s = math.inf if self._snapshot_step is None else self._snapshot_step[1] + SNAPSHOT_LATE_S
        progressed_s = min(map(self._progressed_s, self._started_s), default=math.inf)
        return min(late_s, progressed_s + NO_PROGRESS_TIMEOUT_S)

    def _progressed_s(self, peer: m.PeerId) -> float:
        """Return the time at which a newcomer, or the sources whose snapshots it awaits, made progress."""
        waits_for = (peer, *self._state_sources) if self._snapshot_step is not None else (peer,)
        workers = self._run.workers
        times_s = [workers[each].progressed_s for each in waits_for if each in workers]
        return max([self._started_s[peer], *times_s])


def choose_snapshot_step(latest: int, made: int, running_s: float) -> int:
    """Choose a step that no member will have begun when `ServeCatchUp` arrives.

    Args:
        latest: the members' last step.
        made: the number of steps made in the last `running_s` seconds.
        running_s: the time in which the steps were made; at least `SNAPSHOT_LEAD_S` is assumed, because a
            few quick initial steps say little about the rate.
    """
    rate_Hz = made / max(running_s, SNAPSHOT_LEAD_S)
    return latest + max(SNAPSHOT_LEAD_STEPS, math.ceil(rate_Hz * SNAPSHOT_LEAD_S))
