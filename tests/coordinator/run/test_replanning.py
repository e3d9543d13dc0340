"""A run whose links change gets another rank order if the gain is worth it, and not at once.

Members measure their links again if exchanges take much longer or shorter than predicted.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from scripted_coordinator import A, B, C, D, ScriptedCoordinator

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.planning import rank_order
from gridtrain.core.planning.exchange_choice import FIRST_STEP_FIGURE
from gridtrain.core.planning.rank_order_search import Pieces, RankOrderEstimate
from gridtrain_coordinator.run import generation_plan, link_remeasurement, reorder_limits
from gridtrain_coordinator.run.events import Effect, LogEvent, PeerConnected, Send
from gridtrain_coordinator.run.journal_recovery import generation_entry, recover_run
from gridtrain_coordinator.run.link_failures import FAILURES_BEFORE_AVOIDING
from gridtrain_coordinator.run.registry import AVOIDED_PAIR_RTT_S
from gridtrain_coordinator.run.reorder_limits import ReorderLimits

PEERS = A, B, C, D
FACTS = (
    ("model", "25600000 parameters in 1 tensors"),
    ("exchange", "GTopK(density=0.001, values=fp16, topology=butterfly)"),
)
SETUP = m.Setup(FACTS, m.LedgerSpec(100, 0, epochs=1), 4, None)
SETUP_RING = replace(SETUP, facts=(FACTS[0], ("exchange", "Dense(topology=ring)")))
SETUP_AUTO = replace(SETUP, facts=(FACTS[0], ("exchange", "auto(values=fp16)")))
FAST_Bps, SLOW_Bps = 1.25e8, 5e5


class Run(ScriptedCoordinator):
    """Four cooperating workers; each event takes one virtual second.

    Args:
        hosts: the source addresses of workers that cannot be dialled from outside.
    """

    def __init__(
        self, *, plans: bool = True, setup: m.Setup = SETUP, hosts: Mapping[m.PeerId, str] | None = None
    ) -> None:
        limits = Deadlines(silence_s=1e9, settle_s=0.0, report_s=100.0)
        super().__init__(limits=limits, min_workers=4, plans=plans)
        for peer in PEERS:
            links = m.LinkLatencies(tuple((other, 0.001) for other in PEERS if other != peer))
            is_reachable = hosts is None or peer not in hosts
            if hosts is not None and not is_reachable:
                self.hear(PeerConnected(peer, hosts[peer]))
            self.join(peer, setup=None, reachable=is_reachable)
            self.say(peer, setup, links)
        self.start(*PEERS)

    def rates(self, slow: set[frozenset[m.PeerId]]) -> list[Effect]:
        effects: list[Effect] = []
        for a in PEERS:
            rates = [(b, SLOW_Bps if frozenset((a, b)) in slow else FAST_Bps) for b in PEERS if b != a]
            effects += self.say(a, m.LinkRates(tuple((b, rate, rate) for b, rate in rates)))
        return effects

    def uploads(self, up_Bps: dict[m.PeerId, float]) -> None:
        """Both ends of each link report the upload of its sender, `FAST_Bps` by default."""
        for a in PEERS:
            rates = [(b, up_Bps.get(a, FAST_Bps), up_Bps.get(b, FAST_Bps)) for b in PEERS if b != a]
            self.say(a, m.LinkRates(tuple(rates)))

    @property
    def entries_shares(self) -> dict[m.PeerId, int]:
        return {member.peer: member.entries_share for member in self.core.run.member_list}

    def heartbeat_until_frozen(self, limit_s: float) -> str:
        """The reason of the `Freeze`; empty if there is none within `limit_s`."""
        until_s = self.now_s + limit_s
        while self.now_s < until_s:
            effects = self.say(A, m.Heartbeat(0, 0, 0, ()))
            for effect in effects + (self.tick() if self.core.deadline_s <= self.now_s else []):
                if isinstance(effect, Send) and isinstance(effect.message, m.Freeze):
                    return effect.message.reason
        return ""

    def exchange(
        self, seconds: float, until_s: float, *, is_answering: bool = True
    ) -> list[tuple[float, str, Any]]:
        """Steps whose exchanges take `seconds`; returns what starts measurements: (time, event, fields), and
        (time, name of the member that measures, the peers to which it measures)."""
        found: list[tuple[float, str, Any]] = []
        while self.now_s < until_s:
            for effect in self.step(seconds):
                if isinstance(effect, LogEvent) and effect.event == "links_remeasured":
                    found.append((self.now_s, effect.event, effect.fields))
                elif isinstance(effect, Send) and isinstance(effect.message, m.Admitted):
                    targets = "".join(self.core.worker_name(to) for to, _ in effect.message.probe_targets)
                    found.append((self.now_s, self.core.worker_name(effect.peer), targets))
                    if is_answering:
                        self.say(effect.peer, m.LinkLatencies(()))
        return found

    def step(self, exchange_s: float) -> list[Effect]:
        """The members' heartbeats after a step whose exchange took this long."""
        step = self.core.run.workers[A].step + 1
        beat = m.Heartbeat(0, step, step, (("communicating_s", exchange_s),))
        return [effect for peer in PEERS for effect in self.say(peer, beat)]

    def next_generation(self) -> None:
        self.report(*PEERS)
        self.start(*PEERS)

    @property
    def order(self) -> str:
        return "".join(member.name for member in self.core.run.member_list)


