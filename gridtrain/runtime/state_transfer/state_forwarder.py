"""What has come of a state goes on to the next member that lacks it, block by block.

Decides what may leave now.  Whether it is the state is found out by whoever loads it, by the donor's digest.

    StateIntake   [table][1 MiB][1 MiB] ..     as they come
                     |
    PassingOutlet    +--> next member          from the block on that it asked for
"""

from __future__ import annotations

from gridtrain.core.messages import PeerId, StateBlock
from gridtrain.errors import TransportError
from gridtrain.network.transport.interface import Transport
from gridtrain.runtime.state_transfer.blobs import BACKLOG_BYTES, MAX_STATE_REQUESTS, BlobReceiver


class StateForwarder:
    """See the module's text.  Used from the loop's thread alone."""

    def __init__(self, intake: BlobReceiver) -> None:
        self._receiver = intake
        self._next: dict[PeerId, tuple[int, int, int]] = {}  # term, generation, the block that comes next
        self._request_counts = 0
        self._available = (0, 0)  # term and generation that these are of

    def request(self, peer: PeerId, term: int, generation: int, have: int) -> None:
        """Bounded in each generation, as `StateOutlet.ask` is; one may end before it has started."""
        if (term, generation) != self._available:
            self._available, self._request_counts = (term, generation), 0
            self._next.clear()
        self._request_counts += 1
        if self._request_counts <= MAX_STATE_REQUESTS:
            self._next[peer] = (term, generation, have)

    def stop(self) -> None:
        """What was passed on is not the state, and what comes now does not go on from it: ask the donor."""
        self._next.clear()
        self._request_counts = MAX_STATE_REQUESTS

    def clear(self) -> None:
        """The generation has started."""
        self._next.clear()
        self._request_counts = 0
        self._receiver.stop_forwarding()

    def has_data(self, transport: Transport) -> bool:
        return any(
            self._receiver.forwardable_block(generation, index) is not None and _has_room(transport, peer)
            for peer, (_, generation, index) in self._next.items()
        )

    def send_pending(self, transport: Transport) -> int:
        """Queue blocks up to the backlog's bound; returns how many."""
        sent = 0
        for peer, (term, generation, index) in list(self._next.items()):
            try:
                while _has_room(transport, peer):
                    block = self._receiver.forwardable_block(generation, index)
                    if block is None:
                        break
                    transport.send(peer, StateBlock(term, generation, index, *block))
                    index, sent = index + 1, sent + 1
                self._next[peer] = (term, generation, index)
            except TransportError:
                del self._next[peer]  # when it is connected again it asks again
        return sent


def _has_room(transport: Transport, peer: PeerId) -> bool:
    return transport.backlog_bytes(peer) < BACKLOG_BYTES
