"""The Unix socket through which an agent talks to its script and its owner; finds running workers by name.

The file mode of the socket is 0600, so only this user can connect.  `PolicyEnforcer` handles the messages.

    gridtrain worker set ... -- one JSON line --> ControlSocket --> answer(...) -- one JSON line -->
    the script               -- {"role": "script"}, then its state, line by line --> hear(...)
                             <-- a line whenever the directive changes ------------- push(...)
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gridtrain.errors import ConfigError, GridtrainError, disk_errors
from gridtrain.network.transport.identity import make_private_folder
from gridtrain.runtime.client.agent_link import CONTROL_VARIABLE, MAX_LINE_BYTES
from gridtrain.runtime.client.worker_defaults import state_directory
from gridtrain_worker.script_processes import is_from_script, is_suspended

SOCKET = "control.sock"
MAX_PATH_BYTES = 100
"""The maximum length of the path of the socket; some systems allow only 103 bytes.

If the path would be longer, the socket is created at a shorter path, and a link points to it.
"""

MAX_CONNECTIONS = 16
MAX_LISTED = 10
SUSPENDED, REFUSING = "a suspended worker", "a worker that does not say its name"
ALLOWED_FROM_SCRIPT = ("show",)
"""Requests that a training script may make.  A script's short pause would replace the owner's longer pause,
and `stop` would end it.  A malicious script is not restrained: it has the permissions of the account."""

MIN_DIGITS = 6
ASK_S = 5.0
_CREDENTIALS = struct.Struct("3i")  # process, user and group, as in `struct ucred`
_POLL_S = 0.25

Body = dict[str, Any]


class WorkerSuspended(ConfigError):
    """The agent is suspended (Ctrl-Z), and does not answer until it is continued.

    Attributes:
        pid: the agent's process id.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(
            f"the worker is suspended (process {pid})", remedy=f"{_continue(pid)}, and try again"
        )
        self.pid = pid


def _continue(*pids: int) -> str:
    return f"continue it with fg in its terminal, or with kill -CONT {' '.join(map(str, pids))}"


