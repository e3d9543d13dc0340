"""The least time that a link allows an exchange, whatever the processors do.

Decides the formulas; knows no measurement.  alpha: seconds one way; B: bytes a second of each cable, in each
direction at once; S: bytes of one member's payload, of a dense exchange those of its whole vector.

    dense, ring or any other    2 (P-1) alpha + 2 (P-1)/P * S / B       Patarasuk and Yuan 2009, section 2
    dense, single reducer       2 alpha + 2 (P-1) S / B                 its cable carries everybody's
    TopK, all-gather            ceil(log2 P) alpha + (P-1) S / B
    gTop-k, butterfly           rounds * (alpha + S / B), rounds = floor(log2 P) + 2 [P no power of two]
    gTop-k, tree and broadcast  2 ceil(log2 P) (alpha + S / B)          Shi et al. 2019, section 3
    gTop-k, single reducer      2 alpha + 2 (P-1) S / B

S is exact for our payloads (`wire.sparse.encoded_bytes`) and 8 bytes an entry for the rivals'.  That a merge
may have fewer than k entries is left out: with synthetic gradients it has k.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from bench.cells import Cell
from gridtrain.config import Dense, TopK
from gridtrain.network.wire.dense_payload import slice_bytes
from gridtrain.network.wire.sparse_payload import ValueKind, encoded_bytes
from gridtrain.network.wire.value_encoding import VALUE_KINDS

FLOAT_BYTES = 4
RIVAL_ENTRY_BYTES = 8
"""An index of 4 bytes and a float32."""


def butterfly_rounds(world_size: int) -> int:
    """With the fold before and after it where P is no power of two."""
    return int(math.log2(world_size)) + 2 * (world_size & (world_size - 1) != 0)


def dense_s(world_size: int, vector_bytes: float, alpha_s: float, beta_s: float) -> float:
    """beta_s: seconds per byte."""
    return 2 * (world_size - 1) * (alpha_s + vector_bytes * beta_s / world_size)


def star_s(world_size: int, payload_bytes: float, alpha_s: float, beta_s: float) -> float:
    return 2 * alpha_s + 2 * (world_size - 1) * payload_bytes * beta_s


def gather_s(world_size: int, payload_bytes: float, alpha_s: float, beta_s: float) -> float:
    return math.ceil(math.log2(world_size)) * alpha_s + (world_size - 1) * payload_bytes * beta_s


def butterfly_s(world_size: int, payload_bytes: float, alpha_s: float, beta_s: float) -> float:
    return butterfly_rounds(world_size) * (alpha_s + payload_bytes * beta_s)


def tree_s(world_size: int, payload_bytes: float, alpha_s: float, beta_s: float) -> float:
    return 2 * math.ceil(math.log2(world_size)) * (alpha_s + payload_bytes * beta_s)


SPARSE: dict[str, Callable[[int, float, float, float], float]] = {
    "butterfly": butterfly_s,
    "tree": tree_s,
    "star": star_s,
}


def payload_bytes(cell: Cell) -> float | None:
    """Of one member, as it is first sent.  None: this module does not know."""
    if cell.rival:
        return None if cell.op == "powersgd" else float(RIVAL_ENTRY_BYTES * cell.k)
    exchange = cell.exchange
    if isinstance(exchange, Dense):
        return float(slice_bytes(cell.n, VALUE_KINDS[exchange.values]))
    kind = ValueKind.__members__.get(exchange.values.upper())
    return None if kind is None else float(encoded_bytes(cell.k, cell.n, kind))


def bound_s(cell: Cell) -> float | None:
    """None: nothing limits the link, or there is no formula here for what is exchanged."""
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
    shape = SPARSE.get(getattr(cell.exchange, "topology", "butterfly"))
    return shape(P, size, alpha_s, beta_s) if shape else None
