"""The line between the stages of one pipeline, over the round that is open in the group.

Decides on which channel of the round a payload travels.  Never decides what is sent when (the runner), nor
whether the round goes on (the group).

    Runner.send -----> HandOff  } collectives of the open round, one for each payload:      the group
    Runner.receive <-- TakeOver } stale ones never match, nobody waits longer than all  <-> (vote, FREEZE)

A payload that nobody has asked for yet is taken and held ready if it was `expected`; others wait in the core.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gridtrain.errors import LineBroken
from gridtrain.protocol.handoff import between
from gridtrain.protocol.messages import Channel
from gridtrain.protocol.seats import Seats
from gridtrain.runtime.handoffs import HandOffWorkspace, TakeOverWorkspace
from gridtrain.runtime.opened import OpenedRound, Part

Expected = Iterable[tuple[int, Channel]]
"""(stage that sends, channel)."""


class GroupLine:
    """See `gridtrain.pipeline.runner.Line`.  Of one attempt at one step.

    Args:
        seats: of the generation.
        rank: this member's.
        limit_bytes: of one payload; a larger one is no honest neighbour's.
    """

    def __init__(self, seats: Seats, rank: int, limit_bytes: int) -> None:
        self._seats, self._rank, self._limit_bytes = seats, rank, limit_bytes
        self._stage, self._replica = seats.stage_of(rank), seats.replica_of(rank)
        self._taking: dict[Channel, TakeOverWorkspace] = {}
        self._round: OpenedRound | None = None

    def parts(self, expected: Expected) -> dict[Channel, Part]:
        """To open the round with: payloads that will come, whenever they are asked for."""
        return dict(self._take(stage, channel) for stage, channel in expected)

    def opened(self, round_: OpenedRound) -> None:
        self._round = round_

    def send(self, stage: int, channel: Channel, buffers: Sequence[memoryview]) -> None:
        self._check()
        workspace = HandOffWorkspace(buffers)
        collective = workspace.to(self._rank, self._seats.rank(stage, self._replica))
        self._open.add({between(self._stage, stage, channel): Part(collective, workspace)})

    def receive(self, stage: int, channel: Channel) -> Sequence[memoryview]:
        where = between(stage, self._stage, channel)
        if where not in self._taking:
            self._check()
            self._open.add(dict([self._take(stage, channel)]))
        if not self._open.wait(where):
            raise self._broken()
        return self._taking.pop(where).take()

    def abort(self, reason: str) -> None:
        self._open.fail(reason)

    def give_up(self, broken: LineBroken) -> None:
        """This attempt ends here: nobody waits for this stage, and whose payload was unfit answers for it."""
        if broken.peer is not None:
            self._open.blame(self._seats.rank(broken.peer, self._replica), broken.reason)
        self.abort(broken.reason)

    @property
    def _open(self) -> OpenedRound:
        assert self._round is not None, "the line was used before its round was opened"
        return self._round

    def _take(self, stage: int, channel: Channel) -> tuple[Channel, Part]:
        where, workspace = between(stage, self._stage, channel), TakeOverWorkspace(self._limit_bytes)
        self._taking[where] = workspace
        sender = self._seats.rank(stage, self._replica)
        return where, Part(workspace.by(self._rank, sender, self._seats.world_size), workspace)

    def _check(self) -> None:
        if self._open.lost:
            raise self._broken()

    def _broken(self) -> LineBroken:
        return LineBroken(self._open.why or "the round is lost: a member is gone, or could not go on")
