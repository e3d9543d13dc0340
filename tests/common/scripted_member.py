"""A member's core, and a coordinator and peers whose messages a test chooses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.group import member_events as ev
from gridtrain.core.member.member import MemberCore

COORDINATOR = b"0" * 32
SETUP = m.Setup((("model", "tiny"),), m.LedgerSpec(100, 0, epochs=1), 4, None)


def full_mesh(rank: int, size: int, cuts: Any = ()) -> frozenset[int]:
    return frozenset(range(size)) - {rank}


def no_neighbours(rank: int, size: int, cuts: Any = ()) -> frozenset[int]:
    return frozenset()


class ScriptedMember:
    """A member's core that was welcomed, and whose training script has joined."""

    def __init__(
        self,
        me: m.PeerId,
        setup: m.Setup = SETUP,
        *,
        address: str = "",
        limits: Deadlines | None = None,
        neighbours: Any = full_mesh,
        may_be_absent: bool = False,
    ) -> None:
        self.me, self.now_s = me, 0.0
        join = m.Join("r", me[:1].decode(), address)
        self.core = MemberCore(me, COORDINATOR, join, limits or Deadlines())
        self.hear(ev.PeerConnected(COORDINATOR))
        self.say(m.Welcome(1, "r", ""))
        self.hear(ev.TrainerJoined(setup, neighbours, may_be_absent=may_be_absent))

    def hear(self, event: ev.MemberEvent) -> list[ev.MemberEffect]:
        return self.core.handle(event, self.now_s)

    def say(self, message: m.Message, peer: m.PeerId = COORDINATOR) -> list[ev.MemberEffect]:
        return self.hear(ev.MessageReceived(peer, message))

    def install(
        self,
        generation: int,
        members: Iterable[m.Member],
        *,
        applied: int = -1,
        history: bytes | None = None,
        ledger: m.LedgerState | None = None,
        bounds: tuple[int, ...] = (),
        decided: m.RoundId | None = None,
    ) -> list[ev.MemberEffect]:
        """A member list and then its view, whose effects are returned; by default with its own history."""
        members = tuple(members)
        self.say(m.MemberListPage(1, generation, 0, 1, members))
        then = self.core.history if history is None else history
        state = ledger or m.LedgerState(step=applied + 1)
        return self.say(
            m.MembershipView(
                1, generation, len(members), m.Verdict.ABORT, decided, applied, then, state, "why", "", bounds
            )
        )
