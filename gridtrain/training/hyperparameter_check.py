"""After an aborted step, finds the workers whose learning rate or other optimizer settings differ.

A digest of the optimizer settings is part of every vote, so that a step with different settings never
commits.  A retry also exchanges the settings of all ranks as text, in one more dense vector of the same
round.  The workers whose settings differ from those of most workers then stop, and the others can commit:

    attempt 0   update                         ABORT: the votes' digests differ
    attempt 1   update | row 0 | row 1 | ...   ABORT, but all ranks have read the rows.  The largest group
                                               with equal settings continues (of several largest groups,
                                               the one with the lowest rank); other workers raise an error

    row (512 values, one byte each): checksum 8 | digest 32 | name=value lines, as many as fit
"""

from __future__ import annotations

import hashlib
import logging

import numpy as np
import numpy.typing as npt
import torch

from gridtrain.core.collectives.collective import Collective
from gridtrain.core.commit.two_phase_commit import largest_agreeing_group
from gridtrain.errors import ConfigError
from gridtrain.quantities import MAX_NAMES, list_first, make_printable
from gridtrain.runtime.buffers.collective_buffers import DenseRingBuffer
from gridtrain.runtime.mailbox.step_plan import StepPlan
from gridtrain.training.checkpoint import hyperparameters

log = logging.getLogger("gridtrain")

ROW_BYTES = 512
_CHECKSUM_BYTES = 8
_DIGEST_BYTES = 32
_MAX_NAMED = 3

HyperparameterRow = tuple[bytes, tuple[str, ...]]  # digest, name=value lines


class _HyperparameterBuffer(DenseRingBuffer):
    """The rows of settings, one per rank.  A member whose gradient is not finite also sends its row."""

    def make_collective(self, rank: int, world_size: int, flags: int) -> Collective:
        return super().make_collective(rank, world_size, 0)


def make_hyperparameter_buffer(plan: StepPlan, optimizer: torch.optim.Optimizer) -> DenseRingBuffer | None:
    """Return a buffer with this worker's row of settings and zeros in the other rows; None in the first
    attempt."""
    if plan.attempt == 0:
        return None
    rows = np.zeros((plan.world_size, ROW_BYTES), np.float32)
    rows[plan.rank] = _make_row(optimizer)
    return _HyperparameterBuffer(rows.reshape(-1), plan.world_size)


def make_empty_buffer(plan: StepPlan) -> DenseRingBuffer:
    """Return a buffer of zeros for a worker that contributes nothing; without its row, no settings are
    compared in this attempt."""
    return DenseRingBuffer(np.zeros(plan.world_size * ROW_BYTES, np.float32), plan.world_size)


def check_hyperparameters(plan: StepPlan, optimizer: torch.optim.Optimizer, sums: DenseRingBuffer) -> None:
    """After an aborted attempt that exchanged the settings of all ranks, compare these settings.

    Nothing is compared if this worker's own row in `sums` is not the row that it sent.

    Raises `ConfigError` if this worker's settings differ from the settings of the largest agreeing group.
    """
    table = sums.update.reshape(plan.world_size, ROW_BYTES)
    if not np.array_equal(table[plan.rank], _make_row(optimizer)):
        text = "step %d: workers' settings are not compared, because another worker altered this worker's row"
        log.warning(text, plan.step + 1)
        return
    read = [_read_row(row) for row in table]
    rows = [row for row in read if row is not None]
    if len(rows) < plan.world_size:
        return  # the exchange failed for a reason other than different settings
    staying = largest_agreeing_group({rank: digest for rank, (digest, _) in enumerate(rows)})
    if plan.rank in staying:
        return
    mine, theirs = _difference(rows[plan.rank], rows[staying[0]])
    ranks, have = ("rank", "has") if len(staying) == 1 else ("ranks", "have")
    named = f"{ranks} {list_first([str(rank) for rank in staying], MAX_NAMES)}"
    raise ConfigError(
        f"step {plan.step + 1} cannot be committed: rank {plan.rank} has {mine}, but {len(staying)} of "
        f"{plan.world_size} workers ({named}) {have} {theirs}; the run continues without rank {plan.rank}",
        remedy="change the optimizer's settings in the same way on all workers: compute them from grid.step "
        "instead of a counter, step ReduceLROnPlateau with grid.mean(loss), and name schedulers in "
        "grid.track(scheduler=...) for workers that join later",
    )


def _make_row(optimizer: torch.optim.Optimizer) -> npt.NDArray[np.uint8]:
    room = ROW_BYTES - _CHECKSUM_BYTES - _DIGEST_BYTES
    text = "\n".join(hyperparameters.hyperparameter_lines(optimizer)).encode()
    if len(text) > room:  # a part of a line would look like another value
        text = text[: room + 1].rpartition(b"\n")[0]
    body = hyperparameters.hyperparameter_digest(optimizer) + text.ljust(room)
    return np.frombuffer(_checksum(body) + body, np.uint8)


def _read_row(row: npt.NDArray[np.float32]) -> HyperparameterRow | None:
    """Parse one rank's row; return None if its checksum is wrong, as in a row of zeros."""
    raw = np.clip(np.nan_to_num(row), 0, 255).astype(np.uint8).tobytes()
    checksum, body = raw[:_CHECKSUM_BYTES], raw[_CHECKSUM_BYTES:]
    if _checksum(body) != checksum:
        return None
    text = body[_DIGEST_BYTES:].decode(errors="replace").rstrip()
    return body[:_DIGEST_BYTES], tuple(text.split("\n"))


def _difference(mine: HyperparameterRow, theirs: HyperparameterRow) -> tuple[str, str]:
    """Return the settings that differ as two strings: with this worker's values, and with the other rank's.

    Only printable characters are returned, because `theirs` was received from the network.
    """
    pairs = [(a, b) for a, b in zip(mine[1], theirs[1], strict=False) if a != b][:_MAX_NAMED]
    if not pairs:  # the difference is in the truncated part
        pairs = [(f"settings {mine[0].hex()[:8]}", f"settings {theirs[0].hex()[:8]}")]
    return ", ".join(make_printable(a) for a, _ in pairs), ", ".join(make_printable(b) for _, b in pairs)


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECKSUM_BYTES).digest()