class ControlSocket:
    """Serves connections in background threads until `close`.

    Args:
        folder: this worker's private folder.
        answer: returns the answer to a request from the owner; if it raises a `GridtrainError`, the request
            is refused.
        greet: returns the first directive for a script, given the script's first message.
        hear: called with a script's process id and each status that the script sends.

    Raises:
        ConfigError: the socket cannot be created.
    """

    def __init__(
        self,
        folder: Path,
        answer: Callable[[Body], Body],
        greet: Callable[[Body], Body],
        hear: Callable[[int, Body], None],
    ) -> None:
        self._answer, self._greet, self._hear = answer, greet, hear
        self._closing = threading.Event()
        self._script_connections: set[socket.socket] = set()
        self._connection_slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._lock = threading.Lock()
        make_private_folder(folder)
        self._default_path = folder / SOCKET
        self.path, self._short_folder = _free(self._default_path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        what = f"cannot create the control socket {self.path}"
        before = os.umask(0o177)  # the file is created with its final mode
        try:
            with disk_errors(what, "check the folder, or set XDG_STATE_HOME to another folder"):
                self._socket.bind(self.path)
        finally:
            os.umask(before)
        self._socket.listen(MAX_CONNECTIONS)
        self._socket.settimeout(_POLL_S)
        self._thread = threading.Thread(target=self._main, name="gridtrain-control", daemon=True)
        self._thread.start()

    def push(self, body: Body) -> None:
        """Send `body` to all connected scripts."""
        line = json.dumps(body).encode() + b"\n"
        with self._lock:
            for script in list(self._script_connections):
                with contextlib.suppress(OSError):
                    script.sendall(line)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._socket.close()
        with contextlib.suppress(OSError):  # a read-only disk; the next agent removes the socket
            self._default_path.unlink(missing_ok=True)
        if self._short_folder is not None:
            shutil.rmtree(self._short_folder, ignore_errors=True)

    def _main(self) -> None:
        while not self._closing.is_set():
            try:
                talk, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            if not self._connection_slots.acquire(blocking=False):
                talk.close()
                continue
            threading.Thread(target=self._serve, args=(talk,), daemon=True).start()

    def _serve(self, talk: socket.socket) -> None:
        try:
            with talk:
                talk.settimeout(ASK_S)
                lines = _lines(talk)
                first = json.loads(next(lines))
                if not isinstance(first, dict):
                    return
                if first.get("role") == "script":
                    self._serve_script(talk, lines, first)
                else:
                    talk.sendall(json.dumps(self._answer_or_refuse(talk, first)).encode() + b"\n")
        except (OSError, ValueError, KeyError, TypeError, StopIteration, RecursionError):
            pass  # the client has disconnected, or did not send JSON
        finally:
            with self._lock:
                self._script_connections.discard(talk)
            self._connection_slots.release()

    def _serve_script(self, talk: socket.socket, lines: Iterator[bytes], first: Body) -> None:
        greeting = json.dumps(self._greet(first)).encode() + b"\n"
        with self._lock:
            talk.sendall(greeting)
            self._script_connections.add(talk)
        talk.settimeout(None)
        for line in lines:
            said = json.loads(line)
            if isinstance(said, dict):
                self._hear(first["pid"], said)

    def _answer_or_refuse(self, talk: socket.socket, question: Body) -> Body:
        try:
            is_allowed = question.get("ask") in ALLOWED_FROM_SCRIPT
            pid, uid = _peer(talk)
            is_own_user = uid == os.getuid()  # not root, whose processes may be hidden
            if not is_allowed and is_own_user and is_from_script(pid, f"{CONTROL_VARIABLE}="):
                raise ConfigError(
                    "a training script may not pause, stop or resume its worker, nor set its rules",
                    remedy="run the command in a terminal",
                )
            return {"ok": True, **self._answer(question)}
        except GridtrainError as error:
            return {"ok": False, "reason": getattr(error, "reason", str(error)), "remedy": error.remedy}


def _lines(talk: socket.socket) -> Iterator[bytes]:
    rest = b""
    while got := talk.recv(MAX_LINE_BYTES):
        *lines, rest = (rest + got).split(b"\n")
        yield from lines
        if len(rest) > MAX_LINE_BYTES:
            return


def _free(place: Path) -> tuple[str, Path | None]:
    """Remove the socket of an agent that was killed, and return (path to listen on, temporary folder).

    The folder is None unless `place` is too long; in that case, `place` becomes a link to a socket in the
    folder.
    """
    place.unlink(missing_ok=True)
    if len(os.fsencode(place)) <= MAX_PATH_BYTES:
        return str(place), None
    folder = Path(tempfile.mkdtemp(prefix="gridtrain-", dir=_short_folder()))
    place.symlink_to(folder / SOCKET)
    return str(folder / SOCKET), folder


def _short_folder() -> str | None:
    """Return the runtime folder of this systemd service, whose /tmp may be private; None to use /tmp.

    The runtime folder of a login session is not used, because it is removed when the session ends.
    """
    place = os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    room = MAX_PATH_BYTES - len(f"/gridtrain-12345678/{SOCKET}")
    return place if place and len(os.fsencode(place)) <= room and os.access(place, os.W_OK) else None


# -- client side -----------------------------------------------------------------------------------------


def ask_agent(path: Path, question: Body) -> Body:
    """Send one request to the agent whose socket is `path`; return its answer.

    Raises:
        ConfigError: the agent refuses the request.
        WorkerSuspended: the agent is suspended.
        OSError: no agent is listening on `path`, or the agent does not answer in time.
        StopIteration, ValueError: the agent closes the connection, or does not send JSON.
    """
    target = os.readlink(path) if path.is_symlink() else str(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as talk:
        talk.settimeout(ASK_S)
        talk.connect(target)
        pid, _ = _peer(talk)
        if is_suspended(pid):
            raise WorkerSuspended(pid)
        talk.sendall(json.dumps(question).encode() + b"\n")
        answer = json.loads(next(_lines(talk)))
    if not answer.pop("ok"):
        raise ConfigError(answer["reason"], remedy=answer["remedy"])
    assert isinstance(answer, dict)
    return answer


def _peer(talk: socket.socket) -> tuple[int, int]:
    """Return the ids of the process at the other end and of its user; (0, 0) if this is not Linux."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0, 0
    pid, uid, _ = _CREDENTIALS.unpack(
        talk.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, uid


def running_workers() -> list[tuple[Path, Body]]:
    """Return the socket path and the answer to `show` for each of this user's workers on this machine.

    A suspended worker does not answer; only its run and its process id are known.
    """
    found: list[tuple[Path, Body]] = []
    base = state_directory("default").parent
    for path in sorted(base.glob(f"*/identities/*/*/{SOCKET}")):
        try:
            found.append((path, ask_agent(path, {"ask": "show"})))
        except WorkerSuspended as error:
            run = path.parents[3].name
            found.append((path, {"name": SUSPENDED, "run": run, "key": "unknown", "suspended": error.pid}))
        except ConfigError:
            found.append((path, {"name": REFUSING, "run": path.parents[3].name, "key": "unknown"}))
        except (OSError, ValueError, StopIteration):
            pass  # it has ended
    return found


def find_worker(who: str) -> Path:
    """Return the socket of one worker.

    Args:
        who: the worker's name, RUN/NAME, or at least the first `MIN_DIGITS` digits of its key; empty for the
            only worker.

    Raises:
        ConfigError: no worker matches, or several workers match.
    """
    found = _found_workers()
    meant = [path for path, shown in found if not who or _matches(who, shown)]
    suspended = [shown for _, shown in found if "suspended" in shown and _may_match(who, shown)]
    if not meant and suspended:
        listed = [f"run {shown['run']}, process {shown['suspended']}" for shown in suspended[:MAX_LISTED]]
        raise ConfigError(
            f"there is no running worker {who!r}; a suspended one ({'; '.join(listed)}) may have this name",
            remedy=f"correct the name, or {_continue(*(shown['suspended'] for shown in suspended))}",
        )
    if len(meant) == 1:
        return meant[0]
    listed = [_display_name(shown) for path, shown in found if not meant or path in meant]
    names = ", ".join(listed[:MAX_LISTED]) + (" and others" if len(listed) > MAX_LISTED else "")
    if not meant:
        raise ConfigError(f"there is no worker {who!r}", remedy=f"choose one of: {names}")
    if not who:
        raise ConfigError(
            f"{len(found)} workers are running: {names}", remedy="choose one with --worker NAME, or add --all"
        )
    raise ConfigError(
        f"{who!r} matches {len(meant)} workers: {names}",
        remedy="specify the run or the key: --worker RUN/NAME, or --worker KEY",
    )


def find_workers() -> list[Path]:
    """Return the sockets of all running workers of this user; raise `ConfigError` if there are none."""
    return [path for path, _ in _found_workers()]


def _found_workers() -> list[tuple[Path, Body]]:
    found = running_workers()
    if not found:
        raise ConfigError(
            "none of your workers is running on this machine",
            remedy="start one with gridtrain worker INVITATION",
        )
    return found


def _matches(who: str, shown: Body) -> bool:
    name, run, key = (str(shown.get(word) or "") for word in ("name", "run", "key"))
    digits = who.lower()
    return who in (name, f"{run}/{name}") or (len(digits) >= MIN_DIGITS and key.startswith(digits))


def _may_match(who: str, shown: Body) -> bool:
    """Return whether a worker known only by its run may have the name `who`, or be RUN/NAME."""
    run, slash, _ = who.partition("/")
    return not slash or run == shown["run"]


def _display_name(shown: Body) -> str:
    return f"{shown.get('name')} (run {shown.get('run')}, key {shown.get('key')})"
