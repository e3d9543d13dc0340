"""What goes into and what comes out of a `Membership`: its events and its effects.

Decides nothing.  Effects are carried out strictly in the order in which they are returned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gridtrain.protocol import messages as m


class RunPhase(StrEnum):
    """What people see."""

    WAITING = "waiting"
    TRAINING = "training"
    PAUSED = "paused"
    FINISHED = "finished"


# -- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Heard:
    peer: m.PeerId
    message: m.Message


@dataclass(frozen=True, slots=True)
class Up:
    peer: m.PeerId


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection broke; the peer may come back within `Deadlines.regreet_s`."""

    peer: m.PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Offended:
    """The peer sent something that is no message."""

    peer: m.PeerId
    reason: str


Event = Heard | Up | Lost | Offended


# -- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    peer: m.PeerId
    message: m.Message


@dataclass(frozen=True, slots=True)
class Journal:
    """Must be durable before any later effect is carried out.  `body` is JSON-able."""

    kind: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Dismiss:
    peer: m.PeerId


@dataclass(frozen=True, slots=True)
class Note:
    """One log line."""

    level: str
    event: str
    fields: dict[str, Any] = field(default_factory=dict)


Effect = Send | Journal | Dismiss | Note
