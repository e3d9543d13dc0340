"""The base class of transports layered over another transport: flow control, relayed connections, faults."""

from __future__ import annotations

from collections.abc import Sequence

from gridtrain.core.messages import PeerId
from gridtrain.network.transport.interface import Transport


class WrappingTransport:
    """Forwards the methods of `Transport` to the layer below; a layer overrides those that it changes.

    `hang_up`, `send` and `poll` are not defined because every layer implements its own.
    """

    def __init__(self, inner: Transport) -> None:
        self.me, self.traffic, self._inner = inner.me, inner.traffic, inner

    def listen(self, address: str) -> str:
        return self._inner.listen(address)

    def dial(self, peer: PeerId, address: str) -> None:
        self._inner.dial(peer, address)

    def reach(self, peer: PeerId, addresses: Sequence[str], timeout_s: float) -> None:
        self._inner.reach(peer, addresses, timeout_s)

    def connected(self, peer: PeerId) -> bool:
        return self._inner.connected(peer)

    def backlog_bytes(self, peer: PeerId) -> int:
        return self._inner.backlog_bytes(peer)

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._inner.close()
