"""Records simulated histories as digests, to show that a refactoring has not changed behaviour.

A history is one run of a simulator from one seed.  Its transcript lists every call of every core in it (the
coordinator's, the workers', the collectives'): the event, the time, the effects returned, in order, and the
deadline after the call.  The digest of the transcript is stored.

    python record_transcripts.py --out FILE [--seeds A:B] [--only NAME]     record
    python record_transcripts.py --check FILE [--seeds A:B] [--only NAME]   compare; status 1 if any differs
    python record_transcripts.py --show NAME SEED [--names]                 print one transcript

Run it with PYTHONPATH set to the tree under test.  To find where two trees differ, print the transcript of
a history that differs from both trees and compare the two texts.

A transcript does not depend on names in the source.  Classes and cores are numbered in the order of their
first appearance in a history, dataclasses are written by the position of their fields, enums by value, sets
and mappings in sorted order, floats by `repr`.  Texts for people and log messages are left out.
Values that are part of a protocol or of a file format (message fields, journal keys and entries, addresses,
descriptions of exchanges, enum values) are written as they are: they must not change.

    event --> core --> effects, deadline          c3 handle @0.417        core, call, time
                 |                                  < #12(8f..,#9(..))    the event
                 v                                  > #14(c1..,#20(..))   one line for each effect
             Transcript --> blake2b                 = 2.417               the deadline, where it changed
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from collective_group import CollectiveGroup
from exchange_buffers import NEIGHBOURS, make_buffer

from gridtrain.core import messages as m
from gridtrain.core.collectives.activation_transfer import ActivationReceiver, ActivationSender
from gridtrain.core.collectives.allgather import AllGather
from gridtrain.core.collectives.butterfly import ButterflyExchange
from gridtrain.core.collectives.collective import BufferEffect, Collective
from gridtrain.core.collectives.direct import DirectAllReduce
from gridtrain.core.collectives.direct_allgather import make_allgather
from gridtrain.core.collectives.ring import RingAllReduce
from gridtrain.core.collectives.star import DenseStar, SparseStar
from gridtrain.core.collectives.subgroup import Subgroup
from gridtrain.core.collectives.tree import TreeExchange
from gridtrain.core.group import member_events as ev
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.core.member.member import MemberCore
from gridtrain.core.planning.batch_shares import SAMPLES_FIGURE, SECONDS_FIGURE
from gridtrain.core.planning.exchange_choice import FIRST_STEP_FIGURE
from gridtrain.core.planning.network_model import LinkModel as ModelledLink
from gridtrain.core.planning.network_model import NetworkModel as ModelledNetwork
from gridtrain.core.planning.workload import ExchangeKind, Workload
from gridtrain.errors import JoinRefused
from gridtrain_coordinator.membership.membership import Membership
from gridtrain_coordinator.run import events as cio
from simulation.faults import Faults
from simulation.staged_world import (
    EPOCHS,
    SAMPLES,
    StagedWorker,
    StagedWorld,
    random_model,
    setup_of,
)
from simulation.toy_trainer import AUTO, CHOICES, PARAMETERS, Buffers, K, N, ToyTrainer, contribution_to
from simulation.virtual_exchange import simulate_exchange
from simulation.virtual_network import LinkProperties
from simulation.world import COORDINATOR, SimWorker, World

# -- the code under test -----------------------------------------------------------------------

HOOKS: tuple[tuple[type[Any], dict[str, Callable[..., Any]]], ...] = (
    (Membership, {"start": Membership.start, "handle": Membership.handle, "tick": Membership.tick}),
    (MemberCore, {"handle": MemberCore.handle, "tick": MemberCore.tick}),
    *(
        (collective, {"start": collective.start, "handle": collective.handle})
        for collective in (
            RingAllReduce, DirectAllReduce, AllGather, ButterflyExchange, TreeExchange, DenseStar, SparseStar,
            Subgroup, ActivationSender, ActivationReceiver,
        )
    ),
)  # fmt: skip
"""Classes of cores, and the methods of each that are recorded, by their names in transcripts."""

HAVE_DEADLINES = (Membership, MemberCore)

NOTES = (ev.LogEvent, cio.LogEvent)
"""Effects that are log lines: left out."""

TEXTS = frozenset({"reason", "remedy", "text"})
"""Names of fields that are texts for people: left out, as are these:"""

OTHER_TEXTS = {
    (ev.AddCollectives, "failure"),
    (ev.AddResidual, "name"),
    (ev.DeliverMean, "missing"),
    (m.WorkerInfo, "texts"),
}

TEXT_KEYS = frozenset({"reason"})
"""Keys of journal entries whose values are texts for people: left out."""

EXCHANGES = ("dense", "direct", "dense-star", "topk", "gtopk", "tree", "star")

# -- transcripts -------------------------------------------------------------------------------


class Transcript:
    """The canonical text of one history.

    Args:
        keep: keep the lines, for people; otherwise only their digest is computed.

    Attributes:
        failure: the exception by which the simulator ended; empty: it ended by itself.
    """

    def __init__(self, keep: bool = False) -> None:
        self.lines: list[str] | None = [] if keep else None
        self.failure = ""
        self._digest = hashlib.blake2b(digest_size=16)
        self._classes: dict[type[Any], int] = {}
        self._cores: dict[int, tuple[int, Any]] = {}  # by id: unique, as the core is referenced here
        self._deadlines: dict[int, float] = {}

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    @property
    def class_names(self) -> list[str]:
        """`NUMBER qualified name` of all classes that were numbered."""
        return [f"#{number} {cls.__module__}.{cls.__qualname__}" for cls, number in self._classes.items()]

    def call(self, core: Any, call: str, args: tuple[Any, ...]) -> None:
        """A core is called with `args`: an event, or none, and the time; a collective without the time."""
        events: Sequence[Any] = args
        at = ""
        if isinstance(core, HAVE_DEADLINES):
            *events, now_s = args
            at = f" @{now_s!r}"
        self._write(f"c{self._number_of_core(core)} {call}{at}")
        for event in events:
            self._write(f"  < {self.form(event)}")

    def returned(self, core: Any, effects: Iterable[Any]) -> None:
        """The effects of the call, and the core's next deadline."""
        for effect in effects:
            if not isinstance(effect, NOTES):
                self._write(f"  > {self.form(effect)}")
        if isinstance(core, HAVE_DEADLINES):
            number, deadline_s = self._number_of_core(core), core.deadline_s
            if self._deadlines.get(number) != deadline_s:
                self._deadlines[number] = deadline_s
                self._write(f"  = {deadline_s!r}")

    def raised(self, error: BaseException) -> None:
        self._write(f"  ! {self.form(error)}")

    def form(self, value: Any) -> str:
        """One value, in one line."""
        cls = type(value)
        if value is None or cls in (bool, int, float, str):
            return repr(value)
        if cls is tuple or cls is list:
            return f"[{','.join(map(self.form, value))}]"
        if isinstance(value, bytes | bytearray | memoryview):
            return _form_of_bytes(bytes(value))
        names = _written(cls)
        if names is not None:
            number = self._number_of_class(cls)
            return f"#{number}({','.join([self.form(getattr(value, name)) for name in names])})"
        return self._form_of_others(value)

    def _form_of_others(self, value: Any) -> str:
        match value:
            case Enum():
                plain = isinstance(value.value, int | str)
                return self.form(value.value if plain else list(type(value)).index(value))
            case Mapping():
                items = [(key, item) for key, item in value.items() if key not in TEXT_KEYS]
                return f"{{{','.join(sorted(f'{self.form(key)}:{self.form(item)}' for key, item in items))}}}"
            case set() | frozenset():
                return f"{{{','.join(sorted(map(self.form, value)))}}}"
            case np.ndarray():
                return f"{value.dtype.str}{list(value.shape)}{_form_of_bytes(value.tobytes())}"
            case np.generic():
                return self.form(value.item())
            case JoinRefused():
                return f"#{self._number_of_class(type(value))}({value.code!r})"
        return "function" if callable(value) else f"#{self._number_of_class(type(value))}"

    def _number_of_class(self, cls: type[Any]) -> int:
        return self._classes.setdefault(cls, len(self._classes) + 1)

    def _number_of_core(self, core: Any) -> int:
        if id(core) not in self._cores:
            self._cores[id(core)] = len(self._cores) + 1, core
            self._write(f"c{len(self._cores)} is #{self._number_of_class(type(core))}")
        return self._cores[id(core)][0]

    def _write(self, line: str) -> None:
        self._digest.update(line.encode())
        self._digest.update(b"\n")
        if self.lines is not None:
            self.lines.append(line)


