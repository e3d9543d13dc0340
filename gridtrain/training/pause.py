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

from gridtrain.core.messages import CheckpointInfo
from gridtrain.errors import CoordinatorUnreachable, JoinRefused
from gridtrain.network.transport.access_control import PeerAllowlist
from gridtrain.network.transport.flow_control import FlowControlTransport
from gridtrain.runtime.client.agent_link import BUDGET_EXHAUSTED, AgentControl, AgentDirective
from gridtrain.runtime.group_session import GroupSession

log = logging.getLogger("gridtrain")

MakeTransport = Callable[[], tuple[FlowControlTransport, PeerAllowlist]]
SetRateLimits = Callable[[float | None, float | None], None]

POLL_INTERVAL_S = 1.0
RETRY_FIRST_S, RETRY_MOST_S = 1.0, 30.0
CONTROL_RESERVE_BYTES = 64 << 10
"""Beats, votes and the farewell of one step."""

STEPS_AHEAD = 2
"""A step is expected to cost no more than so many times the dearest one so far."""


class PauseController:
    """See the module's text.

    Args:
        connect: makes a transport for a new place in the group; None: this worker cannot come back, and so
            never rests.
        limit: sets the rate caps.

    Attributes:
        missed_the_end: the run was finished while this worker rested.
    """

    def __init__(
        self, session: GroupSession, owner: AgentControl, connect: MakeTransport | None, limit: SetRateLimits
    ) -> None:
        self._session, self._agent, self._connect, self._limit = session, owner, connect, limit
        self._rates: tuple[float | None, float | None] | None = None
        self._turn_start_bytes: int | None = None
        self._max_step_bytes = 0
        self._is_returning = False
        self.has_missed_end = False
        if connect is not None:
            session.connection.set_control(self._should_pause, self._budget_exhausted)
            self._apply_rates(owner.directive)

    @property
    def is_controlled(self) -> bool:
        """Somebody may pause this worker."""
        return self._connect is not None

    @property
    def should_stop(self) -> bool:
        """The owner wants the script to end after the step."""
        return self._agent.directive.stop

    @property
    def remaining_bytes(self) -> int:
        """Of what this process may move; very much where there is no limit."""
        left = self._agent.directive.most_bytes - self._session.connection.moved_bytes
        return int(max(0.0, min(left, 1 << 60)))

    def begin_turn(self) -> None:
        """A step is about to be computed: learn what the last one cost, and obey what has changed."""
        moved_bytes = self._session.connection.moved_bytes
        if self._turn_start_bytes is not None:
            self._max_step_bytes = max(self._max_step_bytes, moved_bytes - self._turn_start_bytes)
        self._turn_start_bytes, self._is_returning = moved_bytes, False
        self._apply_rates(self._agent.directive)
        picture = self._session.snapshot
        self._agent.report(state="training", step=picture.applied + 1, name=picture.name)

    def pause(self, held: CheckpointInfo | None, *, touched: bool) -> bool:
        """Leave now, come back when it is wanted; False: there is nothing to come back to.

        Raises `JoinRefused`, and `CoordinatorUnreachable` where nobody answered for `Deadlines.paused_s`.
        """
        reason = self._pause_reason()
        log.warning("paused by its owner: %s; the others go on without this worker", reason)
        self._session.pause(reason)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()  # whoever wants the GPU wants its memory, too
        self._agent.report(state="paused", reason=reason)
        self._turn_start_bytes, self._is_returning = None, True
        away_since_s = time.monotonic()
        if not self._await_permission() or not self._rejoin(held, touched):
            return False
        log.warning(
            "this worker is back after %.0f s, and takes over the state", time.monotonic() - away_since_s
        )
        self._agent.report(state="joining")
        return True

    def is_run_over(self, refusal: JoinRefused) -> bool:
        """On the way back: the run was finished meanwhile, which is no error."""
        if refusal.code != "finished" or not self._is_returning:
            return False
        log.warning("the run was finished while this worker was paused")
        self.has_missed_end = True
        return True

    def _await_permission(self) -> bool:
        """Until it may train; False: the owner has said stop."""
        while self._should_pause():
            if self.should_stop:
                return False
            self._agent.wait(POLL_INTERVAL_S)
        return True

    def _rejoin(self, held: CheckpointInfo | None, touched: bool) -> bool:
        assert self._connect is not None
        give_up_s = time.monotonic() + self._session.config.deadlines.paused_s
        retry_s = RETRY_FIRST_S
        while True:
            try:
                self._apply_rates(self._agent.directive)
                self._session.resume(*self._connect(), held, touched=touched)
                return True
            except CoordinatorUnreachable as error:
                if time.monotonic() >= give_up_s:
                    raise
                log.warning("%s; tried again in %.0f s", error.reason, retry_s)
            except JoinRefused as refusal:
                if not self.is_run_over(refusal):
                    raise
                return False
            self._agent.wait(retry_s)
            retry_s = min(RETRY_MOST_S, 2 * retry_s)
            if not self._await_permission():
                return False

    def _should_pause(self) -> bool:
        """Elsewhere: asked while the script waits between two steps."""
        wish = self._agent.directive
        return not wish.run or wish.stop or self._exceeds_budget(wish)

    def _pause_reason(self) -> str:
        wish = self._agent.directive
        if not wish.run:
            return wish.reason
        return wish.spent_text if self._exceeds_budget(wish) else "for a moment only"

    def _exceeds_budget(self, wish: AgentDirective) -> bool:
        if wish.most_bytes == math.inf:
            return False
        needed_bytes = STEPS_AHEAD * self._max_step_bytes + CONTROL_RESERVE_BYTES
        return self._session.connection.moved_bytes + needed_bytes > wish.most_bytes

    def _budget_exhausted(self) -> str:
        """In the loop's thread, which asks all the time: also while a state of gigabytes is taken over, or a
        step waits for a slow line, and a new cap is meant for just that."""
        wish = self._agent.directive
        self._apply_rates(wish)
        if wish.most_bytes == math.inf:
            return ""
        margin_bytes = max(CONTROL_RESERVE_BYTES, self._max_step_bytes) // 2
        if self._session.connection.moved_bytes + margin_bytes <= wish.most_bytes:
            return ""
        self._agent.report(
            state=BUDGET_EXHAUSTED
        )  # or the agent, which sees that there is a little left, takes it for a failure
        return f"paused in the middle of a step: {wish.spent_text}"

    def _apply_rates(self, wish: AgentDirective) -> None:
        rates = wish.upload_Bps, wish.download_Bps
        if rates != self._rates:
            self._rates = rates
            self._limit(*rates)
