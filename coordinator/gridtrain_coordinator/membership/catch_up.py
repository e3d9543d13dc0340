"""Newcomers that take over the state while the members train on: who gives it to whom.

Decides who follows, from which members, and after which step these take their images.  Never decides who
enters a generation: that is `protocol.membership`, which lets a follower in when it has said Caught.

    admitted --Fetch(donors)--> follows --Caught--> enters the next generation
                                   | +-- NoRoute: no donor is connected --> Fetch with other ways
                                   |
                                   +-- no progress for `STUCK_S`: enters all the same, and the others wait
    donors <--Donate(step, followers)-- the eldest members that hold the state; told again when it changes
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
"""Without progress.  A donor's trainer may be in a long step, and gives its state after it."""

SNAPSHOT_LEAD_S, SNAPSHOT_LEAD_STEPS = 1.5, 1
"""All donors are to take their images after the same step, so it has to be one that none has begun yet."""

SNAPSHOT_LATE_S = 4.0
"""If the group has not got to that step by then, it has become slower, and a nearer step is named."""


class CatchUp:
    """What was told to whom."""

    def __init__(self, run: RunState, whereabouts: AddressBook) -> None:
        self._run, self._addresses = run, whereabouts
        self._started_s: dict[m.PeerId, float] = {}
        self._state_sources: tuple[m.PeerId, ...] = ()
        self._announced: tuple[m.PeerId, ...] = ()
        self._fetch_sent_s: dict[m.PeerId, float] = {}  # who was told how to reach the donors, and when last
        self._snapshot_step: tuple[int, float] | None = None  # the step of the images, and when it was named

    @property
    def is_active(self) -> bool:
        """Somebody follows, or has to be told that it is over."""
        return bool(self._announced or self._state_sources or self._started_s)

    def advance(self, made_s: float, now_s: float) -> list[Effect]:
        """Bring everybody up to date, while the members train in a generation that was made at `made_s`."""
        run = self._run
        followers = [w for w in run.workers.values() if w.is_catching_up and w.peer not in run.members]
        if not followers and not self.is_active:
            return []  # as almost always, and this is asked after every message
        # All were READY: those who joined with this generation hold the state by now.
        holders = [peer for peer in run.present_members if run.workers[peer].disconnected_s is None]
        if run.present_members and not holders:
            return []  # as when this coordinator's own line breaks for a moment: they may come back
        if not holders or run.view is None:
            for worker in followers:
                worker.has_caught_up = True  # there is nobody to follow
            followers = []
        # Of what they say the middle: one that lies moves nothing.
        latest = min(median_low([run.workers[x].step for x in holders] or [-1]), MAX_STEPS)
        before = run.view.applied if run.view is not None else -1
        step = choose_snapshot_step(latest, latest - before, now_s - made_s)
        return self._update(followers, run.sort_by_seniority(holders), step, latest, now_s)

    def _update(
        self, followers: Sequence[Worker], holders: Sequence[m.PeerId], step: int, latest: int, now_s: float
    ) -> list[Effect]:
        """Tell what is new.

        Args:
            followers: admitted, and not caught up.
            holders: members that hold the state, the eldest first.
            step: after which images are to be taken.
            latest: the members' last step.
        """
        entering = [worker for worker in self._run.newcomers() if worker.has_caught_up]
        effects: list[Effect] = []
        following: list[Worker] = []
        for worker in followers[:MAX_CATCHING_UP]:
            since_s = self._started_s.setdefault(worker.peer, now_s)
            if now_s - max(since_s, worker.progressed_s) >= NO_PROGRESS_TIMEOUT_S:
                worker.has_caught_up = True
                fields = {"name": worker.name, "reason": f"no progress for {NO_PROGRESS_TIMEOUT_S:.0f} s"}
                effects.append(LogEvent("warning", "not_following", fields))
            else:
                following.append(worker)
        self._started_s = {worker.peer: self._started_s[worker.peer] for worker in following}
        following += [worker for worker in entering if worker.peer in self._announced]
        peers = tuple(worker.peer for worker in following)
        donors = tuple(holders[:MAX_STATE_SOURCES]) if following else ()
        anew = self._is_snapshot_step_late(step, latest, now_s)
        if (donors, peers) == (self._state_sources, self._announced) and not anew:
            return effects
        gone = [peer for peer in self._state_sources if peer not in donors]
        effects += [Send(peer, m.ServeCatchUp(self._run.term, -1, ())) for peer in gone]
        effects += [Send(peer, m.ServeCatchUp(self._run.term, step, peers)) for peer in donors]
        for worker in following:
            if donors != self._state_sources or worker.peer not in self._announced:
                effects += self._send_fetch(worker.peer, donors, now_s)
        new = [worker.name for worker in following if worker.peer not in self._announced]
        if new:
            told: dict[str, object] = {"names": ", ".join(new), "donors": len(donors), "after_step": step}
            effects.append(LogEvent("info", "following", told))
        self._state_sources, self._announced = donors, peers
        self._fetch_sent_s = {peer: told_s for peer, told_s in self._fetch_sent_s.items() if peer in peers}
        self._snapshot_step = (step, now_s) if donors and step > latest else None
        return effects

    def _send_fetch(self, peer: m.PeerId, donors: Sequence[m.PeerId], now_s: float) -> list[Effect]:
        """Both ends are told: the generation may be another one since the newcomer was announced."""
        self._fetch_sent_s[peer] = now_s
        named = tuple((donor, self._addresses.address(peer, donor)) for donor in donors)
        return [*self._addresses.connect(peer, donors), Send(peer, m.CatchUpFrom(self._run.term, named))]

    def handle_no_route(self, worker: Worker, message: m.PeersUnreachable, now_s: float) -> list[Effect]:
        """A follower is connected with no donor: it goes another way, without waiting for a generation."""
        run, peer, limits = self._run, worker.peer, self._run.limits
        told_s = self._fetch_sent_s.get(peer)
        missed = run.members & set(message.peers) - {peer}
        if message.term != run.term or peer not in self._announced or not missed & set(self._state_sources):
            return []
        if told_s is None or now_s < told_s + limits.route_s / 2:
            return []  # it was told since, and has not tried that yet
        tried = self._addresses.reroute(peer, sorted(missed))
        names = ", ".join(run.display_name(other) for other in self._state_sources if other in missed)
        note = LogEvent("warning", "no_route", {"name": worker.name, "to": names, "tried": tried})
        return [note, *self._send_fetch(peer, self._state_sources, now_s)]

    def on_reconnected(self, peer: m.PeerId) -> None:
        """Its connection is back: what it was told may have been lost, and is told again."""
        self._state_sources = tuple(donor for donor in self._state_sources if donor != peer)
        self._announced = tuple(told for told in self._announced if told != peer)

    def _is_snapshot_step_late(self, step: int, latest: int, now_s: float) -> bool:
        """Once a turn: forget the step of the images when the group has got there, and look every `LATE_S`
        whether it takes longer than was thought; then, whether `step` is nearer and to be named instead."""
        if self._snapshot_step is None or latest >= self._snapshot_step[0]:
            self._snapshot_step = None  # they are taken
            return False
        named, since_s = self._snapshot_step
        if now_s < since_s + SNAPSHOT_LATE_S:
            return False
        self._snapshot_step = named, now_s  # looked at again later
        return step < named

    def deadline_s(self) -> float:
        """When somebody may be stuck, or the step of the images is late."""
        workers = self._run.workers
        late_s = math.inf if self._snapshot_step is None else self._snapshot_step[1] + SNAPSHOT_LATE_S
        stuck_s = min(
            (
                (max(since_s, workers[peer].progressed_s) if peer in workers else since_s)
                + NO_PROGRESS_TIMEOUT_S
                for peer, since_s in self._started_s.items()
            ),
            default=math.inf,
        )
        return min(late_s, stuck_s)


def choose_snapshot_step(latest: int, made: int, running_s: float) -> int:
    """A step that no member has begun when it hears of it; `made` steps in the last `running_s` seconds.

    A few quick steps at the beginning say little of the rate: less than `AHEAD_S` counts as so much.
    """
    rate_Hz = made / max(running_s, SNAPSHOT_LEAD_S)
    return latest + max(SNAPSHOT_LEAD_STEPS, math.ceil(rate_Hz * SNAPSHOT_LEAD_S))