ADDED = {
    (ev.ResolveRound, "is_unknown"),
    (m.LedgerSpec, "delay"),
    (m.LedgerSpec, "shards"),
    (m.LedgerState, "pending"),
    (m.LedgerState, "leases"),
    (m.LedgerState, "restart_generation"),
    (m.Member, "entries_share"),
    (ev.ProbePeers, "is_member"),
    (m.StandbyNotice, "decided_round"),
}
"""Fields that classes did not have when the baseline was recorded; all histories have their defaults, or show
them in the journal."""

_WRITTEN: dict[type[Any], tuple[str, ...] | None] = {}


def _written(cls: type[Any]) -> tuple[str, ...] | None:
    """Names of the fields of a dataclass that are written, in their order; None: it is not a dataclass."""
    if cls not in _WRITTEN:
        _WRITTEN[cls] = None
        if is_dataclass(cls):
            names = [field.name for field in fields(cls) if field.init and field.name not in TEXTS]
            _WRITTEN[cls] = tuple(name for name in names if (cls, name) not in ADDED | OTHER_TEXTS)
    return _WRITTEN[cls]


def _form_of_bytes(value: bytes) -> str:
    """Keys and digests in full, longer values by their length and digest."""
    if len(value) <= 32:
        return f"x{value.hex()}"
    return f"x[{len(value)}]{hashlib.blake2b(value, digest_size=8).hexdigest()}"


