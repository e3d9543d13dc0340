"""Every error that gridtrain raises on purpose.

A message says what happened, the value, the bound, the peer, and what to do next (`remedy`), so that a user
who reads only the last line of a traceback knows the next step.
"""

from __future__ import annotations


class GridtrainError(Exception):
    """Base of all errors of this package.

    Args:
        reason: what happened, with the value and the bound.
        remedy: the next thing to do; appended to the text after an arrow.

    Attributes:
        exit_code: of a process that ends with this error.
    """

    exit_code = 1

    def __init__(self, reason: str, *, remedy: str = "") -> None:
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{reason} -> {remedy}" if remedy else reason)


class RemoteProtocolError(GridtrainError):
    """A peer violated the protocol.  It is disconnected; this process goes on."""


class LocalProtocolError(GridtrainError):
    """This process violated the protocol: a bug in gridtrain.  It is never caught."""


class ConfigError(GridtrainError):
    """The user asked for something impossible or contradictory."""

    exit_code = 2


class LineBroken(GridtrainError):
    """A pipeline's attempt cannot go on: stage `peer`, if known, has failed, left, or sent invalid data."""

    def __init__(self, reason: str, peer: int | None = None, *, remedy: str = "") -> None:
        self.peer = peer
        super().__init__(reason, remedy=remedy)


class TransportError(GridtrainError):
    """An address cannot be bound or used, or a bounded queue is full."""


class CoordinatorUnreachable(GridtrainError):
    """Nobody answered at the coordinator's address in time."""

    exit_code = 3


class JoinRefused(GridtrainError):
    """The coordinator refused this worker; `code` is stable, the text is for people.

    A script that does not catch it ends with `exit_code`, as `gridtrain worker` does.
    """

    exit_code = 4

    def __init__(self, code: str, reason: str, *, remedy: str = "") -> None:
        self.code = code
        super().__init__(reason, remedy=remedy)


class NotAccepted(GridtrainError):
    """The volunteer has not consented to run the bundle that the run's owner serves."""

    exit_code = 5


class RunPaused(GridtrainError):
    """The run cannot go on now (for instance: a member failed and the coordinator is away)."""


class BudgetSpent(GridtrainError):
    """The bytes that this machine may send and receive in a day are used up."""


class JournalError(GridtrainError):
    """The coordinator's journal cannot be read or written."""
