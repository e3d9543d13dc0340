"""What this machine has contributed: while the script runs, at its end, and over all the times.

Decides how earlier times are added.  The figures come from the script's own process, through a file that only
this agent and its script use; they are for the volunteer's eyes, and nobody else is told.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gridtrain.runtime.contribution import Contribution
from gridtrain_worker.voice import Voice

LOOK_EVERY_S = 1.0


class Giving:
    """One stay of one worker in the run.

    Args:
        identity: the file with the worker's key; what it has given is kept beside it.
    """

    def __init__(self, identity: Path, voice: Voice) -> None:
        self.path = identity.with_suffix(".now.json")
        self._kept = identity.with_suffix(".given.json")
        self._voice = voice
        self._look_at_s = float("-inf")
        self._ended = Contribution()  # of scripts of this stay that were started again
        self._now: Contribution | None = None
        self._told = False
        self.path.unlink(missing_ok=True)

    def look(self, now_s: float) -> None:
        """To be called often; looks once a second."""
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_EVERY_S
        found = Contribution.read(self.path)
        if found is not None and found.steps:
            self._now = found
            self._voice.show(added(self._ended, found), now_s)

    def script_ended(self) -> None:
        """Its last word counts; the next one begins at 0."""
        found = Contribution.read(self.path) or self._now
        self.path.unlink(missing_ok=True)
        self._ended = added(self._ended, found) if found is not None else self._ended
        self._now = None

    def end(self) -> None:
        """The stay is over: told if there was anything, and kept.  Idempotent."""
        if self._told or self._ended.steps == 0:
            return
        self._told = True
        before = Contribution.read(self._kept)
        total = added(before, self._ended) if before is not None else self._ended
        total.write(self._kept)
        self._voice.end(self._ended, total)


def added(before: Contribution, now: Contribution) -> Contribution:
    """Both together; the run stands where the later one says."""
    return replace(
        now,
        steps=before.steps + now.steps,
        samples=before.samples + now.samples,
        sent_bytes=before.sent_bytes + now.sent_bytes,
        received_bytes=before.received_bytes + now.received_bytes,
    )
