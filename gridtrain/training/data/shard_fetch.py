"""Downloads files of a data set (https, s3, hf), with timeouts, resumed copies and progress lines.

http://, https://    the standard library, with a deadline for each read, and ranges
s3://, hf:// ...     fsspec
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import logging
import os
import posixpath
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPResponse, InvalidURL
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, Request, build_opener

from gridtrain._version import __version__
from gridtrain.errors import ConfigError, DataError
from gridtrain.extras import require
from gridtrain.quantities import format_bytes, format_count, make_printable
from gridtrain.training.data.fetch_meter import FetchMeter

log = logging.getLogger("gridtrain")

CHUNK_BYTES = 4 << 20
RETRY_AFTER_S = (1.0, 5.0, 25.0, *(60.0,) * 9)
"""The seconds to wait before each further attempt at fetching a file, together about 10 minutes.  After
another `CHUNK_BYTES` have arrived, attempts are counted again from the first."""

BRIEF_S = 31.0
"""The sum of the first three of these waits.  The group waits for a worker until the worker has the file, or
until its waits exceed this sum."""

OTHER_RETRIES = 3
"""The maximum number of further attempts after an error other than one of the connection or the server."""

_PERMANENT = (FileNotFoundError, PermissionError, ImportError, ValueError, InvalidURL)
READ_TIMEOUT_S = 60.0
"""The longest wait for more bytes from an HTTP server, and the period in which any server must send at least
`MIN_BYTES`."""

MIN_BYTES = 64 << 10
MAX_REASON = 200
"""The maximum number of characters of a server's reason phrase that are shown."""

LINES_EVERY_S = 10.0
PROGRESS = "GRIDTRAIN_PROGRESS"
"""The environment variable that `gridtrain worker` sets for its script if it writes the script's output to a
terminal."""

CLEAR = "\r\x1b[K"
_MISSING = (404, 410)
_BUSY = (408, 425, 429)
"""The HTTP statuses below 500 after which another attempt may succeed."""

Copy = Callable[[str, Path, int, FetchMeter], bool | None]
"""A function that appends the missing bytes to a partial file; for arguments and result, see `copy_rest`."""


class ServerBusy(ConnectionError):
    """An HTTP server answered that it cannot serve the file at present.

    Attributes:
        retry_after_s: how long the server asks its clients to wait; 0 if it does not say.
    """

    def __init__(self, text: str, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class FetchRetries:
    """Decides after a failed attempt at fetching a file whether and when to try again.

    Args:
        place: the file's URL.
        retry_after_s: the waits before further attempts; see `RETRY_AFTER_S`.

    Attributes:
        waited_s: the sum of the waits since the count of attempts last restarted.
    """

    def __init__(self, place: str, retry_after_s: Sequence[float]) -> None:
        self._place, self._retry_after_s = place, retry_after_s
        self._waits_s, self._furthest, self._failed = iter(retry_after_s), 0, 0
        self.waited_s = 0.0

    def wait_after(self, error: Exception, done: int) -> float:
        """Return the seconds to wait before the next attempt, and log the first of these waits.

        Args:
            error: the error with which the attempt failed.
            done: the number of bytes that have arrived so far.

        Raises:
            DataError: another attempt would also fail, or this was the last one.
        """
        if done >= self._furthest + CHUNK_BYTES:
            self._waits_s, self._furthest, self._failed = iter(self._retry_after_s), done, 0
            self.waited_s = 0.0
        self._failed += 1
        cause = describe(error)
        kind = " ".join(cause.split()[:2]) if cause.startswith("HTTP ") else type(error).__name__
        failure = f"{self._place} cannot be read after {done} bytes: {cause}"
        if isinstance(error, _PERMANENT):
            raise DataError(
                failure,
                kind=kind,
                remedy="check the URL and the access to it: another attempt would also fail",
            ) from None
        is_outage = isinstance(error, OSError | HTTPException)
        wait_s = self._next_wait(error) if is_outage or self._failed <= OTHER_RETRIES else None
        if wait_s is None:
            raise DataError(
                f"{failure}; less than {CHUNK_BYTES >> 20} MiB of progress in "
                f"{format_count(self._failed, 'attempt')}",
                kind=kind,
                remedy="check the URL and the connection; the next attempt continues from there",
            ) from None
        if self._failed == 1:
            total_s = sum(self._retry_after_s if is_outage else self._retry_after_s[:OTHER_RETRIES])
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + total_s))
            log.warning("%s; retrying until about %s", failure, until)
        self.waited_s += wait_s
        return wait_s

    def _next_wait(self, error: Exception) -> float | None:
        """Return the seconds until the next attempt, at least as many as the server asks for, unless these
        exceed all remaining waits; None after the last attempt."""
        wait_s = next(self._waits_s, None)
        asked_s = error.retry_after_s if isinstance(error, ServerBusy) else 0.0
        while wait_s is not None and wait_s < asked_s:
            if (further_s := next(self._waits_s, None)) is None:
                break
            wait_s += further_s
        return wait_s


