"""How long this worker waits for a coordinator that is away, or that does not let it in.

Decides when it gives up, and what people are told.  Never reconnects: the transport does, all the while.
"""

from __future__ import annotations

import logging

from gridtrain.errors import JoinRefused, RunPaused

log = logging.getLogger("gridtrain")

DENIED_TIMEOUT_S = 60.0
"""A member that is denied for that long on end gives up."""


class ReconnectPolicy:
    """See the module's text.  Used from the loop's thread alone.

    Args:
        where: the coordinator's address, for people.
        paused_s: so long it is waited for.
    """

    def __init__(self, where: str, paused_s: float) -> None:
        self._address, self._paused_s = where, paused_s
        self._paused_since_s: float | None = None
        self._denied_since_s: float | None = None

    def connected(self) -> None:
        """The coordinator has a connection to this worker."""
        self._denied_since_s = None

    def handle_denial(self, now_s: float, *, member: bool) -> None:
        """Raises `JoinRefused`, or asks again.

        A refused handshake proves nothing about who refused it.  At the start it is believed, as nothing is
        lost.  A member that was let in before goes on asking for a while, since anybody on the way could say
        no: a coordinator that puts a worker out says so over the connection that stands.
        """
        if self._denied_since_s is None:
            self._denied_since_s = now_s
        if member and now_s - self._denied_since_s < DENIED_TIMEOUT_S:
            log.info("the coordinator's address does not let this worker in; it is asked again")
            return
        raise JoinRefused(
            "denied",
            f"the coordinator at {self._address} does not let this worker in (any more)",
            remedy="ask the run's owner for a new invitation",
        )

    def handle_pause(self, why: str, now_s: float) -> None:
        """Say once that the run is paused ("": it is not), and give up after a long time (rule 10)."""
        if not why:
            if self._paused_since_s is not None:
                log.warning("the coordinator is back")
            self._paused_since_s = None
            return
        if self._paused_since_s is None:
            self._paused_since_s = now_s
            log.warning("paused: %s; waiting for %s to come back", why, self._address)
        if now_s - self._paused_since_s >= self._paused_s:
            raise RunPaused(
                f"paused for {self._paused_s:.0f} s: {why}, and nobody answers at {self._address}",
                remedy="start the coordinator again with its journal, then this worker",
            )
