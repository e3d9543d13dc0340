"""A stream of payloads delays housekeeping of the I/O loop by at most `HOUSEKEEPING_INTERVAL_S`."""

from __future__ import annotations

import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gridtrain.config import Deadlines, JoinConfig
from gridtrain.core import messages as m
from gridtrain.core.group import member_events as ev
from gridtrain.network.transport.access_control import PeerAllowlist
from gridtrain.network.transport.interface import Received, TrafficCounters
from gridtrain.runtime import io_loop as loop
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.runtime.mailbox.worker_task import AddResiduals, CaptureState
from gridtrain.runtime.open_round import OpenRound, PipelineRound

COORDINATOR, PEER = b"c" * 32, b"p" * 32
BETWEEN_S = 0.0007
"""The interval of payloads, so short that every poll returns one."""


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class BusyTransport:
    """A transport that receives a payload in each poll."""

    me = b"w" * 32

    def __init__(self, clock: Clock) -> None:
        self.clock, self.traffic, self.woken = clock, TrafficCounters(), 0
        self.credited: dict[m.PeerId, int] = {}
        self.waits: list[float] = []

    def poll(self, timeout_s: float) -> list[Received]:
        self.waits.append(timeout_s)
        self.clock.now_s += BETWEEN_S
        slot = m.PayloadSlot(m.CollectivePhase.REDUCE)
        return [Received(PEER, m.Data(m.RoundId(1, 1, 0, 0), m.Channel(), slot, 0, b"1234"), 50)]

    def wake(self) -> None:
        self.woken += 1

    def backlog_bytes(self, peer: m.PeerId) -> int:
        return 0

    def return_credit(self, held_bytes: Callable[[m.PeerId], int]) -> None:
        self.credited[PEER] = 50 * len(self.waits) - held_bytes(PEER)


class Core:
    """The core of a member in an exchange; records the times of heartbeats and the lateness of ticks."""

    phase, term, generation, pause_reason, is_synced = ev.MemberPhase.RUNNING, 1, 1, "", True
    rank_assignment = absent_round = current_generation = None
    known_peers = frozenset((COORDINATOR, PEER))
    residual_transfer = SimpleNamespace(is_refusing=False)

    def __init__(self, clock: Clock) -> None:
        self.clock, self.deadline_s = clock, clock.now_s + 0.5
        self.heartbeats: list[float] = []
        self.late_s: list[float] = []
        self.payloads = 0

    def handle(self, event: ev.MemberEvent, now_s: float) -> list[ev.MemberEffect]:
        self.heartbeats += [now_s] if isinstance(event, ev.HeartbeatDue) else []
        return []

    def receive_data(self, peer: m.PeerId, data: m.Data, nbytes: int, now_s: float) -> list[ev.MemberEffect]:
        self.payloads += 1
        return []

    def tick(self, now_s: float) -> list[ev.MemberEffect]:
        self.late_s.append(now_s - self.deadline_s)
        self.deadline_s = now_s + 0.5
        return []

    def early_bytes(self, peer: m.PeerId) -> int:
        return 0


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A loop with its core and its transport; `run` runs it for some seconds."""
    clock = Clock()
    monkeypatch.setattr(loop, "time", clock)
    config = JoinConfig("tcp://127.0.0.1:1", COORDINATOR.hex(), deadlines=Deadlines(beat_s=0.25))
    transport, core = BusyTransport(clock), Core(clock)
    driver: Any = loop.IoLoop(transport, config, PeerAllowlist(COORDINATOR))  # type: ignore[arg-type]
    driver._core = core

    def run(for_s: float) -> None:
        until_s = clock.now_s + for_s
        while clock.now_s < until_s:
            driver._run_once()

    return types.SimpleNamespace(driver=driver, core=core, transport=transport, run=run)


def test_heartbeats_and_deadlines_are_on_time_while_payloads_arrive(busy: Any) -> None:
    most_s = loop.HOUSEKEEPING_INTERVAL_S + 2 * BETWEEN_S
    busy.run(3.0)
    gaps_s = [
        after - before for before, after in zip(busy.core.heartbeats, busy.core.heartbeats[1:], strict=False)
    ]
    assert len(gaps_s) >= 10 and max(gaps_s) <= 0.25 + most_s
    assert len(busy.core.late_s) >= 5 and 0 <= min(busy.core.late_s) <= max(busy.core.late_s) <= most_s
    assert max(busy.transport.waits[2:]) <= 0.25, "no extra turn for housekeeping without a deadline"


def test_senders_get_their_credit_in_the_same_turn(busy: Any) -> None:
    """A sender without credit would have to wait for housekeeping."""
    busy.run(0.05)
    assert busy.core.payloads > 50
    assert busy.transport.credited == {PEER: 50 * busy.core.payloads}


def test_a_command_between_two_turns_brings_housekeeping_forward(busy: Any) -> None:
    """The command is submitted after the turn has taken its commands; `_main` takes it before the next."""
    busy.run(0.05)
    before_s = busy.driver._housekeeping_s
    busy.driver.mailbox.submit(lambda: None)
    busy.driver._run_commands()
    busy.driver._run_once()
    assert busy.driver._housekeeping_s > before_s


@pytest.mark.parametrize("catching_up", [False, True])
def test_most_turns_do_no_housekeeping(busy: Any, catching_up: bool) -> None:
    runs = []

    def poll(now_s: float) -> tuple[None, None]:
        runs.append(now_s)
        return None, None

    busy.driver._link_probe.poll = poll
    if catching_up:  # updates are sent between the payloads
        busy.driver.catch_up_source.set_receivers(ev.TakeStateSnapshot(0, (PEER,)))
    busy.run(1.0)
    shortest_s = loop.HOUSEKEEPING_INTERVAL_S if catching_up else loop.QUIET_INTERVAL_S
    due = 0 if catching_up else 1.0 / 0.25 + 1.0 / 0.5  # heartbeats and deadlines
    assert 1.0 / (shortest_s + 2 * BETWEEN_S) - 1 <= len(runs) <= 1.0 / shortest_s + due + 2


@pytest.mark.parametrize("what", ["command", "state", "saved", "discarded", "residual"])
def test_results_of_the_trainer_are_handled_in_the_next_turn(busy: Any, what: str) -> None:
    busy.run(0.02)
    driver, checkpoint = busy.driver, m.CheckpointInfo(1, b"h", m.LedgerState())
    driver.mailbox.is_stale, woken = False, busy.transport.woken
    match what:
        case "command":
            driver.mailbox.submit(ev.AbandonRound())
        case "state":
            driver.state_sender.supply_state(CaptureState(1, False), [b""])
        case "saved":
            driver.checkpoint_requests.finish(ev.SaveCheckpoint(checkpoint))
        case "discarded":
            driver.mailbox.finish_task(ev.DiscardCheckpoints(3))
        case "residual":
            driver.residuals.take_confirmed()
    assert driver.mailbox.is_stale, "the snapshot is read again, whatever arrives meanwhile"
    assert busy.transport.woken == woken + 1


def test_a_trainer_that_waits_for_a_payload_is_woken_for_that_payload_only(
    busy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, woken = busy.driver, []
    mine = driver.step_rounds.current = OpenRound(m.RoundId(1, 1, 0, 0), {})
    sent, awaited = m.Channel(index=1), m.Channel(index=2)

    def arrives(timeout_s: float) -> None:
        """Replaces the wait by what the loop's thread does meanwhile."""
        assert timeout_s > 0 and len(woken) < 5
        for channel in (sent, awaited):
            driver._execute_one(ev.CollectiveCompleted(channel, 0))

    monkeypatch.setattr(driver.mailbox.condition, "wait", arrives)
    monkeypatch.setattr(
        driver.mailbox.condition, "notify_all", lambda: woken.append(frozenset(mine.completed))
    )
    assert PipelineRound(driver.mailbox, mine).wait(awaited)
    assert woken == [{sent, awaited}]
    assert PipelineRound(driver.mailbox, mine).wait(sent, awaited), "both have arrived, so there is no wait"


