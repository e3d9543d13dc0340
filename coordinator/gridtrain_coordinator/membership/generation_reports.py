"""Decides which generation counts when members report one that is not in the journal (commit rule 11).

    journal: generation 7 of anna, bert       reported: generation 9 of anna, bert, clara    by anna, clara
                                                        generation 12 of dora                by dora, falsely
             most reported: generation 9, two reports against one

The coordinator waits for all members named by the journal or by the most reported generation, so that a false
report does not win by arriving before the others.

If a reported term is higher, the coordinator raises its own term and makes a new generation.  Reports by
workers named in the journal take effect immediately.  One invitation may admit many keys, so the reports of
all other workers take effect at most once per `TERM_RAISE_INTERVAL_S`, with the highest of their terms.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from gridtrain.core import messages as m

MAX_AHEAD = 1_000_000
"""How many terms or generations a journal may be behind; reports that exceed this are rejected."""

TERM_RAISE_INTERVAL_S = 30.0

GenerationReport = tuple[int, tuple[tuple[m.PeerId, int], ...], tuple[int, ...]]
"""The number of a generation, its members with their shares in rank order, and its stage bounds."""


class GenerationReports:
    """The reports of generations that the journal does not contain.

    Args:
        members: the members of the journal's last generation.
        generation: the journal's last generation.
    """

    def __init__(self, members: frozenset[m.PeerId] = frozenset(), generation: int = 0) -> None:
        self.highest_generation = 0  # the next generation's number must be higher
        self.begin(members, generation)

    def begin(self, members: frozenset[m.PeerId], generation: int) -> None:
        """Discard all reports; the arguments have the same meaning as those of the class."""
        self.journaled_members = members
        self.journaled_generation = generation
        self._reports: dict[m.PeerId, GenerationReport] = {}
        self._reporters: set[m.PeerId] = set()

    @property
    def is_journal_behind(self) -> bool:
        """Whether a worker has reported a later generation."""
        return bool(self._reporters)

    def record(self, peer: m.PeerId, claim: m.CurrentGeneration) -> bool:
        """Record a worker's first report; return False and ignore the report if it is not the first."""
        if peer in self._reporters:
            return False
        self._reporters.add(peer)
        self.highest_generation = max(self.highest_generation, claim.generation)
        if peer in dict(claim.members):
            self._reports[peer] = (claim.generation, claim.members, claim.stage_bounds)
        return True

    def most_reported(self, is_valid: Callable[[tuple[int, ...]], bool]) -> GenerationReport | None:
        """Return the generation reported by the most workers; None if there is none.

        Ties are broken in favour of the generation with more members, then the later generation.

        Args:
            is_valid: a function that checks whether the given stage bounds are possible for the run's model.
        """
        votes = Counter(report for report in self._reports.values() if is_valid(report[2]))
        return max(votes, key=lambda report: (votes[report], len(report[1]), report[0]), default=None)


class TermRaise:
    """Decides when the terms that workers report raise the coordinator's term."""

    def __init__(self) -> None:
        self._reported_term = 0
        self.deadline_s = math.inf  # when the highest reported term takes effect; infinite if never
        self._next_unknown_s = -math.inf  # reports by unknown workers take effect no earlier

    def record(self, term: int, *, is_known: bool, now_s: float) -> None:
        """Record a reported term.

        Args:
            is_known: whether the journal names the reporting worker.
        """
        self._reported_term = max(self._reported_term, term)
        self.deadline_s = min(self.deadline_s, now_s if is_known else max(now_s, self._next_unknown_s))
        if not is_known:
            self._next_unknown_s = max(self._next_unknown_s, self.deadline_s + TERM_RAISE_INTERVAL_S)

    def due_term(self, now_s: float) -> int | None:
        """Return the highest reported term when it takes effect, and only once; otherwise None."""
        if now_s < self.deadline_s:
            return None
        self.deadline_s = math.inf
        return self._reported_term


def is_credible(claim: m.CurrentGeneration, term: int, generation: int) -> bool:
    """Return whether a report is credible: not too far ahead of the journal, and without empty stages.

    Args:
        term, generation: the coordinator's latest term and generation.
    """
    bounds = claim.stage_bounds
    is_sound = not bounds or (bounds[0] == 0 and len(bounds) > 1 and all(a < b for a, b in pairwise(bounds)))
    return is_sound and claim.term <= term + MAX_AHEAD and claim.generation <= generation + MAX_AHEAD