@contextmanager
def recording(keep: bool = False) -> Iterator[Transcript]:
    """Record all calls of all cores in this context, except for calls of one core by another."""
    transcript, depth = Transcript(keep), 0

    def recorded(method: Callable[..., Any], call: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def replacement(core: Any, *args: Any) -> Any:
            nonlocal depth
            if depth:
                return method(core, *args)
            transcript.call(core, call, args)
            depth += 1
            try:
                effects = method(core, *args)
                transcript.returned(core, effects)
            except Exception as error:
                transcript.raised(error)
                raise
            finally:
                depth -= 1
            return effects

        return replacement

    replaced: dict[tuple[type[Any], str], Callable[..., Any]] = {}
    for cls, methods in HOOKS:
        for call, method in methods.items():
            name = method.__name__
            owner = next(base for base in cls.__mro__ if name in vars(base))
            if (owner, name) not in replaced:
                replaced[owner, name] = method
                setattr(owner, name, recorded(method, call))
    try:
        yield transcript
    finally:
        for (owner, name), method in replaced.items():
            setattr(owner, name, method)


# -- trainers, and their worlds ------------------------------------------------------------------------------


class VectorTrainer:
    """A trainer whose model is a vector, in several buckets.

    Args:
        exchange: the exchange, unless the coordinator chooses one.
        buckets: collectives of one round.
    """

    def __init__(self, exchange: str, buckets: int = 1) -> None:
        book: dict[m.RoundId, list[ToyTrainer.Attempt]] = defaultdict(list)
        n = N // buckets
        gradients = (partial(_gradient, start=start, stop=start + n) for start in range(0, N, n))
        self._of = {
            m.Channel(index=index): ToyTrainer(exchange, book, gradient, n)
            for index, gradient in enumerate(gradients)
        }

    def prepare(
        self, round_id: m.RoundId, assignment: RankAssignment, spans: Sequence[m.Span], skip: bool
    ) -> Buffers:
        return {
            channel: buffer
            for channel, trainer in self._of.items()
            for buffer in trainer.prepare(round_id, assignment, spans, skip).values()
        }

    def commit(self, buffers: Buffers, skip: bool) -> None:
        for trainer in self._of.values():
            trainer.commit(buffers, skip)

    def capture(self) -> Any:
        return np.concatenate([trainer.model for trainer in self._of.values()])

    def restore(self, state: Any) -> None:
        for trainer, part in zip(self._of.values(), np.split(state, len(self._of)), strict=True):
            trainer.restore(part)

    def clear_residual(self) -> None:
        for trainer in self._of.values():
            trainer.clear_residual()

    def take_residual(self) -> Any:
        return b"".join(trainer.take_residual() for trainer in self._of.values())

    def add_residual(self, residual: Any) -> None:
        parts = np.split(np.frombuffer(residual, np.float32), len(self._of))
        for trainer, part in zip(self._of.values(), parts, strict=True):
            trainer.add_residual(part)


@functools.cache
def _gradient(position: int, start: int = 0, stop: int = N) -> np.ndarray:
    """Elements `start` to `stop` of a sample's gradient."""
    indices = np.arange(start, stop)
    gradient: np.ndarray = ((position * 7919 + indices * 104_729) % 1009 % 17 - 8).astype(np.float32)
    return gradient


class PartwiseWorker(SimWorker):
    """Submits its collectives one after the other, as a trainer that overlaps them with computing.

    In one half of all rounds all are submitted before the round opens; in the other half the round opens with
    the first one, and the others follow; a few of those rounds fail.
    """

    def handle(self, event: ev.MemberEvent) -> None:
        if not isinstance(event, ev.SubmitRound) or len(event.collectives) < 2:
            super().handle(event)
            return
        round_id, collectives = event.round, sorted(event.collectives.items())
        first, rest = dict(collectives[:1]), dict(collectives[1:])
        dice = Random(f"{self.peer.hex()} {round_id.generation} {round_id.step} {round_id.attempt}")
        if dice.random() < 0.5:
            super().handle(ev.SubmitRound(round_id, first, is_complete=False))
            super().handle(ev.SubmitRound(round_id, rest))
            return
        extension = ev.AddCollectives(round_id, rest, has_more=False)
        if dice.random() < 0.1:
            extension = ev.AddCollectives(round_id, {}, failure="it cannot go on")
        super().handle(ev.SubmitRound(round_id, first, has_more=True))
        self.world.later(dice.uniform(0.0, 0.05), self.peer, partial(self.handle, extension))


class MeasuredWorld(World):
    """A world whose workers may report how fast they compute, and how fast their links are."""

    speeds = ""
    """"constant": a worker's depends on its key; "in turns": all compute slowly and fast in turns."""

    links = False
    """Whether the rates of links are reported; no two links are equal."""

    turn_s = 1.0

    def figures(self, worker: SimWorker) -> tuple[tuple[str, float], ...]:
        unlike = 1 + worker.peer[0] % 4
        if self.speeds == "constant":
            return (SAMPLES_FIGURE, 20.0 * self.now_s * unlike), (SECONDS_FIGURE, 4.0 * self.now_s)
        if self.speeds == "in turns" and worker.has_computed:
            sample_s = unlike * (3.0 if int(self.now_s / self.turn_s) % 2 else 0.001)
            return (
                (FIRST_STEP_FIGURE, 3 * sample_s),
                (SAMPLES_FIGURE, 100.0),
                (SECONDS_FIGURE, 100 * sample_s),
            )
        return ()

    def rates_Bps(
        self, peer: m.PeerId, others: Sequence[m.PeerId]
    ) -> tuple[tuple[m.PeerId, float, float], ...]:
        """Round-trip times are reported a little later."""
        if not self.links:
            return ()
        rtt_s = tuple((other, (peer[2] + other[2]) / 5120) for other in others)
        self.later(0.1, peer, partial(self.send, peer, COORDINATOR, m.LinkLatencies(rtt_s)))
        return tuple((other, 1e6 * (2 + peer[1] % 32), 1e6 * (2 + other[1] % 32)) for other in others)


class VectorWorld(MeasuredWorld):
    """A group in which every worker has the whole model.

    Args:
        exchange: "auto": the coordinator chooses one.
        batch: samples of a step; None: each worker has 3.
    """

    def __init__(
        self, seed: int, exchange: str, *, buckets: int, can_catch_up: bool, initial_digest: bytes,
        batch: int | None,
        **more: Any,
    ) -> None:  # fmt: skip
        self._partwise = buckets > 1
        self.deceivers: tuple[m.PeerId, ...] = ()
        self.deceivers_habit = ""
        facts: tuple[tuple[str, str], ...] = (("kind", exchange),)
        usual = exchange
        if exchange == "auto":
            usual = "dense"
            facts = (("model", f"{PARAMETERS} parameters in 4 tensors"), ("exchange", AUTO.describe()))
            more["choices"] = {said: NEIGHBOURS[name] for said, name in CHOICES.items()}
        spec = m.LedgerSpec(SAMPLES, 1, epochs=more.pop("epochs", EPOCHS))
        setup = m.Setup(facts, spec, 3, batch, can_catch_up=can_catch_up, initial_state_digest=initial_digest)
        super().__init__(
            seed, partial(VectorTrainer, usual, buckets), NEIGHBOURS[usual], setup,
            **{"min_workers": 1, "compute_s": (0.001, 0.1), "checkpoint_every": 5, **more},
        )  # fmt: skip

    def send(self, src: m.PeerId, dst: m.PeerId, message: m.Message) -> None:
        sent = self._instead(message) if src in self.deceivers else message
        if sent is not None:
            super().send(src, dst, sent)

    def _instead(self, message: m.Message) -> m.Message | None:
        """The message that a deceiver sends instead; None: none."""
        match self.deceivers_habit, message:
            case "boasts", m.FreezeReport():
                applied = message.applied + self.random.choice((1, 2, 2, 50))
                return replace(message, applied=applied, ledger=replace(message.ledger, step=applied + 1))
            case "boasts", m.Heartbeat():
                return replace(message, step=message.step + 1000)
            case "is silent", m.Data():
                return message if self.random.random() < 0.7 else None
            case "refuses", m.Vote():
                return replace(message, yes=message.yes and self.random.random() < 0.5)
            case "blames", m.Heartbeat() if self.random.random() < 0.7:
                core, blamed = self.workers[self.deceivers[0]].core, max(worker.peer for worker in self.alive)
                round_id = m.RoundId(core.term, core.generation, core.step, 0)
                return m.RoundStalled(round_id, (blamed,), 0.0, "blames the same one again")
        return message

    def make_worker(self, peer: m.PeerId, trainer: Any, setup: m.Setup) -> SimWorker:
        return (PartwiseWorker if self._partwise else SimWorker)(self, peer, trainer, setup)


class StageWorld(MeasuredWorld, StagedWorld):
    """A model in stages, whose workers may report how fast they are."""

    def make_worker(self, peer: m.PeerId, trainer: Any, setup: m.Setup) -> SimWorker:
        """Where links differ, machines differ as well."""
        flops = 1e12 * (1 + peer[3] % 4) if self.links else 0.0
        return super().make_worker(peer, trainer, replace(setup, flops=flops))


# -- faults ------------------------------------------------------------------------------------


class Trouble(Faults):
    """Faults of the workers and the coordinator of one history, and their times."""

    def __init__(self, world: World, dice: Random, most: int) -> None:
        super().__init__(world, dice)
        self.most = most

    def crash_and_return(self) -> None:
        """A process joins with the key and the disk of one that died, or only with its disk."""
        for worker in self.some():
            self.world.crash(worker.peer)
            same_key = partial(self.world.restart_process, worker.peer, self.random.choice((0.0, 0.3, 2.0)))
            self.after(2.0, self.random.choice((same_key, partial(self._return, worker))))

    def _return(self, worker: SimWorker) -> None:
        if isinstance(worker, StagedWorker) and isinstance(self.world, StagedWorld):
            self.world.join_with(worker.stored_checkpoints)
        else:
            self.world.join(worker.disk)

    def crash_all(self) -> None:
        """A power cut: some workers return."""
        for worker in self.world.alive:
            self.world.crash(worker.peer)
            if self.random.random() < 0.7:
                self.after(3.0, partial(self._return, worker))

    def return_all(self) -> None:
        for worker in [worker for worker in self.world.workers.values() if not worker.alive]:
            if len(self.world.alive) < self.most:
                self._return(worker)

    def leave(self) -> None:
        for worker in self.some():
            self.world.leave(worker.peer)

    def leave_gracefully(self) -> None:
        for worker in self.some():
            self.world.leave_gracefully(worker.peer)

    def leave_two_gracefully(self) -> None:
        for worker in self.some(2):
            self.after(0.3, partial(self.world.leave_gracefully, worker.peer))

    def pause(self) -> None:
        """The owner of a machine needs it; the worker returns later."""
        for worker in self.some():
            worker.handle(ev.LeaveGroup("its owner plays", is_temporary=True))
            self.world.crash(worker.peer)
            self.after(4.0, partial(self.world.restart_process, worker.peer))

    def join_isolated(self) -> None:
        """A newcomer that only the coordinator can reach."""
        newcomer = self.world.join()
        for member in self.members:
            self.world.block_link(newcomer.peer, member.peer, 30.0)

    def catch_up(self) -> None:
        """A worker outside the generation requests the state from members and receives pieces of it."""
        members = self.members
        for worker in self.world.alive if members else []:
            if worker.core.rank_assignment is None:
                worker.handle(ev.StateSnapshotLoading())
                source, step = self.random.choice(members), max(0, worker.core.step)
                asked = self.random.choice(
                    (m.SnapshotRequest(), m.SnapshotBlocksRequest(step, (0, 1)), m.UpdatesRequest(step))
                )
                table, update = (
                    m.SnapshotDigests(step, b"history", b"table"),
                    m.UpdateLogEntry(step, step, b"update"),
                )
                answered = self.random.choice((table, update, m.SnapshotUnavailable("")))
                self.world.send(worker.peer, source.peer, asked)
                self.world.send(source.peer, worker.peer, answered)

    def refute(self) -> None:
        """A forwarded state turns out to be a different one."""
        for worker in self.world.alive:
            worker.handle(ev.StateDigestMismatch(worker.core.generation))

    def lie(self) -> None:
        """A member sends a message that no honest member sends, to the coordinator or to another member."""
        for liar, other in [self.some(2)] if len(self.members) >= 2 else []:
            core, peers = liar.core, tuple(worker.peer for worker in self.members)
            step = core.step + self.random.choice((-1, 0, 1, 2, 50))
            generation = core.generation + self.random.choice((0, 0, 0, 1, -1))
            round_id = m.RoundId(core.term, generation, max(0, step), self.random.choice((0, 0, 1)))
            digest = self.random.randbytes(32)
            phase, hop, segment = (
                self.random.choice(tuple(m.CollectivePhase)),
                *self.random.choices(range(3), k=2),
            )
            place = m.PayloadSlot(phase, hop, segment)
            to_member: tuple[m.Message, ...] = (
                m.Data(round_id, m.Channel(index=self.random.randint(0, 1)), place, 0, b"nothing"),
                m.Vote(round_id, True, digest, "", None),
                m.Vote(round_id, False, b"", "does not like it", None),
                m.Decision(round_id, m.Verdict.COMMIT, ""),
                m.Decision(round_id, m.Verdict.ABORT, "does not like it"),
                m.RoundProgress(round_id, 1000),
                m.MeanRequest(core.term, generation, core.step, 0, 1.5),
                m.MeanReply(core.term, generation, core.step, 0, 1.5),
                m.StateRequest(core.term, generation),
                m.ResidualReply(core.term, generation, True, ""),
                m.UpdatesRequest(core.step),
                m.ResidualBlock(core.term, generation, core.applied, core.history, 0, 2, b"residual"),
                m.StartGeneration(core.term, generation),
                m.Freeze(core.term, generation, "it says so"),
            )
            to_coordinator: tuple[m.Message, ...] = (
                m.ViolationReport(other.peer, "does not like it"),
                m.RoundStalled(round_id, peers, 1.0, "blames all"),
                m.ConnectionLost(core.term, generation, other.peer),
                m.PeersUnreachable(core.term, generation, (other.peer,)),
                m.ReplicaDigest(core.term, generation, core.applied, digest),
                m.Ready(core.term, generation, digest),
                m.FreezeReport(
                    core.term, generation, True, step, digest, core.replica_state.ledger, None, b"", 0
                ),
                m.CurrentGeneration(core.term, generation + 3, tuple((peer, 3) for peer in peers)),
                m.CatchUpReport(step, digest),
                m.StageCheckpointList(
                    (m.CheckpointInfo(step, digest, core.replica_state.ledger),), generation
                ),
                m.StartGeneration(core.term, generation),
                m.LinkLatencies(((other.peer, 0.01),)),
                m.LinkRates(((other.peer, 1e6, 1e6),)),
            )
            if self.random.random() < 0.5:
                self.world.send(liar.peer, COORDINATOR, self.random.choice(to_coordinator))
            else:
                self.world.send(liar.peer, other.peer, self.random.choice(to_member))


EVERYTHING = (
    Trouble.join, Trouble.join, Trouble.crash, Trouble.crash, Trouble.crash_and_return, Trouble.crash_all,
    Trouble.leave, Trouble.leave_gracefully, Trouble.pause, Trouble.break_edge, Trouble.break_coordinator,
    Trouble.break_all_coordinator, Trouble.block_link, Trouble.partition, Trouble.freeze,
    Trouble.freeze_coordinator, Trouble.restart, Trouble.restart_and_crash, Trouble.restart_from_backup,
    Trouble.back_up, Trouble.take_over, Trouble.flip, Trouble.lose_decision, Trouble.miss_generation,
)  # fmt: skip


# -- histories ---------------------------------------------------------------------------------

UNTIL_S, MAX_EVENTS = 90.0, 2_000_000


def churn(
    exchange: str,
    seed: int,
    *,
    faults: Sequence[Callable[[Trouble], None]] = EVERYTHING,
    calm: float = 0.1,
    workers: tuple[int, int] = (1, 5),
    watch: Callable[[World, Random], None] | None = None,
    speeds: str = "",
    links: bool = False,
    **more: Any,
) -> None:
    """Workers with the whole model, and these faults, or none with probability `calm`."""
    dice = Random(f"{exchange} {seed}")
    usual = {
        "buckets": 1,
        "batch": None,
        "can_catch_up": dice.random() < 0.5,
        "initial_digest": dice.choice((b"", b"as built")),
        "behind_nat": dice.choice((0.0, 0.0, 0.5, 1.0)),
        "skips": dice.choice((0.0, 0.0, 0.02)),
        "slow_restore": dice.choice((0.0, 0.0, 0.2)),
    }
    world = VectorWorld(seed, exchange, **{**usual, **more})
    world.speeds, world.links, world.turn_s = speeds, links, dice.choice((0.5, 1.0, 2.0))
    count = dice.randint(*workers)
    for _ in range(count):
        world.join()
    if dice.random() >= calm:
        Trouble(world, dice, most=count + 2).plan_some(faults, dice.randint(1, 8))
    if watch is not None:
        watch(world, dice)
    world.run(UNTIL_S, max_events=MAX_EVENTS)


def compare_sometimes(world: World, dice: Random) -> None:
    """Members request averages and compare their states; sometimes a state diverges."""
    compared: dict[m.PeerId, int] = defaultdict(lambda: -1)

    def look() -> None:
        for worker in world.alive:
            core = worker.core
            if core.applied == compared[worker.peer] or not core.is_synced:
                continue
            compared[worker.peer] = core.applied
            worker.handle(ev.RequestMean(core.step, 0, float(worker.peer[0])))
            generation = core.current_generation
            if core.applied % 2 == 0 or (generation is not None and generation.is_comparison_due):
                digest = dice.randbytes(16) if dice.random() < 0.03 else core.history[:16]
                if dice.random() < 0.8:
                    worker.handle(ev.CompareReplicas(core.applied, digest))
        world.at(world.now_s + 0.02, look)

    look()


def deceive(world: World, dice: Random) -> None:
    """One of the first members sends other messages than its core."""
    assert isinstance(world, VectorWorld)
    world.deceivers = (dice.choice(sorted(world.workers)),)
    world.deceivers_habit = dice.choice(("boasts", "is silent", "refuses", "blames"))
    compare_sometimes(world, dice)


def stages(seed: int, *, links: bool = False) -> None:
    """A model in 2 to 4 stages of 1 or 2 replicas, and 0 to 2 standbys."""
    dice = Random(f"stages {seed}")
    count, replicas, standbys = dice.randint(2, 4), dice.randint(1, 2), dice.choice((0, 0, 1, 2))
    model: m.StagedModel | None = None
    memory: tuple[int, ...] = (0,)
    if dice.random() < 0.6:
        model, total = random_model(dice, count)
        memory = dice.choice(((0,), (0,), (2 * total, total), (total,)))
    more = {"skips": dice.choice((0.0, 0.0, 0.02)), "behind_nat": dice.choice((0.0, 0.0, 0.5))}
    batch = dice.choice((None, 12)) if links else None
    world = StageWorld(seed, setup_of(count, model, batch=batch), memory=memory, **more)
    world.links, world.speeds = links, "constant" if links else ""
    for _ in range(count * replicas + standbys):
        world.join()
    trouble = Trouble(world, dice, most=9)
    trouble.plan_some(
        (*STAGE_FAULTS, Trouble.join, Trouble.leave, Trouble.leave_gracefully), dice.randint(0, 6)
    )
    if dice.random() < 0.8:  # owners restart their workers
        world.at(dice.uniform(5.0, 20.0), trouble.return_all)
    world.run(UNTIL_S, max_events=MAX_EVENTS)


def repartition(seed: int) -> None:
    """One replica of each stage and no standby: after a loss a stage has no worker."""
    dice = Random(f"repartition {seed}")
    count = dice.randint(2, 4)
    model, total = random_model(dice, count)
    memory = dice.choice(((0,), (0,), (2 * total,), (2 * total, total), (total, 2 * total // 3)))
    slow = dice.choice((0.0, 0.0, 0.2))
    world = StageWorld(seed, setup_of(count, model, epochs=3), memory=memory, slow_restore=slow)
    for _ in range(count):
        world.join()
    trouble = Trouble(world, dice, most=6)
    for _ in range(dice.randint(1, 2)):
        world.at(dice.uniform(0.6, 4.0), trouble.crash)
    for _ in range(dice.choice((0, 1, 1, 2, 3))):
        world.at(dice.uniform(2.0, 12.0), trouble.join)
    if dice.random() < 0.5:
        trouble.plan_some(STAGE_FAULTS, dice.randint(1, 2))
    if dice.random() < 0.3:
        world.at(dice.uniform(5.0, 20.0), trouble.return_all)
    world.run(60.0, max_events=MAX_EVENTS)


STAGE_FAULTS = (
    Trouble.crash, Trouble.crash_stage, Trouble.crash_and_return, Trouble.crash_all, Trouble.break_edge,
    Trouble.break_coordinator, Trouble.restart, Trouble.restart_and_crash, Trouble.restart_from_backup,
    Trouble.freeze, Trouble.freeze_coordinator, Trouble.flip, Trouble.partition, Trouble.lose_decision,
    Trouble.block_link, Trouble.pause,
)  # fmt: skip


class BareBuffer:
    """A buffer without values, for a collective that is run without them."""

    def __init__(self, make: Callable[[int, int, int], Collective]) -> None:
        self.make_collective = make

    def apply(self, effect: BufferEffect) -> None: ...

    def payload(self, place: m.PayloadSlot) -> bytes:
        return b"payload"

    def compute_digest(self) -> bytes:
        return b""


def collectives(seed: int) -> None:
    """One collective over a network that delays and reorders; in some histories a rank dies."""
    dice = Random(f"collectives {seed}")
    size = dice.randint(1, 12)
    names = (*EXCHANGES, "telling", "subgroups", "activations")
    name = names[seed % len(names)]
    values = [_gradient(dice.randrange(1000)) for _ in range(size)]
    bare: dict[str, Callable[[int, int, int], Collective]] = {
        "telling": make_allgather,
        "subgroups": _in_subgroups,
        "activations": _activation,
    }
    buffers: list[Any] = (
        [BareBuffer(bare[name]) for _ in range(size)]
        if name in bare
        else [
            make_buffer(name, rank, size, contribution_to(name, value), n=N, k=K)
            for rank, value in enumerate(values)
        ]
    )
    skipping = [rank for rank in range(size) if dice.random() < 0.05 and name != "activations"]
    link = LinkProperties(delay_s=(0.001, 0.02), bandwidth_Bps=1e6, in_order=dice.random() < 0.5)
    group = CollectiveGroup(buffers, seed=seed, skipping=skipping, link=link)
    if dice.random() < 0.3:
        dead = dice.randrange(size)
        group.network.call_at(dice.uniform(0.0, 0.05), partial(group.network.crash, dead))
    group.run()


def _in_subgroups(rank: int, world_size: int, flags: int) -> Collective:
    """One collective among the even ranks, and one among the odd ranks."""
    ranks = range(rank % 2, world_size, 2)
    return Subgroup(RingAllReduce(ranks.index(rank), len(ranks), 2, flags), ranks)


def _activation(rank: int, world_size: int, flags: int) -> Collective:
    """From each even rank to the next one, in three pieces."""
    if rank % 2:
        return ActivationReceiver(rank, rank - 1, world_size)
    return ActivationSender(rank, rank + 1, 3) if rank + 1 < world_size else RingAllReduce(0, 1, 1, flags)


def modelled_links(seed: int) -> None:
    """One collective over modelled links, as in tests of the planner's estimates."""
    dice = Random(f"links {seed}")
    size = dice.randint(2, 12)
    pairs = {
        (a, b): ModelledLink(dice.uniform(0.0001, 0.03), dice.uniform(1e6, 1e8))
        for a in range(size)
        for b in range(size)
    }
    up, down = ([dice.uniform(1e6, 1e8) for _ in range(size)] for _ in range(2))
    network = ModelledNetwork(lambda a, b: pairs[a, b], up, down)
    kinds = tuple(ExchangeKind)
    load = Workload(kinds[seed % len(kinds)], dice.randint(10_000, 900_000), density=0.02)
    simulate_exchange(load, network, lambda work: 1e-4)


RESTARTS = (
    Trouble.restart, Trouble.restart, Trouble.restart_and_crash, Trouble.restart_from_backup, Trouble.back_up,
    Trouble.freeze_coordinator, Trouble.take_over, Trouble.break_all_coordinator, Trouble.join,
    Trouble.crash_all,
)  # fmt: skip
CATCH_UP_FAULTS = (
    Trouble.join, Trouble.join, Trouble.join, Trouble.join_isolated, Trouble.crash, Trouble.block_link,
    Trouble.break_coordinator, Trouble.leave_gracefully, Trouble.restart, Trouble.miss_generation,
    Trouble.catch_up, Trouble.catch_up, Trouble.refute,
)  # fmt: skip
LEAVING = (
    Trouble.leave_gracefully,
    Trouble.leave_two_gracefully,
    Trouble.join,
    Trouble.break_edge,
    Trouble.lose_decision,
)
PAUSING = (Trouble.pause, Trouble.pause, Trouble.join, Trouble.crash_and_return, Trouble.restart)
CALMER = (
    Trouble.join,
    Trouble.crash,
    Trouble.break_edge,
    Trouble.restart,
    Trouble.flip,
    Trouble.leave_gracefully,
)

HISTORIES: dict[str, tuple[Callable[[int], None], int]] = {
    "dense": (partial(churn, "dense"), 200),
    "topk": (partial(churn, "topk"), 200),
    "gtopk": (partial(churn, "gtopk"), 200),
    "tree": (partial(churn, "tree"), 60),
    "star": (partial(churn, "star"), 60),
    "direct": (partial(churn, "direct"), 60),
    "dense-star": (partial(churn, "dense-star"), 60),
    "auto": (partial(churn, "auto", speeds="in turns", links=True, compute_s=(0.05, 0.2), reshare_s=0.4), 50),
    "shares": (
        partial(
            churn, "gtopk", speeds="constant", links=True, reshare_s=1.0, batch=15, epochs=6, faults=CALMER,
            workers=(3, 9),
        ),
        60,
    ),
    "restarts": (partial(churn, "gtopk", faults=RESTARTS, calm=0.0), 120),
    "followers": (
        partial(churn, "dense", faults=CATCH_UP_FAULTS, can_catch_up=True, compute_s=(0.1, 0.3)), 100
    ),
    "leaving": (partial(churn, "topk", faults=LEAVING, calm=0.0, workers=(3, 6)), 60),
    "pausing": (partial(churn, "gtopk", faults=PAUSING, calm=0.0, workers=(2, 5)), 60),
    "comparing": (partial(churn, "dense", faults=CALMER, watch=compare_sometimes, workers=(3, 5)), 60),
    "partwise": (partial(churn, "dense", faults=CALMER, buckets=2, workers=(2, 5)), 60),
    "lying": (partial(churn, "gtopk", faults=(Trouble.lie,), calm=0.0, workers=(3, 6)), 100),
    "deceiving": (
        partial(
            churn, "topk", faults=CALMER, calm=0.2, watch=deceive, workers=(3, 6), compute_s=(0.3, 0.6),
            epochs=3,
        ),
        100,
    ),
    "stages": (stages, 120),
    "stage-links": (partial(stages, links=True), 43),
    "repartition": (repartition, 60),
    "collectives": (collectives, 80),
    "links": (modelled_links, 28),
}  # fmt: skip
"""By name: the function that runs a history from its seed, and the number of recorded seeds, from 0."""


def record(name: str, seed: int, keep: bool = False) -> Transcript:
    """Run one history.  An exception ends it, and is part of the transcript."""
    with recording(keep) as transcript:
        try:
            HISTORIES[name][0](seed)
        except Exception as error:
            transcript.raised(error)
            transcript.failure = f"{type(error).__name__}: {error}"
    return transcript


# -- command line ------------------------------------------------------------------------------

Digests = dict[str, dict[int, str]]


def load(path: Path) -> Digests:
    """By name and seed, as `save` has written them."""
    known = json.loads(path.read_text())["histories"]
    return {name: {int(seed): digest for seed, digest in of.items()} for name, of in known.items()}


def save(path: Path, digests: Digests) -> None:
    about = f"Python {platform.python_version()}, numpy {np.__version__}"
    path.write_text(json.dumps({"recorded_with": about, "histories": digests}, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--out", type=Path, metavar="FILE", help="record digests")
    task.add_argument("--check", type=Path, metavar="FILE", help="compare with recorded digests")
    task.add_argument("--show", nargs=2, metavar=("NAME", "SEED"), help="print one transcript")
    parser.add_argument("--seeds", type=_seeds, metavar="A:B", help="only seeds A to B - 1")
    parser.add_argument("--only", choices=HISTORIES, metavar="NAME", help=", ".join(HISTORIES))
    parser.add_argument("--names", action="store_true", help="with --show: end with the names of all classes")
    args = parser.parse_args(argv)
    if args.show:
        if args.show[0] not in HISTORIES:
            parser.error(f"NAME is one of {', '.join(HISTORIES)}")
        transcript = record(args.show[0], int(args.show[1]), keep=True)
        for line in (transcript.lines or []) + (transcript.class_names if args.names else []):
            print(line)
        if transcript.failure:
            print(f"failed: {transcript.failure}", file=sys.stderr)
        return 0
    known = {name: dict.fromkeys(range(count), "") for name, (_, count) in HISTORIES.items()}
    if args.check:
        known = load(args.check)
    began_s, found, differing = time.monotonic(), defaultdict[str, dict[int, str]](dict), 0
    for name, seed, digest in _chosen(known, args.only, args.seeds):
        transcript = record(name, seed)
        found[name][seed] = transcript.digest
        if transcript.failure:
            print(f"failed: {name} {seed}: {transcript.failure}")
        if digest and digest != transcript.digest:
            differing += 1
            print(f"differs: {name} {seed}")
    print(f"code under test: {sys.modules[Membership.__module__].__file__}")
    print(f"{sum(map(len, found.values()))} histories in {time.monotonic() - began_s:.0f} s", end="")
    if args.out:
        save(args.out, found)
        print(f", written to {args.out}")
    else:
        print(f", {differing} differ")
    return 1 if differing else 0


def _chosen(known: Digests, only: str | None, seeds: range | None) -> Iterator[tuple[str, int, str]]:
    for name, digests in known.items():
        for seed, digest in digests.items():
            if only in (None, name) and (seeds is None or seed in seeds):
                yield name, seed, digest


def _seeds(text: str) -> range:
    first, _, end = text.partition(":")
    return range(int(first), int(end))


if __name__ == "__main__":
    sys.exit(main())
