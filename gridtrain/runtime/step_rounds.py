"""The rounds that this worker takes part in: their numbers, and how they end.

Decides what may still be added to a round, computed in it or sent of it.  Never decides who sends what to
whom, nor whether a round commits: the core does, whose effects the loop brings here.

    trainer's thread                                         the loop's thread
      begin .. run               --- Submit, Extend -->        core --> data, fill, reached   numbers
      open --> OpenedRound            (commands)                    --> seal --> digest, for the vote
                                                                    --> resolve
      run, settle, OpenedRound   <-- outcome, with the picture ----------- tell
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
    """See the module's text.

    Args:
        keep: is given what a sparse step did, and the length of the flat gradient, for followers.

    Attributes:
        current: the round that is open here.
        latest: that this worker has submitted to; it may be over.
    """

    def __init__(self, meeting: Mailbox, keep: Callable[[StepUpdate, int], None]) -> None:
        self._mailbox, self._record_step = meeting, keep
        self.current: OpenRound | None = None
        self.last_submitted: OpenRound | None = None
        self._submitted = False  # since `begin_attempt`
        self._ended: list[tuple[OpenRound, RoundOutcome]] = []  # the trainer has not been told yet
        self.has_hash_work = False  # a dense sum has slices to be hashed before the end

    # -- the trainer's thread ------------------------------------------------------------------------

    def begin_attempt(self) -> None:
        """What `settle` says is of the round that is submitted next."""
        self._submitted = False

    def begin_bucket(
        self, round_id: m.RoundId, channel: m.Channel, workspace: CollectiveBuffer, skip: bool
    ) -> None:
        """Submit one bucket of this worker's part of a round; `run` brings the rest."""
        picture = self._mailbox.read()
        if picture.open_round != round_id:
            return  # `run` will say that the round is over
        collective = workspace.make_collective(picture.rank, picture.world_size, skip)
        with self._mailbox.condition:
            if self.current is None or self.current.id != round_id:
                self.current = OpenRound(round_id, {})
            self.current.buffers[channel] = workspace
        self._mailbox.submit_payload(io.SubmitRound(round_id, {channel: collective}, is_complete=False))

    def run(
        self,
        round_id: m.RoundId,
        workspaces: Sequence[CollectiveBuffer | BucketedBuffer],
        skip: bool,
        settings: bytes,
    ) -> RoundOutcome:
        """Submit this worker's part of a round, or what `begin` left, and wait for its outcome."""
        picture = self._mailbox.read()
        if picture.generation != round_id.generation:
            return RoundOutcome(is_committed=False, is_skipped=False)
        with self._mailbox.condition:
            channels = buffers_by_channel(workspaces)
            begun = self._current_if(round_id)
            mine = begun or OpenRound(round_id, {}, is_failed=self._was_failed_before(channels.values()))
            rest = {c: w for c, w in channels.items() if c not in mine.buffers}
        collectives = {
            channel: workspace.make_collective(picture.rank, picture.world_size, skip)
            for channel, workspace in rest.items()
        }
        with self._mailbox.condition:
            mine.buffers |= rest
            mine.voted_buffers, mine.settings = workspaces, settings
            self._submit(mine)
        self._mailbox.submit(io.SubmitRound(round_id, collectives))
        if mine.is_failed:
            # The others go on from what they have, and cannot send what is missing here: all begin anew.
            self._mailbox.submit(io.RoundFailed("what came in an earlier attempt was refused here"))
        return await_outcome(self._mailbox, mine)

    def resolve_last(self, timeout_s: float) -> RoundOutcome | None:
        """How the latest round ended that this worker submitted to; None: it has not, in that time.

        Of an attempt that was never submitted: not committed.  For whoever was interrupted in `run`, or
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

    # -- the loop's thread ---------------------------------------------------------------------------

    def payload_to_send(self, ship: io.SendPayload) -> m.Data | None:
        """What is to be sent; None: the round is over here, or spoilt."""
        mine = self._is_usable
        if mine is None or mine.id != ship.round:
            return None
        payload = mine.buffers[ship.channel].payload(ship.slot)
        return m.Data(ship.round, ship.channel, ship.slot, ship.skip, payload)

    def apply_payload(self, channel: m.Channel, effect: BufferEffect) -> None:
        """Raises `RemoteProtocolError` for a payload that is not what it must be."""
        if (mine := self._is_usable) is not None:
            mine.buffers[channel].apply(effect)

    def mark_complete(self, channel: m.Channel, skip: bool) -> None:
        with self._mailbox.condition:
            if (mine := self._is_usable) is not None:
                mine.completed[channel] = skip
                self._mailbox.progress += 1
                self._mailbox.notify_trainer()

    def compute_vote_digest(self, skip: bool) -> bytes | None:
        """The digest that is voted on; None: nobody votes for what was spoilt."""
        if (mine := self._is_usable) is None:
            return None
        seals = [b"" if skip else workspace.compute_digest() for workspace in mine.voted_buffers]
        mine.digests = tuple(seals)
        return vote_digest(mine.settings, skip, seals)

    def mark_failed(self) -> None:
        """Something was refused: else that would be sent on, or missed in the sum."""
        if self.current is not None:
            self.current.is_failed = True

    def hash_ahead(self) -> None:
        """While the wire is busy: one slice each time, so that what comes meanwhile waits for no more."""
        with self._mailbox.condition:  # the trainer may be adding a bucket
            mine = self._is_usable
            workspaces = mine.buffers.values() if mine is not None else ()
            dense = [workspace for workspace in workspaces if isinstance(workspace, DenseRingBuffer)]
        self.has_hash_work = any(workspace.hash_ahead() for workspace in dense)

    def resolve(self, round_id: m.RoundId, committed: bool, skip: bool, reason: str) -> None:
        """It is over; the trainer hears of it with the next picture, see `tell`."""
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
        """One of which the trainer has not been told."""
        return bool(self._ended)

    def publish_ended(self) -> bool:
        """Locked.  What `resolve` was told is the trainer's now; True: it was something."""
        told = self.has_ended
        for ended, outcome in self._ended:
            ended.outcome = outcome
        self._ended.clear()
        return told

    # -- inside --------------------------------------------------------------------------------------

    @property
    def _is_usable(self) -> OpenRound | None:
        """Of a round that is spoilt nothing is computed, sent or sealed any more."""
        return self.current if self.current is not None and not self.current.is_failed else None

    def _current_if(self, round_id: m.RoundId) -> OpenRound | None:
        return self.current if self.current is not None and self.current.id == round_id else None

    def _submit(self, mine: OpenRound) -> None:
        self.current = self.last_submitted = mine
        self._submitted = True

    def _was_failed_before(self, workspaces: Iterable[CollectiveBuffer]) -> bool:
        """A retry is about to go on from numbers of an attempt in which something was refused."""
        latest = self.last_submitted
        if latest is None or not latest.is_failed:
            return False
        return any(mine is theirs for mine in workspaces for theirs in latest.buffers.values())

    def _record_update(self, mine: OpenRound, skip: bool) -> None:
        """For followers: only sparse updates are small enough to be kept and sent."""
        workspace = mine.voted_buffers[0]
        if isinstance(workspace, BucketedBuffer) and not workspace.is_sparse:
            return
        if isinstance(workspace, AllGatherBuffer | ButterflyBuffer | BucketedBuffer):
            update = None if skip else workspace.update
            kept = StepUpdate(mine.id.step, mine.settings, skip, update, () if skip else mine.digests[1:])
            self._record_step(kept, workspace.n)
