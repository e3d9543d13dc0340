"""Keeps downloads of data within the owner's `download_limit` and the traffic budget.

    sockets    bytes received; bytes sent or received --+
    readers    bytes fetched by each process -----------+--> request(n): waits for the download limit, returns
                                                             how many of n bytes may be read now, or raises
                                                             BudgetSpent

A script and the processes that read its data ahead share one meter.  The transport applies the download limit
to the sockets (`network.transport.receive_queue`); a fetch also takes the bytes received by sockets into
account, so that both together stay within the limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from gridtrain.errors import BudgetSpent, DataError
from gridtrain.network.transport.rate_limiter import MAX_LATENESS_S
from gridtrain.quantities import format_bytes

PIECE_S = 0.1
"""With a download limit, one read is limited to the bytes that may arrive in this many seconds."""

MIN_PIECE_BYTES = 4096
MAX_READERS = 128
_DOWNLOAD_BPS, _MAX_BYTES, _DAY_BYTES, _RECEIVED_BYTES, _MOVED_BYTES, _FIRST_READER = range(6)
FIELDS = _FIRST_READER + 1 + MAX_READERS


class FetchMeter:
    """Counts the bytes that a worker fetches, and bounds them; until `limit` is called, they are unbounded.

    Each field of the shared memory is written by one process: the script's, or one of `MAX_READERS` readers.

    Args:
        clock: a function that returns monotonic seconds.
        sleep: a function that waits for a number of seconds.
        fields: the memory; by default a tensor that torch shares with the processes of a `DataLoader`.

    Attributes:
        bytes_arrived: a function that is called when bytes of a file have arrived in this process.
    """

    bytes_arrived: Callable[[], object] = staticmethod(lambda: None)

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        *,
        fields: Any = None,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._memory = _shared_memory() if fields is None else fields
        self._fields = _array_of(self._memory)
        self.limit(None, math.inf)
        self._reader = 0
        self._charged_bytes, self._charged_s = self._received_bytes, self._clock()
        self._Bps = math.inf
        self._free_s = -math.inf  # when a link with the limit's rate would have received all these bytes

    def __getstate__(self) -> dict[str, Any]:
        own = ("_fields", "bytes_arrived")  # of this process
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._fields = _array_of(self._memory)

    # -- the script's process --------------------------------------------------------------------------

    def limit(self, download_Bps: float | None, most_bytes: float, day_bytes: float = math.inf) -> None:
        """Set the limits: the download rate in bytes per second (None for no limit), and the numbers of bytes
        that the worker may send, receive and fetch in total and in a whole day."""
        self._fields[_DOWNLOAD_BPS] = download_Bps or math.inf
        self._fields[_MAX_BYTES], self._fields[_DAY_BYTES] = most_bytes, day_bytes

    def note_exchanges(self, received_bytes: int, moved_bytes: int) -> None:
        """Record how many bytes the sockets have received so far, and how many they have received or sent."""
        self._fields[_RECEIVED_BYTES], self._fields[_MOVED_BYTES] = received_bytes, moved_bytes

    @property
    def fetched_bytes(self) -> int:
        """The number of bytes that all processes of this worker have fetched."""
        return int(sum(self._fields[_FIRST_READER:]))

    # -- readers -----------------------------------------------------------------------------------

    def is_reader(self, number: int) -> None:
        """Declare that this process is the script's reader `number`, counted from 0."""
        self._reader = 1 + number % MAX_READERS

    def request(self, nbytes: int) -> int:
        """Wait until the limit allows a read; return how many bytes may be read now, at most `nbytes`.

        Raises:
            BudgetSpent: the budget is exhausted.
        """
        self._follow_limit()
        while (wait_s := self._free_s - self._clock()) > 0:
            self._sleep(min(wait_s, 1.0))
            self._follow_limit()
        if (left := self._left_bytes) < 1:
            raise BudgetSpent(
                "the data set's files need more bytes than remain in the traffic budget",
                remedy="wait until more bytes are allowed, or raise the budget; fetched bytes are kept",
            )
        most = left if self._Bps == math.inf else min(left, max(MIN_PIECE_BYTES, self._Bps * PIECE_S))
        return int(min(nbytes, most))

    def wait(self, duration_s: float) -> None:
        """Wait before another attempt at a fetch.

        Raises:
            BudgetSpent: this worker's rules no longer allow fetches.
        """
        until_s = self._clock() + duration_s
        while (left_s := until_s - self._clock()) > 0:
            self._sleep(min(left_s, 1.0))
            self._follow_limit()

    def check_undivided(self, place: str, nbytes: int) -> None:
        """Check the budget for a file whose fetch cannot be resumed on another day.

        Raises:
            DataError: the budget of a whole day is smaller than the file.
            BudgetSpent: the rest of the budget is smaller than the file.
        """
        self._follow_limit()
        what = f"{place} of {format_bytes(nbytes)}, whose fetch cannot be continued later,"
        if nbytes > (day_bytes := float(self._fields[_DAY_BYTES])):
            raise DataError(
                f"{what} is larger than the traffic budget of a day, {format_bytes(day_bytes)}",
                kind="is larger than the traffic budget of a day",
                remedy="raise the budget (gridtrain worker set budget=...), or ask the run's owner for "
                "smaller shards",
            )
        if nbytes > (left := self._left_bytes):
            raise BudgetSpent(
                f"{what} needs more than the {format_bytes(max(0.0, left))} left in the traffic budget",
                remedy="wait until more bytes are allowed, or raise the budget",
            )

    def count(self, nbytes: int) -> None:
        """Count bytes that have arrived."""
        self._fields[_FIRST_READER + self._reader] += nbytes
        self._charge()
        if nbytes:
            self.bytes_arrived()

    def _follow_limit(self) -> None:
        if (rate_Bps := float(self._fields[_DOWNLOAD_BPS])) != self._Bps:
            self._Bps, self._charged_bytes, self._charged_s = rate_Bps, self._received_bytes, self._clock()
            self._free_s = -math.inf
        self._charge()

    def _charge(self) -> None:
        """Account for the bytes that this worker has received since the last call, through sockets or
        fetches."""
        now_s, received_bytes = self._clock(), self._received_bytes
        if self._Bps < math.inf:
            start_s = max(self._free_s, self._charged_s - MAX_LATENESS_S)
            self._free_s = start_s + max(0, received_bytes - self._charged_bytes) / self._Bps
        self._charged_bytes, self._charged_s = received_bytes, now_s

    @property
    def _left_bytes(self) -> float:
        return float(self._fields[_MAX_BYTES]) - float(self._fields[_MOVED_BYTES]) - self.fetched_bytes

    @property
    def _received_bytes(self) -> int:
        return int(self._fields[_RECEIVED_BYTES]) + self.fetched_bytes


def _array_of(memory: Any) -> Any:
    """Return the memory as an array that is read and written without torch's operations.

    Those operations release the interpreter's lock.  A daemon thread, such as the one for the agent's link,
    that takes the lock again while the interpreter exits would abort the process.
    """
    return memory.numpy() if hasattr(memory, "numpy") else memory


def _shared_memory() -> Any:
    import torch  # imported here, because the agent uses a meter without torch

    zeros = torch.zeros(FIELDS, dtype=torch.float64, device="cpu")
    return zeros.share_memory_()  # type: ignore[no-untyped-call]
