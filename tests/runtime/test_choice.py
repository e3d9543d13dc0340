"""A trainer with a gradient waits until the exchange of its generation is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as ev
from gridtrain.core.planning.exchange_choice import FIRST_STEP_FIGURE
from gridtrain.runtime.compute_rate import ComputeRate
from gridtrain.runtime.group_means import GroupMeans
from gridtrain.runtime.group_session import GroupSession
from gridtrain.runtime.mailbox.step_plan import StepPlan
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot

OPEN = WorkerSnapshot(world_size=1, open_round=m.RoundId(1, 1, 7, 0), exchange="Dense()", is_synced=True)


class Snapshots:
    """A connection that publishes one snapshot after the other."""

    should_interrupt = False

    def __init__(self, *snapshots: WorkerSnapshot) -> None:
        self.snapshots, self.figures = list(snapshots), dict[str, float]()
        self.loop = self.heartbeat = self.step_rounds = self.mailbox = self

    @property
    def snapshot(self) -> WorkerSnapshot:
        return self.snapshots[0]

    def wait(self, found: Callable[[WorkerSnapshot], bool]) -> WorkerSnapshot:
        while not found(self.snapshots[0]):
            del self.snapshots[0]
        return self.snapshots[0]

    def add_figures(self, figures: dict[str, float]) -> None:
        self.figures |= figures

    def begin_attempt(self) -> None: ...

    def next_task(self, snapshot: WorkerSnapshot, **_: bool) -> None: ...


def test_a_choice_that_is_open_again_is_awaited() -> None:
    """A worker alone had Dense(); another one joins while its round ends, and the choice is open for two."""
    session: Any = GroupSession.__new__(GroupSession)
    frozen = replace(OPEN, open_round=None)
    open_again = replace(OPEN, world_size=2, open_round=m.RoundId(1, 2, 7, 0), exchange="")
    exchange = "GTopK(density=0.01)"
    plan = StepPlan(7, 0, 0, world_size=2, samples=1, total_samples=2, exchange=exchange)
    chosen = replace(open_again, open_round=m.RoundId(1, 3, 7, 0), exchange=exchange, plan=plan)
    session.connection = session.tasks = Snapshots(frozen, open_again, chosen)
    setup = m.Setup((), m.LedgerSpec(100, 0, epochs=1), 1, None)
    choices: Any = {"Dense()": None, chosen.exchange: None}
    session._joined = ev.TrainerJoined(setup, lambda *_: frozenset(), None, choices)
    session._turn, session._early_plan, session._means = (
        OPEN,
        None,
        GroupMeans(session.connection, lambda step: None),
    )
    session._submitted = None
    session.is_turn_done = session._is_awaiting_choice = False
    session.end_reason = ""
    session._compute_rate = ComputeRate()
    assert session.begin() is plan
    assert session.connection.figures[FIRST_STEP_FIGURE] > 0, "reported before the choice is awaited"
