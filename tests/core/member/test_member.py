"""A worker's state machine: known peers, dialling, violations, and messages that are repeated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scripted_member import COORDINATOR, SETUP, ScriptedMember

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.commit.two_phase_commit import EMPTY_HISTORY, extend_history
from gridtrain.core.group import member_events as ev
from gridtrain.core.member.member import MemberCore
from gridtrain.core.member.required_peers import RECONNECT_SHARE
from gridtrain.core.member.scalar_means import KNOWN_INDEX, SUBMITTED_INDEX
from gridtrain.errors import RemoteProtocolError

ME, A, B, C, J = (letter * 32 for letter in (b"m", b"a", b"b", b"c", b"j"))
LIMITS = Deadlines(route_s=8.0)


class Worker(ScriptedMember):
    """A member core, and views of its generations."""

    def __init__(self, setup: m.Setup = SETUP, *, may_be_absent: bool = False) -> None:
        super().__init__(ME, setup, address="tcp://me:1", limits=LIMITS, may_be_absent=may_be_absent)

    def view(self, generation: int, **addresses: str) -> list[ev.MemberEffect]:
        """A generation of other workers, by letter, and this one at the last rank."""
        addresses_by_peer = {name.encode() * 32: address for name, address in addresses.items()} | {ME: ""}
        return self.install(
            generation,
            (m.Member(p, p[:1].decode(), address, 4, False) for p, address in addresses_by_peer.items()),
        )


def dials(effects: list[ev.MemberEffect]) -> dict[m.PeerId, str]:
    return {effect.peer: effect.address for effect in effects if isinstance(effect, ev.Dial)}


def logged(effects: list[ev.MemberEffect]) -> list[ev.LogEvent]:
    return [effect for effect in effects if isinstance(effect, ev.LogEvent)]


def test_known_peers_are_the_coordinator_and_then_the_members() -> None:
    worker = Worker()
    assert worker.core.known_peers == {COORDINATOR}
    worker.view(1, a="tcp://a:1", b="tcp://b:1")
    assert worker.core.known_peers == {COORDINATOR, ME, A, B}
    worker.hear(ev.PeerConnected(A)), worker.hear(ev.PeerConnected(B))
    effects = worker.view(2, b="tcp://b:1")
    assert worker.core.known_peers == {COORDINATOR, ME, B}
    assert ev.Disconnect(A) in effects and ev.Disconnect(B) not in effects


def test_a_member_dials_addresses_and_relays() -> None:
    worker = Worker()
    relayed = "relay:" + B.hex()
    assert dials(worker.view(1, a=relayed, b="tcp://b:1")) == {A: relayed, B: "tcp://b:1"}
    through_the_coordinator = "relay:" + COORDINATOR.hex()
    assert dials(worker.view(2, a=through_the_coordinator, b="")) == {A: through_the_coordinator}


def test_an_announced_peer_is_known_until_the_generation_after_the_next() -> None:
    worker = Worker()
    worker.view(1, a="")
    assert dials(worker.say(m.ExpectProbes(((J, "tcp://j:1"), (B, ""))))) == {J: "tcp://j:1"}
    assert {J, B} <= worker.core.known_peers
    worker.view(2, a="", b="")
    assert J in worker.core.known_peers
    worker.view(3, a="")
    assert J not in worker.core.known_peers and B not in worker.core.known_peers


def test_only_the_coordinator_announces() -> None:
    worker = Worker()
    worker.view(1, a="")
    with pytest.raises(Exception, match="only the coordinator may send it"):
        worker.say(m.ExpectProbes(((J, ""),)), peer=A)
    assert J not in worker.core.known_peers


def test_the_dialling_member_reports_an_unreachable_peer_once() -> None:
    worker = Worker()
    worker.view(1, a="tcp://a:1", b="")
    assert worker.core.deadline_s == LIMITS.route_s
    worker.now_s = LIMITS.route_s
    (effect,) = [e for e in worker.core.tick(worker.now_s) if isinstance(e, ev.Send)]
    assert effect == ev.Send(COORDINATOR, m.PeersUnreachable(1, 1, (A,)))
    assert worker.core.deadline_s == float("inf")


def test_unreachable_sources_are_reported_once_for_each_list_of_addresses() -> None:
    worker = Worker()
    worker.say(m.Admitted(((A, "tcp://a:1"), (B, ""), (J, "tcp://j:1"))))
    worker.say(m.CatchUpFrom(1, ((A, "tcp://a:1"), (B, ""))))
    worker.hear(ev.PeerConnected(J))
    assert worker.core.deadline_s == LIMITS.route_s
    assert worker.core.tick(LIMITS.route_s - 0.1) == []
    worker.now_s = LIMITS.route_s
    reports = sent_messages(worker.core.tick(worker.now_s))
    assert reports == [m.PeersUnreachable(1, 0, (A, B))], "not of J, which might be a relay"
    assert worker.core.deadline_s == float("inf")
    relayed = "relay:" + J.hex()
    assert dials(worker.say(m.CatchUpFrom(1, ((A, relayed), (B, ""))))) == {A: relayed}
    worker.hear(ev.PeerConnected(A))
    assert worker.core.deadline_s == float("inf"), "one source is enough"
    worker.hear(ev.PeerDisconnected(A, "reset"))
    assert worker.core.deadline_s == worker.now_s + LIMITS.route_s, "the connection may be restored"
    worker.hear(ev.PeerConnected(A))
    assert worker.core.tick(worker.now_s + 2 * LIMITS.route_s) == []


def test_a_violator_is_excluded_and_reported_once_until_the_next_generation() -> None:
    worker = Worker()
    worker.view(1, a="tcp://a:1", b="")
    worker.hear(ev.PeerConnected(A)), worker.hear(ev.PeerConnected(B))
    effects = worker.hear(ev.ProtocolViolation(A, "sent NaN"))
    assert ev.Disconnect(A) in effects
    assert ev.LogEvent("offence", {"peer": A.hex()[:8], "reason": "sent NaN"}) in effects
    assert ev.Send(COORDINATOR, m.ViolationReport(A, "sent NaN")) in effects
    assert A not in worker.core.known_peers
    assert worker.hear(ev.ProtocolViolation(A, "sent NaN again")) == [ev.Disconnect(A)]
    worker.view(2, a="tcp://a:1", b="")
    assert A in worker.core.known_peers


def test_a_violator_outside_of_the_generation_is_not_reported() -> None:
    worker = Worker()
    worker.view(1, a="")
    worker.say(m.ExpectProbes(((J, ""),)))
    effects = worker.hear(ev.ProtocolViolation(J, "sent garbage"))
    assert ev.Disconnect(J) in effects and not [e for e in effects if isinstance(e, ev.Send)]


def test_from_a_source_that_violated_the_protocol_nothing_is_copied() -> None:
    worker = Worker(replace(SETUP, can_catch_up=True))
    worker.say(m.CatchUpFrom(1, ((A, "tcp://a:1"), (B, ""))))
    worker.hear(ev.PeerConnected(A))
    assert ev.SourceDisconnected(A) in worker.hear(ev.ProtocolViolation(A, "sent garbage"))


@pytest.mark.parametrize("bounds", [(1, 2, 3), (0, 2, 1, 3), (0, 1, 1, 3), (0, 1, 2), (0,)])
def test_a_partition_that_is_none_of_the_model_is_refused(bounds: tuple[int, ...]) -> None:
    worker = Worker(replace(SETUP, stages=3))
    members = [m.Member(peer, peer[:1].decode(), "", 4, False) for peer in (ME, A, B)]
    with pytest.raises(RemoteProtocolError, match="divides a model of 3 layers"):
        worker.install(1, members, bounds=bounds)


@pytest.mark.parametrize(
    "ledger",
    [
        m.LedgerState(step=1),
        m.LedgerState(requeued=(m.Span(0, 2**63 - 1),)),
        m.LedgerState(cursor=4, holders=((B, (m.Span(0, 4),)),)),
    ],
    ids=["another step", "too many positions", "held by a stranger"],
)
def test_a_ledger_that_no_run_can_have_is_refused(ledger: m.LedgerState) -> None:
    members = [m.Member(peer, peer[:1].decode(), "", 4, False) for peer in (ME, A)]
    with pytest.raises(RemoteProtocolError, match="the ledger from the coordinator"):
        Worker().install(1, members, ledger=ledger)


def test_a_worker_that_has_not_reached_its_coordinator_yet_is_not_paused() -> None:
    core = MemberCore(ME, COORDINATOR, m.Join("r", "me", ""), LIMITS)
    assert core.pause_reason == ""
    worker = Worker()
    worker.hear(ev.PeerDisconnected(COORDINATOR, "reset"))
    assert "needs the coordinator" in worker.core.pause_reason


def test_a_worker_is_paused_while_an_earlier_coordinator_answers() -> None:
    """Otherwise it would wait indefinitely for a later coordinator that has ended."""
    worker = Worker()
    worker.say(m.Welcome(3, "r", ""))
    for term, is_paused in ((2, True), (3, False)):
        worker.hear(ev.PeerDisconnected(COORDINATOR, "reset"))
        worker.hear(ev.PeerConnected(COORDINATOR))
        worker.say(m.Welcome(term, "r", ""))
        assert bool(worker.core.pause_reason) == is_paused


def test_the_state_is_sent_until_the_generation_starts() -> None:
    worker = Worker()
    worker.view(1, a="")
    worker.hear(ev.PeerConnected(A))
    sent = [any(isinstance(e, ev.SendState) for e in worker.say(m.StateRequest(1, 1), A))]
    worker.say(m.StartGeneration(1, 1))
    sent += [any(isinstance(e, ev.SendState) for e in worker.say(m.StateRequest(1, 1), A))]
    assert sent == [True, False]


def test_a_root_that_aborts_and_requests_no_freeze_is_reported() -> None:
    worker = Worker()
    worker.view(1, a="")
    worker.hear(ev.PeerConnected(A))
    worker.say(m.StartGeneration(1, 1))
    for attempt in range(2):
        assert worker.core.next_round == m.RoundId(1, 1, 0, attempt)
        worker.hear(ev.SubmitRound(m.RoundId(1, 1, 0, attempt), {}))
        worker.say(m.Decision(m.RoundId(1, 1, 0, attempt), m.Verdict.ABORT, "on purpose"), A)
    assert worker.core.next_round is None
    stalled: list[tuple[float, m.RoundStalled]] = []
    for number in range(1, 5):
        worker.now_s = number * LIMITS.first_step_s / 2
        sent = [e.message for e in worker.hear(ev.HeartbeatDue(0, True, ())) if isinstance(e, ev.Send)]
        stalled += [(worker.now_s, message) for message in sent if isinstance(message, m.RoundStalled)]
    assert [(at_s, report.suspects) for at_s, report in stalled] == [(LIMITS.first_step_s, (A,))]


@pytest.mark.parametrize(("delay", "reported"), [(0, [0]), (1, [])])
def test_a_member_that_waits_in_a_round_reports_that_it_makes_no_more_calls(
    delay: int, reported: list[int]
) -> None:
    """With a delay, its trainer is already computing the next batch, and may call `grid.mean` for it."""
    worker = Worker(replace(SETUP, ledger=replace(SETUP.ledger, delay=delay)))
    worker.view(1, a="")
    worker.hear(ev.PeerConnected(A))
    worker.say(m.StartGeneration(1, 1))

    def beat() -> list[int]:
        sent = sent_messages(worker.hear(ev.HeartbeatDue(0, True, ())))
        return [x.step for x in sent if isinstance(x, m.MeanRequest) and x.index == SUBMITTED_INDEX]

    worker.say(m.MeanReply(1, 1, 0, SUBMITTED_INDEX, 1.0), A)
    assert beat() == [], "it may still call"
    worker.hear(ev.SubmitRound(m.RoundId(1, 1, 0, 0), {}))
    assert [beat(), beat()] == [reported, []]
    worker.hear(ev.PeerConnected(A))
    assert beat() == reported, "it may have been lost"


def test_a_round_that_is_over_does_not_begin_again() -> None:
    worker = Worker()
    worker.view(1, a="")
    worker.hear(ev.PeerConnected(A))
    worker.say(m.StartGeneration(1, 1))
    first, second = (m.RoundId(1, 1, 0, attempt) for attempt in range(2))
    worker.hear(ev.SubmitRound(first, {}))
    worker.say(m.Decision(first, m.Verdict.ABORT, "on purpose"), A)
    refused = ev.ResolveRound(first, False, 0, "the round can no longer begin")
    assert worker.hear(ev.SubmitRound(first, {})) == [refused]
    assert worker.core.next_round == second


def test_members_that_a_freeze_removes_are_disconnected_at_once() -> None:
    worker = Worker()
    worker.view(1, a="tcp://a:1", b="")
    worker.hear(ev.PeerConnected(A)), worker.hear(ev.PeerConnected(B))
    effects = worker.say(m.Freeze(1, 1, "a was removed", (A,)))
    assert ev.Disconnect(A) in effects
    assert worker.core.known_peers == {COORDINATOR, ME, B}


def test_several_rejoins_lead_to_one_join() -> None:
    """For example if all messages of an interrupted connection arrive at once."""
    worker = Worker()
    joins = [e for _ in range(24) for e in worker.say(m.Rejoin("you are not registered"))]
    assert [e.message for e in joins if isinstance(e, ev.Send)] == [
        m.Join("r", "m", "tcp://me:1", is_rejoin=True)
    ]


def sent_messages(effects: list[ev.MemberEffect]) -> list[m.Message]:
    return [effect.message for effect in effects if isinstance(effect, ev.Send)]


def test_a_mean_is_requested_again_when_the_root_reconnects() -> None:
    """Between two steps there is no open round whose end would end the wait."""
    worker = Worker()
    worker.hear(ev.PeerConnected(A))
    worker.view(1, a="tcp://a:1")
    worker.say(m.StartGeneration(1, 1))
    (request,) = sent_messages(worker.hear(ev.RequestMean(0, 0, 1.5)))
    worker.hear(ev.PeerDisconnected(A, "reset"))
    assert request in sent_messages(worker.hear(ev.PeerConnected(A)))
    worker.say(m.MeanReply(1, 1, 0, 0, 1.0), A)
    assert request not in sent_messages(worker.hear(ev.PeerConnected(A)))


@pytest.mark.parametrize("may_be_absent", [False, True])
def test_a_mean_is_received_while_frozen_and_known_until_steps_are_repeated(may_be_absent: bool) -> None:
    """If its trainer may be absent, the member reports the mean before the trainer repeats its call."""
    worker = Worker(may_be_absent=may_be_absent)
    worker.hear(ev.PeerConnected(A))
    worker.view(1, a="tcp://a:1")
    worker.say(m.StartGeneration(1, 1))
    worker.hear(ev.RequestMean(0, 0, 1.5)), worker.hear(ev.RequestMean(0, 1, 1.5))
    worker.say(m.Freeze(1, 1, "b joins"))
    assert worker.say(m.MeanReply(1, 1, 0, 1, 1.0), A) == [ev.DeliverMean(0, 1, 1.0)]
    worker.hear(ev.RequestMean(0, 2, 1.5))
    worker.view(2, a="tcp://a:1")
    reported = sent_messages(worker.say(m.StartGeneration(1, 2)))
    (repeated,) = sent_messages(worker.hear(ev.RequestMean(0, 1, 1.5)))
    assert repeated == m.MeanRequest(1, 2, 0, KNOWN_INDEX + 1, 1.0)
    assert reported == [repeated] * may_be_absent


def test_unreachable_peers_are_reported_again_to_a_coordinator_that_reconnects() -> None:
    worker = Worker()
    worker.view(1, a="tcp://a:1", b="tcp://b:1")
    worker.hear(ev.PeerConnected(A))
    worker.hear(ev.PeerDisconnected(COORDINATOR, "reset"))
    worker.now_s += LIMITS.route_s
    assert m.PeersUnreachable(1, 1, (B,)) in sent_messages(worker.core.tick(worker.now_s)), (
        "this report is lost"
    )
    worker.hear(ev.PeerConnected(COORDINATOR))
    assert m.PeersUnreachable(1, 1, (B,)) in sent_messages(worker.say(m.Welcome(1, "r", "")))
    worker.hear(ev.PeerConnected(B))
    assert not [
        x for x in sent_messages(worker.say(m.Welcome(1, "r", ""))) if isinstance(x, m.PeersUnreachable)
    ]


def lone_view(
    worker: Worker, generation: int, applied: int, history: bytes, *joining: m.PeerId
) -> list[ev.MemberEffect]:
    """This worker is the only member or, if A joins, the first of two."""
    peers = (ME, A) if joining else (ME,)
    members = tuple(m.Member(p, p[:1].decode(), "", 4, p in joining) for p in peers)
    state = m.LedgerState(step=applied + 1, cursor=4 * applied + 4, consumed=4 * applied + 4)
    return worker.install(generation, members, applied=applied, history=history, ledger=state)


@pytest.mark.parametrize("is_loaded", [True, False], ids=["loaded", "maybe loading"])
def test_a_model_overwritten_by_another_state_cannot_start_the_run(is_loaded: bool) -> None:
    """The state of step 501 arrives; after a Freeze no member holds it, and the run starts at step 0."""
    worker = Worker()
    worker.hear(ev.PeerConnected(A))
    lone_view(worker, 1, 500, b"h" * 32, ME)
    assert worker.say(m.StateBlock(1, 1, 0, 1, b""), A)
    worker.say(m.Freeze(1, 1, "a member left"))
    lone_view(worker, 2, 500, b"h" * 32, ME)
    if is_loaded:
        worker.hear(ev.StateLoaded(1, 1))
    (stop,) = [e for e in lone_view(worker, 3, -1, EMPTY_HISTORY) if isinstance(e, ev.Stop)]
    assert stop.error.code == "stale-model" and not worker.core.is_synced
    assert stop.error.reason.startswith("the run continues from a state that this worker no longer has")
    assert "--restarts" in stop.error.remedy


@pytest.mark.parametrize(
    "event", [ev.StateSnapshotLoading(), ev.CaughtUp(140, b"k" * 32)], ids=["loads", "has loaded"]
)
def test_catch_up_replaces_the_state_of_a_checkpoint(event: ev.MemberEvent) -> None:
    """After a pause at step 100 it catches up to step 140; its checkpoint of step 100 no longer counts."""
    checkpoint = m.CheckpointInfo(99, b"h" * 32, m.LedgerState(step=100, cursor=400, consumed=400))
    worker = Worker(replace(SETUP, checkpoint=checkpoint, can_catch_up=True))
    assert worker.core.is_synced and worker.core.applied == 99 and not worker.core.replica_state.is_modified
    worker.say(m.CatchUpFrom(1, ((A, "tcp://a:1"),)))
    worker.hear(event)
    assert not worker.core.is_synced and worker.core.applied == -1 and worker.core.replica_state.is_modified
    effects = lone_view(worker, 1, 99, b"h" * 32)
    assert [e for e in effects if isinstance(e, ev.Stop)], "the checkpoint is not in memory any more"


def test_catch_up_begins_again_after_a_failure() -> None:
    worker = Worker(replace(SETUP, can_catch_up=True))
    sources = m.CatchUpFrom(1, ((A, "tcp://a:1"),))
    assert ev.BeginCatchUp() in worker.say(sources) and ev.BeginCatchUp() not in worker.say(sources)
    assert sent_messages(worker.hear(ev.CatchUpFailed("the disk is full"))) == [m.CatchUpReport(-1, b"")]
    assert ev.BeginCatchUp() in worker.say(sources)


def test_a_generation_that_ends_before_its_state_arrives_leaves_the_checkpoint_in_memory() -> None:
    """It joins at step 501, whose state is lost before it arrives; the run rolls back to its checkpoint."""
    checkpoint = m.CheckpointInfo(99, b"h" * 32, m.LedgerState(step=100, cursor=400, consumed=400))
    worker = Worker(replace(SETUP, checkpoint=checkpoint))
    lone_view(worker, 1, 500, b"k" * 32, ME)
    worker.say(m.Freeze(1, 1, "the source is gone"))
    assert not worker.core.is_synced and worker.core.applied == 500
    assert m.Ready(1, 2, b"h" * 32) in sent_messages(lone_view(worker, 2, 99, b"h" * 32))
    assert worker.core.is_synced and worker.core.applied == 99


def test_a_state_that_has_arrived_leaves_no_checkpoint_in_memory() -> None:
    """The state of step 501 arrives and may be loaded; the checkpoint's state is not in memory any more."""
    checkpoint = m.CheckpointInfo(99, b"h" * 32, m.LedgerState(step=100, cursor=400, consumed=400))
    worker = Worker(replace(SETUP, checkpoint=checkpoint))
    worker.hear(ev.PeerConnected(A))
    lone_view(worker, 1, 500, b"k" * 32, ME)
    assert worker.say(m.StateBlock(1, 1, 0, 1, b""), A)
    assert not sent_messages(lone_view(worker, 2, 99, b"h" * 32)) and not worker.core.is_synced


