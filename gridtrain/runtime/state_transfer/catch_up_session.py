"""This worker follows: the loop feeds what donors send, the trainer loads and replays it.

Decides when the coordinator is told that it has caught up, or that it cannot follow.  What is asked of whom
and what comes next to do is not decided here (`runtime.following`).

    io.Follow, DonorUp, DonorDown, Arrive, Feed --> Following --has_work (in the picture)--> trainer
                                                       ^                          take_work, did_work
    turn --> CaughtUp | Strayed                        +-------------------------- fail_work
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as io
from gridtrain.runtime.mailbox.mailbox import Mailbox
from gridtrain.runtime.state_transfer.blobs import MAX_STATE_BYTES, BlobReceiver
from gridtrain.runtime.state_transfer.catch_up_receiver import (
    CatchUpReceiver,
    CatchUpWork,
    PeerRequests,
    ProgressBar,
    SnapshotWork,
)

CAUGHT_UP_REPEAT_S = 1.0
"""That it has caught up is said again so soon, until a VIEW names this worker."""


@dataclass(frozen=True, slots=True)
class CatchUpStatus:
    """What `turn` has to say: to donors, to the core, and to people."""

    requests: PeerRequests
    event: io.CaughtUp | io.CatchUpFailed | None
    progress: tuple[int, int, int, int]
    is_complete: bool


class CatchUpSession:
    """See the module's text.

    Args:
        intake: of the whole state, which is of no use where this worker cannot follow.
        idle_s: a member to be of which nothing more came for so long cannot follow.
    """

    def __init__(self, meeting: Mailbox, intake: BlobReceiver, idle_s: float) -> None:
        self._mailbox, self._intake, self._idle_s = meeting, intake, idle_s
        self._receiver: CatchUpReceiver | None = None
        self._bounds = (MAX_STATE_BYTES, 0)  # of the largest state, and elements of the flat gradient
        self._next_report_s = -math.inf
        self._last_progress: tuple[object, float] = (None, 0.0)  # what `Following.idle` was, and since when
        self._progress_bar = ProgressBar()

    # -- the trainer's thread --------------------------------------------------------------------

    def set_limits(self, max_bytes: int, n: int) -> None:
        """The largest image that a donor may send, and the elements of the flat gradient."""
        with self._mailbox.condition:
            self._bounds = (max_bytes, n)

    def take_work(self) -> CatchUpWork | None:
        """What a follower's trainer has to do next; `did_work` is to follow."""
        with self._mailbox.condition:
            following = self._receiver
            work = following.take_work() if following is not None and following.has_work else None
        if isinstance(work, SnapshotWork):
            self._mailbox.submit(io.SnapshotLoading())
        return work

    def fail_work(self, reason: str) -> None:
        """What a donor gave cannot be loaded or replayed: this worker takes the whole state instead."""
        with self._mailbox.condition:
            if self._receiver is not None:
                self._receiver.failure = self._receiver.failure or reason
        self._mailbox.mark_stale()

    def finish_work(self, work: CatchUpWork) -> None:
        with self._mailbox.condition:
            self._mailbox.progress += 1
            if self._receiver is not None:
                self._receiver.finish_work(work)
        self._mailbox.mark_stale()

    # -- the loop's thread -----------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self._receiver is not None and self._receiver.has_work

    @property
    def can_load_checkpoint(self) -> bool:
        """A follower loads what it lacks when it has replayed all updates: they begin from what it has."""
        return self._receiver is None or self._receiver.has_reached_target

    def execute(
        self, effect: io.BeginCatchUp | io.SourceConnected | io.SourceDisconnected | io.SetCatchUpTarget
    ) -> PeerRequests:
        with self._mailbox.condition:
            following = self._receiver
            match effect:
                case io.BeginCatchUp():
                    self._receiver = CatchUpReceiver(*self._bounds)
                case io.SourceConnected(peer) if following is not None:
                    return following.source_up(peer)
                case io.SourceDisconnected(peer) if following is not None:
                    return following.source_down(peer)
                case io.SetCatchUpTarget(applied, history) if following is not None:
                    following.set_target(applied, history)
        return []

    def handle_message(self, peer: m.PeerId, message: m.Message, now_s: float) -> PeerRequests:
        """Raises `RemoteProtocolError` for what an honest donor cannot have sent."""
        with self._mailbox.condition:
            asks = self._receiver.handle_message(peer, message, now_s) if self._receiver else []
            self._mailbox.progress += 1
        return asks

    def poll(self, now_s: float, *, seated: bool, synced: bool) -> CatchUpStatus | None:
        """How it stands; None: this worker does not follow, or is a member with the state by now."""
        with self._mailbox.condition:
            following = self._receiver
            if following is None:
                return None
            if synced and seated:
                self._receiver = None
                return None
            asks = following.tick(now_s)
            if not seated or following.idle_key is None or following.idle_key != self._last_progress[0]:
                self._last_progress = (following.idle_key, now_s)
            elif now_s - self._last_progress[1] >= self._idle_s:
                following.failure = following.failure or "nothing more came of what the VIEW names"
            if following.failure:
                self._receiver = None
                self._intake.clear()
            event = self._event(following, now_s, seated)
            return CatchUpStatus(asks, event, following.progress, following.has_reached_target)

    def show_progress(self, standing: CatchUpStatus, now_s: float) -> None:
        """To people, now and then."""
        self._progress_bar.show(standing.progress, now_s, over=standing.is_complete)

    def _event(
        self, following: CatchUpReceiver, now_s: float, seated: bool
    ) -> io.CaughtUp | io.CatchUpFailed | None:
        if following.failure:
            return io.CatchUpFailed(following.failure)
        if seated or not following.is_caught_up or following.position is None or now_s < self._next_report_s:
            return None
        self._next_report_s = now_s + CAUGHT_UP_REPEAT_S
        return io.CaughtUp(*following.position)
