"""How long a generation may take to form while a state is on its way to some of its members.

Decides that from what they tell in their beats and from the bytes that are due; never who is removed.

    clara's beats:  STATE_LEFT 102e6 .. 87e6 .. 71e6 .. 0        on its way: nothing is begun anew meanwhile
                    STATE_LEFT 87e6 .. 87e6 .. (`ready_s`) 87e6  not any more
"""

from __future__ import annotations

import math

MAX_FORMING_S = 900.0
"""So long a generation may take to form, whatever progress its newcomers show, beside the bytes' time."""

STATE_BYTES_PER_PARAMETER = 16
"""Of a parameter with the moments of its optimizer, and buffers."""

DEFAULT_RATE_Bps, MIN_RATE_Bps = 2.5e6, 125e3
"""A line of which nothing is known; and the slowest that is waited for."""


class StateTransferProgress:
    """What a member lacks of its state, and when that last became less."""

    __slots__ = ("left_bytes", "progressed_s")

    def __init__(self) -> None:
        self.left_bytes, self.progressed_s = 0.0, 0.0

    def update(self, left_bytes: float, now_s: float) -> None:
        """With each beat."""
        if left_bytes != self.left_bytes:
            self.left_bytes, self.progressed_s = left_bytes, now_s

    def deadline_s(self, patience_s: float) -> float:
        """So long it counts as on its way, as it lacks some: `patience_s` after something came."""
        return self.progressed_s + patience_s if self.left_bytes > 0 else -math.inf


def max_forming_s(receivers: int, parameters: int | None, rate_Bps: float | None) -> float:
    """The longest that a generation may take to form.

    Args:
        receivers: members that lack the state.
        parameters: of the model; None: not known.
        rate_Bps: of the slowest measured line from who holds it; None: nothing was measured.
    """
    slowest_Bps = max(MIN_RATE_Bps, rate_Bps if rate_Bps is not None else DEFAULT_RATE_Bps)
    return MAX_FORMING_S + receivers * STATE_BYTES_PER_PARAMETER * (parameters or 0) / slowest_Bps
