"""The coordinator's core with five workers, under messages of members, joining workers and the operator.

It acts as the daemon and honest workers, as the schedule says; in between any peer sends any message.
The journal is read back after every generation.

    input:  u8 min_workers, u8 workers at the start, then a schedule: a byte for an action, and its arguments
"""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import Any

from gridfuzz import drawing
from gridfuzz.source import Source
from gridfuzz.targets.base import Target, must
from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain.core.commit.two_phase_commit import EMPTY_HISTORY, extend_history
from gridtrain.network.wire.codec import encode as to_frames
from gridtrain_coordinator.membership.membership import Membership
from gridtrain_coordinator.run import events as ev
from gridtrain_coordinator.run.journal_recovery import recover_run

KEYS = tuple(bytes([letter]) * 32 for letter in b"abcde")
COORDINATOR, STRANGER = b"C" * 32, b"s" * 32
SPEC = m.LedgerSpec(size=40, seed=0, epochs=3)
SETUP = m.Setup((("model", "tiny"),), SPEC, 4, None)
OF_WORKERS = (
    *(
        m.Join,
        m.Setup,
        m.LinkLatencies,
        m.Heartbeat,
        m.FreezeReport,
        m.Ready,
        m.RoundStalled,
        m.Leave,
        m.RunFinished,
        m.ViolationReport,
        m.PeersUnreachable,
        m.CurrentGeneration,
    ),
    *(m.FreezeReport, m.FreezeReport, m.RoundStalled, m.Setup),
)
ANY = tuple(drawing.TYPE_CODES)
MAX_SNAPSHOT_BYTES = 4 << 20


