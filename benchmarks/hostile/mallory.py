"""What the hostile member runs: the honest script over the real SDK, and from some step on an attack.

    python -m hostile.mallory '{"steps": 100}' '{"attacks": ["garbage", "held"]}'

The first argument is `honest.Options`, the second `Orders`.  She lives once for each attack: joins with her key,
becomes a member, takes part in `LAWFUL_STEPS` steps, attacks until she is put out, and begins the next life at
once.  Each line of stdout is one JSON object; beside those of `honest`:

    attack    begins now, as a member of `generation`
    out       of the group, with the coordinator's (or our own) words; `sent` = so many messages at line rate
    stranger  her key is not let in any more
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import gridtrain
from gridtrain.errors import GridtrainError, JoinRefused
from gridtrain.protocol import messages as m
from gridtrain.protocol.member_io import Stage
from gridtrain.transport.curve import Identity
from hostile import strangers
from hostile.attacks import ATTACKS, Attack, Place
from hostile.honest import Options, say, train, wait_for_gate

LAWFUL_STEPS = 2


@dataclass(frozen=True)
class Orders:
    """One JSON object on the command line.

    Attributes:
        gate: a FIFO; a byte in it lets her join.
        forever: goes on with the last attack until her key is let in no more, and then hammers at the doors.
    """

    attacks: list[str] = field(default_factory=list)
    gate: str = ""
    forever: bool = False


class Hands:
    """Between the SDK's loop and its transport, in the loop's thread."""

    def __init__(self, grid: gridtrain.Grid, name: str) -> None:
        driver: Any = grid._session._driver
        credit = driver._transport
        identity = Identity.read(Path(grid._config.identity))
        self._place = Place(driver._core, credit, credit._inner._inner, identity)
        self.attack: Attack = ATTACKS[name](self._place)
        self._name, self._began = name, False
        self._poll, self._send = credit.poll, credit.send
        self._from_step: int | None = None
        credit.poll, credit.send = self.poll, self.send

    @property
    def addresses(self) -> dict[bytes, str]:
        return self._place.addresses() if self._place.core.seat is not None else {}

    def poll(self, timeout_s: float) -> Any:
        if not self._attacks():
            return self._poll(timeout_s)
        self.attack.burst()
        idle = type(self.attack).burst is Attack.burst
        return self._poll(timeout_s if idle else 0.0)

    def send(self, peer: bytes, message: m.Message) -> None:
        if isinstance(message, m.Accuse):
            return  # what her floods upset in her own software is nobody's fault
        for changed in self.attack.send(peer, message) if self._attacks() else [message]:
            self._send(peer, changed)

    def _attacks(self) -> bool:
        core = self._place.core
        if core.stage is not Stage.RUNNING:
            return False
        if self._from_step is None:
            self._from_step = core.step + LAWFUL_STEPS
        if core.step < self._from_step:
            return False
        if not self._began:
            self._began = True
            say("attack", attack=self._name, generation=core.generation, step=core.step)
        return True


def live(name: str, options: Options) -> tuple[Hands | None, str]:
    """One life; her hands, and why it ended: the refusal's code."""
    hands = None
    try:
        with gridtrain.join() as grid:
            hands = Hands(grid, name)
            train(grid, options)
        code, reason = "end", "the run ended with her as a member"
    except JoinRefused as refusal:
        code, reason = refusal.code, refusal.reason
    except GridtrainError as error:
        code, reason = type(error).__name__, str(error)
    say("out", attack=name, code=code, reason=reason, sent=hands.attack.sent if hands is not None else 0)
    return hands, code


def main() -> None:
    torch.set_num_threads(1)
    options, orders = Options(**json.loads(sys.argv[1])), Orders(**json.loads(sys.argv[2]))
    say("loaded", pid=os.getpid())
    wait_for_gate(orders.gate)
    names, known, lives = list(orders.attacks), {}, 0
    while lives < len(names) or orders.forever:
        hands, code = live(names[min(lives, len(names) - 1)], options)
        known |= hands.addresses if hands is not None else {}
        lives += 1
        if code in ("denied", "end"):
            break
    say("stranger", at_s=time.monotonic(), lives=lives)
    if orders.forever:
        strangers.hammer(Identity.read(Path(os.environ["GRIDTRAIN_IDENTITY"])), known)


if __name__ == "__main__":
    main()
