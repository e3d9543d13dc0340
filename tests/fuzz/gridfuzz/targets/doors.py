"""The coordinator's access control: enrolments, orders, violations and joins by any peer, in any order.

A model of a few lines says who may be admitted; and the journal is read back each time.

    input:  a schedule: one byte for an action, and its arguments
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

from gridfuzz import drawing
from gridfuzz.source import Source
from gridfuzz.targets.base import Target, must
from gridtrain.core import messages as m
from gridtrain.network.wire.codec import encode as to_frames
from gridtrain_coordinator.access import authorization as doors

OPERATOR, COORDINATOR = b"O" * 32, b"C" * 32
KEYS = tuple(bytes([letter]) * 32 for letter in b"abcdef")
TOKENS = tuple(bytes([letter]) * 32 for letter in b"012")
ORDERS = (m.Invite, m.RemoveWorker, m.Unban)


class Gate:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.door = doors.Authorization(run="run", operator=OPERATOR, coordinator=COORDINATOR)
        self.journal: list[tuple[str, dict[str, Any]]] = []
        self.wall_s, self.now_s = 1e9, 0.0
        self.ever_let_in: set[m.PeerId] = set()
        self.banned: set[m.PeerId] = set()
        self.left: dict[m.PeerId, int] = {}  # uses of each token
        self.until_s: dict[m.PeerId, float] = {}

    def step(self) -> None:
        source = self.source
        passed_s = source.choice((0.0, 0.0, 1.0, 6.0, 700.0, 1e5))
        self.now_s += passed_s
        self.wall_s += passed_s * source.choice((1, 1, 1, -1))  # somebody sets the clock
        peer = source.choice(KEYS)
        match source.byte() % 10:
            case 0 | 1:
                uses, expires_s = source.choice((1, 2, 10_000)), source.choice((60.0, 1e6, 0.0, 1e10))
                self.order(OPERATOR, m.Invite(source.choice(TOKENS), uses, expires_s))
            case 2 | 3:
                self.enrol(source.choice(TOKENS), peer)
            case 4:
                self.enrol(
                    source.choice((*KEYS, *TOKENS, OPERATOR)), source.choice((*KEYS, OPERATOR, COORDINATOR))
                )
            case 5:
                self.order(OPERATOR, m.RemoveWorker(peer, source.one_in(2), "why"))
            case 6:
                self.order(OPERATOR, m.Unban(peer))
            case 7:
                hints = {"peer": (*KEYS, OPERATOR, COORDINATOR), "key": (*TOKENS, *KEYS, OPERATOR)}
                order = drawing.message(source, ORDERS, hints)
                self.order(source.choice((*KEYS, *TOKENS, OPERATOR)), order)  # type: ignore[arg-type]
            case 8:
                accuser = source.choice((None, *KEYS))
                reason = source.choice(("why", "x" * 600, "\x1b[2J", "\ud800"))
                self.judged(self.door.record_violation(peer, reason, accuser, self.now_s))
            case _:
                for _ in range(source.choice((1, 30))):
                    self.door.allow_join(peer, self.now_s)
                self.judged(self.door.tick(self.now_s))
        self.check()

    def enrol(self, token: m.PeerId, peer: m.PeerId) -> None:
        where = self.source.choice(("10.0.0.0/24", "::/48", "", "no host", "fe80::/48"))
        was = self.door.access_role(peer, self.wall_s)
        answer = self.door.enrol(token, peer, where, self.wall_s)
        self.write(answer.entries)
        to_frames(answer.reply)
        if not isinstance(answer.reply, m.Enrolled):
            must(self.door.access_role(peer, self.wall_s) == was, "a refusal let somebody in")
            return
        must(token in self.left and self.wall_s < self.until_s[token], "no valid invitation was shown")
        must(peer not in self.banned, "a banned key is let in")
        must(peer not in (OPERATOR, COORDINATOR), "somebody came in with our own key")
        if answer.entries:
            self.left[token] -= 1
            must(self.left[token] >= 0, "an invitation is used once too often")
        self.ever_let_in.add(peer)

    def order(self, sender: m.PeerId, order: m.Invite | m.RemoveWorker | m.Unban) -> None:
        answer = self.door.handle_order(sender, order, self.wall_s)
        self.write(answer.entries)
        to_frames(answer.reply)
        if sender != OPERATOR:
            must(isinstance(answer.reply, m.Refused) and not answer.entries, "orders from anybody")
            return
        if not isinstance(answer.reply, m.OperatorReply):
            return
        match order:
            case m.Invite(key, uses, expires_s) if expires_s > 0:
                self.left[key], self.until_s[key] = uses, self.wall_s + expires_s
            case m.Invite(key):
                self.until_s[key] = self.wall_s
            case m.RemoveWorker(peer, ban):
                must(peer not in (OPERATOR, COORDINATOR), "we are expelled")
                if ban:
                    self.banned.add(peer)
            case m.Unban(peer):
                self.banned.discard(peer)

    def judged(self, judgement: doors.ViolationOutcome) -> None:
        self.write(judgement.entries)
        for peer, reason in judgement.removed:
            must(
                self.door.access_role(peer, self.wall_s) is not doors.AccessRole.PEER,
                f"a kicked key stays: {reason}",
            )
        must(set(judgement.restored) <= self.ever_let_in, "restored who never was a member")

    def write(self, entries: Any) -> None:
        self.journal += [(e.kind, json.loads(json.dumps(e.body, allow_nan=False))) for e in entries]

    def check(self) -> None:
        again = doors.recover_authorization(
            self.journal, run="run", operator=OPERATOR, coordinator=COORDINATOR
        )
        for key in (*KEYS, *TOKENS, OPERATOR, COORDINATOR):
            standing = self.door.access_role(key, self.wall_s)
            must(again.access_role(key, self.wall_s) == standing, "the journal says something else of a key")
            if standing is doors.AccessRole.PEER and key != OPERATOR:
                must(key in self.ever_let_in, "a stranger is a member")
                must(key not in self.banned, "a banned key is a member")
            must(standing is not doors.AccessRole.GUEST or key in self.left, "a guest without an invitation")


def run(data: bytes) -> bool:
    gate = Gate(Source(data))
    for _ in range(60):
        if gate.source.empty:
            break
        gate.step()
    picture = json.dumps(gate.door.status(gate.wall_s))
    must(not any(key.hex() in picture for key in TOKENS), "an invitation's key shows")
    must(len(picture) < 1 << 20, "the picture has no bound")
    return bool(gate.ever_let_in)


def valid(random: Random) -> bytes:
    return random.randbytes(random.choice((20, 100, 400)))


TARGETS = (
    Target(
        "door",
        "who may come in: enrolments, orders, strikes",
        run,
        valid,
        (
            "gridtrain_coordinator.access.authorization",
            "gridtrain_coordinator.access.authorization_rules",
            "gridtrain_coordinator.access.violations",
        ),
        max_bytes=600,
    ),
)
