"""The buffers, vote digests and outcomes of this worker's rounds, and the steps that its trainer has missed.

The core decides which payload is sent to which peer, and whether a round commits.  This module executes the
core's effects.

    training thread                                            I/O thread
      begin_bucket .. submit     --- SubmitRound ------->        core --> payload_to_send, apply_payload
      open --> PipelineRound     --- AddCollectives ---->             --> compute_vote_digest
                                                                      --> resolve
      await_submitted            <-- outcome, with the snapshot -- publish_ended
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import cast

from gridtrain.core import messages as m
from gridtrain.core.collectives.collective import BufferEffect, Collective
from gridtrain.core.group import member_events as ev
from gridtrain.core.group.round_flags import absent_flag, is_skipped
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.buffers.buckets import RoundBuffers, UpdateBuffer, buffers_by_channel
from gridtrain.runtime.buffers.collective_buffers import (
    CollectiveBuffer,
    DenseRingBuffer,
    PayloadBuffer,
)
from gridtrain.runtime.mailbox.mailbox import Mailbox
from gridtrain.runtime.mailbox.step_plan import NOT_COMMITTED, RoundOutcome, StepPlan
from gridtrain.runtime.missed_step import MissedStep
from gridtrain.runtime.open_round import (
    OpenRound,
    PipelineRound,
    RoundPart,
    await_outcome,
    buffers_of,
    collectives_of,
)
from gridtrain.runtime.state_transfer.update_log import StepUpdate, vote_digest

log = logging.getLogger("gridtrain")

REJECTED_EARLIER = "this worker rejected a payload of an earlier attempt"
"""The reason for the failure of an attempt whose buffers were used in an earlier attempt that failed."""

MAX_MISSED_BYTES = 1 << 30
"""If the updates that are kept for an absent trainer exceed this size in bytes, the group waits for the
trainer."""

MakeEmpty = Callable[[StepPlan, RoundBuffers], RoundBuffers | None]
"""Makes the buffers of an empty contribution to a step, or returns None if the trainer has to take part.

