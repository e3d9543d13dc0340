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


class Trained(Protocol):
    """Whatever trains."""

    @property
    def calls_per_turn(self) -> int: ...

    def remember(self) -> Callable[[], None]:
        """What the script itself changes between two steps; what is returned puts it back."""
        ...


class SetBack:
    """Of one worker; used from the thread that trains."""

    def __init__(self) -> None:
        self._trained: Trained | None = None
        self._put_back: Callable[[], None] | None = None
        self._given_up = False

    def turn_begins(self, trained: Trained) -> None:
        """With several calls in a turn the script changes things before the last one, which is the step."""
        self._trained = trained
        self._put_back = trained.remember() if trained.calls_per_turn > 1 else None

    def give_up(self) -> None:
        """In the turn's step: it is not done."""
        assert self._trained is not None
        self._given_up = True
        self._put_back = self._put_back or self._trained.remember()

    def turn_ends(self) -> None:
        """The script has done what it does between two steps."""
        put_back, self._put_back = self._put_back, None
        if self._given_up and put_back is not None:
            put_back()
        self._given_up = False
