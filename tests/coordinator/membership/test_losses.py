"""How long the coordinator waits for a lost member, and for members that come back after its own restart.

The other members are stalled meanwhile; each test lists the events by second.
"""

from __future__ import annotations

from scripted_coordinator import SETUP, A, B, C, Journal, ScriptedCoordinator, receivers

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain_coordinator.run.events import (
    DialBackResult,
    Effect,
    MessageReceived,
    PeerConnected,
    PeerDisconnected,
)
from gridtrain_coordinator.run.liveness import JOIN_WAIT_S

LIMITS = Deadlines()


class Told(ScriptedCoordinator):
    """Each event has a time."""

    def __init__(self, journal: Journal | None = None, term: int = 1) -> None:
        super().__init__(limits=LIMITS, event_s=0.0, min_workers=3, journal=journal, term=term)

    def join(self, peer: m.PeerId, now_s: float, *, setup: bool = True, anew: bool = False) -> None:
        """`anew`: another process with the same key."""
        self.connect(peer, now_s)
        generation, address = 0 if anew else self.core.generation, "memory://" + peer[:1].decode()
        self.say(peer, m.Join("r", peer[:1].decode(), address, True, generation > 0, generation), now_s)
        self.keep(self.core.handle(DialBackResult(peer, address), now_s))
        if setup:
            self.say(peer, SETUP, now_s)

    def say(self, peer: m.PeerId, message: m.Message, now_s: float) -> list[Effect]:
        return self.keep(self.core.handle(MessageReceived(peer, message), now_s))

    def connect(self, peer: m.PeerId, now_s: float) -> None:
        """Its key connects, and says nothing yet."""
        self.keep(self.core.handle(PeerConnected(peer, "host"), now_s))

    def lose(self, peer: m.PeerId, now_s: float) -> None:
        self.keep(self.core.handle(PeerDisconnected(peer, "reset"), now_s))

    def pass_to(self, now_s: float, *alive: m.PeerId) -> None:
        """Time passes; the members in `alive` send heartbeats."""
        for peer in alive:
            self.say(peer, m.Heartbeat(1, 0, round(now_s), ()), min(now_s, self.core.deadline_s))
        for _ in range(1000):
            if (at_s := self.core.deadline_s) > now_s:
                for peer in alive:
                    self.say(peer, m.Heartbeat(1, 0, round(now_s), ()), now_s)
                return
            for peer in alive:
                self.say(peer, m.Heartbeat(1, 0, round(at_s), ()), at_s)
            self.keep(self.core.tick(at_s))
        raise AssertionError(f"the core wants to be called again and again at {at_s}")

    def train(self) -> None:
        """A, B and C are in generation 1 at second 3."""
        for peer in (A, B, C):
            self.join(peer, 0.0)
        for peer in (A, B, C):
            self.say(peer, m.LinkLatencies(()), 1.0)
        self.ready(3.0, A, B, C)
        assert self.core.snapshot(1.0)["phase"] == "training"

    def ready(self, now_s: float, *peers: m.PeerId) -> None:
        self.pass_to(now_s, *peers)
        for peer in peers:
            self.say(peer, m.Ready(self.core.term, self.core.generation, self.view.history), now_s)

    def report(self, peer: m.PeerId, now_s: float, *, synced: bool = True) -> None:
        view = self.view
        told = (self.core.term, view.generation, synced, view.applied, view.history, view.ledger)
        self.say(peer, m.FreezeReport(*told, None, b"", 0), now_s)

    def frozen(self) -> list[m.PeerId]:
        return receivers(self.seen, m.Freeze)

    def lost(self) -> list[tuple[str, str]]:
        return [(e.fields["name"], e.fields["reason"]) for e in self.notes("lost")]


def broken(reported_s: float | None) -> Told:
    """At second 10 of training C's connection to the coordinator breaks; A reports that its own has, too."""
    told = Told()
    told.train()
    told.pass_to(9.9, A, B, C)
    told.lose(C, 10.0)
    if reported_s is not None:
        told.say(A, m.ConnectionLost(1, 1, C), reported_s)
    return told


def assert_lost_after_regreet_s(told: Told, since_s: float) -> None:
    """C, whose connection broke then, may come back until that time has passed."""
    told.pass_to(since_s + LIMITS.regreet_s - 0.01, A, B)
    assert not told.lost()
    told.pass_to(since_s + LIMITS.regreet_s, A, B)
    assert told.lost() == [("c", "lost its connection and did not reconnect")]


