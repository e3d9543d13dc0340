"""Rate caps and the send queue: pure, so every time is exact."""

from __future__ import annotations

import pytest

from gridtrain.core.messages import Ping, StateBlock
from gridtrain.errors import ConfigError, TransportError
from gridtrain.network.transport import send_queue
from gridtrain.network.transport.rate_limiter import (
    MAX_LATENESS_S,
    UploadLimiter,
    parse_rate,
)
from gridtrain.network.transport.send_queue import QueuedMessage, SendQueue, is_bulk

# -- rates ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rate_Bps"),
    [
        ("20Mbit", 2.5e6),
        ("1Gbit", 125e6),
        ("500kbit", 62_500),
        ("2.5MB", 2.5e6),
        ("100B", 100),
        ("8bit", 1),
        ("20 mbit/s", 2.5e6),
    ],
)
def test_rates_are_read_as_bytes_per_second(text, rate_Bps):
    assert parse_rate(text) == rate_Bps


@pytest.mark.parametrize(
    "text", ["", "20", "20Mb", "Mbit", "-3MB", "1e3MB", "0Mbit", "2.5 MiB", "inf MB", "4 bit/m"]
)
def test_what_is_no_rate_is_refused_with_examples(text):
    with pytest.raises(ConfigError, match='"20Mbit", "1Gbit"'):
        parse_rate(text)


# -- the upload line -----------------------------------------------------------------------------


def test_bulk_leaves_one_after_the_other_without_a_burst():
    pacer = UploadLimiter(1000.0)
    # queued together at t = 10 after a long rest:  |--500--|--250--|
    assert pacer.schedule_bulk(500, queued_s=10.0, now_s=10.0) == 10.5
    assert pacer.schedule_bulk(250, queued_s=10.0, now_s=10.5) == 10.75
    # the line rests from 10.75 to 12: that time is not saved up
    assert pacer.schedule_bulk(1000, queued_s=12.0, now_s=12.0) == 13.0


def test_a_loop_that_wakes_a_little_late_does_not_slow_the_line():
    pacer = UploadLimiter(1000.0)
    pacer.schedule_bulk(500, queued_s=0.0, now_s=0.0)
    assert pacer.schedule_bulk(500, queued_s=0.0, now_s=0.5 + MAX_LATENESS_S / 2) == 1.0
    # but what is missed by much is missed
    assert pacer.schedule_bulk(500, queued_s=0.0, now_s=5.0) == pytest.approx(5.5 - MAX_LATENESS_S)


def test_control_goes_at_once_and_is_paid_for_by_later_bulk():
    pacer = UploadLimiter(1000.0)
    pacer.schedule_bulk(500, queued_s=0.0, now_s=0.0)
    pacer.charge_control(100, now_s=0.2)
    assert pacer.schedule_bulk(500, queued_s=0.0, now_s=0.5) == pytest.approx(1.1)
    assert pacer.control_free_s == pytest.approx(0.3)  # control alone keeps to the rate as well


def test_no_cap_is_no_wait():
    assert UploadLimiter(None).schedule_bulk(10**12, queued_s=1.0, now_s=2.0) == 2.0


# -- the outbox ----------------------------------------------------------------------------------


def packet(
    peer: str, name: str, nbytes: int = 100, *, bulk: bool = True, queued_s: float = 0.0
) -> QueuedMessage[str]:
    return QueuedMessage(peer.encode() * 32, "Data", name, nbytes, bulk, queued_s)


def drain(outbox: SendQueue[str], now_s: float = 0.0) -> list[str]:
    taken = []
    while (item := outbox.take(now_s)) is not None:
        taken.append(item.body)
    return taken


def test_only_data_and_state_wait_for_the_line():
    assert is_bulk(StateBlock(1, 1, 0, 1, b""))
    assert not is_bulk(Ping(1))


def test_peers_take_turns_and_control_goes_first():
    outbox: SendQueue[str] = SendQueue(UploadLimiter(None))
    for item in (
        packet("a", "a1"),
        packet("a", "a2"),
        packet("a", "a3"),
        packet("b", "b1"),
        packet("b", "b2"),
    ):
        outbox.put(item)
    outbox.put(packet("b", "vote", bulk=False))
    assert drain(outbox) == ["vote", "a1", "b1", "a2", "b2", "a3"]
    assert outbox.is_empty()


