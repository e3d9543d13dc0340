"""Tasks of the training thread: each is of one generation, is done once, and blocks no other."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gridtrain.config import Deadlines, JoinConfig
from gridtrain.core import messages as m
from gridtrain.core.group import member_events as io
from gridtrain.core.member.member import MemberCore
from gridtrain.errors import ConfigError
from gridtrain.network.transport.access_control import PeerAllowlist
from gridtrain.network.transport.interface import TrafficCounters
from gridtrain.runtime.group_session import GroupSession, WaitInterrupted
from gridtrain.runtime.io_loop import IoLoop
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.runtime.mailbox.worker_task import CaptureState, ReadCheckpoint, WorkerTask
from gridtrain.runtime.trainer_tasks import TrainerTasks

COORDINATOR, A, B, C = (letter * 32 for letter in (b"0", b"a", b"b", b"c"))
LEDGER = m.LedgerState(step=10)
K1, K2 = m.CheckpointInfo(9, b"h", LEDGER, m.Span(1, 2)), m.CheckpointInfo(4, b"g", LEDGER, m.Span(1, 2))


class Line:
    """A transport over which nothing comes."""

    me = A

    def __init__(self) -> None:
        self.traffic = TrafficCounters()

    def wake(self) -> None: ...

    def send(self, peer: m.PeerId, message: m.Message) -> None: ...


class Scene:
    """An I/O loop that is turned by hand; its core is a member of a pipeline of two, as a."""

    def __init__(self) -> None:
        config = JoinConfig("tcp://127.0.0.1:1", COORDINATOR.hex(), identity="x", run="r", name="a")
        self.loop: Any = IoLoop(Line(), config, PeerAllowlist(COORDINATOR))  # type: ignore[arg-type]
        self.core = MemberCore(A, COORDINATOR, m.Join("r", "a", ""), Deadlines())
        self.loop._core = self.core
        self.hear(io.PeerConnected(COORDINATOR))
        self.say(m.Welcome(1, "r", ""))
        spec = m.LedgerSpec(100, 0, epochs=1)
        self.hear(
            io.TrainerJoined(m.Setup((), spec, 4, None, stages=2), lambda rank, size, cuts=(): frozenset())
        )

    def hear(self, event: io.MemberEvent) -> None:
        self.core.handle(event, 0.0)

    def say(self, message: m.Message) -> None:
        self.hear(io.MessageReceived(COORDINATOR, message))

    def view(self, generation: int, *order: m.PeerId) -> None:
        members = tuple(m.Member(peer, peer[:1].decode(), "", 0, False, -1) for peer in order)
        self.say(m.MemberListPage(1, generation, 0, 1, members))
        ledger = m.LedgerState()
        view = m.MembershipView(
            1, generation, len(order), m.Verdict.ABORT, None, -1, self.core.history, ledger, "because"
        )
        self.say(view)

    def ask(self, peer: m.PeerId, generation: int, kept: m.CheckpointInfo | None = None) -> None:
        self.loop._execute_one(io.SendState(peer, 1, generation, True, kept, 0, False))

    @property
    def snapshot(self) -> WorkerSnapshot:
        """As the loop publishes it, once it has done what the trainer has submitted."""
        self.loop._run_commands()
        self.loop._publish()
        return self.loop.mailbox.snapshot

    @property
    def tasks(self) -> tuple[WorkerTask, ...]:
        return self.snapshot.tasks


def test_requests_of_an_earlier_generation_lapse() -> None:
    """Otherwise the state at the present rank would be sent under the name of the earlier one."""
    scene = Scene()
    scene.view(5, A, B)
    scene.ask(B, 5)
    scene.ask(B, 5, K1)
    assert scene.tasks == (ReadCheckpoint(5, K1), CaptureState(5, True))
    scene.view(6, A, C)
    assert scene.tasks == ()
    scene.ask(C, 6, K2)
    assert scene.tasks == (ReadCheckpoint(6, K2),), "it waits behind nothing"


def test_a_state_that_was_captured_for_an_earlier_generation_is_sent_to_nobody() -> None:
    scene = Scene()
    scene.view(5, A, B)
    scene.ask(B, 5)
    (task,) = scene.tasks
    assert isinstance(task, CaptureState)
    scene.view(6, A, B)
    scene.ask(B, 6)
    scene.loop.state_sender.supply_state(task, [b"own", b"common"])
    assert scene.tasks == (CaptureState(6, True),)
    assert scene.loop.state_sender._state_sender._captured[1] == []


def test_a_standby_gives_nobody_its_state_and_holds_none() -> None:
    scene = Scene()
    scene.view(5, A, B)
    scene.ask(B, 5)
    assert scene.tasks == (CaptureState(5, True),)
    sender = scene.loop.state_sender._state_sender
    sender.store(5, [b"own", b"common"])
    scene.ask(C, 5)
    scene.say(m.StandbyNotice(1, 6, 9, b"h", LEDGER, "spare"))
    assert scene.tasks == ()
    assert sender._captured[1] == [] and not sender._queues


class Disk:
    """K1 cannot be read, and is no longer listed then."""

    def __init__(self) -> None:
        self.states = (K1, K2)
        self.read: list[m.CheckpointInfo] = []

    def stored_checkpoints(self) -> tuple[m.CheckpointInfo, ...]:
        return self.states

    def discard_after(self, after: int) -> None: ...

    def read_for_peer(self, held: m.CheckpointInfo) -> list[bytes]:
        self.read.append(held)
        if held == K1:
            self.states = (K2,)
            raise ConfigError("its tensors differ from those that were written", remedy="")
        return [b"own", b"common"]


@pytest.mark.parametrize("full", [True, False])
def test_a_disk_that_is_full_is_reported_to_the_core(full: bool) -> None:
    """The checkpoint has a digest, as it is on the disk, and the one that was to be written has none."""
    written = replace(K1, digest=b"d" * 32)

    class FullDisk:
        def save_now(self, held: m.CheckpointInfo) -> None:
            if full:
                raise OSError(28, "No space left on device")

        def stored_checkpoints(self) -> tuple[m.CheckpointInfo, ...]:
            return () if full else (written,)

    scene = Scene()
    tasks = TrainerTasks(scene.loop)
    tasks.attach_stage_checkpoints(FullDisk())  # type: ignore[arg-type]
    scene.loop._execute_one(io.SaveCheckpoint(K1))
    snapshot = scene.snapshot
    assert tasks.next_task(snapshot) == io.SaveCheckpoint(K1)
    tasks.run(io.SaveCheckpoint(K1), snapshot, is_pipeline=True)
    events = [command for command in scene.loop.mailbox.take_commands() if not callable(command)]
    assert events == [
        io.StageCheckpointsChanged((), K1) if full else io.StageCheckpointsChanged((written,), None)
    ]


def test_a_checkpoint_that_cannot_be_read_blocks_no_other() -> None:
    scene, disk = Scene(), Disk()
    tasks = TrainerTasks(scene.loop)
    tasks.attach_stage_checkpoints(disk)  # type: ignore[arg-type]
    scene.view(5, A, B)
    scene.ask(B, 5, K1)
    scene.ask(C, 5, K2)
    while (task := tasks.next_task(snapshot := scene.snapshot)) is not None:
        tasks.run(task, snapshot, is_pipeline=True)
    assert disk.read == [K1, K2]
    senders = scene.loop.state_sender._checkpoint_senders
    assert scene.tasks == () and len(senders[K2]._queues) == 1 and not senders[K1]._queues
    scene.ask(B, 5, K1)
    assert scene.tasks == (), "it is not read again for whoever repeats its request"


def test_a_finished_task_is_not_done_twice_and_is_offered_again_when_it_is_due_again() -> None:
    scene = Scene()
    mailbox, task = scene.loop.mailbox, io.SaveCheckpoint(K1)
    scene.loop._execute_one(task)
    assert scene.tasks == (task,)
    computed = scene.loop._snapshot_builder.build(scene.core)
    scene.loop.checkpoint_requests.finish(task)
    mailbox.finish_task(task)
    assert mailbox.read().tasks == ()
    mailbox.publish(computed)
    assert mailbox.read().tasks == (), "it was computed before the loop could know"
    assert scene.tasks == ()
    scene.loop._execute_one(task)
    assert scene.tasks == (task,)


def test_what_others_need_of_its_memory_is_written_before_a_worker_leaves() -> None:
    """It is needed elsewhere, and the model is being repartitioned."""
    snapshots = [WorkerSnapshot(tasks=(io.SaveCheckpoint(K1),)), WorkerSnapshot()]
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
    session.is_standby_at_end = session._is_awaiting_choice = False
    session._early_plan = session._joined = None
    with pytest.raises(WaitInterrupted):
        session._wait(lambda _: True, between_batches=True)
    assert done == [io.SaveCheckpoint(K1)]


def test_a_worker_that_has_dropped_its_batch_asks_nobody_for_a_mean() -> None:
    """The others are at a step in which it takes no part: they would wait for one another."""
    session: Any = GroupSession.__new__(GroupSession)
    session._is_dropping_batch = True
    assert session.average(2.5) == 2.5
