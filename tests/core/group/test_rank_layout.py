"""Stages and replicas of ranks."""

from __future__ import annotations

import pytest

from gridtrain.core.group.rank_layout import RankLayout, group_by_stage
from gridtrain.errors import LocalProtocolError


def test_a_layout_of_three_stages_and_two_replicas() -> None:
    layout = RankLayout.for_world_size(stages=3, world_size=6)
    assert [(layout.stage_of(rank), layout.replica_of(rank)) for rank in range(6)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
    assert [layout.rank_of(stage, replica) for stage in range(3) for replica in range(2)] == list(range(6))
    assert [layout.stage_ranks(stage) for stage in range(3)] == [(0, 1), (2, 3), (4, 5)]
    assert [layout.pipeline_ranks(replica) for replica in range(2)] == [(0, 2, 4), (1, 3, 5)]
    assert [layout.previous_stage_rank(rank) for rank in range(6)] == [None, None, 0, 1, 2, 3]
    assert [layout.next_stage_rank(rank) for rank in range(6)] == [2, 3, 4, 5, None, None]
    assert [layout.backup_rank(rank) for rank in range(6)] == [2, 3, 4, 5, 0, 1]
    assert [layout.backed_up_rank(rank) for rank in range(6)] == [4, 5, 0, 1, 2, 3]
    assert group_by_stage("abcdef", 3) == [["a", "b"], ["c", "d"], ["e", "f"]]


def test_an_impossible_layout_is_an_error() -> None:
    for stages, replicas in ((0, 1), (1, 0)):
        with pytest.raises(LocalProtocolError, match="at least 1 x 1"):
            RankLayout(stages, replicas)
    assert RankLayout(1, 1).world_size == 1
    with pytest.raises(LocalProtocolError, match=r"must be a multiple of the number of stages \(3\)"):
        RankLayout.for_world_size(3, 7)
    assert group_by_stage("abcdefg", 3) == [list("abcdefg")]