The second argument contains the buffers of the previous attempt at the step if the trainer was also absent
from that attempt; a ring resumes with them.  Otherwise it is empty.
"""


class StepRounds:
    """The open round, the last round to which this worker submitted, and the steps its trainer has missed.

    Args:
        mailbox: the mailbox between the two threads.
        record_step: a function that is called with the update of each sparse step and the length of the flat
            gradient.
        count_missed_step: a function that is called for each step that committed without the trainer.

    Attributes:
        current: the round that is open on this worker, or None.
        last_submitted: the latest round to which this worker has submitted, even if it has ended; or None.
        has_hash_work: whether a dense sum may have slices that can be hashed before the end of the round.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        record_step: Callable[[StepUpdate, int], None],
        count_missed_step: Callable[[], None],
    ) -> None:
        self._mailbox, self._record_step = mailbox, record_step
        self._count_missed_step = count_missed_step
        self.current: OpenRound | None = None
        self.last_submitted: OpenRound | None = None
        self._submitted = False  # since `begin_attempt`
        self._ended: list[tuple[OpenRound, RoundOutcome]] = []  # not published yet
        self.has_hash_work = False
        self._make_empty: MakeEmpty | None = None
        self._missed: list[MissedStep] = []
        self._aborted_absence: OpenRound | None = None  # the latest absent round, if it was aborted

    # -- training thread -----------------------------------------------------------------------------

    def begin_attempt(self) -> None:
        """Begin an attempt.  `resolve_last` then refers to the round that is submitted next."""
        self._submitted = False

    def begin_bucket(
        self, round_id: m.RoundId, channel: m.Channel, buffer: CollectiveBuffer, skip: bool
    ) -> None:
        """Submit one bucket of this worker's part of a round; `submit` submits the rest."""
        snapshot = self._mailbox.read()
        if snapshot.open_round != round_id:
            return  # the round is over, and `submit` returns None
        collective = buffer.make_collective(snapshot.rank, snapshot.world_size, skip)
        with self._mailbox.condition:
            if self._missed or self.is_absent:
                return
            if self.current is None or self.current.id != round_id:
                self.current = OpenRound(round_id, {})
            self.current.buffers[channel] = buffer
        self._mailbox.submit_payload(ev.SubmitRound(round_id, {channel: collective}, is_complete=False))

    def submit(
        self,
        round_id: m.RoundId,
        buffers: RoundBuffers,
        skip: bool,
        settings: bytes,
        *,
        is_awaited: bool = False,
    ) -> OpenRound | None:
        """Submit this worker's part of a round and return the round.

        Returns None if the round is over, or if the group proceeds without this worker's part.  Buckets that
        `begin_bucket` has already submitted are not submitted again.

        Args:
            is_awaited: whether the trainer now only waits for the outcome.  The outcome is published with a
                snapshot, so the trainer needs no snapshot that shows the submission.
        """
        snapshot = self._mailbox.read()
        if snapshot.generation != round_id.generation:
            return None
        with self._mailbox.condition:
            channels = buffers_by_channel(buffers)
            begun = self._current_if(round_id)
            if begun is not None and begun.is_absent:  # the group proceeds without this submission
                return None
            mine = begun or OpenRound(
                round_id, {}, is_failed=_was_failed_before(channels.values(), self.last_submitted)
            )
            rest = {c: w for c, w in channels.items() if c not in mine.buffers}
        collectives = _make_collectives(rest, snapshot.rank, snapshot.world_size, skip)
        with self._mailbox.condition:
            if self._missed or self.is_absent:
                return None
            mine.buffers |= rest
            mine.voted_buffers, mine.settings = buffers, settings
            self._submit(mine)
            # Submitted under the lock, so that Ctrl-C during the wait for the lock leaves nothing submitted.
            submit = self._mailbox.submit_payload if is_awaited else self._mailbox.submit
            submit(ev.SubmitRound(round_id, collectives, settings=settings))
        if mine.is_failed:
            # The other members cannot send the missing payload again, so all members must start over.
            self._mailbox.submit(ev.RoundFailed(REJECTED_EARLIER))
        return mine

    def await_submitted(self, mine: OpenRound | None) -> RoundOutcome:
        """Wait for the outcome of the round that `submit` has returned."""
        return NOT_COMMITTED if mine is None else await_outcome(self._mailbox, mine)

    def resolve_last(self, timeout_s: float) -> RoundOutcome | None:
        """Wait for the outcome of this attempt and return it; return None after `timeout_s`.

        A worker calls this method when it leaves after an interruption before or during a round.  An attempt
        that was never submitted was not committed.  Unless this worker has voted YES, it votes NO now, so
        that the round can end while other members are busy with a long computation.
        """
        latest = self.last_submitted
        if latest is None or not self._submitted:
            return NOT_COMMITTED
        self._mailbox.submit(ev.AbandonRound())
        self._mailbox.wait(lambda _: latest.outcome is not None, timeout_s)
        return latest.outcome

    def open(
        self, round_id: m.RoundId, parts: Mapping[m.Channel, RoundPart], settings: bytes
    ) -> PipelineRound:
        """Open a pipeline's round with its first collectives; return an object that adds more collectives."""
        mine = OpenRound(round_id, buffers_of(parts), settings=settings)
        with self._mailbox.condition:
            self._submit(mine)
        self._mailbox.submit(ev.SubmitRound(round_id, collectives_of(parts), has_more=True))
        return PipelineRound(self._mailbox, mine)

    # -- steps from which the trainer is absent ------------------------------------------------------

    def attach_empty(self, make_empty: MakeEmpty) -> None:
        """Set the function that makes empty contributions, so that steps can commit without the trainer."""
        self._make_empty = make_empty

    def stop_absences(self) -> None:
        """Prevent steps from committing without the trainer, which is about to leave."""
        with self._mailbox.condition:
            self._make_empty = None

    @property
    def is_absent(self) -> bool:
        """Whether the I/O thread has made an empty contribution to the open round."""
        return self.current is not None and self.current.is_absent

    @property
    def last_missed(self) -> int | None:
        """The last committed step that the trainer has missed and must apply; None if there is none."""
        with self._mailbox.condition:
            return self._missed[-1].step if self._missed else None

    def take_missed(self, last_step: int | None = None) -> list[MissedStep]:
        """Take the steps up to `last_step` that the trainer has to apply, oldest first; None stands for all.

        The trainer may have missed later steps that the snapshot does not show yet.
        """
        with self._mailbox.condition:
            taken = [each for each in self._missed if last_step is None or each.step <= last_step]
            self._missed = self._missed[len(taken) :]
        return taken

    def contribute_nothing(
        self, round_id: m.RoundId, plan: StepPlan, settings: bytes
    ) -> list[ev.SubmitRound | ev.StayPresent | ev.RoundFailed]:
        """Make an empty contribution to a round from which the trainer is absent.

        This method is called in the I/O thread.

        Returns the events for the core: only `StayPresent` if the trainer has begun to submit, if its missed
        updates exceed `MAX_MISSED_BYTES`, or if no empty contribution can be made; otherwise, no events if an
        earlier round is still open on this worker.

        Args:
            plan: the plan of the step, with 0 samples.
            settings: the optimizer settings of the other members.
        """
        with self._mailbox.condition:
            if sum(each.nbytes for each in self._missed) > MAX_MISSED_BYTES or self._make_empty is None:
                return [ev.StayPresent(round_id)]
            before = self._aborted_absence if plan.attempt else None
            buffers = self._make_empty(plan, before.voted_buffers if before is not None else ())
            if buffers is None:
                return [ev.StayPresent(round_id)]
            if self.current is not None:
                return [ev.StayPresent(round_id)] if self.current.id == round_id else []
            channels = buffers_by_channel(buffers)
            is_failed = _was_failed_before(channels.values(), before)
            self.current = OpenRound(
                round_id, {**channels}, buffers, settings=settings, is_failed=is_failed, is_absent=True
            )
        collectives = _make_collectives(channels, plan.rank, plan.world_size, absent_flag(plan.rank))
        submitted = ev.SubmitRound(round_id, collectives, settings=settings, is_absent=True)
        return [submitted, ev.RoundFailed(REJECTED_EARLIER)] if is_failed else [submitted]

    def _end_absent(self, ended: OpenRound, committed: bool, flags: int) -> None:
        """Keep the update of a committed step for the trainer, or the buffers of an aborted attempt."""
        self._aborted_absence = None if committed else ended
        if not committed:
            return
        missed = MissedStep(ended.id.step, ended.settings, None)
        if not is_skipped(flags):
            update_buffer = cast(UpdateBuffer, ended.voted_buffers[0])
            missed = MissedStep.of(ended.id.step, ended.settings, update_buffer)
        self._missed.append(missed)
        self._count_missed_step()

    # -- I/O thread ----------------------------------------------------------------------------------

    def payload_to_send(self, effect: ev.SendPayload) -> m.Data | None:
        """Return the message to send; None if the round is over on this worker, or has failed."""
        mine = self._usable
        if mine is None or mine.id != effect.round:
            return None
        payload = mine.buffers[effect.channel].payload(effect.slot)
        return m.Data(effect.round, effect.channel, effect.slot, effect.flags, payload)

    def apply_payload(self, channel: m.Channel, effect: BufferEffect) -> None:
        """Apply an effect to a buffer.  Raises `RemoteProtocolError` if its payload is invalid."""
        if (mine := self._usable) is not None:
            mine.buffers[channel].apply(effect)
            self.has_hash_work = True  # perhaps; `hash_ahead` checks

    def mark_complete(self, channel: m.Channel, flags: int) -> None:
        with self._mailbox.condition:
            if (mine := self._usable) is not None:
                mine.completed[channel] = flags
                self._mailbox.count_progress()
                self._mailbox.notify_trainer()

    def compute_vote_digest(self, flags: int) -> bytes | None:
        """Return the digest to vote for; None if the round has failed."""
        if (mine := self._usable) is None:
            return None
        skipped = is_skipped(flags)
        digests = [b"" if skipped else buffer.compute_digest() for buffer in mine.voted_buffers]
        mine.digests = tuple(digests)
        return vote_digest(mine.settings, flags, digests)

    def mark_failed(self) -> None:
        """Mark the open round as failed.  Call this method when a payload was rejected.

        Without this mark, this worker would send sums that lack the rejected payload.
        """
        if self.current is not None:
            self.current.is_failed = True

    def hash_ahead(self) -> None:
        """Hash slices that are already final, while the network is busy.

        Each call hashes at most one slice of each buffer, so that arriving messages are not delayed for long.
        """
        if not self.has_hash_work:
            return
        with self._mailbox.condition:  # the trainer may be adding a bucket
            mine = self._usable
            buffers = mine.buffers.values() if mine is not None else ()
            dense = [buffer for buffer in buffers if isinstance(buffer, DenseRingBuffer)]
        self.has_hash_work = any(buffer.hash_ahead() for buffer in dense)

    def resolve(self, effect: ev.ResolveRound) -> None:
        """End the round.  The trainer receives the outcome with the next snapshot (`publish_ended`)."""
        round_id, committed, flags = effect.round, effect.committed, effect.flags
        if not committed:
            where = round_id.step + 1, round_id.attempt + 1
            log.info("step %d attempt %d did not commit: %s", *where, effect.reason)
        with self._mailbox.condition:  # the trainer may be adding a bucket
            ended = self._current_if(round_id)
            if ended is not None and ended.is_absent:
                self._end_absent(ended, committed, flags)  # first: the trainer may be about to leave
            self.current = None if ended is not None else self.current
        if ended is not None:
            if committed:
                self._record_update(ended, flags)
                ended.buffers, ended.voted_buffers = {}, ()  # else `last_submitted` would keep them
            else:
                ended.failure_reason = effect.reason
            self._ended.append((ended, RoundOutcome(committed, is_skipped(flags), effect.is_unknown)))

    @property
    def has_ended(self) -> bool:
        """Whether a round has ended whose outcome has not been published yet."""
        return bool(self._ended)

    def publish_ended(self) -> bool:
        """Publish the outcomes of the rounds that have ended; return whether there were any outcomes.

        The caller holds the mailbox's condition.
        """
        had_ended = self.has_ended
        for ended, outcome in self._ended:
            ended.outcome = outcome
        self._ended.clear()
        return had_ended

    @property
    def _usable(self) -> OpenRound | None:
        """The open round; None if no round is open or the open round has failed."""
        return self.current if self.current is not None and not self.current.is_failed else None

    def _current_if(self, round_id: m.RoundId) -> OpenRound | None:
        return self.current if self.current is not None and self.current.id == round_id else None

    def _submit(self, mine: OpenRound) -> None:
        self.current = self.last_submitted = mine
        self._submitted = True

    def _record_update(self, mine: OpenRound, flags: int) -> None:
        """Record a sparse update for workers that catch up; dense updates are too large."""
        buffer = mine.voted_buffers[0]
        if isinstance(buffer, UpdateBuffer) and buffer.is_sparse:
            skipped = is_skipped(flags)
            step_update = StepUpdate(
                mine.id.step,
                mine.settings,
                flags,
                None if skipped else cast(SparseVector, buffer.update),
                () if skipped else mine.digests[1:],
            )
            self._record_step(step_update, buffer.n)


def _make_collectives(
    buffers: Mapping[m.Channel, CollectiveBuffer], rank: int, world_size: int, flags: int
) -> dict[m.Channel, Collective]:
    return {c: buffer.make_collective(rank, world_size, flags) for c, buffer in buffers.items()}


def _was_failed_before(buffers: Iterable[PayloadBuffer], before: OpenRound | None) -> bool:
    """Return whether the round `before` rejected a payload and used any of `buffers`."""
    if before is None or not before.is_failed:
        return False
    return any(mine is theirs for mine in buffers for theirs in before.buffers.values())
