"""Partitions of a model, compared with all partitions and with simple expectations."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations

import pytest

from gridtrain.core.planning.network_model import LinkModel, NetworkModel, uniform_network
from gridtrain.core.stages.bottleneck_partition import bottleneck_cuts, bottleneck_cuts_within
from gridtrain.core.stages.memory_fit import fits
from gridtrain.core.stages.partition import best_partition, partition_at
from gridtrain.core.stages.stage_cost import (
    Device,
    ExecutionSettings,
    Layer,
    PartitionCost,
    ScheduleKind,
    StageCost,
    StageCostModel,
)
from gridtrain.errors import ConfigError
from gridtrain.quantities import format_bytes

Seeds = Callable[[int], Iterator[int]]
BARE = ExecutionSettings(message_s=0.0, copies=0.0, rematerialise=False, micro_batches=1)


def layer(seconds: float, parameters: int = 0, output: int = 0, kept_bytes: int = 0) -> Layer:
    return Layer("x", seconds / 3, seconds * 2 / 3, parameters, output, kept_bytes)


def even_layers(count: int, parameters: int = 0, output: int = 0, kept_bytes: int = 0) -> list[Layer]:
    return [replace(layer(0.003, parameters, output, kept_bytes), name=f"block{i}") for i in range(count)]


def all_bounds(count: int, stages: int) -> Iterator[tuple[int, ...]]:
    for between in combinations(range(1, count), stages - 1):
        yield (0, *between, count)


def test_a_card_twice_as_fast_gets_twice_the_work() -> None:
    found = best_partition(even_layers(20), [Device(), Device(speed=2.0), Device(), Device()], running=BARE)
    assert [stage.stop - stage.start for stage in found.stages] == [4, 8, 4, 4]
    assert [stage.compute_s for stage in found.stages] == pytest.approx([0.012] * 4)


def test_a_small_card_gets_layers_that_fit() -> None:
    """A layer needs 4 bytes with gradient and Adam's moments, so a device of 9 bytes holds two."""
    devices = [Device(memory_bytes=40), Device(memory_bytes=9), Device(memory_bytes=40)]
    found = best_partition(even_layers(10, parameters=1), devices, running=replace(BARE, copies=3.0))
    assert [stage.memory.total for stage in found.stages] == [16, 8, 16]


def test_a_slow_link_moves_the_boundary_to_where_little_is_sent() -> None:
    """Outputs of 100, 100, 1, 100 bytes: over a link of 1 kB/s only a boundary after layer 2 is fast
    enough."""
    layers = [layer(0.01, output=output) for output in (100, 100, 1, 100)]
    assert best_partition(layers, [Device()] * 2, running=BARE).cuts == (0, 2, 4)
    found = best_partition(layers, [Device()] * 2, uniform_network(2, 0.0, 1000.0), BARE)
    assert found.cuts == (0, 3, 4)
    assert found.stages[0].transfer_s == pytest.approx(1 / 1000)
    assert found.period_s == pytest.approx(0.03)


def test_transfers_are_hidden_behind_computing_only_with_overlap() -> None:
    layers = [layer(0.01, output=10), layer(0.01)]
    network = uniform_network(2, 5.0, 2000.0)  # latency does not count for the period
    assert best_partition(layers, [Device()] * 2, network, BARE).period_s == pytest.approx(0.01)
    assert best_partition(
        layers, [Device()] * 2, network, replace(BARE, overlap=False)
    ).period_s == pytest.approx(0.015)


def test_the_upload_of_a_stage_is_shared_by_both_neighbours() -> None:
    """The middle stage sends activations and gradients through one upload of 1 kB/s: 20 + 10 bytes."""
    link = LinkModel(0.0)
    network = NetworkModel(lambda src, dst: link, (1000.0,) * 3, (1e9,) * 3)
    layers = [layer(0.001, output=10), layer(0.001, output=20), layer(0.001)]
    found = best_partition(layers, [Device()] * 3, network, BARE)
    assert [stage.transfer_s for stage in found.stages] == pytest.approx([0.010, 0.030, 0.020], rel=1e-3)


