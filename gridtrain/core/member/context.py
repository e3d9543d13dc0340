"""What a worker keeps from one generation to the next, and what every part of its core may ask of that.

Decides nothing.  There is one of it; each `Generation` is lent it.

    Course --- Generation     seat, attempts, means, the state's way here               from VIEW to VIEW
                   |
                   v
               Lasting        edges, state, checkpoints, following, hand-over, pace     as long as it lives
"""

from __future__ import annotations

from dataclasses import dataclass

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.commit.attempts import RankAssignment
from gridtrain.core.group.member_events import Disconnect, LogEvent, MemberEffect, Send, TrainerJoined
from gridtrain.core.member.coordinator_link import CoordinatorLink
from gridtrain.core.member.member_checkpoints import MemberCheckpoints
from gridtrain.core.member.peer_links import PeerLinks
from gridtrain.core.member.replica_state import ReplicaState
from gridtrain.core.member.residual_transfer import ResidualTransfer
from gridtrain.core.member.step_pace import StepPace
from gridtrain.core.member.worker_catch_up import WorkerCatchUp


@dataclass(slots=True)
class MemberContext:
    """See the module's text.  `entered`: what the trainer brought; None: it has not come yet."""

    own_id: m.PeerId
    deadlines: Deadlines
    coordinator_link: CoordinatorLink
    peer_links: PeerLinks
    replica_state: ReplicaState
    checkpoints: MemberCheckpoints
    catch_up: WorkerCatchUp
    residual_transfer: ResidualTransfer
    step_pace: StepPace
    trainer: TrainerJoined | None = None

    @property
    def coordinator(self) -> m.PeerId:
        return self.coordinator_link.coordinator

    @property
    def setup(self) -> m.Setup | None:
        return self.trainer.setup if self.trainer is not None else None

    @property
    def is_pipelined(self) -> bool:
        return self.trainer is not None and self.trainer.is_pipelined

    @property
    def is_finished(self) -> bool:
        """The ledger has ended the run, as far as this worker has applied it."""
        return self.trainer is not None and self.replica_state.is_finished(self.trainer.setup.ledger)

    def introduce(self) -> list[MemberEffect]:
        """What the trainer brought, for the coordinator."""
        return self.coordinator_link.introduce(
            self.trainer, self.checkpoints.stored, self.replica_state.is_modified
        )

    def report_finished(self) -> list[MemberEffect]:
        """Nothing if there is more to do."""
        if not self.is_finished:
            return []
        return [Send(self.coordinator, m.RunFinished(*self.replica_state.position))]

    def known_peers(self, seat: RankAssignment | None) -> frozenset[m.PeerId]:
        """Whom this worker deals with: the coordinator, the members, and who was announced; nobody else."""
        return self.peer_links.known_peers(seat, self.catch_up.peers)

    def disconnect_strangers(self, seat: RankAssignment | None) -> list[MemberEffect]:
        """Of whom it does not deal with any more."""
        return self.peer_links.disconnect_strangers(self.known_peers(seat))

    def exclude_peer(self, peer: m.PeerId, reason: str) -> list[MemberEffect]:
        """It has broken the protocol."""
        if not self.peer_links.exclude_peer(peer):
            return [Disconnect(peer)]
        note = LogEvent("offence", {"peer": peer.hex()[:8], "reason": reason})
        return [note, Disconnect(peer), *self.catch_up.source_lost(peer)]
