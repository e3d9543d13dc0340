"""A worker's core in its real loop, in a generation of three, which receives messages from all others.

They come from peers, strangers and the coordinator.

The network below the loop and the trainer above it are simulated and honest: any failure is a fault of the
product.  The schedule decides what arrives, and when.

    input:  u8 rank, u8 exchange, then a schedule: one byte for an action, and its arguments
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from gridfuzz import drawing
from gridfuzz.source import Source
from gridfuzz.targets.base import Target, must
from gridfuzz.targets.exchanges import expected
from gridfuzz.targets.loops import Before, Watched, Wire, loop_by
from gridtrain.config import JoinConfig
from gridtrain.core import messages as m
from gridtrain.core.collectives import allgather, butterfly, ring
from gridtrain.core.commit import data_ledger
from gridtrain.core.commit.attempts import MAX_EARLY_BYTES, MAX_EARLY_MESSAGES
from gridtrain.core.commit.two_phase_commit import EMPTY_HISTORY, ROOT, extend_history
from gridtrain.core.group import member_events as ev
from gridtrain.core.member.peer_links import MAX_EXPECTED
from gridtrain.errors import JoinRefused, RemoteProtocolError
from gridtrain.network.transport.access_control import PeerAllowlist
from gridtrain.network.transport.interface import (
    ConnectionRole,
    PeerDown,
    PeerUp,
    Received,
    TransportViolation,
)
from gridtrain.network.wire.sparse_payload import encode
from gridtrain.network.wire.value_encoding import ValueKind
from gridtrain.runtime import io_loop as loop
from gridtrain.runtime.buffers.collective_buffers import AllGatherBuffer, ButterflyBuffer, DenseRingBuffer
from gridtrain.runtime.mailbox.step_plan import StepPlan
from gridtrain.runtime.open_round import OpenRound

KEYS = tuple(bytes([letter]) * 32 for letter in b"abc")
COORDINATOR, STRANGER = b"C" * 32, b"s" * 32
CHANNEL = m.Channel()
N, K, KIND = 24, 4, ValueKind.FP16
SETUP = m.Setup((("model", "tiny"),), m.LedgerSpec(size=40, seed=0, steps=30), 4, None)
PAYLOADS = tuple(
    encode(np.arange(count) * 5, np.full(count, 0.5 + count, np.float32), n=N, kind=KIND)
    for count in range(K + 1)
)
EDGES = (ring.neighbours, allgather.neighbours, butterfly.neighbours)
OF_MEMBERS = (
    *(m.Data, m.Vote, m.Decision, m.RoundProgress, m.MeanRequest, m.MeanReply, m.StateRequest, m.StateBlock),
    *(m.StateDigest, m.Waiting, m.ProceedWithout),
    *(m.ResidualBlock, m.ResidualReply, m.CheckpointBlock),
)
OF_COORDINATOR = (
    *(
        m.Welcome,
        m.Rejoin,
        m.Refused,
        m.Reachability,
        m.ExpectProbes,
        m.Admitted,
        m.Freeze,
        m.MemberListPage,
        m.MembershipView,
        m.StartGeneration,
    ),
    *(m.RunStateUpdate, m.HeartbeatReply, m.StandbyNotice),
)
ANY = tuple(drawing.TYPE_CODES)


class WorkerHarness:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.me = KEYS[source.below(3)]
        kind = source.below(6)
        self.kind, self.may_be_absent = kind % 3, kind >= 3
        self.now_s = 100.0
        self.up: set[m.PeerId] = set()
        self.yes: dict[m.RoundId, dict[m.PeerId, bytes]] = {}
        self.ended: dict[m.RoundId, bool] = {}
        self.resolved: set[m.RoundId] = set()
        self.due: list[tuple[int, m.PayloadSlot]] = []
        self.generation = 0
        config = JoinConfig("tcp://127.0.0.1:1", COORDINATOR.hex())
        self.gate = PeerAllowlist(COORDINATOR)
        self.loop = loop.IoLoop(Wire(self.me, self.up), config, self.gate)  # type: ignore[arg-type]
        join = m.Join("run", "me", "tcp://127.0.0.1:1")
        self.core = Watched(self.me, COORDINATOR, join, config.deadlines)
        self.core.watcher = self
        self.loop._core = self.core
        if self.may_be_absent:
            self.loop.step_rounds.attach_empty(self._make_empty)

    @property
    def open(self) -> m.RoundId | None:
        current = self.loop.step_rounds.current
        return current.id if current is not None else None

    def go(self, most: int) -> None:
        self._enter()
        for _ in range(most):
            if self.source.empty:
                break
            self.step()

    # -- from outside ------------------------------------------------------------------------------

    def _enter(self) -> None:
        self.edge(COORDINATOR)
        self.receive_from_coordinator(m.Welcome(1, "run", "s"))
        self.loop._handle(ev.TrainerJoined(SETUP, EDGES[self.kind], may_be_absent=self.may_be_absent))
        self.next_generation(KEYS, -1, EMPTY_HISTORY, m.LedgerState(), joining=KEYS[1:])

    def next_generation(
        self,
        order: tuple[m.PeerId, ...],
        applied: int,
        history: bytes,
        state: m.LedgerState,
        joining: tuple[m.PeerId, ...] = (),
    ) -> None:
        """A next generation as an honest coordinator makes it; members without the state receive it."""
        self.generation = max(self.generation, self.core.generation) + 1
        term, generation = self.core.term, self.generation
        roster = tuple(m.Member(p, "n", f"tcp://127.0.0.1:{p[0]}", 4, p in joining) for p in order)
        self.receive_from_coordinator(m.MemberListPage(term, generation, 0, 1, roster))
        decided = None
        view = m.MembershipView(
            term, generation, len(order), m.Verdict.ABORT, decided, applied, history, state, "why"
        )
        self.receive_from_coordinator(view)
        for peer in order:
            if peer != self.me:
                self.edge(peer)
        if not self.core.is_synced and self.source.byte() % 8 < 7:
            self.loop._handle(ev.StateLoaded(term, generation))
        self.receive_from_coordinator(m.StartGeneration(term, generation))

    def edge(self, peer: m.PeerId) -> None:
        if peer not in self.up and self.gate(peer) is ConnectionRole.MEMBER and peer != self.me:
            self.up.add(peer)
            self.loop._handle_transport_event(PeerUp(peer))

    def receive_from_coordinator(self, message: m.Message) -> None:
        self.edge(COORDINATOR)
        nbytes = drawing.nbytes(message)
        if nbytes is not None:
            self.loop._handle_transport_event(Received(COORDINATOR, message, nbytes))

    def step(self) -> None:
        source = self.source
        self.now_s += source.choice((0.0, 0.0, 0.01, 0.3, 3.0, 30.0))
        self._train()
        match source.byte() % 20:
            case 0 | 1 | 2 | 3:
                self._due_data()
            case 4 | 5 | 6:
                self._others_vote()
            case 7 | 8 | 9:
                self.receive(source.choice(KEYS), drawing.message(source, OF_MEMBERS, self.hints()))
            case 10:
                self.receive_from_coordinator(drawing.message(source, OF_COORDINATOR, self.hints()))
            case 11:
                message = drawing.message(source, ANY, self.hints())
                self.receive(source.choice((*KEYS, STRANGER, COORDINATOR)), message)
            case 12:
                self._flap(source.choice((*KEYS, COORDINATOR)))
            case 13:
                self.loop.heartbeat.add_figures({"loss": 1.0})
                self.loop._send_heartbeat()
            case 14:
                if self.now_s >= self.core.deadline_s:
                    self.loop._execute(self.core.tick(self.now_s))
                self.loop._transport.return_credit(self.core.early_bytes)
            case 15:
                self.loop._handle(ev.RequestMean(self.core.step, source.below(3), 1.5))
            case 16:
                self.receive_from_coordinator(m.Freeze(self.core.term, self.core.generation, "why"))
                if source.byte() & 1:
                    self._generation_after_freeze()
            case 17:
                self._generation_after_freeze()
            case 18:
                peer = source.choice(KEYS)
                if peer in self.up:
                    self.loop._handle_transport_event(TransportViolation(peer, "x" * source.choice((1, 600))))
            case _:
                self.loop._handle(
                    source.choice((ev.RoundFailed("here"), ev.ProbeResults(()), ev.LeaveGroup("why")))
                )
        self.loop._contribute_if_absent()
        self.loop._publish()

    def receive(self, peer: m.PeerId, message: m.Message) -> None:
        """The transport delivers nothing from peers that are not admitted or not connected."""
        if peer not in self.up or self.gate(peer) is not ConnectionRole.MEMBER:
            return
        match message:
            case m.Vote(round_id, True, digest):
                self.yes.setdefault(round_id, {}).setdefault(peer, digest)
        nbytes = drawing.nbytes(message)
        if nbytes is not None:
            self.loop._handle_transport_event(Received(peer, message, nbytes))

    def hints(self) -> drawing.Hints:
        core, source = self.core, self.source
        here = self.open or core.next_round or m.RoundId(core.term, core.generation, core.step, 0)
        step = max(0, here.step + source.choice((0, 1, -1)))
        spans = (m.Span(here.step * 4, here.step * 4 + 4),)
        return {
            "RoundId": (here, replace(here, step=step), replace(here, attempt=here.attempt + 1)),
            "term": (core.term, core.term, core.term + 1, max(0, core.term - 1)),
            "generation": (core.generation, core.generation + 1, max(0, core.generation - 1)),
            "step": (max(0, core.step), core.step + 1),
            "applied": (core.applied, max(-1, core.applied - 1), core.applied + 1),
            "history": (core.history, EMPTY_HISTORY),
            "Channel": (CHANNEL,),
            "Place": [place for _, place in self.due] or [m.PayloadSlot(m.CollectivePhase.SWAP)],
            "peer": (*KEYS, STRANGER),
            "digest": tuple(self.yes.get(here, {}).values()) or (b"", b"d" * 32),
            "LedgerState": (
                core.replica_state.ledger,
                m.LedgerState(requeued=spans),
                m.LedgerState(holders=((KEYS[0], spans),)),
            ),
            "world_size": (3, 1, 2),
            "index": (0, 1),
            "total": (1, 2),
            "page": (0, 1),
            "pages": (1, 2),
            "share": (4, 0, 2**31 - 1),
            "payload": (b"", bytes(8), bytes(32), bytes(N * 4), self._payload()),
        }

    def _due_data(self) -> None:
        """Data that the exchange waits for, with a valid payload or nearly one."""
        if self.open is None or not self.due or self.core.rank_assignment is None:
            return
        rank, place = self.source.choice(self.due[:1] if self.kind == 0 else self.due)
        self.due.remove((rank, place))
        if rank >= len(self.core.rank_assignment.members):
            return
        payload = self._payload()
        if self.kind == 0:
            start, stop = place.segment * N // self.world, (place.segment + 1) * N // self.world
            payload = bytes(4 * (stop - start))
        if self.source.one_in(12):
            damaged = bytearray(payload)
            damaged[self.source.below(len(damaged) or 1) : 1] = self.source.bytes(1)
            payload = bytes(damaged)
        data = m.Data(self.open, CHANNEL, place, drawing.flags(self.source), payload)
        self.receive(self.core.rank_assignment.members[rank].peer, data)

    def _payload(self) -> bytes:
        return PAYLOADS[self.source.byte() % len(PAYLOADS)]

    def _others_vote(self) -> None:
        assignment = self.core.rank_assignment
        if self.open is None or assignment is None:
            return
        round_id = self.open
        mine = self.yes.get(round_id, {}).get(self.me)
        if assignment.rank == ROOT:
            peer = self.source.choice([x.peer for x in assignment.members])
            yes = not self.source.one_in(8)
            self.receive(peer, m.Vote(round_id, yes, mine or b"d" * 32 if yes else b"", "why"))
        elif mine is not None or self.source.one_in(4):
            verdict = m.Verdict(not self.source.one_in(6))
            self.receive(assignment.members[ROOT].peer, m.Decision(round_id, verdict, "why"))

    def _flap(self, peer: m.PeerId) -> None:
        if peer in self.up:
            self.up.discard(peer)
            self.loop._handle_transport_event(PeerDown(peer, "broke"))
        else:
            self.edge(peer)
            if peer == COORDINATOR and self.core.term < 2**62:
                self.receive_from_coordinator(m.Welcome(self.core.term + self.source.one_in(8), "run", "s"))

    def _generation_after_freeze(self) -> None:
        core, source = self.core, self.source
        applied, history, state = core.applied, core.history, core.replica_state.ledger
        if not data_ledger.is_sound(
            SETUP.ledger, state, KEYS
        ):  # after a notice that no honest coordinator sends
            applied, history, state = -1, EMPTY_HISTORY, m.LedgerState()
        prepared = (
            core.current_generation.attempts.prepared_attempt if core.current_generation is not None else None
        )
        if prepared is not None and core.is_synced and source.byte() & 1:
            applied, history = prepared.round_id.step, extend_history(history, prepared.digest)
            state = replace(state, step=applied + 1)
        others = [peer for peer in KEYS if peer != self.me and source.byte() % 4]
        order = tuple(sorted([self.me, *others], reverse=source.one_in(2)))
        joining = () if core.is_synced else (self.me,) if len(order) > 1 else ()
        state = data_ledger.release_deferred(SETUP.ledger, state, order)
        self.next_generation(order, applied, history, state, joining)

    # -- the trainer ---------------------------------------------------------------------------------

    @property
    def world(self) -> int:
        return self.core.rank_assignment.world_size if self.core.rank_assignment is not None else 1

    def _make_empty(self, plan: StepPlan, _: Sequence[object]) -> Sequence[Any] | None:
        """The loop's contribution instead of the trainer's; None if the trainer has to take part."""
        if self.source.one_in(8):
            return None
        self.due = expected(self.kind, plan.rank, plan.world_size, 1)
        return (self._buffer(plan.rank, PAYLOADS[0], np.zeros(N, np.float32)),)

    def _buffer(self, rank: int, payload: bytes, values_N: npt.NDArray[np.float32]) -> Any:
        if self.kind == 0:
            return DenseRingBuffer(values_N, self.world)
        if self.kind == 1:
            return AllGatherBuffer(rank, self.world, payload, n=N, k=K, kind=KIND)
        return ButterflyBuffer(payload, n=N, k=K, kind=KIND)

    def _train(self) -> None:
        core = self.core
        if self.loop.step_rounds.last_missed is not None and not self.source.one_in(4):
            self.loop.step_rounds.take_missed()
            self.loop._handle(ev.TrainerReturned())
        if (
            self.core.rank_assignment is not None
            and self.loop.state_receiver.blobs.is_complete_for(core.generation)
            and not core.is_synced
        ):
            self._restore()
        if (
            core.next_round is None
            or core.rank_assignment is None
            or self.open is not None
            or self.source.one_in(6)
        ):
            return
        must(
            core.own_id in core.current_generation.data_assignment(),
            "this worker has no place in the assignment",
        )
        rank, round_id = core.rank_assignment.rank, core.next_round
        self.due = expected(self.kind, rank, self.world, 1)
        payload = self._payload() if self.kind else b""
        buffer = self._buffer(rank, payload, np.ones(N, np.float32))
        collective = buffer.make_collective(rank, self.world, int(self.source.one_in(16)))
        self.loop.step_rounds.current = OpenRound(round_id, {CHANNEL: buffer}, (buffer,), b"salt")
        self.loop._handle(ev.SubmitRound(round_id, {CHANNEL: collective}))

    def _restore(self) -> None:
        try:
            taken = self.loop.state_receiver.take_state(self.core.generation)
        except RemoteProtocolError:  # by the trainer: a dishonest source can prevent a newcomer's start
            return
        if taken is None:
            return
        term, generation, _ = taken
        self.loop._handle(ev.StateLoaded(term, generation))

    # -- invariants ----------------------------------------------------------------------------------

    def state(self) -> Before:
        core = self.core
        prepared = (
            core.current_generation.attempts.prepared_attempt if core.current_generation is not None else None
        )
        return Before(
            core.term,
            core.generation,
            core.applied,
            prepared.round_id if prepared is not None else None,
            self._members(),
            core.phase is ev.MemberPhase.RUNNING,
        )

    def _members(self) -> frozenset[m.PeerId]:
        return (
            frozenset(x.peer for x in self.core.rank_assignment.members)
            if self.core.rank_assignment is not None
            else frozenset()
        )

    def check(self, cause: ev.MemberEvent | None, effects: list[ev.MemberEffect], before: Before) -> None:
        core = self.core
        if isinstance(cause, ev.DigestComputed) and self.open is not None:
            self.yes.setdefault(self.open, {})[self.me] = cause.digest
        by_view = isinstance(cause, ev.MessageReceived) and isinstance(
            cause.message, m.MembershipView | m.StandbyNotice
        )
        allowed = before.members | self._members() | core.known_peers | {COORDINATOR}
        if isinstance(cause, ev.MessageReceived):
            allowed |= {cause.peer}
        for effect in effects:
            match effect:
                case ev.Send(peer, message):
                    must(peer in allowed and peer != self.me, f"posted to an unknown peer: {message}")
                    voted = isinstance(message, m.Vote)
                    must(
                        not voted or before.running or core.phase is ev.MemberPhase.RUNNING,
                        "a vote while frozen",
                    )
                case ev.SendPayload(peer) | ev.SendState(peer) | ev.ForwardState(peer):
                    must(peer in allowed and peer != self.me, "sent to no member")
                case ev.ResolveRound(round_id, committed) if not by_view:
                    self._check_resolved(round_id, committed, cause, before)
        must(core.term >= before.term, "the term decreases")
        is_apart = core.phase is ev.MemberPhase.APART  # after a StandbyNotice it is in no generation
        must(core.generation >= before.generation or is_apart, "the generation decreases")
        must(core.applied >= before.applied or by_view, "the applied step decreases without a MembershipView")
        must(core.deadline_s == core.deadline_s, "the deadline is no number")
        must(len(core._context.peer_links._expected_since) <= MAX_EXPECTED, "too many peers are expected")
        for peer in self._members():
            must(core.early_bytes(peer) <= MAX_EARLY_BYTES, "too many bytes are stored")
            early = (
                core.current_generation.attempts._early.get(peer)
                if core.current_generation is not None
                else None
            )
            must(early is None or len(early.messages) <= MAX_EARLY_MESSAGES, "too many messages are stored")

    def _check_resolved(self, round_id: m.RoundId, committed: bool, cause: Any, before: Before) -> None:
        if (
            isinstance(cause, ev.SubmitRound)
            and not committed
            and self.core._view_changes.generation is not None
        ):
            self.resolved.add(round_id)
            return  # it came too late
        must(round_id not in self.resolved, f"a round is resolved twice: {round_id}")
        self.resolved.add(round_id)
        self.ended[round_id] = committed
        assignment = self.core.rank_assignment
        if assignment is None:
            message = cause.message if isinstance(cause, ev.MessageReceived) else None
            is_left_behind = isinstance(message, m.CatchUpFrom) and cause.peer == COORDINATOR
            must(is_left_behind and not committed, "a round is resolved outside of any generation")
            return
        root = assignment.members[ROOT].peer
        votes = self.yes.get(round_id, {})
        if committed:
            must(self.me in votes, "COMMIT of a round that was not prepared here")
            if self.me == root:
                same = {votes.get(x.peer) for x in assignment.members}
                must(len(same) == 1 and None not in same, "COMMIT without the YES of all for one digest")
            else:
                must(
                    isinstance(cause, ev.MessageReceived) and cause.peer == root,
                    f"COMMIT by {type(cause).__name__}",
                )
        elif round_id == before.prepared and self.me != root:
            decided = isinstance(cause, ev.MessageReceived) and isinstance(cause.message, m.Decision)
            must(decided and cause.peer == root, "aborts alone after its YES")


def run(data: bytes) -> bool:
    harness = WorkerHarness(Source(data))
    with (
        loop_by(lambda: harness.now_s),
        suppress(JoinRefused),
    ):  # refused: the coordinator ends this worker
        harness.go(80)
    return any(harness.ended.values())


def valid(random: Random) -> bytes:
    head = bytes((random.randrange(3), random.randrange(3)))
    if random.random() < 0.5:
        return head + random.randbytes(random.choice((30, 150, 600)))
    # Mostly actions of an honest group: data, votes, and sometimes a new generation.
    likely = bytes((0, 0, 0, 0, 1, 1, 4, 4, 5, 4, 13, 16, 17))
    steps = bytearray()
    for _ in range(random.choice((10, 30, 70))):
        steps += bytes((random.randrange(3), random.randrange(5), random.choice(likely)))
        steps += bytes(random.randrange(4))
    return head + bytes(steps)


TARGETS = (
    Target(
        "member",
        "a worker's core in a running generation",
        run,
        valid,
        tuple(
            f"gridtrain.core.{name}"
            for name in (
                *("member.member", "member.generation", "member.incoming_state", "member.peer_links"),
                *("member.replica_state", "member.scalar_means", "member.stragglers", "commit.attempts"),
            )
        ),
        max_bytes=800,
        cpu_s=0.5,
    ),
)
