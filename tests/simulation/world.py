"""A whole group on the virtual network: the real membership and member cores, and toy trainers.

The world executes the cores' effects as the I/O loop and the daemon do, lets workers join, leave, crash and
lose connections, and records what happened, so that tests can check the guarantees.  A seed is a history.
    Membership <-- virtual network --> MemberCore + ToyTrainer, one of each for every worker

The model of the toy trainer is a vector; the gradient of a sample is a small integer vector that its position
determines, so that sums are exact and every lost or repeated sample shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from types import MappingProxyType
from typing import Any, Protocol, cast

from compacted_journal import compacted

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.group import member_events as ev
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.core.group.round_flags import SKIP, absent_flag, is_skipped
from gridtrain.core.member.member import MemberCore
from gridtrain.core.messages import RELAY_PREFIX, relay_of
from gridtrain.errors import JoinRefused, RemoteProtocolError
from gridtrain_coordinator.membership.membership import Membership
from gridtrain_coordinator.run import events as cio
from gridtrain_coordinator.run.journal_recovery import is_same_run, recover_run
from simulation.commit_coverage import CommitCoverage, MemberBefore, open_round
from simulation.virtual_network import LinkProperties, VirtualNetwork

COORDINATOR = b"c" * 32


class SimTrainer(Protocol):
    """What a simulated worker computes with; tests provide it."""

    def prepare(
        self, round_id: m.RoundId, assignment: RankAssignment, spans: Sequence[m.Span], skip: bool
    ) -> dict[m.Channel, Any]:
        """Collective buffers for one attempt, from the same samples each time.

        Args:
            skip: the gradient is not finite.
        """
        ...

    def commit(self, buffers: dict[m.Channel, Any], skip: bool) -> None: ...

    def capture(self) -> Any: ...

    def restore(self, state: Any) -> None: ...

    def take_residual(self) -> Any:
        """The residual of this worker, which is leaving; it takes no further step."""
        ...

    def add_residual(self, residual: Any) -> None:
        """Add the residual that another worker has transferred."""

    def clear_residual(self) -> None:
        """Clear the residual, which belongs to the state that has been replaced, and report it as lost."""
        ...


class StallingTrainer(SimTrainer, Protocol):
    """A trainer without which steps may commit while it is stalled."""

    def prepare_empty(self, round_id: m.RoundId, assignment: RankAssignment) -> dict[m.Channel, Any]:
        """Collective buffers for an attempt to which the stalled trainer contributes nothing."""
        ...

    def apply_missed(self, buffers: dict[m.Channel, Any]) -> None:
        """Apply a committed step, with the buffers that `prepare_empty` has made for it."""
        ...


RESIDUAL_TRANSFER_S = 3.0
MAX_CATCH_UP_S = 2.0


@dataclass(frozen=True, slots=True)
class _ConnectionChange:
    """Sent through the network when a connection opens or breaks."""

    up: bool


@dataclass(slots=True)
class Submission:
    """What one worker contributed to one attempt."""

    peer: m.PeerId
    round: m.RoundId
    spans: tuple[m.Span, ...]


@dataclass(slots=True)
class History:
    """What happened, for tests."""

    submissions: list[Submission] = field(default_factory=list)
    absences: list[tuple[m.PeerId, m.RoundId]] = field(default_factory=list)  # committed without its trainer
    late_submissions: int = 0  # batches of steps that were committed before
    declined: int = 0  # requests to be absent that came too late
    commits: list[tuple[m.PeerId, m.RoundId, bytes]] = field(default_factory=list)
    aborts: int = 0
    joins: int = 0
    crashes: int = 0
    generations: int = 0
    restarts: int = 0
    start_overs: int = 0
    voided: int = 0
    repeated: int = 0  # batches that a restarted process computed again, in runs with a delay
    state_transfers: int = 0
    passed_on: int = 0
    rollbacks: int = 0
    restarted_processes: int = 0  # processes that started with the key of one that had just died
    blackouts: int = 0  # moments in which no worker was alive
    blank_backups: int = 0  # lost disks and fail-overs after which nothing names a member
    coordinator_failovers: int = 0
    lost_disks: int = 0  # of the coordinator, with a generation that no backup knew
    skipped: set[m.RoundId] = field(default_factory=set)
    caught_up: int = 0
    refused: list[str] = field(default_factory=list)
    acknowledged: list[tuple[m.PeerId, m.PeerId]] = field(
        default_factory=list
    )  # residuals: (leaver, recipient)
    added_residuals: list[tuple[m.PeerId, m.PeerId]] = field(default_factory=list)
    void_residuals: list[tuple[m.PeerId, m.PeerId]] = field(
        default_factory=list
    )  # acknowledged, but counted already


@dataclass(frozen=True, slots=True)
class WorkerDisk:
    """What a worker finds on its disk when it restarts."""

    checkpoint: m.CheckpointInfo
    state: Any


class SimWorker:
    """One worker: core, trainer, and what the I/O loop does between them."""

    def __init__(self, world: World, peer: m.PeerId, trainer: SimTrainer, setup: m.Setup) -> None:
        self.world = world
        self.peer = peer
        self.trainer = trainer
        self.disk: WorkerDisk | None = None
        self.flip_next = False  # whether one bit of the next update is to be wrong here
        self.alive = True
        self.left = False
        join = m.Join("sim", peer.hex()[:6], peer.hex())
        self.core = MemberCore(peer, COORDINATOR, join, world.deadlines)
        self._setup = setup
        self._batch: tuple[m.Span, ...] = ()
        self._batch_step = -1
        self._computing = False
        self.has_computed = False  # a batch, at least
        self._frozen = False
        self._offered: m.StateBlock | None = None
        self._missed_events: list[ev.MemberEvent] = []
        self._buffers: dict[m.Channel, Any] = {}
        self._state_requests: list[tuple[m.PeerId, int, int, bool]] = []
        self._forward_requests: list[
            tuple[m.PeerId, int, int]
        ] = []  # workers to which the received state is forwarded
        self._received_block: m.StateBlock | None = None
        self._computed: tuple[m.Span, ...] = ()  # the batch of the turn before, in a run with a delay
        self._begun: tuple[m.Span, ...] = ()  # the batch that is computed, or was computed last
        self._stalled_until_s = 0.0  # the trainer alone; the core and the connections go on
        self._is_absent = False  # from the open round
        self._missed: list[tuple[dict[m.Channel, Any], bool]] = []  # buffers of committed steps, skipped
        self.restored: list[tuple[int, int]] = []  # term and generation of each state that it has loaded
        self._progress = 0
        self._is_round_failed = False  # a payload of the open round was refused
        self._pending_residuals: dict[
            m.PeerId, Any
        ] = {}  # complete residuals of leavers that are not added yet
        self._leave_deadline_s: float | None = None
        self._is_transferring = False
        self._connected_sources: set[m.PeerId] = set()

    def freeze(self, for_s: float) -> None:
        """As SIGSTOP: connections stay open, nothing is read or sent; afterwards everything is read at
        once."""
        self._frozen = True
        self.world.later(for_s, self.peer, self._thaw)

    def stall(self, for_s: float) -> None:
        """Stop the trainer only."""
        self._stalled_until_s = max(self._stalled_until_s, self.world.now_s + for_s)
        self.world.later(for_s, self.peer, self._go_on)

    def wake(self) -> None:
        """End a stall that outlasts the run: the trainer applies what it has missed."""
        self._stalled_until_s = 0.0
        if self._missed:
            self._apply_missed()

    @property
    def _is_late(self) -> bool:
        """Whether a step was committed without this worker's batch, which is still to be contributed."""
        return any(batch.peer == self.peer for batch in self.core.replica_state.ledger.late)

    @property
    def _is_stalled(self) -> bool:
        return self.world.now_s < self._stalled_until_s

    def _contribute_if_absent(self) -> None:
        absent, assignment = self.core.absent_round, self.core.rank_assignment
        if absent is None or assignment is None or not self.alive:
            return
        round_id, _ = absent
        if self.world.declines_absence(self.peer, round_id.step):
            self.world.log.declined += 1
            self._execute(self._run_core(ev.StayPresent(round_id)))
            return
        self._is_absent, self._is_round_failed = True, False
        self._buffers = cast(StallingTrainer, self.trainer).prepare_empty(round_id, assignment)
        flag = absent_flag(assignment.rank)
        collectives = {
            channel: buffer.make_collective(assignment.rank, assignment.world_size, flag)
            for channel, buffer in self._buffers.items()
        }
        self.handle(ev.SubmitRound(round_id, collectives, is_absent=True))

    def _apply_missed(self) -> None:
        """Apply missed steps, as the trainer does first once it runs again."""
        missed, self._missed = self._missed, []
        for buffers, skipped in missed:
            if not skipped:
                cast(StallingTrainer, self.trainer).apply_missed(buffers)
        self.handle(ev.TrainerReturned())

    def _thaw(self) -> None:
        self._frozen, missed, self._missed_events = False, self._missed_events, []
        if self.world.random.random() < 0.5:
            self.tick()  # the loop may check its deadline before it reads
        for event in missed:
            self.handle(event)
        self._go_on()

    def handle(self, event: ev.MemberEvent) -> None:
        if not self.alive:
            return
        if self._frozen:
            self._missed_events.append(event)
            return
        try:
            effects = self._run_core(event)
        except RemoteProtocolError as error:
            if not isinstance(event, ev.MessageReceived):
                raise
            effects = self._run_core(ev.ProtocolViolation(event.peer, error.reason))
        self._execute(effects)

    def tick(self) -> None:
        if self.alive and not self._frozen and self.world.now_s >= self.core.deadline_s:
            self._execute(self._run_core(None))

    def _run_core(self, event: ev.MemberEvent | None) -> list[ev.MemberEffect]:
        """Pass the event to the core; None is a tick."""
        world, before = self.world, MemberBefore.of(self.core)
        now_s = world.now_s
        effects = self.core.tick(now_s) if event is None else self.core.handle(event, now_s)
        world.coverage.record_member(self.core, before, event, effects, coordinator_up=world.coordinator_up)
        return effects

    def send_heartbeat(self) -> None:
        if self._frozen:
            return
        self.handle(ev.HeartbeatDue(self._progress, not self._computing, self.world.figures(self)))
        self.tick()

    def enter(self) -> None:
        may_be_absent = self.world.may_be_absent
        self.handle(ev.TrainerJoined(self._setup, self.world.edges, None, self.world.choices, may_be_absent))

    def _execute(self, effects: list[ev.MemberEffect]) -> None:
        queue = list(effects)
        while queue and self.alive:
            effect = queue.pop(0)
            try:
                queue.extend(self._execute_one(effect))
            except RemoteProtocolError as error:
                self._is_round_failed = True
                culprit = effect.peer if isinstance(effect, ev.ApplyToBuffer) else None
                event = (
                    ev.RoundFailed(str(error))
                    if culprit is None
                    else ev.ProtocolViolation(culprit, error.reason)
                )
                queue.extend(self._run_core(event))
        self._contribute_if_absent()
        self._go_on()

    def _execute_one(self, effect: ev.MemberEffect) -> list[ev.MemberEffect]:
        world = self.world
        match effect:
            case ev.Send(peer, message):
                world.send(self.peer, peer, message)
            case ev.SendPayload() | ev.ApplyToBuffer() | ev.ComputeDigest() if self._is_round_failed:
                pass
            case ev.SendPayload(peer, round_id, channel, slot, flags):
                if not world.connected(self.peer, peer):
                    return self._run_core(ev.RoundFailed("edge is down"))
                payload = bytes(self._buffers[channel].payload(slot))
                world.send(self.peer, peer, m.Data(round_id, channel, slot, flags, payload))
            case ev.ApplyToBuffer(channel, fill):
                self._progress += 1
                self._buffers[channel].apply(fill)
            case ev.ComputeDigest(flags):
                digest = b"" if is_skipped(flags) else self._buffers[m.Channel()].compute_digest()
                flipped, self.flip_next = self.flip_next, False
                return self._run_core(ev.DigestComputed(digest + bytes([flags, flipped])))
            case ev.ResolveRound(round_id, committed, flags):
                self._resolve(round_id, committed, is_skipped(flags))
            case ev.Dial(peer, address):
                world.dial(self.peer, peer, address)
            case ev.Disconnect(peer):
                world.break_edge(self.peer, peer, None)
            case ev.ProbePeers(probe):
                if rates := world.rates_Bps(self.peer, [peer for peer, _ in probe]):
                    world.send(self.peer, COORDINATOR, m.LinkRates(rates))
                return self._run_core(ev.ProbeResults(()))
            case ev.SendState(peer, term, generation) as asked:
                self._state_requests.append((peer, term, generation, asked.digest_only))
            case ev.ForwardState(peer, term, generation):
                self._forward_requests.append((peer, term, generation))
                self._forward_state()
            case ev.ExpectStateDigest():
                pass  # the simulator forwards no wrong state
            case ev.StoreStateBlock(_, block):
                if self._has_state_of(block):
                    return []  # sent twice: complete already
                world.log.state_transfers += 1
                self._offered = self._received_block = block
                self._forward_state()
            case ev.SourceConnected(peer):
                self._connected_sources.add(peer)
            case ev.SourceDisconnected(peer):
                self._connected_sources.discard(peer)
            case ev.BeginCatchUp():
                # The copy is not simulated: it gets the state when it enters.
                world.later(world.catch_up_s(), self.peer, self._catch_up)
            case ev.Stop(error):
                self._stop(error)
            case ev.StoreResidualBlock(peer, piece):
                self._pending_residuals[peer] = piece.payload
                effects = self._run_core(ev.ResidualReceived(peer))
                answers = [x.message for x in effects if isinstance(x, ev.Send)]
                if any(isinstance(answer, m.ResidualReply) and answer.is_accepted for answer in answers):
                    world.log.acknowledged.append((peer, self.peer))
                return effects
            case ev.AddResidual(peer):
                world.log.added_residuals.append((peer, self.peer))
                self.trainer.add_residual(self._pending_residuals.pop(peer))
            case ev.DropResidual(peer):
                if self._pending_residuals.pop(peer, None) is not None:
                    world.log.void_residuals.append((peer, self.peer))
            case ev.ResidualTransferEnded():
                self.depart()
            case ev.LogEvent():
                pass
        return []

    def has_residual_of(self, leaver: m.PeerId) -> bool:
        """Whether the residual of this worker has been received and is not added yet."""
        return leaver in self._pending_residuals

    # -- leaving with a residual transfer ----------------------------------------------------------

    def leave(self) -> None:
        """Accept no residuals, end the open round, transfer the residual, leave."""
        if self._leave_deadline_s is None:
            self._leave_deadline_s = self.world.now_s + RESIDUAL_TRANSFER_S
            self.handle(ev.RefuseResiduals())
            self.handle(ev.AbandonRound())
            self._transfer_residual()

    def _transfer_residual(self) -> None:
        if not self.alive or self._leave_deadline_s is None:
            return
        if self.world.now_s >= self._leave_deadline_s:
            self.depart()
            return
        if self._missed:
            self._apply_missed()
        ready = (
            open_round(self.core) is None
            and not self._pending_residuals
            and self.core.phase is ev.MemberPhase.RUNNING
        )
        if ready and not self._is_transferring and not self._frozen:
            self._is_transferring = True
            self.handle(ev.TransferResidual((self.trainer.take_residual(),)))
        self.world.at(self.world.now_s + 0.05, self._transfer_residual)

    def depart(self) -> None:
        if self.alive:
            self.left = True
            self.handle(ev.LeaveGroup("leaves"))
            self.world.crash(self.peer)

    def _catch_up(self) -> None:
        if self.core.rank_assignment is None and not self._connected_sources:
            self.world.later(0.2, self.peer, self._catch_up)
        elif self.core.rank_assignment is None and not self._frozen:
            fails = self.world.catch_up_s() > MAX_CATCH_UP_S * 0.9
            self.handle(ev.CatchUpFailed("on purpose") if fails else ev.CaughtUp(0, b""))
            self.world.log.caught_up += 1

    def _stop(self, error: JoinRefused) -> None:
        self.world.log.refused.append(str(error))
        self.world.crash(self.peer)
        if error.code == "stale-model":  # as an agent does with --restarts
            self.world.at(self.world.now_s + 1.0, self.world.restart_script)

    def _go_on(self) -> None:
        """What the training thread does when it is idle: send its state, begin a step."""
        if not self.alive or self._computing or self._frozen or self._leave_deadline_s is not None:
            return
        if self._is_stalled:
            return
        if self._missed:
            self._apply_missed()
            return
        block, self._offered = self._offered, None
        # As in the runtime, a state is loaded only in the generation for which it was requested.
        if block is not None and not self.core.is_synced and block.generation == self.core.generation:
            # Loading takes a while, in which the group may change once more.
            self._computing = True
            self.world.later(self.world.restore_s(), self.peer, partial(self._restored, block))
            return
        for peer, term, generation, digest in self._state_requests:
            if self.core.rank_assignment is not None and (term, generation) == (
                self.core.rank_assignment.term,
                self.core.rank_assignment.generation,
            ):
                block = m.StateBlock(term, generation, 0, 1, None if digest else self.trainer.capture())
                answer = m.StateDigest(term, generation, b"") if digest else block
                self.world.send(self.peer, peer, answer)
        self._state_requests.clear()
        if self.core.next_round is None or (self._is_exchange_undecided and self.has_computed):
            return
        if self._setup.ledger.delay:
            self._begin_turn(self.core.next_round)
            return
        self._computing = True
        assert self.core.current_generation is not None
        spans = self.core.current_generation.data_assignment().get(self.peer, ())
        is_late = self._is_late and bool(spans) and spans == self._begun  # computed already
        fresh = self._batch_step != self.core.step and not is_late
        self._begun = spans
        self.world.later(self.world.compute_s(self.peer) if fresh else 0.0, self.peer, self._submit)

    def _begin_turn(self, round_id: m.RoundId) -> None:
        """In a run with a delay: submit the batch of the turn before, and compute this step's meanwhile."""
        assert self.core.current_generation is not None
        spans = self.core.current_generation.data_assignment().get(self.peer, ())
        is_new = self._batch_step != self.core.step
        if not is_new and spans not in ((), self._batch):
            self.world.log.voided += 1  # it was removed, and its batch is assigned to other workers
            is_new = True
        if is_new:
            self._computed, self._batch, self._batch_step = self._batch, spans, self.core.step
        pending = {batch.peer: batch.spans for batch in self.core.replica_state.ledger.pending}
        counted = pending.get(self.peer, ())
        if counted not in ((), self._computed):
            self._repeat(counted)
            return
        if is_new and spans:
            self._computing = True
            self.world.later(self.world.compute_s(self.peer), self.peer, self._end_turn)
        self._submit_batch(round_id, counted)

    def _repeat(self, spans: tuple[m.Span, ...]) -> None:
        """Compute a batch again that the group counts, and that this process does not have."""
        self.world.log.repeated += 1
        assert self.peer in self.world.restarted_processes, "its trainer has lost a batch"
        self._batch, self._batch_step, self._computing = spans, self.core.step - 1, True
        self.world.later(self.world.compute_s(self.peer), self.peer, self._end_turn)

    def _end_turn(self) -> None:
        if self._frozen or self._is_stalled:
            self.world.later(0.1, self.peer, self._end_turn)
            return
        self._computing = False
        self._progress += 1
        self._go_on()

    @property
    def _is_exchange_undecided(self) -> bool:
        """The coordinator chooses the exchange, and has not done so yet."""
        choices, assignment = self.world.choices, self.core.rank_assignment
        return bool(choices) and assignment is not None and not assignment.exchange and "" not in choices

    def _has_state_of(self, block: m.StateBlock) -> bool:
        received = self._received_block
        generation = None if received is None else (received.term, received.generation)
        return generation == (block.term, block.generation)

    def _forward_state(self) -> None:
        """Forward the received state; the I/O loop does this while the trainer computes."""
        received = self._received_block
        for request in list(self._forward_requests):
            peer, term, generation = request
            if received is not None and (term, generation) == (received.term, received.generation):
                self._forward_requests.remove(request)
                self.world.log.passed_on += 1
                self.world.send(self.peer, peer, received)

    def _restored(self, block: m.StateBlock) -> None:
        self._computing = False
        self._batch, self._batch_step = (), -1  # a batch in hand was for another model
        self._missed.clear()  # the state contains these steps
        self.restored.append((block.term, block.generation))
        self.trainer.restore(block.payload)
        self.trainer.clear_residual()
        self.handle(ev.StateLoaded(block.term, block.generation))

    def _submit(self) -> None:
        if self._frozen or self._is_stalled:
            self.world.later(0.1, self.peer, self._submit)
            return
        self._computing = False
        self._progress += 1
        round_id, assignment = self.core.next_round, self.core.rank_assignment
        if not self.alive or round_id is None or assignment is None or self._leave_deadline_s is not None:
            self._go_on()
            return
        if self._missed:  # the batch is late
            self._apply_missed()
            return
        self.has_computed = True
        if self._is_exchange_undecided:  # the gradient waits for an exchange
            return
        assert self.core.current_generation is not None
        spans = self.core.current_generation.data_assignment().get(self.peer, ())
        if self._batch_step == self.core.step and spans not in ((), self._batch):
            self.world.log.voided += 1  # it was removed, and its batch is assigned to other workers
        self._batch, self._batch_step = spans, self.core.step
        self.world.log.late_submissions += self._is_late and bool(spans)
        self._submit_batch(round_id, spans)

    def _submit_batch(self, round_id: m.RoundId, spans: tuple[m.Span, ...]) -> None:
        assignment = self.core.rank_assignment
        assert assignment is not None
        self._is_round_failed = self._is_absent = False
        skip = self.world.is_skipped(self.peer, round_id.step)
        self._buffers = self.trainer.prepare(round_id, assignment, spans, skip)
        self.world.log.submissions.append(Submission(self.peer, round_id, spans))
        collectives = {
            channel: buffer.make_collective(assignment.rank, assignment.world_size, SKIP if skip else 0)
            for channel, buffer in self._buffers.items()
        }
        self.handle(ev.SubmitRound(round_id, collectives))

    def _resolve(self, round_id: m.RoundId, committed: bool, skip: bool) -> None:
        if committed and self._is_absent:
            self._missed.append((self._buffers, skip))
            self.world.log.absences.append((self.peer, round_id))
            self.world.log.commits.append((self.peer, round_id, self.core.history))
            if skip:
                self.world.log.skipped.add(round_id)
        elif committed:
            self.trainer.commit(self._buffers, skip)
            self.world.log.commits.append((self.peer, round_id, self.core.history))
            if skip:
                self.world.log.skipped.add(round_id)
            if round_id.step % self.world.checkpoint_every == 0:
                checkpoint = m.CheckpointInfo(
                    self.core.applied, self.core.history, self.core.replica_state.ledger
                )
                self.disk = WorkerDisk(checkpoint, self.trainer.capture())
        else:
            self.world.log.aborts += 1
        self._buffers, self._is_absent = {}, False


