"""Decides when a silent worker counts as lost (heartbeats), and when a transfer of the state has stalled.

a message, a heartbeat   --> Liveness: lost after a timeout, shorter if its heartbeats are regular
its connection breaks    --> Liveness: lost unless it rejoins in time
bytes of a state arrive  --> StateTransferProgress: awaited while they keep arriving
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gridtrain.config import Deadlines
from gridtrain.core.group.io_loop_stalls import extend_start

MAX_RESTARTS = 2
"""How many times in one generation an increase of a worker's missing bytes counts as progress."""

MIN_SILENCE_S, FEWEST_BEATS = 2.0, 40
"""The shortest heartbeat timeout, and the number of heartbeats with progress after which a worker's timeout
is derived from its own intervals."""

INTERVALS, INTERVAL_DECAY, MAX_INTERVAL_S = 4.0, 0.9998, 10.0
"""A worker's timeout is `INTERVALS` times its longest heartbeat interval, which is recorded as at most
`MAX_INTERVAL_S`.  Each heartbeat multiplies the recorded interval by `INTERVAL_DECAY`, so that the interval
influences the timeout for more than an hour."""

JOIN_WAIT_S = 0.25
"""The shortest wait for a `Join` over a new connection with a worker's key.  A worker sends it first;
other programs that connect with the key, such as the worker's agent, send none."""


class HeartbeatIntervals:
    """The intervals between a worker's heartbeats, which determine its timeout.

    If a worker that was lost because of its timeout returns, its absence counts as an interval
    (`Registry.register`).
    """

    __slots__ = ("_arrived_s", "_count", "_longest_s")

    def __init__(self) -> None:
        self._arrived_s, self._count, self._longest_s = math.inf, 0, 0.0

    def record(self, now_s: float, *, has_progressed: bool) -> None:
        """Record a heartbeat, or the worker's registration.

        Args:
            has_progressed: whether the heartbeat's progress counter has increased.
        """
        self._count += has_progressed
        interval_s = min(now_s - self._arrived_s, MAX_INTERVAL_S)
        self._longest_s = max(interval_s, self._longest_s * INTERVAL_DECAY)
        self._arrived_s = now_s

    def excuse_stall(self, stalled_s: float) -> None:
        """Exclude the time during which the coordinator read no messages."""
        self._arrived_s += stalled_s

    def timeout_s(self, most_s: float) -> float:
        """Return the time without messages after which the worker counts as lost; at most `most_s`."""
        if self._count < FEWEST_BEATS:
            return most_s
        return min(most_s, max(MIN_SILENCE_S, INTERVALS * self._longest_s))


