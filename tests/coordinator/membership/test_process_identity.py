"""A worker's process ends, and another one joins with its key before the coordinator has noticed.

The new process has the key and the disk of the old one, but no state, rank or setup.  Causes: an agent
that restarts its script, a container, a copied identity.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from scripted_coordinator import ME, A, B, C, Journal, ScriptedCoordinator, sent
from scripted_member import ScriptedMember, no_neighbours

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.group import member_events
from gridtrain.core.member.member import MemberCore
from gridtrain_coordinator.run.events import (
    DialBackResult,
    PeerConnected,
    PeerDisconnected,
    RunPhase,
    Send,
)

SETUP = m.Setup((("model", "tiny"),), m.LedgerSpec(100, 0, steps=20), 4, None)
LIMITS = Deadlines()
CHECKPOINT = m.CheckpointInfo(4, b"h" * 32, m.LedgerState(step=5, cursor=20, consumed=20))


class Run(ScriptedCoordinator):
    """Workers with scripted messages; time passes only where a test says so."""

    def __init__(self, least: int = 1, journal: Journal | None = None) -> None:
        super().__init__(
            limits=LIMITS, event_s=0.0, min_workers=least, journal=journal, term=2 if journal else 1
        )

    def join(self, peer: m.PeerId, *, again: bool = False, generation: int = 0) -> list[str]:
        """Returns the types of the messages that the worker receives."""
        name, address = peer[:1].decode(), "memory://" + peer[:1].decode()
        self.hear(PeerConnected(peer, "host"))
        effects = self.say(peer, m.Join("r", name, address, True, again, generation))
        self.hear(DialBackResult(peer, address))
        return [type(message).__name__ for message in sent(effects, to=peer)]

    def enter(self, peer: m.PeerId, setup: m.Setup = SETUP) -> None:
        self.say(peer, setup, m.LinkLatencies(()))

    def form(self) -> None:
        """Ticks until the next generation is formed."""
        before = self.core.generation
        while self.core.generation == before:
            self.now_s = max(self.now_s, self.core.deadline_s)
            self.tick()

    def train(self, *peers: m.PeerId) -> None:
        for peer in peers:
            self.join(peer)
            self.enter(peer)
        self.form()
        self.start(*peers)

    def steps(self, step: int, *peers: m.PeerId) -> None:
        self.say_all(peers, m.Heartbeat(1, step, step, ()))

    def say_all(self, peers: tuple[m.PeerId, ...], message: m.Message) -> None:
        for peer in peers:
            self.say(peer, message)

    def frozen(self) -> list[tuple[m.PeerId, tuple[m.PeerId, ...]]]:
        return [(e.peer, e.message.removed) for e in self.seen
                if isinstance(e, Send) and isinstance(e.message, m.Freeze)]  # fmt: skip

    def joining(self) -> dict[m.PeerId, bool]:
        return {x.peer: x.joining for x in self.core.run.member_list}


def report(run: Run, peer: m.PeerId, step: int) -> None:
    state = m.LedgerState(step=step, cursor=8 * step, consumed=8 * step)
    message = m.FreezeReport(
        run.core.term, run.core.generation, True, step - 1, b"h" * 32, state, None, b"", 0
    )
    run.say(peer, message)


@pytest.mark.parametrize("noticed", [True, False], ids=["connection broke", "connection was replaced"])
def test_a_new_process_has_no_rank_and_the_others_continue_from_their_state(noticed: bool) -> None:
    """A and B are at step 7.  A' receives no view and no start; B continues, and A' joins as a newcomer."""
    run = Run(least=2)
    run.train(A, B)
    run.steps(7, A, B)
    if noticed:
        run.hear(PeerDisconnected(A, "reset"))
    run.now_s += LIMITS.regreet_s / 2
    assert run.join(A) == ["Welcome", "RunStateUpdate"]
    assert [x.fields for x in run.notes("lost")] == [
        {"name": "a", "reason": "its process has ended, and another process joined with its key"}
    ]
    assert run.frozen() == [(B, (A,))]
    run.enter(A, SETUP)
    report(run, B, 7)
    assert run.view.applied == 6
    assert run.joining() == {B: False, A: True}


def test_the_reason_for_a_new_generation_has_the_name_of_the_process_that_has_ended() -> None:
    run = Run(least=2)
    run.train(A, B)
    run.hear(PeerDisconnected(A, "reset"))
    while not run.notes("lost"):
        run.now_s = max(run.now_s, run.core.deadline_s)
        run.steps(7, B)
        run.tick()
    run.say(A, m.Join("r", "new", "memory://a"))
    assert run.core.run.view_change.reason == (
        "a is lost: its process has ended, and another process joined with its key"
    )


def test_a_new_process_alone_begins_from_its_checkpoint_and_the_rollback_is_logged() -> None:
    """The run must not continue from the step at which the generation began."""
    run = Run()
    run.train(A)
    run.steps(9, A)
    run.join(A)
    assert run.core.phase is RunPhase.WAITING
    run.enter(A, replace(SETUP, checkpoint=CHECKPOINT))
    run.form()
    assert [x.fields for x in run.notes("rollback")] == [{"from": 9, "to": 5}]
    assert run.view.applied == 4
    assert run.view.ledger.restart_generation == 0
    assert not [x for x in sent(run.seen, m.RunStateUpdate) if "start at step 0, because" in x.reason]


def test_a_new_process_without_a_checkpoint_is_told_that_it_begins_a_run_again() -> None:
    run = Run()
    run.train(A)
    run.steps(9, A)
    run.join(A)
    run.enter(A)
    run.form()
    assert run.view.ledger == m.LedgerState(restart_generation=run.view.generation), "another history"
    assert run.view.applied == -1 and [x.fields for x in run.notes("rollback")] == [{"from": 9, "to": 0}]
    told = [x.reason for x in sent(run.seen, m.RunStateUpdate)]
    assert told[-1] == (
        "waiting for the run to start at step 0, because no connected worker has a checkpoint of its 9 "
        "steps; to continue from a checkpoint instead, stop this worker and first start one that has a "
        "checkpoint"
    )


def while_a_builds_its_model() -> Run:
    """The only member A is at step 9 and is replaced by another process; B joins without a checkpoint."""
    run = Run()
    run.train(A)
    run.steps(9, A)
    run.join(A)
    run.join(B), run.enter(B)
    return run


def test_a_run_does_not_begin_again_while_a_worker_that_may_have_a_checkpoint_builds_its_model() -> None:
    run = while_a_builds_its_model()
    run.pass_to(run.now_s + LIMITS.regather_s - 0.1, A, B)
    assert run.core.generation == 1
    run.enter(A, replace(SETUP, checkpoint=CHECKPOINT))
    run.pass_to(run.now_s + LIMITS.settle_s, A, B)
    assert [x.fields for x in run.notes("rollback")] == [{"from": 9, "to": 5}]
    assert run.joining() == {A: False, B: True}


def test_a_run_begins_again_if_the_worker_that_may_have_a_checkpoint_never_sends_its_setup() -> None:
    run = while_a_builds_its_model()
    joined_s = run.now_s
    run.pass_to(joined_s + LIMITS.regather_s - 0.1, A, B)
    assert run.core.generation == 1
    run.pass_to(joined_s + LIMITS.regather_s, A, B)
    assert run.joining() == {B: False}
    assert [x.fields for x in run.notes("rollback")] == [{"from": 9, "to": 0}]


def test_a_member_that_returns_between_generations_is_not_told_to_start_the_abandoned_one() -> None:
    """B and C cannot reach A, so that generation 1 never starts; its successor follows after a gap."""
    run = Run(least=3)
    for peer in (A, B, C):
        run.join(peer), run.enter(peer)
    run.form()
    run.ready(A)
    for peer in (B, C):
        run.say(peer, m.PeersUnreachable(1, 1, (A,)))
    run.tick(LIMITS.generation_gap_s / 2)
    assert run.core.run.view_change.is_idle and run.core.generation == 1
    run.hear(PeerDisconnected(A, "reset"))
    assert run.join(A, again=True, generation=1)[-1] == "MembershipView"
    assert not sent(run.seen, m.StartGeneration)


def test_the_readiness_of_the_old_process_does_not_count() -> None:
    run = Run(least=2)
    for peer in (A, B):
        run.join(peer), run.enter(peer)
    run.form()
    run.ready(A)
    run.join(A)
    run.ready(B)
    assert run.core.phase is not RunPhase.TRAINING
    assert not sent(run.seen, m.StartGeneration)


def test_a_newcomer_is_included_only_once_its_new_process_has_sent_its_setup() -> None:
    """Otherwise the others would wait while its script builds the model."""
    run = Run()
    run.train(A)
    run.join(B), run.enter(B)
    run.join(B)
    run.tick(LIMITS.generation_gap_s)
    report(run, A, 1)
    assert run.joining() == {A: False}
    run.ready(A)
    run.enter(B)
    run.tick(LIMITS.generation_gap_s)
    report(run, A, 1)
    assert run.joining() == {A: False, B: True}


def restarted() -> tuple[Run, Run]:
    """The coordinator of a run in which A and B train, and one restarted from its journal."""
    run = Run(least=2)
    run.train(A, B)
    return run, Run(least=2, journal=run.journal)


def test_a_restarted_coordinator_treats_the_new_process_as_a_newcomer() -> None:
    """The journal names A; A' could only report the initial state."""
    _, again = restarted()
    assert "MembershipView" not in again.join(A)
    again.enter(A)
    again.join(B, again=True, generation=1)
    again.enter(B)
    assert again.frozen() == [(B, (A,))]
    report(again, B, 7)
    assert again.joining() == {B: False, A: True}


