"""Partitions, placements and times for random models and workers equal the recorded ones
(`recorded_results`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from recorded_results import compare
from timetable import timetable

from gridtrain.core import messages as m
from gridtrain.core.group.rank_layout import RankLayout
from gridtrain.core.planning.network_model import LinkModel, NetworkModel
from gridtrain.core.stages import device_assignment, memory_fit, repartition, schedule, step_time
from gridtrain.core.stages.micro_batch_trials import TRIALS, StepTimings, choose_micro_batches
from gridtrain.core.stages.partition import best_partition, partition_at
from gridtrain.core.stages.rank_placement import (
    StateLocations,
    place_ranks,
    placement_cost_s,
    stage_shares,
)
from gridtrain.core.stages.stage_cost import Device, ExecutionSettings, Layer, ScheduleKind, StageCostModel
from gridtrain.errors import ConfigError

RECORDED = Path(__file__).with_name("recorded_partitions.json")
ORDERS = list(ScheduleKind)


def peers_named(names: str) -> list[bytes]:
    return [name.encode() * 32 for name in names]


def drawn_layers(random: Random, count: int) -> list[Layer]:
    return [
        Layer(
            f"layer {index}",
            random.uniform(0.001, 0.01),
            random.uniform(0.002, 0.02),
            random.randrange(1000, 90_000),
            random.randrange(100, 5000),
            random.randrange(100, 9000),
            random.choice((0.0, 0.004)),
            random.choice((None, 800)),
            random.choice((None, 3000)),
            random.choice((None, 12_000)),
            random.choice((0, 7000)),
        )
        for index in range(count)
    ]


def drawn_network(random: Random, size: int) -> NetworkModel:
    links = {
        (a, b): LinkModel(random.uniform(0.001, 0.02), random.uniform(1e5, 1e6))
        for a in range(size)
        for b in range(size)
    }
    return NetworkModel(lambda a, b: links[a, b], [8e5] * size, [7e5] * size)


def drawn_settings(random: Random, order: ScheduleKind) -> ExecutionSettings:
    return ExecutionSettings(
        samples=random.choice((1, 3)),
        micro_batches=random.choice((1, 4, 9)),
        order=order,
        rematerialise=random.random() < 0.5,
        copies=2.5,
        input_bytes=700,
        overlap=random.random() < 0.7,
        message_s=0.0007,
        ahead=random.choice((0.0, 1.0)),
    )


def or_error(make: object, *arguments: object, **named: object) -> object:
    """What the function returns, or "refused"."""
    assert callable(make)
    try:
        return make(*arguments, **named)
    except ConfigError:
        return "refused"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_partitions_are_as_recorded(order: ScheduleKind, stages: int) -> None:
    random, found = Random(f"{order} {stages}"), []
    for _ in range(4):
        layers, network = drawn_layers(random, 7), drawn_network(random, stages)
        devices = [
            Device(random.uniform(0.5, 2.0), random.choice((math.inf, 9e5, 6e5))) for _ in range(stages)
        ]
        running = drawn_settings(random, order)
        best = or_error(best_partition, layers, devices, network, running, slack=random.choice((0.0, 0.1)))
        bounds = (0, *sorted(random.sample(range(1, 7), stages - 1)), 7)
        at = partition_at(StageCostModel(layers, devices, network, running), bounds)
        costs = StageCostModel(layers, devices, network, running)
        fitting = memory_fit.find_fitting_partition(costs), memory_fit.fits(layers, devices, running)
        lack = memory_fit.smallest_shortfall(layers, devices, running)
        estimate = step_time.estimate_step(layers, devices, network, running, 11, at)
        found.append((best, at, fitting, lack, estimate.step_s, estimate.bubble, estimate.sent_bytes))
    compare(RECORDED, f"partitions {order.value} {stages}", found)


@pytest.mark.parametrize("order", ORDERS)
def test_micro_batches_are_as_recorded(order: ScheduleKind) -> None:
    random, found = Random(str(order)), []
    for stages in (1, 2, 3):
        layers, network = drawn_layers(random, 5), drawn_network(random, stages)
        devices = [Device(random.uniform(0.5, 2.0), 2e6)] * stages
        for batch in (1, 13):
            running = replace(drawn_settings(random, order), ahead=0.0)
            proposal = or_error(step_time.propose_micro_batches, layers, devices, network, running, batch)
            if isinstance(proposal, step_time.MicroBatchProposal):
                rows = [(x.settings.micro_batches, x.settings.ahead, x.step_s) for x in proposal.alternatives]
                found.append((proposal.micro_batches, rows))
    found += [(0, step_time.micro_batch_candidates(batch)) for batch in (1, 2, 13, 600)]
    compare(RECORDED, f"micro-batches {order.value}", found)


@pytest.mark.parametrize("order", ORDERS)
def test_micro_batches_from_trials_are_as_recorded(order: ScheduleKind) -> None:
    random, found = Random(str(order)), []
    for stages, replicas, batch in ((2, 1, 32), (3, 2, 40), (2, 2, 3)):
        layout = RankLayout(stages, replicas)
        for most in (math.inf, 4.0):
            timings = [
                tuple(
                    StepTimings(
                        random.uniform(0.01, 0.05) / each,
                        random.uniform(0.02, 0.09) / each,
                        random.uniform(0.1, 0.4) / each,
                        batch,
                        most,
                    )
                    for _ in range(layout.world_size)
                )
                for each in TRIALS
            ]
            found.append(choose_micro_batches(timings, layout, order, 0.0).micro_batches)
    compare(RECORDED, f"trials {order.value}", found)


def test_schedules_are_as_recorded() -> None:
    random, found = Random(1), []
    for stages in (1, 2, 4):
        for number in (1, 3, 6):
            ahead = random.choice((0.0, 0.5, 2.0))
            for made in (
                schedule.fill_drain(stages, number),
                schedule.one_forward_one_backward(stages, number, ahead=ahead),
            ):
                forward_s = [random.uniform(1, 2) for _ in range(stages)]
                table = timetable(made, forward_s, 2.0, send_s=0.3, latency_s=0.7)
                in_flight = [made.max_in_flight(stage) for stage in range(stages)]
                shown = [" ".join(map(str, actions)) for actions in made.actions]
                found.append((shown, in_flight, table.makespan_s, table.busy_share(stages - 1)))
    compare(RECORDED, "schedules", found)


def drawn_setup(random: Random, layers: int, bounds: Sequence[int]) -> m.Setup:
    is_timed = random.random() < 0.5
    layer_costs = tuple(
        m.LayerCosts(
            random.randrange(500, 9000),
            random.randrange(500, 9000),
            random.randrange(50, 500),
            60,
            70,
            random.choice((0, 900)),
            *((0.004, 0.008, 0.001) if is_timed else ()),
        )
        for _ in range(layers)
    )
    model = m.StagedModel(tuple(bounds), layer_costs, copies=2.0, micro_batches=4, fill_drain=is_timed)
    return m.Setup((), m.LedgerSpec(100, 0, epochs=1), 4, None, stages=len(bounds) - 1, model=model)


@pytest.mark.parametrize("seed", range(12))
def test_repartitions_are_as_recorded(seed: int) -> None:
    random = Random(seed)
    setup = drawn_setup(random, 8, (0, 2, 4, 6, 8))
    peers = peers_named("abcdefg"[: random.choice((2, 3, 3, 7))])
    devices = {peer: Device(random.choice((0.5, 1.0)), random.choice((6e4, 9e4, math.inf))) for peer in peers}
    ends = [sorted(random.sample(range(9), 2)) for _ in range(2 * len(peers))]
    held_spans = {
        peer: tuple(m.Span(*span) for span in ends[2 * n : 2 * n + 2]) for n, peer in enumerate(peers)
    }
    held_spans[peers[-1]] += (m.Span(0, 4), m.Span(4, 8))
    repartitioned = or_error(repartition.partition_over_fewer, setup, peers, devices, held_spans)
    found: list[object] = [repartitioned]
    if isinstance(repartitioned, repartition.Repartition):
        disk = {peer: [0] for peer in peers[:1]}
        for locations in (
            StateLocations(held_spans=held_spans),
            StateLocations({peers[-1]: 1}, disk, (), {}, held_spans),
        ):
            found.append(
                or_error(repartition.assembler_pieces, repartitioned, repartitioned.members, locations)
            )
            found.append(or_error(repartition.repartition_at, repartitioned.cuts, peers, locations))
    found.append(
        or_error(
            device_assignment.assign_devices,
            setup,
            [*peers, *peers_named("xyz")],
            devices | {peer: Device(1.5, 1.2e5) for peer in peers_named("xyz")},
        )
    )
    bounds = setup.model.cuts if setup.model else ()
    found.append(device_assignment.able_workers(setup, bounds, peers, devices))
    found.append(
        [device_assignment.stage_bytes(setup, bounds), device_assignment.is_uniform(setup, bounds, devices)]
    )
    compare(RECORDED, f"repartitions {seed}", found)


@pytest.mark.parametrize("seed", range(12))
def test_placements_are_as_recorded(seed: int) -> None:
    random = Random(seed)
    stages, peers = random.choice((1, 2, 3)), peers_named("abcdefghij"[: random.randrange(4, 10)])
    in_memory = {peer: random.randrange(stages) for peer in peers if random.random() < 0.5}
    on_disk = {peer: {random.randrange(stages)} for peer in peers if random.random() < 0.5}
    last = {peer: random.randrange(stages) for peer in peers if random.random() < 0.5}
    delays_s = {(a, b): random.uniform(0.001, 0.1) for a in peers for b in peers}
    speeds = {peer: random.uniform(1.0, 9.0) for peer in peers[::2]}
    initial = [stage for stage in range(stages) if stage not in {*in_memory.values()}]
    found: list[object] = []
    for cost_s in (None, lambda a, b: delays_s[a, b]):
        for locations in (
            StateLocations(in_memory, on_disk, initial, last),
            StateLocations({peer: n % stages for n, peer in enumerate(peers[:stages])}, on_disk, (), last),
        ):
            placed = place_ranks(stages, peers, locations, speed=speeds.get, cost_s=cost_s)
            found.append(placed)
            layout = RankLayout(stages, len(peers) // stages)
            rows = [placed.order[n * layout.replicas :][: layout.replicas] for n in range(stages)]
            found.append(placement_cost_s(rows, lambda a, b: delays_s[a, b]))
    most = [random.choice((0, 3, 9)) for _ in range(layout.world_size)]
    found.append(stage_shares([""] * len(most), most, layout, 20))
    compare(RECORDED, f"placements {seed}", found)


def test_relative_speeds_are_as_recorded() -> None:
    random, found = Random(1), []
    for count in (1, 2, 5):
        speeds = {peer: random.choice((0.01, 1.0, 2.0, 900.0)) for peer in peers_named("abcde"[:count])}
        found.append((speeds, device_assignment.relative_speeds(speeds)))
    compare(RECORDED, "speeds", found)
