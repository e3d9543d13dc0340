"""How many samples of a step each worker takes, where the number of a whole step is fixed
(`global_batch_size`).

    speed, samples/s      40   10   10        (20 + 20 + 20)            step's computing: 2.00 s
    shares of 60          40   10   10        the slowest is done last                    1.00 s

A step takes as long as its slowest worker, so the shares make the longest n_i / v_i as short as whole samples
allow.  A worker's speed is measured at its present share.  Where a step has a fixed part (v grows with n) the
shares therefore converge to those with which all workers finish at the same time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from gridtrain.core.messages import PeerId

SAMPLES_FIGURE = "computed_samples"
SECONDS_FIGURE = "computed_s"
"""Figures of a heartbeat: samples that a worker has computed since it joined, and in how many seconds."""

OBSERVATION_DECAY = math.exp(-1 / 20)
"""Weight of an observation at the next one: of heartbeats or, where those take longer, of steps."""

MIN_SECONDS_S = 0.05
MIN_OBSERVATIONS = 8
"""A speed counts as measured after so many heartbeats with so much computing in them."""

MIN_SPEEDUP = 1.15
"""Other shares are worth a generation when the longest computing becomes shorter by this factor."""

MAX_MEDIAN_RATIO = 64.0
"""A speed counts as at most so many times the median, as it is the worker's own report."""

MAX_NAMED_WORKERS = 8


@dataclass(slots=True)
class _SpeedEstimate:
    """Decaying sums of what one worker has computed."""

    samples: float = 0.0
    seconds_s: float = 0.0
    observations: int = 0
    last_totals: tuple[float, float] = (0.0, 0.0)  # the latest totals


@dataclass(frozen=True, slots=True)
class BatchShares:
    """`counts[i]` samples for the i-th worker, and the reason in words."""

    counts: tuple[int, ...]
    reason: str


@dataclass(slots=True)
class WorkerSpeeds:
    """The workers' measured speeds."""

    _speeds: dict[PeerId, _SpeedEstimate] = field(default_factory=dict)

    def observe(self, peer: PeerId, figures: Mapping[str, float]) -> None:
        """Record the totals in a heartbeat's figures; missing or invalid ones are ignored."""
        totals = figures.get(SAMPLES_FIGURE, 0.0), figures.get(SECONDS_FIGURE, 0.0)
        known = self._speeds.setdefault(peer, _SpeedEstimate())
        samples, seconds_s = totals[0] - known.last_totals[0], totals[1] - known.last_totals[1]
        if samples < 0 or seconds_s < 0:  # the worker restarted
            self._speeds[peer] = _SpeedEstimate(last_totals=totals)
            return
        if not (0 < samples < math.inf and 0 < seconds_s < math.inf):
            return
        known.samples = known.samples * OBSERVATION_DECAY + samples
        known.seconds_s = known.seconds_s * OBSERVATION_DECAY + seconds_s
        known.observations += 1
        known.last_totals = totals

    def forget(self, peer: PeerId) -> None:
        self._speeds.pop(peer, None)

    def speed(self, peer: PeerId) -> float | None:
        """Samples per second of computing; None: not measured yet."""
        known = self._speeds.get(peer)
        if known is None or known.observations < MIN_OBSERVATIONS or known.seconds_s < MIN_SECONDS_S:
            return None
        return min(max(known.samples / known.seconds_s, 1e-6), 1e12)

    def plan_shares(
        self, peers: Sequence[PeerId], names: Sequence[str], total: int, most: Sequence[int]
    ) -> BatchShares:
        """Shares of `total` for `peers`; one that is not measured counts as the median of the others."""
        measured = {p: speed for p in peers if (speed := self.speed(p)) is not None}
        counts = tuple(divide_samples(total, self._assumed_speeds(peers, measured), most))
        if not measured:
            return BatchShares(counts, f"{total} samples in even shares: no speed is measured yet")
        shown = ", ".join(
            f"{name} {count}" + (f" ({measured[peer]:.3g}/s)" if peer in measured else " (not measured)")
            for peer, name, count in list(zip(peers, names, counts, strict=True))[:MAX_NAMED_WORKERS]
        )
        more = f" and {len(peers) - MAX_NAMED_WORKERS} more" if len(peers) > MAX_NAMED_WORKERS else ""
        return BatchShares(counts, f"{total} samples shared by measured speed: {shown}{more}")

    def rebalance_reason(self, peers: Sequence[PeerId], current: Sequence[int], most: Sequence[int]) -> str:
        """Why other shares than the current ones are worth a generation; empty: they are not, or that is
        unknown."""
        measured = {p: speed for p in peers if (speed := self.speed(p)) is not None}
        busy = [peer for peer, share in zip(peers, current, strict=True) if share > 0]
        if len(peers) < 2 or not busy or any(peer not in measured for peer in busy):
            return ""
        speeds = self._assumed_speeds(peers, measured)
        now_s = slowest_compute_s(current, speeds)
        then_s = slowest_compute_s(divide_samples(sum(current), speeds, most), speeds)
        if now_s < MIN_SPEEDUP * then_s:
            return ""
        return f"shares by measured speed make the computing of a step {now_s / then_s:.2f} times as fast"

    def _assumed_speeds(self, peers: Sequence[PeerId], measured: Mapping[PeerId, float]) -> list[float]:
        usual = median(measured.values()) if measured else 1.0
        return [min(measured.get(peer, usual), MAX_MEDIAN_RATIO * usual) for peer in peers]


def slowest_compute_s(counts: Sequence[int], speeds: Sequence[float]) -> float:
    """Seconds that the slowest worker computes."""
    return max(count / speed for count, speed in zip(counts, speeds, strict=True))


def divide_samples(total: int, speeds: Sequence[float], most: Sequence[int]) -> list[int]:
    """Integer shares with the sum `total` that make the longest count / speed as short as possible.

    Every worker gets at least 1 if there are enough; ties go to the lower index.

    Args:
        speeds: all > 0 and finite.
        most: the largest share of each; 0: any.  If their sum is less than `total`, they are scaled up.
    """
    limits = _share_limits(total, most)
    least = 1 if total >= len(speeds) else 0
    counts = _rounded_down(total, speeds, limits, least)
    # The next sample goes to the worker that finishes it first: exact, as counts only grow.
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


def _share_limits(total: int, most: Sequence[int]) -> list[int]:
    limits = [min(limit, total) if limit > 0 else total for limit in most]
    if (room := sum(limits)) >= total:
        return limits
    return [math.ceil(limit * total / room) for limit in limits]


def _rounded_down(total: int, speeds: Sequence[float], limits: Sequence[int], least: int) -> list[int]:
    """Proportional shares within their bounds, none larger than in the best division.

    Workers at a bound get that, and the rest is divided again: at most one pass for each worker.
    """
    counts = [0] * len(speeds)
    unbounded = list(range(len(speeds)))
    left = total
    while unbounded:
        whole = math.fsum(speeds[i] for i in unbounded)
        at_least = [i for i in unbounded if left * speeds[i] / whole <= least]
        at_most = [i for i in unbounded if left * speeds[i] / whole >= limits[i]]
        # Fixing lower and upper bounds moves the rest in opposite directions: the larger surplus goes first.
        short = sum(least - left * speeds[i] / whole for i in at_least)
        over = sum(left * speeds[i] / whole - limits[i] for i in at_most)
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
