"""The rounds that this worker takes part in: their buffers, and how they end.

The core decides who sends what to whom, and whether a round commits; its effects are executed here.

    training thread                                            I/O thread
      begin_bucket .. run        --- SubmitRound ------->        core --> payload_to_send, apply_payload
      open --> PipelineRound     --- AddCollectives ---->             --> compute_vote_digest
                                                                      --> resolve
      run, resolve_last          <-- outcome, with the snapshot -- publish_ended
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from gridtrain.core import messages as m
from gridtrain.core.collectives.collective import BufferEffect
from gridtrain.core.group import member_events as io
from gridtrain.runtime.buffers.buckets import BucketedBuffer, buffers_by_channel
from gridtrain.runtime.buffers.collective_buffers import (
    AllGatherBuffer,
    ButterflyBuffer,
    CollectiveBuffer,
    DenseRingBuffer,
)
from gridtrain.runtime.mailbox.mailbox import Mailbox
from gridtrain.runtime.open_round import (
    OpenRound,
    PipelineRound,
    RoundPart,
    await_outcome,
    buffers_of,
    collectives_of,
)
from gridtrain.runtime.state_transfer.update_log import StepUpdate, vote_digest
from gridtrain.runtime.step_plan import RoundOutcome

log = logging.getLogger("gridtrain")


class StepRounds:
    """The open round, and the last one that this worker submitted to.

    Args:
        record_step: called with the update of each sparse step, and the length of the flat gradient.

    Attributes:
        current: the round that is open here.
        last_submitted: the latest round that this worker has submitted to; it may be over.
        has_hash_work: a dense sum has slices that can be hashed before the end.
    """

    def __init__(self, mailbox: Mailbox, record_step: Callable[[StepUpdate, int], None]) -> None:
        self._mailbox, self._record_step = mailbox, record_step
        self.current: OpenRound | None = None
        self.last_submitted: OpenRound | None = None
        self._submitted = False  # since `begin_attempt`
        self._ended: list[tuple[OpenRound, RoundOutcome]] = []  # not published yet
        self.has_hash_work = False

    # -- training thread -----------------------------------------------------------------------------

    def begin_attempt(self) -> None:
        """`resolve_last` is about the round that is submitted next."""
        self._submitted = False

    def begin_bucket(
        self, round_id: m.RoundId, channel: m.Channel, buffer: CollectiveBuffer, skip: bool
    ) -> None:
        """Submit one bucket of this worker's part of a round; `run` submits the rest."""
        snapshot = self._mailbox.read()
        if snapshot.open_round != round_id:
            return  # `run` will say that the round is over
        collective = buffer.make_collective(snapshot.rank, snapshot.world_size, skip)
        with self._mailbox.condition:
            if self.current is None or self.current.id != round_id:
                self.current = OpenRound(round_id, {})
            self.current.buffers[channel] = buffer
        self._mailbox.submit_payload(io.SubmitRound(round_id, {channel: collective}, is_complete=False))

    def run(
        self,
        round_id: m.RoundId,
        buffers: Sequence[CollectiveBuffer | BucketedBuffer],
        skip: bool,
        settings: bytes,
    ) -> RoundOutcome:
        """Submit this worker's part of a round, as far as `begin_bucket` has not, and wait for its
        outcome."""
        snapshot = self._mailbox.read()
        if snapshot.generation != round_id.generation:
            return RoundOutcome(is_committed=False, is_skipped=False)
        with self._mailbox.condition:
            channels = buffers_by_channel(buffers)
            begun = self._current_if(round_id)
            mine = begun or OpenRound(round_id, {}, is_failed=self._was_failed_before(channels.values()))
            rest = {c: w for c, w in channels.items() if c not in mine.buffers}
        collectives = {
            channel: buffer.make_collective(snapshot.rank, snapshot.world_size, skip)
            for channel, buffer in rest.items()
        }
        with self._mailbox.condition:
            mine.buffers |= rest
            mine.voted_buffers, mine.settings = buffers, settings
            self._submit(mine)
        self._mailbox.submit(io.SubmitRound(round_id, collectives))
        if mine.is_failed:
            # The others continue from what they have, and cannot send what is missing here: all start over.
            self._mailbox.submit(io.RoundFailed("a payload of an earlier attempt was rejected here"))
        return await_outcome(self._mailbox, mine)

    def resolve_last(self, timeout_s: float) -> RoundOutcome | None:
        """How the last round ended that this worker submitted to; None: it has not within `timeout_s`.

        An attempt that was never submitted was not committed.  For a worker that was interrupted in `run`, or
        on the way to it, and leaves.  Unless it has voted YES it votes NO now: others may be in the middle of
        a long computation.
        """
        latest = self.last_submitted
        if latest is None or not self._submitted:
            return RoundOutcome(is_committed=False, is_skipped=False)
        self._mailbox.submit(io.AbandonRound())
        self._mailbox.wait(lambda _: latest.outcome is not None, timeout_s)
        return latest.outcome

    def open(
        self, round_id: m.RoundId, parts: Mapping[m.Channel, RoundPart], settings: bytes
    ) -> PipelineRound:
        """Open a round whose collectives are not all known yet."""
        mine = OpenRound(round_id, buffers_of(parts), settings=settings)
        with self._mailbox.condition:
            self._submit(mine)
        self._mailbox.submit(io.SubmitRound(round_id, collectives_of(parts), has_more=True))
        return PipelineRound(self._mailbox, mine)

    # -- I/O thread ----------------------------------------------------------------------------------

    def payload_to_send(self, effect: io.SendPayload) -> m.Data | None:
        """The message to be sent; None: the round is over here, or has failed."""
        mine = self._usable
        if mine is None or mine.id != effect.round:
            return None
        payload = mine.buffers[effect.channel].payload(effect.slot)
        return m.Data(effect.round, effect.channel, effect.slot, effect.skip, payload)

    def apply_payload(self, channel: m.Channel, effect: BufferEffect) -> None:
        """Raises `RemoteProtocolError` for a payload that cannot be used."""
        if (mine := self._usable) is not None:
            mine.buffers[channel].apply(effect)

    def mark_complete(self, channel: m.Channel, skip: bool) -> None:
        with self._mailbox.condition:
            if (mine := self._usable) is not None:
                mine.completed[channel] = skip
                self._mailbox.count_progress()
                self._mailbox.notify_trainer()

    def compute_vote_digest(self, skip: bool) -> bytes | None:
        """The digest that is voted on; None: the round has failed."""
        if (mine := self._usable) is None:
            return None
        digests = [b"" if skip else buffer.compute_digest() for buffer in mine.voted_buffers]
        mine.digests = tuple(digests)
        return vote_digest(mine.settings, skip, digests)

    def mark_failed(self) -> None:
        """A payload was rejected: otherwise it would be sent on, or be missing in the sum."""
        if self.current is not None:
            self.current.is_failed = True

    def hash_ahead(self) -> None:
        """Hash one slice while the network is busy: what arrives meanwhile waits for no more than that."""
        with self._mailbox.condition:  # the trainer may be adding a bucket
            mine = self._usable
            buffers = mine.buffers.values() if mine is not None else ()
            dense = [buffer for buffer in buffers if isinstance(buffer, DenseRingBuffer)]
        self.has_hash_work = any(buffer.hash_ahead() for buffer in dense)

    def resolve(self, round_id: m.RoundId, committed: bool, skip: bool, reason: str) -> None:
        """It is over; the trainer gets the outcome with the next snapshot (`publish_ended`)."""
        if not committed:
            log.info("step %d attempt %d did not commit: %s", round_id.step, round_id.attempt, reason)
        with self._mailbox.condition:  # the trainer may be adding a bucket
            ended = self._current_if(round_id)
            self.current = None if ended is not None else self.current
        if ended is not None:
            if committed:
                self._record_update(ended, skip)
            else:
                ended.failure_reason = reason
            self._ended.append((ended, RoundOutcome(committed, skip)))

    @property
    def has_ended(self) -> bool:
        """A round has ended whose outcome is not published yet."""
        return bool(self._ended)

    def publish_ended(self) -> bool:
        """Publish the outcomes of finished rounds; returns whether there were any.  The condition is held."""
        had_ended = self.has_ended
        for ended, outcome in self._ended:
            ended.outcome = outcome
        self._ended.clear()
        return had_ended

    @property
    def _usable(self) -> OpenRound | None:
        """The open round; None if it has failed: then nothing is computed or sent in it any more."""
        return self.current if self.current is not None and not self.current.is_failed else None

    def _current_if(self, round_id: m.RoundId) -> OpenRound | None:
        return self.current if self.current is not None and self.current.id == round_id else None

    def _submit(self, mine: OpenRound) -> None:
        self.current = self.last_submitted = mine
        self._submitted = True

    def _was_failed_before(self, buffers: Iterable[CollectiveBuffer]) -> bool:
        """A retry is about to continue with buffers of an attempt in which a payload was rejected."""
        latest = self.last_submitted
        if latest is None or not latest.is_failed:
            return False
        return any(mine is theirs for mine in buffers for theirs in latest.buffers.values())

    def _record_update(self, mine: OpenRound, skip: bool) -> None:
        """For workers that catch up: only sparse updates are small enough to be stored and sent."""
        buffer = mine.voted_buffers[0]
        if isinstance(buffer, BucketedBuffer) and not buffer.is_sparse:
            return
        if isinstance(buffer, AllGatherBuffer | ButterflyBuffer | BucketedBuffer):
            update = None if skip else buffer.update
            step_update = StepUpdate(
                mine.id.step, mine.settings, skip, update, () if skip else mine.digests[1:]
            )
            self._record_step(step_update, buffer.n)
