"""The threshold that a selection of the k largest entries derives from the previous one, on any device.

A threshold is stored as the bits of a float32 number: without the sign, they have the same order as the
magnitudes.
"""

from __future__ import annotations

import numpy as np

from gridtrain.errors import LocalProtocolError

MAGNITUDE_MASK = 0x7FFF_FFFF
SLACK_START, SLACK_MIN, SLACK_MAX = 0.9, 0.5, 0.98
"""The threshold as a fraction of the last k-th magnitude: the initial value, the minimum and the maximum."""

SLACK_AFTER_MISS, SLACK_AFTER_EXCESS = 0.8, 1.02
"""What this fraction is multiplied by after too few candidates, and after more than `EXCESS` times k."""

EXCESS = 3


def value_bits(magnitude: float) -> int:
    """Return the bits of a number >= 0, rounded to float32, as an integer."""
    return int(np.array(magnitude, np.float32).view(np.uint32))


def value_from_bits(bits: int) -> float:
    return float(np.array(bits, np.uint32).view(np.float32))


def check_k(n: int, k: int) -> None:
    """Raise `LocalProtocolError` unless 1 <= k <= n."""
    if not 1 <= k <= n:
        raise LocalProtocolError(f"k is {k}; it must be between 1 and {n}, the number of elements")


class ThresholdHint:
    """The threshold for the next selection, which is lower than the last selection's k-th magnitude.

    Attributes:
        bits: the bits of the threshold as a float32; 0 if there is no threshold yet.
        misses: the number of times that the threshold was too high and a second pass was needed.
    """

    def __init__(self) -> None:
        self.bits = 0
        self.misses = 0
        self._slack = SLACK_START

    def mark_missed(self) -> None:
        """Record that the threshold was too high: fewer than k elements reached it."""
        self.misses += 1
        self._slack = max(SLACK_MIN, self._slack * SLACK_AFTER_MISS)

    def update(self, kth_bits: int, candidates: int, k: int) -> None:
        """Set the threshold from the k-th magnitude of a selection that had `candidates` candidates."""
        if candidates > EXCESS * k:
            self._slack = min(SLACK_MAX, self._slack * SLACK_AFTER_EXCESS)
        kth = min(value_from_bits(kth_bits), float(np.finfo(np.float32).max))
        self.bits = value_bits(kth * self._slack) if kth == kth else 0
