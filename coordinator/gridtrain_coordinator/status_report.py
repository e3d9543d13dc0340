"""Builds the status for the CLI and the dashboard, including average rates of steps and bytes per second.

A rate is the increase of a counter per second, measured over at most the last `WINDOW_S` seconds, or
`LONG_WINDOW_S` seconds to predict the remaining time:

    time     now - 10 s    now
    step     410           430     2 steps per second
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

from gridtrain.core.messages import PeerId
from gridtrain.network.transport.interface import PeerUp, VersionMismatch
from gridtrain_coordinator.run.recent_dict import RecentDict
from gridtrain_coordinator.run.slow_member import busy_s, find_slow_member

WINDOW_S, LONG_WINDOW_S = 10.0, 300.0
SAMPLE_S = 1.0

REFUSED_S, MAX_REFUSED, MAX_REFUSED_ROWS = 86_400.0, 1000, 3
"""How long, and for how many workers, a refusal because of the protocol version is remembered; and how many
versions the status names."""


class RateMeter:
    """Measures how fast counters increase over the last `WINDOW_S` seconds.

    Attributes:
        due_s: when to call `observe` next.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, dict[str, dict[str, float]]]] = deque()  # figures by peer
        self._steps: deque[tuple[float, int | None]] = deque()  # None while the run is not training
        self.due_s = -math.inf

    def restart(self, now_s: float) -> None:
        """Forget the counters; the next `observe` is due when workers have reported later values."""
        self._samples.clear()
        self._steps.clear()
        self.due_s = now_s + SAMPLE_S

    def observe(self, status: dict[str, Any], now_s: float) -> None:
        figures = {member["peer"]: member["figures"] for member in status["members"]}
        step = status["step"] if status["phase"] == "training" else None
        self._samples.append((now_s, figures))
        self._steps.append((now_s, step))
        self.due_s = now_s + SAMPLE_S
        while now_s - self._samples[0][0] > WINDOW_S:
            self._samples.popleft()
        while now_s - self._steps[0][0] > LONG_WINDOW_S:
            self._steps.popleft()

    def steps_per_s(self, window_s: float = WINDOW_S) -> float | None:
        """Return the steps per second over the window, or since training last resumed, if that was later.

        Returns None if the rate is not known yet, the run is not training, or it was rolled back.
        """
        known: list[tuple[float, int]] = []
        for at_s, step in reversed(self._steps):
            if step is None or self._steps[-1][0] - at_s > window_s:
                break
            known.append((at_s, step))
        return _slope(*known[-1], *known[0]) if len(known) > 1 else None

    def figure_per_s(self, peer: str, figure: str) -> float | None:
        """Return a metric's increase per second; None if not yet known or if the worker was restarted."""
        known = [
            (at_s, figures[peer][figure])
            for at_s, figures in self._samples
            if figure in figures.get(peer, {})
        ]
        return _slope(*known[0], *known[-1]) if len(known) > 1 else None


class RefusedVersions:
    """Counts the workers that were refused within `REFUSED_S` because of their protocol version."""

    def __init__(self) -> None:
        # By the worker's key, or by the key of its invitation and its host: when, protocol version, software.
        self._latest: RecentDict[tuple[PeerId, str], tuple[float, int, str]] = RecentDict(MAX_REFUSED)

    def record(self, event: VersionMismatch, now_s: float) -> None:
        self._latest[event.key, event.host] = now_s, event.version, event.software

    def discard(self, event: PeerUp) -> None:
        """Record that a worker has connected, and therefore uses this coordinator's version now."""
        pending = event.pending_key
        self._latest.pop((event.peer, "") if pending is None else (pending, event.host), None)

    def rows(self, now_s: float) -> list[dict[str, Any]]:
        """Return the number of workers for each version, the most frequent versions first."""
        counts = Counter(
            (version, software)
            for at_s, version, software in self._latest.values()
            if now_s < at_s + REFUSED_S
        )
        return [
            {"version": version, "software": software, "workers": workers}
            for (version, software), workers in counts.most_common(MAX_REFUSED_ROWS)
        ]


def _slope(from_s: float, from_value: float, to_s: float, to_value: float) -> float | None:
    return (to_value - from_value) / (to_s - from_s) if to_s > from_s and to_value >= from_value else None


