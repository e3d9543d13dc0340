"""Transcripts of the virtual network: when messages arrive, and which ones faults remove."""

import pytest

from simulation.virtual_network import LinkProperties, VirtualNetwork

EXACT = LinkProperties(delay_s=(1.0, 1.0))


def network_of(*nodes, seed=0, link=EXACT):
    """A network and what its nodes receive, as lines of text."""
    network, transcript = VirtualNetwork(seed, link), []

    def deliver(src, dst, message):
        transcript.append(f"{network.clock.now_s:g} {src} -> {dst}: {message}")

    for node in nodes:
        network.attach(node, deliver)
    return network, transcript


def run(network, max_events=1000):
    for _ in range(max_events):
        if network.idle:
            return
        network.step()
    raise AssertionError(f"still busy after {max_events} events")


def test_messages_take_time_and_timers_fire_between_them():
    network, transcript = network_of("a", "b")
    network.send("a", "b", "hello")
    network.call_at(0.5, lambda: network.send("b", "a", "what?"))
    network.call_at(1.2, lambda: transcript.append("1.2 tick"))
    run(network)
    assert transcript == ["1 a -> b: hello", "1.2 tick", "1.5 b -> a: what?"]


def test_step_returns_what_was_delivered():
    network, _ = network_of("a", "b")
    network.call_at(0.0, lambda: None)
    network.send("a", "b", "hello")
    assert network.step() is None
    delivery = network.step()
    assert (delivery.at_s, delivery.src, delivery.dst, delivery.message) == (1.0, "a", "b", "hello")
    assert network.idle


def test_a_receiver_can_answer_at_once():
    network, transcript = network_of("a")
    network.attach("b", lambda src, dst, message: network.send(dst, src, message.upper()))
    network.send("a", "b", "hello")
    run(network)
    assert transcript == ["2 b -> a: HELLO"]


def test_messages_queue_for_the_bandwidth_of_their_direction():
    network, transcript = network_of("a", "b", link=LinkProperties(delay_s=(1.0, 1.0), bandwidth_Bps=100.0))
    network.send("a", "b", "first", nbytes=200)
    network.send("a", "b", "second", nbytes=50)
    network.send("b", "a", "other way", nbytes=100)
    run(network)
    assert transcript == ["2 b -> a: other way", "3 a -> b: first", "3.5 a -> b: second"]


def arrivals(seed, **link):
    network, transcript = network_of("a", "b", seed=seed, link=LinkProperties(delay_s=(0.0, 1.0), **link))
    for number in range(10):
        network.send("a", "b", number)
    run(network)
    return [int(line.rsplit(" ", 1)[1]) for line in transcript]


def test_a_seed_is_a_history():
    assert arrivals(seed=3) == arrivals(seed=3) != arrivals(seed=4)


def test_messages_overtake_each_other_unless_the_link_is_in_order():
    assert arrivals(seed=0) != sorted(arrivals(seed=0))
    assert arrivals(seed=0, in_order=True) == list(range(10))


def test_messages_can_be_lost_or_arrive_twice():
    assert 0 < len(arrivals(seed=0, loss=0.5)) < 10 < len(arrivals(seed=0, duplicate=0.5)) < 20
    assert sorted(arrivals(seed=0, duplicate=1.0)) == sorted([*range(10), *range(10)])


def test_a_link_can_be_set_for_one_direction():
    network, transcript = network_of("a", "b")
    network.set_link("a", "b", LinkProperties(delay_s=(5.0, 5.0)))
    network.send("a", "b", "slow")
    network.send("b", "a", "fast")
    run(network)
    assert transcript == ["1 b -> a: fast", "5 a -> b: slow"]


def test_a_crashed_node_has_no_timers_and_neither_sends_nor_receives():
    network, transcript = network_of("a", "b")
    network.send("b", "a", "last words")
    network.send("a", "b", "too late")
    network.call_at(0.5, lambda: network.crash("b"))
    network.call_at(0.6, lambda: network.send("b", "a", "from beyond"))
    network.call_at(0.7, lambda: transcript.append("b's timer"), node="b")
    network.call_at(0.8, lambda: transcript.append("a's timer"), node="a")
    run(network)
    assert transcript == ["a's timer", "1 b -> a: last words"]


@pytest.mark.parametrize("heal_at_s", [0.2, 0.9])
def test_a_partition_loses_messages_that_are_sent_into_it(heal_at_s):
    network, transcript = network_of("a", "b", "c")
    network.call_at(0.1, lambda: network.partition(["a"], ["b", "c"]))
    network.call_at(0.15, lambda: network.send("a", "b", "lost"))
    network.call_at(0.15, lambda: network.send("b", "c", "same side"))
    network.call_at(heal_at_s, network.heal)
    network.call_at(1.0, lambda: network.send("c", "a", "again"))
    run(network)
    assert transcript == ["1.15 b -> c: same side", "2 c -> a: again"]


def test_a_partition_loses_messages_in_flight():
    network, transcript = network_of("a", "b")
    network.send("a", "b", "in flight")
    network.call_at(0.5, lambda: network.partition(["a"], ["b"]))
    network.call_at(2.0, network.heal)
    run(network)
    assert transcript == []
