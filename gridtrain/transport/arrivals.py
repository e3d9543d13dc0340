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

from gridtrain.transport.limits import LATENESS_S

T = TypeVar("T")
S = TypeVar("S", bound=Hashable)
MOST_WAITING_BYTES = 768 * 2**20
HONEST_BYTES = 32 * 2**20
"""Of all senders together: at least so much, and a window of credit (`credits`) for each of them."""
MOST_OWNERS = 1024
_PAID = 1e-6
"""Bytes: what rounding may leave of a debt."""


@dataclass(slots=True)
class _Lane(Generic[T]):
    """One sender's."""

    waiting: deque[tuple[T, int]] = field(default_factory=deque)
    waiting_bytes: int = 0
    debt_bytes: float = 0.0


class Arrivals(Generic[S, T]):
    """What has come from all senders.

    Args:
        rate_Bps: bytes per second; None: no cap, everything is handed on at once.
    """

    def __init__(self, rate_Bps: float | None) -> None:
        self.rate_Bps = rate_Bps
        self._lanes: dict[S, _Lane[T]] = {}
        self._waiting_bytes = 0
        self._left: dict[bytes, tuple[float, float]] = {}  # by owner: debt in bytes, and since when
        self._paid_until_s = -math.inf

    @property
    def idle(self) -> bool:
        """There is no cap and nothing waits: whatever comes would be handed on at once."""
        return self.rate_Bps is None and not self._lanes

    def charge(self, sender: S, nbytes: int, now_s: float) -> None:
        """Account for something that was handed on without asking."""
        if self.rate_Bps is not None:
            self._begin(now_s)
            self._lanes.setdefault(sender, _Lane()).debt_bytes += nbytes

    def put(self, sender: S, item: T, nbytes: int, now_s: float) -> None:
        """It has come; `take` gives it back when its time has come."""
        self._begin(now_s)
        lane = self._lanes.setdefault(sender, _Lane())
        lane.waiting.append((item, nbytes))
        lane.waiting_bytes += nbytes
        self._waiting_bytes += nbytes

    def take(self, now_s: float) -> list[T]:
        """Everything that may be handed on now, each sender's in its order."""
        taken: list[T] = []
        while self._lanes:
            for sender, lane in list(self._lanes.items()):
                while lane.waiting and (lane.debt_bytes <= _PAID or self.rate_Bps is None):
                    item, nbytes = lane.waiting.popleft()
                    lane.waiting_bytes -= nbytes
                    self._waiting_bytes -= nbytes
                    lane.debt_bytes += nbytes
                    taken.append(item)
                if lane.debt_bytes <= _PAID or self.rate_Bps is None:
                    del self._lanes[sender]
            if not self._pay(now_s):
                break
        return taken

    def begin(self, sender: S, owner: bytes, now_s: float) -> None:
        """It has come; what its owner's last one owed is its own now."""
        debt_bytes = self._faded(owner, now_s)
        if debt_bytes > _PAID:
            self.charge(sender, math.ceil(debt_bytes), now_s)

    def end(self, sender: S, owner: bytes, now_s: float) -> list[T]:
        """It has gone: what its lane still holds, at once."""
        lane = self._lanes.pop(sender, None)
        if lane is None:
            return []
        self._waiting_bytes -= lane.waiting_bytes
        debt_bytes = lane.debt_bytes + lane.waiting_bytes
        if self.rate_Bps is not None and debt_bytes > _PAID:
            debt_bytes += self._faded(owner, now_s)  # of another one that it had
            self._left[owner] = (debt_bytes, now_s)  # the latest comes last
            if len(self._left) > MOST_OWNERS:
                del self._left[next(iter(self._left))]
        return [item for item, _ in lane.waiting]

    def _faded(self, owner: bytes, now_s: float) -> float:
        """What is left of the debt of its connections that have gone; it is the caller's now."""
        debt_bytes, since_s = self._left.pop(owner, (0.0, now_s))
        return max(0.0, debt_bytes - (now_s - since_s) * (self.rate_Bps or math.inf)) if debt_bytes else 0.0

    def overfull(self) -> S | None:
        """The sender of which most waits, where more waits than may; None: there is room."""
        if self._waiting_bytes <= max(MOST_WAITING_BYTES, len(self._lanes) * HONEST_BYTES):
            return None
        return max(self._lanes, key=lambda sender: self._lanes[sender].waiting_bytes)

    def waiting_bytes(self, sender: S) -> int:
        lane = self._lanes.get(sender)
        return 0 if lane is None else lane.waiting_bytes

    def due_s(self) -> float:
        """When `take` has something; infinite: nothing waits."""
        if self.rate_Bps is None:
            return -math.inf if self._lanes else math.inf
        owed = [lane.debt_bytes for lane in self._lanes.values()]
        waiting = [lane.debt_bytes for lane in self._lanes.values() if lane.waiting]
        if not waiting:
            return math.inf
        next_bytes = min(waiting)  # by then each of the others has paid as much, or all it owed
        return self._paid_until_s + sum(min(debt, next_bytes) for debt in owed) / self.rate_Bps

    def _begin(self, now_s: float) -> None:
        """A line that stood idle has saved nothing up, but for the lateness of a loop."""
        if not self._lanes:
            self._paid_until_s = max(self._paid_until_s, now_s - LATENESS_S)

    def _pay(self, now_s: float) -> bool:
        """Until the first debt is paid, or until now.  True: one was, and there may be more."""
        if self.rate_Bps is None:
            return False
        owing = [lane for lane in self._lanes.values() if lane.debt_bytes > _PAID]
        if not owing:
            return False
        budget = max(0.0, now_s - self._paid_until_s) * self.rate_Bps
        least = min(lane.debt_bytes for lane in owing)
        share = min(least, budget / len(owing))
        for lane in owing:
            lane.debt_bytes -= share
        self._paid_until_s += share * len(owing) / self.rate_Bps
        return share >= least
