"""Operations on spans of sample positions: take the first positions, join adjacent spans, subtract spans."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from gridtrain.core.messages import LedgerSpec, Span


def take_first(queue: deque[Span], count: int) -> tuple[Span, ...]:
    """Remove the first `count` positions from the queue, or all if the queue has fewer, and return them."""
    taken: list[Span] = []
    while count > 0 and queue:
        span = queue.popleft()
        stop = min(span.stop, span.start + count)
        taken.append(Span(span.start, stop))
        count -= stop - span.start
        if stop < span.stop:
            queue.appendleft(Span(stop, span.stop))
    return tuple(taken)


def coalesce(spec: LedgerSpec, spans: Iterable[Span]) -> tuple[Span, ...]:
    """Sort the spans and join adjacent ones, but never across the end of a pass."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        if joined and joined[-1].stop == span.start and span.start % spec.size != 0:
            joined[-1] = Span(joined[-1].start, span.stop)
        else:
            joined.append(span)
    return tuple(joined)


def subtract(spans: Iterable[Span], taken: Iterable[Span]) -> list[Span]:
    """Return the positions of `spans` that are not in `taken`."""
    holes = sorted(taken, key=lambda span: span.start)
    rest: list[Span] = []
    for span in spans:
        start = span.start
        for hole in holes:
            if hole.stop <= start or hole.start >= span.stop:
                continue
            if hole.start > start:
                rest.append(Span(start, hole.start))
            start = hole.stop
        if start < span.stop:
            rest.append(Span(start, span.stop))
    return rest
