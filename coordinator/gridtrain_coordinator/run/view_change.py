"""The change of members in progress: its phase, reason and deadline, and the members' answers.

      request(reason)              begin_freezing            begin_forming               reset
IDLE ----------------> IDLE, reason ------------> FREEZING ----------------> FORMING ------------> IDLE
                                              waits for FreezeReport     waits for Ready    it is abandoned
                                                                             |   start
                                                                             ----------------> IDLE, started
                                                                                    all are ready
"""

from __future__ import annotations

import math
from enum import StrEnum

from gridtrain.core import messages as m


class ViewChangePhase(StrEnum):
    IDLE = "none"
    FREEZING = "freezing"  # waiting for FreezeReport messages
    FORMING = "forming"  # waiting for Ready messages


class ViewChange:
    """The state of the view change; other objects read its attributes and change them through its methods.

    Attributes:
        deadline_s: the time at which waiting for the members' answers ends.
        reason: the reason for another generation; empty if no generation is requested.
        can_wait: whether the members train until they are frozen, which leaves time to search for a plan.
        unrouted_reason: the reason for replacing the forming generation, unless its members connect after
            all.
        unrouted_s: the time from which it may be replaced.
        last_installed_s: the time at which this coordinator installed its latest generation; -inf if it has
            installed none.
        freeze_reports: the members' `FreezeReport` messages.
        is_started: whether the latest generation has started.  It stays false if the generation is abandoned,
            and is true for a generation that an earlier coordinator installed.
        ready_histories: by member, the history in its `Ready` message.
    """

    def __init__(self) -> None:
        self.phase = ViewChangePhase.IDLE
        self.deadline_s = math.inf
        self.reason = ""
        self.can_wait = False
        self.unrouted_reason, self.unrouted_s = "", -math.inf
        self.last_installed_s = -math.inf
        self.is_started = True
        self.freeze_reports: dict[m.PeerId, m.FreezeReport] = {}
        self.ready_histories: dict[m.PeerId, bytes] = {}

    @property
    def is_idle(self) -> bool:
        return self.phase is ViewChangePhase.IDLE

    @property
    def is_freezing(self) -> bool:
        return self.phase is ViewChangePhase.FREEZING

    @property
    def is_forming(self) -> bool:
        return self.phase is ViewChangePhase.FORMING

    @property
    def has_installed(self) -> bool:
        """Whether this coordinator has installed a generation since it started or took over."""
        return self.last_installed_s > -math.inf

    def forget_installation(self) -> None:
        """Record that members may hold a later generation than this coordinator has installed."""
        self.last_installed_s = -math.inf

    # -- phases ------------------------------------------------------------------------------------

    def begin_freezing(self, deadline_s: float) -> None:
        self.phase, self.deadline_s = ViewChangePhase.FREEZING, deadline_s
        self.freeze_reports.clear()

    def begin_forming(self, deadline_s: float, now_s: float) -> str:
        """Wait for the members of an installed generation; return the reason for the generation."""
        self.phase, self.deadline_s, self.last_installed_s = ViewChangePhase.FORMING, deadline_s, now_s
        self.unrouted_reason, self.unrouted_s = "", -math.inf
        self.is_started = False
        self.ready_histories.clear()
        reason, self.reason = self.reason, ""
        return reason

    def start(self) -> None:
        """End the view change: the generation starts."""
        self.reset()
        self.is_started = True

    def reset(self) -> None:
        """End the view change: stop waiting for the members' answers."""
        self.phase, self.deadline_s = ViewChangePhase.IDLE, math.inf

    # -- reasons -----------------------------------------------------------------------------------

    def request(self, reason: str, *, can_wait: bool = False) -> None:
        """Request another generation; the first reason is kept.

        Args:
            can_wait: see the attribute, which is true only if this argument is true in every request.
        """
        self.can_wait = can_wait and (self.can_wait or not self.reason)
        self.reason = self.reason or reason

    def replace_reason(self, reason: str) -> None:
        """Request another generation for this reason, which replaces any earlier reason."""
        self.reason, self.can_wait = reason, False

    def withdraw(self) -> None:
        """Withdraw the request for another generation."""
        self.reason = ""

    def mark_unrouted(self, reason: str, from_s: float) -> None:
        """Record that members of the forming generation cannot connect; the first call counts.

        Args:
            from_s: the time from which the generation may be replaced.
        """
        if not self.unrouted_reason:
            self.unrouted_reason, self.unrouted_s = reason, from_s

    # -- deadline ----------------------------------------------------------------------------------

    def wait_until(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s

    def extend_deadline(self, deadline_s: float) -> None:
        """Postpone the deadline to `deadline_s`, unless it is already later."""
        self.deadline_s = max(self.deadline_s, deadline_s)

    def shorten_deadline(self, deadline_s: float) -> None:
        """Bring the deadline forward to `deadline_s` if it is later."""
        self.deadline_s = min(self.deadline_s, deadline_s)

    # -- answers -----------------------------------------------------------------------------------

    def record_freeze_report(self, peer: m.PeerId, report: m.FreezeReport) -> None:
        self.freeze_reports[peer] = report

    def discard_freeze_report(self, peer: m.PeerId) -> None:
        """Discard the `FreezeReport` of a member that has left."""
        self.freeze_reports.pop(peer, None)

    def record_ready(self, peer: m.PeerId, history: bytes) -> None:
        self.ready_histories[peer] = history
