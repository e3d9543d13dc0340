"""How many samples of a step each worker takes, where the whole step's number is fixed (`global_batch_size`).

Decides the shares from the speeds that workers measure while they compute, and when other shares are worth
a new generation.  Never measures, never makes a generation: that is `protocol.generations`.

    speed, samples/s      40   10   10        (20 + 20 + 20)            step's computing: 2.00 s
    shares of 60          40   10   10        the slowest is done last                    1.00 s

A step takes as long as its slowest worker, so the shares are dealt such that the longest n_i / v_i is as
short as whole samples allow.  A speed is measured in what a worker did of its share, so where a step has a
fixed part (v grows with n) the shares creep to the point at which all are done at the same time.
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
"""Figures of a Beat: how much a worker has computed since it came, and in how long."""

OBSERVATION_DECAY = math.exp(-1 / 20)
"""What an observation counts for at the next one: of beats or, where those take longer, of steps."""

MIN_SECONDS_S = 0.05
MIN_OBSERVATIONS = 8
"""A speed is known from so many beats on, with so much computing in them."""

MIN_SPEEDUP = 1.15
"""Other shares are worth a generation when the longest computing becomes shorter by this factor."""

MAX_MEDIAN_RATIO = 64.0
"""A speed counts as so many times the median at most: it is the worker's own word."""

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
    """`counts[i]` samples for the i-th worker; `reason` says in words why."""

    counts: tuple[int, ...]
    reason: str


@dataclass(slots=True)
class WorkerSpeeds:
    """What is known of the workers' speeds."""

    _speeds: dict[PeerId, _SpeedEstimate] = field(default_factory=dict)

    def observe(self, peer: PeerId, figures: Mapping[str, float]) -> None:
        """Take the totals out of a beat's figures; a beat without them, or with nonsense, tells nothing."""
        told = figures.get(SAMPLES_FIGURE, 0.0), figures.get(SECONDS_FIGURE, 0.0)
        known = self._speeds.setdefault(peer, _SpeedEstimate())
        samples, seconds_s = told[0] - known.last_totals[0], told[1] - known.last_totals[1]
        if samples < 0 or seconds_s < 0:  # it began anew
            self._speeds[peer] = _SpeedEstimate(last_totals=told)
            return
        if not (0 < samples < math.inf and 0 < seconds_s < math.inf):
            return
        known.samples = known.samples * OBSERVATION_DECAY + samples
        known.seconds_s = known.seconds_s * OBSERVATION_DECAY + seconds_s
        known.observations += 1
        known.last_totals = told

    def forget(self, peer: PeerId) -> None:
        self._speeds.pop(peer, None)

    def speed(self, peer: PeerId) -> float | None:
        """Samples per second of computing; None: not known yet."""
        known = self._speeds.get(peer)
        if known is None or known.observations < MIN_OBSERVATIONS or known.seconds_s < MIN_SECONDS_S:
            return None
        return min(max(known.samples / known.seconds_s, 1e-6), 1e12)

    def plan_shares(
        self, peers: Sequence[PeerId], names: Sequence[str], total: int, most: Sequence[int]
    ) -> BatchShares:
        """Shares of `total` for `peers`; who has not been measured counts as the median of the others."""
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
        """Why other shares than the current ones are wanted; empty: they are not, or it cannot be known."""
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
    """How long the slowest worker computes, in seconds."""
    return max(count / speed for count, speed in zip(counts, speeds, strict=True))


def divide_samples(total: int, speeds: Sequence[float], most: Sequence[int]) -> list[int]:
    """Whole shares whose sum is `total`, such that the longest count / speed is as short as can be.

    Everybody gets at least 1 if there are enough; ties go to the lower index.

    Args:
        speeds: all > 0 and finite.
        most: the largest share of each; 0: any.  Where they do not hold the total they count in proportion.
    """
    limits = _share_limits(total, most)
    least = 1 if total >= len(speeds) else 0
    counts = _rounded_down(total, speeds, limits, least)
    # The next sample goes where it is done first: exact, as every count only grows.
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
    """Proportional shares within their bounds, none above its place in the best deal.

    Who is at a bound is taken out, and the rest is shared again: at most one turn for each worker.
    """
    counts = [0] * len(speeds)
    open_ones = list(range(len(speeds)))
    left = total
    while open_ones:
        whole = math.fsum(speeds[i] for i in open_ones)
        low = [i for i in open_ones if left * speeds[i] / whole <= least]
        high = [i for i in open_ones if left * speeds[i] / whole >= limits[i]]
        # Too much for some and too little for others pull the rest apart: the larger surplus goes first.
        short = sum(least - left * speeds[i] / whole for i in low)
        over = sum(left * speeds[i] / whole - limits[i] for i in high)
        bound = low if low and short >= over else high
        if not bound:
            break
        for i in bound:
            counts[i] = least if bound is low else limits[i]
            left -= counts[i]
        open_ones = [i for i in open_ones if i not in bound]
    if open_ones:
        whole = math.fsum(speeds[i] for i in open_ones)
        for i in open_ones:
            counts[i] = min(limits[i], max(least, math.floor(left * speeds[i] / whole)))
    while sum(counts) > total:  # rounding errors of huge ratios
        counts[max(range(len(counts)), key=lambda i: counts[i])] -= 1
    return counts
