"""This worker's signs of life: whether anything moves, whether the trainer waits, and figures for people.

Decides what counts as progress of what was moved.  Never decides whether that is enough: the others do.

    trainer: note, busy --+
    bytes moved ----------+--> pulse --> io.Pulse --> Progress to peers, Beat to the coordinator
    Meeting.progress -----+
"""

from __future__ import annotations

from collections.abc import Mapping

from gridtrain.core.group import member_events as io
from gridtrain.core.messages import STATE_LEFT
from gridtrain.runtime.mailbox.mailbox import Mailbox

EXCHANGE_MESSAGES = ("Data", "RelayRequest", "RelayedMessage")
PROGRESS_MESSAGES = (*EXCHANGE_MESSAGES, "SnapshotBlock", "UpdateLogEntry")
"""Messages that are work: whoever sends or receives them is not hung."""


class HeartbeatSource:
    """See the module's text."""

    def __init__(self, meeting: Mailbox) -> None:
        self._mailbox = meeting
        self._busy = False
        self._moved_bytes = 0
        self._figures: dict[str, float] = {}

    # -- the trainer's thread --------------------------------------------------------------------

    def add_figures(self, figures: Mapping[str, float]) -> None:
        """Figures for `gridtrain status`, and a sign of life."""
        with self._mailbox.condition:
            self._figures.update(figures)
            self._mailbox.progress += 1

    @property
    def figures(self) -> dict[str, float]:
        """What was noted so far."""
        with self._mailbox.condition:
            return dict(self._figures)

    def set_busy(self, inside: bool) -> None:
        """The trainer is legitimately busy (an evaluation) and counts as making progress."""
        with self._mailbox.condition:
            self._busy = inside

    # -- the loop's thread -----------------------------------------------------------------------

    def make_heartbeat(self, traffic: Mapping[str, tuple[int, int]], left_bytes: int) -> io.HeartbeatDue:
        """`traffic`: bytes sent and received by message type; `left_bytes`: of the state that is coming."""
        moved = sum(sum(traffic.get(kind, (0, 0))) for kind in PROGRESS_MESSAGES)
        with self._mailbox.condition:
            if moved != self._moved_bytes or self._busy:
                self._moved_bytes = moved
                self._mailbox.progress += 1
            progress, waiting = self._mailbox.progress, self._mailbox.is_trainer_waiting
            figures = tuple(sorted(self._figures.items()))
        sent = float(sum(out for out, _ in traffic.values()))
        received = float(sum(back for _, back in traffic.values()))
        exchanged = float(sum(traffic.get(kind, (0, 0))[0] for kind in EXCHANGE_MESSAGES))
        counts = [("exchanged_bytes", exchanged), ("received_bytes", received), ("sent_bytes", sent)]
        if left_bytes:
            counts.append((STATE_LEFT, float(left_bytes)))
        return io.HeartbeatDue(progress, waiting, (*figures, *counts))
