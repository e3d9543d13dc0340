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

from gridtrain.protocol import member_io as io
from gridtrain.protocol import messages as m
from gridtrain.runtime.following import Asks, Bar, Following, ImageWork, Work
from gridtrain.runtime.meeting import Meeting
from gridtrain.runtime.statefeed import MAX_STATE_BYTES, StateIntake

CAUGHT_AGAIN_S = 1.0
"""That it has caught up is said again so soon, until a VIEW names this worker."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What `turn` has to say: to donors, to the core, and to people."""

    asks: Asks
    event: io.CaughtUp | io.Strayed | None
    progress: tuple[int, int, int, int]
    arrived: bool


class CatchingUp:
    """See the module's text.

    Args:
        intake: of the whole state, which is of no use where this worker cannot follow.
        idle_s: a member to be of which nothing more came for so long cannot follow.
    """

    def __init__(self, meeting: Meeting, intake: StateIntake, idle_s: float) -> None:
        self._meeting, self._intake, self._idle_s = meeting, intake, idle_s
        self._following: Following | None = None
        self._bounds = (MAX_STATE_BYTES, 0)  # of the largest state, and elements of the flat gradient
        self._caught_again_s = -math.inf
        self._moved: tuple[object, float] = (None, 0.0)  # what `Following.idle` was, and since when
        self._bar = Bar()

    # -- the trainer's thread --------------------------------------------------------------------

    def allow(self, max_bytes: int, n: int) -> None:
        """The largest image that a donor may send, and the elements of the flat gradient."""
        with self._meeting.changed:
            self._bounds = (max_bytes, n)

    def take_work(self) -> Work | None:
        """What a follower's trainer has to do next; `did_work` is to follow."""
        with self._meeting.changed:
            following = self._following
            work = following.work() if following is not None and following.has_work else None
        if isinstance(work, ImageWork):
            self._meeting.command(io.Loading())
        return work

    def fail_work(self, reason: str) -> None:
        """What a donor gave cannot be loaded or replayed: this worker takes the whole state instead."""
        with self._meeting.changed:
            if self._following is not None:
                self._following.failed = self._following.failed or reason
        self._meeting.stir()

    def did_work(self, work: Work) -> None:
        with self._meeting.changed:
            self._meeting.progress += 1
            if self._following is not None:
                self._following.done(work)
        self._meeting.stir()

    # -- the loop's thread -----------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self._following is not None and self._following.has_work

    @property
    def may_load(self) -> bool:
        """A follower loads what it lacks when it has replayed all updates: they begin from what it has."""
        return self._following is None or self._following.arrived

    def do(self, effect: io.Follow | io.DonorUp | io.DonorDown | io.Arrive) -> Asks:
        with self._meeting.changed:
            following = self._following
            match effect:
                case io.Follow():
                    self._following = Following(*self._bounds)
                case io.DonorUp(peer) if following is not None:
                    return following.donor_up(peer)
                case io.DonorDown(peer) if following is not None:
                    return following.donor_down(peer)
                case io.Arrive(applied, history) if following is not None:
                    following.enter(applied, history)
        return []

    def heard(self, peer: m.PeerId, message: m.Message, now_s: float) -> Asks:
        """Raises `RemoteProtocolError` for what an honest donor cannot have sent."""
        with self._meeting.changed:
            asks = self._following.heard(peer, message, now_s) if self._following else []
            self._meeting.progress += 1
        return asks

    def turn(self, now_s: float, *, seated: bool, synced: bool) -> Standing | None:
        """How it stands; None: this worker does not follow, or is a member with the state by now."""
        with self._meeting.changed:
            following = self._following
            if following is None:
                return None
            if synced and seated:
                self._following = None
                return None
            asks = following.tick(now_s)
            if not seated or following.idle is None or following.idle != self._moved[0]:
                self._moved = (following.idle, now_s)
            elif now_s - self._moved[1] >= self._idle_s:
                following.failed = following.failed or "nothing more came of what the VIEW names"
            if following.failed:
                self._following = None
                self._intake.forget()
            event = self._event(following, now_s, seated)
            return Standing(asks, event, following.progress, following.arrived)

    def show(self, standing: Standing, now_s: float) -> None:
        """To people, now and then."""
        self._bar.show(standing.progress, now_s, over=standing.arrived)

    def _event(self, following: Following, now_s: float, seated: bool) -> io.CaughtUp | io.Strayed | None:
        if following.failed:
            return io.Strayed(following.failed)
        if seated or not following.caught_up or following.at is None or now_s < self._caught_again_s:
            return None
        self._caught_again_s = now_s + CAUGHT_AGAIN_S
        return io.CaughtUp(*following.at)
