"""Faults of the in-memory network happen exactly as planned, and equally for equal seeds."""

from __future__ import annotations

import hashlib

import pytest

from gridtrain.core.messages import Ping
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.in_memory import EndpointKilled, FaultPlan, MemoryHub, MessageFault
from gridtrain.network.transport.interface import PeerDown, PeerUp

ANNA, BERT = (
    Identity.from_secret(hashlib.blake2b(name, digest_size=32).digest()).public for name in (b"anna", b"bert")
)


@pytest.fixture
def pair(memory_net):
    """`pair(fault, ..)`: anna has dialled bert over a network with these faults."""

    def make(*faults: MessageFault, seed: int = 0):
        memory_net.hub = MemoryHub(FaultPlan(*faults, seed=seed))
        return memory_net.pair()

    return make


def exchange(net, anna, bert, count: int) -> None:
    """anna sends `count` pings; bert's answer, which is not delayed, ends it."""
    for nonce in range(count):
        anna.transport.send(bert.key, Ping(nonce))
    bert.transport.send(anna.key, Ping(100))
    net.until(lambda: anna.got(), anna, bert)


def nonces(endpoint) -> list[int]:
    return [ping.nonce for ping in endpoint.got()]


def test_a_dropped_message_is_lost_on_that_edge_alone(memory_net, pair):
    anna, bert = pair(MessageFault("drop", source=ANNA, target=BERT, kind="Ping", after=1, times=2))
    exchange(memory_net, anna, bert, 5)
    assert nonces(bert) == [0, 3, 4]
    assert nonces(anna) == [100]


def test_a_duplicate_comes_twice(memory_net, pair):
    anna, bert = pair(MessageFault("duplicate", source=ANNA, after=1, times=1))
    exchange(memory_net, anna, bert, 3)
    assert nonces(bert) == [0, 1, 1, 2]


def test_delays_reorder(memory_net, pair):
    anna, bert = pair(MessageFault("delay", source=ANNA, delay_s=0.05), seed=3)
    exchange(memory_net, anna, bert, 10)
    memory_net.until(lambda: len(bert.got()) == 10, bert)
    assert sorted(nonces(bert)) == list(range(10))
    assert nonces(bert) != list(range(10))


def test_the_same_seed_has_the_same_faults(seeds):
    for seed in seeds(20):
        plans = [FaultPlan(MessageFault("drop", probability=0.5), seed=seed) for _ in range(2)]
        fates = [plan.next_outcome(ANNA, BERT, "Ping") for plan in plans for _ in range(50)]
        # What happens on another edge in between changes nothing.
        other = FaultPlan(MessageFault("drop", probability=0.5), seed=seed)
        mixed = []
        for _ in range(50):
            other.next_outcome(BERT, ANNA, "Ping")
            mixed.append(other.next_outcome(ANNA, BERT, "Ping"))
        assert fates[:50] == fates[50:] == mixed, f"seed {seed}"


def test_a_cut_edge_is_down_on_both_sides_until_it_is_healed(memory_net, pair):
    anna, bert = pair()
    memory_net.hub.disconnect(ANNA, BERT)
    memory_net.until(lambda: anna.of(PeerDown) and bert.of(PeerDown), anna, bert)
    memory_net.hub.reconnect(ANNA, BERT)
    anna.transport.send(bert.key, Ping(1))
    memory_net.until(lambda: bert.got(), anna, bert)
    assert anna.story() == ["up bert", "down bert", "up bert"]
    assert bert.story() == ["up anna", "down anna", "up anna", "Ping 1 from anna"]


def test_a_cut_at_the_third_message(memory_net, pair):
    anna, bert = pair(MessageFault("cut", source=ANNA, after=2, times=1))
    for nonce in range(3):
        anna.transport.send(bert.key, Ping(nonce))
    memory_net.until(lambda: bert.of(PeerDown), anna, bert)
    assert bert.story() == ["up anna", "Ping 0 from anna", "Ping 1 from anna", "down anna"]


def test_a_killed_endpoint_says_nothing_more_and_its_thread_ends(memory_net, pair):
    anna, bert = pair(MessageFault("kill", source=ANNA, after=1))
    anna.transport.send(bert.key, Ping(0))
    with pytest.raises(EndpointKilled):
        anna.transport.send(bert.key, Ping(1))
    with pytest.raises(EndpointKilled):
        anna.transport.poll(0.0)
    memory_net.until(lambda: bert.of(PeerDown), bert)
    assert bert.story() == ["up anna", "Ping 0 from anna", "down anna"]


def test_a_killed_endpoint_may_come_back_under_its_name(memory_net):
    anna, bert = memory_net.add("anna"), memory_net.add("bert")
    anna.transport.dial(BERT, bert.transport.listen("memory://bert"))
    memory_net.hub.kill(BERT)
    again = memory_net.add("bert")
    again.transport.listen("memory://bert")
    memory_net.until(lambda: again.of(PeerUp), anna, again)
    assert anna.story() == ["up bert", "down bert", "up bert"]
