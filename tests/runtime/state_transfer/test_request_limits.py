"""What other members ask this worker's trainer for is of one generation, and of what it can give."""

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
from gridtrain.network.transport.interface import TrafficCounters
from gridtrain.network.transport.access_control import PeerAllowlist
from gridtrain.runtime.group_session import GroupSession, WaitInterrupted
from gridtrain.runtime.io_loop import IoLoop
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.runtime.state_transfer.state_sender import StateSender

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
    """A driver whose loop is turned by hand; its core is a member of a pipeline of two, as a."""

    def __init__(self) -> None:
        config = JoinConfig("tcp://127.0.0.1:1", COORDINATOR.hex(), identity="x", run="r", name="a")
        self.driver: Any = IoLoop(Line(), config, PeerAllowlist(COORDINATOR))  # type: ignore[arg-type]
        self.core = MemberCore(A, COORDINATOR, m.Join("r", "a", ""), Deadlines())
        self.driver._core = self.core
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
        self.driver._execute_one(io.SendState(peer, 1, generation, True, kept, 0, False))

    @property
    def picture(self) -> Any:
        """As the loop publishes it, once it has done what the trainer has brought."""
        brought = self.driver.state_sender.take_supplied()
        self.driver._run_commands()
        self.driver.state_sender.store_supplied(brought, self.core.generation)
        self.driver._publish()
        return self.driver.last_snapshot


def test_what_was_asked_for_in_an_earlier_generation_is_not_owed() -> None:
    """Else its seat of now would be given under the name of the one of then."""
    scene = Scene()
    scene.view(5, A, B)
    scene.ask(B, 5)
    scene.ask(B, 5, K1)
    assert scene.picture.requested_state == (5, True) and scene.picture.requested_checkpoint == (5, K1)
    scene.view(6, A, C)
    assert scene.picture.requested_state == (0, False) and scene.picture.requested_checkpoint is None
    scene.ask(C, 6, K2)
    assert scene.picture.requested_checkpoint == (6, K2), "it waits behind nothing"


def test_a_spare_owes_nobody_a_state_and_holds_none() -> None:
    scene = Scene()
    scene.view(5, A, B)
    scene.ask(B, 5)
    assert scene.picture.requested_state == (5, True)
    scene.driver.giving._own.fill(5, [b"own", b"common"])
    scene.ask(C, 5)
    scene.say(m.StandbyNotice(1, 6, 9, b"h", LEDGER, "spare"))
    assert scene.picture.requested_state == (0, False)
    assert scene.driver.giving._own._captured[1] == [] and not scene.driver.giving._own._queues


class Disk:
    """K1 cannot be read, and is not told of then any more."""

    def __init__(self) -> None:
        self.states = (K1, K2)

    def held(self) -> tuple[m.CheckpointInfo, ...]:
        return self.states

    def give(self, held: m.CheckpointInfo) -> list[bytes]:
        if held == K1:
            self.states = (K2,)
            raise ConfigError("its tensors differ from those that were written", remedy="")
        return [b"own", b"common"]


@pytest.mark.parametrize("full", [True, False])
def test_a_disk_that_is_full_is_told_to_the_core(full: bool) -> None:
    """The checkpoint has a digest, as it is on the disk, and what was to be written none."""
    written = replace(K1, digest=b"d" * 32)

    class Aside:
        def put_aside(self, held: m.CheckpointInfo) -> None:
            if full:
                raise OSError(28, "No space left on device")

        def held(self) -> tuple[m.CheckpointInfo, ...]:
            return () if full else (written,)

    heard: list[io.MemberEvent] = []
    disk = SimpleNamespace(put_aside=lambda held: None)
    driver: Any = SimpleNamespace(disk=disk, wait=lambda *_: None, command=heard.append)
    session: Any = GroupSession.__new__(GroupSession)
    session._driver, session._disk = driver, Aside()
    session._save_now(K1)
    assert heard == [
        io.StageCheckpointsChanged((), K1) if full else io.StageCheckpointsChanged((written,), None)
    ]


def test_a_checkpoint_that_cannot_be_read_blocks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    session: Any = GroupSession.__new__(GroupSession)
    session._driver, session._disk, session._gave = scene.driver, Disk(), None
    scene.view(5, A, B)
    scene.ask(B, 5, K1)
    scene.ask(C, 5, K2)
    given: list[tuple[m.CheckpointInfo, int, Any]] = []
    giving = scene.driver.state_sender
    monkeypatch.setattr(
        giving,
        "supply_checkpoint",
        lambda *kept: (given.append(kept), StateSender.supply_checkpoint(giving, *kept)),
    )
    for _ in range(2):
        assert session._must_send_checkpoint(scene.picture)
        session._send_checkpoint(scene.picture)
    assert given == [(K1, 5, None), (K2, 5, [b"own", b"common"])]
    assert scene.picture.requested_checkpoint is None


def test_what_others_need_of_its_memory_is_written_before_a_worker_goes() -> None:
    """Its owner wants it elsewhere, and the model is being cut anew."""
    pictures = [WorkerSnapshot(save_requested=K1), WorkerSnapshot()]
    done: list[m.CheckpointInfo] = []

    def wait(ready: Any) -> WorkerSnapshot:
        assert ready(pictures[0])
        return pictures[0]

    def put_aside(held: m.CheckpointInfo) -> None:
        done.append(held)
        pictures.pop(0)

    session: Any = GroupSession.__new__(GroupSession)
    session._driver = SimpleNamespace(wait=wait, signs=SimpleNamespace(busy=lambda inside: None))
    session._disk, session._put_aside = object(), put_aside
    session._replay = session._inherit = session._capture = session._copy = session._gave = None
    session._given_for, session._awaits_choice = (0, False), False
    with pytest.raises(WaitInterrupted):
        session._wait_for_event(lambda _: True)
    assert done == [K1]


def test_who_has_given_its_batch_up_asks_nobody_for_a_mean() -> None:
    """The others are at a step that this worker does not take any more: they would wait for one another."""
    session: Any = GroupSession.__new__(GroupSession)
    session._gives_up = True
    assert session.average(2.5) == 2.5