def test_checkpoints_that_are_stored_before_the_first_generation_are_reported_without_one() -> None:
    worker, stored = Worker(), m.CheckpointInfo(4, b"h" * 32, m.LedgerState(), m.Span(0, 2))
    report = ev.Send(COORDINATOR, m.StageCheckpointList((stored,), 0))
    assert worker.hear(ev.StageCheckpointsChanged((stored,), False)) == [report]


def changes(generation: int, base: int, *members: m.Member) -> m.MemberListChanges:
    """Changes of a list whose first entry stays, followed by other members."""
    first = m.Member(A, "a", "tcp://a:1", 4, False)
    digest = m.member_list_digest((first, *members))
    return m.MemberListChanges(
        1, generation, base, (m.Span(0, 1), m.Span(3, 3 + len(members))), members, digest
    )


def test_a_member_list_may_be_sent_as_changes() -> None:
    worker = Worker()
    worker.view(1, a="tcp://a:1", b="tcp://b:1")
    mine, new = m.Member(ME, "me", "", 8, False), m.Member(C, "c", "tcp://c:1", 4, False)
    assert worker.say(changes(2, 1, mine, new)) == []
    assert dials(worker.say(verdict(worker, 2, 3))) == {A: "tcp://a:1", C: "tcp://c:1"}
    assert worker.core.generation == 2 and worker.core.known_peers == {COORDINATOR, ME, A, C}


