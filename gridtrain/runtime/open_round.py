"""An open round and its buffers; a pipeline's training thread adds parts to the round and waits for them.

add(parts) ..   wait(channels) -> False if the round fails ..     complete(last collective) -> RoundOutcome
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gridtrain.core import messages as m
from gridtrain.core.collectives.collective import Collective
from gridtrain.core.group import member_events as ev
from gridtrain.core.group.round_flags import is_skipped
from gridtrain.runtime.buffers.buckets import RoundBuffers
from gridtrain.runtime.buffers.collective_buffers import CollectiveBuffer, PayloadBuffer
from gridtrain.runtime.mailbox.mailbox import Mailbox
from gridtrain.runtime.mailbox.step_plan import RoundOutcome
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot


@dataclass(frozen=True, slots=True)
class RoundPart:
    """A collective of a round, and its buffer."""

    collective: Collective
    buffer: PayloadBuffer


@dataclass(slots=True)
class OpenRound:
    """A round in which this worker takes part.

    Attributes:
        buffers: the submitted buffers by channel.
        voted_buffers: the buffers whose digests the members vote on, in order.
        is_failed: whether this worker has rejected a payload of the round, or of an earlier attempt with the
            same buffers.
        outcome: the outcome that the trainer can read; None until it is published.
        digests: the digests of `voted_buffers`, in order; empty until this worker has computed its vote.
        failure_reason: the reason why the round did not commit; empty if it committed or is still open.
        completed: maps the channel of each complete collective to the flags of its contributions.
        is_absent: whether the I/O thread has made an empty contribution in place of the trainer.
    """

    id: m.RoundId
    buffers: dict[m.Channel, PayloadBuffer]
    voted_buffers: RoundBuffers = ()
    settings: bytes = b""
    outcome: RoundOutcome | None = None
    digests: tuple[bytes, ...] = ()
    is_failed: bool = False
    failure_reason: str = ""
    completed: dict[m.Channel, int] = field(default_factory=dict)
    is_absent: bool = False


def buffers_of(parts: Mapping[m.Channel, RoundPart]) -> dict[m.Channel, PayloadBuffer]:
    return {channel: part.buffer for channel, part in parts.items()}


def collectives_of(parts: Mapping[m.Channel, RoundPart]) -> dict[m.Channel, Collective]:
    return {channel: part.collective for channel, part in parts.items()}


def await_outcome(mailbox: Mailbox, mine: OpenRound) -> RoundOutcome:
    """Wait until the round has ended; return its outcome.

    A worker that has to leave the group abandons a round that can no longer be committed.  If it waited for
    the decision instead, the wait would not end after a failure of the coordinator or of the root, the member
    that decides.
    """
    mailbox.wait(
        lambda here: (
            mine.outcome is not None or (here.failing_round == mine.id and mailbox.should_interrupt())
        )
    )
    if mine.outcome is None:
        mailbox.submit(ev.AbandonRound())
        mailbox.wait(lambda _: mine.outcome is not None)
    assert mine.outcome is not None
    return mine.outcome


class PipelineRound:
    """A round to which collectives are added while it runs.  Only the training thread uses it."""

    def __init__(self, mailbox: Mailbox, mine: OpenRound) -> None:
        self._mailbox, self._round = mailbox, mine

    def add(self, parts: Mapping[m.Channel, RoundPart]) -> None:
        """Add collectives, but not the last collective of the round, without waiting for their results."""
        with self._mailbox.condition:
            self._round.buffers |= buffers_of(parts)
        self._mailbox.submit_payload(ev.AddCollectives(self._round.id, collectives_of(parts)))

    def wait(self, *channels: m.Channel) -> bool:
        """Wait until the collectives of `channels` are complete; return False if the round fails first."""

        def are_complete() -> bool:
            return all(channel in self._round.completed for channel in channels)

        if not are_complete():
            self._mailbox.wait(lambda snapshot: are_complete() or self._is_lost_in(snapshot))
        return are_complete()

    def is_skipped(self, channel: m.Channel) -> bool:
        """Return whether any member skips the step in the collective of `channel`, which must be complete."""
        return is_skipped(self._round.completed[channel])

    def complete(self, channel: m.Channel, last: Collective, buffer: CollectiveBuffer) -> RoundOutcome:
        """Add the last collective, on whose buffer the members vote; wait for the outcome and return it."""
        with self._mailbox.condition:
            self._round.buffers[channel] = buffer
            self._round.voted_buffers = (buffer,)
        self._mailbox.submit_payload(ev.AddCollectives(self._round.id, {channel: last}, has_more=False))
        return self.end()

    def fail(self, reason: str) -> None:
        """Vote NO and report `reason`, unless the round is over or this worker has already voted.

        Returns immediately; `end` waits for the outcome.
        """
        if self._round.outcome is None:
            self._mailbox.submit(ev.AddCollectives(self._round.id, {}, failure=reason))

    def report_peer(self, rank: int, reason: str) -> None:
        """Report a violation that only the trainer can detect, by the member with this rank.

        The member is disconnected, and the round fails.  If the round's generation has ended, the
        call has no effect.
        """
        snapshot = self._mailbox.read()
        if snapshot.generation == self._round.id.generation and rank < len(snapshot.shares):
            self._mailbox.submit(ev.ProtocolViolation(snapshot.shares[rank][0], reason))

    def end(self) -> RoundOutcome:
        """Wait for the outcome of the round, even if the round has failed or is lost; return the outcome."""
        return await_outcome(self._mailbox, self._round)

    @property
    def is_lost(self) -> bool:
        """Whether the round has ended or can no longer be committed."""
        return self._is_lost_in(self._mailbox.read())

    @property
    def failure_reason(self) -> str:
        """The reason why the round did not commit; empty if it is unknown."""
        return self._round.failure_reason

    def _is_lost_in(self, snapshot: WorkerSnapshot) -> bool:
        return self._round.outcome is not None or snapshot.failing_round == self._round.id
