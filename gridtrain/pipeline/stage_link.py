"""Sends and receives activations and gradients between the stages of a pipeline in the group's open round.

Each payload is sent and received by a collective of the open round (`ActivationSendBuffer`,
`ActivationReceiveBuffer`).  The collectives end with the round, so every wait ends.  The payloads that
`round_parts` expects are received even before `receive` is called; the core stores others until that call.
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
"""Pairs (sending stage, channel)."""


class RoundStageLink:
    """Connects one stage to the other stages of its pipeline, for one attempt at one step.

    Stages are identified by their numbers in the pipeline of one replica.  A payload is sent from one stage
    to another on one channel (`gridtrain.core.stages.schedule`); each channel is used once.  `receive` never
    returns a payload of another attempt.

    Args:
        layout: the layout of the generation.
        rank: the rank of this member.
        limit_bytes: the maximum size of a payload.
    """

    def __init__(self, layout: RankLayout, rank: int, limit_bytes: int) -> None:
        self._layout, self._rank, self._limit_bytes = layout, rank, limit_bytes
        self._stage, self._replica = layout.stage_of(rank), layout.replica_of(rank)
        self._received: dict[Channel, ActivationReceiveBuffer] = {}
        self._round: PipelineRound | None = None

    def round_parts(self, expected: ExpectedPayloads) -> dict[Channel, RoundPart]:
        """Return the parts with which the round must be opened to receive the expected payloads."""
        return dict(self._take_payload(stage, channel) for stage, channel in expected)

    def set_round(self, round_: PipelineRound) -> None:
        self._round = round_

    def send(self, stage: int, channel: Channel, buffers: Sequence[memoryview]) -> None:
        """Send a payload without waiting for the receiver or the network.

        The buffers must be contiguous and have the format "B".  They are not copied, so the caller must not
        change them while the link exists.  `buffers`, and each buffer in it, may be empty.

        Raises:
            LineBroken: the attempt is over.
        """
        self._check_not_broken()
        buffer = ActivationSendBuffer(buffers)
        collective = buffer.make_send(self._rank, self._layout.rank_of(stage, self._replica))
        self._open_round.add({stage_channel(self._stage, stage, channel): RoundPart(collective, buffer)})

    def receive(self, stage: int, channel: Channel) -> Sequence[memoryview]:
        """Wait for the payload that `stage` sends to this stage on `channel`, and return it.

        The caller must not write to the buffers, and must check their number and sizes
        (`TensorTreeSpec.decode`); the link only limits their total size.

        Raises:
            LineBroken: the payload will not arrive, because a stage failed, left, aborted or timed out.  All
                waiting stages get this error immediately, regardless of which stage is at fault.
        """
        where = stage_channel(stage, self._stage, channel)
        if where not in self._received:
            self._check_not_broken()
            self._open_round.add(dict([self._take_payload(stage, channel)]))
        if not self._open_round.wait(where):
            raise self._broken_error()
        return self._received.pop(where).take_buffers()

    def abort(self, reason: str) -> None:
        """End the attempt: `receive` and `send` then raise `LineBroken` on all stages.

        This method can be called more than once, and after the link has broken.
        """
        self._open_round.fail(reason)

    def fail_attempt(self, broken: LineBroken) -> None:
        """End this attempt on all stages, and report the stage that `broken` names, if any, as the cause."""
        if broken.peer is not None:
            self._open_round.report_peer(self._layout.rank_of(broken.peer, self._replica), broken.reason)
        self.abort(broken.reason)

    @property
    def _open_round(self) -> PipelineRound:
        assert self._round is not None, "the link was used before its round was opened"
        return self._round

    def _take_payload(self, stage: int, channel: Channel) -> tuple[Channel, RoundPart]:
        where, buffer = stage_channel(stage, self._stage, channel), ActivationReceiveBuffer(self._limit_bytes)
        self._received[where] = buffer
        sender = self._layout.rank_of(stage, self._replica)
        return where, RoundPart(buffer.make_receive(self._rank, sender, self._layout.world_size), buffer)

    def _check_not_broken(self) -> None:
        if self._open_round.is_lost:
            raise self._broken_error()

    def _broken_error(self) -> LineBroken:
        return LineBroken(
            self._open_round.failure_reason or "the round failed, because a member left or could not continue"
        )
