"""What the exchanges' options mean, and what is refused with which words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gridtrain.config import Auto, Dense, GTopK, TopK
from gridtrain.errors import ConfigError
from gridtrain.network.wire.value_encoding import VALUE_KINDS
from gridtrain.runtime.buffers.star_buffers import SPARSE_BUFFERS, DenseStarBuffer, make_dense_buffer
from gridtrain.training.exchangers import neighbours_of


@pytest.mark.parametrize(
    ("exchange", "text"),
    [
        (Dense(), "Dense()"),
        (Dense(topology="ring"), "Dense(topology=ring)"),
        (Dense(topology="direct"), "Dense(topology=direct)"),
        (Dense(topology="star"), "Dense(topology=star)"),
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
def test_workers_with_other_options_have_another_text(exchange: Any, text: str) -> None:
    assert exchange.describe() == text


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Dense(topology="butterfly"), 'topology of Dense is "butterfly".*"ring".*"star"'),
        (lambda: GTopK(topology="ring"), 'topology of GTopK is "ring".*"butterfly".*"tree".*"star"'),
        (lambda: GTopK(values="int3"), 'values is "int3".*values="fp16".*values="int8".*values="int2"'),
        (
            lambda: GTopK(values="int2"),
            r'"int2", but GTopK\(topology="butterfly"\).*use values="int4".*"star"',
        ),
        (lambda: GTopK(values="int2", topology="tree"), r'"int2", but GTopK\(topology="tree"\).*use.*TopK'),
        (lambda: Auto(values="int2"), r"two bits are too coarse.*TopK"),
        (lambda: TopK(chunk=199), r"chunk is 199.*selects 1\.99.*chunk=200 or more, or chunk=0"),
        (lambda: TopK(chunk=4096, warmup=((5, 0.0001),)), r"density 0\.0001 selects 0\.4.*chunk=20000"),
        (lambda: TopK(chunk=-1), r"chunk is -1"),
        (lambda: TopK(residual_decay=1.0), r"residual_decay is 1\.0; it must be >= 0 and < 1"),
        (lambda: TopK(residual_decay=float("nan")), r"residual_decay is nan"),
        (lambda: TopK(density=0.0), "density is 0.0"),
        (lambda: GTopK(density=2.0, topology="tree"), "density is 2.0"),
    ],
)
def test_what_there_is_not_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize("values", VALUE_KINDS)
def test_every_kind_of_values_can_be_asked_for(values: str) -> None:
    assert TopK(values=values).values == GTopK(values=values, topology="star").values == values


@pytest.mark.parametrize("topology", SPARSE_BUFFERS)
def test_each_topology_of_gtopk_has_edges_that_both_ends_know(topology: str) -> None:
    edges = neighbours_of(GTopK(topology=topology))
    for world_size in range(1, 20):
        for rank in range(world_size):
            assert all(rank in edges(other, world_size) for other in edges(rank, world_size))


def test_a_dense_star_is_a_workspace_of_its_own() -> None:
    star = make_dense_buffer("star", np.zeros(4, np.float32), 2)
    ring = make_dense_buffer("ring", np.zeros(4, np.float32), 2)
    assert isinstance(star, DenseStarBuffer) and not isinstance(ring, DenseStarBuffer)
