"""How long the coordinator waits for a lost member, and for members that come back after its own restart.

The other members are stalled meanwhile; each test lists the events by second.
"""

from __future__ import annotations

import pytest
from scripted_coordinator import SETUP, A, B, C, Journal, ScriptedCoordinator, receivers, sent

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain_coordinator.run.events import (
    DialBackResult,
    Effect,
    MessageReceived,
    PeerConnected,
    PeerDisconnected,
    RunPhase,
)
from gridtrain_coordinator.run.liveness import JOIN_WAIT_S

LIMITS = Deadlines()


class TimedCoordinator(ScriptedCoordinator):
    """Each event has an explicit time."""

    def __init__(self, journal: Journal | None = None, term: int = 1) -> None:
        super().__init__(limits=LIMITS, event_s=0.0, min_workers=3, journal=journal, term=term)

    def join(self, peer: m.PeerId, now_s: float, *, setup: bool = True, new_process: bool = False) -> None:
        """`new_process`: another process with the same key."""
        self.connect(peer, now_s)
        generation, address = 0 if new_process else self.core.generation, "memory://" + peer[:1].decode()
        self.say(peer, m.Join("r", peer[:1].decode(), address, True, generation > 0, generation), now_s)
        self.keep(self.core.handle(DialBackResult(peer, address), now_s))
        if setup:
            self.say(peer, SETUP, now_s)

    def say(self, peer: m.PeerId, message: m.Message, now_s: float) -> list[Effect]:
        return self.keep(self.core.handle(MessageReceived(peer, message), now_s))

    def connect(self, peer: m.PeerId, now_s: float) -> None:
        """Connects without sending a message."""
        self.keep(self.core.handle(PeerConnected(peer, "host"), now_s))

    def lose(self, peer: m.PeerId, now_s: float) -> None:
        self.keep(self.core.handle(PeerDisconnected(peer, "reset"), now_s))

    def train(self) -> None:
        """A, B and C are in generation 1 at second 3."""
        for peer in (A, B, C):
            self.join(peer, 0.0)
        for peer in (A, B, C):
            self.say(peer, m.LinkLatencies(()), 1.0)
        self.ready(3.0, A, B, C)
        assert self.core.status(1.0)["phase"] == "training"

    def ready(self, now_s: float, *peers: m.PeerId) -> None:
        self.pass_to(now_s, *peers)
        for peer in peers:
            self.say(peer, m.Ready(self.core.term, self.core.generation, self.view.history), now_s)

    def report(self, peer: m.PeerId, now_s: float, *, synced: bool = True) -> None:
        view = self.view
        fields = (self.core.term, view.generation, synced, view.applied, view.history, view.ledger)
        self.say(peer, m.FreezeReport(*fields, None, b"", 0), now_s)

    def frozen(self) -> list[m.PeerId]:
        return receivers(self.seen, m.Freeze)

    def lost(self) -> list[tuple[str, str]]:
        return [(e.fields["name"], e.fields["reason"]) for e in self.notes("lost")]


def broken(reported_s: float | None) -> TimedCoordinator:
    """At second 10 C's connection to the coordinator breaks; A reports that its connection to C broke too."""
    run = TimedCoordinator()
    run.train()
    run.pass_to(9.9, A, B, C)
    run.lose(C, 10.0)
    if reported_s is not None:
        run.say(A, m.ConnectionLost(1, 1, C), reported_s)
    return run


def assert_lost_after_regreet_s(run: TimedCoordinator, since_s: float) -> None:
    """C is lost once `regreet_s` has passed since its connection broke."""
    run.pass_to(since_s + LIMITS.regreet_s - 0.01, A, B)
    assert not run.lost()
    run.pass_to(since_s + LIMITS.regreet_s, A, B)
    assert run.lost() == [("c", "lost its connection and did not reconnect")]


def test_a_member_that_loses_two_connections_at_once_has_ended() -> None:
    """10.00  C's connection to the coordinator is reset;  10.02  A's to C as well;  10.10  C is lost."""
    run = broken(reported_s=10.02)
    run.pass_to(10.0 + LIMITS.ended_s - 0.01, A, B)
    assert not run.lost()
    run.pass_to(10.0 + LIMITS.ended_s, A, B)
    assert run.lost() == [("c", "lost its connections to this coordinator and to a member")]
    assert run.frozen() == [A, B]


