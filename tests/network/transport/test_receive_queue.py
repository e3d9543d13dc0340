"""The download cap: everything is read, and delivered at the rate of the cap, fairly between senders."""

from __future__ import annotations

import random

import pytest

from gridtrain.network.transport.rate_limiter import MAX_LATENESS_S
from gridtrain.network.transport.receive_queue import ReceiveQueue


def test_without_a_cap_nothing_waits():
    arrivals: ReceiveQueue[str, int] = ReceiveQueue(None)
    for item in range(3):
        arrivals.put("anna", item, 10**9, 0.0)
    arrivals.charge("anna", 10**9, 0.0)
    assert arrivals.take_due(0.0) == [0, 1, 2]
    assert arrivals.due_s() == float("inf")


def test_a_message_is_handed_on_and_the_next_one_waits_for_its_time():
    arrivals: ReceiveQueue[str, str] = ReceiveQueue(1000.0)
    arrivals.put("anna", "first", 500, 5.0)
    arrivals.put("anna", "second", 500, 5.0)
    assert arrivals.take_due(5.0) == ["first"]
    assert arrivals.due_s() == pytest.approx(5.5 - MAX_LATENESS_S)
    assert arrivals.take_due(5.4) == []
    assert arrivals.take_due(5.5) == ["second"]


def test_what_was_handed_on_at_once_is_paid_for_later():
    arrivals: ReceiveQueue[str, str] = ReceiveQueue(1000.0)
    arrivals.charge("anna", 300, 0.0)
    arrivals.put("anna", "bulk", 10, 0.0)
    assert arrivals.take_due(0.2) == []
    assert arrivals.take_due(0.3) == ["bulk"]


def test_nobody_waits_for_another_ones_giant():
    """One after the other, the rest of the large debt would come first: 60 s.  Both share the rate."""
    arrivals: ReceiveQueue[str, str] = ReceiveQueue(1000.0)
    arrivals.put("mallory", "giant", 60_000, 0.0)
    arrivals.put("mallory", "another", 60_000, 0.0)
    for item in range(10):
        arrivals.put("anna", f"small {item}", 100, 0.0)
    assert arrivals.take_due(0.0) == ["giant", "small 0"]
    assert len(arrivals.take_due(1.0)) == 5  # half of the line's 1,000 bytes
    assert len(arrivals.take_due(2.0)) == 4


def test_who_has_gone_is_heard_to_the_end_and_who_is_forgotten_is_not():
    arrivals: ReceiveQueue[str, int] = ReceiveQueue(1000.0)
    for item in range(3):
        arrivals.put("anna", item, 1000, 0.0)
        arrivals.put("bert", item + 10, 1000, 0.0)
    assert arrivals.take_due(0.0) == [0, 10]
    assert arrivals.waiting_bytes("anna") == 2000
    assert arrivals.remove_sender("anna", b"anna", 0.0) == [1, 2]
    arrivals.remove_sender("bert", b"bert", 0.0)
    assert arrivals.take_due(100.0) == []
    assert arrivals.due_s() == float("inf")


def test_who_has_gone_takes_no_share_of_the_rate():
    arrivals: ReceiveQueue[str, str] = ReceiveQueue(1000.0)
    arrivals.put("mallory", "giant", 60_000, 0.0)
    arrivals.put("anna", "first", 100, 0.0)
    arrivals.put("anna", "second", 100, 0.0)
    assert arrivals.take_due(0.0) == ["giant", "first"]
    arrivals.remove_sender("mallory", b"mallory", 0.0)
    assert arrivals.due_s() == pytest.approx(0.11 - MAX_LATENESS_S), "what was idle before was shared"
    assert arrivals.take_due(0.1) == ["second"]


def test_nobody_gets_round_the_cap_by_coming_back():
    arrivals: ReceiveQueue[str, str] = ReceiveQueue(1000.0)
    for life, now_s in enumerate((0.0, 1.0, 2.0)):
        sender = f"mallory {life}"
        arrivals.add_sender(sender, b"mallory", now_s)
        arrivals.put(sender, sender, 10_000, now_s)
        taken = arrivals.take_due(now_s)
        assert taken == ([sender] if life == 0 else [])
        arrivals.remove_sender(sender, b"mallory", now_s)
    arrivals.add_sender("mallory 3", b"mallory", 25.0)
    arrivals.put("mallory 3", "next", 100, 25.0)
    assert arrivals.take_due(29.9) == []
    assert arrivals.take_due(30.1) == ["next"], "30,000 bytes at 1,000 a second"
    arrivals.add_sender("anna", b"anna", 30.1)
    assert arrivals.due_s() == float("inf"), "she owes nothing"


