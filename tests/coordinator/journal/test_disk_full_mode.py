"""With a full disk the coordinator makes no decisions, says so, and continues when there is room."""

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

COORDINATOR, OPERATOR, ANNA, BERT, INVITATION, GUEST = (
    letter * 32 for letter in (b"c", b"o", b"a", b"b", b"i", b"g")
)
NAMES = {OPERATOR: "operator", ANNA: "anna", BERT: "bert", GUEST: "guest"}
BIG = "x" * 60_000


class Scene:
    """A real journal that can be filled; a core and a transport that record events and messages."""

    def __init__(self, folder: Path, *, backups: Backups | None = None) -> None:
        self.now_s = 100.0
        self.lines: list[str] = []
        self.heard: list[tuple[float, Event]] = []
        self.deadline_s = 1e9
        self.answers: dict[type[Event], list[Effect]] = {}
        self.turns: list[list[TransportEvent]] = []
        self.me = COORDINATOR
        self.store = JournalStore.open(folder / JOURNAL)
        self.store.identity()
        (self.pages,) = self.store._connection.execute("PRAGMA page_count").fetchone()
        door = Authorization(open_to_all=True, operator=OPERATOR, coordinator=COORDINATOR)
        door.invite(INVITATION, 9, 600.0, 0.0)
        for member in (ANNA, BERT):
            door.enrol(INVITATION, member, "", 0.0)
        reception = AccessHandler(door, self, OPERATOR, lambda: 100.0)
        self.loop = Coordinator(
            self, self.store, self, reception, log=self.log, clock=lambda: self.now_s, backups=backups
        )  # type: ignore[arg-type]

    def fill(self) -> None:
        self.store._connection.execute(f"PRAGMA max_page_count = {self.pages + 2}")

    def make_room(self) -> None:
        self.store._connection.execute("PRAGMA max_page_count = 100000")

    def turn(self, *events: TransportEvent, after_s: float = 0.0) -> list[str]:
        """What the loop did in one turn."""
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
        self.heard.append((now_s, event))
        return self.answers.get(type(event), [])

    def tick(self, now_s: float) -> list[Effect]:
        self.lines.append("tick")
        return []

    def snapshot(self, now_s: float) -> dict[str, Any]:
        return {"phase": "training", "reason": "", "step": 0, "finished": False, "members": [], "events": []}


JOIN = m.Join("default", "anna", "memory://anna")
DECIDES = [
    JournalEntry("generation", {"term": 1, "generation": 1, "note": BIG}),
    Send(BERT, m.StartGeneration(1, 1)),
]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    scene = Scene(tmp_path)
    scene.answers = {MessageReceived: DECIDES}
    scene.turn(PeerUp(ANNA), PeerUp(BERT), PeerUp(OPERATOR))
    scene.fill()
    return scene


def test_the_command_that_finds_the_disk_full_is_refused_at_once(scene: Scene) -> None:
    """Its program used to wait in vain, and to report that no coordinator can be reached."""
    scene.store._connection.execute(f"PRAGMA max_page_count = {scene.pages}")
    for number in range(200):  # short entries, until one does not fit
        invite = m.Invite(bytes([number]) * 32, 1, 600.0)
        lines = scene.turn(Received(OPERATOR, invite, 80))
        if lines[0] == "log error no_room":
            break
    assert "Refused no-room to operator" in lines


def test_a_decision_waits_for_room_and_is_then_carried_out_once(scene: Scene) -> None:
    assert scene.turn(Received(ANNA, JOIN, 80)) == [
        "log error no_room",
        "RunStateUpdate paused to anna",
        "RunStateUpdate paused to bert",
    ]
    assert scene.turn(after_s=5.0) == [], "tried in vain"
    scene.make_room()
    assert scene.turn(after_s=0.5) == [], "once a second"
    assert scene.turn(after_s=0.6) == [
        "log info room_again",
        "StartGeneration to bert",
        "RunStateUpdate training to anna",
        "RunStateUpdate training to bert",
    ]
    assert [e.kind for e in scene.store.entries()] == ["generation"]


