"""A stream of payloads delays nothing else in the I/O loop by more than `HOUSEKEEPING_INTERVAL_S`."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest

from gridtrain.config import Deadlines, JoinConfig
from gridtrain.core import messages as m
from gridtrain.core.group import member_events as io
from gridtrain.network.transport.access_control import PeerAllowlist
from gridtrain.network.transport.interface import Received, TrafficCounters
from gridtrain.runtime import io_loop as loop
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.runtime.mailbox.worker_task import AddResiduals, CaptureState
from gridtrain.runtime.open_round import OpenRound, PipelineRound

COORDINATOR, PEER = b"c" * 32, b"p" * 32
BETWEEN_S = 0.0007
"""Payloads come so often: never a moment in which nothing is there."""


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class Line:
    """A transport over which a payload comes each time that it is asked."""

    me = b"w" * 32

    def __init__(self, clock: Clock) -> None:
        self.clock, self.traffic, self.woken = clock, TrafficCounters(), 0
        self.credited: dict[m.PeerId, int] = {}
        self.waits: list[float] = []

    def poll(self, timeout_s: float) -> list[Received]:
        self.waits.append(timeout_s)
        self.clock.now_s += BETWEEN_S
        place = m.PayloadSlot(m.CollectivePhase.REDUCE)
        return [Received(PEER, m.Data(m.RoundId(1, 1, 0, 0), m.Channel(), place, 0, b"1234"), 50)]

    def wake(self) -> None:
        self.woken += 1

    def backlog_bytes(self, peer: m.PeerId) -> int:
        return 0

    def return_credit(self, held_bytes: Callable[[m.PeerId], int]) -> None:
        self.credited[PEER] = 50 * len(self.waits) - held_bytes(PEER)


class Core:
    """Of a member in the middle of an exchange: when it beat, and how late its deadlines were."""

    phase, term, generation, pause_reason, is_synced = io.MemberPhase.RUNNING, 1, 1, "", True
    rank_assignment = absent_round = current_generation = None
    known_peers = frozenset((COORDINATOR, PEER))

    def __init__(self, clock: Clock) -> None:
        self.clock, self.deadline_s = clock, clock.now_s + 0.5
        self.beats: list[float] = []
        self.late_s: list[float] = []
        self.payloads = 0

    def handle(self, event: io.MemberEvent, now_s: float) -> list[io.MemberEffect]:
        self.beats += [now_s] if isinstance(event, io.HeartbeatDue) else []
        return []

    def receive_data(self, peer: m.PeerId, data: m.Data, nbytes: int, now_s: float) -> list[io.MemberEffect]:
        self.payloads += 1
        return []

    def tick(self, now_s: float) -> list[io.MemberEffect]:
        self.late_s.append(now_s - self.deadline_s)
        self.deadline_s = now_s + 0.5
        return []

    def early_bytes(self, peer: m.PeerId) -> int:
        return 0


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A driver, its core and its line, which `play` lets turn for some seconds."""
    clock = Clock()
    monkeypatch.setattr(loop, "time", clock)
    config = JoinConfig("tcp://127.0.0.1:1", COORDINATOR.hex(), deadlines=Deadlines(beat_s=0.25))
    line, core = Line(clock), Core(clock)
    driver: Any = loop.IoLoop(line, config, PeerAllowlist(COORDINATOR))  # type: ignore[arg-type]
    driver._core = core

    def play(for_s: float) -> None:
        until_s = clock.now_s + for_s
        while clock.now_s < until_s:
            driver._run_once()

    return types.SimpleNamespace(driver=driver, core=core, line=line, play=play)


def test_beats_and_deadlines_are_kept_while_payloads_come(busy: Any) -> None:
    most_s = loop.HOUSEKEEPING_INTERVAL_S + 2 * BETWEEN_S
    busy.play(3.0)
    gaps_s = [after - before for before, after in zip(busy.core.beats, busy.core.beats[1:], strict=False)]
    assert len(gaps_s) >= 10 and max(gaps_s) <= 0.25 + most_s
    assert len(busy.core.late_s) >= 5 and 0 <= min(busy.core.late_s) <= max(busy.core.late_s) <= most_s
    assert max(busy.line.waits[2:]) <= 0.25, "no turn of its own for chores that no deadline asks for"


def test_who_sends_may_send_on_at_once(busy: Any) -> None:
    """Its credit is no chore: a sender without any would wait."""
    busy.play(0.05)
    assert busy.core.payloads > 50
    assert busy.line.credited == {PEER: 50 * busy.core.payloads}


def test_a_command_between_two_turns_brings_housekeeping_forward(busy: Any) -> None:
    """Submitted after the turn has taken its commands: `_main` takes it before the next one."""
    busy.play(0.05)
    before_s = busy.driver._housekeeping_s
    busy.driver.mailbox.submit(lambda: None)
    busy.driver._run_commands()
    busy.driver._run_once()
    assert busy.driver._housekeeping_s > before_s


@pytest.mark.parametrize("catching_up", [False, True])
def test_most_turns_do_no_chores(busy: Any, catching_up: bool) -> None:
    chores = []
    busy.driver._link_probe._round_trips.take_results = chores.append
    if catching_up:  # updates are sent between the payloads
        busy.driver.catch_up_source.set_receivers(io.TakeSnapshot(0, (PEER,)))
    busy.play(1.0)
    shortest_s = loop.HOUSEKEEPING_INTERVAL_S if catching_up else loop.QUIET_INTERVAL_S
    due = 0 if catching_up else 1.0 / 0.25 + 1.0 / 0.5  # heartbeats and deadlines
    assert 1.0 / (shortest_s + 2 * BETWEEN_S) - 1 <= len(chores) <= 1.0 / shortest_s + due + 2


