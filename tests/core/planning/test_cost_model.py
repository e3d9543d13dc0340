"""The cost model: simulations against textbook formulas on even links, and against bounds on any links."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from gridtrain.config import DENSE_VALUES, VALUES
from gridtrain.core.planning import cost_model
from gridtrain.core.planning.network_model import LinkModel, NetworkModel, uniform_network
from gridtrain.core.planning.workload import (
    HEADER_BYTES,
    NO_CPU_COSTS,
    CpuCosts,
    ExchangeKind,
    Workload,
    count_messages,
    end_work_s,
    messages_by_pair,
    messages_of,
    slice_count,
    sparse_payload_bytes,
)
from gridtrain.errors import ConfigError
from gridtrain.network.wire.dense_payload import slice_bytes
from gridtrain.network.wire.sparse_payload import encoded_bytes
from gridtrain.network.wire.value_encoding import VALUE_KINDS, ValueKind
from gridtrain.runtime.buffers.rounded_buffers import make_dense_buffer

RATE_Bps = 12.5e6
SEEDS = range(20)


def exchange_s(load: Workload, network: NetworkModel, cpu: CpuCosts = NO_CPU_COSTS) -> float:
    return cost_model.exchange_cost(load, network, cpu, vote=False).exchange_s


def closed_form_s(load: Workload, world_size: int, alpha_s: float, bandwidth_Bps: float) -> float:
    """Textbook formulas for even links, without work, headers and vote.

    Ring: Patarasuk and Yuan (2009), with slices, so that the next slice hides alpha.  gTop-k and TopK: Shi et
    al., arXiv 1901.04359, section III; a butterfly needs half of the hops of a tree.
    """
    size, unit_s = world_size, load.unit_bytes / bandwidth_Bps
    if size == 1:
        return 0.0
    log2 = size.bit_length() - 1
    exact = size == 1 << log2
    match load.kind.topology:
        case "ring":
            rounds, slices = 2 * (size - 1), slice_count(load, size)
            slice_s = unit_s / (size * slices)
            flowing_s = rounds * slices * slice_s + alpha_s
            return max(flowing_s, rounds * (alpha_s + slice_s) + (slices - 1) * slice_s)
        case "direct":
            half_s = (size - 1) / size * unit_s
            return max(2 * half_s + alpha_s, 2 * alpha_s + half_s * (1 + 1 / slice_count(load, size)))
        case "all-gather":
            return (log2 + (not exact)) * alpha_s + (size - 1) * unit_s
        case "butterfly":
            return (log2 + 2 * (not exact)) * (alpha_s + unit_s)
        case "tree":
            return 2 * (log2 + (not exact)) * (alpha_s + unit_s)
        case "star":
            return 2 * alpha_s + (size - 1) * unit_s * (1 + 1 / slice_count(load, size))


# -- on even links -------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8, 16, 24])
@pytest.mark.parametrize("alpha_s", [0.0, 0.0004, 0.020])
@pytest.mark.parametrize("kind", list(ExchangeKind))
def test_the_simulation_gives_the_textbooks_formula(
    kind: ExchangeKind, alpha_s: float, world_size: int
) -> None:
    density = 0.3 if kind is ExchangeKind.GTOPK_DIRECT else 0.001  # its parts are short beside their headers
    load = Workload(kind, 2_000_000, density)
    simulated_s = exchange_s(load, uniform_network(world_size, alpha_s, RATE_Bps))
    formula_s = closed_form_s(load, world_size, alpha_s, RATE_Bps)
    uneven_size = world_size & (world_size - 1) != 0
    if kind is ExchangeKind.TOPK:  # payloads travel one by one, so a hop's alpha hides behind others' bytes
        wire_s = (world_size - 1) * load.unit_bytes / RATE_Bps
        assert wire_s + alpha_s <= simulated_s <= 1.02 * formula_s
    elif kind is ExchangeKind.TREE and uneven_size:  # ranks without a partner save a hop of bytes or so
        assert 0.49 * formula_s <= simulated_s <= 1.02 * formula_s
    elif kind is ExchangeKind.GTOPK and uneven_size:
        # Folds share downloads with first swaps: up to two payloads more than in the formula; a payload
        # swapped early is present when the fold is merged: one alpha less.
        unit_s = load.unit_bytes / RATE_Bps
        assert 0.98 * (formula_s - alpha_s - unit_s) <= simulated_s <= 1.02 * (formula_s + 2 * unit_s)
    else:
        assert simulated_s == pytest.approx(formula_s, rel=0.02)


@pytest.mark.parametrize("world_size", [33, 64, 100])
def test_hops_of_a_large_all_gather_travel_as_one(world_size: int) -> None:
    load = Workload(ExchangeKind.TOPK, 2_000_000)
    formula_s = closed_form_s(load, world_size, 0.001, RATE_Bps)
    assert exchange_s(load, uniform_network(world_size, 0.001, RATE_Bps)) == pytest.approx(
        formula_s, rel=0.03
    )


@pytest.mark.parametrize("alpha_s", [0.0, 0.010])
@pytest.mark.parametrize(
    ("load", "world_size", "within"),
    [
        (Workload(ExchangeKind.DENSE, 2_000_000), 12, 0.02),
        (Workload(ExchangeKind.DIRECT, 8_000_000), 24, 0.05),
        (Workload(ExchangeKind.STAR, 2_000_000), 12, 0.03),
    ],
    ids=["ring", "direct", "star"],
)
def test_an_estimate_for_a_large_group_agrees_with_the_simulation(
    load: Workload, world_size: int, within: float, alpha_s: float
) -> None:
    network = uniform_network(world_size, alpha_s, RATE_Bps)
    simulated = cost_model.exchange_cost(load, network, CpuCosts())
    estimated = cost_model.exchange_cost(load, network, CpuCosts(), max_messages=10)
    assert estimated.exchange_s == pytest.approx(simulated.exchange_s, rel=within)
    assert estimated.sent_bytes == pytest.approx(simulated.sent_bytes, rel=0.001)
    assert estimated.cpu_s == pytest.approx(simulated.cpu_s, rel=0.05)


def test_a_direct_exchange_of_at_most_the_largest_number_of_messages_is_simulated() -> None:
    load, network = Workload(ExchangeKind.DIRECT, 2_000_000), uniform_network(17, 0.01, RATE_Bps)
    at_most, fewer, any_number = (
        cost_model.exchange_cost(load, network, CpuCosts(), max_messages=n).exchange_s
        for n in (2 * 16 * 17, 2 * 16 * 17 - 1, 10**6)
    )
    assert at_most != fewer and at_most == pytest.approx(any_number, rel=0.05)


# -- on any links --------------------------------------------------------------------------------


def random_network(rng: random.Random, world_size: int) -> NetworkModel:
    links = {
        (src, dst): LinkModel(rng.uniform(0, 0.02), rng.choice([1e6, 1e7, float("inf")]))
        for src in range(world_size)
        for dst in range(world_size)
    }
    up, down = ([rng.uniform(1e6, 1e8) for _ in range(world_size)] for _ in range(2))
    return NetworkModel(lambda src, dst: links[src, dst], up, down)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", list(ExchangeKind))
def test_no_exchange_is_faster_than_its_links(kind: ExchangeKind, seed: int) -> None:
    rng = random.Random(seed)
    network = random_network(rng, rng.randint(2, 9))
    merging = kind in (ExchangeKind.GTOPK, ExchangeKind.GTOPK_DIRECT, ExchangeKind.TREE)
    values = rng.choice([name for name in VALUES if not (merging and name == "int2")])
    load = Workload(kind, 500_000, density=rng.choice([0.001, 0.01, 0.3]), values=values)
    found = cost_model.exchange_cost(load, network, NO_CPU_COSTS, vote=False)
    assert found.exchange_s >= found.total_bytes / sum(network.up_Bps)
    assert found.exchange_s >= found.total_bytes / sum(network.down_Bps)
    assert found.sent_bytes >= load.unit_bytes / network.size, f"seed {seed}"


@pytest.mark.parametrize("kind", list(ExchangeKind))
def test_the_cost_grows_with_size_and_latency_and_falls_with_rate(kind: ExchangeKind) -> None:
    def s(
        parameters: int = 500_000, alpha_s: float = 0.002, rate: float = 1e7, density: float = 0.01
    ) -> float:
        return exchange_s(Workload(kind, parameters, density), uniform_network(6, alpha_s, rate), CpuCosts())

    assert s() < s(parameters=5_000_000)
    assert s() < s(rate=5e6)
    assert s() < s(alpha_s=0.050)
    assert (s() < s(density=0.1)) is kind.has_density


def test_encryption_and_work_cost_time() -> None:
    network = uniform_network(4, 0.001, 1e10)
    plain, encrypted = (
        Workload(ExchangeKind.DENSE, 5_000_000, encrypted=is_encrypted) for is_encrypted in (False, True)
    )
    cpu = CpuCosts(message_s=90e-6)  # with many slices the handling of messages would hide the encryption
    assert exchange_s(plain, network) < exchange_s(plain, network, cpu) < exchange_s(encrypted, network, cpu)


def test_the_root_of_a_star_receives_and_sends_as_fast_as_its_cpu_moves_bytes() -> None:
    load = Workload(ExchangeKind.STAR, 1000, encrypted=False)  # one slice: it sends once it has received all
    found_s = exchange_s(load, uniform_network(5, 0.0, 1e12), replace(NO_CPU_COSTS, byte_s=1e-6))
    assert found_s == pytest.approx(2 * 4 * (load.unit_bytes + HEADER_BYTES) * 1e-6, rel=1e-6)


def test_members_that_share_a_link_share_its_rate() -> None:
    thin = LinkModel(0.001, shared_links=("between",))
    near = LinkModel(0.001)

    def link(src: int, dst: int) -> LinkModel:
        return near if src // 2 == dst // 2 else thin

    load = Workload(ExchangeKind.GTOPK, 1_000_000, 0.01)
    separate = NetworkModel(link, (1e8,) * 4, (1e8,) * 4, {"between": 1e8})
    together = NetworkModel(link, (1e8,) * 4, (1e8,) * 4, {"between": 1e6})
    # In the second hop both pairs use the shared link both ways: four payloads in sequence.
    assert exchange_s(load, together) == pytest.approx(4 * load.unit_bytes / 1e6, rel=0.05)
    assert exchange_s(load, separate) < 0.1 * exchange_s(load, together)


@pytest.mark.parametrize("kind", [ExchangeKind.TOPK, ExchangeKind.DIRECT])
def test_a_message_that_waits_for_its_senders_upload_delays_nobody_on_a_shared_link(
    kind: ExchangeKind,
) -> None:
    load, rates = Workload(kind, 1_000_000, 0.01), ((1e6,) * 4, (1e6,) * 4)
    through = NetworkModel(lambda src, dst: LinkModel(0.01, shared_links=("wide",)), *rates, {"wide": 1e9})
    apart = NetworkModel(lambda src, dst: LinkModel(0.01), *rates)
    assert exchange_s(load, through) == pytest.approx(exchange_s(load, apart), rel=0.01)


# -- sizes ---------------------------------------------------------------------------------------


def test_bytes_are_those_that_the_schedule_sends() -> None:
    load = Workload(ExchangeKind.DENSE, 1_000_000)
    found = cost_model.exchange_cost(load, uniform_network(4, 0.001, 1e8), NO_CPU_COSTS)
    messages = 2 * 3 * slice_count(load, 4)
    assert found.sent_bytes == pytest.approx(2 * 3 / 4 * 4e6 + messages * HEADER_BYTES)
    assert found.total_bytes == pytest.approx(4 * found.sent_bytes)
    star = cost_model.exchange_cost(
        Workload(ExchangeKind.STAR, 1_000_000), uniform_network(4, 0.001, 1e8), NO_CPU_COSTS
    )
    assert star.received_bytes == pytest.approx(3 * 4e6, rel=0.01)


def test_the_vote_is_a_round_trip_to_the_root() -> None:
    load, network = Workload(ExchangeKind.GTOPK, 100_000), uniform_network(4, 0.010, 1e9)
    with_vote, without = (
        cost_model.exchange_cost(load, network, NO_CPU_COSTS),
        cost_model.exchange_cost(load, network, NO_CPU_COSTS, vote=False),
    )
    assert with_vote.exchange_s - without.exchange_s == pytest.approx(0.020)


def test_an_impossible_workload_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"density is 1\.5"):
        Workload(ExchangeKind.TOPK, 10, density=1.5)
    with pytest.raises(ConfigError, match="slowest rate is 0 bytes"):
        uniform_network(2, 0.0, 0.0)


@pytest.mark.parametrize("kind", ExchangeKind)
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8, 31, 32, 33, 40, 64, 100])
def test_messages_are_counted_as_they_are_made(kind: ExchangeKind, size: int) -> None:
    load = Workload(kind, 10_000_000)
    for most in (1, 400, 30_000):
        assert count_messages(load, size, most) == len(messages_of(load, size, most)), most
    crossed = Counter((message.src, message.dst) for message in messages_of(load, size, 1))
    assert messages_by_pair(load, size) == crossed


@pytest.mark.parametrize("values", DENSE_VALUES)
@pytest.mark.parametrize("kind", [ExchangeKind.DENSE, ExchangeKind.DIRECT, ExchangeKind.STAR])
def test_a_rounded_dense_exchange_sends_the_bytes_that_its_buffers_make(
    kind: ExchangeKind, values: str
) -> None:
    n, size, topology = 3_000_000, 4, {"dense": "ring", "dense-direct": "direct"}.get(kind, str(kind))
    buffer = make_dense_buffer(topology, np.zeros(n, np.float32), size, VALUE_KINDS[values])
    load = Workload(kind, n, dense_values=values)
    assert slice_count(load, size) == buffer.slices
    network = uniform_network(size, 0.001, 1e7)
    cost = cost_model.exchange_cost(load, network, NO_CPU_COSTS, vote=False)
    others, senders = size - 1, 1 if kind is ExchangeKind.STAR else size
    headers = HEADER_BYTES * 2 * others * senders * slice_count(load, size)
    assert cost.total_bytes - headers == pytest.approx(2 * others * slice_bytes(n, VALUE_KINDS[values]))
    assert cost.exchange_s < cost_model.exchange_cost(load, network, CpuCosts(), vote=False).exchange_s


def test_rounding_pays_on_slow_links_only() -> None:
    def exchange_ratio(rate_Bps: float) -> float:
        loads = [Workload(ExchangeKind.DENSE, 25_600_000, dense_values=values) for values in ("int8", "fp32")]
        int8_s, fp32_s = (exchange_s(x, uniform_network(4, 1e-3, rate_Bps), CpuCosts()) for x in loads)
        return int8_s / fp32_s

    assert exchange_ratio(12.5e6) < 0.27 and exchange_ratio(12.5e9) > 0.9


@pytest.mark.parametrize("values", [kind.name.lower() for kind in ValueKind])
@pytest.mark.parametrize("k", [0, 1, 255, 256, 257, 6029, 25_600])
@pytest.mark.parametrize("n", [25_600, 25_600_000])
def test_the_size_of_a_payload_is_that_of_the_codec(values: str, k: int, n: int) -> None:
    assert sparse_payload_bytes(n, k, values) == encoded_bytes(k, n, ValueKind[values.upper()])


@pytest.mark.parametrize("kind", [ExchangeKind.TOPK, ExchangeKind.GTOPK])
def test_four_bits_take_longer_to_encode(kind: ExchangeKind) -> None:
    """Once, and in a butterfly of four also in each of two merges: 5 ns times 1,000 entries each."""
    network, costs = uniform_network(4, 0.001, 1e12), replace(NO_CPU_COSTS, encode_entry_s=1e-9)
    int8_s, int4_s = (exchange_s(Workload(kind, 10**6, 0.001, v), network, costs) for v in ("int8", "int4"))
    encodings = 3 if kind is ExchangeKind.GTOPK else 1
    assert int4_s - int8_s == pytest.approx(encodings * 5e-6, rel=1e-3)


@pytest.mark.parametrize("kind", [ExchangeKind.GTOPK, ExchangeKind.TREE])
def test_two_bits_are_refused_where_merges_round(kind: ExchangeKind) -> None:
    with pytest.raises(ConfigError, match=f"{kind} does not support.*topk, star-gtopk"):
        Workload(kind, 1000, values="int2")


def test_a_ring_hashes_while_it_waits_and_a_star_at_its_end() -> None:
    """At the end remains at most a slice of 1 MiB of the ring, and all 4 MB of the star."""
    hashing, network = replace(NO_CPU_COSTS, hash_byte_s=1e-9), uniform_network(4, 0.001, 1e8)
    ring, star = Workload(ExchangeKind.DENSE, 1_000_000), Workload(ExchangeKind.STAR, 1_000_000)
    slice_s = 1e-9 * 1e6 / slice_count(ring, 4)
    assert exchange_s(ring, network, hashing) - exchange_s(ring, network) == pytest.approx(slice_s)
    assert exchange_s(star, network, hashing) - exchange_s(star, network) == pytest.approx(4e-3)
    assert cost_model.exchange_cost(ring, network, hashing).cpu_s == pytest.approx(4e-3)


# -- the vote --------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 8, 100])
def test_the_root_handles_one_vote_after_the_other(world_size: int) -> None:
    """All are prepared at once: a vote in flight, then one turn of the root per member, and a decision."""
    cpu = replace(NO_CPU_COSTS, message_s=1.0, wake_s=0.5)
    load, network = Workload(ExchangeKind.GTOPK, 1000, 0.01), uniform_network(world_size, 10.0, 1e12)
    voted = (
        cost_model.exchange_cost(load, network, cpu).exchange_s
        - cost_model.exchange_cost(load, network, cpu, vote=False).exchange_s
    )
    trips_s = 2 * (1 + 10 + 0.5) + 1  # sent, in flight, woken, twice; then the last member reads the decision
    turns_s = (world_size - 1) + (world_size - 2)
    assert voted <= trips_s + turns_s + 1e-6
    if world_size & (world_size - 1) == 0:
        assert voted == pytest.approx(trips_s + turns_s, rel=1e-6)


@pytest.mark.parametrize("far", [1, 2, 3])
def test_an_estimated_star_waits_for_the_most_distant_member(far: int) -> None:
    load, even = Workload(ExchangeKind.STAR, 2_000_000), LinkModel(0.001, RATE_Bps)

    def link(src: int, dst: int) -> LinkModel:
        return LinkModel(2.0, RATE_Bps) if far in (src, dst) else even

    rates = [RATE_Bps] * 4
    costs = [
        cost_model.exchange_cost(
            load, NetworkModel(link, rates, rates), NO_CPU_COSTS, vote=False, max_messages=n
        )
        for n in (1, 10**6)
    ]
    assert costs[0].exchange_s == pytest.approx(costs[1].exchange_s, rel=0.1)


def test_an_estimated_ring_of_two_slices_fills_its_pipeline_once() -> None:
    """Hops are expensive here: 22 in sequence, and one more slice that follows the first."""
    load = next(
        load
        for parameters in range(100_000, 10_000_000, 100_000)
        if slice_count(load := Workload(ExchangeKind.DENSE, parameters), 4) == 2
    )
    network = uniform_network(4, 0.0, RATE_Bps)
    estimated, simulated = (
        cost_model.exchange_cost(
            load, network, replace(NO_CPU_COSTS, wake_s=1.0), vote=False, max_messages=n
        ).exchange_s
        for n in (1, 10**6)
    )
    slice_s = load.unit_bytes / 8 / RATE_Bps
    assert estimated == pytest.approx(6 * (1.0 + slice_s) + slice_s, rel=1e-3)
    assert abs(estimated - simulated) < 0.2


@pytest.mark.parametrize("kind", list(ExchangeKind))
def test_half_of_the_setup_time_is_before_the_first_message_and_half_after_the_vote(
    kind: ExchangeKind,
) -> None:
    load, network = Workload(kind, 1_000_000), uniform_network(4, 0.001, RATE_Bps)
    for vote, begin_s in ((False, 1.5), (True, 3.0)):
        for max_messages in (1, 10**6):  # estimated where that is possible, and simulated
            with_s, without_s = (
                cost_model.exchange_cost(load, network, cpu, vote=vote, max_messages=max_messages).exchange_s
                for cpu in (replace(NO_CPU_COSTS, begin_s=3.0), NO_CPU_COSTS)
            )
            assert with_s - without_s == pytest.approx(begin_s)


def test_the_digest_of_a_sparse_update_is_of_its_entries() -> None:
    hashing = replace(NO_CPU_COSTS, hash_byte_s=1.0)
    for kind, world_size in ((ExchangeKind.GTOPK, 1), (ExchangeKind.TREE, 1), (ExchangeKind.TOPK, 4)):
        load = Workload(kind, 1_000_000, 0.01)
        assert end_work_s(load, 4, hashing) == 12 * 10_000 * world_size


def test_a_direct_exchange_of_sixteen_members_is_always_simulated() -> None:
    load = Workload(ExchangeKind.DIRECT, 1_000_000)
    for size, is_simulated in ((16, True), (17, False)):
        network = uniform_network(size, 0.01, RATE_Bps)
        few, many = (
            cost_model.exchange_cost(load, network, NO_CPU_COSTS, max_messages=n).exchange_s
            for n in (500, 10**6)
        )
        assert (few == many) is is_simulated


@pytest.mark.parametrize("kind", [ExchangeKind.DENSE, ExchangeKind.DIRECT, ExchangeKind.STAR])
def test_the_estimate_counts_the_handling_of_messages_at_both_ends(kind: ExchangeKind) -> None:
    load, network = Workload(kind, 2_000_000), uniform_network(24, 0.0, 1e12)
    estimated, simulated = (
        cost_model.exchange_cost(
            load, network, replace(NO_CPU_COSTS, message_s=0.01), vote=False, max_messages=n
        ).exchange_s
        for n in (1, 10**6)
    )
    assert estimated == pytest.approx(simulated, rel=0.05)


def test_a_token_bucket_passes_a_payload_at_once_after_a_pause() -> None:
    """Each link of a ring of two passes its first 40 kB at once, of 200 kB in each of two rounds."""
    load = Workload(ExchangeKind.DENSE, 100_000, encrypted=False)
    even = uniform_network(2, 0.0, RATE_Bps)
    shaped = replace(even, burst_bytes=40_000)
    saved_s = exchange_s(load, even) - exchange_s(load, shaped)
    assert saved_s == pytest.approx(40_000 / RATE_Bps, rel=0.01)
    whole = replace(even, burst_bytes=1e6)
    assert exchange_s(load, whole) < 0.1 * exchange_s(load, even)
