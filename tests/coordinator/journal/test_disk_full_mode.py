"""With a full disk the coordinator makes no decisions, reports it, and continues when there is room."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gridtrain.core import messages as m
from gridtrain.network.transport.interface import Frames, PeerDown, PeerUp, Received, TransportEvent
from gridtrain_coordinator.access.authorization import Authorization
from gridtrain_coordinator.access_handler import AccessHandler
from gridtrain_coordinator.daemon import Coordinator
from gridtrain_coordinator.journal import disk_full_mode
from gridtrain_coordinator.journal.backups import JOURNAL, Backups, latest_backup
from gridtrain_coordinator.journal.store import JournalStore
from gridtrain_coordinator.run.events import (
    Effect,
    Event,
    JournalEntry,
    MessageReceived,
    PeerConnected,
    PeerDisconnected,
    Send,
)

COORDINATOR, OPERATOR, ANNA, BERT, INVITATION, PENDING = (
    letter * 32 for letter in (b"c", b"o", b"a", b"b", b"i", b"g")
)
NAMES = {OPERATOR: "operator", ANNA: "anna", BERT: "bert", PENDING: "pending"}
BIG = "x" * 60_000


class FullDiskCoordinator:
    """A coordinator with a real journal that can be filled; core and transport record what they receive."""

    def __init__(self, folder: Path, *, backups: Backups | None = None) -> None:
        self.now_s = 100.0
        self.lines: list[str] = []
        self.received: list[tuple[float, Event]] = []
        self.deadline_s = 1e9
        self.answers: dict[type[Event], list[Effect]] = {}
        self.turns: list[list[TransportEvent]] = []
        self.me = COORDINATOR
        self.store = JournalStore.open(folder / JOURNAL)
        self.store.identity()
        (self.pages,) = self.store._connection.execute("PRAGMA page_count").fetchone()
        access = Authorization(open_to_all=True, operator=OPERATOR, coordinator=COORDINATOR)
        access.invite(INVITATION, 9, 600.0, 0.0)
        for member in (ANNA, BERT):
            access.enrol(INVITATION, member, "", 0.0)
        access_handler = AccessHandler(access, self, OPERATOR, lambda: 100.0)
        self.loop = Coordinator(
            self, self.store, self, access_handler, log=self.log, clock=lambda: self.now_s, backups=backups
        )  # type: ignore[arg-type]

    def fill(self) -> None:
        self.store._connection.execute(f"PRAGMA max_page_count = {self.pages + 2}")

    def make_room(self) -> None:
        self.store._connection.execute("PRAGMA max_page_count = 100000")

    def turn(self, *events: TransportEvent, after_s: float = 0.0) -> list[str]:
        """Runs the loop once and returns what it did."""
        self.now_s += after_s
        self.turns.append(list(events))
        began = len(self.lines)
        self.loop._run_once()
        return self.lines[began:]

    def log(self, level: str, event: str, fields: Mapping[str, Any]) -> None:
        self.lines.append(f"log {level} {event}")

    # -- as a transport

    def poll(self, timeout_s: float) -> list[TransportEvent]:
        return self.turns.pop(0)

    def send(self, peer: m.PeerId, message: m.Message, frames: Frames | None = None) -> None:
        text = f" {message.state}" if isinstance(message, m.RunStateUpdate) else ""
        text += f" {message.code}" if isinstance(message, m.Refused) else ""
        if isinstance(message, m.StatusReply):
            text += f" {json.loads(bytes(message.payload))['phase']}"
        self.lines.append(f"{type(message).__name__}{text} to {NAMES[peer]}")

    def hang_up(self, peer: m.PeerId) -> None:
        self.lines.append(f"hang up on {NAMES[peer]}")

    def reach(self, peer: m.PeerId, addresses: Iterable[str], timeout_s: float) -> None: ...

    def close(self) -> None: ...

    # -- as a core

    def worker_name(self, peer: m.PeerId) -> str:
        return ""

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        self.received.append((now_s, event))
        return self.answers.get(type(event), [])

    def tick(self, now_s: float) -> list[Effect]:
        self.lines.append("tick")
        return []

    def snapshot(self, now_s: float) -> dict[str, Any]:
        return {"phase": "training", "reason": "", "step": 0, "finished": False, "members": [], "events": []}


JOIN = m.Join("default", "anna", "memory://anna")
DECISION = [
    JournalEntry("generation", {"term": 1, "generation": 1, "note": BIG}),
    Send(BERT, m.StartGeneration(1, 1)),
]


@pytest.fixture
def disk(tmp_path: Path) -> FullDiskCoordinator:
    disk = FullDiskCoordinator(tmp_path)
    disk.answers = {MessageReceived: DECISION}
    disk.turn(PeerUp(ANNA), PeerUp(BERT), PeerUp(OPERATOR))
    disk.fill()
    return disk


def test_a_command_that_finds_the_disk_full_is_refused_at_once(disk: FullDiskCoordinator) -> None:
    """Otherwise the command would time out and report that no coordinator can be reached."""
    disk.store._connection.execute(f"PRAGMA max_page_count = {disk.pages}")
    for number in range(200):  # short entries, until one does not fit
        invite = m.Invite(bytes([number]) * 32, 1, 600.0)
        lines = disk.turn(Received(OPERATOR, invite, 80))
        if lines[0] == "log error no_room":
            break
    assert "Refused no-room to operator" in lines


def test_a_decision_is_carried_out_once_when_there_is_room(disk: FullDiskCoordinator) -> None:
    assert disk.turn(Received(ANNA, JOIN, 80)) == [
        "log error no_room",
        "RunStateUpdate paused to anna",
        "RunStateUpdate paused to bert",
    ]
    assert disk.turn(after_s=5.0) == [], "still no room"
    disk.make_room()
    assert disk.turn(after_s=0.5) == [], "tried once a second"
    assert disk.turn(after_s=0.6) == [
        "log info room_again",
        "StartGeneration to bert",
        "RunStateUpdate training to anna",
        "RunStateUpdate training to bert",
    ]
    assert [e.kind for e in disk.store.entries()] == ["generation"]


def test_events_are_deferred_in_order_and_deadlines_wait(disk: FullDiskCoordinator) -> None:
    disk.turn(Received(ANNA, JOIN, 80))
    stopped_s = disk.received[-1][0]
    disk.deadline_s = stopped_s + 3.0
    ready = m.Ready(1, 1, bytes(32))
    assert (
        disk.turn(Received(BERT, ready, 80), Received(ANNA, m.Heartbeat(1, 0, 0, ()), 80), after_s=60.0) == []
    )
    assert disk.turn(PeerDown(ANNA, "closed"), PeerUp(ANNA), after_s=60.0) == [
        "RunStateUpdate paused to anna"
    ]
    before = len(disk.received)
    disk.answers = {}
    disk.make_room()
    disk.turn(after_s=60.0)
    assert [event for _, event in disk.received[before:]] == [
        MessageReceived(BERT, ready),
        PeerDisconnected(ANNA, "closed"),
        PeerConnected(ANNA),
    ]
    assert {at_s for at_s, _ in disk.received[before:]} == {stopped_s}, "the core's clock stood still"
    assert disk.turn(after_s=1.0) == [] and "tick" in disk.turn(after_s=2.5)


def test_the_status_says_so_and_enrolments_and_commands_are_refused(disk: FullDiskCoordinator) -> None:
    disk.turn(Received(ANNA, JOIN, 80))
    assert disk.turn(
        Received(OPERATOR, m.StatusRequest(), 8),
        Received(OPERATOR, m.RemoveWorker(ANNA, False, "slow"), 80),
        PeerUp(PENDING, "", "10.0.0.9", INVITATION),
        Received(PENDING, m.Enrol(PENDING), 80),
    ) == ["StatusReply paused to operator", "Refused no-room to operator", "Refused no-room to pending"]
    assert len(disk.received) == 4, "three connections and one join: the core received nothing else"


def test_deferred_events_are_bounded(disk: FullDiskCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_full_mode, "MAX_EVENTS", 2)
    disk.turn(Received(ANNA, JOIN, 80))
    lines = disk.turn(*[Received(BERT, m.Leave("tired"), 80)] * 3)
    assert lines == ["hang up on bert"]


def test_the_disk_fills_again_while_deferred_events_are_handled(disk: FullDiskCoordinator) -> None:
    disk.turn(Received(ANNA, JOIN, 80))
    disk.answers = {
        MessageReceived: [JournalEntry("state", {"note": BIG * 20}), Send(ANNA, m.StartGeneration(1, 1))]
    }
    disk.turn(Received(BERT, m.Leave("tired"), 80))
    disk.store._connection.execute(f"PRAGMA max_page_count = {disk.pages + 40}")
    lines = disk.turn(after_s=2.0)
    assert lines[:3] == ["log info room_again", "StartGeneration to bert", "log error no_room"]
    disk.make_room()
    assert "StartGeneration to anna" in disk.turn(after_s=2.0)
    assert [e.kind for e in disk.store.entries()] == ["generation", "state"]


# -- backups in the loop -----------------------------------------------------------------------------


def test_backups_are_made_at_intervals_while_the_journal_grows(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    backups = Backups(tmp_path / "backups", tmp_path / "state", every_s=5.0, keep=2)
    disk = FullDiskCoordinator(tmp_path / "state", backups=backups)
    for number in range(12):
        disk.answers = {MessageReceived: [JournalEntry("generation", {"term": 1, "generation": number})]}
        disk.turn(Received(ANNA, JOIN, 80), after_s=1.0)
    assert sorted(path.name for path in (tmp_path / "backups").iterdir()) == [
        "backup-0-00000006",
        "backup-0-00000011",
    ]
    disk.turn(after_s=60.0)
    assert latest_backup(tmp_path / "backups").name == "backup-0-00000012", "the last entry is backed up too"
    assert backups.due_s == math.inf, "none is due until there is a new entry"


def test_a_failed_backup_is_logged_once_and_the_run_continues(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "backups").write_text("a file in the folder's place")
    disk = FullDiskCoordinator(tmp_path / "state", backups=Backups(tmp_path / "backups", tmp_path / "state"))
    disk.answers = {MessageReceived: [JournalEntry("state", {}), Send(BERT, m.StartGeneration(1, 1))]}
    assert disk.turn(Received(ANNA, JOIN, 80)) == ["StartGeneration to bert", "log error backup_failed"]
    assert disk.turn(Received(ANNA, JOIN, 80), after_s=60.0) == ["StartGeneration to bert"]
    (tmp_path / "backups").unlink()
    assert disk.turn(after_s=60.0) == ["log info backup"]
