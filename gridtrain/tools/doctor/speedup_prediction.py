"""Doctor's prediction of the run's speed with and without this machine, from the planner's cost model.

    the run's network, exchange, shares, compute times  --> samples per second of its P members
    the same, with this machine's links and speed       --> samples per second of P + 1 members

The gain is the relative difference of the two.

Figures that were not measured are assumed, and the prediction lists the assumptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from gridtrain.core.planning.exchange_recommendation import (
    ExchangeEstimate,
    estimate_best_order,
    estimate_exchange,
)
from gridtrain.core.planning.network_model import LinkModel, NetworkModel
from gridtrain.core.planning.rank_order import DEFAULT_LINK_Bps
from gridtrain.core.planning.workload import CpuCosts, Workload
from gridtrain.status_fields import mapping, rows
from gridtrain.tools.doctor.doctor_probe import LinkMeasurement

MAX_ORDERED = 32
MIN_Bps = 1e3


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The current state of a run.

    Attributes:
        network: the network between members; None if fewer than two are training.
        load: what each step exchanges.
        compute_s: the compute times per step of the members that report one, by rank.
        shares: how many samples of a step each member computes, by rank.
        global_batch_size: the number of samples in a step; None if each worker adds samples of its own.
        flops: the speeds that members report (see `device_flops`), in floating-point operations per second.
    """

    network: NetworkModel | None
    load: Workload
    compute_s: Mapping[int, float]
    shares: Sequence[int]
    global_batch_size: int | None
    flops: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class SpeedupPrediction:
    """The speed of a run with and without this machine.

    Attributes:
        step_s, joined_step_s: the step time now, and with this machine.
        gain: the relative increase in samples per second; 0.2 means 20 % more.
        exchange_s: the time of an exchange with this machine.
        compute_s: the time in which this machine computes as many samples as the median member.
        assumptions: the figures that were not measured, and the values assumed.
        is_bound: whether only an upper bound of this machine's upload or download is known, so that a step
            with it takes at least `joined_step_s`.
    """

    step_s: float
    joined_step_s: float
    gain: float
    exchange_s: float
    compute_s: float
    assumptions: tuple[str, ...]
    is_bound: bool = False


def predict_speedup(
    run: RunStatus, mine: Mapping[int, LinkMeasurement], coordinator: LinkMeasurement, flops: float | None
) -> SpeedupPrediction:
    """Predict the run's speed with this machine.

    Args:
        mine: the links between this machine and members, by rank.
        coordinator: the link between this machine and the coordinator.
        flops: the speed of this machine in floating-point operations per second; None if it is unknown.
    """
    assumed: list[str] = []
    usual_s = median(run.compute_s.values())
    compute_s = usual_s
    if flops and run.flops:
        compute_s = usual_s * median(run.flops) / flops
    else:
        assumed.append("this machine computes as fast as the median member, because no speeds are known")
    links = coordinator, *mine.values()
    if not any(each.up_Bps or each.down_Bps for each in links):
        assumed.append(
            f"this machine's link has {DEFAULT_LINK_Bps * 8 / 1e6:.0f} Mbit/s, because no rate was measured"
        )
    elif not any(each.up_Bps for each in mine.values()):
        assumed.append("the links to the members are like the link to the coordinator")
    shares, more = _shares(run, usual_s, compute_s)
    now_s, with_compute_s = max(run.compute_s.values()), _slowest(run, shares, usual_s, compute_s)
    size = len(run.shares)
    before = _look(run.load, run.network, now_s) if run.network is not None else None
    after = _look(run.load, _joined(run.network, size, mine, coordinator), with_compute_s)
    step_s = before.step_s if before is not None else now_s
    samples, with_samples = sum(run.shares), sum(run.shares) + more
    gain = (with_samples / after.step_s) / (samples / step_s) - 1
    is_bound = any(is_bound for _, is_bound in (_upload(links), _download(links)))
    exchange_s = after.cost.exchange_s
    return SpeedupPrediction(step_s, after.step_s, gain, exchange_s, compute_s, tuple(assumed), is_bound)


