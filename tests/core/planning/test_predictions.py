"""The tools that compare predictions with measurements and with the paper."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from bench.cells import parse
from bench.results import CellResult, Sample
from calibrate import LARGE, TINY, ends_of, solved, workload_of
from gridtrain.core.planning.cost_model import exchange_cost
from gridtrain.core.planning.network_model import uniform_network
from gridtrain.core.planning.workload import NO_CPU_COSTS, CpuCosts, ExchangeKind, Workload
from paper import DATA, MODELS, efficiencies, markdown
from predictions import FRAME_SHARE, compare, is_predictable, load_of, paced_Bps, predict
from shared_host import host_exchange_cost

RING = parse("dense P=4 n=25.6M rate=100Mbit")


def test_a_ring_on_shaped_links_takes_the_time_of_its_bytes() -> None:
    bound_s = 2 * 3 / 4 * 102.4e6 / (12.5e6 * FRAME_SHARE)
    assert predict(RING, NO_CPU_COSTS) == pytest.approx(bound_s, rel=0.01)
    assert predict(RING, CpuCosts(), cores=2) > bound_s


def test_selection_is_not_part_of_an_exchange() -> None:
    cell = parse("gtopk P=4 n=25.6M rate=100Mbit")
    slow = CpuCosts(select_parameter_s=100e-9)
    for cores in (None, 1, 2):
        assert predict(cell, slow, cores) == pytest.approx(predict(cell, CpuCosts(), cores), rel=0.02)


@pytest.mark.parametrize(
    ("exchange", "kind", "density", "values"),
    [
        ("gtopk", ExchangeKind.GTOPK, 0.001, "fp16"),
        ("gtopk:values=int8,topology=tree", ExchangeKind.TREE, 0.001, "int8"),
        ("gtopk:density=0.02,topology=star", ExchangeKind.STAR_GTOPK, 0.02, "fp16"),
        ("topk", ExchangeKind.TOPK, 0.001, "fp16"),
        ("dense:topology=star", ExchangeKind.STAR, 0.001, "fp16"),
    ],
)
def test_exchanges_of_result_files_are_read(
    exchange: str, kind: ExchangeKind, density: float, values: str
) -> None:
    load = load_of(parse(f"{exchange} P=4 n=1000"))
    assert load.kind is kind
    if kind.is_sparse:
        assert (load.density, load.values) == (density, values)


def test_only_measured_cells_are_predicted() -> None:
    samples = [Sample(0.04, 0.01)]
    assert is_predictable(CellResult(RING, None, samples))
    assert not is_predictable(CellResult(RING, None, []))
    assert not is_predictable(CellResult(parse("gloo/all_reduce P=4 n=25.6M rate=1Gbit"), None, samples))


def test_busy_cells_do_not_count() -> None:
    exact_s = predict(RING, NO_CPU_COSTS, 2)
    cells = [
        CellResult(RING, None, [Sample(seconds, cpu_s)])
        for seconds, cpu_s in ((exact_s, 0.01), (1.3 * exact_s, 0.01), (2 * exact_s, exact_s))
    ]
    text, counted, good = compare(cells, {4: NO_CPU_COSTS}, 2)
    assert (counted, good) == (2, 1)
    assert "| +0% | 0% |" in text
    assert "| -23% |" in text


def test_a_cell_has_the_costs_for_its_number_of_members() -> None:
    """Four members have those for four, or else those for the next larger number."""
    exact_s, idle, slow = predict(RING, NO_CPU_COSTS, 2), NO_CPU_COSTS, CpuCosts(begin_s=10.0)
    cells = [CellResult(RING, None, [Sample(exact_s, 0.01)])]
    assert [compare(cells, costs, 2)[1:] for costs in ({2: slow, 4: idle, 8: slow}, {2: slow, 8: idle})] == [
        (1, 1),
        (1, 1),
    ]
    assert compare(cells, {2: idle, 4: slow}, 2)[1:] == (1, 0)
    assert compare(cells, {2: idle}, 2)[1:] == (1, 1)


def test_payloads_below_the_initial_window_are_paced_on_links_with_a_delay() -> None:
    """Of 7 segments, 5 wait for 1 / 28.9 of the round trip each: 6.9 ms."""
    assert 9063 / paced_Bps(parse("gtopk P=2 n=2.56M rate=20Mbit delay=20ms")) == pytest.approx(
        6.9e-3, rel=0.01
    )
    for other in (
        "gtopk P=2 n=2.56M rate=20Mbit",
        "gtopk P=2 n=2.56M density=0.01 rate=20Mbit delay=20ms",
        "gtopk P=2 n=1000 rate=20Mbit delay=20ms",
        "dense P=2 n=2000 rate=20Mbit delay=20ms",
    ):
        assert paced_Bps(parse(other)) == math.inf


def test_the_table_has_the_papers_figures_and_predictions() -> None:
    paper = json.loads(DATA.read_text(encoding="utf-8"))
    found = efficiencies(paper, NO_CPU_COSTS)
    assert len(found) == len(MODELS) * 3 * 4
    at = {(each["model"], each["exchange"], each["workers"]): each for each in found}
    assert at["vgg16", "gtopk", 32]["paper"] == pytest.approx(123.2 / 1317.333)
    # resnet50, dense, P = 32: 2 * 31/32 * 102 MB * 9 ns = 1.78 s beside 256 / 52.873 = 4.84 s of computing
    assert at["resnet50", "dense", 32]["predicted"] == pytest.approx(4.842 / (4.842 + 1.783), rel=0.02)
    for each in found:
        assert 0 < each["predicted"] <= 1
    assert "| resnet50 | dense | 73.8% / " in markdown(found)


@pytest.mark.parametrize("members", [2, 4])
def test_calibration_recovers_the_cost_of_messages(members: int) -> None:
    """The exchanges take the time that the model predicts."""
    cpu = replace(NO_CPU_COSTS, message_s=200e-6, wake_s=150e-6, begin_s=1.5e-3)
    network = uniform_network(members, 0.0, 1e12)
    seconds = {what: host_exchange_cost(workload_of(what), network, cpu, 2).exchange_s for what in TINY}
    cpu_s = {what: cpu.begin_s + ends_of(what, members) * cpu.message_s for what in TINY}
    ring_cpu_s = cpu.begin_s + ends_of(LARGE["ring"][0], members, LARGE["ring"][1]) * cpu.message_s
    found = solved(members, 2, seconds, cpu_s, ring_cpu_s)
    assert found == pytest.approx({"message_s": 200e-6, "wake_s": 150e-6, "begin_s": 1.5e-3}, rel=0.02)


def test_ends_of_messages_are_counted() -> None:
    """A butterfly of two: a payload out and one in, a vote and a decision at each end."""
    assert [ends_of(what, 2) for what in ("gtopk", "gtopk:topology=tree", "dense")] == [4, 4, 6]
    assert ends_of("gtopk", 4) == 2 * (8 + 6) / 4


def test_packets_take_cores_from_members_that_share_them() -> None:
    load, network = load_of(parse("dense P=4 n=1M")), uniform_network(4, 0.0, 12.5e6)
    without, with_packets = replace(CpuCosts(), packet_s=0.0), replace(CpuCosts(), packet_s=20e-6)
    assert (
        exchange_cost(load, network, with_packets).exchange_s
        == exchange_cost(load, network, without).exchange_s
    )
    shared = [host_exchange_cost(load, network, cpu, 2) for cpu in (without, with_packets)]
    assert shared[1].exchange_s > shared[0].exchange_s
    assert shared[1].cpu_s - shared[0].cpu_s == pytest.approx(2 * 6e6 / 1448 * 20e-6, rel=0.01)
    fast = uniform_network(4, 0.0, 125e6)  # 12 us between packets, of which each costs 2 * 20 us
    together = [host_exchange_cost(load, fast, cpu, 2) for cpu in (without, with_packets)]
    assert together[0] == together[1]


def test_one_machine_for_all_is_slower_than_one_for_each() -> None:
    load, network = Workload(ExchangeKind.GTOPK, 2_000_000, 0.01), uniform_network(8, 0.0, 1e9)
    alone = exchange_cost(load, network, CpuCosts())
    shared = host_exchange_cost(load, network, CpuCosts(), 2)
    assert shared.exchange_s > 2 * alone.exchange_s
    assert shared.cpu_s == alone.cpu_s


def test_packets_on_one_machine_slow_down_all_other_work_and_nothing_else() -> None:
    """There are more cores than work: without packets sharing the machine changes nothing."""
    load, network = Workload(ExchangeKind.GTOPK, 1_000_000, 0.01), uniform_network(4, 0.001, 12.5e6)
    costs = replace(NO_CPU_COSTS, message_s=0.001, merge_entry_s=1e-6)

    def on_one_host_s(cpu: CpuCosts) -> float:
        return host_exchange_cost(load, network, cpu, 20, vote=False).exchange_s

    alone_s = exchange_cost(load, network, costs, vote=False).exchange_s
    assert on_one_host_s(costs) == pytest.approx(alone_s)
    packets = replace(costs, packet_s=50e-6)
    assert on_one_host_s(packets) > 1.02 * alone_s
    # Selecting ends before there are packets, so neither slows the other down.
    select_s = 5 * alone_s
    selecting = replace(packets, select_parameter_s=select_s / load.parameters)
    assert on_one_host_s(selecting) == pytest.approx(select_s + on_one_host_s(packets))