def test_two_connections_that_break_together_are_the_end_of_a_process() -> None:
    """10.00  C's connection to the coordinator is reset;  10.02  A's to C as well;  10.10  C is lost."""
    told = broken(reported_s=10.02)
    told.pass_to(10.0 + LIMITS.ended_s - 0.01, A, B)
    assert not told.lost()
    told.pass_to(10.0 + LIMITS.ended_s, A, B)
    assert told.lost() == [("c", "lost its connections to this coordinator and to a member")]
    assert told.frozen() == [A, B]


def test_another_program_with_the_workers_key_is_not_its_return() -> None:
    """10.000  C is killed;  10.015  its agent asks for the run's status;  10.030  and disconnects."""
    told = broken(reported_s=10.002)
    told.connect(C, 10.015)
    told.lose(C, 10.03)
    told.pass_to(10.0 + LIMITS.ended_s, A, B)
    assert told.lost() == [("c", "lost its connections to this coordinator and to a member")]


def test_nobody_is_lost_while_a_connection_is_open_over_which_a_join_may_come() -> None:
    """10.0  C's connections break;  10.09  it has connected again;  10.3  its Join has arrived."""
    told = broken(reported_s=10.02)
    told.connect(C, 10.09)
    told.pass_to(10.3, A, B)
    told.join(C, 10.3)
    told.pass_to(13.0, A, B, C)
    assert not told.lost() and not told.frozen()


def test_a_program_that_stays_connected_with_the_workers_key_does_not_keep_it_in_the_group() -> None:
    """10.0  C is killed;  10.03  its agent connects, and stays;  10.28  C is lost, not at its next Join."""
    told = Told()
    told.train()
    told.pass_to(9.9, A, B, C)
    told.lose(C, 10.0)
    told.say(A, m.ConnectionLost(1, 1, C), 10.02)
    told.connect(C, 10.03)
    told.pass_to(10.03 + JOIN_WAIT_S - 0.01, A, B)
    assert not told.lost()
    told.pass_to(10.03 + JOIN_WAIT_S, A, B)
    assert told.lost() == [("c", "lost its connections to this coordinator and to a member")]


def test_a_connection_that_broke_before_the_return_counts_no_more() -> None:
    """10.0  C's connections break;  10.05  it has joined again;  10.5  one breaks: it may come back."""
    told = broken(reported_s=10.02)
    told.join(C, 10.05)
    told.lose(C, 10.5)
    assert_lost_after_regreet_s(told, since_s=10.5)


def test_a_member_that_ends_while_a_generation_forms_is_detected_as_soon() -> None:
    """10.0  B leaves;  10.01  the next generation forms;  10.05  C's connections break."""
    told = Told()
    told.train()
    told.pass_to(9.9, A, B, C)
    told.say(B, m.Leave("tired"), 10.0)
    for peer in (A, C):
        told.report(peer, 10.01)
    assert told.core.generation == 2
    told.lose(C, 10.05)
    told.say(A, m.ConnectionLost(1, 2, C), 10.06)
    told.pass_to(10.05 + LIMITS.ended_s, A)
    assert told.lost() == [("c", "lost its connections to this coordinator and to a member")]


def test_a_report_that_crosses_the_next_view_says_that_a_process_has_ended() -> None:
    """10.01  generation 2 forms;  10.02  A, still in 1, reports C;  10.05  C's connection breaks."""
    told = Told()
    told.train()
    told.pass_to(9.9, A, B, C)
    told.say(B, m.Leave("tired"), 10.0)
    for peer in (A, C):
        told.report(peer, 10.01)
    assert told.core.generation == 2
    told.say(A, m.ConnectionLost(1, 1, C), 10.02)
    told.lose(C, 10.05)
    told.pass_to(10.05 + LIMITS.ended_s, A)
    assert told.lost() == [("c", "lost its connections to this coordinator and to a member")]


