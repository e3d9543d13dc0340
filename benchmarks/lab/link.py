"""A host's link: its rate in each direction, its delay, its loss.

                  up: tbf on the host's end       delay, loss: see arrivals.py
host  eth0 ============================= link ============================== port of the bridge
                                                 down: tbf on the port
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lab import arrivals, shape
from lab.ns import LabError


@dataclass(frozen=True, slots=True)
class End:
    """An end of a link: an interface in a namespace."""

    namespace: str
    interface: str


@dataclass(frozen=True, slots=True)
class Settings:
    """Rates such as "20Mbit" (empty: no limit), the delay, and the share of frames that are lost."""

    up: str = ""
    down: str = ""
    delay_s: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        for rate in (self.up, self.down):
            if rate:
                shape.rate_Bps(rate)
        if not 0 <= self.delay_s <= arrivals.LONGEST_DELAY_S:
            bound = f"from 0 to {arrivals.LONGEST_DELAY_S:g} seconds"
            raise ValueError(f"delay_s is {self.delay_s}; it must be {bound}")
        if not 0 <= self.loss < 1:
            raise ValueError(f"loss is {self.loss}; it must be a share of the frames, at least 0 and below 1")


class Link:
    """The link between a host and a bridge.

    Args:
        near, far: its ends at the host and at the bridge.
        inner: a router's other interfaces, so that packets that leave its home are delayed, too.
        start: starts a program on the host.
    """

    def __init__(self, near: End, far: End, inner: Sequence[str], start: arrivals.Start) -> None:
        self.settings = Settings()
        self._near, self._far, self._both = near, far, bool(inner)
        self._arrivals = arrivals.Arrivals(near.namespace, near.interface, inner, start)

    def change(
        self, up: str = "", down: str = "", delay_s: float | None = None, loss: float | None = None
    ) -> None:
        """Change the settings that are not empty or None.  Raises `LabError`, `ValueError`."""
        was = self.settings
        delay_s = was.delay_s if delay_s is None else delay_s
        loss = was.loss if loss is None else loss
        now = Settings(up or was.up, down or was.down, delay_s, loss)
        impaired = (delay_s, loss) != (was.delay_s, was.loss)
        if impaired and (reason := arrivals.why_not()):
            raise LabError(reason)
        with_netem = impaired and not arrivals.netem_why_not()
        if impaired and not with_netem:
            self._arrivals.set(delay_s, loss)
        _set(self._far, now.down, bool(down), (delay_s, loss) if with_netem else None)
        _set(self._near, now.up, bool(up), (delay_s, 0.0) if with_netem and self._both else None)
        if loss:
            shape.offloads(self._far.namespace, self._far.interface, on=False)
        self.settings = now


def _set(end: End, rate: str, new_rate: bool, impairment: tuple[float, float] | None) -> None:
    """Set the rate at one end, and its netem `impairment` (delay, loss) unless that is None."""
    if impairment is not None:
        arrivals.netem(end.namespace, end.interface, *impairment)
    if rate and (new_rate or impairment is not None):
        under = arrivals.has_netem(end.namespace, end.interface)
        shape.limit(end.namespace, end.interface, rate, parent=arrivals.BELOW_NETEM if under else "root")