def copy_rest(
    place: str,
    part: Path,
    limit_bytes: int,
    meter: FetchMeter,
    say: Callable[[str], None] | None = None,
) -> bool:
    """Append the missing bytes of a remote file to `part`.

    Returns whether the remote file may be longer than `part`, because the HTTP response gave no length.

    Args:
        limit_bytes: the size of the file, or the maximum size that is accepted.
        meter: the meter that limits and counts the bytes that are read.
        say: a function that is called with lines that show the progress; by default, the progress is shown on
            standard error.

    Raises:
        BudgetSpent: `meter` allows no more; `part` contains the bytes that have arrived.
        DataError: the file is larger than expected, or cannot be resumed and exceeds a day's budget.
        FileNotFoundError, PermissionError: another attempt would also fail.
        Exception: the connection broke, or was too slow.  `part` contains the bytes that have arrived.
    """
    with part.open("ab") as local:
        size = local.tell()
        if size >= limit_bytes:
            return False
        with _opened(place, size) as (remote, start), _shown(place, say) as show:
            if start != size:  # the server does not support ranges
                meter.check_undivided(place, limit_bytes)
                local.truncate(start)
            size = start
            is_http = isinstance(remote, HTTPResponse)
            read = remote.read1 if is_http else remote.read  # read1 returns what has arrived
            is_sized = is_http and remote.length is not None
            end = size + remote.length if is_sized else limit_bytes + 1
            since_s, before = time.monotonic(), size
            while wanted := min(CHUNK_BYTES, limit_bytes + 1 - size, end - size):
                asked_s = time.monotonic()
                allowed = meter.request(wanted)
                since_s += time.monotonic() - asked_s  # this wait is not the server's
                if not (chunk := read(allowed)):
                    break
                size += local.write(chunk)
                meter.count(len(chunk))
                show(size, min(end, limit_bytes))
                if size > limit_bytes:
                    raise DataError(
                        f"{place} has changed: it is now larger than {limit_bytes} bytes",
                        kind="has changed",
                        remedy="if the change is intended, regenerate its index or update [run.data]",
                    )
                if (waited_s := time.monotonic() - since_s) >= READ_TIMEOUT_S:
                    if size - before < MIN_BYTES:
                        raise TimeoutError(f"only {size - before} bytes arrived in {waited_s:.0f} s")
                    since_s, before = time.monotonic(), size
            if is_sized and size < min(end, limit_bytes):
                raise ConnectionError(f"the connection ended after {size} of {end} bytes")
            return is_http and not is_sized and not remote.chunked


@contextmanager
def _opened(place: str, start: int) -> Iterator[tuple[Any, int]]:
    """Open a remote file at byte `start`; yield the file, and its position: `start`, or 0 if the server
    cannot begin there."""
    if place.startswith(("http://", "https://")):
        with _request(place, start) as response:
            yield response, start if response.status == 206 else 0
        return
    with open_remote(place) as remote:
        if start:
            try:
                remote.seek(start)
            except (OSError, ValueError):  # a file system that does not support ranges
                start = 0
        yield remote, start


def refuse_credentials(place: str) -> None:
    """Raise `ConfigError` if an http(s) URL is invalid, or contains a user name or a password.  The URL may
    follow other protocols of fsspec, such as `simplecache::https://`."""
    for url in re.split(r"::(?=\w+://)", place):
        if not re.match("https?://", url, re.IGNORECASE):
            continue
        try:
            host = urlsplit(url).netloc
        except ValueError:  # the error's text may contain the password
            shown = path_of(url).rpartition("@")[2]
            raise ConfigError(
                f"the host in the URL {shown!r:.200} is invalid", remedy="correct the URL"
            ) from None
        if "@" in host:
            raise ConfigError(
                f"a URL at {host.rpartition('@')[2]} contains a user name or a password, which all members "
                "and logs would see",
                remedy="use a signed URL, or a protocol whose package has credentials of its own, such as "
                "s3://",
            )


