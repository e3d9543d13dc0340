"""The download cap of a transport that reads everything at once: what has come is handed on later.

Decides when bulk that has been read may be handed on.  Never touches a socket, a clock (`now_s` is passed
in) or what it holds.

    read --control--------------------------------------> handed on at once, and paid for later
         --bulk--> a sender's lane: handed on when the sender has paid for what came before it
                   |  debts of all senders drain together at the cap's rate, each at the same share
    anna  [60 MiB] ######################################-->
    bert  [4 kB] #-->  [4 kB] #-->                             does not wait for anna's

A sender that has gone takes no share of the rate.  What it owed by then waits for the same owner's next one,
and fades at the cap's rate meanwhile, so that nobody gets round the cap by coming back.

Nothing is left unread in libzmq, as a queue that is not read stops its connections, and with them every
other sender's words.  An honest sender stops by itself when its byte credits are used up, because what lies
here is not dealt with yet; so the cap holds on average over a window of credits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gridtrain.network.transport.rate_limiter import MAX_LATENESS_S

T = TypeVar("T")
S = TypeVar("S", bound=Hashable)
MOST_WAITING_BYTES = 768 * 2**20
MIN_WAITING_BYTES = 32 * 2**20
"""Of all senders together: at least so much, and a window of credit (`credits`) for each of them."""
MOST_OWNERS = 1024
_DEBT_EPSILON = 1e-6
"""Bytes: what rounding may leave of a debt."""


@dataclass(slots=True)
class _SenderQueue(Generic[T]):
    """One sender's."""

    waiting: deque[tuple[T, int]] = field(default_factory=deque)
    waiting_bytes: int = 0
    debt_bytes: float = 0.0


class ReceiveQueue(Generic[S, T]):
    """What has come from all senders.

    Args:
        rate_Bps: bytes per second; None: no cap, everything is handed on at once.
    """

    def __init__(self, rate_Bps: float | None) -> None:
        self.rate_Bps = rate_Bps
        self._queues: dict[S, _SenderQueue[T]] = {}
        self._waiting_bytes = 0
        self._departed_debts: dict[bytes, tuple[float, float]] = {}  # by owner: debt in bytes, and since when
        self._paid_until_s = -math.inf

    @property
    def is_idle(self) -> bool:
        """There is no cap and nothing waits: whatever comes would be handed on at once."""
        return self.rate_Bps is None and not self._queues

    def charge(self, sender: S, nbytes: int, now_s: float) -> None:
        """Account for something that was handed on without asking."""
        if self.rate_Bps is not None:
            self._start_accounting(now_s)
            self._queues.setdefault(sender, _SenderQueue()).debt_bytes += nbytes

    def put(self, sender: S, item: T, nbytes: int, now_s: float) -> None:
        """It has come; `take` gives it back when its time has come."""
        self._start_accounting(now_s)
        lane = self._queues.setdefault(sender, _SenderQueue())
        lane.waiting.append((item, nbytes))
        lane.waiting_bytes += nbytes
        self._waiting_bytes += nbytes

    def take_due(self, now_s: float) -> list[T]:
        """Everything that may be handed on now, each sender's in its order."""
        taken: list[T] = []
        while self._queues:
            for sender, lane in list(self._queues.items()):
                while lane.waiting and (lane.debt_bytes <= _DEBT_EPSILON or self.rate_Bps is None):
                    item, nbytes = lane.waiting.popleft()
                    lane.waiting_bytes -= nbytes
                    self._waiting_bytes -= nbytes
                    lane.debt_bytes += nbytes
                    taken.append(item)
                if lane.debt_bytes <= _DEBT_EPSILON or self.rate_Bps is None:
                    del self._queues[sender]
            if not self._settle_debts(now_s):
                break
        return taken

    def add_sender(self, sender: S, owner: bytes, now_s: float) -> None:
        """It has come; what its owner's last one owed is its own now."""
        debt_bytes = self._take_departed_debt(owner, now_s)
        if debt_bytes > _DEBT_EPSILON:
            self.charge(sender, math.ceil(debt_bytes), now_s)

    def remove_sender(self, sender: S, owner: bytes, now_s: float) -> list[T]:
        """It has gone: what its lane still holds, at once."""
        lane = self._queues.pop(sender, None)
        if lane is None:
            return []
        self._waiting_bytes -= lane.waiting_bytes
        debt_bytes = lane.debt_bytes + lane.waiting_bytes
        if self.rate_Bps is not None and debt_bytes > _DEBT_EPSILON:
            debt_bytes += self._take_departed_debt(owner, now_s)  # of another one that it had
            self._departed_debts[owner] = (debt_bytes, now_s)  # the latest comes last
            if len(self._departed_debts) > MOST_OWNERS:
                del self._departed_debts[next(iter(self._departed_debts))]
        return [item for item, _ in lane.waiting]

    def _take_departed_debt(self, owner: bytes, now_s: float) -> float:
        """What is left of the debt of its connections that have gone; it is the caller's now."""
        debt_bytes, since_s = self._departed_debts.pop(owner, (0.0, now_s))
        return max(0.0, debt_bytes - (now_s - since_s) * (self.rate_Bps or math.inf)) if debt_bytes else 0.0

    def find_overfull_sender(self) -> S | None:
        """The sender of which most waits, where more waits than may; None: there is room."""
        if self._waiting_bytes <= max(MOST_WAITING_BYTES, len(self._queues) * MIN_WAITING_BYTES):
            return None
        return max(self._queues, key=lambda sender: self._queues[sender].waiting_bytes)

    def waiting_bytes(self, sender: S) -> int:
        lane = self._queues.get(sender)
        return 0 if lane is None else lane.waiting_bytes

    def due_s(self) -> float:
        """When `take` has something; infinite: nothing waits."""
        if self.rate_Bps is None:
            return -math.inf if self._queues else math.inf
        owed = [lane.debt_bytes for lane in self._queues.values()]
        waiting = [lane.debt_bytes for lane in self._queues.values() if lane.waiting]
        if not waiting:
            return math.inf
        next_bytes = min(waiting)  # by then each of the others has paid as much, or all it owed
        return self._paid_until_s + sum(min(debt, next_bytes) for debt in owed) / self.rate_Bps

    def _start_accounting(self, now_s: float) -> None:
        """A line that stood idle has saved nothing up, but for the lateness of a loop."""
        if not self._queues:
            self._paid_until_s = max(self._paid_until_s, now_s - MAX_LATENESS_S)

    def _settle_debts(self, now_s: float) -> bool:
        """Until the first debt is paid, or until now.  True: one was, and there may be more."""
        if self.rate_Bps is None:
            return False
        owing = [lane for lane in self._queues.values() if lane.debt_bytes > _DEBT_EPSILON]
        if not owing:
            return False
        budget = max(0.0, now_s - self._paid_until_s) * self.rate_Bps
        least = min(lane.debt_bytes for lane in owing)
        share = min(least, budget / len(owing))
        for lane in owing:
            lane.debt_bytes -= share
        self._paid_until_s += share * len(owing) / self.rate_Bps
        return share >= least