class CoordinatorHarness:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.now_s = 1000.0
        self.term = 0
        self.least = 1 + source.below(3)
        self.journal: list[tuple[str, dict[str, Any]]] = []
        self.views: dict[m.PeerId, m.MembershipView] = {}  # the latest that each received
        self.rosters: dict[m.PeerId, tuple[m.Member, ...]] = {}
        self.frozen: set[m.PeerId] = set()
        self.by_generation: dict[int, m.MembershipView] = {}
        self.calls: dict[m.PeerId, tuple[str, ...]] = {}
        self.heartbeats = 0
        self.start()

    def start(self) -> None:
        self.term += 1
        self.core = Membership(
            me=COORDINATOR,
            run="run",
            term=self.term,
            deadlines=Deadlines(),
            software="s",
            min_workers=self.least,
            recovered=recover_run(self.journal),
        )
        self.frozen.clear()
        self.take(self.core.start(self.now_s))
        for peer in KEYS[: self.source.below(6)]:
            self.join(peer)

    # -- honest workers ------------------------------------------------------------------------------

    def join(self, peer: m.PeerId) -> None:
        """A worker joins: the same process if it has a rank, else a new one each time."""
        self.event(ev.PeerConnected(peer, "10.0.0.1"))
        generation = self.views[peer].generation if peer in self.views else 0
        address = f"tcp://10.0.0.1:{peer[0]}"
        self.say(peer, m.Join("run", peer.decode()[:1], address, True, generation > 0, generation))
        if peer in self.calls:
            reached = self.calls.pop(peer)
            self.event(
                ev.DialBackResult(peer, "" if self.source.one_in(4) else reached[0] if reached else "")
            )
        self.say(peer, SETUP)
        self.say(peer, m.LinkLatencies(tuple((other, 0.01) for other in KEYS if other != peer)))

    def ready(self) -> None:
        """All members of the latest generation that have received it send Ready."""
        for peer, view in list(self.views.items()):
            self.say(peer, m.Ready(view.term, view.generation, view.history))

    def report(self, peer: m.PeerId, ahead: int, prepared: bool) -> None:
        """Report of a worker that has committed `ahead` steps, and may be prepared for another."""
        view = self.views.get(peer)
        if view is None:
            return
        state, history, applied = view.ledger, view.history, view.applied
        shares = [(member.peer, member.share) for member in self.rosters[peer]]
        for _ in range(ahead):
            if data_ledger.is_finished(SPEC, state):
                break
            state = data_ledger.commit(SPEC, state, data_ledger.assign(SPEC, state, shares), skipped=False)
            history, applied = extend_history(history, b"d"), applied + 1
        round_id = m.RoundId(view.term, view.generation, applied + 1, 0) if prepared else None
        report = m.FreezeReport(
            *(self.term, view.generation, True, applied, history, state, round_id),
            *(b"d" if prepared else b"", False),
        )
        self.say(peer, report)

    # -- the schedule ----------------------------------------------------------------------------------

    def step(self) -> None:
        source = self.source
        self.now_s += source.choice((0.0, 0.0, 0.1, 1.0, 6.0, 100.0))
        peer = source.choice(KEYS)
        match source.byte() % 18:
            case 0 | 1:
                self.ready()
            case 2 | 3:
                ahead = source.below(3)
                for member in sorted(self.frozen):
                    self.report(member, ahead, bool(source.byte() & 1))
                self.frozen.clear()
            case 4:
                self.report(peer, source.below(3), bool(source.byte() & 1))
            case 5 | 6:
                self.join(peer)
            case 7 | 8 | 9:
                self.say(peer, drawing.message(source, OF_WORKERS, self.hints()))
            case 10:
                sender = source.choice((*KEYS, STRANGER))
                self.say(sender, drawing.message(source, ANY, self.hints()))
            case 11:
                self.event(ev.PeerDisconnected(peer, "broke"))
            case 12:
                self.event(ev.ProtocolViolation(peer, "why"))
            case 13:
                self.event(ev.WorkerRemoved(peer, "kicked", "why", ""))
            case 14:
                address = source.choice((*self.calls.get(peer, ()), "", "tcp://10.0.0.9:1"))
                self.calls.pop(peer, None)
                self.event(ev.DialBackResult(peer, address))
            case 15:
                self.tick()
            case 16:
                for member in KEYS:  # heartbeats, so that no member times out
                    self.heartbeats += 1
                    self.say(
                        member,
                        m.Heartbeat(self.heartbeats, max(0, self.core.generation), self.heartbeats, ()),
                    )
            case _:
                self.start()

    def hints(self) -> drawing.Hints:
        core, source = self.core, self.source
        view = core.run.view
        applied = view.applied if view is not None else -1
        step = max(0, applied + 1)
        here = m.RoundId(self.term, core.generation, step, 0)
        state = view.ledger if view is not None else m.LedgerState()
        span = m.Span(state.cursor, state.cursor + 4)
        leased = replace(
            state, holders=((source.choice((*KEYS, STRANGER)), (span,)),), cursor=state.cursor + 4
        )
        return {
            "RoundId": (here, replace(here, step=step + 1), replace(here, attempt=1)),
            "term": (self.term,),
            "generation": (core.generation, core.generation, core.generation + 1),
            "applied": (applied, applied, applied + 1, 2**63 - 1),
            "history": (view.history if view is not None else EMPTY_HISTORY, b"h" * 32),
            "digest": (b"", b"d"),
            "ledger": (),
            "LedgerState": (state, leased, replace(state, step=2**63 - 1), m.LedgerState()),
            "LedgerSpec": (SPEC, SPEC, m.LedgerSpec(2**63 - 1, 0, 1), m.LedgerSpec(1, 0, None, 1)),
            "run": ("run",),
            "facts": (SETUP.facts,),
            "batch_size": (4, 0, 2**31 - 1),
            "global_batch_size": (None,),
            "peer": (*KEYS, STRANGER),
            "rtt_s": ((), tuple((other, 1e6) for other in KEYS)),
            "patience_s": (0.0, 1.0),
            "synced": (True,),
        }

    def tick(self) -> None:
        """Call `tick` when it is due, as the daemon does; that must end."""
        for _ in range(20):
            if self.core.deadline_s > self.now_s:
                return
            self.take(self.core.tick(self.now_s))
            self.now_s += 1e-6
        must(self.core.deadline_s > self.now_s, "the daemon would loop without end")

    def say(self, peer: m.PeerId, message: m.Message) -> None:
        if drawing.nbytes(message) is not None:
            self.event(ev.MessageReceived(peer, message))

    def event(self, event: ev.Event) -> None:
        self.take(self.core.handle(event, self.now_s))
        self.tick()

    # -- the daemon, and invariants --------------------------------------------------------------------

    def take(self, effects: list[ev.Effect]) -> None:
        self.write([(e.kind, e.body) for e in effects if isinstance(e, ev.JournalEntry)])
        for at, effect in enumerate(effects):
            match effect:
                case ev.Send(peer, message):
                    to_frames(message)  # a LocalProtocolError here was caused by a worker
                    must(peer in (*KEYS, STRANGER), "sent to a peer that is not connected")
                    self.sent(peer, message)
                case ev.JournalEntry("generation", body):
                    earlier = [
                        e
                        for e in effects[:at]
                        if isinstance(e, ev.Send) and isinstance(e.message, m.MembershipView)
                    ]
                    sent_before = [view for view in earlier if view.message.generation == body["generation"]]
                    must(not sent_before, "a MembershipView is sent before it is in the journal")
                case ev.DialBack(peer, addresses):
                    self.calls[peer] = addresses
                case ev.Disconnect(peer):
                    self.views.pop(peer, None)

    def look(self) -> None:
        status = json.dumps(self.core.status(self.now_s))
        must(len(status) < MAX_SNAPSHOT_BYTES, "the status has no bound")

    def sent(self, peer: m.PeerId, message: m.Message) -> None:
        match message:
            case m.MemberListPage(_, _, page, _, members):
                self.rosters[peer] = members if page == 0 else self.rosters.get(peer, ()) + members
            case m.MemberListChanges():
                self.rosters[peer] = message.apply(self.rosters[peer]) or ()
            case m.MembershipView():
                same = replace(message, term=0)
                first = self.by_generation.setdefault(message.generation, same)
                must(first == same, f"two of one generation: {first} and {same}")
                must(data_ledger.is_balanced(message.ledger), "a MembershipView's ledger does not add up")
                members = {x.peer for x in self.rosters.get(peer, ())}
                fits = peer in members and len(members) == message.world_size
                must(fits, "a MembershipView does not fit its member list")
                must(sum(x.share for x in self.rosters[peer]) >= 1, "no member has a share of the next step")
                must(any(not x.joining for x in self.rosters[peer]), "no member has the state")
                self.views[peer] = message
                self.frozen.discard(peer)
            case m.Freeze():
                self.frozen.add(peer)

    def write(self, entries: list[tuple[str, dict[str, Any]]]) -> None:
        if not entries:
            return
        must(self.core.term >= self.term, "the term decreases")
        self.term = self.core.term  # members may have reported a later one
        before = recover_run(self.journal)
        self.journal += [(kind, json.loads(json.dumps(body, allow_nan=False))) for kind, body in entries]
        after = recover_run(self.journal)
        must(after.generation >= before.generation, "the generation decreases in the journal")
        if any(kind == "generation" for kind, _ in entries):
            must(after.generation > before.generation, "a generation is journalled twice")
            ours = replace(self.core.run.view, term=self.term)  # type: ignore[type-var]
            must(after.view == ours, "the journal has another MembershipView")