@pytest.mark.parametrize("whole", [4, 3], ids=["at once", "piece by piece"])
def test_changed_links_lead_to_another_order_but_not_at_once(
    whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_plan, "WHOLE_SEARCH_MEMBERS", whole)
    run = Run()
    assert run.order == "abcd"
    made_s = run.core.run.view_change.last_installed_s
    run.rates({frozenset((A, B)), frozenset((B, D))})
    reason = run.heartbeat_until_frozen(120.0)
    took_s = run.now_s - made_s
    assert took_s >= 30.0, "not before reshare_s has passed"
    assert (took_s >= 36.0) == (whole == 3), "a heartbeat a second, each with one piece"
    assert reason.startswith("links have changed: another order makes an exchange ")
    run.next_generation()
    # B's only good link is to C: one of its two partners is still behind a thin one, the other one is C.
    assert run.order.index("b") ^ run.order.index("c") in (1, 2)
    assert "predicted time" in run.core.status(run.now_s)["plan_reason"]
    assert run.heartbeat_until_frozen(100.0) == "", "the same links do not lead to a further one"


def test_in_a_ring_workers_that_need_no_relay_are_neighbours() -> None:
    """No worker can be dialled from outside; a and c are behind the same router."""
    hosts = {A: "198.51.100.1", B: "198.51.100.2", C: "198.51.100.1", D: "198.51.100.4"}
    run = Run(setup=SETUP_RING, hosts=hosts)
    assert run.order == "abdc", "in join order a and c are opposite"
    relayed = [tuple(row[:2]) for row in run.core.status(run.now_s)["relayed"]]
    assert relayed == [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)], "all pairs but that of a and c"


def test_a_plan_and_each_comparison_use_the_present_routes() -> None:
    """The pair of a and c alone needs no relay; what was known before says that no pair does."""
    hosts = {A: "198.51.100.1", B: "198.51.100.2", C: "198.51.100.1", D: "198.51.100.4"}
    run = Run(hosts=hosts)
    planner = run.core._planner
    links, routes = planner.measured_links, planner.measured_links.relayed
    assert {frozenset(pair) for pair in routes} == {
        frozenset((a, b)) for a in PEERS for b in PEERS if a != b and {a, b} != {A, C}
    }
    basis = planner._basis(PEERS, ())
    links.relayed = frozenset()
    assert planner._basis(PEERS, ()) != basis, "an order found for other routes is not used"
    planner.link_cost(PEERS, run.now_s)
    assert links.relayed == routes
    links.relayed = frozenset()
    run.rates({frozenset((A, B)), frozenset((B, D))})
    run.heartbeat_until_frozen(120.0)
    assert links.relayed == routes


