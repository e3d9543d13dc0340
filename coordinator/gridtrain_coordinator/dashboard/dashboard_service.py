"""Runs the dashboard's web server in a thread of its own, and limits its connections, events and commands.

    daemon's thread                             dashboard's thread (asyncio, uvicorn)
      publish(status) -- latest status ------> Board.update -> EventStream.publish -> open pages
      note(event) ------ at most 500 --------> Board.add_event
      take_orders() <--- at most 16 ---------- POST /api/v1/workers/KEY/kick

The daemon never waits for the dashboard: it stores the status and wakes the dashboard's loop, puts events
into a bounded queue, and fetches the operator's commands when it is ready for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import queue
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from gridtrain.core.messages import OperatorReply, Refused, RemoveWorker, Unban
from gridtrain_coordinator.dashboard.board import Board
from gridtrain_coordinator.dashboard.connection_timeouts import close_expired
from gridtrain_coordinator.dashboard.event_stream import EventStream
from gridtrain_coordinator.dashboard.guard import problem
from gridtrain_coordinator.dashboard.http_api import STREAM, Api, create_app
from gridtrain_coordinator.run.events import Log

MAX_ORDERS = 16
MAX_EVENTS = 500  # between two status updates
MAX_CONNECTIONS = 128
MONITORED = ("/healthz", "/metrics")  # answered however many connections are open
MAX_LOGGED_ERRORS = 20  # different errors, per `LOG_EVERY_S`
LOG_EVERY_S = 60.0
BACKLOG = 64
"""How many connections may wait to be accepted; asyncio also tries to accept this many at a time, even if too
many files are open."""

END_S = 3.0

Order = tuple[RemoveWorker | Unban, "Future[OperatorReply | Refused]"]


class DashboardService:
    """Serves the dashboard.

    Args:
        bound: a bound socket; `close` closes it.
        token: the text that authorizes commands.
        log: a function that receives an event if the dashboard fails.
        allowed_hosts: the host names under which the dashboard may be opened, besides IP addresses and
            localhost.
    """

    def __init__(
        self, bound: socket.socket, token: str, log: Log, allowed_hosts: tuple[str, ...] = ()
    ) -> None:
        self._socket = bound
        self._token = token
        self._named = allowed_hosts
        self._log = log
        self._orders: queue.Queue[Order] = queue.Queue(MAX_ORDERS)
        self._events: deque[tuple[float, str, str, dict[str, Any]]] = deque(maxlen=MAX_EVENTS)
        self._latest: tuple[float, float, Mapping[str, Any]] | None = None  # with wall and monotonic clock
        self._updated_s: float | None = None  # monotonic clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: uvicorn.Server | None = None
        self._stream: EventStream | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gridtrain-dashboard", daemon=True)

    # -- the daemon's side: these methods do not block ---------------------------------------------

    def publish(self, status: Mapping[str, Any]) -> None:
        """Pass a status to the dashboard; the caller must not change it afterwards."""
        self._latest = time.time(), time.monotonic(), status
        self._call(self._tick)

    def note(self, level: str, event: str, fields: Mapping[str, Any]) -> None:
        """Record a log event; see `gridtrain_coordinator.log.Log`."""
        self._events.append((time.time(), level, event, dict(fields)))

    def take_orders(self) -> Iterator[Order]:
        """Yield the operator's commands received since the last call; the caller must answer each of them."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._orders.get_nowait()

    def start(self) -> None:
        """Start the thread.

        Raises no exception: if the dashboard cannot run, a log event reports the reason.
        """
        self._thread.start()
        self._started.wait(END_S)

    def close(self) -> None:
        def end() -> None:
            if self._stream is not None:
                self._stream.close()
            if self._server is not None:
                self._server.should_exit = True

        self._call(end)
        if self._thread.is_alive():
            self._thread.join(END_S)
        self._socket.close()

    def _call(self, callback: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(callback)

    # -- the dashboard's side ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # including SystemExit, which uvicorn raises if it cannot start
            reason = f"{type(error).__name__}: {error}"
            remedy = "restart the coordinator to open the dashboard again"
            self._log("error", "dashboard_failed", {"reason": reason, "remedy": remedy})
        finally:
            self._started.set()

    async def _serve(self) -> None:
        loggers = [logging.getLogger(name) for name in ("uvicorn.error", "asyncio")]
        errors = _ErrorHandler(self._log)
        for logger in loggers:
            logger.addHandler(errors)
            logger.propagate = False  # errors go to the coordinator's log instead
        try:
            await self._serve_pages()
        finally:
            for logger in loggers:
                logger.removeHandler(errors)
                logger.propagate = True

    async def _serve_pages(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._board = Board()
        self._stream = EventStream(lambda: encoded(self._board.full_state()))
        api = Api(self._board, self._stream, self._token, self._submit_order, self._age_s)
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._limited(create_app(api, allowed_hosts=self._named)),
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                http="h11",
                server_header=False,
                date_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=16_384,
                backlog=BACKLOG,
                timeout_keep_alive=5,
                timeout_graceful_shutdown=1,
            )
        )
        self._socket.listen(BACKLOG)
        self._socket.setblocking(False)
        self._started.set()
        server = self._server
        watching = asyncio.create_task(close_expired(lambda: server.server_state.connections, (STREAM,)))
        try:
            await server.serve(sockets=[self._socket])
        finally:
            watching.cancel()

    def _limited(self, app: ASGIApp) -> ASGIApp:
        """Return the application with a limit on connections, except for the paths in `MONITORED`."""

        async def limited(scope: Scope, receive: Receive, send: Send) -> None:
            assert self._server is not None
            count = len(self._server.server_state.connections)
            if count > MAX_CONNECTIONS and scope.get("path") not in MONITORED:
                reason = f"{count} connections are open; at most {MAX_CONNECTIONS} are served"
                await problem(503, "busy", reason, "try again in a minute")(scope, receive, send)
            else:
                await app(scope, receive, send)

        return limited

    def _tick(self) -> None:
        """Pass the latest events and status to the open pages; called from the dashboard's loop."""
        latest, self._latest = self._latest, None
        if latest is None or self._stream is None:
            return
        while self._events:
            self._board.add_event(*self._events.popleft())
        at_s, self._updated_s, status = latest
        self._board.update(status, at_s)
        self._stream.publish(encoded(self._board.take_changes()))

    def _age_s(self) -> float | None:
        """Return the seconds since the latest status, on a clock that is never set back."""
        return None if self._updated_s is None else time.monotonic() - self._updated_s

    def _submit_order(self, order: RemoveWorker | Unban) -> Future[OperatorReply | Refused]:
        answer: Future[OperatorReply | Refused] = Future()
        try:
            self._orders.put_nowait((order, answer))
        except queue.Full:
            reason = f"{MAX_ORDERS} commands are waiting to be handled"
            answer.set_result(Refused("busy", reason, "try again in a second"))
        return answer


