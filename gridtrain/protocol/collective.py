"""What a collective says to the loop that runs it.

A collective (ring, all-gather, butterfly) decides who sends what to whom and when; it never
opens a payload.  The numbers live in a *workspace* (`gridtrain.runtime.buffers`), which the loop
owns.  Effects are executed strictly in the order in which they are returned, so `MergeIn` followed
by `SendTo` sends the merged payload; nothing has to be fed back into the core.

         Arrived                      effects, in order
    wire --------> Collective.handle ------------------> loop: workspace.apply(effect)
                                                               transport.send(workspace.payload(place))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from gridtrain.protocol.messages import Place


@dataclass(frozen=True, slots=True)
class Arrived:
    """The one event: a payload of this round and channel came from `from_rank`."""

    from_rank: int
    place: Place
    skip: bool
    payload: Any


# -- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendTo:
    """Send what the workspace now holds for `place`."""

    to_rank: int
    place: Place
    skip: bool


@dataclass(frozen=True, slots=True)
class AddSlice:
    """Ring, reduce half: work[segment][slice] += payload."""

    segment: int
    slice: int
    payload: Any


@dataclass(frozen=True, slots=True)
class StoreSlice:
    """Ring, gather half: work[segment][slice] = payload."""

    segment: int
    slice: int
    payload: Any


@dataclass(frozen=True, slots=True)
class StoreOf:
    """All-gather: keep the payload of `rank`; the sum is taken in rank order at the end."""

    rank: int
    payload: Any


@dataclass(frozen=True, slots=True)
class MergeIn:
    """Butterfly: mine = truncate(mine + payload); what is dropped or rounded at index i is kept
    here iff i % owner_modulus == owner_residue (1, 0: all of it is kept here)."""

    payload: Any
    owner_modulus: int
    owner_residue: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """Butterfly, unfold: mine = payload, bit for bit."""

    payload: Any


@dataclass(frozen=True, slots=True)
class Complete:
    """The workspace now holds the whole update."""

    skip: bool


WorkspaceEffect = AddSlice | StoreSlice | StoreOf | MergeIn | Adopt
CollectiveEffect = SendTo | WorkspaceEffect | Complete


class Collective(Protocol):
    """One exchange of one round on one channel, as a member of rank `rank` sees it.

    `handle` raises `RemoteProtocolError` for a payload that cannot belong to this collective
    (wrong sender for the place, impossible place, the same place twice); an early one is held.
    """

    complete: bool

    def start(self, now_s: float) -> list[CollectiveEffect]: ...

    def handle(self, event: Arrived, now_s: float) -> list[CollectiveEffect]: ...

    def waiting_for(self) -> frozenset[int]:
        """Ranks from which something is still missing for the next move."""
        ...