def test_a_process_that_was_welcomed_but_had_no_rank_is_a_new_process() -> None:
    run, again = restarted()
    assert "MembershipView" not in again.join(A, again=True)
    assert "MembershipView" not in run.join(A, again=True), "also if another coordinator welcomed it"
    assert run.frozen() == [(B, (A,))]


def test_a_member_that_only_reconnects_keeps_its_rank() -> None:
    run = Run(least=2)
    run.train(A, B)
    run.hear(PeerDisconnected(A, "reset"))
    assert run.join(A, again=True, generation=1)[-2:] == ["MembershipView", "StartGeneration"]
    assert [x.fields for x in run.notes("lost")] == [] and run.frozen() == []


def test_a_report_of_the_new_process_does_not_count_as_the_old_ones() -> None:
    """The new process may report its checkpoint as its state."""
    run = Run(least=3)
    run.train(A, B, C)
    run.steps(9, A, B, C)
    run.join(A), run.enter(A)
    report(run, A, 5)
    report(run, B, 9)
    report(run, C, 9)
    assert run.view.applied == 8
    assert run.joining() == {A: True, B: False, C: False}


def member(checkpoint: m.CheckpointInfo | None = None) -> ScriptedMember:
    return ScriptedMember(A, replace(SETUP, checkpoint=checkpoint), neighbours=no_neighbours, limits=LIMITS)


