"""The residual of a worker that pauses more than once between two steps, and then leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gridtrain.errors import GridtrainError
from gridtrain.training.model_state import ModelStateOptions, WholeModelState
from gridtrain.training.residual_departure import LeftResidual, load_left_residual

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
    made._session = SimpleNamespace(tasks=SimpleNamespace(settle_absences=lambda timeout_s: None))
    made._options, made._facts, made._left = ModelStateOptions(tmp_path, every=10, keep=2), (), None
    made._has_taken_part = True
    made._left_at = made._left_step = made._written_step = made._store = made._uploader = None
    made._transfer_residual, made._keep_for_pause = transfer, lambda: None
    return made


@pytest.mark.parametrize(
    ("untransferred", "expected"),
    [
        ([OWN, None], [1.0, 0.0, 2.0]),
        ([None, OF_A_PEER], [0.0, 4.0, 8.0]),
        ([OWN, OF_A_PEER], [1.0, 4.0, 10.0]),
        ([OWN, ELSEWHERE], [0.0, 4.0, 8.0]),  # the group has gone on without its own
        ([ELSEWHERE, OWN], [0.0, 4.0, 8.0]),  # its own is of the checkpoint with which it was started again
    ],
    ids=["own", "received", "both", "received later", "restarted"],
)
@pytest.mark.parametrize("ending", ["pause", "leave"])
def test_a_residual_received_between_two_pauses_is_left_as_well(
    state: Any, tmp_path: Path, untransferred: list[LeftResidual | None], expected: list[float], ending: str
) -> None:
    state.untransferred = list(untransferred)
    state.rest(1000)
    if ending == "pause":
        state.rest(1000)
        (left,) = state._take_left()
    else:
        state.leave(1000, between_steps=False)
        state.close(0.0)
        left = load_left_residual(tmp_path, (), 3)
    assert not state.untransferred
    assert left is not None and left.residual_N.tolist() == expected


def test_a_residual_is_written_although_the_group_is_gone(state: Any, tmp_path: Path) -> None:
    state.untransferred = [OWN, GridtrainError("this worker has left the run")]
    state.rest(1000)
    state.leave(1000, between_steps=False)
    state.close(0.0)
    left = load_left_residual(tmp_path, (), 3)
    assert left is not None and left.residual_N.tolist() == [1.0, 0.0, 2.0]
