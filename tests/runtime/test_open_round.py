"""An open round of a pipeline, as its training thread sees it."""

from __future__ import annotations

from gridtrain.core import messages as m
from gridtrain.errors import JoinRefused
from gridtrain.runtime.mailbox.mailbox import Mailbox
from gridtrain.runtime.open_round import OpenRound, PipelineRound
from gridtrain.runtime.step_plan import NOT_COMMITTED


def test_a_round_that_ended_before_the_worker_was_refused_is_lost_and_has_its_outcome() -> None:
    """The trainer then drops its batch, and learns of the refusal between two batches."""
    mailbox, mine = Mailbox(lambda: None), OpenRound(m.RoundId(1, 1, 0, 0), {})
    mine.outcome = NOT_COMMITTED
    mailbox.fail(JoinRefused("finished", "the run is finished"))
    round_ = PipelineRound(mailbox, mine)
    assert round_.is_lost and round_.end() is NOT_COMMITTED