@pytest.mark.parametrize(("base", "name"), [(2, "me"), (1, "another")], ids=["generation", "digest"])
def test_changes_of_another_list_lead_to_a_rejoin(base: int, name: str) -> None:
    worker = Worker()
    worker.view(1, a="tcp://a:1", b="tcp://b:1")
    wrong = changes(3, base, m.Member(ME, "me", "", 8, False))
    wrong = replace(wrong, members=(m.Member(ME, name, "", 8, False),))
    joins = [x.message for x in worker.say(wrong) if isinstance(x, ev.Send)]
    assert joins == [m.Join("r", "m", "tcp://me:1", True, True, 1)]
    assert worker.say(verdict(worker, 3, 2)) == [] and worker.core.generation == 1
    worker.say(m.Welcome(1, "r", ""))
    worker.view(3, a="tcp://a:1")
    assert worker.core.generation == 3


def test_the_digest_of_a_list_covers_every_field() -> None:
    member = m.Member(A, "a", "x", 4, False)
    other = m.Member(
        B, "b", "y", 5, True, 1, ((m.Span(0, 1), 2),), b"d", (b"p",), entries_share=m.WHOLE_SHARE // 2
    )
    lists = [(replace(member, **{name: getattr(other, name)}),) for name in m.Member.__dataclass_fields__]
    digests = {m.member_list_digest(members) for members in ((), (member,), (member, member), *lists)}
    assert len(digests) == 3 + len(lists)