def test_a_worker_with_a_slow_upload_selects_fewer_entries_from_the_next_generation_on() -> None:
    run = Run()
    assert set(run.entries_shares.values()) == {m.WHOLE_SHARE}
    run.uploads({C: SLOW_Bps})
    reason = run.heartbeat_until_frozen(60.0)
    assert reason.startswith("links have changed: ")
    assert set(run.entries_shares.values()) == {m.WHOLE_SHARE}, "not before the next generation"
    run.next_generation()
    share = run.entries_shares[C]
    assert 16 <= share < 128 and [run.entries_shares[peer] for peer in (A, B, D)] == [m.WHOLE_SHARE] * 3
    status = run.core.status(run.now_s)
    assert f"c {share / 256:.0%} of k (upload 4 Mbit/s)" in status["entry_shares_reason"]
    assert status["entry_shares_reason"] in status["plan_reason"]
    assert run.heartbeat_until_frozen(100.0) == "", "the same rates change nothing further"

    journalled = json.loads(json.dumps(generation_entry(run.view, run.core.run.member_list)))
    assert recover_run([("generation", journalled)]).roster == run.core.run.member_list
    assert [row.get("entries_share") for row in journalled["members"] if row["name"] != "c"] == [None] * 3

    for peer in PEERS:
        run.say(peer, SETUP)  # as workers do when they measure their links again
    run.uploads({C: SLOW_Bps * 1.2})
    assert run.heartbeat_until_frozen(100.0) == "", "the change is too small"
    for peer in PEERS:
        run.say(peer, SETUP)
    run.uploads({})
    assert run.heartbeat_until_frozen(200.0).startswith("links have changed: ")
    run.next_generation()
    assert set(run.entries_shares.values()) == {m.WHOLE_SHARE}
    assert run.core.status(run.now_s)["entry_shares_reason"] == ""


def test_after_a_loss_few_orders_are_tried_at_once_and_the_others_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others wait for the first plan without D, and not for the complete search half a minute later."""
    searched: list[tuple[int, bool]] = []
    search = rank_order.search_order

    def record(load: Any, network: Any, *rest: Any, is_urgent: bool) -> Pieces[RankOrderEstimate]:
        searched.append((network.size, is_urgent))
        return search(load, network, *rest, is_urgent=is_urgent)

    run = Run()
    run.uploads({D: SLOW_Bps})
    assert run.heartbeat_until_frozen(60.0)
    run.next_generation()
    assert run.entries_shares[D] < m.WHOLE_SHARE
    monkeypatch.setattr(rank_order, "search_order", record)
    run.say(D, m.Leave("tired"))
    run.report(A, B, C)
    assert searched == [(3, True)]
    assert (
        set(run.entries_shares.values()) == {m.WHOLE_SHARE}
        and "of k" not in run.core.status(run.now_s)["plan_reason"]
    )
    run.start(A, B, C)
    lost_s = run.now_s
    assert run.heartbeat_until_frozen(60.0) == "", "no other order is noticeably faster"
    assert searched == [(3, True), (3, False)] and run.now_s > lost_s + 30.0


def test_a_reported_slow_upload_of_another_worker_changes_nothing() -> None:
    run = Run()
    run.uploads({})
    run.say(B, SETUP)
    run.say(B, m.LinkRates(tuple((other, FAST_Bps, SLOW_Bps) for other in (A, C, D))))
    run.heartbeat_until_frozen(100.0)
    assert set(run.entries_shares.values()) == {m.WHOLE_SHARE}


def test_a_small_change_makes_no_generation() -> None:
    run = Run()
    run.rates(set())
    assert run.heartbeat_until_frozen(100.0) == ""
    assert run.core.generation == 1


def test_avoided_pairs_count_when_orders_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an order planned around a broken pair looks slow, and a generation undoes it."""
    run, seen = Run(), []
    for _ in range(FAILURES_BEFORE_AVOIDING):
        run.core._planner.link_failures.record(A, B, run.now_s)
    assert run.core._planner.link_failures.begin_avoiding(run.now_s) == {(A, B)}

    def compare(load: Any, links: rank_order.LinkMeasurements, *rest: Any) -> Any:
        seen.append(links.rtt_s[A, B])
        return ""
        yield

    monkeypatch.setattr(rank_order, "compare_rank_orders", compare)
    run.rates(set())
    run.heartbeat_until_frozen(60.0)
    assert seen == [AVOIDED_PAIR_RTT_S]


