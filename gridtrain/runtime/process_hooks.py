"""Decides how a training script ends on SIGTERM, Ctrl-C or an error, and how its traceback is printed.

Handlers that the user has installed are not replaced.
"""

from __future__ import annotations

import atexit
import functools
import io
import os
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

from gridtrain.errors import GridtrainError, LocalProtocolError

_LIBRARIES = (
    str(Path(__file__).resolve().parents[1]) + os.sep,
    *{sysconfig.get_path(n) + os.sep for n in ("purelib", "platlib", "stdlib")},
    "<string>",
)
"""Folders of gridtrain, other installed packages and Python, and generated code, such as the `__init__` of a
dataclass; none of these is the user's script."""

_generators: WeakSet[Generator[Any, None, None]] = WeakSet()
_of_parent: list[Generator[Any, None, None]] = []
"""In a forked process, the generators of its parent.  They must not be closed, because the parent still uses
their data loaders' processes."""


def _keep_open() -> None:
    _of_parent.extend(_generators)
    _generators.clear()


os.register_at_fork(after_in_child=_keep_open)

Parameters = ParamSpec("Parameters")
Item = TypeVar("Item")


def closed_at_exit(
    make: Callable[Parameters, Generator[Item, None, None]],
) -> Callable[Parameters, Generator[Item, None, None]]:
    """Decorate a generator function, so that its unfinished generators are closed when the script exits.

    Otherwise, a generator in a global variable may be closed only after the interpreter has cleared modules
    that the generator still needs, such as those that define the exceptions in its `except` clauses.
    """

    @functools.wraps(make)
    def make_registered(*args: Parameters.args, **options: Parameters.kwargs) -> Generator[Item, None, None]:
        generator = make(*args, **options)
        _generators.add(generator)
        return generator

    return make_registered


@atexit.register
def _close_generators() -> None:
    for generator in list(_generators):
        with suppress(ValueError):  # another thread is executing it
            generator.close()


def install_sigterm_handler() -> None:
    """Make SIGTERM raise `SystemExit` in the script, so that this worker can leave the group properly."""
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit_on_signal)


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    sys.last_value = SystemExit(128 + number)  # the interpreter does not set it for a `SystemExit`
    raise sys.last_value


_HINTS = {
    "SafetensorError: Error while deserializing": (
        "a safetensors file is damaged or incomplete -> download it again, or copy it from another worker"
    ),
    "Expected more than 1 value per channel": (
        "a batch has a single sample, with which SyncBatchNorm, scripted layers and F.batch_norm cannot "
        "train -> use batch sizes that leave no batch with one sample, even at the end of a pass, or use "
        "BatchNorm1d, 2d or 3d"
    ),
}
"""Hints that gridtrain adds to the traceback of another library's error; each key is a part of the error."""


def install_error_hook() -> None:
    """Make an uncaught `GridtrainError` or Ctrl-C print one line instead of a traceback.

    A `GridtrainError` also sets the exit code.  A traceback is still printed for a `LocalProtocolError` and
    for any other error, followed by a hint if one in `_HINTS` matches.  If GRIDTRAIN_DEBUG is set, this
    function does nothing, so a traceback is printed for all errors.
    """
    if sys.excepthook is sys.__excepthook__ and not os.environ.get("GRIDTRAIN_DEBUG"):
        sys.excepthook = _format_error


def describe_end(error: BaseException | None) -> str:
    """Return a worker's reason for leaving the run when its script ends, with or without an error."""
    match error:
        case None | SystemExit(code=None | 0):
            return "the training script ended before the run"
        case KeyboardInterrupt():
            return "the training script was interrupted"
        case SystemExit(code=143):
            return "the training script was stopped (SIGTERM)"
        case SystemExit(code=code):
            return f"the training script failed with exit code {code if isinstance(code, int) else 1}"
        case GridtrainError(exit_code=code, reason=reason):
            return f"the training script failed with exit code {code}: {reason}"
    failure = f"{type(error).__name__}: {error}"
    return f"the training script failed with exit code 1 (traceback in its output): {failure}"


def uncaught_error() -> BaseException | None:
    """Return the error that ended this process's script, for use when the process exits.

    Returns None if no error ended the script, if the script called `sys.exit`, or in an interactive shell.
    """
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


def _format_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, KeyboardInterrupt):
        print("gridtrain: interrupted; this worker is leaving the run", file=sys.stderr)
    elif isinstance(error, GridtrainError) and not isinstance(error, LocalProtocolError):
        # torch.distributed buffers what this hook prints, and would drop it because of the SystemExit
        stream = sys.__stderr__ if isinstance(sys.stderr, io.StringIO) else sys.stderr
        print(f"gridtrain: {_place(trace)}{kind.__name__}: {error}", file=stream, flush=True)
        raise SystemExit(error.exit_code)  # the interpreter exits with this code instead of 1
    else:
        sys.__excepthook__(kind, error, trace)
        for text, hint in _HINTS.items():
            if text in f"{kind.__name__}: {error}":
                print(f"gridtrain: {_place(trace)}{hint}", file=sys.stderr)


def _place(trace: TracebackType | None) -> str:
    """Return a prefix with the script's file and line in which the error was raised; "" if there are none."""
    frames = [f for f in traceback.extract_tb(trace) if not f.filename.startswith(_LIBRARIES)]
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}: " if frames else ""
