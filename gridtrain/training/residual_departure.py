"""Sends the largest entries of a leaving worker's residual; writes the rest to disk, and restores it later.

    leave after step s   the largest entries are sent to another worker, which sends them in later steps;
                         the rest is written to <folder>/left with the step, the history and the facts
    return               <folder>/left is removed; the rest is added to the residual if the run's last step
                         is still s, with the same history, and is otherwise reported as lost

See docs/decisions/0016.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from safetensors import SafetensorError

from gridtrain.core.messages import Facts, Span
from gridtrain.runtime.group_session import GroupSession
from gridtrain.runtime.mailbox.step_plan import NOT_COMMITTED, RoundOutcome
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.runtime.state_transfer import residual_pieces
from gridtrain.runtime.state_transfer.checkpoint_copy import RESIDUAL_FILE
from gridtrain.training.checkpoint.checkpoint_store import (
    matches_facts,
    parse_facts,
    replaced_folder,
)
from gridtrain.training.checkpoint.serialization import safetensors_pieces
from gridtrain.training.worker_residual import WorkerResidual

log = logging.getLogger("gridtrain")

LEFT_FOLDER = "left"
MAX_HEADER_BYTES = 1 << 20
WHOLE_MODEL = Span(0, 1)


@dataclass(frozen=True, slots=True)
class LeftResidual:
    """The residual that remains with a worker that has left after the step with index `applied`.

    Attributes:
        history: the history of the run after that step.
        layers: the layers of the stage to which the residual belongs; the default stands for a whole model.
    """

    applied: int
    history: bytes
    residual_N: npt.NDArray[np.float32]
    layers: Span = WHOLE_MODEL

    @property
    def text(self) -> str:
        """The stage's layers and a comma, as a part of a log message; "" for a whole model."""
        if self.layers == WHOLE_MODEL:
            return ""
        return f"layers {self.layers.start} to {self.layers.stop - 1}, "


def transfer_residual(
    session: GroupSession,
    residual: WorkerResidual,
    budget_bytes: int,
    drop_from_checkpoint: Callable[[int], None] | None,
    layers: Span = WHOLE_MODEL,
) -> LeftResidual | None:
    """Send the residual of a worker that leaves a run in progress or pauses.

    Returns the residual that remains with this worker, or None if nothing remains.

    Args:
        budget_bytes: the maximum number of bytes to send; the largest entries that fit are sent.
        drop_from_checkpoint: a function that removes the residual from the checkpoint of the given step; None
            if there are no checkpoints.
    """
    timeout_s = session.config.deadlines.handover_s
    until_s = time.monotonic() + timeout_s
    rounds = session.connection.loop.step_rounds

    def resolve() -> RoundOutcome | None:
        outcome, here = rounds.resolve_last(until_s - time.monotonic()), session.snapshot
        is_before = outcome is not None and _held_snapshot(session, here).applied < here.applied
        return NOT_COMMITTED if is_before else outcome

    residual_N = residual.take(resolve)
    if residual_N is None:
        residual.drop("it is not known whether this worker's last step was committed and applied")
    residual_N = _merge_received(session, residual.size, residual_N, until_s)
    if residual_N is None or not residual_N.any():
        return None
    snapshot = session.snapshot
    held = _held_snapshot(session, snapshot)  # now, because a later view may have another position
    if not snapshot.is_synced and (snapshot.world_size or snapshot.applied < 0):
        # `snapshot` has no position, or that of a state which this worker has not received.
        lost = residual_pieces.magnitude_sum(residual_N)
        session.increase_figure("lost_mass", lost)
        log.warning("this worker's residual, of magnitude %.3g, is lost: the group has another state", lost)
        return None
    chosen = residual_pieces.select_entries(residual_N, budget_bytes, max(1, snapshot.world_size))
    sent: bool | None = False  # None: the recipient has not answered, and may have the entries
    text = _obstacle(snapshot) if chosen.entries else "the remaining budget allows no entry"
    if not text:
        # The timeout begins only now, because selecting and encoding many entries also takes time.
        sent, text = session.connection.transfer_residual(
            residual_pieces.split_pieces(chosen.payload), timeout_s
        )
    sent_magnitude = chosen.magnitude_sum if sent else 0.0
    share = sent_magnitude / chosen.total_magnitude_sum
    session.increase_figure("handed_over_mass", sent_magnitude)
    session.report_figures({"handed_over_share": share})
    if not snapshot.is_finished:  # otherwise, no step needs the residual
        log.warning(
            "%.3g of the residual's magnitude %.3g (%.1f %%) transferred: %s",
            sent_magnitude,
            chosen.total_magnitude_sum,
            100 * share,
            f"{chosen.entries} entr{'y' if chosen.entries == 1 else 'ies'} to {text}" if sent else text,
        )
    if drop_from_checkpoint is not None and sent is not False:
        drop_from_checkpoint(snapshot.applied + 1)
    # A recipient that has not answered may have all entries, which must then not be added again.
    rest_N = residual_N if sent is False else chosen.remainder_N
    if rest_N is None:
        return None
    return LeftResidual(held.applied, held.history, rest_N, layers)