def test_reported_rates_count_once_per_introduction() -> None:
    run = Run()
    run.rates(set())
    run.say(B, m.LinkRates(((A, SLOW_Bps, SLOW_Bps), (D, SLOW_Bps, SLOW_Bps))))
    assert run.core._planner.measured_links.rate_Bps(B, A) == FAST_Bps, "it has reported already"
    assert run.heartbeat_until_frozen(100.0) == ""
    run.say(B, SETUP)  # as a worker does when it measures its links again
    run.say(B, m.LinkRates(((A, SLOW_Bps, SLOW_Bps),)))
    assert run.core._planner.measured_links.rate_Bps(B, A) == SLOW_Bps
    assert run.heartbeat_until_frozen(100.0) == "", "no other worker reports it"


def test_a_report_that_only_replaces_an_older_one_of_the_other_end_is_a_change() -> None:
    planner = Run().core._planner
    limits, from_anna = planner.reorder_limits, m.LinkRates(((A, 0.0, FAST_Bps),))
    planner.record_rates(A, m.LinkRates(((B, SLOW_Bps, 0.0),)))
    planner.record_rates(B, from_anna)
    limits.clear_changes()
    limits.record_introduction(B, 0.0)
    planner.record_rates(B, from_anna)
    assert planner.measured_links.rate_Bps(A, B) == FAST_Bps
    assert limits.due_reporters(0.0) == {B}


def test_a_worker_whose_reports_change_the_order_has_to_wait_longer_each_time() -> None:
    """Changes reported every second lead to another order at 0, 30, 90 and 210 s."""
    limits, found_s = ReorderLimits(pause_s=30.0), []
    for now_s in range(400):
        limits.mark_changed(A)
        if now_s % 60 == 0:
            limits.forget(A)  # it leaves and joins again
            limits.mark_changed(A)
        if due := limits.due_reporters(float(now_s)):
            limits.record_evaluation(due, float(now_s), found=True)
            found_s.append(now_s)
    assert found_s == [0, 30, 90, 210]


def test_the_waits_start_anew_after_a_time_without_changes() -> None:
    """The second wait is 60 s, from 30 to 90 s; until 150 s, a change would double it."""
    for quiet_until_s, wait_s in ((149.0, 120.0), (150.0, 30.0)):
        limits = ReorderLimits(pause_s=30.0)
        for now_s in (0.0, 30.0, quiet_until_s):
            limits.record_evaluation(frozenset({A}), now_s, found=True)
        limits.mark_changed(A)
        assert not limits.due_reporters(quiet_until_s + wait_s - 1.0)
        assert limits.due_reporters(quiet_until_s + wait_s) == {A}


def test_an_evaluation_without_a_result_does_not_lengthen_the_wait() -> None:
    limits = ReorderLimits(pause_s=30.0)
    limits.mark_changed(A)
    limits.record_evaluation(limits.due_reporters(0.0), 0.0, found=False)
    assert limits.due_reporters(1.0) == frozenset()
    limits.mark_changed(A)
    assert limits.due_reporters(1.0) == {A}
    limits.clear_changes()
    assert limits.due_reporters(1.0) == frozenset(), "the new plan includes the change"


def test_the_reports_of_a_worker_that_left_are_dropped() -> None:
    limits = ReorderLimits(pause_s=30.0)
    rates = [(B, 1e6, 2e6)]
    assert limits.accept(A, rates) == rates
    limits.record_introduction(A, 0.0)
    assert [limits.accept(A, rates), limits.accept(A, rates)] == [rates, []]
    limits.forget(A)
    assert not limits._introduction_of and not limits._last_accepted


def test_a_report_in_one_direction_leaves_the_other_to_be_reported() -> None:
    limits = ReorderLimits(pause_s=30.0)
    for rates in ([(B, 0.0, 2e6)], [(B, 1e6, 0.0)]):
        assert [limits.accept(A, rates), limits.accept(A, rates)] == [rates, []]


def test_the_links_and_addresses_of_more_than_sixteen_members_are_not_examined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner, peers = Run().core._planner, [bytes([number]) * 32 for number in range(17)]
    planner.measured_links.record(peers[0], [(peers[1], FAST_Bps, FAST_Bps)])
    monkeypatch.setattr(planner._addresses, "all_direct", lambda members: True)
    for size, is_choice in ((2, False), (3, True), (16, True), (17, False)):
        examined = planner._rated(peers[:size]) is not None, planner._may_be_direct(peers[:size])
        assert examined == (is_choice, is_choice)


