"""Limits the download rate (`download_limit`) by delaying the delivery of received bulk messages.

The bytes of a delivered message are added to its sender's debt.  The debts of all senders together decrease
at the rate of the cap, in equal shares.  Pure: times are passed as arguments.

    read --control--> delivered at once; its bytes are added to the sender's debt
         --bulk-----> the sender's queue: delivered when the sender has no debt from earlier messages

    anna  [60 MiB] ######################################-->
    bert  [4 kB] #-->  [4 kB] #-->                             does not wait for anna's message

A closed connection gets no share of the rate.  Its debt decreases at the rate of the cap and is charged to
the next connection of the same peer, so that a peer cannot evade the cap by reconnecting.  The debt is
discarded once the peer may no longer connect, because it has left the group or was excluded.

No messages are left unread in libzmq, because an unread queue blocks its connections, and therefore the
messages of all senders.  Messages in this queue are not counted as processed, so a correct sender exhausts
its credit and stops.  The cap therefore holds on average over one flow-control window.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gridtrain.network.transport.rate_limiter import MAX_LATENESS_S

T = TypeVar("T")
S = TypeVar("S", bound=Hashable)
MAX_WAITING_BYTES = 768 * 2**20
MIN_WAITING_BYTES = 32 * 2**20
"""The limit on the bytes waiting from all senders together: `MAX_WAITING_BYTES`, or `MIN_WAITING_BYTES` (a
flow control window) per sender if that is more."""
MAX_OWNERS = 1024
_DEBT_EPSILON = 1e-6
"""A debt of at most this many bytes is treated as a rounding error."""


@dataclass(slots=True)
class _SenderQueue(Generic[T]):
    """The waiting messages and the debt of one sender."""

    waiting: deque[tuple[T, int]] = field(default_factory=deque)
    waiting_bytes: int = 0
    debt_bytes: float = 0.0


class ReceiveQueue(Generic[S, T]):
    """The messages received from all senders.  A sender is a connection, and its owner is a peer.

    Args:
        rate_Bps: the cap in bytes per second; None for no cap, so that everything is delivered immediately.
    """

    def __init__(self, rate_Bps: float | None) -> None:
        self.rate_Bps = rate_Bps
        self._queues: dict[S, _SenderQueue[T]] = {}
        self._waiting_bytes = 0
        self._departed_debts: dict[bytes, tuple[float, float]] = {}  # by owner: debt in bytes, and its time
        self._paid_until_s = -math.inf

    @property
    def is_idle(self) -> bool:
        """Whether there is no cap and no message is waiting; if so, a message can be delivered
        immediately."""
        return self.rate_Bps is None and not self._queues

    def charge(self, sender: S, nbytes: int, now_s: float) -> None:
        """Add to the sender's debt the bytes of a message that was delivered without waiting."""
        if self.rate_Bps is not None:
            self._start_accounting(now_s)
            self._queues.setdefault(sender, _SenderQueue()).debt_bytes += nbytes

    def put(self, sender: S, item: T, nbytes: int, now_s: float) -> None:
        """Add a message; `take_due` returns it when it is due."""
        self._start_accounting(now_s)
        queue = self._queues.setdefault(sender, _SenderQueue())
        queue.waiting.append((item, nbytes))
        queue.waiting_bytes += nbytes
        self._waiting_bytes += nbytes

    def take_due(self, now_s: float) -> list[T]:
        """Remove and return the messages that may be delivered now; each sender's messages are in order."""
        taken: list[T] = []
        while self._queues:
            for sender, queue in list(self._queues.items()):
                while queue.waiting and (queue.debt_bytes <= _DEBT_EPSILON or self.rate_Bps is None):
                    item, nbytes = queue.waiting.popleft()
                    queue.waiting_bytes -= nbytes
                    self._waiting_bytes -= nbytes
                    queue.debt_bytes += nbytes
                    taken.append(item)
                if queue.debt_bytes <= _DEBT_EPSILON or self.rate_Bps is None:
                    del self._queues[sender]
            if not self._settle_debts(now_s):
                break
        return taken

    def add_sender(self, sender: S, owner: bytes, now_s: float) -> None:
        """Add a new connection, which takes over the debt of its owner's closed connections."""
        debt_bytes = self._take_departed_debt(owner, now_s)
        if debt_bytes > _DEBT_EPSILON:
            self.charge(sender, math.ceil(debt_bytes), now_s)

    def remove_sender(self, sender: S, owner: bytes, now_s: float) -> list[T]:
        """Remove a closed connection; return its waiting messages, which should be delivered immediately."""
        queue = self._queues.pop(sender, None)
        if queue is None:
            return []
        self._waiting_bytes -= queue.waiting_bytes
        debt_bytes = queue.debt_bytes + queue.waiting_bytes
        if self.rate_Bps is not None and debt_bytes > _DEBT_EPSILON:
            debt_bytes += self._take_departed_debt(owner, now_s)  # the debt of another closed connection
            self._departed_debts[owner] = (debt_bytes, now_s)  # the newest entry is last
            if len(self._departed_debts) > MAX_OWNERS:
                del self._departed_debts[next(iter(self._departed_debts))]
        return [item for item, _ in queue.waiting]

    def forget_departed(self, has_departed: Callable[[bytes], bool]) -> None:
        """Discard the debts of the closed connections of owners that have left or were excluded.

        If such an owner becomes a member again, its messages must not be late, because all members would wait
        for them.
        """
        for owner in [owner for owner in self._departed_debts if has_departed(owner)]:
            del self._departed_debts[owner]

    def _take_departed_debt(self, owner: bytes, now_s: float) -> float:
        """Remove and return the remaining debt of the owner's closed connections."""
        debt_bytes, since_s = self._departed_debts.pop(owner, (0.0, now_s))
        return max(0.0, debt_bytes - (now_s - since_s) * (self.rate_Bps or math.inf)) if debt_bytes else 0.0

    def find_overfull_sender(self) -> S | None:
        """Return the sender with the most waiting bytes if the waiting bytes of all senders together exceed
        the limit, otherwise None."""
        if self._waiting_bytes <= max(MAX_WAITING_BYTES, len(self._queues) * MIN_WAITING_BYTES):
            return None
        return max(self._queues, key=lambda sender: self._queues[sender].waiting_bytes)

    def waiting_bytes(self, sender: S) -> int:
        queue = self._queues.get(sender)
        return 0 if queue is None else queue.waiting_bytes

    def due_s(self) -> float:
        """Return the time from which `take_due` returns a message; infinity if no message is waiting."""
        if self.rate_Bps is None:
            return -math.inf if self._queues else math.inf
        owed = [queue.debt_bytes for queue in self._queues.values()]
        waiting = [queue.debt_bytes for queue in self._queues.values() if queue.waiting]
        if not waiting:
            return math.inf
        next_bytes = min(waiting)  # by then every other debt has decreased by the same amount, or to 0
        return self._paid_until_s + sum(min(debt, next_bytes) for debt in owed) / self.rate_Bps

    def _start_accounting(self, now_s: float) -> None:
        """If the queue was idle, start settling debts as of now, or as of up to `MAX_LATENESS_S` ago."""
        if not self._queues:
            self._paid_until_s = max(self._paid_until_s, now_s - MAX_LATENESS_S)

    def _settle_debts(self, now_s: float) -> bool:
        """Decrease all debts equally, until one of them is 0 or all of the elapsed time is settled.

        Returns whether a debt has reached 0.  The caller must then call this method again, because some of
        the elapsed time may not be settled yet.
        """
        if self.rate_Bps is None:
            return False
        owing = [queue for queue in self._queues.values() if queue.debt_bytes > _DEBT_EPSILON]
        if not owing:
            return False
        budget = max(0.0, now_s - self._paid_until_s) * self.rate_Bps
        least = min(queue.debt_bytes for queue in owing)
        share = min(least, budget / len(owing))
        for queue in owing:
            queue.debt_bytes -= share
        self._paid_until_s += share * len(owing) / self.rate_Bps
        return share >= least
