"""Who sits where in a generation of S stages x R replicas, and who gives whom which stage's state.

Decides the order of ranks (`protocol.seats`), the donors and who is left over, with the reason in words.
Never decides which state a generation begins with (`protocol.copies`), never measures a link.

    here: anna (0) bert (0) clara (1) dora (-) emil (-)         2 stages x 2 replicas, emil is spare
                                                                 (n): holds the state of stage n
              replica 0   replica 1
    stage 0     anna        bert         who holds a stage's state keeps that stage: a move is a transfer
    stage 1     clara       dora         dora gets the state from clara

Holders come first, then who has the stage's checkpoint on its disk, then the fastest.  Among the places that
this leaves open, neighbours in a pipeline and the replicas of a stage are brought near each other: by trying
all of them where they are few, by exchanging pairs (2-opt, Croes 1958) otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations, product

from gridtrain.core.group.rank_layout import RankLayout
from gridtrain.core.messages import PeerId, Span
from gridtrain.core.planning.batch_shares import BatchShares, divide_samples
from gridtrain.core.planning.network_model import NetworkModel
from gridtrain.errors import LocalProtocolError

PairCost = Callable[[PeerId, PeerId], float]
"""Seconds from one peer to another and back, the same in both directions."""

MAX_ENUMERATED = 3000
"""Seatings that are looked at one by one; where there are more, pairs are exchanged."""

MAX_SWAP_CHECKS = 200_000
"""Members looked at while pairs are exchanged, about 0.1 s: the coordinator has other things to do."""

MAX_LINK_PLACED_MEMBERS = 64
"""Members that are placed by their links; of more only pairs are exchanged, as far as that goes."""

MAX_NAMED_WORKERS = 8

DEFAULT_ACTIVATION_BYTES = 1 << 20
"""Of an activation, as the coordinator does not know what crosses a cut."""


@dataclass(frozen=True, slots=True)
class StateLocations:
    """What is held, by those who may be seated.

    Attributes:
        live: in whose memory the state is with which the generation begins, of which stage.
        disks: on whose disk it is, of which stages.
        begins: stages that whoever sits there first makes anew, as at step 0.
        stood: in which stage each member of the last generation sat.
        holds: blocks whose state is in somebody's memory or on its disk, of this or another cut.
    """

    in_memory: Mapping[PeerId, int] = field(default_factory=dict)
    on_disk: Mapping[PeerId, Collection[int]] = field(default_factory=dict)
    initial_stages: Collection[int] = ()
    last_stage: Mapping[PeerId, int] = field(default_factory=dict)
    held_spans: Mapping[PeerId, tuple[Span, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Attributes:
    order: members by rank.
    donors: of those who have to be sent their stage's state, by whose rank.
    spares: who has no seat.
    reason: in words.
    pieces: of who puts its stage together, from which blocks of whose rank.
    digests: of the checkpoints that members are given; a state in memory has none.
    piece_digests: likewise of `pieces`.
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
    hands: StateLocations,
    *,
    speed: Callable[[PeerId], float | None] = lambda peer: None,
    cost_s: PairCost | None = None,
    name: Callable[[PeerId], str] = lambda peer: peer.hex()[:8],
) -> RankPlacement:
    """The seating of as many replicas as there are workers for.

    Args:
        peers: who may take part, at least `stages`, the longest-serving first; all different.
        hands: each stage is in somebody's, among `peers`, or begins anew.
        cost_s: of the links; None: nothing is measured.

    Raises:
        LocalProtocolError: there are too few, or nobody has some stage.
    """
    if len(peers) < stages or len(set(peers)) != len(peers):
        raise LocalProtocolError(f"{len(peers)} workers cannot sit in {stages} stages")
    seats = RankLayout(stages, len(peers) // stages)
    placed, rest = _place_holders(seats, peers, hands)
    _place_disk_holders(seats, placed, rest, hands)
    pinned = {peer for row in placed for peer in row}
    free = seats.world_size - len(pinned)
    at = {peer: place for place, peer in enumerate(peers)}
    rest.sort(key=lambda peer: (-(speed(peer) or 0.0), at[peer]))
    chosen, spares = rest[:free], sorted(rest[free:], key=lambda peer: at[peer])
    _fill_vacancies(
        seats, placed, chosen, hands, cost_s if seats.world_size <= MAX_LINK_PLACED_MEMBERS else None
    )
    joined = [list(row) for row in placed]
    if cost_s is not None:
        placed = _improve_by_links(seats, placed, pinned, cost_s)
    eldest = min(range(seats.replicas), key=lambda replica: at[placed[0][replica]])
    for row in placed:  # the eldest of stage 0 is the root of the votes
        row[0], row[eldest] = row[eldest], row[0]
    order = tuple(peer for row in placed for peer in row)
    donors = _choose_state_sources(seats, order, hands, cost_s)
    reason = _reason(seats, order, spares, donors, name)
    if cost_s is not None:
        reason += _improvement_text(seats, joined, placed, cost_s)
    return RankPlacement(order, donors, tuple(spares), reason)


def _place_holders(
    seats: RankLayout, peers: Sequence[PeerId], hands: StateLocations
) -> tuple[list[list[PeerId]], list[PeerId]]:
    """By stage those who hold it, as many as may stay; and the others."""
    placed: list[list[PeerId]] = [[] for _ in range(seats.stages)]
    rest: list[PeerId] = []
    for peer in peers:
        stage = hands.in_memory.get(peer)
        fits = stage is not None and stage < seats.stages and len(placed[stage]) < seats.replicas
        if stage is not None and fits:
            placed[stage].append(peer)
        else:
            rest.append(peer)
    return placed, rest


def _place_disk_holders(
    seats: RankLayout, placed: list[list[PeerId]], rest: list[PeerId], hands: StateLocations
) -> None:
    """Of a stage that nobody holds in memory, one who has it on its disk must be a member."""
    for peer in list(rest):
        stood = hands.last_stage.get(peer, seats.stages)
        if stood in hands.on_disk.get(peer, ()) and stood < seats.stages and not placed[stood]:
            rest.remove(peer)
            placed[stood].append(peer)
    lost = [stage for stage in range(seats.stages) if not placed[stage] and stage not in hands.initial_stages]
    keepers = {s: [p for p in (*rest, *_all_placed(placed)) if s in hands.on_disk.get(p, ())] for s in lost}
    for stage in sorted(lost, key=lambda stage: len(keepers[stage])):
        if not keepers[stage]:
            raise LocalProtocolError(f"nobody has the state of stage {stage} of {seats.stages}")
        if not set(keepers[stage]) & set(_all_placed(placed)):
            # It sits at this stage, so that one disk is read and nothing is sent.
            rest.remove(keepers[stage][0])
            placed[stage].append(keepers[stage][0])


def _fill_vacancies(
    seats: RankLayout,
    placed: list[list[PeerId]],
    chosen: Sequence[PeerId],
    hands: StateLocations,
    cost_s: PairCost | None,
) -> None:
    """The open places, stage by stage: who has it on its disk, else the nearest, else the fastest."""
    left = list(chosen)
    for stage, row in enumerate(placed):
        while len(row) < seats.replicas:
            near = [*row, *(placed[stage - 1] if stage else [])]
            best = min(
                left,
                key=lambda peer: (
                    stage not in hands.on_disk.get(peer, ()),
                    min((cost_s(peer, other) for other in near), default=0.0) if cost_s else 0.0,
                ),
            )
            left.remove(best)
            row.append(best)


def _all_placed(placed: Sequence[Sequence[PeerId]]) -> Iterator[PeerId]:
    return (peer for row in placed for peer in row)


# -- links ---------------------------------------------------------------------------------------


def placement_cost_s(placed: Sequence[Sequence[PeerId]], cost_s: PairCost) -> tuple[float, float]:
    """(the slowest pipeline + the slowest group of replicas, the sum of all), in seconds.

    All pipelines run at once, and then all groups: each time the slowest one counts.
    """
    pipelines = [math.fsum(map(cost_s, line, line[1:])) for line in zip(*placed, strict=True)]
    groups = [math.fsum(map(cost_s, row, (*row[1:], row[0]))) if len(row) > 1 else 0.0 for row in placed]
    return max(pipelines) + max(groups), math.fsum((*pipelines, *groups))


def _improve_by_links(
    seats: RankLayout, placed: list[list[PeerId]], pinned: Collection[PeerId], cost_s: PairCost
) -> list[list[PeerId]]:
    """The best of the seatings that leave the pinned members at their stages."""
    loose = [(s, r) for s, row in enumerate(placed) for r, peer in enumerate(row) if peer not in pinned]
    count = math.factorial(len(loose)) * math.factorial(seats.replicas) ** (seats.stages - 1)
    if count <= MAX_ENUMERATED:
        return min(
            _enumerate_placements(seats, placed, loose), key=lambda tried: placement_cost_s(tried, cost_s)
        )
    return _improve_by_swaps(seats, placed, pinned, cost_s)


def _enumerate_placements(
    seats: RankLayout, placed: list[list[PeerId]], loose: Sequence[tuple[int, int]]
) -> Iterator[list[list[PeerId]]]:
    """The order within stage 0 stays: which pipeline has which number makes no difference."""
    for others in permutations([placed[s][r] for s, r in loose]):
        rows = [list(row) for row in placed]
        for (s, r), peer in zip(loose, others, strict=True):
            rows[s][r] = peer
        for turned in product(*(permutations(row) for row in rows[1:])):
            yield [list(rows[0]), *(list(row) for row in turned)]


def _improve_by_swaps(
    seats: RankLayout, placed: list[list[PeerId]], pinned: Collection[PeerId], cost_s: PairCost
) -> list[list[PeerId]]:
    rows = [list(row) for row in placed]
    best = placement_cost_s(rows, cost_s)
    places = [(s, r) for s in range(seats.stages) for r in range(seats.replicas)]
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
    seats: RankLayout, order: Sequence[PeerId], hands: StateLocations, cost_s: PairCost | None
) -> dict[PeerId, int]:
    """Who has to be sent its state, and by whom: the nearest that has it, of equals the lowest rank."""
    donors: dict[PeerId, int] = {}
    keepers_of: dict[int, list[int]] = {}
    for rank, peer in enumerate(order):
        for stage in hands.on_disk.get(peer, ()):
            keepers_of.setdefault(stage, []).append(rank)
    for rank, peer in enumerate(order):
        stage = seats.stage_of(rank)
        group = seats.stage_ranks(stage)
        holders = [other for other in group if hands.in_memory.get(order[other]) == stage]
        keepers = keepers_of.get(stage, [])
        if hands.in_memory.get(peer) == stage or stage in hands.on_disk.get(peer, ()):
            continue
        if stage in hands.initial_stages and not holders and not keepers:
            holders = [group[0]]
            if rank == group[0]:
                continue
        # Of those who have it on their disks one that sits here reads it in any case.
        here = holders or [other for other in keepers if other in group] or keepers
        donors[peer] = min(here, key=lambda other: (cost_s(peer, order[other]) if cost_s else 0.0, other))
    return donors


def _reason(
    seats: RankLayout,
    order: Sequence[PeerId],
    spares: Sequence[PeerId],
    donors: Mapping[PeerId, int],
    name: Callable[[PeerId], str],
) -> str:
    text = f"{seats.stages} stages x {seats.replicas} replica{'s' if seats.replicas > 1 else ''}"
    moves = [
        f"{name(peer)} gets stage {seats.stage_of(order.index(peer))} from {name(order[donor])}"
        for peer, donor in donors.items()
    ]
    text += "; " + (_abbreviate(moves) if moves else "nobody has to be sent a state")
    return f"{text}; spare: {_abbreviate([name(peer) for peer in spares])}" if spares else text


def _abbreviate(words: Sequence[str]) -> str:
    more = f" and {len(words) - MAX_NAMED_WORKERS} more" if len(words) > MAX_NAMED_WORKERS else ""
    return ", ".join(words[:MAX_NAMED_WORKERS]) + more


def _improvement_text(
    seats: RankLayout, before: Sequence[Sequence[PeerId]], after: Sequence[Sequence[PeerId]], cost_s: PairCost
) -> str:
    slow_s, fast_s = placement_cost_s(before, cost_s)[0], placement_cost_s(after, cost_s)[0]
    if seats.world_size < 3 or not fast_s < slow_s:
        return "; the links make no other order better"
    return (
        f"; neighbours by their links: {fast_s * 1e3:.3g} ms along a pipeline and a group instead of "
        f"{slow_s * 1e3:.3g} ms"
    )


def stage_shares(most: Sequence[int], seats: RankLayout, global_batch_size: int | None) -> BatchShares:
    """Only who holds the first stage reads samples; the others get what its neighbours send them.

    Args:
        most: by rank, the batch size that each one asked for; 0: any.
    """
    rest = (0,) * (seats.world_size - seats.replicas)
    if global_batch_size is None:
        return BatchShares(
            (*most[: seats.replicas], *rest), "each pipeline takes its first worker's batch size"
        )
    counts = divide_samples(global_batch_size, [1.0] * seats.replicas, most[: seats.replicas])
    return BatchShares(
        (*counts, *rest), f"{global_batch_size} samples in even shares over {seats.replicas} pipelines"
    )


def pair_cost(network: NetworkModel, at: Mapping[PeerId, int]) -> PairCost:
    """Of a message of `USUAL_BYTES` and its answer, by indices in the network."""

    def cost_s(a: PeerId, b: PeerId) -> float:
        both = ((at[a], at[b]), (at[b], at[a]))
        return math.fsum(
            network.link(*way).alpha_s + DEFAULT_ACTIVATION_BYTES / network.path_Bps(*way) for way in both
        )

    return cost_s
