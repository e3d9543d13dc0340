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

from gridtrain.protocol import member_io as io
from gridtrain.protocol import messages as m
from gridtrain.runtime.meeting import Meeting
from gridtrain.runtime.statefeed import StateOutlet, state_digest
from gridtrain.transport.base import Transport

Blobs = Sequence[bytes | memoryview]


@dataclass(slots=True)
class Brought:
    """What the trainer has given: its state (generation, blobs, digest), and checkpoints from the disk."""

    captured: tuple[int, Blobs, bytes] | None = None
    kept: list[tuple[m.Held, int, Blobs | None]] = field(default_factory=list)


class Giving:
    """See the module's text."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._own = StateOutlet()
        self._kept: dict[m.Held, StateOutlet] = {}  # of checkpoints, for members of other stages
        self._asked_in = 0  # the generation of which all that is asked for in the outlets is
        self._brought = Brought()

    # -- the trainer's thread --------------------------------------------------------------------

    def give(self, generation: int, blobs: Blobs) -> None:
        """The trainer captured its state for the joiners of `generation`."""
        digest = state_digest(blobs) if len(blobs) > 1 else b""
        with self._meeting.changed:
            self._brought.captured = (generation, blobs, digest)
        self._meeting.stir()

    def give_kept(self, held: m.Held, generation: int, blobs: Blobs | None) -> None:
        """A checkpoint on this worker's disk, read for a member that begins from it; None: it cannot be, and
        nobody is given it."""
        with self._meeting.changed:
            self._brought.kept.append((held, generation, blobs))
        self._meeting.stir()

    # -- the loop's thread -----------------------------------------------------------------------

    def ask(self, effect: io.GiveState, term: int) -> None:
        """A member lacks it."""
        outlet = self._own if effect.kept is None else self._kept.setdefault(effect.kept, StateOutlet())
        outlet.ask(
            effect.peer,
            term,
            effect.generation,
            whole=effect.whole,
            have=effect.have,
            digest=effect.digest,
        )

    @property
    def wanted(self) -> tuple[int, bool]:
        """See `StateOutlet.wanted`."""
        return self._own.wanted

    @property
    def wanted_kept(self) -> tuple[int, m.Held] | None:
        """Generation, and the checkpoint that the trainer is to read."""
        wanted = ((outlet.wanted[0], held) for held, outlet in self._kept.items() if outlet.wanted[0])
        return next(wanted, None)

    def brought(self) -> Brought:
        """What the trainer has given since; `fill` is to follow, when its commands from before are done."""
        with self._meeting.changed:
            brought, self._brought = self._brought, Brought()
        return brought

    def fill(self, brought: Brought, generation: int) -> None:
        """What was captured for another generation than this one is nobody's any more."""
        if brought.captured is not None and brought.captured[0] == generation:
            self._own.fill(*brought.captured)
        for held, asked_in, blobs in brought.kept:
            if blobs is None:
                self._kept.pop(held, None)
            elif held in self._kept:
                self._kept[held].fill(asked_in, blobs)

    def forget_others(self, generation: int) -> None:
        """What was asked for in an earlier generation is of another seat, perhaps, and nobody's any more."""
        if generation == self._asked_in:
            return
        self._asked_in = generation
        self._own.forget_others(generation)
        for held, outlet in list(self._kept.items()):
            outlet.forget_others(generation)
            if not outlet.wanted[0]:
                del self._kept[held]

    def forget(self) -> None:
        """The generation has started: its members hold the state."""
        self._own.forget()
        self._kept.clear()

    def ready(self, transport: Transport) -> bool:
        """There is something to `pump`."""
        return any(outlet.ready(transport) for outlet in self._outlets)

    def pump(self, transport: Transport) -> int:
        """Send what the transport takes; returns how many blocks."""
        return sum(outlet.pump(transport) for outlet in self._outlets)

    @property
    def _outlets(self) -> list[StateOutlet]:
        return [self._own, *self._kept.values()]
