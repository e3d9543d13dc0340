"""No rank orders are searched while members are frozen: the plan is searched before, or few orders are tried.

    train --whole search--> Freeze --reports: counted here--> MembershipView

Evaluated orders are counted, since a search takes no virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from rank_orders import plan_rank_order
from scripted_coordinator import ScriptedCoordinator, receivers, sent
from staged_run import StagedRun

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.planning import entry_shares, rank_order, rank_order_search
from gridtrain_coordinator.run import generation_plan
from gridtrain_coordinator.run.events import PeerDisconnected

PEERS = tuple(letter.encode() * 32 for letter in "abcdefg")
*SIX, G = PEERS
EXCHANGES = {
    "gtopk": "GTopK(density=0.001, values=fp16)",
    "topk": "TopK(density=0.001, values=fp16)",
    "dense": "Dense(topology=ring)",
    "small dense": "Dense(topology=ring)",
}
MAX_URGENT_ORDERS = 700
"""Orders that may be evaluated while members wait, in about 10 ms; the search for seven tries up to 5,000."""


class Counter:
    """Counts evaluated orders, estimated or simulated."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        make, simulate = rank_order_search.order_estimator, rank_order_search.simulated_exchange_s

        def estimator(*args: Any) -> Callable[[Sequence[int]], float]:
            estimate = make(*args)
            return lambda order: self._counted(estimate, order)

        patch.setattr(rank_order_search, "order_estimator", estimator)
        for module in (rank_order_search, rank_order, entry_shares):
            patch.setattr(module, "simulated_exchange_s", lambda *args: self._counted(simulate, *args))

    def _counted(self, evaluate: Callable[..., float], *args: Any) -> float:
        self.count += 1
        return evaluate(*args)

    def of(self, act: Callable[[], object]) -> int:
        before = self.count
        act()
        return self.count - before


def rate_Bps(a: m.PeerId, b: m.PeerId) -> float:
    return 1e6 * (1 + (7 * min(a[0], b[0]) + 13 * max(a[0], b[0])) % 31)


class Group(ScriptedCoordinator):
    """Six workers that train, whose links differ."""

    def __init__(self, exchange: str) -> None:
        limits = Deadlines(silence_s=1e9, settle_s=0.0, report_s=100.0)
        super().__init__(limits=limits, min_workers=len(SIX))
        parameters = 100_000 if exchange == "small dense" else 25_600_000
        facts = (("model", f"{parameters} parameters in 1 tensors"), ("exchange", EXCHANGES[exchange]))
        self.setup = m.Setup(facts, m.LedgerSpec(100, 0, epochs=1), 4, None)
        for peer in SIX:
            self.enter(peer)
        self.start(*SIX)

    def enter(self, peer: m.PeerId) -> None:
        """The worker joins, and reports its links; then all members send a heartbeat."""
        others = [other for other in PEERS if other != peer and (other in SIX or peer == G)]
        links = m.LinkLatencies(tuple((other, 0.001 * (1 + other[0] % 5)) for other in others))
        self.join(peer, setup=None)
        rates = tuple((other, rate_Bps(peer, other), rate_Bps(other, peer)) for other in others)
        self.say(peer, m.LinkRates(rates), self.setup, links)

    def beat_until_frozen(self) -> None:
        for _ in range(100):
            if self.core.run.view_change.is_freezing:
                return
            self.say(PEERS[0], m.Heartbeat(0, 0, 0, ()))
        raise AssertionError("no Freeze was sent")

    def freeze_and_report(self) -> None:
        self.beat_until_frozen()
        self.report(*SIX)

    @property
    def order(self) -> tuple[m.PeerId, ...]:
        return self.core.run.member_order

    def best_order(self) -> tuple[m.PeerId, ...]:
        """By the whole search, for the connected members."""
        planner, peers = self.core._planner, self.core.run.eligible_workers()
        load, shares = planner.exchange_choice.workload, planner.entry_shares.shares
        return plan_rank_order(load, planner.measured_links, peers, peers[:6], (), shares).order


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    return Counter(monkeypatch)


def admit(run: Group, counter: Counter) -> None:
    """G joins, or joins again: its plan is the best one, and is searched while the others train."""
    run.enter(G)
    assert counter.of(run.beat_until_frozen) > 100 or sent(run.effects, m.Freeze)
    frozen = counter.of(lambda: run.report(*run.core.run.member_order))
    assert receivers(run.effects, m.MembershipView) and G in run.order
    assert frozen == 0
    run.start(*run.order)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_plan_with_a_newcomer_is_searched_before_members_are_frozen(
    exchange: str, counter: Counter
) -> None:
    run = Group(exchange)
    total = counter.of(lambda: admit(run, counter))
    assert total > MAX_URGENT_ORDERS
    assert run.core._planner._is_search_due is False
    assert counter.of(lambda: run.say(PEERS[0], m.Heartbeat(0, 0, 0, ()))) == 0


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_after_a_loss_and_a_return_members_wait_for_few_orders(exchange: str, counter: Counter) -> None:
    run = Group(exchange)
    admit(run, counter)
    run.hear(PeerDisconnected(G, "its process ended"))
    run.tick(run.core.run.limits.regreet_s)
    assert sent(run.effects, m.Freeze)
    frozen = counter.of(lambda: run.report(*SIX))
    assert set(run.order) == set(SIX) and 0 < frozen <= MAX_URGENT_ORDERS
    run.start(*SIX)
    admit(run, counter)


