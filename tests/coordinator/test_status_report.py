"""Rates from counters, and status without addresses."""

from __future__ import annotations

from typing import Any

import pytest

from gridtrain.network.transport.interface import VersionMismatch
from gridtrain_coordinator import status_report
from gridtrain_coordinator.run.slow_member import find_slow_member
from gridtrain_coordinator.status_report import RateMeter, RefusedVersions, build_status, redact_addresses


def core_status(step: int, phase: str = "training", **sent_bytes: float) -> dict[str, Any]:
    members = [{"peer": peer, "figures": {"sent_bytes": sent}} for peer, sent in sent_bytes.items()]
    return {"step": step, "phase": phase, "members": members}


def observed(*rows: tuple[float, dict[str, Any]]) -> RateMeter:
    meter = RateMeter()
    for at_s, status in rows:
        meter.observe(status, at_s)
    return meter


def test_rates_over_the_window() -> None:
    meter = observed((0, core_status(10, a=1000)), (1, core_status(12, a=3000)), (2, core_status(14, a=5000)))
    assert (meter.steps_per_s(), meter.figure_per_s("a", "sent_bytes")) == (2.0, 2000.0)


def test_old_samples_are_forgotten() -> None:
    meter = observed((0, core_status(0, a=1)), (5, core_status(50, a=2)), (12, core_status(50, a=2)))
    assert meter.steps_per_s() == 0.0


def test_steps_count_from_the_resumption() -> None:
    """A coordinator that restarted, or whose workers have checkpoints, is at step 0 until they train."""
    waiting, resumed = core_status(0, "waiting", a=1), core_status(2000, a=1)
    assert observed((0, waiting), (1, resumed)).steps_per_s() is None
    assert observed((0, waiting), (1, resumed), (2, core_status(2003, a=2))).steps_per_s() == 3.0
    assert observed((0, resumed), (1, resumed), (2, core_status(2001, "paused", a=2))).steps_per_s() is None


def test_unknown_rates_are_none() -> None:
    meter = observed((0, core_status(10, a=1000)))
    assert meter.steps_per_s() is None
    assert meter.figure_per_s("a", "sent_bytes") is None
    assert meter.figure_per_s("nobody", "sent_bytes") is None


def test_a_restarted_worker_has_no_negative_rate() -> None:
    meter = observed((0, core_status(100, a=9000)), (1, core_status(0, a=10)))
    assert (meter.steps_per_s(), meter.figure_per_s("a", "sent_bytes")) == (None, None)


