"""Schedules, drawn as text."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timetable import timetable

from gridtrain.core.stages import schedule as plan
from gridtrain.core.stages.schedule import (
    Action,
    ActionKind,
    Schedule,
    ahead_for,
    divide_samples,
    fill_drain,
)
from gridtrain.core.stages.schedule import one_forward_one_backward as one_f_one_b
from gridtrain.errors import ConfigError, LocalProtocolError

counts = st.integers(1, 9)


def draw_schedule(schedule: Schedule, *, forward: int = 1, backward: int = 1, hop: int = 0) -> str:
    """The schedule as text, a line for each stage; `forward`, `backward` and `hop` (latency) in columns.

    `=` continues work that is longer than one column; `.` is the bubble.
    """
    table = timetable(schedule, forward, backward, latency_s=hop)
    columns = round(table.makespan_s)
    width = max((len(str(slot.action)) for slots in table.slots for slot in slots), default=1) + 2
    lines = []
    for stage, slots in enumerate(table.slots):
        cells = ["."] * columns
        for slot in slots:
            start, stop = round(slot.start_s), round(slot.stop_s)
            cells[start:stop] = [str(slot.action), *["="] * (stop - start - 1)]
        lines.append(f"stage {stage}  " + "".join(cell.rjust(width) for cell in cells))
    return "\n".join(lines)


def test_the_schedule_fill_drain() -> None:
    assert (
        draw_schedule(fill_drain(3, 4))
        == """\
stage 0    F0  F1  F2  F3   .   .   .   .  B0  B1  B2  B3
stage 1     .  F0  F1  F2  F3   .   .  B0  B1  B2  B3   .
stage 2     .   .  F0  F1  F2  F3  B0  B1  B2  B3   .   ."""
    )


def test_the_schedule_one_forward_one_backward() -> None:
    assert (
        draw_schedule(one_f_one_b(3, 4))
        == """\
stage 0    F0  F1  F2   .   .  B0  F3  B1   .  B2   .  B3
stage 1     .  F0  F1   .  B0  F2  B1  F3  B2   .  B3   .
stage 2     .   .  F0  B0  F1  B1  F2  B2  F3  B3   .   ."""
    )


def test_a_schedule_with_backward_passes_of_twice_the_time() -> None:
    assert (
        draw_schedule(one_f_one_b(2, 3), backward=2)
        == """\
stage 0    F0  F1   .   .  B0   =  F2  B1   =   .  B2   =
stage 1     .  F0  B0   =  F1  B1   =  F2  B2   =   .   ."""
    )


def test_micro_batches_ahead_hide_the_latency_of_links() -> None:
    assert (
        draw_schedule(one_f_one_b(2, 4), hop=1)
        == """\
stage 0    F0  F1   .   .   .  B0  F2  B1  F3   .   .  B2   .  B3
stage 1     .   .  F0  B0  F1  B1   .   .  F2  B2  F3  B3   .   ."""
    )
    ahead = plan.ahead_for(1, 1, 1)
    assert ahead == 2
    assert (
        draw_schedule(one_f_one_b(2, 4, ahead=ahead), hop=1)
        == """\