def test_another_program_with_the_workers_key_is_no_reconnection() -> None:
    """10.000  C is killed;  10.015  its agent asks for the run's status;  10.030  and disconnects."""
    run = broken(reported_s=10.002)
    run.connect(C, 10.015)
    run.lose(C, 10.03)
    run.pass_to(10.0 + LIMITS.ended_s, A, B)
    assert run.lost() == [("c", "lost its connections to this coordinator and to a member")]


def test_a_member_with_an_open_connection_is_not_lost() -> None:
    """10.0  C's connections break;  10.09  it connects again;  10.3  its Join arrives."""
    run = broken(reported_s=10.02)
    run.connect(C, 10.09)
    run.pass_to(10.3, A, B)
    run.join(C, 10.3)
    run.pass_to(13.0, A, B, C)
    assert not run.lost() and not run.frozen()


def test_another_program_that_stays_connected_with_the_workers_key_does_not_keep_it_in_the_group() -> None:
    """10.0  C is killed;  10.03  its agent connects and stays connected;  10.28  C is lost."""
    run = TimedCoordinator()
    run.train()
    run.pass_to(9.9, A, B, C)
    run.lose(C, 10.0)
    run.say(A, m.ConnectionLost(1, 1, C), 10.02)
    run.connect(C, 10.03)
    run.pass_to(10.03 + JOIN_WAIT_S - 0.01, A, B)
    assert not run.lost()
    run.pass_to(10.03 + JOIN_WAIT_S, A, B)
    assert run.lost() == [("c", "lost its connections to this coordinator and to a member")]


def test_connections_that_broke_before_a_return_no_longer_count() -> None:
    """10.0  C's connections break;  10.05  it joins again;  10.5  one breaks, and may be restored."""
    run = broken(reported_s=10.02)
    run.join(C, 10.05)
    run.lose(C, 10.5)
    assert_lost_after_regreet_s(run, since_s=10.5)


def in_generation_2() -> TimedCoordinator:
    """B has left at 10.0, and generation 2 of A and C forms at 10.01."""
    run = TimedCoordinator()
    run.train()
    run.pass_to(9.9, A, B, C)
    run.say(B, m.Leave("tired"), 10.0)
    for peer in (A, C):
        run.report(peer, 10.01)
    assert run.core.generation == 2
    return run


def test_a_member_that_ends_while_a_generation_forms_is_detected_as_quickly() -> None:
    """10.0  B leaves;  10.01  the next generation forms;  10.05  C's connections break."""
    run = in_generation_2()
    run.lose(C, 10.05)
    run.say(A, m.ConnectionLost(1, 2, C), 10.06)
    run.pass_to(10.05 + LIMITS.ended_s, A)
    assert run.lost() == [("c", "lost its connections to this coordinator and to a member")]


def test_a_report_of_the_preceding_generation_counts() -> None:
    """10.01  generation 2 forms;  10.02  A, still in 1, reports C;  10.05  C's connection breaks."""
    run = in_generation_2()
    run.say(A, m.ConnectionLost(1, 1, C), 10.02)
    run.lose(C, 10.05)
    run.pass_to(10.05 + LIMITS.ended_s, A)
    assert run.lost() == [("c", "lost its connections to this coordinator and to a member")]


def test_a_report_of_an_earlier_generation_does_not_count() -> None:
    """Generation 3 forms, and A's report is of generation 1, so C's connection may be restored."""
    run = TimedCoordinator()
    run.train()
    run.pass_to(9.9, A, B, C)
    for generation in (2, 3):
        at_s = 10.0 * generation
        run.pass_to(at_s, A, B, C)
        run.say(A, m.RoundStalled(m.RoundId(1, generation - 1, 0, 0), (), 0.0, "test"), at_s)
        for peer in (A, B, C):
            run.report(peer, at_s)
        assert run.core.generation == generation
        run.ready(at_s, A, B, C)
    run.say(A, m.ConnectionLost(1, 1, C), 30.1)
    run.lose(C, 30.1)
    run.pass_to(30.1 + LIMITS.regreet_s - 0.01, A, B)
    assert not run.lost()


