"""Flow control by byte credits: bounds the bulk that was sent to a peer and that it has not processed.

Bulk (`send_queue.BULK_MESSAGES`) waits for credit; control never waits, so credit always gets through.

    sender                                                     receiver
    loop -- send --> waiting --fits?--> inner =========> inner --exceeds?--> Received --> loop
                        ^                                                                   |
                        +------ Credit(total) <========= a quarter of the window <--- return_credit

Both sides count the frames of a message as encoded, without what a transport adds.  A message may leave
while the window has room for it, or while at most a quarter of the window is unacknowledged.  So a receiver
that grants at every quarter leaves nobody waiting, and a message larger than the window can be sent.

At `PeerUp` each side resets its counts to 0 and sends Credit(0), at which the other does the same.  The two
do so at different times, because a connection may come up again on one side alone (after `hang_up`) or be
replaced.  Messages under way at that time are counted on one side only, so a sender may for a while have
twice as much unacknowledged as the rule says.  A receiver tolerates twice as much, and no more.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gridtrain.core.messages import Credit, Data, Message, PeerId
from gridtrain.errors import TransportError
from gridtrain.network.transport.interface import (
    PeerDown,
    PeerUp,
    Received,
    Transport,
    TransportEvent,
    TransportViolation,
)
from gridtrain.network.transport.send_queue import BULK_MESSAGES, DEFAULT_LIMIT_BYTES
from gridtrain.network.wire import codec

WINDOW_BYTES = 32 * 2**20
"""Part of the protocol: the same on both sides."""

RETRY_S = 0.02
"""After which sending is tried again if the queue below was full."""


def credit_bytes(message: Message) -> int:
    """Bytes of the message's frames, as our encoder writes them."""
    if type(message) is Data:  # the most frequent
        return codec.data_bytes(message)
    return sum(map(len, codec.encode(message)))


def needs_credit(message: Message) -> bool:
    """Whether the message is bulk, which a peer holds in memory until it is processed."""
    return isinstance(message, BULK_MESSAGES)


def fits_window(unacknowledged_bytes: int, nbytes: int, window_bytes: int) -> bool:
    """Whether one more message of `nbytes` may leave."""
    return unacknowledged_bytes + nbytes <= window_bytes or unacknowledged_bytes <= window_bytes // 4


def exceeds_credit(outstanding_bytes: int, nbytes: int, largest_bytes: int, window_bytes: int) -> bool:
    """The defence: whether one more message of `nbytes` is more than an honest peer can have under way.

    Args:
        outstanding_bytes: received, and not granted again.
        largest_bytes: size of the largest message from this peer, this one included.
    """
    return outstanding_bytes + nbytes > 2 * (window_bytes + largest_bytes)


