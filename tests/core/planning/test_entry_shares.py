"""Members that select fewer entries: by the rates of both ends, with hysteresis, and only if it pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from rank_orders import plan_rank_order, reorder_reason

from gridtrain.core.messages import WHOLE_SHARE, PeerId
from gridtrain.core.planning import message_schedule
from gridtrain.core.planning.cost_model import exchange_cost
from gridtrain.core.planning.entry_shares import (
    MAX_LISTED,
    MAX_MEMBERS,
    MIN_ENTRIES_SHARE,
    EntryShares,
    choose_entry_shares,
    share_change_reason,
)
from gridtrain.core.planning.message_schedule import ReceiveWork, scale_to_shares
from gridtrain.core.planning.network_model import LinkModel, NetworkModel
from gridtrain.core.planning.rank_order import LinkMeasurements
from gridtrain.core.planning.rank_order_search import order_estimator
from gridtrain.core.planning.workload import (
    NO_CPU_COSTS,
    CpuCosts,
    ExchangeKind,
    Workload,
    sparse_payload_bytes,
)

Mbit_Bps = 125e3
FAST, SLOW = 100.0, 5.0
SPARSE = [kind for kind in ExchangeKind if kind.is_sparse]
LOAD = Workload(ExchangeKind.TREE, 25_600_000, 0.001)


def key(number: int) -> PeerId:
    return bytes([number]) * 32


def measured(up_Mbit: Sequence[float], trip_s: float = 0.02) -> tuple[list[PeerId], LinkMeasurements]:
    """Members with these uploads, all of which report what they send and receive."""
    peers = [key(number) for number in range(len(up_Mbit))]
    links = LinkMeasurements({(a, b): trip_s for a in peers for b in peers if a != b})
    for i, a in enumerate(peers):
        rates = [(b, up_Mbit[i] * Mbit_Bps, up_Mbit[j] * Mbit_Bps) for j, b in enumerate(peers) if j != i]
        links.record(a, rates)
    return peers, links


def choose(
    up_Mbit: Sequence[float], load: Workload | None = LOAD, current: Mapping[int, int] | None = None
) -> EntryShares:
    peers, links = measured(up_Mbit)
    names = {peer: f"worker-{peer[0]}" for peer in peers}
    shares = {key(number): share for number, share in (current or {}).items()}
    return choose_entry_shares(load, links, peers, peers, shares, names)


# -- the choice ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SPARSE)
def test_a_member_with_a_slow_upload_selects_fewer_entries_and_the_exchange_is_faster(
    kind: ExchangeKind,
) -> None:
    load = Workload(kind, 25_600_000, 0.001)
    chosen = choose([FAST, FAST, FAST, SLOW], load)
    assert set(chosen.shares) == {key(3)}
    assert MIN_ENTRIES_SHARE <= chosen.shares[key(3)] <= WHOLE_SHARE // 2
    assert chosen.share_of(key(0)) == WHOLE_SHARE
    peers, links = measured([FAST, FAST, FAST, SLOW])
    before = plan_rank_order(load, links, peers, peers)
    after = plan_rank_order(load, links, peers, peers, (), chosen.shares)
    assert "per exchange" in before.reason
    assert chosen.reason.startswith("fewer entries for slow uploads (usual upload 100 Mbit/s): worker-3 ")
    assert "of k (upload 5 Mbit/s); " in chosen.reason and chosen.reason.endswith(", predicted")
    assert after.reason.split("time: ")[1].split(" per")[0] in chosen.reason


def test_a_member_with_a_slow_upload_becomes_a_leaf() -> None:
    """In the order of joining it would be the root; in a butterfly of five it is the folded rank."""
    for kind in (ExchangeKind.TREE, ExchangeKind.GTOPK):
        peers, links = measured([SLOW, FAST, FAST, FAST, FAST])
        load = Workload(kind, 25_600_000, 0.001)
        chosen = choose_entry_shares(load, links, peers, peers, {}, {peer: "w" for peer in peers})
        order = plan_rank_order(load, links, peers, peers, (), chosen.shares).order
        rank = order.index(key(0))
        sends = [message for message in _messages(kind, 5) if message.src == rank]
        assert len(sends) == 1 and not sends[0].needs, f"{kind}: rank {rank} sends {sends}"


def _messages(kind: ExchangeKind, size: int) -> list[message_schedule.PlannedMessage]:
    return message_schedule.tree(size) if kind is ExchangeKind.TREE else message_schedule.butterfly(size)


@pytest.mark.parametrize(
    ("up_Mbit", "load"),
    [
        pytest.param([FAST] * 4, LOAD, id="equal uploads"),
        pytest.param([FAST, FAST, FAST, 60.0], LOAD, id="less than half is missing"),
        pytest.param([FAST, FAST, FAST, SLOW], Workload(ExchangeKind.DENSE, 10**6), id="dense"),
        pytest.param([FAST, FAST, FAST, SLOW], Workload(ExchangeKind.TREE, 10**6), id="small payloads"),
        pytest.param([FAST, FAST, FAST, SLOW], None, id="unknown load"),
        pytest.param([FAST, SLOW], LOAD, id="two members"),
        pytest.param([*[FAST] * MAX_MEMBERS, SLOW], LOAD, id="a large group"),
    ],
)
def test_all_members_select_k_entries_if_fewer_do_not_pay(
    up_Mbit: list[float], load: Workload | None
) -> None:
    assert choose(up_Mbit, load) == EntryShares()


def test_without_rates_no_share_is_smaller() -> None:
    peers = [key(number) for number in range(4)]
    links = LinkMeasurements({(a, b): 0.02 for a in peers for b in peers if a != b})
    assert choose_entry_shares(LOAD, links, peers, peers, {}, {}) == EntryShares()


def test_of_two_slow_uploads_the_slower_sends_less() -> None:
    shares = choose([FAST, FAST, FAST, FAST, 20.0, SLOW]).shares
    assert set(shares) == {key(4), key(5)} and shares[key(5)] < shares[key(4)]


def test_the_reason_names_only_some_of_many() -> None:
    chosen = choose([*[FAST] * 16, *[SLOW] * 12], Workload(ExchangeKind.TOPK, 25_600_000, 0.001))
    assert len(chosen.shares) == 12
    assert chosen.reason.count("worker-") == MAX_LISTED and f" and {12 - MAX_LISTED} more;" in chosen.reason
    assert " more" not in choose([*[FAST] * 8, *[SLOW] * MAX_LISTED]).reason


# -- hysteresis ------------------------------------------------------------------------------------


def test_a_share_changes_only_by_a_large_factor() -> None:
    wanted = choose([FAST, FAST, FAST, SLOW]).shares[key(3)]
    for now, expected in ((wanted * 1.4, wanted * 1.4), (wanted / 1.4, wanted / 1.4), (wanted * 2, wanted)):
        chosen = choose([FAST, FAST, FAST, SLOW], current={3: round(now)})
        assert chosen.shares == {key(3): round(expected)}


def test_a_member_near_the_bound_keeps_its_share() -> None:
    """At 1/1.8 of the usual rate: too fast to get a smaller share, too slow to lose one."""
    load = Workload(ExchangeKind.TOPK, 25_600_000, 0.01)
    ups = [FAST, FAST, FAST, FAST / 1.8]
    small = choose([FAST, FAST, FAST, FAST / 2.5], load).shares
    assert small and choose(ups, load).shares == {}
    assert choose(ups, load, {3: small[key(3)]}).shares == {key(3): small[key(3)]}
    assert choose([FAST, FAST, FAST, FAST / 1.2], load, {3: small[key(3)]}).shares == {}


def test_a_change_needs_a_new_generation_and_more_than_one_reporter() -> None:
    peers, links = measured([FAST, FAST, FAST, SLOW])
    names = {peer: f"worker-{peer[0]}" for peer in peers}
    reason = share_change_reason(LOAD, links, peers, {}, names)
    assert reason == "links have changed: slow uploads of 1 member (worker-3) delay the exchange"
    shares = choose_entry_shares(LOAD, links, peers, peers, {}, names).shares
    assert share_change_reason(LOAD, links, peers, shares, names) == "", "these shares are in use"

    peers, links = measured([FAST] * 4)
    recovered = share_change_reason(LOAD, links, peers, shares, names)
    assert recovered == "links have changed: no upload delays the exchange any more"
    links.record(key(3), [(other, SLOW * Mbit_Bps, FAST * Mbit_Bps) for other in peers[:3]])
    assert choose_entry_shares(LOAD, links, peers, peers, {}, names).shares, "by its own report"
    assert share_change_reason(LOAD, links, peers, {}, names) == "", "no other member reports it"


def test_one_member_alone_cannot_reduce_the_share_of_another() -> None:
    peers, links = measured([FAST] * 4)
    links.record(key(0), [(key(3), FAST * Mbit_Bps, SLOW * Mbit_Bps)])
    assert choose_entry_shares(LOAD, links, peers, peers, {}, {}) == EntryShares()


def test_orders_are_compared_with_the_shares_in_use() -> None:
    peers, links = measured([FAST, FAST, FAST, FAST, SLOW])
    load = Workload(ExchangeKind.GTOPK, 25_600_000, 0.001)
    chosen = choose_entry_shares(load, links, peers, peers, {}, {peer: "w" for peer in peers})
    order = plan_rank_order(load, links, peers, peers, (), chosen.shares).order
    assert reorder_reason(load, links, order, peers, chosen.shares) == ""
    assert reorder_reason(load, links, order[::-1], peers, chosen.shares).startswith("links have changed")


# -- messages with shares --------------------------------------------------------------------------


def fractions(messages: list[message_schedule.PlannedMessage], shares: list[float]) -> dict[str, float]:
    scaled = scale_to_shares(messages, shares)
    assert [(m.src, m.dst, m.needs) for m in scaled] == [(m.src, m.dst, m.needs) for m in messages]
    return {f"{m.src}>{m.dst} {m.work}": m.fraction for m in scaled}


def test_a_leaf_of_a_tree_sends_only_its_own_entries() -> None:
    """0 <- 1, 2 <- 3, 0 <- 2, then in the other direction."""
    assert fractions(message_schedule.tree(4), [1.0, 0.25, 0.5, 0.25]) == {
        "1>0 merge": 0.25, "3>2 merge": 0.25, "2>0 merge": 0.75, "0>2 adopt": 1.0, "0>1 adopt": 1.0,
        "2>3 adopt": 1.0,
    }  # fmt: skip


def test_in_a_butterfly_the_second_hop_carries_the_entries_of_others() -> None:
    sent = scale_to_shares(message_schedule.butterfly(4), [1.0, 1.0, 1.0, 0.25])
    assert [message.fraction for message in sent if message.src == 3] == [0.25, 1.0]
    fold = scale_to_shares(message_schedule.butterfly(5), [1.0, 1.0, 1.0, 1.0, 0.25])
    assert [message.fraction for message in fold if message.src == 4] == [0.25]


def test_a_star_sends_back_the_entries_of_all() -> None:
    for shares, back in (([0.25, 0.25], 0.5), ([1.0, 0.25, 0.25], 1.0)):
        star = message_schedule.star(len(shares), 1, ReceiveWork.POOL, ReceiveWork.ADOPT)
        assert [message.fraction for message in scale_to_shares(star, shares)] == [
            *shares[1:], *[back] * (len(shares) - 1)
        ]  # fmt: skip


@pytest.mark.parametrize("size", [2, 3, 7, 32, 33, 40])
def test_an_all_gather_carries_each_payload_as_it_is(size: int) -> None:
    shares = [0.25 if rank % 3 else 1.0 for rank in range(size)]
    received = [0.0] * size
    for message in scale_to_shares(message_schedule.all_gather(size), shares):
        received[message.dst] += message.count * message.fraction
    for rank in range(size):
        assert received[rank] == pytest.approx(sum(shares) - shares[rank])


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize("size", [2, 5, 8])
def test_whole_shares_cost_what_no_shares_cost(kind: ExchangeKind, size: int) -> None:
    load, link = Workload(kind, 300_000, 0.01), LinkModel(0.01)
    rates = [1e6 * (rank + 1) for rank in range(size)]
    plain = NetworkModel(lambda a, b: link, rates, rates)
    whole = NetworkModel(lambda a, b: link, rates, rates, entry_shares=[1.0] * size)
    assert exchange_cost(load, whole, CpuCosts()) == exchange_cost(load, plain, CpuCosts())
    order = list(range(size))
    estimates = [order_estimator(load, network, CpuCosts())(order) for network in (whole, plain)]
    assert estimates[0] == pytest.approx(estimates[1])


def test_a_small_payload_has_its_exact_size() -> None:
    load = Workload(ExchangeKind.STAR_GTOPK, 1_000_000, 0.01)
    network = NetworkModel(lambda a, b: LinkModel(0.0), [1e6] * 3, [1e9] * 3, entry_shares=[1.0, 1.0, 0.125])
    cost = exchange_cost(load, network, NO_CPU_COSTS, vote=False)
    small_bytes = sparse_payload_bytes(1_000_000, 1250, "fp16")
    assert load.payload_bytes(0.125) == small_bytes > load.unit_bytes / 8, "an index needs more bits"
    assert cost.total_bytes == pytest.approx(3 * load.unit_bytes + small_bytes + 4 * 110)