def test_one_broken_connection_may_be_restored() -> None:
    """10.0  C's connection breaks;  10.9  it is restored;  20.0  it breaks again;  21.0  C is lost."""
    run = broken(reported_s=None)
    run.pass_to(10.9, A, B)
    run.join(C, 10.9)
    run.pass_to(19.9, A, B, C)
    run.lose(C, 20.0)
    assert_lost_after_regreet_s(run, since_s=20.0)


def test_an_old_report_of_a_broken_connection_does_not_count() -> None:
    run = TimedCoordinator()
    run.train()
    run.say(A, m.ConnectionLost(1, 1, C), 3.5)
    run.pass_to(9.9, A, B, C)
    run.lose(C, 10.0)
    run.pass_to(10.0 + LIMITS.regreet_s - 0.01, A, B)
    assert not run.lost()


def restarted() -> TimedCoordinator:
    before = TimedCoordinator()
    before.train()
    return TimedCoordinator(before.journal, term=2)


def test_members_train_until_all_have_returned_to_a_restarted_coordinator() -> None:
    """One `Freeze` for all at second 3, not at the return of the first."""
    run = restarted()
    run.join(A, 1.0)
    run.join(B, 2.0)
    assert run.frozen() == []
    run.join(C, 3.0)
    assert sorted(run.frozen()) == [A, B, C]
    for peer in (A, B, C):
        run.report(peer, 3.1)
    assert run.core.generation == 2


def test_members_that_were_told_of_the_pause_are_told_when_training_continues() -> None:
    """Otherwise the last message in a worker's log is that the run is paused."""
    run = restarted()
    for peer in (A, B, C):
        run.join(peer, 1.0)
    for peer in (A, B, C):
        run.report(peer, 1.1)
    run.ready(1.2, A, B, C)
    for peer in (A, B, C):
        states = [(x.state, x.reason) for x in sent(run.seen, m.RunStateUpdate, peer)]
        assert states == [
            (
                "paused",
                "the coordinator restarted; waiting for 3 members to come back (a member that has finished "
                "the run does not)",
            ),
            ("training", "3 workers since step 0"),
        ]
    new = TimedCoordinator()
    new.train()
    assert [x.state for x in sent(new.seen, m.RunStateUpdate, A)] == ["waiting"], "there was no pause"


def test_a_member_lost_with_the_coordinator_is_not_awaited_until_regather_s() -> None:
    """1.0  A and B have returned;  4.0  Freeze, and the next generation."""
    run = restarted()
    run.join(A, 1.0)
    run.join(B, 1.2)
    run.pass_to(3.9, A, B)
    assert run.frozen() == []
    run.pass_to(4.0, A, B)
    assert sorted(run.frozen()) == [A, B]
    run.report(A, 4.1)
    run.report(B, 4.1)
    assert run.core.generation == 2 and {x.peer for x in run.core.run.member_list} == {A, B}


def test_the_status_names_the_members_that_are_not_back_after_a_restart() -> None:
    """C was lost with the coordinator; then B, which holds the state, is the only one to be back."""
    run = restarted()
    assert "awaited" not in run.core.status(0.5)["reason"], "nobody is back yet"
    run.join(A, 1.0)
    run.join(B, 1.2)
    waiting = run.core.status(1.5)["reason"]
    assert waiting.startswith("the coordinator restarted; waiting for 3 members to come back")
    assert waiting.endswith("; still awaited, for at most 3 s: c")
    run.pass_to(4.0, A, B)
    run.report(A, 4.1, synced=False)
    assert run.core.status(4.2)["reason"].endswith("; still awaited: c"), "only with the state it continues"
    run.report(B, 4.3)
    assert run.core.generation == 2 and "awaited" not in run.core.status(4.4)["reason"]


def test_a_reported_stall_ends_the_wait_sooner() -> None:
    run = restarted()
    run.join(A, 1.0)
    run.join(B, 1.2)
    run.say(A, m.RoundStalled(m.RoundId(1, 1, 0, 0), (C,), 0.0, "no connection to c"), 1.3)
    run.pass_to(1.3 + LIMITS.report_s, A, B)
    assert sorted(run.frozen()) == [A, B]


