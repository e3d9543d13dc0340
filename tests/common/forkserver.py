"""Starts Python programs by forking an interpreter that has torch, zmq and gridtrain loaded.

    with Client().forking():                         subprocess.Popen((sys.executable, "/path/train.py", ...))

Importing torch and gridtrain takes 2 s of CPU, a fork 10 ms.  Inside `forking`, `subprocess` requests
`python [-u] SCRIPT.py ...` and `python [-u] -m MODULE ...`, of gridtrain or torchrun, from a server, and
executes all other programs.
A forked program is as an executed one: a child of the requesting process, in its process group or in its
own, with its own pid, argv, environment, working directory and standard streams, no other open file, default
signal handlers, and `__main__` run to its end.  A forked module can request programs itself: it has its own
server.

It differs from an executed program in the hash seed, which is the server's, in modules that are loaded
already, and in its end, when modules are not unloaded.  If that matters, and for a part of the tests of the
command line, a test executes (`pytest.mark.executed`); `make test-all` executes everything.

The server is executed once and has no thread.  It does not fork for a caller with other Python settings,
locale or namespaces.  It forks twice, so that the requesting process, a subreaper for that moment, adopts the
program.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = (
    "torch",
    "torch._dynamo",  # which the first step of an optimizer imports
    "torch.optim",
    "torch.utils.data",
    "zmq",
    "gridtrain",
    "gridtrain.sdk.join",
    "gridtrain.pipeline.pipeline",
    "gridtrain.cli.main",
    "gridtrain_coordinator.daemon",
    "gridtrain_worker.agent",
)
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
REQUEST_BYTES = 150_000  # limit of a datagram of a Unix socket
COMMAND_LINE_BYTES = 8192  # reserved for the command lines of its children, as `ps` shows them
PR_SET_CHILD_SUBREAPER = 36
DEFAULTS = (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)
MODULES = ("gridtrain", "torch.distributed.run")
NO_SETTINGS = ("PYTHONUNBUFFERED", "TORCHINDUCTOR_CACHE_DIR", "TORCHELASTIC_", "TORCH_NCCL_")
"""What a forked program obeys, what torch sets for itself when a test takes the step of an optimizer, and
beginnings of what torchrun sets for its processes."""

NAMESPACES = ("net", "mnt", "uts", "pid", "user")

_execute: Any = subprocess._fork_exec  # type: ignore[attr-defined]
subprocess._USE_POSIX_SPAWN = False  # type: ignore[misc]  # which Python 3.13 would use instead of `_fork_exec`


# -- in the requesting process ---------------------------------------------------------------------


class Client:
    """Replaces `subprocess._fork_exec` by requests to a server; without a connection it starts one."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        self._connection = connection
        self._server: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._settings = _settings(dict(os.environ))
        self._owner = os.getpid()

    def close(self) -> None:
        """End the server, if this client has started one."""
        if self._connection is not None and self._server is not None:
            self._connection.close()
            self._server.wait()

    def fork_exec(
        self,
        args: list[str | bytes],
        executables: tuple[bytes, ...],
        close_fds: bool,
        kept_fds: tuple[int, ...],
        cwd: str | bytes | os.PathLike[str] | None,
        environment: list[bytes] | None,
        *rest: Any,
    ) -> int:
        """As `_posixsubprocess.fork_exec`: fds, flags, users; the pid of the started process."""
        stdin, _, _, stdout, _, stderr, _, report, restores, session, group, *others = rest
        words = [os.fsdecode(word) for word in args]
        variables = _variables(environment)
        plain = (
            close_fds
            and kept_fds == (report,)
            and restores
            and tuple(others[:5]) == (None, None, None, -1, None)
        )
        request = {
            "words": words,
            "environment": variables,
            "folder": os.fsdecode(cwd) if cwd is not None else os.getcwd(),
            "session": session,
            "group": os.getpgid(0) if group == -1 else group,
        }
        message = json.dumps(request).encode()
        if not (
            plain
            and os.getpid() == self._owner
            and executables == (os.fsencode(sys.executable),)
            and _program(words) is not None
            and len(message) < REQUEST_BYTES
            and os.path.isdir(request["folder"])
            and _settings(variables) == self._settings
        ):
            return int(_execute(args, executables, close_fds, kept_fds, cwd, environment, *rest))
        streams = [given if given != -1 else own for own, given in enumerate((stdin, stdout, stderr))]
        return self._ask(message, streams)

    def _ask(self, message: bytes, streams: list[int]) -> int:
        with self._lock:
            connection = self._connection = self._connection or self._start()
            libc = ctypes.CDLL(None, use_errno=True)
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(connection, [message], streams)
                answer = connection.recv(64)
            finally:
                libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise RuntimeError("the fork server has ended -> see its traceback on stderr")
        return int(answer)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, executing():
            fd = theirs.fileno()
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(fd), "-" * COMMAND_LINE_BYTES],
                stdin=subprocess.DEVNULL,
                env=os.environ | dict.fromkeys(THREADS, "1"),
                pass_fds=[fd],
                process_group=0,
            )
        return ours

    @contextlib.contextmanager
    def forking(self) -> Iterator[None]:
        """In this context `subprocess` forks Python programs."""
        with _starting_by(self.fork_exec):
            yield


@contextlib.contextmanager
def executing() -> Iterator[None]:
    """In this context `subprocess` executes all programs."""
    with _starting_by(_execute):
        yield


@contextlib.contextmanager
def _starting_by(fork_exec: Callable[..., int]) -> Iterator[None]:
    before = subprocess._fork_exec  # type: ignore[attr-defined]
    subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess._fork_exec = before  # type: ignore[attr-defined]


