"""Assigns workers to stages and replicas, by the state they hold and then by links; chooses state sources.

    connected: anna (0) bert (0) clara (1) dora (-) emil (-)    2 stages x 2 replicas, emil is a standby
                                                                 (n): holds the state of stage n
              replica 0   replica 1
    stage 0     anna        bert         a worker that holds a stage's state keeps that stage
    stage 1     clara       dora         dora has no state, and receives it from clara

Workers that hold a stage in memory get ranks first, then workers with a stage's checkpoint on disk, then the
fastest workers.  The remaining ranks are filled so that neighbours in a pipeline and the replicas of a stage
are near each other, by trying all placements if there are few, and otherwise by swapping pairs (2-opt, Croes
1958).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations, product

from gridtrain.core.group.rank_layout import RankLayout
from gridtrain.core.messages import PeerId, Span
from gridtrain.core.planning.batch_shares import BatchShares, divide_samples, own_shares
from gridtrain.core.planning.network_model import NetworkModel
from gridtrain.errors import LocalProtocolError
from gridtrain.quantities import format_count, format_seconds, list_first

PairCost = Callable[[PeerId, PeerId], float]
"""Returns the round trip between two peers in seconds, which does not depend on their order."""

MAX_ENUMERATED = 3000
"""If there are at most this many placements, all are tried; otherwise, pairs of members are swapped."""

MAX_SWAP_CHECKS = 200_000
"""The maximum number of members to examine while swapping pairs, which takes the coordinator about 0.1 s."""

MAX_LINK_PLACED_MEMBERS = 64
"""The largest generation whose vacant ranks are filled according to the links; in larger generations, only
the swaps consider links."""

MAX_NAMED_WORKERS = 8

DEFAULT_ACTIVATION_BYTES = 1 << 20
"""The assumed size of an activation, because the coordinator does not know the actual sizes."""


@dataclass(frozen=True, slots=True)
class StateLocations:
    """The holders of the state with which a generation begins, among its possible members.

    Attributes:
        in_memory: the stage whose state each worker has in memory.
        on_disk: the stages whose state each worker has on its disk.
        initial_stages: the stages whose first replica creates the state, as at step 0.
        last_stage: the stage of each member of the last generation.
        held_spans: the layers whose state each worker has in memory or on disk, whatever the partition.
        is_initial: whether no step has been committed; if so, a state that no worker has can be created.
    """

    in_memory: Mapping[PeerId, int] = field(default_factory=dict)
    on_disk: Mapping[PeerId, Collection[int]] = field(default_factory=dict)
    initial_stages: Collection[int] = ()
    last_stage: Mapping[PeerId, int] = field(default_factory=dict)
    held_spans: Mapping[PeerId, tuple[Span, ...]] = field(default_factory=dict)
    is_initial: bool = False

    @property
    def exact_stages(self) -> set[int]:
        """The stages whose state at least one worker has."""
        return {*self.in_memory.values(), *(stage for own in self.on_disk.values() for stage in own)}


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """The ranks of a generation.

    Attributes:
        order: the members in rank order.
        state_sources: for each member that needs its stage's state, the rank that sends it.
        standbys: the workers without a rank.
        reason: the reason for the placement, as text.
        pieces: for each assembler (see `repartition`), the layers that it receives and the ranks that send
            them.
        digests: for each member that receives a checkpoint, the digest of the checkpoint; a member that
            receives a state from memory has no entry.
        piece_digests: for each assembler, the digests of the checkpoints of its `pieces`.
    """

    order: tuple[PeerId, ...]
    state_sources: Mapping[PeerId, int]
    standbys: tuple[PeerId, ...]
    reason: str
    pieces: Mapping[PeerId, tuple[tuple[Span, int], ...]] = field(default_factory=dict)
    digests: Mapping[PeerId, bytes] = field(default_factory=dict)
    piece_digests: Mapping[PeerId, tuple[bytes, ...]] = field(default_factory=dict)


def place_ranks(
    stages: int,
    peers: Sequence[PeerId],
    locations: StateLocations,
    *,
    speed: Callable[[PeerId], float | None] = lambda peer: None,
    cost_s: PairCost | None = None,
    name: Callable[[PeerId], str] = lambda peer: peer.hex()[:8],
) -> RankPlacement:
    """Assign workers to the ranks of as many complete replicas of the pipeline as possible.

    Args:
        peers: the workers that may be members, at least `stages`, longest-serving first, without
            duplicates.
        locations: the holders of the state; each stage must be held by one of `peers` or be initial.
        speed: returns a worker's measured speed, or None if it has not been measured.
        cost_s: returns the round trip between two workers in seconds; None if no link has been measured.
        name: returns a worker's name, for the text of the reason.

    Raises:
        LocalProtocolError: there are too few workers, `peers` contains a duplicate, or there is a stage whose
            state no worker has.
    """
    if len(peers) < stages or len(set(peers)) != len(peers):
        raise LocalProtocolError(f"{format_count(len(peers), 'worker')} cannot be placed in {stages} stages")
    layout = RankLayout(stages, len(peers) // stages)
    placed, rest = _place_holders(layout, peers, locations)
    _place_disk_holders(layout, placed, rest, locations)
    pinned = {peer for row in placed for peer in row}
    free = layout.world_size - len(pinned)
    at = {peer: place for place, peer in enumerate(peers)}
    rest.sort(key=lambda peer: (-(speed(peer) or 0.0), at[peer]))
    chosen, standbys = rest[:free], sorted(rest[free:], key=lambda peer: at[peer])
    _fill_vacancies(
        layout, placed, chosen, locations, cost_s if layout.world_size <= MAX_LINK_PLACED_MEMBERS else None
    )
    joined = [list(row) for row in placed]
    if cost_s is not None:
        placed = _improve_by_links(layout, placed, pinned, cost_s)
    eldest = min(range(layout.replicas), key=lambda replica: at[placed[0][replica]])
    for row in placed:  # the longest-serving worker of stage 0 is the root of the votes
        row[0], row[eldest] = row[eldest], row[0]
    order = tuple(peer for row in placed for peer in row)
    sources = _choose_state_sources(layout, order, locations, cost_s)
    reason = _reason(layout, order, standbys, sources, name)
    if cost_s is not None:
        reason += _improvement_text(layout, joined, placed, cost_s)
    return RankPlacement(order, sources, tuple(standbys), reason)


def _place_holders(
    layout: RankLayout, peers: Sequence[PeerId], locations: StateLocations
) -> tuple[list[list[PeerId]], list[PeerId]]:
    """Return, for each stage, up to `layout.replicas` workers that hold its state in memory, and a list of
    all other workers."""
    placed: list[list[PeerId]] = [[] for _ in range(layout.stages)]
    rest: list[PeerId] = []
    for peer in peers:
        stage = locations.in_memory.get(peer)
        fits = stage is not None and stage < layout.stages and len(placed[stage]) < layout.replicas
        if stage is not None and fits:
            placed[stage].append(peer)
        else:
            rest.append(peer)
    return placed, rest


def _place_disk_holders(
    layout: RankLayout, placed: list[list[PeerId]], rest: list[PeerId], locations: StateLocations
) -> None:
    """Place a worker with the stage on its disk for each stage that no worker holds in memory.

    This moves workers from `rest` to `placed`.  Initial stages are left out.

    Raises:
        LocalProtocolError: there is a stage whose state no worker has.
    """
    for peer in list(rest):
        last = locations.last_stage.get(peer, layout.stages)
        if last in locations.on_disk.get(peer, ()) and last < layout.stages and not placed[last]:
            rest.remove(peer)
            placed[last].append(peer)
    lost = [
        stage for stage in range(layout.stages) if not placed[stage] and stage not in locations.initial_stages
    ]
    disk_holders = {
        s: [p for p in (*rest, *_all_placed(placed)) if s in locations.on_disk.get(p, ())] for s in lost
    }
    for stage in sorted(lost, key=lambda stage: len(disk_holders[stage])):
        if not disk_holders[stage]:
            raise LocalProtocolError(f"no worker has the state of stage {stage} of {layout.stages}")
        if not set(disk_holders[stage]) & set(_all_placed(placed)):
            # A worker with the stage on its disk gets this stage, so that the state need not be sent.
            rest.remove(disk_holders[stage][0])
            placed[stage].append(disk_holders[stage][0])


def _fill_vacancies(
    layout: RankLayout,
    placed: list[list[PeerId]],
    chosen: Sequence[PeerId],
    locations: StateLocations,
    cost_s: PairCost | None,
) -> None:
    """Fill the vacant ranks of each stage.

    Workers with the stage on their disk are preferred, then nearby workers, then fast workers.
    """
    left = list(chosen)
    for stage, row in enumerate(placed):
        while len(row) < layout.replicas:
            near = [*row, *(placed[stage - 1] if stage else [])]
            best = min(
                left,
                key=lambda peer: (
                    stage not in locations.on_disk.get(peer, ()),
                    min((cost_s(peer, other) for other in near), default=0.0) if cost_s else 0.0,
                ),
            )
            left.remove(best)
            row.append(best)


def _all_placed(placed: Sequence[Sequence[PeerId]]) -> Iterator[PeerId]:
    return (peer for row in placed for peer in row)


# -- links ---------------------------------------------------------------------------------------


def placement_cost_s(placed: Sequence[Sequence[PeerId]], cost_s: PairCost) -> tuple[float, float]:
    """Return two times in seconds: the time of the slowest pipeline plus that of the slowest replica group,
    and the sum over all pipelines and groups, which is compared if the first times are equal.

    All pipelines run at the same time, and all groups run at the same time after the pipelines, so the step
    time depends only on the slowest pipeline and the slowest group.
    """
    pipelines = [math.fsum(map(cost_s, ranks, ranks[1:])) for ranks in zip(*placed, strict=True)]
    groups = [math.fsum(map(cost_s, row, (*row[1:], row[0]))) if len(row) > 1 else 0.0 for row in placed]
    return max(pipelines) + max(groups), math.fsum((*pipelines, *groups))


def _improve_by_links(
    layout: RankLayout, placed: list[list[PeerId]], pinned: Collection[PeerId], cost_s: PairCost
) -> list[list[PeerId]]:
    """Return the cheapest placement found (`placement_cost_s`) that leaves pinned members in their stages."""
    loose = [(s, r) for s, row in enumerate(placed) for r, peer in enumerate(row) if peer not in pinned]
    count = math.factorial(len(loose)) * math.factorial(layout.replicas) ** (layout.stages - 1)
    if count <= MAX_ENUMERATED:
        return min(_enumerate_placements(placed, loose), key=lambda tried: placement_cost_s(tried, cost_s))
    return _improve_by_swaps(layout, placed, pinned, cost_s)


def _enumerate_placements(
    placed: list[list[PeerId]], loose: Sequence[tuple[int, int]]
) -> Iterator[list[list[PeerId]]]:
    """Yield every placement that leaves the pinned members in their stages.

    Within stage 0, the order is fixed, because the numbering of the pipelines does not affect the cost.
    """
    for others in permutations([placed[s][r] for s, r in loose]):
        rows = [list(row) for row in placed]
        for (s, r), peer in zip(loose, others, strict=True):
            rows[s][r] = peer
        for permuted in product(*(permutations(row) for row in rows[1:])):
            yield [list(rows[0]), *(list(row) for row in permuted)]


def _improve_by_swaps(
    layout: RankLayout, placed: list[list[PeerId]], pinned: Collection[PeerId], cost_s: PairCost
) -> list[list[PeerId]]:
    rows = [list(row) for row in placed]
    best = placement_cost_s(rows, cost_s)
    places = [(s, r) for s in range(layout.stages) for r in range(layout.replicas)]
    left = MAX_SWAP_CHECKS // len(places)
    better = True
    while better and left > 0:
        better = False
        for (s, r), (t, q) in combinations(places, 2):
            if s != t and (rows[s][r] in pinned or rows[t][q] in pinned):
                continue
            if (left := left - 1) < 0:
                break
            rows[s][r], rows[t][q] = rows[t][q], rows[s][r]
            if (found := placement_cost_s(rows, cost_s)) < best:
                best, better = found, True
            else:
                rows[s][r], rows[t][q] = rows[t][q], rows[s][r]
    return rows


# -- states --------------------------------------------------------------------------------------


def _choose_state_sources(
    layout: RankLayout, order: Sequence[PeerId], locations: StateLocations, cost_s: PairCost | None
) -> dict[PeerId, int]:
    """Return, for each member without its stage's state, the rank of the nearest holder."""
    sources: dict[PeerId, int] = {}
    disk_holders_of: dict[int, list[int]] = {}
    for rank, peer in enumerate(order):
        for stage in locations.on_disk.get(peer, ()):
            disk_holders_of.setdefault(stage, []).append(rank)
    for rank, peer in enumerate(order):
        stage = layout.stage_of(rank)
        group = layout.stage_ranks(stage)
        holders = [other for other in group if locations.in_memory.get(order[other]) == stage]
        disk_holders = disk_holders_of.get(stage, [])
        if locations.in_memory.get(peer) == stage or stage in locations.on_disk.get(peer, ()):
            continue
        if stage in locations.initial_stages and not holders and not disk_holders:
            holders = [group[0]]
            if rank == group[0]:
                continue
        # Among members with the stage on disk, members of this stage are preferred, because they read the
        # state from disk in any case.
        here = holders or [other for other in disk_holders if other in group] or disk_holders
        sources[peer] = min(here, key=lambda other: (cost_s(peer, order[other]) if cost_s else 0.0, other))
    return sources


