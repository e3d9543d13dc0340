"""Rows of settings: which worker has to leave, and that damaged or incomplete rows have no effect."""

import numpy as np
import pytest
import torch
from torch import nn

from gridtrain.core.group.round_flags import SKIP
from gridtrain.errors import ConfigError
from gridtrain.runtime.buffers.collective_buffers import DenseRingBuffer
from gridtrain.runtime.mailbox.step_plan import StepPlan
from gridtrain.training import hyperparameter_check


def plan(rank, world_size, attempt=1):
    return StepPlan(7, attempt, rank, world_size, samples=1, total_samples=world_size)


def sgd(**options):
    return torch.optim.SGD(nn.Linear(2, 1).parameters(), **{"lr": 0.1, **options})


def summed(optimizers, skipping=()):
    """The sum of all rows, which every rank has after the ring."""
    parts = [
        hyperparameter_check.make_hyperparameter_buffer(plan(rank, len(optimizers)), one)
        for rank, one in enumerate(optimizers)
    ]
    for rank, part in enumerate(parts):
        part.make_collective(rank, len(parts), SKIP if rank in skipping else 0)
    return sum(part.update for part in parts)


def answers_of(optimizers, sums_N):
    """The answer for each rank: None to go on."""
    answers = []
    for rank, one in enumerate(optimizers):
        sums = DenseRingBuffer(sums_N.copy(), len(optimizers))
        try:
            hyperparameter_check.check_hyperparameters(plan(rank, len(optimizers)), one, sums)
            answers.append(None)
        except ConfigError as error:
            answers.append(error.reason)
    return answers


def test_a_first_attempt_sends_no_rows():
    assert hyperparameter_check.make_hyperparameter_buffer(plan(0, 3, attempt=0), sgd()) is None


@pytest.mark.parametrize(
    ("rates", "leaving"),
    [
        ([0.1, 0.1, 0.1], []),
        ([0.1, 0.2], [1]),
        ([0.2, 0.1, 0.1], [0]),
        ([0.1, 0.2, 0.1, 0.2], [1, 3]),
        ([0.3, 0.1, 0.2], [1, 2]),
        ([0.1, 0.1, 0.1 + 1e-12], [2]),
        ([np.float32(0.1), np.float32(0.1), np.float32(0.2)], [2]),
    ],
)
@pytest.mark.parametrize("skipping", [(), (0,)], ids=["", "a gradient is not finite"])
def test_the_largest_group_of_equal_settings_goes_on(rates, leaving, skipping):
    optimizers = [sgd(lr=rate) for rate in rates]
    answers = answers_of(optimizers, summed(optimizers, skipping))
    assert [rank for rank, reason in enumerate(answers) if reason] == leaving


def test_the_error_names_the_settings():
    rates = [{"lr": 0.1}, {"lr": 0.1}, {"lr": 0.01, "momentum": 0.9, "nesterov": True}]
    optimizers = [sgd(**options) for options in rates]
    assert answers_of(optimizers, summed(optimizers))[2] == (
        "step 8 cannot be committed: rank 2 has lr=0.01, momentum=0.9, nesterov=True, but 2 of 3 workers "
        "(ranks 0, 1) have lr=0.1, momentum=0, nesterov=False; the run continues without rank 2"
    )


def test_the_error_names_the_parameter_group():
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    groups = [
        [{"params": first.parameters()}, {"params": second.parameters(), "lr": lr}] for lr in (1.0, 2.0)
    ]
    optimizers = [torch.optim.SGD(group, lr=0.1) for group in groups]
    reason = answers_of(optimizers, summed(optimizers))[1]
    assert "rank 1 has lr of group 1=2.0, but 1 of 2 workers (rank 0) has lr of group 1=1.0;" in reason


def test_settings_beyond_a_row_are_compared_by_their_digest():
    def many(last):
        parameters = [nn.Parameter(torch.ones(1)) for _ in range(60)]
        groups = [{"params": [p], "weight_decay": 0.0} for p in parameters]
        groups[-1]["weight_decay"] = last
        return torch.optim.SGD(groups, lr=0.1)

    optimizers = [many(0.0), many(0.5)]
    reason = answers_of(optimizers, summed(optimizers))[1]
    assert "rank 1 has settings " in reason and "has settings " in reason.partition(", but ")[2]


@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf, 300.0, -1.0, 0.0])
@pytest.mark.parametrize("at", [0, 20, 600])
def test_no_worker_leaves_because_of_an_incomplete_row(at, damage):
    optimizers = [sgd(lr=0.1), sgd(lr=0.2)]
    sums_N = summed(optimizers)
    sums_N[at] = damage
    assert answers_of(optimizers, sums_N) == [None, None] or damage == 0.0, "the value may have been 0"


def test_no_worker_leaves_because_another_one_altered_its_row(caplog):
    optimizers = [sgd(lr=0.1), sgd(lr=0.1), sgd(lr=0.1)]
    forged_N = summed([sgd(lr=0.3), sgd(lr=0.1), sgd(lr=0.3)])
    rank_0, rank_1, rank_2 = answers_of(optimizers, forged_N)
    assert rank_0 is None and rank_2 is None, "their rows are not the ones that they sent"
    assert "rank 1 has lr=0.1" in rank_1, "a member cannot check the rows of others"
    assert (
        caplog.messages
        == ["step 8: workers' settings are not compared, because another worker altered this worker's row"]
        * 2
    )


def test_a_setting_that_does_not_fit_into_the_row_is_not_named():
    def adamw(lr):
        groups = [{"params": nn.Linear(2, 1).parameters()}, {"params": nn.Linear(2, 1).parameters()}]
        return torch.optim.AdamW(groups, lr=lr)

    optimizers = [adamw(0.00016666666666666666), adamw(0.0005)]
    assert answers_of(optimizers, summed(optimizers))[1] == (
        "step 8 cannot be committed: rank 1 has lr of group 0=0.0005, lr of group 1=0.0005, but 1 of 2 "
        "workers (rank 0) has lr of group 0=0.00016666666666666666, lr of group 1=0.00016666666666666666; "
        "the run continues without rank 1"
    )


def test_texts_from_the_network_are_made_printable():
    evil = sgd()
    evil.param_groups[0]["lr"] = "\x1b[2J\x07"
    optimizers = [evil, sgd()]
    (_, reason) = answers_of(optimizers, summed(optimizers))
    assert "\x1b" not in reason and "\x07" not in reason and "lr=\ufffd[2J\ufffd" in reason
