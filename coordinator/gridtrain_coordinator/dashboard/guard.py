"""Decides which web requests are accepted (host names, token), and sets the security headers of responses.

Another site can point its own host name at this machine ("DNS rebinding").  Requests from its pages carry
that name, so only addresses and known names are accepted.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES = 4096
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}


def problem(status: int, code: str, reason: str, remedy: str) -> JSONResponse:
    """Return a refusal as a JSON response; all refusals have this form."""
    return JSONResponse({"code": code, "reason": reason, "remedy": remedy}, status)


def is_host_allowed(host: str, allowed_hosts: Collection[str]) -> bool:
    """Return whether a request may carry this Host header.

    IP addresses, localhost and the names in `allowed_hosts` are allowed.  Any IP address is allowed,
    because with DNS rebinding the header contains the malicious site's host name.
    """
    name = _without_port(host.strip().lower()).rstrip(".")
    if name in ("localhost", *allowed_hosts):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[: host.find("]") + 1]
    return host.rsplit(":", 1)[0] if host.count(":") == 1 else host


def bearer(headers: Headers, token: str) -> bool:
    """Return whether the request carries the token; the comparison takes constant time.

    It may be in `X-Auth-Token`, because a proxy with passwords uses `Authorization` itself.
    """
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    given = [*([credentials] if scheme.lower() == "bearer" else []), *headers.getlist("x-auth-token")]
    return any([secrets.compare_digest(text.strip().encode(), token.encode()) for text in given])


class Guard:
    """The application's outermost layer, which checks hosts and body sizes, and adds security headers."""

    def __init__(self, app: ASGIApp, allowed_hosts: Collection[str]) -> None:
        self._app = app
        self._named = frozenset(name.lower() for name in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        refusal = self._refusal(Headers(scope=scope))
        await (refusal or self._app)(scope, receive, guarded)

    def _refusal(self, headers: Headers) -> JSONResponse | None:
        host = headers.get("host", "")
        if not is_host_allowed(host, self._named):
            return problem(
                421,
                "host",
                f"this dashboard does not serve the host name {host[:80]!r}",
                "open the dashboard at its IP address, or allow this name with --dashboard-host",
            )
        if "transfer-encoding" in headers:
            return problem(
                413,
                "size",
                "the body is sent in chunks, so that its length is unknown",
                f"send a Content-Length of at most {MAX_BODY_BYTES} bytes instead of Transfer-Encoding",
            )
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            return problem(
                413,
                "size",
                f"the body's length is {length[:20]}; a body may be at most {MAX_BODY_BYTES} bytes long",
                "send a smaller body",
            )
        return None
