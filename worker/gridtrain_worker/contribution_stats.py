"""Adds up one worker's contributions since its agent started, and over all starts on this machine.

The figures come from the script's process, through a file that only this agent and its script use.  They are
shown only to the volunteer, and never sent.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gridtrain.runtime.contribution import Contribution
from gridtrain_worker.console import Console

LOOK_EVERY_S = 1.0


class ContributionStats:
    """The contribution of one worker since the agent started.

    Args:
        identity: the file that contains the worker's key; the total is stored beside it.
        console: shows the figures to the volunteer.
    """

    def __init__(self, identity: Path, console: Console) -> None:
        self.path = identity.with_suffix(".now.json")
        self._total_file = identity.with_suffix(".given.json")
        self._console = console
        self._next_read_s = float("-inf")
        self._before = Contribution.read(self._total_file) or Contribution()  # from earlier starts
        self._finished = Contribution()  # from earlier scripts since the agent started
        self._current: Contribution | None = None
        self._is_reported = False
        if (found := Contribution.read(self.path)) is not None:  # the latest agent was killed
            self._before = add_contributions(self._before, found)
        self._counted = found  # of an earlier script whose file is still there
        if found is None or self._before.write(self._total_file):
            self._remove_file(found)

    @property
    def is_empty(self) -> bool:
        """Whether no script has contributed a step since the agent started."""
        return self._finished.steps == 0

    @property
    def step(self) -> int:
        """The number of the run's steps when the latest script that committed a step ended."""
        return self._finished.step

    def update(self, now_s: float, untrained: str = "") -> None:
        """Read the script's figures and show the totals of all starts on this machine, at most once a second.

        Args:
            untrained: what the script is doing instead of training, and why; "" if it is training.
        """
        if now_s < self._next_read_s:
            return
        self._next_read_s = now_s + LOOK_EVERY_S
        found = self._read()
        if found is not None and found.steps:
            self._current = found
        shown = self._finished if self._current is None else add_contributions(self._finished, self._current)
        if shown.steps:
            self._console.show_progress(add_contributions(self._before, shown), now_s, untrained)

    def script_ended(self) -> bool:
        """Add the script's last figures to those of earlier scripts, and store the total of all starts; the
        next script counts from 0.

        Returns whether the script has committed a step.
        """
        found = self._read() or self._current
        self._finished = add_contributions(self._finished, found) if found is not None else self._finished
        if not self.is_empty:
            add_contributions(self._before, self._finished).write(self._total_file)
        self._current = None
        self._remove_file(found or self._counted)
        return found is not None and found.steps > 0

    def _read(self) -> Contribution | None:
        """Return the figures of the script that is running; None if there are none yet."""
        found = Contribution.read(self.path)
        return None if found == self._counted else found

    def _remove_file(self, counted: Contribution | None) -> None:
        """Remove the file, whose figures are `counted`; a disk that is full or read-only may keep it."""
        try:
            self.path.unlink(missing_ok=True)
            counted = None
        except OSError:  # training does not depend on it
            pass
        self._counted = counted

    def finish(self) -> None:
        """Show the contributions since the agent started, if any; do so only once."""
        if self._is_reported or self.is_empty:
            return
        self._is_reported = True
        self._console.show_summary(self._finished, add_contributions(self._before, self._finished))


def add_contributions(before: Contribution, now: Contribution) -> Contribution:
    """Return the sum of the two contributions; step, run and world size are those of `now`.

    If the run has been set back meanwhile, the steps of `before` that `now` may have repeated do not count;
    their samples are estimated from the mean per step.  If `now` has no steps, only its bytes are added, so
    that steps repeated later are recognized.
    """
    sent_bytes = before.sent_bytes + now.sent_bytes
    received_bytes = before.received_bytes + now.received_bytes
    if not now.steps:
        return replace(before, sent_bytes=sent_bytes, received_bytes=received_bytes)
    repeated = before.step - (now.step - now.steps)
    kept = max(0, before.steps - max(0, repeated))
    return replace(
        now,
        steps=kept + now.steps,
        samples=before.samples * kept // max(1, before.steps) + now.samples,
        sent_bytes=sent_bytes,
        received_bytes=received_bytes,
    )
