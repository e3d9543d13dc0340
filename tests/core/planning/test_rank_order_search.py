"""Orders of ranks on uneven links, compared with an exhaustive search that runs the real cores."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import pytest
from simulation.virtual_exchange import simulate_exchange

from gridtrain.core.planning import rank_order_search
from gridtrain.core.planning.exchange_recommendation import (
    ExchangeEstimate,
    estimate_exchange,
    recommend_exchange,
)
from gridtrain.core.planning.network_model import LinkModel, NetworkModel, uniform_network
from gridtrain.core.planning.rank_order_search import best_order, simulated_exchange_s
from gridtrain.core.planning.workload import (
    NO_CPU_COSTS,
    CpuCosts,
    ExchangeKind,
    Workload,
    count_messages,
)

RUNNABLE = (ExchangeKind.DENSE, ExchangeKind.TOPK, ExchangeKind.GTOPK)
MBIT_Bps = 125_000.0


def uneven(rng: random.Random, size: int) -> NetworkModel:
    rates = [2.5e6, 12.5e6, 125e6]
    pairs = [(a, b) for a in range(size) for b in range(size)]
    links = {pair: LinkModel(rng.uniform(0.0001, 0.03), rng.choice(rates)) for pair in pairs}
    up, down = ([rng.choice(rates) for _ in range(size)] for _ in range(2))
    return NetworkModel(lambda a, b: links[a, b], up, down)


def measured_s(load: Workload, network: NetworkModel) -> float:
    """The time of the real cores, followed by the vote to rank 0 and back."""
    ends_s = simulate_exchange(load, network).complete_s
    others = range(1, network.size)
    decided_s = max(ends_s[0], *(ends_s[rank] + network.link(rank, 0).alpha_s for rank in others))
    return decided_s + max(network.link(0, rank).alpha_s for rank in others)


def exhaustive(load: Workload, network: NetworkModel) -> dict[tuple[int, ...], float]:
    orders = [(0, *others) for others in permutations(range(1, network.size))]
    return {order: measured_s(load, network.reordered(order)) for order in orders}


def small(kind: ExchangeKind) -> Workload:
    return Workload(kind, 60_000) if kind is ExchangeKind.DENSE else Workload(kind, 1_000_000, 0.01)


@pytest.mark.parametrize(
    ("kind", "seed", "size"),
    [
        *((kind, seed, 0) for kind in RUNNABLE for seed in range(6)),
        (ExchangeKind.GTOPK, 11, 7),
        (ExchangeKind.DENSE, 13, 7),
    ],
)
def test_no_other_order_is_faster(kind: ExchangeKind, seed: int, size: int) -> None:
    rng = random.Random(seed)
    network = uneven(rng, size or rng.choice([3, 4, 5, 6]))
    every_s = exhaustive(small(kind), network)
    planned_s = every_s[best_order(small(kind), network, NO_CPU_COSTS, [0]).order]
    assert planned_s <= min(every_s.values()) * 1.001, f"seed {seed}, P {network.size}"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", RUNNABLE)
@pytest.mark.parametrize("is_urgent", [False, True])
def test_the_search_for_large_groups_finds_a_good_order(
    kind: ExchangeKind, seed: int, is_urgent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with all orders of a group that is small enough to try them, as is the urgent search."""
    if not is_urgent:
        monkeypatch.setattr(rank_order_search, "EXACT_MAX_PEERS", 2)
    network = uneven(random.Random(seed), 6)
    every_s = exhaustive(small(kind), network)
    found_s = every_s[best_order(small(kind), network, NO_CPU_COSTS, [0], is_urgent=is_urgent).order]
    assert found_s <= min(every_s.values()) * 1.2, f"seed {seed}"
    assert found_s <= every_s[0, 1, 2, 3, 4, 5] * 1.001, f"seed {seed}"


