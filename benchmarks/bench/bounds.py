"""Lower bounds for the time of an exchange, from the links alone.

alpha: latency in seconds one way; B: bytes per second of each link, in both directions at once; S: bytes of
one member's payload (of a dense exchange: of its whole vector).

    dense, ring or any other    2 (P-1) alpha + 2 (P-1)/P * S / B       Patarasuk and Yuan 2009, section 2
    dense, single reducer       2 alpha + 2 (P-1) S / B                 its link carries all vectors
    TopK, all-gather            ceil(log2 P) alpha + (P-1) S / B
    gTop-k, butterfly           rounds * (alpha + S / B), rounds = floor(log2 P) + 2 [P no power of two]
    gTop-k, direct              2 alpha + 2 (P-1)/P * S / B             each sums the entries of its indices
    gTop-k, tree and broadcast  2 ceil(log2 P) (alpha + S / B)          Shi et al. 2019, section 3
    gTop-k, single reducer      2 alpha + 2 (P-1) S / B

S is exact for gridtrain's payloads (`sparse_payload.encoded_bytes`) and 8 bytes an entry for rivals'.  A
merge is assumed to have k entries, as it has with synthetic gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from bench.cells import Cell
from gridtrain.config import Dense, TopK
from gridtrain.network.wire.dense_payload import slice_bytes
from gridtrain.network.wire.sparse_payload import encoded_bytes
from gridtrain.network.wire.value_encoding import VALUE_KINDS, ValueKind

FLOAT_BYTES = 4
RIVAL_ENTRY_BYTES = 8
"""An index of 4 bytes and a float32."""


def butterfly_rounds(world_size: int) -> int:
    """Return the number of rounds, with the fold if P is not a power of two."""
    return int(math.log2(world_size)) + 2 * (world_size & (world_size - 1) != 0)


def dense_s(world_size: int, vector_bytes: float, alpha_s: float, beta_s: float) -> float:
    """Return the bound of a dense ring.  beta_s: seconds per byte."""
    return 2 * (world_size - 1) * (alpha_s + vector_bytes * beta_s / world_size)


def star_s(world_size: int, payload_bytes: float, alpha_s: float, beta_s: float) -> float:
    return 2 * alpha_s + 2 * (world_size - 1) * payload_bytes * beta_s


def gather_s(world_size: int, payload_bytes: float, alpha_s: float, beta_s: float) -> float:
    return math.ceil(math.log2(world_size)) * alpha_s + (world_size - 1) * payload_bytes * beta_s


def butterfly_s(world_size: int, payload_bytes: float, alpha_s: float, beta_s: float) -> float:
    return butterfly_rounds(world_size) * (alpha_s + payload_bytes * beta_s)


def tree_s(world_size: int, payload_bytes: float, alpha_s: float, beta_s: float) -> float:
    return 2 * math.ceil(math.log2(world_size)) * (alpha_s + payload_bytes * beta_s)


def direct_s(world_size: int, payload_bytes: float, alpha_s: float, beta_s: float) -> float:
    return 2 * alpha_s + 2 * (world_size - 1) / world_size * payload_bytes * beta_s


SPARSE: dict[str, Callable[[int, float, float, float], float]] = {
    "auto": lambda *link: min(butterfly_s(*link), direct_s(*link)),
    "butterfly": butterfly_s,
    "direct": direct_s,
    "tree": tree_s,
    "star": star_s,
}


def payload_bytes(cell: Cell) -> float | None:
    """Return the bytes of one member's first payload; None if unknown."""
    if cell.rival:
        return float(RIVAL_ENTRY_BYTES * cell.k)
    exchange = cell.exchange
    if isinstance(exchange, Dense):
        return float(slice_bytes(cell.n, VALUE_KINDS[exchange.values]))
    kind = ValueKind.__members__.get(exchange.values.upper())
    return None if kind is None else float(encoded_bytes(cell.k, cell.n, kind))


def bound_s(cell: Cell) -> float | None:
    """Return the lower bound; None if the link is unlimited or there is no formula."""
    if not cell.link.bandwidth_Bps:
        return None
    P, alpha_s, beta_s = cell.link.workers, cell.link.delay_s, 1.0 / cell.link.bandwidth_Bps
    size = payload_bytes(cell)
    if cell.dense:
        vector = FLOAT_BYTES * cell.n if cell.rival or size is None else size
        star = not cell.rival and getattr(cell.exchange, "topology", "ring") == "star"
        formula = star_s if star else dense_s
        return formula(P, vector, alpha_s, beta_s)
    if size is None:
        return None
    if cell.rival:
        formula = tree_s if cell.op == "gtopk" else gather_s
        return formula(P, size, alpha_s, beta_s)
    if isinstance(cell.exchange, TopK):
        return gather_s(P, size, alpha_s, beta_s)
    shape = SPARSE.get(getattr(cell.exchange, "topology", "auto"))
    return shape(P, size, alpha_s, beta_s) if shape else None
