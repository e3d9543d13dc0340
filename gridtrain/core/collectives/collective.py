"""The interface between collectives (ring, butterfly, ...) and the I/O loop: events and effects.

A collective decides which rank sends which payload to which rank, and when; it never reads the contents of a
payload.  The values are in a collective buffer (`gridtrain.runtime.buffers`), which the loop owns.  The loop
executes effects strictly in the order in which they are returned, so `MergePayload` followed by `SendTo`
sends the merged payload.

         a payload                          effects, in order
    wire ------------> Collective.handle ------------------> loop: buffer.apply(effect)
                                                                   transport.send(buffer.payload(slot))

An effect that changes a buffer carries the `Provenance` of its payload.  The sender is held responsible even
for a payload that it has only forwarded, because every member checks a payload before merging, storing or
forwarding it.  If the buffer rejects a payload, the remaining effects of that round are not executed, so the
payload does not spread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from gridtrain.core.messages import PayloadSlot
from gridtrain.errors import RemoteProtocolError


@dataclass(frozen=True, slots=True)
class Provenance:
    """The sender of a payload, and bounds that the payload satisfies if all members are correct.

    Attributes:
        rank: rank of the sender, which may have forwarded another member's payload.
        contributors: maximum number of members whose contributions the payload sums.
        world_size: number of members of the round.
        roundings: maximum number of times that any value of the payload was rounded.
    """

    rank: int
    contributors: int
    world_size: int
    roundings: int


@dataclass(frozen=True, slots=True)
class SendTo:
    """Send the payload that the buffer holds at `slot` when this effect is executed."""

    to_rank: int
    slot: PayloadSlot
    flags: int


@dataclass(frozen=True, slots=True)
class AddSlice:
    """Add the payload to a slice: buffer[segment][slice] += payload."""

    segment: int
    slice: int
    payload: Any
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class StoreSlice:
    """Replace a slice with the payload: buffer[segment][slice] = payload."""

    segment: int
    slice: int
    payload: Any
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class StoreFromRank:
    """Store the payload of `rank`; at the end, the buffer sums all payloads in rank order."""

    rank: int
    payload: Any
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class MergePayload:
    """Merge a received payload into this member's payload: own = truncate(own + payload).

    A value or rounding error that is dropped at index i is added to this member's residual if and only if
    i % owner_modulus == owner_residue; with modulus 1 and residue 0, the member keeps all of them.
    """

    payload: Any
    owner_modulus: int
    owner_residue: int
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class ReplacePayload:
    """Replace this member's payload with the received payload, bit for bit."""

    payload: Any
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class CollectiveComplete:
    """This rank's part of the collective is complete; `flags` combines the flags of all contributions."""

    flags: int


BufferEffect = AddSlice | StoreSlice | StoreFromRank | MergePayload | ReplacePayload
CollectiveEffect = SendTo | BufferEffect | CollectiveComplete


class Collective(Protocol):
    """One exchange of a round on one channel, as seen by one member."""

    complete: bool

    def start(self) -> list[CollectiveEffect]: ...

    def handle(self, from_rank: int, slot: PayloadSlot, flags: int, payload: Any) -> list[CollectiveEffect]:
        """Process a payload of this round and channel, and return the effects to execute.

        A payload that arrives early is stored until it is due.

        Raises:
            RemoteProtocolError: the payload cannot belong to this collective, because its slot is impossible
                or belongs to another sender, or because a payload with this slot has already arrived.
        """
        ...

    def waiting_for(self) -> frozenset[int]:
        """Return the ranks whose payloads are awaited."""
        ...


class CollectiveBase:
    """State and helper methods that most collectives share.

    Args:
        name: name of the collective in error messages.
        flags: flags of this rank's contribution (`core.group.round_flags`).
    """

    __slots__ = ("_flags", "_label", "_rank", "_world_size", "complete")

    def __init__(self, name: str, rank: int, world_size: int, flags: int) -> None:
        self._label = f"{name}, rank {rank} of {world_size}"
        self._rank = rank
        self._world_size = world_size
        self._flags = int(flags)  # later combined with the flags of the contributions that have arrived
        self.complete = False

    def _check(
        self,
        from_rank: int,
        slot: PayloadSlot,
        due: tuple[int, PayloadSlot] | None,
        otherwise: str = "no further payload",
    ) -> None:
        check_expected(self._label, from_rank, slot, due, otherwise)

    def _provenance(self, from_rank: int, contributors: int, roundings: int) -> Provenance:
        return Provenance(from_rank, contributors, self._world_size, roundings)

    def _completed(self) -> list[CollectiveEffect]:
        self.complete = True
        return [CollectiveComplete(self._flags)]


def check_expected(
    name: str, from_rank: int, slot: PayloadSlot, due: tuple[int, PayloadSlot] | None, otherwise: str
) -> None:
    """Raise `RemoteProtocolError` unless the payload is the expected one.

    Args:
        name: name of the collective in the error message, for example "ring, rank 1 of 4".
        due: (sender's rank, slot) of the expected payload; None if no payload is expected.
        otherwise: text after "expected" in the error message if `due` is None.
    """
    if (from_rank, slot) != due:
        expected = otherwise if due is None else f"{due[1]} from rank {due[0]}"
        raise RemoteProtocolError(
            f"{name}: rank {from_rank} sent {slot}; expected {expected}",
            remedy="only a faulty or hostile peer sends a repeated or impossible slot",
        )
