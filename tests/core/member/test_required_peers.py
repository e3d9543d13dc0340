"""Peers to which a member must be connected, by its exchange and its state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gridtrain.core import messages as m
from gridtrain.core.group.member_events import TrainerJoined
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.core.member.required_peers import choose_state_source, required_ranks

PEERS = [bytes([ord("a") + rank]) * 32 for rank in range(6)]
SETUP = m.Setup((), m.LedgerSpec(100, 0, epochs=1), 4, None)


def group(size: int, rank: int, *, stages: int = 1, **changed: dict[int, object]) -> RankAssignment:
    """`changed` maps fields of members to values by rank."""
    members = [m.Member(peer, "", "", 1, False) for peer in PEERS[:size]]
    for name, values in changed.items():
        for at, value in values.items():
            members[at] = replace(members[at], **{name: value})  # type: ignore[arg-type]
    return RankAssignment(PEERS[rank], 1, 1, tuple(members), stages=stages)


def right(rank: int, size: int, bounds: tuple[int, ...] = ()) -> frozenset[int]:
    return frozenset({(rank + 1) % size})


@pytest.mark.parametrize(
    ("joining", "donor", "source"),
    [
        ({}, {}, 0),
        ({0: True}, {}, 1),
        ({2: True}, {2: 1}, 1),
        ({2: True, 3: True}, {2: 0, 3: 1}, 0),
        ({2: True}, {2: 9}, 0),
        ({2: True}, {1: 1}, 0),
        (dict.fromkeys(range(4), True), {}, None),
    ],
)
def test_the_state_source_is_the_named_member_or_the_first_one_with_the_state(
    joining: dict[int, object], donor: dict[int, object], source: int | None
) -> None:
    assert choose_state_source(group(4, 3, joining=joining, donor=donor), is_pipelined=False) == source


def test_in_a_pipeline_the_state_source_is_a_replica_of_the_same_stage() -> None:
    """Stage 0: ranks 0, 1, 2; stage 1: ranks 3, 4, 5."""
    for donor, source in ((-1, 4), (5, 5), (0, 0), (6, 4)):
        assignment = group(6, 5, stages=2, joining={3: True, 5: True}, donor={5: donor})
        assert choose_state_source(assignment, is_pipelined=True) == source
    pieces = {5: ((m.Span(0, 1), 0),)}
    assert choose_state_source(group(6, 5, stages=2, pieces=pieces), is_pipelined=True) is None


def test_root_and_source_need_all_members_and_others_need_neighbours_root_and_source() -> None:
    trainer = TrainerJoined(SETUP, right)
    joining: dict[int, object] = {0: True, 1: True}
    for rank, needed in ((0, {1, 2, 3, 4}), (2, {0, 1, 3, 4}), (1, {0, 2}), (3, {0, 2, 4}), (4, {0, 2})):
        assert required_ranks(group(5, rank, joining=joining), trainer) == needed
    assert required_ranks(group(5, 3), None) == {0}
