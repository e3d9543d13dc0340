"""Selects the largest entries of a leaving worker's residual within a budget, and checks received entries.

    residual_N --the largest |v| that fit the budget--> sparse, fp32 --> pieces of 1 MiB -->+
    recipient's residual_N += entries <-- kept until confirmed <-- checked <-- joined <-----+

`gridtrain.core.member.residual_recipients` chooses the recipient and decides when a residual is confirmed.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

from gridtrain.core.messages import MAX_BLOCK_BYTES, MAX_RESIDUAL_BLOCKS, PeerId, ResidualBlock
from gridtrain.errors import LocalProtocolError, RemoteProtocolError
from gridtrain.network.wire.sparse_payload import SparseVector, decode, encode, encoded_bytes
from gridtrain.network.wire.value_encoding import ValueKind
from gridtrain.sparsify.merge import FloatArray, largest_summable

MAX_BUDGET_BYTES = MAX_RESIDUAL_BLOCKS * MAX_BLOCK_BYTES
_KIND = ValueKind.FP32
_REMEDY = "check that the peer runs the same version of gridtrain"


@dataclass(frozen=True, slots=True)
class ResidualSelection:
    """The part of a residual that is transferred.

    Attributes:
        payload: the encoded entries.
        entries: the number of entries that are transferred.
        magnitude_sum: the sum of the magnitudes of the entries that are transferred.
        total_magnitude_sum: the sum of the magnitudes of all entries of the residual.
        remainder_N: the rest of the residual, which is not transferred; None if all its elements are zero.
    """

    payload: bytes
    entries: int
    magnitude_sum: float
    total_magnitude_sum: float
    remainder_N: FloatArray | None


def select_entries(residual_N: FloatArray, budget_bytes: int, world_size: int) -> ResidualSelection:
    """Select the entries with the largest magnitudes, as many as fit into the budget.

    Of entries with equal magnitudes, those with the lowest indices are selected first.
    Entries with a magnitude above `largest_summable` are not selected.

    Args:
        residual_N: this worker's residual.
        budget_bytes: the maximum size of the payload; at most `MAX_BUDGET_BYTES` are used.
        world_size: the number of members of the group.
    """
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
        magnitude_sum(values_K),
        total,
        rest_N if rest_N.any() else None,
    )


def _max_entries(available: int, n: int, budget_bytes: int) -> int:
    """Return the largest number of entries, at most `available`, whose payload fits into the budget."""
    counts = range(1, available + 1)
    return bisect_right(counts, budget_bytes, key=lambda k: encoded_bytes(k, n, _KIND))


def split_pieces(payload: bytes) -> tuple[memoryview, ...]:
    """Split an encoded residual into pieces of at most `MAX_BLOCK_BYTES`."""
    view = memoryview(payload)
    return tuple(view[i : i + MAX_BLOCK_BYTES] for i in range(0, len(view), MAX_BLOCK_BYTES))


@dataclass(slots=True)
class _IncomingResidual:
    total: int
    pieces: list[bytes] = field(default_factory=list)


class IncomingResiduals:
    """The recipient's side: joins pieces, and keeps complete residuals until they are confirmed.

    Attributes:
        n: the number of elements in this worker's residual and in each residual that it receives; 0 if this
            worker has no residual.
        confirmed: the confirmed residuals, which the trainer has to add to its own residual, with the names
            of the workers that sent them.
    """

    def __init__(self) -> None:
        self.n = 0
        self._incoming: dict[PeerId, _IncomingResidual] = {}
        self._complete: dict[PeerId, SparseVector] = {}
        self.confirmed: list[tuple[str, SparseVector]] = []

    def receive_piece(self, peer: PeerId, piece: ResidualBlock, world_size: int) -> bool:
        """Store a piece; return whether the residual is now complete.

        Pieces after a gap are dropped, because a broken connection may have lost pieces.  Raises
        `RemoteProtocolError` if the residual is not valid for this model, or has a value that is too large
        for a group of `world_size` members.
        """
        _check_total(piece.total, self.n)
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
        entries = decode(payload, n=self.n, max_entries=self.n, kind=_KIND)
        _check_values(entries.values, world_size)
        self._complete[peer] = entries
        return True

    def confirm(self, peer: PeerId, name: str) -> None:
        """Move a peer's residual to `confirmed`.  Raises `LocalProtocolError` if it is not complete."""
        if peer not in self._complete:
            raise LocalProtocolError(f"the residual of {name} was confirmed before it was complete")
        self.confirmed.append((name, self._complete.pop(peer)))

    def take_confirmed(self) -> list[tuple[str, SparseVector]]:
        """Remove and return the confirmed residuals."""
        confirmed, self.confirmed = self.confirmed, []
        return confirmed

    @property
    def unconfirmed_magnitude(self) -> float:
        """The sum of the magnitudes of all entries in residuals that are complete but not confirmed."""
        return sum(magnitude_sum(entries.values) for entries in self._complete.values())

    @property
    def has_unconfirmed(self) -> bool:
        return bool(self._complete)

    def remove_peer(self, peer: PeerId) -> None:
        self._incoming.pop(peer, None)
        self._complete.pop(peer, None)


def _check_total(total: int, n: int) -> None:
    """Raise `RemoteProtocolError` if a residual of `n` elements cannot have as many pieces as `total`."""
    most = -(-encoded_bytes(n, n, _KIND) // MAX_BLOCK_BYTES) if n else 0
    if total > most:
        raise RemoteProtocolError(
            f"a residual has {total} pieces; for the {n} elements of this model, it must have at most {most}",
            remedy=_REMEDY,
        )


def _check_values(values_K: FloatArray, world_size: int) -> None:
    """Raise `RemoteProtocolError` if a value exceeds the bound for values in a round.

    The recipient would never be able to send larger values.
    """
    limit = largest_summable(world_size)
    if values_K.size and not (np.abs(values_K) <= limit).all():
        raise RemoteProtocolError(
            f"a residual has a value of magnitude {float(np.abs(values_K).max()):.3g}; the limit is "
            f"{limit:.3g}",
            remedy=_REMEDY,
        )


def magnitude_sum(values: FloatArray) -> float:
    """Return the sum of the magnitudes of the values."""
    return float(np.abs(values).sum(dtype=np.float64))
