"""Error feedback: the residual of a worker, which is the gradient that it has not sent yet.

Until `commit` the committed state is only read; everything new is written to second buffers.

                   contribution                     truncated (by the merges)
                        |                                      |
    residual --(+)------+---> acc --select--> payload          |
       ^                       |                               |
       |                       +--- minus decode(payload) ----(+)---> new residual
       +------------------------------- commit: swap -------------------+
                                        abort: nothing to do

With DGC momentum correction (Lin et al. 2018, arXiv 1712.01887, section 3.1) the residual is their v:

    u = m u + contribution;   v += u;   select from v;   v -= decode(mine);   u = 0 where selected here

so that no gradient is lost in v, with "contribution" read as the new u.  Only the selected entries are copied
from the device to the host.

A vector can be prepared in parts (the buckets of an exchange that overlaps with backward), each with its own
payload; they commit together or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gridtrain.errors import ConfigError, LocalProtocolError
from gridtrain.network.wire.sparse_payload import SparseVector, ValueKind, encode_with_decoded
from gridtrain.sparsify.cuda_selection import make_selection
from gridtrain.sparsify.merge import TruncatedEntries
from gridtrain.sparsify.selection import AccumulationTerms, Selection

_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class PreparedState:
    """A round's new state before the vote.  Valid until the next `prepare` of the same part.

    Attributes:
        payload: what this worker sends; its indices count from `start`.
        decoded: what the payload decodes to.
        skip: the accumulated values cannot be sent; the payload is empty and nothing may change.
        new_residual_N, new_u_N: state after a commit, without truncated entries (None: skip, no momentum).
        start: first element of the part; 0 for the whole vector.
        threshold: the smallest magnitude selected; 0.0 if none was.
    """

    payload: bytes
    decoded: SparseVector
    skip: bool
    new_residual_N: Tensor | None
    new_u_N: Tensor | None
    start: int = 0
    threshold: float = 0.0


class ErrorFeedback:
    """Residual, momentum and their second buffers of one worker.

    Args:
        n: elements of the flat gradient.
        device: on which entries are selected.
        momentum: DGC momentum m, 0 <= m < 1; 0 for no u.
    """

    def __init__(self, n: int, device: torch.device | str, momentum: float = 0.0) -> None:
        self._momentum = momentum
        self._residual_N = torch.zeros(n, dtype=torch.float32, device=device)
        self._spare_residual_N = torch.zeros_like(self._residual_N)
        self._u_N = torch.zeros_like(self._residual_N) if momentum else None
        self._spare_u_N = torch.zeros_like(self._residual_N) if momentum else None
        self._selections: dict[tuple[int, int], Selection] = {}  # by part, each with its own threshold

    @property
    def residual_N(self) -> Tensor:
        """(n,) float32, committed.  Read only."""
        return self._residual_N

    @property
    def u_N(self) -> Tensor | None:
        """(n,) float32, committed momentum; None without.  Read only."""
        return self._u_N

    def prepare(
        self,
        contribution_N: Tensor,
        k: int,
        kind: ValueKind,
        limit: float = _FLOAT32_MAX,
        *,
        weight: float = 1.0,
        start: int = 0,
        floor: float = 0.0,
    ) -> PreparedState:
        """Select, encode, and compute what remains.  The committed state is not changed.

        A contribution or a sum that is not finite makes this worker skip, so the caller need not check it.

        Args:
            contribution_N: (n,) float32 on the residual's device: n_i / N times the mean gradient; or the
                gradient alone, with `weight`.  Shorter than the residual: a part of it, see `start`.
            k: entries to send, 1 <= k <= n.
            limit: largest magnitude to send (`merge.largest_summable`); beyond it this worker skips.
            weight: n_i / N, if contribution_N is not multiplied by it yet (the product is rounded to float32
                before it is added, as if it were); 0.0: this worker has no samples, and contribution_N is not
                read.
            start: the first element of the part.  Parts may be prepared in any order, by different threads.
            floor: only entries of at least this magnitude are sent.

        Raises:
            LocalProtocolError: k or the part are out of range.
        """
        part = self._part(start, contribution_N.numel())
        acc_N = self._spare_residual_N[part]
        new_u_N = None if self._spare_u_N is None else self._spare_u_N[part]
        terms = AccumulationTerms(
            self._residual_N[part],
            contribution_N,
            acc_N,
            weight,
            None if self._u_N is None else self._u_N[part],
            new_u_N,
            self._momentum,
        )
        selected = self._selection(part).select(terms, k, floor)
        magnitudes_K = np.abs(selected.values_K)
        if not (magnitudes_K <= limit).all():  # the largest magnitudes are among the selected, and NaN
            return self.prepare_skip(kind, start=start, n=acc_N.numel())
        made = encode_with_decoded(selected.indices_K, selected.values_K, n=acc_N.numel(), kind=kind)
        acc_N.index_add_(0, selected.where_K, _like(made.sparse.values, acc_N), alpha=-1)
        if new_u_N is not None:
            new_u_N.index_fill_(0, selected.where_K, 0.0)
        threshold = float(magnitudes_K.min()) if magnitudes_K.size else 0.0
        return PreparedState(made.payload, made.sparse, False, acc_N, new_u_N, start, threshold)

    def prepare_skip(self, kind: ValueKind, *, start: int = 0, n: int | None = None) -> PreparedState:
        """Take part with an empty payload: a gradient is not finite.  `n`: elements of the part at
        `start`."""
        nothing = np.empty(0, np.int64), np.empty(0, np.float32)
        n = self._residual_N.numel() if n is None else n
        made = encode_with_decoded(*nothing, n=n, kind=kind)
        return PreparedState(made.payload, made.sparse, True, None, None, start)

    def commit(self, prepared: PreparedState, truncated: Iterable[TruncatedEntries]) -> None:
        """Make the prepared state the committed one, and add what the merges on this worker truncated.

        Not for a round that was skipped (by any member): residual and u do not change then.
        """
        self.commit_parts([(prepared, truncated)])

    def commit_parts(self, parts: Sequence[tuple[PreparedState, Iterable[TruncatedEntries]]]) -> None:
        """Commit a vector that was prepared in parts, each with its truncated entries (indices from `start`).

        If one of them is a skip, nothing changes.

        Raises:
            LocalProtocolError: they are not the whole vector.
        """
        if any(prepared.new_residual_N is None for prepared, _ in parts):
            return
        self._check_whole([prepared for prepared, _ in parts])
        for prepared, truncated in parts:
            for indices, values in truncated:
                assert prepared.new_residual_N is not None
                where = torch.from_numpy(indices).to(prepared.new_residual_N.device, torch.int64)
                prepared.new_residual_N.index_add_(0, where, _like(values, prepared.new_residual_N))
        self._residual_N, self._spare_residual_N = self._spare_residual_N, self._residual_N
        self._u_N, self._spare_u_N = self._spare_u_N, self._u_N

    def _part(self, start: int, size: int) -> slice:
        n = self._residual_N.numel()
        if not 0 <= start < start + size <= n:
            raise LocalProtocolError(f"part {start} .. {start + size} of a residual of {n} elements")
        return slice(start, start + size)

    def _selection(self, part: slice) -> Selection:
        key = (part.start, part.stop)
        if key not in self._selections:
            self._selections[key] = make_selection(self._residual_N.device)
        return self._selections[key]

    def _check_whole(self, parts: Sequence[PreparedState]) -> None:
        """Check that the parts cover the vector without gaps, all in the second buffer."""
        covered = 0
        for prepared in sorted(parts, key=lambda prepared: prepared.start):
            new_N = prepared.new_residual_N
            assert new_N is not None
            second = self._spare_residual_N.data_ptr() + prepared.start * new_N.element_size()
            if prepared.start != covered or new_N.data_ptr() != second:
                raise LocalProtocolError(
                    f"commit of a part at {prepared.start} that was prepared for another round, or follows "
                    f"element {covered}: parts must be the whole vector, each prepared since the last commit"
                )
            covered += new_N.numel()
        if covered != self._residual_N.numel():
            raise LocalProtocolError(f"commit of {covered} of {self._residual_N.numel()} elements")

    def add_residual(
        self, indices_K: npt.NDArray[np.int64], values_K: npt.NDArray[np.float32], limit: float
    ) -> bool:
        """Add another worker's residual to the committed one, between two rounds: all of it or nothing.

        Returns False, and changes nothing, if a sum exceeds `limit`, because this worker could not send it.
        """
        where = torch.from_numpy(indices_K).to(self._residual_N.device, torch.int64)
        summed_K = self._residual_N[where] + _like(values_K, self._residual_N)
        if not bool((summed_K.abs() <= limit).all()):
            return False
        self._residual_N.index_copy_(0, where, summed_K)
        return True

    def clear(self) -> None:
        """Set everything to zero, as at the beginning."""
        self._residual_N.zero_()
        if self._u_N is not None:
            self._u_N.zero_()

    def state(self) -> dict[str, Tensor]:
        """Copies of the committed state; not part of the optimizer's, because every worker has its own."""
        state = {"residual": self._residual_N.cpu().clone()}
        if self._u_N is not None:
            state["u"] = self._u_N.cpu().clone()
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned.  Raises `ConfigError` if it is of another model or momentum."""
        expected = {"residual": self._residual_N} | ({} if self._u_N is None else {"u": self._u_N})
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if shapes != {name: tuple(tensor.shape) for name, tensor in expected.items()}:
            raise ConfigError(
                f"residual state of shapes {shapes} for a model of {self._residual_N.numel()} elements "
                f"with momentum {self._momentum}",
                remedy="load the residual that was saved with this model and exchange",
            )
        for name, tensor in expected.items():
            tensor.copy_(state[name])


def _like(values: npt.NDArray[np.float32], other: Tensor) -> Tensor:
    return torch.from_numpy(values).to(other.device)
