"""Checkpoints of a stage are copied from file to file, block by block, and only complete ones are kept."""

from __future__ import annotations

import shutil
import struct
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from brisk import WITHIN_S

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as ev
from gridtrain.errors import RemoteProtocolError, TransportError
from gridtrain.runtime.state_transfer.block_buffer import BLOCK_BYTES
from gridtrain.runtime.state_transfer.checkpoint_copy import FILES, RESIDUAL_FILE, CheckpointCopier

CHECKPOINT = m.CheckpointInfo(9, b"h", m.LedgerState(step=10), layers=m.Span(1, 2))
PEER = b"p" * 32
SIZES = (100, 2 * BLOCK_BYTES + 5)


class Disk:
    """A folder with a checkpoint, and one for received copies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.adopted, self.checked, self.may_adopt = (threading.Event() for _ in range(3))
        self.may_adopt.set()
        for name, size in zip(FILES, SIZES, strict=True):
            (folder / name).write_bytes(
                bytes(i % 251 for i in range(256)) * (size // 256) + b"e" * (size % 256)
            )

    def make_copy_folder(self, checkpoint: m.CheckpointInfo) -> Path:
        (self.folder / "copy").mkdir(exist_ok=True)
        return self.folder / "copy"

    def files_to_copy(self, checkpoint: m.CheckpointInfo) -> list[Path]:
        return [self.folder / name for name in FILES]

    def is_intact(self, checkpoint: m.CheckpointInfo) -> bool:
        assert checkpoint.layers == CHECKPOINT.layers
        self.checked.set()
        return False

    def adopt_copy(self, checkpoint: m.CheckpointInfo, folder: Path) -> None:
        assert checkpoint == CHECKPOINT and self.may_adopt.wait(WITHIN_S)
        self.adopted.set()


class RecordingTransport:
    """The part of a transport that a copier needs."""

    def __init__(self) -> None:
        self.sent: list[m.CheckpointBlock] = []
        self.waiting_bytes = 0
        self.broken = False

    def backlog_bytes(self, peer: m.PeerId) -> int:
        return self.waiting_bytes

    def send(self, peer: m.PeerId, message: m.CheckpointBlock) -> None:
        if self.broken:
            raise TransportError("gone", remedy="")
        self.sent.append(message)


def sent_by(copies: CheckpointCopier, transport: Any, generation: int = 1) -> list[m.CheckpointBlock]:
    copies.send(ev.SendCheckpoint(PEER, 1, 1, CHECKPOINT))
    for now_s in range(20):
        copies.send_next(transport, float(now_s), generation)
    return list(transport.sent)


def test_an_awaited_checkpoint_that_was_pruned_is_checked(tmp_path: Path) -> None:
    """The coordinator then learns which checkpoints exist, and plans without the others."""
    disk, transport = Disk(tmp_path), RecordingTransport()
    copies = CheckpointCopier(disk, None, 10**8)
    (tmp_path / FILES[0]).unlink()
    copies.send(ev.SendCheckpoint(PEER, 1, 1, CHECKPOINT, is_awaited=True))
    copies.send_next(transport, 0.0, 1)  # type: ignore[arg-type]
    assert transport.sent == [] and disk.checked.wait(WITHIN_S)


def test_all_blocks_arrive_and_the_files_are_equal(tmp_path: Path) -> None:
    disk, transport = Disk(tmp_path), RecordingTransport()
    blocks = sent_by(CheckpointCopier(disk, None, 10**8), transport)
    assert [len(block.payload) for block in blocks] == [16, 100, BLOCK_BYTES, BLOCK_BYTES, 5]
    assert [(block.index, block.total) for block in blocks] == [(i, 5) for i in range(5)]
    receiver = CheckpointCopier(disk, None, 10**8)
    for block in blocks:
        receiver.receive(block)
    assert disk.adopted.wait(WITHIN_S)
    for name in FILES:
        assert (tmp_path / "copy" / name).read_bytes() == (tmp_path / name).read_bytes()


def test_an_awaited_checkpoint_is_sent_first_at_full_rate_with_the_residual(tmp_path: Path) -> None:
    """The receiver takes over the stage; a mere copy of a checkpoint must not include the residual."""
    disk, transport = Disk(tmp_path), RecordingTransport()
    (tmp_path / RESIDUAL_FILE).write_bytes(b"unsent")
    copies = CheckpointCopier(disk, rate_Bps=1.0, max_bytes=10**8)
    copies.send(ev.SendCheckpoint(PEER, 1, 1, CHECKPOINT))
    for _ in range(2):  # requested again after a broken connection
        copies.send(ev.SendCheckpoint(PEER, 1, 1, CHECKPOINT, is_awaited=True))
    for _ in range(8):
        copies.send_next(transport, 0.0, 1)  # type: ignore[arg-type]
    assert [len(block.payload) for block in transport.sent] == [24, 100, BLOCK_BYTES, BLOCK_BYTES, 5, 6, 16]
    receiver = CheckpointCopier(disk, None, 10**8)
    for block in transport.sent[:6]:
        receiver.receive(block)
    assert disk.adopted.wait(WITHIN_S)
    assert (tmp_path / "copy" / RESIDUAL_FILE).read_bytes() == b"unsent"


def test_an_awaited_checkpoint_does_not_wait_for_a_slow_copy(tmp_path: Path) -> None:
    disk, transport = Disk(tmp_path), RecordingTransport()
    copies = CheckpointCopier(disk, rate_Bps=1.0, max_bytes=10**8)
    copies.send(ev.SendCheckpoint(PEER, 1, 1, CHECKPOINT))
    assert copies.send_next(transport, 0.0, 1) == 1 and copies.due_s == 16.0  # type: ignore[arg-type]
    copies.send(ev.SendCheckpoint(b"q" * 32, 1, 1, CHECKPOINT, is_awaited=True))
    for _ in range(8):
        copies.send_next(transport, 0.0, 1)  # type: ignore[arg-type]
    assert [len(block.payload) for block in transport.sent] == [16, 16, 100, BLOCK_BYTES, BLOCK_BYTES, 5, 16]
    assert copies.due_s == 16.0, "the slow copy restarts"


def test_copies_yield_to_rounds_and_respect_the_rate(tmp_path: Path) -> None:
    disk, transport = Disk(tmp_path), RecordingTransport()
    copies = CheckpointCopier(disk, rate_Bps=float(BLOCK_BYTES), max_bytes=10**8)
    copies.send(ev.SendCheckpoint(PEER, 1, 1, CHECKPOINT))
    transport.waiting_bytes = 1
    assert copies.send_next(transport, 0.0, 1) == 0  # type: ignore[arg-type]
    transport.waiting_bytes = 0
    assert copies.due_s == pytest.approx(0.02)
    for now_s in (0.02, 0.03, 0.04):
        copies.send_next(transport, now_s, 1)  # type: ignore[arg-type]
    assert len(transport.sent) == 3, "16 + 100 bytes cause no delay"
    assert copies.due_s == pytest.approx(1.04)
    assert copies.send_next(transport, 0.5, 1) == 0  # type: ignore[arg-type]


def test_another_generation_or_a_broken_connection_ends_a_copy(tmp_path: Path) -> None:
    disk, transport = Disk(tmp_path), RecordingTransport()
    assert sent_by(CheckpointCopier(disk, None, 10**8), transport, generation=2) == []
    transport.broken = True
    copies = CheckpointCopier(disk, None, 10**8)
    assert sent_by(copies, transport) == [] and copies.due_s == float("inf")


@pytest.mark.parametrize("is_pruned", [True, False])
def test_a_missing_checkpoint_is_not_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_pruned: bool
) -> None:
    """The next checkpoint is copied instead of one that was pruned, so that is no reason for a warning."""
    (tmp_path / "step").mkdir()
    disk, transport = Disk(tmp_path / "step"), RecordingTransport()
    shutil.rmtree(disk.folder) if is_pruned else (disk.folder / FILES[0]).unlink()
    copies = CheckpointCopier(disk, None, 10**8)
    assert sent_by(copies, transport) == [] and copies.due_s == float("inf")
    assert len(caplog.messages) == (0 if is_pruned else 1)


def test_a_copy_with_a_gap_is_not_kept(tmp_path: Path) -> None:
    disk, transport = Disk(tmp_path), RecordingTransport()
    blocks = sent_by(CheckpointCopier(disk, None, 10**8), transport)
    receiver = CheckpointCopier(disk, None, 10**8)
    for block in (*blocks[:2], *blocks[3:]):
        receiver.receive(block)
    assert not disk.adopted.is_set() and any((tmp_path / "copy").iterdir())
    receiver.receive(blocks[0])  # the next copy starts from the beginning
    assert not any((tmp_path / "copy").iterdir())
    for block in blocks[1:]:
        receiver.receive(block)
    assert disk.adopted.wait(WITHIN_S)


def test_closing_discards_an_incomplete_copy_and_awaits_a_complete_one(tmp_path: Path) -> None:
    """Either would otherwise stay in the folder of a process that ends."""
    disk, transport = Disk(tmp_path), RecordingTransport()
    blocks = sent_by(CheckpointCopier(disk, None, 10**8), transport)
    receiver = CheckpointCopier(disk, None, 10**8)
    for block in blocks[:3]:
        receiver.receive(block)
    receiver.close()
    assert not (tmp_path / "copy").exists()
    disk.may_adopt.clear()
    for block in blocks:
        receiver.receive(block)
    closing = threading.Thread(target=receiver.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive() and not disk.adopted.is_set()
    disk.may_adopt.set()
    closing.join(WITHIN_S)
    assert disk.adopted.is_set() and any((tmp_path / "copy").iterdir())


@pytest.mark.parametrize(
    ("table", "total", "words"),
    [
        (b"12345678", 2, "table is 8 bytes long; it must be 16"),
        (struct.pack("<2Q", 10, 2**63), 5, "must total at most 100000000 bytes"),
        (struct.pack("<2Q", 0, 10), 2, "a checkpoint has files of"),
        (struct.pack("<2Q", 10, 10), 7, "at most 100000000 bytes, in 3 blocks"),
    ],
)
def test_an_impossible_table_is_refused(tmp_path: Path, table: bytes, total: int, words: str) -> None:
    receiver = CheckpointCopier(Disk(tmp_path), None, 10**8)
    with pytest.raises(RemoteProtocolError, match=words):
        receiver.receive(m.CheckpointBlock(1, 1, CHECKPOINT, 0, total, table))


def test_a_block_of_another_length_is_refused(tmp_path: Path) -> None:
    disk, transport = Disk(tmp_path), RecordingTransport()
    blocks = sent_by(CheckpointCopier(disk, None, 10**8), transport)
    receiver = CheckpointCopier(disk, None, 10**8)
    receiver.receive(blocks[0])
    with pytest.raises(RemoteProtocolError, match="block 1 of a checkpoint is 99 bytes long; it must be 100"):
        receiver.receive(replace(blocks[1], payload=blocks[1].payload[:-1]))
