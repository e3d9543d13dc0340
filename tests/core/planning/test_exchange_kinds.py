"""Each exchange of `config.Exchange` is known wherever kinds of exchanges are told apart."""

from __future__ import annotations

import json
import re
from typing import get_args

import pytest
from click.testing import CliRunner

import gridtrain
from gridtrain.cli.main import cli
from gridtrain.cli.plan import plan
from gridtrain.config import Exchange
from gridtrain.core.planning.exchange_facts import parse_exchange, workload_of
from gridtrain.core.planning.exchange_recommendation import estimate_exchange
from gridtrain.core.planning.local_steps_proposal import recommend_local_steps
from gridtrain.core.planning.network_model import uniform_network
from gridtrain.core.planning.workload import CpuCosts, ExchangeKind, Workload, messages_by_pair
from gridtrain.training.exchangers import neighbours_of
from gridtrain_coordinator.dashboard.topology_graph import build_graph

SIZE = 6
every_kind = pytest.mark.parametrize("kind", list(ExchangeKind))


def exchange_of(kind: ExchangeKind) -> Exchange:
    usual = kind.exchange()
    return usual if usual.topology == kind.topology else kind.exchange(topology=kind.topology)  # type: ignore[call-arg]


def test_every_exchange_has_a_kind_and_is_exported() -> None:
    exchanges = get_args(Exchange)
    assert {kind.exchange for kind in ExchangeKind} == set(exchanges)
    assert {each.__name__ for each in exchanges} <= set(gridtrain.__all__)


@every_kind
def test_the_text_of_a_runs_facts_gives_the_exchange(kind: ExchangeKind) -> None:
    text = exchange_of(kind).describe()
    load = workload_of({"exchange": text, "model": "1000 parameters"})
    assert load is not None and load.kind is kind
    assert parse_exchange(f"LocalSteps(every=8, exchange={text})") == parse_exchange(text)
    assert parse_exchange(f"Sign{text}") is None


@every_kind
def test_the_graph_shows_the_members_that_exchange_messages(kind: ExchangeKind) -> None:
    load = Workload(kind, 1000)
    graph = build_graph({"world_size": SIZE}, load)
    drawn = {pair for a, b, *_ in graph["edges"] for pair in ((a, b), (b, a))}
    neighbours = neighbours_of(exchange_of(kind))
    assert drawn == {(a, b) for a in range(SIZE) for b in neighbours(a, SIZE)}
    assert messages_by_pair(load, SIZE).keys() <= drawn and graph["kind"] == kind.topology


@every_kind
def test_the_proposed_call_makes_the_exchange(kind: ExchangeKind) -> None:
    estimate = estimate_exchange(Workload(kind, 10**7), uniform_network(SIZE, 0.1, 1e5), CpuCosts(), 0.1)
    found = re.search(r"exchange=(\w+\([^)]*\))", recommend_local_steps([estimate], 0.9))
    assert found is not None
    assert Workload.of(eval(found[1], vars(gridtrain)), 1000).kind is kind


@every_kind
def test_gridtrain_plan_predicts_the_exchange(kind: ExchangeKind) -> None:
    arguments = ["plan", "--parameters", "1M", "--workers", "4", "--exchange", kind, "--json"]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    (figures,) = json.loads(result.output)
    assert figures["exchange"] == kind and figures["memory_bytes_per_parameter"]["exchange"] > 0
    assert (figures["density"] < 1.0) is kind.has_density
    assert kind in str(plan.help)
