"""Pauses a worker when its owner or the traffic budget requires it, and lets it rejoin the run.

The volunteer's agent decides when the script pauses, and manages the byte budget.

    between two steps: the directive is "pause", or the next step may exceed the budget
        residual to another worker --> TemporaryLeave to the coordinator --> every connection is closed
        .......... nothing is sent, nothing is computed; GPU memory is freed ..........
    the directive is "run" --> Join, the group's state, a member of the next generation
    the script ends        --> Join, then Leave: the worker is no longer paused

If a step transfers more than expected, this worker cannot wait for the end of the step: the budget check then
ends the script immediately, and the agent restarts it when budget is available again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from gridtrain.core.messages import CheckpointInfo, ends_with_resume
from gridtrain.errors import CoordinatorUnreachable, GridtrainError, JoinRefused
from gridtrain.network.transport.access_control import PeerAllowlist
from gridtrain.network.transport.flow_control import FlowControlTransport
from gridtrain.runtime.client.agent_link import BUDGET_EXHAUSTED, AgentControl, AgentDirective
from gridtrain.runtime.group_session import GroupSession
from gridtrain.training.data.fetch_meter import FetchMeter

log = logging.getLogger("gridtrain")

MakeTransport = Callable[[], tuple[FlowControlTransport, PeerAllowlist]]
SetRateLimits = Callable[[float | None, float | None], None]

POLL_INTERVAL_S = 1.0
LEAVE_S = 3.0
"""How long a worker that ends while it is paused tries to reach the coordinator."""

RETRY_FIRST_S, RETRY_MOST_S = 1.0, 30.0
CONTROL_RESERVE_BYTES = 64 << 10
"""The bytes reserved for the heartbeats, votes and leave message of one step."""

STEPS_AHEAD = 2
"""The next step is assumed to transfer up to this many times the bytes of the most expensive step so far."""


class PauseController:
    """Carries out the agent's directives: between two steps or, for rate limits and the budget, at any time.

    Args:
        session, owner: this worker's session in the run, and its link to the volunteer's agent.
        connect: a function that creates a transport for rejoining; None without an agent, in which case
            this worker never pauses.
        limit: a function that sets the upload and download limits in bytes per second.
        fetches: the meter of the data sets' fetches, to which the same limits apply.

    Attributes:
        has_missed_end: whether the run was finished while this worker was paused.
    """

    def __init__(
        self,
        session: GroupSession,
        owner: AgentControl,
        connect: MakeTransport | None,
        limit: SetRateLimits,
        fetches: FetchMeter | None = None,
    ) -> None:
        self._fetches = fetches or FetchMeter()
        self._session, self._agent, self._connect, self._limit = session, owner, connect, limit
        self._rates: tuple[float | None, float | None] | None = None
        self._turn_start_bytes: int | None = None
        self._max_step_bytes = 0
        self._directed_bytes = self._limit_bytes = owner.directive.most_bytes
        self._is_returning = False
        self.has_missed_end = False
        if connect is not None:
            session.connection.set_control(self._should_pause, self._budget_exhausted)
            self._apply_rates(owner.directive)

    @property
    def is_controlled(self) -> bool:
        """Whether an agent may pause this worker."""
        return self._connect is not None

    @property
    def has_lost_agent(self) -> bool:
        """Whether the agent's process ended before this script did."""
        return self._agent.is_lost

    @property
    def should_stop(self) -> bool:
        """Whether the agent requests that the script end after the current step."""
        return self._agent.directive.stop

    def await_stop(self, timeout_s: float) -> bool:
        """Wait until the agent requests that the script end, but not longer than `timeout_s`; return whether
        it has requested this."""
        until_s = time.monotonic() + timeout_s
        while not (known := self._agent.directive).stop and (left_s := until_s - time.monotonic()) > 0.0:
            self._agent.wait(left_s, known)
        return self.should_stop

    @property
    def remaining_bytes(self) -> int:
        """The number of bytes that this process may still send, receive and fetch; 2**60 without a limit."""
        left = self._bound_bytes() - self.moved_bytes
        return int(max(0.0, min(left, 1 << 60)))

    @property
    def residual_budget_bytes(self) -> int:
        """The number of bytes that this worker may spend on transferring its residual when it pauses or
        leaves."""
        return self.remaining_bytes // 2

    @property
    def moved_bytes(self) -> int:
        """The number of bytes that this worker has sent, received and fetched so far.  Thread-safe."""
        return self._note_exchanges() + self._fetches.fetched_bytes

    def _note_exchanges(self) -> int:
        """Return the bytes that the sockets have sent and received so far, and note them in the meter."""
        sent_bytes, received_bytes = self._session.connection.total_bytes
        self._fetches.note_exchanges(received_bytes, sent_bytes + received_bytes)
        return sent_bytes + received_bytes

    @property
    def _reserve_bytes(self) -> int:
        """The bytes of the budget that this worker needs to end its step and leave in an orderly way."""
        return STEPS_AHEAD * self._max_step_bytes + CONTROL_RESERVE_BYTES

    def _bound_bytes(self) -> float:
        """Return the number of bytes at which the script ends immediately.  Thread-safe.

        If the owner lowers the budget below this number, this worker can still end its step and leave in an
        orderly way.
        """
        most_bytes = self._agent.directive.most_bytes
        if most_bytes != self._directed_bytes:
            needed_bytes = min(self._limit_bytes, self.moved_bytes + self._reserve_bytes)
            self._limit_bytes, self._directed_bytes = max(most_bytes, needed_bytes), most_bytes
        return self._limit_bytes

    def report_spent(self) -> None:
        """Notify the agent that the script is ending because the traffic budget is exhausted, which is not a
        failure."""
        self._agent.report(state=BUDGET_EXHAUSTED)

    def begin_turn(self) -> None:
        """Begin a step: record the bytes that the last step transferred, and apply new rate limits."""
        moved_bytes = self._note_exchanges()
        if self._turn_start_bytes is not None:
            self._max_step_bytes = max(self._max_step_bytes, moved_bytes - self._turn_start_bytes)
        self._turn_start_bytes, self._is_returning = moved_bytes, False
        self._apply_rates(self._agent.directive)
        snapshot = self._session.snapshot
        self._agent.report(state="training", step=snapshot.applied + 1, name=snapshot.name)

    def pause(
        self,
        held: CheckpointInfo | None,
        *,
        touched: bool,
        on_left: Callable[[], None],
        others_wait: bool = False,
    ) -> bool:
        """Leave the group and rejoin when the agent allows it; return False if this worker must not rejoin.

        Args:
            held: the state that this worker holds, or None; the group's state replaces it if the group has
                continued.
            touched: whether the model has changed since the script created it.
            on_left: a function that is called when this worker has left.
            others_wait: whether the other workers may have to wait for this worker.

        Raises:
            JoinRefused: the coordinator refuses the worker for a reason other than the end of the run.
            CoordinatorUnreachable: the coordinator does not answer for `Deadlines.paused_s`.
        """
        reason = self._pause_reason()
        hint = " (gridtrain worker resume ends the pause)" if ends_with_resume(reason) else ""
        log.warning("paused by its owner: %s%s", reason, hint)
        members = self._session.pause(reason)
        if members == 1:
            log.warning(
                "no other worker is training: the run will continue when enough workers have joined or "
                "resumed"
            )
        elif not members:
            log.warning("this worker had not yet become a member")
        elif not others_wait:
            log.warning("the other workers continue without this worker, unless they are also paused")
        self._agent.report(state="paused", reason=reason)
        self._turn_start_bytes, self._is_returning = None, True
        away_since_s, has_returned = time.monotonic(), False
        try:
            on_left()
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.empty_cache()  # for other programs that use the GPU
            has_returned = self._await_permission() and self._rejoin(held, touched)
        finally:
            if not has_returned and not self.has_missed_end:
                self._leave_for_good()
        if not has_returned:
            return False
        log.warning(
            "this worker has returned after %.0f s and is loading the group's state",
            time.monotonic() - away_since_s,
        )
        self._agent.report(state="joining")
        return True

    def is_run_over(self, refusal: JoinRefused) -> bool:
        """Whether the run was finished while this worker was paused, which is not an error."""
        if refusal.code != "finished" or not self._is_returning:
            return False
        log.warning("the run was finished while this worker was paused")
        self.has_missed_end = True
        return True

    def _leave_for_good(self) -> None:
        """Notify the coordinator, if it answers soon and the budget allows it, that this worker is no longer
        paused, but has ended."""
        assert self._connect is not None
        if self.remaining_bytes < CONTROL_RESERVE_BYTES:
            return
        with suppress(GridtrainError):
            self._session.connection.leave_paused(
                *self._connect(), "it has ended while it was paused", LEAVE_S
            )

    def _await_permission(self) -> bool:
        """Wait until this worker may train; return False if it has to stop."""
        known = self._agent.directive
        while self._should_pause():
            if self.should_stop:
                return False
            self._agent.wait(POLL_INTERVAL_S, known)
            known = self._agent.directive
        return True

    def _rejoin(self, held: CheckpointInfo | None, touched: bool) -> bool:
        assert self._connect is not None
        give_up_s = time.monotonic() + self._session.config.deadlines.paused_s
        retry_s = RETRY_FIRST_S
        while True:
            known = self._agent.directive
            try:
                self._apply_rates(known)
                self._session.resume(*self._connect(), held, touched=touched)
                return True
            except CoordinatorUnreachable as error:
                if time.monotonic() >= give_up_s:
                    raise
                log.warning("%s; trying again in %.0f s", error.reason, retry_s)
            except JoinRefused as refusal:
                if not self.is_run_over(refusal):
                    raise
                return False
            self._agent.wait(retry_s, known)
            retry_s = min(RETRY_MOST_S, 2 * retry_s)
            if not self._await_permission():
                return False

    def _should_pause(self) -> bool:
        """Whether to pause now.  The I/O thread also calls this, while the script waits between two steps."""
        directive = self._agent.directive
        return not directive.run or directive.stop or self._exceeds_budget(directive)

    def _pause_reason(self) -> str:
        directive = self._agent.directive
        if not directive.run:
            return directive.reason
        return directive.spent_text if self._exceeds_budget(directive) else "for a moment only"

    def _exceeds_budget(self, directive: AgentDirective) -> bool:
        if directive.most_bytes == math.inf:
            return False
        return self.moved_bytes + self._reserve_bytes > directive.most_bytes

    def _budget_exhausted(self) -> str:
        """Return the reason why the script has to end immediately, or "" while the budget is not exhausted.

        The I/O thread calls this method often, even while a large state is being transferred or a step waits
        for a slow link, so that new rate limits take effect immediately.
        """
        directive = self._agent.directive
        self._apply_rates(directive)
        margin_bytes = max(CONTROL_RESERVE_BYTES, self._max_step_bytes) // 2
        if self._bound_bytes() == math.inf or self.moved_bytes + margin_bytes <= self._limit_bytes:
            return ""
        self.report_spent()  # otherwise the agent, which sees a few bytes left, would assume a failure
        return f"paused in the middle of a step: {directive.spent_text}"

    def _apply_rates(self, directive: AgentDirective) -> None:
        rates = directive.upload_Bps, directive.download_Bps
        if rates != self._rates:
            self._rates = rates
            self._limit(*rates)
        most_bytes = directive.most_bytes - self._reserve_bytes
        self._fetches.limit(directive.download_Bps, most_bytes, directive.day_bytes)
