"""A worker's core by itself: whom it deals with, and what it does about who breaks the protocol."""

from __future__ import annotations

import pytest

from gridtrain.config import Deadlines
from gridtrain.protocol import member_io as io
from gridtrain.protocol import messages as m
from gridtrain.protocol.member import MemberCore

COORDINATOR = b"0" * 32
ME, A, B, J = (letter * 32 for letter in (b"m", b"a", b"b", b"j"))
LIMITS = Deadlines(route_s=8.0)
SETUP = m.Setup((("model", "tiny"),), m.LedgerSpec(100, 0, epochs=1), 4, None)


class Worker:
    """A member core that is welcomed, and says what it does."""

    def __init__(self) -> None:
        self.core = MemberCore(ME, COORDINATOR, m.Join("r", "me", "tcp://me:1"), LIMITS)
        self.now_s = 0.0
        self.hear(io.EdgeUp(COORDINATOR))
        self.say(m.Welcome(1, "r", ""))
        self.hear(io.Enter(SETUP, lambda rank, size: frozenset(range(size)) - {rank}))

    def hear(self, event: io.Event) -> list[io.Effect]:
        return self.core.handle(event, self.now_s)

    def say(self, message: m.Message, peer: m.PeerId = COORDINATOR) -> list[io.Effect]:
        return self.hear(io.Heard(peer, message))

    def view(self, generation: int, **addresses: str) -> list[io.Effect]:
        """A generation of this worker and others, by letter; it is the last in rank."""
        peers = [*(name.encode() * 32 for name in addresses), ME]
        ways = [*addresses.values(), ""]
        members = tuple(
            m.Member(p, p[:1].decode(), way, 4, False) for p, way in zip(peers, ways, strict=True)
        )
        self.say(m.Roster(1, generation, 0, 1, members))
        history, ledger = self.core.history, m.LedgerState()
        view = m.View(1, generation, len(peers), m.Verdict.ABORT, None, -1, history, ledger, "")
        return self.say(view)


def dials(effects: list[io.Effect]) -> dict[m.PeerId, str]:
    return {effect.peer: effect.address for effect in effects if isinstance(effect, io.Dial)}


def test_only_the_coordinator_is_known_at_first_then_the_roster() -> None:
    worker = Worker()
    assert worker.core.acquaintances == {COORDINATOR}
    worker.view(1, a="tcp://a:1", b="tcp://b:1")
    assert worker.core.acquaintances == {COORDINATOR, ME, A, B}
    worker.hear(io.EdgeUp(A)), worker.hear(io.EdgeUp(B))
    effects = worker.view(2, b="tcp://b:1")
    assert worker.core.acquaintances == {COORDINATOR, ME, B}
    assert io.HangUp(A) in effects and io.HangUp(B) not in effects


def test_it_dials_whom_it_is_told_to_and_the_relays_on_the_way() -> None:
    worker = Worker()
    relayed = "relay:" + B.hex()
    assert dials(worker.view(1, a=relayed, b="tcp://b:1")) == {A: relayed, B: "tcp://b:1"}
    through_the_coordinator = "relay:" + COORDINATOR.hex()
    assert dials(worker.view(2, a=through_the_coordinator, b="")) == {A: through_the_coordinator}


def test_a_newcomer_that_was_announced_may_measure_until_the_generation_after_the_next() -> None:
    worker = Worker()
    worker.view(1, a="")
    assert dials(worker.say(m.Expect(((J, "tcp://j:1"), (B, ""))))) == {J: "tcp://j:1"}
    assert {J, B} <= worker.core.acquaintances
    worker.view(2, a="", b="")
    assert J in worker.core.acquaintances
    worker.view(3, a="")
    assert J not in worker.core.acquaintances and B not in worker.core.acquaintances


def test_only_the_coordinator_announces() -> None:
    worker = Worker()
    worker.view(1, a="")
    with pytest.raises(Exception, match="only the coordinator may send it"):
        worker.say(m.Expect(((J, ""),)), peer=A)
    assert J not in worker.core.acquaintances


def test_an_edge_that_does_not_come_up_is_reported_once_by_whoever_was_to_dial() -> None:
    worker = Worker()
    worker.view(1, a="tcp://a:1", b="")
    assert worker.core.deadline_s == LIMITS.route_s
    worker.now_s = LIMITS.route_s
    (post,) = [e for e in worker.core.tick(worker.now_s) if isinstance(e, io.Post)]
    assert post == io.Post(COORDINATOR, m.NoRoute(1, 1, (A,)))
    assert worker.core.deadline_s == float("inf")


def test_an_offender_is_dropped_accused_once_and_let_in_again_by_the_next_generation() -> None:
    worker = Worker()
    worker.view(1, a="tcp://a:1", b="")
    worker.hear(io.EdgeUp(A)), worker.hear(io.EdgeUp(B))
    effects = worker.hear(io.Offence(A, "sent NaN"))
    assert io.HangUp(A) in effects
    assert io.Post(COORDINATOR, m.Accuse(A, "sent NaN")) in effects
    assert A not in worker.core.acquaintances
    again = worker.hear(io.Offence(A, "sent NaN again"))
    assert not [e for e in again if isinstance(e, io.Post)]
    worker.view(2, a="tcp://a:1", b="")
    assert A in worker.core.acquaintances


def test_who_is_no_member_is_dropped_without_a_word_to_the_coordinator() -> None:
    worker = Worker()
    worker.view(1, a="")
    worker.say(m.Expect(((J, ""),)))
    effects = worker.hear(io.Offence(J, "sent garbage"))
    assert io.HangUp(J) in effects and not [e for e in effects if isinstance(e, io.Post)]


def test_a_worker_that_never_reached_its_coordinator_is_not_paused() -> None:
    core = MemberCore(ME, COORDINATOR, m.Join("r", "me", ""), LIMITS)
    assert core.paused == ""
    worker = Worker()
    worker.hear(io.EdgeDown(COORDINATOR, "line"))
    assert "needs the coordinator" in worker.core.paused


def test_a_freeze_names_who_is_cut_off_before_the_next_view() -> None:
    worker = Worker()
    worker.view(1, a="tcp://a:1", b="")
    worker.hear(io.EdgeUp(A)), worker.hear(io.EdgeUp(B))
    effects = worker.say(m.Freeze(1, 1, "a was put out", (A,)))
    assert io.HangUp(A) in effects
    assert worker.core.acquaintances == {COORDINATOR, ME, B}


def test_many_rejoins_are_answered_by_one_join() -> None:
    """As when all that was said during a silence of the line arrives at once."""
    worker = Worker()
    joins = [e for _ in range(24) for e in worker.say(m.Rejoin("you are not on the roll"))]
    assert [e.message for e in joins if isinstance(e, io.Post)] == [m.Join("r", "me", "tcp://me:1")]
