"""With a full disk the coordinator makes no decisions, reports it, and continues when there is room."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
from scripted_daemon import (
    ANNA,
    BERT,
    INVITATION,
    JOIN,
    OPERATOR,
    PENDING,
    FakeCore,
    ScriptedTransport,
    access_handler,
)

from gridtrain.core import messages as m
from gridtrain.network.transport.interface import (
    PeerDown,
    PeerUp,
    Received,
    TransportEvent,
    VersionMismatch,
)
from gridtrain_coordinator.daemon import Coordinator
from gridtrain_coordinator.journal import disk_full_mode
from gridtrain_coordinator.journal.backups import JOURNAL, Backups, latest_backup
from gridtrain_coordinator.journal.store import JournalFull, JournalStore
from gridtrain_coordinator.run.events import (
    Disconnect,
    JournalEntry,
    LogEvent,
    MessageReceived,
    PeerConnected,
    PeerDisconnected,
    Send,
    WorkerRemoved,
)

BIG = "x" * 60_000


class DescribedTransport(ScriptedTransport):
    """Records the run's phase that a message names, and the code of a refusal."""

    def name_of(self, message: m.Message) -> str:
        match message:
            case m.RunStateUpdate(state):
                return f"RunStateUpdate {state}"
            case m.Refused(code):
                return f"Refused {code}"
            case m.StatusReply(payload):
                return f"StatusReply {json.loads(bytes(payload))['phase']}"
        return super().name_of(message)


class FullDiskCoordinator:
    """A coordinator with a real journal that can be filled; core and transport record what they receive."""

    def __init__(self, folder: Path, *, backups: Backups | None = None) -> None:
        self.now_s, self.backups = 100.0, backups
        self.lines: list[str] = []
        self.core = FakeCore()
        self.core.fixed_status["phase"] = "training"
        self.core.at_tick = [LogEvent("info", "tick")]
        self.transport = DescribedTransport(self.lines, [])
        self.store = JournalStore.open(folder / JOURNAL)
        self.store.identity()
        (self.pages,) = self.store._connection.execute("PRAGMA page_count").fetchone()
        self.loop = Coordinator(
            self.transport, self.store, self.core, access_handler(self.core, ANNA, BERT, uses=9),
            log=self.log, clock=lambda: self.now_s, backups=backups,
        )  # type: ignore[arg-type]  # fmt: skip

    def fill(self) -> None:
        self.store._connection.execute(f"PRAGMA max_page_count = {self.pages + 2}")

    def fill_to_the_last_byte(self) -> None:
        self.fill()
        with pytest.raises(JournalFull):
            while True:
                self.store.append_all([("strike", {})])

    def make_room(self) -> None:
        self.store._connection.execute("PRAGMA max_page_count = 100000")

    def iteration(self, *events: TransportEvent, after_s: float = 0.0) -> list[str]:
        """Runs the loop once and returns what it did."""
        self.now_s += after_s
        self.transport.iterations.append(list(events))
        began = len(self.lines)
        self.loop._run_once()
        if self.backups is not None:
            self.backups.wait(self.now_s)  # the next iteration reports its end
        return self.lines[began:]

    def status(self, after_s: float = 0.0) -> dict[str, Any]:
        """Returns the status that an operator receives."""
        self.iteration(Received(OPERATOR, m.StatusRequest(), 8), after_s=after_s)
        status: dict[str, Any] = json.loads(bytes(self.transport.sent[-1].payload))
        return status

    def log(self, level: str, event: str, fields: Mapping[str, Any]) -> None:
        self.lines.append(f"log {level} {event}")


DECISION = [
    JournalEntry("generation", {"term": 1, "generation": 1, "note": BIG}),
    Send(BERT, m.StartGeneration(1, 1)),
]


