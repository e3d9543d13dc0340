"""The comparison of the cost model with the collectives, and its chart."""

from __future__ import annotations

import json

import pytest

from gridtrain.core.planning.cost_model import exchange_cost
from gridtrain.core.planning.network_model import uniform_network
from gridtrain.core.planning.workload import CpuCosts, ExchangeKind
from record import RESULTS
from scaling import ALPHA_S, BANDWIDTH_BPS, NAMES, chart, load_of, simulated


@pytest.mark.parametrize("kind", NAMES, ids=str)
def test_the_collectives_agree_with_the_model(kind: ExchangeKind) -> None:
    load, network = load_of(kind), uniform_network(4, ALPHA_S, BANDWIDTH_BPS)
    cost = exchange_cost(load, network, CpuCosts(), vote=False)
    took_s, sent_bytes = simulated(load, 4, CpuCosts())
    assert took_s == pytest.approx(cost.exchange_s, rel=0.1)
    assert sent_bytes == pytest.approx(cost.sent_bytes, rel=0.01)


def test_the_chart_shows_the_result_file() -> None:
    rows = json.loads((RESULTS / "scaling.json").read_text())["results"]
    drawn = (RESULTS.parents[1] / "docs" / "images" / "scaling.svg").read_text()
    assert drawn == chart(rows), "run benchmarks/scaling.py with --out and --picture"
