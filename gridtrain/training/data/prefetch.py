"""Reads batches ahead in other processes (`num_workers=`) in the order in which they are needed.

    expected      s+1   s+2   s+3              a member joins, and the shares change:
    requested     s+1   s+2   s+3              s+1'  s+2' ..     s+1, s+2, s+3 are read and dropped

Samples are counted when their step commits, not when they are read.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, Dataset

from gridtrain.core.messages import Span
from gridtrain.errors import ConfigError, GridtrainError
from gridtrain.training.data.fetch_meter import MAX_READERS, FetchMeter
from gridtrain.training.data.readers import Reader, is_iterable

Spans = tuple[Span, ...]


def check_readers(dataset: Any, num_workers: int, prefetch_factor: int) -> None:
    """Raise `ConfigError` if `num_workers` or `prefetch_factor` is not valid for the data set."""
    most = 1 if is_iterable(dataset) else MAX_READERS
    if not 0 <= num_workers <= most:
        bound = "0 or 1 for an iterable data set" if most == 1 else f"from 0 to {most}"
        raise ConfigError(f"num_workers is {num_workers}; it must be {bound}", remedy="try num_workers=1")
    if prefetch_factor < 1:
        raise ConfigError(
            f"prefetch_factor is {prefetch_factor}; it must be >= 1", remedy="try prefetch_factor=2"
        )


@dataclass(slots=True)
class _BatchRequest:
    spans: Spans  # (): the loader had room, but no further step was expected
    is_stale: bool = False


class Prefetcher:
    """Reads the batches of future steps with copies of `reader` in other processes.

    Args:
        num_workers: the number of processes, at least 1.
        prefetch_factor: the number of steps that each process reads ahead.
        meter: the meter of the data set's fetches, in which each process counts its bytes separately.

    Attributes:
        depth: the number of steps that are read ahead.
        dropped_batches: the number of steps that were read but not used.
    """

    def __init__(
        self, reader: Reader, num_workers: int, prefetch_factor: int, meter: FetchMeter | None = None
    ) -> None:
        self.depth = num_workers * prefetch_factor
        self.dropped_batches = 0
        self._requests: deque[Spans] = deque()
        self._pending: deque[_BatchRequest] = deque()
        self._batches: Any = None  # the iterator of `_loader`
        self._loader = DataLoader(
            _RequestDataset(reader),
            batch_size=None,
            sampler=iter(self._next_request, None),  # endless, because a request is never None
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            collate_fn=_identity,
            worker_init_fn=partial(_begin_reader, meter),
        )

    def read(self, spans: Spans, ahead: Sequence[Spans]) -> list[Any]:
        """Return the batches of a step; meanwhile, the steps in `ahead` are read.

        Args:
            spans: the spans of the step.
            ahead: the spans of at least the next `depth` steps, or of all remaining steps if there are fewer.

        Raises:
            GridtrainError: the process could not read the batches of the step.
        """
        self._update_requests([spans, *(later for later in ahead if later)])
        if self._batches is None:
            self._batches = iter(self._loader)  # requests `depth` steps
        while True:
            batches = next(self._batches)  # requests one more
            asked = self._pending.popleft()
            if asked.spans == spans and not asked.is_stale:
                if isinstance(batches, GridtrainError):
                    raise batches
                return list(batches)
            self.dropped_batches += bool(asked.spans)

    def close(self) -> None:
        """Stop the processes."""
        batches, self._batches = self._batches, None
        if batches is not None:
            batches._shutdown_workers()  # explicitly: an exception being raised may refer to the iterator

    def _next_request(self) -> Spans:
        """Return the spans of the step that the loader is to read next; () if no further step is expected."""
        spans = self._requests.popleft() if self._requests else ()
        self._pending.append(_BatchRequest(spans))
        return spans

    def _update_requests(self, expected: list[Spans]) -> None:
        """Request the expected steps that are not pending yet.  If the pending steps are not the expected
        ones, drop all pending steps and request all expected steps again."""
        pending = [asked.spans for asked in self._pending if asked.spans and not asked.is_stale]
        shorter = min(len(pending), len(expected))
        if pending[:shorter] != expected[:shorter]:
            for asked in self._pending:
                asked.is_stale = True
            pending = []
        self._requests = deque(expected[len(pending) :])


class _RequestDataset(Dataset[Any]):
    """The data set in the reader processes: an "index" is a step's spans.

    An error with a message for users is returned, because a loader would add the process's traceback to one
    that is raised.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __getitem__(self, spans: Spans) -> list[Any] | GridtrainError | None:
        try:
            return self._reader.read(spans) if spans else None
        except GridtrainError as error:
            return error


def _identity(batches: Any) -> Any:
    return batches


def _begin_reader(meter: FetchMeter | None, worker: int) -> None:
    _exit_with_parent()
    if meter is not None:
        meter.is_reader(worker)


def _exit_with_parent() -> None:
    """Make the kernel kill this reader when its parent ends.  A reader has copies of the sockets, so if it
    outlived its parent, no peer would notice that the parent has ended."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
