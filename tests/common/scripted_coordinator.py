"""A coordinator's core, and workers whose messages a test chooses."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from types import UnionType
from typing import Any

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain_coordinator.membership.membership import Membership
from gridtrain_coordinator.run.events import (
    DialBackResult,
    Effect,
    Event,
    JournalEntry,
    LogEvent,
    MessageReceived,
    RunPhase,
    Send,
)
from gridtrain_coordinator.run.journal_recovery import RecoveredRun, recover_run

ME = b"0" * 32
A, B, C, D, E = (letter * 32 for letter in (b"a", b"b", b"c", b"d", b"e"))
SETUP = m.Setup((("model", "tiny"),), m.LedgerSpec(100, 0, epochs=1), 4, None)

Journal = list[tuple[str, dict[str, Any]]]


def sent(
    effects: Iterable[Effect], kind: type[m.Message] | UnionType = m.Message, to: m.PeerId | None = None
) -> list[Any]:
    """The messages of a type among these effects; only those to one worker, if it is named."""
    return [
        e.message
        for e in effects
        if isinstance(e, Send) and isinstance(e.message, kind) and to in (None, e.peer)
    ]


def receivers(effects: Iterable[Effect], kind: type[m.Message]) -> list[m.PeerId]:
    return [e.peer for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


class ScriptedCoordinator:
    """A coordinator's core with its effects and its journal.  Workers are keys of 32 equal letters.

    Args:
        event_s: seconds that pass before each event.
        journal: of the previous coordinator.

    Attributes:
        effects: of the latest event.
        seen: all effects.
        journal: all entries, as they are read again.
    """

    def __init__(
        self,
        *,
        limits: Deadlines | None = None,
        event_s: float = 1.0,
        min_workers: int = 1,
        term: int = 1,
        journal: Journal | None = None,
        recovered: RecoveredRun | None = None,
        plans: bool = True,
    ) -> None:
        self.journal = journal or []
        self.event_s, self.now_s = event_s, 0.0
        self.effects: list[Effect] = []
        self.seen: list[Effect] = []
        if self.journal:
            recovered = recover_run(self.journal)
        self.core = Membership(
            me=ME, run="r", term=term, deadlines=limits or Deadlines(), software="", min_workers=min_workers,
            recovered=recovered, plans=plans,
        )  # fmt: skip
        self.keep(self.core.start(self.now_s))

    def keep(self, effects: list[Effect]) -> list[Effect]:
        self.effects = effects
        self.seen += effects
        self.journal += [
            (e.kind, json.loads(json.dumps(e.body))) for e in effects if isinstance(e, JournalEntry)
        ]
        return effects

    def hear(self, event: Event) -> list[Effect]:
        self.now_s += self.event_s
        return self.keep(self.core.handle(event, self.now_s))

    def say(self, peer: m.PeerId, *messages: m.Message) -> list[Effect]:
        return [effect for message in messages for effect in self.hear(MessageReceived(peer, message))]

    def tick(self, after_s: float = 0.0) -> list[Effect]:
        self.now_s += after_s
        return self.keep(self.core.tick(self.now_s))

    def pass_to(self, now_s: float, *alive: m.PeerId) -> None:
        """Time passes until `now_s`; the workers in `alive` send heartbeats."""
        self._send_heartbeats(alive, now_s, min(now_s, self.core.deadline_s))
        for _ in range(1000):
            if (at_s := self.core.deadline_s) > now_s:
                self._send_heartbeats(alive, now_s, now_s)
                self.now_s = now_s
                return
            self._send_heartbeats(alive, at_s, at_s)
            self.keep(self.core.tick(at_s))
        raise AssertionError(f"the deadline does not advance beyond {at_s}")

    def _send_heartbeats(self, alive: Sequence[m.PeerId], progress: float, at_s: float) -> None:
        for peer in alive:
            beat = m.Heartbeat(1, 0, round(progress), ())
            self.keep(self.core.handle(MessageReceived(peer, beat), at_s))

    def join(
        self, peer: m.PeerId, *, reachable: bool = True, generation: int = 0, setup: m.Setup | None = SETUP
    ) -> list[Effect]:
        """Args: generation: the worker's previous one; setup: None: no set-up is sent."""
        name, address = peer[:1].decode(), "memory://" + peer[:1].decode()
        effects = self.say(peer, m.Join("r", name, address, True, generation > 0, generation))
        effects += self.hear(DialBackResult(peer, address if reachable else ""))
        return effects + (self.say(peer, setup, m.LinkLatencies(())) if setup is not None else [])

    @property
    def view(self) -> m.MembershipView:
        view = self.core.run.view
        assert view is not None
        return view

    @property
    def roster(self) -> str:
        """Names of the members by rank."""
        return " ".join(member.name for member in self.core.run.member_list)

    def ready(self, *peers: m.PeerId) -> None:
        for peer in peers:
            self.say(peer, m.Ready(self.core.term, self.core.generation, self.view.history))

    def start(self, *peers: m.PeerId) -> None:
        self.ready(*peers)
        assert self.core.phase is RunPhase.TRAINING

    def report(self, *peers: m.PeerId, synced: bool = True) -> None:
        """Each of `peers` reports the state of the latest view."""
        view = self.view
        state = (self.core.term, view.generation, synced, view.applied, view.history, view.ledger)
        for peer in peers:
            self.say(peer, m.FreezeReport(*state, None, b"", 0))

    def notes(self, event: str) -> list[LogEvent]:
        return [e for e in self.seen if isinstance(e, LogEvent) and e.event == event]
