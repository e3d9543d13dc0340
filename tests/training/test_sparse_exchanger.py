"""Members that select different numbers of entries have one update, and the rest is in their residuals."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from collective_group import CollectiveGroup

from gridtrain.config import GTopK, TopK
from gridtrain.network.wire.sparse_payload import SparseVector, decode
from gridtrain.network.wire.value_encoding import VALUE_KINDS
from gridtrain.runtime.mailbox.step_plan import StepPlan
from gridtrain.training.exchangers import ExchangePart, SparseExchanger

N, STEPS = 400, 3
EXCHANGES = [
    TopK(density=0.05, values="fp32"),
    TopK(density=0.05, values="int4", chunk=100),
    *(GTopK(density=0.05, values="fp32", topology=name) for name in ("butterfly", "tree", "star")),
    GTopK(density=0.05, momentum=0.5, values="fp32", topology="tree"),
]


def plan_of(step: int, rank: int, world_size: int, share: float) -> StepPlan:
    return StepPlan(step, 0, rank, world_size, 1, world_size, entries_share=share)


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.describe())
def test_all_have_one_update_and_nothing_is_lost(
    exchange: TopK | GTopK, seeds: Callable[[int], Iterable[int]]
) -> None:
    """Integers over a power of two: residuals after + update == residuals before + contributions, exactly."""
    for seed in seeds(12):
        rng = np.random.default_rng(seed)
        size = int(rng.choice([2, 4, 8]))  # weights are powers of two
        shares = rng.choice([1.0, 0.5, 0.25, 0.0625], size).tolist()
        group = [SparseExchanger(exchange, (0, N), torch.device("cpu")) for _ in range(size)]
        for step in range(STEPS):
            gradients = [torch.from_numpy(rng.integers(-64, 65, N).astype(np.float32)) for _ in group]
            before = _masses(group, exchange)
            parts = _exchange(group, gradients, shares, step, seed)
            updates = [one.commit(part) for one, part in zip(group, parts, strict=True)]
            assert all(isinstance(update, SparseVector) for update in updates)
            for update in updates[1:]:
                assert np.array_equal(update.indices, updates[0].indices), f"seed {seed}"
                assert update.values.tobytes() == updates[0].values.tobytes(), f"seed {seed}"
            after = sum(one.feedback.residual_N.numpy().astype(np.float64) for one in group)
            after[updates[0].indices] += updates[0].values
            if exchange.momentum == 0.0:  # otherwise u is added as well
                fresh = sum(gradient.numpy().astype(np.float64) for gradient in gradients) / size
                assert np.array_equal(after, before + fresh), f"seed {seed}, step {step}"


def _masses(group: list[SparseExchanger], exchange: TopK | GTopK) -> np.ndarray:
    return sum(one.feedback.residual_N.numpy().astype(np.float64) for one in group)


def _exchange(
    group: list[SparseExchanger], gradients: list[torch.Tensor], shares: list[float], step: int, seed: int
) -> list[ExchangePart]:
    size = len(group)
    parts = [
        one.prepare_bucket(0, gradients[rank], plan_of(step, rank, size, shares[rank]), usable=True)
        for rank, one in enumerate(group)
    ]
    for part, share in zip(parts, shares, strict=True):
        assert part.prepared is not None
        entries = part.prepared.decoded.indices.size
        assert entries <= group[0]._exchange.k_at(step, N, share) <= group[0]._exchange.k_at(step, N)
    running = CollectiveGroup([part.buffer for part in parts], seed=seed)
    running.run()
    assert running.flags == [0] * size
    return parts


def test_entries_that_a_smaller_share_does_not_send_are_in_the_residual() -> None:
    exchange = GTopK(density=0.05, values="fp32", topology="tree")
    gradient = torch.arange(N, dtype=torch.float32) - 100
    one = SparseExchanger(exchange, (0, N), torch.device("cpu"))
    part = one.prepare_bucket(0, gradient, plan_of(0, 0, 1, 0.25), usable=True)
    assert part.prepared is not None
    sent = decode(part.prepared.payload, n=N, max_entries=5, kind=VALUE_KINDS["fp32"])
    assert sent.indices.tolist() == [395, 396, 397, 398, 399], "the largest 5 of the k = 20 entries"
    CollectiveGroup([part.buffer], seed=0).run()
    one.commit(part)
    residual = one.feedback.residual_N
    assert torch.equal(residual[:395], gradient[:395]) and not residual[395:].any()
    again = one.prepare_bucket(0, torch.zeros(N), plan_of(1, 0, 1, 1.0), usable=True)
    assert again.prepared is not None
    assert again.prepared.decoded.indices.tolist() == list(range(375, 395)), "a whole share sends it next"


def test_a_share_of_k_is_at_least_one_entry_and_one_for_each_chunk() -> None:
    assert [GTopK(density=0.01).k_at(0, 10_000, share) for share in (1.0, 0.5, 1 / 16)] == [100, 50, 6]
    assert GTopK(density=0.01).k_at(0, 200, 1 / 16) == 1
    assert TopK(density=0.01, chunk=1000).k_at(0, 10_500, 1 / 16) == 11, (
        "otherwise a chunk never sends anything"
    )
    assert TopK(density=0.01, chunk=1000).k_at(0, 50, 1 / 16) == 1
    assert GTopK(density=0.01, warmup=((5, 0.5),)).k_at(4, 1000, 0.25) == 125
