"""Checkpoints of a stage go from file to file, one block at a time, and only whole ones are kept."""

from __future__ import annotations

import struct
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from brisk import WITHIN_S

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as io
from gridtrain.errors import RemoteProtocolError, TransportError
from gridtrain.runtime.state_transfer.block_buffer import BLOCK_BYTES
from gridtrain.runtime.state_transfer.checkpoint_copy import FILES, RESIDUAL_FILE, CheckpointCopier

HELD = m.CheckpointInfo(9, b"h", m.LedgerState(step=10), layers=m.Span(1, 2))
PEER = b"p" * 32
SIZES = (100, 2 * BLOCK_BYTES + 5)


class Disk:
    """Two folders: what is kept, and what comes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.adopted, self.looked_at = threading.Event(), threading.Event()
        for name, size in zip(FILES, SIZES, strict=True):
            (folder / name).write_bytes(
                bytes(i % 251 for i in range(256)) * (size // 256) + b"e" * (size % 256)
            )

    def make_copy_folder(self, held: m.CheckpointInfo) -> Path:
        (self.folder / "copy").mkdir(exist_ok=True)
        return self.folder / "copy"

    def files_to_copy(self, held: m.CheckpointInfo) -> list[Path]:
        return [self.folder / name for name in FILES]

    def is_intact(self, held: m.CheckpointInfo) -> bool:
        assert held.layers == HELD.layers
        self.looked_at.set()
        return False

    def adopt_copy(self, held: m.CheckpointInfo, folder: Path) -> None:
        assert held == HELD
        self.adopted.set()


class Line:
    """A transport of which only this much is asked."""

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


def sent_by(copies: CheckpointCopier, line: Any, generation: int = 1) -> list[m.CheckpointBlock]:
    copies.send(io.SendCheckpoint(PEER, 1, 1, HELD))
    for now_s in range(20):
        copies.send_next(line, float(now_s), generation)
    return list(line.sent)


def test_what_the_group_waits_for_and_is_pruned_while_it_is_sent_is_looked_at(tmp_path: Path) -> None:
    """So that the coordinator is told what is there, and plans without the rest."""
    disk, line = Disk(tmp_path), Line()
    copies = CheckpointCopier(disk, None, 10**8)
    (tmp_path / FILES[0]).unlink()
    copies.send(io.SendCheckpoint(PEER, 1, 1, HELD, is_awaited=True))
    copies.send_next(line, 0.0, 1)  # type: ignore[arg-type]
    assert line.sent == [] and disk.looked_at.wait(WITHIN_S)


def test_all_blocks_come_and_the_files_are_equal(tmp_path: Path) -> None:
    disk, line = Disk(tmp_path), Line()
    blocks = sent_by(CheckpointCopier(disk, None, 10**8), line)
    assert [len(block.payload) for block in blocks] == [16, 100, BLOCK_BYTES, BLOCK_BYTES, 5]
    assert [(block.index, block.total) for block in blocks] == [(i, 5) for i in range(5)]
    taker = CheckpointCopier(disk, None, 10**8)
    for block in blocks:
        taker.receive(block)
    assert disk.adopted.wait(WITHIN_S)
    for name in FILES:
        assert (tmp_path / "copy" / name).read_bytes() == (tmp_path / name).read_bytes()


def test_what_the_group_waits_for_goes_first_and_fast_and_with_the_residual(tmp_path: Path) -> None:
    """The receiver takes the blocks over; one that keeps a copy alone must not send what others have not."""
    disk, line = Disk(tmp_path), Line()
    (tmp_path / RESIDUAL_FILE).write_bytes(b"unsent")
    copies = CheckpointCopier(disk, rate_Bps=1.0, max_bytes=10**8)
    copies.send(io.SendCheckpoint(PEER, 1, 1, HELD))
    for _ in range(2):  # asked for again, as a connection broke
        copies.send(io.SendCheckpoint(PEER, 1, 1, HELD, is_awaited=True))
    for _ in range(8):
        copies.send_next(line, 0.0, 1)  # type: ignore[arg-type]
    assert [len(block.payload) for block in line.sent] == [24, 100, BLOCK_BYTES, BLOCK_BYTES, 5, 6, 16]
    taker = CheckpointCopier(disk, None, 10**8)
    for block in line.sent[:6]:
        taker.receive(block)
    assert disk.adopted.wait(WITHIN_S)
    assert (tmp_path / "copy" / RESIDUAL_FILE).read_bytes() == b"unsent"


def test_what_the_group_waits_for_does_not_wait_for_a_slow_copy_that_is_under_way(tmp_path: Path) -> None:
    disk, line = Disk(tmp_path), Line()
    copies = CheckpointCopier(disk, rate_Bps=1.0, max_bytes=10**8)
    copies.send(io.SendCheckpoint(PEER, 1, 1, HELD))
    assert copies.send_next(line, 0.0, 1) == 1 and copies.due_s == 16.0  # type: ignore[arg-type]
    copies.send(io.SendCheckpoint(b"q" * 32, 1, 1, HELD, is_awaited=True))
    for _ in range(8):
        copies.send_next(line, 0.0, 1)  # type: ignore[arg-type]
    assert [len(block.payload) for block in line.sent] == [16, 16, 100, BLOCK_BYTES, BLOCK_BYTES, 5, 16]
    assert copies.due_s == 16.0, "the slow one begins again"


def test_rounds_go_first_and_no_more_than_the_rate(tmp_path: Path) -> None:
    disk, line = Disk(tmp_path), Line()
    copies = CheckpointCopier(disk, rate_Bps=float(BLOCK_BYTES), max_bytes=10**8)
    copies.send(io.SendCheckpoint(PEER, 1, 1, HELD))
    line.waiting_bytes = 1
    assert copies.send_next(line, 0.0, 1) == 0  # type: ignore[arg-type]
    line.waiting_bytes = 0
    assert copies.due_s == pytest.approx(0.02)
    for now_s in (0.02, 0.03, 0.04):
        copies.send_next(line, now_s, 1)  # type: ignore[arg-type]
    assert len(line.sent) == 3, "16 + 100 bytes are nothing"
    assert copies.due_s == pytest.approx(1.04)
    assert copies.send_next(line, 0.5, 1) == 0  # type: ignore[arg-type]


def test_another_generation_or_a_broken_line_gives_it_up(tmp_path: Path) -> None:
    disk, line = Disk(tmp_path), Line()
    assert sent_by(CheckpointCopier(disk, None, 10**8), line, generation=2) == []
    line.broken = True
    copies = CheckpointCopier(disk, None, 10**8)
    assert sent_by(copies, line) == [] and copies.due_s == float("inf")


def test_a_checkpoint_that_is_gone_is_not_sent(tmp_path: Path) -> None:
    disk, line = Disk(tmp_path), Line()
    (tmp_path / FILES[0]).unlink()
    copies = CheckpointCopier(disk, None, 10**8)
    assert sent_by(copies, line) == [] and copies.due_s == float("inf")


def test_after_a_gap_nothing_is_kept(tmp_path: Path) -> None:
    disk, line = Disk(tmp_path), Line()
    blocks = sent_by(CheckpointCopier(disk, None, 10**8), line)
    taker = CheckpointCopier(disk, None, 10**8)
    for block in (*blocks[:2], *blocks[3:]):
        taker.receive(block)
    assert not disk.adopted.is_set()
    for block in blocks:  # the next one begins anew
        taker.receive(block)
    assert disk.adopted.wait(WITHIN_S)


@pytest.mark.parametrize(
    ("table", "total", "words"),
    [
        (b"12345678", 2, "table has 8 bytes; it must have 16"),
        (struct.pack("<2Q", 10, 2**63), 5, "must have at most 100000000 bytes"),
        (struct.pack("<2Q", 0, 10), 2, "a checkpoint has files of"),
        (struct.pack("<2Q", 10, 10), 7, "at most 100000000 bytes in total, in 3 blocks"),
    ],
)
def test_a_table_that_cannot_be_is_refused(tmp_path: Path, table: bytes, total: int, words: str) -> None:
    taker = CheckpointCopier(Disk(tmp_path), None, 10**8)
    with pytest.raises(RemoteProtocolError, match=words):
        taker.receive(m.CheckpointBlock(1, 1, HELD, 0, total, table))


def test_a_block_of_another_length_is_refused(tmp_path: Path) -> None:
    disk, line = Disk(tmp_path), Line()
    blocks = sent_by(CheckpointCopier(disk, None, 10**8), line)
    taker = CheckpointCopier(disk, None, 10**8)
    taker.receive(blocks[0])
    with pytest.raises(RemoteProtocolError, match="block 1 of a checkpoint has 99 bytes; it must have 100"):
        taker.receive(replace(blocks[1], payload=blocks[1].payload[:-1]))