def test_refusals_of_other_versions_are_forgotten_after_a_day_and_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Anybody with an invitation can cause them."""
    monkeypatch.setattr(status_report, "MAX_REFUSED", 5)
    refused = RefusedVersions()
    for number in range(9):
        event = VersionMismatch(None, "", b"k" * 32, f"10.0.0.{number}", number, "gridtrain 0.0")
        refused.record(event, float(number))
    assert len(refused._latest) == 5
    assert [row["version"] for row in refused.rows(9.0)] == [4, 5, 6]
    assert [row["version"] for row in refused.rows(status_report.REFUSED_S + 7.0)] == [8]


def test_addresses_and_nothing_else_are_removed() -> None:
    dialled_back = {
        "event": "called_back",
        "name": "anna",
        "reachable": True,
        "address": "tcp://10.0.0.6:7001",
    }
    status = {
        "members": [{"name": "anna", "address": "tcp://10.0.0.6:7001", "reach": "direct"}],
        "events": [dialled_back, {"event": "no_route", "tried": ["tcp://10.0.0.6:7001"], "name": "anna"}],
    }
    redact_addresses(status)
    assert status == {
        "members": [{"name": "anna", "address": "", "reach": "direct"}],
        "events": [
            {"event": "called_back", "name": "anna", "reachable": True},
            {"event": "no_route", "name": "anna"},
        ],
    }


ENDLESS: dict[str, Any] = {"total_steps": None, "samples": None, "total_samples": None, "epochs": None}
NO_LINKS = {"stages": 1, "global_batch_size": 64, "links": [], **ENDLESS}


def figures(computing_s: float, communicating_s: float, waiting_s: float = 0.0) -> dict[str, float]:
    return {
        "computing_s": computing_s,
        "selecting_s": 0.125,
        "communicating_s": communicating_s,
        "waiting_s": waiting_s,
        "applying_s": 0.125,
    }


@pytest.mark.parametrize(
    ("reported", "shown"),
    [
        ([figures(1.0, 2.5), figures(3.0, 0.5)], [figures(1.0, 0.5, 2.0), figures(3.0, 0.5)]),
        ([figures(1.0, 1.5, 1.0), figures(3.0, 0.5)], [figures(1.0, 0.5, 2.0), figures(3.0, 0.5)]),
        ([figures(1.0, 0.5), figures(30.0, 0.5)], [figures(1.0, 0.0, 0.5), figures(30.0, 0.5)]),
        ([figures(1.0, 0.5), {"computing_s": float("nan")}], [figures(1.0, 0.5), None]),
        ([figures(1.0, 0.5), {}], [figures(1.0, 0.5), {}]),
    ],
    ids=["slow", "waited before", "of another step", "not a number", "no figures"],
)
def test_time_in_which_the_slowest_member_is_busy_is_waiting(
    reported: list[dict[str, float]], shown: list[dict[str, float] | None]
) -> None:
    """A worker outside the group, whatever it reports, delays no one."""
    members = [
        {"peer": str(n), "name": str(n), "rank": n, "figures": each} for n, each in enumerate(reported)
    ]
    members.append({"peer": "x", "name": "x", "rank": None, "figures": figures(99.0, 0.0)})
    taken = {"members": members, "step": 7, "phase": "training", **NO_LINKS}
    status = build_status(taken, RateMeter(), software="", address="", now_s=0.0, uptime_s=0.0)
    for member, expected in zip(status["members"], shown, strict=False):
        assert expected is None or member["figures"] == expected
    assert [member["figures"] for member in members[:-1]] == reported, "the report itself is unchanged"


@pytest.mark.parametrize(
    ("phase", "reported", "said"),
    [
        (
            "training",
            [figures(0.1, 2.9)] * 2 + [figures(3.0, 0.0)],
            {"peer": "2", "name": "w2", "reason": "is busy for 3.25 s per step; the median is 350 ms"},
        ),
        (
            "training",
            [{"computing_s": 0.07, "step_s": 1.0}] * 2 + [{"computing_s": 0.95, "step_s": 1.0}],
            {"peer": "2", "name": "w2", "reason": "is busy for 950 ms per step; the median is 70 ms"},
        ),
        ("training", [figures(0.1, 0.1)] * 2 + [figures(3.0, 0.0)], None),
        ("training", [figures(3.0, 0.1)] * 3, None),
        ("training", [figures(1.0, 0.1), figures(1.1, 0.1), figures(1.2, 0.1)], None),
        ("training", [{"computing_s": 0.001}, {"computing_s": 0.003}], None),
        ("training", [figures(0.1, 2.9), figures(0.1, 2.8), figures(0.3, 2.7)], None),
        ("training", [figures(3.0, 0.1), {}], None),
        ("training", [figures(3.0, 0.1)], None),
        ("frozen", [figures(0.1, 2.9)] * 2 + [figures(3.0, 0.0)], None),
    ],
    ids=[
        "slow",
        "slow stage",
        "the steps do not wait for it",
        "alike",
        "similar",
        "noise",
        "a small part of the step",
        "not reported yet",
        "alone",
        "not training",
    ],
)
def test_the_member_for_which_the_others_wait_is_named(
    phase: str, reported: list[dict[str, float]], said: dict[str, str] | None
) -> None:
    members = [
        {"peer": str(n), "name": f"w{n}", "rank": n, "figures": each} for n, each in enumerate(reported)
    ]
    taken = {"members": members, "step": 7, "phase": phase, **NO_LINKS}
    status = build_status(taken, RateMeter(), software="", address="", now_s=0.0, uptime_s=0.0)
    assert status["waited_for"] == said


FAST_Bps, SLOW_Bps = 12.5e6, 0.6e6


@pytest.mark.parametrize(
    ("slow_links", "said"),
    [
        ({(0, 1), (1, 2)}, ("w1", "from w0")),
        ({(1, 2)}, ("w1", "to w2")),
        ({(0, 1), (1, 2), (2, 0)}, None),
        (set(), None),
    ],
    ids=["slow line", "slow upload", "all slow", "all fast"],
)
@pytest.mark.parametrize("communicating_s", [2.75, 0.25])
def test_the_member_with_the_slowest_link_is_named_if_a_step_is_mostly_exchange(
    slow_links: set[tuple[int, int]], said: tuple[str, str] | None, communicating_s: float
) -> None:
    """w0 computes for longest, but not for a noticeable part of the step."""
    reported = [figures(0.3, communicating_s), *[figures(0.25, communicating_s)] * 2]
    members = [
        {"peer": str(n), "name": f"w{n}", "rank": n, "figures": each} for n, each in enumerate(reported)
    ]
    ring = [(0, 1), (1, 2), (2, 0)]
    links = [[*pair, None, SLOW_Bps if pair in slow_links else FAST_Bps] for pair in ring]
    links += [[1, 0, 0.01, None], [1, 7, 0.01, 1.0]]  # no rate; no member with figures
    taken = {"members": members, "step": 7, "phase": "training", **NO_LINKS, "links": links}
    status = build_status(taken, RateMeter(), software="", address="", now_s=0.0, uptime_s=0.0)
    if said is None or communicating_s < 1.0:
        assert status["waited_for"] is None
    else:
        name, direction = said
        reason = f"has the slowest link, 4.8 Mbit/s {direction}; the exchange takes 2.75 s of a step"
        assert status["waited_for"] == {"peer": name[1:], "name": name, "reason": reason}


@pytest.mark.parametrize(("sent_bytes", "is_named"), [(50e3, False), (70e3, True)])
def test_a_link_over_which_little_is_sent_is_not_named(sent_bytes: float, is_named: bool) -> None:
    """Its rate may have been measured long ago, or a member has no processor time."""
    members = [
        {
            "peer": str(n),
            "name": f"w{n}",
            "rank": n,
            "figures": figures(0.25, 2.75) | {"exchanged_bytes": 0.0},
        }
        for n in range(2)
    ]
    links = [[0, 1, None, SLOW_Bps], [1, 0, None, FAST_Bps]]
    taken = {"members": members, "step": 7, "phase": "training", **NO_LINKS, "links": links}
    sent = [each | {"figures": {**each["figures"], "exchanged_bytes": sent_bytes}} for each in members]
    rates = observed((0, taken), (1, {**taken, "members": sent}))
    status = build_status(taken, rates, software="", address="", now_s=0.0, uptime_s=0.0)
    assert (status["waited_for"] is not None) == is_named


def test_a_link_over_which_little_is_sent_does_not_hide_the_next_slowest_one() -> None:
    members = [{"peer": n, "name": f"w{n}", "rank": n, "figures": figures(0.25, 2.75)} for n in range(3)]
    links = [(0, 1, None, SLOW_Bps), (1, 2, None, FAST_Bps), (2, 0, None, SLOW_Bps / 2)]
    named = find_slow_member(members, links, sent_Bps=lambda peer: 0.0 if peer == 2 else SLOW_Bps)
    assert named is not None and "4.8 Mbit/s" in named["reason"] and named["name"] in ("w0", "w1")


@pytest.mark.parametrize(("other_Bps", "named"), [(SLOW_Bps, None), (FAST_Bps, "w0"), (None, "w0")])
def test_rates_whose_sum_is_less_than_the_sender_sends_are_out_of_date(
    other_Bps: float | None, named: str | None
) -> None:
    """w0 sends twice the rate of one link; that of its other link may be unknown."""
    members = [{"peer": n, "name": f"w{n}", "rank": n, "figures": figures(0.25, 2.75)} for n in range(3)]
    links = [(0, 1, None, SLOW_Bps), (0, 2, None, other_Bps)]
    links += [(a, b, None, FAST_Bps) for a in (1, 2) for b in range(3) if a != b]
    found = find_slow_member(members, links, sent_Bps=lambda peer: 2.1 * SLOW_Bps)
    assert (found and found["name"]) == named


@pytest.mark.parametrize(
    ("slow", "fastest", "named"),
    [({(0, 1), (0, 2)}, (2, 0), ("w0", "to w1")), ({(1, 0), (2, 0)}, (0, 2), ("w0", "from w1"))],
    ids=["upload", "download"],
)
def test_the_slow_end_of_a_link_is_named_by_its_direction(
    slow: set[tuple[int, int]], fastest: tuple[int, int], named: tuple[str, str]
) -> None:
    """Its other direction is the fastest of all."""
    members = [{"peer": n, "name": f"w{n}", "rank": n, "figures": figures(0.25, 2.75)} for n in range(3)]
    rates = {(a, b): FAST_Bps for a in range(3) for b in range(3) if a != b}
    rates |= {**dict.fromkeys(slow, SLOW_Bps), fastest: 2 * FAST_Bps}
    found = find_slow_member(members, [(*pair, None, rate_Bps) for pair, rate_Bps in rates.items()])
    assert found is not None
    assert (found["name"], found["reason"].split("Mbit/s ")[1].split(";")[0]) == named


@pytest.mark.parametrize("false_s", [1.2e308, -10.0])
def test_two_members_with_impossible_durations_do_not_stop_the_coordinator(false_s: float) -> None:
    """The others have not reported a step yet."""
    reported: list[dict[str, float]] = [*[{"computing_s": false_s, "step_s": false_s}] * 2, {}]
    members = [
        {"peer": str(n), "name": f"w{n}", "rank": n, "figures": each} for n, each in enumerate(reported)
    ]
    assert find_slow_member(members) is None


@pytest.mark.parametrize(
    ("stages", "global_batch_size", "is_hinted"), [(1, None, True), (1, 64, False), (2, None, False)]
)
def test_a_global_batch_size_is_suggested_where_it_is_not_set(
    stages: int, global_batch_size: int | None, is_hinted: bool
) -> None:
    reported = [figures(0.1, 2.9), figures(0.1, 2.9), figures(3.0, 0.0)]
    members = [
        {"peer": str(n), "name": f"w{n}", "rank": n, "figures": each} for n, each in enumerate(reported)
    ]
    settings = {**NO_LINKS, "stages": stages, "global_batch_size": global_batch_size}
    taken = {"members": members, "step": 7, "phase": "training", **settings}
    status = build_status(taken, RateMeter(), software="", address="", now_s=0.0, uptime_s=0.0)
    hint = "; if this persists, global_batch_size gives it fewer samples"
    assert status["waited_for"]["reason"].endswith("the median is 350 ms" + hint * is_hinted)


@pytest.mark.parametrize(
    ("length", "remaining_s"),
    [
        ({"total_steps": 100}, 160.0),
        ({"total_steps": 19}, 0.0),
        ({"total_samples": 1000, "epochs": 20, "samples": 200}, 224.0),
        ({"total_samples": 1000, "epochs": 20}, None),
        ({}, None),
    ],
    ids=["steps", "an old total", "16 passes of 7 steps", "samples unknown", "length unknown"],
)
def test_the_remaining_time_is_predicted_from_the_steps_of_five_minutes(
    length: dict[str, int], remaining_s: float | None
) -> None:
    """Here the latest step was more than ten seconds ago."""
    members = [{"peer": "a", "name": "a", "rank": 0, "share": 8, "figures": {}}]
    taken = {**core_status(20), "members": members, **NO_LINKS, **length}
    rates = observed((0, {**taken, "step": 0}), (20, taken), (35, taken), (40, taken))
    assert rates.steps_per_s() == 0.0
    status = build_status(taken, rates, software="", address="", now_s=0.0, uptime_s=0.0)
    assert status["remaining_s"] == remaining_s


def test_the_loss_is_the_mean_of_the_members_losses_weighted_by_their_shares() -> None:
    """A worker that is no member yet has no part in it, and members may report none."""
    reported = [(0, 30, 2.0), (1, 10, 4.0), (2, 10, None), (3, 10, float("nan")), (None, 0, 99.0)]
    members = [
        {
            "peer": str(at),
            "name": "w",
            "rank": rank,
            "share": share,
            "figures": {"loss": loss} if loss else {},
        }
        for at, (rank, share, loss) in enumerate(reported)
    ]
    taken = {"members": members, "step": 7, "phase": "training", **NO_LINKS}
    status = build_status(taken, RateMeter(), software="", address="", now_s=0.0, uptime_s=0.0)
    assert status["loss"] == 2.5
    taken["members"] = members[2:]
    status = build_status(taken, RateMeter(), software="", address="", now_s=0.0, uptime_s=0.0)
    assert status["loss"] is None