def test_rates_of_strangers_are_not_stored() -> None:
    run = Run()
    stranger = b"x" * 32
    run.say(A, m.LinkRates(((stranger, 1e6, 1e6), (B, 2e6, 0.0))))
    assert run.core._planner.measured_links.rate_Bps(A, stranger) is None
    assert run.core._planner.measured_links.rate_Bps(A, B) == 2e6
    run.say(B, m.Leave("enough"))
    assert run.core._planner.measured_links.rate_Bps(A, B) is None


def test_waiting_reporters_are_bounded_and_the_first_to_be_due_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reorder_limits, "MAX_REMEMBERED", 2)
    limits = ReorderLimits(pause_s=30.0)
    for now_s, peer in ((0.0, A), (1.0, B), (2.0, C)):
        limits.record_evaluation(frozenset({peer}), now_s, found=True)
    for peer in (A, B, C):
        limits.mark_changed(peer)
    assert limits.due_reporters(3.0) == {A}
    assert limits.due_reporters(31.0) == {A, B}


def test_with_ranks_in_the_order_of_joining_links_change_nothing() -> None:
    run = Run(plans=False)
    run.uploads({C: SLOW_Bps})
    assert run.heartbeat_until_frozen(100.0) == ""
    for peer in PEERS:
        run.say(peer, SETUP)
    run.rates({frozenset((A, B))})
    assert run.heartbeat_until_frozen(100.0) == ""
    run.say(D, m.Leave("enough"))
    assert run.order == "abcd" and "as configured" in run.core.status(run.now_s)["plan_reason"]
    assert run.core._planner.link_cost(PEERS, run.now_s) is None
    assert Run().core._planner.link_cost(PEERS, 9.0) is not None
    assert Run().core._planner.link_cost(PEERS[:2], 9.0) is None


def test_the_first_exchange_is_chosen_by_the_latest_links_and_not_while_a_generation_is_made() -> None:
    run = Run(setup=SETUP_AUTO)
    run.rates(set())
    run.core.run.view_change.request("another worker is waiting")
    assert run.heartbeat_until_frozen(9.0) == "another worker is waiting"
    choice = run.core._planner.exchange_choice
    for is_open, latency_s in ((True, 5.0), (False, 0.001)):
        for peer in PEERS:
            run.say(peer, m.LinkLatencies(tuple((other, latency_s) for other in PEERS if other != peer)))
        for peer in PEERS:
            run.say(peer, m.Heartbeat(0, 0, 0, ((FIRST_STEP_FIGURE, 1.0),)))
        assert choice.is_open == is_open
        run.next_generation()
        assert not run.core._planner.reorder_limits.due_reporters(run.now_s), "the plan uses all rates"
    assert "a step takes 1.06 s" in choice.reason


