"""Shares by measured speed: their sizes, and when a new division is worth it."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gridtrain.core.planning.batch_shares import (
    MAX_BOUNDED_WORKERS,
    MIN_COMPUTE_SPEEDUP,
    MIN_OBSERVATIONS,
    SAMPLES_FIGURE,
    SECONDS_FIGURE,
    WorkerSpeeds,
    divide_samples,
    seconds_per_sample,
    slowest_compute_s,
)

A, B, C = (letter * 32 for letter in (b"a", b"b", b"c"))
SPEEDS = st.lists(st.floats(0.01, 1000.0), min_size=1, max_size=12)
NO_LIMIT = [0] * 12


@pytest.mark.parametrize(
    ("total", "speeds", "most", "shares"),
    [
        (60, (40, 10, 10), (0, 0, 0), [40, 10, 10]),
        (8, (1, 1, 1), (0, 0, 0), [3, 3, 2]),  # the lower ranks get the remainder
        (10, (1000, 1, 1), (0, 0, 0), [8, 1, 1]),  # no share is 0 while there are enough samples
        (2, (1, 5, 1), (0, 0, 0), [0, 2, 0]),  # there are not enough
        (60, (40, 10, 10), (24, 0, 0), [24, 18, 18]),  # limited by its memory
        (60, (1, 1), (10, 20), [20, 40]),  # the limits allow only 30 samples: in proportion to them
        (5, (3, 2), (0, 0), [3, 2]),
    ],
)
def test_samples_are_divided_by_speed(
    total: int, speeds: tuple[float, ...], most: tuple[int, ...], shares: list[int]
) -> None:
    assert divide_samples(total, speeds, most) == shares


@given(SPEEDS, st.integers(1, 5000), st.data())
@settings(max_examples=300, deadline=None)
def test_the_sum_is_the_total_and_every_bound_holds(
    speeds: list[float], total: int, data: st.DataObject
) -> None:
    most = data.draw(st.lists(st.integers(0, 2000), min_size=len(speeds), max_size=len(speeds)))
    counts = divide_samples(total, speeds, most)
    assert sum(counts) == total and min(counts) >= 0
    if total >= len(speeds):
        assert min(counts) >= 1
    room = sum(limit or total for limit in most)
    if room >= total:
        assert all(count <= (limit or total) for count, limit in zip(counts, most, strict=True))


@given(SPEEDS, st.integers(12, 5000))
@settings(max_examples=200, deadline=None)
def test_no_single_move_makes_the_slowest_faster(speeds: list[float], total: int) -> None:
    counts = divide_samples(total, speeds, NO_LIMIT[: len(speeds)])
    longest = slowest_compute_s(counts, speeds)
    for source in range(len(counts)):
        for target in range(len(counts)):
            if source != target and counts[source] > 1:
                moved = list(counts)
                moved[source], moved[target] = moved[source] - 1, moved[target] + 1
                assert slowest_compute_s(moved, speeds) >= longest * (1 - 1e-12)


@given(SPEEDS, st.integers(12, 5000))
@settings(max_examples=200, deadline=None)
def test_shares_of_more_than_one_sample_are_proportional_within_one_sample(
    speeds: list[float], total: int
) -> None:
    wanted = [total * speed / sum(speeds) for speed in speeds]
    if min(wanted) >= 1:
        counts = divide_samples(total, speeds, NO_LIMIT[: len(speeds)])
        # Not below; the remainder of rounding down goes to the workers that finish it first.
        assert all(count > want - 1 for count, want in zip(counts, wanted, strict=True))


class Workers:
    """Workers that compute their shares at their own speeds and report it."""

    def __init__(self, speeds: dict[bytes, float], noise: float = 0.0, fixed_s: float = 0.0) -> None:
        self.sharing, self.speeds, self.random = WorkerSpeeds(), speeds, Random(1)
        self.noise, self.fixed_s = noise, fixed_s
        self.reported = {peer: (0.0, 0.0) for peer in speeds}

    def compute(self, shares: list[int], steps: int = 1) -> None:
        for _ in range(steps):
            for peer, share in zip(self.speeds, shares, strict=True):
                factor = self.random.uniform(1 - self.noise, 1 + self.noise)
                samples, seconds_s = self.reported[peer]
                took_s = self.fixed_s + share / (self.speeds[peer] * factor)
                self.reported[peer] = samples + share, seconds_s + took_s
                figures = {SAMPLES_FIGURE: self.reported[peer][0], SECONDS_FIGURE: self.reported[peer][1]}
                self.sharing.observe(peer, figures)

    def settle(self, total: int, rounds: int) -> tuple[list[int], int]:
        """The shares after so many evaluations, and the number of divisions."""
        peers, most = list(self.speeds), [0] * len(self.speeds)
        shares, divisions = divide_samples(total, [1.0] * len(peers), most), 0
        for _ in range(rounds):
            self.compute(shares, steps=5)
            if self.sharing.rebalance_reason(peers, shares, most):
                names = [peer[:1].decode() for peer in peers]
                shares, divisions = (
                    list(self.sharing.plan_shares(peers, names, total, most).counts),
                    divisions + 1,
                )
        return shares, divisions


def test_one_division_is_enough_and_has_a_reason() -> None:
    workers = Workers({A: 40.0, B: 10.0, C: 10.0})
    assert workers.settle(60, rounds=10) == ([40, 10, 10], 1)
    plan = workers.sharing.plan_shares([A, B, C], ["ann", "bob", "cy"], 60, [0, 0, 0])
    assert plan.reason == "60 samples shared by measured speed: ann 40 (40/s), bob 10 (10/s), cy 10 (10/s)"
    assert workers.sharing.rebalance_reason([A, B, C], [20, 20, 20], [0, 0, 0]) == (
        "shares by measured speed make the computation of a step 2.00 times as fast"
    )


def test_pauses_do_not_count_but_a_slowdown_is_found_soon() -> None:
    """C pauses for 30 s in every fifth step, and is twice as slow later."""
    peers, shares, most = [A, B, C], [20, 20, 20], [0, 0, 0]
    workers = Workers(dict.fromkeys(peers, 10.0))
    for _ in range(20):
        workers.compute(shares, steps=4)
        workers.reported[C] = workers.reported[C][0], workers.reported[C][1] + 30.0
        workers.compute(shares)
        assert workers.sharing.speed(C) in (None, pytest.approx(10.0))
    workers.speeds[C] = 5.0
    reports = 0
    while not workers.sharing.rebalance_reason(peers, shares, most):
        workers.compute(shares)
        reports += 1
    assert reports == 7, "6 without regard to pauses"


@pytest.mark.parametrize("seed", range(20))
def test_noise_does_not_lead_to_repeated_divisions(seed: int) -> None:
    """Each step varies by up to a fifth; smoothed speeds vary less than the least gain."""
    workers = Workers({A: 40.0, B: 10.0, C: 10.0}, noise=0.2)
    workers.random.seed(seed)
    shares, divisions = workers.settle(600, rounds=100)
    assert 1 <= divisions <= 2
    wanted = [400, 100, 100]
    assert all(abs(share - want) <= 0.15 * want for share, want in zip(shares, wanted, strict=True))


def test_a_fixed_part_of_each_step_is_taken_into_account() -> None:
    """0.5 s of every step do not depend on the share; all members should still finish together."""
    workers = Workers({A: 100.0, B: 10.0}, fixed_s=0.5)
    shares, divisions = workers.settle(110, rounds=60)
    times_s = [0.5 + share / speed for share, speed in zip(shares, (100.0, 10.0), strict=True)]
    assert max(times_s) / min(times_s) < MIN_COMPUTE_SPEEDUP**2
    assert 1 <= divisions <= 6


def test_an_unmeasured_worker_counts_as_the_median_and_triggers_no_division() -> None:
    workers = Workers({A: 30.0, B: 10.0, C: 20.0})
    workers.compute([4, 4, 4], steps=MIN_OBSERVATIONS)
    workers.sharing.forget(C)
    assert workers.sharing.speed(C) is None
    assert workers.sharing.plan_shares([A, B, C], ["a", "b", "c"], 60, [0, 0, 0]).counts == (30, 10, 20)
    assert workers.sharing.rebalance_reason([A, B, C], [20, 20, 20], [0, 0, 0]) == ""


def test_an_unmeasured_worker_is_at_most_as_fast_as_its_unfinished_batch_shows() -> None:
    workers = Workers({A: 30.0, B: 30.0, C: 1.0})
    workers.sharing.observe_unfinished(C, 20, 10.0)
    peers, names = [A, B, C], ["a", "b", "c"]
    assert workers.sharing.plan_shares(peers, names, 62, [0, 0, 0]).counts == (21, 21, 20), (
        "nothing to compare"
    )
    workers.compute([20, 20, 0], steps=MIN_OBSERVATIONS)
    workers.sharing.forget(C)
    for _ in range(2):
        plan = workers.sharing.plan_shares(peers, names, 62, [0, 0, 0])
        assert plan.counts == (30, 30, 2)
        assert plan.reason.endswith("c 2 (not measured, at most 2/s)")
        workers.sharing.observe_unfinished(C, 90, 10.0)  # no new bound
    workers.compute([0, 0, 2], steps=MIN_OBSERVATIONS)
    assert workers.sharing.speed(C) == pytest.approx(1.0)
    workers.sharing.forget(C)
    assert workers.sharing.plan_shares(peers, names, 60, [0, 0, 0]).counts == (20, 20, 20)


@pytest.mark.parametrize("fixed_s, least, most_divisions", [(0.0, 16, 1), (0.02, 12, 8)])
def test_a_worker_of_usual_speed_does_not_keep_the_share_after_a_pause(
    fixed_s: float, least: int, most_divisions: int
) -> None:
    """In a group of 12, its samples make the steps only 12 / 11 times as fast.  Without a fixed time, a
    single sample takes it less than `MIN_SECONDS_S` in all observations."""
    peers, most = [bytes([65 + number]) * 32 for number in range(12)], [0] * 12
    workers = Workers(dict.fromkeys(peers, 800.0), fixed_s=fixed_s)
    workers.compute([16] * 12, steps=20)
    workers.sharing.forget(peers[-1])
    workers.sharing.observe_unfinished(peers[-1], 16, 15.0)
    shares = workers.sharing.plan_shares(peers, ["x"] * 12, 192, most).counts
    assert shares[-1] == 1
    divisions = 0
    for _ in range(20):
        workers.compute(list(shares), steps=30)
        if reason := workers.sharing.rebalance_reason(peers, shares, most):
            assert reason == "a worker that made no progress before is fast enough for a larger share"
            shares = workers.sharing.plan_shares(peers, ["x"] * 12, 192, most).counts
            divisions += 1
    assert shares[-1] >= least and divisions <= most_divisions


@pytest.mark.parametrize("speed, counts", [(1.0, (30, 29, 1)), (30.0, (20, 20, 20)), (90.0, (20, 20, 20))])
def test_a_measured_worker_is_as_slow_after_its_removal_as_before(
    speed: float, counts: tuple[int, ...]
) -> None:
    """Otherwise a slow one would get the median share after each pause, and be removed again."""
    workers = Workers({A: 30.0, B: 30.0, C: speed})
    workers.compute([30, 30, 1], steps=40)
    workers.sharing.observe_unfinished(C, 1, 15.0)
    workers.sharing.forget(C)
    assert workers.sharing.plan_shares([A, B, C], ["a", "b", "c"], 60, [0, 0, 0]).counts == counts


def test_a_worker_without_a_share_causes_no_division() -> None:
    workers = Workers({A: 30.0, B: 30.0, C: 30.0})
    workers.compute([1, 1, 0], steps=40)
    workers.sharing.observe_unfinished(C, 1, 15.0)
    shares = workers.sharing.plan_shares([A, B, C], ["a", "b", "c"], 2, [0, 0, 0]).counts
    assert shares == (1, 1, 0) and not workers.sharing.rebalance_reason([A, B, C], shares, [0, 0, 0])


def test_a_slow_worker_keeps_a_small_share() -> None:
    workers = Workers({A: 30.0, B: 30.0, C: 1.0})
    workers.compute([30, 30, 0], steps=MIN_OBSERVATIONS)
    workers.sharing.observe_unfinished(C, 20, 15.0)
    peers, most = [A, B, C], [0, 0, 0]
    shares = workers.sharing.plan_shares(peers, ["a", "b", "c"], 60, most).counts
    assert shares[-1] == 1
    for _ in range(20):
        workers.compute(list(shares), steps=5)
        assert workers.sharing.rebalance_reason(peers, shares, most) == ""


def test_the_bounds_of_a_limited_number_of_workers_are_kept() -> None:
    workers = Workers({A: 30.0, B: 30.0})
    workers.compute([20, 20], steps=MIN_OBSERVATIONS)
    for number in range(MAX_BOUNDED_WORKERS + 1):
        workers.sharing.observe_unfinished(number.to_bytes(32, "big"), 20, 10.0)
    first, second = (number.to_bytes(32, "big") for number in range(2))
    plan = workers.sharing.plan_shares([A, first, second], ["a", "b", "c"], 62, [0, 0, 0])
    assert plan.counts == (30, 30, 2)


@pytest.mark.parametrize(
    "figures", [{}, {SAMPLES_FIGURE: 5.0}, {SECONDS_FIGURE: 5.0}, {SAMPLES_FIGURE: -1e308}]
)
def test_implausible_figures_are_ignored(figures: dict[str, float]) -> None:
    sharing = WorkerSpeeds()
    for _ in range(10):
        sharing.observe(A, figures)
    assert sharing.speed(A) is None


def test_an_exaggerated_speed_gets_a_bounded_share() -> None:
    workers = Workers({A: 10.0, B: 10.0, C: 1e6})
    workers.compute([10**5] * 3, steps=10)
    counts = workers.sharing.plan_shares([A, B, C], ["a", "b", "c"], 6600, [0, 0, 0]).counts
    assert counts == (100, 100, 6400)


def test_a_restarted_worker_is_measured_from_zero() -> None:
    speeds = WorkerSpeeds()
    speeds.observe(A, {SAMPLES_FIGURE: 100.0, SECONDS_FIGURE: 50.0})
    speeds.observe(A, {})  # nothing computed yet
    for number in range(1, MIN_OBSERVATIONS + 1):
        assert speeds.speed(A) is None
        speeds.observe(A, {SAMPLES_FIGURE: 10.0 * number, SECONDS_FIGURE: 2.0 * number})
    assert speeds.speed(A) == pytest.approx(5.0)


@pytest.mark.parametrize(
    "samples, seconds_s", [(5.0, float("inf")), (float("inf"), 5.0), (5.0, 0.0), (0.0, 5.0)]
)
def test_totals_that_cannot_be_measured_are_ignored(samples: float, seconds_s: float) -> None:
    speeds = WorkerSpeeds()
    for number in range(1, MIN_OBSERVATIONS + 1):
        speeds.observe(A, {SAMPLES_FIGURE: samples * number, SECONDS_FIGURE: seconds_s * number})
        assert speeds.speed(A) is None
    speeds = WorkerSpeeds()
    speeds.observe(A, {SAMPLES_FIGURE: samples, SECONDS_FIGURE: seconds_s})
    for number in range(1, MIN_OBSERVATIONS + 1):
        speeds.observe(A, {SAMPLES_FIGURE: 100.0 * number, SECONDS_FIGURE: 50.0 * number})
    assert speeds.speed(A) == pytest.approx(2.0)


@pytest.mark.parametrize("last", [(200.0, 40.0), (90.0, 60.0), (4.0, 1.0)])
def test_a_total_that_has_fallen_means_a_restarted_worker(last: tuple[float, float]) -> None:
    speeds = WorkerSpeeds()
    for number in range(MIN_OBSERVATIONS):
        speeds.observe(A, {SAMPLES_FIGURE: 100.0 + number, SECONDS_FIGURE: 50.0 + number})
    assert speeds.speed(A) is not None
    speeds.observe(A, dict(zip((SAMPLES_FIGURE, SECONDS_FIGURE), last, strict=True)))
    assert speeds.speed(A) is None


def test_shares_stay_even_while_little_computing_was_measured_and_the_reason_is_true_then() -> None:
    speeds = WorkerSpeeds()
    for number in range(100):
        speeds.observe(A, {SAMPLES_FIGURE: 8.0 * number, SECONDS_FIGURE: 0.001 * number})
    assert speeds.plan_shares([A, B], ["ann", "bob"], 16, [0, 0]).reason == (
        "16 samples in equal shares: too little computing was measured to compare speeds"
    )


def test_a_group_that_is_too_small_for_its_limits_says_so() -> None:
    names, most = ["ann", "bob"], [2, 0]
    assert WorkerSpeeds().plan_shares([A, B], names, 16, most).reason == (
        "16 samples in equal shares: too little computing was measured to compare speeds"
    )
    assert WorkerSpeeds().plan_shares([A, B], names, 16, [2, 2]).reason == (
        "16 samples in equal shares: too little computing was measured to compare speeds; too few workers, "
        "so max_batch_size is exceeded: ann 8 instead of at most 2, bob 8 instead of at most 2"
    )


def test_seconds_per_sample_are_read_from_figures() -> None:
    assert seconds_per_sample({"computed_samples": 40.0, "computed_s": 2.0}) == 0.05
    for odd in ({}, {"computed_samples": 4.0}, {"computed_samples": float("nan"), "computed_s": 1.0}):
        assert seconds_per_sample(odd) == 0.0