def test_what_comes_meanwhile_comes_later_in_its_order_and_nobody_is_late(scene: Scene) -> None:
    scene.turn(Received(ANNA, JOIN, 80))
    stopped_s = scene.heard[-1][0]
    scene.deadline_s = stopped_s + 3.0
    ready = m.Ready(1, 1, bytes(32))
    assert (
        scene.turn(Received(BERT, ready, 80), Received(ANNA, m.Heartbeat(1, 0, 0, ()), 80), after_s=60.0)
        == []
    )
    assert scene.turn(PeerDown(ANNA, "closed"), PeerUp(ANNA), after_s=60.0) == [
        "RunStateUpdate paused to anna"
    ]
    told = len(scene.heard)
    scene.answers = {}
    scene.make_room()
    scene.turn(after_s=60.0)
    assert [event for _, event in scene.heard[told:]] == [
        MessageReceived(BERT, ready),
        PeerDisconnected(ANNA, "closed"),
        PeerConnected(ANNA),
    ]
    assert {at_s for at_s, _ in scene.heard[told:]} == {stopped_s}, "the core's clock stood still"
    assert scene.turn(after_s=1.0) == [] and "tick" in scene.turn(after_s=2.5)


def test_status_says_it_and_guests_and_orders_are_refused(scene: Scene) -> None:
    scene.turn(Received(ANNA, JOIN, 80))
    assert scene.turn(
        Received(OPERATOR, m.StatusRequest(), 8),
        Received(OPERATOR, m.RemoveWorker(ANNA, False, "slow"), 80),
        PeerUp(GUEST, "", "10.0.0.9", INVITATION),
        Received(GUEST, m.Enrol(GUEST), 80),
    ) == ["StatusReply paused to operator", "Refused no-room to operator", "Refused no-room to guest"]
    assert len(scene.heard) == 4, "three came, one joined: the core heard nothing of it"


def test_what_is_kept_is_bounded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_full_mode, "MAX_EVENTS", 2)
    scene.turn(Received(ANNA, JOIN, 80))
    lines = scene.turn(*[Received(BERT, m.Leave("tired"), 80)] * 3)
    assert lines == ["hang up on bert"]


def test_a_second_time_without_room_while_going_on(scene: Scene) -> None:
    scene.turn(Received(ANNA, JOIN, 80))
    scene.answers = {
        MessageReceived: [JournalEntry("state", {"note": BIG * 20}), Send(ANNA, m.StartGeneration(1, 1))]
    }
    scene.turn(Received(BERT, m.Leave("tired"), 80))
    scene.store._connection.execute(f"PRAGMA max_page_count = {scene.pages + 40}")
    lines = scene.turn(after_s=2.0)
    assert lines[:3] == ["log info room_again", "StartGeneration to bert", "log error no_room"]
    scene.make_room()
    assert "StartGeneration to anna" in scene.turn(after_s=2.0)
    assert [e.kind for e in scene.store.entries()] == ["generation", "state"]


# -- backups in the loop -----------------------------------------------------------------------------


def test_a_backup_follows_the_journal_but_not_each_entry(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    backups = Backups(tmp_path / "backups", tmp_path / "state", every_s=5.0, keep=2)
    scene = Scene(tmp_path / "state", backups=backups)
    for number in range(12):
        scene.answers = {MessageReceived: [JournalEntry("generation", {"term": 1, "generation": number})]}
        scene.turn(Received(ANNA, JOIN, 80), after_s=1.0)
    assert sorted(path.name for path in (tmp_path / "backups").iterdir()) == [
        "backup-0-00000006",
        "backup-0-00000011",
    ]
    scene.turn(after_s=60.0)
    assert latest_backup(tmp_path / "backups").name == "backup-0-00000012", "the last one too"
    assert backups.due_s == math.inf, "until there is something new"


def test_a_backup_that_fails_is_said_once_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "backups").write_text("a file in the folder's place")
    scene = Scene(tmp_path / "state", backups=Backups(tmp_path / "backups", tmp_path / "state"))
    scene.answers = {MessageReceived: [JournalEntry("state", {}), Send(BERT, m.StartGeneration(1, 1))]}
    assert scene.turn(Received(ANNA, JOIN, 80)) == ["StartGeneration to bert", "log error backup_failed"]
    assert scene.turn(Received(ANNA, JOIN, 80), after_s=60.0) == ["StartGeneration to bert"]
    (tmp_path / "backups").unlink()
    assert scene.turn(after_s=60.0) == ["log info backup"]
