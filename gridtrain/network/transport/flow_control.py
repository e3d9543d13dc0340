"""Flow control by credit: limits the sent bytes that a peer has not processed yet (the window).

Bulk messages (`send_queue.BULK_MESSAGES`) wait for credit.  Control messages never wait, so Credit, which is
one of them, always arrives.

    sender                                                     receiver
    loop -- send --> waiting --fits?--> inner =========> inner --exceeds?--> Received --> loop
                        ^                                                                   |
                        +------ Credit(total) <========= a quarter of the window <--- return_credit

Both sides count the bytes of a message's frames, excluding the overhead of the transport.  A message may be
sent while the window has room for it, or while at most a quarter of the window is unacknowledged.  Therefore,
a receiver that grants credit at every quarter never stalls a sender, and a message larger than the window can
be sent.

At `PeerUp`, each side resets its counts to 0 and sends Credit(0); a side that receives Credit(0) also resets
its counts.  The two sides reset their counts at different times, because a connection may be re-established
on only one side (after `hang_up`) or be replaced.  Messages in transit at that time are counted on one side
only, so a sender may temporarily have twice as many unacknowledged bytes as the rule permits.  A receiver
tolerates this amount and no more.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gridtrain.core.messages import Credit, Message, PeerId
from gridtrain.errors import TransportError, describe_type
from gridtrain.network.transport.interface import (
    Frames,
    PeerDown,
    PeerUp,
    Received,
    Transport,
    TransportEvent,
    TransportViolation,
    not_connected_error,
)
from gridtrain.network.transport.send_queue import BULK_MESSAGES, QUEUE_LIMIT_BYTES
from gridtrain.network.transport.wrapping_transport import WrappingTransport
from gridtrain.network.wire import codec

WINDOW_BYTES = 32 * 2**20
"""The size of the window.  It is part of the protocol: both sides must use the same size."""

RETRY_S = 0.02
"""The delay before another attempt to send after the queue of the inner transport was full."""

Waiting = tuple[Message, Frames, int]
"""A message waiting for credit, its frames, and the size of the frames in bytes."""


def needs_credit(message: Message) -> bool:
    """Return whether this is a bulk message, which a peer holds in memory until it is processed."""
    return type(message) in BULK_MESSAGES


@dataclass(slots=True, eq=False)
class _CreditAccount:
    """Counts of the bulk bytes sent to and received from one peer since the counts were reset.

    Attributes:
        carried_over: the bytes that were received before the reset and have not been processed yet.
        largest: the size of the largest message that was received.
    """

    sent: int = 0
    credited: int = 0
    waiting: deque[Waiting] = field(default_factory=deque)
    waiting_bytes: int = 0

    received: int = 0
    processed: int = 0
    granted: int = 0
    carried_over: int = 0
    largest: int = 0

    @property
    def outstanding_bytes(self) -> int:
        """The number of received bytes for which no new credit has been granted."""
        return self.carried_over + self.received - self.granted

    @property
    def unprocessed_bytes(self) -> int:
        return self.carried_over + self.received - self.processed

    def reset(self) -> None:
        self.carried_over += self.received - self.processed
        self.sent = self.credited = self.received = self.processed = self.granted = 0

    def mark_processed(self, nbytes: int) -> None:
        """Count `nbytes` as processed, the oldest bytes first, but no more bytes than were received."""
        old = min(self.carried_over, nbytes)
        self.carried_over -= old
        self.processed = min(self.received, self.processed + nbytes - old)

    def fits_window(self, nbytes: int, window_bytes: int) -> bool:
        """Return whether another message of `nbytes` may be sent to the peer."""
        unacknowledged_bytes = self.sent - self.credited
        return unacknowledged_bytes + nbytes <= window_bytes or unacknowledged_bytes <= window_bytes // 4

    def is_grant_due(self, window_bytes: int) -> bool:
        return self.processed - self.granted >= max(1, window_bytes // 4)


class FlowControlTransport(WrappingTransport):
    """Implements `Transport` over `inner`; the loop must also call `return_credit`.

    Args:
        inner: the transport with direct or relayed connections.
        window_bytes: the size of the window, which must be the same on both sides.
    """

    def __init__(self, inner: Transport, *, window_bytes: int = WINDOW_BYTES) -> None:
        super().__init__(inner)
        self._window_bytes = window_bytes
        self._accounts: dict[PeerId, _CreditAccount] = {}
        self._ever_sent: Counter[PeerId] = Counter()  # bytes of bulk messages, over all resets
        self._blocked: set[PeerId] = set()  # peers for which the queue of the inner transport was full
        self._unprocessed: set[PeerId] = set()  # peers whose received bulk messages are not all processed

    # -- Transport -----------------------------------------------------------------------------

    def hang_up(self, peer: PeerId) -> None:
        """See `Transport.hang_up`; messages waiting for credit are dropped."""
        self._accounts.pop(peer, None)
        self._inner.hang_up(peer)

    def send(self, peer: PeerId, message: Message, frames: Frames | None = None) -> None:
        """See `Transport.send`; bulk messages wait for credit.

        Raises:
            TransportError: the peer is not connected, or its queue is full.
            LocalProtocolError: the message cannot be encoded.
        """
        if not needs_credit(message) or not self._inner.connected(peer):
            self._inner.send(peer, message, frames)
            return
        account = self._accounts.get(peer)
        if account is None:
            raise not_connected_error(peer)
        frames = codec.encode(message) if frames is None else frames
        nbytes = sum(map(len, frames))
        if not account.waiting and account.fits_window(nbytes, self._window_bytes):
            self._send_bulk(peer, account, (message, frames, nbytes))
            return
        if account.waiting_bytes + nbytes > QUEUE_LIMIT_BYTES:
            raise TransportError(
                f"the queue for peer {peer.hex()[:8]} is full: {account.waiting_bytes} bytes wait for "
                f"credit, and {nbytes} more would exceed the limit of {QUEUE_LIMIT_BYTES}",
                remedy="treat the connection as failed, because the peer processes messages too slowly",
            )
        account.waiting.append((message, frames, nbytes))
        account.waiting_bytes += nbytes

    def backlog_bytes(self, peer: PeerId) -> int:
        account = self._accounts.get(peer)
        return self._inner.backlog_bytes(peer) + (account.waiting_bytes if account is not None else 0)

    def poll(self, timeout_s: float) -> list[TransportEvent]:
        """See `Transport.poll`.  This method also returns, possibly without events, when credit arrives."""
        if self._blocked:
            timeout_s = min(timeout_s, RETRY_S)
            for peer in list(self._blocked):
                self._retry_blocked(peer)
        events: list[TransportEvent] = []
        for event in self._inner.poll(timeout_s):
            self._handle(event, events)
        return events

    # -- for the loop --------------------------------------------------------------------------

    def return_credit(self, held_bytes: Callable[[PeerId], int]) -> None:
        """Mark as processed all bulk messages that `poll` returned, except `held_bytes(peer)` bytes per peer.

        Call this method after handling the events of `poll`.
        """
        for peer in list(self._unprocessed):
            account = self._accounts.get(peer)
            if account is not None and (unprocessed_bytes := account.unprocessed_bytes):
                self.mark_processed(peer, max(0, unprocessed_bytes - held_bytes(peer)))
            else:
                self._unprocessed.discard(peer)

    def mark_processed(self, peer: PeerId, nbytes: int) -> None:
        """Record that `nbytes` of bulk messages from `peer` were used, forwarded or dropped.

        If the connection is down, the call has no effect.
        """
        account = self._accounts.get(peer)
        if account is not None:
            account.mark_processed(nbytes)
            self._grant(peer, account)

    # -- internal ------------------------------------------------------------------------------

    def _handle(self, event: TransportEvent, events: list[TransportEvent]) -> None:
        if type(event) is Received:
            if needs_credit(event.message):
                self._receive_bulk(event, events)
            elif type(event.message) is Credit:
                self._apply_credit(event.peer, event.message.total_bytes, events)
            else:
                events.append(event)
            return
        match event:
            case PeerUp(peer):
                self._accounts[peer] = _CreditAccount()
                if event.pending_key is None:  # a pending member sends no bulk messages
                    with contextlib.suppress(TransportError):  # the connection is down again
                        self._inner.send(peer, Credit(0))
            case PeerDown(peer):
                self._accounts.pop(peer, None)
        events.append(event)

    def _receive_bulk(self, event: Received, events: list[TransportEvent]) -> None:
        peer, nbytes = event.peer, event.nbytes
        account = self._accounts.get(peer)
        if account is None:
            account = self._accounts[peer] = _CreditAccount()
        account.largest = max(account.largest, nbytes)
        if account.outstanding_bytes + nbytes > 2 * (self._window_bytes + account.largest):
            text = (
                f"{describe_type(event.message)} of {nbytes} bytes exceeded the credit: "
                f"{account.outstanding_bytes} bytes were not acknowledged; the window is "
                f"{self._window_bytes} bytes"
            )
            events.append(TransportViolation(peer, text))
            return
        account.received += nbytes
        self._unprocessed.add(peer)
        events.append(event)

    def _apply_credit(self, peer: PeerId, total_bytes: int, events: list[TransportEvent]) -> None:
        account = self._accounts.setdefault(peer, _CreditAccount())
        if total_bytes > self._ever_sent[peer]:
            text = f"Credit is for {total_bytes} bytes, but only {self._ever_sent[peer]} were sent"
            events.append(TransportViolation(peer, text))
            return
        if total_bytes == 0:
            account.reset()
        # The peer's total includes messages that were in transit when our counts were reset.
        account.credited = max(account.credited, min(total_bytes, account.sent))
        self._send_waiting(peer, account)

    def _send_waiting(self, peer: PeerId, account: _CreditAccount) -> None:
        """Send waiting messages as long as credit permits."""
        while account.waiting:
            waiting = account.waiting[0]
            nbytes = waiting[2]
            if not account.fits_window(nbytes, self._window_bytes):
                break
            try:
                self._send_bulk(peer, account, waiting)
            except TransportError:
                self._blocked.add(peer)
                break
            account.waiting.popleft()
            account.waiting_bytes -= nbytes

    def _send_bulk(self, peer: PeerId, account: _CreditAccount, waiting: Waiting) -> None:
        message, frames, nbytes = waiting
        self._inner.send(peer, message, frames)
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