@pytest.mark.parametrize("what", ["command", "state", "aside", "discarded", "inherited"])
def test_what_the_trainer_says_counts_in_the_next_turn(busy: Any, what: str) -> None:
    busy.play(0.02)
    driver, held = busy.driver, m.CheckpointInfo(1, b"h", m.LedgerState())
    driver.mailbox.is_stale, woken = False, busy.line.woken
    match what:
        case "command":
            driver.mailbox.submit(io.AbandonRound())
        case "state":
            driver.state_sender.supply_state(CaptureState(1, False), [b""])
        case "aside":
            driver.checkpoint_requests.finish(io.SaveCheckpoint(held))
        case "discarded":
            driver.mailbox.finish_task(io.DiscardCheckpoints(3))
        case "inherited":
            driver.residuals.take_confirmed()
    assert driver.mailbox.is_stale, "the snapshot is looked at again, whatever comes over the line meanwhile"
    assert busy.line.woken == woken + 1


def test_who_waits_for_a_payload_is_woken_for_that_one(busy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, woken = busy.driver, []
    mine = driver.step_rounds.current = OpenRound(m.RoundId(1, 1, 0, 0), {})
    sent, awaited = m.Channel(index=1), m.Channel(index=2)

    def arrives(timeout_s: float) -> None:
        """In place of sleeping: what the loop's thread does meanwhile."""
        assert timeout_s > 0 and len(woken) < 5
        for channel in (sent, awaited):
            driver._execute_one(io.CollectiveCompleted(channel, 0))

    monkeypatch.setattr(driver.mailbox.condition, "wait", arrives)
    monkeypatch.setattr(
        driver.mailbox.condition, "notify_all", lambda: woken.append(frozenset(mine.completed))
    )
    assert PipelineRound(driver.mailbox, mine).wait(awaited)
    assert woken == [{sent, awaited}]
    assert PipelineRound(driver.mailbox, mine).wait(sent, awaited), "they are there: nobody waits"


@pytest.mark.parametrize("whole", [False, True])
def test_a_bucket_that_is_sent_early_waits_for_no_chore(busy: Any, whole: bool) -> None:
    """Nor does the backward that goes on beside it; the rest of the round changes the snapshot."""
    busy.play(0.02)
    driver = busy.driver
    driver._housekeeping_s += 1.0  # it is not due
    driver.mailbox.is_stale = driver._is_snapshot_due = False
    (driver.mailbox.submit if whole else driver.mailbox.submit_payload)(
        io.SubmitRound(m.RoundId(1, 1, 0, 0), {}, is_complete=whole)
    )
    driver._run_once()
    assert driver.mailbox.is_stale == whole


def test_turns_without_events_do_no_chores_before_one_is_due(busy: Any) -> None:
    """While slices are hashed the loop does not wait, and most turns find nothing."""
    busy.play(0.02)
    driver, line, chores = busy.driver, busy.line, []
    driver._do_housekeeping = chores.append
    driver._heartbeat_s = busy.core.deadline_s = line.clock.now_s + 0.05
    line.poll = lambda timeout_s: []
    driver.step_rounds.has_hash_work = True
    for _ in range(3):
        driver._run_once()
    assert not chores
    line.clock.now_s += 0.05
    driver._run_once()
    assert len(chores) == 1, "idle when something is due: at once, whenever the last time was"


@pytest.mark.parametrize("awaited", [False, True])
def test_only_a_trainer_that_goes_on_is_shown_that_it_has_submitted(busy: Any, awaited: bool) -> None:
    """One that waits for the outcome is shown the snapshot that comes with it."""
    busy.play(0.02)
    mailbox, rounds = busy.driver.mailbox, busy.driver.step_rounds
    mailbox.publish(WorkerSnapshot(generation=1))
    mailbox.is_stale = False
    round_id = m.RoundId(1, 1, 0, 0)
    if awaited:
        rounds.await_submitted = lambda mine: mine
        mine = rounds.run(round_id, [], False, b"")
    else:
        mine = rounds.submit(round_id, [], False, b"")
    assert mine is rounds.current
    assert mailbox.is_stale == (not awaited)
    assert [type(command) for command in mailbox.take_commands()] == [io.SubmitRound]


def test_what_the_trainer_has_made_is_sent_in_the_turn_in_which_it_is_taken(busy: Any) -> None:
    """Those who wait for a snapshot are answered by housekeeping; the next event may be long in coming."""
    busy.play(0.02)
    driver = busy.driver
    driver._housekeeping_s += 1.0  # it is not due
    driver._is_snapshot_due = False
    driver.mailbox.submit(lambda: None)
    driver._run_once()
    assert driver._is_snapshot_due


def test_a_finished_task_that_is_due_again_is_shown_without_a_chore(busy: Any) -> None:
    """It was withdrawn from a snapshot that was published before the loop had taken the commands."""
    mailbox, again = busy.driver.mailbox, WorkerSnapshot(tasks=(AddResiduals(),))
    mailbox.publish(again)
    mailbox.finish_task(AddResiduals())
    assert mailbox.take_stale()
    mailbox.publish(again)
    assert mailbox.read().tasks == ()
    mailbox.take_commands()
    assert mailbox.take_stale()
    mailbox.publish(again)
    assert mailbox.read().tasks == (AddResiduals(),)
    mailbox.take_commands()
    assert not mailbox.take_stale(), "no snapshot for nothing"
