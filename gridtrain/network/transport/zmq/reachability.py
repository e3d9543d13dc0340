"""Checks, with connections that end after the handshake, whether a peer can be dialled at its addresses.

    reach(peer, addresses) --> one attempt per address, at the same time, up to `MAX_ATTEMPTS`
                                  handshake finished --------> ReachResult(peer, address)
                                  all failed, or timeout ----> ReachResult(peer, "")

A finished handshake proves the peer's key.  Without encryption, a Hello that names the key is sufficient.
Host names are not resolved, because a peer chooses the addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq

from gridtrain.core.messages import Hello, PeerId
from gridtrain.errors import GridtrainError, TransportError
from gridtrain.network.transport.interface import ReachResult
from gridtrain.network.transport.zmq import sockets
from gridtrain.network.wire import codec

MAX_ADDRESSES = 4
MAX_ATTEMPTS = 64
"""The maximum number of simultaneous attempts.  Further attempts wait; their time limits keep running."""

PROBE_SOFTWARE = "gridtrain reach"
"""The value of `software` in a Hello that only requests the peer's key and opens no connection.  The value is
used only without encryption."""


@dataclass(slots=True, eq=False)
class _ReachAttempt:
    address: str
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]


@dataclass(slots=True, eq=False)
class _ReachRequest:
    peer: PeerId
    deadline_s: float
    untried: list[str]
    attempts: list[_ReachAttempt] = field(default_factory=list)


class ReachabilityCheck:
    """Checks whether peers can be dialled; several peers can be checked at the same time.

    Args:
        open_dealer: opens a socket that connects only to the given peer.
        hello: the frames to send if connections are not encrypted; None if they are encrypted.
        can_dial: returns whether this transport may use an address.
    """

    def __init__(
        self,
        open_dealer: Callable[[PeerId], zmq.Socket[bytes]],
        hello: sockets.Frames | None,
        can_dial: Callable[[str], bool],
    ) -> None:
        self._open_dealer = open_dealer
        self._hello = hello
        self._can_dial = can_dial
        self._requests: list[_ReachRequest] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._requests)

    def start(self, peer: PeerId, addresses: Sequence[str], deadline_s: float) -> None:
        possible = [address for address in dict.fromkeys(addresses) if sockets.is_numeric(address)]
        allowed = [address for address in possible if self._can_dial(address)]
        self._requests.append(_ReachRequest(peer, deadline_s, allowed[:MAX_ADDRESSES]))

    def interests(self) -> list[tuple[sockets.Waitable, int]]:
        attempts = [attempt for request in self._requests for attempt in request.attempts]
        sources = [attempt.monitor if self._hello is None else attempt.socket for attempt in attempts]
        if self._hello is not None:
            sources += [attempt.monitor for attempt in attempts]
        return [(source, sockets.READ) for source in sources]

    def due_s(self) -> float:
        """Return the time at which the first request times out; infinity if there is no request."""
        return min((request.deadline_s for request in self._requests), default=float("inf"))

    def poll(self, now_s: float) -> list[ReachResult]:
        """Process all requests; return the results of the finished requests."""
        results = []
        for request in list(self._requests):
            self._open_attempts(request)
            address = self._poll_request(request)
            failed = not request.untried and not request.attempts
            if address or failed or now_s >= request.deadline_s:
                results.append(ReachResult(request.peer, address))
                self._close_request(request)
        return results

    def close(self) -> None:
        for request in list(self._requests):
            self._close_request(request)

    def _open_attempts(self, request: _ReachRequest) -> None:
        """Open connections to the untried addresses, up to `MAX_ATTEMPTS` in total."""
        while request.untried and sum(len(other.attempts) for other in self._requests) < MAX_ATTEMPTS:
            address = request.untried.pop(0)
            try:
                dealer = self._open_dealer(request.peer)
            except zmq.ZMQError:  # the peer's name is not a key, or no descriptor is left
                continue
            attempt = _ReachAttempt(address, dealer, sockets.open_monitor(dealer))
            try:
                sockets.connect(dealer, address)
            except TransportError:
                sockets.close(attempt.socket, attempt.monitor)
                continue
            if self._hello is not None:
                sockets.write(dealer, self._hello)
            request.attempts.append(attempt)

    def _poll_request(self, request: _ReachRequest) -> str:
        """Close failed attempts; return the address that has answered, or "" if there is none yet."""
        for attempt in list(request.attempts):
            events = [event for event, _ in sockets.monitor_events(attempt.monitor)]
            if self._has_answered(attempt, request.peer, events):
                return attempt.address
            if any(event in sockets.LOST_EVENTS for event in events):
                sockets.close(attempt.socket, attempt.monitor)
                request.attempts.remove(attempt)
        return ""

    def _has_answered(self, attempt: _ReachAttempt, peer: PeerId, events: list[int]) -> bool:
        if self._hello is None:
            return zmq.EVENT_HANDSHAKE_SUCCEEDED in events
        incoming = sockets.read(attempt.socket, encrypted=False)
        if incoming is None:
            return False
        try:
            message = codec.decode(incoming.frames)
        except GridtrainError:
            return False
        return isinstance(message, Hello) and message.peer == peer

    def _close_request(self, request: _ReachRequest) -> None:
        self._requests.remove(request)
        for attempt in request.attempts:
            sockets.close(attempt.socket, attempt.monitor)
