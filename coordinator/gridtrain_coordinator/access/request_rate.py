"""Counts each key's recent requests to enforce limits such as a maximum number of joins per minute.

times_s    41.2  55.0  58.3 | now      the requests within the window; a new one is added if it is allowed
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from gridtrain_coordinator.run.recent_dict import RecentDict


class RequestRate:
    """The times of requests within the last `window_s` seconds.

    Args:
        max_keys: the maximum number of keys, such as peers; the least recently used key is dropped first.
    """

    def __init__(self, window_s: float, max_keys: int) -> None:
        self._window_s = window_s
        self._times_s: RecentDict[Hashable, deque[float]] = RecentDict(max_keys)

    def allow(self, key: Hashable, now_s: float, most: int) -> bool:
        """Return whether a request is allowed now; if so, count it.

        Args:
            most: the maximum number of requests from one key within the window.
        """
        times_s = self._times_s[key] = self._times_s.get(key, deque())
        while times_s and times_s[0] <= now_s - self._window_s:
            times_s.popleft()
        is_allowed = len(times_s) < most
        if is_allowed:
            times_s.append(now_s)
        return is_allowed
