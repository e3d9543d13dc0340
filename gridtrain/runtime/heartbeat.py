"""Composes a worker's heartbeat from its progress, its figures, and whether its trainer is waiting.

    trainer: add_figures, is_busy ---+
    bytes moved ---------------------+--> ev.HeartbeatDue --> RoundProgress (peers), Heartbeat (coordinator)
    Mailbox.progress ----------------+

From the heartbeats, the peers and the coordinator decide whether this worker is making enough progress.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gridtrain.core.group import member_events as ev
from gridtrain.core.messages import IS_WAITING, MISSED_STEPS, STATE_BYTES, STATE_LEFT
from gridtrain.network.transport.interface import RELAYED_PIECE, TrafficCounters
from gridtrain.runtime.mailbox.mailbox import Mailbox

STATE_MESSAGES = ("SnapshotBlock", "SnapshotDigests", "StateBlock", "StateDigest")
"""Types of messages that carry the state to a newcomer."""

PROGRESS_MESSAGES = ("Data", "SnapshotBlock", "UpdateLogEntry", RELAYED_PIECE)
"""Types of messages that count as progress, because a worker that sends or receives them is not hung.
Control messages and forwarded packets do not count, because the I/O loop of a hung worker handles both."""


class HeartbeatSource:
    """Collects the content of the next heartbeat.

    Attributes:
        is_busy: whether the trainer is busy with work that may take a long time.  As long as it is, each
            heartbeat counts as progress.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self.is_busy = False
        self._moved_bytes = 0
        self._figures: dict[str, float] = {}

    # -- training thread -------------------------------------------------------------------------

    def add_figures(self, figures: Mapping[str, float]) -> None:
        """Add or replace figures that `gridtrain status` shows.  The call counts as progress."""
        with self._mailbox.condition:
            self._figures.update(figures)
            self._mailbox.count_progress()

    def increase_figure(self, name: str, amount: float) -> None:
        """Add to a figure that is a total; it is not reported before it exceeds 0."""
        if amount:
            with self._mailbox.condition:
                self._figures[name] = self._figures.get(name, 0.0) + amount

    @property
    def figures(self) -> dict[str, float]:
        """The latest value of each figure, by name."""
        with self._mailbox.condition:
            return dict(self._figures)

    # -- I/O thread ------------------------------------------------------------------------------

    def count_missed_step(self) -> None:
        """Count a step that committed without the trainer."""
        self.increase_figure(MISSED_STEPS, 1.0)

    def make_heartbeat(self, traffic: TrafficCounters, left_bytes: int) -> ev.HeartbeatDue:
        """Return the event that makes the core send a heartbeat.

        Args:
            traffic: the counters of this worker's transport.
            left_bytes: the number of bytes still missing from the state that this worker is receiving.
        """
        sent, received = traffic.sent_bytes, traffic.received_bytes
        own_sent = sent, traffic.relayed_sent_bytes
        own_received = received, traffic.relayed_received_bytes
        moved_bytes = _count((*own_sent, *own_received), PROGRESS_MESSAGES)
        with self._mailbox.condition:
            if moved_bytes != self._moved_bytes or self.is_busy:
                self._moved_bytes = moved_bytes
                self._mailbox.count_progress()
            progress, is_waiting = self._mailbox.progress, self._mailbox.is_trainer_waiting
            figures = tuple(sorted(self._figures.items()))
        counts = [
            ("exchanged_bytes", float(_count(own_sent, ("Data",)))),
            ("received_bytes", float(sum(received.values()))),
            ("sent_bytes", float(sum(sent.values()))),
        ]
        if state_bytes := _count(own_received, STATE_MESSAGES):
            counts.append((STATE_BYTES, float(state_bytes)))
        if is_waiting:
            counts.append((IS_WAITING, 1.0))
        if left_bytes:
            counts.append((STATE_LEFT, float(left_bytes)))
        return ev.HeartbeatDue(progress, is_waiting, (*figures, *counts))


def _count(counters: Sequence[Mapping[str, int]], kinds: Sequence[str]) -> int:
    return sum(counter.get(kind, 0) for counter in counters for kind in kinds)
