"""Decides when a worker gives up waiting for the coordinator, and when it rejoins after its removal.

After any other disconnection, the transport reconnects automatically.
"""

from __future__ import annotations

import logging
import math

from gridtrain.errors import CoordinatorUnreachable, JoinRefused, RunPaused

log = logging.getLogger("gridtrain")

DENIED_TIMEOUT_S = 60.0
"""Time after which a member gives up if the coordinator keeps denying it access."""

REJOIN_INTERVAL_S, MAX_REJOIN_INTERVAL_S = 30.0, 600.0
"""Minimum time between two rejoins of a worker whose training loop keeps stalling, because the other members
wait for it each time.  The time doubles with each rejoin, up to the maximum."""

REJOIN_TIMEOUT_S = 120.0
"""Time after which a worker that rejoins gives up if the coordinator does not answer."""


class ReconnectPolicy:
    """Decides when this worker gives up or rejoins.  Only the I/O thread uses it.

    Args:
        address: the coordinator's address, which is shown in messages.
        paused_s: the time after which this worker gives up if the run stays paused.

    Attributes:
        is_left_out: whether this worker was removed for lack of progress and has not reconnected yet.
    """

    def __init__(self, address: str, paused_s: float) -> None:
        self._address, self._paused_s = address, paused_s
        self._pause_reason, self._paused_since_s = "", 0.0
        self._denied_since_s: float | None = None
        self.is_left_out = False
        self._rejoin_s: float | None = None  # when it began to connect again
        self._has_told_interval = False
        self._next_rejoin_s, self._interval_s = -math.inf, REJOIN_INTERVAL_S

    def trainer_stalled(self) -> None:
        """Record that this worker was removed because its training loop made no progress in time."""
        self.is_left_out, self._rejoin_s, self._has_told_interval = True, None, False

    @property
    def waiting_reason(self) -> str:
        """Why this worker is not training; "" if nothing is known to prevent it.  Thread-safe."""
        if self.is_left_out:
            why = "its training loop made no progress in time"
            return f"{why}, and the group continues without it until it rejoins"
        return self._pause_reason

    def should_rejoin(self, now_s: float, *, trainer_waiting: bool) -> bool:
        """Return whether to connect to the coordinator again, because the stalled loop has continued.

        Returns True at most once after each call to `trainer_stalled`.

        Args:
            now_s: the current time.
            trainer_waiting: whether the training loop is waiting for the group, and thus has continued.
        """
        if not (self.is_left_out and self._rejoin_s is None and trainer_waiting):
            return False
        if now_s < self._next_rejoin_s:
            if not self._has_told_interval:
                self._has_told_interval = True
                log.warning(
                    "this worker rejoins in %.0f s, because the group has repeatedly waited too long for it",
                    self._next_rejoin_s - now_s,
                )
            return False
        self._rejoin_s, self._next_rejoin_s = now_s, now_s + self._interval_s
        self._interval_s = min(2 * self._interval_s, MAX_REJOIN_INTERVAL_S)
        return True

    def connected(self) -> None:
        """Record that this worker is connected to the coordinator."""
        self._denied_since_s, self._rejoin_s = None, None
        self.is_left_out = False

    def handle_denial(self, now_s: float, *, member: bool) -> None:
        """Handle a denial of access.

        A refused handshake does not prove that the coordinator refuses this worker, because anyone on the
        network path can cause it.  A worker that is not a member yet gives up immediately, because it loses
        nothing.  A member keeps trying for `DENIED_TIMEOUT_S`, because a coordinator that removes a worker
        notifies it over the existing connection.

        Args:
            now_s: the current time.
            member: whether this worker counts as a member, because a coordinator has welcomed it.

        Raises:
            JoinRefused: this worker is not a member, or has been denied access for `DENIED_TIMEOUT_S`.
        """
        if self._denied_since_s is None:
            self._denied_since_s = now_s
        if member and now_s - self._denied_since_s < DENIED_TIMEOUT_S:
            log.info("a handshake at the coordinator's address was refused; trying again")
            return
        raise JoinRefused(
            "denied",
            f"the coordinator at {self._address} denies this worker access",
            remedy="ask the run's owner for a new invitation",
        )

    def handle_pause(self, reason: str, now_s: float) -> None:
        """Log once why the run is paused, or that it is no longer paused.

        A worker that was left out does not log that the run is paused.

        Args:
            reason: why the run is paused; empty if it is not paused.
            now_s: the current time.

        Raises:
            RunPaused: the pause has lasted `paused_s` (commit rule 10 in docs/architecture.md).
            CoordinatorUnreachable: this worker was left out, and the coordinator has not answered for
                `REJOIN_TIMEOUT_S`.
        """
        if self._rejoin_s is not None and now_s >= self._rejoin_s + REJOIN_TIMEOUT_S:
            raise CoordinatorUnreachable(
                "the group continued without this worker, whose training loop made no progress in time, "
                f"and the coordinator at {self._address} has not answered for {REJOIN_TIMEOUT_S:.0f} s",
                remedy="ask the run's owner whether the run has finished, or start this worker again",
            )
        if not reason or self.is_left_out:
            if self._pause_reason:
                log.warning("the run is no longer paused")
            self._pause_reason = ""
            return
        if not self._pause_reason:
            self._paused_since_s = now_s
            log.warning("paused: %s; waiting for the coordinator at %s", reason, self._address)
        self._pause_reason = reason
        if now_s - self._paused_since_s >= self._paused_s:
            raise RunPaused(
                f"the run has been paused for {self._paused_s:.0f} s: {reason}, and {self._address} does not "
                "answer",
                remedy="restart the coordinator with its journal, then restart this worker",
            )
