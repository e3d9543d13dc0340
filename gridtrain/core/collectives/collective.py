"""Interface between a collective and the loop that runs it.

A collective (ring, all-gather, butterfly) decides who sends what to whom and when; it opens no payload.  The
numbers are in a collective buffer (`gridtrain.runtime.buffers`), which the loop owns.  Effects are executed
strictly in the order in which they are returned, so `MergePayload` followed by `SendTo` sends the merged
payload.

       PayloadReceived                      effects, in order
    wire ------------> Collective.handle ------------------> loop: buffer.apply(effect)
                                                                   transport.send(buffer.payload(slot))

An effect that changes a buffer carries its `Provenance`: the sender of a payload is responsible for it even
where it only forwarded it, because a payload is checked before it is merged, stored or sent on.  If the
buffer refuses a payload, the following effects of the same round are void: nothing of it travels further.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from gridtrain.core.messages import PayloadSlot
from gridtrain.errors import RemoteProtocolError


@dataclass(frozen=True, slots=True)
class PayloadReceived:
    """The only event: a payload of this round and channel arrived from `from_rank`."""

    from_rank: int
    slot: PayloadSlot
    skip: bool
    payload: Any


# -- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Provenance:
    """The sender of a payload, and what the payload is if all members were honest.

    Attributes:
        rank: the sender's, which need not be the origin's.
        contributors: largest number of members whose contributions are summed in it.
        world_size: number of members of the round.
        roundings: largest number of times that a value in it was rounded.
    """

    rank: int
    contributors: int
    world_size: int
    roundings: int


@dataclass(frozen=True, slots=True)
class SendTo:
    """Send what the buffer now holds at `slot`."""

    to_rank: int
    slot: PayloadSlot
    skip: bool


@dataclass(frozen=True, slots=True)
class AddSlice:
    """buffer[segment][slice] += payload."""

    segment: int
    slice: int
    payload: Any
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class StoreSlice:
    """buffer[segment][slice] = payload."""

    segment: int
    slice: int
    payload: Any
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class StoreFromRank:
    """Store the payload of `rank`; the sum is taken in rank order at the end."""

    rank: int
    payload: Any
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class MergePayload:
    """own = truncate(own + payload).  What is dropped or rounded at index i goes to this member's residual
    iff i % owner_modulus == owner_residue (1, 0: all of it)."""

    payload: Any
    owner_modulus: int
    owner_residue: int
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class ReplacePayload:
    """own = payload, bit for bit."""

    payload: Any
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class CollectiveComplete:
    """The buffer holds the whole update.  `skip`: a contribution to it is not finite."""

    skip: bool


BufferEffect = AddSlice | StoreSlice | StoreFromRank | MergePayload | ReplacePayload
CollectiveEffect = SendTo | BufferEffect | CollectiveComplete


class Collective(Protocol):
    """One exchange of one round on one channel, as one member sees it.

    `handle` raises `RemoteProtocolError` for a payload that cannot belong to this collective (wrong sender
    for the slot, impossible slot, the same slot twice); an early one is held.
    """

    complete: bool

    def start(self, now_s: float) -> list[CollectiveEffect]: ...

    def handle(self, event: PayloadReceived, now_s: float) -> list[CollectiveEffect]: ...

    def waiting_for(self) -> frozenset[int]:
        """Ranks whose payloads are awaited."""
        ...


class CollectiveBase:
    """State that collectives have in common.

    Args:
        name: of the collective, for error texts.
        skip: this rank's contribution is not finite.
    """

    __slots__ = ("_name", "_rank", "_skip", "_world_size", "complete")

    def __init__(self, name: str, rank: int, world_size: int, skip: bool) -> None:
        self._name = name
        self._rank = rank
        self._world_size = world_size
        self._skip = skip  # and later, whether any contribution that has arrived is not finite
        self.complete = False

    @property
    def _label(self) -> str:
        return f"{self._name}, rank {self._rank} of {self._world_size}"

    def _check(
        self,
        event: PayloadReceived,
        due: tuple[int, PayloadSlot] | None,
        otherwise: str = "nothing (more) here",
    ) -> None:
        check_expected(self._label, event, due, otherwise)

    def _provenance(self, event: PayloadReceived, contributors: int, roundings: int) -> Provenance:
        return Provenance(event.from_rank, contributors, self._world_size, roundings)

    def _completed(self) -> list[CollectiveEffect]:
        self.complete = True
        return [CollectiveComplete(self._skip)]


def check_expected(
    core: str, event: PayloadReceived, due: tuple[int, PayloadSlot] | None, otherwise: str = "nothing"
) -> None:
    """Raise `RemoteProtocolError` unless this payload is the one that is due.

    Args:
        core: the collective, for the text: "ring, rank 1 of 4".
        due: (sender's rank, slot); None: no payload is due there.
        otherwise: text for None.
    """
    if not _is_expected(event, due):
        expected = otherwise if due is None else f"{due[1]} from rank {due[0]}"
        raise RemoteProtocolError(
            f"{core}: rank {event.from_rank} sent {event.slot}; due was {expected}",
            remedy="drop that peer; a repeated or impossible slot means a faulty or hostile one",
        )


def _is_expected(event: PayloadReceived, due: tuple[int, PayloadSlot] | None) -> bool:
    return (event.from_rank, event.slot) == due
