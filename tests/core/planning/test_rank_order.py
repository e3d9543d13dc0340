"""The order of ranks from reported link measurements, and which reports are believed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import combinations

import pytest
from rank_orders import plan_rank_order, reorder_reason

from gridtrain.core.messages import PeerId
from gridtrain.core.planning import message_schedule
from gridtrain.core.planning.exchange_facts import workload_of
from gridtrain.core.planning.rank_order import (
    LinkMeasurements,
    RankOrder,
    join_order,
)
from gridtrain.core.planning.rank_order_search import simulated_exchange_s
from gridtrain.core.planning.workload import CpuCosts, ExchangeKind, Workload, messages_by_pair

A, B, C, D = PEERS = [name.encode() * 32 for name in "abcd"]
LOAD = Workload(ExchangeKind.GTOPK, 25_600_000)
SLOW, FAST = 2.5e6, 125e6


def facts(exchange: str, model: str = "25600000 parameters in 3 tensors, digest 3f") -> dict[str, str]:
    return {"model": model, "exchange": exchange}


@pytest.mark.parametrize(
    ("exchange", "load"),
    [
        ("Dense()", Workload(ExchangeKind.DENSE, 25_600_000)),
        ("Dense(topology=ring)", Workload(ExchangeKind.DENSE, 25_600_000)),
        ("Dense(topology=direct)", Workload(ExchangeKind.DIRECT, 25_600_000)),
        ("Dense(topology=star)", Workload(ExchangeKind.STAR, 25_600_000)),
        ("Dense(values=int8)", Workload(ExchangeKind.DENSE, 25_600_000, dense_values="int8")),
        (
            "LocalSteps(every=8, exchange=Dense(topology=direct, values=bf16), x=1)",
            Workload(ExchangeKind.DIRECT, 25_600_000, dense_values="bf16"),
        ),
        ("Dense(values=fp16)", None),
        (
            "TopK(density=0.01, momentum=0.9, values=fp32)",
            Workload(ExchangeKind.TOPK, 25_600_000, 0.01, "fp32"),
        ),
        (
            "GTopK(density=0.001, momentum=0.0, values=int8)",
            Workload(ExchangeKind.GTOPK, 25_600_000, 0.001, "int8"),
        ),
        ("GTopK(density=0.1, values=fp16, topology=tree)", Workload(ExchangeKind.TREE, 25_600_000, 0.1)),
        (
            "LocalSteps(every=8, exchange=GTopK(density=0.02, values=fp16), x=1)",
            Workload(ExchangeKind.GTOPK, 25_600_000, 0.02),
        ),
        ("Gossip(density=0.1)", None),
        ("GTopK(density=2.0, values=fp16)", None),
        ("GTopK(density=nan, values=fp16)", None),
        ("GTopK(density=0.1, values=roman)", None),
        ("GTopK(", None),
    ],
)
def test_the_exchange_is_read_from_the_facts(exchange: str, load: Workload | None) -> None:
    assert workload_of(facts(exchange)) == load


def test_facts_without_a_size_give_no_workload() -> None:
    assert workload_of({}) is None
    assert workload_of(facts("Dense()", model="many parameters")) is None
    assert workload_of(facts("Dense()", model="0 parameters")) is None


def all_pairs(slow: tuple[PeerId, ...] = (), rtt_s: float = 0.001) -> LinkMeasurements:
    """Measurements of all pairs by both ends; `slow` members have 20 Mbit/s."""
    measured = LinkMeasurements({(a, b): rtt_s for a in PEERS for b in PEERS if a != b})
    for a in PEERS:
        rates = [(b, SLOW if a in slow or b in slow else FAST) for b in PEERS if b != a]
        measured.record(a, [(b, rate, rate) for b, rate in rates])
    return measured


def test_the_lower_of_both_reported_rates_counts() -> None:
    measured = all_pairs(slow=(B,))
    measured.record(B, [(peer, 1e12, 1e12) for peer in PEERS])  # B exaggerates
    assert measured.rate_Bps(A, B) == measured.rate_Bps(B, A) == SLOW
    measured.record(B, [(A, 1.0, 0.0)])
    assert measured.rate_Bps(B, A) == 1e3, "bounded below as well"
    assert measured.rate_Bps(B, B) is None, "a report about itself does not count"


def test_measurements_of_a_worker_that_left_are_dropped() -> None:
    measured = all_pairs()
    measured.forget(B)
    assert measured.rate_Bps(A, B) is None and measured.rate_Bps(B, A) is None
    assert measured.rate_Bps(A, C) == FAST


def test_an_unmeasured_link_counts_as_the_median() -> None:
    measured = LinkMeasurements({(A, B): 0.002, (A, C): 0.004, (B, C): 0.020})
    measured.record(A, [(B, 1e6, 3e6), (C, 2e6, 0.0)])
    network = measured.build_network(PEERS)
    assert network is not None
    assert network.link(3, 0).alpha_s == 0.002  # half of the median of 2, 4 and 20 ms
    assert network.link(3, 0).bandwidth_Bps == 2e6
    assert network.up_Bps[0] == 2e6, "the upload is at least its fastest link"
    assert LinkMeasurements().build_network(PEERS) is None


@pytest.mark.parametrize("rtt_s", [float("nan"), float("inf"), -1.0])
def test_an_impossible_round_trip_is_ignored(rtt_s: float) -> None:
    network = LinkMeasurements({(A, B): rtt_s, (A, C): 0.004}).build_network(PEERS)
    assert network is not None and network.link(0, 1).alpha_s == 0.002
    assert LinkMeasurements({(A, B): rtt_s}).link_rows([A, B]) == []


def test_links_are_listed_as_rows() -> None:
    assert LinkMeasurements({(A, B): 0.0}).link_rows([A, B]) == [[0, 1, 0.0, None], [1, 0, 0.0, None]]
    measured = LinkMeasurements({(A, B): 0.002})
    measured.record(B, [(A, 1e6, 0.0)])
    assert measured.link_rows([A, B, C]) == [[0, 1, 0.002, None], [1, 0, 0.002, 1e6]]


def test_without_rates_a_ring_is_ordered_by_round_trips_and_a_butterfly_assumes_a_rate() -> None:
    measured = LinkMeasurements({(A, B): 0.001, (C, D): 0.001, (A, C): 0.009, (B, D): 0.002})
    assert plan_rank_order(Workload(ExchangeKind.DENSE, 1000), measured, PEERS, [A]).reason.startswith(
        "ring of 4 ordered by round trip"
    )
    assert plan_rank_order(None, measured, PEERS, [A]).reason.startswith("ring of 4 ordered by round trip")
    reason = plan_rank_order(LOAD, measured, PEERS, [A]).reason
    assert reason.endswith("(no rate has been measured; 100 Mbit/s are assumed)")
    assert "no round trip has been measured" in plan_rank_order(LOAD, LinkMeasurements(), PEERS, [A]).reason


def test_an_order_is_replaced_by_a_noticeably_faster_one() -> None:
    """Pairs are AB CD, then AC BD; A-B and B-D become slow, so B should be paired with C and one of these."""
    measured = all_pairs()
    assert reorder_reason(LOAD, measured, PEERS) == "", "all links are equal"
    for a, b in ((A, B), (B, A), (B, D), (D, B)):
        measured.record(a, [(b, SLOW / 4, SLOW / 4)])
    text = reorder_reason(LOAD, measured, PEERS)
    assert text.startswith("links have changed: another order makes an exchange ")
    better = plan_rank_order(LOAD, measured, PEERS, [A])
    assert better.reason.startswith("butterfly of 4 ordered by predicted time: ")
    assert "its slowest link is " in better.reason
    assert reorder_reason(LOAD, measured, better.order) == "", "that order stays"


def test_three_members_are_ordered_too() -> None:
    """Ranks 1 and 2 exchange nothing with each other."""
    measured = all_pairs()
    for a, b in ((A, B), (B, A)):
        measured.record(a, [(b, SLOW / 4, SLOW / 4)])
    assert reorder_reason(LOAD, measured, [A, B, C]).startswith("links have changed")
    assert reorder_reason(LOAD, measured, [C, A, B]) == ""


def test_the_slowest_link_is_a_measured_one() -> None:
    """The rate from rank 0 to 1 is assumed, from the link between ranks 1 and 2, which exchange nothing."""
    measured = LinkMeasurements({(a, b): 0.0003 for a in (A, B, C) for b in (A, B, C) if a != b})
    measured.record(B, [(A, 70e6, 0.0)])
    measured.record(C, [(A, 42e6, 0.0), (B, 30e6, 0.0)])
    planned = plan_rank_order(LOAD, measured, [A, B, C], [A])
    assert planned.order == (A, B, C)
    assert planned.reason.endswith("; its slowest link is 336 Mbit/s, between ranks 0 and 2")


SIX = [bytes([i]) * 32 for i in range(1, 7)]


def honest_six(but: PeerId) -> LinkMeasurements:
    measured = LinkMeasurements({(a, b): 0.002 for a in SIX for b in SIX if a != b})
    for a in SIX:
        measured.record(a, [(b, 12.5e6, 12.5e6) for b in SIX if a not in (b, but)])
    return measured


def test_one_liar_cannot_change_the_order() -> None:
    """It reports that the links to its present neighbours are slow; no other member does."""
    load, liar = Workload(ExchangeKind.DENSE, 2_000_000), SIX[5]
    measured = honest_six(but=liar)
    order = plan_rank_order(load, measured, SIX, SIX).order
    at = order.index(liar)
    near = {order[at - 1], order[(at + 1) % 6]}
    lies = [(peer, 1e5 if peer in near else 12.5e6) for peer in SIX[:5]]
    measured.record(liar, [(peer, rate, rate) for peer, rate in lies])
    assert plan_rank_order(load, measured, SIX, SIX).order != order, "it would affect a new plan"
    assert reorder_reason(load, measured, order, SIX) == ""


@pytest.mark.parametrize(
    ("kind", "slower", "are_neighbours"),
    [
        (ExchangeKind.DENSE, 1.0, True),
        (ExchangeKind.DENSE, 0.97, True),
        (ExchangeKind.DENSE, 0.5, False),
        (ExchangeKind.GTOPK, 1.0, True),
    ],
)
@pytest.mark.parametrize("is_urgent", [False, True])
def test_of_orders_that_take_about_as_long_one_with_fewer_relayed_pairs_is_chosen(
    kind: ExchangeKind, slower: float, are_neighbours: bool, is_urgent: bool
) -> None:
    """All pairs but one use a relay.  In join order this one does not exchange; if it does, the pair of the
    other two does, too, whose rate is `slower` times the others' rate."""
    one = {A, C} if kind is ExchangeKind.DENSE else {A, D}
    measured = LinkMeasurements({(a, b): 0.04 for a in PEERS for b in PEERS if a != b})
    for a in PEERS:
        rates = [(b, SLOW * (1.0 if {a, b} & one else slower)) for b in PEERS if b != a]
        measured.record(a, [(b, rate, rate) for b, rate in rates])
    found = []
    for relayed in ((), [(a, b) for a in PEERS for b in PEERS if a != b and {a, b} != one]):
        measured.relayed = frozenset(relayed)
        made = plan_rank_order(Workload(kind, 1_000_000), measured, PEERS, [A], is_urgent=is_urgent)
        pairs = messages_by_pair(Workload(kind, 1_000_000), len(PEERS))
        found.append(any({made.order[src], made.order[dst]} == one for src, dst in pairs))
        is_for_relays = ", because fewer messages are relayed" in made.reason
        assert is_for_relays == (bool(relayed) and are_neighbours), made.reason
        assert (", as in join order" in made.reason) == (made.order == tuple(PEERS)), made.reason
    assert found == [False, are_neighbours]