def test_the_debt_of_an_excluded_peer_is_forgotten():
    arrivals: ReceiveQueue[str, str] = ReceiveQueue(1000.0)
    arrivals.put("first", "giant", 100_000, 0.0)
    assert arrivals.take_due(0.0) == ["giant"]
    arrivals.remove_sender("first", b"mallory", 0.0)
    arrivals.forget_departed(lambda owner: owner == b"mallory")
    arrivals.add_sender("second", b"mallory", 1.0)
    arrivals.put("second", "next", 100, 1.0)
    assert arrivals.take_due(1.0) == ["next"], "all members would wait for it"


def test_what_waits_of_all_is_bounded_and_the_one_with_the_most_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gridtrain.network.transport.receive_queue.MAX_WAITING_BYTES", 1000)
    monkeypatch.setattr("gridtrain.network.transport.receive_queue.MIN_WAITING_BYTES", 300)
    arrivals: ReceiveQueue[str, int] = ReceiveQueue(1.0)
    for item in range(4):
        arrivals.put("anna", item, 100, 0.0)
        arrivals.put("mallory", item, 200, 0.0)
    arrivals.take_due(0.0)  # the first of each
    assert arrivals.find_overfull_sender() is None
    arrivals.put("anna", 4, 101, 0.0)
    assert arrivals.find_overfull_sender() == "mallory"
    arrivals.remove_sender("mallory", b"mallory", 0.0)
    assert arrivals.find_overfull_sender() is None


def test_a_window_of_each_honest_sender_may_wait(monkeypatch: pytest.MonkeyPatch):
    """The root of a star with many members has as many windows under way to it."""
    monkeypatch.setattr("gridtrain.network.transport.receive_queue.MAX_WAITING_BYTES", 1000)
    monkeypatch.setattr("gridtrain.network.transport.receive_queue.MIN_WAITING_BYTES", 200)
    arrivals: ReceiveQueue[int, str] = ReceiveQueue(1.0)
    for member in range(20):
        arrivals.put(member, "a window", 200, 0.0)
    assert arrivals.find_overfull_sender() is None
    arrivals.put(7, "more", 1, 0.0)
    assert arrivals.find_overfull_sender() == 7


def test_two_connections_of_one_owner_leave_both_debts():
    arrivals: ReceiveQueue[str, str] = ReceiveQueue(1000.0)
    for connection in ("first", "second"):
        arrivals.put(connection, "large", 10_000, 0.0)
        arrivals.take_due(0.0)
    for connection in ("first", "second"):
        arrivals.remove_sender(connection, b"mallory", 1.0)
    arrivals.add_sender("third", b"mallory", 1.0)
    arrivals.put("third", "next", 10, 1.0)
    assert arrivals.take_due(15.0) == []
    assert arrivals.take_due(21.5) == ["next"]


@pytest.mark.parametrize("seed", range(50))
def test_the_sum_keeps_to_the_cap_and_each_sender_to_its_order(seed):
    print("seed", seed)
    dice = random.Random(seed)
    rate = 10.0 ** dice.uniform(1, 6)
    arrivals: ReceiveQueue[int, tuple[int, int, int]] = ReceiveQueue(rate)
    senders, most = dice.randint(1, 5), 1000
    put, taken, now_s = [], [], 0.0
    for number in range(200):
        item = (dice.randrange(senders), number, dice.randint(1, most))
        put.append(item)
        arrivals.put(item[0], item, item[2], now_s)
        taken += arrivals.take_due(now_s)
        # Each sender is one message ahead of what it has paid for.
        assert sum(nbytes for *_, nbytes in taken) <= rate * (now_s + MAX_LATENESS_S) + senders * most + 1
        now_s += dice.expovariate(1.0) * most / rate
    backlog = [item for item in put if item not in taken]
    while (due_s := arrivals.due_s()) < float("inf"):
        now_s = max(now_s, due_s) + 1e-9
        got = arrivals.take_due(now_s)
        assert got, "it was due"
        taken += got
    assert sorted(taken) == sorted(put), backlog
    for sender in range(senders):
        assert [item for item in taken if item[0] == sender] == [item for item in put if item[0] == sender]
