"""When a connection that we made is dialled again."""

from __future__ import annotations

from typing import Any

from gridtrain.network.transport.zmq.dialer import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    REDIAL_S,
    STEADY_S,
    Connection,
    OutgoingConnection,
)

PEER = b"p" * 32


def established(at_s: float) -> OutgoingConnection:
    """A connection over which the peer has greeted; its socket is not touched."""
    socket: Any = None
    dial = OutgoingConnection(PEER, "tcp://10.0.0.1:7000", established_s=at_s)
    dial.connection = Connection(PEER, PEER, "", socket, outgoing=dial)
    return dial


def waits_s(dial: OutgoingConnection, now_s: float, times: int) -> list[float]:
    found = []
    for _ in range(times):
        dial.retry_later(now_s)
        found.append(dial.due_s - now_s)
    return found


def test_a_steady_connection_is_redialled_at_once_and_then_with_a_back_off() -> None:
    first, second, third, *_, last = waits_s(established(10.0), 10.0 + STEADY_S, 12)
    assert REDIAL_S / 2 <= first <= REDIAL_S
    assert BACKOFF_FIRST_S / 2 <= second <= BACKOFF_FIRST_S
    assert BACKOFF_FIRST_S <= third <= 2 * BACKOFF_FIRST_S
    assert BACKOFF_MAX_S / 2 <= last <= BACKOFF_MAX_S


def test_a_connection_that_is_closed_as_soon_as_it_is_made_is_redialled_with_a_back_off() -> None:
    """As by a peer that does not admit us."""
    (first,) = waits_s(established(10.0), 10.0 + STEADY_S / 2, 1)
    assert BACKOFF_FIRST_S / 2 <= first <= BACKOFF_FIRST_S


def test_the_lost_connection_is_returned_once() -> None:
    dial = established(10.0)
    connection = dial.connection
    assert dial.retry_later(20.0) is connection is not None
    assert dial.retry_later(20.1) is None
