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
from gridtrain_coordinator.run.events import RecordViolation, RunPhase

LIAR = b"z" * 32
LIMITS = Deadlines(silence_s=1e9, settle_s=0.0, probe_s=0.0, report_s=100.0)


class Coordinator(ScriptedCoordinator):
    """Workers say of which generation of another coordinator they are members."""

    def __init__(self, journal: Journal | None = None, term: int = 1, min_workers: int = 1) -> None:
        super().__init__(limits=LIMITS, event_s=0.01, min_workers=min_workers, journal=journal, term=term)

    def wait(self, for_s: float) -> None:
        until_s = self.now_s + for_s
        while self.core.deadline_s <= until_s:  # a loop that is later than that holds itself for a sleeper
            self.now_s = max(self.now_s, self.core.deadline_s)
            self.tick()
        self.now_s = until_s

    def enter(self, peer: m.PeerId, *told: m.Message) -> None:
        seated = [message.generation for message in told if isinstance(message, m.CurrentGeneration)]
        self.join(peer, generation=max(seated, default=self.core.generation), setup=None)
        self.say(peer, *told, SETUP, m.LinkLatencies(()))

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
        """Of those that A has received."""
        freeze: m.Freeze = sent(self.seen, m.Freeze, A)[-1]
        return freeze


def backup() -> Journal:
    """Generation 1 of anna and bert has trained in term 1."""
    first = Coordinator(min_workers=2)
    first.enter(A)
    first.enter(B)
    first.wait(1.0)
    first.start(A, B)
    return first.journal


def trained() -> Coordinator:
    """Anna and bert have come back to a coordinator from the backup, after five steps more, and train."""
    standby = formed()
    standby.start(A, B)
    return standby


def formed() -> Coordinator:
    """They are not ready yet."""
    standby = Coordinator(backup(), term=2)
    standby.enter(A)
    standby.enter(B)
    standby.report_at(5, A, B)
    return standby


SEATED = m.CurrentGeneration(term=3, generation=5, members=((A, 4), (C, 4)))


def test_a_restarted_coordinator_knows_the_names_of_its_members_before_they_return() -> None:
    assert Coordinator(backup(), term=2).core.worker_name(B) == "b"


def test_a_later_generation_of_its_members_is_taken_over() -> None:
    standby = Coordinator(backup(), term=2)
    standby.enter(A, SEATED)
    assert standby.core.term == 4, "above everything that anybody knows"
    assert sent(standby.seen, m.Welcome, A)[-1].term == 4
    freeze = standby.last_freeze
    assert (freeze.term, freeze.generation) == (4, 5)
    standby.enter(C, SEATED)
    standby.enter(B)  # the journal knows it; it left before generation 5
    standby.report_at(5, A, C)
    view = standby.view
    assert (view.term, view.generation, view.applied) == (4, 6, 5)
    assert standby.terms == [1, 2, 4]
    assert view.ledger.holders == ((A, (m.Span(48, 52),)), (C, (m.Span(52, 56),))), "by the shares they told"


def test_terms_alone_are_raised_too() -> None:
    """The old coordinator restarted after the backup, and has made no generation since."""
    standby = Coordinator(backup(), term=2)
    standby.enter(A, m.CurrentGeneration(7, 1, ((A, 4), (B, 4))))
    standby.enter(B)
    standby.report_at(5, A, B)
    assert standby.view.term == 8


def test_a_quick_liar_does_not_lead() -> None:
    standby = Coordinator(backup(), term=2)
    standby.enter(LIAR, m.CurrentGeneration(3, 90, ((LIAR, 4),)))
    standby.report_at(70, LIAR)
    assert standby.core.phase is RunPhase.PAUSED and standby.core.run.view is None, (
        "the others are waited for"
    )
    for peer in (A, C):
        standby.enter(peer, SEATED)
    standby.enter(B)
    standby.report_at(5, A, C)
    view = standby.view
    assert view.applied == 5 and view.generation == 91, "nobody ignores it as old"
    holders = {member.peer for member in standby.core.run.member_list if not member.joining}
    assert holders == {A, C}


def test_nobody_raises_terms_without_end() -> None:
    standby = Coordinator(backup(), term=2)
    standby.enter(LIAR, *(m.CurrentGeneration(term, 1, ()) for term in range(3, 1000)))
    assert standby.core.term == 4
    standby = Coordinator(backup(), term=2)
    standby.enter(LIAR, m.CurrentGeneration(2 + MAX_AHEAD + 1, 1, ()))
    assert standby.core.term == 2 and [e.peer for e in standby.seen if isinstance(e, RecordViolation)] == [
        LIAR
    ]