def test_a_rate_reported_by_one_end_only_is_at_most_the_median() -> None:
    measured = honest_six(but=SIX[5])
    measured.forget(SIX[5])
    measured.record(SIX[5], [(other, 1e11, 1e11) for other in SIX[:5]])
    network = measured.build_network(SIX)
    assert network is not None
    assert network.path_Bps(5, 0) == network.path_Bps(0, 5) == 12.5e6
    assert list(network.up_Bps) == list(network.down_Bps) == [12.5e6] * 6


def test_with_two_workers_a_rate_reported_by_one_end_only_is_bounded() -> None:
    """B's loop stalled until A no longer awaited the answer; then B read the whole burst at once."""
    measured = LinkMeasurements()
    measured.record(B, [(A, 0.0, 4e9)])
    network = measured.build_network([A, B])
    assert network is not None and network.path_Bps(0, 1) == 125e6
    measured.record(A, [(B, 5e9, 0.0)])
    network = measured.build_network([A, B])
    assert network is not None and network.path_Bps(0, 1) == 4e9, "both ends report it"


def test_a_repeated_rate_is_no_change() -> None:
    measured = LinkMeasurements()
    assert measured.record(A, [(B, 1e6, 0.0)]) is True
    assert measured.record(A, [(B, 1e6, 0.0), (A, 5.0, 5.0)]) is False
    assert measured.record(A, [(B, 1e6, 2e6)]) is True


