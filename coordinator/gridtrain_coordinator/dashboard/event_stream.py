"""One event a second for every page that is open, encoded once for all of them.

Decides who is too many and who is too slow.  Never waits for a browser: who lags is given the whole
picture again, who does not read at all is cut off.

    publish(frame) --> kept, the last KEPT --> each page: `whole`, then `tick`, `tick`, ...
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

MAX_PAGES = 32
FRAME_HISTORY = 8  # frames; who is further behind begins anew
SEND_TIMEOUT_S = 20.0
"""A page that takes nothing for so long is cut off."""

HEARTBEAT_S = 15.0
RETRY_MS = 2000
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]


def frame(event: str, data: bytes) -> bytes:
    """One server-sent event; `data` is JSON, and holds no line break."""
    return b"event: " + event.encode() + b"\ndata: " + data + b"\n\n"


class EventStream:
    """The frames of the last seconds.  All methods belong to the dashboard's loop.

    Args:
        whole: the whole picture as JSON.
    """

    def __init__(self, whole: Callable[[], bytes]) -> None:
        self._full_state = whole
        self._frames: deque[bytes] = deque(maxlen=FRAME_HISTORY)
        self._number = 0  # of the latest frame
        self._published = asyncio.Event()
        self._is_closed = False
        self.page_count = 0

    def publish(self, data: bytes) -> None:
        self._frames.append(frame("tick", data))
        self._number += 1
        self._announce()

    def close(self) -> None:
        """Every page is let go."""
        self._is_closed = True
        self._announce()

    def _announce(self) -> None:
        self._published.set()
        self._published = asyncio.Event()

    @property
    def is_full(self) -> bool:
        return self.page_count >= MAX_PAGES

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI response that lasts as long as the page is open."""
        self.page_count += 1
        writing = asyncio.create_task(self._write(send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.page_count -= 1
            for task in (writing, leaving):
                task.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})

        async def put(body: bytes, more: bool = True) -> None:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send({"type": "http.response.body", "body": body, "more_body": more})

        await put(f"retry: {RETRY_MS}\n\n".encode())
        at = -1
        while not self._is_closed:
            news = self._published
            if at < 0 or self._number - at > len(self._frames):
                at = self._number
                await put(frame("whole", self._full_state()))
            elif at < self._number:
                behind = self._number - at
                at = self._number
                await put(b"".join(list(self._frames)[-behind:]))
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await news.wait()
                        continue
                await put(b": still here\n\n")
        await put(b"event: end\ndata: {}\n\n", more=False)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
