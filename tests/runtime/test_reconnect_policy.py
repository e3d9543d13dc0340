"""When a worker whose training loop stalled connects to the coordinator again."""

from __future__ import annotations

import pytest

from gridtrain.errors import RunPaused
from gridtrain.runtime.reconnect_policy import CONNECTING_S, REJOIN_INTERVAL_S, ReconnectPolicy


def test_a_stalled_worker_rejoins_once_its_loop_waits_for_the_group() -> None:
    policy = ReconnectPolicy("tcp://127.0.0.1:7700", 60.0)
    assert not policy.should_rejoin(0.0, trainer_waiting=True), "it was not removed"
    policy.trainer_stalled()
    assert not policy.should_rejoin(1.0, trainer_waiting=False), "the loop is still stalled"
    assert policy.should_rejoin(2.0, trainer_waiting=True)
    assert not policy.should_rejoin(3.0, trainer_waiting=True), "it has rejoined"


def test_a_worker_that_stalls_again_rejoins_after_an_interval() -> None:
    """The others wait for it each time."""
    policy = ReconnectPolicy("tcp://127.0.0.1:7700", 60.0)
    for rejoined_s in (5.0, 5.0 + REJOIN_INTERVAL_S):
        policy.trainer_stalled()
        assert policy.should_rejoin(rejoined_s, trainer_waiting=True)
    policy.trainer_stalled()
    assert not policy.should_rejoin(rejoined_s + REJOIN_INTERVAL_S - 0.1, trainer_waiting=True)


def test_a_worker_gives_up_only_after_its_loop_has_continued() -> None:
    """It has closed the connection itself, so the run is not paused for lack of a coordinator."""
    policy = ReconnectPolicy("tcp://127.0.0.1:7700", 60.0)
    policy.trainer_stalled()
    for now_s in (0.0, 1000.0):
        policy.handle_pause("1 peer is gone", now_s)
    assert policy.should_rejoin(1000.0, trainer_waiting=True)
    policy.handle_pause("1 peer is gone", 1000.0 + CONNECTING_S)
    with pytest.raises(RunPaused):
        policy.handle_pause("1 peer is gone", 1060.0 + CONNECTING_S)