def test_the_order_that_justified_a_change_is_the_one_planned() -> None:
    """Above 7 members the search depends on its start; both searches start with the present order."""
    tried = 0
    for seed in range(6):
        rng, peers = random.Random(seed), [bytes([i]) * 32 for i in range(10)]
        measured, order = (
            LinkMeasurements({(a, b): 0.01 for a in peers for b in peers if a < b}),
            list(peers),
        )
        for a in peers:
            rates = [(b, rng.choice([1e5, 2.5e6, 12.5e6, 125e6])) for b in peers if b != a]
            measured.record(a, [(b, rate, rate) for b, rate in rates])
        for _generation in range(3):
            if not reorder_reason(LOAD, measured, order, peers):
                break
            tried += 1
            order = list(plan_rank_order(LOAD, measured, peers, peers, order).order)
        assert reorder_reason(LOAD, measured, order, peers) == "", f"seed {seed}"
    assert tried > 3


def test_the_root_of_a_star_is_the_member_with_the_state_and_the_best_links() -> None:
    measured, load = all_pairs(slow=(A,)), Workload(ExchangeKind.STAR, 1_000_000)
    assert plan_rank_order(load, measured, PEERS, [A, C]).order[0] == C
    assert plan_rank_order(load, measured, PEERS, [A]).order[0] == A
    assert reorder_reason(load, measured, PEERS, PEERS).startswith("links have changed")
    assert reorder_reason(load, measured, plan_rank_order(load, measured, PEERS, PEERS).order, PEERS) == ""