@pytest.mark.parametrize("size", [5, 6, 7, 12, 40])
@pytest.mark.parametrize("kind", ExchangeKind)
def test_a_search_tries_a_limited_number_of_orders(
    kind: ExchangeKind, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer if members wait; counted, as time varies."""
    network, load = uneven(random.Random(1), size), small(kind)
    simulated = Counter[bool]()
    simulate, estimator = rank_order_search.simulated_exchange_s, rank_order_search.order_estimator
    estimated = Counter[bool]()
    is_urgent = False

    def count(*args: Any) -> float:
        simulated[is_urgent] += 1
        return simulate(*args)

    def counting_estimator(*args: Any) -> Callable[[Sequence[int]], float]:
        estimate = estimator(*args)

        def counted(order: Sequence[int]) -> float:
            estimated[is_urgent] += 1
            return estimate(order)

        return counted

    monkeypatch.setattr(rank_order_search, "simulated_exchange_s", count)
    monkeypatch.setattr(rank_order_search, "order_estimator", counting_estimator)
    for is_urgent in (False, True):
        best_order(load, network, NO_CPU_COSTS, range(size), range(size), is_urgent=is_urgent)
    limits = {True: rank_order_search.URGENT_SEARCH, False: rank_order_search.FULL_SEARCH}
    messages = count_messages(load, size, rank_order_search.SIMULATED_MESSAGES)
    given = 8  # orders from which a search starts, and which it compares with the best ones again
    for is_urgent, limit in limits.items():
        most = max(limit.simulated_orders, limit.messages // messages)
        assert simulated[is_urgent] <= most + 2, "the best ones, the current order and the order of joining"
        edges = (estimated[is_urgent] - most - 2 * given) * size * (size - 1).bit_length()
        assert edges <= limit.edges
    assert simulated[True] <= simulated[False] and estimated[True] <= estimated[False]


@pytest.mark.parametrize("is_urgent", [False, True])
@pytest.mark.parametrize("kind", [*RUNNABLE, ExchangeKind.STAR])
def test_orders_are_searched_from_three_members_up_to_a_limit(
    kind: ExchangeKind, is_urgent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two members have one order; in a star only the root matters."""
    limits = rank_order_search.URGENT_SEARCH if is_urgent else rank_order_search.FULL_SEARCH
    begun: list[int] = []
    monkeypatch.setattr(
        rank_order_search, "order_estimator", lambda load, network, cpu: begun.append(network.size)
    )
    sizes = (2, 3, limits.searched_peers, limits.searched_peers + 1)
    for size in sizes:
        network = uniform_network(size, 0.001, 1e7)
        next(rank_order_search.search_order(small(kind), network, NO_CPU_COSTS, [0], is_urgent=is_urgent))
    assert begun == ([] if kind is ExchangeKind.STAR else [*sizes[1:3]])


def with_rates(up_Mbit: list[float], alpha_s: float = 0.001) -> NetworkModel:
    link = LinkModel(alpha_s)
    rates = [rate * MBIT_Bps for rate in up_Mbit]
    return NetworkModel(lambda a, b: link, rates, rates)


def test_a_single_home_connection_gets_a_rank_that_sends_little() -> None:
    """6 ranks: 4 and 5 fold into 0 and 1, which send three payloads; the others send two or one."""
    network = with_rates([1000, 20, 1000, 1000, 1000, 1000])  # the second to join is at home
    found = best_order(Workload(ExchangeKind.GTOPK, 25_600_000), network, CpuCosts(), [0])
    assert found.order.index(1) >= 2
    assert found.join_order_s > 1.2 * found.exchange_s


def two_sites(size: int, thin_Mbit: float, known: bool = True) -> NetworkModel:
    """Members join alternately at one and at the other site, between which there is one slow link.

    `known`: all pairs are known to share the link, as from a description; probes measure pairs separately.
    """
    thin_Bps = thin_Mbit * MBIT_Bps
    near = LinkModel(0.0002)
    far = (
        (LinkModel(0.020, shared_links=("a-b",)), LinkModel(0.020, shared_links=("b-a",)))
        if known
        else (LinkModel(0.020, thin_Bps),) * 2
    )
    rates = [1000 * MBIT_Bps] * size
    return NetworkModel(
        lambda a, b: near if a % 2 == b % 2 else far[a % 2], rates, rates, {"a-b": thin_Bps, "b-a": thin_Bps}
    )


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("size", [4, 8, 16, 32])
def test_a_butterfly_crosses_between_two_sites_in_one_hop_only(size: int, known: bool) -> None:
    load, network = Workload(ExchangeKind.GTOPK, 25_600_000), two_sites(size, 20, known)
    mixed = [0, *random.Random(size).sample(range(1, size), size - 1)]  # in any order of joining
    found = best_order(load, network.reordered(mixed), CpuCosts(), [0])
    site = [mixed[member] % 2 for member in found.order]
    crossing = [
        hop for hop in range(size.bit_length() - 1) if any(site[r] != site[r ^ 1 << hop] for r in range(size))
    ]
    assert len(crossing) == 1, site
    assert found.exchange_s <= found.join_order_s


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("size", [6, 12])
def test_a_ring_crosses_between_two_sites_twice(size: int, known: bool) -> None:
    found = best_order(Workload(ExchangeKind.DENSE, 25_600_000), two_sites(size, 20, known), CpuCosts(), [0])
    site = [member % 2 for member in found.order]
    assert sum(site[rank] != site[rank - 1] for rank in range(size)) == 2, site
    if known:  # one crossing each way instead of half of all
        assert found.join_order_s / found.exchange_s == pytest.approx(size / 2, rel=0.1)


def test_without_a_gain_the_order_is_that_of_joining() -> None:
    for kind in RUNNABLE:
        assert best_order(
            Workload(kind, 1_000_000), uniform_network(6, 0.001, 1e7), CpuCosts(), [0]
        ).order == (0, 1, 2, 3, 4, 5)


def test_the_predicted_time_is_that_of_the_order() -> None:
    load, network = Workload(ExchangeKind.GTOPK, 1_000_000, 0.01), uneven(random.Random(5), 6)
    found = best_order(load, network, CpuCosts(), [3])
    assert found.order[0] == 3
    assert found.exchange_s == simulated_exchange_s(load, network, CpuCosts(), found.order)


# -- which exchange ------------------------------------------------------------------------------


def each_on(network: NetworkModel, compute_s: float) -> list[ExchangeEstimate]:
    return [
        estimate_exchange(Workload(kind, 25_600_000), network, CpuCosts(), compute_s) for kind in RUNNABLE
    ]


def test_dense_is_recommended_on_fast_links() -> None:
    best, reason = recommend_exchange(each_on(uniform_network(4, 0.0001, 10_000 * MBIT_Bps), 5.0))
    assert best.load.kind is ExchangeKind.DENSE
    assert reason.startswith("Use dense with 4 workers: its exchange takes")


def test_a_butterfly_is_recommended_on_slow_links_with_the_gain() -> None:
    best, reason = recommend_exchange(each_on(uniform_network(16, 0.010, 20 * MBIT_Bps), 0.5))
    assert best.load.kind is ExchangeKind.GTOPK
    assert reason.startswith("Use gtopk at density 0.001 with 16 workers: a step takes")
    assert "the next best is topk" in reason
    assert "and dense would take" in reason


def test_local_steps_share_the_time_of_an_exchange() -> None:
    load, network = Workload(ExchangeKind.GTOPK, 25_600_000), uniform_network(4, 0.010, 20 * MBIT_Bps)
    every, tenth = (estimate_exchange(load, network, CpuCosts(), 0.1, local_steps=h) for h in (1, 10))
    assert tenth.step_s - 0.1 == pytest.approx((every.step_s - 0.1) / 10)
    assert tenth.efficiency > every.efficiency


@pytest.mark.parametrize("kind", [ExchangeKind.GTOPK, ExchangeKind.TREE])
def test_the_first_member_is_not_rank_0_if_its_link_is_slow_and_others_hold_the_model(
    kind: ExchangeKind,
) -> None:
    """At rank 0 of five, four hops of a butterfly use that link; at rank 3 only two."""
    rates_Bps = [2.5e6] + 4 * [125e6]
    network = NetworkModel(
        lambda a, b: LinkModel(0.02 if 0 in (a, b) else 0.0002, min(rates_Bps[a], rates_Bps[b])),
        rates_Bps,
        rates_Bps,
    )
    load = Workload(kind, 10_000_000, 0.01)

    alone = best_order(load, network, CpuCosts(), firsts=[0])  # no other member holds the model yet
    later = best_order(load, network, CpuCosts(), firsts=range(5))

    assert alone.order[0] == 0 != later.order[0]
    assert later.exchange_s < 0.6 * alone.exchange_s
    every = [simulated_exchange_s(load, network, CpuCosts(), order) for order in permutations(range(5))]
    assert later.exchange_s == pytest.approx(min(every), rel=0.01)


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("kind", RUNNABLE)
def test_in_a_larger_group_that_waits_no_order_is_worse_than_the_current_one(
    kind: ExchangeKind, first: int
) -> None:
    """19 members are too many for an urgent search; before one left, their order was the best one.

    A ring is the same, but for the vote, from whichever member it begins.
    """
    load, network = small(kind), uneven(random.Random(2), 20)
    before = best_order(load, network, NO_CPU_COSTS, range(20)).order
    network = network.reordered([member for member in range(20) if member != 7])
    now = [member - (member > 7) for member in before if member != 7]
    firsts = range(first, 19) if kind is not ExchangeKind.GTOPK else range(19)
    at = now.index(first) if kind is not ExchangeKind.GTOPK else 0
    now_s = simulated_exchange_s(load, network, NO_CPU_COSTS, [*now[at:], *now[:at]])
    found = best_order(load, network, NO_CPU_COSTS, firsts, now, is_urgent=True)
    assert found.exchange_s <= now_s
    if kind is ExchangeKind.GTOPK:
        assert found.exchange_s < found.join_order_s
