"""Divides a step's samples (`global_batch_size`) among workers by measured speed, and rebalances the shares.

    speed, samples/s      40   10   10
    equal shares of 60    20   20   20        compute time per step: 2.00 s
    shares by speed       40   10   10        compute time per step: 1.00 s

A step takes as long as its slowest worker, so the shares minimize the longest compute time.  A worker's
compute time is its number of samples divided by its speed, which is measured with its current share.  If part
of the compute time does not depend on the share, the measured speed grows with the share: one
rebalancing is inexact, but repeated ones approach the shares for which all workers finish at the same time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low

from gridtrain.core.messages import PeerId
from gridtrain.quantities import list_first

SAMPLES_FIGURE = "computed_samples"
SECONDS_FIGURE = "computed_s"
"""Names of two heartbeat metrics: the number of samples that the worker has computed since it joined,
and the compute time of these samples in seconds."""

OBSERVATION_DECAY = math.exp(-1 / 20)
"""The weight of earlier observations is multiplied by this factor at each new observation.  An observation is
a heartbeat or, if batches take longer than the interval between heartbeats, a batch."""

MIN_SECONDS_S = 0.05
MIN_OBSERVATIONS = 8
"""A speed is considered measured after at least `MIN_OBSERVATIONS` observations with at least `MIN_SECONDS_S`
of compute time in total (with the weights of `OBSERVATION_DECAY`)."""

MIN_COMPUTE_SPEEDUP = 1.15
"""Different shares justify a new generation if a step is then computed at least this many times as fast."""

MAX_MEDIAN_RATIO = 64.0
"""Upper bound on a speed and on a batch size, as a multiple of the median, because workers report both."""

MAX_NAMED_WORKERS = 8
MAX_BOUNDED_WORKERS = 1024  # unmeasured workers of which an upper bound on the speed is kept


def seconds_per_sample(figures: Mapping[str, float]) -> float:
    """Return the mean compute time per sample since the worker joined, in seconds; 0.0 if it is unknown.

    The worker does not count its first batches.
    """
    samples, seconds = figures.get(SAMPLES_FIGURE, 0.0), figures.get(SECONDS_FIGURE, 0.0)
    return seconds / samples if 0 < samples < math.inf and 0 < seconds < math.inf else 0.0


@dataclass(slots=True)
class _SpeedEstimate:
    """Sums of one worker's samples and compute time, in which earlier observations have less weight.

    Each observation counts as the median of itself and the two preceding ones, so that a pause of the
    training loop, which lengthens one observation, does not count.
    """

    latest: tuple[tuple[float, float], ...] = ()  # samples and seconds of up to three observations
    samples: float = 0.0
    seconds_s: float = 0.0
    observations: int = 0
    last_totals: tuple[float, float] = (0.0, 0.0)  # samples and seconds in the latest heartbeat


@dataclass(frozen=True, slots=True)
class BatchShares:
    """The division of a step's samples among the workers.

    Attributes:
        counts: the number of samples for each worker.
        reason: the reason for these shares, as text.
    """

    counts: tuple[int, ...]
    reason: str


@dataclass(slots=True)
class WorkerSpeeds:
    """The workers' measured speeds."""

    _speeds: dict[PeerId, _SpeedEstimate] = field(default_factory=dict)
    _bounds: dict[PeerId, float] = field(default_factory=dict)  # of workers not yet measured, oldest first
    _limited: set[PeerId] = field(default_factory=set)  # workers whose share was planned with a bound

    def observe(self, peer: PeerId, figures: Mapping[str, float]) -> None:
        """Record the totals in `figures`, the metrics of a heartbeat; a missing total counts as 0.

        If a total is smaller than the last one, the worker has restarted, and its earlier observations are
        discarded.  Totals are ignored if one of them has not increased or is not finite.
        """
        totals = figures.get(SAMPLES_FIGURE, 0.0), figures.get(SECONDS_FIGURE, 0.0)
        known = self._speeds.setdefault(peer, _SpeedEstimate())
        samples, seconds_s = totals[0] - known.last_totals[0], totals[1] - known.last_totals[1]
        if samples < 0 or seconds_s < 0:  # the worker restarted
            self._speeds[peer] = _SpeedEstimate(last_totals=totals)
            return
        if not (0 < samples < math.inf and 0 < seconds_s < math.inf):
            return
        known.observations += 1
        known.last_totals = totals
        known.latest = *known.latest[-2:], (samples, seconds_s)
        if len(known.latest) < 3:
            return
        samples, seconds_s = sorted(known.latest, key=lambda each: each[1] / each[0])[1]
        known.samples = known.samples * OBSERVATION_DECAY + samples
        known.seconds_s = known.seconds_s * OBSERVATION_DECAY + seconds_s
        if self.speed(peer) is not None:
            self._bounds.pop(peer, None)

    def observe_unfinished(self, peer: PeerId, samples: int, waited_s: float) -> None:
        """Record that a worker did not finish `samples` samples in `waited_s` > 0 seconds.

        Until the worker's speed is measured again, even after `forget`, it is assumed to be at most the last
        measured speed or, without one, `samples / waited_s`.  The cause may have been a mere pause, so
        `rebalance_reason` lets the share grow as soon as the speed is measured.
        """
        if samples > 0:
            speed = self.speed(peer) or samples / waited_s
            self._bounds[peer] = min(speed, self._bounds.pop(peer, math.inf))
            if len(self._bounds) > MAX_BOUNDED_WORKERS:
                del self._bounds[next(iter(self._bounds))]

    def forget(self, peer: PeerId) -> None:
        self._speeds.pop(peer, None)
        self._limited.discard(peer)

    def speed(self, peer: PeerId) -> float | None:
        """Return the worker's samples per second of compute time.

        Returns None if the speed is not considered measured (`MIN_OBSERVATIONS`, `MIN_SECONDS_S`).
        `MIN_SECONDS_S` does not apply to a share that was planned with a bound, because computing such a
        share may take less time.
        """
        known = self._speeds.get(peer)
        least_s = 0.0 if peer in self._limited else MIN_SECONDS_S
        if known is None or known.observations < MIN_OBSERVATIONS or known.seconds_s < least_s:
            return None
        return min(max(known.samples / known.seconds_s, 1e-6), 1e12)

    def plan_shares(
        self, peers: Sequence[PeerId], names: Sequence[str], total: int, most: Sequence[int]
    ) -> BatchShares:
        """Divide `total` samples among `peers`; for a worker without a measured speed, assume the median
        speed or, if lower, the worker's bound.

        Args:
            names: the name of each worker, for the text of the reason.
            most: the maximum share of each worker; 0 means no limit.
        """
        measured = {p: speed for p in peers if (speed := self.speed(p)) is not None}
        self._limited.update(p for p in peers if measured and p in self._bounds)
        counts = tuple(divide_samples(total, self._assumed_speeds(peers, measured), most))
        exceeded = _exceeded_limits(names, counts, most)
        if not measured:
            why = "too little computing was measured to compare speeds"
            return BatchShares(counts, f"{total} samples in equal shares: {why}{exceeded}")
        shares = [
            f"{name} {count} ({self._describe_speed(peer)})"
            for peer, name, count in zip(peers, names, counts, strict=True)
        ]
        shown = list_first(shares, MAX_NAMED_WORKERS)
        return BatchShares(counts, f"{total} samples shared by measured speed: {shown}{exceeded}")

    def rebalance_reason(self, peers: Sequence[PeerId], current: Sequence[int], most: Sequence[int]) -> str:
        """Return the reason for a new generation with different shares.

        Returns "" if different shares do not justify a new generation, if there are fewer than 2 workers, or
        if the speed of a worker with samples has not been measured.

        Args:
            current: the current share of each worker.
            most: see `plan_shares`.
        """
        measured = {p: speed for p in peers if (speed := self.speed(p)) is not None}
        busy = [peer for peer, share in zip(peers, current, strict=True) if share > 0]
        if len(peers) < 2 or not busy or any(peer not in measured for peer in busy):
            return ""
        speeds = self._assumed_speeds(peers, measured)
        now_s = slowest_compute_s(current, speeds)
        counts = divide_samples(sum(current), speeds, most)
        then_s = slowest_compute_s(counts, speeds)
        if now_s < MIN_COMPUTE_SPEEDUP * then_s:
            # In a large group, the gain is small even if one worker of usual speed has a single sample.
            limited = (each for each in zip(peers, current, counts, strict=True) if each[0] in self._limited)
            if any(0 < MIN_COMPUTE_SPEEDUP * share <= count for _, share, count in limited):
                return "a worker that made no progress before is fast enough for a larger share"
            return ""
        return f"shares by measured speed make the computation of a step {now_s / then_s:.2f} times as fast"

    def _assumed_speeds(self, peers: Sequence[PeerId], measured: Mapping[PeerId, float]) -> list[float]:
        if not measured:
            return [1.0] * len(peers)
        usual = median(measured.values())
        assumed = (measured.get(peer) or min(usual, self._bounds.get(peer, usual)) for peer in peers)
        return [min(speed, MAX_MEDIAN_RATIO * usual) for speed in assumed]

    def _describe_speed(self, peer: PeerId) -> str:
        if (speed := self.speed(peer)) is not None:
            return f"{speed:.3g}/s"
        bound = self._bounds.get(peer)
        return "not measured" if bound is None else f"not measured, at most {bound:.3g}/s"


