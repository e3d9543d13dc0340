"""The coordinator's mode while its disk is full: no decisions are made, and events are queued.

    loop --JournalFull--> DiskFullMode(effects not executed) --once a second: is there room?--> the effects,
                              | events: queued in order, bounded                             then the events
                              | heartbeats: shown in the status, then dropped
                              | status: answered, with the reason and how long the disk has been full
                              | pending members, the operator: refused, with the remedy (`refusal`)
                              + the core's clock is stopped, so that no deadline passes

Decisions are not announced until they are durable, so a full disk has the same effect as a slow coordinator:
the current generation continues to train (commit rule 10), and no later decision can contradict an earlier
one that is not yet durable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from typing import Any

from gridtrain.core import messages as m
from gridtrain.network.transport.interface import PeerUp, Received, TransportEvent
from gridtrain_coordinator.run import events as ev

RETRY_S = 1.0
MAX_EVENTS = 20_000
"""The maximum number of queued events.

A peer whose event would exceed this number is disconnected, and reconnects later.
"""

REMEDY = "try again when the run's owner has freed disk space"

DEFERRED = m.OperatorReply("the command is recorded; it will be carried out when the disk has room")
"""The reply to a command whose own journal entries are durable, while the entries that follow are not."""


def refusal(cause: str) -> m.Refused:
    """Return the refusal of a request that cannot be recorded in the journal because of `cause`."""
    return m.Refused("no-room", f"the coordinator cannot decide now, because {cause}", REMEDY)


class DiskFullMode:
    """A period during which the disk is full.

    Args:
        cause: the reason why the journal cannot be written.
        effects: the decided effects, to be carried out in this order once they are durable.
        began_s: the time at which the period began, on the real clock.
        core_s: the time at which the core's clock stopped.
    """

    def __init__(self, cause: str, effects: Sequence[ev.Effect], *, began_s: float, core_s: float) -> None:
        self.cause = cause
        self.effects = list(effects)
        self.events: deque[TransportEvent] = deque()
        self._heartbeats: dict[m.PeerId, tuple[m.Heartbeat, float]] = {}  # each peer's latest, and its time
        self.began_s, self.core_stopped_s = began_s, core_s
        self.retry_at_s = began_s + RETRY_S

    @property
    def reason(self) -> str:
        """The reason shown in `RunStateUpdate` and `gridtrain status`."""
        return (
            f"the coordinator makes no decisions, because {self.cause}; training continues until a member is "
            "lost, and decisions resume when disk space is available"
        )

    @property
    def phase(self) -> str:
        return str(ev.RunPhase.PAUSED)

    def state(self) -> m.RunStateUpdate:
        return m.RunStateUpdate(self.phase, self.reason)

    def update_status(self, status: dict[str, Any], connected: Container[m.PeerId], real_s: float) -> None:
        """Update a status of the core, whose clock has stopped, with later heartbeats and connections.

        Args:
            connected: the workers with a connection.
            real_s: the time on the real clock.
        """
        stopped_s = real_s - self.began_s
        for row in status["members"]:
            peer = bytes.fromhex(row["peer"])
            row["last_heard_s"] = round(row["last_heard_s"] + stopped_s, 3)
            if peer in self._heartbeats:
                beat, at_s = self._heartbeats[peer]
                row |= {"step": beat.step, "progress": beat.progress, "figures": dict(beat.metrics)}
                row["last_heard_s"] = round(real_s - at_s, 3)
            if peer not in connected:
                row["state"] = "suspect"
            if row["rank"] is not None:
                status["step"] = max(status["step"], row["step"])
        age = f"except for heartbeats and broken connections, this status is {stopped_s:.0f} s old"
        status |= {"phase": self.phase, "reason": f"{self.reason}; {age}"}

    def queue_event(self, event: TransportEvent, real_s: float) -> list[ev.Effect]:
        """Store an event for later; return the effects to carry out now.

        Heartbeats are not queued, because each supersedes the one before; the latest is kept for the status.
        If the queue is full, a peer that sends a message or connects is disconnected.
        """
        if isinstance(event, Received) and isinstance(event.message, m.Heartbeat):
            self._heartbeats[event.peer] = event.message, real_s
            return []
        if len(self.events) < MAX_EVENTS or not isinstance(event, Received | PeerUp):
            if isinstance(event, Received) and isinstance(event.message, m.Leave | m.TemporaryLeave):
                last = self._heartbeats.get(event.peer)  # the core must know the worker's last step
                self.events += [Received(event.peer, last[0], event.nbytes)] if last is not None else []
            self.events.append(event)
            return []
        return [ev.Disconnect(event.peer)]
