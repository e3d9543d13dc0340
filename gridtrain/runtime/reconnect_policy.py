"""How long this worker waits for a coordinator that is away, or that denies it access.

The transport reconnects by itself.
"""

from __future__ import annotations

import logging

from gridtrain.errors import JoinRefused, RunPaused

log = logging.getLogger("gridtrain")

DENIED_TIMEOUT_S = 60.0
"""A member that is denied for so long without a break gives up."""


class ReconnectPolicy:
    """Used by the I/O thread alone.

    Args:
        address: the coordinator's, for people.
        paused_s: how long a paused run waits for it.
    """

    def __init__(self, address: str, paused_s: float) -> None:
        self._address, self._paused_s = address, paused_s
        self._paused_since_s: float | None = None
        self._denied_since_s: float | None = None

    def connected(self) -> None:
        """The coordinator has a connection to this worker."""
        self._denied_since_s = None

    def handle_denial(self, now_s: float, *, member: bool) -> None:
        """Raises `JoinRefused`, unless a member was denied for less than `DENIED_TIMEOUT_S`.

        A refused handshake does not prove who refused it.  At the start it is believed, as nothing is lost.
        A member that was admitted before keeps trying for a while, since anybody on the path could refuse: a
        coordinator that removes a worker says so over the present connection.
        """
        if self._denied_since_s is None:
            self._denied_since_s = now_s
        if member and now_s - self._denied_since_s < DENIED_TIMEOUT_S:
            log.info("the coordinator's address denies this worker access; trying again")
            return
        raise JoinRefused(
            "denied",
            f"the coordinator at {self._address} denies this worker access",
            remedy="ask the run's owner for a new invitation",
        )

    def handle_pause(self, reason: str, now_s: float) -> None:
        """Log once that the run is paused ("": it is not).  Raises `RunPaused` after `paused_s` (rule 10)."""
        if not reason:
            if self._paused_since_s is not None:
                log.warning("the coordinator is back")
            self._paused_since_s = None
            return
        if self._paused_since_s is None:
            self._paused_since_s = now_s
            log.warning("paused: %s; waiting for %s to come back", reason, self._address)
        if now_s - self._paused_since_s >= self._paused_s:
            raise RunPaused(
                f"paused for {self._paused_s:.0f} s: {reason}, and nobody answers at {self._address}",
                remedy="start the coordinator again with its journal, then this worker",
            )
