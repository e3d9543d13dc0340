"""Residuals that change hands: this worker's when it leaves, and others' that it takes over.

Decides nothing about who takes what, nor when it counts: the core does (`protocol.handover`).

    io.TakePiece, Inherit, Forget --> Inheritance --counting (in the picture)--> trainer: take
    trainer: hand_on ------ io.HandOn --> core --> io.Handed --> trainer
"""

from __future__ import annotations

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as io
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.mailbox.mailbox import Mailbox
from gridtrain.runtime.state_transfer.residual_pieces import IncomingResiduals


class ResidualExchange:
    """See the module's text.

    Attributes:
        inheritance: guarded by `Meeting.changed`.
    """

    def __init__(self, meeting: Mailbox) -> None:
        self._mailbox = meeting
        self.incoming = IncomingResiduals()
        self._transfer_result: io.ResidualTransferEnded | None = None

    # -- the trainer's thread --------------------------------------------------------------------

    def set_length(self, n: int) -> None:
        """The length of this worker's residual, which another one's may be added to."""
        with self._mailbox.condition:
            self.incoming.set_length(n)

    def take_confirmed(self) -> list[tuple[m.PeerId, SparseVector]]:
        """What members that have left have handed over: to be added to this worker's residual now."""
        with self._mailbox.condition:
            counting, self.incoming.confirmed = self.incoming.confirmed, []
        self._mailbox.mark_stale()
        return counting

    def stop_accepting(self, timeout_s: float) -> None:
        """Take no more residuals over, and wait until those that were acknowledged count, or never will."""
        self._mailbox.submit(io.RefuseResiduals())
        self._mailbox.wait(lambda picture: not picture.is_residual_recipient, timeout_s)

    @property
    def unconfirmed_magnitude(self) -> float:
        """Sum of magnitudes of the residuals that were acknowledged and are not this worker's yet."""
        with self._mailbox.condition:
            return self.incoming.unconfirmed_magnitude

    def transfer(self, pieces: tuple[memoryview, ...], timeout_s: float) -> io.ResidualTransferEnded | None:
        """Give this worker's residual to another one; None: nobody answered.  No step can follow."""
        self._mailbox.submit(io.TransferResidual(pieces))
        self._mailbox.wait(lambda _: self._transfer_result is not None, timeout_s)
        return self._transfer_result

    # -- the loop's thread -----------------------------------------------------------------------

    def execute(
        self, effect: io.StoreResidualBlock | io.AddResidual | io.DropResidual | io.ResidualTransferEnded
    ) -> io.ResidualReceived | None:
        """The event that follows at once.  Raises `RemoteProtocolError` for what cannot be a residual."""
        with self._mailbox.condition:
            match effect:
                case io.StoreResidualBlock(peer, piece, world_size):
                    self._mailbox.progress += 1
                    return (
                        io.ResidualReceived(peer)
                        if self.incoming.receive_piece(peer, piece, world_size)
                        else None
                    )
                case io.AddResidual(peer):
                    self.incoming.confirm(peer)
                case io.DropResidual(peer):
                    self.incoming.remove_peer(peer)
                case io.ResidualTransferEnded():
                    self._transfer_result = effect
                    self._mailbox.condition.notify_all()
        return None
