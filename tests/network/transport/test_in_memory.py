"""Connections that break and endpoints that are killed in the in-memory network."""

from __future__ import annotations

import hashlib

import pytest

from gridtrain.core.messages import Ping
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.in_memory import EndpointKilled
from gridtrain.network.transport.interface import PeerDown, PeerUp

ANNA, BERT = (
    Identity.from_secret(hashlib.blake2b(name, digest_size=32).digest()).public for name in (b"anna", b"bert")
)


def test_a_cut_edge_is_down_on_both_sides_until_it_is_healed(memory_net):
    anna, bert = memory_net.pair()
    memory_net.hub.disconnect(ANNA, BERT)
    memory_net.until(lambda: anna.of(PeerDown) and bert.of(PeerDown), anna, bert)
    memory_net.hub.reconnect(ANNA, BERT)
    anna.transport.send(bert.key, Ping(1))
    memory_net.until(lambda: bert.got(), anna, bert)
    assert anna.story() == ["up bert", "down bert", "up bert"]
    assert bert.story() == ["up anna", "down anna", "up anna", "Ping 1 from anna"]


def test_a_killed_endpoint_says_nothing_more_and_its_thread_ends(memory_net):
    anna, bert = memory_net.pair()
    memory_net.hub.kill_sender("Ping", source=ANNA, after=1)
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
