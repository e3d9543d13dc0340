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
from gridtrain.config import Dense
from gridtrain.network.wire.dense_payload import slice_bytes
from gridtrain.network.wire.sparse_payload import encoded_bytes
from gridtrain.network.wire.value_encoding import VALUE_KINDS, ValueKind

FLOAT_BYTES = 4
RIVAL_ENTRY_BYTES = 8
"""An index of 4 bytes and a float32."""


def butterfly_rounds(world_size: int) -> int:
    """Return the number of rounds, with the fold if P is not a power of two."""
    return int(math.log2(world_size)) + 2 * (world_size & (world_size - 1) != 0)


def _levels(world_size: int) -> int:
    return math.ceil(math.log2(world_size))


FORMULAS: dict[str, Callable[[int, float, float, float], float]] = {
    "ring": lambda P, S, alpha, beta: 2 * (P - 1) * (alpha + S * beta / P),
    "star": lambda P, S, alpha, beta: 2 * alpha + 2 * (P - 1) * S * beta,
    "all-gather": lambda P, S, alpha, beta: _levels(P) * alpha + (P - 1) * S * beta,
    "butterfly": lambda P, S, alpha, beta: butterfly_rounds(P) * (alpha + S * beta),
    "direct": lambda P, S, alpha, beta: 2 * alpha + 2 * (P - 1) / P * S * beta,
    "tree": lambda P, S, alpha, beta: 2 * _levels(P) * (alpha + S * beta),
    "auto": lambda *link: min(FORMULAS["butterfly"](*link), FORMULAS["direct"](*link)),
}
"""Topology -> bound in seconds; beta is 1 / B.  A dense exchange that is not a star has that of a ring."""


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
        is_star = not cell.rival and cell.exchange.topology == "star"
        return FORMULAS["star" if is_star else "ring"](P, vector, alpha_s, beta_s)
    if size is None:
        return None
    rivals = "tree" if cell.op == "gtopk" else "all-gather"
    return FORMULAS[rivals if cell.rival else cell.exchange.topology](P, size, alpha_s, beta_s)
