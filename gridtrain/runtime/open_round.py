"""One round that is open here: its numbers, and how a pipeline's training thread goes on in it.

Decides nothing: it hands collectives and their numbers to the loop's thread, and waits for them.

    add(parts) ..   wait(channels) -> False: the round is lost ..   complete(last part) -> RoundOutcome
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gridtrain.core import messages as m
from gridtrain.core.collectives.collective import Collective
from gridtrain.core.group import member_events as io
from gridtrain.runtime.buffers.buckets import BucketedBuffer
from gridtrain.runtime.buffers.collective_buffers import CollectiveBuffer
from gridtrain.runtime.mailbox.mailbox import Mailbox
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.runtime.step_plan import RoundOutcome


@dataclass(frozen=True, slots=True)
class RoundPart:
    """One collective of a round, and its numbers."""

    collective: Collective
    buffer: CollectiveBuffer


@dataclass(slots=True)
class OpenRound:
    """`workspaces`: those that were submitted, by channel; `whole`: those that are voted on, in order."""

    id: m.RoundId
    buffers: dict[m.Channel, CollectiveBuffer]
    voted_buffers: Sequence[CollectiveBuffer | BucketedBuffer] = ()
    settings: bytes = b""
    outcome: RoundOutcome | None = None
    digests: tuple[bytes, ...] = ()
    is_failed: bool = False  # something was refused in it
    failure_reason: str = ""  # it did not commit
    completed: dict[m.Channel, bool] = field(default_factory=dict)  # complete collectives, and who skips


def buffers_of(parts: Mapping[m.Channel, RoundPart]) -> dict[m.Channel, CollectiveBuffer]:
    return {channel: part.buffer for channel, part in parts.items()}


def collectives_of(parts: Mapping[m.Channel, RoundPart]) -> dict[m.Channel, Collective]:
    return {channel: part.collective for channel, part in parts.items()}


def await_outcome(meeting: Mailbox, mine: OpenRound) -> RoundOutcome:
    """Whatever this worker's part in it was.

    Whoever is wanted elsewhere does not wait for a root that is gone, or a coordinator that is, to hear of a
    round that it has voted NO on.
    """
    meeting.wait(
        lambda here: (
            mine.outcome is not None or (here.failing_round == mine.id and meeting.should_interrupt())
        )
    )
    if mine.outcome is None:
        meeting.submit(io.AbandonRound())
        meeting.wait(lambda _: mine.outcome is not None)
    assert mine.outcome is not None
    return mine.outcome


class PipelineRound:
    """See the module's text.  Used from the thread that trains.

    Attributes:
        outcome: None until the round has ended.
    """

    def __init__(self, meeting: Mailbox, mine: OpenRound) -> None:
        self._mailbox, self._round = meeting, mine
        self.outcome: RoundOutcome | None = None

    def add(self, parts: Mapping[m.Channel, RoundPart]) -> None:
        """Further collectives, not the last ones.  Returns at once."""
        with self._mailbox.condition:
            self._round.buffers |= buffers_of(parts)
        self._mailbox.submit_payload(io.AddCollectives(self._round.id, collectives_of(parts)))

    def wait(self, *channels: m.Channel) -> bool:
        """Until these collectives are complete; False: the round is lost, and they never will be."""

        def there() -> bool:
            return all(channel in self._round.completed for channel in channels)

        if not there():
            self._mailbox.wait(lambda picture: there() or self._is_lost_in(picture))
        return there()

    def is_skipped(self, channel: m.Channel) -> bool:
        """Of a collective that is complete: whether anybody in it skips the step."""
        return self._round.completed[channel]

    def complete(self, channel: m.Channel, last: RoundPart) -> RoundOutcome:
        """The last collective: its workspace is sealed and voted on.  Waits for the outcome."""
        with self._mailbox.condition:
            self._round.buffers[channel] = last.buffer
            self._round.voted_buffers = (last.buffer,)
        self._mailbox.submit_payload(
            io.AddCollectives(self._round.id, {channel: last.collective}, has_more=False)
        )
        return self.end()

    def fail(self, reason: str) -> None:
        """Vote NO, unless the round is over already or voted on.  Returns at once."""
        if self._round.outcome is None:
            self._mailbox.submit(io.AddCollectives(self._round.id, {}, failure=reason))

    def report_peer(self, rank: int, reason: str) -> None:
        """What this rank sent is no honest member's, which only the trainer could see: it is dropped, and the
        round lost.  Returns at once."""
        picture = self._mailbox.read()
        if picture.generation == self._round.id.generation and rank < len(picture.shares):
            self._mailbox.submit(io.ProtocolViolation(picture.shares[rank][0], reason))

    def end(self) -> RoundOutcome:
        """Wait for the outcome, also of a round that was failed, or lost."""
        self.outcome = await_outcome(self._mailbox, self._round)
        return self.outcome

    @property
    def is_lost(self) -> bool:
        """It cannot be committed any more."""
        return self._is_lost_in(self._mailbox.read())

    @property
    def failure_reason(self) -> str:
        """Why the round is lost, as far as it is known here."""
        return self._round.failure_reason

    def _is_lost_in(self, picture: WorkerSnapshot) -> bool:
        return self._round.outcome is not None or picture.failing_round == self._round.id
