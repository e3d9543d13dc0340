"""Declares the events that `Membership` handles, the effects that it returns, and the phases of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gridtrain.core import messages as m

Log = Callable[[str, str, Mapping[str, Any]], None]
"""A function that logs an event, given its level ("info", "warning" or "error"), name and fields."""


class RunPhase(StrEnum):
    """The phase of a run, as the status shows it; it remains TRAINING while generations change.

        WAITING, PAUSED     a generation starts                             ->  TRAINING
        all but FINISHED    all members are away, or a stage has no member  ->  PAUSED
        any, on a restart   the journal has a generation                    ->  PAUSED
        TRAINING, PAUSED    all members left permanently, or none of
                            them returned and other workers are present     ->  WAITING
        TRAINING, PAUSED    all members have reached the end                ->  FINISHED

    `RunState.enter_phase` changes the phase.
    """

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
    """A peer has connected from the address `host`."""

    peer: m.PeerId
    host: str = ""


@dataclass(frozen=True, slots=True)
class PeerDisconnected:
    """A connection broke; the peer may come back within `Deadlines.regreet_s`."""

    peer: m.PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class ProtocolViolation:
    """The peer broke the protocol."""

    peer: m.PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class DialBackResult:
    """The result of a `DialBack`.

    Attributes:
        address: the address at which the worker was reached; empty if all attempts failed.
    """

    peer: m.PeerId
    address: str


@dataclass(frozen=True, slots=True)
class WorkerRemoved:
    """The operator removed this worker, or it was removed because of violations."""

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
    """An entry for the journal, which must be durable before any later effect is carried out.

    Attributes:
        body: the content of the entry; JSON-serializable.
    """

    kind: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Disconnect:
    peer: m.PeerId


@dataclass(frozen=True, slots=True)
class DialBack:
    """Check at which of these addresses the worker can be reached; `DialBackResult` always follows."""

    peer: m.PeerId
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecordViolation:
    """Record that a worker broke the protocol; after repeated violations, the worker is removed from the run.

    Attributes:
        accuser: the member that reported the violation; None if the coordinator itself detected it.
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
