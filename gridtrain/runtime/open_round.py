"""One open round: its buffers, and how the training thread of a pipeline takes part in it.

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
    """One collective of a round, and its buffer."""

    collective: Collective
    buffer: CollectiveBuffer


@dataclass(slots=True)
class OpenRound:
    """A round that this worker takes part in.

    Attributes:
        buffers: those that were submitted, by channel.
        voted_buffers: those that are voted on, in order.
        is_failed: a payload in it was rejected.
        failure_reason: why it did not commit.
        completed: the collectives that are complete, and whether the step is skipped in them.
    """

    id: m.RoundId
    buffers: dict[m.Channel, CollectiveBuffer]
    voted_buffers: Sequence[CollectiveBuffer | BucketedBuffer] = ()
    settings: bytes = b""
    outcome: RoundOutcome | None = None
    digests: tuple[bytes, ...] = ()
    is_failed: bool = False
    failure_reason: str = ""
    completed: dict[m.Channel, bool] = field(default_factory=dict)


def buffers_of(parts: Mapping[m.Channel, RoundPart]) -> dict[m.Channel, CollectiveBuffer]:
    return {channel: part.buffer for channel, part in parts.items()}


def collectives_of(parts: Mapping[m.Channel, RoundPart]) -> dict[m.Channel, Collective]:
    return {channel: part.collective for channel, part in parts.items()}


def await_outcome(mailbox: Mailbox, mine: OpenRound) -> RoundOutcome:
    """Wait until the round has ended.

    A worker that is needed elsewhere abandons a round that it has voted NO on: the root, or the coordinator,
    may be gone, and its decision would be waited for in vain.
    """
    mailbox.wait(
        lambda here: (
            mine.outcome is not None or (here.failing_round == mine.id and mailbox.should_interrupt())
        )
    )
    if mine.outcome is None:
        mailbox.submit(io.AbandonRound())
        mailbox.wait(lambda _: mine.outcome is not None)
    assert mine.outcome is not None
    return mine.outcome


class PipelineRound:
    """A round whose collectives are added while it runs.  Used by the training thread.

    Attributes:
        outcome: None until the round has ended.
    """

    def __init__(self, mailbox: Mailbox, mine: OpenRound) -> None:
        self._mailbox, self._round = mailbox, mine
        self.outcome: RoundOutcome | None = None

    def add(self, parts: Mapping[m.Channel, RoundPart]) -> None:
        """Add collectives, not the last ones.  Returns at once."""
        with self._mailbox.condition:
            self._round.buffers |= buffers_of(parts)
        self._mailbox.submit_payload(io.AddCollectives(self._round.id, collectives_of(parts)))

    def wait(self, *channels: m.Channel) -> bool:
        """Wait until these collectives are complete; False: the round is lost, and they never will be."""

        def are_complete() -> bool:
            return all(channel in self._round.completed for channel in channels)

        if not are_complete():
            self._mailbox.wait(lambda snapshot: are_complete() or self._is_lost_in(snapshot))
        return are_complete()

    def is_skipped(self, channel: m.Channel) -> bool:
        """Whether any member skips the step in this collective, which is complete."""
        return self._round.completed[channel]

    def complete(self, channel: m.Channel, last: RoundPart) -> RoundOutcome:
        """Add the last collective, whose buffer is voted on, and wait for the outcome."""
        with self._mailbox.condition:
            self._round.buffers[channel] = last.buffer
            self._round.voted_buffers = (last.buffer,)
        self._mailbox.submit_payload(
            io.AddCollectives(self._round.id, {channel: last.collective}, has_more=False)
        )
        return self.end()

    def fail(self, reason: str) -> None:
        """Vote NO, unless the round is over or this worker has voted.  Returns at once."""
        if self._round.outcome is None:
            self._mailbox.submit(io.AddCollectives(self._round.id, {}, failure=reason))

    def report_peer(self, rank: int, reason: str) -> None:
        """No honest member sends what this rank has sent, as only the trainer could see: it is dropped, and
        the round is lost.  Returns at once."""
        snapshot = self._mailbox.read()
        if snapshot.generation == self._round.id.generation and rank < len(snapshot.shares):
            self._mailbox.submit(io.ProtocolViolation(snapshot.shares[rank][0], reason))

    def end(self) -> RoundOutcome:
        """Wait for the outcome, also of a round that has failed or is lost."""
        self.outcome = await_outcome(self._mailbox, self._round)
        return self.outcome

    @property
    def is_lost(self) -> bool:
        """It cannot be committed any more."""
        return self._is_lost_in(self._mailbox.read())

    @property
    def failure_reason(self) -> str:
        """Why the round is lost, as far as this worker knows."""
        return self._round.failure_reason

    def _is_lost_in(self, snapshot: WorkerSnapshot) -> bool:
        return self._round.outcome is not None or snapshot.failing_round == self._round.id
