"""The trainer's thread takes over a state, while the loop's thread may be a generation further on."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gridtrain.core.group import member_events as io
from gridtrain.runtime.group_session import GroupSession
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot


class Loop:
    """What the trainer's thread sees of the loop's: a state is offered, whenever it looks."""

    def __init__(self, *states: tuple[int, int, list[bytes]] | None) -> None:
        self.states = list(states)
        self.told: list[io.MemberEvent] = []
        self.taking = self.signs = self

    def look(self) -> WorkerSnapshot:
        return WorkerSnapshot(is_state_complete=True, generation=2, has_incoming_residuals=True)

    def take(self) -> tuple[int, int, list[bytes]] | None:
        return self.states.pop(0)

    def busy(self, on: bool) -> None:
        pass

    def command(self, event: io.MemberEvent) -> None:
        self.told.append(event)

    def wait(
        self, ready: Callable[[WorkerSnapshot], bool], timeout_s: float = math.inf
    ) -> WorkerSnapshot | None:
        if ready(self.look()):
            return self.look()
        assert timeout_s < math.inf, "the loop's thread waits for this one"
        return None


@pytest.fixture
def session_over() -> Callable[[Loop], Any]:
    def make(loop: Loop) -> Any:
        loaded: list[list[bytes]] = []
        session: Any = GroupSession.__new__(GroupSession)
        session._driver, session._disk, session._is_pipeline = loop, None, False
        session._restore, session.loaded = loaded.append, loaded
        return session

    return make


def test_the_next_generations_state_may_be_there_when_this_ones_is_loaded(session_over: Any) -> None:
    """A worker hung until it was dismissed: it waited for the offer to end, the loop for it to be taken."""
    loop = Loop((1, 1, [b"old"]), (1, 2, [b"new"]))
    session = session_over(loop)
    session._restore_state()
    session._restore_state()
    assert session.loaded == [[b"old"], [b"new"]]
    assert loop.told == [io.StateLoaded(1, 1), io.StateLoaded(1, 2)]


def test_a_state_that_is_replaced_before_it_is_taken_is_waited_for_again(session_over: Any) -> None:
    loop = Loop(None, (1, 2, [b"new"]))
    session = session_over(loop)
    session._restore_state()
    assert session.loaded == [] and loop.told == []
    session._restore_state()
    assert session.loaded == [[b"new"]]


def test_a_residual_that_comes_while_another_is_added_is_added_too(session_over: Any) -> None:
    loop: Any = Loop()
    loop.residuals = SimpleNamespace(take=lambda: [(b"p", "entries")])
    session = session_over(loop)
    added: list[Any] = []
    session._replay, session._has_begun = None, lambda picture: False
    session._inherit = lambda peer, entries: added.append(entries)
    picture = SimpleNamespace(offered_work=False, inherited=True)
    assert session._serve_requests(picture) and added == ["entries"]
