"""Builds the web page's graph, which shows which members of a generation exchange data.

ring 0-1-2-3-0    butterfly 0-1 2-3 0-2 1-3    tree, star: towards rank 0    stages: rows of replicas
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gridtrain.core.collectives import ring
from gridtrain.core.group.rank_layout import RankLayout
from gridtrain.core.planning.workload import NEIGHBOURS, NeighboursOf, Workload
from gridtrain.errors import LocalProtocolError
from gridtrain_coordinator.dashboard import sanitize

MAX_DRAWN_NODES = 40  # if there are more members, no edges are drawn


def build_graph(status: Mapping[str, Any], run_load: Workload | None) -> dict[str, Any]:
    """Return the graph of the generation that a status describes, as a JSON-serializable dictionary.

    kind: ring, direct, butterfly, tree, star, all-gather or stages
    size: the number of members
    stages: the number of stages of a pipeline; otherwise 1
    edges: for each pair that exchanges data, the two ranks, the rate in bytes per second, the round trip in
        seconds, and the rank of the relay (-1 for the coordinator).  A rate or round trip is None if unknown;
        the relay is None if the route is direct.  No edges if there are more than `MAX_DRAWN_NODES` members.
    """
    size, stages = int(status.get("world_size", 0)), int(status.get("stages", 1))
    name = run_load.kind.topology if run_load is not None else "ring"
    pairs: set[tuple[int, int]] = set()
    if 1 < size <= MAX_DRAWN_NODES:
        pairs = _pipeline_edges(stages, size) if stages > 1 else _pairs(NEIGHBOURS[name], range(size))
    known_links = _undirected_links(status.get("links", ()))
    relays = {(a, b): by for a, b, by in status.get("relayed", ())}
    edges = [[a, b, *known_links.get((a, b), (None, None)), relays.get((a, b))] for a, b in sorted(pairs)]
    return {"kind": "stages" if stages > 1 else name, "size": size, "stages": stages, "edges": edges}


def _pairs(neighbours: NeighboursOf, ranks: Sequence[int]) -> set[tuple[int, int]]:
    size = len(ranks)
    ranked_pairs = {(ranks[a], ranks[b]) for a in range(size) for b in neighbours(a, size)}
    return {(min(pair), max(pair)) for pair in ranked_pairs if pair[0] != pair[1]}


def _pipeline_edges(stages: int, size: int) -> set[tuple[int, int]]:
    """Return the edges of the rings among each stage's replicas and of the pipelines through the stages."""
    try:
        replicas = RankLayout.for_world_size(stages, size).replicas
    except LocalProtocolError:
        return set()
    pairs = {(rank, rank + replicas) for rank in range(size - replicas)}
    for first in range(0, size, replicas):
        pairs |= _pairs(ring.neighbours, range(first, first + replicas))
    return pairs


def _undirected_links(
    links: Sequence[Sequence[Any]],
) -> dict[tuple[int, int], tuple[float | None, float | None]]:
    """Return the lower rate and the longer round trip of the two directions, by (smaller, larger) rank."""
    known_links: dict[tuple[int, int], tuple[float | None, float | None]] = {}
    for a, b, rtt_s, rate_Bps in links:
        pair = (min(a, b), max(a, b))
        rate, trip = known_links.get(pair, (None, None))
        rates = [x for x in (rate, sanitize.number(rate_Bps)) if x is not None]
        trips = [x for x in (trip, sanitize.number(rtt_s)) if x is not None]
        known_links[pair] = (
            round(min(rates)) if rates else None,
            float(f"{max(trips):.4g}") if trips else None,
        )
    return known_links
