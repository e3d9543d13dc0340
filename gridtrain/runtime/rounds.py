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

from gridtrain.protocol import member_io as io
from gridtrain.protocol import messages as m
from gridtrain.protocol.collective import WorkspaceEffect
from gridtrain.runtime.buckets import BucketedWorkspace, by_channel
from gridtrain.runtime.buffers import ButterflyWorkspace, DenseWorkspace, GatherWorkspace, Workspace
from gridtrain.runtime.meeting import Meeting
from gridtrain.runtime.opened import (
    OpenedRound,
    OpenRound,
    Part,
    await_outcome,
    collectives_of,
    workspaces_of,
)
from gridtrain.runtime.plan import RoundOutcome
from gridtrain.runtime.updates import StepUpdate, vote_digest

log = logging.getLogger("gridtrain")


class Rounds:
    """See the module's text.

    Args:
        keep: is given what a sparse step did, and the length of the flat gradient, for followers.

    Attributes:
        current: the round that is open here.
        latest: that this worker has submitted to; it may be over.
    """

    def __init__(self, meeting: Meeting, keep: Callable[[StepUpdate, int], None]) -> None:
        self._meeting, self._keep = meeting, keep
        self.current: OpenRound | None = None
        self.latest: OpenRound | None = None
        self._submitted = False  # since `begin_attempt`
        self._ended: list[tuple[OpenRound, RoundOutcome]] = []  # the trainer has not been told yet
        self.may_hash = False  # a dense sum has slices to be hashed before the end

    # -- the trainer's thread ------------------------------------------------------------------------

    def begin_attempt(self) -> None:
        """What `settle` says is of the round that is submitted next."""
        self._submitted = False

    def begin(self, round_id: m.RoundId, channel: m.Channel, workspace: Workspace, skip: bool) -> None:
        """Submit one bucket of this worker's part of a round; `run` brings the rest."""
        picture = self._meeting.look()
        if picture.open_round != round_id:
            return  # `run` will say that the round is over
        collective = workspace.collective(picture.rank, picture.world_size, skip)
        with self._meeting.changed:
            if self.current is None or self.current.id != round_id:
                self.current = OpenRound(round_id, {})
            self.current.workspaces[channel] = workspace
        self._meeting.bring(io.Submit(round_id, {channel: collective}, whole=False))

    def run(
        self,
        round_id: m.RoundId,
        workspaces: Sequence[Workspace | BucketedWorkspace],
        skip: bool,
        settings: bytes,
    ) -> RoundOutcome:
        """Submit this worker's part of a round, or what `begin` left, and wait for its outcome."""
        picture = self._meeting.look()
        if picture.generation != round_id.generation:
            return RoundOutcome(committed=False, skip=False)
        with self._meeting.changed:
            channels = by_channel(workspaces)
            begun = self._open_as(round_id)
            mine = begun or OpenRound(round_id, {}, spoilt=self._spoilt_before(channels.values()))
            rest = {c: w for c, w in channels.items() if c not in mine.workspaces}
        collectives = {
            channel: workspace.collective(picture.rank, picture.world_size, skip)
            for channel, workspace in rest.items()
        }
        with self._meeting.changed:
            mine.workspaces |= rest
            mine.whole, mine.settings = workspaces, settings
            self._submit(mine)
        self._meeting.command(io.Submit(round_id, collectives))
        if mine.spoilt:
            # The others go on from what they have, and cannot send what is missing here: all begin anew.
            self._meeting.command(io.Broke("what came in an earlier attempt was refused here"))
        return await_outcome(self._meeting, mine)

    def settle(self, timeout_s: float) -> RoundOutcome | None:
        """How the latest round ended that this worker submitted to; None: it has not, in that time.

        Of an attempt that was never submitted: not committed.  For whoever was interrupted in `run`, or
        on the way to it, and leaves.  Unless it has voted YES it votes NO now: others may be in the middle of
        a long computation.
        """
        latest = self.latest
        if latest is None or not self._submitted:
            return RoundOutcome(committed=False, skip=False)
        self._meeting.command(io.Withdraw())
        self._meeting.wait(lambda _: latest.outcome is not None, timeout_s)
        return latest.outcome

    def open(self, round_id: m.RoundId, parts: Mapping[m.Channel, Part], settings: bytes) -> OpenedRound:
        """Open a round whose collectives are not all known yet."""
        mine = OpenRound(round_id, workspaces_of(parts), settings=settings)
        with self._meeting.changed:
            self._submit(mine)
        self._meeting.command(io.Submit(round_id, collectives_of(parts), more=True))
        return OpenedRound(self._meeting, mine)

    # -- the loop's thread ---------------------------------------------------------------------------

    def data(self, ship: io.Ship) -> m.Data | None:
        """What is to be sent; None: the round is over here, or spoilt."""
        mine = self._sound
        if mine is None or mine.id != ship.round:
            return None
        payload = mine.workspaces[ship.channel].payload(ship.place)
        return m.Data(ship.round, ship.channel, ship.place, ship.skip, payload)

    def fill(self, channel: m.Channel, effect: WorkspaceEffect) -> None:
        """Raises `RemoteProtocolError` for a payload that is not what it must be."""
        if (mine := self._sound) is not None:
            mine.workspaces[channel].apply(effect)

    def reached(self, channel: m.Channel, skip: bool) -> None:
        with self._meeting.changed:
            if (mine := self._sound) is not None:
                mine.reached[channel] = skip
                self._meeting.progress += 1
                self._meeting.wake()

    def seal(self, skip: bool) -> bytes | None:
        """The digest that is voted on; None: nobody votes for what was spoilt."""
        if (mine := self._sound) is None:
            return None
        seals = [b"" if skip else workspace.seal() for workspace in mine.whole]
        mine.seals = tuple(seals)
        return vote_digest(mine.settings, skip, seals)

    def spoil(self) -> None:
        """Something was refused: else that would be sent on, or missed in the sum."""
        if self.current is not None:
            self.current.spoilt = True

    def hash_ahead(self) -> None:
        """While the wire is busy: one slice each time, so that what comes meanwhile waits for no more."""
        with self._meeting.changed:  # the trainer may be adding a bucket
            mine = self._sound
            workspaces = mine.workspaces.values() if mine is not None else ()
            dense = [workspace for workspace in workspaces if isinstance(workspace, DenseWorkspace)]
        self.may_hash = any(workspace.hash_ahead() for workspace in dense)

    def resolve(self, round_id: m.RoundId, committed: bool, skip: bool, reason: str) -> None:
        """It is over; the trainer hears of it with the next picture, see `tell`."""
        if not committed:
            log.info("step %d attempt %d did not commit: %s", round_id.step, round_id.attempt, reason)
        with self._meeting.changed:  # the trainer may be adding a bucket
            ended = self._open_as(round_id)
            self.current = None if ended is not None else self.current
        if ended is not None:
            if committed:
                self._remember(ended, skip)
            else:
                ended.why = reason
            self._ended.append((ended, RoundOutcome(committed, skip)))

    @property
    def has_ended(self) -> bool:
        """One of which the trainer has not been told."""
        return bool(self._ended)

    def tell(self) -> bool:
        """Locked.  What `resolve` was told is the trainer's now; True: it was something."""
        told = self.has_ended
        for ended, outcome in self._ended:
            ended.outcome = outcome
        self._ended.clear()
        return told

    # -- inside --------------------------------------------------------------------------------------

    @property
    def _sound(self) -> OpenRound | None:
        """Of a round that is spoilt nothing is computed, sent or sealed any more."""
        return self.current if self.current is not None and not self.current.spoilt else None

    def _open_as(self, round_id: m.RoundId) -> OpenRound | None:
        return self.current if self.current is not None and self.current.id == round_id else None

    def _submit(self, mine: OpenRound) -> None:
        self.current = self.latest = mine
        self._submitted = True

    def _spoilt_before(self, workspaces: Iterable[Workspace]) -> bool:
        """A retry is about to go on from numbers of an attempt in which something was refused."""
        latest = self.latest
        if latest is None or not latest.spoilt:
            return False
        return any(mine is theirs for mine in workspaces for theirs in latest.workspaces.values())

    def _remember(self, mine: OpenRound, skip: bool) -> None:
        """For followers: only sparse updates are small enough to be kept and sent."""
        workspace = mine.whole[0]
        if isinstance(workspace, BucketedWorkspace) and not workspace.is_sparse:
            return
        if isinstance(workspace, GatherWorkspace | ButterflyWorkspace | BucketedWorkspace):
            update = None if skip else workspace.update
            kept = StepUpdate(mine.id.step, mine.settings, skip, update, () if skip else mine.seals[1:])
            self._keep(kept, workspace.n)
