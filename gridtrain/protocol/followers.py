"""Newcomers that take over the state while the members train on: who gives it to whom.

Decides who follows, from which members, and after which step these take their images.  Never decides who
enters a generation: that is `protocol.membership`, which lets a follower in when it has said Caught.

    admitted --Fetch(donors)--> follows --Caught--> enters the next generation
                                   |
                                   +-- no progress for `STUCK_S`: enters all the same, and the others wait
    donors <--Donate(step, followers)-- the eldest members that hold the state; told again when it changes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from gridtrain.protocol import messages as m
from gridtrain.protocol.membership_io import Effect, Note, Send
from gridtrain.protocol.roll import Worker

MOST_DONORS = 3
MOST_FOLLOWERS = 64
STUCK_S = 60.0
"""Without progress.  A donor's trainer may be in a long step, and gives its state after it."""

AHEAD_S, AHEAD_STEPS = 1.5, 1
"""All donors are to take their images after the same step, so it has to be one that none has begun yet."""


class Followers:
    """What was told to whom.

    Args:
        address: how the first of two workers reaches the second.
    """

    def __init__(self, address: Callable[[m.PeerId, m.PeerId], str]) -> None:
        self._address = address
        self._since_s: dict[m.PeerId, float] = {}
        self._donors: tuple[m.PeerId, ...] = ()
        self._told: tuple[m.PeerId, ...] = ()

    @property
    def serving(self) -> bool:
        """Somebody follows, or has to be told that it is over."""
        return bool(self._told or self._donors or self._since_s)

    def turn(
        self,
        followers: Sequence[Worker],
        holders: Sequence[m.PeerId],
        step: int,
        term: int,
        now_s: float,
        entering: Sequence[Worker] = (),
    ) -> list[Effect]:
        """Bring everybody up to date.

        Args:
            followers: admitted, and not caught up.
            holders: members that hold the state, the eldest first.
            step: after which images are to be taken.
        """
        effects: list[Effect] = []
        following: list[Worker] = []
        for worker in followers[:MOST_FOLLOWERS]:
            since_s = self._since_s.setdefault(worker.peer, now_s)
            if now_s - max(since_s, worker.moved_s) >= STUCK_S:
                worker.caught = True
                fields = {"name": worker.name, "reason": f"no progress for {STUCK_S:.0f} s"}
                effects.append(Note("warning", "not_following", fields))
            else:
                following.append(worker)
        self._since_s = {worker.peer: self._since_s[worker.peer] for worker in following}
        following += [worker for worker in entering if worker.peer in self._told]
        peers = tuple(worker.peer for worker in following)
        donors = tuple(holders[:MOST_DONORS]) if following else ()
        if (donors, peers) == (self._donors, self._told):
            return effects
        gone = [peer for peer in self._donors if peer not in donors]
        effects += [Send(peer, m.Donate(term, -1, ())) for peer in gone]
        effects += [Send(peer, m.Donate(term, step, peers)) for peer in donors]
        for worker in following:
            if donors != self._donors or worker.peer not in self._told:
                named = tuple((donor, self._address(worker.peer, donor)) for donor in donors)
                effects.append(Send(worker.peer, m.Fetch(term, named)))
        new = [worker.name for worker in following if worker.peer not in self._told]
        if new:
            told: dict[str, object] = {"names": ", ".join(new), "donors": len(donors), "after_step": step}
            effects.append(Note("info", "following", told))
        self._donors, self._told = donors, peers
        return effects

    def deadline_s(self, workers: Mapping[m.PeerId, Worker]) -> float:
        """When somebody may be stuck."""
        return min(
            (
                (max(since_s, workers[peer].moved_s) if peer in workers else since_s) + STUCK_S
                for peer, since_s in self._since_s.items()
            ),
            default=math.inf,
        )


def step_ahead(latest: int, made: int, running_s: float) -> int:
    """A step that no member has begun when it hears of it; `made` steps in the last `running_s` seconds."""
    rate_Hz = made / running_s if running_s > 0 else 0.0
    return latest + max(AHEAD_STEPS, math.ceil(rate_Hz * AHEAD_S))
