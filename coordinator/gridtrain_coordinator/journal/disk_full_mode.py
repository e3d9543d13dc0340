"""The coordinator while its disk is full: it decides nothing more until what it decided is written down.

Decides what is answered meanwhile and what is kept for later.  Never touches a socket or the journal.

    turn --JournalFull--> Standstill(effects of that turn) --once a second: is there room?--> the effects,
                              | events: kept in their order, bounded                          then the events
                              | status: answered, with the reason
                              | guests, the operator: refused, with the remedy
                              + the core's clock stands still, so that nobody is late for what it was not told

Nobody has been told of what is not durable, so to everybody else the coordinator only looks slow: a running
generation trains on (rule 10), and no second decision can contradict the first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from gridtrain.core import messages as m
from gridtrain.network.transport.interface import PeerUp, Received, TransportEvent
from gridtrain_coordinator.run import events as io

RETRY_S = 1.0
MAX_EVENTS = 20_000
"""So many are kept for later; whose would be one too many is hung up on, and comes back."""

REMEDY = "try again when its owner has made room"


class DiskFullMode:
    """See the module's text.

    Args:
        why: the journal's own words.
        effects: what was decided, to be carried out in this order once it is durable.
        began_s: by the clock that goes on.
        core_s: where the core's clock stopped.
    """

    def __init__(self, why: str, effects: Sequence[io.Effect], *, began_s: float, core_s: float) -> None:
        self.cause = why
        self.effects = list(effects)
        self.events: deque[TransportEvent] = deque()
        self.began_s, self.core_stopped_s = began_s, core_s
        self.retry_at_s = began_s + RETRY_S

    @property
    def reason(self) -> str:
        """For `RunState` and `gridtrain status`."""
        return (
            f"the coordinator decides nothing more, because {self.cause}; whoever trains goes on until a "
            "member is missing, and all goes on when there is room"
        )

    @property
    def phase(self) -> str:
        return str(io.RunPhase.PAUSED)

    def refusal(self) -> m.Refused:
        return m.Refused("no-room", f"nothing can be decided now, because {self.cause}", REMEDY)

    def state(self) -> m.RunStateUpdate:
        return m.RunStateUpdate(self.phase, self.reason)

    def queue_event(self, event: TransportEvent) -> list[io.Effect]:
        """For later.  Beats say nothing that the next one does not say again."""
        if isinstance(event, Received) and isinstance(event.message, m.Heartbeat):
            return []
        if len(self.events) < MAX_EVENTS or not isinstance(event, Received | PeerUp):
            self.events.append(event)
            return []
        return [io.Disconnect(event.peer)]
