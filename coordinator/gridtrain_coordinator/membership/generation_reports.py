"""What the members tell a coordinator whose journal is older than the run (commit rule 11).

Decides which generation is the latest where the journal, a backup's, does not know it.  Never decides a
verdict: the members of that generation are frozen and report, as after any restart.

    journal: generation 7 of anna, bert       Seated(generation 9: anna, bert, clara)   told by anna, clara
                                              Seated(generation 12: dora)               told by dora, a liar
             leading: generation 9, by two voices against one

Every member is waited for that the journal or the leading tale names, so that one that is quick to lie does
not lead before the others are there.

Where a tale's term is higher, the coordinator raises its own, and a generation that runs is made anew.  Whom
the journal names is believed at once.  One invitation may make many keys, so all others together are believed
at most once in `RAISE_GAP_S`, then the highest of them; who is honest waits so long.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from gridtrain.core import messages as m

MAX_AHEAD = 1_000_000
"""Terms, or generations, that a journal may be behind; who tells of more is not believed."""

TERM_RAISE_INTERVAL_S = 30.0

GenerationReport = tuple[int, tuple[tuple[m.PeerId, int], ...], tuple[int, ...]]
"""Generation, its members with their shares in rank order, and its cuts where the model has stages."""


class GenerationReports:
    """See the module's text.  `known`: the members of the journal's last generation, `generation`."""

    def __init__(self, known: frozenset[m.PeerId] = frozenset(), generation: int = 0) -> None:
        self.journaled_members = known
        self.journaled_generation = generation
        self.highest_generation = 0  # the next generation is above this one
        self._reports: dict[m.PeerId, GenerationReport] = {}
        self._reporters: set[m.PeerId] = set()

    @property
    def is_journal_behind(self) -> bool:
        """Somebody knows of a later generation."""
        return bool(self._reporters)

    def record(self, peer: m.PeerId, seated: m.CurrentGeneration) -> bool:
        """False: it has told its tale before, and nobody may tell another one."""
        if peer in self._reporters:
            return False
        self._reporters.add(peer)
        self.highest_generation = max(self.highest_generation, seated.generation)
        if peer in dict(seated.members):
            self._reports[peer] = (seated.generation, seated.members, seated.stage_bounds)
        return True

    def most_reported(self, may_be: Callable[[tuple[int, ...]], bool]) -> GenerationReport | None:
        """What most tell; of equals the one of more members, then the later one.

        Args:
            may_be: whether the run's model may be cut so.
        """
        votes = Counter(tale for tale in self._reports.values() if may_be(tale[2]))
        return max(votes, key=lambda tale: (votes[tale], len(tale[1]), tale[0]), default=None)


class TermRaise:
    """When the term is raised because of what workers tell."""

    def __init__(self) -> None:
        self._reported_term = 0
        self._due_s = math.inf  # when the highest term that was told is heeded
        self._next_unknown_s = -math.inf  # not before, for the sake of strangers

    @property
    def deadline_s(self) -> float:
        """When `due` has something; infinite: never."""
        return self._due_s

    def record(self, term: int, *, known: bool, now_s: float) -> None:
        """`known`: the journal names who tells it."""
        self._reported_term = max(self._reported_term, term)
        self._due_s = min(self._due_s, now_s if known else max(now_s, self._next_unknown_s))
        if not known:
            self._next_unknown_s = max(self._next_unknown_s, self._due_s + TERM_RAISE_INTERVAL_S)

    def due_term(self, now_s: float) -> int | None:
        """The highest term that was told, if it is to be heeded now; None: nothing is."""
        if now_s < self._due_s:
            return None
        self._due_s = math.inf
        return self._reported_term


def is_credible(seated: m.CurrentGeneration, term: int, generation: int) -> bool:
    """No worker can know of so much more than the journal, nor of cuts that leave a stage empty."""
    cuts = seated.stage_bounds
    is_cut = not cuts or (cuts[0] == 0 and len(cuts) > 1 and all(a < b for a, b in pairwise(cuts)))
    return is_cut and seated.term <= term + MAX_AHEAD and seated.generation <= generation + MAX_AHEAD
