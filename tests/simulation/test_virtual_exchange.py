"""The planner's simulation of listed messages against the real collectives over the same links."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from gridtrain.core.planning.exchange_simulation import ExchangeSimulation
from gridtrain.core.planning.network_model import LinkModel, NetworkModel
from gridtrain.core.planning.workload import NO_CPU_COSTS, ExchangeKind, Workload, messages_of, receive_work_s
from simulation.virtual_exchange import simulate_exchange

SEEDS = range(15)


def uneven(rng: random.Random, world_size: int) -> NetworkModel:
    """No two links are equal, so that the order of events does not depend on how ties are resolved."""
    links = {
        (a, b): LinkModel(rng.uniform(0.0001, 0.03), rng.uniform(1e6, 1e8))
        for a in range(world_size)
        for b in range(world_size)
    }
    up, down = ([rng.uniform(1e6, 1e8) for _ in range(world_size)] for _ in range(2))
    return NetworkModel(lambda a, b: links[a, b], up, down)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ExchangeKind)
def test_the_simulated_messages_are_those_of_the_collectives(kind: ExchangeKind, seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(2, 12)
    load, network = Workload(kind, rng.randint(10_000, 900_000), density=0.02), uneven(rng, size)
    real = simulate_exchange(load, network)
    messages = messages_of(load, size)
    assert Counter(real.sent) == Counter((message.src, message.dst) for message in messages), f"seed {seed}"
    simulated_s = ExchangeSimulation(messages, load, network, NO_CPU_COSTS).run()
    assert max(simulated_s) == pytest.approx(max(real.complete_s.values()), rel=0.02), (
        f"seed {seed}, P {size}"
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_work_takes_the_same_time_in_both(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([2, 4, 8])
    load, network = Workload(ExchangeKind.GTOPK, 500_000, density=0.05), uneven(rng, size)
    cpu = replace(NO_CPU_COSTS, merge_entry_s=207e-9)
    real = simulate_exchange(load, network, lambda work: receive_work_s(work, load, 1.0, cpu))
    simulated_s = ExchangeSimulation(messages_of(load, size), load, network, cpu).run()
    assert max(simulated_s) == pytest.approx(max(real.complete_s.values()), rel=1e-6), f"seed {seed}"
