"""A round that is open from a pipeline's first activation on, as the training thread sees it.

Decides nothing: it hands collectives and their numbers to the loop's thread, and waits for them.

    OpenRound   add(parts)   wait(channels) -> False: the round is lost   complete(last part) -> RoundOutcome
"""

from __future__ import annotations

from collections.abc import Mapping

from gridtrain.protocol.messages import Channel
from gridtrain.runtime.plan import RoundOutcome
from gridtrain.runtime.rounds import OpenRound, Part, Rounds


class OpenedRound:
    """See the module's text.  Used from the thread that trains.

    Attributes:
        outcome: None until the round has ended.
    """

    def __init__(self, rounds: Rounds, opened: OpenRound) -> None:
        self._rounds, self._opened = rounds, opened
        self.outcome: RoundOutcome | None = None

    def add(self, parts: Mapping[Channel, Part]) -> None:
        """Further collectives, not the last ones.  Returns at once."""
        self._rounds.extend(self._opened, parts)

    def wait(self, *channels: Channel) -> bool:
        """Until these collectives are complete; False: the round is lost, and they never will be."""
        return self._rounds.await_channels(self._opened, channels)

    def skips(self, channel: Channel) -> bool:
        """Of a collective that is complete: whether anybody in it skips the step."""
        return self._opened.reached[channel]

    def complete(self, channel: Channel, last: Part) -> RoundOutcome:
        """The last collective, which the vote is about; waits for the outcome."""
        self.outcome = self._rounds.complete(self._opened, channel, last)
        return self.outcome

    def fail(self, reason: str) -> None:
        """Vote NO, unless this worker has voted.  Returns at once."""
        self._rounds.fail(self._opened, reason)

    def blame(self, rank: int, reason: str) -> None:
        """What this rank sent is no honest member's: it is dropped, and the round lost.  Returns at once."""
        self._rounds.blame(self._opened, rank, reason)

    def end(self) -> RoundOutcome:
        """Wait for the outcome of a round that was failed, or lost."""
        self.outcome = self._rounds.end(self._opened)
        return self.outcome

    @property
    def lost(self) -> bool:
        """It cannot be committed any more."""
        return self._rounds.is_lost(self._opened)

    @property
    def why(self) -> str:
        """Why the round is lost, as far as it is known here."""
        return self._opened.why