class _ErrorHandler(logging.Handler):
    """Writes the web server's errors to the coordinator's log: each at most once per `LOG_EVERY_S`, with the
    number of times that it occurred in the previous interval."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.ERROR)
        self._log = log
        self._counts: Counter[str] = Counter()
        self._counts_before = self._counts
        self._next_s = float("-inf")

    def emit(self, record: logging.LogRecord) -> None:
        reason = record.getMessage().partition("\n")[0]
        # At the end, uvicorn logs pages that are still open, and asyncio that it cannot accept again.
        if reason.startswith(("Cancel ", "Exception in callback BaseSelectorEventLoop._start_serving")):
            return
        if error := record.exc_info and record.exc_info[1]:
            reason = f"{reason} {error!r}"
        if (now_s := time.monotonic()) >= self._next_s:
            self._next_s = now_s + LOG_EVERY_S
            self._counts_before, self._counts = self._counts, Counter()
        if reason in self._counts:
            self._counts[reason] += 1
        elif len(self._counts) < MAX_LOGGED_ERRORS:
            self._counts[reason] = 1
            times = {"times_before": self._counts_before[reason]} if self._counts_before[reason] else {}
            self._log("error", "dashboard_failed", {"reason": reason, **times})


def encoded(status: Mapping[str, Any]) -> bytes:
    """Encode a status as JSON on one line."""
    return json.dumps(status, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode(
        "utf-8", "replace"
    )
