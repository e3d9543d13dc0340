"""The planner: the ring whose slowest edge is fastest, and a reason that a person can check."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import combinations, permutations

import pytest

from gridtrain.core.messages import PeerId
from gridtrain.core.planning import ring_order
from gridtrain.errors import LocalProtocolError

Links = dict[tuple[PeerId, PeerId], float]


def peer(name: str) -> PeerId:
    return name.encode() * 32


def links_ms(text: str) -> Links:
    """`links_ms("ab 1  bc 9")`: round trips in milliseconds."""
    words = text.split()
    return {
        (peer(link[0]), peer(link[1])): float(ms) / 1e3
        for link, ms in zip(words[::2], words[1::2], strict=True)
    }


def plan(text: str, joined: str, first: str) -> tuple[str, str]:
    made = ring_order.order_ring(links_ms(text), [peer(name) for name in joined], peer(first))
    return "".join(member[:1].decode() for member in made.order), made.reason


SQUARE = "ab 1  ac 2  ad 9  bc 9  bd 2  cd 1"


def test_the_slow_links_stay_out_of_the_ring() -> None:
    assert plan(SQUARE, joined="abcd", first="a") == (
        "abdc",
        "ring of 4 ordered by round trip: slowest edge 2.00 ms instead of 9.00 ms in join order",
    )


def test_first_is_rank_zero_and_the_ring_stays_the_same() -> None:
    assert plan(SQUARE, joined="abcd", first="c")[0] == "cabd"
    assert plan(SQUARE, joined="dcba", first="c")[0] == "cabd"


def test_with_equal_slowest_edges_the_sum_decides() -> None:
    # all three rings pass a twice on links of 5 ms: abcd is 12 ms in all, abdc and acbd are 15
    assert plan("ab 5  ac 5  ad 5  bc 1  bd 4  cd 1", joined="acbd", first="a")[0] == "abcd"


def test_equal_rings_are_decided_by_peer_id() -> None:
    same = "ab 1  ac 1  ad 1  bc 1  bd 1  cd 1"
    assert plan(same, joined="dbca", first="a") == (
        "abcd",
        "ring of 4 ordered by round trip: slowest edge 1.00 ms, as in join order",
    )


def test_of_a_link_measured_from_both_ends_the_slower_counts() -> None:
    assert plan("ab 1  ba 7  ac 2  bc 2  cd 2  ad 2  bd 2", joined="abcd", first="a")[0] == "acbd"


def test_a_missing_link_counts_as_the_median() -> None:
    order, reason = plan("ab 1  bc 2  cd 9  ad 2", joined="abcd", first="a")
    assert order == "acbd"
    assert reason == (
        "ring of 4 ordered by round trip: slowest edge 2.00 ms instead of 9.00 ms in join order "
        "(2 links are not measured and count as 2.00 ms, the median)"
    )


def test_measurements_that_are_no_numbers_count_as_missing() -> None:
    broken = {(peer("a"), peer("b")): float("nan"), (peer("b"), peer("c")): -1.0, (peer("a"), peer("a")): 1.0}
    made = ring_order.order_ring(broken, [peer("c"), peer("a"), peer("b")], peer("a"))
    assert made == ring_order.RankOrder(
        (peer("a"), peer("b"), peer("c")), "ring of 3 in join order: no round trip is measured"
    )


@pytest.mark.parametrize(
    ("joined", "first", "order", "reason"),
    [
        ("a", "a", "a", "ring of 1: there is only one order"),
        ("ab", "b", "ba", "ring of 2: there is only one order"),
        ("abc", "b", "bca", "ring of 3 in join order: no round trip is measured"),
    ],
)
def test_where_there_is_nothing_to_order(joined: str, first: str, order: str, reason: str) -> None:
    assert plan("", joined, first) == (order, reason)


@pytest.mark.parametrize(("joined", "first"), [("ab", "c"), ("", "a"), ("aab", "a")])
def test_a_first_that_is_no_member_is_our_own_bug(joined: str, first: str) -> None:
    with pytest.raises(LocalProtocolError, match="cannot order a ring"):
        plan("", joined, first)


def random_links(rng: random.Random, names: list[PeerId]) -> Links:
    """Round trips in whole milliseconds with many ties, some of them missing, some in both directions."""
    links = {pair: rng.randint(1, 12) / 1024 for pair in combinations(names, 2) if rng.random() < 0.9}
    links |= {(b, a): rng.randint(1, 12) / 1024 for a, b in list(links) if rng.random() < 0.3}
    return links


def quality(links: Links, order: tuple[PeerId, ...]) -> tuple[float, float]:
    """(slowest edge, sum) with every pair measured; multiples of 2^-10 s, so that sums are exact."""
    edges = [
        max(links.get((a, b), 0), links.get((b, a), 0))
        for a, b in zip(order, order[1:] + order[:1], strict=True)
    ]
    return max(edges), sum(edges)


def test_up_to_seven_members_no_ring_is_better(seeds: Callable[[int], Iterator[int]]) -> None:
    for seed in seeds(60):
        rng = random.Random(seed)
        names = [bytes([number]) * 32 for number in rng.sample(range(256), 3 + seed % 5)]
        links = random_links(rng, names)
        links |= {pair: 6 / 1024 for pair in combinations(names, 2) if pair not in links}
        made = ring_order.order_ring(links, names, names[-1])
        best = min(quality(links, (names[-1], *others)) for others in permutations(names[:-1]))
        assert made.order[0] == names[-1] and sorted(made.order) == sorted(names), f"seed {seed}"
        assert quality(links, made.order) == best, f"seed {seed}: {made.reason}"
        others_joined_first = ring_order.order_ring(links, names[::-1], names[-1])
        assert made.order == others_joined_first.order, f"seed {seed}: the order depends on who joined when"


def test_two_opt_often_finds_the_best_slowest_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unstructured links are its hardest case; it is never worse than the join order."""
    found = 0
    for seed in range(60):
        rng = random.Random(seed)
        names = [bytes([number]) * 32 for number in rng.sample(range(256), 7)]
        links = {pair: rng.randint(1, 100) / 1024 for pair in combinations(names, 2)}
        exact = ring_order.order_ring(links, names, names[0]).order
        with monkeypatch.context() as patch:
            patch.setattr(ring_order, "MAX_EXACT_PEERS", 2)
            near = ring_order.order_ring(links, names, names[0]).order
        assert near[0] == names[0] and sorted(near) == sorted(names), f"seed {seed}"
        assert quality(links, exact) <= quality(links, near), f"seed {seed}"
        assert quality(links, near)[0] <= quality(links, tuple(names))[0], f"seed {seed}"
        found += quality(links, near)[0] == quality(links, exact)[0]
    assert found >= 36, f"only {found} of 60"


def test_two_opt_untwists_a_circle(seeds: Callable[[int], Iterator[int]]) -> None:
    """Two stretches of a circle of 9 to 24 members are crossed; the plan goes round again."""
    for seed in seeds(20):
        rng = random.Random(seed)
        size = rng.randint(9, 24)
        circle = [bytes([number]) * 32 for number in rng.sample(range(256), size)]
        links = {(circle[a], circle[b]): min(b - a, size - b + a) for a, b in combinations(range(size), 2)}
        made = ring_order.order_ring(links, rng.sample(circle, size), circle[0])
        assert made.order in (tuple(circle), (circle[0], *reversed(circle[1:]))), (
            f"seed {seed}: {made.reason}"
        )


def test_large_groups_are_ordered_within_the_bound_and_never_worse_than_they_joined() -> None:
    rng = random.Random(7)
    names = [rng.randbytes(32) for _ in range(120)]
    links = {pair: rng.expovariate(200) for pair in combinations(names, 2)}
    made = ring_order.order_ring(links, names, names[5])
    assert sorted(made.order) == sorted(names) and made.order[0] == names[5]
    assert quality(links, made.order)[0] < quality(links, tuple(names))[0] / 5, made.reason
