"""Batches read ahead by processes of their own, in the order in which the run will ask for them.

Decides what is read ahead and what of it is thrown away.  Never decides what a step takes: the ledger says
what comes next if nobody comes or goes (`ledger.foresee`), and at each turn what really came.

    foreseen          s+1   s+2   s+3              a member joins, and the shares change:
    asked, in line    s+1   s+2   s+3              s+1'  s+2' ..     s+1, s+2, s+3 are read and dropped

Nothing counts that was read: a sample counts where its step commits.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

from gridtrain.core.messages import Span
from gridtrain.training.data.readers import Reader

Spans = tuple[Span, ...]


@dataclass(slots=True)
class _BatchRequest:
    spans: Spans  # (): nothing was wanted when the loader came for more
    is_stale: bool = False


class Prefetcher:
    """See the module's text.

    Args:
        num_workers: processes, at least 1.
        prefetch_factor: steps that each of them reads ahead.

    Attributes:
        dropped: steps that were read for nothing.
    """

    def __init__(self, reader: Reader, num_workers: int, prefetch_factor: int) -> None:
        self.depth = num_workers * prefetch_factor
        self.dropped_batches = 0
        self._requests: deque[Spans] = deque()
        self._pending: deque[_BatchRequest] = deque()
        self._batches: Iterator[Any] | None = None
        self._loader = DataLoader(
            _RequestDataset(reader),
            batch_size=None,
            sampler=_RequestSampler(self),
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            collate_fn=_identity,
            worker_init_fn=_exit_with_parent,
        )

    def read(self, spans: Spans, ahead: Sequence[Spans]) -> list[Any]:
        """The batches of this turn; what lies ahead of it is read meanwhile.

        `ahead` holds at least the next `depth` steps, fewer at the end of the run.
        """
        self._update_requests([spans, *(later for later in ahead if later)])
        if self._batches is None:
            self._batches = iter(self._loader)  # asks for `depth` steps
        while True:
            batches = next(self._batches)  # asks for one more
            asked = self._pending.popleft()
            if asked.spans == spans and not asked.is_stale:
                return list(batches)
            self.dropped_batches += bool(asked.spans)

    def close(self) -> None:
        """Ends the processes."""
        self._batches = None

    def next_request(self) -> Spans:
        """The loader has room for one more."""
        spans = self._requests.popleft() if self._requests else ()
        self._pending.append(_BatchRequest(spans))
        return spans

    def _update_requests(self, expected: list[Spans]) -> None:
        """Go on asking after what is asked for already; if that is not what is expected, begin anew."""
        in_line = [asked.spans for asked in self._pending if asked.spans and not asked.is_stale]
        shorter = min(len(in_line), len(expected))
        if in_line[:shorter] != expected[:shorter]:
            for asked in self._pending:
                asked.is_stale = True
            in_line = []
        self._requests = deque(expected[len(in_line) :])


class _RequestSampler(Sampler[Spans]):
    """What the loader asks for next; without end."""

    def __init__(self, prefetcher: Prefetcher) -> None:
        self._prefetcher = prefetcher

    def __iter__(self) -> Iterator[Spans]:
        while True:
            yield self._prefetcher.next_request()


class _RequestDataset(Dataset[Any]):
    """What runs in the processes: an "index" is a step's spans."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __getitem__(self, spans: Spans) -> list[Any] | None:
        return self._reader.read(spans) if spans else None


def _identity(batches: Any) -> Any:
    return batches


def _exit_with_parent(worker: int) -> None:
    """A reader holds copies of the connections: while it lived, no peer would notice that its parent died."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
