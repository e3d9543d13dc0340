"""How the model is cut for those who are here, and who of them sits where; or why nobody can go on.

Decides that for the next generation of a run in stages, from what they hold, their memory and their links.
Never decides which step it goes on from (`protocol.copies`), never makes the generation.

    as many workers as stages ----> seats in the defined cut; where a memory is too small: another one
    fewer ------------------------> wait `recut_s` for a quick rejoiner, then a new cut over all here
    a disk takes nothing any more -> the cut of before, in which nobody needs it
    newcomers --------------------> another replica or, where there are too few stages, a further one?

See `protocol.recutting` and `protocol.assigning` for where a model is cut, `protocol.seating` for seats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gridtrain.core import messages as m
from gridtrain.core.stages import device_assignment, repartition
from gridtrain.core.stages.rank_placement import RankPlacement, StateLocations, place_ranks
from gridtrain.core.stages.repartition import Repartition, defined_cuts
from gridtrain.core.stages.stage_cost import Card
from gridtrain.errors import ConfigError
from gridtrain_coordinator.run.generation_plan import GenerationPlanner
from gridtrain_coordinator.run.registry import Worker, worker_count_text
from gridtrain_coordinator.run.run_state import RunState
from gridtrain_coordinator.run.view_change import ViewChange
from gridtrain_coordinator.stages.checkpoint_catalog import CheckpointCatalog
from gridtrain_coordinator.stages.full_disks import find_partition
from gridtrain_coordinator.stages.repartition_cache import RepartitionCache
from gridtrain_coordinator.stages.whole_state import RestartPoint, locate_state, too_few_reason

LiveStates = Mapping[m.PeerId, m.Span]
"""Of which blocks the states in memory are."""

PlacementResult = tuple[RankPlacement, tuple[int, ...]]
"""Who sits where, and how the model is cut."""


class StagePlacement:
    """See the module's text."""

    def __init__(
        self, run: RunState, making: ViewChange, plans: GenerationPlanner, disks: CheckpointCatalog
    ) -> None:
        self._run, self._view_change, self._planner, self._checkpoints = run, making, plans, disks
        self._repartition_cache = RepartitionCache()
        self._previous_partition: tuple[
            int, ...
        ] = ()  # of the generation before, where the model was cut otherwise
        self._too_few_since_s: float | None = None  # fewer workers than stages are here
        # Workers for whose seats there was no room, and the cut in which that was so.
        self._rejected_placement: tuple[frozenset[m.PeerId], tuple[int, ...]] | None = None

    @property
    def _setup(self) -> m.Setup:
        assert self._run.definition is not None
        return self._run.definition

    @property
    def _has_too_few_stages(self) -> bool:
        """Of stages: the model is cut into fewer than the run is defined with."""
        return self._run.definition is not None and self._run.stage_count < self._run.definition.stages

    # -- while the run trains ----------------------------------------------------------------------

    def adds_replica_or_stage(self, newcomers: Sequence[Worker]) -> bool:
        """Or a further stage, where there are fewer than the run is defined with."""
        run = self._run
        if self._rejected_placement == (frozenset(run.eligible_workers()), run.effective_partition):
            return False  # these have no room for the seats that are left
        here = len(run.present_members) + len(newcomers)
        if newcomers and self._has_too_few_stages and here > run.stage_count:
            return self._repartition_cache.is_worthwhile(self._setup, run.effective_partition, here)
        return here // run.stage_count > len(run.member_order) // run.stage_count

    # -- for the next generation -------------------------------------------------------------------

    def place(self, begin: RestartPoint, live: LiveStates, now_s: float) -> PlacementResult | str:
        """Who sits where in the next generation, and how its model is cut; else why nobody can go on."""
        setup, stages, self._view_change.deadline_s = self._setup, self._run.stage_count, math.inf
        peers = self._run.eligible_workers()
        enough = len(peers) >= setup.stages
        if enough or not peers:
            self._too_few_since_s = None
        reason = "" if enough else too_few_reason(stages, len(peers), begin.last_step_locations)
        if begin.outcome is None:
            return reason if len(peers) < stages else begin.reason
        if begin.outcome.applied < 0 and not enough:
            return reason  # nothing is lost by waiting for all
        try:
            if enough:
                return self._place_all_stages(begin, live, now_s)
            recut = self._partition_fewer_stages(begin)
            if len(recut.cuts) - 1 >= stages:
                self._too_few_since_s = None
            elif self._is_waiting_for_rejoin(now_s):
                wait = f"{self._run.limits.recut_s:g} s"
                return f"{reason}, or {wait} later over {worker_count_text(len(recut.cuts) - 1)}, cut anew"
            return self._place_ranks(recut, begin, live, now_s)
        except ConfigError as error:
            why = repartition.error_text(error)
            if not reason:
                return f"{worker_count_text(len(peers))} are here, but their memory is too small: {why}"
            return f"{reason}; cut anew it does not fit: {why}" if why else reason

    def place_in_previous_partition(
        self, begin: RestartPoint, live: LiveStates, now_s: float
    ) -> PlacementResult | None:
        """In the cut in which those are whose disks are full; None: that cannot be."""
        here = [span for peer, span in live.items() if self._run.workers[peer].is_disk_full]
        cuts, peers = (
            find_partition(here, self._run.effective_partition, self._previous_partition),
            self._run.eligible_workers(),
        )
        if not cuts or len(peers) < len(cuts) - 1:
            return None
        try:
            hands = self._locate_state(begin, cuts, live)
            found = self._assign_ranks(repartition.repartition_at(cuts, peers, hands), hands, now_s), cuts
        except ConfigError:
            return None
        self._rejected_placement = frozenset(peers), cuts
        return found

    def adopt_partition(self, cuts: tuple[int, ...]) -> None:
        """The next generation is cut so."""
        run = self._run
        if run.member_list and cuts != run.effective_partition:
            self._previous_partition = run.effective_partition
        run.partition, self._too_few_since_s = cuts, None

    def _is_waiting_for_rejoin(self, now_s: float) -> bool:
        """For a quick rejoiner, who saves the new cut."""
        since_s = self._too_few_since_s = now_s if self._too_few_since_s is None else self._too_few_since_s
        if now_s >= since_s + self._run.limits.recut_s:
            return False
        self._view_change.deadline_s = since_s + self._run.limits.recut_s
        return True

    # -- cuts --------------------------------------------------------------------------------------

    def _place_all_stages(self, begin: RestartPoint, live: LiveStates, now_s: float) -> PlacementResult:
        """There are workers for all stages; where one's memory is too small it is cut as it fits."""
        assert begin.outcome is not None
        try:
            return self._place_ranks(self._defined_partition(begin, live, now_s), begin, live, now_s)
        except ConfigError:
            if begin.outcome.applied < 0:
                raise
        as_they_were = self._current_holders_only(begin, live)
        if as_they_were is not None:
            self._rejected_placement = frozenset(self._run.eligible_workers()), as_they_were.cuts
        return self._place_ranks(as_they_were or self._partition_fewer_stages(begin), begin, live, now_s)

    def _defined_partition(self, begin: RestartPoint, live: LiveStates, now_s: float) -> Repartition:
        """There are workers for all stages."""
        assert begin.outcome is not None
        setup, peers = self._setup, self._run.eligible_workers()
        cuts = defined_cuts(setup) if self._has_too_few_stages else self._run.effective_partition
        cards = self._devices(peers)
        free = setup.model is not None and not setup.model.fixed
        if begin.outcome.applied < 0 and free and not device_assignment.is_uniform(setup, cuts, cards):
            return self._repartition_cache.assign(setup, peers, cards, self._planner.link_cost(peers, now_s))
        peers = device_assignment.able_workers(setup, cuts, peers, cards)
        if len(peers) < setup.stages:
            raise ConfigError(f"{worker_count_text(len(peers))} have memory for a stage", remedy="wait")
        return repartition.repartition_at(cuts, peers, self._locate_state(begin, cuts, live))

    def _current_holders_only(self, begin: RestartPoint, live: LiveStates) -> Repartition | None:
        """Those who hold a stage in memory, so have room for it: where newcomers' memory is too small for a
        seat, nobody stops for them.  None: a stage is in nobody's memory."""
        run = self._run
        stage_of = self._locate_state(begin, run.effective_partition, live).in_memory
        holders = [
            [p for p in run.eligible_workers() if stage_of.get(p) == n] for n in range(run.stage_count)
        ]
        replicas = min(map(len, holders))
        chosen = {peer for stage in holders for peer in stage[:replicas]}
        members = tuple(peer for peer in run.eligible_workers() if peer in chosen)
        return (
            Repartition(run.effective_partition, members, reason="the others' memory is too small")
            if replicas
            else None
        )

    def _partition_fewer_stages(self, begin: RestartPoint) -> Repartition:
        peers = self._run.eligible_workers()
        return self._repartition_cache.fit_fewer_stages(
            self._setup, peers, self._devices(peers), begin.state_locations.held_spans
        )

    # -- seats -------------------------------------------------------------------------------------

    def _place_ranks(
        self, recut: Repartition, begin: RestartPoint, live: LiveStates, now_s: float
    ) -> PlacementResult:
        return self._assign_ranks(recut, self._locate_state(begin, recut.cuts, live), now_s), recut.cuts

    def _assign_ranks(self, recut: Repartition, hands: StateLocations, now_s: float) -> RankPlacement:
        """`hands`: of the new cut.  Raises `ConfigError` where a memory is too small for its seat."""
        run, peers = self._run, recut.members
        hands = repartition.restricted_to(hands, peers)
        if recut.cuts == run.effective_partition:
            hands = replace(hands, last_stage={peer: run.stage_of(peer) for peer in run.member_order})
        cards = self._devices(peers)
        seated = place_ranks(
            len(recut.cuts) - 1,
            peers,
            repartition.with_assemblers(hands, recut),
            speed=lambda peer: cards[peer].speed,
            cost_s=self._planner.link_cost(peers, now_s),
            name=run.display_name,
        )
        device_assignment.check_memory_fit(self._setup, recut.cuts, seated.order, cards, run.display_name)
        spares = tuple(peer for peer in run.eligible_workers() if peer not in peers)
        reason = f"{seated.reason}; {recut.reason}" if recut.reason else seated.reason
        pieces = repartition.assembler_pieces(recut, seated.order, hands)
        return replace(seated, standbys=(*seated.standbys, *spares), pieces=pieces, reason=reason)

    def _devices(self, peers: Sequence[m.PeerId]) -> dict[m.PeerId, Card]:
        """Memory as they declared it, speed as they measured it, compared with each other."""
        setups = {peer: self._run.workers[peer].setup for peer in peers}
        speeds = device_assignment.relative_speeds(
            {p: s.flops if s is not None else 0.0 for p, s in setups.items()}
        )
        return {
            peer: Card(speeds[peer], (setup.memory_bytes if setup is not None else 0) or math.inf)
            for peer, setup in setups.items()
        }

    def _locate_state(self, begin: RestartPoint, cuts: Sequence[int], live: LiveStates) -> StateLocations:
        """What they have of the stages of this cut."""
        assert begin.outcome is not None
        return locate_state(begin.outcome, live, self._checkpoints.trusted_checkpoints(), cuts)
