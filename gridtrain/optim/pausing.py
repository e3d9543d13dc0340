"""A script's pauses: leave the group between two steps, wait, and come back as a joiner does.

Decides when this worker goes and comes, from what its owner wishes and from what is left of the day's bytes.
Never decides why (that is the agent's), nor what becomes of the residual (`optim.leaving`).

    between two steps: the wish is "pause", or the next step may not fit what is left of the day
        residual to a neighbour --> Pausing to the coordinator --> every connection is closed
        .......... nothing is sent, nothing is computed; memory of the GPU is given back ..........
    the wish is "run" --> a new place: Join, the group's state, in at the next generation

A step that costs more than was foreseen cannot be left in its middle by these means: `spent` then ends
everything at once, and the script with it; the agent starts it again when there are bytes again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import torch

from gridtrain.errors import CoordinatorUnreachable, JoinRefused
from gridtrain.protocol.messages import Held
from gridtrain.runtime.acquaintances import Acquaintances
from gridtrain.runtime.api import GroupSession
from gridtrain.runtime.owner import SPENT, Owner, Wish
from gridtrain.transport.credits import CreditTransport

log = logging.getLogger("gridtrain")

Connect = Callable[[], tuple[CreditTransport, Acquaintances]]
Limit = Callable[[float | None, float | None], None]

LOOK_S = 1.0
RETRY_FIRST_S, RETRY_MOST_S = 1.0, 30.0
TALK_BYTES = 64 << 10
"""Beats, votes and the farewell of one step."""

FORESIGHT = 2
"""A step is expected to cost no more than so many times the dearest one so far."""


class Pauses:
    """See the module's text.

    Args:
        connect: makes a transport for a new place in the group; None: this worker cannot come back, and so
            never rests.
        limit: sets the rate caps.

    Attributes:
        missed_the_end: the run was finished while this worker rested.
    """

    def __init__(self, session: GroupSession, owner: Owner, connect: Connect | None, limit: Limit) -> None:
        self._session, self._owner, self._connect, self._limit = session, owner, connect, limit
        self._rates: tuple[float | None, float | None] | None = None
        self._at_turn_bytes: int | None = None
        self._dearest_bytes = 0
        self._returning = False
        self.missed_the_end = False
        if connect is not None:
            session.wanted_elsewhere = self._wanted
            session.spend_while(self._spent)
            self._obey_rates(owner.wish)

    @property
    def led(self) -> bool:
        """Somebody may pause this worker."""
        return self._connect is not None

    @property
    def stops(self) -> bool:
        """The owner wants the script to end after the step."""
        return self._owner.wish.stop

    @property
    def left_bytes(self) -> int:
        """Of what this process may move; very much where there is no limit."""
        left = self._owner.wish.most_bytes - self._session.moved_bytes
        return int(max(0.0, min(left, 1 << 60)))

    def turn_begins(self) -> None:
        """A step is about to be computed: learn what the last one cost, and obey what has changed."""
        moved_bytes = self._session.moved_bytes
        if self._at_turn_bytes is not None:
            self._dearest_bytes = max(self._dearest_bytes, moved_bytes - self._at_turn_bytes)
        self._at_turn_bytes, self._returning = moved_bytes, False
        self._obey_rates(self._owner.wish)
        picture = self._session.picture
        self._owner.tell(state="training", step=picture.applied + 1, name=picture.name)

    def rest(self, held: Held | None, *, touched: bool) -> bool:
        """Leave now, come back when it is wanted; False: there is nothing to come back to.

        Raises `JoinRefused`, and `CoordinatorUnreachable` where nobody answered for `Deadlines.paused_s`.
        """
        reason = self._reason()
        log.warning("paused by its owner: %s; the others go on without this worker", reason)
        self._session.depart(reason)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()  # whoever wants the GPU wants its memory, too
        self._owner.tell(state="paused", reason=reason)
        self._at_turn_bytes, self._returning = None, True
        away_since_s = time.monotonic()
        if not self._await_leave() or not self._return(held, touched):
            return False
        log.warning(
            "this worker is back after %.0f s, and takes over the state", time.monotonic() - away_since_s
        )
        self._owner.tell(state="joining")
        return True

    def too_late(self, refusal: JoinRefused) -> bool:
        """On the way back: the run was finished meanwhile, which is no error."""
        if refusal.code != "finished" or not self._returning:
            return False
        log.warning("the run was finished while this worker was paused")
        self.missed_the_end = True
        return True

    def _await_leave(self) -> bool:
        """Until it may train; False: the owner has said stop."""
        while self._wanted():
            if self.stops:
                return False
            self._owner.wait(LOOK_S)
        return True

    def _return(self, held: Held | None, touched: bool) -> bool:
        assert self._connect is not None
        give_up_s = time.monotonic() + self._session.config.deadlines.paused_s
        retry_s = RETRY_FIRST_S
        while True:
            try:
                self._obey_rates(self._owner.wish)
                self._session.come_back(*self._connect(), held, touched=touched)
                return True
            except CoordinatorUnreachable as error:
                if time.monotonic() >= give_up_s:
                    raise
                log.warning("%s; tried again in %.0f s", error.reason, retry_s)
            except JoinRefused as refusal:
                if not self.too_late(refusal):
                    raise
                return False
            self._owner.wait(retry_s)
            retry_s = min(RETRY_MOST_S, 2 * retry_s)
            if not self._await_leave():
                return False

    def _wanted(self) -> bool:
        """Elsewhere: asked while the script waits between two steps."""
        wish = self._owner.wish
        return not wish.run or wish.stop or self._step_may_not_fit(wish)

    def _reason(self) -> str:
        wish = self._owner.wish
        if not wish.run:
            return wish.reason
        return wish.spent_text if self._step_may_not_fit(wish) else "for a moment only"

    def _step_may_not_fit(self, wish: Wish) -> bool:
        if wish.most_bytes == math.inf:
            return False
        needed_bytes = FORESIGHT * self._dearest_bytes + TALK_BYTES
        return self._session.moved_bytes + needed_bytes > wish.most_bytes

    def _spent(self) -> str:
        """In the loop's thread, which asks all the time: also while a state of gigabytes is taken over, or a
        step waits for a slow line, and a new cap is meant for just that."""
        wish = self._owner.wish
        self._obey_rates(wish)
        if wish.most_bytes == math.inf:
            return ""
        margin_bytes = max(TALK_BYTES, self._dearest_bytes) // 2
        if self._session.moved_bytes + margin_bytes <= wish.most_bytes:
            return ""
        self._owner.tell(
            state=SPENT
        )  # or the agent, which sees that there is a little left, takes it for a failure
        return f"paused in the middle of a step: {wish.spent_text}"

    def _obey_rates(self, wish: Wish) -> None:
        rates = wish.upload_Bps, wish.download_Bps
        if rates != self._rates:
            self._rates = rates
            self._limit(*rates)