@pytest.fixture
def disk(tmp_path: Path) -> FullDiskCoordinator:
    disk = FullDiskCoordinator(tmp_path)
    disk.core.answers = {MessageReceived: DECISION}
    disk.iteration(PeerUp(ANNA), PeerUp(BERT), PeerUp(OPERATOR))
    disk.fill()
    return disk


def test_a_command_that_finds_the_disk_full_is_refused_at_once(disk: FullDiskCoordinator) -> None:
    """Otherwise the command would time out and report that no coordinator can be reached."""
    disk.store._connection.execute(f"PRAGMA max_page_count = {disk.pages}")
    for number in range(200):  # short entries, until one does not fit
        invite = m.Invite(bytes([number]) * 32, 1, 600.0)
        lines = disk.iteration(Received(OPERATOR, invite, 80))
        if lines[0] == "log error no_room":
            break
    assert "send Refused no-room to operator" in lines


KICK = m.RemoveWorker(ANNA, False, "slow")


def test_a_kick_that_cannot_be_recorded_changes_nothing(disk: FullDiskCoordinator) -> None:
    disk.core.answers = {WorkerRemoved: [Disconnect(ANNA)]}
    disk.fill_to_the_last_byte()
    refused = ["log error no_room", "send Refused no-room to operator"]
    assert disk.iteration(Received(OPERATOR, KICK, 80), Received(ANNA, JOIN, 80)) == refused
    assert disk.core.received[-1] == MessageReceived(ANNA, JOIN), "anna has access"
    assert disk.iteration(Received(OPERATOR, KICK, 80)) == refused, "the second one, too"
    disk.make_room()
    assert "hang up on anna" not in disk.iteration(after_s=2.0)
    assert "expelled" not in [e.kind for e in disk.store.entries()]
    assert disk.iteration(Received(OPERATOR, KICK, 80), Received(ANNA, JOIN, 80)) == [
        "hang up on anna",
        "send OperatorReply to operator",
    ]
    assert [e.kind for e in disk.store.entries()][-1] == "expelled"


def test_an_end_of_the_run_that_cannot_be_recorded_changes_nothing(disk: FullDiskCoordinator) -> None:
    disk.core.at_end = [JournalEntry("state", {"ending": True})]
    disk.core.after_end = [LogEvent("info", "finished")]
    disk.fill_to_the_last_byte()
    assert disk.iteration(Received(OPERATOR, m.EndRun(), 8)) == [
        "log error no_room",
        "send Refused no-room to operator",
    ]
    disk.make_room()
    disk.iteration(after_s=6.0)
    assert disk.core.ends == 0 and "state" not in [e.kind for e in disk.store.entries()]
    assert disk.iteration(Received(OPERATOR, m.EndRun(), 8)) == [
        "log info finished",
        "send OperatorReply to operator",
    ]
    assert [e.kind for e in disk.store.entries()][-1] == "state"


def test_a_recorded_command_whose_further_entries_do_not_fit_is_carried_out_later(
    disk: FullDiskCoordinator,
) -> None:
    disk.core.at_end = [JournalEntry("state", {"ending": True})]
    disk.core.after_end = [JournalEntry("state", {"note": BIG}), LogEvent("info", "finished")]
    lines = disk.iteration(Received(OPERATOR, m.EndRun(), 8))
    assert (lines[0], lines[-1]) == ("log error no_room", "send OperatorReply to operator")
    assert disk.transport.sent[-1] == disk_full_mode.DEFERRED
    assert [e.body for e in disk.store.entries()] == [{"ending": True}]
    disk.make_room()
    assert "log info finished" in disk.iteration(after_s=2.0)
    assert disk.core.ends == 1 and len(list(disk.store.entries())) == 2


def test_a_command_follows_the_decisions_of_earlier_messages(disk: FullDiskCoordinator) -> None:
    lines = disk.iteration(Received(ANNA, JOIN, 80), Received(OPERATOR, KICK, 80), Received(BERT, JOIN, 80))
    assert (lines[0], lines[-1]) == ("log error no_room", "send Refused no-room to operator")
    before, disk.core.answers = len(disk.core.received), {}
    disk.make_room()
    assert "send StartGeneration to bert" in disk.iteration(after_s=2.0)
    assert disk.core.received[before:] == [MessageReceived(BERT, JOIN)]


