"""The training thread takes a state, while the I/O thread may be in a later generation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gridtrain.config import JoinConfig
from gridtrain.core import messages as m
from gridtrain.core.group import member_events as ev
from gridtrain.network.transport.access_control import PeerAllowlist
from gridtrain.network.transport.interface import TrafficCounters
from gridtrain.runtime.io_loop import IoLoop
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.runtime.mailbox.worker_task import AddResiduals, LoadState
from gridtrain.runtime.state_transfer.blobs import split_blocks
from gridtrain.runtime.trainer_tasks import TrainerTasks

COORDINATOR = b"c" * 32


class IdleWorker:
    """A trainer with an I/O loop that does not run."""

    def __init__(self) -> None:
        transport: Any = SimpleNamespace(me=b"w" * 32, traffic=TrafficCounters(), wake=lambda: None)
        config = JoinConfig("tcp://127.0.0.1:1", COORDINATOR.hex())
        self.loop = IoLoop(transport, config, PeerAllowlist(COORDINATOR))
        self.tasks = TrainerTasks(self.loop)
        self.loaded: list[Any] = []
        self.tasks.attach_state(lambda snapshot, whole: None, self.loaded.append)

    def receive(self, generation: int, blob: bytes) -> None:
        blocks = split_blocks([blob])
        for index, block in enumerate(blocks):
            message = m.StateBlock(1, generation, index, len(blocks), block)
            self.loop.state_receiver.receive_block(message, vouched=True, is_forwarding=False)

    def run(self, task: Any) -> list[ev.MemberEvent]:
        """Runs a task; returns the resulting events."""
        self.tasks.run(task, WorkerSnapshot(tasks=(task,)), is_pipeline=False)
        return [command for command in self.loop.mailbox.take_commands() if not callable(command)]


@pytest.fixture
def worker() -> IdleWorker:
    return IdleWorker()


def test_the_next_generations_state_may_arrive_before_this_ones_is_loaded(worker: IdleWorker) -> None:
    """Otherwise trainer and I/O loop would wait for each other."""
    worker.receive(1, b"old")
    assert worker.run(LoadState(1)) == [ev.StateLoaded(1, 1)]
    worker.receive(2, b"new")
    assert worker.run(LoadState(2)) == [ev.StateLoaded(1, 2)]
    assert worker.loaded == [[b"old"], [b"new"]]


def test_a_replaced_state_is_not_loaded_for_another_generation(
    worker: IdleWorker,
) -> None:
    worker.receive(1, b"old")
    worker.receive(2, b"new")
    assert worker.run(LoadState(1)) == [] and worker.loaded == []
    assert worker.run(LoadState(2)) == [ev.StateLoaded(1, 2)] and worker.loaded == [[b"new"]]


def test_a_residual_received_while_another_is_added_is_added_too(worker: IdleWorker) -> None:
    added: list[Any] = []
    worker.tasks.attach_residual(4, lambda name, entries: added.append(entries))
    confirmed: Any = [("anna", "entries")]
    for count in (1, 2):
        worker.loop.residuals.incoming.confirmed = list(confirmed)
        assert worker.tasks.next_task(WorkerSnapshot(tasks=(AddResiduals(),))) == AddResiduals()
        worker.run(AddResiduals())
        assert added == ["entries"] * count
