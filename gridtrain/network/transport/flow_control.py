"""How much bulk may be under way to a peer that has not dealt with it yet.

Decides when a bulk message (`outbox.BULK`) may leave, and when a peer has sent more than it may.
Never touches a socket; control is never held back, so credit always gets through.

    sender                                             receiver
    loop -- send --> waits --fits?--> inner ======> inner --overdrawn?--> Received --> loop
                       ^                                                                 |
                       +---- Credit(total) <====== at least a quarter of the window <- done(peer, nbytes)

Both sides count the frames of a message as encoded, whatever a transport puts around them.  A message
may leave while the window has room for it, or while at most a quarter of the window is under way.  So a
receiver that grants whenever a quarter is to be granted leaves nobody waiting, and a message larger
than the window passes too.

At its `PeerUp` each side starts its counts at 0 and says so with Credit(0), whereupon the other does the
same.  The two moments differ, as an edge may come up anew on one side alone (after `hang_up`) or change
its connection; what is under way just then is counted on one side only, so a sender may for a while
have twice as much under way as the rule says.  A receiver therefore bears twice as much, and no more.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gridtrain.core.messages import Credit, Data, Message, PeerId
from gridtrain.errors import TransportError
from gridtrain.network.transport.interface import (
    PeerDown,
    PeerUp,
    Received,
    TrafficCounters,
    Transport,
    TransportEvent,
    TransportViolation,
)
from gridtrain.network.transport.send_queue import BULK_MESSAGES, DEFAULT_LIMIT_BYTES
from gridtrain.network.wire import codec

WINDOW_BYTES = 32 * 2**20
"""Part of the protocol: both sides must go by the same."""

RETRY_S = 0.02
"""Something was to leave, but the queue below was full: it is tried again."""


def credit_bytes(message: Message) -> int:
    """What a message counts for: the bytes of its frames, in the form that our encoder gives them."""
    if type(message) is Data:  # the most frequent of all
        return codec.data_bytes(message)
    return sum(map(len, codec.encode(message)))


def needs_credit(message: Message) -> bool:
    """Credit is for what a peer holds in memory until it is dealt with."""
    return isinstance(message, BULK_MESSAGES)


def fits_window(under_way_bytes: int, nbytes: int, window_bytes: int) -> bool:
    """May one more message of `nbytes` leave?"""
    return under_way_bytes + nbytes <= window_bytes or under_way_bytes <= window_bytes // 4


def exceeds_credit(open_bytes: int, nbytes: int, largest_bytes: int, window_bytes: int) -> bool:
    """The defence: one more message of `nbytes` is beyond what an honest peer can ever have under way.

    Args:
        open_bytes: came and was not granted anew.
        largest_bytes: of one message from this peer, this one included.
    """
    return open_bytes + nbytes > 2 * (window_bytes + largest_bytes)


@dataclass(slots=True, eq=False)
class _CreditAccount:
    """What went to and came from one peer since the counts began, in bytes."""

    sent: int = 0
    credited: int = 0
    waiting: deque[tuple[Message, int]] = field(default_factory=deque)
    waiting_bytes: int = 0

    received: int = 0
    processed: int = 0
    granted: int = 0
    carried_over: int = 0  # came before the counts began anew, and the loop still has it
    largest: int = 0

    @property
    def outstanding_bytes(self) -> int:
        return self.carried_over + self.received - self.granted

    def reset(self) -> None:
        self.carried_over += self.received - self.processed
        self.sent = self.credited = self.received = self.processed = self.granted = 0

    def mark_processed(self, nbytes: int) -> None:
        """The loop is done with so much, the oldest first; never more than there is."""
        old = min(self.carried_over, nbytes)
        self.carried_over -= old
        self.processed = min(self.received, self.processed + nbytes - old)

    def is_grant_due(self, window_bytes: int) -> bool:
        return self.processed - self.granted >= max(1, window_bytes // 4)


class FlowControlTransport:
    """Implements `Transport` over `inner`, and `done`, which the loop must call.

    Args:
        inner: any edges, direct or relayed.
        window_bytes: the same on both sides.
        queue_bytes: the most that may wait for one peer's credit.
    """

    def __init__(
        self, inner: Transport, *, window_bytes: int = WINDOW_BYTES, queue_bytes: int = DEFAULT_LIMIT_BYTES
    ) -> None:
        self.me = inner.me
        self._inner = inner
        self._window_bytes = window_bytes
        self._queue_bytes = queue_bytes
        self._accounts: dict[PeerId, _CreditAccount] = {}
        self._ever_sent: Counter[PeerId] = Counter()  # bytes of bulk, over all counts
        self._blocked: set[PeerId] = set()  # the queue below was full when something was to leave
        self._woken = False  # from any thread

    # -- the contract --------------------------------------------------------------------------

    @property
    def traffic(self) -> TrafficCounters:
        return self._inner.traffic

    @traffic.setter
    def traffic(self, traffic: TrafficCounters) -> None:
        self._inner.traffic = traffic

    def listen(self, address: str) -> str:
        return self._inner.listen(address)

    def dial(self, peer: PeerId, address: str) -> None:
        self._inner.dial(peer, address)

    def reach(self, peer: PeerId, addresses: Sequence[str], timeout_s: float) -> None:
        self._inner.reach(peer, addresses, timeout_s)

    def hang_up(self, peer: PeerId) -> None:
        """As the contract says; but what waits for credit is dropped."""
        self._accounts.pop(peer, None)
        self._inner.hang_up(peer)

    def connected(self, peer: PeerId) -> bool:
        return self._inner.connected(peer)

    def send(self, peer: PeerId, message: Message) -> None:
        """As the contract says; bulk waits for credit.  Raises `TransportError`, `LocalProtocolError`."""
        account = self._accounts.get(peer)
        if not needs_credit(message) or not self._inner.connected(peer):
            self._inner.send(peer, message)
            return
        if account is None:
            raise TransportError(
                f"peer {peer.hex()[:8]} is not connected", remedy="wait for its PeerUp before sending"
            )
        nbytes = credit_bytes(message)
        if not account.waiting and fits_window(account.sent - account.credited, nbytes, self._window_bytes):
            self._pass_on(peer, account, message, nbytes)
            return
        if account.waiting_bytes + nbytes > self._queue_bytes:
            raise TransportError(
                f"the queue for peer {peer.hex()[:8]} is full: {account.waiting_bytes} bytes wait for "
                f"credit, {nbytes} more would exceed {self._queue_bytes}",
                remedy="the peer deals with too little of what is sent; treat the edge as failed",
            )
        account.waiting.append((message, nbytes))
        account.waiting_bytes += nbytes

    def backlog_bytes(self, peer: PeerId) -> int:
        account = self._accounts.get(peer)
        return self._inner.backlog_bytes(peer) + (account.waiting_bytes if account is not None else 0)

    def poll(self, timeout_s: float) -> list[TransportEvent]:
        """As the contract says.  Returns early, with nothing, when credit let something leave.

        `Received.nbytes` of bulk is what `done` wants to hear.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            for peer in list(self._blocked):
                self._retry_blocked(peer)
            until_s = min(deadline_s, time.monotonic() + RETRY_S) if self._blocked else deadline_s
            events: list[TransportEvent] = []
            released = False
            for event in self._inner.poll(max(0.0, until_s - time.monotonic())):
                if isinstance(event, Received) and isinstance(event.message, Credit):
                    released |= self._apply_credit(event.peer, event.message.total_bytes, events)
                else:
                    self._handle(event, events)
            if events or released or self._woken or time.monotonic() >= deadline_s:
                self._woken = False
                return events

    def wake(self) -> None:
        self._woken = True
        self._inner.wake()

    def close(self) -> None:
        self._inner.close()

    # -- for the loop --------------------------------------------------------------------------

    def mark_processed(self, peer: PeerId, nbytes: int) -> None:
        """The loop has dealt with bulk of `nbytes` from `peer`: used, passed on or dropped it.

        To be called once for every `Received` with bulk; for those of a connection that has
        gone down it makes no difference.
        """
        account = self._accounts.get(peer)
        if account is not None:
            account.mark_processed(nbytes)
            self._grant(peer, account)

    # -- inside --------------------------------------------------------------------------------

    def _handle(self, event: TransportEvent, events: list[TransportEvent]) -> None:
        match event:
            case PeerUp(peer):
                self._accounts[peer] = _CreditAccount()
                if event.pending_key is None:  # a guest has nothing to send
                    self._reset_account(peer)
            case PeerDown(peer):
                self._accounts.pop(peer, None)
            case Received(peer, message) if needs_credit(message):
                account = self._accounts.setdefault(peer, _CreditAccount())
                nbytes = credit_bytes(message)
                account.largest = max(account.largest, nbytes)
                if exceeds_credit(account.outstanding_bytes, nbytes, account.largest, self._window_bytes):
                    text = (
                        f"{type(message).__name__} of {nbytes} bytes although {account.outstanding_bytes} bytes are under "
                        f"way; the window has {self._window_bytes}"
                    )
                    events.append(TransportViolation(peer, text))
                    return
                account.received += nbytes
                event = Received(peer, message, nbytes)
        events.append(event)

    def _reset_account(self, peer: PeerId) -> None:
        with contextlib.suppress(TransportError):  # it is down again
            self._inner.send(peer, Credit(0))

    def _apply_credit(self, peer: PeerId, total_bytes: int, events: list[TransportEvent]) -> bool:
        """True: something could leave."""
        account = self._accounts.setdefault(peer, _CreditAccount())
        if total_bytes > self._ever_sent[peer]:
            text = f"Credit for {total_bytes} bytes of bulk; {self._ever_sent[peer]} were sent to it"
            events.append(TransportViolation(peer, text))
            return False
        if total_bytes == 0:
            account.reset()
        # What was under way when the counts began is in its total and not in ours.
        account.credited = max(account.credited, min(total_bytes, account.sent))
        return self._send_waiting(peer, account)

    def _send_waiting(self, peer: PeerId, account: _CreditAccount) -> bool:
        """Send what waited, as far as credit goes."""
        released = False
        while account.waiting:
            message, nbytes = account.waiting[0]
            if not fits_window(account.sent - account.credited, nbytes, self._window_bytes):
                break
            try:
                self._pass_on(peer, account, message, nbytes)
            except TransportError:
                self._blocked.add(peer)
                break
            account.waiting.popleft()
            account.waiting_bytes -= nbytes
            released = True
        return released

    def _pass_on(self, peer: PeerId, account: _CreditAccount, message: Message, nbytes: int) -> None:
        self._inner.send(peer, message)
        account.sent += nbytes
        self._ever_sent[peer] += nbytes

    def _grant(self, peer: PeerId, account: _CreditAccount) -> None:
        if account.is_grant_due(self._window_bytes):
            try:
                self._inner.send(peer, Credit(account.processed))
                account.granted = account.processed
            except TransportError:
                self._blocked.add(peer)

    def _retry_blocked(self, peer: PeerId) -> None:
        self._blocked.discard(peer)
        account = self._accounts.get(peer)
        if account is not None and self._inner.connected(peer):
            self._grant(peer, account)
            self._send_waiting(peer, account)
