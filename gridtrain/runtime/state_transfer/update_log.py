"""The update of each of the last steps, so that a new worker can catch up while the others train.

    member:    committed round --> UpdateLog (the last few hundred, bounded in bytes) --> UpdateLogEntry
    receiver:  UpdateLogEntry --> decode_update --> digest of the vote --> history, step by step

    payload:   u32 S | S bytes of settings | u8 skip | u8 m | m digests of 32 bytes | sparse update, fp32

The digest of a vote covers all of this (`vote_digest`), and a history chains these digests.  A receiver whose
history equals the membership view's has applied what the members applied, from any sender.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gridtrain.errors import RemoteProtocolError
from gridtrain.network.wire.sparse_payload import SparseVector, ValueKind, decode, encode
from gridtrain.runtime.buffers.collective_buffers import sparse_digest

MOST_UPDATES, MOST_BYTES = 512, 128 << 20
MAX_SETTINGS_BYTES = 1 << 20
"""One parameter group takes about 230; there may be one for each parameter."""
_DIGEST_BYTES = 32
_ENTRY_BYTES = 12  # an int64 index and a float32 value in memory
_REMEDY = "ask another member"


@dataclass(frozen=True, slots=True)
class StepUpdate:
    """What one committed step did.

    Attributes:
        settings: of the optimizer, serialized.
        update: None for a skipped step.
        other_digests: of the round's further buffers (averages), which are not replayed.
    """

    step: int
    settings: bytes
    is_skipped: bool
    update: SparseVector | None
    other_digests: tuple[bytes, ...] = ()

    @property
    def digest(self) -> bytes:
        """What the members voted for."""
        digests = [b"" if self.update is None else sparse_digest(self.update), *self.other_digests]
        return vote_digest(
            self.settings, self.is_skipped, [b""] * len(digests) if self.is_skipped else digests
        )


def vote_digest(settings: bytes, skip: bool, digests: Sequence[bytes]) -> bytes:
    """32 bytes for a whole round: the optimizer's settings, whether it is skipped, and all its updates."""
    salt = hashlib.blake2b(settings, digest_size=_DIGEST_BYTES).digest()
    digest = hashlib.blake2b(salt + bytes([skip]), digest_size=_DIGEST_BYTES)
    for each in digests:
        digest.update(each)
    return digest.digest()


def matches_history(history: bytes, voted: bytes) -> bool:
    """Defence: what was replayed is what the members voted for, step by step."""
    return history == voted


class UpdateLog:
    """The last updates, oldest first, without a gap."""

    def __init__(self, max_count: int = MOST_UPDATES, max_bytes: int = MOST_BYTES) -> None:
        self._max_count, self._max_bytes = max_count, max_bytes
        self._updates: deque[StepUpdate] = deque()
        self._bytes = 0

    def add(self, update: StepUpdate) -> None:
        if self._updates and update.step != self._updates[-1].step + 1:
            self.clear()  # this member was away: what it has does not continue to this step
        self._updates.append(update)
        self._bytes += _memory_bytes(update)
        while len(self._updates) > self._max_count or (
            self._bytes > self._max_bytes and len(self._updates) > 1
        ):
            self._bytes -= _memory_bytes(self._updates.popleft())

    def clear(self) -> None:
        self._updates.clear()
        self._bytes = 0

    @property
    def latest_step(self) -> int:
        """-1: the log is empty."""
        return self._updates[-1].step if self._updates else -1

    def has_all_after(self, applied: int) -> bool:
        """Whether all steps after `applied` up to the latest are here; also if there are none."""
        return bool(self._updates) and self._updates[0].step <= applied + 1 <= self._updates[-1].step + 1

    def get(self, step: int) -> StepUpdate | None:
        if not self._updates or not self._updates[0].step <= step <= self._updates[-1].step:
            return None
        return self._updates[step - self._updates[0].step]


def encode_update(update: StepUpdate, n: int) -> bytes:
    """The payload of an `UpdateLogEntry`.  n: length of the flat gradient."""
    parts = [struct.pack("<I", len(update.settings)), update.settings]
    parts += [bytes([update.is_skipped, len(update.other_digests)]), *update.other_digests]
    if update.update is not None:
        parts.append(encode(update.update.indices, update.update.values, n=n, kind=ValueKind.FP32))
    return b"".join(parts)


def decode_update(step: int, payload: bytes | memoryview, n: int) -> StepUpdate:
    """Raises `RemoteProtocolError` if the payload is not an update of a model of n elements."""
    data = memoryview(payload).cast("B")
    if len(data) < 6:
        raise RemoteProtocolError(f"an update of {len(data)} bytes, must be at least 6", remedy=_REMEDY)
    (settings_bytes,) = struct.unpack_from("<I", data)
    if settings_bytes > min(MAX_SETTINGS_BYTES, len(data) - 6):
        raise RemoteProtocolError(
            f"settings of {settings_bytes} bytes in an update of {len(data)}; at most {MAX_SETTINGS_BYTES}",
            remedy=_REMEDY,
        )
    end = 4 + settings_bytes
    skip, digests = data[end], data[end + 1]
    start = end + 2 + digests * _DIGEST_BYTES
    if skip > 1 or start > len(data) or (skip and start != len(data)):
        raise RemoteProtocolError(
            f"an update of {len(data)} bytes with skip {skip} and {digests} digests", remedy=_REMEDY
        )
    others = tuple(bytes(data[i : i + _DIGEST_BYTES]) for i in range(end + 2, start, _DIGEST_BYTES))
    update = None if skip else decode(data[start:], n=n, max_entries=n, kind=ValueKind.FP32)
    return StepUpdate(step, bytes(data[4:end]), bool(skip), update, others)


def _memory_bytes(update: StepUpdate) -> int:
    entries = 0 if update.update is None else int(np.size(update.update.indices))
    return 500 + len(update.settings) + _ENTRY_BYTES * entries
