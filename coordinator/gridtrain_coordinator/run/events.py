"""Events that `Membership` handles, and effects that it returns, to be carried out in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gridtrain.core import messages as m

Log = Callable[[str, str, Mapping[str, Any]], None]
"""(level, event, fields), level one of "info", "warning", "error"."""


class RunPhase(StrEnum):
    """Phase of a run, as people see it."""

    WAITING = "waiting"
    TRAINING = "training"
    PAUSED = "paused"
    FINISHED = "finished"


# -- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MessageReceived:
    peer: m.PeerId
    message: m.Message


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """`host`: the address from which the connection comes."""

    peer: m.PeerId
    host: str = ""


@dataclass(frozen=True, slots=True)
class PeerDisconnected:
    """The connection broke; the peer may come back within `Deadlines.regreet_s`."""

    peer: m.PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class ProtocolViolation:
    """The peer broke the protocol."""

    peer: m.PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class DialBackResult:
    """Answer to `DialBack`: the address at which the worker was reached; empty: at none."""

    peer: m.PeerId
    address: str


@dataclass(frozen=True, slots=True)
class WorkerRemoved:
    """The operator removed this worker, or it was removed for violations."""

    peer: m.PeerId
    code: str
    reason: str
    remedy: str


Event = (
    MessageReceived | PeerConnected | PeerDisconnected | ProtocolViolation | DialBackResult | WorkerRemoved
)


# -- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    peer: m.PeerId
    message: m.Message


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """Must be durable before any later effect is carried out.  `body` is JSON-able."""

    kind: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Disconnect:
    peer: m.PeerId


@dataclass(frozen=True, slots=True)
class DialBack:
    """Find out at which of these addresses the worker can be reached; `DialBackResult` always follows."""

    peer: m.PeerId
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecordViolation:
    """The worker broke the protocol; violations are counted as long as the worker is known.

    `accuser`: the member that reports it; None: the coordinator saw it.
    """

    peer: m.PeerId
    reason: str
    accuser: m.PeerId | None = None


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One log line."""

    level: str
    event: str
    fields: dict[str, Any] = field(default_factory=dict)


Effect = Send | JournalEntry | Disconnect | DialBack | RecordViolation | LogEvent