def joins(member: ScriptedMember) -> list[m.Message]:
    member.hear(member_events.PeerDisconnected(ME, "reset"))
    effects = member.hear(member_events.PeerConnected(ME))
    return [effect.message for effect in effects if isinstance(effect, member_events.Send)]


def begin_generation(member: ScriptedMember, *, joining: bool) -> None:
    members = (m.Member(A, "a", "", 4, joining), m.Member(B, "b", "", 4, False))
    state = m.LedgerState(step=10, cursor=40, consumed=40)
    member.install(3, members, applied=9, history=b"h" * 32, ledger=state)


def test_a_join_says_whether_the_process_is_known_and_its_generation() -> None:
    fresh = MemberCore(A, ME, m.Join("r", "a", ""), LIMITS)
    (first,) = fresh.handle(member_events.PeerConnected(ME), 0.0)
    assert first == member_events.Send(ME, m.Join("r", "a", "", True, False, 0))
    welcomed = member()
    assert joins(welcomed) == [m.Join("r", "a", "", True, True, 0)]
    begin_generation(welcomed, joining=True)
    assert joins(welcomed) == [m.Join("r", "a", "", True, True, 3)]


@pytest.mark.parametrize(
    "checkpoint", [None, m.CheckpointInfo(14, b"x" * 32, m.LedgerState(step=15, cursor=60, consumed=60))]
)
def test_a_start_for_which_this_process_was_not_ready_is_ignored(checkpoint: m.CheckpointInfo | None) -> None:
    """Another process sent `Ready` with this key."""
    unready = member(checkpoint)
    begin_generation(unready, joining=False)
    effects = unready.say(m.StartGeneration(1, 3))
    assert unready.core.phase is member_events.MemberPhase.FORMING and unready.core.next_round is None
    assert [e.event for e in effects if isinstance(e, member_events.LogEvent)] == ["not_ready"]
