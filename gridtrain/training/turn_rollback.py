"""What a script does behind a batch that was given up is undone before its worker rests.

Decides when settings, trackers and the like are remembered, and when they are put back.  Never decides that a
batch is given up (`runtime.api.GroupSession.begin`), nor what becomes of the worker then (`optim.pausing`).

    optimizer.step()    no attempt can begin, and the owner wants this worker: given up, nothing was applied
    scheduler.step()    the script cannot know, and goes on as behind any step
    grid.batches        put back: the state is again the one of the last committed step, to rest with
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class TurnState(Protocol):
    """Whatever trains."""

    @property
    def calls_per_turn(self) -> int: ...

    def capture_turn_state(self) -> Callable[[], None]:
        """What the script itself changes between two steps; what is returned puts it back."""
        ...


class TurnRollback:
    """Of one worker; used from the thread that trains."""

    def __init__(self) -> None:
        self._state: TurnState | None = None
        self._restore: Callable[[], None] | None = None
        self._is_dropped = False

    def begin_turn(self, trained: TurnState) -> None:
        """With several calls in a turn the script changes things before the last one, which is the step."""
        self._state = trained
        self._restore = trained.capture_turn_state() if trained.calls_per_turn > 1 else None

    def drop_turn(self) -> None:
        """In the turn's step: it is not done."""
        assert self._state is not None
        self._is_dropped = True
        self._restore = self._restore or self._state.capture_turn_state()

    def end_turn(self) -> None:
        """The script has done what it does between two steps."""
        put_back, self._restore = self._restore, None
        if self._is_dropped and put_back is not None:
            put_back()
        self._is_dropped = False
