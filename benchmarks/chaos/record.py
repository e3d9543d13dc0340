"""Derives from the workers' output which attempts were committed, and which guarantees were violated.

    round  [3, 120, 0]  positions 960-968      from each worker, before it sends anything
    outcome [3, 120, 0] committed              from each worker that learns it.  The attempt then counts for
                                               all workers whose loops took part; an absent one uses its
                                               positions later
    state   step 120    digest                 equal on all workers

A position of the data is assigned once in each pass; the mark `end` names those returned at the end.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Line = dict[str, Any]
Round = tuple[int, int, int]  # generation, step, attempt

MAX_FINDINGS = 20


@dataclass(frozen=True, slots=True)
class Assignment:
    """The positions of the data ledger that one worker took in a round, and the sample at each."""

    worker: str
    positions: list[int]
    samples: list[int]


@dataclass(slots=True)
class Record:
    """The output of all workers of a run.

    Attributes:
        committed: the rounds that were committed, by step.
        committed_s: when the first worker learned that a step was committed.
    """

    committed: dict[int, set[Round]] = field(default_factory=lambda: defaultdict(set))
    committed_s: dict[int, float] = field(default_factory=dict)
    world_sizes: dict[Round, int] = field(default_factory=dict)
    taken: dict[Round, list[Assignment]] = field(default_factory=lambda: defaultdict(list))
    digests: dict[int, dict[str, set[str]]] = field(default_factory=dict)
    loaded: dict[str, list[Line]] = field(default_factory=lambda: defaultdict(list))
    latest_s: dict[str, float] = field(default_factory=dict)
    ends: dict[str, Line] = field(default_factory=dict)

    def take(self, worker: str, line: Line) -> None:
        """Add one line of a worker's output."""
        name: Round = tuple(line.get("round", ()))  # type: ignore[assignment]
        match line.get("mark"):
            case "loaded":
                self.loaded[worker].append(line)
            case "round":
                self.world_sizes[name] = line["of"]
                positions = [at for start, stop in line["spans"] for at in range(start, stop)]
                self.taken[name].append(Assignment(worker, positions, line["samples"]))
            case "outcome" if not line.get("submitted", True):
                self.taken[name] = [each for each in self.taken[name] if each.worker != worker]
            case "outcome" if line["committed"]:
                self.committed[name[1]].add(name)
                before_s = self.committed_s.get(name[1], line["at_s"])
                self.committed_s[name[1]] = min(before_s, line["at_s"])
                self.latest_s[worker] = line["at_s"]
            case "state":
                self.digests.setdefault(line["step"], defaultdict(set))[line["digest"]].add(worker)
            case "end":
                self.ends[worker] = line

    @property
    def last_commit_s(self) -> float:
        return max(self.committed_s.values(), default=0.0)

    def commits_s(self) -> list[float]:
        """Return the times of all commits in order."""
        return sorted(self.committed_s.values())

    def samples_between(self, begin_s: float, end_s: float) -> int:
        """Return the number of samples of the steps that were committed in an interval."""
        steps = (step for step, at_s in self.committed_s.items() if begin_s <= at_s < end_s)
        rounds = (name for step in steps for name in self.committed[step])
        return sum(len(each.samples) for name in rounds for each in self.taken[name])

    def steps_between(self, begin_s: float, end_s: float) -> int:
        return sum(begin_s <= at_s < end_s for at_s in self.committed_s.values())

    def violations(self, workers: Iterable[str], size: int) -> list[str]:
        """Describe each violation of a guarantee, for a data set of `size` samples."""
        found = [*self._forks(), *self._replicas(), *self._ends(set(workers))]
        if self.ends:
            found += self._positions(next(iter(self.ends.values())))
        return (found + self._passes(size))[:MAX_FINDINGS]

    # -- one guarantee each ----------------------------------------------------------------------------

    def _forks(self) -> list[str]:
        twice = {step: sorted(names) for step, names in self.committed.items() if len(names) > 1}
        missing = sorted(set(range(max(self.committed, default=-1) + 1)) - set(self.committed))
        found = [f"step {step} was committed in several rounds: {names}" for step, names in twice.items()]
        return found + ([f"no worker learned of the commit of steps {missing[:10]}"] if missing else [])

    def _replicas(self) -> list[str]:
        return [
            f"after step {step} the models differ: {dict(digests)}"
            for step, digests in sorted(self.digests.items())
            if len(digests) > 1
        ]

    def _ends(self, workers: set[str]) -> list[str]:
        found = [f"{name} did not reach the end" for name in sorted(workers - set(self.ends))]
        names = ("step", "digest", "cursor", "consumed", "requeued")
        endings = Counter(str([line[name] for name in names]) for line in self.ends.values())
        return found + ([f"the workers end differently: {dict(endings)}"] if len(endings) > 1 else [])

    def _positions(self, end: Line) -> list[str]:
        """Check that each position below the ledger's cursor was committed once or will be assigned next."""
        held: Counter[int] = Counter()
        for names in self.committed.values():
            for name in names:
                for each in self.taken[name]:
                    held.update(each.positions)
        consumed = sum(held.values())
        for start, stop in (*end["requeued"], *end.get("late", ())):
            held.update(range(start, stop))
        wrong = {position: held[position] for position in range(end["cursor"]) if held[position] != 1}
        beyond = [position for position in held if position >= end["cursor"]]
        found = [
            f"position {position} was counted {n} times" for position, n in itertools.islice(wrong.items(), 5)
        ]
        if beyond:
            found.append(f"positions {sorted(beyond)[:5]} lie beyond the ledger's cursor {end['cursor']}")
        if consumed != end["consumed"]:
            found.append(f"the ledger counts {end['consumed']} samples, the workers {consumed}")
        return found

    def _passes(self, size: int) -> list[str]:
        """Check that each sample was used once in each complete pass, by the samples themselves."""
        taken: dict[int, Counter[int]] = defaultdict(Counter)
        for names in self.committed.values():
            for name in names:
                for each in self.taken[name]:
                    counts = len(each.positions), len(each.samples)
                    if counts[0] != counts[1]:
                        return [f"round {name} has {counts[0]} positions, {counts[1]} samples"]
                    for position, sample in zip(each.positions, each.samples, strict=True):
                        taken[position // size][sample] += 1
        return [
            f"pass {number}: {len(counts)} different samples of {size}"
            for number, counts in sorted(taken.items())
            if sum(counts.values()) == size and len(counts) != size
        ]
