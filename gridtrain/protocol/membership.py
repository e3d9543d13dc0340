"""The coordinator's side of the protocol: who is a member, and what became of the open step.

Takes events, hands each to the part that it is for, and then takes every step towards the next generation
that can be taken.  Never sees a gradient, never touches a socket, a clock or a disk: what must be durable
leaves as a `Journal` effect, and the loop makes it so before it carries out what follows.

    WAITING --enough workers--> FORMING --all READY--> TRAINING --all Finished--> FINISHED
                                 ^   |                    |
                            VIEW |   | a member is lost   | join, leave, loss, stall
                                 |   v                    v
                               FREEZING <-----------------+      (FREEZE sent, REPORTs awaited)

Commit rules 5 to 8 (DESIGN section 7).  Where all members are lost the run waits, and starts anew.

    run         who is on the roll, who is a member      \\ what all parts share
    making      NONE, FREEZING, FORMING; why             /
    admission   Join, Setup: a worker comes              partings     it goes
    complaints  what members say of each other           plans        what is measured, and a better plan
    freezing    whose REPORTs are awaited                recalling    a journal that is older than the run
    in_stages   every stage in somebody's hands          placing      who sits where     on_disks  checkpoints
    generations the next one is made, and told           readying     whose READYs are awaited
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from gridtrain.config import Deadlines
from gridtrain.protocol import forming
from gridtrain.protocol import messages as m
from gridtrain.protocol.admission import Admission
from gridtrain.protocol.complaints import Complaints
from gridtrain.protocol.drift import Drifted, Drifts
from gridtrain.protocol.followers import Followers
from gridtrain.protocol.freezing import Freezing
from gridtrain.protocol.generations import Generations
from gridtrain.protocol.in_stages import InStages
from gridtrain.protocol.making import Making
from gridtrain.protocol.membership_io import (
    CalledBack,
    Dismiss,
    Effect,
    Event,
    Expelled,
    Heard,
    Lost,
    Note,
    Offended,
    RunPhase,
    Send,
    Strike,
    Up,
)
from gridtrain.protocol.on_disks import OnDisks
from gridtrain.protocol.partings import Partings
from gridtrain.protocol.placing import Placing
from gridtrain.protocol.plans import Plans
from gridtrain.protocol.readying import Readying
from gridtrain.protocol.recall import Recall
from gridtrain.protocol.recalling import Recalling
from gridtrain.protocol.recovery import Recovered
from gridtrain.protocol.resting import Resting
from gridtrain.protocol.roll import Worker
from gridtrain.protocol.run import MOST_STEPS, Run
from gridtrain.protocol.seats import groups
from gridtrain.protocol.wakefulness import Wakefulness, no_earlier
from gridtrain.protocol.whereabouts import Whereabouts
from gridtrain.protocol.witnesses import Witnesses


class Membership:
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
        self.run = Run(run, term, deadlines, min_workers=min_workers, software=software)
        self._build(me, recovered, by_links=plans)
        self._wakefulness = Wakefulness()
        self._events: deque[dict[str, Any]] = deque(maxlen=50)
        self._settled: str | None = None  # with this change wanted a beat moves nothing; None: it may
        self._due_s: float | None = None  # see deadline_s
        if recovered is not None:
            self._take_up(recovered)

    def _build(self, me: m.PeerId, recovered: Recovered | None, *, by_links: bool) -> None:
        """The parts: each knows those above it here, and no others."""
        run = self.run
        known = frozenset(x.peer for x in recovered.roster) if recovered is not None else frozenset()
        recall = Recall(known, recovered.generation if recovered is not None else 0)
        witnesses = Witnesses(recovered.checkpoints if recovered is not None else {})
        making = self._making = Making(run)
        whereabouts = self._whereabouts = Whereabouts(me)
        drifts, drifted = Drifts(), Drifted()
        self._drifted, self._resting = drifted, Resting()
        self._followers = Followers(run, whereabouts)
        plans = self._plans = Plans(run, making, whereabouts, by_links=by_links)
        partings = self._partings = Partings(run, making, plans, whereabouts, drifted)
        readying = self._readying = Readying(run, making, plans, partings)
        generations = self._generations = Generations(
            run, making, plans, readying, whereabouts, drifts, drifted, recall
        )
        disks = self._disks = OnDisks(run, making, witnesses)
        placing = Placing(run, making, plans, disks)
        stages = self._stages = InStages(run, making, partings, generations, placing, disks)
        freezing = self._freezing = Freezing(run, making, partings, generations, stages, drifted, recall)
        self._recalling = Recalling(run, making, freezing, recall)
        self._complaints = Complaints(run, making, plans, partings, whereabouts, drifts, drifted)
        self._admission = Admission(run, plans, partings, disks, whereabouts, self._resting)

    def _take_up(self, recovered: Recovered) -> None:
        self.run.take_up(recovered)
        view = recovered.view
        chosen, alone = ("", False) if view is None else (view.exchange, view.world_size == 1)
        self._plans.exchanging.defined(recovered.reference, chosen, alone)
        if view is not None and not self.run.over:
            self._freezing.hold(math.inf)
            self._making.want("the coordinator restarted")

    # -- interface -----------------------------------------------------------------------------

    @property
    def term(self) -> int:
        return self.run.term

    @property
    def phase(self) -> RunPhase:
        return self.run.phase

    @property
    def reason(self) -> str:
        return self.run.reason

    @property
    def generation(self) -> int:
        return self.run.generation

    def start(self, now_s: float) -> list[Effect]:
        if self._making.freezing:
            self._freezing.hold(now_s)
        entry = self.run.term_entry()
        return self._noted([entry, Note("info", "started", dict(entry.body))], now_s)

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        woken = self._woken(now_s)
        if not (isinstance(event, Heard) and isinstance(event.message, m.Beat)):
            self._settled, self._due_s = None, None
        worker = self.run.workers.get(event.peer)
        effects: list[Effect] = []
        match event:
            case Up(peer, host):
                self._whereabouts.came(peer, host)
                if worker is not None:
                    worker.lost_s, worker.missed_s, worker.heard_s = None, -math.inf, now_s
            case Lost(peer, _):
                self._whereabouts.went(peer)
                if worker is not None:
                    worker.lost_s = now_s
            case Offended(peer, reason):
                effects = [Strike(peer, reason)]
            case CalledBack(peer, address):
                effects = self._admission.called_back(peer, address, now_s)
            case Expelled():
                effects = self._expelled(event)
            case Heard(peer, message):
                if worker is not None:
                    worker.heard_s = now_s
                effects = self._heard(peer, message, now_s)
        effects = woken + effects + self._go_on(now_s)
        if self._settled is None:
            self._due_s = None
        return self._noted(effects, now_s)

    def tick(self, now_s: float) -> list[Effect]:
        """To be called when `deadline_s` has passed."""
        self._settled = None
        effects = self._woken(now_s)  # held against what the loop was told
        for worker in list(self.run.workers.values()):
            gone = worker.gone(self.run.limits, now_s)
            if gone:
                effects += self._partings.lose(worker.peer, gone)
            elif not worker.admitted and now_s >= worker.probe_until_s:
                worker.admitted = True
        raised = self._recalling.raise_term(now_s) if not self.run.over else []
        if raised:
            effects += [*raised, *(told for peer in list(self.run.workers) for told in self._repeat(peer))]
        effects += self._go_on(now_s)
        if self._making.resting and self._making.until_s <= now_s:
            self._making.rest()  # who was waited for, or asked it, is gone
        self._due_s = None
        return self._noted(effects, now_s)

    def lend(self, guest: m.PeerId, most: int) -> tuple[list[Effect], tuple[tuple[m.PeerId, str], ...]]:
        """Members that can be dialled, and where; they expect a guest now that measures its line to them."""
        return self._whereabouts.lend(guest, self.run.order, most)

    def name_of(self, peer: m.PeerId) -> str:
        """By which people know it; empty: they do not."""
        worker = self.run.workers.get(peer)
        return worker.name if worker is not None else self._resting.name_of(peer)

    def snapshot(self, now_s: float) -> dict[str, Any]:
        """What `gridtrain status` shows; JSON-able."""
        run, exchanging = self.run, self._plans.exchanging
        rank_of = {peer: rank for rank, peer in enumerate(run.order)}
        stage_of = {p: n for n, group in enumerate(groups(run.order, run.stages)) for p in group}
        steps = [run.reached, *(run.workers[peer].step for peer in run.present)]
        return {
            "run": run.name,
            "phase": str(run.phase),
            "reason": run.reason,
            "term": run.term,
            "generation": run.generation,
            "step": max(steps),
            "world_size": len(run.roster),
            "stages": run.stages,
            "finished": run.over,
            "facts": dict(exchanging.setup.facts) if exchanging.setup else {},
            "exchange_reason": exchanging.text,
            "global_batch_size": run.reference.global_batch_size if run.reference else None,
            "plan_reason": self._plans.reason,
            "links": self._plans.links.listed(run.order),
            "relayed": self._whereabouts.relayed(run.order),
            "drifts": self._complaints.drift_count,
            "members": [
                {
                    **w.line(rank_of.get(w.peer), run.roster, now_s),
                    "stage": stage_of.get(w.peer),
                    "reach": self._whereabouts.reach(w.peer),
                }
                for w in run.workers.values()
            ],
            "resting": self._resting.lines(now_s),
            "events": [dict(event) for event in self._events],
        }

    def _noted(self, effects: list[Effect], now_s: float) -> list[Effect]:
        for effect in effects:
            if isinstance(effect, Note):
                self._events.append({"at_s": round(now_s, 3), "event": effect.event, **effect.fields})
        return effects

    # -- time ----------------------------------------------------------------------------------

    @property
    def deadline_s(self) -> float:
        """When `tick` may have something to do; infinite if nothing is waited for."""
        if self._due_s is None:
            self._due_s = self._earliest_s()
        return self._due_s

    def _earliest_s(self) -> float:
        """A beat only puts this off: it is worked out again when it has come, or with other news."""
        run, making, held_s = self.run, self._making, self._freezing.held_until_s
        times = [making.until_s, *(worker.deadline_s(self.run.limits) for worker in run.workers.values())]
        if held_s is not None:
            times.append(held_s)
        if making.forming and making.unrouted:
            times.append(self._readying.fed_until_s())
        if run.over:
            return min(times)
        times.append(self._recalling.deadline_s)
        if making.resting and any(run.workers[peer].lost_s is None for peer in run.present):
            times.append(self._followers.deadline_s())
        enough = run.roster or sum(w.admitted for w in run.workers.values()) >= run.least_workers
        if making.resting and making.change and enough:
            times.append(making.may_begin_at_s())
        return min(times)

    def _woken(self, now_s: float) -> list[Effect]:
        """If this coordinator itself stood still, nobody is to blame for a silence that it slept through."""
        if not self._wakefulness.is_late(now_s):
            self._wakefulness.called(now_s)
            return []
        slept_s = self._wakefulness.overslept(self.deadline_s, now_s)
        if not slept_s:
            return []
        limits = self.run.limits
        until_s = now_s + 2 * limits.beat_s  # what was said meanwhile is read by then, and more comes
        for worker in self.run.workers.values():
            worker.heard_s = no_earlier(worker.heard_s, limits.silence_s, until_s)
            worker.probe_until_s = max(worker.probe_until_s, until_s)
            worker.moved_s += slept_s
            worker.feed.moved_s += slept_s
            if worker.lost_s is not None:
                worker.lost_s = no_earlier(worker.lost_s, limits.regreet_s, until_s)
        self._making.until_s = max(self._making.until_s, until_s)
        return [Note("warning", "overslept", {"late_s": round(slept_s, 3)})]

    # -- messages ------------------------------------------------------------------------------

    def _heard(self, peer: m.PeerId, message: m.Message, now_s: float) -> list[Effect]:
        run, worker = self.run, self.run.workers.get(peer)
        if isinstance(message, m.Join):
            return self._join(peer, message, now_s)
        if worker is None:
            reason = f"a {type(message).__name__} came from a worker that is not on the roll"
            return [Send(peer, m.Rejoin(reason))]
        match message:
            case m.Setup():
                return self._admission.set_up(worker, message, now_s)
            case m.About(texts):
                worker.about = dict(texts)
            case m.Links(rtt_s):
                worker.rtt_s = dict(rtt_s)
                worker.admitted = worker.setup is not None
            case m.Rates():
                self._plans.rated(peer, message)
            case m.Beat():
                return self._beat(worker, message, now_s)
            case m.Report():
                return self._freezing.report(worker, message, now_s)
            case m.Ready(term, generation, history):
                if self._making.forming and run.is_now(term, generation):
                    self._making.ready[peer], worker.loading = history, False
                    self._drifted.is_ready(peer, generation)
            case m.Stalled():
                self._freezing.stalled(message.round.generation, now_s)
                return self._complaints.stalled(worker, message, now_s)
            case m.NoRoute() if peer not in run.members:
                return self._followers.no_route(worker, message, now_s)
            case m.NoRoute():
                return self._complaints.no_route(worker, message)
            case m.Fingerprint():
                return self._complaints.compare(peer, message)
            case m.Broken():
                return self._complaints.broken(worker, message, now_s)
            case m.Accuse():
                return self._complaints.accused(peer, message)
            case m.Kept():
                return self._disks.keeps(worker, message)
            case m.Caught(applied):
                worker.caught = True
                return [Note("info", "caught_up", {"name": worker.name, "step": applied})]
            case m.Seated():
                return self._recalling.seated(worker, message, now_s)
            case m.Leave(reason):
                return self._partings.dismiss(peer, f"left: {reason}")
            case m.Pausing(reason):
                self._resting.rests(peer, worker.name, reason, now_s)
                return self._partings.dismiss(peer, f"left: {self._resting.said(peer)}")
            case m.Finished(applied):
                run.finished.add(peer)
                if peer in run.members:  # others have finished nothing
                    run.reached = max(run.reached, min(applied, MOST_STEPS) + 1)
                return [Note("info", "worker_finished", {"name": worker.name, "step": applied})]
            case _:
                return [Strike(peer, f"sent {type(message).__name__}, which only others may send")]
        return []

    def _beat(self, worker: Worker, beat: m.Beat, now_s: float) -> list[Effect]:
        run = self.run
        if beat.progress > worker.progress:
            worker.progress, worker.moved_s = beat.progress, now_s
        worker.step, worker.figures = beat.step, dict(beat.figures)
        worker.feed.told(worker.figures.get(forming.STATE_LEFT, 0.0), now_s)
        self._plans.computed(worker.peer, worker.figures)
        self._plans.mind(now_s)
        if self._making.resting and worker.peer in run.members:
            run.reached = max(run.reached, beat.step)  # so that a rollback is seen to be one
        return [Send(worker.peer, m.BeatReply(run.term, beat.sequence))]

    def _join(self, peer: m.PeerId, join: m.Join, now_s: float) -> list[Effect]:
        if refused := self._admission.refusal(peer, join):
            return refused
        effects: list[Effect] = []
        if self._is_another_process(peer, join):
            effects = self._partings.replace(peer, join.name) + self._go_on(now_s)
            self._settled = None
        effects += self._admission.join(peer, join, now_s)
        self._followers.missed(peer)
        return [*effects, *self._drifted.again(peer), *self._repeat(peer)]

    def _is_another_process(self, peer: m.PeerId, join: m.Join) -> bool:
        """Than the one that is known by this key."""
        run, worker = self.run, self.run.workers.get(peer)
        member = peer in run.members - run.departed
        known = member or (worker is not None and worker.setup is not None)
        # Who has said READY has a seat, and who has none never was a member in another term of ours.
        elsewhere = member and (
            (peer in self._making.ready and join.generation < run.generation)
            or (worker is None and not join.generation)
        )
        return known and (elsewhere or not join.again)

    def _expelled(self, event: Expelled) -> list[Effect]:
        peer = event.peer
        self._resting.forget(peer)
        if peer not in self.run.workers:
            return [Dismiss(peer)]
        refused = Send(peer, m.Refused(event.code, event.reason, event.remedy))
        return [refused, *self._partings.dismiss(peer, event.reason, told=True)]

    def _repeat(self, peer: m.PeerId) -> list[Effect]:
        """What a worker may have missed while its connection was broken."""
        if peer not in self.run.members:
            return self._stages.spare([peer]) if self.run.workers[peer].spare else []
        if self._making.freezing and self._freezing.held_until_s is not None:
            return []  # it comes when the FREEZE does
        return self._generations.repeat(peer)

    # -- towards the next generation -----------------------------------------------------------

    def _go_on(self, now_s: float) -> list[Effect]:
        """Take every step towards the next generation that can be taken now."""
        making = self._making
        if self.run.over or self._settled == making.change:
            return []
        before = making.standing, making.until_s, making.change
        if making.freezing:
            effects = self._freezing.go_on(now_s)
        elif making.forming:
            effects, given_up = self._readying.go_on(now_s)
            effects += self._go_on(now_s) if given_up else []
        else:
            effects = self._followers.go_on(making.made_s, now_s) + self._begin_making(now_s)
        changed = effects or before != (making.standing, making.until_s, making.change)
        fed = making.forming and making.unrouted  # which beats tell
        moves = changed or fed or self._followers.serving or self.run.is_pipeline
        self._settled = None if moves else making.change
        return effects

    def _begin_making(self, now_s: float) -> list[Effect]:
        run, making = self.run, self._making
        if run.members and run.members <= run.finished:
            return self._partings.finish()
        if run.members and not run.present:
            return self._freezing.regather(now_s)
        newcomers = run.newcomers()
        if run.is_pipeline and not making.change and run.members:
            spared = self._stages.admit(newcomers)
            if spared is not None:
                return spared
        if newcomers:
            making.want(", ".join(w.name for w in newcomers) + " joined")
        if not making.change or now_s < making.may_begin_at_s():
            return []
        if run.members:
            return self._freezing.freeze(now_s)
        if len(newcomers) < run.least_workers:
            return []
        return self._stages.first(now_s) if run.is_pipeline else self._generations.first(now_s)
