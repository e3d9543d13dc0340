"""Options of the exchanges: descriptions, refused values, and residuals."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from collective_group import CollectiveGroup

from gridtrain.config import Auto, Deadlines, Dense, GTopK, LocalSteps, Overlap, TopK
from gridtrain.errors import ConfigError
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.network.wire.value_encoding import VALUE_KINDS
from gridtrain.runtime.buffers.collective_buffers import DenseRingBuffer
from gridtrain.runtime.buffers.rounded_buffers import make_dense_buffer
from gridtrain.runtime.buffers.star_buffers import SPARSE_BUFFERS, DenseStarBuffer
from gridtrain.runtime.mailbox.step_plan import RoundOutcome, StepPlan
from gridtrain.training.exchangers import ExchangePart, join_parts, make_exchanger, neighbours_of
from gridtrain.training.worker_residual import WorkerResidual

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("exchange", "text"),
    [
        (Dense(), "Dense()"),
        (Dense(topology="ring"), "Dense(topology=ring)"),
        (Dense(topology="direct"), "Dense(topology=direct)"),
        (Dense(topology="star"), "Dense(topology=star)"),
        (Dense(values="int8"), "Dense(values=int8)"),
        (Dense(topology="ring", values="bf16"), "Dense(topology=ring, values=bf16)"),
        (TopK(values="int8"), "TopK(density=0.01, momentum=0.0, values=int8)"),
        (
            TopK(values="int2", chunk=200, residual_decay=0.05, warmup=((9, 1),)),
            "TopK(density=0.01, momentum=0.0, values=int2, chunk=200, residual_decay=0.05, warmup=((9, 1),))",
        ),
        (GTopK(), "GTopK(density=0.01, momentum=0.0, values=fp16)"),
        (GTopK(topology="tree"), "GTopK(density=0.01, momentum=0.0, values=fp16, topology=tree)"),
        (
            GTopK(values="bf16", warmup=((5, 0.5),), topology="star"),
            "GTopK(density=0.01, momentum=0.0, values=bf16, warmup=((5, 0.5),), topology=star)",
        ),
    ],
)
def test_each_combination_of_options_has_its_own_description(exchange: Any, text: str) -> None:
    assert exchange.describe() == text


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Dense(topology="butterfly"), 'topology of Dense is "butterfly".*"ring".*"star"'),
        (lambda: Dense(values="fp16"), 'values of Dense is "fp16".*values="fp32".*values="int8"'),
        (lambda: GTopK(topology="ring"), 'topology of GTopK is "ring".*"butterfly".*"tree".*"star"'),
        (lambda: GTopK(values="int3"), 'values is "int3".*values="fp16".*values="int8".*values="int2"'),
        (
            lambda: GTopK(values="int2"),
            r'"int2", but GTopK\(topology="auto"\).*use values="int4".*"star"',
        ),
        (lambda: GTopK(values="int2", topology="tree"), r'"int2", but GTopK\(topology="tree"\).*use.*TopK'),
        (lambda: Auto(values="int2"), r"two bits are too coarse.*TopK"),
        (lambda: TopK(chunk=199), r"chunk is 199.*selects 1\.99.*chunk=200 or more, or chunk=0"),
        (lambda: TopK(chunk=4096, warmup=((5, 0.0001),)), r"density 0\.0001 selects 0\.4.*chunk=20000"),
        (lambda: TopK(chunk=-1), r"chunk is -1; it must be an integer >= 0 -> use chunk=0"),
        (lambda: TopK(residual_decay=1.0), r"residual_decay is 1\.0; it must be a number >= 0 and < 1"),
        (lambda: TopK(residual_decay=float("nan")), r"residual_decay is nan"),
        (lambda: TopK(density=0.0), "density is 0.0"),
        (lambda: GTopK(density=2.0, topology="tree"), "density is 2.0"),
        (lambda: GTopK(density="a"), "density is 'a'; it must be a number"),
        (lambda: TopK(density=0.1, momentum=None), "momentum is None; it must be a number"),
        (lambda: TopK(chunk="a"), "chunk is 'a'; it must be an integer"),
        (lambda: TopK(warmup="ab"), "warmup is 'ab'; it must be a tuple of pairs"),
        (lambda: TopK(warmup=(5,)), r"warmup is \(5,\); it must be a tuple of pairs"),
        (lambda: TopK(warmup=(("a", 0.1),)), "warmup step is 'a'; it must be an integer > 0"),
        (lambda: TopK(warmup=((5, "a"),)), "warmup density is 'a'; it must be a number > 0 and <= 1"),
        (lambda: Auto(density="x"), "density is 'x'; it must be a number > 0 and <= 1"),
        (lambda: Auto(computing="x"), "computing is 'x'; it must be a number > 0 and < 1"),
        (lambda: Auto(sparse="no"), "sparse is 'no'; it must be True or False"),
        (lambda: Overlap(buckets="a"), "buckets is 'a'; it must be an integer from 1 to 256"),
        (lambda: Overlap(buckets=1.5), r"buckets is 1\.5; it must be an integer from 1 to 256"),
        (lambda: Overlap(least="a"), "least is 'a'; it must be an integer >= 1"),
        (
            lambda: LocalSteps(4, outer_momentum="a"),
            "outer_momentum is 'a'; it must be a number >= 0 and < 1",
        ),
        (lambda: LocalSteps(4, outer_learning_rate="a"), "outer_learning_rate is 'a'; .* > 0 and finite"),
        (
            lambda: LocalSteps(4, overlap="no"),
            "overlap is 'no'; it must be True, False, or a number of local",
        ),
        (lambda: Deadlines(beat_s="a"), r"beat_s is 'a'; it must be a number >= 0 -> the default is 0\.5"),
    ],
)
def test_invalid_options_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize("values", VALUE_KINDS)
def test_every_kind_of_values_is_accepted(values: str) -> None:
    assert TopK(values=values).values == GTopK(values=values, topology="star").values == values


@pytest.mark.parametrize("topology", SPARSE_BUFFERS)
def test_edges_of_each_topology_are_symmetric(topology: str) -> None:
    edges = neighbours_of(GTopK(topology=topology))
    for world_size in range(1, 20):
        for rank in range(world_size):
            assert all(rank in edges(other, world_size) for other in edges(rank, world_size))


def test_a_dense_star_has_its_own_buffer() -> None:
    star = make_dense_buffer("star", np.zeros(4, np.float32), 2)
    ring = make_dense_buffer("ring", np.zeros(4, np.float32), 2)
    assert isinstance(star, DenseStarBuffer) and not isinstance(ring, DenseStarBuffer)


# -- the residual of a dense exchange ----------------------------------------------------------------

KINDS = ("bf16", "int8")
PARTS = (0, 100, 250)


def unreported(name: str, amount: float) -> None:
    """As the figures that the session reports."""


def plan(rank: int, world_size: int, step: int = 0, attempt: int = 0, samples: int = 1) -> StepPlan:
    return StepPlan(step, attempt, rank, world_size, samples, 8)


def exact_sum(vectors: Sequence[np.ndarray]) -> list[Fraction]:
    return [sum(map(Fraction, map(float, column)), Fraction()) for column in zip(*vectors, strict=True)]


def residuals_of(exchangers: Sequence[Any]) -> list[np.ndarray]:
    return [each.feedback.residual_N.numpy().copy() for each in exchangers]


@pytest.mark.parametrize("values", KINDS)
@pytest.mark.parametrize("topology", ["ring", "direct", "star"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_no_gradient_is_lost_through_steps_retries_and_skips(
    world_size: int, topology: str, values: str, seeds: Any
) -> None:
    """In rational numbers: integers, of which float32 adds any number here without rounding.

    A worker's share of a step's samples may be 0.  Some attempts are aborted, and some steps skipped.
    """
    for seed in seeds(6, drawn=2):
        rng, n = np.random.default_rng(seed), 250
        exchange = Dense(topology=topology, values=values)
        exchangers = [make_exchanger(exchange, (0, n), CPU) for _ in range(world_size)]
        for step in range(4):
            before = residuals_of(exchangers)
            gradients = [torch.from_numpy(rng.integers(-8000, 8000, n).astype(np.float32)) for _ in before]
            samples = [int(rng.integers(0, 3)) for _ in before]
            is_skipped = bool(rng.random() < 0.2)
            if is_skipped:
                gradients[-1], samples[-1] = gradients[-1] * np.nan, 1
            parts: list[ExchangePart] = []
            for attempt in range(int(rng.integers(1, 4))):
                if not parts or not parts[0].buffer.is_resumable:
                    plans = [plan(r, world_size, step, attempt, samples[r]) for r in range(world_size)]
                    parts = [
                        each.prepare_bucket(0, gradient, one, usable=True)
                        for each, gradient, one in zip(exchangers, gradients, plans, strict=True)
                    ]
                skipping = [rank for rank, part in enumerate(parts) if part.skip]
                assert bool(skipping) == is_skipped, f"seed {seed}"
                group = CollectiveGroup([part.buffer for part in parts], seed=seed, skipping=skipping)
                for _ in range(int(rng.integers(0, 30))):
                    if not group.network.idle:
                        group.network.step()
            group.run()
            assert [v.tobytes() for v in residuals_of(exchangers)] == [v.tobytes() for v in before], seed
            if is_skipped:
                continue
            updates = [each.commit(part) for each, part in zip(exchangers, parts, strict=True)]
            assert len({update.tobytes() for update in updates}) == 1, f"seed {seed}"
            weighted = [g.numpy() * np.float32(s / 8) for g, s in zip(gradients, samples, strict=True)]
            after = exact_sum([updates[0], *residuals_of(exchangers)])
            assert after == exact_sum([*weighted, *before]), f"seed {seed}, step {step}"


@pytest.mark.parametrize("values", KINDS)
def test_a_residual_received_between_two_attempts_is_kept(values: str) -> None:
    """A resumed ring sends the contribution of its first attempt."""
    exchangers = [make_exchanger(Dense(topology="ring", values=values), (0, 3), CPU) for _ in range(2)]
    before = [np.array(v, np.float32) for v in ([1.25, 2.5, 3.0], [0.5, 0.5, 0.5])]
    for each, residual_N in zip(exchangers, before, strict=True):
        each.feedback.load({"residual": torch.from_numpy(residual_N)})
    gradients = [torch.tensor([1001.0, 3.0, 7.0]) * 8, torch.tensor([1.0, 3003.0, 70007.0]) * 8]
    parts = [
        each.prepare_bucket(0, gradient, plan(rank, 2), usable=True)
        for rank, (each, gradient) in enumerate(zip(exchangers, gradients, strict=True))
    ]
    CollectiveGroup([part.buffer for part in parts], seed=1)
    assert WorkerResidual(exchangers[0], 3, unreported).add(
        SparseVector(np.array([2]), np.array([64.0], np.float32)), 2
    )
    CollectiveGroup([part.buffer for part in parts], seed=2).run()
    updates = [each.commit(part) for each, part in zip(exchangers, parts, strict=True)]
    inherited = np.array([0, 0, 64], np.float32)
    expected = exact_sum([*(g.numpy() / 8 for g in gradients), *before, inherited])
    assert exact_sum([updates[0], *residuals_of(exchangers)]) == expected


@pytest.mark.parametrize("values", KINDS)
def test_buckets_share_one_residual(values: str) -> None:
    """Two buckets in one round, then one: `Overlap` changes between both from step to step."""
    rng, exchange = np.random.default_rng(3), Dense(topology="ring", values=values)
    wholes = [make_exchanger(exchange, (0, 250), CPU) for _ in range(2)]
    bucketed = [make_exchanger(exchange, PARTS, CPU, each.feedback) for each in wholes]
    for step, exchangers in enumerate([bucketed, wholes, bucketed]):
        before = residuals_of(wholes)
        gradients = [torch.from_numpy(rng.integers(-8000, 8000, 250).astype(np.float32)) for _ in wholes]
        joined = []
        for rank, each in enumerate(exchangers):
            bounds = list(pairwise(each.bounds))
            parts = {  # the last bucket is sent first
                b: each.prepare_bucket(
                    b, gradients[rank][slice(*bounds[b])], plan(rank, 2, step), usable=True
                )
                for b in reversed(range(len(bounds)))
            }
            joined.append(join_parts(each.bounds, [parts[b] for b in range(len(bounds))]))
        for buffers in zip(*([bucket.buffer for bucket in part.buckets] for part in joined), strict=True):
            CollectiveGroup(buffers, seed=step).run()
        updates = [each.commit(part) for each, part in zip(wholes, joined, strict=True)]
        weighted = [gradient.numpy() / 8 for gradient in gradients]
        assert exact_sum([updates[0], *residuals_of(wholes)]) == exact_sum([*weighted, *before]), step
    assert all(residual_N.any() for residual_N in residuals_of(wholes))


@pytest.mark.parametrize("values", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_values_that_cannot_be_sent_skip_the_step(values: str, bad: float) -> None:
    one = make_exchanger(Dense(values=values), (0, 2), CPU)
    part = one.prepare_bucket(0, torch.tensor([bad, 1.0]) * 8, plan(0, 2), usable=True)
    assert part.skip and not one.feedback.residual_N.any()
    assert one.prepare_bucket(0, torch.tensor([1.0, 1.0]), plan(0, 2), usable=False).skip


def test_float32_has_no_residual() -> None:
    one = make_exchanger(Dense(), (0, 2), CPU)
    part = one.prepare_bucket(0, torch.ones(2), plan(0, 2), usable=True)
    assert type(part.buffer) is DenseRingBuffer and part.buffer.rest_N is None
    assert one.open_feedback() is None and not one.keeps_residual


@pytest.mark.parametrize(
    ("settled", "left"),
    [(RoundOutcome(True, False), 0.0), (RoundOutcome(False, False), 2.5), (RoundOutcome(True, True), 2.5)],
    ids=["committed", "aborted", "skipped"],
)
def test_a_residual_is_taken_as_the_last_round_leaves_it(settled: RoundOutcome, left: float) -> None:
    one = make_exchanger(Dense(values="int8"), (0, 4), CPU)
    one.feedback.load({"residual": torch.full((4,), 2.5)})
    residual = WorkerResidual(one, 4, unreported)
    part = one.prepare_bucket(0, torch.ones(4), plan(0, 1), usable=True)
    part.buffer.make_collective(0, 1, 0).start()
    residual.mark_sent(part)
    taken_N = residual.take(lambda: settled)
    assert residual.size == 4 and taken_N is not None and taken_N.tolist() == [left] * 4
