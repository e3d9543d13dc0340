"""The exceptions that gridtrain raises deliberately, and their exit codes.

A message says what happened, with the value, the bound and the peer, and what to do next (`remedy`), so that
the last line of a traceback tells users how to continue.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""The error numbers for a full disk and for an exhausted quota."""


class GridtrainError(Exception):
    """Base class of all errors of this package.

    Args:
        reason: what happened, with the value and the bound.
        remedy: what the user should do next; it is appended to the message after an arrow.

    Attributes:
        exit_code: the exit status of a process that ends with this error.
    """

    exit_code = 1

    def __init__(self, reason: str, *, remedy: str = "") -> None:
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{reason} -> {remedy}" if remedy else reason)


NEVER_SENT = "check that the peer runs the same version of gridtrain; a correct peer never sends this message"
"""The default remedy of a `RemoteProtocolError`."""


class RemoteProtocolError(GridtrainError):
    """A peer violated the protocol.  The peer is disconnected; this process continues."""

    def __init__(self, reason: str, *, remedy: str = NEVER_SENT) -> None:
        super().__init__(reason, remedy=remedy)


class LocalProtocolError(GridtrainError):
    """This process violated the protocol because of a bug in gridtrain."""


class ConfigError(GridtrainError):
    """A setting or an argument is invalid, or contradicts another one."""

    exit_code = 2


@contextmanager
def disk_errors(what: str, remedy: str) -> Iterator[None]:
    """Raise a `ConfigError` in place of an `OSError` in the `with` block.

    Args:
        what: what cannot be done, such as "run.toml cannot be read"; the system's reason follows it.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror or error}", remedy=remedy) from None


class DataError(GridtrainError):
    """A file of the data set cannot be read, or does not match the index.

    Args:
        kind: what happened, in a few words without a path or a URL, such as "HTTP 404".

    Attributes:
        summary: the file's name in the index and `kind`, for other members; "" if the file is unknown.
    """

    def __init__(self, reason: str, *, kind: str = "", remedy: str = "") -> None:
        self.kind, self.summary = kind, ""
        super().__init__(reason, remedy=remedy)


class LineBroken(GridtrainError):
    """A pipeline's attempt cannot continue because a stage failed, left or sent invalid data.

    Attributes:
        peer: the index of that stage; None if it is unknown.
    """

    def __init__(self, reason: str, peer: int | None = None, *, remedy: str = "") -> None:
        self.peer = peer
        super().__init__(reason, remedy=remedy)


class TransportError(GridtrainError):
    """An address cannot be bound or connected to, a peer is not connected, or a bounded queue is full."""


class AddressTaken(TransportError):
    """Another program is already listening on the address."""


class CoordinatorUnreachable(GridtrainError):
    """The coordinator did not answer in time at its address."""

    exit_code = 3


DISMISSED = "dismissed"
"""The code of `JoinRefused` for a worker that the coordinator has removed because it delayed the group or was
lost."""

STALLED = "stalled"
"""The code of a worker that was removed because its training loop made no progress while the other members
waited.  The worker rejoins when its loop continues; no `JoinRefused` with this code is raised."""

VERSION = "version"
"""The code of `JoinRefused` for a worker with another version of the protocol."""

MTU_REMEDY = (
    "if small messages arrive and large ones do not, a router on the way drops large packets: lower the MTU "
    "of this machine's network interface, for example to 1280, or let the routers pass ICMP; then try again"
)


class JoinRefused(GridtrainError):
    """The coordinator refused this worker; programs should evaluate `code`, because the text may change.

    A script that does not catch this error exits with status `exit_code`, as `gridtrain worker` does: 4; 1 if
    the code is `DISMISSED`, so that service managers start the worker again; or 0 if the run has ended while
    the agent's script was starting.
    """

    exit_code = 4

    def __init__(self, code: str, reason: str, *, remedy: str = "") -> None:
        self.code = code
        if code == DISMISSED:
            self.exit_code = GridtrainError.exit_code
        super().__init__(reason, remedy=remedy)


class NotAccepted(GridtrainError):
    """The volunteer has not consented to run the bundle that the run's owner serves."""

    exit_code = 5


class RunPaused(GridtrainError):
    """The run cannot continue at the moment, for example because a member failed while the coordinator is
    down."""


class BudgetSpent(GridtrainError):
    """This machine has reached its daily limit on bytes sent and received."""


class JournalError(GridtrainError):
    """The coordinator's journal cannot be read or written."""


def describe_type(value: object) -> str:
    """Return the name of a value's type with its article, such as "an int" or "a Linear"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"