def redact_addresses(status: dict[str, Any]) -> None:
    """Remove all addresses from a status for a reader that is not the operator."""
    for member in status["members"]:
        member["address"] = ""
    for event in status["events"]:
        event.pop("address", None)
        event.pop("tried", None)


def mean_loss(members: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the mean of the reported losses, weighted by the members' shares; a share of 0 counts as 1.

    Returns None if no member reports a finite loss, or if the sum overflows.
    """
    reported = [
        (loss, max(member["share"] or 0, 1))
        for member in members
        if math.isfinite(loss := member["figures"].get("loss", math.nan))
    ]
    total = sum(share for _, share in reported)
    mean = sum(loss * share for loss, share in reported) / total if reported else math.inf
    return mean if math.isfinite(mean) else None


def _remaining_s(status: Mapping[str, Any], steps_per_s: float | None) -> float | None:
    """Return the predicted time until the end of the run in seconds; None if it is unknown."""
    left: float | None = None
    if (steps := status["total_steps"]) is not None:
        left = steps - status["step"]
    elif (total := status["total_samples"]) is not None and status["samples"] is not None:
        share, size = sum(member["share"] or 0 for member in status["members"]), total // status["epochs"]
        left = (total - status["samples"]) / size * math.ceil(size / share) if share else None
    return max(0.0, left) / steps_per_s if left is not None and steps_per_s else None


def _separate_wait(figures: dict[str, float], slowest_s: float) -> dict[str, float]:
    """Return the figures with the time spent waiting for the slowest member moved from `communicating_s` to
    `waiting_s`.

    Args:
        slowest_s: how long the slowest member is busy in each step, in seconds.
    """
    communicating_s, waiting_s = figures.get("communicating_s", 0.0), figures.get("waiting_s", 0.0)
    waited_s = min(slowest_s - busy_s(figures) - waiting_s, communicating_s)
    if not waited_s > 0.0:
        return figures
    return {**figures, "communicating_s": communicating_s - waited_s, "waiting_s": waiting_s + waited_s}


def encode_status(status: dict[str, Any]) -> bytes:
    """Encode a status as the payload of a `StatusReply`: UTF-8 JSON."""
    return json.dumps(status, separators=(",", ":")).encode()


def build_status(
    status: dict[str, Any], rates: RateMeter, *, software: str, address: str, now_s: float, uptime_s: float
) -> dict[str, Any]:
    """Return the content of a `StatusReply`, which the dashboard also shows.

    It extends `Membership.status` with loss, waited_for (peer, name and reason of the member that is slow
    or has a slow link, or None), software, address, now_s (read from the same clock as the events' `at_s`),
    uptime_s, wall_s, steps_per_s and remaining_s, and adds sent_Bps and received_Bps to each member; these
    are None while they are unknown.
    """
    active = [member for member in status["members"] if member.get("rank") is not None]
    reported = [member["figures"] for member in active if "computing_s" in member["figures"]]
    slowest_s = max(map(busy_s, reported), default=0.0)
    members = [
        {
            **member,
            "figures": _separate_wait(member["figures"], slowest_s),
            "sent_Bps": rates.figure_per_s(member["peer"], "sent_bytes"),
            "received_Bps": rates.figure_per_s(member["peer"], "received_bytes"),
        }
        for member in status["members"]
    ]
    has_fixed_batches = status["stages"] == 1 and status["global_batch_size"] is None
    slow = find_slow_member(
        active,
        status["links"],
        has_fixed_batches=has_fixed_batches,
        sent_Bps=lambda peer: rates.figure_per_s(peer, "exchanged_bytes") or None,
    )
    return {
        **status,
        "members": members,
        "loss": mean_loss(active),
        "waited_for": slow if status["phase"] == "training" else None,
        "software": software,
        "address": address,
        "now_s": round(now_s, 3),
        "uptime_s": round(uptime_s, 3),
        "wall_s": round(time.time(), 3),
        "steps_per_s": rates.steps_per_s(),
        "remaining_s": _remaining_s(status, rates.steps_per_s(LONG_WINDOW_S)),
    }