def own_shares(names: Sequence[str], sizes: Sequence[int], reason: str) -> BatchShares:
    """Return the workers' own batch sizes as their shares, but at most `MAX_MEDIAN_RATIO` times the median.

    Without this limit, a single worker could take nearly all samples of the run.

    Args:
        names: the name of each worker, for the text of the reason.
        sizes: the batch size of each worker; if their number is even, the median is the lower of the two
            middle sizes.
        reason: why these sizes are used; the limited shares, if any, are appended.
    """
    most = int(MAX_MEDIAN_RATIO * median_low(sizes))
    limited = [
        f"{name} {most} instead of {size}" for name, size in zip(names, sizes, strict=True) if size > most
    ]
    if limited:
        shown = list_first(limited, MAX_NAMED_WORKERS)
        reason += f", but at most {MAX_MEDIAN_RATIO:g} times the median batch size: {shown}"
    return BatchShares(tuple(min(size, most) for size in sizes), reason)


def slowest_compute_s(counts: Sequence[int], speeds: Sequence[float]) -> float:
    """Return the longest compute time (samples / speed) of all workers, in seconds."""
    return max(count / speed for count, speed in zip(counts, speeds, strict=True))


def divide_samples(total: int, speeds: Sequence[float], most: Sequence[int]) -> list[int]:
    """Return integer shares that sum to `total` and minimize the longest compute time (share / speed).

    Every worker gets at least 1 sample if there are enough samples.  If two workers would finish the next
    sample at the same time, the one with the lower index gets it.

    Args:
        speeds: samples per second of each worker, all > 0 and finite.
        most: the maximum share of each worker; 0 means no limit.  If the sum of these limits is less than
            `total`, all limits are scaled up by the same factor.
    """
    limits = _share_limits(total, most)
    least = 1 if total >= len(speeds) else 0
    counts = _rounded_down(total, speeds, limits, least)
    # Each further sample goes to the worker that would finish it first; optimal, because counts only grow.
    queue = [
        ((count + 1) / speed, i)
        for i, (count, speed, limit) in enumerate(zip(counts, speeds, limits, strict=True))
        if count < limit
    ]
    heapq.heapify(queue)
    for _ in range(total - sum(counts)):
        _, i = heapq.heappop(queue)
        counts[i] += 1
        if counts[i] < limits[i]:
            heapq.heappush(queue, ((counts[i] + 1) / speeds[i], i))
    return counts


