"""Forwards a state that is still arriving to the next member that lacks it, block by block.

The member that loads it checks it against the state source's digest.

    BlobReceiver   [table][1 MiB][1 MiB] ..     as they arrive
                      |
    StateForwarder    +--> next member          from the block that it asked for
"""

from __future__ import annotations

from gridtrain.core.messages import PeerId, StateBlock
from gridtrain.errors import TransportError
from gridtrain.network.transport.interface import Transport
from gridtrain.runtime.state_transfer.blobs import MAX_STATE_REQUESTS, BlobReceiver, has_room


class StateForwarder:
    """Used by the I/O thread alone."""

    def __init__(self, receiver: BlobReceiver) -> None:
        self._receiver = receiver
        self._next: dict[PeerId, tuple[int, int, int]] = {}  # term, generation, next block
        self._request_count = 0
        self._available = (0, 0)  # term and generation of the above

    def request(self, peer: PeerId, term: int, generation: int, blocks_received: int) -> None:
        """Another member asks for the state; the number of requests in a generation is bounded."""
        if (term, generation) != self._available:
            self._available, self._request_count = (term, generation), 0
            self._next.clear()
        self._request_count += 1
        if self._request_count <= MAX_STATE_REQUESTS:
            self._next[peer] = (term, generation, blocks_received)

    def stop(self) -> None:
        """What was forwarded is not the state: the next member has to ask the state source."""
        self._next.clear()
        self._request_count = MAX_STATE_REQUESTS

    def clear(self) -> None:
        """The generation has started."""
        self._next.clear()
        self._request_count = 0
        self._receiver.stop_forwarding()

    def has_data(self, transport: Transport) -> bool:
        return any(
            self._receiver.forwardable_block(generation, index) is not None and has_room(transport, peer)
            for peer, (_, generation, index) in self._next.items()
        )

    def send_pending(self, transport: Transport) -> int:
        """Queue blocks up to the bound of the backlog; returns how many."""
        sent = 0
        for peer, (term, generation, index) in list(self._next.items()):
            try:
                while has_room(transport, peer):
                    block = self._receiver.forwardable_block(generation, index)
                    if block is None:
                        break
                    transport.send(peer, StateBlock(term, generation, index, *block))
                    index, sent = index + 1, sent + 1
                self._next[peer] = (term, generation, index)
            except TransportError:
                del self._next[peer]  # a peer that connects again asks again
        return sent