def test_a_report_of_an_earlier_generation_says_nothing() -> None:
    """Generation 3 forms, and A's report is of generation 1: C's connection may come back."""
    told = Told()
    told.train()
    told.pass_to(9.9, A, B, C)
    for generation in (2, 3):
        at_s = 10.0 * generation
        told.pass_to(at_s, A, B, C)
        told.say(A, m.RoundStalled(m.RoundId(1, generation - 1, 0, 0), (), 0.0, "test"), at_s)
        for peer in (A, B, C):
            told.report(peer, at_s)
        assert told.core.generation == generation
        told.ready(at_s, A, B, C)
    told.say(A, m.ConnectionLost(1, 1, C), 30.1)
    told.lose(C, 30.1)
    told.pass_to(30.1 + LIMITS.regreet_s - 0.01, A, B)
    assert not told.lost()


def test_one_broken_connection_may_come_back() -> None:
    """10.0  C's connection breaks;  10.9  it is restored;  20.0  it breaks again;  21.0  C is lost."""
    told = broken(reported_s=None)
    told.pass_to(10.9, A, B)
    told.join(C, 10.9)
    told.pass_to(19.9, A, B, C)
    told.lose(C, 20.0)
    assert_lost_after_regreet_s(told, since_s=20.0)


def test_what_a_member_said_long_ago_is_no_second_connection() -> None:
    told = Told()
    told.train()
    told.say(A, m.ConnectionLost(1, 1, C), 3.5)
    told.pass_to(9.9, A, B, C)
    told.lose(C, 10.0)
    told.pass_to(10.0 + LIMITS.regreet_s - 0.01, A, B)
    assert not told.lost()


def restarted() -> Told:
    before = Told()
    before.train()
    return Told(before.journal, term=2)


def test_members_train_on_until_all_are_back_at_a_restarted_coordinator() -> None:
    """One `Freeze` for all at second 3, not at the return of the first."""
    told = restarted()
    told.join(A, 1.0)
    told.join(B, 2.0)
    assert told.frozen() == []
    told.join(C, 3.0)
    assert sorted(told.frozen()) == [A, B, C]
    for peer in (A, B, C):
        told.report(peer, 3.1)
    assert told.core.generation == 2


def test_who_died_with_the_coordinator_is_not_waited_for_until_regather_s() -> None:
    """It used to take 60 s.  1.0  A and B are back;  4.0  Freeze, and the next generation."""
    told = restarted()
    told.join(A, 1.0)
    told.join(B, 1.2)
    told.pass_to(3.9, A, B)
    assert told.frozen() == []
    told.pass_to(4.0, A, B)
    assert sorted(told.frozen()) == [A, B]
    told.report(A, 4.1)
    told.report(B, 4.1)
    assert told.core.generation == 2 and {x.peer for x in told.core.run.member_list} == {A, B}


def test_a_stall_that_is_told_of_ends_the_wait_sooner() -> None:
    told = restarted()
    told.join(A, 1.0)
    told.join(B, 1.2)
    told.say(A, m.RoundStalled(m.RoundId(1, 1, 0, 0), (C,), 0.0, "no connection to c"), 1.3)
    told.pass_to(1.3 + LIMITS.report_s, A, B)
    assert sorted(told.frozen()) == [A, B]


def test_a_fresh_process_alone_does_not_begin_anew_while_the_holders_may_return() -> None:
    """C's machine restarted it without a state.  A, which has it, comes after 30 s: nothing is lost."""
    told = restarted()
    told.join(C, 1.0, anew=True)
    told.pass_to(4.0, C)
    told.pass_to(29.9, C)
    assert told.core.generation == 1, "nothing was begun"
    told.join(A, 30.0)
    told.pass_to(33.0, A, C)
    assert told.frozen() == [A], "B, who may come with A, had its time"
    told.report(A, 33.1)
    told.pass_to(33.1 + LIMITS.silence_s, A, C)
    assert told.core.generation == 2
    assert {x.peer: x.joining for x in told.core.run.member_list} == {A: False, C: True}


def test_a_process_that_was_started_anew_is_not_waited_for_while_it_builds_its_model() -> None:
    """It used to cost 1.0 s: C's new process has joined, and is still importing."""
    told = restarted()
    told.join(A, 1.0)
    told.join(B, 1.0)
    told.join(C, 1.0, setup=False, anew=True)
    assert sorted(told.frozen()) == [A, B]
    told.report(A, 1.1)
    told.report(B, 1.1)
    assert told.core.generation == 2 and {x.peer for x in told.core.run.member_list} == {A, B}