def test_a_decision_is_carried_out_once_when_there_is_room(disk: FullDiskCoordinator) -> None:
    assert disk.iteration(Received(ANNA, JOIN, 80)) == [
        "log error no_room",
        "send RunStateUpdate paused to anna",
        "send RunStateUpdate paused to bert",
    ]
    assert disk.iteration(after_s=5.0) == [], "still no room"
    disk.make_room()
    assert disk.iteration(after_s=0.5) == [], "tried once a second"
    assert disk.iteration(after_s=0.6) == [
        "log info room_again",
        "send StartGeneration to bert",
        "send RunStateUpdate training to anna",
        "send RunStateUpdate training to bert",
    ]
    assert [e.kind for e in disk.store.entries()] == ["generation"]


def test_events_are_deferred_in_order_and_deadlines_wait(disk: FullDiskCoordinator) -> None:
    disk.iteration(Received(ANNA, JOIN, 80))
    stopped_s = disk.core.received_s[-1]
    disk.core.deadline_s = stopped_s + 3.0
    ready = m.Ready(1, 1, bytes(32))
    assert (
        disk.iteration(Received(BERT, ready, 80), Received(ANNA, m.Heartbeat(1, 0, 0, ()), 80), after_s=60.0)
        == []
    )
    assert disk.iteration(PeerDown(ANNA, "closed"), PeerUp(ANNA), after_s=60.0) == [
        "send RunStateUpdate paused to anna"
    ]
    before = len(disk.core.received)
    disk.core.answers = {}
    disk.make_room()
    disk.iteration(after_s=60.0)
    assert disk.core.received[before:] == [
        MessageReceived(BERT, ready),
        PeerDisconnected(ANNA, "closed"),
        PeerConnected(ANNA),
    ]
    assert set(disk.core.received_s[before:]) == {stopped_s}, "the core's clock stood still"
    assert disk.iteration(after_s=1.0) == [] and "log info tick" in disk.iteration(after_s=2.5)


def test_the_status_says_so_and_enrolments_and_commands_are_refused(disk: FullDiskCoordinator) -> None:
    disk.iteration(Received(ANNA, JOIN, 80))
    assert disk.iteration(
        Received(OPERATOR, m.StatusRequest(), 8),
        Received(OPERATOR, m.RemoveWorker(ANNA, False, "slow"), 80),
        PeerUp(PENDING, "", "10.0.0.9", INVITATION),
        Received(PENDING, m.Enrol(PENDING), 80),
    ) == [
        "send StatusReply paused to operator",
        "send Refused no-room to operator",
        "send Refused no-room to the pending member",
    ]
    assert len(disk.core.received) == 4, "three connections and one join: the core received nothing else"


def test_the_status_shows_later_heartbeats_and_broken_connections(disk: FullDiskCoordinator) -> None:
    """anna trains, bert is still receiving the state."""
    row = {"state": "active", "share": 4, "step": 40, "progress": 9, "figures": {}, "last_heard_s": 0.5}
    disk.core.fixed_status |= {
        "step": 40,
        "members": [{**row, "rank": n, "peer": peer.hex()} for peer, n in ((ANNA, 0), (BERT, None))],
    }
    disk.iteration(Received(ANNA, JOIN, 80))
    beats = [m.Heartbeat(1, step, step, (("loss", 2.0),)) for step in (160, 170, 900)]
    disk.iteration(Received(ANNA, beats[0], 80), Received(BERT, beats[2], 80), after_s=2.0)
    disk.iteration(PeerDown(BERT, "reset"), after_s=3.0)
    disk.iteration(Received(ANNA, beats[1], 80), after_s=4.0)
    status = disk.status(after_s=1.0)
    rows = [(x["state"], x["step"], x["progress"], x["last_heard_s"]) for x in status["members"]]
    assert rows == [("active", 170, 170, 1.0), ("suspect", 900, 900, 8.0)]
    assert (status["phase"], status["step"], status["loss"]) == ("paused", 170, 2.0)
    assert status["reason"].endswith("except for heartbeats and broken connections, this status is 10 s old")
    disk.iteration(PeerDown(ANNA, "reset"))
    assert disk.status(after_s=9.0)["members"][0]["state"] == "suspect"
    disk.core.answers = {}
    disk.make_room()
    disk.iteration(after_s=1.0)
    assert disk.status()["members"][0]["step"] == 40, "the core has not received the heartbeats"