def run(data: bytes) -> bool:
    harness = CoordinatorHarness(Source(data))
    for _ in range(60):
        if harness.source.empty:
            break
        harness.step()
        if harness.source.one_in(8):
            harness.look()
    harness.look()
    return len(harness.by_generation) > 1


def valid(random: Random) -> bytes:
    head = bytes((random.randrange(3), random.randrange(1, 6)))
    if random.random() < 0.4:
        return head + random.randbytes(random.choice((30, 150, 400)))
    # Mostly actions of an honest group: ready, reports, newcomers, heartbeats.
    steps = bytearray(random.randbytes(5))
    for _ in range(random.choice((8, 20, 50))):
        steps += bytes(
            (random.randrange(5), random.randrange(5), random.choice((0, 0, 2, 2, 5, 11, 15, 16, 7)))
        )
        steps += bytes(random.randrange(256) for _ in range(random.randrange(5)))
    return head + bytes(steps)


TARGETS = (
    Target(
        "membership",
        "the coordinator's core among five workers",
        run,
        valid,
        (
            *(
                "gridtrain_coordinator.membership.membership",
                "gridtrain_coordinator.run.registry",
                "gridtrain_coordinator.run.liveness",
                "gridtrain_coordinator.run.route_table",
            ),
            *(
                "gridtrain_coordinator.membership.worker_admission",
                "gridtrain_coordinator.membership.complaints",
                "gridtrain_coordinator.membership.departures",
            ),
            *(
                "gridtrain_coordinator.membership.freeze_phase",
                "gridtrain_coordinator.membership.view_installer",
                "gridtrain_coordinator.membership.readiness",
            ),
            *(
                "gridtrain_coordinator.membership.member_recovery",
                "gridtrain_coordinator.run.generation_plan",
                "gridtrain_coordinator.run.view_change",
            ),
            *(
                "gridtrain.core.commit.verdict",
                "gridtrain.core.commit.data_ledger",
                "gridtrain_coordinator.run.journal_recovery",
            ),
        ),
        max_bytes=600,
        cpu_s=1.0,
    ),
)
