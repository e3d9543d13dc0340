"""What a collective says to the loop that runs it.

A collective (ring, all-gather, butterfly) decides who sends what to whom and when; it never
opens a payload.  The numbers live in a *workspace* (`gridtrain.runtime.buffers.collective_buffers`), which the loop
owns.  Effects are executed strictly in the order in which they are returned, so `MergeIn` followed
by `SendTo` sends the merged payload; nothing has to be fed back into the core.

         Arrived                      effects, in order
    wire --------> Collective.handle ------------------> loop: workspace.apply(effect)
                                                               transport.send(workspace.payload(place))

What changes a workspace comes with its `Source`: whoever sent the payload answers for it, also where
it only passed it on, because a payload is checked before it is merged, stored or sent on.  If
`apply` refuses it, the effects that follow in the same round are void: nothing of it travels further.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from gridtrain.core.messages import PayloadSlot
from gridtrain.errors import RemoteProtocolError


@dataclass(frozen=True, slots=True)
class PayloadReceived:
    """The one event: a payload of this round and channel came from `from_rank`."""

    from_rank: int
    slot: PayloadSlot
    skip: bool
    payload: Any


# -- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Provenance:
    """Who sent a payload, and what it is if everybody before was honest, the sender last.

    Attributes:
        rank: the sender's, which need not be the origin's.
        members: whose parts have been summed into it, at most.
        world_size: all members of the round.
        roundings: how often a value in it was rounded on its way, at most.
    """

    rank: int
    contributors: int
    world_size: int
    roundings: int


@dataclass(frozen=True, slots=True)
class SendTo:
    """Send what the workspace now holds for `place`."""

    to_rank: int
    slot: PayloadSlot
    skip: bool


@dataclass(frozen=True, slots=True)
class AddSlice:
    """Ring, reduce half: work[segment][slice] += payload."""

    segment: int
    slice: int
    payload: Any
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class StoreSlice:
    """Ring, gather half: work[segment][slice] = payload."""

    segment: int
    slice: int
    payload: Any
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class StoreFromRank:
    """All-gather: keep the payload of `rank`; the sum is taken in rank order at the end."""

    rank: int
    payload: Any
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class MergePayload:
    """Butterfly: mine = truncate(mine + payload); what is dropped or rounded at index i is kept
    here iff i % owner_modulus == owner_residue (1, 0: all of it is kept here)."""

    payload: Any
    owner_modulus: int
    owner_residue: int
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class ReplacePayload:
    """Butterfly, unfold: mine = payload, bit for bit."""

    payload: Any
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class CollectiveComplete:
    """The workspace now holds the whole update."""

    skip: bool


BufferEffect = AddSlice | StoreSlice | StoreFromRank | MergePayload | ReplacePayload
CollectiveEffect = SendTo | BufferEffect | CollectiveComplete


class Collective(Protocol):
    """One exchange of one round on one channel, as a member of rank `rank` sees it.

    `handle` raises `RemoteProtocolError` for a payload that cannot belong to this collective
    (wrong sender for the place, impossible place, the same place twice); an early one is held.
    """

    complete: bool

    def start(self, now_s: float) -> list[CollectiveEffect]: ...

    def handle(self, event: PayloadReceived, now_s: float) -> list[CollectiveEffect]: ...

    def waiting_for(self) -> frozenset[int]:
        """Ranks from which something is still missing for the next move."""
        ...


def check_expected(
    core: str, event: PayloadReceived, due: tuple[int, PayloadSlot] | None, otherwise: str = "nothing"
) -> None:
    """Whether this payload is the one that is due: of this place, and from the rank whose turn it is.

    Args:
        core: who asks, for the text: "ring, rank 1 of 4".
        due: (sender's rank, place); None: no such place is waited for (any more).
        otherwise: what to say for None.

    Raises:
        RemoteProtocolError: it is not: an impossible place, the same one twice, or another's turn.
    """
    if not _is_expected(event, due):
        expected = otherwise if due is None else f"{due[1]} from rank {due[0]}"
        raise RemoteProtocolError(
            f"{core}: rank {event.from_rank} sent {event.slot}; due was {expected}",
            remedy="drop that peer; a repeated or impossible place means a faulty or hostile one",
        )


def _is_expected(event: PayloadReceived, due: tuple[int, PayloadSlot] | None) -> bool:
    return (event.from_rank, event.slot) == due
