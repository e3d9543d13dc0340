"""Commit rule 11: a coordinator started from a backup takes the maximum of journal and reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.group import member_events
from gridtrain.core.member.member import MemberCore
from gridtrain_coordinator.membership.generation_reports import MAX_AHEAD, TERM_RAISE_INTERVAL_S
from gridtrain_coordinator.membership.membership import Membership
from gridtrain_coordinator.run.events import (
    DialBackResult,
    Effect,
    JournalEntry,
    MessageReceived,
    RecordViolation,
    RunPhase,
    Send,
)
from gridtrain_coordinator.run.journal_recovery import recover_run

ME = b"0" * 32
A, B, C, LIAR = (letter * 32 for letter in (b"a", b"b", b"c", b"z"))
SPEC = m.LedgerSpec(100, 0, epochs=1)
SETUP = m.Setup((("model", "tiny"),), SPEC, 4, None)
LIMITS = Deadlines(silence_s=1e9, settle_s=0.0, probe_s=0.0, report_s=100.0)


class Coordinator:
    """A membership, its journal and its messages; workers are `MemberCore`s or scripted messages."""

    def __init__(self, journal: Sequence[JournalEntry] = (), term: int = 1, min_workers: int = 1) -> None:
        entries = [(entry.kind, entry.body) for entry in journal]
        self.journal = list(journal)
        self.core = Membership(
            me=ME,
            run="r",
            term=term,
            deadlines=LIMITS,
            software="",
            min_workers=min_workers,
            recovered=recover_run(entries) if entries else None,
        )
        self.now_s = 0.0
        self.sent: list[Send] = []
        self.strikes: list[RecordViolation] = []
        self._take(self.core.start(0.0))

    def _take(self, effects: Sequence[Effect]) -> list[Send]:
        self.journal += [effect for effect in effects if isinstance(effect, JournalEntry)]
        self.strikes += [effect for effect in effects if isinstance(effect, RecordViolation)]
        sends = [effect for effect in effects if isinstance(effect, Send)]
        self.sent += sends
        return sends

    def hear(self, peer: m.PeerId, message: m.Message) -> list[Send]:
        self.now_s += 0.01
        return self._take(self.core.handle(MessageReceived(peer, message), self.now_s))

    def wait(self, for_s: float) -> None:
        until_s = self.now_s + for_s
        while self.core.deadline_s <= until_s:  # a loop that is later than that holds itself for a sleeper
            self.now_s = max(self.now_s, self.core.deadline_s)
            self._take(self.core.tick(self.now_s))
        self.now_s = until_s

    def join(self, peer: m.PeerId, *told: m.Message) -> None:
        seated = [message.generation for message in told if isinstance(message, m.CurrentGeneration)]
        generation = max(seated, default=self.core.generation)
        name = peer[:1].decode()
        self.hear(peer, m.Join("r", name, "memory://" + name, True, generation > 0, generation))
        self._take(self.core.handle(DialBackResult(peer, "memory://" + peer[:1].decode()), self.now_s))
        for message in told:
            self.hear(peer, message)
        self.hear(peer, SETUP)
        self.hear(peer, m.LinkLatencies(()))

    def report(self, peer: m.PeerId, applied: int, ledger_state: m.LedgerState) -> None:
        generation, history = self.core.generation, bytes([applied + 1]) * 32
        self.hear(
            peer,
            m.FreezeReport(self.core.term, generation, True, applied, history, ledger_state, None, b"", 0),
        )

    def last(self, kind: type[m.Message], peer: m.PeerId) -> m.Message:
        return [x.message for x in self.sent if x.peer == peer and isinstance(x.message, kind)][-1]

    def start(self, *peers: m.PeerId) -> None:
        assert self.core.run.view is not None
        for peer in peers:
            self.hear(peer, m.Ready(self.core.term, self.core.generation, self.core.run.view.history))
        assert self.core.phase is RunPhase.TRAINING


def backup() -> list[JournalEntry]:
    """Generation 1 of anna and bert has trained in term 1."""
    first = Coordinator(min_workers=2)
    first.join(A)
    first.join(B)
    first.wait(1.0)
    first.start(A, B)
    return first.journal


def at_step(applied: int) -> m.LedgerState:
    return m.LedgerState(step=applied + 1, cursor=8 * (applied + 1), consumed=8 * (applied + 1))


SEATED = m.CurrentGeneration(term=3, generation=5, members=((A, 4), (C, 4)))


def test_a_restarted_coordinator_knows_the_names_of_its_members_before_they_return() -> None:
    assert Coordinator(backup(), term=2).core.worker_name(B) == "b"


def test_a_later_generation_of_its_members_is_taken_over() -> None:
    standby = Coordinator(backup(), term=2)
    standby.join(A, SEATED)
    assert standby.core.term == 4, "above everything that anybody knows"
    assert isinstance(standby.last(m.Welcome, A), m.Welcome) and standby.last(m.Welcome, A).term == 4
    freeze = standby.last(m.Freeze, A)
    assert (freeze.term, freeze.generation) == (4, 5)
    standby.join(C, SEATED)
    standby.join(B)  # the journal knows it; it left before generation 5
    for peer in (A, C):
        standby.report(peer, 5, at_step(5))
    view = standby.core.run.view
    assert view is not None and (view.term, view.generation, view.applied) == (4, 6, 5)
    assert [entry.body["term"] for entry in standby.journal if entry.kind == "term"] == [1, 2, 4]
    assert view.ledger.holders == ((A, (m.Span(48, 52),)), (C, (m.Span(52, 56),))), "by the shares they told"


def test_terms_alone_are_raised_too() -> None:
    """The old coordinator restarted after the backup, and has made no generation since."""
    standby = Coordinator(backup(), term=2)
    standby.join(A, m.CurrentGeneration(7, 1, ((A, 4), (B, 4))))
    standby.join(B)
    for peer in (A, B):
        standby.report(peer, 5, at_step(5))
    assert standby.core.run.view is not None and standby.core.run.view.term == 8


def test_a_quick_liar_does_not_lead() -> None:
    standby = Coordinator(backup(), term=2)
    standby.join(LIAR, m.CurrentGeneration(3, 90, ((LIAR, 4),)))
    standby.report(LIAR, 70, at_step(70))
    assert standby.core.phase is RunPhase.PAUSED and standby.core.run.view is None, (
        "the others are waited for"
    )
    for peer in (A, C):
        standby.join(peer, SEATED)
    standby.join(B)
    for peer in (A, C):
        standby.report(peer, 5, at_step(5))
    view = standby.core.run.view
    assert view is not None and view.applied == 5 and view.generation == 91, "nobody ignores it as old"
    holders = {member.peer for member in standby.core.run.member_list if not member.joining}
    assert holders == {A, C}


def test_nobody_raises_terms_without_end() -> None:
    standby = Coordinator(backup(), term=2)
    standby.join(LIAR, *(m.CurrentGeneration(term, 1, ()) for term in range(3, 1000)))
    assert standby.core.term == 4
    standby = Coordinator(backup(), term=2)
    standby.join(LIAR, m.CurrentGeneration(2 + MAX_AHEAD + 1, 1, ()))
    assert standby.core.term == 2 and [strike.peer for strike in standby.strikes] == [LIAR]


def test_many_keys_of_one_invitation_raise_the_term_now_and_then_only() -> None:
    standby = Coordinator(backup(), term=2)
    for peer in (A, B):
        standby.join(peer)
    for peer in (A, B):
        standby.report(peer, 5, at_step(5))
    standby.start(A, B)
    for number in range(40):
        standby.join(bytes([number]) * 32, m.CurrentGeneration(standby.core.term + 1, 1, ()))
    raised = [entry.body["term"] for entry in standby.journal if entry.kind == "term"]
    assert raised == [1, 2, 4], "the first of them is believed"
    standby.wait(TERM_RAISE_INTERVAL_S)
    raised = [entry.body["term"] for entry in standby.journal if entry.kind == "term"]
    assert raised == [1, 2, 4, 6], "and then the highest of all that came since"
    standby.wait(3 * TERM_RAISE_INTERVAL_S)
    assert standby.core.term == 6


def test_a_generation_that_forms_with_the_lower_term_is_given_up() -> None:
    standby = Coordinator(backup(), term=2)
    for peer in (A, B):
        standby.join(peer)
    for peer in (A, B):
        standby.report(peer, 5, at_step(5))
    assert standby.core.run.view_change.is_forming and standby.core.generation == 2
    standby.join(C, m.CurrentGeneration(7, 1, ((C, 4),)))
    standby.wait(2.0)
    freeze = standby.last(m.Freeze, A)
    assert isinstance(freeze, m.Freeze) and (freeze.term, freeze.generation) == (8, 2)


def test_who_told_of_a_higher_term_too_early_gets_its_view_later() -> None:
    standby = Coordinator(backup(), term=2)
    standby.join(LIAR, m.CurrentGeneration(3, 1, ((LIAR, 4),)))
    standby.join(C, m.CurrentGeneration(7, 1, ((C, 4),)))
    assert standby.core.term == 4, "C, whom the journal does not name, ignores this one for now"
    standby.join(A, m.CurrentGeneration(5, 1, ((A, 4), (B, 4))))
    assert standby.core.term == 8, "whom it names is heard at once"
    assert standby.last(m.Freeze, A) == m.Freeze(8, 1, "the coordinator was started from a backup", ())


def test_what_a_coordinator_made_itself_binds() -> None:
    """A member of a lost generation comes back when the others have continued without it."""
    standby = Coordinator(backup(), term=2)
    for peer in (A, B):
        standby.join(peer)
    for peer in (A, B):
        standby.report(peer, 5, at_step(5))
    standby.start(A, B)
    standby.join(C, m.CurrentGeneration(2, 9, ((C, 4),)))
    standby.wait(5.0)
    for peer in (A, B):
        standby.report(peer, 6, at_step(6))
    view = standby.core.run.view
    assert view is not None and view.applied == 6
    assert view.generation == 10 and view.term == 3, "so that it follows the View"
    assert [member.joining for member in standby.core.run.member_list if member.peer == C] == [True]


@pytest.mark.parametrize("all_are_back", [True, False])
def test_workers_of_a_later_coordinator_are_taken_back_if_all_of_them_stay(all_are_back: bool) -> None:
    """Otherwise the later coordinator may go on with the others."""
    standby = Coordinator(backup(), term=2)
    for peer in (A, B):
        standby.join(peer)
    for peer in (A, B):
        standby.report(peer, 5, at_step(5))
    standby.start(A, B)
    later = ((A, 4), (B, 4)) if all_are_back else ((A, 4), (B, 4), (C, 4))
    for peer in (A, B):
        standby.join(peer, m.CurrentGeneration(7, 9, later))
    standby.wait(LIMITS.regather_s - 1.0)
    assert standby.core.term == 2
    standby.wait(3 * LIMITS.regather_s)
    assert (standby.core.term > 7) == all_are_back
    if all_are_back:
        for peer in (A, B):
            standby.hear(peer, m.CurrentGeneration(standby.core.term, 9, later))
        freeze = standby.last(m.Freeze, A)
        assert isinstance(freeze, m.Freeze) and (freeze.term, freeze.generation) == (standby.core.term, 9)
        for peer in (A, B):
            standby.report(peer, 8, at_step(8))
        view = standby.core.run.view
        assert view is not None and (view.generation, view.applied) == (10, 8)


def test_a_coordinator_that_all_workers_have_left_takes_over_from_nobody() -> None:
    standby = Coordinator()
    standby.hear(A, m.Join("r", "a", "memory://a", True))
    standby.hear(A, SETUP)
    standby.hear(A, m.CurrentGeneration(7, 0, ()))
    standby.hear(A, m.Leave("goes back"))
    standby.wait(2 * LIMITS.regather_s)
    assert standby.core.term == 1


def test_an_ordinary_restart_takes_nothing_from_it() -> None:
    restarted = Coordinator(backup(), term=2)
    restarted.join(A, m.CurrentGeneration(1, 1, ((A, 4), (B, 4))))
    restarted.join(B, m.CurrentGeneration(1, 1, ((A, 4), (B, 4))))
    assert restarted.core.term == 2 and restarted.core.generation == 1


def test_a_worker_tells_where_it_is_and_takes_no_earlier_freeze() -> None:
    core = MemberCore(A, ME, m.Join("r", "a", ""), LIMITS)
    core.handle(member_events.TrainerJoined(SETUP, lambda rank, world: frozenset()), 0.0)

    def told(message: m.Message) -> list[m.Message]:
        effects = core.handle(member_events.MessageReceived(ME, message, 0), 1.0)
        return [effect.message for effect in effects if isinstance(effect, member_events.Send)]

    assert told(m.Welcome(1, "r", "")) == [SETUP], "it is nowhere yet"
    told(m.MemberListPage(1, 5, 0, 1, (m.Member(A, "a", "", 4, False),)))
    told(m.MembershipView(1, 5, 1, m.Verdict.ABORT, None, -1, bytes(32), m.LedgerState(), ""))
    mine = m.CurrentGeneration(1, 5, ((A, 4),))
    assert told(m.Welcome(1, "r", "")) == [mine, SETUP, m.Ready(1, 5, bytes(32))]
    assert told(m.Freeze(1, 4, "", ())) == []
    assert told(m.Welcome(7, "r", ""))[0] == replace(mine, term=7)
    assert told(m.Welcome(3, "r", "")) == [replace(mine, term=7)], "a lower term is told of the higher one"
    assert told(m.Freeze(3, 5, "", ())) == [] and core.term == 7
    (report,) = told(m.Freeze(8, 5, "", ()))
    assert isinstance(report, m.FreezeReport) and report.generation == 5


def test_deadlines_stay_finite_while_members_are_waited_for() -> None:
    standby = Coordinator(backup(), term=2)
    standby.join(A, SEATED)
    assert standby.core.deadline_s < math.inf
    standby.report(A, 5, at_step(5))
    standby.wait(LIMITS.regather_s + 1.0)
    view = standby.core.run.view
    assert view is not None and view.applied == 5, "clara and bert did not come back"
