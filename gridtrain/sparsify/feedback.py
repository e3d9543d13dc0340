"""Error feedback: what this worker has accumulated and not yet sent (DESIGN section 6).

Decides what a step's payload holds and what stays behind.  Never decides whether the step commits: until
`commit`, the committed state is only read, everything new is written into second buffers.

                   contribution                        kept (from the merges)
                        |                                      |
    residual --(+)------+---> acc --select--> payload          |
       ^                       |                               |
       |                       +--- minus decode(payload) ----(+)---> new residual
       +------------------------------- commit: swap -------------------+
                                        abort: nothing to do

With DGC momentum correction (Lin et al. 2018, arXiv 1712.01887, section 3.1) the residual is their v:

    u = m u + contribution;   v += u;   select on v;   v -= decode(mine);   u = 0 where selected here

so the conservation law (promise 2) holds over v, with "contribution" read as the new u.
Only the selected entries ever cross from the device to the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gridtrain.errors import ConfigError
from gridtrain.sparsify.merge import Kept
from gridtrain.sparsify.select import select_topk
from gridtrain.wire.sparse import Sparse, ValueKind, encode_once

_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A round's new state before the vote.  Valid until the next `prepare` of the same object.

    Attributes:
        payload: what this worker brings into the exchange.
        decoded: what that decodes to.
        skip: the accumulated values cannot travel; the payload is empty and nothing may change.
        new_residual_N, new_u_N: state after a commit, without what merges keep (None: skip, no momentum).
    """

    payload: bytes
    decoded: Sparse
    skip: bool
    new_residual_N: Tensor | None
    new_u_N: Tensor | None


class ErrorFeedback:
    """Residual, momentum and their second buffers of one worker.

    Args:
        n: elements of the flat gradient.
        device: where selection happens.
        momentum: DGC momentum m, 0 <= m < 1; 0 keeps no u.
    """

    def __init__(self, n: int, device: torch.device | str, momentum: float = 0.0) -> None:
        self._momentum = momentum
        self._residual_N = torch.zeros(n, dtype=torch.float32, device=device)
        self._spare_residual_N = torch.zeros_like(self._residual_N)
        self._u_N = torch.zeros_like(self._residual_N) if momentum else None
        self._spare_u_N = torch.zeros_like(self._residual_N) if momentum else None

    @property
    def residual_N(self) -> Tensor:
        """(n,) float32, committed.  Read only."""
        return self._residual_N

    @property
    def u_N(self) -> Tensor | None:
        """(n,) float32, committed momentum; None without.  Read only."""
        return self._u_N

    def prepare(
        self, contribution_N: Tensor, k: int, kind: ValueKind, limit: float = _FLOAT32_MAX
    ) -> Prepared:
        """Select, encode, and compute what stays behind.  The committed state is untouched.

        Args:
            contribution_N: (n,) finite float32 on the residual's device: n_i / N times the mean gradient.
            k: entries to send, 1 <= k <= n.
            limit: largest magnitude to send (`merge.largest_summable`); beyond it this worker skips.
        """
        new_u_N = None
        added_N = contribution_N
        if self._u_N is not None and self._spare_u_N is not None:
            new_u_N = torch.mul(self._u_N, self._momentum, out=self._spare_u_N)
            added_N = new_u_N.add_(contribution_N)
        acc_N = torch.add(self._residual_N, added_N, out=self._spare_residual_N)

        n = acc_N.numel()
        selected_K = select_topk(acc_N, k)
        values_K = acc_N[selected_K].cpu().numpy()
        if not (np.abs(values_K) <= limit).all():  # the largest magnitudes are among the selected
            return self.prepare_skip(kind)
        made = encode_once(selected_K.cpu().numpy(), values_K, n=n, kind=kind)
        acc_N.index_add_(0, selected_K, _like(made.sparse.values, acc_N), alpha=-1)
        if new_u_N is not None:
            new_u_N.index_fill_(0, selected_K, 0.0)
        return Prepared(made.payload, made.sparse, False, acc_N, new_u_N)

    def prepare_skip(self, kind: ValueKind) -> Prepared:
        """Take part with an empty payload: a gradient here is not finite."""
        nothing = np.empty(0, np.int64), np.empty(0, np.float32)
        made = encode_once(*nothing, n=self._residual_N.numel(), kind=kind)
        return Prepared(made.payload, made.sparse, True, None, None)

    def commit(self, prepared: Prepared, kept: Iterable[Kept]) -> None:
        """Make the prepared state the committed one and add what the merges on this worker kept.

        A round that was skipped (by anybody) is not committed here: residual and u stay as they are.
        """
        if prepared.new_residual_N is None:
            return
        for indices, values in kept:
            where = torch.from_numpy(indices).to(prepared.new_residual_N.device, torch.int64)
            prepared.new_residual_N.index_add_(0, where, _like(values, prepared.new_residual_N))
        self._residual_N, self._spare_residual_N = prepared.new_residual_N, self._residual_N
        if prepared.new_u_N is not None:
            self._u_N, self._spare_u_N = prepared.new_u_N, self._u_N

    def absorb(
        self, indices_K: npt.NDArray[np.int64], values_K: npt.NDArray[np.float32], limit: float
    ) -> bool:
        """Add another worker's residual to the committed one, between two rounds: all of it or nothing.

        Returns False, and changes nothing, if a sum is beyond `limit`: this worker could not send it.
        """
        where = torch.from_numpy(indices_K).to(self._residual_N.device, torch.int64)
        summed_K = self._residual_N[where] + _like(values_K, self._residual_N)
        if not bool((summed_K.abs() <= limit).all()):
            return False
        self._residual_N.index_copy_(0, where, summed_K)
        return True

    def state(self) -> dict[str, Tensor]:
        """Copies of the committed state, kept apart from the optimizer's: every worker has its own."""
        state = {"residual": self._residual_N.cpu().clone()}
        if self._u_N is not None:
            state["u"] = self._u_N.cpu().clone()
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned.  Raises `ConfigError` if it is of another model or momentum."""
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