def verdict(worker: Worker, generation: int, members: int) -> m.MembershipView:
    history, ledger = worker.core.history, m.LedgerState()
    return m.MembershipView(1, generation, members, m.Verdict.ABORT, None, -1, history, ledger, "")


def test_a_run_that_its_owner_ends_is_over_for_a_member_that_holds_its_state() -> None:
    """The same member begins a round, and asks for a mean, where the run goes on."""
    for ended in (False, True):
        worker = Worker()
        worker.view(1, a="")
        worker.hear(ev.PeerConnected(A))
        if ended:
            worker.say(m.RunStateUpdate("finished", "its owner has ended it after 0 steps"))
        finished = m.RunFinished(-1, EMPTY_HISTORY)
        assert (finished in sent_messages(worker.say(m.StartGeneration(1, 1)))) == ended
        assert (worker.core.next_round is None) == worker.core.is_finished == ended
        asked = worker.hear(ev.RequestMean(0, 0, 1.5))
        assert (ev.DeliverMean(0, 0, None) in asked) == ended, "the others may not call it any more"
        worker.hear(ev.PeerDisconnected(A, "it has left"))
        assert (worker.core.deadline_s == float("inf")) == ended, "a connection is not missed any more"


@pytest.mark.parametrize("is_declared", [False, True])
def test_after_the_end_of_a_run_a_lost_connection_is_no_stall(is_declared: bool) -> None:
    """Until the coordinator declares the end, another member may still need the last decision."""
    worker = Worker()
    at_end = m.LedgerState(cursor=SETUP.ledger.size, consumed=SETUP.ledger.size)
    members = [m.Member(A, "a", "", 4, False), m.Member(ME, "m", "", 4, False)]
    worker.install(1, members, ledger=at_end)
    worker.hear(ev.PeerConnected(A))
    worker.say(m.StartGeneration(1, 1))
    assert worker.core.is_finished and not worker.core.is_ended_early
    if is_declared:
        worker.say(m.RunStateUpdate("finished", "2 workers reached the end of the run"))
    worker.hear(ev.PeerDisconnected(A, "it has left"))
    assert (worker.core.deadline_s == float("inf")) == is_declared
    stalls = sent_messages(worker.core.tick(min(worker.core.deadline_s, 100.0)))
    assert [type(each) for each in stalls] == ([] if is_declared else [m.RoundStalled])


