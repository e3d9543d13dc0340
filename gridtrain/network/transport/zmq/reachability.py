"""Finding out whether a peer can be dialled: fresh connections that end with the handshake.

Decides which of some addresses answers with a peer's key.  Never touches a connection that carries
messages, and never looks a name up: the addresses are what somebody says of itself.

    reach(peer, addresses) --> one attempt each, all at once, as room permits
                                  handshake done ----> Reached(peer, address)
                                  all failed, or time over --> Reached(peer, "")

That the handshake came to its end proves the peer's key.  Without encryption there is no such proof, and
a Hello that names the key has to do.
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

MOST_ADDRESSES = 4
MOST_ATTEMPTS = 64
"""Connections at a time; whoever comes later waits, within its own time limit."""

PROBE_SOFTWARE = "gridtrain reach"
"""Without encryption the software of a Hello that asks who is there, and is no greeting."""


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
    """All questions that are open.

    Args:
        open_dealer: makes a socket that accepts nobody but the peer that it is given.
        hello: what to ask with if there is no encryption; None: there is.
        may_dial: false for addresses that this transport must not use.
    """

    def __init__(
        self,
        open_dealer: Callable[[PeerId], zmq.Socket[bytes]],
        hello: sockets.Frames | None,
        may_dial: Callable[[str], bool],
    ) -> None:
        self._open_dealer = open_dealer
        self._hello = hello
        self._can_dial = may_dial
        self._requests: list[_ReachRequest] = []

    def start(self, peer: PeerId, addresses: Sequence[str], deadline_s: float) -> None:
        possible = [address for address in dict.fromkeys(addresses) if sockets.is_numeric(address)]
        allowed = [address for address in possible if self._can_dial(address)]
        self._requests.append(_ReachRequest(peer, deadline_s, allowed[:MOST_ADDRESSES]))

    def interests(self) -> list[tuple[sockets.Waitable, int]]:
        attempts = [attempt for question in self._requests for attempt in question.attempts]
        sources = [attempt.monitor if self._hello is None else attempt.socket for attempt in attempts]
        if self._hello is not None:
            sources += [attempt.monitor for attempt in attempts]
        return [(source, sockets.READ) for source in sources]

    def due_s(self) -> float:
        """When a question's time is over."""
        return min((question.deadline_s for question in self._requests), default=float("inf"))

    def poll(self, now_s: float) -> list[ReachResult]:
        """Go on as far as possible; returns the answers that are found."""
        answers = []
        for question in list(self._requests):
            self._open_attempts(question)
            address = self._poll_request(question)
            failed = not question.untried and not question.attempts
            if address or failed or now_s >= question.deadline_s:
                answers.append(ReachResult(question.peer, address))
                self._close_request(question)
        return answers

    def close(self) -> None:
        for question in list(self._requests):
            self._close_request(question)

    def _open_attempts(self, question: _ReachRequest) -> None:
        """Open connections while there is room."""
        while question.untried and sum(len(other.attempts) for other in self._requests) < MOST_ATTEMPTS:
            address = question.untried.pop(0)
            try:
                dealer = self._open_dealer(question.peer)
            except zmq.ZMQError:  # no key at all, or no descriptor left
                continue
            attempt = _ReachAttempt(address, dealer, sockets.open_monitor(dealer))
            try:
                sockets.connect(dealer, address)
            except TransportError:
                sockets.close(attempt.socket, attempt.monitor)
                continue
            if self._hello is not None:
                sockets.write(dealer, self._hello)
            question.attempts.append(attempt)

    def _poll_request(self, question: _ReachRequest) -> str:
        """The address that answered, if one has; attempts that have failed are closed."""
        for attempt in list(question.attempts):
            events = [event for event, _ in sockets.monitor_events(attempt.monitor)]
            if self._answered(attempt, question.peer, events):
                return attempt.address
            if any(event in sockets.LOST_EVENTS for event in events):
                sockets.close(attempt.socket, attempt.monitor)
                question.attempts.remove(attempt)
        return ""

    def _answered(self, attempt: _ReachAttempt, peer: PeerId, events: list[int]) -> bool:
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

    def _close_request(self, question: _ReachRequest) -> None:
        self._requests.remove(question)
        for attempt in question.attempts:
            sockets.close(attempt.socket, attempt.monitor)
