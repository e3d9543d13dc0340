"""All-gather of stage summaries: one hop for few members, a tree for many."""

import pytest
from collective_group import Arrival

from gridtrain.core.collectives.allgather import neighbours as tree_neighbours
from gridtrain.core.collectives.collective import (
    CollectiveComplete,
    CollectiveEffect,
    SendTo,
    StoreFromRank,
)
from gridtrain.core.collectives.direct_allgather import (
    MAX_DIRECT_ALLGATHER_MEMBERS,
    make_allgather,
    neighbours,
)
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.errors import RemoteProtocolError


def hops_after(last: int, world_size: int) -> int:
    """Time from the start of rank `last` until all are complete; a message takes 1."""
    cores = [make_allgather(rank, world_size, rank == last) for rank in range(world_size)]
    early: list[Arrival] = []
    done: dict[int, int] = {}
    in_flight: list[tuple[int, int, Arrival]] = []  # (time, receiver, payload)

    def carry_out(now: int, rank: int, effects: list[CollectiveEffect]) -> None:
        for effect in effects:
            if isinstance(effect, CollectiveComplete):
                assert effect.flags and rank not in done
                done[rank] = now
            if isinstance(effect, SendTo):
                assert effect.to_rank in neighbours(rank, world_size)
                arrived = Arrival(rank, effect.slot, effect.flags, effect.slot.segment)
                in_flight.append((now + 1, effect.to_rank, arrived))

    for now in (0, 100):
        starting = [rank for rank in range(world_size) if (rank == last) is (now == 100)]
        for rank in starting:
            carry_out(now, rank, cores[rank].start())
        for message in early:  # received before the round was open
            carry_out(now, last, cores[last].handle(*message))
        while in_flight:
            when, to, arrived = in_flight.pop(0)
            if to == last and now == 0:
                early.append(arrived)
            else:
                carry_out(when, to, cores[to].handle(*arrived))
    return max(done.values()) - 100 if len(done) == world_size else -1


@pytest.mark.parametrize(("world_size", "hops"), [(2, 1), (3, 1), (4, 1), (8, 1), (9, 3), (16, 4)])
def test_number_of_hops_after_the_last_rank_has_started(world_size: int, hops: int) -> None:
    assert hops_after(0, world_size) == hops


def test_few_ranks_are_fully_connected_and_many_use_the_tree() -> None:
    assert neighbours(1, 4) == {0, 2, 3} == tree_neighbours(1, 4)
    assert len(neighbours(0, MAX_DIRECT_ALLGATHER_MEMBERS)) == MAX_DIRECT_ALLGATHER_MEMBERS - 1
    assert neighbours(5, MAX_DIRECT_ALLGATHER_MEMBERS + 1) == tree_neighbours(
        5, MAX_DIRECT_ALLGATHER_MEMBERS + 1
    )


def test_a_transcript_of_rank_1_of_three() -> None:
    core = make_allgather(1, 3, flags=0)
    slot = PayloadSlot(CollectivePhase.ALL_GATHER, 0, 1)
    assert core.start() == [SendTo(0, slot, 0), SendTo(2, slot, 0)]
    (stored,) = core.handle(2, PayloadSlot(CollectivePhase.ALL_GATHER, 0, 2), 0, "two")
    assert isinstance(stored, StoreFromRank) and (stored.rank, stored.payload) == (2, "two")
    assert core.waiting_for() == {0}
    assert core.handle(0, PayloadSlot(CollectivePhase.ALL_GATHER, 0, 0), 1, "nil")[-1] == CollectiveComplete(
        1
    )
    assert core.complete


def test_no_rank_sends_for_another_one() -> None:
    core = make_allgather(1, 3, flags=0)
    core.start()
    with pytest.raises(RemoteProtocolError, match="rank 2"):
        core.handle(2, PayloadSlot(CollectivePhase.ALL_GATHER, 0, 0), 0, "nil")