@pytest.mark.parametrize(
    ("order", "rematerialise", "activations"),
    [
        # 4 stages of one layer; 6 micro-batches of 2 samples; each layer: 1 byte in, 1 out, 10 stored;
        # 2 bytes of gradients in use
        (ScheduleKind.FILL_DRAIN, False, [2 * (6 * 12 + 2)] * 4),
        (ScheduleKind.FILL_DRAIN, True, [2 * (6 * 1 + 10 + 1 + 2)] * 4),
        (ScheduleKind.ONE_F_ONE_B, False, [2 * (in_flight * 12 + 2) for in_flight in (4, 3, 2, 1)]),
        (ScheduleKind.ONE_F_ONE_B, True, [2 * (in_flight + 10 + 1 + 2) for in_flight in (4, 3, 2, 1)]),
    ],
)
def test_stored_activations_depend_on_schedule_and_rematerialisation(
    order: ScheduleKind, rematerialise: bool, activations: list[int]
) -> None:
    running = replace(
        BARE, samples=2, micro_batches=6, order=order, rematerialise=rematerialise, input_bytes=1
    )
    found = best_partition(even_layers(4, output=1, kept_bytes=10), [Device()] * 4, running=running)
    assert [stage.memory.activations for stage in found.stages] == activations
    assert [stage.memory.transit for stage in found.stages] == [2 * 2 * n for n in (3, 4, 4, 2)]


def test_micro_batches_in_flight_are_those_of_the_schedule() -> None:
    for order in ScheduleKind:
        for stages in range(1, 6):
            for number in (1, 2, 3, 8):
                for ahead in (0.0, 0.5, 2.0):
                    running = replace(BARE, order=order, micro_batches=number, ahead=ahead)
                    schedule = running.schedule(stages)
                    in_flight = [running.in_flight(stage, stages) for stage in range(stages)]
                    assert in_flight == [schedule.max_in_flight(stage) for stage in range(stages)]


def test_rematerialisation_costs_a_second_forward_pass() -> None:
    layers = even_layers(2)
    for order, backwards in ((ScheduleKind.FILL_DRAIN, [3, 3]), (ScheduleKind.ONE_F_ONE_B, [3, 2])):
        running = replace(BARE, rematerialise=True, order=order, micro_batches=4)
        found = best_partition(layers, [Device()] * 2, running=running)
        assert [stage.backward_s / 0.001 for stage in found.stages] == pytest.approx(backwards)


# -- compared with all partitions ------------------------------------------------------------------