@dataclass(slots=True, eq=False)
class Liveness:
    """When a worker was last heard from and whether it is connected, and hence when it counts as lost.

    Attributes:
        connected_s: when the open connection with its key was opened, by the worker or by another program;
            None if none is open.
        disconnected_s: the time at which its connection broke; None if it has joined since then.
        link_broken_s: the time at which a member last reported a broken connection to this worker.
        is_loading_state: whether it is receiving the state for a generation that is forming.  If many workers
            load a state at the same time on few cores, they miss heartbeats, so the timeout is longer.
    """

    last_heard_s: float
    heartbeats: HeartbeatIntervals = field(default_factory=HeartbeatIntervals)
    is_loading_state: bool = False
    connected_s: float | None = -math.inf
    disconnected_s: float | None = None
    link_broken_s: float = -math.inf

    def record_connected(self, now_s: float) -> None:
        """Record a connection with the worker's key.

        Only a `Join` proves that the worker itself is back, because its agent also connects with this key.
        """
        self.connected_s = now_s

    def record_disconnected(self, now_s: float) -> None:
        self.connected_s = None
        if self.disconnected_s is None:
            self.disconnected_s = now_s

    def record_message(self, now_s: float) -> None:
        self.last_heard_s = now_s

    def record_link_broken(self, now_s: float) -> None:
        """Record that a member's connection to this worker broke."""
        self.link_broken_s = now_s

    def record_join(self) -> None:
        self.disconnected_s, self.link_broken_s = None, -math.inf

    def mark_loading(self, is_loading: bool) -> None:
        self.is_loading_state = is_loading

    def excuse_stall(self, stalled_s: float, until_s: float, limits: Deadlines, *, trains: bool) -> None:
        """Postpone deadlines to `until_s` or later, because no message was read for `stalled_s` seconds."""
        self.last_heard_s = extend_start(self.last_heard_s, self._silence_s(limits, trains), until_s)
        self.heartbeats.excuse_stall(stalled_s)
        if self.disconnected_s is not None:
            self.disconnected_s = extend_start(self.disconnected_s, limits.regreet_s, until_s)
        if self.connected_s is not None:
            self.connected_s = extend_start(self.connected_s, JOIN_WAIT_S, until_s)

    def failure_reason(self, limits: Deadlines, now_s: float, *, trains: bool) -> str:
        """Return the reason why the worker is considered lost; empty if it is not lost.

        Args:
            trains: whether the worker's heartbeats should be regular; False while it catches up.
        """
        if self.disconnected_s is not None and now_s >= self._reconnect_deadline_s(limits):
            if self._is_link_broken(limits):
                return "lost its connections to this coordinator and to a member"
            return "lost its connection and did not reconnect"
        silence_s = self._silence_s(limits, trains)
        return f"sent nothing for {silence_s:.1f} s" if now_s >= self.last_heard_s + silence_s else ""

    def deadline_s(self, limits: Deadlines, *, trains: bool) -> float:
        """Return the next time at which the worker may count as lost."""
        silent_s = self.last_heard_s + self._silence_s(limits, trains)
        return min(silent_s, self._reconnect_deadline_s(limits))

    def _silence_s(self, limits: Deadlines, trains: bool) -> float:
        if self.is_loading_state:
            return max(limits.silence_s, limits.ready_s)
        return self.heartbeats.timeout_s(limits.silence_s) if trains else limits.silence_s

    def _reconnect_deadline_s(self, limits: Deadlines) -> float:
        """Return the time until which a broken connection may be restored.

        A cut cable or a frozen machine does not reset connections.  If two connections of one worker break at
        the same time, its process has ended, so the wait is short.  An open connection may belong to the
        returning worker or to another program, for example its agent, so a `Join` is awaited only a little
        longer, not until that program ends.
        """
        if self.disconnected_s is None:
            return math.inf
        has_ended = self._is_link_broken(limits)
        wait_s = min(limits.regreet_s, limits.ended_s) if has_ended else limits.regreet_s
        deadline_s = self.disconnected_s + wait_s
        if self.connected_s is None:
            return deadline_s
        return max(deadline_s, self.connected_s + max(wait_s, JOIN_WAIT_S))

    def _is_link_broken(self, limits: Deadlines) -> bool:
        at_s = self.disconnected_s
        return at_s is not None and abs(self.link_broken_s - at_s) <= limits.regreet_s


class StateTransferProgress:
    """The number of bytes of the state that a worker has yet to receive, and the time of its last progress.

    A decrease of at least `step_bytes` since progress was last recorded counts as progress, as does the
    arrival of the last byte.  An increase counts at most `MAX_RESTARTS` times: a forwarded state may turn out
    to be wrong and is then sent again.

        missing bytes in successive heartbeats
        102e6, 87e6, 71e6, ... 0                  in progress until the last byte arrives
        102e6, 101e6, 101e6, ... for patience_s   stalled

    Attributes:
        has_received: whether any bytes have arrived.
    """

    __slots__ = (
        "_mark_bytes",
        "_max_bytes",
        "_restarts_left",
        "_step_bytes",
        "has_received",
        "left_bytes",
        "progressed_s",
    )

    def __init__(self) -> None:
        self.begin(1.0, math.inf, 0.0)

    def begin(self, step_bytes: float, max_bytes: float, now_s: float) -> None:
        """Start over for a new generation, in which the worker receives a state of at most `max_bytes`."""
        self.left_bytes, self.progressed_s, self.has_received = 0.0, now_s, False
        self._mark_bytes, self._step_bytes, self._max_bytes = math.inf, step_bytes, max_bytes
        self._restarts_left = MAX_RESTARTS

    @property
    def has_begun(self) -> bool:
        """Whether a heartbeat has reported missing bytes in this generation."""
        return self._mark_bytes < math.inf

    def update(self, left_bytes: float, now_s: float) -> None:
        """Record the number of missing bytes that a heartbeat reports."""
        self.left_bytes = left_bytes = min(left_bytes, self._max_bytes)
        self.has_received = self.has_received or left_bytes < self._mark_bytes < math.inf
        if left_bytes > self._mark_bytes + self._step_bytes and self._restarts_left > 0:
            self._restarts_left -= 1
        elif left_bytes <= 0:
            if not 0 < self._mark_bytes < math.inf:
                return  # nothing has arrived yet, or the last byte is known to have arrived
        elif self._mark_bytes - left_bytes < self._step_bytes:
            return
        self._mark_bytes, self.progressed_s = left_bytes, now_s

    def excuse_stall(self, stalled_s: float) -> None:
        """Extend the deadline by the time `stalled_s` during which the coordinator read no messages."""
        self.progressed_s += stalled_s

    def deadline_s(self, patience_s: float) -> float:
        """Return the time until which the transfer counts as in progress; -inf if no bytes are missing."""
        return self.progressed_s + patience_s if self.left_bytes > 0 else -math.inf
