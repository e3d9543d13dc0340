"""Estimates for random networks equal the recorded ones (`recorded_results`)."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from rank_orders import plan_rank_order, reorder_reason
from recorded_results import compare

from gridtrain.core.planning import exchange_recommendation, workload
from gridtrain.core.planning.batch_shares import divide_samples
from gridtrain.core.planning.cost_model import exchange_cost
from gridtrain.core.planning.local_steps_proposal import propose_local_steps
from gridtrain.core.planning.message_schedule import ReceiveWork
from gridtrain.core.planning.network_model import LinkModel, NetworkModel
from gridtrain.core.planning.rank_order import LinkMeasurements
from gridtrain.core.planning.rank_order_search import best_order, order_estimator
from gridtrain.core.planning.topology_choice import choose_topology
from gridtrain.core.planning.workload import CpuCosts, ExchangeKind, Workload

RECORDED = Path(__file__).with_name("recorded_estimates.json")
KINDS = list(ExchangeKind)
CPU = CpuCosts(
    message_s=0.0011,
    wake_s=0.0023,
    begin_s=0.017,
    packet_s=31e-6,
    byte_s=1.3e-9,
    crypt_byte_s=2.1e-9,
    add_byte_s=1.7e-9,
    store_byte_s=0.9e-9,
    hash_byte_s=2.9e-9,
)


def drawn_network(random: Random, size: int) -> NetworkModel:
    """A random network with a link that pairs of an even and an odd member share."""
    links = {
        (a, b): LinkModel(
            random.uniform(0.001, 0.05), random.uniform(2e6, 5e7), ("sea",) if (a + b) % 2 else ()
        )
        for a in range(size)
        for b in range(size)
    }
    up_Bps, down_Bps = ([random.uniform(3e6, 4e7) for _ in range(size)] for _ in range(2))
    return NetworkModel(lambda a, b: links[a, b], up_Bps, down_Bps, {"sea": 1.5e7})


@pytest.mark.parametrize("kind", KINDS)
def test_costs_of_exchanges_are_as_recorded(kind: ExchangeKind) -> None:
    random, found = Random(str(kind)), []
    for size in (1, 2, 3, 5, 8):
        network = drawn_network(random, size)
        for max_messages in (30_000, 1):
            load = Workload(
                kind, random.choice((9_000, 3_000_000)), 0.01, random.choice(("fp32", "int8")), size % 2 > 0
            )
            cost = exchange_cost(load, network, CPU, vote=size != 3, max_messages=max_messages)
            found.append((size, max_messages, cost))
    compare(RECORDED, f"costs {kind.value}", found)


@pytest.mark.parametrize("kind", KINDS)
def test_work_and_messages_are_as_recorded(kind: ExchangeKind) -> None:
    found = []
    for size, parameters in ((2, 1000), (3, 5_000_000), (6, 40_000_000)):
        load = Workload(kind, parameters, 0.02, "fp16")
        pairs = [workload.messages_by_pair(load, size)[pair] for pair in ((0, 1), (1, 0), (size - 1, 0))]
        counts = [workload.count_messages(load, size, most) for most in (1, 100, 30_000)]
        slices = [
            workload.slice_count(load, size),
            *(workload.simulated_slices(load, size, n) for n in (1, 100)),
        ]
        seconds = [workload.start_work_s(load, CPU), workload.cpu_s_per_byte(load, CPU)]
        seconds += [at(load, size, CPU) for at in (workload.end_work_s, workload.overlapped_work_s)]
        seconds += [workload.receive_work_s(work, load, 0.3, CPU) for work in ReceiveWork]
        found.append((pairs, counts, slices, seconds))
    compare(RECORDED, f"work {kind.value}", found)


@pytest.mark.parametrize("kind", KINDS)
def test_orders_of_ranks_are_as_recorded(kind: ExchangeKind) -> None:
    random, found = Random(str(kind)), []
    for size in (2, 3, 4, 9):
        network, load = drawn_network(random, size), Workload(kind, 200_000, 0.05)
        members = list(range(size))
        estimate = order_estimator(load, network, CPU)
        order = best_order(load, network, CPU, members[1:], random.sample(members, size))
        found.append((order, [estimate(random.sample(members, size)) for _ in range(3)]))
    compare(RECORDED, f"orders {kind.value}", found)


@pytest.mark.parametrize("has_rates", [False, True])
def test_orders_from_measurements_are_as_recorded(has_rates: bool) -> None:
    random, found = Random(1), []
    for size in (2, 3, 5):
        peers = [bytes([ord("a") + number]) * 32 for number in range(size)]
        measured = LinkMeasurements({(a, b): random.uniform(0.001, 0.3) for a in peers for b in peers})
        for peer in peers if has_rates else ():
            others = [other for other in peers if other != peer]
            measured.record(
                peer, [(other, random.uniform(1e5, 1e8), random.uniform(1e5, 1e8)) for other in others]
            )
        for kind in (None, ExchangeKind.DENSE, ExchangeKind.GTOPK):
            load = Workload(kind, 300_000) if kind is not None else None
            order = plan_rank_order(load, measured, peers, peers[1:], peers).order
            changed = bool(reorder_reason(load, measured, peers[::-1], peers))
            found.append((kind, order, changed, measured.link_rows(peers)[:2]))
    compare(RECORDED, f"measured orders {has_rates}", found)


COMPARED = [(size, compute_s) for size in (2, 4, 8) for compute_s in (0.01, 1.0, 60.0)]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_with_each_exchange_are_as_recorded(kind: ExchangeKind) -> None:
    random, found, load = Random(2), [], Workload(kind, 400_000, 0.01)
    for size, compute_s in COMPARED:
        network = drawn_network(random, size)
        one = exchange_recommendation.estimate_exchange(
            load, network, CPU, compute_s, local_steps=1 + size % 3
        )
        found.append((one.step_s, one.efficiency, one.speedup))
    compare(RECORDED, f"steps {kind.value}", found)


def test_choices_are_as_recorded() -> None:
    random, found = Random(2), []
    loads = [Workload(kind, 400_000, 0.01) for kind in KINDS]
    for size, compute_s in COMPARED:
        network = drawn_network(random, size)
        each = [
            exchange_recommendation.estimate_exchange(load, network, CPU, compute_s, local_steps=1 + size % 3)
            for load in loads
        ]
        best = exchange_recommendation.estimate_best_order(loads[0], network, CPU, compute_s)
        chosen = exchange_recommendation.recommend_exchange(each).best.load.kind
        topology = choose_topology(loads[0], size, network, True)
        found.append(((best.step_s, best.efficiency, best.speedup), chosen, topology))
    compare(RECORDED, "choices", found)


def test_shares_and_local_steps_are_as_recorded() -> None:
    random, found = Random(3), []
    for _ in range(60):
        count = random.randrange(1, 7)
        speeds = [random.choice((0.1, 1.0, 1.0, 3.0, 50.0, 61.0)) for _ in range(count)]
        most = [random.choice((0, 0, 3, 20)) for _ in range(count)]
        total = random.choice((1, 5, 20, 97))
        found.append([total, speeds, most, divide_samples(total, speeds, most)])
    found += [
        [step_s, exchange_s, propose_local_steps(step_s, exchange_s)]
        for step_s in (0.01, 0.5, 7.0)
        for exchange_s in (0.001, 0.05, 0.5, 700.0)
    ]
    compare(RECORDED, "shares", found)
