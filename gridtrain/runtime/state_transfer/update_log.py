"""A bounded log of the latest committed updates, kept for newcomers, and the encoding of an update.

    member:    committed round --> UpdateLog (at most MAX_LOGGED_STEPS) --> UpdateLogEntry
    receiver:  UpdateLogEntry --> decode_update --> digest of the vote --> history, step by step

    payload:   u32 S | S bytes of settings | u64 flags | u8 m | m digests of 32 bytes | sparse update, fp32

S is the length of the settings in bytes, and m the number of `StepUpdate.other_digests`.  A skipped step has
no sparse update.

The digest of a vote covers the whole payload (`vote_digest`), and a history chains these digests.  A receiver
whose history equals the history in the membership view has therefore applied the same updates as the members,
regardless of which worker sent the updates.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from gridtrain.core.group.round_flags import is_skipped
from gridtrain.core.member.stragglers import MAX_SETTINGS_BYTES
from gridtrain.core.planning.worker_memory_estimate import MAX_LOGGED_BYTES, MAX_LOGGED_STEPS
from gridtrain.errors import RemoteProtocolError
from gridtrain.network.wire.sparse_payload import SparseVector, decode, encode
from gridtrain.network.wire.value_encoding import ValueKind
from gridtrain.runtime.buffers.collective_buffers import sparse_digest

_DIGEST_BYTES = 32
_FLAGS_BYTES = 8
_FIXED_BYTES = 4 + _FLAGS_BYTES + 1  # excluding settings, digests and the update
_ENTRY_BYTES = 8  # an index and a float32 value in memory
_invalid = partial(RemoteProtocolError, remedy="request the updates from another member")


@dataclass(frozen=True, slots=True)
class StepUpdate:
    """The effect of one committed step.

    Attributes:
        settings: the serialized settings of the optimizer.
        flags: the flags of the round (`core.group.round_flags`).
        update: the update; None for a skipped step.
        other_digests: the digests of the round's other buffers, such as averages, which are not replayed.
    """

    step: int
    settings: bytes
    flags: int
    update: SparseVector | None
    other_digests: tuple[bytes, ...] = ()

    @property
    def digest(self) -> bytes:
        """The digest that the members voted for."""
        digests = [b"" if self.update is None else sparse_digest(self.update), *self.other_digests]
        skipped = is_skipped(self.flags)
        return vote_digest(self.settings, self.flags, [b""] * len(digests) if skipped else digests)


def vote_digest(settings: bytes, flags: int, digests: Sequence[bytes]) -> bytes:
    """Return the 32-byte digest that a member votes for in a round.

    Args:
        settings: the serialized settings of the optimizer.
        flags: the flags of the round.
        digests: the digests of the buffers on which the members vote, in order; each is b"" if the step is
            skipped.
    """
    salt = hashlib.blake2b(settings, digest_size=_DIGEST_BYTES).digest()
    digest = hashlib.blake2b(salt + flags.to_bytes(_FLAGS_BYTES, "little"), digest_size=_DIGEST_BYTES)
    for each in digests:
        digest.update(each)
    return digest.digest()


class UpdateLog:
    """The updates of the latest steps, oldest first and without gaps; each index is stored in 4 bytes."""

    def __init__(self, max_bytes: int = MAX_LOGGED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._updates: deque[StepUpdate] = deque()
        self._bytes = 0

    def add(self, update: StepUpdate) -> None:
        if self._updates and update.step != self._updates[-1].step + 1:
            self.clear()  # this member has missed steps, so the older updates do not lead up to this step
        self._updates.append(_with_indices(update, np.uint32))
        self._bytes += _memory_bytes(update)
        while len(self._updates) > MAX_LOGGED_STEPS or (
            self._bytes > self._max_bytes and len(self._updates) > 1
        ):
            self._bytes -= _memory_bytes(self._updates.popleft())

    def clear(self) -> None:
        self._updates.clear()
        self._bytes = 0

    @property
    def latest_step(self) -> int:
        """The step of the latest update; -1 if the log is empty."""
        return self._updates[-1].step if self._updates else -1

    def has_all_after(self, applied: int) -> bool:
        """Return whether the log contains all steps after `applied` up to the latest step of the log.

        True if `applied` is the latest step; False if the log is empty.
        """
        return bool(self._updates) and self._updates[0].step <= applied + 1 <= self._updates[-1].step + 1

    def get(self, step: int) -> StepUpdate | None:
        if not self._updates or not self._updates[0].step <= step <= self._updates[-1].step:
            return None
        return _with_indices(self._updates[step - self._updates[0].step], np.int64)


def encode_update(update: StepUpdate, n: int) -> bytes:
    """Encode an update as the payload of an `UpdateLogEntry`; `n` is the length of the flat gradient."""
    parts = [struct.pack("<I", len(update.settings)), update.settings]
    parts += [struct.pack("<QB", update.flags, len(update.other_digests)), *update.other_digests]
    if update.update is not None:
        parts.append(encode(update.update.indices, update.update.values, n=n, kind=ValueKind.FP32))
    return b"".join(parts)


def decode_update(step: int, payload: bytes | memoryview, n: int) -> StepUpdate:
    """Decode the payload of an `UpdateLogEntry`.

    Raises `RemoteProtocolError` if the payload is not a valid update for a model of n elements.
    """
    data = memoryview(payload).cast("B")
    if len(data) < _FIXED_BYTES:
        raise _invalid(f"an update is {len(data)} bytes long; the minimum is {_FIXED_BYTES} bytes")
    (settings_bytes,) = struct.unpack_from("<I", data)
    if settings_bytes > min(MAX_SETTINGS_BYTES, len(data) - _FIXED_BYTES):
        raise _invalid(
            f"the settings in an update of {len(data)} bytes are {settings_bytes} bytes long; they must fit "
            f"into the update, and the maximum is {MAX_SETTINGS_BYTES} bytes"
        )
    end = 4 + settings_bytes
    flags, digests = struct.unpack_from("<QB", data, end)
    first = end + _FLAGS_BYTES + 1
    start, skipped = first + digests * _DIGEST_BYTES, is_skipped(flags)
    if start > len(data) or (skipped and start != len(data)):
        raise _invalid(
            f"an update of {len(data)} bytes has the flags {flags:#x} and {digests} digests, which do not "
            "match its length"
        )
    others = tuple(bytes(data[i : i + _DIGEST_BYTES]) for i in range(first, start, _DIGEST_BYTES))
    update = None if skipped else decode(data[start:], n=n, max_entries=n, kind=ValueKind.FP32)
    return StepUpdate(step, bytes(data[4:end]), flags, update, others)


def _with_indices(
    update: StepUpdate, dtype: type[np.unsignedinteger[Any] | np.signedinteger[Any]]
) -> StepUpdate:
    """Return the update with indices of type `dtype`; in every exchange, indices are below 2**32."""
    if update.update is None:
        return update
    return replace(update, update=replace(update.update, indices=update.update.indices.astype(dtype)))


def _memory_bytes(update: StepUpdate) -> int:
    entries = 0 if update.update is None else int(np.size(update.update.indices))
    return 500 + len(update.settings) + _ENTRY_BYTES * entries
