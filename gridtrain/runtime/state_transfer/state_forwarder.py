"""Forwards a state to the next member that does not have it, block by block as the blocks arrive.

The member that loads the state compares it with the digest from the state source.

    BlobReceiver   [table][1 MiB][1 MiB] ..     blocks as they arrive
                      |
    StateForwarder    +--> next member          blocks from the first one that this member needs
"""

from __future__ import annotations

from gridtrain.core.messages import PeerId, StateBlock
from gridtrain.errors import TransportError
from gridtrain.network.transport.interface import Transport
from gridtrain.runtime.state_transfer.blobs import MAX_STATE_REQUESTS, BlobReceiver, has_room


class StateForwarder:
    """Forwards blocks to members that have requested them.  Only the I/O thread uses it."""

    def __init__(self, receiver: BlobReceiver) -> None:
        self._receiver = receiver
        self._next: dict[PeerId, tuple[int, int, int]] = {}  # term, generation, next block
        self._request_count = 0
        self._available = (0, 0)  # term and generation to which the requests belong

    def request(self, peer: PeerId, term: int, generation: int, blocks_received: int) -> None:
        """Start forwarding to a member that has requested the state and already has `blocks_received` blocks.

        At most `MAX_STATE_REQUESTS` requests are served in a generation.
        """
        if (term, generation) != self._available:
            self._available, self._request_count = (term, generation), 0
            self._next.clear()
        self._request_count += 1
        if self._request_count <= MAX_STATE_REQUESTS:
            self._next[peer] = (term, generation, blocks_received)

    def stop(self) -> None:
        """Stop forwarding.  Call this method when the state has proved invalid.

        The next member has to request the state from the state source.
        """
        self._next.clear()
        self._request_count = MAX_STATE_REQUESTS

    def clear(self) -> None:
        """Drop all requests and blocks.  Call this method when the generation has started."""
        self._next.clear()
        self._request_count = 0
        self._receiver.stop_forwarding()

    def has_data(self, transport: Transport) -> bool:
        return any(
            self._receiver.forwardable_block(generation, index) is not None and has_room(transport, peer)
            for peer, (_, generation, index) in self._next.items()
        )

    def send_pending(self, transport: Transport) -> int:
        """Send blocks until each peer's queue in the transport is full; return the number of blocks sent."""
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
                del self._next[peer]  # a peer that reconnects repeats its request
        return sent
