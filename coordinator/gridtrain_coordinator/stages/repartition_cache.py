"""Cuts over those who are here, asked for after each message while a run is paused: the last answer is kept.

Decides nothing of its own: `protocol.recutting` and `protocol.assigning` do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from gridtrain.core.messages import PeerId, Setup
from gridtrain.core.stages import device_assignment, repartition
from gridtrain.core.stages.rank_placement import PairCost
from gridtrain.core.stages.repartition import HeldSpans, Repartition
from gridtrain.core.stages.stage_cost import Card
from gridtrain.errors import ConfigError


class RepartitionCache:
    """Of one run.  All but `pays` raise `ConfigError` where nothing fits."""

    def __init__(self) -> None:
        self._last_gain: tuple[Hashable, bool] | None = None
        self._last_result: tuple[Hashable, Repartition | ConfigError] | None = None

    def is_worthwhile(self, setup: Setup, cuts: tuple[int, ...], stages: int) -> bool:
        """See `recutting.pays`; no more stages than the run is defined with."""
        asked = cuts, min(stages, setup.stages)
        if self._last_gain is None or self._last_gain[0] != asked:
            self._last_gain = asked, repartition.is_worth_more_stages(setup, *asked)
        return self._last_gain[1]

    def fit_fewer_stages(
        self, setup: Setup, peers: Sequence[PeerId], cards: Mapping[PeerId, Card], holds: HeldSpans
    ) -> Repartition:
        """See `recutting.fewer`."""
        asked = "fewer", tuple(peers), tuple(cards.values()), tuple(holds.items())
        return self._cached(asked, lambda: repartition.partition_over_fewer(setup, peers, cards, holds))

    def assign(
        self, setup: Setup, peers: Sequence[PeerId], cards: Mapping[PeerId, Card], cost_s: PairCost | None
    ) -> Repartition:
        """See `assigning.assign`; links change, so only that nothing fits is kept."""
        asked = "begin", tuple(peers), tuple(cards.values())
        found = self._cached(asked, lambda: device_assignment.assign_devices(setup, peers, cards, cost_s))
        self._last_result = None
        return found

    def _cached(self, asked: Hashable, find: Callable[[], Repartition]) -> Repartition:
        if self._last_result is None or self._last_result[0] != asked:
            try:
                self._last_result = asked, find()
            except ConfigError as error:
                self._last_result = asked, error
        found = self._last_result[1]
        if isinstance(found, ConfigError):
            raise found
        return found
