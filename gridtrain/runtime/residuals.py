"""Residuals that change hands: this worker's when it leaves, and others' that it takes over.

Decides nothing about who takes what, nor when it counts: the core does (`protocol.handover`).

    io.TakePiece, Inherit, Forget --> Inheritance --counting (in the picture)--> trainer: take
    trainer: hand_on ------ io.HandOn --> core --> io.Handed --> trainer
"""

from __future__ import annotations

from gridtrain.protocol import member_io as io
from gridtrain.protocol import messages as m
from gridtrain.runtime.handover import Inheritance
from gridtrain.runtime.meeting import Meeting
from gridtrain.wire.sparse import Sparse


class Residuals:
    """See the module's text.

    Attributes:
        inheritance: guarded by `Meeting.changed`.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self.inheritance = Inheritance()
        self._handed: io.Handed | None = None

    # -- the trainer's thread --------------------------------------------------------------------

    def allow(self, n: int) -> None:
        """The length of this worker's residual, which another one's may be added to."""
        with self._meeting.changed:
            self.inheritance.allow(n)

    def take(self) -> list[tuple[m.PeerId, Sparse]]:
        """What members that have left have handed over: to be added to this worker's residual now."""
        with self._meeting.changed:
            counting, self.inheritance.counting = self.inheritance.counting, []
        self._meeting.stir()
        return counting

    def last_call(self, timeout_s: float) -> None:
        """Take no more residuals over, and wait until those that were acknowledged count, or never will."""
        self._meeting.command(io.LastCall())
        self._meeting.wait(lambda picture: not picture.heir, timeout_s)

    @property
    def open_mass(self) -> float:
        """Sum of magnitudes of the residuals that were acknowledged and are not this worker's yet."""
        with self._meeting.changed:
            return self.inheritance.open_mass

    def hand_on(self, pieces: tuple[memoryview, ...], timeout_s: float) -> io.Handed | None:
        """Give this worker's residual to another one; None: nobody answered.  No step can follow."""
        self._meeting.command(io.HandOn(pieces))
        self._meeting.wait(lambda _: self._handed is not None, timeout_s)
        return self._handed

    # -- the loop's thread -----------------------------------------------------------------------

    def do(self, effect: io.TakePiece | io.Inherit | io.Forget | io.Handed) -> io.Inherited | None:
        """The event that follows at once.  Raises `RemoteProtocolError` for what cannot be a residual."""
        with self._meeting.changed:
            match effect:
                case io.TakePiece(peer, piece, world_size):
                    self._meeting.progress += 1
                    return io.Inherited(peer) if self.inheritance.take(peer, piece, world_size) else None
                case io.Inherit(peer):
                    self.inheritance.count(peer)
                case io.Forget(peer):
                    self.inheritance.forget(peer)
                case io.Handed():
                    self._handed = effect
                    self._meeting.changed.notify_all()
        return None
