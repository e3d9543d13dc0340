"""The parts of a worker's state machine that outlive a generation: links, state, checkpoints and residuals.

ViewChanges --- Generation     rank assignment, attempts, averages, incoming state  one generation
                   |
                   v
             MemberContext     links, state, checkpoints, catch-up, residuals       lifetime of the worker
"""

from __future__ import annotations

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.group.member_events import Disconnect, LogEvent, MemberEffect, Send, TrainerJoined
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.core.member.coordinator_link import CoordinatorLink
from gridtrain.core.member.member_checkpoints import MemberCheckpoints
from gridtrain.core.member.peer_links import PeerLinks
from gridtrain.core.member.replica_state import ReplicaState
from gridtrain.core.member.residual_recipients import ResidualTransfer
from gridtrain.core.member.step_pace import StepPace
from gridtrain.core.member.stragglers import UsualDelays
from gridtrain.core.member.worker_catch_up import WorkerCatchUp


class MemberContext:
    """The objects that all generations of a worker share.

    Attributes:
        trainer: the event with the trainer's setup; None until the trainer has joined.
    """

    def __init__(self, own_id: m.PeerId, coordinator: m.PeerId, join: m.Join, deadlines: Deadlines) -> None:
        self.own_id, self.coordinator = own_id, coordinator
        self.deadlines = deadlines
        self.coordinator_link = CoordinatorLink(coordinator, join)
        self.peer_links = PeerLinks(own_id, coordinator)
        self.replica_state = ReplicaState()
        self.checkpoints = MemberCheckpoints(self.replica_state, self.coordinator_link)
        self.catch_up = WorkerCatchUp(self.peer_links, deadlines.route_s)
        self.residual_transfer = ResidualTransfer(self.replica_state, self.peer_links)
        self.step_pace = StepPace(deadlines)
        self.usual_delays = UsualDelays()
        self.trainer: TrainerJoined | None = None

    @property
    def setup(self) -> m.Setup | None:
        return self.trainer.setup if self.trainer is not None else None

    @property
    def is_pipelined(self) -> bool:
        return self.trainer is not None and self.trainer.is_pipelined

    @property
    def is_finished(self) -> bool:
        """Whether the run has ended, at its last step or early."""
        return self.is_at_end or self.is_ended_early

    @property
    def is_at_end(self) -> bool:
        """Whether the run has ended according to the ledger of this worker's state."""
        return self.trainer is not None and self.replica_state.is_finished(self.trainer.setup.ledger)

    @property
    def is_ended_early(self) -> bool:
        """Whether the owner ended the run before all of its steps were completed."""
        return self.is_declared_finished and not self.is_at_end

    @property
    def is_declared_finished(self) -> bool:
        """Whether this worker is synced and the coordinator has declared the run finished.

        In that case, this worker needs no other member.
        """
        is_finished = self.replica_state.is_synced and self.coordinator_link.run_state[0] == "finished"
        return is_finished and self.trainer is not None

    def trainer_joined(self, trainer: TrainerJoined) -> None:
        self.trainer = trainer
        self.checkpoints.set_stored(trainer.setup.stage_checkpoints)

    def introduce(self) -> list[MemberEffect]:
        """Send the trainer's setup to the coordinator."""
        return self.coordinator_link.introduce(
            self.trainer, self.checkpoints.stored, self.replica_state.is_modified
        )

    def report_finished(self) -> list[MemberEffect]:
        """Send RunFinished to the coordinator if the run has ended."""
        if not self.is_finished:
            return []
        return [Send(self.coordinator, m.RunFinished(*self.replica_state.position))]

    def known_peers(self, assignment: RankAssignment | None) -> frozenset[m.PeerId]:
        """Return the peers whose messages are accepted.

        These are the coordinator, the members, the announced peers, and the catch-up partners.
        """
        return self.peer_links.known_peers(assignment, self.catch_up.peers)

    def disconnect_strangers(self, assignment: RankAssignment | None) -> list[MemberEffect]:
        return self.peer_links.disconnect_strangers(self.known_peers(assignment))

    def exclude_peer(self, peer: m.PeerId, reason: str) -> list[MemberEffect]:
        """Exclude and disconnect a peer that violated the protocol."""
        if not self.peer_links.exclude_peer(peer):
            return [Disconnect(peer)]
        event = LogEvent("offence", {"peer": peer.hex()[:8], "reason": reason})
        return [event, Disconnect(peer), *self.catch_up.source_lost(peer)]
