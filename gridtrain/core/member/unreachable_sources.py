"""Whom a follower cannot reach: it has no seat, so nobody misses an edge to it, and it has to say so itself.

Decides when to tell the coordinator that none of its donors is connected, and of whom that is told.  Never
decides on another way (`protocol.whereabouts`), never dials.

    Fetch --a donor is up--> follows
      |   --`route_s` without any--> NoRoute(those that are not up) --> Fetch with other ways
      +--------------------------------------------------------------------+
"""

from __future__ import annotations

import math
from collections.abc import Collection

from gridtrain.core.group.stall_detection import extend_start
from gridtrain.core.messages import PeerId

MAX_UNREACHABLE = 1024
"""What the list of one message holds."""


class UnreachableSources:
    """See the module's text.

    Args:
        route_s: how long an edge may take to come up.
    """

    def __init__(self, route_s: float) -> None:
        self._route_s = route_s
        self._since_s = math.inf  # infinite: nothing was told since, or it was said

    def restart(self, now_s: float) -> None:
        """How to reach the donors; or one that was up is gone, and may come back by the same way."""
        self._since_s = now_s

    def extend_timeouts(self, until_s: float) -> None:
        """This worker slept: it waits until then at least."""
        self._since_s = extend_start(self._since_s, self._route_s, until_s)

    def deadline_s(self, donors: Collection[PeerId], up: Collection[PeerId]) -> float:
        """When to look: infinite where one of the donors is up, as one is enough."""
        return math.inf if not donors or any(peer in up for peer in donors) else self._since_s + self._route_s

    def take_unreachable(
        self, donors: Collection[PeerId], others: Collection[PeerId], up: Collection[PeerId], now_s: float
    ) -> tuple[PeerId, ...]:
        """Of whom to say so, once: of the donors first, and of who else was announced, as one of these could
        be thought of as a relay.  (): of nobody now."""
        if now_s < self.deadline_s(donors, up):
            return ()
        self._since_s = math.inf
        return tuple(peer for peer in dict.fromkeys((*donors, *others)) if peer not in up)[:MAX_UNREACHABLE]