def test_of_a_plan_found_ahead_that_no_longer_fits_nothing_is_used(counter: Counter) -> None:
    """One of the members is lost after the Freeze: the order for seven is not that for six."""
    run = Group("gtopk")
    run.enter(G)
    run.beat_until_frozen()
    run.say(SIX[2], m.Leave("tired"))
    rest = [peer for peer in SIX if peer != SIX[2]]
    frozen = counter.of(lambda: run.report(*rest))
    assert set(run.order) == {*rest, G} and 0 < frozen <= MAX_URGENT_ORDERS
    assert run.core._planner._is_search_due


def test_a_plan_found_ahead_is_not_used_after_links_have_changed(counter: Counter) -> None:
    run = Group("gtopk")
    run.enter(G)
    run.beat_until_frozen()
    run.core._planner.measured_links.record(G, [(SIX[0], 1e4, 1e4)])
    frozen = counter.of(lambda: run.report(*SIX))
    assert G in run.order and 0 < frozen <= MAX_URGENT_ORDERS
    assert run.core._planner._is_search_due


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches for six or seven members are divided, as those for hundreds are."""
    monkeypatch.setattr(generation_plan, "WHOLE_SEARCH_MEMBERS", 3)
    monkeypatch.setattr(rank_order_search, "EXACT_MAX_PEERS", 3)


def search_one_piece(run: Group, counter: Counter) -> int:
    """Return the number of evaluated orders."""
    assert run.core.deadline_s <= run.now_s, "the next piece is due at once"
    orders = counter.of(run.tick)
    run.say(PEERS[0], m.Heartbeat(0, 0, 0, ()))
    return orders


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_search_in_pieces_finds_what_one_at_once_finds(
    exchange: str, counter: Counter, in_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Group(exchange)
    run.enter(G)
    orders: list[int] = []
    while not run.core.run.view_change.is_freezing:
        assert len(orders) < 100
        orders.append(search_one_piece(run, counter))
    assert len(orders) >= 6 and max(orders) < 0.6 * sum(orders)
    assert counter.of(lambda: run.report(*SIX)) == 0
    monkeypatch.setattr(generation_plan, "WHOLE_SEARCH_MEMBERS", 32)
    whole = Group(exchange)
    admit(whole, counter)
    assert run.order == whole.order


def test_reports_between_two_pieces_do_not_make_a_search_useless(counter: Counter, in_pieces: None) -> None:
    run = Group("gtopk")
    run.enter(G)
    search_one_piece(run, counter)
    run.core._planner.measured_links.record(G, [(SIX[0], 1e4, 1e4)])
    while not run.core.run.view_change.is_freezing:
        search_one_piece(run, counter)
    assert counter.of(lambda: run.report(*SIX)) == 0
    assert G in run.order and not run.core._planner._is_search_due


def test_members_do_not_wait_for_the_rest_of_a_search_when_one_is_lost(
    counter: Counter, in_pieces: None
) -> None:
    run = Group("gtopk")
    run.enter(G)
    search_one_piece(run, counter)
    assert not run.core.run.view_change.is_freezing
    waiting = counter.of(lambda: run.say(SIX[2], m.Leave("tired")))
    assert run.core.run.view_change.is_freezing
    rest = [peer for peer in SIX if peer != SIX[2]]
    waiting += counter.of(lambda: run.report(*rest))
    assert set(run.order) == {*rest, G} and waiting <= MAX_URGENT_ORDERS


def test_members_whose_round_stalls_do_not_wait_for_a_search(counter: Counter) -> None:
    run = Group("gtopk")
    stalled = m.RoundStalled(m.RoundId(run.core.term, run.core.generation, 0, 0), (), 0.0, "no data")
    waiting = counter.of(lambda: run.say(SIX[1], stalled))
    waiting += counter.of(run.beat_until_frozen)
    waiting += counter.of(lambda: run.report(*SIX))
    assert set(run.order) == set(SIX) and waiting <= MAX_URGENT_ORDERS


def test_members_that_have_not_sent_their_setup_again_are_not_planned_with() -> None:
    """After a restart all members are frozen together as soon as they are back."""
    before = Group("gtopk")
    run = ScriptedCoordinator(journal=before.journal, term=2)
    for peer in SIX:
        run.join(peer, generation=before.core.generation, setup=None)
    run.tick(run.core.run.limits.settle_s)
    assert run.core.run.view_change.is_freezing
    assert run.core._planner._found is None


def test_a_pipeline_that_is_divided_anew_searches_no_rank_order(counter: Counter) -> None:
    run = StagedRun(2, *SIX[:4])
    for peer in SIX[4:]:
        run.join(peer)
    run.tick(run.core.run.limits.settle_s)
    assert run.core.run.view_change.is_freezing
    run.report(*SIX[:4])
    run.ready()
    run.lose(SIX[0])
    run.report(*[peer for peer in run.core.run.present_members])
    assert run.core.generation == 3 and len(run.core.run.member_order) == 4
    assert counter.count == 0
