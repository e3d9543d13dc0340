"""The dashboard's HTTP interface: the page, the JSON API, commands (kick, ban), /metrics and /healthz.

    GET   /  /static/...              the page
    GET   /api/v1/run  /workers  /workers/KEY  /topology  /events  /history  /stream  /openapi.json
    GET   /api/v1/door                                                   token
    POST  /api/v1/workers/KEY/kick  .../ban  .../unban                   token
    GET   /metrics  /healthz

Anyone who can reach the port may read; by default, only programs on this machine can.  Commands, the
status of access control (/api/v1/door) and the members' addresses require the token.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gridtrain.core.messages import OperatorReply, Refused, RemoveWorker, Unban
from gridtrain_coordinator.dashboard import sanitize
from gridtrain_coordinator.dashboard.board import Board
from gridtrain_coordinator.dashboard.event_stream import EventStream
from gridtrain_coordinator.dashboard.guard import Guard, bearer, problem
from gridtrain_coordinator.dashboard.history import COLUMNS
from gridtrain_coordinator.dashboard.prometheus import exposition

STALE_S = 10.0
"""If the latest status is this old, the coordinator counts as unhealthy; a status arrives every second."""

ORDER_S = 5.0
MAX_LISTED = 1000
STREAM = "/api/v1/stream"
_KEY = re.compile(r"[0-9a-f]{64}")
_SCRIPTS = ("uplot", "app", "format", "plots", "table", "topology", "timeline", "details")
STATIC = {
    "index.html": "text/html; charset=utf-8",
    "app.css": "text/css; charset=utf-8",
    "uplot.css": "text/css; charset=utf-8",
    **{f"{name}.js": "text/javascript; charset=utf-8" for name in _SCRIPTS},
    "icon.svg": "image/svg+xml",
}
Order = RemoveWorker | Unban
SubmitOrder = Callable[[Order], "Future[OperatorReply | Refused]"]


@dataclass(slots=True, eq=False)
class Api:
    """The handlers of all routes.

    Args:
        submit_order: a function that passes a command to the daemon, and returns a future of the reply.
        age_s: a function that returns the seconds since the latest status; None before the first one.
    """

    _board: Board
    _stream: EventStream
    _token: str
    _submit_order: SubmitOrder
    _age_s: Callable[[], float | None]

    # -- reading -------------------------------------------------------------------------------

    async def healthz(self, request: Request) -> Response:
        age_s = self._age_s()
        is_healthy = age_s is not None and age_s < STALE_S
        heard_s = None if age_s is None else round(age_s, 1)
        body = {"ok": is_healthy, "phase": self._board.run.get("phase", "starting"), "heard_s": heard_s}
        return JSONResponse(body, 200 if is_healthy else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(exposition(self._board), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def run(self, request: Request) -> Response:
        if not self._board.run:
            raise HTTPException(503)
        return JSONResponse(self._board.run)

    async def workers(self, request: Request) -> Response:
        rows = self._board.workers()
        state = request.query_params.get("state")
        rows = [row for row in rows if state is None or row["state"] == state]
        first, limit = _count(request, "offset", 0), _count(request, "limit", MAX_LISTED)
        return JSONResponse({"total": len(rows), "workers": rows[first : first + min(limit, MAX_LISTED)]})

    async def worker(self, request: Request) -> Response:
        peer = _key(request)
        row = next((row for row in self._board.workers() if row["peer"] == peer), None)
        if row is None:
            return problem(404, "unknown", "no worker has this key", "list the keys with GET /api/v1/workers")
        if bearer(request.headers, self._token):
            row = row | {"address": self._board.address(peer)}
        return JSONResponse(row)

    async def topology(self, request: Request) -> Response:
        return JSONResponse(self._board.topology)

    async def events(self, request: Request) -> Response:
        after, limit = _count(request, "after", 0), _count(request, "limit", MAX_LISTED)
        events = [event for event in self._board.events if event["id"] > after]
        return JSONResponse({"events": events[: min(limit, MAX_LISTED)]})

    async def history(self, request: Request) -> Response:
        history = self._board.history
        window = request.query_params.get("window", "whole")
        if window not in ("recent", "whole"):
            raise HTTPException(400, "window must be recent or whole")
        whole = window == "whole"
        points = history.all_points() if whole else list(history.recent)
        body = {"columns": COLUMNS, "stride": history.stride if whole else 1}
        return JSONResponse(body | {"points": [point.row() for point in points]})

    async def openapi(self, request: Request) -> Response:
        return Response(_packaged("openapi.json"), media_type="application/json")

    async def stream(self, request: Request) -> Any:
        if request.method == "HEAD":
            return Response(media_type="text/event-stream; charset=utf-8")  # the response to a GET never ends
        if self._stream.is_full:
            text = f"{self._stream.page_count} pages are open"
            refusal = problem(503, "full", text, "close a page, or try again later")
            refusal.headers["retry-after"] = "10"
            return refusal
        return self._stream.serve

    # -- with the token ------------------------------------------------------------------------

    async def access(self, request: Request) -> Response:
        self._require_token(request)
        return JSONResponse(self._board.access)

    async def kick(self, request: Request) -> Response:
        return await self._order(request, lambda peer, reason: RemoveWorker(peer, False, reason))

    async def ban(self, request: Request) -> Response:
        return await self._order(request, lambda peer, reason: RemoveWorker(peer, True, reason))

    async def unban(self, request: Request) -> Response:
        return await self._order(request, lambda peer, reason: Unban(peer))

    async def _order(self, request: Request, order: Callable[[bytes, str], Order]) -> Response:
        self._require_token(request)
        peer = bytes.fromhex(_key(request))
        reason = await _reason(request)
        try:
            submitted = self._submit_order(order(peer, reason))
            reply = await asyncio.wait_for(asyncio.wrap_future(submitted), ORDER_S)
        except TimeoutError:
            text = f"the coordinator has not answered within {ORDER_S:.0f} s"
            return problem(504, "no-answer", text, "see the coordinator's log")
        if isinstance(reply, Refused):
            return problem(409, reply.code, reply.reason, reply.remedy)
        return JSONResponse({"done": reply.text})

    def _require_token(self, request: Request) -> None:
        if not bearer(request.headers, self._token):
            raise HTTPException(401, headers={"www-authenticate": 'Bearer realm="gridtrain"'})


def create_app(api: Api, *, allowed_hosts: Collection[str] = ()) -> ASGIApp:
    """Return the application with all routes, behind the guard."""
    get, post = ["GET"], ["POST"]
    v1 = "/api/v1"
    routes = [
        Route("/", _static("index.html"), methods=get),
        *(Route(f"/static/{name}", _static(name), methods=get) for name in STATIC if name != "index.html"),
        Route("/healthz", api.healthz, methods=get),
        Route("/metrics", api.metrics, methods=get),
        Route(f"{v1}/run", api.run, methods=get),
        Route(f"{v1}/workers", api.workers, methods=get),
        Route(f"{v1}/workers/{{key}}", api.worker, methods=get),
        Route(f"{v1}/topology", api.topology, methods=get),
        Route(f"{v1}/events", api.events, methods=get),
        Route(f"{v1}/history", api.history, methods=get),
        Route(STREAM, api.stream, methods=get),
        Route(f"{v1}/openapi.json", api.openapi, methods=get),
        Route(f"{v1}/door", api.access, methods=get),
        Route(f"{v1}/workers/{{key}}/kick", api.kick, methods=post),
        Route(f"{v1}/workers/{{key}}/ban", api.ban, methods=post),
        Route(f"{v1}/workers/{{key}}/unban", api.unban, methods=post),
    ]
    return Guard(Starlette(routes=routes, exception_handlers={HTTPException: _refused}), allowed_hosts)


_ERROR_TEXTS = {
    401: (
        "token",
        "this request requires the token",
        "open the address that the coordinator printed, with #token=...",
    ),
    404: (
        "unknown",
        "there is nothing at this address",
        "read the list of addresses with GET /api/v1/openapi.json",
    ),
    405: (
        "method",
        "this address does not allow this method",
        "read the list of methods with GET /api/v1/openapi.json",
    ),
    503: ("starting", "there is no status yet", "try again in a second"),
}


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code, reason, remedy = _ERROR_TEXTS.get(
        error.status_code, ("wrong", error.detail, "read the description with GET /api/v1/openapi.json")
    )
    answer = problem(error.status_code, code, reason, remedy)
    answer.headers.update(error.headers or {})
    return answer


def _key(request: Request) -> str:
    key = str(request.path_params["key"]).lower()
    if not _KEY.fullmatch(key):
        raise HTTPException(400, "a worker's key must have 64 hexadecimal digits")
    return key


def _count(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise HTTPException(400, f"{name} must be an integer >= 0, of at most 15 digits")
    return int(text)


async def _reason(request: Request) -> str:
    body = await request.body()  # bounded: `Guard` has checked its length
    if not body:
        return ""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not JSON") from None
    reason = answer.get("reason", "") if isinstance(answer, dict) else None
    if not isinstance(reason, str):
        raise HTTPException(400, 'the body must be an object such as {"reason": "why"}')
    return sanitize.text(reason, 200)


def _packaged(*path: str) -> bytes:
    return files(__package__).joinpath(*path).read_bytes()


def _static(name: str) -> Callable[[Request], Awaitable[Response]]:
    content = _packaged("static", name)

    async def serve(request: Request) -> Response:
        return Response(content, media_type=STATIC[name])

    return serve
