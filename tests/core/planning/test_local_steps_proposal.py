"""The proposed number of local steps, and its reason."""

import re
from dataclasses import replace

import pytest

import gridtrain
from gridtrain.core.planning.exchange_recommendation import estimate_exchange
from gridtrain.core.planning.local_steps_proposal import propose_local_steps, recommend_local_steps
from gridtrain.core.planning.network_model import uniform_network
from gridtrain.core.planning.workload import CpuCosts, ExchangeKind, Workload
from gridtrain.errors import ConfigError


@pytest.mark.parametrize(
    "step_s, exchange_s, target_share, every",
    [
        (1.0, 0.0, 0.1, 1),  # nothing to save
        (1.0, 0.1, 0.1, 1),  # 0.1 of 1.1 s
        (1.0, 1.0, 0.1, 9),  # 1 of 10 s, exactly
        (1.0, 1.01, 0.1, 10),
        (0.3, 6.0, 0.2, 80),
        (0.5, 2.0, 0.5, 4),
        (0.025, 100.0, 0.1, 512),  # the largest number
    ],
)
def test_the_fewest_steps_within_the_target_share_are_proposed(step_s, exchange_s, target_share, every):
    proposal = propose_local_steps(step_s, exchange_s, target_share=target_share)
    assert proposal.every == every
    assert proposal.share == pytest.approx(exchange_s / (every * step_s + exchange_s))
    if every < 512:
        assert proposal.share <= target_share + 1e-9
    if 1 < every < 512:
        fewer = every - 1
        assert exchange_s / (fewer * step_s + exchange_s) > target_share


@pytest.mark.parametrize("step_s", [0.3, 1.0])
@pytest.mark.parametrize("blocking_s", [0.0, 0.05, 2.0])
@pytest.mark.parametrize("hidden_s", [0.0, 0.2, 7.0])
@pytest.mark.parametrize("target_share", [0.1, 0.5])
def test_with_overlap_the_fewest_steps_are_proposed_too(step_s, blocking_s, hidden_s, target_share):
    """Against a timeline: blocking work, then steps and the hidden part side by side."""

    def idle_share(every):
        turn_s = blocking_s + max(every * step_s, hidden_s)
        return 1 - every * step_s / turn_s

    proposal = propose_local_steps(
        step_s, blocking_s + hidden_s, target_share=target_share, hidden_s=hidden_s
    )
    fewest = next(every for every in range(1, 512) if idle_share(every) <= target_share + 1e-9)
    assert proposal.every == fewest
    assert proposal.share == pytest.approx(idle_share(fewest), abs=1e-9)


def test_the_proposal_has_a_reason():
    few, none, many = (propose_local_steps(0.5, exchange_s).reason for exchange_s in (3.0, 0.001, 900.0))
    assert few == (
        "a step takes 0.5 s and an exchange takes 3 s; with 54 steps between two exchanges, exchanges take "
        "10.0% of the time, at most 10.0%"
    )
    assert none == (
        "a step takes 0.5 s and an exchange takes 0.001 s; with 1 step between two exchanges, exchanges take "
        "only 0.2% of the time"
    )
    hidden = propose_local_steps(0.5, 3.0, hidden_s=2.9).reason
    assert "an exchange takes 3 s, of which 2.9 s may overlap with computing; with 6 steps" in hidden
    assert "512 steps between two exchanges, the largest number proposed, exchanges still take 77.9%" in many


@pytest.mark.parametrize("kind", ExchangeKind)
def test_a_recommended_expression_makes_that_exchange(kind):
    load = Workload(kind, 10**9, 0.01, "int8")
    network = uniform_network(4, 0.020, 2.5e6)
    text = recommend_local_steps([estimate_exchange(load, network, CpuCosts(), 1.0)], 0.9)
    found = re.search(r"use (LocalSteps\(every=\d+, exchange=.*, overlap=True\)): (\d+)% computing", text)
    assert found is not None, text
    local = eval(found[1], vars(gridtrain))
    made = Workload.of(local.exchange, 10**9)
    assert made == load if kind.is_sparse else made.kind == kind
    assert (int(found[2]) >= 90) == (local.every < 512)


def test_the_share_of_overlapped_steps_is_that_of_their_timeline():
    load = Workload(ExchangeKind.GTOPK, 124_000_000, 0.01)
    alone = estimate_exchange(load, uniform_network(4, 0.020, 2.5e6), CpuCosts(), 1.0, local_steps=8)
    select_s, hidden_s = alone.cost.select_s, alone.cost.exchange_s - alone.cost.select_s
    assert 0 < select_s < hidden_s < 8
    assert alone.step_s == pytest.approx(1 + alone.cost.exchange_s / 8)
    overlapped = replace(alone, overlapped=1.0)
    assert overlapped.step_s == pytest.approx(1 + select_s / 8)
    half = replace(alone, overlapped=0.25 * hidden_s / 8)
    assert half.step_s == pytest.approx(1 + select_s / 8 + 0.75 * hidden_s / 8)
    short = replace(overlapped, local_steps=1)
    assert short.step_s == pytest.approx(short.cost.exchange_s), "the exchange takes longer than the turn"


def test_a_smaller_maximum_is_respected():
    assert gridtrain.propose_local_steps(0.1, 10.0, most=64).every == 64


@pytest.mark.parametrize(
    "arguments, named",
    [
        ({"step_s": 0.0}, "step_s"),
        ({"step_s": float("nan")}, "step_s"),
        ({"exchange_s": -1.0}, "exchange_s"),
        ({"exchange_s": float("inf")}, "exchange_s"),
        ({"target_share": 0.0}, "target_share"),
        ({"target_share": 1.0}, "target_share"),
        ({"most": 0}, "most"),
        ({"hidden_s": -0.1}, "hidden_s"),
        ({"hidden_s": 1.1}, "hidden_s"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, named):
    with pytest.raises(ConfigError, match=named):
        propose_local_steps(**{"step_s": 1.0, "exchange_s": 1.0, **arguments})
