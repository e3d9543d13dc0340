"""Copies a stage's checkpoints, at a limited rate, to the disk of a worker of the next stage.

`gridtrain.core.member.member_checkpoints` decides which checkpoints are sent to which worker, and when.
Neither side holds more than one block in memory.  Checkpoints for which the group waits after a repartition
are sent first, and without a rate cap.

    disk.files_to_copy --> [lengths] [1 MiB] [1 MiB] ..     one block at a time, at most `rate_Bps`, when no
        _OutgoingCopy           CheckpointBlock             other data are queued, so that rounds go first
                                  |
        _IncomingCopy <-----------+--> disk.make_copy_folder / <the same names> --> disk.adopt_copy
"""

from __future__ import annotations

import logging
import shutil
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as ev
from gridtrain.errors import RemoteProtocolError, TransportError
from gridtrain.network.transport.interface import Transport
from gridtrain.runtime.state_transfer.block_buffer import BLOCK_BYTES, BlockLayout

log = logging.getLogger("gridtrain")

FILES = ("state.json", "tensors.safetensors")
RESIDUAL_FILE = "residual.safetensors"
"""The file with the worker's residual, copied only for a receiver that takes over the worker's layers."""

MAX_WAITING = 4
"""Maximum number of queued checkpoints for which the group does not wait.  If there are more, the oldest is
dropped."""

_REMEDY = "check that the peer runs the same version of gridtrain"


class CheckpointDisk(Protocol):
    """The disk with the checkpoints.  Each checkpoint is a folder that contains `FILES`."""

    def make_copy_folder(self, held: m.CheckpointInfo) -> Path:
        """Create an empty folder for the copy of this checkpoint, and return its path.

        Raises `OSError` if the folder cannot be created.
        """

    def files_to_copy(self, held: m.CheckpointInfo) -> Sequence[Path]:
        """Return the paths of a checkpoint's files, in the order of `FILES`."""

    def is_intact(self, held: m.CheckpointInfo) -> bool:
        """Return whether a checkpoint can be read; if it cannot, no longer report it to the group.

        This method is called in a separate thread.
        """

    def adopt_copy(self, held: m.CheckpointInfo, folder: Path) -> None:
        """Add a complete copy to the checkpoints.  This method is called in a separate thread."""


class _OutgoingCopy:
    """Reads one checkpoint, block by block."""

    def __init__(self, effect: ev.SendCheckpoint, files: Sequence[Path]) -> None:
        self.effect = effect
        self._files: list[BinaryIO] = [path.open("rb") for path in files]
        self._lengths = [path.stat().st_size for path in files]
        self.total = 1 + BlockLayout(self._lengths).block_count
        self._index = 0

    def next_block(self) -> m.CheckpointBlock | None:
        """Read the next block; return None if all blocks have been read.

        Raises `OSError` if a file cannot be read.
        """
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
    """Sends and receives copies of checkpoints.  Only the I/O thread uses it.

    Attributes:
        disk: the disk with this worker's checkpoints, which is set before this worker joins the group; None
            if this worker keeps no checkpoints, and neither sends nor receives copies.
        rate_Bps: the rate cap for all blocks together in bytes per second; None for no cap.  Any thread may
            change it.
        max_bytes: the size in bytes of the largest checkpoint to accept.
    """

    def __init__(self, disk: CheckpointDisk | None, rate_Bps: float | None, max_bytes: int) -> None:
        self.disk, self.rate_Bps, self.max_bytes = disk, rate_Bps, max_bytes
        self._waiting: deque[ev.SendCheckpoint] = deque()
        # The copies for which the group waits:
        self._awaited: dict[tuple[m.PeerId, m.CheckpointInfo], ev.SendCheckpoint] = {}
        self._outgoing: _OutgoingCopy | None = None
        self._block: m.CheckpointBlock | None = None
        self._next_send_s = 0.0
        self._incoming: _IncomingCopy | None = None
        self._adoptions: list[threading.Thread] = []

    def close(self) -> None:
        """Discard the incomplete copy, if any, and wait until complete copies have been stored."""
        self._give_up()
        self._discard_incoming()
        for adoption in self._adoptions:
            adoption.join()

    # -- sending -------------------------------------------------------------------------------------

    def send(self, effect: ev.SendCheckpoint) -> None:
        """Queue a checkpoint for another worker; without a disk, there is nothing to send."""
        if self.disk is None:
            return
        if effect.is_awaited:
            self._awaited[effect.peer, effect.checkpoint] = effect
            self._yield_to_state()
            return
        self._waiting.append(effect)
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()

    def _yield_to_state(self) -> None:
        """Interrupt the current copy if the group does not wait for it.  The copy starts over later."""
        self._next_send_s = 0.0
        if self._outgoing is not None and not self._outgoing.effect.is_awaited:
            self._waiting.appendleft(self._outgoing.effect)
            self._give_up()

    @property
    def due_s(self) -> float:
        """The time from which `send_next` must be called; infinity if there is nothing to send."""
        busy = self._waiting or self._awaited or self._outgoing is not None
        return self._next_send_s if busy else float("inf")

    def send_next(self, transport: Transport, now_s: float, generation: int) -> int:
        """Send one block if it is due and no other data are queued for the peer.

        Returns the number of blocks sent.
        """
        if now_s < self._next_send_s or not self._prepare(generation):
            return 0
        assert self._outgoing is not None and self._block is not None
        peer, block = self._outgoing.effect.peer, self._block
        if transport.backlog_bytes(peer) > 0:
            self._next_send_s = now_s + 0.02
            return 0
        try:
            transport.send(peer, block)
            self._block = None
        except TransportError:
            self._give_up()  # the peer will get the next checkpoint instead
            return 0
        if self.rate_Bps is not None and not self._outgoing.effect.is_awaited:
            self._next_send_s = now_s + len(block.payload) / self.rate_Bps
        return 1

    def _prepare(self, generation: int) -> bool:
        """Prepare the next block to send; return whether there is a block to send."""
        if (disk := self.disk) is None:
            return False
        effect = self._outgoing.effect if self._outgoing is not None else None
        try:
            if self._outgoing is not None and self._outgoing.effect.generation != generation:
                self._give_up()  # the peer may hold another stage now
            while self._outgoing is None and (self._waiting or self._awaited):
                first = next(iter(self._awaited), None)
                effect = self._awaited.pop(first) if first is not None else self._waiting.popleft()
                if effect.generation == generation:
                    files = disk.files_to_copy(effect.checkpoint)
                    self._outgoing = _OutgoingCopy(effect, _files_with_residual(files, effect))
            if self._outgoing is not None and self._block is None:
                self._block = self._outgoing.next_block()
                if self._block is None:
                    self._give_up()
        except OSError as error:
            is_awaited = effect is not None and effect.is_awaited
            if is_awaited or not _is_of_removed_folder(error):  # old checkpoints are removed as usual
                log.warning("cannot read a checkpoint to copy it to another worker: %s", error)
            if effect is not None and is_awaited:
                # If the checkpoint is no longer reported, the group stops waiting for it.
                _in_thread(disk.is_intact, effect.checkpoint)
            self._give_up()
        return self._block is not None

    def _give_up(self) -> None:
        if self._outgoing is not None:
            self._outgoing.close()
        self._outgoing = self._block = None

    # -- receiving -----------------------------------------------------------------------------------

    def receive(self, block: m.CheckpointBlock) -> None:
        """Store a received block.

        Raises `RemoteProtocolError` if the block does not match the other blocks.
        """
        if (disk := self.disk) is None:
            return
        try:
            if block.index == 0:
                self._discard_incoming()
                self._incoming = _IncomingCopy(block, disk, self.max_bytes)
            elif self._incoming is not None and self._incoming.receive(block):
                complete, self._incoming = self._incoming, None
                complete.close()
                adoption = _in_thread(disk.adopt_copy, complete.checkpoint, complete.folder)
                self._adoptions = [*(x for x in self._adoptions if x.is_alive()), adoption]
        except OSError as error:
            log.warning("cannot write a copy of another stage's checkpoint: %s", error.strerror or error)
            self._discard_incoming()

    def _discard_incoming(self) -> None:
        """Remove an incomplete copy, if any, for example because its sender was lost."""
        if self._incoming is not None:
            self._incoming.close()
            shutil.rmtree(self._incoming.folder, ignore_errors=True)
        self._incoming = None


