"""One measurement of a worker's links, round trips and then bursts, in virtual time."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

import pytest

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as ev
from gridtrain.runtime.link_probes.link_probe import LinkProbe

ANNA, BERT = b"a" * 32, b"b" * 32
LIMIT_S, TICK_S = 2.0, 0.005


class Peers:
    """A transport to peers that answer each message `TICK_S` later, unless they are in `silent`.  Anna
    answers the pings to those."""

    def __init__(self, silent: set[m.PeerId]) -> None:
        self.silent = silent
        self.answers: list[tuple[m.PeerId, m.Message]] = []

    def connected(self, peer: m.PeerId) -> bool:
        return True

    def send(self, peer: m.PeerId, message: Any) -> None:
        match message:
            case m.Ping(nonce) if peer in self.silent:
                self.answers.append((ANNA, m.Pong(nonce)))
            case _ if peer in self.silent:
                pass
            case m.Ping(nonce):
                self.answers.append((peer, m.Pong(nonce)))
            case m.Burst(nonce, index, payload) if index == m.BURST_MESSAGES - 1:
                self.answers.append((peer, m.BurstReceived(nonce, bytes(payload[-8:]))))
            case m.BurstRequest(nonce):
                payload = bytes(m.BURST_MESSAGE_BYTES)
                self.answers += [(peer, m.Burst(nonce, index, payload)) for index in range(m.BURST_MESSAGES)]
            case _:
                pass


def measure(
    silent: set[m.PeerId], connecting: Iterable[m.PeerId] = (), *, is_member: bool = False
) -> tuple[dict[m.PeerId, tuple[float, float]], ev.ProbeResults, float]:
    """The rates by peer, the round trips, and when the latter were reported."""
    peers = Peers(silent)
    probe = LinkProbe(peers, LIMIT_S, Random(1))  # type: ignore[arg-type]
    targets = (ANNA, "tcp://10.0.0.2:1"), (BERT, "tcp://10.0.1.2:1")
    probe.begin(ev.ProbePeers(targets, is_member=is_member), 0.0)
    for peer in connecting:
        probe.peer_up(peer, 0.0)
    measured: dict[m.PeerId, tuple[float, float]] = {}
    for tick in range(1, round(m.MEMBER_PROBE_S / TICK_S)):
        answers, peers.answers = peers.answers, []
        for peer, answer in answers:
            for reply in probe.handle_message(peer, answer, tick * TICK_S):  # type: ignore[arg-type]
                peers.send(peer, reply)
        rates, results = probe.poll(tick * TICK_S)
        for peer, sent_Bps, received_Bps in rates.rates_Bps if rates is not None else ():
            measured[peer] = sent_Bps, received_Bps
        if results is not None:
            return measured, results, tick * TICK_S
    raise AssertionError("no round trips within the limit")


def test_both_directions_of_each_link_are_measured() -> None:
    measured, results, _ = measure(set())
    assert measured.keys() == {ANNA, BERT} and all(min(rates) > 0 for rates in measured.values())
    assert dict(results.rtt_s) == {ANNA: pytest.approx(TICK_S), BERT: pytest.approx(TICK_S)}


@pytest.mark.parametrize(("is_member", "limit_s"), [(False, LIMIT_S), (True, m.MEMBER_PROBE_S)])
def test_a_silent_target_does_not_prevent_the_bursts_to_the_others(is_member: bool, limit_s: float) -> None:
    """A peer that cannot be reached is waited for until the deadline, but the other one is measured."""
    measured, results, reported_s = measure({BERT}, is_member=is_member)
    assert measured.keys() == {ANNA} and min(measured[ANNA]) > 0
    assert dict(results.rtt_s) == {ANNA: pytest.approx(TICK_S)}
    assert reported_s == pytest.approx(0.8 * limit_s)


def test_a_target_that_connects_while_it_is_pinged_does_not_delay_the_report() -> None:
    """The transport is connected when the probe begins, but its `PeerUp` is handled after that."""
    _, _, reported_s = measure(set(), connecting={ANNA})
    assert reported_s < 0.4 * LIMIT_S