def test_a_lost_connection_is_reported_twice_the_usual_time_after_the_loss_or_the_start() -> None:
    worker = Worker()
    worker.view(1, a="")
    assert worker.core.tick(LIMITS.route_s) == [], "a dials"
    worker.hear(ev.PeerConnected(A)), worker.hear(ev.PeerDisconnected(A, "reset"))
    worker.now_s = 50.0
    worker.say(m.StartGeneration(1, 1))
    for lost_s in (50.0, 70.0):
        worker.now_s = lost_s
        worker.hear(ev.PeerConnected(A)), worker.hear(ev.PeerDisconnected(A, "reset"))
        assert worker.core.deadline_s == lost_s + 2 * LIMITS.regreet_s
    worker.now_s = worker.core.deadline_s
    (report,) = sent_messages(worker.core.tick(worker.now_s))
    assert report == m.RoundStalled(m.RoundId(1, 1, 0, 0), (A,), 0.0, "no connection to a")


def test_a_member_that_dials_a_lost_peer_reports_the_route_with_the_stall() -> None:
    worker = Worker()
    worker.view(1, a="tcp://a:1", b="")
    worker.hear(ev.PeerConnected(A)), worker.hear(ev.PeerConnected(B))
    worker.say(m.StartGeneration(1, 1))
    worker.hear(ev.PeerDisconnected(A, "timed out")), worker.hear(ev.PeerDisconnected(B, "timed out"))
    worker.now_s = worker.core.deadline_s
    unreachable, stalled = sent_messages(worker.core.tick(worker.now_s))
    assert unreachable == m.PeersUnreachable(1, 1, (A,)), "b dials, so b reports this route"
    assert isinstance(stalled, m.RoundStalled) and set(stalled.suspects) == {A, B}


@pytest.mark.parametrize("has_sources", [False, True])
def test_a_worker_that_reaches_nobody_says_so_once(has_sources: bool) -> None:
    worker = Worker()
    if has_sources:
        worker.say(m.CatchUpFrom(1, ((A, "tcp://a:1"),)))
    else:
        worker.view(1, a="tcp://a:1", b="")
        worker.hear(ev.PeerConnected(A)), worker.hear(ev.PeerConnected(B))
        worker.say(m.StartGeneration(1, 1))
        worker.hear(ev.PeerDisconnected(A, "timed out")), worker.hear(ev.PeerDisconnected(B, "timed out"))
    worker.hear(ev.PeerDisconnected(COORDINATOR, "timed out"))
    worker.now_s = worker.core.deadline_s
    assert logged(worker.core.tick(worker.now_s)) == [ev.LogEvent("offline", {})]
    worker.hear(ev.PeerConnected(COORDINATOR))
    worker.say(m.Welcome(1, "r", ""))
    back = worker.core.tick(worker.now_s)
    if not has_sources:
        assert logged(back) == [ev.LogEvent("stalled", {"reason": "no connection to a, b"})]
        assert [type(message) for message in sent_messages(back)] == [m.PeersUnreachable, m.RoundStalled]


