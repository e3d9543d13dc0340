"""Counts the bytes sent and received each day, for the traffic budget, in a file that survives restarts.

    {"day": "2026-11-21", "bytes": 1234567, "others": {"1970-01-01": 890}}

`others` holds the bytes of other days, so that a machine whose clock was wrong for a while keeps its counts.
The file is rewritten as a whole when at least `UNWRITTEN_BYTES` bytes have been counted since the last write,
or the first of them `UNWRITTEN_S` seconds ago.
`gridtrain.training.pause` computes, in the script, how much of the budget a step reserves.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

from gridtrain.errors import ConfigError, disk_errors
from gridtrain.runtime.client.private_file import replace_private_file

MAX_FILE_BYTES = 4096
FILE = "budget.json"
MAX_DAYS = 8
UNWRITTEN_BYTES, UNWRITTEN_S = 1 << 20, 1.0
"""If the agent is killed, the counts lose at most about this many bytes, or the bytes of this many seconds.
The file is not written more often, because a write may wait for the disk."""


class Budget:
    """Counts the bytes of each day, in the file named `FILE` in a worker's folder.

    Its methods raise `ConfigError` if the file cannot be read or written, because a budget that cannot be
    enforced must not appear to be enforced.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = folder / FILE, clock
        self._days = self._read()  # the last key is the latest day
        self._unwritten_bytes, self._unwritten_since_s = 0, math.inf

    def today_bytes(self, today: date) -> int:
        return self._days.get(today.isoformat(), 0)

    def add(self, nbytes: int, today: date, *, sure: bool = True) -> None:
        """Add `nbytes`, which may be 0, to the count of `today`, and write the counts if a write is due.

        Bytes are counted on the day on which they are reported, so yesterday's last bytes may be counted
        toward today.

        Args:
            sure: whether a write waits until the counts are on disk.
        """
        now_s = self._clock()
        if nbytes:
            total = self._days.pop(today.isoformat(), 0) + nbytes
            self._days[today.isoformat()] = total
            while len(self._days) > MAX_DAYS:
                del self._days[next(iter(self._days))]
            self._unwritten_bytes += nbytes
            self._unwritten_since_s = min(self._unwritten_since_s, now_s)
        if self._unwritten_bytes >= UNWRITTEN_BYTES or now_s >= self._unwritten_since_s + UNWRITTEN_S:
            self.keep(sure=sure)

    def keep(self, *, sure: bool = True) -> None:
        """Write the counts unless the file is up to date; for `sure`, see `add`."""
        if not self._unwritten_bytes:
            return
        *others, (day, nbytes) = self._days.items()
        body = {"day": day, "bytes": nbytes, "others": dict(others)}
        what = f"the day's traffic cannot be counted in {self._path}"
        with disk_errors(what, "free space on the disk, or check the folder's permissions"):
            replace_private_file(self._path, json.dumps(body), durable=sure)
        self._unwritten_bytes, self._unwritten_since_s = 0, math.inf

    def _read(self) -> dict[str, int]:
        try:
            with open(self._path, "rb") as file:
                body = json.loads(file.read(MAX_FILE_BYTES))
            # Older files have no "others".
            found = [*body.get("others", {}).items(), (body["day"], body["bytes"])]
            for day, nbytes in found:
                if date.fromisoformat(day).isoformat() != day or type(nbytes) is not int or nbytes < 0:
                    raise ValueError(f"{nbytes!r} bytes on {day!r}")
            return dict(found)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"today's traffic cannot be read from {self._path}: {error}",
                remedy="remove the file; today's count then starts at 0",
            ) from None
