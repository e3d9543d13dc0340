"""What has come of a state goes on to the next member that lacks it, block by block.

Decides what may leave now.  Whether it is the state is found out by whoever loads it, by the donor's digest.

    StateIntake   [table][1 MiB][1 MiB] ..     as they come
                     |
    PassingOutlet    +--> next member          from the block on that it asked for
"""

from __future__ import annotations

from gridtrain.errors import TransportError
from gridtrain.protocol.messages import PeerId, StateBlock
from gridtrain.runtime.statefeed import BACKLOG_BYTES, MAX_ASKS, StateIntake
from gridtrain.transport.base import Transport


class PassingOutlet:
    """See the module's text.  Used from the loop's thread alone."""

    def __init__(self, intake: StateIntake) -> None:
        self._intake = intake
        self._next: dict[PeerId, tuple[int, int, int]] = {}  # term, generation, the block that comes next
        self._asks = 0
        self._here = (0, 0)  # term and generation that these are of

    def ask(self, peer: PeerId, term: int, generation: int, have: int) -> None:
        """Bounded in each generation, as `StateOutlet.ask` is; one may end before it has started."""
        if (term, generation) != self._here:
            self._here, self._asks = (term, generation), 0
            self._next.clear()
        self._asks += 1
        if self._asks <= MAX_ASKS:
            self._next[peer] = (term, generation, have)

    def stop(self) -> None:
        """What was passed on is not the state, and what comes now does not go on from it: ask the donor."""
        self._next.clear()
        self._asks = MAX_ASKS

    def forget(self) -> None:
        """The generation has started."""
        self._next.clear()
        self._asks = 0
        self._intake.release()

    def ready(self, transport: Transport) -> bool:
        return any(
            self._intake.passable(generation, index) is not None and _has_room(transport, peer)
            for peer, (_, generation, index) in self._next.items()
        )

    def pump(self, transport: Transport) -> int:
        """Queue blocks up to the backlog's bound; returns how many."""
        sent = 0
        for peer, (term, generation, index) in list(self._next.items()):
            try:
                while _has_room(transport, peer):
                    block = self._intake.passable(generation, index)
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
