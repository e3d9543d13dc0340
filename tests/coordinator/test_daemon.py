"""The loop carries out the effects of a core in order, journal entries before everything that follows."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.errors import JournalError, TransportError
from gridtrain.network.transport.in_memory import MemoryHub, MemoryTransport
from gridtrain.network.transport.interface import (
    ConnectionDenied,
    Frames,
    PeerDown,
    PeerUp,
    ReachResult,
    Received,
    TransportEvent,
    TransportViolation,
)
from gridtrain.network.wire.codec import encode
from gridtrain_coordinator.access import authorization_rules
from gridtrain_coordinator.access.authorization import Authorization
from gridtrain_coordinator.access_handler import AccessHandler
from gridtrain_coordinator.daemon import EXIT_DELAY_S, Coordinator
from gridtrain_coordinator.diagnostics import Checkups
from gridtrain_coordinator.journal.store import JournalStore
from gridtrain_coordinator.run.events import (
    DialBack,
    DialBackResult,
    Disconnect,
    Effect,
    Event,
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

COORDINATOR, OPERATOR, ANNA, BERT, INVITATION = (letter * 32 for letter in (b"c", b"o", b"a", b"b", b"i"))
GUEST = b"g" * 32
NAMES = {COORDINATOR: "coordinator", OPERATOR: "operator", ANNA: "anna", BERT: "bert", GUEST: "the guest"}
JOIN = m.Join("default", "anna", "memory://anna")


class FakeCore:
    """Answers each kind of event with the effects that a test specifies."""

    def __init__(self, answers: Mapping[type[Event], list[Effect]] | None = None) -> None:
        self.answers = dict(answers or {})
        self.heard: list[Event] = []
        self.deadline_s = math.inf
        self.picture: dict[str, Any] = {
            "phase": "waiting", "step": 0, "finished": False, "members": [], "events": [],
        }  # fmt: skip
        self.at_start: list[Effect] = []
        self.at_tick: list[Effect] = []

    def start(self, now_s: float) -> list[Effect]:
        return self.at_start

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        self.heard.append(event)
        return self.answers.get(type(event), [])

    def tick(self, now_s: float) -> list[Effect]:
        self.deadline_s = math.inf
        return self.at_tick

    def snapshot(self, now_s: float) -> dict[str, Any]:
        return self.picture

    def worker_name(self, peer: m.PeerId) -> str:
        return peer[:4].decode()


class ScriptedTransport:
    """Returns prepared events, one list for each poll, and records what is sent."""

    me = COORDINATOR

    def __init__(self, transcript: list[str], turns: Iterable[list[TransportEvent]]) -> None:
        self.transcript = transcript
        self.turns = list(turns)
        self.refuses: set[m.PeerId] = set()
        self.waits_s: list[float] = []
        self.sent: list[m.Message] = []
        self.frames: list[Frames | None] = []

    def poll(self, timeout_s: float) -> list[TransportEvent]:
        self.waits_s.append(timeout_s)
        return self.turns.pop(0) if self.turns else []

    def send(self, peer: m.PeerId, message: m.Message, frames: Frames | None = None) -> None:
        if peer in self.refuses:
            raise TransportError(f"the queue of {NAMES[peer]} is full")
        self.transcript.append(f"send {type(message).__name__} to {NAMES[peer]}")
        self.sent.append(message)
        self.frames.append(frames)

    def reach(self, peer: m.PeerId, addresses: Iterable[str], timeout_s: float) -> None:
        self.transcript.append(f"call {NAMES[peer]} back at {', '.join(addresses)} for {timeout_s:g} s")

    def hang_up(self, peer: m.PeerId) -> None:
        self.transcript.append(f"hang up on {NAMES[peer]}")

    def close(self) -> None:
        self.transcript.append("close transport")


class WrittenDownStore(JournalStore):
    transcript: list[str]

    def append_all(self, entries: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        entries = list(entries)
        super().append_all(entries)
        self.transcript.append("durable: " + ", ".join(kind for kind, _ in entries))

    def close(self) -> None:
        super().close()
        self.transcript.append("close journal")


class Turns:
    """A stop flag that is set after a number of turns."""

    def __init__(self, count: int) -> None:
        self.left = count

    def is_set(self) -> bool:
        self.left -= 1
        return self.left < 0


def reception_of(core: FakeCore, *members: m.PeerId) -> AccessHandler:
    """Access control with an invitation of two uses, of which these members have used theirs."""
    door = Authorization(open_to_all=True, operator=OPERATOR, coordinator=COORDINATOR)
    door.invite(INVITATION, 2, 600.0, 0.0)
    for member in members:
        door.enrol(INVITATION, member, "", 0.0)
    return AccessHandler(door, core, OPERATOR, lambda: 100.0)


def play(
    core: FakeCore,
    *turns: list[TransportEvent],
    refuses: Iterable[m.PeerId] = (),
    reception: AccessHandler | None = None,
    clock: Callable[[], float] = lambda: 100.0,
    **options: Any,
) -> tuple[list[str], ScriptedTransport]:
    """Run the loop over these turns; returns what it did."""
    transcript: list[str] = []
    transport = ScriptedTransport(transcript, turns)
    transport.refuses = set(refuses)
    store = WrittenDownStore.open(":memory:")
    assert isinstance(store, WrittenDownStore)
    store.transcript = transcript

    def log(level: str, event: str, fields: Mapping[str, Any]) -> None:
        transcript.append(f"log {level} {event}")

    reception = reception or reception_of(core, ANNA, BERT)
    coordinator = Coordinator(transport, store, core, reception, log=log, clock=clock, **options)  # type: ignore[arg-type]
    coordinator.run(Turns(len(turns)))
    assert transcript[-2:] == ["close transport", "close journal"]
    return transcript[:-2], transport


def test_the_journal_is_durable_before_what_follows_is_sent() -> None:
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
    transcript, _ = play(core, [Received(ANNA, JOIN, 80)])
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
    transcript, _ = play(core, [PeerUp(ANNA), Received(ANNA, JOIN, 80), Received(BERT, JOIN, 80)])
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
    _, transport = play(FakeCore({MessageReceived: effects}), [Received(ANNA, JOIN, 80)])
    first, second, other = transport.frames
    assert first is second and first == encode(page) and other == encode(start)


def test_nothing_is_sent_when_the_journal_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: JournalStore, entries: object) -> None:
        raise JournalError("the disk is full")

    monkeypatch.setattr(WrittenDownStore, "append_all", full)
    transcript: list[str] = []
    transport = ScriptedTransport(transcript, [[Received(ANNA, JOIN, 80)]])
    store = WrittenDownStore.open(":memory:")
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
        Coordinator(transport, store, core, reception_of(core)).run(Turns(9))  # type: ignore[arg-type]
    assert transcript == ["close transport", "close journal"]


def test_the_core_starts_before_anybody_is_heard() -> None:
    core = FakeCore({MessageReceived: [LogEvent("info", "joined")]})
    core.at_start = [JournalEntry("term", {"term": 1}), LogEvent("info", "started")]
    transcript, _ = play(core, [Received(ANNA, JOIN, 80)])
    assert transcript == ["durable: term", "log info started", "log info joined"]


def test_transport_events_become_the_cores_events() -> None:
    core = FakeCore()
    transcript, _ = play(
        core,
        [PeerUp(ANNA, "", "10.0.0.5"), Received(ANNA, JOIN, 80), ReachResult(ANNA, "memory://anna")],
        [TransportViolation(ANNA, "no msgpack"), PeerDown(ANNA, "closed")],
        [TransportViolation(None, "not greeted"), ConnectionDenied(ANNA, "memory://anna")],
    )
    assert core.heard == [
        PeerConnected(ANNA, "10.0.0.5"),
        MessageReceived(ANNA, JOIN),
        DialBackResult(ANNA, "memory://anna"),
        ProtocolViolation(ANNA, "no msgpack"),
        PeerDisconnected(ANNA, "closed"),
    ]
    assert transcript == ["log warning violation", "log warning violation", "log info denied"]


def test_a_worker_is_called_back_at_the_addresses_that_the_core_names() -> None:
    core = FakeCore({MessageReceived: [DialBack(ANNA, ("tcp://a:1", "tcp://b:1"))]})
    transcript, _ = play(core, [Received(ANNA, JOIN, 80)], reach_s=1.5)
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
    transcript, _ = play(core, [Received(ANNA, JOIN, 80)], refuses=[BERT])
    assert core.heard == [MessageReceived(ANNA, JOIN), PeerDisconnected(BERT, "the queue of bert is full")]
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
    store, reception = JournalStore.open(":memory:"), reception_of(core)
    Coordinator(transport, store, core, reception, log=log, clock=clock).run(Turns(2))  # type: ignore[arg-type]
    assert transcript == ["log warning lost", "close transport"]
    assert transport.waits_s == pytest.approx([0.1, 0.25]), "then bounded, so that a stop is noticed"


def status_for(asker: m.PeerId) -> dict[str, Any]:
    core = FakeCore()
    figures = {"sent_bytes": 5e6, "loss": 2.5}
    line = {"peer": ANNA.hex(), "name": "anna", "address": "tcp://10.0.0.6:7001", "figures": figures}
    core.picture["members"] = [line]
    core.picture["events"] = [{"event": "joined", "name": "anna", "address": "tcp://10.0.0.6:7001"}]
    turn: list[TransportEvent] = [Received(asker, m.StatusRequest(), 9)]
    transcript, transport = play(core, turn, address="tcp://10.0.0.5:7700")
    assert transcript == [f"send StatusReply to {NAMES[asker]}"] and core.heard == []
    (reply,) = transport.sent
    assert isinstance(reply, m.StatusReply)
    picture = json.loads(reply.payload)
    assert picture["address"] == "tcp://10.0.0.5:7700"
    (member,) = picture["members"]
    assert member.pop("address") == picture["events"][0].get("address", "")
    rates = {"sent_Bps": None, "received_Bps": None}
    assert member == {"peer": ANNA.hex(), "name": "anna", "figures": figures, "strikes": 0, **rates}
    assert isinstance(picture, dict)
    return picture


def test_status_is_answered_by_the_daemon_and_tells_members_nothing_of_places() -> None:
    picture = status_for(BERT)
    assert "door" not in picture and "10.0.0.6" not in json.dumps(picture)


def test_the_operator_is_told_more() -> None:
    picture = status_for(OPERATOR)
    assert picture["events"][0]["address"] == "tcp://10.0.0.6:7001"
    assert [line["peer"] for line in picture["door"]["enrolled"]] == [ANNA.hex(), BERT.hex()]


# -- the door ------------------------------------------------------------------------------------------

COMES = PeerUp(GUEST, "", "10.0.0.5", pending_key=INVITATION)


def test_a_guest_is_enrolled_durably_and_the_core_never_hears_of_it() -> None:
    core = FakeCore()
    enrols: list[TransportEvent] = [COMES, Received(GUEST, m.Enrol(BERT), 40)]
    transcript, transport = play(core, enrols, [PeerDown(GUEST, "done")], reception=reception_of(core, ANNA))
    assert transcript == ["durable: enrolled", "log info enrolled", "send Enrolled to the guest"]
    assert transport.sent == [m.Enrolled("default")] and core.heard == []


@pytest.mark.parametrize(
    "message",
    [m.Enrol(b"d" * 32), m.DiagnosticRequest(b"d" * 32, ""), m.StatusRequest(), JOIN],
    ids=lambda m: type(m).__name__,
)
def test_who_holds_a_used_up_invitation_is_told_that_and_nothing_else(message: m.Message) -> None:
    core = FakeCore()
    transcript, transport = play(core, [COMES, Received(GUEST, message, 40)])
    assert transcript == ["log info not_enrolled", "send Refused to the guest", "hang up on the guest"]
    (refused,) = transport.sent
    assert isinstance(refused, m.Refused) and refused.code == "invitation" and core.heard == []
    assert refused.reason == "this invitation is used up"


def test_enrolments_are_counted_by_address_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authorization_rules, "MAX_ENROLS_PER_RANGE", 1)
    core = FakeCore()
    turns: list[list[TransportEvent]] = [
        [PeerUp(GUEST, "", host, pending_key=INVITATION), Received(GUEST, m.Enrol(key), 40)]
        for key, host in ((ANNA, "10.0.0.5"), (BERT, "10.0.0.9"), (BERT, "10.0.1.9"))
    ]
    _, transport = play(core, *turns, reception=reception_of(core))
    assert [getattr(answer, "code", "") for answer in transport.sent] == ["", "too-many", ""]


def test_of_who_holds_a_used_up_invitation_nothing_is_kept() -> None:
    """Its connection is hung up on, so that nothing else would say that it is gone."""
    core = FakeCore()
    reception = reception_of(core, ANNA, BERT)
    play(core, [COMES, Received(GUEST, m.StatusRequest(), 40)], reception=reception)
    assert not reception.is_pending(GUEST)


@pytest.mark.parametrize("message", [m.StatusRequest(), m.Enrol(b"d" * 32)], ids=["violation", "refusal"])
def test_nor_is_the_address_of_a_guest_that_is_hung_up_on(
    message: m.Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[m.PeerId] = []
    monkeypatch.setattr(Checkups, "on_disconnected", lambda self, peer: forgotten.append(peer))
    core = FakeCore()
    members = (ANNA,) if isinstance(message, m.StatusRequest) else (ANNA, BERT)
    play(core, [COMES, Received(GUEST, message, 40)], reception=reception_of(core, *members))
    assert forgotten == [GUEST]


@pytest.mark.parametrize(
    "message", [m.StatusRequest(), JOIN, m.RemoveWorker(ANNA, True, "")], ids=lambda m: type(m).__name__
)
def test_a_guest_may_do_nothing_else(message: m.Message) -> None:
    core = FakeCore()
    transcript, _ = play(core, [COMES, Received(GUEST, message, 40)], reception=reception_of(core, ANNA))
    assert transcript == ["log warning violation", "hang up on the guest"] and core.heard == []


def test_a_guest_that_breaks_the_protocol_is_hung_up_on() -> None:
    core = FakeCore()
    transcript, _ = play(core, [COMES, TransportViolation(GUEST, "no msgpack")])
    assert transcript == ["log warning violation", "hang up on the guest"] and core.heard == []


def test_a_kick_is_durable_before_anybody_is_told() -> None:
    core = FakeCore({WorkerRemoved: [Send(ANNA, m.Refused("kicked", "out", "ask")), Disconnect(ANNA)]})
    transcript, _ = play(core, [Received(OPERATOR, m.RemoveWorker(ANNA, False, "too slow"), 40)])
    assert transcript == [
        "durable: expelled",
        "send Refused to anna",
        "hang up on anna",
        "send OperatorReply to operator",
    ]
    (expelled,) = core.heard
    assert isinstance(expelled, WorkerRemoved) and expelled.code == "kicked"
    assert expelled.reason == "was removed from the run: too slow" and "new invitation" in expelled.remedy


def test_who_is_banned_is_not_sent_for_a_new_invitation_alone() -> None:
    core = FakeCore()
    play(core, [Received(OPERATOR, m.RemoveWorker(ANNA, True, "rude"), 40)])
    (expelled,) = core.heard
    assert isinstance(expelled, WorkerRemoved) and expelled.reason == "was removed from the run: rude"
    assert f"gridtrain unban {ANNA.hex()[:12]}" in expelled.remedy


def test_a_ban_is_written_down_with_the_name_that_people_know() -> None:
    reception = reception_of(FakeCore(), ANNA)
    assert [row["name"] for row in reception.status()["enrolled"]] == ["aaaa"]
    effects = reception.handle(OPERATOR, m.RemoveWorker(ANNA, True, "rude"), 0.0)
    (entry,) = [effect.body for effect in effects or () if isinstance(effect, JournalEntry)]
    assert (entry["name"], entry["ban"]) == ("aaaa", True)


def test_a_removed_worker_can_still_be_named() -> None:
    reception = reception_of(FakeCore(), ANNA)
    reception.handle(OPERATOR, m.RemoveWorker(ANNA, False, "rude"), 0.0)
    assert reception.status()["removed"] == [{"peer": ANNA.hex(), "name": "aaaa"}]
    reception.handle(OPERATOR, m.RemoveWorker(ANNA, True, "rude"), 0.0)
    assert reception.status()["removed"] == []


@pytest.mark.parametrize(
    "order", [m.Invite(b"n" * 32, 1, 60.0), m.RemoveWorker(ANNA, False, ""), m.Unban(ANNA)]
)
def test_orders_are_the_operators(order: m.Message) -> None:
    core = FakeCore()
    transcript, transport = play(core, [Received(BERT, order, 40)])
    assert transcript == ["send Refused to bert"] and core.heard == []
    (refused,) = transport.sent
    assert isinstance(refused, m.Refused) and refused.code == "operator"


def test_the_operators_key_does_not_train() -> None:
    core = FakeCore()
    transcript, _ = play(core, [Received(OPERATOR, JOIN, 80)])
    assert transcript == ["send Refused to operator"] and core.heard == []


def test_the_third_strike_is_a_kick() -> None:
    core = FakeCore({MessageReceived: [RecordViolation(ANNA, "reported a ledger that does not add up")]})
    turns = [[Received(ANNA, JOIN, 80)] for _ in range(3)]
    transcript, _ = play(core, *turns, clock=itertools.count(100.0, 0.01).__next__)
    assert transcript == ["durable: strike", "durable: strike", "durable: strike, expelled"]
    expulsions = [event for event in core.heard if isinstance(event, WorkerRemoved)]
    assert [(event.code, event.reason[:38]) for event in expulsions] == [
        ("offence", "broke the protocol (violation 1 of 3):"),
        ("offence", "broke the protocol (violation 2 of 3):"),
        ("kicked", "was removed from the run: 3 violations"),
    ]


@pytest.mark.parametrize(
    ("members", "ends_after_s"), [([], 1.0), ([{"peer": ANNA.hex(), "figures": {}}], EXIT_DELAY_S)]
)
def test_it_exits_some_time_after_the_end(members: list[dict[str, Any]], ends_after_s: float) -> None:
    """At once when all workers have left, else after a delay; each reading of the clock takes 0.05 s."""
    core = FakeCore()
    core.picture.update(finished=True, members=members)
    now_s = 100.0

    def clock() -> float:
        nonlocal now_s
        now_s += 0.05
        return now_s

    turns: list[list[TransportEvent]] = [[]] * 1000
    play(core, *turns, clock=clock, exit_when_finished=True)
    assert now_s - 100.0 <= ends_after_s + 0.5, "it did not wait for the 1000 turns"


def test_it_stays_after_the_end_unless_told_otherwise() -> None:
    core = FakeCore()
    core.picture["finished"] = True
    _, transport = play(core, *[[]] * 20)
    assert len(transport.waits_s) == 20


def test_a_worker_is_welcomed_by_the_real_core_over_the_memory_transport() -> None:
    hub = MemoryHub()
    mine, anna = MemoryTransport(COORDINATOR, hub), MemoryTransport(ANNA, hub)
    mine.listen("memory://coordinator")
    anna.dial(COORDINATOR, "memory://coordinator")
    anna.send(COORDINATOR, JOIN)
    door = Authorization(open_to_all=True, coordinator=COORDINATOR)
    coordinator = Coordinator.for_run(mine, JournalStore.open(":memory:"), door, deadlines=Deadlines())
    coordinator.run(Turns(1))
    heard = [event.message for event in anna.poll(1.0) if isinstance(event, Received)]
    assert [type(message).__name__ for message in heard] == ["Welcome", "RunStateUpdate"]
    assert heard[0].term == 1  # type: ignore[union-attr]


def test_what_came_in_the_same_breath_as_the_ban_is_not_heard() -> None:
    core = FakeCore({WorkerRemoved: [Disconnect(ANNA)]})
    play(core, [Received(OPERATOR, m.RemoveWorker(ANNA, True, "spam"), 40), Received(ANNA, JOIN, 80)])
    assert not [event for event in core.heard if isinstance(event, MessageReceived)]
