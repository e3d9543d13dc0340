"""Limits of `gridtrain doctor` at a coordinator: number of requests, bytes, and hosts that are dialled."""

from __future__ import annotations

from typing import Any

import pytest

from gridtrain.core import messages as m
from gridtrain.network.transport.interface import PeerUp, ReachResult
from gridtrain_coordinator.doctor_checks import MAX_OPEN_CHECKUPS, MAX_PER_ADDRESS_RANGE, MAX_PINGS, Checkups
from gridtrain_coordinator.run import events as ev

MEMBER = b"m" * 32
EXPECT = ev.Send(MEMBER, m.ExpectProbes(((b"k" * 32, ""),)))


def new_checkups() -> Checkups:
    return Checkups(lambda peer, most: ([EXPECT], ((MEMBER, "tcp://10.0.0.9:7"),)[:most]))


def ask(checkups: Checkups, number: int, host: str, address: str = "", now_s: float = 0.0) -> list[ev.Effect]:
    peer = number.to_bytes(32, "big")
    checkups.on_connected(PeerUp(peer, host=host))
    message = m.DiagnosticRequest(bytes([1]) + peer[1:], address)
    assert checkups.accepts(peer, message)
    return checkups.handle(peer, message, lambda: b"{}", now_s)


def has_begun(effects: list[ev.Effect]) -> bool:
    return any(isinstance(e, ev.Send) and isinstance(e.message, m.DiagnosticReply) for e in effects)


@pytest.mark.parametrize(
    ("address", "dialled"),
    [
        ("tcp://203.0.113.5:7701", ("tcp://203.0.113.5:7701",)),
        ("tcp://192.168.1.4:7701", ("tcp://203.0.113.5:7701",)),
        ("tcp://198.51.100.9:22", ("tcp://203.0.113.5:22",)),
    ],
)
def test_only_the_requesting_host_is_dialled_back(address: str, dialled: tuple[str, ...]) -> None:
    effects = ask(new_checkups(), 1, "203.0.113.5", address)
    calls = [e.addresses for e in effects if isinstance(e, ev.DialBack)]
    assert [tuple(dict.fromkeys(addresses)) for addresses in calls] == [dialled]
    assert EXPECT in effects and has_begun(effects)


def test_a_request_without_an_address_is_answered_at_once() -> None:
    effects = ask(new_checkups(), 1, "203.0.113.5")
    assert ev.Send((1).to_bytes(32, "big"), m.Reachability("")) in effects


def test_the_result_is_sent_to_the_requesting_peer() -> None:
    checkups = new_checkups()
    ask(checkups, 1, "203.0.113.5", "tcp://203.0.113.5:1")
    key = bytes([1]) + (1).to_bytes(32, "big")[1:]
    assert checkups.on_dial_back_result(ReachResult(b"x" * 32, "")) is None, (
        "the dial-back of a worker is not a checkup's"
    )
    assert checkups.on_dial_back_result(ReachResult(key, "tcp://a:1")) == [
        ev.Send((1).to_bytes(32, "big"), m.Reachability("tcp://a:1"))
    ]


def test_checkups_are_limited_by_address_range_and_in_total() -> None:
    checkups = new_checkups()
    started = [has_begun(ask(checkups, n, f"203.0.113.{n}")) for n in range(1, 9)]
    assert started == [True] * MAX_PER_ADDRESS_RANGE + [False] * 2
    assert has_begun(ask(checkups, 20, "203.0.113.77", now_s=61.0))
    many = [has_begun(ask(checkups, 100 + n, f"10.{n}.0.1", now_s=61.0)) for n in range(40)]
    assert sum(many) == MAX_OPEN_CHECKUPS - MAX_PER_ADDRESS_RANGE - 1
    checkups.on_disconnected((20).to_bytes(32, "big"))
    assert has_begun(ask(checkups, 21, "10.200.0.1", now_s=61.0))


def test_requests_of_one_checkup_are_limited() -> None:
    checkups, peer = new_checkups(), (1).to_bytes(32, "big")
    assert not checkups.accepts(peer, m.Ping(1)), "not before a DiagnosticRequest"
    ask(checkups, 1, "203.0.113.5")

    def handle(message: Any) -> list[ev.Effect]:
        assert checkups.accepts(peer, message)
        return checkups.handle(peer, message, lambda: b"{}", 0.0)

    for nonce in range(MAX_PINGS):
        assert handle(m.Ping(nonce)) == [ev.Send(peer, m.Pong(nonce))]
    end = bytes(m.BURST_MESSAGE_BYTES - 8) + b"12345678"
    answers = [handle(m.Burst(9, index, end)) for index in range(m.BURST_MESSAGES)]
    assert answers == [[]] * (m.BURST_MESSAGES - 1) + [[ev.Send(peer, m.BurstReceived(9, b"12345678"))]]
    assert len(handle(m.BurstRequest(3))) == m.BURST_MESSAGES
    refused, disconnected = handle(m.BurstRequest(4))
    assert "sent a BurstRequest beyond its limits" in refused.message.reason  # type: ignore[union-attr]
    assert disconnected == ev.Disconnect(peer) and not checkups.accepts(peer, m.Ping(1))


def test_a_second_request_is_not_taken_for_another_machine() -> None:
    checkups = new_checkups()
    ask(checkups, 1, "203.0.113.5")
    (refused,) = ask(checkups, 1, "203.0.113.5")
    assert "a DiagnosticRequest beyond its limits" in refused.message.reason  # type: ignore[union-attr]
