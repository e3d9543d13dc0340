"""What becomes of a residual when its worker leaves, and when it comes back.

Decides what is handed over, what is written down, and whether what was written down still fits the run
(docs/decisions/0016).  Never decides who takes it over: that is `protocol.handover`.

    leave after step s     largest entries --> a neighbour        (it has them: never read back)
                           the rest --------> <folder>/left       (applied, history, facts)
    come back              the run is still after step s, with the same history: added, and the file removed
                           otherwise: removed, and counted as lost
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
from typing import Protocol

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from safetensors import SafetensorError

from gridtrain.core.messages import Facts
from gridtrain.runtime.group_session import GroupSession
from gridtrain.runtime.state_transfer import residual_pieces
from gridtrain.runtime.state_transfer.checkpoint_copy import RESIDUAL_FILE
from gridtrain.runtime.step_plan import RoundOutcome
from gridtrain.training.checkpoint.checkpoint_store import publish_folder, sync_files

log = logging.getLogger("gridtrain")

LEFT_FOLDER = "left"
MAX_HEADER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LeftResidual:
    """A residual as it was after step `applied` of a run with this history."""

    applied: int
    history: bytes
    residual_N: npt.NDArray[np.float32]


class ResidualOwner(Protocol):
    """Whatever trains, and keeps a residual."""

    @property
    def residual_size(self) -> int: ...

    def take_residual(self, settle: Callable[[], RoundOutcome | None]) -> npt.NDArray[np.float32] | None: ...


def transfer_residual(
    session: GroupSession, wrapped: ResidualOwner, budget_bytes: int, voids: Callable[[int], None] | None
) -> LeftResidual | None:
    """To be called once, when this worker leaves a run that goes on: nobody else could send its residual.

    Returns what stays with this worker; None: nothing.

    Args:
        voids: see `Checkpoints.void`; None: there are no checkpoints.
    """
    patience_s = session.config.deadlines.handover_s
    until_s = time.monotonic() + patience_s
    residual_N = wrapped.take_residual(
        lambda: session.connection.resolve_last_round(until_s - time.monotonic())
    )
    if residual_N is None and wrapped.residual_size:
        log.warning("this worker's residual is lost: its last step was cut off in the middle")
    residual_N = _merge_received(session, wrapped.residual_size, residual_N, until_s)
    if residual_N is None or not residual_N.any():
        return None
    picture = session.snapshot
    chosen = residual_pieces.select_entries(residual_N, budget_bytes, max(1, picture.world_size))
    taken: bool | None = False
    text = "nobody else is there"
    if chosen.entries and picture.world_size > 1 and not picture.is_finished:
        # To sort and to encode takes a while where there is much, and is no heir's fault.
        taken, text = session.connection.transfer_residual(
            residual_pieces.split_pieces(chosen.payload), patience_s
        )
    share = chosen.magnitude_sum / chosen.total_magnitude_sum if taken else 0.0
    session.report_figures(
        {"handed_over_mass": chosen.magnitude_sum if taken else 0.0, "handed_over_share": share}
    )
    log.warning(
        "%.3g of the residual's mass %.3g (%.1f %%) handed over: %s",
        chosen.magnitude_sum if taken else 0.0,
        chosen.total_magnitude_sum,
        100 * share,
        f"{chosen.entries} entries to {text}" if taken else text,
    )
    if voids is not None and taken is not False:
        voids(picture.applied + 1)
    # An heir that has not answered may have everything all the same: it must not come back from here.
    rest_N = residual_N if taken is False else chosen.remainder_N
    return LeftResidual(picture.applied, picture.history, rest_N) if rest_N is not None else None


def _merge_received(
    session: GroupSession, residual_n: int, residual_N: npt.NDArray[np.float32] | None, until_s: float
) -> npt.NDArray[np.float32] | None:
    """And what this worker has taken over from others, and not added to its own before it left."""
    if not residual_n:
        return residual_N
    inherited, lost_mass = session.connection.take_last_residuals(max(0.0, until_s - time.monotonic()))
    for peer, entries in inherited:
        residual_N = np.zeros(residual_n, np.float32) if residual_N is None else residual_N
        residual_N[entries.indices] += entries.values
        log.warning(
            "residual of %s, mass %.3g: goes on with this worker's",
            peer.hex()[:8],
            residual_pieces.magnitude_sum([entries]),
        )
    if lost_mass:
        session.report_figures({"lost_mass": lost_mass})
        log.warning(
            "mass %.3g of others' residuals is lost: this worker took it over, and leaves before it counted",
            lost_mass,
        )
    return residual_N


def save_left_residual(folder: Path, facts: Facts, left: LeftResidual | None) -> None:
    """Write down what a worker that leaves still holds; None: nothing.  A full disk is logged."""
    path, partial = folder / LEFT_FOLDER, folder / f".{LEFT_FOLDER}.partial"
    try:
        shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(partial, ignore_errors=True)
        if left is None:
            return
        partial.mkdir(parents=True)
        note = {"applied": left.applied, "history": left.history.hex(), "facts": [list(f) for f in facts]}
        tensors = {"residual": torch.from_numpy(left.residual_N)}
        (partial / RESIDUAL_FILE).write_bytes(safetensors.torch.save(tensors))
        (partial / "note.json").write_text(json.dumps(note))
        sync_files(partial)
        publish_folder(partial, path)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)  # there is no room for it
        log.error("the residual of this worker is not written down: %s", error)


def load_left_residual(folder: Path, facts: Facts, n: int) -> LeftResidual | None:
    """What this worker wrote down when it left; it is removed, so that nothing can be read back twice."""
    path = folder / LEFT_FOLDER
    if not path.is_dir():
        return None
    try:
        with (path / "note.json").open("rb") as file:
            note = json.loads(file.read(MAX_HEADER_BYTES))
        residual_N = safetensors.torch.load_file(path / RESIDUAL_FILE)["residual"].numpy()
        left = LeftResidual(int(note["applied"]), bytes.fromhex(note["history"]), residual_N)
        same = [tuple(fact) for fact in note["facts"]] == list(facts)
        if not same or residual_N.shape != (n,) or residual_N.dtype != np.float32:
            raise ValueError("it is of another training")
        if not np.isfinite(residual_N).all():
            raise ValueError("it holds values that are not finite")
    except (OSError, ValueError, TypeError, KeyError, RecursionError, SafetensorError) as error:
        log.warning("the residual in %s is not read back: %s", path, error)
        left = None
    with contextlib.suppress(OSError):
        shutil.rmtree(path)
    if path.exists():
        log.warning("the residual in %s cannot be removed, and is not read back", path)
        return None
    return left
