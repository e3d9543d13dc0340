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

from gridtrain.core.messages import PeerId

MAX_BACKOFF_S = 86_400.0
MAX_REMEMBERED = 4096  # who brought orders about; they are remembered beyond their leaving

LinkRate = tuple[PeerId, float, float]  # as in `Rates`: to whom, there, back


class LinkReports:
    """Bounded by what is known of links, and by `MOST_REMEMBERED`.

    Args:
        pause_s: between two orders that one worker brings about, the first time.
    """

    def __init__(self, pause_s: float) -> None:
        self._initial_backoff_s = pause_s
        self._introduction_of: dict[PeerId, int] = {}  # how often
        self._introduction_count = 0
        self._last_accepted: dict[tuple[PeerId, PeerId, bool], tuple[int, int]] = {}  # when it counted last
        self._changed_reporters: set[PeerId] = set()
        self._backoff: dict[PeerId, tuple[float, float]] = {}  # until when, and how long that is

    def record_introduction(self, peer: PeerId) -> None:
        """It is told to measure, and so are its links."""
        self._introduction_count += 1
        self._introduction_of[peer] = self._introduction_count

    def accept(self, peer: PeerId, rates: Sequence[LinkRate]) -> list[LinkRate]:
        """What counts of its words; 0 takes the place of a rate that does not."""
        heeded = []
        for other, there_Bps, back_Bps in rates:
            there = there_Bps if there_Bps > 0 and self._is_new(peer, other, True) else 0.0
            back = back_Bps if back_Bps > 0 and self._is_new(peer, other, False) else 0.0
            if there or back:
                heeded.append((other, there, back))
        return heeded

    def mark_changed(self, peer: PeerId) -> None:
        """Something that it told is new."""
        self._changed_reporters.add(peer)

    def due_reporters(self, now_s: float) -> frozenset[PeerId]:
        """Who has told something new, and need not wait."""
        return frozenset(
            peer for peer in self._changed_reporters if now_s >= self._backoff.get(peer, (now_s, 0.0))[0]
        )

    def record_evaluation(self, tellers: frozenset[PeerId], now_s: float, *, found: bool) -> None:
        """An order was looked for because of these; `found`: there is to be another one."""
        self._changed_reporters -= tellers
        for peer in tellers if found else ():
            _, before_s = self._backoff.pop(peer, (0.0, 0.0))
            wait_s = min(MAX_BACKOFF_S, 2 * before_s or self._initial_backoff_s)
            self._backoff[peer] = now_s + wait_s, wait_s
        while len(self._backoff) > MAX_REMEMBERED:
            del self._backoff[min(self._backoff, key=lambda peer: self._backoff[peer])]

    def clear_changes(self) -> None:
        """Ranks are given anew, with all that is known."""
        self._changed_reporters.clear()

    def forget(self, peer: PeerId) -> None:
        """It has left; how long it has to wait is kept."""
        self._introduction_of.pop(peer, None)
        self._last_accepted = {word: at for word, at in self._last_accepted.items() if peer not in word}
        self._changed_reporters.discard(peer)

    def _is_new(self, peer: PeerId, other: PeerId, there: bool) -> bool:
        at = self._introduction_of.get(peer, 0), self._introduction_of.get(other, 0)
        word = peer, other, there
        if self._last_accepted.get(word) == at:
            return False
        self._last_accepted[word] = at
        return True
