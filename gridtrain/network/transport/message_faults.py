"""A seeded plan of message faults for the in-memory transport.

The random numbers for a pair of peers depend only on the seed, the rule and the pair, so that the same faults
happen regardless of how threads interleave.

    plan = FaultPlan(
        MessageFault("delay", kind="Data", delay_s=0.01),  # reorders messages
        MessageFault("drop", source=anna, target=bert, kind="Vote", times=1),  # drops only the first vote
        MessageFault("kill", source=carl, kind="Data", after=3),  # kills carl instead of sending the 4th Data
        seed=7,
    )
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from gridtrain.core.messages import PeerId

Action = Literal["drop", "duplicate", "delay", "cut", "kill"]


@dataclass(frozen=True, slots=True)
class MessageFault:
    """A rule for faults; `after`, `times` and `probability` apply separately to each source and target.

    Attributes:
        action: "drop" loses the message; "duplicate" delivers it twice; "delay" delivers it up to
            `delay_s` later (later messages may overtake it); "cut" breaks the connection instead of
            delivering, until `MemoryHub.reconnect`; "kill" kills the sender instead of delivering.
        source, target: the peers to which the rule applies; None for any peer.
        kind: the name of the message type, such as "Data"; None for any type.
        after: the number of matching messages that are delivered before the rule applies.
        times: the number of matching messages to which the rule then applies; None for all.
        probability: the probability of the fault for each message to which the rule applies.
        delay_s: the longest delay of a "delay".
    """

    action: Action
    source: PeerId | None = None
    target: PeerId | None = None
    kind: str | None = None
    after: int = 0
    times: int | None = None
    probability: float = 1.0
    delay_s: float = 0.0

    def matches(self, source: PeerId, target: PeerId, kind: str) -> bool:
        return self.source in (None, source) and self.target in (None, target) and self.kind in (None, kind)


@dataclass(frozen=True, slots=True)
class MessageOutcome:
    """The outcome of one message.

    Attributes:
        delays_s: the message is delivered once after each of these delays; if there are none, it is lost.
        cut: whether the connection breaks.
        kill: whether the sender is killed.
    """

    delays_s: tuple[float, ...] = (0.0,)
    cut: bool = False
    kill: bool = False


class FaultPlan:
    """A list of rules and a seed.  Not thread-safe; `MemoryHub` uses the plan while it holds its lock."""

    def __init__(self, *faults: MessageFault, seed: int = 0) -> None:
        self.faults = faults
        self.seed = seed
        self._counts: dict[tuple[int, PeerId, PeerId], int] = {}
        self._rngs: dict[tuple[int, PeerId, PeerId], random.Random] = {}

    def next_outcome(self, source: PeerId, target: PeerId, kind: str) -> MessageOutcome:
        """Return the outcome of the next message of type `kind` from `source` to `target`."""
        copies, delay_s, lost, cut, kill = 1, 0.0, False, False, False
        for index, fault in enumerate(self.faults):
            if not fault.matches(source, target, kind) or not self._is_hit(index, source, target):
                continue
            match fault.action:
                case "drop":
                    lost = True
                case "duplicate":
                    copies += 1
                case "delay":
                    delay_s += self._rng(index, source, target).uniform(0.0, fault.delay_s)
                case "cut":
                    cut = True
                case "kill":
                    kill = True
        return MessageOutcome(() if lost or cut or kill else (delay_s,) * copies, cut, kill)

    def _is_hit(self, index: int, source: PeerId, target: PeerId) -> bool:
        key, fault = (index, source, target), self.faults[index]
        seen = self._counts[key] = self._counts.get(key, 0) + 1
        in_window = seen > fault.after and (fault.times is None or seen <= fault.after + fault.times)
        return in_window and (
            fault.probability >= 1.0 or self._rng(index, source, target).random() < fault.probability
        )

    def _rng(self, index: int, source: PeerId, target: PeerId) -> random.Random:
        key = (index, source, target)
        if key not in self._rngs:
            self._rngs[key] = random.Random(f"{self.seed}/{index}/{source.hex()}/{target.hex()}")
        return self._rngs[key]
