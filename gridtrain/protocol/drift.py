"""Whether all members still hold the same model: compared now and then, beside the training (promise 1).

Decides whose state is another one.  Never looks at a state, and never repairs one: who has drifted is told,
reports in the next generation that it does not hold the state, and gets it anew.

    every N steps   member --Fingerprint(step, digest of parameters, optimizer, settings)--> coordinator
    coordinator     all are here, or the next comparison has begun and most were here:
                    the largest party is right, of equal ones that with the lowest rank
                    --Drifted(step)--> the others, and another generation

Equal updates do not prove equal models: a memory may flip a bit, another kind of processor may round
otherwise, a script may change what it holds by itself.  Members go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from gridtrain.protocol.messages import PeerId
from gridtrain.protocol.round import largest_party

MOST_OPEN = 4
"""Comparisons that may be under way; an older one is given up."""


class Drift:
    """The comparisons of one generation.

    Args:
        members: in rank order.
    """

    def __init__(self, members: Sequence[PeerId] = ()) -> None:
        self._ranks = {peer: rank for rank, peer in enumerate(members)}
        self._told: dict[int, dict[int, bytes]] = {}  # by step and rank

    def tell(self, peer: PeerId, step: int, digest: bytes) -> list[PeerId]:
        """One member's; who has drifted, once it is known."""
        if peer not in self._ranks:
            return []
        wrong: list[PeerId] = []
        if step not in self._told:
            wrong += self._decide([old for old in self._told if old < step])
            if len(self._told) >= MOST_OPEN:
                del self._told[min(self._told)]
        self._told.setdefault(step, {})[self._ranks[peer]] = digest
        if len(self._told[step]) == len(self._ranks):
            wrong += self._decide([step])
        return wrong

    def _decide(self, steps: Sequence[int]) -> list[PeerId]:
        """By those who are here, if they are most."""
        wrong: list[PeerId] = []
        for step in steps:
            told = self._told[step]
            if 2 * len(told) > len(self._ranks):
                del self._told[step]
                ranks = drifted(told)
                wrong += [peer for peer, rank in self._ranks.items() if rank in ranks]
        return wrong


def drifted(digests: dict[int, bytes]) -> list[int]:
    """Ranks that hold something else than the largest party; of equal ones the one with the lowest rank."""
    return sorted(set(digests) - set(largest_party(digests)))
