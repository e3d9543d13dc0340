"""The residual of a worker that leaves: which entries are sent, and what the recipient accepts.

    residual_N --the largest |v| that fit the budget--> sparse, fp32 --> pieces of 1 MiB -->+
    recipient's residual_N += entries <-- stored until they count <-- checked <-- joined <--+

`gridtrain.core.member.residual_transfer` decides who the recipient is, and when a residual counts.
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
    """The part of a residual that is transferred.

    Attributes:
        magnitude_sum: of the part.
        total_magnitude_sum: of the whole residual.
        remainder_N: what is not transferred; None: nothing.
    """

    payload: bytes
    entries: int
    magnitude_sum: float
    total_magnitude_sum: float
    remainder_N: npt.NDArray[np.float32] | None


def select_entries(
    residual_N: npt.NDArray[np.float32], budget_bytes: int, world_size: int
) -> ResidualSelection:
    """The largest entries that fit; of equal ones the first.  Values are sent with all their bits."""
    magnitudes_N = np.abs(residual_N)
    total = float(magnitudes_N.sum(dtype=np.float64))
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
        total,
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
    """The recipient's side: pieces that arrive, residuals that are complete, and those that count.

    Attributes:
        confirmed: residuals that count: the trainer is to add them to its own.
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
        """Returns whether it was the last piece.  Pieces after a gap, left by a broken connection, are
        dropped.

        Raises `RemoteProtocolError` for what cannot be a residual of this model.
        """
        _check_total(piece.total, self._n)
        if piece.index == 0:
            self._incoming[peer] = _IncomingResidual(piece.total)
        incoming = self._incoming.get(peer)
        if incoming is None or (piece.index, piece.total) != (len(incoming.pieces), incoming.total):
            return False
        incoming.pieces.append(bytes(piece.payload))
        if len(incoming.pieces) < incoming.total:
            return False
        del self._incoming[peer]
        payload = b"".join(incoming.pieces)
        entries = decode(payload, n=self._n, max_entries=self._n, kind=_KIND)
        _check_values(entries.values, world_size)
        self._complete[peer] = entries
        return True

    def confirm(self, peer: PeerId) -> None:
        """It counts now.  Raises `LocalProtocolError` if it is not complete."""
        if peer not in self._complete:
            raise LocalProtocolError(f"the residual of {peer.hex()[:8]} was confirmed before it was complete")
        self.confirmed.append((peer, self._complete.pop(peer)))

    def take_confirmed(self) -> list[tuple[PeerId, SparseVector]]:
        """The residuals that count, once."""
        confirmed, self.confirmed = self.confirmed, []
        return confirmed

    @property
    def unconfirmed_magnitude(self) -> float:
        """Sum of magnitudes of the residuals that are complete, but do not count yet."""
        return magnitude_sum(list(self._complete.values()))

    @property
    def has_unconfirmed(self) -> bool:
        return bool(self._complete)

    def remove_peer(self, peer: PeerId) -> None:
        self._incoming.pop(peer, None)
        self._complete.pop(peer, None)


def _check_total(total: int, n: int) -> None:
    """Raises `RemoteProtocolError` for more pieces than `n` elements can fill."""
    most = -(-encoded_bytes(n, n, _KIND) // MAX_BLOCK_BYTES) if n else 0
    if total > most:
        raise RemoteProtocolError(
            f"a residual of {total} pieces; {n} elements, as this model has, make at most {most}",
            remedy=_REMEDY,
        )


def _check_values(values_K: npt.NDArray[np.float32], world_size: int) -> None:
    """The bound of values in a round: larger ones could keep the recipient from ever sending again."""
    limit = largest_summable(world_size)
    if values_K.size and not (np.abs(values_K) <= limit).all():
        raise RemoteProtocolError(
            f"a residual with the value {float(np.abs(values_K).max()):.3g}, at most {limit:.3g} is possible",
            remedy=_REMEDY,
        )


def magnitude_sum(parts: Sequence[SparseVector]) -> float:
    """Sum of magnitudes."""
    return float(sum(np.abs(part.values).sum(dtype=np.float64) for part in parts))
