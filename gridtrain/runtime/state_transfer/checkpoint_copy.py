"""Checkpoints of a stage on their way to the disk of the next stage, from file to file.

Decides nothing about which goes where (`protocol.checkpoints` does), and never opens what is in them: the
disk's owner looks at it when all of it is there.  Neither side holds more than one block in memory.  What the
group waits for, as the model was cut anew, goes first and as fast as the line takes it.

    disk.copy_files --> [lengths] [1 MiB] [1 MiB] ..     one block at a time, where nothing else waits for the
         Outlet           Copy      Copy    Copy         line, and at most `rate_Bps`: rounds go first
                            |
         Intake <-----------+--> disk.copy_folder / <the same names> --> disk.adopt_copy
"""

from __future__ import annotations

import logging
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as io
from gridtrain.errors import RemoteProtocolError, TransportError
from gridtrain.network.transport.interface import Transport
from gridtrain.runtime.state_transfer.blobs import BLOCK_BYTES

log = logging.getLogger("gridtrain")

FILES = ("state.json", "tensors.safetensors")
RESIDUAL_FILE = "residual.safetensors"
"""What its worker had not sent.  It goes along where the receiver takes the blocks over from that worker."""

MOST_WAITING = 4
"""Checkpoints that wait to be sent; of more the oldest is given up."""

_REMEDY = "drop that peer; an honest one of the same version never sends this"


class CheckpointDisk(Protocol):
    """Where checkpoints lie; each of its folders has `FILES`."""

    def make_copy_folder(self, held: m.CheckpointInfo) -> Path:
        """An empty folder for a copy that is to come.  Raises `OSError`."""
        ...

    def files_to_copy(self, held: m.CheckpointInfo) -> Sequence[Path]:
        """Those of a checkpoint, in the order of `FILES`."""
        ...

    def is_intact(self, held: m.CheckpointInfo) -> bool:
        """It can be read; one that cannot is not told of any more.  Called from a thread of its own."""
        ...

    def adopt_copy(self, held: m.CheckpointInfo, folder: Path) -> None:
        """All of it is there.  Called from a thread of its own."""
        ...


