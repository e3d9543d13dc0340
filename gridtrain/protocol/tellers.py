"""Which of the workers' words about links are heeded, and when they may lead to another order of ranks.

Decides whether a word counts, and who has to wait.  Never looks at a rate, and never plans (`topology`).

    introduced anna (1)      anna: to bert 10 MB/s     counts
                             anna: to bert  1 MB/s     does not: she has had her word since then
    introduced bert (1)      anna: to bert  1 MB/s     counts: bert's line may be another one now
    new order due to anna                              she brings about no other one for 30 s, then 60, 120 ..

Honest workers measure when they are introduced to their peers, so a word counts once for each time at which
one of the link's two ends was.  Who comes anew to be heard again brings generations about ever more rarely.
"""

from __future__ import annotations

from collections.abc import Sequence

from gridtrain.protocol.messages import PeerId

LONGEST_S = 86_400.0
MOST_REMEMBERED = 4096  # who brought orders about; they are remembered beyond their leaving

Rate = tuple[PeerId, float, float]  # as in `Rates`: to whom, there, back


class Tellers:
    """Bounded by what is known of links, and by `MOST_REMEMBERED`.

    Args:
        pause_s: between two orders that one worker brings about, the first time.
    """

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._introduced: dict[PeerId, int] = {}  # how often
        self._count = 0
        self._words: dict[tuple[PeerId, PeerId, bool], tuple[int, int]] = {}  # when it counted last
        self._news: set[PeerId] = set()
        self._waits: dict[PeerId, tuple[float, float]] = {}  # until when, and how long that is

    def introduced(self, peer: PeerId) -> None:
        """It is told to measure, and so are its links."""
        self._count += 1
        self._introduced[peer] = self._count

    def heeded(self, peer: PeerId, rates: Sequence[Rate]) -> list[Rate]:
        """What counts of its words; 0 takes the place of a rate that does not."""
        heeded = []
        for other, there_Bps, back_Bps in rates:
            there = there_Bps if there_Bps > 0 and self._counts(peer, other, True) else 0.0
            back = back_Bps if back_Bps > 0 and self._counts(peer, other, False) else 0.0
            if there or back:
                heeded.append((other, there, back))
        return heeded

    def changed(self, peer: PeerId) -> None:
        """Something that it told is new."""
        self._news.add(peer)

    def due(self, now_s: float) -> frozenset[PeerId]:
        """Who has told something new, and need not wait."""
        return frozenset(peer for peer in self._news if now_s >= self._waits.get(peer, (now_s, 0.0))[0])

    def looked(self, tellers: frozenset[PeerId], now_s: float, *, found: bool) -> None:
        """An order was looked for because of these; `found`: there is to be another one."""
        self._news -= tellers
        for peer in tellers if found else ():
            _, before_s = self._waits.pop(peer, (0.0, 0.0))
            wait_s = min(LONGEST_S, 2 * before_s or self._pause_s)
            self._waits[peer] = now_s + wait_s, wait_s
        while len(self._waits) > MOST_REMEMBERED:
            del self._waits[min(self._waits, key=lambda peer: self._waits[peer])]

    def planned(self) -> None:
        """Ranks are given anew, with all that is known."""
        self._news.clear()

    def forget(self, peer: PeerId) -> None:
        """It has left; how long it has to wait is kept."""
        self._introduced.pop(peer, None)
        self._words = {word: at for word, at in self._words.items() if peer not in word}
        self._news.discard(peer)

    def _counts(self, peer: PeerId, other: PeerId, there: bool) -> bool:
        at = self._introduced.get(peer, 0), self._introduced.get(other, 0)
        word = peer, other, there
        if self._words.get(word) == at:
            return False
        self._words[word] = at
        return True
