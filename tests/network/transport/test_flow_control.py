"""Flow control: how much a peer may send, and what happens to one that sends more."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import pytest
from faulty_hub import FaultyHub

from gridtrain.core.messages import (
    Channel,
    CollectivePhase,
    Credit,
    Data,
    Message,
    PayloadSlot,
    Ping,
    RoundId,
    StateBlock,
    StatusReply,
)
from gridtrain.errors import TransportError
from gridtrain.network.transport import flow_control
from gridtrain.network.transport.flow_control import FlowControlTransport
from gridtrain.network.transport.in_memory import MemoryTransport
from gridtrain.network.transport.interface import (
    PeerDown,
    PeerUp,
    Received,
    Transport,
    TransportEvent,
    TransportViolation,
)
from gridtrain.network.wire import codec

WINDOW_BYTES = 64 * 1024
CHUNK_BYTES = 8 * 1024


def data(index: int, payload: object = bytes(CHUNK_BYTES)) -> Data:
    return Data(
        RoundId(1, 1, 0, 0), Channel(), PayloadSlot(CollectivePhase.REDUCE, segment=index), 0, payload
    )


class Side:
    def __init__(self, name: str, transport: Transport) -> None:
        self.name, self.key, self.transport = name, transport.me, transport
        self.events: list[TransportEvent] = []
        self.undone: list[Received] = []

    def turn(self) -> None:
        events = self.transport.poll(0.001)
        self.events += events
        self.undone += [e for e in events if isinstance(e, Received) and isinstance(e.message, Data)]

    def finish(self, count: int | None = None) -> None:
        """The loop processes the oldest `count` messages (default: all)."""
        assert isinstance(self.transport, FlowControlTransport)
        for event in self.undone[:count]:
            self.transport.mark_processed(event.peer, event.nbytes)
        del self.undone[:count]

    def got(self, kind: type[Message] = Data) -> list[Message]:
        return [e.message for e in self.events if isinstance(e, Received) and isinstance(e.message, kind)]

    def segments(self) -> list[int]:
        return [message.slot.segment for message in self.got(Data)]

    def violations(self) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, TransportViolation)]


class Pair:
    """anna has dialled bert.  `raw` ones have no flow control."""

    def __init__(self) -> None:
        self.hub = FaultyHub()
        self.sides: list[Side] = []

    def add(self, name: str, *, raw: bool = False) -> Side:
        inner = MemoryTransport(name.encode().ljust(32, b"."), self.hub)
        transport: Transport = inner
        if not raw:
            transport = FlowControlTransport(inner, window_bytes=WINDOW_BYTES)
        self.sides.append(Side(name, transport))
        return self.sides[-1]

    def join(self, anna: Side, bert: Side) -> tuple[Side, Side]:
        bert.transport.listen("memory://bert")
        anna.transport.dial(bert.key, "memory://bert")
        self.settle()
        assert anna.transport.connected(bert.key) and bert.transport.connected(anna.key)
        return anna, bert

    def settle(self) -> None:
        """Poll until nothing happens any more."""
        quiet = 0
        while quiet < 3:
            before = [len(side.events) for side in self.sides], self.messages()
            for side in self.sides:
                side.turn()
            moved = before != ([len(side.events) for side in self.sides], self.messages())
            quiet = 0 if moved else quiet + 1

    def messages(self) -> int:
        return sum(sum(side.transport.traffic.sent_messages.values()) for side in self.sides)

    def until(self, condition: Callable[[], object], deadline_s: float = 10.0) -> None:
        end_s = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < end_s, {side.name: len(side.got()) for side in self.sides}
            for side in self.sides:
                side.turn()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for side in made.sides:
        side.transport.close()


ONE = sum(map(len, codec.encode(data(0))))
FULL = WINDOW_BYTES // ONE


def test_a_receiver_that_deals_with_nothing_stops_the_sender_at_the_window(pair):
    anna, bert = pair.join(pair.add("anna"), pair.add("bert"))
    for index in range(3 * FULL):
        anna.transport.send(bert.key, data(index))
    pair.settle()
    assert bert.segments() == list(range(FULL))
    assert anna.transport.backlog_bytes(bert.key) == 2 * FULL * ONE
    assert anna.violations() == bert.violations() == []


def test_what_is_dealt_with_makes_room_and_order_is_kept(pair):
    anna, bert = pair.join(pair.add("anna"), pair.add("bert"))
    for index in range(5 * FULL):
        anna.transport.send(bert.key, data(index))
    while len(bert.got()) < 5 * FULL:
        pair.settle()
        assert len(bert.undone) * ONE <= WINDOW_BYTES
        bert.finish(2)
    assert bert.segments() == list(range(5 * FULL))
    assert anna.transport.backlog_bytes(bert.key) == 0
    grants = bert.transport.traffic.sent_messages["Credit"]
    assert grants <= 2 + 4 * 5, f"{grants} messages to grant five windows a quarter at a time"


def test_control_never_waits(pair):
    anna, bert = pair.join(pair.add("anna"), pair.add("bert"))
    for index in range(2 * FULL):
        anna.transport.send(bert.key, data(index))
    anna.transport.send(bert.key, Ping(1))
    anna.transport.send(bert.key, StatusReply(bytes(4 * WINDOW_BYTES)))
    pair.settle()
    assert bert.got(Ping) and bert.got(StatusReply)
    assert len(bert.segments()) == FULL


def test_state_blocks_need_credit_too(pair):
    anna, bert = pair.join(pair.add("anna"), pair.add("bert"))
    for index in range(100):
        anna.transport.send(bert.key, StateBlock(1, 1, index, 100, bytes(CHUNK_BYTES)))
    pair.settle()
    assert FULL - 1 <= len(bert.got(StateBlock)) <= FULL + 1


def test_a_message_larger_than_the_window_passes(pair):
    anna, bert = pair.join(pair.add("anna"), pair.add("bert"))
    for index in range(4):
        anna.transport.send(bert.key, data(index, bytes(3 * WINDOW_BYTES)))
    for count in range(1, 5):
        pair.settle()
        assert len(bert.got()) == count
        bert.finish()
    assert bert.violations() == []


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.7, 0.76, 1.0, 1.3])
def test_no_size_of_message_gets_stuck(pair, fraction):
    anna, bert = pair.join(pair.add("anna"), pair.add("bert"))
    for index in range(30):
        anna.transport.send(bert.key, data(index, bytes(int(WINDOW_BYTES * fraction))))
    end_s = time.monotonic() + 10
    while len(bert.got()) < 30:
        assert time.monotonic() < end_s, f"stuck after {len(bert.got())}"
        pair.settle()
        bert.finish()
    assert bert.violations() == []


def test_the_queue_is_bounded(pair, monkeypatch):
    monkeypatch.setattr(flow_control, "QUEUE_LIMIT_BYTES", 4 * ONE)
    anna, bert = pair.join(pair.add("anna"), pair.add("bert"))
    with pytest.raises(TransportError, match=r"bytes wait for credit, and \d+ more would exceed"):
        for index in range(FULL + 100):
            anna.transport.send(bert.key, data(index))
    pair.settle()
    assert len(bert.got()) == FULL
    assert anna.transport.backlog_bytes(bert.key) <= 4 * ONE


@pytest.mark.parametrize("seed", range(10))
def test_both_directions_full_never_lock(pair, seed):
    rng = random.Random(seed)
    print("seed", seed)
    anna, bert = pair.join(pair.add("anna"), pair.add("bert"))
    total = 60
    sent = {anna.name: 0, bert.name: 0}
    end_s = time.monotonic() + 20
    while min(len(anna.got()), len(bert.got())) < total:
        assert time.monotonic() < end_s, (len(anna.got()), len(bert.got()))
        for side, other in ((anna, bert), (bert, anna)):
            for _ in range(rng.randrange(12)):
                if sent[side.name] < total:
                    size = rng.choice([0, 100, 5000, 30_000, WINDOW_BYTES, 2 * WINDOW_BYTES])
                    side.transport.send(other.key, data(sent[side.name], bytes(size)))
                    sent[side.name] += 1
            side.turn()
            side.finish(rng.randrange(8))
    assert anna.segments() == bert.segments() == list(range(total))
    assert anna.violations() == bert.violations() == []


# -- connections that come and go --------------------------------------------------------------------


def test_a_new_connection_begins_with_a_full_window(pair):
    anna, bert = pair.join(pair.add("anna"), pair.add("bert"))
    for index in range(2 * FULL):
        anna.transport.send(bert.key, data(index))
    pair.settle()
    pair.hub.disconnect(anna.key, bert.key)
    pair.settle()
    assert [e for e in anna.events if isinstance(e, PeerDown)] and anna.transport.backlog_bytes(bert.key) == 0
    pair.hub.reconnect(anna.key, bert.key)
    pair.settle()
    bert.finish()  # of the connection that is gone: makes no difference
    bert.events.clear()
    for index in range(2 * FULL):
        anna.transport.send(bert.key, data(index))
    pair.settle()
    assert bert.segments() == list(range(FULL))
    for _ in range(2):
        bert.finish()
        pair.settle()
    assert bert.segments() == list(range(2 * FULL))
    assert anna.violations() == bert.violations() == []


@pytest.mark.parametrize("seed", range(10))
def test_an_edge_that_comes_up_anew_on_one_side_alone_goes_on(pair, seed):
    """bert hangs up on the connection that anna dialled, and dials back: anna may not notice."""
    rng = random.Random(seed)
    print("seed", seed)
    anna, bert = pair.join(pair.add("anna"), pair.add("bert"))
    anna.transport.listen("memory://anna")
    for _ in range(6):
        for side, other in ((anna, bert), (bert, anna)):
            for index in range(rng.randrange(3 * FULL)):
                side.transport.send(other.key, data(index))
        for _ in range(rng.randrange(10)):
            for side in (anna, bert):
                side.turn()
                side.finish(rng.randrange(5))
        bert.transport.hang_up(anna.key)
        for _ in range(rng.randrange(3)):
            anna.turn()
        bert.transport.dial(anna.key, "memory://anna")
        pair.until(lambda: bert.transport.connected(anna.key) and anna.transport.connected(bert.key))
        pair.settle()
        anna.finish()
        bert.finish()
        pair.settle()
    for side in (anna, bert):
        side.finish()
        side.events.clear()
    for side, other in ((anna, bert), (bert, anna)):
        for index in range(4 * FULL):
            side.transport.send(other.key, data(10_000 + index))
    end_s = time.monotonic() + 10
    wanted = list(range(10_000, 10_000 + 4 * FULL))
    while not all(side.segments()[-len(wanted) :] == wanted for side in (anna, bert)):
        assert time.monotonic() < end_s, (len(anna.got()), len(bert.got()))
        for side in (anna, bert):
            side.turn()
            side.finish()
    assert anna.violations() == bert.violations() == []


def test_bulk_before_the_peer_is_up_is_an_error(pair):
    anna, bert = pair.add("anna"), pair.add("bert")
    bert.transport.listen("memory://bert")
    anna.transport.dial(bert.key, "memory://bert")
    with pytest.raises(TransportError, match="not connected"):
        anna.transport.send(bert.key, data(0))


def test_credit_is_no_event_and_a_guest_gets_none(pair):
    anna, bert = pair.join(pair.add("anna"), pair.add("bert", raw=True))
    assert anna.got(Credit) == [] and bert.got(Credit) == [Credit(0)]
    sent = anna.transport.traffic.sent_messages["Credit"]
    anna.transport._handle(PeerUp(b"g" * 32, pending_key=b"i" * 32), [])
    assert anna.transport.traffic.sent_messages["Credit"] == sent


def test_a_poll_ends_when_credit_lets_something_leave(pair):
    """So that a caller which fills the queue in portions can continue."""
    anna, bert = pair.join(pair.add("anna"), pair.add("bert"))
    for index in range(2 * FULL):
        anna.transport.send(bert.key, data(index))
    pair.settle()
    bert.finish()
    waited_bytes = anna.transport.backlog_bytes(bert.key)
    start_s = time.monotonic()
    while anna.transport.backlog_bytes(bert.key) == waited_bytes:
        assert anna.transport.poll(60.0) == []
    assert time.monotonic() - start_s < 30.0


# -- cheats ------------------------------------------------------------------------------------------


def test_a_sender_that_does_not_wait_is_a_violation_and_fills_no_memory(pair):
    """anna sends 20 windows to a receiver that processes nothing, without waiting for credit."""
    anna, bert = pair.join(pair.add("anna", raw=True), pair.add("bert"))
    for index in range(20 * FULL):
        anna.transport.send(bert.key, data(index))
    pair.until(lambda: len(bert.events) >= 20 * FULL)
    pair.settle()
    held_bytes = sum(event.nbytes for event in bert.undone)
    assert held_bytes <= 2 * (WINDOW_BYTES + ONE)
    assert "bytes were not acknowledged; the window is 65536 bytes" in bert.violations()[0]
    assert {event.peer for event in bert.events if isinstance(event, TransportViolation)} == {anna.key}


def test_beginning_anew_again_and_again_gains_nothing(pair):
    anna, bert = pair.join(pair.add("anna", raw=True), pair.add("bert"))
    for index in range(20 * FULL):
        anna.transport.send(bert.key, Credit(0))
        anna.transport.send(bert.key, data(index))
    pair.until(lambda: bert.violations())
    pair.settle()
    assert sum(event.nbytes for event in bert.undone) <= 2 * (WINDOW_BYTES + ONE)


def test_granting_more_than_was_ever_sent_is_a_violation(pair):
    anna, bert = pair.join(pair.add("anna"), pair.add("bert", raw=True))
    for index in range(2 * FULL):
        anna.transport.send(bert.key, data(index))
    bert.transport.send(anna.key, Credit(FULL * ONE + 1))
    pair.until(lambda: anna.violations())
    assert anna.violations() == [f"Credit is for {FULL * ONE + 1} bytes, but only {FULL * ONE} were sent"]
    pair.settle()
    assert len(bert.got()) == FULL


def test_a_loop_that_says_done_too_often_grants_no_more_than_came(pair):
    anna, bert = pair.join(pair.add("anna"), pair.add("bert"))
    for index in range(FULL):
        anna.transport.send(bert.key, data(index))
    pair.settle()
    bert.transport.mark_processed(anna.key, 10 * WINDOW_BYTES)
    pair.settle()
    assert anna.violations() == []
