"""The line between the stages of one pipeline, over the round that is open in the group.

Decides on which channel of the round a payload travels.  Never decides what is sent when (the runner), nor
whether the round goes on (the group).

    Runner.send -----> HandOff  } collectives of the open round, one for each payload:      the group
    Runner.receive <-- TakeOver } stale ones never match, nobody waits longer than all  <-> (vote, FREEZE)

A payload that nobody has asked for yet is taken and held ready if it was `expected`; others wait in the core.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gridtrain.core.collectives.activation_transfer import stage_channel
from gridtrain.core.group.rank_layout import RankLayout
from gridtrain.core.messages import Channel
from gridtrain.errors import LineBroken
from gridtrain.runtime.activation_buffers import ActivationReceiveBuffer, ActivationSendBuffer
from gridtrain.runtime.open_round import PipelineRound, RoundPart

ExpectedPayloads = Iterable[tuple[int, Channel]]
"""(stage that sends, channel)."""


class RoundStageLink:
    """See `gridtrain.pipeline.executor.Line`.  Of one attempt at one step.

    Args:
        seats: of the generation.
        rank: this member's.
        limit_bytes: of one payload; a larger one is no honest neighbour's.
    """

    def __init__(self, seats: RankLayout, rank: int, limit_bytes: int) -> None:
        self._seats, self._rank, self._limit_bytes = seats, rank, limit_bytes
        self._stage, self._replica = seats.stage_of(rank), seats.replica_of(rank)
        self._received: dict[Channel, ActivationReceiveBuffer] = {}
        self._round: PipelineRound | None = None

    def round_parts(self, expected: ExpectedPayloads) -> dict[Channel, RoundPart]:
        """To open the round with: payloads that will come, whenever they are asked for."""
        return dict(self._take_payload(stage, channel) for stage, channel in expected)

    def set_round(self, round_: PipelineRound) -> None:
        self._round = round_

    def send(self, stage: int, channel: Channel, buffers: Sequence[memoryview]) -> None:
        self._check_not_broken()
        workspace = ActivationSendBuffer(buffers)
        collective = workspace.make_send(self._rank, self._seats.rank_of(stage, self._replica))
        self._open_round.add({stage_channel(self._stage, stage, channel): RoundPart(collective, workspace)})

    def receive(self, stage: int, channel: Channel) -> Sequence[memoryview]:
        where = stage_channel(stage, self._stage, channel)
        if where not in self._received:
            self._check_not_broken()
            self._open_round.add(dict([self._take_payload(stage, channel)]))
        if not self._open_round.wait(where):
            raise self._broken_error()
        return self._received.pop(where).take_buffers()

    def abort(self, reason: str) -> None:
        self._open_round.fail(reason)

    def fail_attempt(self, broken: LineBroken) -> None:
        """This attempt ends here: nobody waits for this stage, and whose payload was unfit answers for it."""
        if broken.peer is not None:
            self._open_round.report_peer(self._seats.rank_of(broken.peer, self._replica), broken.reason)
        self.abort(broken.reason)

    @property
    def _open_round(self) -> PipelineRound:
        assert self._round is not None, "the line was used before its round was opened"
        return self._round

    def _take_payload(self, stage: int, channel: Channel) -> tuple[Channel, RoundPart]:
        where, workspace = (
            stage_channel(stage, self._stage, channel),
            ActivationReceiveBuffer(self._limit_bytes),
        )
        self._received[where] = workspace
        sender = self._seats.rank_of(stage, self._replica)
        return where, RoundPart(workspace.make_receive(self._rank, sender, self._seats.world_size), workspace)

    def _check_not_broken(self) -> None:
        if self._open_round.is_lost:
            raise self._broken_error()

    def _broken_error(self) -> LineBroken:
        return LineBroken(
            self._open_round.failure_reason or "the round is lost: a member is gone, or could not go on"
        )
