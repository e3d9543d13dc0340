"""Child processes of the demo, `gridtrain bench` and the benchmarks: environment, log tails, termination."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from gridtrain.config import ENV_PREFIX

SHUTDOWN_TIMEOUT_S = 5.0
CLI_COMMAND = (sys.executable, "-m", "gridtrain")


def process_environment(state: Path, **settings: str) -> dict[str, str]:
    """Return the environment for child processes: that of this process, but with other gridtrain settings.

    In this environment, a process computes with one thread.

    Args:
        state: the folder in which the child processes create their state folders and keys.
        settings: the `GRIDTRAIN_` variables to set, by name without this prefix, such as `EXPORT_DIR`.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    ours = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    chosen = {ENV_PREFIX + name: value for name, value in settings.items()}
    return inherited | ours | chosen | {"XDG_STATE_HOME": str(state)}


def log_tail(name: str, logs: Sequence[Path], most_lines: int) -> str:
    """Return the last `most_lines` lines of each of a process's logs, below a heading with `name`."""
    texts = [log.read_text(errors="replace") for log in logs]
    lines = [line for text in texts for line in text.splitlines()[-most_lines:]]
    return "\n".join([f"--- {name}, end of its log ---", *lines])


def end_processes(
    processes: Sequence[subprocess.Popen[bytes]], timeouts_s: Sequence[float] = (SHUTDOWN_TIMEOUT_S,)
) -> None:
    """Terminate processes, each of which must lead its own process group, and their children.

    For each timeout, send SIGTERM to the groups of the processes that are still running, the last process
    first, and wait up to that long for them to exit.  Then send SIGKILL to all groups, because
    children may have outlived their parents.
    """
    with _undisturbed():
        for timeout_s in timeouts_s:
            alive = [process for process in reversed(processes) if process.poll() is None]
            for process in alive:
                _signal_group(process, signal.SIGTERM)
            _wait(alive, timeout_s)
        for process in processes:
            _signal_group(process, signal.SIGKILL)
        _wait(processes, timeouts_s[0])


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    until_s = time.monotonic() + timeout_s
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until_s - time.monotonic()))


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM during the clean-up, which takes a limited time."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
        return
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