def _variables(environment: list[bytes] | None) -> dict[str, str]:
    if environment is None:
        return dict(os.environ)
    pairs = (os.fsdecode(line).split("=", 1) for line in environment)
    return {name: value for name, value in pairs}


def _settings(environment: dict[str, str]) -> dict[str, str]:
    """Variables that an interpreter or a library reads when it starts, and this process's namespaces."""
    read = ("PYTHON", "LC_", "LANG", "CUDA", "TORCH", "LD_")
    chosen = {
        n: value for n, value in environment.items() if n.startswith(read) and not n.startswith(NO_SETTINGS)
    }
    return chosen | {name: os.readlink(f"/proc/thread-self/ns/{name}") for name in NAMESPACES}


def _program(words: list[str]) -> tuple[list[str], bool] | None:
    """What `python` is to run and its arguments, and whether unbuffered; None: not to be forked."""
    unbuffered = words[1:2] == ["-u"]
    program = words[2 if unbuffered else 1 :]
    named = program[:1] == ["-m"] and len(program) > 1 and program[1].startswith(MODULES)
    script = bool(program) and not program[0].startswith("-") and program[0].endswith(".py")
    return (program, unbuffered) if named or script else None


# -- in the server -------------------------------------------------------------------------------------


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        __import__(name)
    gc.collect()
    gc.freeze()
    request = serve(connection)
    while True:
        program, unbuffered = _program(request["words"]) or _end()
        prepare(request, unbuffered)
        if program[0] == "-m":  # this program may start others
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if os.fork() == 0:
                ours.close()
                _leave_group()
                request = serve(theirs)
                continue
            theirs.close()
            subprocess._fork_exec = Client(ours).fork_exec  # type: ignore[attr-defined]
        run_and_end(program)
        return


def serve(connection: socket.socket) -> dict[str, Any]:
    """Answer requests until the requesting process ends; return in each forked process, with its request."""
    while True:
        message, streams, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 3)
        if not message:
            _end()
        read, write = os.pipe()
        adopted, adopt = os.pipe()
        middle = os.fork()
        if not middle:
            if pid := os.fork():
                os.write(write, b"%d" % pid)
                _end()
            os.close(adopt)
            os.read(adopted, 1)  # from now on this process's parent is the requesting process
            for fd in (read, write, adopted):
                os.close(fd)
            connection.close()
            for own, given in enumerate(streams):
                os.dup2(given, own)
                os.close(given)
            return dict(json.loads(message))
        started = os.read(read, 64)
        os.waitpid(middle, 0)
        for fd in (read, write, adopted, adopt, *streams):
            os.close(fd)
        connection.send(started)


def _end() -> NoReturn:
    os._exit(0)


def prepare(request: dict[str, Any], unbuffered: bool) -> None:
    """Become what the request describes; a program that aborts shows what its threads were doing."""
    if request["session"]:
        os.setsid()
    elif request["group"] == 0 or os.getpgid(0) != request["group"]:
        os.setpgid(0, request["group"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in DEFAULTS:
        signal.signal(number, signal.SIG_DFL)
    _open_streams(unbuffered or bool(os.environ.get("PYTHONUNBUFFERED")))
    _show_command_line(request["words"])
    faulthandler.enable(2)
    import numpy
    import torch

    numpy.random.seed()
    threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def _leave_group() -> None:
    """Move the server into its own process group, which its owner's signals and queries do not reach."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in range(2):
        os.dup2(nowhere, fd)
    os.close(nowhere)
    _show_command_line([sys.executable, __file__])


def _open_streams(unbuffered: bool) -> None:
    """`sys.stdin`, `stdout` and `stderr` as an interpreter opens them when it starts."""
    encoding = sys.stdout.encoding
    sys.stdin = io.TextIOWrapper(open(0, "rb", closefd=False), encoding, "strict")  # noqa: SIM115
    for fd, name, errors in ((1, "stdout", sys.stdout.errors), (2, "stderr", "backslashreplace")):
        raw = open(fd, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
        at_once = not unbuffered and (fd == 2 or os.isatty(fd))
        text = io.TextIOWrapper(raw, encoding, errors, line_buffering=at_once, write_through=unbuffered)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    sys.__stdin__ = sys.stdin  # type: ignore[misc]


def _show_command_line(words: list[str]) -> None:
    """Set the command line that /proc and `ps` show."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    line = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - begin - 1]
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)


def run_and_end(program: list[str]) -> None:
    """Run the program and end as the interpreter does, but do not unload torch, which takes 0.3 s of CPU.

    Threads are awaited, functions of `atexit` called, and streams flushed.  After an exception or with a
    text as exit code, the interpreter ends the program.
    """
    code = 0
    try:
        run(program)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        code = end.code or 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        sys.exit(code)  # the interpreter reports it
    os._exit(code & 0xFF)


def run(program: list[str]) -> None:
    """Run it as `python` does: in a new `__main__`; exceptions go to the caller."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    if program[0] == "-m":
        sys.argv = ["-m", *program[2:]]
        sys.path[0] = os.getcwd()
        runpy._run_module_as_main(program[1])  # type: ignore[attr-defined]
        return
    sys.argv = program
    sys.path[0] = os.path.dirname(os.path.realpath(program[0]))
    module.__file__ = os.path.abspath(program[0])
    module.__dict__["__cached__"] = None
    code = compile(Path(program[0]).read_bytes(), module.__file__, "exec", dont_inherit=True)
    exec(code, module.__dict__)


if __name__ == "__main__":
    main()
