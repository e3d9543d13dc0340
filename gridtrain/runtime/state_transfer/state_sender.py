"""What members of a generation that forms are given by this worker: its state, or a checkpoint on its disk.

Decides what the trainer is asked for, and what of that may still be given.  Never decides who gives to whom
(the core does), and never captures a state: the trainer's thread does.

    io.GiveState --> ask --> wanted, wanted_kept (in the picture) --> trainer: give, give_kept
                                                                           |
    StateOutlet: blocks to whoever asked, as the transport drains <-- fill +
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as io
from gridtrain.network.transport.interface import Transport
from gridtrain.runtime.mailbox.mailbox import Mailbox
from gridtrain.runtime.state_transfer.blobs import BlobSender, state_digest

Blobs = Sequence[bytes | memoryview]


@dataclass(slots=True)
class SuppliedState:
    """What the trainer has given: its state (generation, blobs, digest), and checkpoints from the disk."""

    captured: tuple[int, Blobs, bytes] | None = None
    checkpoints: list[tuple[m.CheckpointInfo, int, Blobs | None]] = field(default_factory=list)


class StateSender:
    """See the module's text."""

    def __init__(self, meeting: Mailbox) -> None:
        self._mailbox = meeting
        self._state_sender = BlobSender()
        self._checkpoint_senders: dict[
            m.CheckpointInfo, BlobSender
        ] = {}  # of checkpoints, for members of other stages
        self._generation = 0  # the generation of which all that is asked for in the outlets is
        self._supplied = SuppliedState()

    # -- the trainer's thread --------------------------------------------------------------------

    def supply_state(self, generation: int, blobs: Blobs) -> None:
        """The trainer captured its state for the joiners of `generation`."""
        digest = state_digest(blobs) if len(blobs) > 1 else b""
        with self._mailbox.condition:
            self._supplied.captured = (generation, blobs, digest)
        self._mailbox.mark_stale()

    def supply_checkpoint(self, held: m.CheckpointInfo, generation: int, blobs: Blobs | None) -> None:
        """A checkpoint on this worker's disk, read for a member that begins from it; None: it cannot be, and
        nobody is given it."""
        with self._mailbox.condition:
            self._supplied.checkpoints.append((held, generation, blobs))
        self._mailbox.mark_stale()

    # -- the loop's thread -----------------------------------------------------------------------

    def request(self, effect: io.SendState, term: int) -> None:
        """A member lacks it."""
        outlet = (
            self._state_sender
            if effect.checkpoint is None
            else self._checkpoint_senders.setdefault(effect.checkpoint, BlobSender())
        )
        outlet.request(
            effect.peer,
            term,
            effect.generation,
            whole=effect.is_whole,
            have=effect.blocks_received,
            digest=effect.digest_only,
        )

    @property
    def requested_state(self) -> tuple[int, bool]:
        """See `StateOutlet.wanted`."""
        return self._state_sender.requested

    @property
    def requested_checkpoint(self) -> tuple[int, m.CheckpointInfo] | None:
        """Generation, and the checkpoint that the trainer is to read."""
        wanted = (
            (outlet.requested[0], held)
            for held, outlet in self._checkpoint_senders.items()
            if outlet.requested[0]
        )
        return next(wanted, None)

    def take_supplied(self) -> SuppliedState:
        """What the trainer has given since; `fill` is to follow, when its commands from before are done."""
        with self._mailbox.condition:
            brought, self._supplied = self._supplied, SuppliedState()
        return brought

    def store_supplied(self, brought: SuppliedState, generation: int) -> None:
        """What was captured for another generation than this one is nobody's any more."""
        if brought.captured is not None and brought.captured[0] == generation:
            self._state_sender.store(*brought.captured)
        for held, asked_in, blobs in brought.checkpoints:
            if blobs is None:
                self._checkpoint_senders.pop(held, None)
            elif held in self._checkpoint_senders:
                self._checkpoint_senders[held].store(asked_in, blobs)

    def drop_other_generations(self, generation: int) -> None:
        """What was asked for in an earlier generation is of another seat, perhaps, and nobody's any more."""
        if generation == self._generation:
            return
        self._generation = generation
        self._state_sender.drop_other_generations(generation)
        for held, outlet in list(self._checkpoint_senders.items()):
            outlet.drop_other_generations(generation)
            if not outlet.requested[0]:
                del self._checkpoint_senders[held]

    def clear(self) -> None:
        """The generation has started: its members hold the state."""
        self._state_sender.clear()
        self._checkpoint_senders.clear()

    def has_data(self, transport: Transport) -> bool:
        """There is something to `pump`."""
        return any(outlet.has_data(transport) for outlet in self._senders)

    def send_pending(self, transport: Transport) -> int:
        """Send what the transport takes; returns how many blocks."""
        return sum(outlet.send_pending(transport) for outlet in self._senders)

    @property
    def _senders(self) -> list[BlobSender]:
        return [self._state_sender, *self._checkpoint_senders.values()]