def test_a_stall_is_logged_with_names_instead_of_ranks() -> None:
    worker, seen = Worker(), list[ev.MemberEffect]()
    worker.install(1, (m.Member(p, name, "", 4, False) for p, name in ((ME, "me"), (A, "a"), (B, "b"))))
    worker.hear(ev.PeerConnected(A)), worker.hear(ev.PeerConnected(B))
    worker.say(m.StartGeneration(1, 1))
    for attempt in range(2):
        worker.hear(ev.SubmitRound(m.RoundId(1, 1, 0, attempt), {}))
        worker.now_s = worker.core.deadline_s
        seen += worker.core.tick(worker.now_s)
    seen += worker.core.tick(worker.now_s)
    (stalled,) = (message for message in sent_messages(seen) if isinstance(message, m.RoundStalled))
    assert "no progress from rank 0, rank 1, rank 2 for" in stalled.reason
    named = stalled.reason.replace("rank 0, rank 1, rank 2", "me, a, b")
    assert logged(seen)[-1] == ev.LogEvent("stalled", {"reason": named})


def test_a_member_without_a_route_is_logged_by_name_and_once_while_it_is_missing() -> None:
    worker = Worker()
    worker.view(1, a="tcp://a:1", b="")
    expected = [ev.LogEvent("no_route", {"peers": "a at tcp://a:1"})]
    assert logged(worker.core.tick(LIMITS.route_s)) == expected
    repeated = worker.say(m.Welcome(1, "r", ""))
    assert m.PeersUnreachable(1, 1, (A,)) in sent_messages(repeated) and logged(repeated) == []
    worker.hear(ev.PeerConnected(A)), worker.hear(ev.PeerDisconnected(A, "reset"))
    assert logged(worker.core.tick(worker.core.deadline_s)) == expected


def test_the_log_names_only_the_first_peers_without_a_connection() -> None:
    worker, peers = Worker(), [bytes([number]) * 32 for number in range(1, 6)]
    members = [m.Member(peer, f"w{peer[0]}", f"tcp://w{peer[0]}:1", 4, False) for peer in peers]
    worker.install(1, [m.Member(ME, "m", "", 4, False), *members])
    (event,) = logged(worker.core.tick(LIMITS.route_s))
    assert event.fields["peers"] == "w1 at tcp://w1:1, w2 at tcp://w2:1, w3 at tcp://w3:1 and 2 more"
    for peer in peers:
        worker.hear(ev.PeerConnected(peer))
    worker.say(m.StartGeneration(1, 1))
    for peer in peers:
        worker.hear(ev.PeerDisconnected(peer, "timed out"))
    told = {event.event: event.fields for event in logged(worker.core.tick(worker.core.deadline_s))}
    assert told["stalled"] == {"reason": "no connection to w1, w2, w3 and 2 more"}


def test_members_say_which_newcomers_they_wait_for() -> None:
    worker = Worker()
    members = (m.Member(p, p[:1].decode(), "", 4, p == A) for p in (ME, A))
    worker.install(1, members)
    ready = worker.hear(ev.PeerConnected(A))
    assert logged(ready) == [ev.LogEvent("awaited", {"names": ("a",)})]
    generation = worker.core.current_generation
    assert generation is not None and generation.awaited_newcomers == ("a",)
    worker.say(m.StartGeneration(1, 1))
    assert generation.awaited_newcomers == ()


def test_a_peer_that_was_lost_before_the_generation_is_reported_earlier() -> None:
    """Connecting again over the same route takes less time than connecting for the first time."""
    worker = Worker()
    worker.view(1, a="tcp://a:1", b="tcp://b:1")
    worker.hear(ev.PeerConnected(A)), worker.hear(ev.PeerConnected(B))
    worker.hear(ev.PeerDisconnected(A, "timed out"))
    worker.now_s = 100.0
    worker.view(2, a="tcp://a:1", b="tcp://b:1")
    assert worker.core.deadline_s == 100.0 + RECONNECT_SHARE * LIMITS.route_s
    worker.hear(ev.PeerDisconnected(B, "reset"))
    assert worker.core.deadline_s == 100.0 + LIMITS.route_s, "b was not lost before"
    worker.hear(ev.PeerConnected(B)), worker.hear(ev.PeerConnected(A))
    worker.now_s = 200.0
    worker.view(3, a="tcp://a:1", b="tcp://b:1")
    worker.hear(ev.PeerDisconnected(A, "reset"))
    assert worker.core.deadline_s == 200.0 + LIMITS.route_s, "a was back meanwhile"


def test_a_member_that_stalled_itself_gives_a_lost_peer_its_time() -> None:
    """As after a suspension: connections are made only once the loop runs again."""
    worker = Worker()
    worker.view(1, a="tcp://a:1")
    worker.hear(ev.PeerConnected(A)), worker.hear(ev.PeerDisconnected(A, "timed out"))
    worker.view(2, a="tcp://a:1")
    assert worker.core.deadline_s == RECONNECT_SHARE * LIMITS.route_s
    worker.core._view_changes.generation.extend_timeouts(100.0)
    assert worker.core.deadline_s == 100.0


def test_a_peer_that_was_disconnected_for_a_violation_keeps_its_route() -> None:
    worker = Worker()
    worker.view(1, a="tcp://a:1")
    worker.hear(ev.PeerConnected(A))
    worker.say(m.StartGeneration(1, 1))
    worker.hear(ev.ProtocolViolation(A, "sent garbage"))
    worker.now_s = worker.core.deadline_s
    assert [type(each) for each in sent_messages(worker.core.tick(worker.now_s))] == [m.RoundStalled]


def test_without_its_coordinator_a_member_trains_until_it_needs_it() -> None:
    worker = Worker()
    worker.hear(ev.PeerConnected(A))
    worker.hear(ev.PeerDisconnected(COORDINATOR, "reset"))
    reasons = []
    for event in (
        lambda: worker.view(1, a=""),
        lambda: worker.say(m.StartGeneration(1, 1)),
        lambda: worker.hear(ev.PeerDisconnected(A, "reset")),
        lambda: worker.core.tick(worker.core.deadline_s) and worker.hear(ev.PeerConnected(A)),
    ):
        event()
        reasons.append(worker.core.pause_reason)
    assert [reason.partition(",")[0].partition(";")[0] for reason in reasons] == [
        "the next generation needs the coordinator",
        "",
        "the connection to 1 peer is lost",
        "a step cannot be committed",
    ]


