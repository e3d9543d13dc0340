"""Cuts over those who are here, asked for after each message while a run is paused: the last answer is kept.

Decides nothing of its own: `protocol.recutting` and `protocol.assigning` do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from gridtrain.errors import ConfigError
from gridtrain.protocol import assigning, recutting
from gridtrain.protocol.messages import PeerId, Setup
from gridtrain.protocol.recutting import Holds, Recut
from gridtrain.protocol.seating import Cost
from gridtrain.protocol.stage_costs import Card


class Recutter:
    """Of one run.  All but `pays` raise `ConfigError` where nothing fits."""

    def __init__(self) -> None:
        self._paying: tuple[Hashable, bool] | None = None
        self._found: tuple[Hashable, Recut | ConfigError] | None = None

    def pays(self, setup: Setup, cuts: tuple[int, ...], stages: int) -> bool:
        """See `recutting.pays`; no more stages than the run is defined with."""
        asked = cuts, min(stages, setup.stages)
        if self._paying is None or self._paying[0] != asked:
            self._paying = asked, recutting.pays(setup, *asked)
        return self._paying[1]

    def fewer(
        self, setup: Setup, peers: Sequence[PeerId], cards: Mapping[PeerId, Card], holds: Holds
    ) -> Recut:
        """See `recutting.fewer`."""
        asked = "fewer", tuple(peers), tuple(cards.values()), tuple(holds.items())
        return self._kept(asked, lambda: recutting.fewer(setup, peers, cards, holds))

    def assign(
        self, setup: Setup, peers: Sequence[PeerId], cards: Mapping[PeerId, Card], cost_s: Cost | None
    ) -> Recut:
        """See `assigning.assign`; links change, so only that nothing fits is kept."""
        asked = "begin", tuple(peers), tuple(cards.values())
        found = self._kept(asked, lambda: assigning.assign(setup, peers, cards, cost_s))
        self._found = None
        return found

    def _kept(self, asked: Hashable, find: Callable[[], Recut]) -> Recut:
        if self._found is None or self._found[0] != asked:
            try:
                self._found = asked, find()
            except ConfigError as error:
                self._found = asked, error
        found = self._found[1]
        if isinstance(found, ConfigError):
            raise found
        return found
