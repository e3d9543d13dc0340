"""Votes, decisions and data into `core.commit.attempts`, at the root and elsewhere; the local side is honest.

input:  u8 ranks, u8 rank, then a schedule: one byte for an action, and its arguments
"""

from __future__ import annotations

from contextlib import suppress
from random import Random

from gridfuzz import drawing
from gridfuzz.source import Source
from gridfuzz.targets.base import Target, must
from gridfuzz.targets.exchanges import expected
from gridtrain.core import messages as m
from gridtrain.core.collectives.ring import RingAllReduce
from gridtrain.core.commit.attempts import (
    MAX_EARLY_MESSAGES,
    AttemptEffect,
    Attempts,
    StepCommitted,
)
from gridtrain.core.commit.two_phase_commit import ROOT
from gridtrain.core.group import member_events as ev
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.errors import RemoteProtocolError

GOOD, BAD = b"good", b"bad"
CHANNEL = m.Channel()
FIRST_STEP = 5


class RoundHarness:
    def __init__(self, source: Source) -> None:
        self.source = source
        world_size = 1 + source.below(4)
        roster = tuple(m.Member(bytes([65 + i]) * 32, "", "", 1, False) for i in range(world_size))
        self.assignment = RankAssignment(roster[source.below(world_size)].peer, 1, 2, roster)
        self.core = Attempts(self.assignment, FIRST_STEP)
        self.now_s = 0.0
        self.yes: dict[m.RoundId, set[int]] = {}  # ranks that have voted YES for `GOOD`
        self.decided: dict[m.RoundId, m.Verdict] = {}  # by the root
        self.ended: dict[m.RoundId, bool] = {}
        self.due = expected(0, self.assignment.rank, world_size, 1)
        self.progress = 0
        self.offended: set[m.PeerId] = set()

    def step(self) -> None:
        source, core = self.source, self.core
        if core.open_attempt is None and not core.is_stuck and not source.one_in(4):
            ring = RingAllReduce(self.assignment.rank, self.assignment.world_size, 1, int(source.one_in(16)))
            self.due = expected(0, self.assignment.rank, self.assignment.world_size, 1)
            self.take(core.submit(core.next_round, {CHANNEL: ring}, 5.0, self.now_s), ROOT)
            return
        self.now_s += source.choice((0.0, 0.0, 0.1, 6.0))
        match source.byte() % 12:
            case 0 | 1 | 2 if self.due:
                rank, place = self.due.pop(0)
                self.receive(rank, m.Data(self.current_round, CHANNEL, place, drawing.flags(source), b""))
            case 3 | 4:
                self.receive(self.any_rank(), m.Vote(self.current_round, True, GOOD, ""))
            case 5:
                self.receive(ROOT, m.Decision(self.current_round, source.choice(list(m.Verdict)), ""))
            case 6:
                self.take(core.fail("local", self.now_s), None)
            case 7:
                self.take(core.peer_disconnected("broke", self.now_s), None)
                if (rank := self.any_rank()) != self.assignment.rank:
                    self.take(core.peer_connected(self.assignment.members[rank].peer), None)
            case 8:
                self.take(core.tick(self.now_s), None)
                rank, has_moved = self.any_rank(), source.one_in(2)
                if core.open_attempt is not None:
                    core.open_attempt.record_progress(rank, has_moved, self.now_s)
            case 9:
                self.progress += 1
                rank = self.any_rank()
                self.progressed(rank, m.RoundProgress(self.some_round(), self.progress))
            case 10:  # a member is at the next step already, or claims it
                current_round = self.current_round
                ahead = m.RoundId(current_round.term, current_round.generation, current_round.step + 1, 0)
                self.receive(
                    self.any_rank(),
                    m.Data(ahead, CHANNEL, m.PayloadSlot(m.CollectivePhase.REDUCE), 0, b""),
                )
            case _:
                classes = (m.Data, m.Vote, m.Decision)
                hints = {
                    "RoundId": (self.current_round, self.some_round(), self.some_round()),
                    "Channel": (CHANNEL,),
                    "digest": (GOOD, BAD),
                    "Place": [place for _, place in self.due] or [m.PayloadSlot(m.CollectivePhase.REDUCE)],
                }
                message = drawing.message(source, classes, hints)
                self.receive(self.any_rank(), message)

    @property
    def current_round(self) -> m.RoundId:
        return self.core.open_attempt.round_id if self.core.open_attempt is not None else self.core.next_round

    def some_round(self) -> m.RoundId:
        current_round, source = self.current_round, self.source
        step = max(0, current_round.step + source.choice((0, 1, -1, 2)))
        attempt = max(0, current_round.attempt + source.choice((0, 1, -1)))
        return m.RoundId(current_round.term, current_round.generation + source.one_in(8), step, attempt)

    def any_rank(self) -> int:
        """Mostly a rank other than this member's, if there is one."""
        return (
            self.assignment.rank + 1 + self.source.below(self.assignment.world_size)
        ) % self.assignment.world_size

    def progressed(self, rank: int, message: m.RoundProgress) -> None:
        with suppress(RemoteProtocolError):
            self.core.record_progress(self.assignment.members[rank].peer, message, self.now_s)

    def receive(self, rank: int, message: m.Data | m.Vote | m.Decision) -> None:
        peer = self.assignment.members[rank].peer
        if rank == self.assignment.rank or peer in self.offended:
            return
        if isinstance(message, m.Vote) and message.yes and message.digest == GOOD:
            self.yes.setdefault(message.round, set()).add(rank)
        if isinstance(message, m.Decision) and rank == ROOT:
            self.decided.setdefault(message.round, message.verdict)
        try:
            self.take(self.core.receive(peer, message, 0, self.now_s), rank, message)
        except RemoteProtocolError:
            self.offend(peer)

    def offend(self, peer: m.PeerId) -> None:
        """Ignore the peer from now on, as the member's core does after a violation."""
        if self.source.one_in(2):
            self.offended.add(peer)
            self.core.drop_early(peer)
        self.take(self.core.peer_disconnected("offence", self.now_s), None)

    def take(self, effects: list[AttemptEffect], by: int | None, cause: object = None) -> None:
        for effect in effects:
            match effect:
                case ev.Send(peer, message):
                    must(
                        self.assignment.rank_of(peer) is not None and peer != self.assignment.own_id,
                        "posted to no member",
                    )
                    if isinstance(message, m.Vote):
                        must(
                            peer == self.assignment.members[ROOT].peer, "a vote that does not go to the root"
                        )
                    if isinstance(message, m.Decision) and message.round in self.ended:
                        committed = message.verdict is m.Verdict.COMMIT
                        must(committed == self.ended[message.round], "another decision is repeated")
                case ev.SendPayload(peer):
                    must(
                        self.assignment.rank_of(peer) is not None and peer != self.assignment.own_id,
                        "sent to no member",
                    )
                case ev.ComputeDigest():
                    self.yes.setdefault(self.current_round, set()).add(self.assignment.rank)
                    self.take(self.core.prepare(GOOD, self.now_s), None)
                case StepCommitted(round_id):
                    self.end(round_id, True)
                    votes = self.yes.get(round_id, set())
                    must(self.assignment.rank in votes, "COMMIT of a round that was not prepared here")
                    if self.assignment.rank == ROOT:
                        must(len(votes) == self.assignment.world_size, "COMMIT without the YES of all")
                    else:
                        by_root = self.decided.get(round_id) is m.Verdict.COMMIT or by == ROOT
                        must(by_root, f"COMMIT decided by rank {by}: {cause}")
                case ev.ResolveRound(round_id, committed):
                    must(not committed, "Attempts resolves aborts alone")
                    self.end(round_id, False)
                case _ if type(effect).__name__ == "Offended":
                    self.offended.add(effect.peer)  # type: ignore[union-attr]

    def end(self, round_id: m.RoundId, committed: bool) -> None:
        must(round_id not in self.ended, f"decided twice: {round_id}")
        last = max(self.ended, default=None)
        must(last is None or last < round_id, "a round ended after a later one")
        if last is not None:
            must((round_id.step > last.step) == self.ended[last], "the step does not follow from the verdict")
        self.ended[round_id] = committed

    def check(self) -> None:
        early_by_peer = self.core._early
        for member in self.assignment.members:
            early = early_by_peer.get(member.peer)
            must(early is None or len(early.messages) <= MAX_EARLY_MESSAGES, "too many messages are stored")
        must(self.core.deadline_s == self.core.deadline_s, "the deadline is no number")


def run(data: bytes) -> bool:
    harness = RoundHarness(Source(data))
    for _ in range(300):
        if harness.source.empty:
            break
        harness.step()
        harness.check()
    return any(harness.ended.values())


def valid(random: Random) -> bytes:
    head = bytes((random.randrange(4), random.randrange(4)))
    if random.random() < 0.5:
        return head + random.randbytes(random.choice((20, 80, 300)))
    # Mostly actions of an honest group: submit, the data that are due, votes and decisions.
    steps = bytearray()
    for _ in range(random.choice((6, 20, 60))):
        steps += bytes(
            (random.randrange(3), random.randrange(3), random.choice((0, 1, 2, 3, 3, 4, 5, 5, 10)))
        )
        steps += bytes(random.randrange(4) for _ in range(random.randrange(3)))
    return head + bytes(steps)


TARGETS = (
    Target(
        "attempts",
        "votes, decisions and data into the rounds of one generation",
        run,
        valid,
        ("gridtrain.core.commit.attempts", "gridtrain.core.commit.two_phase_commit"),
        max_bytes=1000,
    ),
)
