"""A leaver's residual on its way: which entries go, and what an heir takes.

Decides what fits a budget, and whether what came is what a residual may be.  Never decides who takes it, nor
when it counts (`protocol.handover`).

    residual_N --the largest |v| that fit the budget--> sparse, fp32 --> pieces of 1 MiB -->+
    heir's residual_N += entries  <--- kept until they count <--- checked <--- joined <-----+
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gridtrain.core.messages import MAX_BLOCK_BYTES, MAX_RESIDUAL_BLOCKS, PeerId, ResidualBlock
from gridtrain.errors import LocalProtocolError, RemoteProtocolError
from gridtrain.network.wire.sparse_payload import SparseVector, ValueKind, decode, encode, encoded_bytes
from gridtrain.sparsify.merge import largest_summable

MAX_BUDGET_BYTES = MAX_RESIDUAL_BLOCKS * MAX_BLOCK_BYTES
_KIND = ValueKind.FP32
_REMEDY = "drop that peer; an honest one of the same version never sends this"


@dataclass(frozen=True, slots=True)
class ResidualSelection:
    """What of a residual is handed over.

    Attributes:
        mass, whole_mass: sums of magnitudes of what goes, and of everything.
        rest_N: what stays; None: nothing.
    """

    payload: bytes
    entries: int
    magnitude_sum: float
    total_magnitude_sum: float
    remainder_N: npt.NDArray[np.float32] | None


def select_entries(
    residual_N: npt.NDArray[np.float32], budget_bytes: int, world_size: int
) -> ResidualSelection:
    """The largest entries that fit; of equal ones the first.  Values travel with all their bits."""
    magnitudes_N = np.abs(residual_N)
    whole_mass = float(magnitudes_N.sum(dtype=np.float64))
    candidates_K = np.flatnonzero((magnitudes_N > 0) & (magnitudes_N <= largest_summable(world_size)))
    k = _max_entries(candidates_K.size, residual_N.size, min(budget_bytes, MAX_BUDGET_BYTES))
    if k < candidates_K.size:
        by_size = np.argsort(-magnitudes_N[candidates_K], kind="stable")
        candidates_K = np.sort(candidates_K[by_size[:k]])
    values_K = residual_N[candidates_K]
    rest_N = residual_N.copy()
    rest_N[candidates_K] = 0.0
    return ResidualSelection(
        encode(candidates_K, values_K, n=residual_N.size, kind=_KIND),
        int(candidates_K.size),
        float(np.abs(values_K).sum(dtype=np.float64)),
        whole_mass,
        rest_N if rest_N.any() else None,
    )


def _max_entries(available: int, n: int, budget_bytes: int) -> int:
    """The largest k whose payload fits; sizes grow with k."""
    low, high = 0, available
    while low < high:
        middle = (low + high + 1) // 2
        if encoded_bytes(middle, n, _KIND) <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def split_pieces(payload: bytes) -> tuple[memoryview, ...]:
    """At most `MAX_RESIDUAL_BLOCKS` pieces."""
    view = memoryview(payload)
    return tuple(view[i : i + MAX_BLOCK_BYTES] for i in range(0, len(view), MAX_BLOCK_BYTES))


@dataclass(slots=True)
class _IncomingResidual:
    total: int
    pieces: list[bytes] = field(default_factory=list)


class IncomingResiduals:
    """The heir's side: pieces that arrive, residuals that are complete, and those that count.

    Attributes:
        counting: residuals that the trainer is to add to its own.
    """

    def __init__(self) -> None:
        self._n = 0
        self._incoming: dict[PeerId, _IncomingResidual] = {}
        self._complete: dict[PeerId, SparseVector] = {}
        self.confirmed: list[tuple[PeerId, SparseVector]] = []

    def set_length(self, n: int) -> None:
        """The length of this worker's residual; 0: it has none."""
        self._n = n

    def receive_piece(self, peer: PeerId, piece: ResidualBlock, world_size: int) -> bool:
        """True when this was the last one.  What comes after a gap, left by a connection, is dropped.

        Raises `RemoteProtocolError` for what cannot be a residual of this model.
        """
        _check_total(piece.total, self._n)
        if piece.index == 0:
            self._incoming[peer] = _IncomingResidual(piece.total)
        arriving = self._incoming.get(peer)
        if arriving is None or (piece.index, piece.total) != (len(arriving.pieces), arriving.total):
            return False
        arriving.pieces.append(bytes(piece.payload))
        if len(arriving.pieces) < arriving.total:
            return False
        del self._incoming[peer]
        payload = b"".join(arriving.pieces)
        entries = decode(payload, n=self._n, max_entries=self._n, kind=_KIND)
        _check_values(entries.values, world_size)
        self._complete[peer] = entries
        return True

    def confirm(self, peer: PeerId) -> None:
        """It is ours."""
        if peer not in self._complete:
            raise LocalProtocolError(f"the residual of {peer.hex()[:8]} counts before it is complete")
        self.confirmed.append((peer, self._complete.pop(peer)))

    @property
    def unconfirmed_magnitude(self) -> float:
        """Sum of magnitudes of what is complete, but does not count yet."""
        return magnitude_sum(list(self._complete.values()))

    @property
    def has_unconfirmed(self) -> bool:
        return bool(self._complete)

    def remove_peer(self, peer: PeerId) -> None:
        self._incoming.pop(peer, None)
        self._complete.pop(peer, None)


def _check_total(total: int, n: int) -> None:
    """`n` elements fill no more pieces than this, however many of them are entries."""
    most = -(-encoded_bytes(n, n, _KIND) // MAX_BLOCK_BYTES) if n else 0
    if total > most:
        raise RemoteProtocolError(
            f"a residual of {total} pieces; {n} elements, as this model has, make {most} at most",
            remedy=_REMEDY,
        )


def _check_values(values_K: npt.NDArray[np.float32], world_size: int) -> None:
    """As for what travels in a round: larger ones could keep the heir from ever sending again."""
    limit = largest_summable(world_size)
    if values_K.size and not (np.abs(values_K) <= limit).all():
        raise RemoteProtocolError(
            f"a residual with the value {float(np.abs(values_K).max()):.3g}, at most {limit:.3g} may travel",
            remedy=_REMEDY,
        )


def magnitude_sum(parts: Sequence[SparseVector]) -> float:
    """Sum of magnitudes."""
    return float(sum(np.abs(part.values).sum(dtype=np.float64) for part in parts))
