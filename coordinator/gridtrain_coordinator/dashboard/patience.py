"""Connections that hold a place without using it: who is hung up on, and when.

Decides that a client has `REQUEST_S` from one answer to the end of its next request's head, and `ANSWER_S` to
take an answer.  uvicorn itself waits for both as long as it takes, and `MOST_CONNECTIONS` clients that say
nothing would lock everybody else out.  Streams look after themselves (`live.Stream`).

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


class Patience:
    """Remembers since when each connection is where it is.

    Args:
        lasting: paths whose answers may last.
    """

    def __init__(self, lasting: Collection[str]) -> None:
        self._lasting = frozenset(lasting)
        self._since: dict[Connection, tuple[Cycle | None, bool, float]] = {}

    def spent(self, connections: Collection[Connection], now_s: float) -> list[Connection]:
        """Those whose time is over."""
        since: dict[Connection, tuple[Cycle | None, bool, float]] = {}
        over = []
        for one in connections:
            cycle = one.cycle
            answering = cycle is not None and not cycle.response_complete
            before = self._since.get(one)
            same = before is not None and before[0] is cycle and before[1] == answering
            since_s = before[2] if same and before is not None else now_s
            since[one] = cycle, answering, since_s
            if cycle is not None and answering and cycle.scope.get("path") in self._lasting:
                continue
            if now_s - since_s > (ANSWER_S if answering else REQUEST_S):
                over.append(one)
        self._since = since
        return over


async def watch(
    connections: Callable[[], Collection[Any]],
    lasting: Collection[str],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Hang up on them, until cancelled."""
    patience = Patience(lasting)
    while True:
        await asyncio.sleep(LOOK_S)
        for one in patience.spent(list(connections()), clock()):
            one.transport.abort()