def random_problem(rng: random.Random) -> tuple[list[Layer], list[Device], NetworkModel, ExecutionSettings]:
    """A model, devices, links and settings; small integers, so that ties are frequent."""
    count = rng.randint(1, 9)
    stages = rng.randint(1, min(count, 5))
    layers = [
        Layer(
            f"layer{i}",
            forward_s=rng.randint(0, 4) / 8,
            backward_s=rng.randint(0, 8) / 8,
            parameter_bytes=(size := rng.randint(0, 20)),
            output_bytes=rng.randint(0, 9),
            kept_bytes=rng.randint(0, 30),
            overhead_s=rng.choice((0.0, 0.25)),
            trainable_bytes=rng.choice((None, size // 2)),
            gradient_bytes=rng.choice((None, 0)),
        )
        for i in range(count)
    ]
    limit = rng.choice((math.inf, 1000.0, 400.0, 200.0))
    devices = [
        Device(rng.choice((0.5, 1.0, 2.0)), limit * rng.choice((0.5, 1, 2)) if limit < math.inf else limit)
        for _ in range(stages)
    ]
    rates = [[rng.choice((4.0, 16.0, math.inf)) for _ in range(stages)] for _ in range(2)]
    link = LinkModel(rng.random(), rng.choice((math.inf, 8.0)))
    running = ExecutionSettings(
        samples=rng.randint(1, 3),
        micro_batches=rng.randint(1, 5),
        order=rng.choice(list(ScheduleKind)),
        rematerialise=rng.random() < 0.5,
        copies=rng.choice((1.0, 2.0, 3.0, 0.5)),
        input_bytes=rng.randint(0, 9),
        overlap=rng.random() < 0.7,
        message_s=rng.choice((0.0, 0.125)),
        ahead=rng.choice((0.0, 0.5)),
    )
    return layers, devices, NetworkModel(lambda src, dst: link, *rates), running


def fullest(found: PartitionCost) -> float:
    limited = all(stage.device.memory_bytes < math.inf for stage in found.stages)
    return max(stage.memory.total / (stage.device.memory_bytes if limited else 1.0) for stage in found.stages)


def has_trained_layer(layers: list[Layer], stage: StageCost) -> bool:
    return any(each.trainable for each in layers[stage.start : stage.stop])


def test_no_partition_is_better(seeds: Seeds) -> None:
    outcomes = {"partitioned": 0, "refused": 0, "decided by memory": 0}
    for seed in seeds(1500):
        rng = random.Random(seed)
        layers, devices, network, running = random_problem(rng)
        slack = rng.choice((0.0, 0.0, 0.1))
        costs = StageCostModel(layers, devices, network, running)
        every = [partition_at(costs, bounds) for bounds in all_bounds(len(layers), len(devices))]
        if any(each.trainable for each in layers):
            every = [one for one in every if all(has_trained_layer(layers, s) for s in one.stages)]
        fitting = [one for one in every if all(s.memory.total <= s.device.memory_bytes for s in one.stages)]
        assert fits(layers, devices, running) is bool(fitting), f"seed {seed}"
        if not fitting:
            with pytest.raises(ConfigError):
                best_partition(layers, devices, network, running, slack=slack)
            outcomes["refused"] += 1
            continue
        found = best_partition(layers, devices, network, running, slack=slack)
        bound_s = min(one.period_s for one in fitting) * (1 + slack)
        near = [one for one in fitting if one.period_s <= bound_s]
        assert found in near, f"seed {seed}: {found.cuts} takes {found.period_s}, possible is {bound_s}"
        assert fullest(found) == min(fullest(one) for one in near), f"seed {seed}: fuller than necessary"
        outcomes["partitioned"] += 1
        outcomes["decided by memory"] += len({fullest(one) for one in near}) > 1
    assert min(outcomes.values()) > 50 or sum(outcomes.values()) < 1500, outcomes


def test_pruning_does_not_change_the_result(seeds: Seeds) -> None:
    """The search has no lower bound at all here."""
    for seed in seeds(200):
        rng = random.Random(seed)
        count, stages = rng.randint(3, 10), rng.randint(1, 3)
        table = [[[rng.randint(0, 6) for _ in range(count + 1)] for _ in range(count)] for _ in range(stages)]
        cuts, worst = bottleneck_cuts(
            count, stages, lambda s, i, j, t=table: t[s][i][j], lambda s, i, j: -1.0
        )
        assert cuts is not None
        least = min(max(table[s][c[s]][c[s + 1]] for s in range(stages)) for c in all_bounds(count, stages))
        assert max(table[s][cuts[s]][cuts[s + 1]] for s in range(stages)) == worst == least, f"seed {seed}"


def test_a_bounded_search_finds_the_same_partition(seeds: Seeds) -> None:
    """Also among equal ones and for any initial bound; and none if there is none."""
    for seed in seeds(300):
        rng = random.Random(seed)
        count, stages = rng.randint(3, 12), rng.randint(1, 4)
        if stages > count:
            continue
        work = [rng.randint(0, 3) for _ in range(count)]
        more = [[[rng.choice((0, 0, 1, 4)) for _ in range(count + 1)] for _ in work] for _ in range(stages)]
        edges = [[rng.choice((0, 0, 0, 9)) for _ in range(count + 1)] for _ in range(stages)]

        def least(stage: int, start: int, stop: int, work: list[int] = work) -> float:
            return float(sum(work[start:stop]))

        def cost(stage: int, start: int, stop: int, more: list[list[list[int]]] = more) -> float:
            at_edges = (edges[stage - 1][start] if stage else 0, edges[stage][stop] if stop < count else 0)  # noqa: B023
            return max(least(stage, start, stop) + more[stage][start][stop], *at_edges)

        plain = bottleneck_cuts(count, stages, cost, least)
        for known in (plain[1], plain[1] + 0.5, 2 * plain[1] + 1, math.inf):
            assert bottleneck_cuts_within(count, stages, cost, least, known, edges) == plain, (
                f"seed {seed}, {known}"
            )
        assert bottleneck_cuts(count, stages, cost, least, plain[1] - 0.5) == (None, math.inf), f"seed {seed}"


@pytest.mark.parametrize("link_Bps", [math.inf, 12.5e6])
def test_many_layers_are_partitioned_without_evaluating_most_stages(
    link_Bps: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator is blocked meanwhile: of 8 x 256 x 256 / 2 stages it evaluates one in ten."""
    evaluated, compute_s = [0], StageCostModel.compute_s

    def counted(self: StageCostModel, stage: int, start: int, stop: int) -> float:
        evaluated[0] += 1
        return compute_s(self, stage, start, stop)

    monkeypatch.setattr(StageCostModel, "compute_s", counted)
    rng = random.Random(0)
    layers = [
        layer(rng.uniform(1e-3, 3e-3), rng.randint(1, 20), rng.randint(1, 8) * 10**5) for _ in range(256)
    ]
    devices = [Device(rng.choice((1.0, 1.5, 2.0)), 1e9) for _ in range(8)]
    best_partition(layers, devices, uniform_network(8, 1e-3, link_Bps), slack=0.02)
    assert evaluated[0] < 8 * 256 * 256 / 2 / 10


# -- refusals --------------------------------------------------------------------------------------


def test_a_model_that_does_not_fit_is_refused_with_the_shortage_and_a_remedy() -> None:
    layers = even_layers(8, parameters=10**9, output=10**6, kept_bytes=10**8)
    devices = [Device(memory_bytes=8e9)] * 2
    running = ExecutionSettings(samples=4, micro_batches=8, rematerialise=False)
    with pytest.raises(ConfigError) as refused:
        best_partition(layers, devices, running=running)
    assert refused.value.reason == (
        "no partition of 8 layers into 2 stages fits: in the best one, stage 1 "
        '(layers 4 to 7, "block4" to "block7") needs 28.9 GB, but its device has only 8 GB; '
        "20.9 GB is missing "
        "(the 28.9 GB consists of: parameters 4 GB, gradients and optimizer 12 GB, activations 12.9 GB, "
        "in transit 16 MB); "
        'its largest layer, "block4", alone needs 7.29 GB'
    )
    assert refused.value.remedy == "use this: 8 stages, the additional ones on devices of 8 GB"


def test_micro_batches_of_one_sample_are_a_remedy() -> None:
    """A sample needs 10 kB in a stage, and a device has room for one and a half."""
    layers = even_layers(2, kept_bytes=10_000)
    running = ExecutionSettings(samples=2, micro_batches=1, rematerialise=True)
    with pytest.raises(ConfigError) as refused:
        best_partition(layers, [Device(memory_bytes=15_000)] * 2, running=running)
    assert refused.value.remedy == "use this: 2 micro-batches of 1 sample"


def test_only_remedies_that_work_are_proposed() -> None:
    """Only activations need memory, so every remedy except larger devices works."""
    layers = even_layers(4, output=10, kept_bytes=1000)
    running = ExecutionSettings(samples=4, micro_batches=8, rematerialise=False)
    devices = [Device(memory_bytes=60_000)] * 2
    with pytest.raises(ConfigError) as refused:
        best_partition(layers, devices, running=running)
    assert refused.value.remedy == (
        "use one of these: the schedule 1f1b; re-materialization; "
        "4 stages, the additional ones on devices of 60 kB"
    )
    best_partition(layers, devices, running=replace(running, order=ScheduleKind.ONE_F_ONE_B))
    best_partition(layers, devices, running=replace(running, rematerialise=True))
    best_partition(layers, [*devices, *devices], running=running)


def test_a_layer_too_large_for_every_card_is_named() -> None:
    layers = [*even_layers(3, parameters=10), replace(layer(0.1, 10**6), name="head")]
    with pytest.raises(ConfigError) as refused:
        best_partition(layers, [Device(memory_bytes=1000)] * 2)
    assert 'stage 1 (layer 3, "head") needs 4 MB, but its device has only 1 kB' in refused.value.reason
    assert 'divide "head" into smaller layers' in refused.value.remedy


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: best_partition(even_layers(3), [Device()] * 4), "3 layers cannot be divided into 4 stages"),
        (lambda: best_partition(even_layers(3), []), "cannot be divided into 0 stages"),
        (
            lambda: best_partition(even_layers(3), [Device()] * 2, uniform_network(3, 0, 1)),
            "2 devices, but the network has 3",
        ),
        (
            lambda: partition_at(StageCostModel(even_layers(1), [Device()], None, ExecutionSettings()), (0,)),
            "do not divide 1 layer into 1 stage ->",
        ),
        (lambda: Device(speed=0), "a device has speed 0"),
        (lambda: Device(memory_bytes=0), "and 0 bytes"),
        (lambda: layer(-1.0), 'costs of layer "x" are'),
        (lambda: layer(math.nan), 'costs of layer "x" are'),
        (lambda: ExecutionSettings(samples=0), "micro-batches of 0 samples"),
        (lambda: ExecutionSettings(copies=-1.0), "-1 copies"),
    ],
)
def test_invalid_arguments_are_refused(make: Callable[[], object], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        make()


@pytest.mark.parametrize("bounds", [(0, 3), (1, 2, 3), (0, 2, 2), (0, 2, 2, 3), (0, 4, 3)])
def test_invalid_bounds_are_refused(bounds: tuple[int, ...]) -> None:
    stages = 3 if len(bounds) == 4 else 2
    costs = StageCostModel(even_layers(3), [Device()] * stages, uniform_network(stages, 0, 1), BARE)
    with pytest.raises(ConfigError, match="cuts"):
        partition_at(costs, bounds)


def test_bytes_are_formatted() -> None:
    assert [format_bytes(n) for n in (0, 999, 1000, 8e9, 5e12)] == ["0 B", "999 B", "1 kB", "8 GB", "5 TB"]
