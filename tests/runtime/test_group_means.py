"""Calls of `grid.mean` that other workers do not make, or make late."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from gridtrain.config import Deadlines
from gridtrain.core.group.member_events import DeliverMean
from gridtrain.core.member.scalar_means import BEFORE_STEP_INDEX, MAX_OPEN_MEANS, WEIGHTS_INDEX
from gridtrain.core.messages import LONE_MEANS
from gridtrain.errors import ConfigError
from gridtrain.runtime import group_means
from gridtrain.runtime.group_means import GroupMeans

DEADLINES = Deadlines()
CALL = "call grid.mean on all workers"


class Worker:
    """Means whose answers a test chooses; `figures` are those of the heartbeats."""

    def __init__(self, world_size: int = 2, rank: int = 0) -> None:
        self.answers: list[DeliverMean | None] = []
        self.waits_s: list[float] = []
        self.figures: dict[str, float] = {}
        loop = SimpleNamespace(
            request_average=lambda *request: self.requests.append(request),
            await_average=self._answer,
            heartbeat=SimpleNamespace(add_figures=self.figures.update),
            mailbox=SimpleNamespace(snapshot=SimpleNamespace(world_size=world_size, rank=rank)),
        )
        config = SimpleNamespace(deadlines=DEADLINES)
        connection: Any = SimpleNamespace(loop=loop, config=config, should_interrupt=False)
        self.generations: list[int | None] = []
        self.requests: list[tuple[int, int, float]] = []
        self.means = GroupMeans(connection, lambda step: self.generations.pop(0))

    def _answer(self, step: int, index: int, timeout_s: float) -> DeliverMean | None:
        self.waits_s.append(timeout_s)
        return self.answers.pop(0)

    def call(self, step: int, *missing: str, index: int = 0) -> float:
        self.answers.append(DeliverMean(step, index, 3.0, missing))
        return self.means.average(step, 1, 2.0, is_before_step=False)


def test_a_call_that_no_other_worker_makes_is_logged_and_soon_ends_in_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Worker()
    assert [worker.call(0, "bob"), worker.call(1, "bob")] == [3.0, 3.0]
    assert caplog.messages == [
        f"grid.mean was called in step {step} without bob -> {group_means.REMEDY}" for step in (1, 2)
    ]
    assert worker.figures == {LONE_MEANS: 2}
    with pytest.raises(ConfigError, match=rf"3 times in a row without bob, up to step 3 -> {CALL}"):
        worker.call(2, "bob")


def test_calls_of_one_step_are_logged_once_and_counted_by_their_place() -> None:
    worker = Worker()
    for step in range(9):
        assert worker.call(step) == 3.0
        missing = () if step % 3 == 2 else ("bob",)
        assert worker.call(step, *missing, index=1) == 3.0
    assert worker.figures == {LONE_MEANS: 6}
    for step in (9, 10):
        worker.call(step), worker.call(step, "bob", index=1)
    worker.call(11)
    with pytest.raises(ConfigError, match="up to step 12"):
        worker.call(11, "bob", index=1)


def test_a_worker_with_another_script_does_not_end_the_run_of_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Worker(world_size=3)
    for step in range(100):
        assert worker.call(step, "eve") == 3.0
    assert len(caplog.messages) == 7, "after 1, 2, 4, ... steps"
    with pytest.raises(ConfigError, match="without bob, eve"):
        worker.call(100, "bob", "eve")


def test_rank_0_does_not_end_the_scripts_of_others_by_naming_workers_that_have_not_called(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Worker(world_size=3, rank=2)
    for step in range(8):
        assert worker.call(step, "bob", "eve") == 3.0
    assert len(caplog.messages) == 4, "after 1, 2, 4, 8 steps"
    assert worker.figures == {LONE_MEANS: 8}


def test_a_worker_that_computes_for_long_is_awaited_and_the_wait_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Worker()
    worker.answers = [None]
    assert worker.call(6) == 3.0
    assert worker.waits_s == [DEADLINES.patience_floor_s, DEADLINES.first_step_s]
    assert caplog.messages == ["grid.mean in step 7 has waited 5 s for workers that have not called it yet"]
    worker.answers = [None, None]
    caplog.set_level(logging.WARNING, "gridtrain")
    assert worker.means.average(7, 1, 2.0, is_before_step=True) == 2.0
    assert caplog.messages[2:] == ["grid.mean in step 8 received no reply; using this worker's own value"]


def test_a_call_during_which_the_group_changes_is_repeated_with_those_of_the_latest_step() -> None:
    worker = Worker()
    assert worker.call(6) == worker.call(7) == 3.0
    worker.means.begin_turn(8)
    worker.requests.clear()
    worker.generations = [2, 3]
    worker.answers = [DeliverMean(8, BEFORE_STEP_INDEX, None)] * 2
    worker.answers.append(DeliverMean(8, BEFORE_STEP_INDEX, 4.0))
    assert worker.means.average(8, 1, 2.0, is_before_step=True) == 4.0
    call = (8, BEFORE_STEP_INDEX, 2.0)
    assert worker.requests == [call, *[(7, 0, 2.0), call] * 2]
    worker.means.repeat(3)
    assert len(worker.requests) == 5, "the generation is the same"


def test_a_worker_that_cannot_make_the_call_in_the_next_generation_has_its_own_value() -> None:
    worker = Worker()
    worker.answers, worker.generations = [DeliverMean(8, 0, None)], [None]
    assert worker.means.average(8, 1, 2.0, is_before_step=False) == 2.0


def test_calls_of_steps_that_are_repeated_are_forgotten() -> None:
    worker = Worker()
    assert worker.call(6) == worker.call(7) == worker.call(8) == 3.0
    worker.requests.clear()
    worker.means.begin_turn(7)
    assert worker.call(7) == 3.0
    assert worker.requests == [(7, 0, 2.0)]
    worker.means.repeat(2)
    assert worker.requests[1:] == [(6, 0, 2.0), (7, 0, 2.0)]


def test_few_of_many_calls_in_a_step_are_repeated() -> None:
    worker = Worker()
    for number in range(3 * MAX_OPEN_MEANS):
        worker.call(7)
        assert worker.requests[-1] == (7, number, 2.0)
    worker.requests.clear()
    worker.means.repeat(2)
    assert worker.requests == [(7, number, 2.0) for number in range(2 * MAX_OPEN_MEANS, 3 * MAX_OPEN_MEANS)]


def test_repeated_calls_do_not_displace_the_answer_to_a_weight() -> None:
    worker = Worker()
    worker.call(6)
    worker.means.announce_weight(2, 7, 5)
    worker.means.repeat(2)
    worker.requests.clear()
    worker.answers = [DeliverMean(7, WEIGHTS_INDEX, 4.0)]
    plan: Any = SimpleNamespace(generation=2, step=7, world_size=2)
    assert worker.means.total_weight(plan, 5) == 8
    assert worker.requests == [(7, WEIGHTS_INDEX, 5)]


def test_calls_are_the_same_if_a_step_is_repeated_with_another_batch() -> None:
    worker = Worker()
    for _ in range(2):
        worker.means.begin_turn(7)
        worker.requests.clear()
        for number in range(2):
            worker.answers = [DeliverMean(7, BEFORE_STEP_INDEX + number, 4.0)]
            assert worker.means.average(7, 1, 2.0, is_before_step=True) == 4.0
        assert worker.requests == [(7, BEFORE_STEP_INDEX + number, 2.0) for number in range(2)]


def test_values_of_a_dropped_batch_are_not_contributed_again() -> None:
    worker = Worker()
    for number, value in enumerate((100.0, 101.0)):
        worker.answers = [DeliverMean(7, BEFORE_STEP_INDEX + number, 4.0)]
        worker.means.average(7, 1, value, is_before_step=True)
    worker.means.begin_turn(7)
    worker.requests.clear()
    worker.generations = [3]
    worker.answers = [DeliverMean(7, BEFORE_STEP_INDEX, None), DeliverMean(7, BEFORE_STEP_INDEX, 5.0)]
    assert worker.means.average(7, 2, 1.0, is_before_step=True) == 5.0
    assert worker.requests == [(7, BEFORE_STEP_INDEX, 1.0)] * 2
