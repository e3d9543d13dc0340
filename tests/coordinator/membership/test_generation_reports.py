"""Commit rule 11: a coordinator started from a backup takes the maximum of journal and reports."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from scripted_coordinator import ME, SETUP, A, B, C, Journal, ScriptedCoordinator, sent

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.group import member_events
from gridtrain.core.member.member import MemberCore
from gridtrain_coordinator.membership.generation_reports import MAX_AHEAD, TERM_RAISE_INTERVAL_S
from gridtrain_coordinator.run.events import PeerDisconnected, RecordViolation, RunPhase

LIAR = b"z" * 32
LIMITS = Deadlines(silence_s=1e9, settle_s=0.0, probe_s=0.0, report_s=100.0)


class Coordinator(ScriptedCoordinator):
    """Receives joins of workers that report a generation of another coordinator."""

    def __init__(self, journal: Journal | None = None, term: int = 1, min_workers: int = 1) -> None:
        super().__init__(limits=LIMITS, event_s=0.01, min_workers=min_workers, journal=journal, term=term)

    def wait(self, for_s: float) -> None:
        until_s = self.now_s + for_s
        while self.core.deadline_s <= until_s:  # a later tick would count as a stalled loop
            self.now_s = max(self.now_s, self.core.deadline_s)
            self.tick()
        self.now_s = until_s

    def enter(self, peer: m.PeerId, *reports: m.Message) -> None:
        generations = [message.generation for message in reports if isinstance(message, m.CurrentGeneration)]
        self.join(peer, generation=max(generations, default=self.core.generation), setup=None)
        self.say(peer, *reports, SETUP, m.LinkLatencies(()))

    def report_at(self, applied: int, *peers: m.PeerId) -> None:
        at = (self.core.term, self.core.generation, True, applied, bytes([applied + 1]) * 32)
        samples = 8 * (applied + 1)
        ledger = m.LedgerState(step=applied + 1, cursor=samples, consumed=samples)
        for peer in peers:
            self.say(peer, m.FreezeReport(*at, ledger, None, b"", 0))

    @property
    def terms(self) -> list[int]:
        return [body["term"] for kind, body in self.journal if kind == "term"]

    @property
    def last_freeze(self) -> m.Freeze:
        """The latest one that A received."""
        freeze: m.Freeze = sent(self.seen, m.Freeze, A)[-1]
        return freeze


def journal_of_term_1() -> Journal:
    """The journal of generation 1, in which anna and bert train in term 1."""
    first = Coordinator(min_workers=2)
    first.enter(A)
    first.enter(B)
    first.wait(1.0)
    first.start(A, B)
    return first.journal


def trained() -> Coordinator:
    """As `formed`, and anna and bert train."""
    standby = formed()
    standby.start(A, B)
    return standby


def formed() -> Coordinator:
    """A coordinator from the backup, to which anna and bert returned after five more steps; not ready yet."""
    standby = Coordinator(journal_of_term_1(), term=2)
    standby.enter(A)
    standby.enter(B)
    standby.report_at(5, A, B)
    return standby


REPORTED = m.CurrentGeneration(term=3, generation=5, members=((A, 4), (C, 4)))


def test_a_restarted_coordinator_knows_the_names_of_its_members_before_they_return() -> None:
    restarted = Coordinator(journal_of_term_1(), term=2).core
    assert restarted.worker_name(B) == "b"


def test_a_restarted_coordinator_says_that_the_run_continues() -> None:
    started = Coordinator(journal_of_term_1(), term=2).core.status(0.0)["events"][0]
    assert (started["event"], started["term"], started["members"]) == ("started", 2, "a, b")
    assert started["reason"] == "the run continues; generation 1 began at step 0"
    first = Coordinator(min_workers=2).core.status(0.0)["events"][0]
    assert first["event"] == "started" and "reason" not in first


def test_a_later_generation_that_members_report_is_adopted() -> None:
    standby = Coordinator(journal_of_term_1(), term=2)
    standby.enter(A, REPORTED)
    assert standby.core.term == 4, "above every reported term"
    assert sent(standby.seen, m.Welcome, A)[-1].term == 4
    freeze = standby.last_freeze
    assert (freeze.term, freeze.generation) == (4, 5)
    standby.enter(C, REPORTED)
    standby.enter(B)  # the journal knows it; it left before generation 5
    standby.report_at(5, A, C)
    view = standby.view
    assert (view.term, view.generation, view.applied) == (4, 6, 5)
    assert standby.terms == [1, 2, 4]
    assert view.ledger.holders == ((A, (m.Span(48, 52),)), (C, (m.Span(52, 56),))), "by the reported shares"


@pytest.mark.parametrize("is_ended", [False, True])
def test_the_members_that_are_awaited_because_the_journal_is_older_are_named(is_ended: bool) -> None:
    """bert was banned after the backup was made.  An order to end the run takes effect after the wait."""
    standby = Coordinator(journal_of_term_1(), term=2)
    standby.enter(A, REPORTED)
    older = "the journal is older than generation 5; waiting for that generation's 2 workers"
    older += " and for 1 other worker of generation 1, which may know a later one"
    reason = standby.core.status(standby.now_s)["reason"]
    assert reason == f"{older}; still awaited: {C.hex()[:8]}, a, b", "no state: the wait has no limit yet"
    standby.enter(C, REPORTED)
    standby.report_at(5, A, C)
    if is_ended:
        effects, reply = standby.core.end_run(standby.now_s)
        standby.keep(effects)
        assert isinstance(reply, m.OperatorReply)
        assert reply.text.endswith("; still awaited, for at most 60 s: b")
    standby.now_s += 20.0
    reason = standby.core.status(standby.now_s)["reason"]
    assert reason.startswith(older) and reason.endswith("; still awaited, for at most 40 s: b")
    standby.wait(41.0)
    assert standby.roster == "a c" and standby.view.applied == 5
    assert "awaited" not in standby.core.status(standby.now_s)["reason"]
    standby.ready(A, C)
    assert standby.core.phase is (RunPhase.FINISHED if is_ended else RunPhase.TRAINING)


def test_a_later_term_without_a_later_generation_is_adopted() -> None:
    """The old coordinator restarted after the backup, and has made no generation since."""
    standby = Coordinator(journal_of_term_1(), term=2)
    standby.enter(A, m.CurrentGeneration(7, 1, ((A, 4), (B, 4))))
    standby.enter(B)
    standby.report_at(5, A, B)
    assert standby.view.term == 8


def test_a_liar_that_reports_first_does_not_decide() -> None:
    standby = Coordinator(journal_of_term_1(), term=2)
    standby.enter(LIAR, m.CurrentGeneration(3, 90, ((LIAR, 4),)))
    standby.report_at(70, LIAR)
    assert standby.core.phase is RunPhase.PAUSED and standby.core.run.view is None, (
        "the others are waited for"
    )
    for peer in (A, C):
        standby.enter(peer, REPORTED)
    standby.enter(B)
    standby.report_at(5, A, C)
    view = standby.view
    assert view.applied == 5 and view.generation == 91, "no member ignores it as old"
    holders = {member.peer for member in standby.core.run.member_list if not member.joining}
    assert holders == {A, C}


def test_raising_the_term_is_bounded() -> None:
    standby = Coordinator(journal_of_term_1(), term=2)
    standby.enter(LIAR, *(m.CurrentGeneration(term, 1, ()) for term in range(3, 1000)))
    assert standby.core.term == 4
    standby = Coordinator(journal_of_term_1(), term=2)
    standby.enter(LIAR, m.CurrentGeneration(2 + MAX_AHEAD + 1, 1, ()))
    assert standby.core.term == 2 and [e.peer for e in standby.seen if isinstance(e, RecordViolation)] == [
        LIAR
    ]


def test_many_keys_of_one_invitation_raise_the_term_once_an_interval() -> None:
    standby = trained()
    for number in range(40):
        standby.enter(bytes([number]) * 32, m.CurrentGeneration(standby.core.term + 1, 1, ()))
    assert standby.terms == [1, 2, 4], "the first report counts at once"
    standby.wait(TERM_RAISE_INTERVAL_S)
    assert standby.terms == [1, 2, 4, 6], "then the highest term reported since"
    standby.wait(3 * TERM_RAISE_INTERVAL_S)
    assert standby.core.term == 6


def test_a_higher_term_ends_the_forming_generation() -> None:
    standby = formed()
    assert standby.core.run.view_change.is_forming and standby.core.generation == 2
    standby.enter(C, m.CurrentGeneration(7, 1, ((C, 4),)))
    standby.wait(2.0)
    freeze = standby.last_freeze
    assert (freeze.term, freeze.generation) == (8, 2)


def test_a_higher_term_is_adopted_only_while_most_members_are_connected() -> None:
    """Otherwise they may be with the coordinator whose term it is."""
    for connected in (True, False):
        standby = trained()
        if not connected:
            standby.hear(PeerDisconnected(B, "reset"))
        standby.enter(C, m.CurrentGeneration(7, 1, ((C, 4),)))
        assert (standby.core.term, len(standby.notes("superseded"))) == ((8, 0) if connected else (2, 1))


def test_a_higher_term_of_an_unknown_worker_is_adopted_later() -> None:
    standby = Coordinator(journal_of_term_1(), term=2)
    standby.enter(LIAR, m.CurrentGeneration(3, 1, ((LIAR, 4),)))
    standby.enter(C, m.CurrentGeneration(7, 1, ((C, 4),)))
    assert standby.core.term == 4, "the journal does not name C"
    standby.enter(A, m.CurrentGeneration(5, 1, ((A, 4), (B, 4))))
    assert standby.core.term == 8, "the journal names A"
    assert standby.last_freeze == m.Freeze(8, 1, "the coordinator was started from a backup", ())


def test_a_coordinators_own_generation_outranks_reports() -> None:
    """A member of a lost generation returns after the others have continued without it."""
    standby = trained()
    standby.enter(C, m.CurrentGeneration(2, 9, ((C, 4),)))
    standby.wait(5.0)
    standby.report_at(6, A, B)
    view = standby.view
    assert view.applied == 6
    assert view.generation == 10 and view.term == 3, "so that it accepts the view"
    assert [member.joining for member in standby.core.run.member_list if member.peer == C] == [True]


@pytest.mark.parametrize("all_returned", [True, False])
def test_workers_of_a_later_coordinator_are_adopted_if_all_of_them_return(all_returned: bool) -> None:
    """Otherwise the later coordinator may continue with the others."""
    standby = trained()
    later = ((A, 4), (B, 4)) if all_returned else ((A, 4), (B, 4), (C, 4))
    for peer in (A, B):
        standby.enter(peer, m.CurrentGeneration(7, 9, later))
    standby.wait(LIMITS.regather_s - 1.0)
    assert standby.core.term == 2
    standby.wait(3 * LIMITS.regather_s)
    assert (standby.core.term > 7) == all_returned
    if all_returned:
        for peer in (A, B):
            standby.say(peer, m.CurrentGeneration(standby.core.term, 9, later))
        freeze = standby.last_freeze
        assert (freeze.term, freeze.generation) == (standby.core.term, 9)
        standby.report_at(8, A, B)
        view = standby.view
        assert (view.generation, view.applied) == (10, 8)


def test_reports_of_workers_that_left_are_ignored() -> None:
    standby = Coordinator()
    standby.say(A, m.Join("r", "a", "memory://a", True))
    standby.say(A, SETUP)
    standby.say(A, m.CurrentGeneration(7, 0, ()))
    standby.say(A, m.Leave("goes back"))
    standby.wait(2 * LIMITS.regather_s)
    assert standby.core.term == 1


def test_an_ordinary_restart_adopts_nothing() -> None:
    restarted = Coordinator(journal_of_term_1(), term=2)
    restarted.enter(A, m.CurrentGeneration(1, 1, ((A, 4), (B, 4))))
    restarted.enter(B, m.CurrentGeneration(1, 1, ((A, 4), (B, 4))))
    assert restarted.core.term == 2 and restarted.core.generation == 1


def test_a_member_reports_its_generation_and_ignores_an_earlier_freeze() -> None:
    core = MemberCore(A, ME, m.Join("r", "a", ""), LIMITS)
    core.handle(member_events.TrainerJoined(SETUP, lambda rank, world: frozenset()), 0.0)

    def reply(message: m.Message) -> list[m.Message]:
        effects = core.handle(member_events.MessageReceived(ME, message, 0), 1.0)
        return [effect.message for effect in effects if isinstance(effect, member_events.Send)]

    assert reply(m.Welcome(1, "r", "")) == [SETUP], "it has no generation yet"
    reply(m.MemberListPage(1, 5, 0, 1, (m.Member(A, "a", "", 4, False),)))
    reply(m.MembershipView(1, 5, 1, m.Verdict.ABORT, None, -1, bytes(32), m.LedgerState(), ""))
    mine = m.CurrentGeneration(1, 5, ((A, 4),))
    assert reply(m.Welcome(1, "r", "")) == [mine, SETUP, m.Ready(1, 5, bytes(32))]
    assert reply(m.Freeze(1, 4, "", ())) == []
    assert reply(m.Welcome(7, "r", ""))[0] == replace(mine, term=7)
    assert reply(m.Welcome(3, "r", "")) == [replace(mine, term=7)], (
        "a coordinator of a lower term learns of the higher one"
    )
    assert reply(m.Freeze(3, 5, "", ())) == [] and core.term == 7
    (report,) = reply(m.Freeze(8, 5, "", ()))
    assert isinstance(report, m.FreezeReport) and report.generation == 5


def test_the_deadline_is_finite_while_members_are_awaited() -> None:
    standby = Coordinator(journal_of_term_1(), term=2)
    standby.enter(A, REPORTED)
    assert standby.core.deadline_s < math.inf
    standby.report_at(5, A)
    standby.wait(LIMITS.regather_s + 1.0)
    view = standby.view
    assert view.applied == 5, "clara and bert did not return"