def test_the_cap_is_shared_and_tells_when_the_next_one_leaves():
    outbox: SendQueue[str] = SendQueue(UploadLimiter(1000.0))
    outbox.put(packet("a", "a1", 500))
    outbox.put(packet("b", "b1", 500))
    assert drain(outbox, 0.0) == [] and outbox.due_s() == 0.5
    assert drain(outbox, 0.5) == ["a1"] and outbox.due_s() == 1.0
    outbox.put(packet("b", "vote", 10, bulk=False))
    assert drain(outbox, 0.6) == ["vote"]
    assert drain(outbox, 1.0) == ["b1"] and outbox.due_s() == float("inf")


@pytest.mark.parametrize(("rate_Bps", "a1_s", "vote_s"), [(4000.0, 21.0, 13.0), (500.0, 98.0, 34.0)])
def test_a_changed_cap_holds_for_what_already_waits(rate_Bps, a1_s, vote_s):
    """At 1 kB/s, a1 would leave at 54, the second vote at 22; at 10 the cap changes."""
    outbox: SendQueue[str] = SendQueue(UploadLimiter(1000.0))
    outbox.put(packet("a", "a1", 32_000))
    assert drain(outbox, 0.0) == []
    outbox.put(packet("a", "vote 1", 22_000, bulk=False))
    assert drain(outbox, 0.0) == ["vote 1"]
    outbox.put(packet("a", "vote 2", 1, bulk=False))
    outbox.limiter.rate_Bps = rate_Bps
    assert drain(outbox, 10.0) == [] and outbox.due_s() == vote_s
    assert drain(outbox, a1_s)[-1:] == ["a1"]


def test_a_lifted_cap_lets_everything_go_at_once_and_a_new_one_begins_afresh():
    outbox: SendQueue[str] = SendQueue(UploadLimiter(1.0))
    for item in (packet("a", "a1", 1000), packet("b", "b1", 1000), packet("b", "vote", 500, bulk=False)):
        outbox.put(item)
    assert drain(outbox, 0.0) == ["vote"]
    outbox.put(packet("b", "vote 2", 500, bulk=False))
    outbox.limiter.rate_Bps = None
    assert drain(outbox, 1.0) == ["vote 2", "a1", "b1"]
    outbox.limiter.rate_Bps = 100.0
    outbox.put(packet("a", "a2", 1000, queued_s=2.0))
    assert drain(outbox, 2.0) == [] and outbox.due_s() == 12.0


def test_what_a_socket_refuses_stays_first_and_holds_up_nobody_else():
    outbox: SendQueue[str] = SendQueue(UploadLimiter(None))
    for item in (packet("a", "a1"), packet("a", "a2"), packet("b", "b1")):
        outbox.put(item)
    refused = outbox.take(0.0)
    assert refused is not None and refused.body == "a1"
    outbox.put_back(refused)
    outbox.put(packet("a", "vote", bulk=False))
    assert drain(outbox) == ["b1"]
    assert outbox.blocked_peers() == [b"a" * 32]
    assert outbox.backlog_bytes(b"a" * 32) == 300
    outbox.unblock(b"a" * 32)
    assert drain(outbox) == ["a1", "vote", "a2"]
    assert outbox.backlog_bytes(b"a" * 32) == 0


def test_the_bound_is_per_peer_and_says_what_is_queued(monkeypatch):
    monkeypatch.setattr(send_queue, "QUEUE_LIMIT_BYTES", 250)
    outbox: SendQueue[str] = SendQueue(UploadLimiter(1.0))
    outbox.put(packet("a", "a1"))
    outbox.put(packet("a", "a2"))
    with pytest.raises(TransportError, match="200 bytes wait, and 100 more would exceed the limit of 250"):
        outbox.put(packet("a", "a3"))
    outbox.put(packet("b", "b1"))


def test_a_dropped_peer_leaves_nothing_even_on_the_line():
    outbox: SendQueue[str] = SendQueue(UploadLimiter(1000.0))
    outbox.put(packet("a", "a1"))
    outbox.put(packet("b", "b1"))
    assert drain(outbox, 0.0) == []  # a1 is on the line
    outbox.clear_peer(b"a" * 32)
    assert drain(outbox, 0.0) == [] and drain(outbox, 0.2) == ["b1"]
    assert outbox.is_empty()
