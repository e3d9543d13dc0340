"""Tasks of the training thread: each belongs to one generation, is done once, and blocks no other."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_member import COORDINATOR, SETUP, ScriptedMember, no_neighbours

from gridtrain.config import JoinConfig
from gridtrain.core import messages as m
from gridtrain.core.group import member_events as ev
from gridtrain.errors import ConfigError
from gridtrain.network.transport.access_control import PeerAllowlist
from gridtrain.network.transport.interface import TrafficCounters
from gridtrain.runtime.event_log import log_event
from gridtrain.runtime.group_session import GroupSession, WaitInterrupted
from gridtrain.runtime.io_loop import IoLoop
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.runtime.mailbox.worker_task import CaptureState, ReadCheckpoint, WorkerTask
from gridtrain.runtime.trainer_tasks import TrainerTasks

A, B, C = (letter * 32 for letter in (b"a", b"b", b"c"))
LEDGER = m.LedgerState(step=10)
K1, K2 = m.CheckpointInfo(9, b"h", LEDGER, m.Span(1, 2)), m.CheckpointInfo(4, b"g", LEDGER, m.Span(1, 2))


class IdleTransport:
    """A transport that receives nothing."""

    me = A

    def __init__(self) -> None:
        self.traffic = TrafficCounters()

    def wake(self) -> None: ...

    def send(self, peer: m.PeerId, message: m.Message) -> None: ...


class ManualLoop(ScriptedMember):
    """An I/O loop that tests run by hand; its core is member a of a pipeline of two."""

    def __init__(self) -> None:
        super().__init__(A, replace(SETUP, stages=2), neighbours=no_neighbours)
        config = JoinConfig("tcp://127.0.0.1:1", COORDINATOR.hex(), identity="x", run="r", name="a")
        self.loop: Any = IoLoop(IdleTransport(), config, PeerAllowlist(COORDINATOR))  # type: ignore[arg-type]
        self.loop._core = self.core

    def view(self, generation: int, *order: m.PeerId) -> None:
        self.install(generation, (m.Member(peer, peer[:1].decode(), "", 0, False, -1) for peer in order))

    def request(self, peer: m.PeerId, generation: int, stored: m.CheckpointInfo | None = None) -> None:
        self.loop._execute_one(ev.SendState(peer, 1, generation, True, stored, 0, False))

    @property
    def snapshot(self) -> WorkerSnapshot:
        """The snapshot that the loop publishes after the trainer's commands."""
        self.loop._run_commands()
        self.loop._publish()
        return self.loop.mailbox.snapshot

    @property
    def tasks(self) -> tuple[WorkerTask, ...]:
        return self.snapshot.tasks


def test_requests_of_an_earlier_generation_are_dropped() -> None:
    """Otherwise the state of the present rank would be sent as that of the earlier one."""
    worker = ManualLoop()
    worker.view(5, A, B)
    worker.request(B, 5)
    worker.request(B, 5, K1)
    assert worker.tasks == (ReadCheckpoint(5, K1), CaptureState(5, True))
    worker.view(6, A, C)
    assert worker.tasks == ()
    worker.request(C, 6, K2)
    assert worker.tasks == (ReadCheckpoint(6, K2),), "no other task precedes it"


def test_a_state_captured_for_an_earlier_generation_is_not_sent() -> None:
    worker = ManualLoop()
    worker.view(5, A, B)
    worker.request(B, 5)
    (task,) = worker.tasks
    assert isinstance(task, CaptureState)
    worker.view(6, A, B)
    worker.request(B, 6)
    worker.loop.state_sender.supply_state(task, [b"own", b"common"])
    assert worker.tasks == (CaptureState(6, True),)
    assert worker.loop.state_sender._state_sender._captured[1] == []


def test_a_standby_sends_and_stores_no_state() -> None:
    worker = ManualLoop()
    worker.view(5, A, B)
    worker.request(B, 5)
    assert worker.tasks == (CaptureState(5, True),)
    sender = worker.loop.state_sender._state_sender
    sender.store(5, [b"own", b"common"])
    worker.request(C, 5)
    worker.say(m.StandbyNotice(1, 6, None, 9, b"h", LEDGER, "standby"))
    assert worker.tasks == ()
    assert sender._captured[1] == [] and not sender._queues


def test_a_member_that_learns_of_the_last_step_from_a_notice_ends() -> None:
    worker = ManualLoop()
    worker.view(5, A, B)
    worker.say(m.StartGeneration(1, 5))
    worker.say(m.Freeze(1, 5, "b is lost"))
    last = m.LedgerState(step=1, cursor=100, consumed=100)
    worker.say(m.StandbyNotice(1, 6, None, worker.core.applied, worker.core.history, last, "the run is over"))
    assert worker.snapshot.is_finished
    assert worker.snapshot.is_synced and worker.snapshot.world_size == 2


class Disk:
    """K1 cannot be read and is not listed afterwards."""

    def __init__(self) -> None:
        self.states = (K1, K2)
        self.read: list[m.CheckpointInfo] = []

    def stored_checkpoints(self) -> tuple[m.CheckpointInfo, ...]:
        return self.states

    def discard_after(self, after: int) -> None: ...

    def read_for_peer(self, checkpoint: m.CheckpointInfo) -> list[bytes]:
        self.read.append(checkpoint)
        if checkpoint == K1:
            self.states = (K2,)
            raise ConfigError("its tensors differ from those that were written", remedy="")
        return [b"own", b"common"]


