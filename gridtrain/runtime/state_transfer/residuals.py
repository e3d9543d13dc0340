"""Residual transfer: this worker's residual when it leaves, and those of others that it accepts.

`gridtrain.core.member.residual_transfer` decides who accepts what, and when it counts.

    io.StoreResidualBlock, AddResidual, ... --> IncomingResiduals --AddResiduals (task)--> take_confirmed
    transfer --> io.TransferResidual --> core --> io.ResidualTransferEnded --> trainer
"""

from __future__ import annotations

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as io
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.mailbox.mailbox import Mailbox
from gridtrain.runtime.state_transfer.residual_pieces import IncomingResiduals


class ResidualExchange:
    """Both directions.

    Attributes:
        incoming: guarded by the mailbox's condition.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self.incoming = IncomingResiduals()
        self._transfer_result: io.ResidualTransferEnded | None = None

    # -- training thread -------------------------------------------------------------------------

    def set_length(self, n: int) -> None:
        """The number of elements of this worker's residual, to which another may be added."""
        with self._mailbox.condition:
            self.incoming.set_length(n)

    def take_confirmed(self) -> list[tuple[m.PeerId, SparseVector]]:
        """Residuals of members that have left, to be added to this worker's now."""
        with self._mailbox.condition:
            confirmed = self.incoming.take_confirmed()
        self._mailbox.mark_stale()
        return confirmed

    def stop_accepting(self, timeout_s: float) -> None:
        """Accept no more residuals, and wait until those that were acknowledged count, or never will."""
        self._mailbox.submit(io.RefuseResiduals())
        self._mailbox.wait(lambda snapshot: not snapshot.is_residual_recipient, timeout_s)

    @property
    def unconfirmed_magnitude(self) -> float:
        """Sum of magnitudes of the residuals that were acknowledged and do not count yet."""
        with self._mailbox.condition:
            return self.incoming.unconfirmed_magnitude

    def transfer(self, pieces: tuple[memoryview, ...], timeout_s: float) -> io.ResidualTransferEnded | None:
        """Give this worker's residual to another one; None: nobody answered.  No step may follow."""
        self._mailbox.submit(io.TransferResidual(pieces))
        self._mailbox.wait(lambda _: self._transfer_result is not None, timeout_s)
        return self._transfer_result

    # -- I/O thread ------------------------------------------------------------------------------

    def execute(
        self, effect: io.StoreResidualBlock | io.AddResidual | io.DropResidual | io.ResidualTransferEnded
    ) -> io.ResidualReceived | None:
        """Returns the event that follows.  Raises `RemoteProtocolError` for what cannot be a residual."""
        with self._mailbox.condition:
            match effect:
                case io.StoreResidualBlock(peer, piece, world_size):
                    self._mailbox.count_progress()
                    if self.incoming.receive_piece(peer, piece, world_size):
                        return io.ResidualReceived(peer)
                case io.AddResidual(peer):
                    self.incoming.confirm(peer)
                case io.DropResidual(peer):
                    self.incoming.remove_peer(peer)
                case io.ResidualTransferEnded():
                    self._transfer_result = effect
                    self._mailbox.condition.notify_all()
        return None