class _Redirections(HTTPRedirectHandler):
    """Follows redirections to http(s) URLs of the same host or of public addresses.

    A server thus cannot direct requests to other hosts in this machine's own network.
    """

    def redirect_request(
        self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        host, first = urlsplit(newurl).hostname or "", urlsplit(f"//{req.origin_req_host}").hostname
        if not newurl.startswith(("http://", "https://")):
            msg = f"redirects to {newurl:.100}, which is not an http(s) URL"
        elif host != first and not _is_public(host):
            msg = f"redirects to {host:.100}, which has no public address; only {first} needs none"
        else:
            return super().redirect_request(req, fp, code, msg, headers, newurl)
        raise HTTPError(newurl, code, msg, headers, fp)


def _is_public(host: str) -> bool:
    """Return whether all addresses of a host are reachable from the internet; True if none is known."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError:  # no host has such a name
        return False
    except OSError:  # the request will fail, too, or a proxy knows the address
        return True
    return all(ipaddress.ip_address(address[0]).is_global for *_, address in found)


@functools.cache
def _opener() -> OpenerDirector:
    return build_opener(_Redirections)


def _request(url: str, start: int) -> HTTPResponse:
    refuse_credentials(url)
    headers = {"User-Agent": f"gridtrain/{__version__}", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        response: HTTPResponse = _opener().open(Request(url, headers=headers), timeout=READ_TIMEOUT_S)
    except HTTPError as error:
        error.close()
        if error.code == 416 and start:  # the partial copy is longer than the file
            return _request(url, 0)
        raise _status_error(error) from None
    except URLError as error:
        raise (
            error.reason if isinstance(error.reason, OSError) else FileNotFoundError(error.reason)
        ) from None
    served = response.headers.get("Content-Range", "")
    if response.status == 206 and not served.startswith(f"bytes {start}-"):
        response.close()
        raise ConnectionError(f"bytes {start}- were requested, but the server sends {served!r:.80}")
    return response


def _status_error(error: HTTPError) -> OSError:
    reason = str(error.reason).partition("\n")[0]  # a redirection loop's reason has several lines
    text = make_printable(f"HTTP {error.code} {reason:.{MAX_REASON}}")
    if error.code in _MISSING:
        return FileNotFoundError(text)
    if error.code < 500 and error.code not in _BUSY:
        return PermissionError(text)
    return ServerBusy(text, _parse_retry_after(error.headers.get("Retry-After", "")))


def _parse_retry_after(text: str) -> float:
    """Return the seconds that a `Retry-After` header asks for; 0 if there is none, or it is invalid."""
    if re.fullmatch("[0-9]{1,9}", text):
        return float(text)
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    return 0.0


def path_of(place: str) -> str:
    """Return a path or a URL, an http(s) URL without fragment and query, which may contain a signature."""
    is_http = re.match("(.*::)?https?://", place, re.IGNORECASE)
    return re.split("[?#]", place, maxsplit=1)[0] if is_http else place


def describe(error: Exception) -> str:
    """Return the status of an HTTP error, or the type and the text of any other error, as one line."""
    text = make_printable(str(error))
    return text if text.startswith("HTTP ") else f"{type(error).__name__}: {text}"


def file_system(place: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it.  Raises `ConfigError` if the URL is not of a
    supported kind, contains a password, or needs a package that is not installed."""
    refuse_credentials(place)
    require("fsspec", f"reading {place.partition('://')[0]}://")
    import fsspec

    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(place)
    except (ImportError, ValueError) as error:  # no package for these URLs, or no such kind of URL
        raise ConfigError(
            f"{place} cannot be read: {make_printable(str(error))}",
            remedy="install the package that reads such URLs, or correct the URL",
        ) from None
    return found


def open_remote(place: str) -> Any:
    """Open a remote file for reading.  Raises the same errors as `file_system`, and those of the library that
    opens the URL."""
    if place.startswith(("http://", "https://")):
        return _request(place, 0)
    system, path = file_system(place)
    return system.open(path, "rb")


@contextmanager
def _shown(place: str, say: Callable[[str], None] | None) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows how many bytes of a file have arrived: on a terminal, in one line that is
    redrawn; elsewhere, on new lines."""
    is_terminal = say is None and (sys.stderr.isatty() or os.environ.get(PROGRESS) == "terminal")
    say = say or (lambda text: _write(f"{text}\n"))
    name, began_s = posixpath.basename(path_of(place)), time.monotonic()
    next_s, latest = began_s + (0 if is_terminal else LINES_EVERY_S), ""

    def show(size: int, nbytes: int) -> None:
        nonlocal next_s, latest
        latest = f"{format_bytes(size)} of {format_bytes(nbytes)}"
        if (now_s := time.monotonic()) < next_s:
            return
        next_s = now_s + (0.2 if is_terminal else LINES_EVERY_S)
        filled = 20 * size // max(size, nbytes)
        if is_terminal:
            line = f"fetching {name}: [{'#' * filled}{'.' * (20 - filled)}] {latest}"
            _write(CLEAR + line[: shutil.get_terminal_size().columns - 1])
        else:
            say(f"fetching {name}: {latest}")

    try:
        yield show
    finally:
        if latest:
            seconds = time.monotonic() - began_s
            say(f"{CLEAR if is_terminal else ''}fetched {name}: {latest} in {seconds:.1f} s")


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads it
        sys.stderr.write(text)
        sys.stderr.flush()
