"""Connections that hold a place without using it: who is hung up on, and when.

Decides that a client has `REQUEST_S` from one answer to the end of its next request's head, and `ANSWER_S` to
take a further piece of an answer.  uvicorn itself waits for both as long as it takes, and `MOST_CONNECTIONS`
clients that say nothing would lock everybody else out.  Streams look after themselves (`live.Stream`).

    connect ...... request's head | answer ........ | request's head | ...
    `- REQUEST_S at most -------' `- ANSWER_S ----' `- REQUEST_S --'
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

REQUEST_S = 10.0
ANSWER_S = 30.0
LOOK_S = 1.0


class Cycle(Protocol):
    """A request and its answer, as uvicorn has them."""

    response_complete: bool
    scope: Mapping[str, Any]


class Connection(Protocol):
    """What is needed of uvicorn's; `cycle` is None until the first head is whole."""

    cycle: Cycle | None
    transport: asyncio.Transport


_Progress = tuple[Cycle | None, bool, int]
"""Which request, whether it is still being answered, bytes of the answer that the client has not taken."""


class ConnectionTimeouts:
    """Remembers since when each connection is where it is.

    Args:
        lasting: paths whose answers may last.
    """

    def __init__(self, lasting: Collection[str]) -> None:
        self._streaming_paths = frozenset(lasting)
        self._since: dict[Connection, tuple[_Progress, float]] = {}

    def expired(self, connections: Collection[Connection], now_s: float) -> list[Connection]:
        """Those whose time is over."""
        since: dict[Connection, tuple[_Progress, float]] = {}
        over = []
        for one in connections:
            cycle = one.cycle
            unsent_bytes = one.transport.get_write_buffer_size()
            computing = cycle is not None and not cycle.response_complete
            where, answering = (cycle, computing, unsent_bytes), computing or unsent_bytes > 0
            before, since_s = self._since.get(one, (where, now_s))
            since[one] = where, since_s if where == before else now_s
            if cycle is not None and computing and cycle.scope.get("path") in self._streaming_paths:
                continue
            if now_s - since[one][1] > (ANSWER_S if answering else REQUEST_S):
                over.append(one)
        self._since = since
        return over


async def close_expired(
    connections: Callable[[], Collection[Any]],
    lasting: Collection[str],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Hang up on them, until cancelled."""
    patience = ConnectionTimeouts(lasting)
    while True:
        await asyncio.sleep(LOOK_S)
        for one in patience.expired(list(connections()), clock()):
            one.transport.abort()