def _shares(run: RunStatus, usual_s: float, compute_s: float) -> tuple[list[float], int]:
    """Return each worker's samples per step, this machine's last, and how many samples this machine adds to a
    step."""
    if run.global_batch_size is None:
        mine = round(median(run.shares))
        return [*map(float, run.shares), float(mine)], mine
    rates = [share / usual_s for share in run.shares]
    rates.append(median(run.shares) / compute_s)
    return [sum(run.shares) * rate / sum(rates) for rate in rates], 0


def _slowest(run: RunStatus, shares: Sequence[float], usual_s: float, compute_s: float) -> float:
    """Return the slowest worker's compute time per step.

    Each worker's time is assumed to be proportional to its samples.

    Args:
        shares: each worker's samples per step with this machine, this machine's last.
        usual_s: the compute time of members that have not reported theirs.
        compute_s: the time in which this machine computes as many samples as the median member.
    """
    times = [
        run.compute_s.get(rank, usual_s) * shares[rank] / max(1, share)
        for rank, share in enumerate(run.shares)
    ]
    mine = compute_s * shares[-1] / max(1.0, median(run.shares))
    return max(*times, mine)


def _look(load: Workload, network: NetworkModel, compute_s: float) -> ExchangeEstimate:
    look = estimate_best_order if 2 < network.size <= MAX_ORDERED else estimate_exchange
    return look(load, network, CpuCosts(), compute_s)


def _joined(
    network: NetworkModel | None, size: int, mine: Mapping[int, LinkMeasurement], coordinator: LinkMeasurement
) -> NetworkModel:
    """Return the members' network with this machine as the last rank."""
    links = coordinator, *mine.values()
    (up_Bps, _), (down_Bps, _) = _upload(links), _download(links)
    trips_s = [each.rtt_s for each in (*mine.values(), coordinator) if each.rtt_s]
    usual = median(trips_s) if trips_s else 0.05

    def link(src: int, dst: int) -> LinkModel:
        if network is not None and max(src, dst) < size:
            return network.link(src, dst)
        if max(src, dst) < size:  # the run has one member, so there is no link to look up
            return LinkModel(usual / 2)
        there = mine.get(min(src, dst), LinkMeasurement())
        rate_Bps = there.up_Bps if src == size else there.down_Bps
        alpha_s = (there.rtt_s if there.rtt_s is not None else usual) / 2
        return LinkModel(alpha_s, max(MIN_Bps, rate_Bps)) if rate_Bps else LinkModel(alpha_s)

    ups = list(network.up_Bps) if network is not None else [down_Bps] * size
    downs = list(network.down_Bps) if network is not None else [up_Bps] * size
    return NetworkModel(
        link, [*ups, up_Bps], [*downs, down_Bps], network.shared_Bps if network is not None else {}
    )


def _upload(links: Iterable[LinkMeasurement]) -> tuple[float, bool]:
    return _best([(each.up_Bps, each.is_up_bound) for each in links])


def _download(links: Iterable[LinkMeasurement]) -> tuple[float, bool]:
    return _best([(each.down_Bps, each.is_down_bound) for each in links])


def _best(rates: Sequence[tuple[float | None, bool]]) -> tuple[float, bool]:
    """Return the rate of the fastest link, and whether it is an upper bound.

    If no rate was measured, it is the lowest bound; if there is no bound, `DEFAULT_LINK_Bps`.

    Args:
        rates: (rate or None, whether it is an upper bound) for each link.
    """
    measured = [rate for rate, is_bound in rates if rate and not is_bound]
    bounds = [rate for rate, is_bound in rates if rate and is_bound]
    best_Bps = max(measured) if measured else min(bounds, default=DEFAULT_LINK_Bps)
    return max(MIN_Bps, best_Bps), not measured and bool(bounds)


def member_figures(picture: Mapping[str, Any], figure: str) -> dict[int, float]:
    """Return the values of `figure` of all training members that report a plausible value, by rank."""
    found: dict[int, float] = {}
    for member in rows(picture, "members"):
        rank, value = member.get("rank"), mapping(member.get("figures")).get(figure)
        if isinstance(rank, int) and isinstance(value, int | float) and 1e-9 < value < 1e18:
            found[rank] = float(value)
    return found


def member_shares(picture: Mapping[str, Any]) -> list[int]:
    ranked = [member for member in rows(picture, "members") if isinstance(member.get("rank"), int)]
    return [max(0, int(x.get("share") or 0)) for x in sorted(ranked, key=lambda x: x["rank"])]