@pytest.mark.parametrize("whole", [False, True])
def test_a_bucket_that_is_sent_early_causes_no_housekeeping(busy: Any, whole: bool) -> None:
    """Only the remaining buckets of the round change the snapshot."""
    busy.run(0.02)
    driver = busy.driver
    driver._housekeeping_s += 1.0  # it is not due
    driver.mailbox.is_stale = driver._is_snapshot_due = False
    (driver.mailbox.submit if whole else driver.mailbox.submit_payload)(
        ev.SubmitRound(m.RoundId(1, 1, 0, 0), {}, is_complete=whole)
    )
    driver._run_once()
    assert driver.mailbox.is_stale == whole


def test_turns_without_events_do_no_housekeeping_before_it_is_due(busy: Any) -> None:
    """While slices are hashed the loop does not wait, and most turns have no events."""
    busy.run(0.02)
    driver, transport, runs = busy.driver, busy.transport, []
    driver._do_housekeeping = runs.append
    driver._heartbeat_s = busy.core.deadline_s = transport.clock.now_s + 0.05
    transport.poll = lambda timeout_s: []
    driver.step_rounds.has_hash_work = True
    for _ in range(3):
        driver._run_once()
    assert not runs
    transport.clock.now_s += 0.05
    driver._run_once()
    assert len(runs) == 1, "at once when it is due in an idle turn"


@pytest.mark.parametrize("awaited", [False, True])
def test_a_submission_is_published_only_for_a_trainer_that_continues(busy: Any, awaited: bool) -> None:
    """A trainer that waits for the outcome gets the snapshot of the outcome."""
    busy.run(0.02)
    mailbox, rounds = busy.driver.mailbox, busy.driver.step_rounds
    mailbox.publish(WorkerSnapshot(generation=1))
    mailbox.is_stale = False
    round_id = m.RoundId(1, 1, 0, 0)
    mine = rounds.submit(round_id, [], False, b"", is_awaited=awaited)
    assert mine is rounds.current
    assert mailbox.is_stale == (not awaited)
    assert [type(command) for command in mailbox.take_commands()] == [ev.SubmitRound]


def test_a_command_of_the_trainer_makes_a_snapshot_due_in_its_turn(busy: Any) -> None:
    """Housekeeping publishes the snapshot; the next event may arrive much later."""
    busy.run(0.02)
    driver = busy.driver
    driver._housekeeping_s += 1.0  # it is not due
    driver._is_snapshot_due = False
    driver.mailbox.submit(lambda: None)
    driver._run_once()
    assert driver._is_snapshot_due


def test_a_finished_task_that_is_due_again_is_published_without_housekeeping(busy: Any) -> None:
    """It was removed from a snapshot that was published before the loop had taken the commands."""
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
    assert not mailbox.take_stale(), "no further snapshot"