class World:
    """The coordinator, the workers and the network between them.

    Args:
        seed: of everything random.
        make_trainer: called for each worker that joins.
        edges, choices: see `member_events.TrainerJoined`.
        setup: of all workers.
        behind_nat: probability that a worker cannot be dialled.
        skips: probability that a worker's gradient is not finite.
        slow_restore: probability that loading a state takes longer than the others wait.
        may_be_absent: whether steps commit without workers whose trainers have stalled.
        declines: probability that a worker cannot be absent from a step.
    """

    def __init__(
        self,
        seed: int,
        make_trainer: Callable[[], SimTrainer],
        edges: Callable[..., frozenset[int]],
        setup: m.Setup,
        *,
        min_workers: int,
        delay_s: tuple[float, float] = (0.0005, 0.02),
        compute_s: tuple[float, float] = (0.001, 0.05),
        behind_nat: float = 0.0,
        skips: float = 0.0,
        slow_restore: float = 0.0,
        checkpoint_every: int = 3,
        choices: Mapping[str, Callable[[int, int], frozenset[int]]] = MappingProxyType({}),
        reshare_s: float = 30.0,
        may_be_absent: bool = False,
        declines: float = 0.0,
    ) -> None:
        self.choices = choices
        self.may_be_absent, self._declines = may_be_absent, declines
        self.random = Random(seed)
        self.coverage = CommitCoverage()
        self.checkpoint_every = checkpoint_every
        self._seed = seed
        self._skips = skips
        self._slow_restore = slow_restore
        self._partitions: set[tuple[m.PeerId, m.PeerId]] = set()
        self._undetected: dict[frozenset[m.PeerId], m.PeerId] = {}
        self._backup = 0  # number of entries of the journal in the latest backup
        self._from_backup = False
        self._decisions_to_lose: tuple[m.PeerId | None, float] | None = None
        self.slow_next_restore = False
        self._coordinator_frozen = False
        self._stale_coordinator: Membership | None = None
        self._misdirected: set[m.PeerId] = set()  # workers connected with the stale coordinator
        self._coordinator_missed: list[cio.Event] = []
        self._nat = Random(seed)  # separate, so that histories without NAT do not depend on it
        self._behind_nat = behind_nat
        self._hidden: set[m.PeerId] = set()
        self._relayed: dict[frozenset[m.PeerId], m.PeerId] = {}
        self.deadlines = Deadlines(
            first_step_s=4.0,
            patience_floor_s=1.0,
            silence_s=2.0,
            report_s=1.0,
            ready_s=6.0,
            route_s=2.0,
            regather_s=10.0,
            reshare_s=reshare_s,
            recut_s=3.0,
        )
        self.network: VirtualNetwork[m.PeerId, Any] = VirtualNetwork(
            seed, LinkProperties(delay_s=delay_s, in_order=True)
        )
        self.edges = edges
        self.log = History()
        self.workers: dict[m.PeerId, SimWorker] = {}
        self.processes: list[SimWorker] = []  # all that have started
        self.restarted_processes: set[m.PeerId] = set()  # keys with which another process has started
        self._make_trainer = make_trainer
        self._setup = setup
        self._compute_s = compute_s
        self._connections: set[frozenset[m.PeerId]] = set()
        self._min_workers = min_workers
        self._journal: list[tuple[str, dict[str, Any]]] = []
        self.network.attach(COORDINATOR, self._to_coordinator)
        self.start_coordinator()
        self._coordinator_ticks()

    # -- for tests ---------------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        return self.network.clock.now_s

    @property
    def alive(self) -> list[SimWorker]:
        return [worker for worker in self.workers.values() if worker.alive]

    @property
    def finished(self) -> bool:
        return self.coordinator.phase is cio.RunPhase.FINISHED

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        self.network.call_at(when_s, action)

    def restart_script(self) -> None:
        """As an agent that restarts its script."""
        self.join()

    def join(self, disk: WorkerDisk | None = None) -> SimWorker:
        """A new worker joins; with `disk`, one that restarts with a new name and its checkpoints."""
        peer = self.random.randbytes(32)
        if self._nat.random() < self._behind_nat:
            self._hidden.add(peer)
        self.log.joins += 1
        self.network.attach(peer, self._to_worker)
        return self._begin(peer, disk)

    def _begin(self, peer: m.PeerId, disk: WorkerDisk | None, enters_after_s: float = 0.0) -> SimWorker:
        setup, trainer = self._setup, self._make_trainer()
        if disk is not None:
            setup = replace(setup, checkpoint=disk.checkpoint)
            trainer.restore(disk.state)
        worker = self.make_worker(peer, trainer, setup)
        self.workers[peer] = worker
        self.processes.append(worker)
        self.connect(peer, COORDINATOR)
        if enters_after_s:
            self.later(enters_after_s, peer, worker.enter)
        else:
            worker.enter()
        self._send_heartbeats(worker)
        return worker

    def restart_process(self, peer: m.PeerId, enters_after_s: float = 0.0) -> None:
        """Start another process with the key and the disk of one that has died.

        Args:
            enters_after_s: how long it builds its model; meanwhile the coordinator knows only its key.
        """
        old = self.workers[peer]
        if peer in self._misdirected:
            self.at(self.now_s + 0.2, partial(self.restart_process, peer, enters_after_s))
        if old.alive or old.left or peer in self._misdirected:
            return
        self.log.restarted_processes += 1
        self.restarted_processes.add(peer)
        self.network.revive(peer)
        self._begin(peer, self._disk_of(old), enters_after_s)

    def _disk_of(self, old: SimWorker) -> WorkerDisk | None:
        return old.disk

    def make_worker(self, peer: m.PeerId, trainer: SimTrainer, setup: m.Setup) -> SimWorker:
        return SimWorker(self, peer, trainer, setup)

    def crash(self, peer: m.PeerId) -> None:
        """As SIGKILL: the worker ends, and its connections break at the other ends."""
        worker = self.workers[peer]
        if not worker.alive:
            return
        worker.alive = False
        self.log.crashes += 1
        self.log.blackouts += not self.alive
        # Sorted: the order of a set differs between processes, and a seed must give one history.
        for pair in sorted((p for p in self._connections if peer in p), key=sorted):
            self._disconnect(pair)
        self.network.crash(peer)

    def ask_status(self, peer: m.PeerId, after_s: float, for_s: float) -> None:
        """The agent of a dead worker asks the coordinator for the run's status, with the worker's key."""
        self.later_at_coordinator(after_s, cio.PeerConnected(peer, "open"))
        self.later_at_coordinator(after_s + for_s, cio.PeerDisconnected(peer, "closed"))

    def leave(self, peer: m.PeerId) -> None:
        """Leave immediately, without a residual transfer."""
        self.workers[peer].depart()

    def leave_gracefully(self, peer: m.PeerId) -> None:
        """Leave with a residual transfer."""
        self.workers[peer].leave()

    def start_coordinator(self) -> None:
        """Start it, after the first time from its journal, compacted; living workers reconnect."""
        recovered, half = recover_run(self._journal), len(self._journal) // 2
        earlier = compacted(self._journal[:half])
        compacted_twice = recover_run(compacted([*earlier, *self._journal[half:]]))
        assert is_same_run(compacted_twice, recovered), (compacted_twice, recovered)
        terms = [body["term"] for kind, body in self._journal if kind == "term"]  # as in the real journal
        self.coordinator = Membership(
            me=COORDINATOR,
            run="sim",
            term=max(terms, default=0) + 1,
            deadlines=self.deadlines,
            software="sim",
            min_workers=self._min_workers,
            recovered=compacted_twice,
        )
        self.coordinator_up = True
        self._execute_coordinator(self.coordinator.start(self.now_s), None)
        self._backup = len(self._journal) if self._backup == 0 else self._backup
        for worker in self.alive:
            self.connect(worker.peer, COORDINATOR)

    def back_up(self) -> None:
        """Copy the journal as it is now."""
        self._backup = len(self._journal)

    def end_run(self) -> None:
        """The owner's command, repeated until the run has finished: a restarted coordinator does not know
        it."""
        if self.finished:
            return
        if self.coordinator_up and not self._coordinator_frozen:
            effects, _ = self.coordinator.end_run(self.now_s)
            self._execute_coordinator(effects, None)
        self.at(self.now_s + 1.0, self.end_run)

    def crash_coordinator(self, down_s: float, *, lose_disk: bool = False) -> None:
        """As SIGKILL; it restarts after `down_s`, with `lose_disk` from the latest backup."""
        if not self.coordinator_up:
            return
        if lose_disk:
            self._from_backup = any(kind == "generation" for kind, _ in self._journal[self._backup :])
            self.log.lost_disks += self._from_backup
            del self._journal[self._backup :]
            blank = not any(kind == "generation" for kind, _ in self._journal)
            self.log.blank_backups += self._from_backup and blank
        self._coordinator_frozen = False
        self._coordinator_missed.clear()
        self.coordinator_up = False
        self.log.restarts += 1
        for pair in sorted((p for p in self._connections if COORDINATOR in p), key=sorted):
            self._disconnect(pair)
        self.at(self.now_s + down_s, self.start_coordinator)

    def freeze_coordinator(self, for_s: float) -> None:
        """As SIGSTOP: deadlines and messages are handled afterwards."""
        if not self.coordinator_up or self._coordinator_frozen:
            return
        asked, self._coordinator_frozen = self.coordinator, True

        def thaw() -> None:
            if self.coordinator is not asked or not self.coordinator_up:
                return
            self._coordinator_frozen, missed = False, self._coordinator_missed
            self._coordinator_missed = []
            if self.random.random() < 0.5:
                self._coordinator_tick()
            for event in missed:
                self._pass_to_coordinator(event)

        self.at(self.now_s + for_s, thaw)

    def partition(
        self,
        side: set[m.PeerId],
        for_s: float,
        *,
        one_way: bool = False,
        rest: set[m.PeerId] | None = None,
    ) -> None:
        """Lose all messages from `side` to the rest, and (unless `one_way`) back; afterwards all dial again.

        As with TCP, each end of a connection finds out by itself that it is broken, at different times.

        Args:
            rest: the others on the other side; None for all.
        """
        rest = ({COORDINATOR} | set(self.workers)) - side if rest is None else rest
        holes = {(a, b) for a in side for b in rest}
        holes |= set() if one_way else {(b, a) for a, b in holes}
        self._partitions |= holes
        cut = (p for p in self._connections if len(p & side) == 1 and p & rest)
        for pair in sorted(cut, key=sorted):
            for end in sorted(pair):
                self.at(self.now_s + self.random.uniform(0.1, 1.0), partial(self._detect_loss, pair, end))

        def heal() -> None:
            self._partitions -= holes

        self.at(self.now_s + for_s, heal)

    def lose_next_decision(self, to: m.PeerId | None = None, away_s: float = 0.0) -> None:
        """Lose the next COMMIT (`to` this worker) and its connection.

        Args:
            away_s: how long that worker is disconnected from root and coordinator; 0.0: its connection to the
                root is restored immediately.
        """
        self._decisions_to_lose = (to, away_s)

    def _lose(self, src: m.PeerId, dst: m.PeerId, to: m.PeerId | None, away_s: float) -> None:
        if to not in (None, dst):
            return
        self._decisions_to_lose = None
        self.break_edge(src, dst, back_after_s=max(0.03, away_s))  # longer than a message is under way
        if away_s:
            self.break_edge(dst, COORDINATOR, back_after_s=away_s)

    def block_link(self, a: m.PeerId, b: m.PeerId, for_s: float) -> None:
        """Partition these two from each other."""
        holes = {(a, b), (b, a)}
        self._partitions |= holes
        pair = frozenset((a, b))
        if pair in self._connections and pair not in self._relayed:
            self._disconnect(pair)
            self.connect(a, b)

        def heal() -> None:
            self._partitions -= holes

        self.at(self.now_s + for_s, heal)

    def fail_over_coordinator(self) -> None:
        """A standby with the current journal takes over, and all workers dial it; the old one keeps
        running."""
        if not self.coordinator_up or self._stale_coordinator is not None:
            return
        self._stale_coordinator, self._coordinator_frozen = self.coordinator, False
        self._coordinator_missed.clear()
        for pair in sorted((p for p in self._connections if COORDINATOR in p), key=sorted):
            self._disconnect(pair)
            (peer,) = pair - {COORDINATOR}
            self._pass_to_stale_coordinator(cio.PeerDisconnected(peer, "connection broke"))
        self.log.coordinator_failovers += 1
        # Neither knows a member: each may begin with the workers that reach it, unaware of the other.
        self.log.blank_backups += not any(kind == "generation" for kind, _ in self._journal)
        self.start_coordinator()

    def connect_to_stale_coordinator(self, peer: m.PeerId, for_s: float) -> None:
        """Connect this worker with the old coordinator for a while.

        Only if it knows the new one: a worker cannot know of a standby that it never reached.
        """
        worker = self.workers[peer]
        if self._stale_coordinator is None or not worker.alive or peer in self._misdirected:
            return
        if worker.core.term <= self._stale_coordinator.term:
            return
        self.break_edge(peer, COORDINATOR, None)

        def begin() -> None:
            if self.connected(peer, COORDINATOR):
                return  # the new coordinator was restarted meanwhile, and the worker has reached it
            self._misdirected.add(peer)
            self._pass_to_stale_coordinator(cio.PeerConnected(peer, "open"))
            self._notify(COORDINATOR, peer, _ConnectionChange(True))
            self.at(self.now_s + for_s, end)

        def end() -> None:
            self._misdirected.discard(peer)
            self._pass_to_stale_coordinator(cio.PeerDisconnected(peer, "connection broke"))
            if self.workers[peer].alive:
                self._notify(COORDINATOR, peer, _ConnectionChange(False))
                self.connect(peer, COORDINATOR)

        self.at(self.now_s + 0.1, begin)

    def _pass_to_stale_coordinator(self, event: cio.Event | None) -> None:
        if self._stale_coordinator is None or self.finished:
            return
        stale, now_s = self._stale_coordinator, self.now_s
        for effect in stale.tick(now_s) if event is None else stale.handle(event, now_s):
            match effect:
                case cio.Send(peer, message) if peer in self._misdirected:
                    self._notify(COORDINATOR, peer, message)
                case cio.DialBack(peer, addresses):
                    back = cio.DialBackResult(peer, addresses[0])
                    self.at(now_s + 0.01, partial(self._pass_to_stale_coordinator, back))
                case _:
                    pass  # it writes to another disk

    def break_edge(self, a: m.PeerId, b: m.PeerId, back_after_s: float | None) -> None:
        """Break the connection; messages in flight are lost, and it is restored later (None: never)."""
        pair = frozenset((a, b))
        if pair not in self._connections:
            return
        relay = self._relayed.get(pair)
        self._disconnect(pair)
        if back_after_s is not None:
            self.at(self.now_s + back_after_s, lambda: self.connect(a, b, relay))

    def run(self, until_s: float, *, max_events: int = 400_000) -> None:
        """Run until the run is finished, all workers are gone, or `until_s` of virtual time have passed."""
        for _ in range(max_events):
            if self.finished or self.network.idle or self.now_s >= until_s:
                return
            self.network.step()
        raise AssertionError(f"more than {max_events} events: the group does not come to an end")

    # -- plumbing ----------------------------------------------------------------------------------

    def connected(self, a: m.PeerId, b: m.PeerId) -> bool:
        return frozenset((a, b)) in self._connections

    def dial(self, dialler: m.PeerId, peer: m.PeerId, address: str) -> None:
        """Dial an address of the member list: directly, or through a relay once both are connected with
        it."""
        relay, pair = relay_of(address), frozenset((dialler, peer))
        if relay is None:
            if peer not in self._hidden:
                self._replace(pair, None)
                self.connect(dialler, peer)
        elif self.connected(dialler, relay) and self.connected(peer, relay):
            self._replace(pair, relay)
            self.connect(dialler, peer, relay)
        elif self.workers[dialler].alive and peer in self.workers[dialler].core.known_peers:
            self.at(self.now_s + 0.1, lambda: self.dial(dialler, peer, address))

    def _detect_loss(self, pair: frozenset[m.PeerId], end: m.PeerId) -> None:
        """One end finds that the connection is broken."""
        (other,) = pair - {end}
        if pair in self._connections and pair not in self._undetected:
            relay = self._relayed.get(pair)
            self._disconnect(pair, notify=False)
            self._undetected[pair] = other
            self._notify(other, end, _ConnectionChange(False))
            self.connect(end, other, relay)  # as soon as it can
        elif self._undetected.get(pair) == end:
            del self._undetected[pair]
            self._notify(other, end, _ConnectionChange(False))

    def _notify(self, src: m.PeerId, dst: m.PeerId, message: Any) -> None:
        if dst == COORDINATOR:
            self._to_coordinator(src, dst, message)
        else:
            self._to_worker(src, dst, message)

    def _replace(self, pair: frozenset[m.PeerId], relay: m.PeerId | None) -> None:
        """A direct connection, or one through another relay, replaces a relayed one."""
        if self._relayed.get(pair, relay) != relay:
            self._disconnect(pair)

    def _disconnect(self, pair: frozenset[m.PeerId], *, notify: bool = True) -> None:
        """Notify both ends and break relayed connections that use this one."""
        self._connections.discard(pair)
        self._relayed.pop(pair, None)
        a, b = sorted(pair)
        if notify:
            self.network.send(a, b, _ConnectionChange(False))
            self.network.send(b, a, _ConnectionChange(False))
        through = [p for p, relay in self._relayed.items() if relay in pair and pair - {relay} <= p]
        for other in sorted(through, key=sorted):
            relay, (dialler, peer) = self._relayed[other], sorted(other)
            self._disconnect(other)
            again = partial(self.dial, dialler, peer, RELAY_PREFIX + relay.hex())
            self.at(self.now_s + 0.1, again)

    def connect(self, dialler: m.PeerId, peer: m.PeerId, relay: m.PeerId | None = None) -> None:
        pair = frozenset((dialler, peer))
        living = all(
            (p == COORDINATOR and self.coordinator_up) or (p in self.workers and self.workers[p].alive)
            for p in pair
        )
        if pair in self._connections or not living or (COORDINATOR in pair and pair & self._misdirected):
            return
        if not (self._is_passable(dialler, peer, relay) and self._is_passable(peer, dialler, relay)):
            self.at(self.now_s + 0.2, lambda: self.connect(dialler, peer, relay))
            return
        if pair in self._undetected:
            self._detect_loss(pair, self._undetected[pair])  # a new handshake ends the old connection
        self._connections.add(pair)
        if relay is not None:
            self._relayed[pair] = relay
        self.network.send(dialler, peer, _ConnectionChange(True))
        self.network.send(peer, dialler, _ConnectionChange(True))

    def _is_passable(self, src: m.PeerId, dst: m.PeerId, relay: m.PeerId | None) -> bool:
        """Whether no partition blocks this direction."""
        hops = {(src, dst)} if relay is None else {(src, relay), (relay, dst)}
        return not hops & self._partitions

    def send(self, src: m.PeerId, dst: m.PeerId, message: m.Message) -> None:
        if dst == COORDINATOR and src in self._misdirected:
            self._pass_to_stale_coordinator(cio.MessageReceived(src, message))
        elif self.connected(src, dst) and self._is_passable(
            src, dst, self._relayed.get(frozenset((src, dst)))
        ):
            self.network.send(src, dst, message)
            if isinstance(message, m.Decision) and self._decisions_to_lose is not None and message.verdict:
                self._lose(src, dst, *self._decisions_to_lose)

    def later(self, delay_s: float, node: m.PeerId, action: Callable[[], None]) -> None:
        self.network.call_at(self.now_s + delay_s, action, node=node)

    def later_at_coordinator(self, delay_s: float, event: cio.Event) -> None:
        """Pass an event to the coordinator, unless it crashes before."""
        recipient = self.coordinator

        def pass_event() -> None:
            if self.coordinator_up and self.coordinator is recipient:
                self._pass_to_coordinator(event)

        self.at(self.now_s + delay_s, pass_event)

    def catch_up_s(self) -> float:
        """Seconds that a worker takes to catch up."""
        return self.random.uniform(0.05, MAX_CATCH_UP_S)

    def restore_s(self) -> float:
        if self.slow_next_restore:
            self.slow_next_restore = False
            return 3.0
        usual_s = self.random.choice((0.0, 0.01, 0.5, 3.0))
        return 40.0 if self._slow_restore and self.random.random() < self._slow_restore else usual_s

    def is_skipped(self, peer: m.PeerId, step: int) -> bool:
        """Whether the gradient is not finite; the same for each attempt."""
        return bool(self._skips) and Random(f"{self._seed} {peer.hex()} {step}").random() < self._skips

    def declines_absence(self, peer: m.PeerId, step: int) -> bool:
        """Whether the worker has to take part in the step; the same for each attempt."""
        if not self._declines:
            return False
        return Random(f"{self._seed} {peer.hex()} {step} declines").random() < self._declines

    def figures(self, worker: SimWorker) -> tuple[tuple[str, float], ...]:
        """Figures of a worker's heartbeat."""
        return ()

    def rates_Bps(
        self, peer: m.PeerId, others: Sequence[m.PeerId]
    ) -> tuple[tuple[m.PeerId, float, float], ...]:
        """Rates that a worker measures, as in `LinkRates`."""
        return ()

    def compute_s(self, peer: m.PeerId) -> float:
        return self.random.uniform(*self._compute_s)

    def _send_heartbeats(self, worker: SimWorker) -> None:
        if worker.alive and not self.finished:
            worker.send_heartbeat()
            self.later(0.25, worker.peer, lambda: self._send_heartbeats(worker))

    def _coordinator_ticks(self) -> None:
        if not self.finished:
            if not self._coordinator_frozen:
                self._coordinator_tick()
            if self._stale_coordinator is not None and self.now_s >= self._stale_coordinator.deadline_s:
                self._pass_to_stale_coordinator(None)
            self.at(self.now_s + 0.05, self._coordinator_ticks)

    def _coordinator_tick(self) -> None:
        if self.coordinator_up and self.now_s >= self.coordinator.deadline_s:
            self._execute_coordinator(self.coordinator.tick(self.now_s), None)

    def _pass_to_coordinator(self, event: cio.Event) -> None:
        if self._coordinator_frozen:
            self._coordinator_missed.append(event)
        else:
            self._execute_coordinator(self.coordinator.handle(event, self.now_s), event)

    def _to_worker(self, src: m.PeerId, dst: m.PeerId, message: Any) -> None:
        worker = self.workers[dst]
        match message:
            case _ConnectionChange(True):
                worker.handle(ev.PeerConnected(src))
            case _ConnectionChange(False):
                worker.handle(ev.PeerDisconnected(src, "connection broke"))
            case _:
                if self.connected(src, dst) or (src == COORDINATOR and dst in self._misdirected):
                    worker.handle(ev.MessageReceived(src, message))

    def _to_coordinator(self, src: m.PeerId, _: m.PeerId, message: Any) -> None:
        if not self.coordinator_up or not (
            self.connected(src, COORDINATOR) or message == _ConnectionChange(False)
        ):
            return
        match message:
            case _ConnectionChange(True):
                event: cio.Event = cio.PeerConnected(src, src.hex() if src in self._hidden else "open")
            case _ConnectionChange(False):
                event = cio.PeerDisconnected(src, "connection broke")
            case _:
                event = cio.MessageReceived(src, message)
        self._pass_to_coordinator(event)

    def _execute_coordinator(self, effects: list[cio.Effect], event: cio.Event | None) -> None:
        self.coverage.record_coordinator(self.coordinator, event, effects, from_backup=self._from_backup)
        for effect in effects:
            match effect:
                case cio.Send(peer, message):
                    self.send(COORDINATOR, peer, message)
                case cio.LogEvent("error", "waiting"):
                    self.log.start_overs += 1
                case cio.LogEvent("error", "rollback"):
                    self.log.rollbacks += 1
                case cio.JournalEntry(kind, body):
                    self._from_backup = self._from_backup and kind != "generation"
                    self._journal.append(
                        (kind, json.loads(json.dumps(body)))
                    )  # as it is read back from a disk
                    self.log.generations += kind == "generation"
                case cio.DialBack(peer, addresses):
                    proven = "" if peer in self._hidden else addresses[0]
                    delay_s = self.deadlines.reach_s if not proven else 0.01
                    self.later_at_coordinator(delay_s, cio.DialBackResult(peer, proven))
                case cio.RecordViolation(peer, reason):
                    self._pass_to_coordinator(cio.WorkerRemoved(peer, "offence", reason, ""))
                case _:
                    pass
