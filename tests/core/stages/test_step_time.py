"""The time of a pipeline step, compared with formulas, and the proposed number of micro-batches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from timetable import timetable

from gridtrain.core.planning.network_model import NetworkModel, uniform_network
from gridtrain.core.stages import step_time
from gridtrain.core.stages.partition import partition_at
from gridtrain.core.stages.stage_cost import Device, ExecutionSettings, Layer, ScheduleKind, StageCostModel
from gridtrain.core.stages.step_time import StepEstimate, _reason, estimate_step, propose_micro_batches
from gridtrain.errors import ConfigError

RUNNING = ExecutionSettings(message_s=0.0, rematerialise=False)
IDEAL_NETWORK = uniform_network(4, 0.0, math.inf)


def layers(count: int = 4, output: int = 0, overhead_s: float = 0.0) -> list[Layer]:
    """Layers with 1 ms forward and 2 ms backward a sample."""
    return [Layer(f"layer{i}", 0.001, 0.002, 1000, output, 0, overhead_s) for i in range(count)]


def estimate(
    each: list[Layer], network: NetworkModel, running: ExecutionSettings, batch: int
) -> StepEstimate:
    stages = network.size
    bounds = [s * len(each) // stages for s in range(stages + 1)]
    devices = [Device()] * stages
    return estimate_step(
        each,
        devices,
        network,
        running,
        batch,
        partition_at(StageCostModel(each, devices, network, running), bounds),
    )


@pytest.mark.parametrize("order", list(ScheduleKind))
@pytest.mark.parametrize("number", [1, 2, 3, 8, 24])
def test_even_stages_take_the_time_of_gpipes_formula(order: ScheduleKind, number: int) -> None:
    found = estimate(layers(), IDEAL_NETWORK, replace(RUNNING, order=order, micro_batches=number), number)
    assert found.step_s == pytest.approx((number + 3) * 0.003)
    assert found.bubble == pytest.approx(3 / (number + 3))
    assert found.ideal_bubble == pytest.approx(3 / (number + 3))


@pytest.mark.parametrize("order", list(ScheduleKind))
@pytest.mark.parametrize(("alpha_s", "bandwidth_Bps"), [(0.0, math.inf), (0.005, 1e6), (0.02, 2e5)])
def test_the_simulation_is_the_timetable_of_the_schedule(
    order: ScheduleKind, alpha_s: float, bandwidth_Bps: float
) -> None:
    """`timetable` has a separate link for each direction, as two stages have here."""
    running = replace(RUNNING, order=order, micro_batches=6)
    found = estimate(layers(2, output=1000), uniform_network(2, alpha_s, bandwidth_Bps), running, 6)
    table = timetable(running.schedule(2), 0.001, 0.002, send_s=1000 / bandwidth_Bps, latency_s=alpha_s)
    assert found.step_s == pytest.approx(table.makespan_s)
    assert found.sent_bytes == (6000, 6000)


def test_a_middle_stage_sends_in_both_directions_through_one_upload() -> None:
    """A micro-batch computes 3 ms in a stage; the uploads of the middle stage take 2 x 4 ms, the period."""
    running = replace(RUNNING, order=ScheduleKind.ONE_F_ONE_B, micro_batches=64, ahead=6.0)
    found = estimate(layers(3, output=4000), uniform_network(3, 0.0, 1e6), running, 64)
    assert found.cut.period_s == pytest.approx(0.008)
    assert found.step_s == pytest.approx(64 * 0.008, rel=0.1)


def test_a_batch_need_not_divide_evenly() -> None:
    """7 samples in 3 micro-batches of 3, 2 and 2 on one stage take the time of 7 samples."""
    found = estimate(
        layers(1), uniform_network(1, 0.0, math.inf), replace(RUNNING, samples=3, micro_batches=3), 7
    )
    assert found.step_s == pytest.approx(7 * 0.003)
    assert found.bubble == pytest.approx(0.0)


# -- proposals -------------------------------------------------------------------------------------


def proposed(
    network: NetworkModel,
    batch: int = 64,
    overhead_s: float = 0.0,
    order: ScheduleKind = ScheduleKind.FILL_DRAIN,
) -> int:
    running = replace(RUNNING, order=order)
    return propose_micro_batches(
        layers(8, 100, overhead_s), [Device()] * 4, network, running, batch
    ).micro_batches


def test_without_overhead_many_micro_batches_are_proposed() -> None:
    proposal = propose_micro_batches(layers(8), [Device()] * 4, None, RUNNING, 64)
    assert proposal.micro_batches == 64 and proposal.chosen.step_s == pytest.approx(67 * 0.006)


@pytest.mark.parametrize(("tolerance", "micro_batches"), [(0.0, 64), (0.10, 22)])  # 22 of 3 samples
def test_a_nearly_as_fast_step_has_fewer_micro_batches(
    tolerance: float, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_time, "STEP_TIME_TOLERANCE", tolerance)
    proposal = propose_micro_batches(layers(8), [Device()] * 4, None, RUNNING, 64)
    assert proposal.micro_batches == micro_batches


def test_the_proposal_is_among_the_fastest_alternatives() -> None:
    cheap, expensive = proposed(IDEAL_NETWORK), proposed(IDEAL_NETWORK, overhead_s=0.003)
    assert expensive < cheap == 64
    proposal = propose_micro_batches(layers(8, 100, 0.003), [Device()] * 4, IDEAL_NETWORK, RUNNING, 64)
    fastest_s = min(each.step_s for each in proposal.alternatives)
    assert proposal.chosen.step_s <= 1.02 * fastest_s
    assert all(
        each.step_s > 1.02 * fastest_s
        for each in proposal.alternatives
        if each.settings.micro_batches < proposal.micro_batches
    )
    assert proposal.reason.startswith(f"{expensive} micro-batches of ")
    assert "because each micro-batch adds overhead and latency" in proposal.reason


def test_1f1b_runs_ahead_on_links_with_latency() -> None:
    running = replace(RUNNING, order=ScheduleKind.ONE_F_ONE_B)
    slow = propose_micro_batches(
        layers(8, 100), [Device()] * 4, uniform_network(4, 0.05, 12.5e6), running, 64
    )
    assert slow.chosen.settings.ahead > 0
    assert "micro-batches ahead for each later stage" in slow.reason
    one = replace(slow.chosen, settings=replace(slow.chosen.settings, ahead=1.0))
    assert "runs 1 micro-batch ahead for each later stage" in _reason(one, slow.alternatives, 64, ())
    without_ahead = replace(slow.chosen.settings, ahead=0.0)
    devices, network = [Device()] * 4, uniform_network(4, 0.05, 12.5e6)
    without = estimate_step(layers(8, 100), devices, network, without_ahead, 64, slow.chosen.cut)
    assert slow.chosen.step_s < 0.8 * without.step_s
    free = [replace(each, forward_s=0.0, backward_s=0.0) for each in layers(8, 100)]
    assert propose_micro_batches(free, devices, network, running, 64).chosen.settings.ahead == 0


def test_alternatives_that_do_not_fit_are_omitted() -> None:
    """Fill-drain stores the whole batch; only transit and working memory grow with the micro-batch."""
    each = [Layer(f"layer{i}", 0.001, 0.002, 0, 100) for i in range(2)]
    devices = [Device(memory_bytes=64 * 200 + 8 * 900)] * 2
    proposal = propose_micro_batches(each, devices, None, RUNNING, 64)
    assert all(one.settings.samples <= 16 for one in proposal.alternatives)
    assert "would need too much memory" in proposal.reason
    with pytest.raises(ConfigError, match="no partition of 2 layers into 2 stages fits"):
        propose_micro_batches(each, [Device(memory_bytes=100)] * 2, None, RUNNING, 64)


def test_a_given_partition_is_kept() -> None:
    proposal = propose_micro_batches(layers(8), [Device()] * 2, None, RUNNING, 16, cuts=(0, 2, 8))
    assert {one.cut.cuts for one in proposal.alternatives} == {(0, 2, 8)}
    with pytest.raises(ConfigError, match=r"stage 1 needs .* kB, but its device has only 20 kB"):
        propose_micro_batches(layers(8), [Device(memory_bytes=20_000)] * 2, None, RUNNING, 16, cuts=(0, 2, 8))


def test_given_numbers_are_compared() -> None:
    proposal = propose_micro_batches(layers(8), [Device()] * 4, None, RUNNING, 64, numbers=(4, 8, 16))
    assert [one.settings.micro_batches for one in proposal.alternatives] == [4, 8, 16]
    assert proposal.micro_batches == 16
    for batch, numbers in ((0, ()), (4, (8,)), (4, (0,))):
        with pytest.raises(ConfigError, match="samples cannot be divided"):
            propose_micro_batches(layers(8), [Device()] * 4, None, RUNNING, batch, numbers=numbers)


def test_each_stage_of_a_proposal_has_something_to_train() -> None:
    frozen = [replace(layer, trainable_bytes=0) for layer in layers(6)]
    two = [replace(layer, trainable_bytes=int(index < 2)) for index, layer in enumerate(frozen)]
    for each, bounds in ((frozen, (0, 3, 6)), (two, (0, 1, 6))):
        proposal = propose_micro_batches(each, [Device()] * 2, None, RUNNING, 8)
        assert proposal.chosen.cut.cuts == bounds
    with pytest.raises(
        ConfigError, match="6 layers, of which 2 are trained, cannot be divided into 3 stages"
    ):
        propose_micro_batches(two, [Device()] * 3, None, RUNNING, 8)
