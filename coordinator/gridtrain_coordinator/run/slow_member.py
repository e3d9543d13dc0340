"""Finds the member that noticeably delays the others, and members without progress, for the status."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median, median_high
from typing import Any

from gridtrain.core.messages import IS_WAITING
from gridtrain.core.planning.rank_order import format_rate
from gridtrain.quantities import format_age, format_seconds, list_first
from gridtrain_coordinator.run.registry import Worker
from gridtrain_coordinator.run.worker_problems import MAX_CAUSES_SHOWN

SLOW = 1.25
"""A member delays the others if it is busy for at least `SLOW` times the median, if the difference to the
median is at least `NOTICEABLE_S` and `NOTICEABLE_PART` of a step, and if it is busy for at most `SLOW` times
as long as a step of the others takes: with `wait="auto"`, their steps do not wait for a stalled member."""

NOTICEABLE_S = 0.005
NOTICEABLE_PART = 0.1

EXCHANGE_PART = 0.5
"""A link delays the members if the exchange takes at least this part of a step, and the rate of the fastest
link is at least `SLOW_LINK` times its rate: measured rates of equal links differ."""

SLOW_LINK = 2.0
LOADED_PART = 0.1
"""A link whose sender sends less than this part of the link's rate, over all its links, does not delay the
exchange: the rate may be out of date, or a member's processor delays it.  Nor do the links of a sender that
sends more than the sum of their rates: these are out of date."""

BUSY_METRICS = ("applying_s", "computing_s", "selecting_s")  # from a commit to the next submission
SHARED_METRICS = ("communicating_s", "waiting_s")

IDLE_S, IDLE_STEPS = 30.0, 10
"""Members are idle if none of them has made progress for `IDLE_S`, and for `IDLE_STEPS` times the duration of
the latest step."""

AWAITED_S, AWAITED_STEPS = 5.0, 2
"""The same limits for members whose training loops do not continue while the other members wait for them."""

WAITING_S = 2.0
"""While members wait for another one, none of them has made progress for this long."""

BATCH_HINT = "if this persists, global_batch_size gives it fewer samples"


def busy_s(figures: Mapping[str, float]) -> float:
    """Return the seconds that a worker spent on its own work in its latest step; 0.0 if it is not valid."""
    return _sum(figures, BUSY_METRICS)


def exchange_duration_s(figures: Sequence[Mapping[str, float]]) -> float:
    """Return the duration of the latest exchange, given the metrics of at least one member, in seconds.

    It is that of the member that began last: the others also wait for this member.  All members' steps take
    equally long, so a member whose durations add up to less than half of the median step is ignored.
    """
    steps_s = [_step_s(each) for each in figures]
    least_s = median_high(steps_s) / 2  # of a member, because a mean of two may be infinite
    known = zip(figures, steps_s, strict=True)
    return min(_sum(each, SHARED_METRICS[:1]) for each, step_s in known if step_s >= least_s)


def find_slow_member(
    members: Iterable[Mapping[str, Any]],
    links: Iterable[Sequence[Any]] = (),
    *,
    has_fixed_batches: bool = False,
    sent_Bps: Callable[[str], float | None] = lambda peer: None,
) -> dict[str, str] | None:
    """Return the key ("peer") and name of the member for which the others wait, and the reason: it is busy
    for a long time, or it has the slowest link.

    Returns None if no member stands out.

    Args:
        members: the active members, as in the status.
        links: (rank, other rank, round trip in s, bytes per second or None) for each measured link.
        has_fixed_batches: whether the script sets the number of samples of each member.
        sent_Bps: returns how many bytes per second a member ("peer") sends in exchanges; None if unknown.
    """
    known = [(busy_s(member["figures"]), member) for member in members if "computing_s" in member["figures"]]
    if len(known) < 2:
        return None
    figures = [member["figures"] for _, member in known]
    usual_s = median(seconds for seconds, _ in known)
    step_s = median(_step_s(each) for each in figures)
    slowest_s, slowest = max(known, key=lambda each: each[0])
    noticeable_s = max(NOTICEABLE_S, NOTICEABLE_PART * step_s)
    is_awaited = slowest_s <= SLOW * step_s
    if is_awaited and slowest_s >= SLOW * usual_s and slowest_s - usual_s >= noticeable_s:
        hint = f"; {BATCH_HINT}" if has_fixed_batches else ""
        reason = f"is busy for {_seconds(slowest_s)} per step; the median is {_seconds(usual_s)}{hint}"
        return {"peer": slowest["peer"], "name": slowest["name"], "reason": reason}
    exchange_s = exchange_duration_s(figures)
    if exchange_s < EXCHANGE_PART * step_s or exchange_s < NOTICEABLE_S:
        return None
    return _find_slow_link({member["rank"]: member for _, member in known}, links, exchange_s, sent_Bps)


def describe_idle(members: Sequence[Worker]) -> str:
    """Return the alert that no member is making progress, according to the heartbeats; "" if a
    member is making progress, or if this may be the first step of a member.

    If some members wait, the alert names only the others, whose first step it may be.  If these do not
    continue for long, they are dismissed (`Complaints`).
    """
    reported = [worker.figures for worker in members if "computing_s" in worker.figures]
    if not reported:
        return ""
    step_s = max(map(_step_s, reported))
    idle_s = {worker.name: worker.liveness.last_heard_s - worker.progressed_s for worker in members}
    awaited = [worker.name for worker in members if not worker.figures.get(IS_WAITING)]
    limit_s, shortest_s = max(IDLE_S, IDLE_STEPS * step_s), min(idle_s.values())
    if 0 < len(awaited) < len(members) and shortest_s >= WAITING_S:
        limit_s, shortest_s = max(AWAITED_S, AWAITED_STEPS * step_s), min(idle_s[name] for name in awaited)
    elif len(reported) < len(members):
        return ""
    else:
        awaited = list(idle_s)
    if shortest_s < limit_s:
        return ""
    names = list_first(awaited, MAX_CAUSES_SHOWN)
    usual = f"the latest took {format_seconds(step_s)}"
    return f"no step for {format_age(shortest_s)}, {usual}: check that the training loop of {names} continues"


def _find_slow_link(
    members: Mapping[int, Mapping[str, Any]],
    links: Iterable[Sequence[Any]],
    exchange_s: float,
    sent_Bps: Callable[[str], float | None],
) -> dict[str, str] | None:
    """Return the member with the slowest link, and the reason; None if no link is much slower than others.

    The member is the sender if its fastest upload is slower than the receiver's fastest download.  If they
    are similar, it is the end whose fastest link is slower or, if both are equal, the sender.

    Args:
        members: the members by rank.
        links: as in `find_slow_member`.
        exchange_s: how long the exchange of a step takes, in seconds.
        sent_Bps: as in `find_slow_member`.
    """
    known = ((src, dst, rate_Bps) for src, dst, _, rate_Bps in links if {src, dst} <= members.keys())
    rates = {(src, dst): rate_Bps for src, dst, rate_Bps in known if rate_Bps}
    loads = {src: sent_Bps(members[src]["peer"]) for src, _ in rates}
    uploads_Bps = {end: [rate_Bps for (src, _), rate_Bps in rates.items() if src == end] for end in loads}

    def may_delay(src: int, rate_Bps: float) -> bool:
        load_Bps, all_Bps = loads[src], uploads_Bps[src]
        is_outdated = load_Bps is not None and len(all_Bps) == len(members) - 1 and load_Bps > sum(all_Bps)
        return load_Bps is None or (load_Bps >= LOADED_PART * rate_Bps and not is_outdated)

    loaded = [(src, dst) for (src, dst), rate_Bps in rates.items() if may_delay(src, rate_Bps)]
    if not loaded:
        return None
    src, dst = min(loaded, key=lambda pair: rates[pair])
    if max(rates.values()) < SLOW_LINK * rates[src, dst]:
        return None
    upload_Bps = max(uploads_Bps[src])
    download_Bps = max(rate_Bps for pair, rate_Bps in rates.items() if pair[1] == dst)
    if 1 / SLOW_LINK < upload_Bps / download_Bps < SLOW_LINK:  # only other directions tell which end is slow
        upload_Bps, download_Bps = (
            max(rate_Bps for pair, rate_Bps in rates.items() if end in pair) for end in (src, dst)
        )
    slow, direction = (src, "to") if upload_Bps <= download_Bps else (dst, "from")
    other = members[dst if slow == src else src]["name"]
    reason = (
        f"has the slowest link, {format_rate(rates[src, dst])} {direction} {other}; the exchange takes "
        f"{_seconds(exchange_s)} of a step"
    )
    return {"peer": members[slow]["peer"], "name": members[slow]["name"], "reason": reason}


def _step_s(figures: Mapping[str, float]) -> float:
    """Return the duration of a worker's latest step in seconds; a pipeline reports it as one metric."""
    return max(_sum(figures, names) for names in (BUSY_METRICS + SHARED_METRICS, ("step_s",)))


def _sum(figures: Mapping[str, float], names: Iterable[str]) -> float:
    """Return the sum of these metrics in seconds; 0.0 if it is negative, infinite or NaN."""
    seconds = sum(figures.get(name, 0.0) for name in names)
    return seconds if 0.0 <= seconds < math.inf else 0.0


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
