"""The coordinator while its disk is full: no decisions until the last ones are written.

    turn --JournalFull--> DiskFullMode(effects of that turn) --once a second: is there room?--> the effects,
                              | events: queued in order, bounded                             then the events
                              | status: answered, with the reason
                              | pending members, the operator: refused, with the remedy
                              + the core's clock stands still, so that no deadline passes

Nobody has heard of anything that is not durable, so to everybody else the coordinator only seems slow: a
running generation trains on (commit rule 10), and no second decision can contradict the first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from gridtrain.core import messages as m
from gridtrain.network.transport.interface import PeerUp, Received, TransportEvent
from gridtrain_coordinator.run import events as io

RETRY_S = 1.0
MAX_EVENTS = 20_000
"""Events that are queued; a peer whose event would be one too many is disconnected, and comes back."""

REMEDY = "try again when its owner has made room"


class DiskFullMode:
    """One interval without room on the disk.

    Args:
        cause: why the journal cannot be written.
        effects: what was decided, to be carried out in this order once it is durable.
        began_s: by the real clock.
        core_s: where the core's clock stopped.
    """

    def __init__(self, cause: str, effects: Sequence[io.Effect], *, began_s: float, core_s: float) -> None:
        self.cause = cause
        self.effects = list(effects)
        self.events: deque[TransportEvent] = deque()
        self.began_s, self.core_stopped_s = began_s, core_s
        self.retry_at_s = began_s + RETRY_S

    @property
    def reason(self) -> str:
        """For `RunStateUpdate` and `gridtrain status`."""
        return (
            f"the coordinator makes no decisions, because {self.cause}; training continues until a member is "
            "missing, and everything continues when there is room"
        )

    @property
    def phase(self) -> str:
        return str(io.RunPhase.PAUSED)

    def refusal(self) -> m.Refused:
        return m.Refused("no-room", f"nothing can be decided now, because {self.cause}", REMEDY)

    def state(self) -> m.RunStateUpdate:
        return m.RunStateUpdate(self.phase, self.reason)

    def queue_event(self, event: TransportEvent) -> list[io.Effect]:
        """Keep an event for later, except heartbeats: the next one says the same."""
        if isinstance(event, Received) and isinstance(event.message, m.Heartbeat):
            return []
        if len(self.events) < MAX_EVENTS or not isinstance(event, Received | PeerUp):
            self.events.append(event)
            return []
        return [io.Disconnect(event.peer)]