@pytest.mark.parametrize("is_full", [True, False])
def test_a_full_disk_is_reported_to_the_core(is_full: bool) -> None:
    """The checkpoint on disk has a digest, the one to be written has none."""
    written = replace(K1, digest=b"d" * 32)

    class FullDisk:
        def save_now(self, checkpoint: m.CheckpointInfo) -> None:
            if is_full:
                raise OSError(28, "No space left on device")

        def stored_checkpoints(self) -> tuple[m.CheckpointInfo, ...]:
            return () if is_full else (written,)

    worker = ManualLoop()
    tasks = TrainerTasks(worker.loop)
    tasks.attach_stage_checkpoints(FullDisk())  # type: ignore[arg-type]
    worker.loop._execute_one(ev.SaveCheckpoint(K1))
    snapshot = worker.snapshot
    assert tasks.next_task(snapshot) == ev.SaveCheckpoint(K1)
    tasks.run(ev.SaveCheckpoint(K1), snapshot, is_pipeline=True)
    events = [command for command in worker.loop.mailbox.take_commands() if not callable(command)]
    assert events == [
        ev.StageCheckpointsChanged((), K1) if is_full else ev.StageCheckpointsChanged((written,), None)
    ]


def test_a_checkpoint_that_cannot_be_read_blocks_no_other() -> None:
    worker, disk = ManualLoop(), Disk()
    tasks = TrainerTasks(worker.loop)
    tasks.attach_stage_checkpoints(disk)  # type: ignore[arg-type]
    worker.view(5, A, B)
    worker.request(B, 5, K1)
    worker.request(C, 5, K2)
    while (task := tasks.next_task(snapshot := worker.snapshot)) is not None:
        tasks.run(task, snapshot, is_pipeline=True)
    assert disk.read == [K1, K2]
    senders = worker.loop.state_sender._checkpoint_senders
    assert worker.tasks == () and len(senders[K2]._queues) == 1 and not senders[K1]._queues
    worker.request(B, 5, K1)
    assert worker.tasks == (), "a repeated request does not read it again"


def test_a_finished_task_is_offered_again_only_when_it_is_due_again() -> None:
    worker = ManualLoop()
    mailbox, task = worker.loop.mailbox, ev.SaveCheckpoint(K1)
    worker.loop._execute_one(task)
    assert worker.tasks == (task,)
    computed = worker.loop._snapshot_builder.build(worker.core)
    worker.loop.checkpoint_requests.finish(task)
    mailbox.finish_task(task)
    assert mailbox.read().tasks == ()
    mailbox.publish(computed)
    assert mailbox.read().tasks == (), "this snapshot precedes the end of the task"
    assert worker.tasks == ()
    worker.loop._execute_one(task)
    assert worker.tasks == (task,)


def test_a_state_that_others_need_is_written_before_a_worker_leaves() -> None:
    """The worker is leaving while the model is repartitioned."""
    snapshots = [WorkerSnapshot(tasks=(ev.SaveCheckpoint(K1),)), WorkerSnapshot()]
    done: list[object] = []

    def wait(ready: Any) -> WorkerSnapshot:
        assert ready(snapshots[0])
        return snapshots[0]

    def run(task: object, snapshot: WorkerSnapshot, *, is_pipeline: bool) -> None:
        done.append(task)
        snapshots.pop(0)

    session: Any = GroupSession.__new__(GroupSession)
    session.connection = SimpleNamespace(wait=wait)
    session.tasks = SimpleNamespace(run=run, next_task=lambda snapshot, **_: next(iter(snapshot.tasks), None))
    session.end_reason, session._is_awaiting_choice = "", False
    session._early_plan = session._submitted = session._joined = None
    with pytest.raises(WaitInterrupted):
        session._wait(lambda _: True, between_batches=True)
    assert done == [ev.SaveCheckpoint(K1)]


def test_a_worker_that_dropped_its_batch_requests_no_mean() -> None:
    """The others are at a step in which it takes no part, so both sides would wait."""
    session: Any = GroupSession.__new__(GroupSession)
    session._is_dropping_batch, session.end_reason = True, ""
    assert session.average(2.5) == 2.5


def test_a_worker_that_waits_for_another_ones_state_names_it(caplog: pytest.LogCaptureFixture) -> None:
    worker = ManualLoop()
    worker.install(5, (m.Member(peer, peer[:1].decode(), "", 0, peer == B) for peer in (A, B)))
    assert worker.snapshot.awaited_newcomers == ("b",)
    session: Any = GroupSession.__new__(GroupSession)
    session.connection = SimpleNamespace(loop=worker.loop)
    assert session.why_waiting == "the members wait for the state to reach b"
    caplog.set_level("INFO", "gridtrain")
    log_event("awaited", {"names": ("b", "c", "d", "e")})
    assert caplog.messages == ["the members wait for the state to reach b, c, d and 1 more"]