def _reason(
    layout: RankLayout,
    order: Sequence[PeerId],
    standbys: Sequence[PeerId],
    sources: Mapping[PeerId, int],
    name: Callable[[PeerId], str],
) -> str:
    text = f"{format_count(layout.stages, 'stage')} x {format_count(layout.replicas, 'replica')}"
    moves = [
        f"{name(peer)} gets stage {layout.stage_of(order.index(peer))} from {name(order[source])}"
        for peer, source in sources.items()
    ]
    text += "; " + (list_first(moves, MAX_NAMED_WORKERS) if moves else "no worker needs to receive a state")
    names = list_first([name(peer) for peer in standbys], MAX_NAMED_WORKERS)
    return f"{text}; standby: {names}" if standbys else text


def _improvement_text(
    layout: RankLayout,
    before: Sequence[Sequence[PeerId]],
    after: Sequence[Sequence[PeerId]],
    cost_s: PairCost,
) -> str:
    slow_s, fast_s = placement_cost_s(before, cost_s)[0], placement_cost_s(after, cost_s)[0]
    if layout.world_size < 3 or not fast_s < slow_s:
        return "; no other order suits the links better"
    return (
        f"; ordered by links: {format_seconds(fast_s)} along a pipeline and a group of replicas instead of "
        f"{format_seconds(slow_s)}"
    )


