"""What the hostile member runs: the honest script over the real SDK, and from some step on an attack.

    python -m hostile.mallory '{"steps": 100}' '{"attacks": ["garbage", "held"]}'

The first argument is `honest.Options`, the second `Orders`.  For each attack she has a key of her own (for
the first one that of the agent who started her).  With it she joins, becomes a member, takes part in
`LAWFUL_STEPS` steps, attacks until she is put out, and begins again at once, until the key is let in no more.
Each line of stdout is one JSON object; beside those of `honest`:

    attack    begins now, as a member of `generation`
    out       of the group: `code` and `reason` are the coordinator's words, or our own; `sent` at line rate
    over      of this attack: after so many `lives`; `kicked`: her key is let in no more
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import gridtrain
from gridtrain.core import messages as m
from gridtrain.core.group.member_events import MemberPhase
from gridtrain.errors import GridtrainError, JoinRefused
from gridtrain.network.transport.identity import Identity
from hostile import strangers
from hostile.attacks import ATTACKS, Attack, Place
from hostile.honest import Options, say, train, wait_for_gate

LAWFUL_STEPS = 2
MOST_LIVES = 10
REFUSED = ("denied", "invitation", "kicked")
"""Codes with which a key is let in no more (decision 0064)."""
MOST_S = 60.0


@dataclass(frozen=True)
class Orders:
    """One JSON object on the command line.

    Attributes:
        invitation: for the keys after the first one.
        gates: FIFOs; a byte in one lets her begin that attack.  None is left out: she begins at once.
        lives: with the key of an attack, at most; `MOST_LIVES` if the attack is not named.
        seconds: an attack that nobody ends is over after that; `MOST_S` if it is not named.
        victim: a member's name, or "coordinator"; empty: everybody.
        forever: the last attack goes on until her key is let in no more, and then she hammers at the doors.
    """

    attacks: list[str] = field(default_factory=list)
    invitation: str = ""
    gates: list[str] = field(default_factory=list)
    lives: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    victim: str = ""
    forever: bool = False


class EnoughError(GridtrainError):
    """The attack has lasted as long as it was to."""


class Hands:
    """Between the SDK's loop and its transport, in the loop's thread."""

    def __init__(self, grid: gridtrain.Grid, name: str, orders: Orders, until_s: float | None) -> None:
        driver: Any = grid._session.connection.loop
        credit = driver._transport
        identity = Identity.read(Path(grid._config.identity))
        self._place = Place(driver._core, credit, credit._inner._inner, identity, orders.victim)
        self._seconds = float("inf") if orders.forever else orders.seconds.get(name, MOST_S)
        self.until_s = until_s
        self.doors: dict[bytes, str] = {}
        self.attack: Attack = ATTACKS[name](self._place)
        self._name, self._began = name, False
        self._poll, self._send, rounds = credit.poll, credit.send, driver.step_rounds
        self._digest = rounds.compute_vote_digest
        self._from_step: int | None = None
        credit.poll, credit.send, rounds.compute_vote_digest = self.poll, self.send, self.digest

    def poll(self, timeout_s: float) -> Any:
        if not self._attacks():
            return self._poll(timeout_s)
        if self.until_s is not None and time.monotonic() >= self.until_s:
            raise EnoughError("she stops by herself")
        if not self._place.zeromq.connected(self._place.core.coordinator):
            return self._poll(timeout_s)  # she has been put out, and has to come back to hear why
        self.attack.burst()
        idle = type(self.attack).burst is Attack.burst
        return self._poll(timeout_s if idle else 0.0)

    def send(self, peer: bytes, message: m.Message) -> None:
        if isinstance(message, m.ViolationReport):
            return  # what her floods upset in her own software is nobody's fault
        for changed in self.attack.send(peer, message) if self._attacks() else [message]:
            self._send(peer, changed)

    def digest(self, flags: int) -> bytes | None:
        """Not in `send`: the root counts its own vote, which it sends to nobody."""
        digest: bytes | None = self._digest(flags)
        return digest if digest is None or not self._attacks() else self.attack.digest(digest)

    def _attacks(self) -> bool:
        core = self._place.core
        if core.phase is not MemberPhase.RUNNING:
            return False
        if self._from_step is None:
            self._from_step = core.step + LAWFUL_STEPS
        if core.step < self._from_step:
            return False
        if not self._began:
            self._began = True
            self.doors = self._place.addresses()
            if self.until_s is None:
                self.until_s = time.monotonic() + self._seconds
            say("attack", attack=self._name, generation=core.generation, step=core.step)
        return True


def attack(name: str, options: Options, orders: Orders, invitation: str | None) -> dict[bytes, str]:
    """All lives with one key; the addresses of those whom she met."""
    doors: dict[bytes, str] = {}
    lives, code, until_s = 0, "", None
    while code not in (*REFUSED, "end", "EnoughError") and lives < orders.lives.get(name, MOST_LIVES):
        lives += 1
        hands = None
        try:
            with gridtrain.join(invitation) as grid:
                hands = Hands(grid, name, orders, until_s)
                train(grid, options)
            code, reason = "end", "the run ended with her as a member"
        except JoinRefused as refusal:
            code, reason = refusal.code, refusal.reason
        except GridtrainError as error:
            code, reason = type(error).__name__, str(error)
        if hands is not None:
            hands.attack.over = True
            doors |= hands.doors
            until_s = hands.until_s
        say("out", attack=name, code=code, reason=reason, sent=hands.attack.sent if hands is not None else 0)
    say("over", attack=name, lives=lives, kicked=code in REFUSED)
    return doors


def main() -> None:
    torch.set_num_threads(1)
    options, orders = Options(**json.loads(sys.argv[1])), Orders(**json.loads(sys.argv[2]))
    say("loaded", pid=os.getpid())
    doors: dict[bytes, str] = {}
    for number, name in enumerate(orders.attacks):
        wait_for_gate(orders.gates[number] if orders.gates else "")
        if number == 0:
            doors |= attack(name, options, orders, None)
            continue
        with tempfile.TemporaryDirectory() as state:
            os.environ["XDG_STATE_HOME"] = state
            doors |= attack(name, options, orders, orders.invitation)
    if orders.forever:
        strangers.hammer(Identity.read(Path(os.environ["GRIDTRAIN_IDENTITY"])), doors)


if __name__ == "__main__":
    main()