def test_a_violation_of_the_coordinator_is_only_logged() -> None:
    (logged,) = Worker().hear(ev.ProtocolViolation(COORDINATOR, "sent garbage"))
    assert logged == ev.LogEvent("offence", {"peer": "the coordinator", "reason": "sent garbage"})


@pytest.mark.parametrize(
    ("state", "logged"), [("training", "coordinator_away"), ("finished", "coordinator_ended")]
)
def test_the_log_says_whether_the_coordinator_left_a_finished_run(state: Any, logged: str) -> None:
    worker = Worker()
    worker.say(m.RunStateUpdate(state, ""))
    effects = worker.hear(ev.PeerDisconnected(COORDINATOR, "reset"))
    assert effects == [ev.LogEvent(logged, {"reason": "reset"})]


def test_a_state_that_was_loaded_too_late_is_not_the_initial_one() -> None:
    worker, digests = Worker(replace(SETUP, initial_state_digest=b"as built")), []
    for _ in range(2):
        sent = sent_messages(worker.say(m.Welcome(1, "r", "")))
        digests += [message.initial_state_digest for message in sent if isinstance(message, m.Setup)]
        worker.hear(ev.StateLoaded(1, 1))
    assert digests == [b"as built", b""]


def test_an_admitted_worker_dials_and_probes_the_others() -> None:
    targets, worker = ((A, "tcp://a:1"), (B, "")), Worker()
    effects = worker.say(m.Admitted(targets))
    assert dials(effects) == {A: "tcp://a:1"} and ev.ProbePeers(targets) in effects
    assert {A, B} <= worker.core.known_peers


def test_a_member_that_measures_its_links_again_has_more_time() -> None:
    targets, worker = ((A, "tcp://a:1"),), Worker()
    worker.view(1, a="")
    assert ev.ProbePeers(targets, is_member=True) in worker.say(m.Admitted(targets))


def test_a_state_that_is_requested_before_the_generation_is_known_is_sent_when_it_is() -> None:
    worker = Worker()
    worker.view(1, a="")
    worker.hear(ev.PeerConnected(A))
    assert worker.say(m.StateRequest(1, 2), A) == []
    assert [e.peer for e in worker.view(2, a="") if isinstance(e, ev.SendState)] == [A]


@pytest.mark.parametrize(
    "ended", [m.LedgerState(), m.LedgerState(step=1, cursor=100, consumed=100)], ids=["goes on", "is over"]
)
def test_a_round_that_is_open_on_standby_is_aborted(ended: m.LedgerState) -> None:
    worker = Worker()
    worker.view(1, a="")
    worker.hear(ev.PeerConnected(A))
    worker.say(m.StartGeneration(1, 1))
    worker.hear(ev.SubmitRound(m.RoundId(1, 1, 0, 0), {}))
    worker.say(m.Freeze(1, 1, "b returns"))
    open_round, before = m.RoundId(1, 1, 0, 0), worker.core.current_generation
    assert before is not None and before.doomed_round == open_round
    assert worker.say(m.StandbyNotice(1, 1, None, -1, EMPTY_HISTORY, ended, "outdated")) == []
    effects = worker.say(m.StandbyNotice(1, 2, None, -1, EMPTY_HISTORY, ended, "b is faster"))
    assert ev.ResolveRound(open_round, False, 0, "b is faster") in effects
    after = worker.core.current_generation
    assert (after is None) == (ended.step == 0) and worker.core.next_round is None
    assert after is None or after.doomed_round is None


@pytest.mark.parametrize("case", ["ready", "waits for a state", "frozen before it is ready"])
def test_checkpoints_of_later_steps_are_discarded_only_by_a_member_that_is_ready(case: str) -> None:
    """The view of a restarted coordinator may name an earlier step than the checkpoint's."""
    worker, later = Worker(), m.CheckpointInfo(900, b"k" * 32, m.LedgerState(), m.Span(0, 1))
    if case == "frozen before it is ready":
        worker.view(1, a="")
        worker.say(m.Freeze(1, 1, "a is lost"))
    else:
        lone_view(worker, 1, *((-1, EMPTY_HISTORY) if case == "ready" else (500, b"h" * 32, ME)))
    effects = worker.hear(ev.StageCheckpointsChanged((later,)))
    assert (ev.DiscardCheckpoints(worker.core.applied) in effects) == (case == "ready")


@pytest.mark.parametrize("prepared", [False, True])
def test_a_member_that_the_group_left_behind_catches_up_outside_its_generation(prepared: bool) -> None:
    """Unless it has prepared an update, which the others may have committed: the next view decides."""
    worker = Worker(replace(SETUP, can_catch_up=True))
    worker.hear(ev.PeerConnected(A))
    worker.install(1, [m.Member(A, "a", "tcp://a:1", 4, False), m.Member(ME, "m", "", 4, False)])
    worker.say(m.StartGeneration(1, 1))
    round_id = worker.core.next_round
    assert round_id is not None
    worker.hear(ev.SubmitRound(round_id, {}))
    if prepared:
        worker.hear(ev.DigestComputed(b"d" * 32))
    effects = worker.say(m.CatchUpFrom(1, ((A, "tcp://a:1"),)))
    resolved = [effect for effect in effects if isinstance(effect, ev.ResolveRound)]
    assert (worker.core.rank_assignment is None) is (ev.BeginCatchUp() in effects) is (not prepared)
    assert [(each.round, each.committed) for each in resolved] == ([] if prepared else [(round_id, False)])
    assert worker.core.is_synced, "its state is intact until catch-up overwrites it"
    committed = extend_history(EMPTY_HISTORY, b"d" * 32)
    members = [m.Member(A, "a", "tcp://a:1", 4, False), m.Member(ME, "m", "", 4, True)]
    effects = worker.install(3, members, applied=0, history=committed, decided=round_id)
    assert any(isinstance(e, ev.ResolveRound) and e.committed for e in effects) is prepared
    assert worker.core.is_synced is prepared