@dataclass(slots=True, eq=False)
class _CreditAccount:
    """Bytes sent to and received from one peer since the counts were reset."""

    sent: int = 0
    credited: int = 0
    waiting: deque[tuple[Message, int]] = field(default_factory=deque)
    waiting_bytes: int = 0

    received: int = 0
    processed: int = 0
    granted: int = 0
    carried_over: int = 0  # received before the reset, and not processed yet
    largest: int = 0

    @property
    def unacknowledged_bytes(self) -> int:
        return self.sent - self.credited

    @property
    def outstanding_bytes(self) -> int:
        return self.carried_over + self.received - self.granted

    @property
    def unprocessed_bytes(self) -> int:
        return self.carried_over + self.received - self.processed

    def reset(self) -> None:
        self.carried_over += self.received - self.processed
        self.sent = self.credited = self.received = self.processed = self.granted = 0

    def mark_processed(self, nbytes: int) -> None:
        """The loop has processed this many bytes, the oldest first; never more than there are."""
        old = min(self.carried_over, nbytes)
        self.carried_over -= old
        self.processed = min(self.received, self.processed + nbytes - old)

    def is_grant_due(self, window_bytes: int) -> bool:
        return self.processed - self.granted >= max(1, window_bytes // 4)


class FlowControlTransport:
    """Implements `Transport` over `inner`; the loop must call `return_credit` as well.

    Args:
        inner: direct or relayed connections.
        window_bytes: the same on both sides.
        queue_bytes: bound of what waits for one peer's credit.
    """

    def __init__(
        self, inner: Transport, *, window_bytes: int = WINDOW_BYTES, queue_bytes: int = DEFAULT_LIMIT_BYTES
    ) -> None:
        self.me, self.traffic = inner.me, inner.traffic
        self._inner = inner
        self._window_bytes = window_bytes
        self._queue_bytes = queue_bytes
        self._accounts: dict[PeerId, _CreditAccount] = {}
        self._ever_sent: Counter[PeerId] = Counter()  # bytes of bulk, over all resets
        self._blocked: set[PeerId] = set()  # the queue below was full
        self._woken = False  # from any thread

    # -- Transport -----------------------------------------------------------------------------

    def listen(self, address: str) -> str:
        return self._inner.listen(address)

    def dial(self, peer: PeerId, address: str) -> None:
        self._inner.dial(peer, address)

    def reach(self, peer: PeerId, addresses: Sequence[str], timeout_s: float) -> None:
        self._inner.reach(peer, addresses, timeout_s)

    def hang_up(self, peer: PeerId) -> None:
        """As `Transport.hang_up`; what waits for credit is dropped."""
        self._accounts.pop(peer, None)
        self._inner.hang_up(peer)

    def connected(self, peer: PeerId) -> bool:
        return self._inner.connected(peer)

    def send(self, peer: PeerId, message: Message) -> None:
        """As `Transport.send`; bulk waits for credit.  Raises `TransportError`, `LocalProtocolError`."""
        account = self._accounts.get(peer)
        if not needs_credit(message) or not self._inner.connected(peer):
            self._inner.send(peer, message)
            return
        if account is None:
            raise TransportError(
                f"peer {peer.hex()[:8]} is not connected", remedy="wait for its PeerUp before sending"
            )
        nbytes = credit_bytes(message)
        if not account.waiting and fits_window(account.unacknowledged_bytes, nbytes, self._window_bytes):
            self._send_bulk(peer, account, message, nbytes)
            return
        if account.waiting_bytes + nbytes > self._queue_bytes:
            raise TransportError(
                f"the queue for peer {peer.hex()[:8]} is full: {account.waiting_bytes} bytes wait for "
                f"credit, {nbytes} more would exceed {self._queue_bytes}",
                remedy="the peer processes too little of what is sent; treat the connection as failed",
            )
        account.waiting.append((message, nbytes))
        account.waiting_bytes += nbytes

    def backlog_bytes(self, peer: PeerId) -> int:
        account = self._accounts.get(peer)
        return self._inner.backlog_bytes(peer) + (account.waiting_bytes if account is not None else 0)

    def poll(self, timeout_s: float) -> list[TransportEvent]:
        """As `Transport.poll`.  Also returns, without events, when credit has let something leave.

        `Received.nbytes` of bulk is its `credit_bytes`.
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

    def return_credit(self, held_bytes: Callable[[PeerId], int]) -> None:
        """All bulk that `poll` has returned is processed but for `held_bytes(peer)` of each peer.

        To be called after the events of `poll` were handled.
        """
        for peer, account in self._accounts.items():
            if unprocessed_bytes := account.unprocessed_bytes:
                self.mark_processed(peer, max(0, unprocessed_bytes - held_bytes(peer)))

    def mark_processed(self, peer: PeerId, nbytes: int) -> None:
        """Bulk of `nbytes` from `peer` was processed: used, passed on or dropped.

        Has no effect for messages of a connection that has gone down.
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
                if event.pending_key is None:  # a pending member sends no bulk
                    self._reset_account(peer)
            case PeerDown(peer):
                self._accounts.pop(peer, None)
            case Received(peer, message) if needs_credit(message):
                account = self._accounts.setdefault(peer, _CreditAccount())
                nbytes = credit_bytes(message)
                account.largest = max(account.largest, nbytes)
                if exceeds_credit(account.outstanding_bytes, nbytes, account.largest, self._window_bytes):
                    text = (
                        f"{type(message).__name__} of {nbytes} bytes while {account.outstanding_bytes} are "
                        f"not acknowledged; the window has {self._window_bytes}"
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
        """True: something has left."""
        account = self._accounts.setdefault(peer, _CreditAccount())
        if total_bytes > self._ever_sent[peer]:
            text = f"Credit for {total_bytes} bytes of bulk; {self._ever_sent[peer]} were sent to it"
            events.append(TransportViolation(peer, text))
            return False
        if total_bytes == 0:
            account.reset()
        # Its total includes what was under way when our counts were reset.
        account.credited = max(account.credited, min(total_bytes, account.sent))
        return self._send_waiting(peer, account)

    def _send_waiting(self, peer: PeerId, account: _CreditAccount) -> bool:
        """Send what waits, as far as credit allows.  True: something has left."""
        released = False
        while account.waiting:
            message, nbytes = account.waiting[0]
            if not fits_window(account.unacknowledged_bytes, nbytes, self._window_bytes):
                break
            try:
                self._send_bulk(peer, account, message, nbytes)
            except TransportError:
                self._blocked.add(peer)
                break
            account.waiting.popleft()
            account.waiting_bytes -= nbytes
            released = True
        return released

    def _send_bulk(self, peer: PeerId, account: _CreditAccount, message: Message, nbytes: int) -> None:
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