def stage_shares(
    names: Sequence[str], most: Sequence[int], layout: RankLayout, global_batch_size: int | None
) -> BatchShares:
    """Divide a batch among the members of the first stage; only these members read samples.

    Args:
        names: the names of the members, in rank order.
        most: the batch size of each rank if `global_batch_size` is None; otherwise the largest share of each
            rank, where 0 means no limit.
        global_batch_size: the number of samples in a step; None if each pipeline uses its first worker's
            batch size.
    """
    rest = (0,) * (layout.world_size - layout.replicas)
    if global_batch_size is None:
        why = "each pipeline uses its first worker's batch size"
        shares = own_shares(names[: layout.replicas], most[: layout.replicas], why)
        return BatchShares((*shares.counts, *rest), shares.reason)
    counts = divide_samples(global_batch_size, [1.0] * layout.replicas, most[: layout.replicas])
    return BatchShares(
        (*counts, *rest),
        f"{global_batch_size} samples divided evenly over {format_count(layout.replicas, 'pipeline')}",
    )


def pair_cost(network: NetworkModel, at: Mapping[PeerId, int]) -> PairCost:
    """Return a function that predicts the time of a message of `DEFAULT_ACTIVATION_BYTES` and an equal reply.

    Args:
        at: the index of each peer in `network`.
    """

    def cost_s(a: PeerId, b: PeerId) -> float:
        both = ((at[a], at[b]), (at[b], at[a]))
        return math.fsum(
            network.link(*way).alpha_s + DEFAULT_ACTIVATION_BYTES / network.path_Bps(*way) for way in both
        )

    return cost_s
