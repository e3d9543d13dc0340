"""What this machine has contributed: while the script runs, at its end, and over all the times.

Decides how earlier times are added.  The figures come from the script's own process, through a file that only
this agent and its script use; they are for the volunteer's eyes, and nobody else is told.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gridtrain.runtime.contribution import Contribution
from gridtrain_worker.console import Console

LOOK_EVERY_S = 1.0


class ContributionStats:
    """One stay of one worker in the run.

    Args:
        identity: the file with the worker's key; what it has given is kept beside it.
    """

    def __init__(self, identity: Path, voice: Console) -> None:
        self.path = identity.with_suffix(".now.json")
        self._total_file = identity.with_suffix(".given.json")
        self._console = voice
        self._next_read_s = float("-inf")
        self._finished = Contribution()  # of scripts of this stay that were started again
        self._current: Contribution | None = None
        self._is_reported = False
        self.path.unlink(missing_ok=True)

    def update(self, now_s: float) -> None:
        """To be called often; looks once a second."""
        if now_s < self._next_read_s:
            return
        self._next_read_s = now_s + LOOK_EVERY_S
        found = Contribution.read(self.path)
        if found is not None and found.steps:
            self._current = found
            self._console.show_progress(add_contributions(self._finished, found), now_s)

    def script_ended(self) -> None:
        """Its last word counts; the next one begins at 0."""
        found = Contribution.read(self.path) or self._current
        self.path.unlink(missing_ok=True)
        self._finished = add_contributions(self._finished, found) if found is not None else self._finished
        self._current = None

    def finish(self) -> None:
        """The stay is over: told if there was anything, and kept.  Idempotent."""
        if self._is_reported or self._finished.steps == 0:
            return
        self._is_reported = True
        before = Contribution.read(self._total_file)
        total = add_contributions(before, self._finished) if before is not None else self._finished
        total.write(self._total_file)
        self._console.show_summary(self._finished, total)


def add_contributions(before: Contribution, now: Contribution) -> Contribution:
    """Both together; the run stands where the later one says."""
    return replace(
        now,
        steps=before.steps + now.steps,
        samples=before.samples + now.samples,
        sent_bytes=before.sent_bytes + now.sent_bytes,
        received_bytes=before.received_bytes + now.received_bytes,
    )
