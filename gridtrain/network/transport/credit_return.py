"""What was read from peers and not given back to them yet as credit.

Decides how much a peer may send on: as much as was dealt with of what it sent.  What the core holds of it
for later is not.  Never counts what may leave (`transport.credits` does).

    Received(peer, nbytes) --> came --> owed - held by the core --> transport.done(peer, ..)
"""

from __future__ import annotations

from collections.abc import Callable

from gridtrain.core.messages import PeerId
from gridtrain.network.transport.flow_control import FlowControlTransport


class CreditReturn:
    """See the module's text.  Used from the loop's thread alone."""

    def __init__(self, transport: FlowControlTransport) -> None:
        self._transport = transport
        self._bytes: dict[PeerId, int] = {}

    def record_received(self, peer: PeerId, nbytes: int) -> None:
        self._bytes[peer] = self._bytes.get(peer, 0) + nbytes

    def remove_peer(self, peer: PeerId) -> None:
        """Its connection is gone, and both ends begin to count anew."""
        self._bytes.pop(peer, None)

    def return_credit(self, held_bytes: Callable[[PeerId], int]) -> None:
        for peer, owed in list(self._bytes.items()):
            held = held_bytes(peer)
            if owed > held:
                self._transport.mark_processed(peer, owed - held)
                self._bytes[peer] = held