def test_avoided_pairs_count_in_a_plan_that_reconsiders_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurements for the exchange do not contain them; those for the rank order do."""
    run, seen = Run(setup=SETUP_AUTO), []
    run.rates(set())
    for peer in PEERS:
        run.say(peer, m.Heartbeat(0, 0, 0, ((FIRST_STEP_FIGURE, 1.0),)))
    run.next_generation()
    planner, newcomer = run.core._planner, b"e" * 32
    assert not planner.exchange_choice.is_open
    for _ in range(FAILURES_BEFORE_AVOIDING):
        planner.link_failures.record(A, B, run.now_s)
    search = rank_order.search_rank_order

    def counted(load: Any, links: rank_order.LinkMeasurements, *rest: Any, **options: Any) -> Any:
        seen.append(links.rtt_s[A, B])
        return search(load, links, *rest, **options)

    monkeypatch.setattr(rank_order, "search_rank_order", counted)
    run.join(newcomer, setup=None)
    run.say(newcomer, SETUP_AUTO, m.LinkLatencies(((A, 0.001),)))
    run.say(newcomer, m.CatchUpReport(0, b""))
    run.heartbeat_until_frozen(9.0)
    assert seen == [AVOIDED_PAIR_RTT_S]


# -- measuring again -------------------------------------------------------------------------------


def measured_again(found: list[tuple[float, str, Any]]) -> str:
    """The names of the members that were asked to measure, in turn."""
    return "".join(name for _, name, _ in found if len(name) == 1)


@pytest.mark.parametrize(("is_answering", "pause_s"), [(True, 4.0), (False, 12.0)])
def test_members_measure_again_one_after_the_other_when_exchanges_take_longer(
    is_answering: bool, pause_s: float
) -> None:
    """A member whose measurement does not end has 10 s; the run looks once in 4 s or more."""
    run = Run()
    run.rates(set())
    assert run.exchange(0.01, 200.0) == [], "as predicted"
    slow_s = run.now_s
    (logged_s, event, fields), *asked = run.exchange(1.0, 260.0, is_answering=is_answering)
    assert event == "links_remeasured" and fields == {"measured_s": 1.0, "predicted_s": 0.059}
    assert slow_s + link_remeasurement.WINDOW_S <= logged_s < slow_s + 30.0
    assert [(name, peers) for _, name, peers in asked] == [("d", "abc"), ("c", "ab"), ("b", "a"), ("a", "")]
    times_s = [at_s for at_s, *_ in asked]
    assert all(pause_s <= later_s - at_s < pause_s + 4.0 for at_s, later_s in itertools.pairwise(times_s))
    assert run.exchange(1.0, 1000.0) == [], "this time is the usual one from now on"


def test_the_plan_changes_only_when_all_members_have_measured_again() -> None:
    run = Run()
    run.rates(set())
    run.exchange(0.01, 200.0)
    assert measured_again(run.exchange(1.0, 220.0)) == "d"
    run.rates({frozenset((A, B)), frozenset((B, D))})
    assert measured_again(run.exchange(1.0, 236.0)) == "cba"
    assert not run.core.run.view_change.reason
    assert run.heartbeat_until_frozen(60.0).startswith("links have changed: ")


def test_members_measure_again_when_a_line_has_recovered_but_less_and_less_often() -> None:
    run = Run()
    run.rates(set())
    times_s = []
    for number in range(40):
        found = run.exchange((1.0, 0.01)[number % 2], run.now_s + 200.0)
        times_s += [at_s for at_s, name, _ in found if name == "links_remeasured"]
    pauses_s = [later_s - at_s for at_s, later_s in itertools.pairwise(times_s)]
    assert pauses_s[0] < 300.0 and max(pauses_s[:3]) < 1000.0
    assert all(pause_s >= 1900.0 for pause_s in pauses_s[5:]) and len(times_s) < 12
    run.exchange(0.01, run.now_s + 10_000.0)
    assert run.exchange(1.0, run.now_s + 60.0), "after an hour without changes"
    run.exchange(1.0, run.now_s + 100.0)
    assert run.exchange(0.01, run.now_s + 60.0), "at the shortest interval again"


def test_durations_that_keep_changing_cause_at_most_one_measurement_an_hour() -> None:
    """One member can cause this: the shortest duration counts, and it can report a shorter one."""
    run, times_s = Run(), []
    run.rates(set())
    for number in range(60):
        found = run.exchange((1.0, 0.0)[number % 2], run.now_s + 200.0)
        times_s += [at_s for at_s, name, _ in found if name == "links_remeasured"]
    pauses_s = [later_s - at_s for at_s, later_s in itertools.pairwise(times_s)]
    assert len(pauses_s) > 6 and all(pause_s >= link_remeasurement.MAX_PAUSE_S for pause_s in pauses_s[6:])


def test_members_measure_once_more_if_that_has_changed_the_prediction_wrongly() -> None:
    """The bursts were slower than the exchange, because they competed with it."""
    run = Run()
    run.rates(set())
    run.exchange(0.01, 200.0)
    assert run.exchange(1.0, 236.0)
    run.uploads(dict.fromkeys(PEERS, 2e4))
    predicted_s = run.core._planner.predicted_exchange_s()
    assert predicted_s is not None and predicted_s > 2.0
    assert measured_again(run.exchange(1.0, 400.0)) == "dcba"
    assert run.exchange(1.0, 1000.0) == []


@pytest.mark.parametrize(
    ("before_s", "after_s", "is_measured"),
    [(0.001, 0.19, False), (0.2, 0.35, False), (0.2, 0.45, True), (0.2, 0.08, True), (0.2, 0.12, False)],
)
def test_small_changes_do_not_count(before_s: float, after_s: float, is_measured: bool) -> None:
    run = Run()
    run.rates(set())
    run.exchange(before_s, 300.0)
    assert bool(run.exchange(after_s, 420.0)) == is_measured


def test_a_member_that_has_just_measured_is_not_asked_again() -> None:
    run = Run()
    run.rates(set())
    run.exchange(0.01, 100.0)
    run.core._planner.reorder_limits.record_introduction(C, 80.0)
    asked = run.exchange(1.0, 139.0)[1:]
    assert [(name, peers) for _, name, peers in asked] == [("d", "abc"), ("b", "ac"), ("a", "c")]


@pytest.mark.parametrize(
    ("false_step", "false_s"), [(10**9, 1.0), (None, 0.0), (None, 1e-6), (None, math.nan)]
)
def test_a_member_with_false_reports_does_not_prevent_a_measurement(
    false_step: int | None, false_s: float
) -> None:
    run = Run()
    run.rates(set())
    run.exchange(0.01, 100.0)
    found = []
    while run.now_s < 130.0:
        step = run.core.run.workers[A].step + 1
        for peer in PEERS:
            told, seconds = (false_step or step, false_s) if peer == B else (step, 1.0)
            beat = m.Heartbeat(0, told, step, (("communicating_s", seconds),))
            found += [e for e in run.say(peer, beat) if isinstance(e, LogEvent)]
    assert [(event.event, event.fields["measured_s"]) for event in found] == [("links_remeasured", 1.0)]


def test_members_do_not_measure_again_while_two_of_them_have_just_measured() -> None:
    """Neither would measure the link between them."""
    run = Run()
    run.rates(set())
    run.exchange(0.01, 100.0)
    for peer in (B, C):
        run.core._planner.reorder_limits.record_introduction(peer, 80.0)
    assert run.exchange(1.0, 139.0) == []
    assert measured_again(run.exchange(1.0, 180.0)) == "dcba"


@pytest.mark.parametrize("slow", PEERS, ids="abcd")
def test_a_line_that_was_slow_at_first_counts_as_fast_once_it_has_been_measured_again(
    slow: m.PeerId,
) -> None:
    """The worker with this line has reported its upload to the others, which measure again before it or after
    it."""
    run = Run(setup=SETUP_RING)
    run.uploads({slow: SLOW_Bps})
    assert (predicted_s := run.core._planner.predicted_exchange_s()) is not None
    assert run.exchange(predicted_s, 100.0) == []
    told: set[m.PeerId] = set()
    for _ in range(12):
        for effect in run.step(1.0):
            if isinstance(effect, Send) and isinstance(effect.message, m.Admitted):
                targets = [peer for peer, _ in effect.message.probe_targets]
                told.add(effect.peer)
                run.say(effect.peer, m.LinkRates(tuple((peer, FAST_Bps, FAST_Bps) for peer in targets)))
                for peer in targets:
                    run.say(peer, m.LinkRates(((effect.peer, 0.0, FAST_Bps),)))
                run.say(effect.peer, m.LinkLatencies(()))
    links = run.core._planner.measured_links
    assert told == set(PEERS)
    assert {links.rate_Bps(a, b) for a, b in itertools.permutations(PEERS, 2)} == {FAST_Bps}


@pytest.mark.parametrize("up_Bps", [SLOW_Bps, FAST_Bps], ids=["sparse", "dense"])
def test_members_measure_again_every_half_hour_while_the_chosen_exchange_is_sparse(up_Bps: float) -> None:
    """The durations of sparse exchanges do not show that the lines have become faster."""
    run = Run(setup=SETUP_AUTO)
    run.uploads(dict.fromkeys(PEERS, up_Bps))
    for peer in PEERS:
        run.say(peer, m.Heartbeat(0, 0, 0, ((FIRST_STEP_FIGURE, 30.0),)))
    run.next_generation()
    planner = run.core._planner
    assert planner.exchange_choice.is_sparse == (up_Bps == SLOW_Bps)
    predicted_s = planner.predicted_exchange_s()
    assert predicted_s is not None
    found = run.exchange(predicted_s, 6000.0)
    times_s = [at_s for at_s, name, _ in found if name == "links_remeasured"]
    assert len(times_s) == 3 * planner.exchange_choice.is_sparse
    assert all(1800.0 <= later_s - at_s < 1850.0 for at_s, later_s in itertools.pairwise(times_s))
    assert run.core._link_remeasurement._pause_s == link_remeasurement.PAUSE_S, (
        "they do not lengthen the pause"
    )


def test_a_member_that_leaves_is_not_asked() -> None:
    run = Run()
    run.rates(set())
    run.exchange(0.01, 200.0)
    assert measured_again(run.exchange(1.0, 220.0)) == "d"
    run.say(B, m.Leave("done"))
    run.report(A, C, D)
    run.start(A, C, D)
    rest = run.exchange(1.0, run.now_s + 60.0)
    assert "b" not in measured_again(rest) and {"c", "a"} <= set(measured_again(rest))


def test_relayed_links_are_not_measured_again() -> None:
    """Bursts are not sent over relays, and an address with another relay would break a connection in use."""
    run = Run(hosts={A: "198.51.100.1", B: "198.51.100.2"})
    assert [row[:2] for row in run.core.status(run.now_s)["relayed"]] == [[0, 3]]
    run.rates(set())
    run.exchange(0.01, 200.0)
    asked = run.exchange(1.0, 260.0)[1:]
    assert run.order == "acdb"
    assert [(name, peers) for _, name, peers in asked] == [("b", "cd"), ("d", "ac"), ("c", "a"), ("a", "")]


def test_without_a_prediction_nothing_is_measured_again() -> None:
    unmeasured, planless = Run(), Run(plans=False)
    planless.rates(set())
    for run in (unmeasured, planless):
        assert run.exchange(1.0, 300.0) == []


def test_exchanges_while_a_generation_is_forming_do_not_count() -> None:
    run = Run()
    run.rates(set())
    run.exchange(0.01, 200.0)
    run.core.run.view_change.request("a test", can_wait=True)
    assert run.heartbeat_until_frozen(60.0) == "a test"
    assert run.exchange(1.0, run.now_s + 90.0) == []


def test_round_trips_measured_while_training_do_not_replace_earlier_ones() -> None:
    run = Run()
    run.say(A, m.LinkLatencies(((B, 0.5), (b"z" * 32, 0.5))))
    assert run.core.run.workers[A].rtt_s == {B: 0.001, C: 0.001, D: 0.001, b"z" * 32: 0.5}
    run.say(A, m.LinkLatencies(((b"y" * 32, 0.5),)))
    assert run.core.run.workers[A].rtt_s.keys() == {B, C, D, b"y" * 32}, "strangers would fill the memory"


def test_round_trips_of_a_worker_that_is_introduced_again_replace_earlier_ones() -> None:
    """It may have returned from another network."""
    run = Run()
    run.say(A, SETUP)
    run.say(A, m.LinkLatencies(((B, 0.5),)))
    assert run.core.run.workers[A].rtt_s == {B: 0.5}


def test_a_line_that_has_become_faster_is_noticed_whichever_end_measures() -> None:
    """D's upload was slow when it joined; then A measures, and D sends a burst only on request."""

    def measure(peer: m.PeerId, other: m.PeerId, up_Bps: dict[m.PeerId, float]) -> float | None:
        run.say(peer, SETUP)
        run.say(other, m.LinkRates(((peer, 0.0, up_Bps[peer]),)))
        run.say(peer, m.LinkRates(((other, up_Bps[peer], up_Bps[other]),)))
        return run.core._planner.measured_links.rate_Bps(D, A)

    run = Run()
    assert measure(D, A, {D: SLOW_Bps, A: FAST_Bps}) == SLOW_Bps
    assert measure(A, D, {D: FAST_Bps, A: FAST_Bps}) == FAST_Bps
    assert measure(D, A, {D: SLOW_Bps, A: FAST_Bps}) == SLOW_Bps
