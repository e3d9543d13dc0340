"""The coordinator's side of the protocol: who is a member, and what became of the open step.

Decides whom to admit, when the next generation is made, its members, ranks and verdict.  Never sees
a gradient, never touches a socket, a clock or a disk: what must be durable leaves as a `Journal`
effect, and the loop makes it so before it carries out what follows.

    WAITING --enough workers--> FORMING --all READY--> TRAINING --all Finished--> FINISHED
                                 ^   |                    |
                            VIEW |   | a member is lost   | join, leave, loss, stall
                                 |   v                    v
                               FREEZING <-----------------+      (FREEZE sent, REPORTs awaited)

Commit rules 5 to 8 (DESIGN section 7).  Where all members are lost the run waits, and starts anew.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from statistics import median_low
from typing import Any

from gridtrain.config import Deadlines
from gridtrain.errors import ConfigError
from gridtrain.protocol import forming, ledger, topology
from gridtrain.protocol import messages as m
from gridtrain.protocol.alike import Alike
from gridtrain.protocol.breaks import MOST_BREAKS, WINDOW_S, Breaks
from gridtrain.protocol.drift import Drifted, Drifts
from gridtrain.protocol.exchanging import FIRST_FIGURE, Exchanging, pace_of
from gridtrain.protocol.followers import Followers, step_ahead
from gridtrain.protocol.in_stages import InStages
from gridtrain.protocol.lines import Network
from gridtrain.protocol.membership_io import (
    CalledBack,
    Dismiss,
    Effect,
    Event,
    Expelled,
    Heard,
    Journal,
    Lost,
    Note,
    Offended,
    RunPhase,
    Send,
    Strike,
    Up,
)
from gridtrain.protocol.names import Names
from gridtrain.protocol.recall import Raises, Recall, is_credible
from gridtrain.protocol.recovery import Recovered, generation_entry
from gridtrain.protocol.recutter import Recutter
from gridtrain.protocol.recutting import refuse_nonsense
from gridtrain.protocol.resting import Resting
from gridtrain.protocol.roads import MOST_MEMBERS
from gridtrain.protocol.roll import AVOIDED_S, Worker, differences, latencies, limits, shares
from gridtrain.protocol.round import HISTORY_START
from gridtrain.protocol.seating import Seating, stage_shares
from gridtrain.protocol.seats import Seats, groups
from gridtrain.protocol.sharing import Sharing
from gridtrain.protocol.stalls import Stalls
from gridtrain.protocol.tellers import Tellers
from gridtrain.protocol.verdict import Outcome, judge
from gridtrain.protocol.wakefulness import Wakefulness, no_earlier
from gridtrain.protocol.whereabouts import Whereabouts
from gridtrain.protocol.witnesses import Witnesses

ROSTER_PAGE = 128
MAX_WORKERS = 1000  # what the lists of one message hold
MAX_PROBES = 256
MOST_STEPS = 2**62
"""What a worker may say of a step has to stay a number of the protocol when something is added to it."""
RESTART = "restart this worker to join again; `gridtrain worker --restarts N` does so by itself"


class _Making(StrEnum):
    """Where the making of the next generation stands."""

    NONE = "none"
    FREEZING = "freezing"  # REPORTs are awaited
    FORMING = "forming"  # READYs are awaited


class Membership(InStages):
    """See the module's text.

    Args:
        me: the coordinator's key.
        run: the run's name; joins for another are refused.
        term: how often the coordinator has started, already journalled.
        min_workers: a run starts only with so many.
        deadlines: see `gridtrain.config.Deadlines`.
        software: this program's version, shown to workers.
        recovered: the run as an earlier term left it; its members are waited for.
        plans: False: ranks go by the order of joining, whatever the links are like.
    """

    def __init__(
        self,
        *,
        me: m.PeerId,
        run: str,
        term: int,
        deadlines: Deadlines,
        software: str,
        min_workers: int = 1,
        recovered: Recovered | None = None,
        plans: bool = True,
    ) -> None:
        self.run = run
        self._plans = plans
        self.term = term
        self.phase = RunPhase.WAITING
        self.reason = f"waiting for {_workers(min_workers)}"
        self.generation = 0
        self._deadlines = deadlines
        self._software = software
        self._min_workers = min_workers
        self._workers: dict[m.PeerId, Worker] = {}
        self._whereabouts = Whereabouts(me)
        self._wakefulness = Wakefulness()
        self._accepted: set[m.PeerId] = set()  # who has obeyed this coordinator
        self._breaks = Breaks()
        self._alike = Alike()
        self._drift = Drifts()
        self._drifted = Drifted()
        self._drifts = 0  # states that were found to differ, and replaced
        self._followers = Followers(self._whereabouts.address)
        self._sharing = Sharing()
        self._links = topology.Measured()
        self._tellers = Tellers(deadlines.reshare_s)
        self._resting = Resting()
        self._names = Names()
        self._reference: m.Setup | None = None  # what all workers must agree with
        self._roster: tuple[m.Member, ...] = ()
        self._current_of: tuple[m.Member, ...] = ()
        self._current_keys: frozenset[m.PeerId] = frozenset()
        self._settled: str | None = None  # with this change wanted a beat moves nothing; None: it may
        self._due_s: float | None = None  # see deadline_s
        self._making = _Making.NONE
        self._making_until_s = math.inf
        self._made_s = -math.inf
        self._formed_by_s = -math.inf  # however much of a state is still on its way
        self._reports: dict[m.PeerId, m.Report] = {}
        self._ready: dict[m.PeerId, bytes] = {}
        self._finished: set[m.PeerId] = set()
        self._view: m.View | None = None
        self._change: str = ""  # why the next generation is wanted; empty: it is not
        self._unrouted = ""  # the same of the one that forms, unless its members find a way all the same
        self._plan_reason = ""
        self._exchanging = Exchanging(rates_s=deadlines.probe_s)
        self._looked_s = -math.inf  # for another exchange
        self._weighed_s = -math.inf  # whether other shares are worth it
        self._reached = 0  # the step that generations and finished workers have told of
        self._witnesses = Witnesses(recovered.checkpoints if recovered is not None else {})
        self._stalls = Stalls(deadlines.patience_floor_s)
        self._events: deque[dict[str, Any]] = deque(maxlen=50)
        self._started = False  # somebody holds, or held, a model worth waiting for
        self._departed: set[m.PeerId] = set()  # members that left, or were dismissed: not waited for
        self._cuts: tuple[int, ...] = ()  # of the generation, where the model has stages
        self._short_since_s: float | None = None  # fewer workers than stages are here
        self._without: tuple[frozenset[m.PeerId], tuple[int, ...]] | None = None  # see in_stages
        self._recutter = Recutter()
        self._regathering = False  # all members are away, and waited for
        self._recall = Recall()  # what members know that the journal does not
        self._raises = Raises()
        self._regather_until_s = -math.inf
        self._waited = False  # those who are not back by now have had their time
        self._freeze_by_s: float | None = None  # while members come back the FREEZE is held, until then
        if recovered is not None:
            self._take_up(recovered)

    def _take_up(self, recovered: Recovered) -> None:
        self.generation, self._reference = recovered.generation, recovered.reference
        view = recovered.view
        chosen, alone = ("", False) if view is None else (view.exchange, view.world_size == 1)
        self._exchanging.defined(recovered.reference, chosen, alone)
        self._recall = Recall(frozenset(x.peer for x in recovered.roster), recovered.generation)
        self._reached = recovered.view.applied + 1 if recovered.view is not None else recovered.reached
        if recovered.finished:
            self.phase, self.reason = (
                RunPhase.FINISHED,
                "the run was finished before the coordinator restarted",
            )
        elif recovered.view is not None:
            self._roster, self._regathering, self._started = recovered.roster, True, recovered.started
            self._view, self._cuts = replace(recovered.view, term=self.term), recovered.view.cuts
            self._making = _Making.FREEZING
            self._change = "the coordinator restarted"
            self.phase = RunPhase.PAUSED
            self.reason = (
                f"the coordinator restarted; waiting for {len(recovered.roster)} members to come back"
            )

    # -- interface -----------------------------------------------------------------------------

    def start(self, now_s: float) -> list[Effect]:
        body = {"term": self.term, "run": self.run, "software": self._software}
        if self._regathering:
            self._making_until_s = self._regather_until_s = now_s + self._deadlines.regather_s
            self._freeze_by_s = math.inf
        return self._noted([Journal("term", body), Note("info", "started", dict(body))], now_s)

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        woken = self._woken(now_s)
        if not (isinstance(event, Heard) and isinstance(event.message, m.Beat)):
            self._settled, self._due_s = None, None
        match event:
            case Up(peer, host):
                self._whereabouts.came(peer, host)
                worker = self._workers.get(peer)
                if worker is not None:
                    worker.lost_s, worker.missed_s, worker.heard_s = None, -math.inf, now_s
                effects: list[Effect] = []
            case Lost(peer, _):
                self._whereabouts.went(peer)
                worker = self._workers.get(peer)
                if worker is not None:
                    worker.lost_s = now_s
                effects = []
            case Offended(peer, reason):
                effects = [Strike(peer, reason)]
            case CalledBack(peer, address):
                effects = self._called_back(peer, address, now_s)
            case Expelled(peer):
                effects = self._expelled(event, now_s)
            case Heard(peer, message):
                if peer in self._workers:
                    self._workers[peer].heard_s = now_s
                effects = self._heard(peer, message, now_s)
        effects = woken + effects + self._go_on(now_s)
        if self._settled is None:
            self._due_s = None
        return self._noted(effects, now_s)

    def tick(self, now_s: float) -> list[Effect]:
        """To be called when `deadline_s` has passed."""
        self._settled = None
        effects = self._woken(now_s)  # held against what the loop was told
        limits = self._deadlines
        for worker in list(self._workers.values()):
            gone = worker.gone(limits, now_s)
            if gone:
                effects += self._remove(worker.peer, gone, now_s)
            elif not worker.admitted and now_s >= worker.probe_until_s:
                worker.admitted = True
        raised = self._raise_term(now_s) if self.phase is not RunPhase.FINISHED else []
        if raised:
            effects += [*raised, *(told for peer in list(self._workers) for told in self._repeat(peer))]
        effects += self._go_on(now_s)
        if self._making is _Making.NONE and self._making_until_s <= now_s:
            self._making_until_s = math.inf  # who was waited for, or asked it, is gone
        self._due_s = None
        return self._noted(effects, now_s)

    def _woken(self, now_s: float) -> list[Effect]:
        """If this coordinator itself stood still, nobody is to blame for a silence that it slept through."""
        if not self._wakefulness.is_late(now_s):
            self._wakefulness.called(now_s)
            return []
        slept_s = self._wakefulness.overslept(self.deadline_s, now_s)
        if not slept_s:
            return []
        limits = self._deadlines
        until_s = now_s + 2 * limits.beat_s  # what was said meanwhile is read by then, and more comes
        for worker in self._workers.values():
            worker.heard_s = no_earlier(worker.heard_s, limits.silence_s, until_s)
            worker.probe_until_s = max(worker.probe_until_s, until_s)
            worker.moved_s += slept_s
            worker.feed.moved_s += slept_s
            if worker.lost_s is not None:
                worker.lost_s = no_earlier(worker.lost_s, limits.regreet_s, until_s)
        self._making_until_s = max(self._making_until_s, until_s)
        return [Note("warning", "overslept", {"late_s": round(slept_s, 3)})]

    @property
    def deadline_s(self) -> float:
        """When `tick` may have something to do; infinite if nothing is waited for."""
        if self._due_s is None:
            self._due_s = self._earliest_s()
        return self._due_s

    def _earliest_s(self) -> float:
        """A beat only puts this off: it is worked out again when it has come, or with other news."""
        limits, w = self._deadlines, self._workers
        held_s = self._freeze_by_s if self._freeze_by_s is not None else math.inf
        serves = self._making is _Making.NONE and self.phase is not RunPhase.FINISHED
        serves = serves and any(x.peer in w and w[x.peer].lost_s is None for x in self._roster)
        times = [
            self._making_until_s,
            self._followers.deadline_s(self._workers) if serves else math.inf,
            held_s,
            self._raises.deadline_s if self.phase is not RunPhase.FINISHED else math.inf,
            *(worker.deadline_s(limits) for worker in self._workers.values()),
        ]
        enough = self._roster or sum(w.admitted for w in self._workers.values()) >= self._least_workers
        if self._making is _Making.NONE and self._change and enough and self.phase is not RunPhase.FINISHED:
            times.append(self._may_make_at_s())
        if self._making is _Making.FORMING and self._unrouted:
            times.append(self._fed_until_s())
        return min(times)

    def snapshot(self, now_s: float) -> dict[str, Any]:
        """What `gridtrain status` shows; JSON-able."""
        rank_of = {member.peer: rank for rank, member in enumerate(self._roster)}
        stages_of = {p: n for n, group in enumerate(groups(list(rank_of), self._stages)) for p in group}
        steps = [self._reached, *(w.step for w in self._workers.values() if w.peer in rank_of)]
        return {
            "run": self.run,
            "phase": str(self.phase),
            "reason": self.reason,
            "term": self.term,
            "generation": self.generation,
            "step": max(steps),
            "world_size": len(self._roster),
            "stages": self._stages,
            "finished": self.phase is RunPhase.FINISHED,
            "facts": dict(self._exchanging.setup.facts) if self._exchanging.setup else {},
            "exchange_reason": self._exchanging.text,
            "global_batch_size": self._reference.global_batch_size if self._reference else None,
            "plan_reason": self._plan_reason,
            "links": self._links.listed([member.peer for member in self._roster]),
            "relayed": self._whereabouts.relayed([member.peer for member in self._roster]),
            "drifts": self._drifts,
            "members": [
                {
                    **w.line(rank_of.get(w.peer), self._roster, now_s),
                    "stage": stages_of.get(w.peer),
                    "reach": self._whereabouts.reach(w.peer),
                }
                for w in self._workers.values()
            ],
            "resting": self._resting.lines(now_s),
            "events": [dict(event) for event in self._events],
        }

    def _noted(self, effects: list[Effect], now_s: float) -> list[Effect]:
        for effect in effects:
            if isinstance(effect, Note):
                self._events.append({"at_s": round(now_s, 3), "event": effect.event, **effect.fields})
        return effects

    # -- messages ------------------------------------------------------------------------------

    def _heard(self, peer: m.PeerId, message: m.Message, now_s: float) -> list[Effect]:
        worker = self._workers.get(peer)
        if isinstance(message, m.Join):
            return self._join(peer, message, now_s)
        if worker is None:
            return [
                Send(peer, m.Rejoin(f"a {type(message).__name__} came from a worker that is not on the roll"))
            ]
        match message:
            case m.Setup():
                return self._set_up(worker, message, now_s)
            case m.About(texts):
                worker.about = dict(texts)
            case m.Links(rtt_s):
                worker.rtt_s = dict(rtt_s)
                worker.admitted = worker.setup is not None
            case m.Rates(rates_Bps):
                known = [told for told in rates_Bps if told[0] in self._workers]
                if self._links.told(peer, self._tellers.heeded(peer, known)):
                    self._tellers.changed(peer)
            case m.Beat(sequence, step, progress, figures):
                if progress > worker.progress:
                    worker.progress, worker.moved_s = progress, now_s
                worker.step, worker.figures = step, dict(figures)
                worker.feed.told(worker.figures.get(forming.STATE_LEFT, 0.0), now_s)
                self._sharing.observe(peer, worker.figures)
                self._mind_exchange(now_s)
                self._mind_shares(now_s)
                self._mind_links(now_s)
                if self._making is _Making.NONE and peer in self._current:
                    self._reached = max(self._reached, step)  # so that a rollback is seen to be one
                return [Send(peer, m.BeatReply(self.term, sequence))]
            case m.Report():
                return self._report(worker, message, now_s)
            case m.Ready(term, generation, history):
                if self._making is _Making.FORMING and (term, generation) == (self.term, self.generation):
                    self._ready[peer], worker.loading = history, False
                    self._drifted.is_ready(peer, generation)
            case m.Stalled():
                return self._stalled(worker, message, now_s)
            case m.NoRoute():
                return self._no_route(worker, message)
            case m.Fingerprint():
                return self._compare(peer, message)
            case m.Kept(states, generation):
                told = generation == self.generation  # else it crossed the View on its way
                return self._keeps(worker, states) + self._plan_without(worker, told=told)
            case m.Caught(applied):
                worker.caught = True
                return [Note("info", "caught_up", {"name": worker.name, "step": applied})]
            case m.Broken():
                return self._broken(worker, message, now_s)
            case m.Seated():
                return self._seated(worker, message, now_s)
            case m.Accuse(accused, reason):
                members = self._current
                if peer in members and accused in members and peer != accused:
                    return [Strike(accused, reason, accuser=peer)]
            case m.Leave(reason):
                return self._remove(peer, f"left: {reason}", now_s, dismiss=True)
            case m.Pausing(reason):
                self._resting.rests(peer, worker.name, reason, now_s)
                return self._remove(peer, f"left: {self._resting.said(peer)}", now_s, dismiss=True)
            case m.Finished(applied):
                self._finished.add(peer)
                if peer in self._current:  # others have finished nothing
                    self._reached = max(self._reached, min(applied, MOST_STEPS) + 1)
                return [Note("info", "worker_finished", {"name": worker.name, "step": applied})]
            case _:
                return [Strike(peer, f"sent {type(message).__name__}, which only others may send")]
        return []

    def _report(self, worker: Worker, report: m.Report, now_s: float) -> list[Effect]:
        """Where a member of the frozen generation stands; what cannot be so must not reach the ledger."""
        members = self._current
        if self._making is not _Making.FREEZING or report.generation != self.generation:
            return []
        if worker.peer not in members:
            return [Strike(worker.peer, "reported on a generation that it is no member of")]
        if worker.peer in self._departed:
            return []  # of another process with its key: what it has is on its disk, see `Setup`
        sound = ledger.is_sound(report.ledger, members) and report.ledger.step == report.applied + 1
        sound = sound and self._may_hold(report.blocks)
        least = self._view.applied if self._view is not None else -1
        if report.synced and (not sound or report.applied < least):
            return [Strike(worker.peer, "reported a step and a ledger that cannot be")]
        if report.synced and worker.setup is None:
            return []  # it was away: its set-up is on the way behind an answer to an older FREEZE
        report = self._drifted.judged(worker.peer, report)
        self._reports[worker.peer] = report
        behind = self._regathering and self._recall.behind  # then others may tell of a later generation
        if report.synced and not behind:  # it can decide: whoever is still away is not waited for any longer
            self._making_until_s = min(self._making_until_s, now_s + self._deadlines.silence_s)
        return []

    def _join(self, peer: m.PeerId, join: m.Join, now_s: float) -> list[Effect]:
        if join.run != self.run:
            return self._refuse(
                peer,
                "wrong-run",
                f'this coordinator serves the run "{self.run}", not "{join.run}"',
                f'ask the owner of "{join.run}" for an invitation to it',
            )
        if self.phase is RunPhase.FINISHED:
            return self._too_late(peer)
        if len(self._workers) >= MAX_WORKERS and peer not in self._workers:
            reason = f"the run has {len(self._workers)} workers, and {MAX_WORKERS} are the most"
            return self._refuse(peer, "full", reason, "try again when somebody has left")
        replaced = self._replaced(peer, join, now_s)
        worker = self._workers.get(peer)
        if worker is None:
            taken = {other.name for other in self._workers.values()} | self._resting.names(peer)
            worker = Worker(peer, self._names.given(peer, join.name, taken), join.address, now_s, now_s)
            self._workers[peer] = worker
        worker.address, worker.lost_s = join.address, None
        self._resting.forget(peer)
        self._followers.missed(peer)
        state = Send(peer, m.RunState(str(self.phase), self.reason))
        note = Note("info", "joined", {"name": worker.name, "peer": peer.hex()[:12], "address": join.address})
        renamed = self._names.renamed(join.name, worker.name)
        welcome = Send(peer, m.Welcome(self.term, self.run, self._software))
        return [
            *replaced,
            note,
            *renamed,
            welcome,
            state,
            *self._whereabouts.locate(worker, join.relay),
            *self._drifted.again(peer),
            *self._repeat(peer),
        ]

    def _replaced(self, peer: m.PeerId, join: m.Join, now_s: float) -> list[Effect]:
        """Another process than the one that is known by this key: that one is lost, with all that it held."""
        worker = self._workers.get(peer)
        member = peer in self._current - self._departed
        known = member or (worker is not None and worker.setup is not None)
        # Who has said READY has a seat, and who has none never was a member in another term of ours.
        elsewhere = member and (
            (peer in self._ready and join.generation < self.generation)
            or (worker is None and not join.generation)
        )
        if not known or (join.again and not elsewhere):
            return []
        reason = "its process has ended, and another one came with its key"
        effects = self._remove(peer, reason, now_s)
        self._drifted.forget(peer)
        if member:
            self._miss(peer, f"{worker.name if worker is not None else join.name} is lost: {reason}", True)
        effects += self._go_on(now_s)
        self._settled = None
        return effects

    def lend(self, guest: m.PeerId, most: int) -> tuple[list[Effect], tuple[tuple[m.PeerId, str], ...]]:
        """Members that can be dialled, and where; they expect a guest now that measures its line to them."""
        return self._whereabouts.lend(guest, [member.peer for member in self._roster], most)

    def _called_back(self, peer: m.PeerId, address: str, now_s: float) -> list[Effect]:
        worker = self._workers.get(peer)
        if worker is None or not (told := self._whereabouts.called_back(worker, address)):
            return []
        return told + (self._introduce(worker, now_s) if worker.setup is not None else [])

    def _introduce(self, worker: Worker, now_s: float) -> list[Effect]:
        self._tellers.introduced(worker.peer)
        worker.probe_until_s = now_s + self._deadlines.probe_s
        # Those that are still measuring too: of workers that come together each pair has to be measured.
        # Whoever came last is measured first, so that each of them is one other's first, second, third ..
        others = [w for w in self._workers.values() if w.introduced and w is not worker]
        others.sort(key=lambda other: -other.probe_until_s)
        return self._whereabouts.introduce(worker.peer, [other.peer for other in others[:MAX_PROBES]])

    def _no_route(self, worker: Worker, message: m.NoRoute) -> list[Effect]:
        """Members that cannot connect: the next generation takes another way between them."""
        current = (message.term, message.generation) == (self.term, self.generation)
        members = self._current
        if not current or self._making is _Making.FREEZING or worker.peer not in members:
            return []
        others = sorted(members & set(message.peers) - {worker.peer})
        if not others:
            return []
        tried = self._whereabouts.give_up(worker.peer, others)
        names = ", ".join(self._workers[p].name if p in self._workers else p.hex()[:8] for p in others)
        reason = f"{worker.name} cannot reach {names} as planned"
        if self._making is _Making.FORMING:
            self._unrouted = self._unrouted or reason
        else:
            self._change = self._change or reason
        return [Note("warning", "no_route", {"name": worker.name, "to": names, "tried": tried})]

    def _compare(self, peer: m.PeerId, told: m.Fingerprint) -> list[Effect]:
        """States are compared beside the training; who has another one than most gets it anew."""
        if (told.term, told.generation) != (self.term, self.generation) or self._making is not _Making.NONE:
            return []
        effects: list[Effect] = []
        for wrong in self._drift.tell(peer, told.step, told.digest):
            if (worker := self._workers.get(wrong)) is None:
                continue
            self._drifts += 1
            self._change = self._change or f"{worker.name} holds another state than most"
            fields = {"name": worker.name, "step": told.step, "so_far": self._drifts}
            effects.append(Note("warning", "drifted", fields))
            effects.append(self._drifted.tell(wrong, m.Drifted(self.term, self.generation, told.step)))
        return effects

    def _broken(self, worker: Worker, message: m.Broken, now_s: float) -> list[Effect]:
        """A connection broke; the member that all such connections have in common goes."""
        members = self._current
        current = (message.term, message.generation) == (self.term, self.generation)
        if not current or not {worker.peer, message.peer} <= members or worker.peer == message.peer:
            return []
        self._breaks.note(worker.peer, message.peer, now_s)
        if message.peer in self._workers:
            self._workers[message.peer].missed_s = now_s
        centre = self._roster[0].peer if topology.is_star(self._exchanging.setup) else None
        flapping = self._breaks.common_end(now_s, len(members), centre)
        if flapping is None:
            if not self._change and (common := self._breaks.worth_avoiding(now_s, len(members))) is not None:
                name = self._workers[common].name if common in self._workers else common.hex()[:8]
                self._change = f"connections of {name} broke again and again: the next ring goes round them"
            return []
        text = f"its connections broke {MOST_BREAKS} times within {WINDOW_S:.0f} s"
        return self._remove(flapping, text, now_s, dismiss=True)

    def _seated(self, worker: Worker, seated: m.Seated, now_s: float) -> list[Effect]:
        """A term or a generation that this journal does not know: it is a backup's (rule 11)."""
        made = self._made_s > -math.inf  # what this coordinator has made itself binds
        latest = self.generation if made else self._recall.generation
        if seated.term <= self.term and seated.generation <= latest:
            return []
        if not is_credible(seated, self.term, latest) or not self._may_be_cut(seated.cuts):
            return [Strike(worker.peer, f"tells of term {seated.term}, generation {seated.generation}")]
        obeyed = worker.peer in self._accepted or (made and not self._has_most())
        if obeyed and seated.term > self.term:
            # Not from a backup: workers that were here have gone to a later coordinator, which alone decides.
            return [Note("warning", "superseded", {"name": worker.name, "term": seated.term})]
        effects: list[Effect] = []
        first = not self._recall.behind
        if not self._recall.tell(worker.peer, seated):
            return []
        if first or seated.term > self.term:
            known = worker.peer in self._recall.known
            self._raises.tell(max(self.term, seated.term), known=known, now_s=now_s)
            effects = self._raise_term(now_s)
        told = self._recall.leading(self._may_be_cut)
        members = tuple((member.peer, member.share) for member in self._roster)
        mine = (self.generation, members, self._cuts)
        if made or told is None or told == mine:
            return effects
        generation, members, self._cuts = told
        self.generation = generation
        self._roster = tuple(
            m.Member(p, self._workers[p].name if p in self._workers else p.hex()[:8], "", share, False)
            for p, share in members
        )
        self.phase, self.reason = (
            RunPhase.PAUSED,
            f"the journal is older than generation {generation}; waiting for its {_workers(len(members))}",
        )
        self._change = "the coordinator was started from a backup"
        self._view, self._started, self._regathering = None, True, True
        self._reports.clear()
        self._making, self._making_until_s = _Making.FREEZING, now_s + self._deadlines.regather_s
        self._regather_until_s, self._freeze_by_s = self._making_until_s, None
        fields = {"generation": generation, "workers": len(members), "term": self.term}
        effects += [
            Journal("state", {"state": str(self.phase), "reason": self.reason}),
            Note("warning", "recalled", fields),
        ]
        freeze = m.Freeze(self.term, generation, self._change, ())
        return effects + [Send(x.peer, freeze) for x in self._roster if x.peer in self._workers]

    def _has_most(self) -> bool:
        """More than half of the generation is connected here."""
        here = [w for x in self._roster if (w := self._workers.get(x.peer)) is not None and w.lost_s is None]
        return 2 * len(here) > len(self._roster)

    def _raise_term(self, now_s: float) -> list[Effect]:
        """Above what was told, if its time has come."""
        told = self._raises.due(now_s)
        if told is None:
            return []
        self.term = term = max(self.term, told) + 1
        if self._view is not None:
            self._view = replace(self._view, term=term)
        if self._made_s > -math.inf and self._roster:  # its members are in the lower one
            self._change = self._change or "the coordinator's term was raised"
            if self._making is _Making.FORMING:
                self._making, self._making_until_s = _Making.NONE, math.inf
        body = {"term": term, "run": self.run, "software": self._software}
        welcome = m.Welcome(term, self.run, self._software)
        return [Journal("term", body), *(Send(peer, welcome) for peer in self._workers)]

    def _expelled(self, event: Expelled, now_s: float) -> list[Effect]:
        self._resting.forget(event.peer)
        if event.peer not in self._workers:
            return [Dismiss(event.peer)]
        refused = Send(event.peer, m.Refused(event.code, event.reason, event.remedy))
        return [refused, *self._remove(event.peer, event.reason, now_s, dismiss=True, told=True)]

    def _repeat(self, peer: m.PeerId) -> list[Effect]:
        """What a member may have missed while its connection was broken; it ignores what it knows."""
        if peer not in self._current:
            return self._spare_in([peer]) if self._workers[peer].spare else []
        if peer in self._departed:
            return []  # it left for good, or is lost: whoever comes back with its key knows nothing
        # Of a generation that only members know there is no View to repeat.
        view = [Send(peer, x) for x in self._view_messages(peer)] if self._view is not None else []
        match self._making:
            case _Making.FREEZING if self._freeze_by_s is not None:
                return []  # both come when the FREEZE does
            case _Making.FREEZING:
                return [
                    *view,
                    Send(
                        peer,
                        m.Freeze(self.term, self.generation, self._change, tuple(sorted(self._departed))),
                    ),
                ]
            case _Making.FORMING:
                return [*view]
            case _Making.NONE:
                return [*view, Send(peer, m.Start(self.term, self.generation))]

    def _refuse(self, peer: m.PeerId, code: str, reason: str, remedy: str) -> list[Effect]:
        worker = self._workers.pop(peer, None)
        self._miss(peer, f"{worker.name if worker is not None else 'a worker'} was refused: {reason}", True)
        note = Note("warning", "refused", {"peer": peer.hex()[:12], "code": code, "reason": reason})
        return [note, Send(peer, m.Refused(code, reason, remedy))]

    def _set_up(self, worker: Worker, setup: m.Setup, now_s: float) -> list[Effect]:
        if self.phase is RunPhase.FINISHED:
            return self._too_late(worker.peer)
        effects: list[Effect] = []
        if self._reference is None:
            try:
                ledger.validate(setup.ledger)
                refuse_nonsense(setup)
            except ConfigError as error:
                return self._refuse(worker.peer, "ledger", error.reason, error.remedy)
            self._reference = setup
            if not self._may_be_cut(self._cuts):  # as somebody told before the run was defined here
                self._cuts = ()
            self._exchanging.defined(setup)
            definition = {
                "facts": dict(setup.facts),
                "ledger": asdict(setup.ledger),
                "global_batch_size": setup.global_batch_size,
                "stages": setup.stages,
                "model": asdict(setup.model) if setup.model is not None else None,
            }
            effects += [Journal("run", definition), Note("info", "run_defined", dict(setup.facts))]
            if setup.stages > self._min_workers and self.phase is RunPhase.WAITING:
                self.reason = f"waiting for {_workers(setup.stages)}: the model has so many stages"
        differing = differences(self._reference, setup)
        if differing:
            return self._refuse(
                worker.peer,
                "different-run",
                "this worker would train something else: " + "; ".join(differing),
                "start every worker with the same script, data and options",
            )
        held = setup.held
        if held is not None and not (ledger.balances(held.ledger) and held.ledger.step == held.applied + 1):
            reason = f"the checkpoint of step {held.applied + 1} has a ledger that does not add up"
            return self._refuse(worker.peer, "checkpoint", reason, "move this worker's checkpoints away")
        if setup.batch_size < 1 and setup.global_batch_size is None:
            reason = f"batch_size is {setup.batch_size}; it must be >= 1"
            return self._refuse(worker.peer, "batch-size", reason, "give grid.batches a batch_size")
        if any(self._impossible(held) for held in setup.kept):
            reason = "a checkpoint has a stage that the run has not, or a ledger that does not add up"
            return self._refuse(worker.peer, "checkpoint", reason, "move this worker's checkpoints away")
        worker.setup, worker.kept = setup, setup.kept
        worker.caught = worker.caught or setup.stages > 1  # nobody can follow before it knows its stage
        worker.caught = worker.caught or (self._exchanging.is_auto and not self._exchanging.sparse)
        self._accepted.add(worker.peer)
        effects += self._hear() + self._plan_without(worker)
        return effects + (self._introduce(worker, now_s) if worker.placed else [])

    def _plan_without(self, worker: Worker, *, told: bool = False) -> list[Effect]:
        """Others wait for a checkpoint that is not, or not any more, on the disk which it is to come from.

        `told`: by the worker itself, in this generation.
        """
        if told and self._making is _Making.FORMING and self._is_pipeline:
            self._mind_unwritten(worker)
        blocks = self._lacks(worker) if self._making is _Making.FORMING and self._is_pipeline else None
        if blocks is None:
            return []
        ends = f"blocks {blocks.start} to {blocks.stop - 1}"
        self._change = self._change or f"{worker.name} has no checkpoint of {ends} that it was to give"
        self._made_up_its_mind()
        return [Note("warning", "no_such_piece", {"name": worker.name, "blocks": ends})]

    def _stalled(self, worker: Worker, stalled: m.Stalled, now_s: float) -> list[Effect]:
        """A round hangs: the rest start anew, without those at fault."""
        members = self._current
        current = (stalled.round.term, stalled.round.generation) == (self.term, self.generation)
        if self._freeze_by_s is not None and stalled.round.generation == self.generation:
            self._freeze_by_s = min(self._freeze_by_s, now_s + self._deadlines.report_s)
        if (
            not current
            or self._making is not _Making.NONE
            or worker.peer not in members
            or self._view is None
        ):
            return []
        # Where the generation began, not where the sender says that it is: its word is not needed here.
        step, reason = self._view.applied + 1, stalled.reason
        times = self._stalls.told(step, members, stalled)
        effects: list[Effect] = [
            Note("warning", "stalled", {"name": worker.name, "step": step, "times": times, "reason": reason})
        ]
        gone = self._stalls.at_fault(stalled, members, self._workers, self._seniority, now_s)
        for peer, why in gone.items():
            effects += self._remove(peer, why, now_s, dismiss=True)
        self._change = self._change or f"{worker.name} reports a stall: {reason}"
        return effects

    def _remove(
        self, peer: m.PeerId, reason: str, now_s: float, *, dismiss: bool = False, told: bool = False
    ) -> list[Effect]:
        """Off the roll.  Who is not dismissed may come back: its next message is answered by Rejoin."""
        worker = self._workers.pop(peer, None)
        if worker is None:
            return [Dismiss(peer)] if dismiss else []
        if peer in self._current:
            self._reached = max(self._reached, worker.step)  # what a rollback is counted from
        left = reason.startswith("left") or self.phase is RunPhase.FINISHED
        level, event = ("info", "left") if left else ("warning", "lost")
        effects: list[Effect] = [Note(level, event, {"name": worker.name, "reason": reason})]
        if dismiss:
            self._whereabouts.forget(peer)
            self._drifted.forget(peer)
        if dismiss and not left and not told:
            effects.append(Send(peer, m.Refused("dismissed", reason, RESTART)))
        self._miss(peer, f"{worker.name} {reason}", dismiss)
        return [*effects, Dismiss(peer)] if dismiss else effects

    def _miss(self, peer: m.PeerId, why: str, for_good: bool) -> None:
        """A member is gone: the others need another generation."""
        self._breaks.forget(peer)
        self._sharing.forget(peer)
        self._links.forget(peer)
        self._tellers.forget(peer)
        if peer in self._current:
            self._change = why
            if for_good:
                self._departed.add(peer)
        self._reports.pop(peer, None)

    # -- making generations ----------------------------------------------------------------------

    def _go_on(self, now_s: float) -> list[Effect]:
        """Take every step towards the next generation that can be taken now."""
        if self.phase is RunPhase.FINISHED or self._settled == self._change:
            return []
        before = self._making, self._making_until_s, self._change
        if self._making is _Making.FREEZING:
            effects = self._collect(now_s)
        elif self._making is _Making.FORMING:
            effects = self._await_ready(now_s)
        else:
            effects = self._let_follow(now_s) + self._begin_making(now_s)
        changed = effects or before != (self._making, self._making_until_s, self._change)
        fed = self._making is _Making.FORMING and self._unrouted  # which beats tell
        moves = changed or fed or self._followers.serving or self._is_pipeline
        self._settled = None if moves else self._change
        return effects

    @property
    def _current(self) -> frozenset[m.PeerId]:
        """The keys of the roster."""
        if self._current_of is not self._roster:
            self._current_of, self._current_keys = self._roster, frozenset(x.peer for x in self._roster)
        return self._current_keys

    def _let_follow(self, now_s: float) -> list[Effect]:
        """Who cannot enter yet takes over the state of those who train."""
        current = self._current
        followers = [w for w in self._workers.values() if w.follows and w.peer not in current]
        if not followers and not self._followers.serving:
            return []  # as almost always, and this is asked after every message
        # All were READY: those who joined with this generation hold the state by now.
        present = [x.peer for x in self._roster if x.peer in self._workers]
        holders = [x for x in present if self._workers[x].lost_s is None]
        if present and not holders:
            return []  # as when this coordinator's own line breaks for a moment: they may come back
        if not holders or self._view is None:
            for worker in followers:
                worker.caught = True  # there is nobody to follow
            followers = []
        # Of what they say the middle: one that lies moves nothing.
        latest = min(median_low([self._workers[x].step for x in holders] or [-1]), MOST_STEPS)
        before = self._view.applied if self._view is not None else -1
        step = step_ahead(latest, latest - before, now_s - self._made_s)
        entering = [w for w in self._workers.values() if w.caught and w.enters and w.peer not in current]
        eldest_first = sorted(holders, key=self._seniority)
        return self._followers.turn(followers, eldest_first, step, latest, self.term, now_s, entering)

    def _begin_making(self, now_s: float) -> list[Effect]:
        current = self._current
        if current and current <= self._finished:
            return self._finish(now_s)
        if current and not current & set(self._workers):
            return self._regather(now_s)
        newcomers = [w for w in self._workers.values() if w.enters and w.peer not in current]
        if self._is_pipeline and not self._change and current and not self._makes_a_replica(newcomers):
            return self._spare(newcomers)
        if newcomers and not self._change:
            self._change = ", ".join(w.name for w in newcomers) + " joined"
        if not self._change or now_s < self._may_make_at_s():
            return []
        if current:
            return self._freeze(now_s)
        return self._first_generation(now_s) if len(newcomers) >= self._least_workers else []

    def _may_make_at_s(self) -> float:
        """At most one generation in `generation_gap_s`; workers that come together start together."""
        limits = self._deadlines
        gap_s = self._made_s + limits.generation_gap_s
        lost = any(member.peer not in self._workers for member in self._roster)
        if lost:
            return self._made_s  # the others wait for nothing else
        newest_s = max((w.joined_s for w in self._workers.values()), default=-math.inf)
        unsettled = [w for w in self._workers.values() if not w.admitted and w.setup is not None]
        settled_s = min((w.probe_until_s for w in unsettled), default=newest_s + limits.settle_s)
        return max(gap_s, settled_s)

    def _held_back(self, now_s: float) -> bool:
        """Members that come back train on until all are there: one FREEZE then stops all, and for a moment.

        Who does not come is not waited for long: by rule 6 those who report can decide without it.
        """
        if self._freeze_by_s is None:
            return False
        awaited = self._current - self._departed
        if self._recall.behind:
            awaited |= self._recall.known  # they may tell another tale
        elif self._freeze_by_s == math.inf and awaited & set(self._workers):
            self._freeze_by_s = now_s + self._deadlines.report_s + self._deadlines.regreet_s
        return not awaited <= set(self._workers) and now_s < min(self._freeze_by_s, self._making_until_s)

    def _freeze(self, now_s: float) -> list[Effect]:
        self._freeze_by_s = None
        self._making, self._making_until_s = _Making.FREEZING, now_s + self._deadlines.report_s
        self._reports.clear()
        freeze = m.Freeze(self.term, self.generation, self._change, tuple(sorted(self._departed)))
        note = Note("info", "freeze", {"generation": self.generation, "reason": self._change})
        return [note, *(Send(x.peer, freeze) for x in self._roster if x.peer in self._workers)]

    def _collect(self, now_s: float) -> list[Effect]:
        """FREEZING: once all who live have reported, or time is up, decide (rule 6)."""
        if self._held_back(now_s):
            return []
        if self._freeze_by_s is not None:
            note, *_ = self._freeze(now_s)
            self._waited = True
            present = [x.peer for x in self._roster if x.peer in self._workers]
            return [note, *(told for peer in present for told in self._repeat(peer))]
        absent = self._current - set(self._reports) - self._departed
        behind = self._regathering and self._recall.behind
        if behind:
            arrived = {w.peer for w in self._workers.values() if w.setup is not None}
            absent |= self._recall.known - arrived  # they may tell another tale
        nobody = not any(report.synced for report in self._reports.values())
        awaited = absent & set(self._workers)
        if behind or (self._regathering and (nobody or not self._waited)):
            awaited = absent
        if awaited and self._is_pipeline and self._making_until_s == math.inf:
            self._making_until_s = now_s + self._deadlines.report_s  # back while the run was paused
        if awaited and now_s < self._making_until_s:
            return []
        # Beside those who have reported: a member whose process is another one now.
        seated = {*self._reports, *self._taking_part()}
        if any(not self._workers[peer].placed for peer in seated if peer in self._workers):
            # `CalledBack` always comes, and without it there is no way to plan; who is admitted only after
            # the View would begin to measure its lines, and never be READY.
            self._making_until_s = max(self._making_until_s, now_s + self._deadlines.settle_s)
            return []
        newcomers = any(w.admitted and w.peer not in absent for w in self._workers.values())
        if self._regathering and nobody and awaited and self._started:
            self._waited = False
            if now_s < self._regather_until_s:
                self._making_until_s = self._regather_until_s
                return []
            if not newcomers:
                # There is nobody who could begin anew, so there is no reason to give up what they hold.
                self._making_until_s = self._regather_until_s = now_s + self._deadlines.regather_s
                return []
        effects: list[Effect] = []
        for peer in sorted(awaited & set(self._workers)):
            effects += self._remove(peer, f"did not report within {self._deadlines.report_s:.1f} s", now_s)
        holders = {p: r for p, r in self._reports.items() if r.synced and p in self._workers}
        if self._is_pipeline:
            return effects + self._collected_in_stages(holders, now_s)
        given_up, self._regathering = self._regathering, False
        self._making, self._making_until_s = _Making.NONE, math.inf
        if not holders:
            return effects + (self._start_over(now_s) if given_up else self._regather(now_s))
        return effects + self._next_generation(holders, now_s)

    def _next_generation(self, reports: dict[m.PeerId, m.Report], now_s: float) -> list[Effect]:
        assert self._reference is not None
        held = [(member.peer, member.share) for member in self._roster]
        eldest_first = {peer: reports[peer] for peer in sorted(reports, key=self._seniority)}
        outcome = judge(eldest_first, self._reference.ledger, held)
        if outcome.applied >= 0:
            return self._make(outcome, now_s)
        # A follower may have loaded something since.
        fresh = [w for w in self._workers.values() if w.setup and not (w.setup.follows and self._started)]
        giver = min(outcome.holders, key=self._seniority)
        outcome = replace(outcome, holders=outcome.holders | self._alike.holders(fresh))
        return self._make(outcome, now_s, giver=giver)

    def _first_generation(self, now_s: float) -> list[Effect]:
        if self._is_pipeline:
            return self._first_in_stages(now_s)
        admitted = [w.peer for w in self._workers.values() if w.admitted]
        eldest = min(admitted, key=self._seniority)
        begin, giver = self._from_checkpoints(sorted(admitted, key=self._seniority)), None
        if begin is None:
            giver = eldest
            ledger_state = m.LedgerState()
            holders = self._alike.first(self._workers[eldest], [self._workers[peer] for peer in admitted])
            begin = Outcome(m.Verdict.ABORT, None, -1, HISTORY_START, ledger_state, holders)
        effects: list[Effect] = []
        if self._reached > begin.applied + 1:
            lost = {"from": self._reached, "to": begin.applied + 1}
            reason = f"nobody holds step {self._reached} any more; back to step {begin.applied + 1}"
            effects = [
                Journal("state", {"state": str(self.phase), "reason": reason, "rollback": lost}),
                Note("error", "rollback", lost),
            ]
            self._reached = begin.applied + 1
        return effects + self._make(begin, now_s, giver=giver)

    def _from_checkpoints(self, eldest_first: list[m.PeerId]) -> Outcome | None:
        """Where the latest checkpoint that somebody holds left off (rule 13); None: nobody holds one."""
        held = {
            peer: setup.held
            for peer in eldest_first
            if (setup := self._workers[peer].setup) is not None and setup.held is not None
        }
        if not held:
            return None
        applied = max(state.applied for state in held.values())
        first = next(state for state in held.values() if state.applied == applied)
        holders = frozenset(
            p for p, state in held.items() if (state.applied, state.history) == (applied, first.history)
        )
        assert self._reference is not None
        state = ledger.released(self._reference.ledger, first.ledger)
        return Outcome(m.Verdict.ABORT, None, applied, first.history, state, holders)

    def _may_improve(self, now_s: float) -> bool:
        """Whether a generation may be wanted only because another one would be faster."""
        training = self._making is _Making.NONE and self.phase is RunPhase.TRAINING and not self._is_pipeline
        return training and not self._change and now_s >= self._made_s + self._deadlines.reshare_s

    def _mind_shares(self, now_s: float) -> None:
        """Want a generation with other shares where it gains noticeably, and not too often."""
        total = self._reference.global_batch_size if self._reference is not None else None
        if total is None or not self._may_improve(now_s) or now_s < self._weighed_s + self._deadlines.beat_s:
            return
        self._weighed_s = now_s  # N workers bring 2 N beats a second, and each look is at all of them
        peers = [member.peer for member in self._roster]
        if all(peer in self._workers for peer in peers):
            most = limits([self._workers[peer] for peer in peers])
            self._change = self._sharing.worth(peers, [member.share for member in self._roster], most)

    def _mind_links(self, now_s: float) -> None:
        """Want a generation in another order where links have changed so much that it gains noticeably."""
        if not self._plans or not self._may_improve(now_s):
            return
        if tellers := self._tellers.due(now_s):
            self._links.rtt_s = latencies(list(self._workers.values()), self._breaks.avoided(now_s))
            load = self._exchanging.load
            roster = [member.peer for member in self._roster]
            joined = sorted((p for p in roster if p in self._workers), key=self._seniority)
            if len(joined) == len(roster):
                self._change = topology.worth(load, self._links, roster, joined) or self._off_road(joined)
            self._tellers.looked(tellers, now_s, found=bool(self._change))

    def _mind_exchange(self, now_s: float) -> None:
        """Want a generation with the exchange that is chosen first, or one that is so much faster now."""
        roster = [member.peer for member in self._roster]
        training = self._making is _Making.NONE and self.phase is RunPhase.TRAINING and not self._change
        if not (self._exchanging.is_auto and training) or any(peer not in self._workers for peer in roster):
            return
        if self._exchanging.open:
            self._change = self._exchanging.first(roster, *self._known_of(roster), now_s)
        elif self._may_improve(now_s) and now_s >= self._looked_s + self._deadlines.reshare_s:
            self._looked_s = now_s
            self._change = self._exchanging.again(*self._now_with(roster))
        if self._change:
            self._change = f"the exchange is chosen: {self._exchanging.chosen}"

    def _choose_exchange(self, peers: Sequence[m.PeerId], now_s: float) -> None:
        """A generation is made anyway; a worker that is alone needs no measurements."""
        if self._exchanging.open:
            if len(peers) == 1:
                self._exchanging.first(peers, {}, None, now_s)
        elif self._current != set(peers):
            self._exchanging.again(*self._now_with(peers))

    def _take_road(self, peers: Sequence[m.PeerId], *, edges: bool) -> None:
        """`edges`: no pair's connections are known to break."""
        network = self._rated(peers)
        self._exchanging.take_road(len(peers), network, lambda: edges and self._whereabouts.all_direct(peers))

    def _off_road(self, peers: Sequence[m.PeerId]) -> str:
        network = self._rated(peers)
        return self._exchanging.off_road(len(peers), network) if network is not None else ""

    def _rated(self, peers: Sequence[m.PeerId]) -> Network | None:
        """Links of a group in which a road is to be chosen; None: no rate is known."""
        rated = self._links.sent_Bps or self._links.came_Bps
        return self._links.network(peers) if rated and 2 < len(peers) <= MOST_MEMBERS else None

    def _known_of(self, peers: Sequence[m.PeerId]) -> tuple[dict[m.PeerId, float], Network | None]:
        """Seconds of their first batch, and their links if a rate is known."""
        workers = [self._workers[peer] for peer in peers]
        figures = {w.peer: w.figures[FIRST_FIGURE] for w in workers if FIRST_FIGURE in w.figures}
        told = {peer: seconds for peer, seconds in figures.items() if 0 < seconds < math.inf}
        if not (self._links.sent_Bps or self._links.came_Bps) or len(peers) < 2:
            return told, None
        self._links.rtt_s = latencies(workers)
        return told, self._links.network(peers)

    def _now_with(self, peers: Sequence[m.PeerId]) -> tuple[int, Network | None, list[float]]:
        """For `Exchanging.again`: computing by what members have told of it, at the shares they have."""
        shares = {member.peer: member.share for member in self._roster}
        figures = {peer: self._workers[peer].figures for peer in peers if shares.get(peer)}
        known = ((shares[peer], figures[peer]) for peer in figures)
        seconds = [share * second_per_sample for share, told in known if (second_per_sample := pace_of(told))]
        return len(peers), self._known_of(peers)[1], seconds

    def _seniority(self, peer: m.PeerId) -> tuple[float, m.PeerId]:
        worker = self._workers[peer]
        return (worker.joined_s, peer)

    def _made_up_its_mind(self) -> None:
        """Neither REPORTs nor READYs are awaited any more."""
        self._making, self._making_until_s = _Making.NONE, math.inf

    def _taking_part(self) -> list[m.PeerId]:
        """Who may be in the next generation, the longest-serving first."""
        current = self._current
        # A member's process that was started anew has no set-up yet: it joins when it has.
        ready = (w for w in self._workers.values() if w.enters or (w.peer in current and w.setup is not None))
        return sorted((w.peer for w in ready), key=self._seniority)

    def _make(
        self,
        outcome: Outcome,
        now_s: float,
        seated: Seating | None = None,
        cuts: tuple[int, ...] = (),
        giver: m.PeerId | None = None,
    ) -> list[Effect]:
        """Journal the next generation, then tell its members (rule 7).

        Args:
            seated: of a model in stages, who sits where; `cuts`: where it is cut.
            giver: who alone gives the state to those who lack it, as others only say that they hold it.
        """
        holding = outcome.holders
        peers = self._taking_part()
        avoided = self._breaks.avoid(now_s)
        self._links.rtt_s = latencies([self._workers[peer] for peer in peers], avoided)
        self._tellers.planned()
        self._choose_exchange(peers, now_s)
        self._take_road(peers, edges=not avoided)
        if seated is not None:
            self._cuts, self._short_since_s = cuts, None
            order, self._plan_reason = seated.order, seated.reason
            holding = frozenset(set(order) - seated.donors.keys())
        else:
            firsts = [peer for peer in peers if peer in holding]
            stood = [member.peer for member in self._roster]
            if self._plans:
                plan = topology.plan(self._exchanging.load, self._links, peers, firsts, stood)
            else:
                plan = topology.as_joined(peers, firsts)
            order, self._plan_reason = plan.order, plan.reason
        if avoided:
            self._plan_reason += (
                f"; of {len(avoided)} pairs connections broke: each counts as {AVOIDED_S:g} s"
            )
        self._whereabouts.plan(order)
        self.generation = max(self.generation, self._recall.floor) + 1
        ordered = [self._workers[peer] for peer in order]
        total = self._reference.global_batch_size if self._reference is not None else None
        if seated is not None:
            dealt = stage_shares(limits(ordered), Seats.of(self._stages, len(order)), total)
        else:
            dealt = shares(ordered, total, self._sharing)
        if self._exchanging.road.reason:
            self._plan_reason += f"; {self._exchanging.road.reason}"
        self._plan_reason += "; " + dealt.reason
        joiners = set(order) - holding if giver is not None else ()
        donors = seated.donors if seated is not None else {peer: order.index(giver) for peer in joiners}
        pieces = seated.pieces if seated is not None else {}
        digests = self._given(seated, outcome) if seated is not None else {}
        piece_digests = self._piece_digests(seated, outcome) if seated is not None else {}
        self._roster = tuple(
            m.Member(
                w.peer, w.name, w.address, share, w.peer not in holding,
                donors.get(w.peer, -1), pieces.get(w.peer, ()), digests.get(w.peer, b""),
                piece_digests.get(w.peer, ()),
            )
            for w, share in zip(ordered, dealt.counts, strict=True)
        )  # fmt: skip
        self._drift = Drifts(groups([member.peer for member in self._roster], self._stages))
        reason, self._change = self._change, ""
        self._view = m.View(
            term=self.term,
            generation=self.generation,
            world_size=len(order),
            verdict=outcome.verdict,
            decided=outcome.decided,
            applied=outcome.applied,
            history=outcome.history,
            ledger=outcome.ledger,
            reason=reason,
            exchange=self._exchanging.named,
            cuts=self._cuts,
        )
        self._making, self._making_until_s = _Making.FORMING, now_s + self._deadlines.ready_s
        joining = {member.peer for member in self._roster if member.joining}
        for worker in self._workers.values():
            worker.loading = worker.peer in joining
        self._unrouted = ""
        self._made_s, self._reached = now_s, max(self._reached, outcome.applied + 1)
        self._formed_by_s = now_s + self._most_forming_s()
        self._ready.clear()
        self._finished.clear()
        self._departed.clear()
        note = Note(
            "info",
            "generation",
            {
                "generation": self.generation,
                "workers": len(order),
                "step": outcome.applied + 1,
                "verdict": outcome.verdict.name,
                "reason": reason,
                "plan": self._plan_reason,
                **({"exchange": self._exchanging.text} if self._exchanging.is_auto else {}),
            },
        )
        view: list[Effect] = []
        for member in self._roster:
            view += self._drifted.again(member.peer)  # before it, as it names another generation
            view += [Send(member.peer, message) for message in self._view_messages(member.peer)]
        spare = self._spare_in(seated.spares) if seated is not None else []
        return [Journal("generation", generation_entry(self._view, self._roster)), note, *view, *spare]

    # -- forming -----------------------------------------------------------------------------------

    def _view_messages(self, viewer: m.PeerId) -> list[m.Message]:
        """The Roster with each member's address as `viewer` is to use it, and the View."""
        assert self._view is not None
        told = self._whereabouts.told(viewer, self._roster)
        size = ROSTER_PAGE if not any(member.pieces for member in told) else ROSTER_PAGE // 8
        pages = [told[i : i + size] for i in range(0, len(told), size)]
        rosters = [
            m.Roster(self.term, self.generation, page, len(pages), members)
            for page, members in enumerate(pages)
        ]
        return [*rosters, self._view]

    def _await_ready(self, now_s: float) -> list[Effect]:
        """FORMING: START when all are READY with one history; else the next generation without them."""
        assert self._view is not None
        members = [member.peer for member in self._roster]
        lost = [p for p in members if p not in self._workers]
        wrong = [
            p for p, history in self._ready.items() if history != self._view.history and p in self._workers
        ]
        effects: list[Effect] = []
        for peer in wrong:
            effects += self._remove(peer, "is READY with another history of updates", now_s)
        late = [p for p in members if p not in self._ready and p in self._workers]
        if late and self._unrouted and now_s >= self._fed_until_s():
            self._change = self._change or self._unrouted
            self._making, self._making_until_s = _Making.NONE, math.inf
            return effects + self._go_on(now_s)
        if late and now_s >= self._making_until_s:
            self._making_until_s, removed = self._late(late, now_s)
            effects += removed
            lost = [p for p in members if p not in self._workers]
        if lost or wrong:
            self._making, self._making_until_s = _Making.NONE, math.inf
            return effects + self._go_on(now_s)
        if late:
            return []
        self._making, self._making_until_s, self._started = _Making.NONE, math.inf, True
        self._unrouted = ""
        self.phase, self.reason = (
            RunPhase.TRAINING,
            f"{_workers(len(members))} since step {self._view.applied + 1}",
        )
        start = m.Start(self.term, self.generation)
        fields = {"generation": self.generation, "workers": len(members), "step": self._view.applied + 1}
        return [
            Journal("state", {"state": str(self.phase), "reason": self.reason}),
            Note("info", "training", fields),
            *(Send(peer, start) for peer in members),
        ]

    def _late(self, late: list[m.PeerId], now_s: float) -> tuple[float, list[Effect]]:
        """Time for READY is up: until when to wait on, or whom to go on without.

        The longest-serving holder of the model always stays: if it waits for pieces of its stage, those who
        were to give them go.
        """
        limits = self._deadlines
        holders = [member.peer for member in self._roster if not member.joining]
        eldest = min((p for p in holders if p in self._workers), key=self._seniority, default=None)
        moved_s = max(self._workers[p].moved_s for p in late)
        if moved_s + limits.ready_s > now_s < self._formed_by_s:  # a big state comes
            return moved_s + limits.ready_s, []
        named = next((x.donor for x in self._roster if x.joining and not self._is_pipeline), -1)
        donor = self._workers.get(self._roster[named].peer if named >= 0 else holders[0]) if holders else None
        computes = donor is not None and donor.moved_s < self._made_s
        if computes and not set(late) & set(holders) and now_s < self._made_s + limits.first_step_s:
            return now_s + limits.ready_s, []  # its trainer is in a long step, and gives its state after it
        why = dict.fromkeys((p for p in late if p != eldest), f"was not ready within {limits.ready_s:.0f} s")
        if eldest in late:
            pieces = next(member.pieces for member in self._roster if member.peer == eldest)
            givers = {self._roster[rank].peer for _, rank in pieces} - {eldest}
            text = f"did not give a checkpoint within {limits.ready_s:.0f} s"
            why |= dict.fromkeys((p for p in givers if p in self._workers), text)
        gone: list[Effect] = []
        for peer, reason in why.items():
            gone += self._remove(peer, reason, now_s, dismiss=True)
        return now_s + limits.ready_s, gone

    def _fed_until_s(self) -> float:
        """A state is visibly on its way to one that is not READY: another generation would begin it anew."""
        members = (self._workers.get(member.peer) for member in self._roster)
        feeds = [w.feed.until_s(self._deadlines.ready_s) for w in members if w and w.peer not in self._ready]
        return min(max(feeds, default=-math.inf), self._formed_by_s)

    def _most_forming_s(self) -> float:
        joining = [member.peer for member in self._roster if member.joining]
        holders = [member.peer for member in self._roster if not member.joining]
        rates = [self._links.rate_Bps(a, b) for a in holders for b in joining]
        load = self._exchanging.load
        slowest_Bps = min((rate for rate in rates if rate is not None), default=None)
        return forming.most_s(len(joining), load.parameters if load is not None else None, slowest_Bps)

    def _regather(self, now_s: float) -> list[Effect]:
        """All members are away.  Unless they left for good, or none had begun, they are waited for."""
        if not self._started or self._current <= self._departed:
            return self._start_over(now_s)
        self._making, self._making_until_s = _Making.FREEZING, now_s + self._deadlines.regather_s
        self._regather_until_s = self._making_until_s
        self._regathering, self._freeze_by_s = True, math.inf
        self._reports.clear()
        self.phase = RunPhase.PAUSED
        self.reason = f"all {len(self._roster)} members are away; they are waited for"
        return [
            Journal("state", {"state": str(self.phase), "reason": self.reason}),
            Note("error", "paused", {"reason": self.reason}),
        ]

    def _start_over(self, now_s: float) -> list[Effect]:
        """Nobody is left who holds the model: wait for workers, and begin from their checkpoints, or at 0."""
        self._roster, self._view, self._change = (), None, ""
        self._started = self._regathering = False
        self._freeze_by_s = None
        self._departed.clear()
        self._alike.forget(self._workers.values())
        self._making, self._making_until_s = _Making.NONE, math.inf
        self.phase = RunPhase.WAITING
        self.reason = (
            "all workers that held the model are gone; the next ones begin from a checkpoint, or at step 0"
        )
        return [
            Journal("state", {"state": str(self.phase), "reason": self.reason, "reached": self._reached}),
            Note("error", "waiting", {"reason": self.reason}),
            *(Send(peer, m.RunState(str(self.phase), self.reason)) for peer in self._workers),
        ]

    def _finish(self, now_s: float) -> list[Effect]:
        self.phase = RunPhase.FINISHED
        self.reason = f"{_workers(len(self._roster))} reached the end of the run"
        members = self._current
        effects: list[Effect] = [
            Journal("state", {"state": str(self.phase), "reason": self.reason}),
            Note("info", "finished", {"reason": self.reason}),
        ]
        for peer in list(self._workers):
            if peer in members:
                effects.append(Send(peer, m.RunState(str(self.phase), self.reason)))
            else:
                effects += self._too_late(peer)
        return effects

    def _too_late(self, peer: m.PeerId) -> list[Effect]:
        text = f'the run "{self.run}" is finished'
        return self._refuse(peer, "finished", text, "ask the run's owner for the result")


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"
