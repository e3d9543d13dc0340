"""The daemon carries out the effects of a core in order; journal entries are durable before later effects."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from scripted_daemon import (
    ANNA,
    BERT,
    COORDINATOR,
    INVITATION,
    JOIN,
    NAMES,
    OPERATOR,
    PENDING,
    FakeCore,
    Iterations,
    ScriptedTransport,
    access_handler,
)

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.errors import JournalError
from gridtrain.network.transport.in_memory import MemoryHub, MemoryTransport
from gridtrain.network.transport.interface import (
    ConnectionDenied,
    PeerDown,
    PeerUp,
    ReachResult,
    Received,
    TransportEvent,
    TransportViolation,
    VersionMismatch,
)
from gridtrain.network.wire.codec import encode
from gridtrain_coordinator import daemon
from gridtrain_coordinator.access import authorization_limits
from gridtrain_coordinator.access.authorization import Authorization
from gridtrain_coordinator.access_handler import AccessHandler
from gridtrain_coordinator.daemon import EXIT_DELAY_S, Coordinator, _recover, recover_membership
from gridtrain_coordinator.doctor_checks import Checkups
from gridtrain_coordinator.journal.store import JournalStore
from gridtrain_coordinator.run.events import (
    DialBack,
    DialBackResult,
    Disconnect,
    Effect,
    JournalEntry,
    LogEvent,
    MessageReceived,
    PeerConnected,
    PeerDisconnected,
    ProtocolViolation,
    RecordViolation,
    Send,
    WorkerRemoved,
)


class RecordingStore(JournalStore):
    transcript: list[str]

    def append_all(self, entries: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        entries = list(entries)
        super().append_all(entries)
        self.transcript.append("durable: " + ", ".join(kind for kind, _ in entries))

    def close(self) -> None:
        super().close()
        self.transcript.append("close journal")


def run_loop(
    core: FakeCore,
    *iterations: list[TransportEvent],
    refuses: Iterable[m.PeerId] = (),
    handler: AccessHandler | None = None,
    clock: Callable[[], float] = lambda: 100.0,
    **options: Any,
) -> tuple[list[str], ScriptedTransport]:
    """Runs the loop over these iterations; returns what it did."""
    transcript: list[str] = []
    transport = ScriptedTransport(transcript, iterations)
    transport.refuses = set(refuses)
    store = RecordingStore.open(":memory:")
    assert isinstance(store, RecordingStore)
    store.transcript = transcript

    def log(level: str, event: str, fields: Mapping[str, Any]) -> None:
        transcript.append(f"log {level} {event}")

    handler = handler or access_handler(core, ANNA, BERT)
    coordinator = Coordinator(transport, store, core, handler, log=log, clock=clock, **options)  # type: ignore[arg-type]
    coordinator.run(Iterations(len(iterations)))
    assert transcript[-2:] == ["close transport", "close journal"]
    return transcript[:-2], transport


def test_journal_entries_are_durable_before_messages_are_sent() -> None:
    freeze, state = m.Freeze(1, 1, "join"), JournalEntry("state", {"state": "training"})
    core = FakeCore(
        {
            MessageReceived: [
                state,
                LogEvent("info", "training"),
                Send(ANNA, freeze),
                Send(BERT, freeze),
                Disconnect(BERT),
            ]
        }
    )
    transcript, _ = run_loop(core, [Received(ANNA, JOIN, 80)])
    assert transcript == [
        "durable: state",
        "log info training",
        "send Freeze to anna",
        "send Freeze to bert",
        "hang up on bert",
    ]


def test_one_turn_is_one_commit() -> None:
    core = FakeCore(
        {
            MessageReceived: [JournalEntry("state", {}), Send(ANNA, m.StartGeneration(1, 1))],
            PeerConnected: [JournalEntry("run", {})],
        }
    )
    transcript, _ = run_loop(core, [PeerUp(ANNA), Received(ANNA, JOIN, 80), Received(BERT, JOIN, 80)])
    assert transcript == [
        "durable: run, state, state",
        "send StartGeneration to anna",
        "send StartGeneration to anna",
    ]


def test_a_message_for_many_is_encoded_once_in_a_turn() -> None:
    """N members receive the same pages of a member list of N."""
    page = m.MemberListPage(1, 1, 0, 1, (m.Member(ANNA, "anna", "", 1, False),))
    start = m.StartGeneration(1, 1)
    effects = [Send(ANNA, page), Send(BERT, page), Send(ANNA, start)]
    _, transport = run_loop(FakeCore({MessageReceived: effects}), [Received(ANNA, JOIN, 80)])
    first, second, other = transport.frames
    assert first is second and first == encode(page) and other == encode(start)


def test_nothing_is_sent_when_the_journal_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: JournalStore, entries: object) -> None:
        raise JournalError("the disk is full")

    monkeypatch.setattr(RecordingStore, "append_all", full)
    transcript: list[str] = []
    transport = ScriptedTransport(transcript, [[Received(ANNA, JOIN, 80)]])
    store = RecordingStore.open(":memory:")
    store.transcript = transcript  # type: ignore[attr-defined]
    core = FakeCore(
        {
            MessageReceived: [
                Send(BERT, m.StartGeneration(1, 1)),
                JournalEntry("state", {}),
                Send(ANNA, m.StartGeneration(1, 1)),
            ]
        }
    )
    with pytest.raises(JournalError, match="disk is full"):
        Coordinator(transport, store, core, access_handler(core)).run(Iterations(9))  # type: ignore[arg-type]
    assert transcript == ["close transport", "close journal"]


def test_the_core_starts_before_messages_are_handled() -> None:
    core = FakeCore({MessageReceived: [LogEvent("info", "joined")]})
    core.at_start = [JournalEntry("term", {"term": 1}), LogEvent("info", "started")]
    transcript, _ = run_loop(core, [Received(ANNA, JOIN, 80)])
    assert transcript == ["durable: term", "log info started", "log info joined"]


def test_transport_events_become_the_cores_events() -> None:
    core = FakeCore()
    transcript, _ = run_loop(
        core,
        [PeerUp(ANNA, "", "10.0.0.5"), Received(ANNA, JOIN, 80), ReachResult(ANNA, "memory://anna")],
        [TransportViolation(ANNA, "no msgpack"), PeerDown(ANNA, "closed")],
        [TransportViolation(None, "not greeted"), ConnectionDenied(ANNA, "memory://anna")],
    )
    assert core.received == [
        PeerConnected(ANNA, "10.0.0.5"),
        MessageReceived(ANNA, JOIN),
        DialBackResult(ANNA, "memory://anna"),
        ProtocolViolation(ANNA, "no msgpack"),
        PeerDisconnected(ANNA, "closed"),
    ]
    assert transcript == ["log warning violation", "log warning violation", "log info denied"]


def test_a_worker_is_dialled_back_at_the_addresses_that_the_core_names() -> None:
    core = FakeCore({MessageReceived: [DialBack(ANNA, ("tcp://a:1", "tcp://b:1"))]})
    transcript, _ = run_loop(core, [Received(ANNA, JOIN, 80)], reach_s=1.5)
    assert transcript == ["call anna back at tcp://a:1, tcp://b:1 for 1.5 s"]


def test_a_peer_that_cannot_be_sent_to_is_lost_once() -> None:
    start = m.StartGeneration(1, 1)
    core = FakeCore({
        MessageReceived: [Send(BERT, start), Send(BERT, start), Send(ANNA, start)],
        PeerDisconnected: [
            JournalEntry("generation", {"term": 1, "generation": 2}),
            Send(BERT, start),
            Send(ANNA, start),
        ],
    })  # fmt: skip
    transcript, _ = run_loop(core, [Received(ANNA, JOIN, 80)], refuses=[BERT])
    assert core.received == [MessageReceived(ANNA, JOIN), PeerDisconnected(BERT, "the queue of bert is full")]
    assert transcript == [
        "send StartGeneration to anna",
        "durable: generation",
        "send StartGeneration to anna",
    ]


def test_the_loop_sleeps_until_the_cores_deadline_and_then_ticks() -> None:
    now_s = 100.0
    core = FakeCore()
    core.deadline_s = 100.1
    core.at_tick = [LogEvent("warning", "lost")]

    def clock() -> float:
        return now_s

    class Late(ScriptedTransport):
        def poll(self, timeout_s: float) -> list[TransportEvent]:
            nonlocal now_s
            now_s += timeout_s
            return super().poll(timeout_s)

    transcript: list[str] = []
    transport = Late(transcript, [])
    log = lambda level, event, fields: transcript.append(f"log {level} {event}")  # noqa: E731
    store, handler = JournalStore.open(":memory:"), access_handler(core)
    Coordinator(transport, store, core, handler, log=log, clock=clock).run(Iterations(2))  # type: ignore[arg-type]
    assert transcript == ["log warning lost", "close transport"]
    assert transport.waits_s == pytest.approx([0.1, 0.25]), "then bounded, so that a stop is noticed"


def status_for(asker: m.PeerId) -> dict[str, Any]:
    core = FakeCore()
    figures = {"sent_bytes": 5e6, "loss": 2.5}
    row = {"peer": ANNA.hex(), "name": "anna", "address": "tcp://10.0.0.6:7001", "figures": figures}
    core.fixed_status["members"] = [row]
    core.fixed_status["events"] = [{"event": "joined", "name": "anna", "address": "tcp://10.0.0.6:7001"}]
    iteration: list[TransportEvent] = [Received(asker, m.StatusRequest(), 9)]
    transcript, transport = run_loop(core, iteration, address="tcp://10.0.0.5:7700")
    assert transcript == [f"send StatusReply to {NAMES[asker]}"] and core.received == []
    (reply,) = transport.sent
    assert isinstance(reply, m.StatusReply)
    status = json.loads(reply.payload)
    assert status["address"] == "tcp://10.0.0.5:7700"
    (member,) = status["members"]
    assert member.pop("address") == status["events"][0].get("address", "")
    rates = {"sent_Bps": None, "received_Bps": None}
    assert member == {"peer": ANNA.hex(), "name": "anna", "figures": figures, "strikes": 0, **rates}
    assert isinstance(status, dict)
    return status


def test_the_status_for_members_contains_no_addresses() -> None:
    status = status_for(BERT)
    assert "door" not in status and "10.0.0.6" not in json.dumps(status)


def test_the_status_for_the_operator_contains_addresses_and_enrolments() -> None:
    status = status_for(OPERATOR)
    assert status["events"][0]["address"] == "tcp://10.0.0.6:7001"
    assert [row["peer"] for row in status["door"]["enrolled"]] == [ANNA.hex(), BERT.hex()]


def test_a_worker_that_asks_for_the_status_without_end_is_not_answered() -> None:
    """Each answer costs more than its request, so requests would pile up faster than they are read."""
    most = daemon.MAX_STATUS_REQUESTS
    flood: list[TransportEvent] = [Received(ANNA, m.StatusRequest(), 9)] * (2 * most)
    others: list[TransportEvent] = [Received(OPERATOR, m.StatusRequest(), 9)] * (2 * most)
    transcript, _ = run_loop(FakeCore(), flood, [*others, Received(BERT, m.StatusRequest(), 9)])
    assert transcript.count("send StatusReply to anna") == most
    assert transcript.count(f"send StatusReply to {NAMES[OPERATOR]}") == 2 * most
    assert transcript.count("send StatusReply to bert") == 1


def mismatch(key: m.PeerId, host: str, version: int = 5) -> VersionMismatch:
    return VersionMismatch(None, "another version", key, host, version, f"gridtrain 0.{version}")


def test_the_status_counts_refused_workers_by_their_version_until_they_connect() -> None:
    """Several workers may hold the same invitation, and one may try again."""
    asks = Received(OPERATOR, m.StatusRequest(), 9)
    old: list[TransportEvent] = [mismatch(ANNA, ""), *[mismatch(INVITATION, "10.0.0.6")] * 2]
    core = FakeCore()
    transcript, transport = run_loop(
        core,
        [mismatch(BERT, "", version=99), *old, asks],
        [PeerUp(PENDING, "", "10.0.0.6", pending_key=INVITATION), PeerUp(BERT, "", "10.0.0.7"), asks],
    )
    counts = [json.loads(reply.payload)["refused_versions"] for reply in transport.sent]  # type: ignore[attr-defined]
    assert counts == [
        [
            {"version": 5, "software": "gridtrain 0.5", "workers": 2},
            {"version": 99, "software": "gridtrain 0.99", "workers": 1},
        ],
        [{"version": 5, "software": "gridtrain 0.5", "workers": 1}],
    ]
    assert transcript[:4] == ["log warning refused"] * 4 and core.received == [
        PeerConnected(BERT, "10.0.0.7")
    ]


# -- access control ------------------------------------------------------------------------------------

CONNECTS = PeerUp(PENDING, "", "10.0.0.5", pending_key=INVITATION)


def test_an_enrolment_is_durable_and_not_passed_to_the_core() -> None:
    core = FakeCore()
    enrols: list[TransportEvent] = [CONNECTS, Received(PENDING, m.Enrol(BERT), 40)]
    transcript, transport = run_loop(
        core, enrols, [PeerDown(PENDING, "done")], handler=access_handler(core, ANNA)
    )
    assert transcript == ["durable: enrolled", "log info enrolled", "send Enrolled to the pending member"]
    assert transport.sent == [m.Enrolled("default")] and core.received == []


@pytest.mark.parametrize(
    "message",
    [m.Enrol(b"d" * 32), m.DiagnosticRequest(b"d" * 32, ""), m.StatusRequest(), JOIN],
    ids=lambda m: type(m).__name__,
)
def test_the_holder_of_a_used_up_invitation_is_refused(message: m.Message) -> None:
    core = FakeCore()
    transcript, transport = run_loop(core, [CONNECTS, Received(PENDING, message, 40)])
    assert transcript == [
        "log info not_enrolled",
        "send Refused to the pending member",
        "hang up on the pending member",
    ]
    (refused,) = transport.sent
    assert isinstance(refused, m.Refused) and refused.code == "invitation" and core.received == []
    assert refused.reason == "this invitation has no uses left"


def test_enrolments_are_counted_by_address_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authorization_limits, "MAX_ENROLS_PER_RANGE", 1)
    core = FakeCore()
    iterations: list[list[TransportEvent]] = [
        [PeerUp(PENDING, "", host, pending_key=INVITATION), Received(PENDING, m.Enrol(key), 40)]
        for key, host in ((ANNA, "10.0.0.5"), (BERT, "10.0.0.9"), (BERT, "10.0.1.9"))
    ]
    _, transport = run_loop(core, *iterations, handler=access_handler(core))
    assert [getattr(answer, "code", "") for answer in transport.sent] == ["", "too-many", ""]


def test_a_refused_enrolment_is_logged_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authorization_limits, "MAX_ENROLS_PER_RANGE", 0)
    handler = access_handler(FakeCore())
    handler.on_connected(CONNECTS)
    note, reply = handler.handle(PENDING, m.Enrol(BERT), 0.0) or ()
    assert isinstance(note, LogEvent) and isinstance(reply, Send) and isinstance(reply.message, m.Refused)
    assert (note.event, note.fields) == (
        "not_enrolled",
        {"peer": BERT.hex()[:12], "reason": reply.message.reason},
    )


def test_a_refused_pending_member_is_forgotten() -> None:
    """The coordinator closes the connection, so no later event reports its end."""
    core = FakeCore()
    handler = access_handler(core, ANNA, BERT)
    run_loop(core, [CONNECTS, Received(PENDING, m.StatusRequest(), 40)], handler=handler)
    assert not handler.is_pending(PENDING)


@pytest.mark.parametrize("message", [m.StatusRequest(), m.Enrol(b"d" * 32)], ids=["violation", "refusal"])
def test_the_address_of_a_disconnected_pending_member_is_forgotten(
    message: m.Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[m.PeerId] = []
    monkeypatch.setattr(Checkups, "on_disconnected", lambda self, peer: forgotten.append(peer))
    core = FakeCore()
    members = (ANNA,) if isinstance(message, m.StatusRequest) else (ANNA, BERT)
    run_loop(core, [CONNECTS, Received(PENDING, message, 40)], handler=access_handler(core, *members))
    assert forgotten == [PENDING]


@pytest.mark.parametrize(
    "message", [m.StatusRequest(), JOIN, m.RemoveWorker(ANNA, True, "")], ids=lambda m: type(m).__name__
)
def test_a_pending_member_can_only_enrol(message: m.Message) -> None:
    core = FakeCore()
    transcript, _ = run_loop(
        core, [CONNECTS, Received(PENDING, message, 40)], handler=access_handler(core, ANNA)
    )
    assert transcript == ["log warning violation", "hang up on the pending member"] and core.received == []


def test_a_pending_member_that_violates_the_protocol_is_disconnected() -> None:
    core = FakeCore()
    transcript, _ = run_loop(core, [CONNECTS, TransportViolation(PENDING, "no msgpack")])
    assert transcript == ["log warning violation", "hang up on the pending member"] and core.received == []


def test_a_kick_is_durable_before_messages_are_sent() -> None:
    core = FakeCore({WorkerRemoved: [Send(ANNA, m.Refused("kicked", "out", "ask")), Disconnect(ANNA)]})
    transcript, _ = run_loop(core, [Received(OPERATOR, m.RemoveWorker(ANNA, False, "too slow"), 40)])
    assert transcript == [
        "durable: expelled",
        "send Refused to anna",
        "hang up on anna",
        "send OperatorReply to operator",
    ]
    (removed,) = core.received
    assert isinstance(removed, WorkerRemoved) and removed.code == "kicked"
    assert removed.reason == "was removed from the run: too slow" and "new invitation" in removed.remedy


def test_the_remedy_of_a_ban_names_the_command_to_lift_it() -> None:
    core = FakeCore()
    run_loop(core, [Received(OPERATOR, m.RemoveWorker(ANNA, True, "rude"), 40)])
    (removed,) = core.received
    assert isinstance(removed, WorkerRemoved) and removed.reason == "was removed from the run: rude"
    assert f"gridtrain unban {ANNA.hex()[:12]}" in removed.remedy


def test_a_ban_is_journalled_with_the_workers_name() -> None:
    handler = access_handler(FakeCore(), ANNA)
    assert [row["name"] for row in handler.status()["enrolled"]] == ["aaaa"]
    recorded: list[Effect] = []
    handler.execute_order(m.RemoveWorker(ANNA, True, "rude"), 0.0, recorded.extend)
    (entry,) = [effect.body for effect in recorded if isinstance(effect, JournalEntry)]
    assert (entry["name"], entry["ban"]) == ("aaaa", True)


def test_a_removed_worker_can_still_be_named() -> None:
    handler = access_handler(FakeCore(), ANNA)
    handler.execute_order(m.RemoveWorker(ANNA, False, "rude"), 0.0, lambda entries: None)
    assert handler.status()["removed"] == [{"peer": ANNA.hex(), "name": "aaaa"}]
    handler.execute_order(m.RemoveWorker(ANNA, True, "rude"), 0.0, lambda entries: None)
    assert handler.status()["removed"] == []


@pytest.mark.parametrize(
    "command", [m.Invite(b"n" * 32, 1, 60.0), m.RemoveWorker(ANNA, False, ""), m.Unban(ANNA), m.EndRun()]
)
def test_commands_are_accepted_from_the_operator_only(command: m.Message) -> None:
    core = FakeCore()
    transcript, transport = run_loop(core, [Received(BERT, command, 40)])
    assert transcript == ["send Refused to bert"] and core.received == []
    (refused,) = transport.sent
    assert isinstance(refused, m.Refused) and refused.code == "operator"


def test_the_operators_key_cannot_train() -> None:
    core = FakeCore()
    transcript, _ = run_loop(core, [Received(OPERATOR, JOIN, 80)])
    assert transcript == ["send Refused to operator"] and core.received == []


def test_the_third_violation_is_a_kick() -> None:
    core = FakeCore({MessageReceived: [RecordViolation(ANNA, "reported a ledger that does not add up")]})
    iterations = [[Received(ANNA, JOIN, 80)] for _ in range(3)]
    transcript, _ = run_loop(core, *iterations, clock=itertools.count(100.0, 0.01).__next__)
    assert transcript == ["durable: strike", "durable: strike", "durable: strike, expelled"]
    removals = [event for event in core.received if isinstance(event, WorkerRemoved)]
    assert [(event.code, event.reason[:38]) for event in removals] == [
        ("offence", "broke the protocol (violation 1 of 3):"),
        ("offence", "broke the protocol (violation 2 of 3):"),
        ("kicked", "was removed from the run: 3 violations"),
    ]


@pytest.mark.parametrize(
    ("is_empty", "is_pending", "ends_after_s"),
    [(True, False, 1.0), (True, True, 1.0), (False, False, EXIT_DELAY_S), (False, True, 40.0)],
)
def test_it_exits_after_the_end_of_the_run(
    monkeypatch: pytest.MonkeyPatch, is_empty: bool, is_pending: bool, ends_after_s: float
) -> None:
    """At once when all workers have left, otherwise after a delay, which is longer while a worker writes the
    model or cannot write its last checkpoint; each reading of the clock takes 0.05 s."""
    monkeypatch.setattr(daemon, "WRITING_DELAY_S", 40.0)
    core = FakeCore()
    core.is_model_pending = is_pending
    core.fixed_status.update(finished=True, members=[] if is_empty else [{"peer": ANNA.hex(), "figures": {}}])
    now_s = 100.0

    def clock() -> float:
        nonlocal now_s
        now_s += 0.05
        return now_s

    iterations: list[list[TransportEvent]] = [[]] * 1000
    run_loop(core, *iterations, clock=clock, exit_when_finished=True)
    assert ends_after_s - 1.0 <= now_s - 100.0 <= ends_after_s + 0.5, "it did not wait for all iterations"


def test_a_missing_journal_is_reported_once_and_shown_to_the_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RecordingStore, "is_missing", True)
    asks = [Received(OPERATOR, m.StatusRequest(), 9), Received(ANNA, m.StatusRequest(), 9)]
    times_s = itertools.count(100.0)
    transcript, transport = run_loop(FakeCore(), [], [], [*asks], clock=lambda: float(next(times_s)))
    assert transcript.count("log error journal_missing") == 1
    replies = [message for message in transport.sent if isinstance(message, m.StatusReply)]
    shown, hidden = (json.loads(reply.payload) for reply in replies)
    assert shown["alert"].startswith(daemon.JOURNAL_MISSING) and "alert" not in hidden


def test_by_default_it_does_not_exit_after_the_end() -> None:
    core = FakeCore()
    core.fixed_status["finished"] = True
    _, transport = run_loop(core, *[[]] * 20)
    assert len(transport.waits_s) == 20


def test_a_worker_is_welcomed_by_the_real_core_over_the_memory_transport() -> None:
    hub = MemoryHub()
    mine, anna = MemoryTransport(COORDINATOR, hub), MemoryTransport(ANNA, hub)
    mine.listen("memory://coordinator")
    anna.dial(COORDINATOR, "memory://coordinator")
    anna.send(COORDINATOR, JOIN)
    access = Authorization(open_to_all=True, coordinator=COORDINATOR)
    store = JournalStore.open(":memory:")
    core = recover_membership(store, COORDINATOR, "default", Deadlines())
    Coordinator(mine, store, core, AccessHandler(access, core)).run(Iterations(1))
    received = [event.message for event in anna.poll(1.0) if isinstance(event, Received)]
    assert [type(message).__name__ for message in received] == ["Welcome", "RunStateUpdate"]
    assert received[0].term == 1  # type: ignore[union-attr]


def test_a_message_in_the_same_turn_as_a_ban_is_ignored() -> None:
    core = FakeCore({WorkerRemoved: [Disconnect(ANNA)]})
    run_loop(core, [Received(OPERATOR, m.RemoveWorker(ANNA, True, "spam"), 40), Received(ANNA, JOIN, 80)])
    assert not [event for event in core.received if isinstance(event, MessageReceived)]


def test_a_coordinator_that_is_started_again_after_the_end_says_how_the_run_ended() -> None:
    store = JournalStore.open(":memory:")
    ended = {"state": "finished", "reason": "its owner has ended it", "missing_model": "no model was written"}
    store.append_all([("state", {"state": "paused", "reason": "", "ending": True}), ("state", ended)])
    with pytest.raises(JournalError, match="has finished: its owner has ended it; no model was written ->"):
        _recover(store, "r")
    store.close()
