"""Passes residuals between the training thread, the core and other workers without making any decisions.

`gridtrain.core.member.residual_recipients` decides which worker accepts a residual, and when the residual is
confirmed.

    ev.StoreResidualBlock, AddResidual, ... --> IncomingResiduals --AddResiduals (task)--> take_confirmed
    transfer --> ev.TransferResidual --> core --> ev.ResidualTransferEnded --> trainer
"""

from __future__ import annotations

from gridtrain.core.group import member_events as ev
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.mailbox.mailbox import Mailbox
from gridtrain.runtime.state_transfer.residual_pieces import IncomingResiduals


class ResidualMailbox:
    """Sends and receives residuals.

    Attributes:
        incoming: stores the residuals of other workers; the mailbox's condition guards it.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self.incoming = IncomingResiduals()
        self._transfer_result: ev.ResidualTransferEnded | None = None

    # -- training thread -------------------------------------------------------------------------

    def take_confirmed(self) -> list[tuple[str, SparseVector]]:
        """Take the confirmed residuals, each with the name of the worker that sent it.  The caller adds
        them to this worker's residual."""
        with self._mailbox.condition:
            confirmed = self.incoming.take_confirmed()
        self._mailbox.mark_stale()
        return confirmed

    def stop_accepting(self, timeout_s: float) -> None:
        """Accept no more residuals; wait until each acknowledged residual is confirmed or dropped.

        Returns after at most `timeout_s`.
        """
        self._mailbox.submit(ev.RefuseResiduals())
        self._mailbox.wait(lambda snapshot: not snapshot.is_residual_recipient, timeout_s)

    @property
    def unconfirmed_magnitude(self) -> float:
        """The sum of the magnitudes of all entries in residuals that are acknowledged but not confirmed."""
        with self._mailbox.condition:
            return self.incoming.unconfirmed_magnitude

    def transfer(self, pieces: tuple[memoryview, ...], timeout_s: float) -> ev.ResidualTransferEnded | None:
        """Transfer this worker's residual to another worker; return the result, or None after `timeout_s`.

        After this call, this worker must not take part in any step.
        """
        self._mailbox.submit(ev.TransferResidual(pieces))
        self._mailbox.wait(lambda _: self._transfer_result is not None, timeout_s)
        return self._transfer_result

    # -- I/O thread ------------------------------------------------------------------------------

    def execute(
        self, effect: ev.StoreResidualBlock | ev.AddResidual | ev.DropResidual | ev.ResidualTransferEnded
    ) -> ev.ResidualReceived | None:
        """Execute an effect; return the event that results from it, or None.

        Raises `RemoteProtocolError` if a received residual is invalid.
        """
        with self._mailbox.condition:
            match effect:
                case ev.StoreResidualBlock(peer, piece, world_size):
                    self._mailbox.count_progress()
                    if self.incoming.receive_piece(peer, piece, world_size):
                        return ev.ResidualReceived(peer)
                case ev.AddResidual(peer, name):
                    self.incoming.confirm(peer, name)
                case ev.DropResidual(peer):
                    self.incoming.remove_peer(peer)
                case ev.ResidualTransferEnded():
                    self._transfer_result = effect
                    self._mailbox.condition.notify_all()
        return None
