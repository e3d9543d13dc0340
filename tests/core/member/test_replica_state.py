"""What a worker's state says about skipped steps: x is a skipped step, - one that was applied."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gridtrain.core import messages as m
from gridtrain.core.commit.two_phase_commit import EMPTY_HISTORY
from gridtrain.core.member.replica_state import ReplicaState


def ledger_after(steps: str) -> m.LedgerState:
    """The ledger after steps of 8 samples each."""
    skipped = 8 * steps.count("x")
    return m.LedgerState(step=len(steps), cursor=8 * len(steps), consumed=8 * len(steps), skipped=skipped)


def after(joined: str, then: str = "") -> ReplicaState:
    """The state of a worker that joined after the steps `joined`, and has committed `then`."""
    state = ReplicaState()
    if joined:
        state.load_checkpoint(m.CheckpointInfo(len(joined) - 1, EMPTY_HISTORY, ledger_after(joined)))
    for count in range(1, len(then) + 1):
        steps = joined + then[:count]
        state.commit_step(len(steps) - 1, bytes(32), ledger_after(steps))
    return state


@pytest.mark.parametrize(
    ("joined", "then", "skipped", "in_a_row"),
    [
        ("", "--", 0, 0),
        ("", "xxx", 3, 3),
        ("", "xx-", 2, 0),
        ("", "x-xx", 3, 2),
        ("-xxxx", "", 4, 0),  # it cannot know which ones were skipped
        ("-xxxx", "xx", 6, 2),
        ("xxxx", "", 4, 4),  # but it knows that all were
        ("xxxx", "xx", 6, 6),
        ("xxxx", "-", 4, 0),
    ],
)
def test_skipped_steps_are_reported_with_those_in_a_row(
    joined: str, then: str, skipped: int, in_a_row: int
) -> None:
    samples = 8 * len(joined + then)
    figures = {m.SKIPPED_SAMPLES: 8 * skipped, m.COMMITTED_SAMPLES: samples, m.SKIPPED_IN_A_ROW: in_a_row}
    assert after(joined, then).skip_metrics == (figures if skipped else {})


def test_a_step_without_samples_ends_no_sequence() -> None:
    state = after("", "-xx")
    state.commit_step(3, bytes(32), replace(state.ledger, step=4))
    assert state.skip_metrics[m.SKIPPED_IN_A_ROW] == 3


def test_a_rollback_is_no_negative_sequence() -> None:
    state = after("", "xx-x")
    state.load_checkpoint(m.CheckpointInfo(1, EMPTY_HISTORY, ledger_after("xx")))
    assert state.skip_metrics[m.SKIPPED_IN_A_ROW] == 0
