"""The coordinator's core with random sequences of events from hypothesis.

The workers are minimal and honest: they do what MembershipView, Freeze and StartGeneration say, at times
that hypothesis chooses.  They commit digests, so that a fork shows as two histories of one step.

    joins, leaves, losses, stalls, clock jumps --> Membership --> views, starts --> workers
    restarts from the journal                          |
                                                       +--> invariants after every event
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain.core.commit.two_phase_commit import EMPTY_HISTORY, extend_history
from gridtrain_coordinator.membership.membership import Membership
from gridtrain_coordinator.run import events as io
from gridtrain_coordinator.run.journal_recovery import recover_run

ME = b"0" * 32
SPEC = m.LedgerSpec(1000, 0, epochs=1)
SETUP = m.Setup((("model", "tiny"),), SPEC, 4, None)
MOST_WORKERS = 5
picks = st.integers(0, 10_000)


@dataclass
class Worker:
    """An honest member, as far as the coordinator can observe it."""

    peer: m.PeerId
    generation: int = 0
    term: int = 0
    member_list: tuple[m.Member, ...] = ()
    next_member_list: tuple[m.Member, ...] = ()
    view: m.MembershipView | None = None
    frozen: m.Freeze | None = None
    running: bool = False
    connected: bool = True
    is_set_up: bool = False
    welcomed: bool = False
    ready_in: int = 0  # the generation for which this process sent Ready
    synced: bool = False
    applied: int = -1
    history: bytes = EMPTY_HISTORY
    ledger: m.LedgerState = field(default_factory=m.LedgerState)
    prepared: tuple[m.RoundId, bytes] | None = None

    def install(self, view: m.MembershipView) -> None:
        if view.term < self.term or view.generation <= self.generation:
            return
        prepared, self.prepared = self.prepared, None
        if prepared is not None and view.applied == self.applied + 1:
            history = extend_history(self.history, prepared[1])
            if history == view.history:
                self.applied, self.history = view.applied, history
        self.synced = self.synced and (self.applied, self.history) == (view.applied, view.history)
        self.term, self.generation, self.view, self.member_list = (
            view.term,
            view.generation,
            view,
            self.next_member_list,
        )
        self.ledger, self.frozen, self.running = view.ledger, None, False
        joining = next(x.joining for x in self.member_list if x.peer == self.peer)
        self.synced = self.synced or (view.applied < 0 and not joining)
        if not self.synced:
            self.applied, self.history = view.applied, view.history

    def apply(self) -> None:
        assert self.prepared is not None
        shares = [(member.peer, member.share) for member in self.member_list]
        self.ledger = data_ledger.commit(
            SPEC, self.ledger, data_ledger.assign(SPEC, self.ledger, shares), skipped=False
        )
        self.applied, self.history = self.applied + 1, extend_history(self.history, self.prepared[1])
        self.prepared = None


class MembershipMachine(RuleBasedStateMachine):
    """Random operations on a coordinator and its workers."""

    @initialize(min_workers=st.integers(1, 3), workers=st.integers(0, 4))
    def begin(self, min_workers: int, workers: int) -> None:
        """Starts with a running group, if there are enough workers."""
        self.now_s = 0.0
        self.min_workers = min_workers
        self.journal: list[tuple[str, dict[str, Any]]] = []
        self.workers: list[Worker] = []
        self.admissible: set[m.PeerId] = set()
        self.made = 0  # number of workers so far
        self.generation = 0
        self.views: dict[int, m.MembershipView] = {}
        self.ready: set[tuple[int, int, m.PeerId]] = set()
        self.histories: dict[int, bytes] = {}  # of each applied step
        self.rolled_back = False
        self.start_coordinator()
        for number in range(workers):
            self.join()
            self.set_up(number, links=True)
        self.time_passes(1.0)
        self.all_get_ready()

    def start_coordinator(self) -> None:
        term = max((body["term"] for kind, body in self.journal if kind == "term"), default=0) + 1
        limits = Deadlines(regather_s=20.0, ready_s=5.0)
        self.core = Membership(
            me=ME,
            run="r",
            term=term,
            deadlines=limits,
            software="",
            min_workers=self.min_workers,
            recovered=recover_run(self.journal),
        )
        self.carry_out(self.core.start(self.now_s))

    # -- the daemon's loop --------------------------------------------------------------------------

    def hear(self, event: io.Event) -> None:
        self.now_s += 0.001
        self.carry_out(self.core.handle(event, self.now_s))

    def say(self, worker: Worker, message: m.Message) -> None:
        if worker.connected:
            self.hear(io.MessageReceived(worker.peer, message))

    def carry_out(self, effects: list[io.Effect]) -> None:
        for effect in effects:
            match effect:
                case io.JournalEntry(kind, body):
                    self.journal.append((kind, json.loads(json.dumps(body))))
                    self.journalled(kind, body)
                case io.Send(peer, message):
                    worker = next((w for w in self.workers if w.peer == peer and w.connected), None)
                    if worker is not None:
                        self.receive(worker, message)
                case io.DialBack(peer, addresses):
                    self.pending.append(io.DialBackResult(peer, addresses[0]))
                case _:
                    pass
        while self.pending:
            self.hear(self.pending.pop())

    pending: list[io.DialBackResult]

    def __init__(self) -> None:
        super().__init__()
        self.pending = []

    def journalled(self, kind: str, body: dict[str, Any]) -> None:
        if kind == "generation":
            assert body["generation"] > self.generation, "generations grow strictly, also over restarts"
            self.generation = body["generation"]
            named = {bytes.fromhex(row["peer"]) for row in body["members"]}
            assert named and named <= self.admissible, "only admitted workers are named"
        if kind == "state" and ("rollback" in body or body["state"] == "waiting"):
            self.rolled_back = True

    def receive(self, worker: Worker, message: m.Message) -> None:
        match message:
            case m.MemberListPage():
                if message.generation > worker.generation:
                    worker.next_member_list = message.members
            case m.MembershipView():
                self.check_view(message)
                worker.install(message)
                self.note(worker)
            case m.Freeze(term, generation) if term >= worker.term and generation == worker.generation:
                worker.frozen, worker.running, worker.term = message, False, term
            case m.StartGeneration(term, generation) if (term, generation) == (
                worker.term,
                worker.generation,
            ):
                for member in worker.member_list:
                    assert (term, generation, member.peer) in self.ready, "started before all were ready"
                assert worker.ready_in == generation, "started for another process with its key"
                worker.running = worker.frozen is None
            case m.Welcome():
                worker.welcomed = True
            case m.Refused() if worker in self.workers:
                self.workers.remove(worker)
            case _:
                pass

    def check_view(self, view: m.MembershipView) -> None:
        known = self.views.setdefault(view.generation, view)
        same = (known.verdict, known.decided_round, known.applied, known.history, known.ledger)
        assert same == (view.verdict, view.decided_round, view.applied, view.history, view.ledger), (
            "a verdict changed"
        )

    def note(self, worker: Worker) -> None:
        """All workers that applied a step have the same history, until a rollback is in the journal."""
        if not worker.synced or worker.applied < 0:
            return
        if self.rolled_back:
            self.histories.clear()
            self.rolled_back = False
        known = self.histories.setdefault(worker.applied, worker.history)
        assert known == worker.history, f"step {worker.applied} has two histories: a fork"

    def pick(self, number: int) -> Worker:
        return self.workers[number % len(self.workers)]

    # -- events --------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.workers) < MOST_WORKERS)
    @rule()
    def join(self) -> None:
        self.made += 1
        worker = Worker(self.made.to_bytes(32, "big"))
        self.workers.append(worker)
        self.greet(worker)

    def greet(self, worker: Worker) -> None:
        worker.connected = True
        self.hear(io.PeerConnected(worker.peer, "open"))
        name = worker.peer.hex()[-4:]
        self.say(worker, m.Join("r", name, "memory://" + name, True, worker.welcomed, worker.generation))
        if worker.is_set_up:
            self.say(worker, SETUP)

    @precondition(lambda self: self.workers)
    @rule(number=picks, links=st.booleans())
    def set_up(self, number: int, links: bool) -> None:
        worker = self.pick(number)
        worker.is_set_up = True
        self.admissible.add(worker.peer)
        self.say(worker, SETUP)
        if links:
            self.say(worker, m.LinkLatencies(()))

    @precondition(lambda self: self.workers)
    @rule(number=picks)
    def leave(self, number: int) -> None:
        if number % 2:
            return
        worker = self.pick(number)
        self.say(worker, m.Leave("had enough"))
        if worker in self.workers:
            self.workers.remove(worker)

    @precondition(lambda self: self.workers)
    @rule(number=picks, for_good=st.booleans())
    def lose(self, number: int, for_good: bool) -> None:
        worker = self.pick(number)
        if worker.connected:
            worker.connected = False
            self.hear(io.PeerDisconnected(worker.peer, "broke"))
        if for_good:
            self.workers.remove(worker)

    @precondition(lambda self: any(not worker.connected for worker in self.workers))
    @rule(number=picks)
    def reconnect(self, number: int) -> None:
        away = [worker for worker in self.workers if not worker.connected]
        self.greet(away[number % len(away)])

    @precondition(lambda self: self.workers)
    @rule(number=picks, noticed=st.booleans())
    def replace_process(self, number: int, noticed: bool) -> None:
        """A process ends, and another one joins at once with its key and without a state."""
        old = self.pick(number)
        self.workers[self.workers.index(old)] = worker = Worker(old.peer)
        if noticed and old.connected:
            self.hear(io.PeerDisconnected(old.peer, "broke"))
        self.greet(worker)

    @precondition(lambda self: self.workers)
    @rule(number=picks)
    def report(self, number: int) -> None:
        worker = self.pick(number)
        if worker.frozen is None:
            return
        round_id, digest = worker.prepared or (None, b"")
        self.say(
            worker,
            m.FreezeReport(
                worker.frozen.term,
                worker.generation,
                worker.synced,
                worker.applied,
                worker.history,
                worker.ledger,
                round_id,
                digest,
                0,
            ),
        )

    @rule()
    def all_report(self) -> None:
        for number in range(len(self.workers)):
            self.report(number)

    @precondition(lambda self: self.workers)
    @rule(number=picks)
    def get_ready(self, number: int) -> None:
        """With the state that a source sends."""
        worker = self.pick(number)
        if worker.view is None or worker.frozen is not None:
            return
        worker.synced = True
        self.note(worker)
        self.ready.add((worker.term, worker.generation, worker.peer))
        worker.ready_in = worker.generation
        self.say(worker, m.Ready(worker.term, worker.generation, worker.history))

    @rule()
    def all_get_ready(self) -> None:
        for number in range(len(self.workers)):
            self.get_ready(number)

    @precondition(lambda self: self.workers)
    @rule(number=picks)
    def lie_about_readiness(self, number: int) -> None:
        """A `Ready` with another history than the view's must start nothing."""
        worker = self.pick(number)
        if worker.view is not None and worker.frozen is None:
            self.say(worker, m.Ready(worker.term, worker.generation, b"\xff" * 32))

    def group(self) -> list[Worker]:
        """The members that run, if all members of a generation do; otherwise none can commit."""
        latest = max((worker.generation for worker in self.workers), default=0)
        members = [worker for worker in self.workers if worker.generation == latest and worker.running]
        return members if members and len(members) == len(members[0].member_list) else []

    @precondition(lambda self: self.group())
    @rule(number=st.integers(0, 99), prepared=st.integers(0, 5), applied=st.integers(0, 5))
    def step(self, number: int, prepared: int, applied: int) -> None:
        """A round: `prepared` members vote YES (5: all); if all did, `applied` of them receive COMMIT."""
        self.round(bytes([number]) * 32, prepared, applied)

    @precondition(lambda self: self.group())
    @rule(numbers=st.lists(st.integers(0, 99), min_size=1, max_size=4))
    def steps(self, numbers: list[int]) -> None:
        """Steps without faults."""
        for number in numbers:
            self.round(bytes([number]) * 32, 5, 5)

    @precondition(lambda self: self.group())
    @rule(number=st.integers(0, 99), applied=st.integers(0, 3), lost=picks, all_stay=st.booleans())
    def lose_during_commit(self, number: int, applied: int, lost: int, all_stay: bool) -> None:
        """All are prepared, some have applied, at most one of those is lost, and the group is frozen."""
        members = self.group()
        self.round(bytes([number]) * 32, 5, applied)
        if not all_stay and len(members) > 1:
            self.lose(self.workers.index(members[lost % len(members)]), for_good=True)
        self.stall(self.workers.index(self.workers[0]), 0, 0.0)
        self.time_passes(1.1)
        self.all_report()

    def round(self, digest: bytes, prepared: int, applied: int) -> None:
        members = self.group()
        if data_ledger.is_finished(SPEC, members[0].ledger):
            return
        pending = next((worker.prepared for worker in members if worker.prepared is not None), None)
        first = members[0]
        if pending is not None and any(worker.applied != first.applied for worker in members):
            for worker in members:  # some know the verdict; the rest receive it
                if worker.prepared is not None:
                    worker.apply()
                    self.note(worker)
            return
        vote = (m.RoundId(first.term, first.generation, first.applied + 1, 0), digest)
        for worker in members:
            worker.prepared = None
        for worker in members[:prepared] if prepared < 5 else members:
            worker.prepared = vote
        if all(worker.prepared is not None for worker in members):
            for worker in members[:applied] if applied < 5 else members:
                worker.apply()
                self.note(worker)

    @precondition(lambda self: self.workers)
    @rule(number=picks, suspect=picks, patience_s=st.sampled_from((0.0, 1.0, 100.0)))
    def stall(self, number: int, suspect: int, patience_s: float) -> None:
        worker = self.pick(number)
        if worker.running:
            round_id = m.RoundId(worker.term, worker.generation, worker.applied + 1, 1)
            self.say(
                worker, m.RoundStalled(round_id, (self.pick(suspect).peer,), patience_s, "nothing moves")
            )

    @rule()
    def heartbeats(self) -> None:
        for worker in list(self.workers):
            self.say(worker, m.Heartbeat(1, worker.applied + 1, int(self.now_s), ()))

    @rule(jump_s=st.sampled_from((0.05, 0.4, 1.1, 2.5, 6.0, 30.0, 1000.0)))
    def time_passes(self, jump_s: float) -> None:
        """The loop ticks on time meanwhile or, after a jump, late."""
        until_s = self.now_s + jump_s
        for _ in range(200):
            if self.core.deadline_s > until_s:
                break
            self.now_s = max(self.now_s, self.core.deadline_s)
            self.tick()
        else:
            raise AssertionError("the coordinator's deadline does not move: a busy timer")
        self.now_s = until_s

    @rule(jump_s=st.sampled_from((0.7, 3.0, 60.0)))
    def sleep(self, jump_s: float) -> None:
        """The coordinator itself stalls."""
        self.now_s += jump_s
        gone = {worker.peer for worker in self.workers if worker.connected} & self.admissible
        known = {row["peer"] for row in self.core.snapshot(self.now_s)["members"]}
        self.tick()
        after = {row["peer"] for row in self.core.snapshot(self.now_s)["members"]}
        if self.core.snapshot(self.now_s)["events"][-1]["event"] == "loop_stalled":
            lost = {bytes.fromhex(peer) for peer in known - after}
            assert not lost & gone, "a connected worker was dismissed for a stall of the coordinator"

    def tick(self) -> None:
        for _ in range(3):
            if self.now_s < self.core.deadline_s:
                return
            self.carry_out(self.core.tick(self.now_s))
        assert self.now_s < self.core.deadline_s, "ticking does not move the deadline: a busy timer"

    @rule()
    def settle(self) -> None:
        """All workers reconnect, report and get ready."""
        for worker in list(self.workers):
            if not worker.connected:
                self.greet(worker)
        for _ in range(2):
            self.all_report()
            self.all_get_ready()
            self.time_passes(1.1)

    @rule(really=st.integers(0, 4))
    def restart(self, really: int) -> None:
        """Killed, and restarted from the journal; workers connect later."""
        if really:
            return
        for worker in self.workers:
            worker.connected = False
        self.start_coordinator()

    # -- invariants ---------------------------------------------------------------------------------

    @invariant()
    def a_phase_has_its_reason(self) -> None:
        if hasattr(self, "core"):
            assert self.core.reason, self.core.phase
            assert not math.isnan(self.core.deadline_s)

    @invariant()
    def no_worker_is_due_before_the_deadline(self) -> None:
        if hasattr(self, "core"):
            run = self.core.run
            due_s = (worker.deadline_s(run.limits) for worker in run.workers.values())
            assert self.core.deadline_s <= min(due_s, default=math.inf)

    @invariant()
    def the_snapshot_can_be_encoded(self) -> None:
        if hasattr(self, "core"):
            json.dumps(self.core.snapshot(self.now_s))


MembershipMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestMembershipMachine = MembershipMachine.TestCase