def _exceeded_limits(names: Sequence[str], counts: Sequence[int], most: Sequence[int]) -> str:
    """Return a text that names the workers whose shares exceed their limits; "" if there are none.

    Shares exceed their limits only if the sum of the limits is less than the number of samples.
    """
    above = [
        f"{name} {count} instead of at most {limit}"
        for name, count, limit in zip(names, counts, most, strict=True)
        if 0 < limit < count
    ]
    if not above:
        return ""
    return f"; too few workers, so max_batch_size is exceeded: {list_first(above, MAX_NAMED_WORKERS)}"


def _share_limits(total: int, most: Sequence[int]) -> list[int]:
    limits = [min(limit, total) if limit > 0 else total for limit in most]
    if (room := sum(limits)) >= total:
        return limits
    return [math.ceil(limit * total / room) for limit in limits]


def _rounded_down(total: int, speeds: Sequence[float], limits: Sequence[int], least: int) -> list[int]:
    """Return shares that are proportional to the speeds, but at least `least` and at most the limits.

    The shares are rounded down, so that none exceeds its optimum; the caller distributes the remaining
    samples.  A worker whose proportional share would be out of bounds gets the nearest bound, and the other
    samples are divided again among the other workers, in at most one pass for each worker.
    """
    counts = [0] * len(speeds)
    unbounded = list(range(len(speeds)))
    left = total
    while unbounded:
        whole = math.fsum(speeds[i] for i in unbounded)
        at_least = [i for i in unbounded if left * speeds[i] / whole <= least]
        at_most = [i for i in unbounded if left * speeds[i] / whole >= limits[i]]
        # Fixing shares at lower and at upper bounds changes the other shares in opposite directions, so the
        # side with the larger surplus is fixed first.
        short = math.fsum(least - left * speeds[i] / whole for i in at_least)
        over = math.fsum(left * speeds[i] / whole - limits[i] for i in at_most)
        bound = at_least if at_least and short >= over else at_most
        if not bound:
            break
        for i in bound:
            counts[i] = least if bound is at_least else limits[i]
            left -= counts[i]
        unbounded = [i for i in unbounded if i not in bound]
    if unbounded:
        whole = math.fsum(speeds[i] for i in unbounded)
        for i in unbounded:
            counts[i] = min(limits[i], max(least, math.floor(left * speeds[i] / whole)))
    while sum(counts) > total:  # rounding errors of huge ratios
        counts[max(range(len(counts)), key=lambda i: counts[i])] -= 1
    return counts