def test_the_core_learns_the_last_step_of_a_worker_that_leaves(disk: FullDiskCoordinator) -> None:
    disk.iteration(Received(ANNA, JOIN, 80))
    beats = [m.Heartbeat(1, step, step, ()) for step in (160, 170)]
    leave = m.Leave("Ctrl-C")
    disk.iteration(*[Received(ANNA, message, 80) for message in (*beats, leave)])
    disk.core.answers = {}
    disk.make_room()
    disk.iteration(after_s=1.0)
    assert disk.core.received[-2:] == [MessageReceived(ANNA, beats[1]), MessageReceived(ANNA, leave)]


def test_rates_are_not_measured_across_a_time_without_decisions(disk: FullDiskCoordinator) -> None:
    for _ in range(3):
        disk.core.fixed_status["step"] += 10
        disk.iteration(after_s=1.0)
    assert disk.status()["steps_per_s"] == 10.0
    disk.iteration(Received(ANNA, JOIN, 80))
    assert disk.status(after_s=60.0)["steps_per_s"] is None
    disk.core.answers = {}
    disk.make_room()
    disk.iteration(after_s=1.0)
    disk.iteration(after_s=0.5)
    disk.core.fixed_status["step"] += 600  # the next heartbeats arrive
    for _ in range(3):
        disk.core.fixed_status["step"] += 10
        disk.iteration(after_s=1.0)
    assert disk.status()["steps_per_s"] == 10.0


def test_deferred_events_are_bounded(disk: FullDiskCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_full_mode, "MAX_EVENTS", 2)
    disk.iteration(Received(ANNA, JOIN, 80))
    lines = disk.iteration(*[Received(BERT, m.Leave("tired"), 80)] * 3)
    assert lines == ["hang up on bert"]


def test_refusals_of_other_versions_are_not_deferred(disk: FullDiskCoordinator) -> None:
    disk.iteration(Received(ANNA, JOIN, 80))
    event = VersionMismatch(None, "", BERT, "10.0.0.5", 5, "gridtrain 0.0")
    assert disk.iteration(event) == ["log warning refused"]
    assert [row["workers"] for row in disk.status()["refused_versions"]] == [1]


def test_the_disk_fills_again_while_deferred_events_are_handled(disk: FullDiskCoordinator) -> None:
    disk.iteration(Received(ANNA, JOIN, 80))
    disk.core.answers = {
        MessageReceived: [JournalEntry("state", {"note": BIG * 20}), Send(ANNA, m.StartGeneration(1, 1))]
    }
    disk.iteration(Received(BERT, m.Leave("tired"), 80))
    disk.store._connection.execute(f"PRAGMA max_page_count = {disk.pages + 40}")
    lines = disk.iteration(after_s=2.0)
    assert lines[:3] == ["log info room_again", "send StartGeneration to bert", "log error no_room"]
    disk.make_room()
    assert "send StartGeneration to anna" in disk.iteration(after_s=2.0)
    assert [e.kind for e in disk.store.entries()] == ["generation", "state"]


# -- backups in the loop -----------------------------------------------------------------------------


