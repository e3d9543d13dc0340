"""The cost model: the walk against the textbook on even links, against bounds on all, and what it notices."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from gridtrain.errors import ConfigError
from gridtrain.protocol import costs
from gridtrain.protocol.lines import Link, Network, even
from gridtrain.protocol.loads import (
    FREE,
    HEADER_BYTES,
    VALUE_BYTES,
    Cpu,
    Kind,
    Load,
    count_moves,
    crossed_by,
    moves_of,
    slices_of,
    sparse_bytes,
)
from gridtrain.wire.sparse import ValueKind, encode, encoded_bytes

RATE_Bps = 12.5e6
SEEDS = range(20)


def exchange_s(load: Load, network: Network, cpu: Cpu = FREE) -> float:
    return costs.cost(load, network, cpu, vote=False).exchange_s


# -- on even links -------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8, 16, 24])
@pytest.mark.parametrize("alpha_s", [0.0, 0.0004, 0.020])
@pytest.mark.parametrize("kind", list(Kind))
def test_the_walk_gives_the_textbooks_formula(kind: Kind, alpha_s: float, world_size: int) -> None:
    load = Load(kind, 2_000_000)
    walked_s = exchange_s(load, even(world_size, alpha_s, RATE_Bps))
    formula_s = costs.closed_s(load, world_size, alpha_s, RATE_Bps)
    uneven_size = world_size & (world_size - 1) != 0
    if kind is Kind.TOPK:  # payloads travel one by one, so a hop's alpha hides behind others' bytes
        wire_s = (world_size - 1) * load.unit_bytes / RATE_Bps
        assert wire_s + alpha_s <= walked_s <= 1.02 * formula_s
    elif kind is Kind.TREE and uneven_size:  # ranks without a partner save a hop of bytes or so
        assert 0.49 * formula_s <= walked_s <= 1.02 * formula_s
    elif kind is Kind.GTOPK and uneven_size:
        # Folds meet first swaps on the same downloads: up to two payloads more than the formula has; and what
        # was swapped early is there when the fold is merged, so one alpha less.
        unit_s = load.unit_bytes / RATE_Bps
        assert 0.98 * (formula_s - alpha_s - unit_s) <= walked_s <= 1.02 * (formula_s + 2 * unit_s)
    else:
        assert walked_s == pytest.approx(formula_s, rel=0.02)


@pytest.mark.parametrize("world_size", [33, 64, 100])
def test_hops_of_a_large_all_gather_travel_as_one(world_size: int) -> None:
    load = Load(Kind.TOPK, 2_000_000)
    formula_s = costs.closed_s(load, world_size, 0.001, RATE_Bps)
    assert exchange_s(load, even(world_size, 0.001, RATE_Bps)) == pytest.approx(formula_s, rel=0.03)


@pytest.mark.parametrize("alpha_s", [0.0, 0.010])
@pytest.mark.parametrize(
    ("load", "world_size", "within"),
    [
        (Load(Kind.DENSE, 2_000_000), 12, 0.02),
        (Load(Kind.DIRECT, 8_000_000), 24, 0.05),
        (Load(Kind.STAR, 2_000_000), 12, 0.03),
    ],
    ids=["ring", "direct", "star"],
)
def test_what_is_too_large_to_walk_costs_what_a_walk_would_say(
    load: Load, world_size: int, within: float, alpha_s: float
) -> None:
    network = even(world_size, alpha_s, RATE_Bps)
    walked = costs.cost(load, network, Cpu())
    not_walked = costs.cost(load, network, Cpu(), most_moves=10)
    assert not_walked.exchange_s == pytest.approx(walked.exchange_s, rel=within)
    assert not_walked.sent_bytes == pytest.approx(walked.sent_bytes, rel=0.001)
    assert not_walked.cpu_s == pytest.approx(walked.cpu_s, rel=0.05)


# -- on any links --------------------------------------------------------------------------------


def random_network(rng: random.Random, world_size: int) -> Network:
    links = {
        (src, dst): Link(rng.uniform(0, 0.02), rng.choice([1e6, 1e7, float("inf")]))
        for src in range(world_size)
        for dst in range(world_size)
    }
    up, down = ([rng.uniform(1e6, 1e8) for _ in range(world_size)] for _ in range(2))
    return Network(lambda src, dst: links[src, dst], up, down)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", list(Kind))
def test_nothing_is_faster_than_the_wire(kind: Kind, seed: int) -> None:
    rng = random.Random(seed)
    network = random_network(rng, rng.randint(2, 9))
    load = Load(kind, 500_000, density=rng.choice([0.001, 0.01, 0.3]), values=rng.choice(list(VALUE_BYTES)))
    found = costs.cost(load, network, FREE, vote=False)
    assert found.exchange_s >= found.total_bytes / sum(network.up_Bps)
    assert found.exchange_s >= found.total_bytes / sum(network.down_Bps)
    assert found.sent_bytes >= load.unit_bytes / network.size, f"seed {seed}"


@pytest.mark.parametrize("kind", list(Kind))
def test_more_costs_more(kind: Kind) -> None:
    def s(
        parameters: int = 500_000, alpha_s: float = 0.002, rate: float = 1e7, density: float = 0.01
    ) -> float:
        return exchange_s(Load(kind, parameters, density), even(6, alpha_s, rate), Cpu())

    assert s() < s(parameters=5_000_000)
    assert s() < s(rate=5e6)
    assert s() < s(alpha_s=0.050)
    assert (s() < s(density=0.1)) is kind.sparse


def test_encryption_and_work_cost_time() -> None:
    network = even(4, 0.001, 1e10)
    plain, sealed = (Load(Kind.DENSE, 5_000_000, encrypted=is_sealed) for is_sealed in (False, True))
    cpu = Cpu(message_s=90e-6)  # with many slices the handling of messages would hide the sealing
    assert exchange_s(plain, network) < exchange_s(plain, network, cpu) < exchange_s(sealed, network, cpu)


def test_one_machine_for_all_is_slower_than_one_for_each() -> None:
    load, network = Load(Kind.GTOPK, 2_000_000, 0.01), even(8, 0.0, 1e9)
    alone = costs.cost(load, network, Cpu())
    shared = costs.cost(load, network, Cpu(), host_cores=2)
    assert shared.exchange_s > 2 * alone.exchange_s
    assert shared.cpu_s == alone.cpu_s


def test_members_that_share_a_line_wait_for_each_other() -> None:
    thin = Link(0.001, shared=("between",))
    near = Link(0.001)

    def link(src: int, dst: int) -> Link:
        return near if src // 2 == dst // 2 else thin

    load = Load(Kind.GTOPK, 1_000_000, 0.01)
    separate = Network(link, (1e8,) * 4, (1e8,) * 4, {"between": 1e8})
    together = Network(link, (1e8,) * 4, (1e8,) * 4, {"between": 1e6})
    # both pairs cross in the second hop, both ways over one line: four payloads, one after the other
    assert exchange_s(load, together) == pytest.approx(4 * load.unit_bytes / 1e6, rel=0.05)
    assert exchange_s(load, separate) < 0.1 * exchange_s(load, together)


@pytest.mark.parametrize("kind", [Kind.TOPK, Kind.DIRECT])
def test_what_waits_for_its_senders_line_holds_up_nobody_on_a_line_that_all_share(kind: Kind) -> None:
    load, lines = Load(kind, 1_000_000, 0.01), ((1e6,) * 4, (1e6,) * 4)
    through = Network(lambda src, dst: Link(0.01, shared=("wide",)), *lines, {"wide": 1e9})
    apart = Network(lambda src, dst: Link(0.01), *lines)
    assert exchange_s(load, through) == pytest.approx(exchange_s(load, apart), rel=0.01)


# -- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("values", "kind"), [("fp16", ValueKind.FP16), ("fp32", ValueKind.FP32)])
def test_a_payloads_size_is_the_codecs(values: str, kind: ValueKind, seed: int) -> None:
    import numpy as np

    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 10_000))
    k = int(rng.integers(0, n + 1))
    indices = np.sort(rng.choice(n, k, replace=False)).astype(np.int64)
    payload = encode(indices, np.ones(k, np.float32), n=n, kind=kind)
    assert sparse_bytes(n, k, values) == len(payload), f"seed {seed}: n {n}, k {k}"


def test_bytes_are_those_that_the_schedule_sends() -> None:
    load = Load(Kind.DENSE, 1_000_000)
    found = costs.cost(load, even(4, 0.001, 1e8), FREE)
    messages = 2 * 3 * slices_of(load, 4)
    assert found.sent_bytes == pytest.approx(2 * 3 / 4 * 4e6 + messages * HEADER_BYTES)
    assert found.total_bytes == pytest.approx(4 * found.sent_bytes)
    star = costs.cost(Load(Kind.STAR, 1_000_000), even(4, 0.001, 1e8), FREE)
    assert star.received_bytes == pytest.approx(3 * 4e6, rel=0.01)


def test_the_vote_is_a_round_trip_to_the_root() -> None:
    load, network = Load(Kind.GTOPK, 100_000), even(4, 0.010, 1e9)
    with_vote, without = costs.cost(load, network, FREE), costs.cost(load, network, FREE, vote=False)
    assert with_vote.exchange_s - without.exchange_s == pytest.approx(0.020)


def test_a_load_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"density 1\.5"):
        Load(Kind.TOPK, 10, density=1.5)
    with pytest.raises(ConfigError, match="slowest line 0 bytes"):
        even(2, 0.0, 0.0)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8, 31, 32, 33, 40, 64, 100])
def test_moves_are_counted_as_they_are_made(kind: Kind, size: int) -> None:
    load = Load(kind, 10_000_000)
    for most in (1, 400, 30_000):
        assert count_moves(load, size, most) == len(moves_of(load, size, most)), most
    crossed = Counter((move.src, move.dst) for move in moves_of(load, size, 1))
    assert crossed_by(load, size) == crossed


@pytest.mark.parametrize("values", [kind.name.lower() for kind in ValueKind])
@pytest.mark.parametrize("k", [0, 1, 255, 256, 257, 6029, 25_600])
def test_all_kinds_of_values_have_the_bytes_that_the_codec_makes(values: str, k: int) -> None:
    assert sparse_bytes(25_600_000, k, values) == encoded_bytes(k, 25_600_000, ValueKind[values.upper()])


def test_a_ring_hashes_while_it_waits_and_a_star_at_its_end() -> None:
    """What is left at the end: a slice of 1 MiB at most of the ring, all 4 MB of the star."""
    hashing, network = replace(FREE, hash_byte_s=1e-9), even(4, 0.001, 1e8)
    ring, star = Load(Kind.DENSE, 1_000_000), Load(Kind.STAR, 1_000_000)
    slice_s = 1e-9 * 1e6 / slices_of(ring, 4)
    assert exchange_s(ring, network, hashing) - exchange_s(ring, network) == pytest.approx(slice_s)
    assert exchange_s(star, network, hashing) - exchange_s(star, network) == pytest.approx(4e-3)
    assert costs.cost(ring, network, hashing).cpu_s == pytest.approx(4e-3)


# -- the vote --------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 8, 100])
def test_the_root_deals_with_one_vote_after_the_other(world_size: int) -> None:
    """All are prepared at once: a vote on its way, then so many turns of the root, and a decision."""
    cpu = replace(FREE, message_s=1.0, wake_s=0.5)
    load, network = Load(Kind.GTOPK, 1000, 0.01), even(world_size, 10.0, 1e12)
    voted = costs.cost(load, network, cpu).exchange_s - costs.cost(load, network, cpu, vote=False).exchange_s
    trips_s = 2 * (1 + 10 + 0.5) + 1  # sent, under way, woken, twice; and the last member reads the decision
    turns_s = (world_size - 1) + (world_size - 2)
    assert voted <= trips_s + turns_s + 1e-6
    if world_size & (world_size - 1) == 0:
        assert voted == pytest.approx(trips_s + turns_s, rel=1e-6)
