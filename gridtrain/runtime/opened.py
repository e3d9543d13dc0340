"""One round that is open here: its numbers, and how a pipeline's training thread goes on in it.

Decides nothing: it hands collectives and their numbers to the loop's thread, and waits for them.

    add(parts) ..   wait(channels) -> False: the round is lost ..   complete(last part) -> RoundOutcome
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gridtrain.protocol import member_io as io
from gridtrain.protocol import messages as m
from gridtrain.protocol.collective import Collective
from gridtrain.runtime.buckets import BucketedWorkspace
from gridtrain.runtime.buffers import Workspace
from gridtrain.runtime.meeting import Meeting
from gridtrain.runtime.picture import Picture
from gridtrain.runtime.plan import RoundOutcome


@dataclass(frozen=True, slots=True)
class Part:
    """One collective of a round, and its numbers."""

    collective: Collective
    workspace: Workspace


@dataclass(slots=True)
class OpenRound:
    """`workspaces`: those that were submitted, by channel; `whole`: those that are voted on, in order."""

    id: m.RoundId
    workspaces: dict[m.Channel, Workspace]
    whole: Sequence[Workspace | BucketedWorkspace] = ()
    settings: bytes = b""
    outcome: RoundOutcome | None = None
    seals: tuple[bytes, ...] = ()
    spoilt: bool = False  # something was refused in it
    why: str = ""  # it did not commit
    reached: dict[m.Channel, bool] = field(default_factory=dict)  # complete collectives, and who skips


def workspaces_of(parts: Mapping[m.Channel, Part]) -> dict[m.Channel, Workspace]:
    return {channel: part.workspace for channel, part in parts.items()}


def collectives_of(parts: Mapping[m.Channel, Part]) -> dict[m.Channel, Collective]:
    return {channel: part.collective for channel, part in parts.items()}


def await_outcome(meeting: Meeting, mine: OpenRound) -> RoundOutcome:
    """Whatever this worker's part in it was.

    Whoever is wanted elsewhere does not wait for a root that is gone, or a coordinator that is, to hear of a
    round that it has voted NO on.
    """
    meeting.wait(
        lambda here: mine.outcome is not None or (here.doomed == mine.id and meeting.wanted_elsewhere())
    )
    if mine.outcome is None:
        meeting.command(io.Withdraw())
        meeting.wait(lambda _: mine.outcome is not None)
    assert mine.outcome is not None
    return mine.outcome


class OpenedRound:
    """See the module's text.  Used from the thread that trains.

    Attributes:
        outcome: None until the round has ended.
    """

    def __init__(self, meeting: Meeting, mine: OpenRound) -> None:
        self._meeting, self._mine = meeting, mine
        self.outcome: RoundOutcome | None = None

    def add(self, parts: Mapping[m.Channel, Part]) -> None:
        """Further collectives, not the last ones.  Returns at once."""
        with self._meeting.changed:
            self._mine.workspaces |= workspaces_of(parts)
        self._meeting.bring(io.Extend(self._mine.id, collectives_of(parts)))

    def wait(self, *channels: m.Channel) -> bool:
        """Until these collectives are complete; False: the round is lost, and they never will be."""

        def there() -> bool:
            return all(channel in self._mine.reached for channel in channels)

        if not there():
            self._meeting.wait(lambda picture: there() or self._is_lost(picture))
        return there()

    def skips(self, channel: m.Channel) -> bool:
        """Of a collective that is complete: whether anybody in it skips the step."""
        return self._mine.reached[channel]

    def complete(self, channel: m.Channel, last: Part) -> RoundOutcome:
        """The last collective: its workspace is sealed and voted on.  Waits for the outcome."""
        with self._meeting.changed:
            self._mine.workspaces[channel] = last.workspace
            self._mine.whole = (last.workspace,)
        self._meeting.bring(io.Extend(self._mine.id, {channel: last.collective}, more=False))
        return self.end()

    def fail(self, reason: str) -> None:
        """Vote NO, unless the round is over already or voted on.  Returns at once."""
        if self._mine.outcome is None:
            self._meeting.command(io.Extend(self._mine.id, {}, reason=reason))

    def blame(self, rank: int, reason: str) -> None:
        """What this rank sent is no honest member's, which only the trainer could see: it is dropped, and the
        round lost.  Returns at once."""
        picture = self._meeting.look()
        if picture.generation == self._mine.id.generation and rank < len(picture.shares):
            self._meeting.command(io.Offence(picture.shares[rank][0], reason))

    def end(self) -> RoundOutcome:
        """Wait for the outcome, also of a round that was failed, or lost."""
        self.outcome = await_outcome(self._meeting, self._mine)
        return self.outcome

    @property
    def lost(self) -> bool:
        """It cannot be committed any more."""
        return self._is_lost(self._meeting.look())

    @property
    def why(self) -> str:
        """Why the round is lost, as far as it is known here."""
        return self._mine.why

    def _is_lost(self, picture: Picture) -> bool:
        return self._mine.outcome is not None or picture.doomed == self._mine.id