def test_backups_are_made_at_intervals_while_the_journal_grows(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    backups = Backups(tmp_path / "backups", tmp_path / "state", every_s=5.0, keep=2)
    disk = FullDiskCoordinator(tmp_path / "state", backups=backups)
    for number in range(12):
        disk.core.answers = {MessageReceived: [JournalEntry("generation", {"term": 1, "generation": number})]}
        disk.iteration(Received(ANNA, JOIN, 80), after_s=1.0)
    assert sorted(path.name for path in (tmp_path / "backups").iterdir()) == [
        "backup-0-00000006",
        "backup-0-00000011",
    ]
    for _ in range(2):
        disk.iteration(after_s=60.0)
    assert latest_backup(tmp_path / "backups").name == "backup-0-00000012", "the last entry is backed up too"
    assert backups.due_s == math.inf, "none is due until there is a new entry"


def test_a_failed_backup_is_logged_once_and_the_run_continues(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "backups").write_text("a file in the folder's place")
    disk = FullDiskCoordinator(tmp_path / "state", backups=Backups(tmp_path / "backups", tmp_path / "state"))
    disk.core.answers = {MessageReceived: [JournalEntry("state", {}), Send(BERT, m.StartGeneration(1, 1))]}
    disk.iteration(Received(ANNA, JOIN, 80))
    assert disk.iteration() == ["log error backup_failed"]
    for _ in range(2):
        assert disk.iteration(Received(ANNA, JOIN, 80), after_s=60.0) == ["send StartGeneration to bert"]
    (tmp_path / "backups").unlink()
    assert [disk.iteration(after_s=60.0) for _ in range(2)] == [[], ["log info backup"]]


def test_a_folder_that_does_not_answer_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state").mkdir()
    backups, answers = Backups(tmp_path / "backups", tmp_path / "state"), threading.Event()
    monkeypatch.setattr("gridtrain_coordinator.journal.backups._sync", lambda path: answers.wait())
    disk = FullDiskCoordinator(tmp_path / "state", backups=backups)
    monkeypatch.setattr(backups, "wait", lambda now_s: None)
    disk.core.answers = {MessageReceived: [JournalEntry("state", {}), Send(BERT, m.StartGeneration(1, 1))]}
    try:
        for after_s in (0.0, 29.0):
            assert disk.iteration(Received(ANNA, JOIN, 80), after_s=after_s) == [
                "send StartGeneration to bert"
            ]
        assert disk.iteration(after_s=1.0) == ["log error backup_failed"]
        assert disk.iteration(Received(ANNA, JOIN, 80), after_s=60.0) == ["send StartGeneration to bert"]
        disk.iteration(PeerUp(OPERATOR))
        assert "has not answered for 30 s" in disk.status()["backup"]["failed"]
    finally:
        answers.set()
    assert backups._writing is not None
    wait([backups._writing])
    assert disk.iteration() == ["log info backup"], "once the folder answers"


@pytest.mark.parametrize("answers", [True, False])
def test_the_last_backup_has_every_entry_unless_the_folder_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    (tmp_path / "state").mkdir()
    backups = Backups(tmp_path / "backups", tmp_path / "state")
    stop, release = threading.Event(), threading.Event()
    disk = FullDiskCoordinator(tmp_path / "state", backups=backups)
    disk.core.at_start = [JournalEntry("state", {})]
    if not answers:
        monkeypatch.setattr("gridtrain_coordinator.journal.backups._sync", lambda path: release.wait())
        monkeypatch.setattr("gridtrain_coordinator.journal.backups.ANSWER_TIMEOUT_S", 0.0)
    backups.begin(disk.store, disk.now_s)  # one without that entry is being written
    stop.set()
    try:
        disk.loop.run(stop)
    finally:
        release.set()
    if answers:
        assert latest_backup(tmp_path / "backups").name == "backup-0-00000001" and not backups.is_pending
    else:
        assert "log error backup_failed" in disk.lines
