"""A trainer that has its gradient waits while nobody has chosen the exchange of its generation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gridtrain.core import messages as m
from gridtrain.core.planning.exchange_choice import FIRST_STEP_FIGURE
from gridtrain.runtime.group_session import GroupSession
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot

OPEN = WorkerSnapshot(world_size=1, open_round=m.RoundId(1, 1, 7, 0), exchange="Dense()", is_synced=True)


class Pictures:
    """A driver that shows one picture after the other."""

    def __init__(self, *pictures: WorkerSnapshot) -> None:
        self.pictures, self.figures = list(pictures), dict[str, float]()

    def look(self) -> WorkerSnapshot:
        return self.pictures[0]

    def wait(self, found: Callable[[WorkerSnapshot], bool]) -> WorkerSnapshot:
        while not found(self.pictures[0]):
            del self.pictures[0]
        return self.pictures[0]

    def note(self, figures: dict[str, float]) -> None:
        self.figures |= figures

    def busy(self, busy: bool) -> None: ...

    def begin_attempt(self) -> None: ...

    rounds = signs = property(lambda self: self)


def test_a_choice_that_is_open_again_is_waited_for() -> None:
    """It was alone and had Dense(); another one joins while its round is given up, and it is open for two."""
    session = GroupSession.__new__(GroupSession)
    frozen = replace(OPEN, open_round=None)
    open_again = replace(OPEN, world_size=2, open_round=m.RoundId(1, 2, 7, 0), exchange="")
    chosen = replace(open_again, open_round=m.RoundId(1, 3, 7, 0), exchange="GTopK(density=0.01)")
    driver: Any = Pictures(frozen, open_again, chosen)
    session._io_loop, session._spec, session._turn = driver, m.LedgerSpec(100, 0, epochs=1), OPEN
    session._join_arguments = (None, None, None, {"Dense()": None, chosen.exchange: None})  # type: ignore[assignment]
    session._is_pipeline = session._is_turn_done = session._is_standby_at_end = (
        session._is_awaiting_choice
    ) = False
    session._early_plan = session._disk = session._replay = session._add_residual = session._copy = (
        session._checkpoint_sent_for
    ) = None
    session.should_interrupt = lambda: False
    session._turn_began_s, session._state_sent_for, session._snapshot_step = 0.0, (0, False), -1
    session._compute_rate = type("Pace", (), {"end": lambda self, now_s: False})()  # type: ignore[assignment]
    plan = session.begin()
    assert plan is not None and plan.exchange == chosen.exchange and plan.world_size == 2
    assert driver.figures[FIRST_STEP_FIGURE] > 0, "told before it is asked for"