def test_a_new_process_alone_does_not_restart_the_run_while_members_with_the_state_may_return() -> None:
    """C's machine restarted it without a state.  A, which holds the state, returns after 30 s."""
    run = restarted()
    run.join(C, 1.0, new_process=True)
    run.pass_to(4.0, C)
    run.pass_to(29.9, C)
    assert run.core.generation == 1, "no generation was formed"
    run.join(A, 30.0)
    run.pass_to(33.0, A, C)
    assert run.frozen() == [A], "B is not awaited any longer"
    run.report(A, 33.1)
    run.pass_to(33.1 + LIMITS.silence_s, A, C)
    assert run.core.generation == 2
    assert {x.peer: x.joining for x in run.core.run.member_list} == {A: False, C: True}


def test_a_member_that_returns_without_its_state_waits_for_those_that_hold_it() -> None:
    """A has lost its state while the coordinator was down; B, which holds it, returns after 30 s."""
    run = restarted()
    run.join(A, 1.0)
    run.pass_to(4.0, A)
    assert run.frozen() == [A]
    run.report(A, 4.1, synced=False)
    run.pass_to(29.9, A)
    assert run.core.phase is RunPhase.PAUSED and run.core.generation == 1, "the run has not started over"
    run.join(B, 30.0)
    run.report(B, 30.1)
    run.pass_to(30.1 + LIMITS.silence_s, A, B)
    assert {x.peer: x.joining for x in run.core.run.member_list} == {A: True, B: False}


def test_a_new_process_is_not_awaited_while_it_builds_its_model() -> None:
    """C's new process has joined, and has not sent its setup yet."""
    run = restarted()
    run.join(A, 1.0)
    run.join(B, 1.0)
    run.join(C, 1.0, setup=False, new_process=True)
    assert sorted(run.frozen()) == [A, B]
    run.report(A, 1.1)
    run.report(B, 1.1)
    assert run.core.generation == 2 and {x.peer for x in run.core.run.member_list} == {A, B}


@pytest.mark.parametrize("is_freezing", [False, True])
def test_no_member_is_lost_because_the_coordinator_itself_stalled(is_freezing: bool) -> None:
    """10  its loop stalls;  70  messages wait to be read, for which it allows two heartbeat intervals."""
    run = TimedCoordinator()
    run.train()
    run.pass_to(9.9, A, B, C)
    if is_freezing:
        run.say(A, m.RoundStalled(m.RoundId(1, 1, 0, 0), (), 0.0, "test"), 10.0)
        assert sorted(run.frozen()) == [A, B, C]
    run.keep(run.core.tick(70.0))
    assert len(run.notes("loop_stalled")) == 1
    read_s = 70.0 + 2 * LIMITS.beat_s
    run.pass_to(read_s - 0.01)
    assert not run.lost()
    run.pass_to(read_s)
    assert sorted(name for name, _ in run.lost()) == ["a", "b", "c"], "nothing was waiting"


def test_a_failed_route_to_a_lost_member_counts_again_when_it_returns() -> None:
    """3  C cannot connect to B;  10  C's connections break, and it is lost;  20  C returns."""
    run = TimedCoordinator()
    run.train()
    run.say(C, m.PeersUnreachable(1, 1, (B,)), 3.0)
    for peer in (A, B, C):
        run.report(peer, 3.1)
    run.ready(3.5, A, B, C)
    run.pass_to(9.9, A, B, C)
    routes = run.core._addresses.route_table
    assert not routes.follows_key_rule(B)
    run.lose(C, 10.0)
    run.say(A, m.ConnectionLost(1, run.core.generation, C), 10.02)
    run.pass_to(10.0 + LIMITS.ended_s, A, B)
    assert run.lost() and not routes.follows_key_rule(B), "the present generation's routes stay"
    for peer in (A, B):
        run.report(peer, 10.2)
    assert routes.location(C) is None and routes.follows_key_rule(B)
    run.join(C, 20.0)
    assert routes.location(C) is not None and not routes.follows_key_rule(B)