class _IncomingCopy:
    """Writes one checkpoint, block by block, to the files of a folder."""

    def __init__(self, first: m.CheckpointBlock, disk: CheckpointDisk, max_bytes: int) -> None:
        self._layout = BlockLayout(_read_sizes(bytes(first.payload), first.total, max_bytes))
        self.checkpoint, self.folder = first.checkpoint, disk.make_copy_folder(first.checkpoint)
        self._total, self._index = first.total, 1
        self._file: BinaryIO | None = None

    def receive(self, block: m.CheckpointBlock) -> bool:
        """Write a block; return whether the checkpoint is now complete.

        Blocks that follow a gap or belong to another checkpoint are dropped.  Raises `RemoteProtocolError` if
        the block has the wrong length, and `OSError` if it cannot be written.
        """
        if (block.checkpoint, block.total, block.index) != (self.checkpoint, self._total, self._index):
            return False
        part, offset, expected = self._layout.place(self._index - 1)
        if len(block.payload) != expected:
            raise RemoteProtocolError(
                f"block {block.index} of a checkpoint is {len(block.payload)} bytes long; "
                f"it must be {expected} bytes long",
                remedy=_REMEDY,
            )
        if offset == 0:
            self.close()
            self._file = (self.folder / (*FILES, RESIDUAL_FILE)[part]).open("wb")
        assert self._file is not None
        self._file.write(block.payload)
        self._index += 1
        return self._index == self._total

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _is_of_removed_folder(error: OSError) -> bool:
    return isinstance(error, FileNotFoundError) and not Path(error.filename).parent.exists()


def _in_thread(function: Callable[..., object], *args: object) -> threading.Thread:
    """Call a function in a separate thread, because the call may take a long time for a large checkpoint."""
    thread = threading.Thread(target=function, args=args, name="gridtrain-copy", daemon=True)
    thread.start()
    return thread


def _files_with_residual(files: Sequence[Path], effect: ev.SendCheckpoint) -> list[Path]:
    residual = files[0].with_name(RESIDUAL_FILE)
    return [*files, residual] if effect.is_awaited and residual.exists() else list(files)


def _read_sizes(table: bytes, total: int, max_bytes: int) -> tuple[int, ...]:
    least = 8 * len(FILES)
    if len(table) not in (least, least + 8):
        raise RemoteProtocolError(
            f"a checkpoint's table is {len(table)} bytes long; it must be {least} or {least + 8} bytes long",
            remedy=_REMEDY,
        )
    sizes = struct.unpack(f"<{len(table) // 8}Q", table)
    blocks = 1 + BlockLayout(sizes).block_count
    if sum(sizes) > max_bytes or min(sizes) < 1 or blocks != total:
        raise RemoteProtocolError(
            f"a checkpoint has files of {sizes} bytes in {total} blocks; no file may be empty, and the files "
            f"must total at most {max_bytes} bytes, in {blocks} blocks",
            remedy=_REMEDY,
        )
    return sizes
