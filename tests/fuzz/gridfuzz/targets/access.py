"""The coordinator's access control: enrolments, orders, violations and joins by any peer, in any order.

A model of a few lines says which keys may be admitted.  The journal is read back each time.

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
from gridtrain_coordinator.access import authorization

OPERATOR, COORDINATOR = b"O" * 32, b"C" * 32
KEYS = tuple(bytes([letter]) * 32 for letter in b"abcdef")
TOKENS = tuple(bytes([letter]) * 32 for letter in b"012")
ORDERS = (m.Invite, m.RemoveWorker, m.Unban)


class AccessHarness:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.access = authorization.Authorization(run="run", operator=OPERATOR, coordinator=COORDINATOR)
        self.journal: list[tuple[str, dict[str, Any]]] = []
        self.wall_s, self.now_s = 1e9, 0.0
        self.ever_admitted: set[m.PeerId] = set()
        self.banned: set[m.PeerId] = set()
        self.left: dict[m.PeerId, int] = {}  # uses of each token
        self.until_s: dict[m.PeerId, float] = {}

    def step(self) -> None:
        source = self.source
        passed_s = source.choice((0.0, 0.0, 1.0, 6.0, 700.0, 1e5))
        self.now_s += passed_s
        self.wall_s += passed_s * source.choice((1, 1, 1, -1))  # the clock is set
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
                self.judged(self.access.record_violation(peer, reason, accuser, self.now_s))
            case _:
                for _ in range(source.choice((1, 30))):
                    self.access.allow_join(peer, self.now_s)
                self.judged(self.access.tick(self.now_s))
        self.check()

    def enrol(self, token: m.PeerId, peer: m.PeerId) -> None:
        where = self.source.choice(("10.0.0.0/24", "::/48", "", "no host", "fe80::/48"))
        was = self.access.access_role(peer, self.wall_s)
        answer = self.access.enrol(token, peer, where, self.wall_s)
        self.write(answer.entries)
        to_frames(answer.reply)
        if not isinstance(answer.reply, m.Enrolled):
            must(self.access.access_role(peer, self.wall_s) == was, "a refusal admits a key")
            return
        must(token in self.left and self.wall_s < self.until_s[token], "no valid invitation was presented")
        must(peer not in self.banned, "a banned key is admitted")
        must(
            peer not in (OPERATOR, COORDINATOR),
            "a worker is admitted with the coordinator's or operator's key",
        )
        if answer.entries:
            self.left[token] -= 1
            must(self.left[token] >= 0, "an invitation is used too often")
        self.ever_admitted.add(peer)

    def order(self, sender: m.PeerId, order: m.Invite | m.RemoveWorker | m.Unban) -> None:
        answer = self.access.handle_order(sender, order, self.wall_s)
        self.write(answer.entries)
        to_frames(answer.reply)
        if sender != OPERATOR:
            must(
                isinstance(answer.reply, m.Refused) and not answer.entries,
                "a command of a peer other than the operator is obeyed",
            )
            return
        if not isinstance(answer.reply, m.OperatorReply):
            return
        match order:
            case m.Invite(key, uses, expires_s) if expires_s > 0:
                self.left[key], self.until_s[key] = uses, self.wall_s + expires_s
            case m.Invite(key):
                self.until_s[key] = self.wall_s
            case m.RemoveWorker(peer, ban):
                must(peer not in (OPERATOR, COORDINATOR), "coordinator or operator are removed")
                if ban:
                    self.banned.add(peer)
            case m.Unban(peer):
                self.banned.discard(peer)

    def judged(self, judgement: authorization.ViolationOutcome) -> None:
        self.write(judgement.entries)
        for peer, reason in judgement.removed:
            must(
                self.access.access_role(peer, self.wall_s) is not authorization.AccessRole.PEER,
                f"a kicked key stays: {reason}",
            )
        must(set(judgement.restored) <= self.ever_admitted, "a key that was never a member is restored")

    def write(self, entries: Any) -> None:
        self.journal += [(e.kind, json.loads(json.dumps(e.body, allow_nan=False))) for e in entries]

    def check(self) -> None:
        again = authorization.Authorization(
            entries=self.journal, run="run", operator=OPERATOR, coordinator=COORDINATOR
        )
        for key in (*KEYS, *TOKENS, OPERATOR, COORDINATOR):
            role = self.access.access_role(key, self.wall_s)
            must(again.access_role(key, self.wall_s) == role, "the journal has another role of a key")
            if role is authorization.AccessRole.PEER and key != OPERATOR:
                must(key in self.ever_admitted, "a stranger is a member")
                must(key not in self.banned, "a banned key is a member")
            must(
                role is not authorization.AccessRole.GUEST or key in self.left,
                "a pending member without an invitation",
            )


def run(data: bytes) -> bool:
    harness = AccessHarness(Source(data))
    for _ in range(60):
        if harness.source.empty:
            break
        harness.step()
    status = json.dumps(harness.access.status(harness.wall_s))
    must(not any(key.hex() in status for key in TOKENS), "the status shows an invitation's key")
    must(len(status) < 1 << 20, "the status has no bound")
    return bool(harness.ever_admitted)


def valid(random: Random) -> bytes:
    return random.randbytes(random.choice((20, 100, 400)))


TARGETS = (
    Target(
        "door",
        "access control: enrolments, orders, violations",
        run,
        valid,
        (
            "gridtrain_coordinator.access.authorization",
            "gridtrain_coordinator.access.authorization_limits",
            "gridtrain_coordinator.access.accusations",
        ),
        max_bytes=600,
    ),
)
