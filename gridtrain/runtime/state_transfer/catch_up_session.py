"""Runs a newcomer's catch-up on two threads: the I/O thread receives, and the trainer loads and replays.

`CatchUpReceiver` decides which data are requested from which source, and what the trainer has to do next.

    ev.BeginCatchUp, SourceConnected, ... --> CatchUpReceiver --DoCatchUpWork (task)--> trainer
                                                    ^                          take_work, finish_work
    poll --> CaughtUp | CatchUpFailed               +------------------------- fail_work
"""

from __future__ import annotations

import math

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as ev
from gridtrain.runtime.mailbox.mailbox import Mailbox
from gridtrain.runtime.state_transfer.blobs import MAX_STATE_BYTES, BlobReceiver
from gridtrain.runtime.state_transfer.catch_up_receiver import (
    CatchUpReceiver,
    CatchUpWork,
    ProgressBar,
    StateSnapshotWork,
)
from gridtrain.runtime.state_transfer.state_snapshot import PeerMessages

CAUGHT_UP_REPEAT_S = 1.0
"""Interval at which `CaughtUp` is repeated until the membership view names this worker."""


class CatchUpSession:
    """Runs one catch-up at a time.

    Args:
        mailbox: the mailbox between the two threads.
        blobs: the receiver of the whole state.  Its blocks are dropped if the catch-up fails, because they
            were requested for this catch-up.
        idle_s: the time after which a source that sends no updates is replaced, once the membership view
            names this worker.  If there is no other source, the catch-up fails instead.

    Attributes:
        limits: the size in bytes of the largest snapshot that is accepted, and the length of the flat
            gradient; the mailbox's condition guards them.
    """

    def __init__(self, mailbox: Mailbox, blobs: BlobReceiver, idle_s: float) -> None:
        self._mailbox, self._blobs, self._idle_s = mailbox, blobs, idle_s
        self._receiver: CatchUpReceiver | None = None
        self.limits = (MAX_STATE_BYTES, 0)
        self._next_report_s = -math.inf
        self._last_progress: tuple[object, float] = (None, 0.0)  # an `idle_key`, and the time of its change
        self._progress_bar = ProgressBar()

    # -- training thread -------------------------------------------------------------------------

    def take_work(self) -> CatchUpWork | None:
        """Take the trainer's next work; return None if the trainer has nothing to do.

        Call `finish_work` or `fail_work` afterwards.
        """
        with self._mailbox.condition:
            work = self._receiver.take_work() if self._receiver is not None and self.has_work else None
        if isinstance(work, StateSnapshotWork):
            self._mailbox.submit(ev.StateSnapshotLoading())
        return work

    def fail_work(self, reason: str) -> None:
        """End the catch-up.  Call this method when received data cannot be loaded or replayed.

        This worker then receives the whole state.
        """
        with self._mailbox.condition:
            if self._receiver is not None:
                self._receiver.fail(reason)
        self._mailbox.mark_stale()

    def finish_work(self, work: CatchUpWork) -> None:
        with self._mailbox.condition:
            self._mailbox.count_progress()
            if self._receiver is not None:
                self._receiver.finish_work(work)
        self._mailbox.mark_stale()

    # -- I/O thread ------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self._receiver is not None and self._receiver.has_work

    @property
    def can_load_state(self) -> bool:
        """Whether a missing state can be loaded now: all updates were replayed, or no catch-up is running."""
        return self._receiver is None or self._receiver.has_reached_target

    def execute(
        self, effect: ev.BeginCatchUp | ev.SourceConnected | ev.SourceDisconnected | ev.SetCatchUpTarget
    ) -> PeerMessages:
        with self._mailbox.condition:
            receiver = self._receiver
            match effect:
                case ev.BeginCatchUp():
                    self._receiver = CatchUpReceiver(*self.limits)
                case ev.SourceConnected(peer) if receiver is not None:
                    return receiver.source_up(peer)
                case ev.SourceDisconnected(peer) if receiver is not None:
                    return receiver.source_down(peer)
                case ev.SetCatchUpTarget(applied, history) if receiver is not None:
                    receiver.set_target(applied, history)
        return []

    def handle_message(self, peer: m.PeerId, message: m.Message, now_s: float) -> PeerMessages:
        """Handle a source's message; return the requests to send to sources.

        Raises `RemoteProtocolError` if the message is invalid.
        """
        with self._mailbox.condition:
            requests = self._receiver.handle_message(peer, message, now_s) if self._receiver else []
            self._mailbox.count_progress()
        return requests

    @property
    def is_active(self) -> bool:
        """Whether this worker is catching up."""
        return self._receiver is not None

    def poll(
        self, now_s: float, *, is_member: bool, synced: bool
    ) -> tuple[PeerMessages, ev.CaughtUp | ev.CatchUpFailed | None]:
        """Advance the catch-up; return the requests to send to sources, and the event for the core or None.

        The catch-up ends if this worker is a member that holds the state.

        Args:
            now_s: the current time.
            is_member: whether the membership view names this worker.
            synced: whether this worker holds the state.
        """
        with self._mailbox.condition:
            receiver = self._receiver
            if receiver is None:
                return [], None
            if synced and is_member:
                self._receiver = None
                return [], None
            requests = receiver.tick(now_s)
            if not is_member or receiver.idle_key is None or receiver.idle_key != self._last_progress[0]:
                self._last_progress = (receiver.idle_key, now_s)
            elif now_s - self._last_progress[1] >= self._idle_s:
                requests += receiver.replace_update_source(
                    "the updates that the membership view names did not arrive"
                )
                self._last_progress = (receiver.idle_key, now_s)
            if receiver.failure:
                self._receiver = None
                self._blobs.clear()
            self._progress_bar.show(receiver.progress, now_s, over=receiver.has_reached_target)
            return requests, self._event(receiver, now_s, is_member)

    def _event(
        self, receiver: CatchUpReceiver, now_s: float, is_member: bool
    ) -> ev.CaughtUp | ev.CatchUpFailed | None:
        if receiver.failure:
            return ev.CatchUpFailed(receiver.failure)
        if is_member or not receiver.is_caught_up or receiver.position is None or now_s < self._next_report_s:
            return None
        self._next_report_s = now_s + CAUGHT_UP_REPEAT_S
        return ev.CaughtUp(*receiver.position)
