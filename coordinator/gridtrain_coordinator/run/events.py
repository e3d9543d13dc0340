"""What goes into and what comes out of a `Membership`: its events and its effects.

Decides nothing.  Effects are carried out strictly in the order in which they are returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gridtrain.core import messages as m

Log = Callable[[str, str, Mapping[str, Any]], None]
"""(level, event, fields), level one of "info", "warning", "error"."""


class RunPhase(StrEnum):
    """What people see."""

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
    """`host`: where the connection comes from."""

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
    """Answer to `CallBack`: the address that got through; empty: none did."""

    peer: m.PeerId
    address: str


@dataclass(frozen=True, slots=True)
class WorkerRemoved:
    """The operator, or its third strike, has put this worker out for good."""

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
    """Find out which of these addresses reaches the worker; `CalledBack` answers, always."""

    peer: m.PeerId
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecordViolation:
    """The worker broke the protocol: a strike against it, to be counted over its whole stay.

    `accuser`: the member that says so; None: the coordinator saw it.
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