@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize(
    "told",
    [
        m.CatchUpFrom(1, ((A, "tcp://a:1"),)),
        m.StandbyNotice(1, 2, None, 20, b"h" * 32, m.LedgerState(step=21), "no rank"),
        m.StandbyNotice(1, 2, None, 21, b"i" * 32, m.LedgerState(step=22), "no rank"),
    ],
    ids=["left behind", "standby", "standby that missed a step"],
)
def test_a_member_that_leaves_before_the_state_arrives_has_no_position(
    told: m.Message, has_state: bool
) -> None:
    """Otherwise its residual, which belongs to an earlier step, would be saved as one of step 21."""
    worker = Worker(replace(SETUP, can_catch_up=True))
    lone_view(worker, 1, 20, b"h" * 32, ME)
    if has_state:
        worker.hear(ev.StateLoaded(1, 1))
    worker.say(told)
    assert worker.core.rank_assignment is None
    position = (20, b"h" * 32) if has_state else (-1, EMPTY_HISTORY)
    assert worker.core.replica_state.position == position


def prepared_worker() -> tuple[Worker, list[m.Member]]:
    """A member of two that has prepared step 0 in generation 1; and the members, as it returns."""
    worker, members = Worker(), [m.Member(A, "a", "tcp://a:1", 4, False), m.Member(ME, "m", "", 4, False)]
    worker.hear(ev.PeerConnected(A))
    worker.install(1, members)
    worker.say(m.StartGeneration(1, 1))
    worker.hear(ev.SubmitRound(m.RoundId(1, 1, 0, 0), {}))
    worker.hear(ev.DigestComputed(b"d" * 32))
    return worker, [members[0], replace(members[1], joining=True)]


def check_prepared_round(effects: list[ev.MemberEffect], committed_in: int | None, *, is_ours: bool) -> None:
    """The round of `prepared_worker` is committed if it `is_ours`; `committed_in` is the generation that the
    coordinator names."""
    (resolved,) = [effect for effect in effects if isinstance(effect, ev.ResolveRound)]
    assert (resolved.round, resolved.committed) == (m.RoundId(1, 1, 0, 0), is_ours)
    assert resolved.is_unknown == (not is_ours and committed_in is None)


@pytest.mark.parametrize(("applied", "is_unknown"), [(-1, False), (0, True), (1, True)])
def test_the_outcome_of_a_prepared_round_is_unknown_if_its_step_is_committed(
    applied: int, is_unknown: bool
) -> None:
    """The member was cut off between its YES and the decision, and the others have other updates."""
    worker, back = prepared_worker()
    history = b"h" * 32 if applied >= 0 else None
    effects = worker.install(3, back, applied=applied, history=history, decided=m.RoundId(1, 1, applied, 0))
    (resolved,) = [effect for effect in effects if isinstance(effect, ev.ResolveRound)]
    assert (resolved.committed, resolved.is_unknown) == (False, is_unknown)


@pytest.mark.parametrize(
    ("committed_in", "joining", "is_ours"),
    [(1, True, True), (2, True, False), (None, True, False), (1, False, True), (None, False, True)],
)
def test_a_member_that_returns_prepared_applies_its_update_unless_the_step_may_be_repeated(
    committed_in: int | None, joining: bool, is_ours: bool
) -> None:
    """The others have committed an equal update without it: its residual would count their samples again."""
    worker, (other, own) = prepared_worker()
    decided = m.RoundId(1, committed_in, 0, 0) if committed_in is not None else None
    history = extend_history(EMPTY_HISTORY, b"d" * 32)
    back = [other, replace(own, joining=joining)]
    effects = worker.install(3, back, applied=0, history=history, decided=decided)
    check_prepared_round(effects, committed_in, is_ours=is_ours)
    requests = [message for message in sent_messages(effects) if isinstance(message, m.StateRequest)]
    assert (worker.core.is_synced, bool(requests)) == (is_ours, not is_ours)


@pytest.mark.parametrize(
    ("committed_in", "is_over", "is_ours"),
    [(1, False, True), (2, False, False), (None, False, False), (2, True, False), (None, True, True)],
)
def test_a_standby_that_was_prepared_applies_its_update_unless_the_step_may_be_repeated(
    committed_in: int | None, is_over: bool, is_ours: bool
) -> None:
    """It returned while the group had no rank for it; the others have committed an equal update."""
    worker, _ = prepared_worker()
    decided = m.RoundId(1, committed_in, 0, 0) if committed_in is not None else None
    ledger = m.LedgerState(step=1, **({"cursor": 100, "consumed": 100} if is_over else {}))
    history = extend_history(EMPTY_HISTORY, b"d" * 32)
    effects = worker.say(m.StandbyNotice(1, 3, decided, 0, history, ledger, "no rank"))
    check_prepared_round(effects, committed_in, is_ours=is_ours)


@pytest.mark.parametrize(
    ("applied", "told"),
    [
        (0, ev.LogEvent("set_back", {"step": 2, "to": 1})),
        (1, ev.LogEvent("left_behind", {"step": 2, "to": 2})),
        (7, ev.LogEvent("left_behind", {"step": 2, "to": 8})),
    ],
)
def test_a_member_that_was_away_is_told_whether_the_group_went_on_or_back(
    applied: int, told: ev.LogEvent
) -> None:
    worker = Worker()
    worker.view(1, a="")
    worker.core.replica_state.commit_step(1, b"d" * 32, m.LedgerState(step=2))
    members = [m.Member(A, "a", "tcp://a:1", 4, False), m.Member(ME, "m", "", 4, True)]
    assert told in worker.install(5, members, applied=applied, history=b"h" * 32)
