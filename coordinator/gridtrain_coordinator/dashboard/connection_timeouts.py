"""Closes web browsers' connections on which a request or an answer makes no progress for too long.

    connect ...... request's head | answer ........ | request's head | ...
    `- REQUEST_S at most -------' `- ANSWER_S ----' `- REQUEST_S --'

A client has `REQUEST_S` from one answer to the end of its next request's head, and `ANSWER_S` to read the
next part of an answer.  Without these limits, which uvicorn does not have, a few silent clients could exhaust
the connections.  Event streams have a limit of their own (`EventStream`).
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
    """A request and its response, as uvicorn represents them.

    Attributes:
        response_complete: whether the response has been written.
        scope: the ASGI scope of the request.
    """

    response_complete: bool
    scope: Mapping[str, Any]


class Connection(Protocol):
    """The part of uvicorn's connection that this module uses.

    Attributes:
        cycle: the latest request; None until the head of the first request is complete.
    """

    cycle: Cycle | None
    transport: asyncio.Transport


_Progress = tuple[Cycle | None, bool, int]
"""The request, whether it is still being answered, and the number of bytes that the client has not read."""


class ConnectionTimeouts:
    """Records when each connection last made progress.

    Args:
        streaming_paths: the paths of event streams, whose answers may take any length of time.
    """

    def __init__(self, streaming_paths: Collection[str]) -> None:
        self._streaming_paths = frozenset(streaming_paths)
        self._since: dict[Connection, tuple[_Progress, float]] = {}

    def expired(self, connections: Collection[Connection], now_s: float) -> list[Connection]:
        """Return the connections that have exceeded their time limit."""
        since: dict[Connection, tuple[_Progress, float]] = {}
        expired = []
        for connection in connections:
            cycle = connection.cycle
            unsent_bytes = connection.transport.get_write_buffer_size()
            is_answering = cycle is not None and not cycle.response_complete
            progress, has_answer = (cycle, is_answering, unsent_bytes), is_answering or unsent_bytes > 0
            before, since_s = self._since.get(connection, (progress, now_s))
            since[connection] = progress, since_s if progress == before else now_s
            if cycle is not None and is_answering and cycle.scope.get("path") in self._streaming_paths:
                continue
            if now_s - since[connection][1] > (ANSWER_S if has_answer else REQUEST_S):
                expired.append(connection)
        self._since = since
        return expired


async def close_expired(connections: Callable[[], Collection[Any]], streaming_paths: Collection[str]) -> None:
    """Abort the connections that have exceeded their time limit, until this coroutine is cancelled.

    Args:
        connections: a function that returns the open connections.
        streaming_paths: see `ConnectionTimeouts`.
    """
    timeouts = ConnectionTimeouts(streaming_paths)
    while True:
        await asyncio.sleep(LOOK_S)
        for connection in timeouts.expired(list(connections()), time.monotonic()):
            connection.transport.abort()