class _OutgoingCopy:
    """One checkpoint, block by block."""

    def __init__(self, effect: io.SendCheckpoint, files: Sequence[Path]) -> None:
        self.effect = effect
        self._files: list[BinaryIO] = [path.open("rb") for path in files]
        self._lengths = [path.stat().st_size for path in files]
        self.total = 1 + sum(-(-length // BLOCK_BYTES) for length in self._lengths)
        self._index = 0

    def next_block(self) -> m.CheckpointBlock | None:
        """None: that was all.  Raises `OSError`."""
        if self._index == self.total:
            return None
        payload = struct.pack(f"<{len(self._lengths)}Q", *self._lengths) if not self._index else b""
        while not payload and self._files:
            payload = self._files[0].read(BLOCK_BYTES)
            if not payload:
                self._files.pop(0).close()
        to = self.effect
        block = m.CheckpointBlock(to.term, to.generation, to.checkpoint, self._index, self.total, payload)
        self._index += 1
        return block

    def close(self) -> None:
        for file in self._files:
            file.close()


class CheckpointCopier:
    """Both sides of it.  Used from the loop's thread alone.

    Args:
        rate_Bps: of all blocks together; None: as fast as the line takes them.
        max_bytes: the largest checkpoint that is taken.
    """

    def __init__(self, disk: CheckpointDisk, rate_Bps: float | None, max_bytes: int) -> None:
        self._disk, self._rate_Bps, self._max_bytes = disk, rate_Bps, max_bytes
        self._waiting: deque[io.SendCheckpoint] = deque()
        self._awaited_by_member: dict[
            tuple[m.PeerId, m.CheckpointInfo], io.SendCheckpoint
        ] = {}  # the group waits for these
        self._outgoing: _OutgoingCopy | None = None
        self._block: m.CheckpointBlock | None = None
        self._line_free_s = 0.0
        self._intake: _IncomingCopy | None = None

    # -- ours to the next stage's disk ---------------------------------------------------------------

    def send(self, effect: io.SendCheckpoint) -> None:
        if effect.is_awaited:
            self._awaited_by_member[effect.peer, effect.checkpoint] = effect
            self._yield_to_state()
            return
        self._waiting.append(effect)
        while len(self._waiting) > MOST_WAITING:
            self._waiting.popleft()

    def _yield_to_state(self) -> None:
        """What nobody waits for, and goes at its slow rate, begins again afterwards."""
        self._line_free_s = 0.0
        if self._outgoing is not None and not self._outgoing.effect.is_awaited:
            self._waiting.appendleft(self._outgoing.effect)
            self._give_up()

    @property
    def due_s(self) -> float:
        """When to `turn` again."""
        busy = self._waiting or self._awaited_by_member or self._outgoing is not None
        return self._line_free_s if busy else float("inf")

    def send_next(self, transport: Transport, now_s: float, generation: int) -> int:
        """Send one block if it is time and nothing else waits for the line; returns how many."""
        if now_s < self._line_free_s or not self._prepare(generation):
            return 0
        assert self._outgoing is not None and self._block is not None
        peer, block = self._outgoing.effect.peer, self._block
        if transport.backlog_bytes(peer) > 0:
            self._line_free_s = now_s + 0.02
            return 0
        try:
            transport.send(peer, block)
            self._block = None
        except TransportError:
            self._give_up()  # the next checkpoint goes there again
            return 0
        if self._rate_Bps is not None and not self._outgoing.effect.is_awaited:
            self._line_free_s = now_s + len(block.payload) / self._rate_Bps
        return 1

    def _prepare(self, generation: int) -> bool:
        """The next block is at hand."""
        effect = self._outgoing.effect if self._outgoing is not None else None
        try:
            if self._outgoing is not None and self._outgoing.effect.generation != generation:
                self._give_up()  # another one sits there now, perhaps
            while self._outgoing is None and (self._waiting or self._awaited_by_member):
                first = next(iter(self._awaited_by_member), None)
                effect = self._awaited_by_member.pop(first) if first is not None else self._waiting.popleft()
                if effect.generation == generation:
                    files = self._disk.files_to_copy(effect.checkpoint)
                    self._outgoing = _OutgoingCopy(effect, _files_with_residual(files, effect))
            if self._outgoing is not None and self._block is None:
                self._block = self._outgoing.next_block()
                if self._block is None:
                    self._give_up()
        except OSError as error:  # pruned while it was being sent
            log.warning("a checkpoint's copy is not sent: %s", error)
            if effect is not None and effect.is_awaited:
                _in_thread(self._disk.is_intact, effect.checkpoint)  # else others would wait for it
            self._give_up()
        return self._block is not None

    def _give_up(self) -> None:
        if self._outgoing is not None:
            self._outgoing.close()
        self._outgoing = self._block = None

    # -- the stage's before us to our disk -----------------------------------------------------------

    def receive(self, block: m.CheckpointBlock) -> None:
        """Raises `RemoteProtocolError` for a block that cannot belong to the others."""
        try:
            if block.index == 0:
                self._close_intake()
                folder = self._disk.make_copy_folder(block.checkpoint)
                self._intake = _IncomingCopy(block, folder, self._max_bytes)
            elif self._intake is not None and self._intake.receive(block):
                held, folder = self._intake.checkpoint, self._intake.folder
                self._close_intake()
                _in_thread(self._disk.adopt_copy, held, folder)
        except OSError as error:
            log.warning("a copy of another stage's checkpoint is not kept: %s", error)
            self._close_intake()

    def _close_intake(self) -> None:
        if self._intake is not None:
            self._intake.close()
        self._intake = None


class _IncomingCopy:
    """One checkpoint, block by block, into the files of a folder."""

    def __init__(self, first: m.CheckpointBlock, folder: Path, max_bytes: int) -> None:
        self.checkpoint, self.folder = first.checkpoint, folder
        self._sizes = _read_sizes(bytes(first.payload), first.total, max_bytes)
        self._total, self._index = first.total, 1
        self._file: BinaryIO | None = None
        self._names = deque(zip((*FILES, RESIDUAL_FILE), self._sizes, strict=False))
        self._left = 0

    def receive(self, block: m.CheckpointBlock) -> bool:
        """True: that was all.  What comes after a gap, or of another checkpoint, is dropped."""
        if (block.checkpoint, block.total, block.index) != (self.checkpoint, self._total, self._index):
            return False
        while not self._left and self._names:
            name, self._left = self._names.popleft()
            self.close()
            self._file = (self.folder / name).open("wb")
        due = min(self._left, BLOCK_BYTES)
        if len(block.payload) != due or self._file is None:
            raise RemoteProtocolError(
                f"block {block.index} of a checkpoint has {len(block.payload)} bytes, due are {due}",
                remedy=_REMEDY,
            )
        self._file.write(block.payload)
        self._left -= due
        self._index += 1
        return self._index == self._total

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _in_thread(do: Callable[..., object], *args: object) -> None:
    """What takes long with a large checkpoint, in a thread of its own."""
    threading.Thread(target=do, args=args, name="gridtrain-copy", daemon=True).start()


def _files_with_residual(files: Sequence[Path], effect: io.SendCheckpoint) -> list[Path]:
    residual = files[0].with_name(RESIDUAL_FILE)
    return [*files, residual] if effect.is_awaited and residual.exists() else list(files)


def _read_sizes(table: bytes, total: int, max_bytes: int) -> tuple[int, ...]:
    fewest = 8 * len(FILES)
    if len(table) not in (fewest, fewest + 8):
        raise RemoteProtocolError(
            f"a checkpoint's table has {len(table)} bytes, must be {fewest} or 8 more", remedy=_REMEDY
        )
    sizes = struct.unpack(f"<{len(table) // 8}Q", table)
    blocks = 1 + sum(-(-size // BLOCK_BYTES) for size in sizes)
    if sum(sizes) > max_bytes or min(sizes) < 1 or blocks != total:
        raise RemoteProtocolError(
            f"a checkpoint of {sizes} bytes in {total} blocks; must be at most {max_bytes}, in {blocks}",
            remedy=_REMEDY,
        )
    return sizes
