"""Sends changes to open web pages as server-sent events once a second, and limits the number of open pages.

    publish(frame) --> the last `FRAME_HISTORY` frames --> each page: `whole`, then `tick`, `tick`, ...

No method waits for a browser: a page that lags behind receives the full state again, and a page that stops
reading is disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

MAX_PAGES = 32
FRAME_HISTORY = 8  # a page that is further behind receives the full state again
SEND_TIMEOUT_S = 20.0
"""How long a page may go without reading before it is disconnected."""

HEARTBEAT_S = 15.0
RETRY_MS = 2000
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # otherwise nginx as a reverse proxy collects events
]


def frame(event: str, data: bytes) -> bytes:
    """Encode one server-sent event.

    Args:
        data: JSON without line breaks.
    """
    return b"event: " + event.encode() + b"\ndata: " + data + b"\n\n"


class EventStream:
    """Sends the latest frames to all open pages.  All methods must be called from the dashboard's loop.

    Args:
        full_state: a function that returns the full state as JSON.
    """

    def __init__(self, full_state: Callable[[], bytes]) -> None:
        self._full_state = full_state
        self._frames: deque[bytes] = deque(maxlen=FRAME_HISTORY)
        self._number = 0  # number of the latest frame
        self._published = asyncio.Event()
        self._is_closed = False
        self.page_count = 0

    def publish(self, data: bytes) -> None:
        self._frames.append(frame("tick", data))
        self._number += 1
        self._announce()

    def close(self) -> None:
        """End the streams to all pages."""
        self._is_closed = True
        self._announce()

    def _announce(self) -> None:
        self._published.set()
        self._published = asyncio.Event()

    @property
    def is_full(self) -> bool:
        return self.page_count >= MAX_PAGES

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one page as an ASGI response that lasts as long as the page is open."""
        self.page_count += 1
        writing = asyncio.create_task(self._write(send))
        watching = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({writing, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.page_count -= 1
            for task in (writing, watching):
                task.cancel()
            await asyncio.gather(writing, watching, return_exceptions=True)

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})

        async def write_body(body: bytes, more: bool = True) -> None:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send({"type": "http.response.body", "body": body, "more_body": more})

        await write_body(f"retry: {RETRY_MS}\n\n".encode())
        sent = -1
        while not self._is_closed:
            published = self._published
            if sent < 0 or self._number - sent > len(self._frames):
                sent = self._number
                await write_body(frame("whole", self._full_state()))
            elif sent < self._number:
                behind = self._number - sent
                sent = self._number
                await write_body(b"".join(list(self._frames)[-behind:]))
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await published.wait()
                        continue
                await write_body(b": still here\n\n")
        await write_body(b"event: end\ndata: {}\n\n", more=False)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