@pytest.mark.parametrize("has_rates", [True, False])
@pytest.mark.parametrize("kind", [ExchangeKind.DENSE, ExchangeKind.TOPK, ExchangeKind.GTOPK])
def test_a_thousand_members_stay_in_join_order(
    kind: ExchangeKind, has_rates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No list of two million moves and no table of a million links is built."""
    made: list[int] = []
    for name in ("ring", "all_gather", "butterfly"):
        make = getattr(message_schedule, name)
        monkeypatch.setattr(message_schedule, name, lambda *args, make=make: counted(made, make(*args)))
    peers = [i.to_bytes(2, "big") * 16 for i in range(1000)]
    measured = LinkMeasurements({(peers[i], peers[i - 1]): 0.01 for i in range(1000)})
    if has_rates:
        measured.record(peers[0], [(peers[1], 1e6, 0.0)])
    made_plan = plan_rank_order(Workload(kind, 25_600_000), measured, peers, peers)
    assert made_plan.order == tuple(peers)
    assert "in join order: above 128 members the order is not optimized" in made_plan.reason
    assert sum(made) <= 30_000


def counted(
    made: list[int], every: list[message_schedule.PlannedMessage]
) -> list[message_schedule.PlannedMessage]:
    made.append(len(every))
    return every


def test_no_order_is_proposed_without_rates_or_a_gain() -> None:
    assert reorder_reason(None, all_pairs(), PEERS) == ""
    assert reorder_reason(LOAD, LinkMeasurements({(A, B): 0.1}), PEERS) == ""
    assert reorder_reason(LOAD, all_pairs(), [A, B]) == ""


# -- a ring by round trips alone -------------------------------------------------------------------

Links = dict[tuple[PeerId, PeerId], float]
ONE_ELEMENT = Workload(ExchangeKind.DENSE, 1)


def peer(name: str) -> PeerId:
    return name.encode() * 32


def links_ms(text: str) -> Links:
    """Round trips of a text such as "ab 1  bc 9", in milliseconds."""
    words = text.split()
    return {
        (peer(link[0]), peer(link[1])): float(ms) / 1e3
        for link, ms in zip(words[::2], words[1::2], strict=True)
    }


def ring(text: str, joined: str, first: str) -> tuple[str, str]:
    made = plan_rank_order(None, LinkMeasurements(links_ms(text)), [peer(n) for n in joined], [peer(first)])
    return "".join(member[:1].decode() for member in made.order), made.reason


SQUARE = "ab 1  ac 2  ad 9  bc 9  bd 2  cd 1"


def test_a_ring_avoids_slow_links() -> None:
    order, reason = ring(SQUARE, joined="abcd", first="a")
    assert order in ("abdc", "acdb")
    assert reason.startswith("ring of 4 ordered by round trip: an exchange of one element takes ")
    assert reason.endswith(" ms in join order")


def test_the_named_first_member_is_rank_0_of_the_same_ring() -> None:
    assert ring(SQUARE, joined="abcd", first="c")[0] in ("cabd", "cdba")
    assert ring(SQUARE, joined="dcba", first="c")[0] in ("cabd", "cdba")


def test_of_equal_rings_that_in_join_order_is_chosen() -> None:
    order, reason = ring("ab 1  ac 1  ad 1  bc 1  bd 1  cd 1", joined="dbca", first="a")
    assert order == "adbc" and reason.endswith(" ms, as in join order")


def test_the_slower_round_trip_of_both_ends_counts() -> None:
    order, _ = ring("ab 1  ba 7  ac 2  bc 2  cd 2  ad 2  bd 2", joined="abcd", first="a")
    assert order in ("acbd", "adbc")


def test_measurements_that_are_no_numbers_count_as_missing() -> None:
    broken = {(peer("a"), peer("b")): float("nan"), (peer("b"), peer("c")): -1.0, (peer("a"), peer("a")): 1.0}
    made = plan_rank_order(None, LinkMeasurements(broken), [peer("c"), peer("a"), peer("b")], [peer("a")])
    assert made == RankOrder(
        (peer("a"), peer("b"), peer("c")), "3 workers in join order: no round trip has been measured"
    )


@pytest.mark.parametrize(
    ("joined", "first", "order", "reason"),
    [
        ("a", "a", "a", "1 worker: the order makes no difference"),
        ("ab", "b", "ba", "2 workers: the order makes no difference"),
        ("abc", "b", "bca", "3 workers in join order: no round trip has been measured"),
    ],
)
def test_small_groups_without_measurements_stay_in_join_order(
    joined: str, first: str, order: str, reason: str
) -> None:
    assert ring("", joined, first) == (order, reason)


def test_in_join_order_only_the_first_member_moves() -> None:
    assert join_order((A, B, C, D), (C,)).order == (C, A, B, D)
    assert join_order((A, B, C, D), (B, A)).order == (B, A, C, D)


def ring_s(links: Links, order: tuple[PeerId, ...]) -> float:
    """Predicted seconds of the smallest exchange."""
    network = LinkMeasurements(links).build_network(order)
    assert network is not None
    return simulated_exchange_s(ONE_ELEMENT, network, CpuCosts(), range(len(order)))


def test_members_of_a_circle_are_ordered_around_it(seeds: Callable[[int], Iterator[int]]) -> None:
    """Members of a circle of 9 to 24 joined in any order; the ring follows the circle."""
    for seed in seeds(20):
        rng = random.Random(seed)
        size = rng.randint(9, 24)
        circle = [bytes([number]) * 32 for number in rng.sample(range(256), size)]
        links = {
            (circle[a], circle[b]): 0.1 * min(b - a, size - b + a) for a, b in combinations(range(size), 2)
        }
        made = plan_rank_order(None, LinkMeasurements(links), rng.sample(circle, size), [circle[0]])
        assert ring_s(links, made.order) <= 1.05 * ring_s(links, tuple(circle)), f"seed {seed}: {made.reason}"