def test_many_keys_of_one_invitation_raise_the_term_now_and_then_only() -> None:
    standby = trained()
    for number in range(40):
        standby.enter(bytes([number]) * 32, m.CurrentGeneration(standby.core.term + 1, 1, ()))
    assert standby.terms == [1, 2, 4], "the first of them is believed"
    standby.wait(TERM_RAISE_INTERVAL_S)
    assert standby.terms == [1, 2, 4, 6], "and then the highest of all that came since"
    standby.wait(3 * TERM_RAISE_INTERVAL_S)
    assert standby.core.term == 6


def test_a_generation_that_forms_with_the_lower_term_is_given_up() -> None:
    standby = formed()
    assert standby.core.run.view_change.is_forming and standby.core.generation == 2
    standby.enter(C, m.CurrentGeneration(7, 1, ((C, 4),)))
    standby.wait(2.0)
    freeze = standby.last_freeze
    assert (freeze.term, freeze.generation) == (8, 2)


def test_who_told_of_a_higher_term_too_early_gets_its_view_later() -> None:
    standby = Coordinator(backup(), term=2)
    standby.enter(LIAR, m.CurrentGeneration(3, 1, ((LIAR, 4),)))
    standby.enter(C, m.CurrentGeneration(7, 1, ((C, 4),)))
    assert standby.core.term == 4, "C, whom the journal does not name, ignores this one for now"
    standby.enter(A, m.CurrentGeneration(5, 1, ((A, 4), (B, 4))))
    assert standby.core.term == 8, "whom it names is heard at once"
    assert standby.last_freeze == m.Freeze(8, 1, "the coordinator was started from a backup", ())


def test_what_a_coordinator_made_itself_binds() -> None:
    """A member of a lost generation comes back when the others have continued without it."""
    standby = trained()
    standby.enter(C, m.CurrentGeneration(2, 9, ((C, 4),)))
    standby.wait(5.0)
    standby.report_at(6, A, B)
    view = standby.view
    assert view.applied == 6
    assert view.generation == 10 and view.term == 3, "so that it follows the View"
    assert [member.joining for member in standby.core.run.member_list if member.peer == C] == [True]


@pytest.mark.parametrize("all_are_back", [True, False])
def test_workers_of_a_later_coordinator_are_taken_back_if_all_of_them_stay(all_are_back: bool) -> None:
    """Otherwise the later coordinator may go on with the others."""
    standby = trained()
    later = ((A, 4), (B, 4)) if all_are_back else ((A, 4), (B, 4), (C, 4))
    for peer in (A, B):
        standby.enter(peer, m.CurrentGeneration(7, 9, later))
    standby.wait(LIMITS.regather_s - 1.0)
    assert standby.core.term == 2
    standby.wait(3 * LIMITS.regather_s)
    assert (standby.core.term > 7) == all_are_back
    if all_are_back:
        for peer in (A, B):
            standby.say(peer, m.CurrentGeneration(standby.core.term, 9, later))
        freeze = standby.last_freeze
        assert (freeze.term, freeze.generation) == (standby.core.term, 9)
        standby.report_at(8, A, B)
        view = standby.core.run.view
        assert view is not None and (view.generation, view.applied) == (10, 8)


def test_a_coordinator_that_all_workers_have_left_takes_over_from_nobody() -> None:
    standby = Coordinator()
    standby.say(A, m.Join("r", "a", "memory://a", True))
    standby.say(A, SETUP)
    standby.say(A, m.CurrentGeneration(7, 0, ()))
    standby.say(A, m.Leave("goes back"))
    standby.wait(2 * LIMITS.regather_s)
    assert standby.core.term == 1


def test_an_ordinary_restart_takes_nothing_from_it() -> None:
    restarted = Coordinator(backup(), term=2)
    restarted.enter(A, m.CurrentGeneration(1, 1, ((A, 4), (B, 4))))
    restarted.enter(B, m.CurrentGeneration(1, 1, ((A, 4), (B, 4))))
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
    standby.enter(A, SEATED)
    assert standby.core.deadline_s < math.inf
    standby.report_at(5, A)
    standby.wait(LIMITS.regather_s + 1.0)
    view = standby.view
    assert view.applied == 5, "clara and bert did not come back"
