"""The residual of a worker that pauses more than once between two steps, and then leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from training.test_worker_residual import INHERITED, a_round

from gridtrain.config import Deadlines
from gridtrain.core.messages import KEPT_STEP, CheckpointInfo, LedgerState
from gridtrain.errors import ConfigError, GridtrainError
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.heartbeat import HeartbeatSource
from gridtrain.runtime.mailbox.mailbox import Mailbox
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.training.checkpoint import checkpoint_store, model_export
from gridtrain.training.checkpoint.checkpoint_store import (
    CheckpointContent,
    CheckpointStore,
    save,
    step_folder,
)
from gridtrain.training.checkpoint.model_export import save_model
from gridtrain.training.model_state import ModelStateOptions, WholeModelState
from gridtrain.training.residual_departure import LeftResidual, load_left_residual, transfer_residual
from gridtrain.training.worker_residual import WorkerResidual

OWN = LeftResidual(4, b"h", np.array([1.0, 0.0, 2.0], np.float32))
OF_A_PEER = replace(OWN, residual_N=np.array([0.0, 4.0, 8.0], np.float32))
ELSEWHERE = replace(OF_A_PEER, applied=5)


@pytest.fixture
def state(tmp_path: Path) -> Any:
    """A model state; `untransferred` are the results of the next transfers: a residual, none, or an error."""

    def transfer(budget_bytes: int) -> LeftResidual | None:
        left = made.untransferred.pop(0)
        if isinstance(left, GridtrainError):
            raise left
        return left  # type: ignore[no-any-return]

    made: Any = WholeModelState.__new__(WholeModelState)
    source = HeartbeatSource(Mailbox(lambda: None))
    made.reported = source._figures
    tasks = SimpleNamespace(settle_absences=lambda timeout_s: True)
    made._session = SimpleNamespace(
        tasks=tasks,
        report_figures=source.add_figures,
        increase_figure=source.increase_figure,
        has_ended_by=lambda error: False,
    )
    made._options, made._facts, made._left = ModelStateOptions(tmp_path, every=10, keep=2), (), None
    made._has_taken_part = True
    made._paused_with = made._left_at = made._left_step = made._written_step = None
    made._store = made._uploader = made._lost_step = None
    made._transfer_residual, made._keep_for_pause = transfer, lambda: None
    return made


@pytest.mark.parametrize(("left_at", "written", "kept"), [(104, 100, 105), (None, 100, 100), (None, None, 0)])
def test_a_worker_that_leaves_reports_the_checkpoint_that_it_keeps(
    state: Any, left_at: int | None, written: int | None, kept: int
) -> None:
    """Also if it reported another one at an earlier pause."""
    state.untransferred = [None]
    state.reported[KEPT_STEP] = 7.0
    state._leaves_before_first_step = lambda: False

    def keep(*, between_steps: bool) -> None:
        state._left_at = None if left_at is None else SimpleNamespace(applied=left_at)

    state._keep_for_others, state._written_step = keep, written
    state.leave(0, between_steps=True)
    assert state.reported == {KEPT_STEP: float(kept)}


@pytest.mark.parametrize(
    ("untransferred", "expected", "lost"),
    [
        ([OWN, None], [1.0, 0.0, 2.0], 0),
        ([None, OF_A_PEER], [0.0, 4.0, 8.0], 0),
        ([OWN, OF_A_PEER], [1.0, 4.0, 10.0], 0),
        ([OWN, ELSEWHERE], [0.0, 4.0, 8.0], 3),  # the group has gone on without its own
        ([ELSEWHERE, OWN], [0.0, 4.0, 8.0], 3),  # its own is of the checkpoint with which it began again
    ],
    ids=["own", "received", "both", "received later", "restarted"],
)
@pytest.mark.parametrize("ending", ["pause", "leave"])
def test_a_residual_received_between_two_pauses_is_left_as_well(
    state: Any,
    tmp_path: Path,
    untransferred: list[LeftResidual | None],
    expected: list[float],
    lost: float,
    ending: str,
) -> None:
    state.untransferred = list(untransferred)
    state.rest(1000)
    if ending == "pause":
        state.rest(1000)
        (left,) = state._take_left()
    else:
        state.leave(1000, between_steps=False)
        state.close(0.0, is_run_over=False)
        left = load_left_residual(tmp_path, (), 3)
    assert not state.untransferred and state.reported.get("lost_mass", 0) == lost
    assert left is not None and left.residual_N.tolist() == expected


def test_a_residual_is_written_although_the_group_is_gone(state: Any, tmp_path: Path) -> None:
    state.untransferred = [OWN, GridtrainError("this worker has left the run")]
    state.rest(1000)
    state.leave(1000, between_steps=False)
    state.close(0.0, is_run_over=False)
    left = load_left_residual(tmp_path, (), 3)
    assert left is not None and left.residual_N.tolist() == [1.0, 0.0, 2.0]


@pytest.mark.parametrize("lists", [True, False], ids=["", "a disk that fails"])
def test_a_warning_of_lost_steps_counts_usable_checkpoints_and_always_releases_the_folder(
    state: Any, tmp_path: Path, lists: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {1: (), 2: (("model", "another"),), 3: (), 9: ()}
    for step, written in facts.items():
        info = CheckpointInfo(step - 1, b"h" * 32, LedgerState(step=step))
        save(CheckpointContent(info, written, {}, {}, {}), step_folder(tmp_path, step))
    (step_folder(tmp_path, 3) / "state.json").write_text("{")
    state.checkpoints = state._store = CheckpointStore(tmp_path, every=10, keep=2)
    state._is_leaving, state._lost_step = False, (5, "was stopped within a step")
    state._store.claim()
    if not lists:
        monkeypatch.setattr(checkpoint_store, "list_checkpoints", Mock(side_effect=OSError(5, "I/O error")))
    state.close(0.0, is_run_over=False)
    latest = "steps 2 to 5 are lost: this worker's latest checkpoint is of step 1"
    assert (latest if lists else "steps 1 to 5 are lost: it has no usable checkpoint") in caplog.text
    CheckpointStore(tmp_path, every=10, keep=2).claim()  # the folder is no longer in use


HELD = CheckpointInfo(4, b"h", LedgerState())


def test_a_pause_before_the_first_step_leaves_the_checkpoint_on_disk_as_it_is(state: Any) -> None:
    """Its residual is in memory now, so that the state without it would replace the one with it."""
    kept: list[int] = []
    state.untransferred, state._has_taken_part = [OWN, OWN], False
    state._session.snapshot = SimpleNamespace(world_size=2, first_step=0)
    state._keep_for_pause, state._keep_for_others = lambda: HELD, lambda: kept.append(4)
    assert state.rest(1000) == HELD and kept == []
    state._has_taken_part = True
    assert state.rest(1000) == HELD and kept == [4]


@pytest.mark.parametrize("is_due", [False, True])
def test_the_checkpoint_of_a_pause_is_uploaded_only_if_one_of_its_step_is_due(
    state: Any, tmp_path: Path, is_due: bool
) -> None:
    uploaded: list[Path] = []
    state._uploader = SimpleNamespace(add=lambda path, part, is_final: uploaded.append(path))
    state._final_step, state._is_checkpoint_due = None, lambda snapshot: is_due
    state._write_checkpoint = lambda snapshot: state._upload(step_folder(tmp_path, snapshot.applied + 1))
    state._left_at = SimpleNamespace(applied=4)
    state.save_paused()
    assert state._written_step == 5 and len(uploaded) == is_due


def test_a_pause_says_that_it_could_not_save_the_state(
    state: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_s: list[float] = []
    monkeypatch.setattr(state, "_wait_for_writer", lambda timeout_s: waits_s.append(timeout_s))
    state._left_at, state._has_taken_part, state._written_step = SimpleNamespace(applied=4), True, 3
    state.save_paused()
    assert waits_s == [300.0, 5.0] and "the previous checkpoint is still being written" in caplog.text
    saved = f"the state after step 3 is on this worker's disk, in {state._options.folder}"
    assert caplog.messages[-1] == f"{saved}; its last state is still being written"


@pytest.mark.parametrize("written_step", [5, 4, None])
def test_a_worker_whose_steps_were_dropped_names_only_a_checkpoint_that_exists(
    state: Any, caplog: pytest.LogCaptureFixture, written_step: int | None
) -> None:
    """With overlapped local steps, or a full disk, there is none of the pause."""
    state._paused_with, state._written_step = (HELD, False), written_step
    state._warn_if_begun_again(SimpleNamespace(applied=0, history=b"another"))
    (message,) = caplog.messages
    assert "paused after step 5" in message and message.count("gridtrain export") == (written_step == 5)
    state._warn_if_begun_again(SimpleNamespace(applied=0, history=b"another"))
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("was_alone", "uploads", "paused_step", "is_warned"),
    [
        (True, False, 5, True),
        (False, False, 5, False),  # the others have continued
        (True, True, 5, True),  # this checkpoint is not uploaded
        (True, True, None, False),  # others can continue from the uploaded checkpoint
    ],
)
def test_a_group_that_has_overtaken_a_pause_has_dropped_only_steps_that_no_other_worker_had(
    state: Any,
    caplog: pytest.LogCaptureFixture,
    was_alone: bool,
    uploads: bool,
    paused_step: int | None,
    is_warned: bool,
) -> None:
    state._paused_with, state._written_step = (HELD, was_alone), 5
    state._paused_step, state._uploader = paused_step, object() if uploads else None
    state._warn_if_begun_again(SimpleNamespace(applied=9, history=b"another"))
    assert [text.count("paused after step 5") for text in caplog.messages] == [1] * is_warned
    assert (
        caplog.text.count("this worker is continuing after the group's step 10; gridtrain export")
        == is_warned
    )


def test_a_repeated_export_keeps_the_earlier_model_once(
    state: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "final.safetensors"
    save_model({"weight": torch.ones(1)}, final)
    state._optimizer = SimpleNamespace(
        model=nn.Linear(2, 1), trained=(), base=SimpleNamespace(describe=lambda: "")
    )
    with monkeypatch.context() as patch:
        patch.setattr(model_export, "write_safetensors", Mock(side_effect=OSError(28, "No space left")))
        for _ in range(2):
            with pytest.raises(ConfigError, match="cannot be written: No space left"):
                state.export(tmp_path)
    state.export(tmp_path)
    assert [path.name for path in tmp_path.glob("earlier-*")] == ["earlier-1"]
    assert load_file(tmp_path / "earlier-1" / final.name)["weight"] == 1.0
    assert load_file(final)["weight"].shape == (1, 2)
    assert final.stat().st_size + 4095 <= 0.995 * state.export_bytes, "in whole blocks, and when rounded"


def leaving(snapshot: WorkerSnapshot, reported: dict[str, float]) -> Any:
    """The session of a worker that leaves with this snapshot; `reported` are its figures."""
    source = HeartbeatSource(Mailbox(lambda: None))
    source._figures = reported
    return SimpleNamespace(
        config=SimpleNamespace(deadlines=Deadlines()),
        connection=SimpleNamespace(
            loop=SimpleNamespace(step_rounds=None), take_last_residuals=lambda timeout_s: ([], 0.0)
        ),
        snapshot=snapshot,
        snapshot_of_model=lambda here: here,
        report_figures=source.add_figures,
        increase_figure=source.increase_figure,
    )


@pytest.mark.parametrize(
    ("world_size", "is_finished", "text"),
    [
        (0, False, "this worker is not a member"),
        (1, False, "there is no other member"),
        (2, True, ""),
    ],
)
def test_a_residual_that_stays_says_why(
    world_size: int, is_finished: bool, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    residual: Any = SimpleNamespace(size=4, take=lambda resolve: np.ones(4, np.float32))
    session = leaving(
        WorkerSnapshot(world_size=world_size, is_finished=is_finished, applied=6, is_synced=world_size > 0),
        {},
    )
    left = transfer_residual(session, residual, 1 << 20, None)
    assert left is not None and left.residual_N.tolist() == [1.0] * 4
    said = f"0 of the residual's magnitude 4 (0.0 %) transferred: {text}"
    assert caplog.messages == ([said] if text else []), "after the end of the run, nothing is lost"


@pytest.mark.parametrize(
    "snapshot", [WorkerSnapshot(world_size=2, applied=7, history=b"h7"), WorkerSnapshot()]
)
@pytest.mark.parametrize("is_known", [True, False])
def test_a_residual_is_not_saved_for_a_state_that_its_worker_has_not_received(
    is_known: bool, snapshot: WorkerSnapshot, caplog: pytest.LogCaptureFixture
) -> None:
    """A member that is not synced has the position of the group's state, whose last step may include a part
    of this residual; once it has left its generation, it has no position."""
    sparse, _ = a_round()
    reported: dict[str, float] = {}
    session = leaving(snapshot, reported)
    residual = WorkerResidual(sparse, 4, session.increase_figure)
    assert residual.add(INHERITED, 1)
    residual._is_committing = not is_known
    assert transfer_residual(session, residual, 1 << 20, None) is None
    assert reported == {"lost_mass": 2.5} and "of magnitude 2.5, is lost" in caplog.text


@pytest.mark.parametrize(("is_accepted", "mass"), [(True, 2.5), (False, 0.0)])
def test_transferred_residuals_add_up(is_accepted: bool, mass: float) -> None:
    """A view that arrives during the transfer does not move what remains to another position."""
    sparse, _ = a_round()
    reported: dict[str, float] = {}
    session = leaving(WorkerSnapshot(world_size=2, applied=6, history=b"h6", is_synced=True), reported)
    here, later = session.snapshot, WorkerSnapshot(world_size=2, applied=7, history=b"h7")

    def transfer(pieces: object, timeout_s: float) -> tuple[bool, str]:
        session.snapshot = later
        return is_accepted, "bert"

    session.connection.transfer_residual = transfer
    for _ in range(2):
        session.snapshot = here
        residual = WorkerResidual(sparse, 4, session.increase_figure)
        residual.clear()
        assert residual.add(INHERITED, 1)
        left = transfer_residual(session, residual, 1 << 20, None)
        assert is_accepted or (left is not None and (left.applied, left.history) == (6, b"h6"))
    assert reported.get("handed_over_mass", 0.0) == 2 * mass
    assert reported["handed_over_share"] == float(is_accepted)


@pytest.mark.parametrize("left", [None, OWN])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_residual_is_lost_once_with_the_state_to_which_it_belongs(
    state: Any, is_resumed: bool, left: LeftResidual | None
) -> None:
    """The group may have received a part of it in a round whose end this worker has not seen.

    A worker that returns may have a residual of a checkpoint and what remained of that one when it left.
    """
    residual = WorkerResidual(a_round()[0], 4, state._session.increase_figure)
    assert residual.add(INHERITED, 1)
    state._is_resumed, state._left = is_resumed, left
    state._optimizer = SimpleNamespace(residual=residual, restore_state=lambda blobs: None)
    state._load_state([b""])
    state._restore_left_residuals(WorkerSnapshot(applied=9))
    of_left = 0.0 if left is None else 3.0
    assert state.reported["lost_mass"] == (of_left if is_resumed and left is not None else 2.5 + of_left)
    assert residual.magnitude == 0.0 and not state._is_resumed


@pytest.mark.parametrize(
    ("size", "cause"), [(4, "the sum is too large to send"), (0, "this worker keeps no residual")]
)
def test_a_residual_that_is_not_added_says_why_and_is_added_to_what_is_lost(
    state: Any, size: int, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    state._optimizer = SimpleNamespace(
        residual=SimpleNamespace(size=size, add=lambda entries, world_size: False)
    )
    state._session.snapshot = WorkerSnapshot(world_size=2)
    state._add_residual("bert", SparseVector(np.array([1]), np.array([3.0], np.float32)))
    assert caplog.messages == [f"the residual of bert, 1 entry of magnitude 3, is lost, because {cause}"]
    for _ in range(2):  # what it left at two pauses; the run has gone on
        state._left = OWN
        state._restore_left_residuals(WorkerSnapshot(applied=9))
    assert state.reported == {"lost_mass": 3.0 + 3.0 + 3.0}
