"""Error feedback: the residual (gradient not sent yet), the DGC momentum, and how both change at a commit.

Until `commit`, the committed state is only read, and new values are written to second buffers.

                   contribution                     truncated (by the merges)
                        |                                      |
    residual --(+)------+---> acc --select--> payload          |
       ^                       |                               |
       |                       +--- minus decode(payload) ----(+)---> new residual
       +------------------------------- commit: swap -------------------+
                                        abort: nothing to do

A decay (SparseLoCo, arXiv 2508.15706) drops a share of the new residual at each commit.  It is off by
default, and nothing else drops a part of a residual; `decayed_magnitude` is the total that was dropped.

With the momentum correction and momentum factor masking of DGC (Deep Gradient Compression, Lin et al. 2018,
arXiv 1712.01887, sections 3.2 and 3.3), the residual is the vector v of that paper:

    u = m u + contribution;  v += u;  select from v;  v -= decode(payload);  u = 0 at the payload's indices

In the figure, "contribution" then stands for the new u.  Nothing is lost from v, either.  Only the
selected entries are copied from the device to the host.

A vector can be prepared in parts (the buckets of an exchange that overlaps with the backward pass), each with
its own payload.  Either all parts are committed or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gridtrain.errors import ConfigError, LocalProtocolError
from gridtrain.network.wire.sparse_payload import SparseVector, encode_with_decoded
from gridtrain.network.wire.value_encoding import ValueKind
from gridtrain.sparsify.merge import TruncatedEntries
from gridtrain.sparsify.selection import make_selection
from gridtrain.sparsify.tensor_selection import AccumulationTerms, Selection

_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class PreparedState:
    """The state that becomes the committed state if the round commits.

    It is valid until the next `prepare` of the same part.

    Attributes:
        payload: the payload that this worker sends; its indices are relative to `start`.
        decoded: the entries to which the payload decodes.
        skip: whether the accumulated values cannot be sent; if so, the payload is empty and the committed
            state must not change.
        new_residual_N, new_u_N: the residual and u after a commit, without truncated entries; both are None
            if `skip` is True, and new_u_N is also None without momentum.
        start: the first element of the part; 0 for the whole vector.
    """

    payload: bytes
    decoded: SparseVector
    skip: bool
    new_residual_N: Tensor | None
    new_u_N: Tensor | None
    start: int = 0


class ErrorFeedback:
    """The residual and the momentum vector of one worker, with their second buffers.

    Args:
        n: the number of elements in the flat gradient.
        device: the device on which entries are selected.
        momentum: the DGC momentum m, 0 <= m < 1; if it is 0, there is no momentum vector u.
        chunk: the length of the chunks in which entries are selected; 0 to select among all elements.
        decay: the share of the residual that each commit drops, 0 <= decay < 1.

    Attributes:
        residual_N: the committed residual, (n,) float32.  Read-only.
        u_N: the committed momentum vector, (n,) float32; None without momentum.  Read-only.
        decayed_magnitude: the sum of the magnitudes that commits have dropped.
    """

    def __init__(
        self,
        n: int,
        device: torch.device | str,
        momentum: float = 0.0,
        chunk: int = 0,
        decay: float = 0.0,
    ) -> None:
        self._momentum, self._chunk, self._decay = momentum, chunk, decay
        self.decayed_magnitude = 0.0
        self.residual_N = torch.zeros(n, dtype=torch.float32, device=device)
        self._spare_residual_N = torch.zeros_like(self.residual_N)
        self.u_N = torch.zeros_like(self.residual_N) if momentum else None
        self._spare_u_N = torch.zeros_like(self.residual_N) if momentum else None
        self._selections: dict[tuple[int, int], Selection] = {}  # by part, each with its own threshold

    def prepare(
        self,
        contribution_N: Tensor,
        k: int,
        kind: ValueKind,
        limit: float = _FLOAT32_MAX,
        *,
        weight: float = 1.0,
        start: int = 0,
    ) -> PreparedState:
        """Select and encode the entries to send and compute the new state.

        The committed state stays unchanged until `commit`.  If a contribution or a sum is not finite, this
        worker skips the step, so the caller need not check for such values.

        Args:
            contribution_N: (n,) float32 on the residual's device: the contribution, or the mean gradient if
                `weight` is given.  If it is shorter than the residual, it is the part that begins at `start`.
            k: the number of entries to send, 1 <= k <= n.
            kind: the encoding of the values.
            limit: the largest magnitude to send (`merge.largest_summable`); if a selected magnitude exceeds
                it, this worker skips the step.
            weight: this worker's share of the step's samples if contribution_N has not been multiplied by it
                yet; the product is rounded to float32 before it is added.  If the weight is 0.0, this worker
                has no samples, and contribution_N is not read.
            start: the first element of the part.  Parts may be prepared in arbitrary order and by different
                threads.

        Raises:
            LocalProtocolError: k or the part is out of range.
        """
        part = self._part(start, contribution_N.numel())
        acc_N = self._spare_residual_N[part]
        new_u_N = None if self._spare_u_N is None else self._spare_u_N[part]
        terms = AccumulationTerms(
            self.residual_N[part],
            contribution_N,
            acc_N,
            weight,
            None if self.u_N is None else self.u_N[part],
            new_u_N,
            self._momentum,
        )
        selected = self._selection(part).select(terms, k)
        # NaN and the largest magnitudes are among the selected values.
        if not (np.abs(selected.values_K) <= limit).all():
            return self.prepare_skip(kind, start=start, n=acc_N.numel())
        made = encode_with_decoded(selected.indices_K, selected.values_K, n=acc_N.numel(), kind=kind)
        where_K = selected.where_K
        if made.sparse.indices.size < where_K.numel():  # some entries are not sent
            where_K = torch.from_numpy(made.sparse.indices).to(acc_N.device)
        add_at(acc_N, where_K, _like(made.sparse.values, acc_N), factor=-1)
        if new_u_N is not None:
            new_u_N.index_fill_(0, where_K, 0.0)
        return PreparedState(made.payload, made.sparse, False, acc_N, new_u_N, start)

    def prepare_skip(self, kind: ValueKind, *, start: int = 0, n: int | None = None) -> PreparedState:
        """Prepare to skip the step: return a state that has an empty payload, and that `commit` ignores.

        A worker whose gradient is not finite takes part in the round with this payload.

        Args:
            kind: the encoding of the values.
            start: the first element of the part.
            n: the number of elements in the part; None for the whole vector.
        """
        nothing = np.empty(0, np.int64), np.empty(0, np.float32)
        n = self.residual_N.numel() if n is None else n
        made = encode_with_decoded(*nothing, n=n, kind=kind)
        return PreparedState(made.payload, made.sparse, True, None, None, start)

    def commit(self, prepared: PreparedState, truncated: Iterable[TruncatedEntries]) -> None:
        """Make the prepared state the committed one; add to its residual what this worker's merges truncated.

        Do not call this method if any member has skipped the step, because the residual and u must then stay
        unchanged.
        """
        self.commit_parts([(prepared, truncated)])

    def commit_parts(self, parts: Sequence[tuple[PreparedState, Iterable[TruncatedEntries]]]) -> None:
        """Commit a vector that was prepared in parts, each with its truncated entries.

        The indices of truncated entries are relative to the part's `start`.  If any part is skipped, the
        state stays unchanged.

        Raises:
            LocalProtocolError: the parts do not cover the whole vector.
        """
        if any(prepared.new_residual_N is None for prepared, _ in parts):
            return
        self._check_whole([prepared for prepared, _ in parts])
        for prepared, truncated in parts:
            assert prepared.new_residual_N is not None
            _add_entries(prepared.new_residual_N, truncated)
        if self._decay:
            magnitude = torch.linalg.vector_norm(self._spare_residual_N, 1, dtype=torch.float64)
            self.decayed_magnitude += self._decay * float(magnitude)
            self._spare_residual_N.mul_(1.0 - self._decay)
        self.residual_N, self._spare_residual_N = self._spare_residual_N, self.residual_N
        self.u_N, self._spare_u_N = self._spare_u_N, self.u_N

    def commit_rests(self, parts: Sequence[tuple[Tensor, npt.NDArray[np.float32] | None]]) -> None:
        """Commit the residual after a dense exchange, which has sent the whole residual.

        Values that `add_residual` has added to the residual since it was read are kept.

        Args:
            parts: for each part of the vector, in order, the residual that was read (a tensor on the CPU),
                and this worker's rounding errors (None if nothing was rounded).
        """
        start = 0
        for sent_B, rest_B in parts:
            part = self._part(start, sent_B.numel())
            new_B = self._spare_residual_N[part]
            torch.sub(self.residual_N[part], sent_B.to(new_B.device), out=new_B)
            if rest_B is not None:
                new_B += _like(rest_B, new_B)
            start = part.stop
        self.residual_N, self._spare_residual_N = self._spare_residual_N, self.residual_N

    def _part(self, start: int, size: int) -> slice:
        n = self.residual_N.numel()
        if not 0 <= start < start + size <= n:
            raise LocalProtocolError(
                f"the part {start} .. {start + size} is not valid; it must not be empty and must lie within "
                f"the residual's {n} elements"
            )
        return slice(start, start + size)

    def _selection(self, part: slice) -> Selection:
        key = (part.start, part.stop)
        if key not in self._selections:
            self._selections[key] = make_selection(self.residual_N.device, self._chunk)
        return self._selections[key]

    def _check_whole(self, parts: Sequence[PreparedState]) -> None:
        """Raise `LocalProtocolError` unless the parts are in the second buffer and cover the whole vector."""
        second_N, at, is_right = self._spare_residual_N, 0, True
        for prepared in sorted(parts, key=lambda prepared: prepared.start):
            new_N = prepared.new_residual_N
            assert new_N is not None
            is_right &= prepared.start == at and new_N.data_ptr() == second_N[at:].data_ptr()
            at += new_N.numel()
        if not is_right or at != second_N.numel():
            raise LocalProtocolError(
                f"the parts must cover the vector of {second_N.numel()} elements without gaps, and each part "
                "must have been prepared after the last commit, not for another round"
            )

    def add_truncated(
        self, truncated: Iterable[TruncatedEntries], rest_N: npt.NDArray[np.float32] | None = None
    ) -> None:
        """After a round to which this worker contributed nothing, add to the residual the entries that its
        merges truncated, and its rounding errors.

        The momentum vector does not change.  Call this method between two rounds.
        """
        _add_entries(self.residual_N, truncated)
        if rest_N is not None:
            self.residual_N += _like(rest_N, self.residual_N)

    def add_residual(
        self, indices_K: npt.NDArray[np.int64], values_K: npt.NDArray[np.float32], limit: float
    ) -> bool:
        """Add another worker's residual to the committed residual, between two rounds.

        Return whether it was added.  Nothing is added if any sum exceeds `limit` in magnitude or is not
        finite, because this worker would not be able to send such a value.
        """
        where = torch.from_numpy(indices_K).to(self.residual_N.device, torch.int64)
        summed_K = self.residual_N[where] + _like(values_K, self.residual_N)
        if not bool((summed_K.abs() <= limit).all()):
            return False
        self.residual_N.index_copy_(0, where, summed_K)
        return True

    def clear(self) -> None:
        """Set the residual and the momentum vector to zero, as they are initially."""
        self.residual_N.zero_()
        if self.u_N is not None:
            self.u_N.zero_()

    def state(self) -> dict[str, Tensor]:
        """Return a copy of the committed state in host memory: "residual" and, with momentum, "u".

        Unlike the optimizer's state, this state differs between workers.
        """
        state = {"residual": self.residual_N.cpu().clone()}
        if self.u_N is not None:
            state["u"] = self.u_N.cpu().clone()
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load a state that `state` returned.

        Raises:
            ConfigError: the state is from a model of a different size, or only one of the saved exchange
                and the present one has momentum.
        """
        expected = {"residual": self.residual_N} | ({} if self.u_N is None else {"u": self.u_N})
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if shapes != {name: tuple(tensor.shape) for name, tensor in expected.items()}:
            raise ConfigError(
                f"the residual state has the shapes {shapes}, which do not match a model of "
                f"{self.residual_N.numel()} elements with momentum {self._momentum}",
                remedy="load the residual that was saved with this model and exchange",
            )
        for name, tensor in expected.items():
            tensor.copy_(state[name])


def _add_entries(target_N: Tensor, entries: Iterable[TruncatedEntries]) -> None:
    for indices, values in entries:
        where = torch.from_numpy(indices).to(target_N.device, torch.int64)
        add_at(target_N, where, _like(values, target_N))


def add_at(target_N: Tensor, where_K: Tensor, values_K: Tensor, *, factor: int = 1) -> None:
    """Add `factor` (1 or -1) times `values_K` to the elements of target_N at the distinct indices `where_K`;
    the result has the same bits on all devices."""
    # `index_add_` replaces subnormal numbers by zeros on a CUDA device.
    target_N.index_copy_(0, where_K, target_N.index_select(0, where_K).add_(values_K, alpha=factor))


def _like(values: npt.NDArray[np.float32], other: Tensor) -> Tensor:
    return torch.from_numpy(values).to(other.device)
