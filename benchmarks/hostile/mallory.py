"""The script of a hostile member: honest training over the real SDK, then an attack.

    python -m hostile.mallory '{"exchange": "gtopk"}' '{"attacks": ["garbage", "held"]}'

The first argument is `observed.Options`, the second `Orders`.  Each attack has its own key (the first one
that of the agent which started this script).  With it the script joins, becomes a member, takes part in
`LAWFUL_STEPS` steps and attacks until it is removed; then it joins again, until its key is refused.  Each
line of stdout is one JSON object, of `observed` or one of these:

    attack    an attack begins, as a member of `generation`
    out       a membership ended: `code` and `reason` of the coordinator or of our own error; `sent` in bursts
    over      an attack ended after `memberships`; `kicked`: the key is refused
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
from hostile.attacks import ATTACKS, Attack, Internals
from lab.group import say
from observed import Options, task_of, train, wait_for_gate

LAWFUL_STEPS = 2
MAX_MEMBERSHIPS = 10
REFUSED = ("denied", "invitation", "kicked")
"""Codes of a refused key (decision 0064)."""
MAX_S = 60.0


@dataclass(frozen=True)
class Orders:
    """One JSON object on the command line.

    Attributes:
        invitation: for all keys but the first one.
        gates: a FIFO for each attack, which begins when a byte has been read; empty: attacks begin at once.
        memberships: most memberships by attack (`MAX_MEMBERSHIPS` if it is not named).
        seconds: longest duration by attack (`MAX_S` if it is not named).
        victim: a member's name or "coordinator"; empty: all of them.
        forever: the last attack lasts until the key is refused; handshakes with the key follow without end.
    """

    attacks: list[str] = field(default_factory=list)
    invitation: str = ""
    gates: list[str] = field(default_factory=list)
    memberships: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    victim: str = ""
    forever: bool = False


class EnoughError(GridtrainError):
    """The attack has reached its longest duration."""


class Interceptor:
    """Sits between the SDK's loop and its transport, in the loop's thread, and carries out an attack.

    Attributes:
        addresses: the addresses known when the attack began, by peer.
    """

    def __init__(self, grid: gridtrain.Grid, name: str, orders: Orders, until_s: float | None) -> None:
        driver: Any = grid._session.connection.loop
        credit = driver._transport
        identity = Identity.read(Path(grid._config.identity))
        self._internals = Internals(driver._core, credit._inner._inner, identity, orders.victim)
        self._seconds = float("inf") if orders.forever else orders.seconds.get(name, MAX_S)
        self.until_s = until_s
        self.addresses: dict[bytes, str] = {}
        self.attack: Attack = ATTACKS[name](self._internals)
        self._name, self._began = name, False
        self._poll, self._send, rounds = credit.poll, credit.send, driver.step_rounds
        self._digest = rounds.compute_vote_digest
        self._from_step: int | None = None
        credit.poll, credit.send, rounds.compute_vote_digest = self.poll, self.send, self.digest

    def poll(self, timeout_s: float) -> Any:
        if not self._attacks():
            return self._poll(timeout_s)
        if not self._internals.zeromq.connected(self._internals.core.coordinator):
            return self._poll(timeout_s)  # it was removed: a notice was lost, and denials end it after 60 s
        if self.until_s is not None and time.monotonic() >= self.until_s:
            raise EnoughError("the longest duration of the attack has passed")
        self.attack.burst()
        idle = type(self.attack).burst is Attack.burst
        return self._poll(timeout_s if idle else 0.0)

    def send(self, peer: bytes, message: m.Message) -> None:
        if isinstance(message, m.ViolationReport):
            return  # its own floods cause these reports
        for changed in self.attack.send(peer, message) if self._attacks() else [message]:
            self._send(peer, changed)

    def digest(self, flags: int) -> bytes | None:
        """Replace the vote's digest here and not in `send`, because the root does not send its own vote."""
        digest: bytes | None = self._digest(flags)
        return digest if digest is None or not self._attacks() else self.attack.digest(digest)

    def _attacks(self) -> bool:
        core = self._internals.core
        if core.phase is not MemberPhase.RUNNING:
            return False
        if self._from_step is None:
            self._from_step = core.step + LAWFUL_STEPS
        if core.step < self._from_step:
            return False
        if not self._began:
            self._began = True
            self.addresses = self._internals.addresses()
            if self.until_s is None:
                self.until_s = time.monotonic() + self._seconds
            say("attack", attack=self._name, generation=core.generation, step=core.step)
        return True


def attack(name: str, options: Options, orders: Orders, invitation: str | None) -> dict[bytes, str]:
    """Attack in all memberships with one key; return the addresses of the peers by public key."""
    addresses: dict[bytes, str] = {}
    memberships, code, until_s = 0, "", None
    most = orders.memberships.get(name, MAX_MEMBERSHIPS)
    while code not in (*REFUSED, "end", "EnoughError") and memberships < most:
        memberships += 1
        interceptor = None
        try:
            with gridtrain.join(invitation) as grid:
                interceptor = Interceptor(grid, name, orders, until_s)
                train(grid, options, task_of(options))
            code, reason = "end", "the run ended during this membership"
        except JoinRefused as refusal:
            code, reason = refusal.code, refusal.reason
        except GridtrainError as error:
            code, reason = type(error).__name__, str(error)
        if interceptor is not None:
            interceptor.attack.over = True
            addresses |= interceptor.addresses
            until_s = interceptor.until_s
        sent = interceptor.attack.sent if interceptor is not None else 0
        say("out", attack=name, code=code, reason=reason, sent=sent)
    say("over", attack=name, memberships=memberships, kicked=code in REFUSED)
    return addresses


def main() -> None:
    torch.set_num_threads(1)
    options, orders = Options(**json.loads(sys.argv[1])), Orders(**json.loads(sys.argv[2]))
    say("loaded", pid=os.getpid())
    addresses: dict[bytes, str] = {}
    for number, name in enumerate(orders.attacks):
        wait_for_gate(orders.gates[number] if orders.gates else "")
        if number == 0:
            addresses |= attack(name, options, orders, None)
            continue
        with tempfile.TemporaryDirectory() as state:
            os.environ["XDG_STATE_HOME"] = state
            addresses |= attack(name, options, orders, orders.invitation)
    if orders.forever:
        strangers.hammer(Identity.read(Path(os.environ["GRIDTRAIN_IDENTITY"])), addresses)


if __name__ == "__main__":
    main()