def _held_snapshot(session: GroupSession, snapshot: WorkerSnapshot) -> WorkerSnapshot:
    """Return the snapshot of the step to which this worker's residual belongs: the group's last step or, if
    this worker is alone and has not applied that step, the step before."""
    own = session.snapshot_of_model(snapshot) if snapshot.world_size == 1 else None
    return own or snapshot


def _obstacle(snapshot: WorkerSnapshot) -> str:
    """Return why no other worker can receive a residual; "" if one can."""
    if not snapshot.world_size:
        return "this worker is not a member"
    if snapshot.is_finished:
        return "the run has finished"
    return "there is no other member" if snapshot.world_size == 1 else ""


def _merge_received(
    session: GroupSession, n: int, residual_N: npt.NDArray[np.float32] | None, until_s: float
) -> npt.NDArray[np.float32] | None:
    """Return the sum of this worker's residual and the residuals that it has received from other workers but
    not yet added to its own; None if there is neither.

    Args:
        n: the number of elements in the residual; 0 if the exchange keeps none.
        residual_N: this worker's residual, which is changed in place; None if it is lost or there is none.
        until_s: the monotonic time until which to wait for transfers in progress.
    """
    if not n:
        return residual_N
    received, lost_magnitude = session.connection.take_last_residuals(max(0.0, until_s - time.monotonic()))
    for name, entries in received:
        residual_N = np.zeros(n, np.float32) if residual_N is None else residual_N
        residual_N[entries.indices] += entries.values
        log.warning(
            "the residual of %s, of magnitude %.3g, is passed on together with this worker's residual",
            name,
            residual_pieces.magnitude_sum(entries.values),
        )
    if lost_magnitude:
        session.increase_figure("lost_mass", lost_magnitude)
        log.warning(
            "magnitude %.3g of other workers' residuals is lost, because this worker accepted it and "
            "is leaving before the transfer is confirmed",
            lost_magnitude,
        )
    return residual_N


def save_left_residual(folder: Path, facts: Facts, left: LeftResidual) -> None:
    """Write the residual that a leaving worker still has.  Errors, such as a full disk, are logged."""
    path = folder / LEFT_FOLDER
    shutil.rmtree(path, ignore_errors=True)
    try:
        note = {"applied": left.applied, "history": left.history.hex(), "facts": [list(f) for f in facts]}
        tensors = {"residual": torch.from_numpy(left.residual_N)}
        with replaced_folder(path) as partial:
            with (partial / RESIDUAL_FILE).open("wb") as file:
                file.writelines(safetensors_pieces(tensors))
            (partial / "note.json").write_text(json.dumps(note))
    except OSError as error:
        reason = error.strerror or error
        log.error("the residual of this worker cannot be written to %s: %s; it is lost", path, reason)


def load_left_residual(folder: Path, facts: Facts, n: int, layers: Span = WHOLE_MODEL) -> LeftResidual | None:
    """Read and remove the residual that `save_left_residual` wrote, so that it cannot be added twice.

    Returns None if there is no residual of `n` elements with these settings; logs a warning if there is a
    different residual.
    """
    path = folder / LEFT_FOLDER
    if not path.is_dir():
        return None
    try:
        with (path / "note.json").open("rb") as file:
            note = json.loads(file.read(MAX_HEADER_BYTES))
        residual_N = safetensors.torch.load_file(path / RESIDUAL_FILE)["residual"].numpy()
        left = LeftResidual(int(note["applied"]), bytes.fromhex(note["history"]), residual_N, layers)
        written = parse_facts(note["facts"])
        if not matches_facts(written, facts) or residual_N.shape != (n,) or residual_N.dtype != np.float32:
            raise ValueError("it was written with different training settings")
        if not np.isfinite(residual_N).all():
            raise ValueError("it contains values that are not finite")
    except (OSError, ValueError, TypeError, KeyError, RecursionError, SafetensorError) as error:
        log.warning("the residual in %s will not be read back: %s", path, error)
        left = None
    with contextlib.suppress(OSError):
        shutil.rmtree(path)
    if path.exists():
        log.warning(
            "the residual in %s cannot be removed and will not be read back, because it might be added twice",
            path,
        )
        return None
    return left
