"""Assigns layers and ranks to workers in a pipeline's next generation, and decides when to repartition.

    at least as many workers as stages --> the defined partition, or another if a worker's memory is too small
    fewer workers -----------------------> wait `recut_s` for one to come back, then repartition
    a disk is full ----------------------> the previous partition, in which no worker needs that disk
    newcomers ---------------------------> another replica, or another stage if there are fewer than defined

The step from which the run continues is chosen by `whole_state`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from gridtrain.core import messages as m
from gridtrain.core.stages import device_assignment, repartition
from gridtrain.core.stages.rank_placement import PairCost, RankPlacement, StateLocations, place_ranks
from gridtrain.core.stages.repartition import HeldSpans, Repartition, defined_cuts, stage_spans
from gridtrain.core.stages.stage_cost import Device
from gridtrain.errors import ConfigError
from gridtrain.quantities import format_count
from gridtrain_coordinator.run.generation_plan import GenerationPlanner
from gridtrain_coordinator.run.registry import Worker
from gridtrain_coordinator.run.run_state import RunState
from gridtrain_coordinator.stages.checkpoint_catalog import CheckpointCatalog
from gridtrain_coordinator.stages.whole_state import (
    RestartPoint,
    locate_state,
    lost_state_reason,
    too_few_reason,
)

T = TypeVar("T")

LiveStates = Mapping[m.PeerId, m.Span]
"""By worker, the layers of its state in memory."""

PlacementResult = tuple[RankPlacement, tuple[int, ...]]
"""The ranks and the bounds of the stages."""


class RepartitionCache:
    """Caches the latest partitions, because a paused run searches for a partition after each message.

    All methods except `is_worthwhile` raise `ConfigError` if no partition fits into the workers' memory.
    """

    def __init__(self) -> None:
        self._latest: dict[str, tuple[Hashable, Any]] = {}  # by method, its latest key and result

    def is_worthwhile(self, setup: m.Setup, cuts: tuple[int, ...], stages: int) -> bool:
        """Return the result of `repartition.is_worth_more_stages`, from the cache if possible.

        Considers no more stages than the definition has.
        """
        most = min(stages, setup.stages)
        key = setup, cuts, most
        return self._cached("gain", key, lambda: repartition.is_worth_more_stages(setup, cuts, most))

    def fit_fewer_stages(
        self, setup: m.Setup, peers: Sequence[m.PeerId], devices: Mapping[m.PeerId, Device], held: HeldSpans
    ) -> Repartition:
        """Return the result of `repartition.partition_over_fewer`, from the cache if possible."""
        key = setup, tuple(peers), tuple(devices.values()), tuple(held.items())
        return self._cached(
            "fewer", key, lambda: repartition.partition_over_fewer(setup, peers, devices, held)
        )

    def assign(
        self,
        setup: m.Setup,
        peers: Sequence[m.PeerId],
        devices: Mapping[m.PeerId, Device],
        cost_s: PairCost | None,
    ) -> Repartition:
        """Return the result of `device_assignment.assign_devices`.

        Only a failure is cached.  It depends on the devices alone, whereas a partition also depends on links,
        which change.
        """
        key = setup, tuple(peers), tuple(devices.values())
        assign = device_assignment.assign_devices
        result = self._cached("begin", key, lambda: assign(setup, peers, devices, cost_s))
        del self._latest["begin"]
        return result

    def _cached(self, method: str, key: Hashable, compute: Callable[[], T]) -> T:
        if method not in self._latest or self._latest[method][0] != key:
            try:
                self._latest[method] = key, compute()
            except ConfigError as error:
                self._latest[method] = key, error
        result = self._latest[method][1]
        if isinstance(result, ConfigError):
            raise result
        return cast(T, result)


class StagePlacement:
    """Divides the model over the connected workers and assigns their ranks."""

    def __init__(self, run: RunState, planner: GenerationPlanner, checkpoints: CheckpointCatalog) -> None:
        self._run, self._planner, self._checkpoints = run, planner, checkpoints
        self._repartition_cache = RepartitionCache()
        self._previous_bounds: tuple[int, ...] = ()  # the bounds before the latest repartition
        self._too_few_since_s: float | None = None  # when the workers became fewer than the stages
        # The workers, and the bounds at which they do not have the memory for further ranks.
        self._rejected_placement: tuple[frozenset[m.PeerId], tuple[int, ...]] | None = None

    @property
    def _has_too_few_stages(self) -> bool:
        """Whether the model is divided into fewer stages than the run's definition specifies."""
        definition = self._run.definition
        return definition is not None and self._run.partition.stage_count < definition.stages

    # -- while the run trains ----------------------------------------------------------------------

    def adds_replica_or_stage(self, newcomers: Sequence[Worker]) -> bool:
        """Return whether these newcomers justify another generation with an additional replica or stage."""
        run, stages, bounds = self._run, self._run.partition.stage_count, self._run.partition.bounds
        if self._rejected_placement == (frozenset(run.eligible_workers()), bounds):
            return False  # they do not have the memory for further ranks
        here = len(run.present_members) + len(newcomers)
        if newcomers and self._has_too_few_stages and here > stages:
            return self._repartition_cache.is_worthwhile(self._run.defined_setup, bounds, here)
        return here // stages > len(run.member_list) // stages

    # -- for the next generation -------------------------------------------------------------------

    def place(self, restart: RestartPoint, live: LiveStates, now_s: float) -> PlacementResult | str:
        """Choose the ranks and stage bounds of the next generation.

        If the run cannot continue yet, returns the reason as text.
        """
        setup, stages = self._run.defined_setup, self._run.partition.stage_count
        self._run.view_change.wait_until(math.inf)
        peers = self._run.eligible_workers()
        has_enough = len(peers) >= setup.stages
        if has_enough or not peers:
            self._too_few_since_s = None
        reason = "" if has_enough else too_few_reason(stages, len(peers), restart.last_step_locations)
        if restart.outcome is None:
            return lost_state_reason(restart, stages, len(peers))
        if restart.outcome.applied < 0 and not has_enough:
            return reason  # no step is lost by waiting for all workers
        try:
            if has_enough:
                return self._place_all_stages(restart, live, now_s)
            plan = self._partition_fewer_stages(restart)
            if len(plan.cuts) - 1 >= stages:
                self._too_few_since_s = None
            elif self._is_waiting_for_rejoin(now_s):
                wait = f"{self._run.limits.recut_s:g} s"
                fewer = format_count(len(plan.cuts) - 1, "worker")
                return f"{reason}, or, repartitioned over {fewer}, after {wait}"
            return self._place_ranks(plan, restart, live, now_s)
        except ConfigError as error:
            why = repartition.error_text(error)
            if not reason:
                return f"the run has {format_count(len(peers), 'worker')}, but too little memory: {why}"
            return f"{reason}; the model does not fit even if it is repartitioned: {why}" if why else reason

    def place_in_previous_partition(
        self, restart: RestartPoint, live: LiveStates, now_s: float
    ) -> PlacementResult | None:
        """Place the workers in the current or previous partition, so that no full disk is needed.

        The stages of this partition include those that workers with full disks hold in memory.  Returns None
        if there is no such partition, or if the workers or their memory do not suffice for it.
        """
        spans = [span for peer, span in live.items() if self._run.workers[peer].is_disk_full]
        bounds = find_partition(spans, self._run.partition.bounds, self._previous_bounds)
        peers = self._run.eligible_workers()
        if not bounds or len(peers) < len(bounds) - 1:
            return None
        try:
            states = self._locate_state(restart, bounds, live)
            plan = repartition.repartition_at(bounds, peers, states)
            result = self._assign_ranks(plan, states, now_s), bounds
        except ConfigError:
            return None
        self._rejected_placement = frozenset(peers), bounds
        return result

    def adopt_partition(self, bounds: tuple[int, ...]) -> None:
        """Use these stage bounds for the next generation."""
        run = self._run
        if run.member_list and bounds != run.partition.bounds:
            self._previous_bounds = run.partition.bounds
        run.partition.adopt(bounds)
        self._too_few_since_s = None

    def _is_waiting_for_rejoin(self, now_s: float) -> bool:
        """Return whether to wait, at most `recut_s`, for a worker whose return would avoid a repartition."""
        since_s = self._too_few_since_s = now_s if self._too_few_since_s is None else self._too_few_since_s
        if now_s >= since_s + self._run.limits.recut_s:
            return False
        self._run.view_change.wait_until(since_s + self._run.limits.recut_s)
        return True

    # -- partitions --------------------------------------------------------------------------------

    def _place_all_stages(self, restart: RestartPoint, live: LiveStates, now_s: float) -> PlacementResult:
        """Place the workers if there are enough of them for all stages.

        If some workers have too little memory, places only the workers that hold a stage, or uses fewer
        stages.
        """
        assert restart.outcome is not None
        try:
            return self._place_ranks(self._defined_partition(restart, live, now_s), restart, live, now_s)
        except ConfigError:
            if restart.outcome.applied < 0:
                raise
        holders_only = self._current_holders_only(restart, live)
        if holders_only is not None:
            self._rejected_placement = frozenset(self._run.eligible_workers()), holders_only.cuts
        plan = holders_only or self._partition_fewer_stages(restart)
        return self._place_ranks(plan, restart, live, now_s)

    def _defined_partition(self, restart: RestartPoint, live: LiveStates, now_s: float) -> Repartition:
        """Return a partition into all defined stages over the workers that have enough memory.

        Raises `ConfigError` if too few workers have enough memory.
        """
        assert restart.outcome is not None
        setup, peers = self._run.defined_setup, self._run.eligible_workers()
        bounds = defined_cuts(setup) if self._has_too_few_stages else self._run.partition.bounds
        devices = self._devices(peers)
        is_free = restart.outcome.applied < 0 and setup.model is not None and not setup.model.fixed
        if is_free and not device_assignment.is_uniform(setup, bounds, devices):
            cost_s = self._planner.link_cost(peers, now_s)
            return self._repartition_cache.assign(setup, peers, devices, cost_s)
        peers = device_assignment.able_workers(setup, bounds, peers, devices)
        if len(peers) < setup.stages:
            raise ConfigError(
                f"a stage fits into the memory of only {format_count(len(peers), 'worker')}",
                remedy="add workers with more memory",
            )
        return repartition.repartition_at(bounds, peers, self._locate_state(restart, bounds, live))

    def _current_holders_only(self, restart: RestartPoint, live: LiveStates) -> Repartition | None:
        """Return the current partition with only the workers that hold a stage in memory.

        Newcomers with too little memory are left out.  Returns None if a stage is not in any worker's memory.
        """
        run, bounds = self._run, self._run.partition.bounds
        stage_of = self._locate_state(restart, bounds, live).in_memory
        eligible, stages = run.eligible_workers(), range(run.partition.stage_count)
        holders = [[peer for peer in eligible if stage_of.get(peer) == stage] for stage in stages]
        replicas = min(map(len, holders))
        chosen = {peer for stage in holders for peer in stage[:replicas]}
        members = tuple(peer for peer in eligible if peer in chosen)
        reason = "the other workers have too little memory"
        return Repartition(bounds, members, reason=reason) if replicas else None

    def _partition_fewer_stages(self, restart: RestartPoint) -> Repartition:
        peers = self._run.eligible_workers()
        return self._repartition_cache.fit_fewer_stages(
            self._run.defined_setup, peers, self._devices(peers), restart.state_locations.held_spans
        )

    # -- ranks -------------------------------------------------------------------------------------

    def _place_ranks(
        self, plan: Repartition, restart: RestartPoint, live: LiveStates, now_s: float
    ) -> PlacementResult:
        return self._assign_ranks(plan, self._locate_state(restart, plan.cuts, live), now_s), plan.cuts

    def _assign_ranks(self, plan: Repartition, states: StateLocations, now_s: float) -> RankPlacement:
        """Assign ranks to the plan's members.

        Raises `ConfigError` if a worker's memory is too small for its stage.

        Args:
            states: the locations of the state, for the stages of the plan's partition.
        """
        run, peers = self._run, plan.members
        states = repartition.restricted_to(states, peers)
        if plan.cuts == run.partition.bounds:
            states = replace(states, last_stage={peer: run.stage_of(peer) for peer in run.member_order})
        devices, name = self._devices(peers), run.workers.display_name
        placement = place_ranks(
            len(plan.cuts) - 1,
            peers,
            repartition.with_assemblers(states, plan),
            speed=lambda peer: devices[peer].speed,
            cost_s=self._planner.link_cost(peers, now_s),
            name=name,
        )
        device_assignment.check_memory_fit(self._run.defined_setup, plan.cuts, placement.order, devices, name)
        standbys = tuple(peer for peer in run.eligible_workers() if peer not in peers)
        reason = f"{placement.reason}; {plan.reason}" if plan.reason else placement.reason
        pieces = repartition.assembler_pieces(plan, placement.order, states)
        return replace(placement, standbys=(*placement.standbys, *standbys), pieces=pieces, reason=reason)

    def _devices(self, peers: Sequence[m.PeerId]) -> dict[m.PeerId, Device]:
        """Map each worker to its declared memory (infinite if not declared) and its relative speed."""
        setups = {peer: self._run.workers[peer].setup for peer in peers}
        speeds = device_assignment.relative_speeds(
            {p: s.flops if s is not None else 0.0 for p, s in setups.items()}
        )
        return {
            peer: Device(speeds[peer], (setup.memory_bytes if setup is not None else 0) or math.inf)
            for peer, setup in setups.items()
        }

    def _locate_state(self, restart: RestartPoint, bounds: Sequence[int], live: LiveStates) -> StateLocations:
        """Find the workers that hold the stages with these bounds."""
        assert restart.outcome is not None
        return locate_state(restart.outcome, live, self._checkpoints.trusted_checkpoints(), bounds)


def find_partition(spans: Collection[m.Span], *candidates: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first candidate whose stages include all these spans; () if there is no such candidate."""
    return next((bounds for bounds in candidates if bounds and set(spans) <= set(stage_spans(bounds))), ())
