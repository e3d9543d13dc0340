"""What is asked of this worker's disk, on which checkpoints of stages lie.

Decides what of that still stands.  Never reads or writes a checkpoint: the trainer's thread does, and copies
go from file to file (`runtime.copies`).

    io.PutAside, io.Reload, io.Discard --> the picture --> trainer: put_aside, cannot_reload, discarded
    io.SendCopy, io.TakeCopy           --> Copies      --> the next stage's disk, and ours
"""

from __future__ import annotations

import math

from gridtrain.protocol import member_io as io
from gridtrain.protocol import messages as m
from gridtrain.runtime.copies import Copies, CopyDisk
from gridtrain.runtime.meeting import Meeting
from gridtrain.transport.base import Transport


class DiskDuties:
    """See the module's text.

    Args:
        rate_Bps: see `Copies`.

    Attributes:
        aside, discard_after: see `Picture`.
    """

    def __init__(self, meeting: Meeting, rate_Bps: float | None) -> None:
        self._meeting, self._rate_Bps = meeting, rate_Bps
        self._copies: Copies | None = None
        self._reload: io.Reload | None = None
        self.aside: m.Held | None = None
        self.discard_after: int | None = None

    # -- the trainer's thread --------------------------------------------------------------------

    def attach(self, disk: CopyDisk, max_bytes: int) -> None:
        """Where copies of other stages' checkpoints go, and ours are; before this worker enters the group."""
        if self._copies is None:
            self._copies = Copies(disk, self._rate_Bps, max_bytes)

    def cannot_reload(self, states: tuple[m.Held, ...]) -> None:
        """What was to be loaded cannot be; these are on the disk."""
        with self._meeting.changed:
            self._reload = None
        self._meeting.command(io.Keeping(states))

    def put_aside(self, held: m.Held) -> None:
        """It is on the disk, or cannot be."""
        with self._meeting.changed:
            if self.aside == held:
                self.aside = None
        self._meeting.stir()

    def discarded(self, after: int) -> None:
        """No checkpoint after this step is on the disk any more."""
        with self._meeting.changed:
            if self.discard_after == after:
                self.discard_after = None
        self._meeting.stir()

    # -- the loop's thread -----------------------------------------------------------------------

    def do(self, effect: io.PutAside | io.Reload | io.Discard | io.SendCopy | io.TakeCopy) -> None:
        """Raises `RemoteProtocolError` for a block of a copy that does not fit the others."""
        match effect:
            case io.PutAside(held):
                self.aside = held
            case io.Reload():
                self._reload = effect
            case io.Discard(after):
                self.discard_after = after
            case io.SendCopy() if self._copies is not None:
                self._copies.send(effect)
            case io.TakeCopy(_, copied) if self._copies is not None:
                with self._meeting.changed:
                    self._meeting.progress += 1
                self._copies.take(copied)

    def reload_in(self, term: int, generation: int, *, synced: bool) -> io.Reload | None:
        """What is to be loaded now: of another generation, or where the state is there, it is forgotten."""
        reload = self._reload
        if reload is None or synced or (reload.term, reload.generation) != (term, generation):
            reload = self._reload = None
        return reload

    @property
    def due_s(self) -> float:
        """When there is something to send."""
        return self._copies.due_s if self._copies is not None else math.inf

    def pump(self, transport: Transport, now_s: float, generation: int) -> int:
        """Send a block of a copy if it is time; returns how many."""
        return self._copies.turn(transport, now_s, generation) if self._copies is not None else 0