stage 0    F0  F1  F2  F3   .  B0   .  B1   .  B2   .  B3
stage 1     .   .  F0  B0  F1  B1  F2  B2  F3  B3   .   ."""
    )


def test_one_stage_has_no_bubble() -> None:
    assert draw_schedule(one_f_one_b(1, 3)) == "stage 0    F0  B0  F1  B1  F2  B2"
    assert timetable(fill_drain(1, 3), 1, 2).busy_share(0) == 1.0


def test_a_schedule_without_samples_is_empty() -> None:
    assert divide_samples(0, 4) == ()
    assert fill_drain(3, 0).actions == ((), (), ())
    assert timetable(one_f_one_b(3, 0), 1, 1).makespan_s == 0.0
    assert timetable(one_f_one_b(3, 0), 1, 1).busy_share(1) == 0.0


@given(stages=counts, micro_batches=counts, forward_ms=counts, backward_ms=counts)
def test_both_schedules_have_the_time_of_the_bubble_formula(
    stages: int, micro_batches: int, forward_ms: int, backward_ms: int
) -> None:
    for schedule in (fill_drain(stages, micro_batches), one_f_one_b(stages, micro_batches)):
        made = timetable(schedule, forward_ms, backward_ms)
        assert made.makespan_s == (micro_batches + stages - 1) * (forward_ms + backward_ms)
        for stage in range(stages):
            assert made.busy_share(stage) == pytest.approx(micro_batches / (micro_batches + stages - 1))


@given(stages=counts, micro_batches=st.integers(0, 9), ahead=st.floats(0, 3))
def test_every_micro_batch_has_one_forward_and_one_backward_pass_in_order(
    stages: int, micro_batches: int, ahead: float
) -> None:
    for schedule in (fill_drain(stages, micro_batches), one_f_one_b(stages, micro_batches, ahead=ahead)):
        for actions in schedule.actions:
            for kind in ActionKind:
                assert [a.micro_batch for a in actions if a.kind is kind] == list(range(micro_batches))
        timetable(schedule, 1, 2)  # raises if stages wait for each other


@given(stages=counts, micro_batches=counts)
def test_the_number_of_micro_batches_in_flight(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        assert fill_drain(stages, micro_batches).max_in_flight(stage) == micro_batches
        assert one_f_one_b(stages, micro_batches).max_in_flight(stage) == min(micro_batches, stages - stage)


@given(stages=counts, micro_batches=counts, hop_ms=st.integers(0, 40))
def test_bounded_micro_batches_ahead_are_as_fast_as_unbounded_ones(
    stages: int, micro_batches: int, hop_ms: int
) -> None:
    ahead = plan.ahead_for(1, 2, hop_ms)
    bounded = timetable(one_f_one_b(stages, micro_batches, ahead=ahead), 1, 2, latency_s=hop_ms).makespan_s
    everything = timetable(
        one_f_one_b(stages, micro_batches, ahead=math.inf), 1, 2, latency_s=hop_ms
    ).makespan_s
    assert (
        one_f_one_b(stages, micro_batches, ahead=math.inf).actions
        == fill_drain(stages, micro_batches).actions
    )
    assert bounded <= everything


@given(samples=st.integers(0, 50), micro_batches=st.integers(1, 20))
def test_samples_are_divided_evenly_into_micro_batches(samples: int, micro_batches: int) -> None:
    sizes = divide_samples(samples, micro_batches)
    assert sum(sizes) == samples and len(sizes) <= micro_batches
    assert not sizes or (min(sizes) >= 1 and max(sizes) - min(sizes) <= 1)
    assert list(sizes) == sorted(sizes, reverse=True)


def test_a_link_carries_one_payload_at_a_time() -> None:
    """The activations of a fast stage queue: 10 ms each on a link, 1 ms of computing."""
    made = timetable(fill_drain(2, 3), [1, 1], [1, 1], send_s=10, latency_s=5)
    assert [slot.start_s for slot in made.slots[1][:3]] == [16, 26, 36]


def test_a_deadlocked_schedule_is_an_error() -> None:
    forward, backward = Action(ActionKind.FORWARD, 0), Action(ActionKind.BACKWARD, 0)
    with pytest.raises(LocalProtocolError, match="no stage can continue"):
        timetable(Schedule("wrong", 1, 1, ((backward, forward),)), 1, 1)
    with pytest.raises(LocalProtocolError, match="2 durations were given for 1 stages"):
        timetable(fill_drain(1, 1), [1, 2], 1)


def test_zero_stages_or_micro_batches_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 stages"):
        fill_drain(0, 1)
    with pytest.raises(ConfigError, match="cannot be divided"):
        divide_samples(3, 0)


def test_channels_are_distinct() -> None:
    made = [
        f(1)
        for f in (
            plan.activations_channel,
            plan.gradients_channel,
            plan.tied_gradients_channel,
            plan.tied_parameters_channel,
        )
    ]
    assert len(set(made)) == 4 and all(channel.kind for channel in made)


def test_the_documentation_shows_these_schedules() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "pipeline.md").read_text()
    assert f"```\n{draw_schedule(one_f_one_b(3, 4))}\n```" in page
    for picture in (draw_schedule(fill_drain(3, 4)), draw_schedule(one_f_one_b(3, 4))):
        assert textwrap.indent(picture, "    ") in (plan.__doc__ or "")


def test_micro_batches_in_flight_are_counted_action_by_action() -> None:
    kinds = [ActionKind.FORWARD, ActionKind.FORWARD, ActionKind.BACKWARD, *[ActionKind.FORWARD] * 2]
    actions = tuple(Action(kind, number) for number, kind in enumerate(kinds))
    assert Schedule("", 1, 5, (actions,)).max_in_flight(0) == 3


def test_no_micro_batch_runs_ahead_without_latency() -> None:
    assert ahead_for(1.0, 2.0, 0.0) == 0.0 and ahead_for(1.0, 2.0, 1.5) == 2.0
