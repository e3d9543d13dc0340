"""When a worker whose training loop stalled connects to the coordinator again."""

from __future__ import annotations

import pytest

from gridtrain.errors import CoordinatorUnreachable, RunPaused
from gridtrain.runtime.reconnect_policy import REJOIN_INTERVAL_S, REJOIN_TIMEOUT_S, ReconnectPolicy


@pytest.fixture
def policy() -> ReconnectPolicy:
    return ReconnectPolicy("tcp://127.0.0.1:7700", 60.0)


def test_a_stalled_worker_rejoins_once_its_loop_waits_for_the_group(policy: ReconnectPolicy) -> None:
    assert not policy.should_rejoin(0.0, trainer_waiting=True), "it was not removed"
    policy.trainer_stalled()
    assert not policy.should_rejoin(1.0, trainer_waiting=False), "the loop is still stalled"
    assert policy.should_rejoin(2.0, trainer_waiting=True)
    assert not policy.should_rejoin(3.0, trainer_waiting=True), "it is connecting"


def test_a_worker_that_stalls_again_rejoins_after_a_growing_interval(
    policy: ReconnectPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    """The others wait for it each time."""
    now_s = 5.0
    for interval_s in (REJOIN_INTERVAL_S, 2 * REJOIN_INTERVAL_S):
        policy.trainer_stalled()
        assert policy.should_rejoin(now_s, trainer_waiting=True)
        policy.connected()
        policy.trainer_stalled()
        assert not policy.should_rejoin(now_s + interval_s - 0.1, trainer_waiting=True)
        now_s += interval_s
    assert (
        caplog.messages
        == ["this worker rejoins in 0 s, because the group has repeatedly waited too long for it"] * 2
    )


def test_the_run_is_not_paused_for_a_worker_that_was_left_out(
    policy: ReconnectPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    """It has closed the connection to the coordinator itself."""
    policy.trainer_stalled()
    for now_s in (0.0, 1000.0):
        policy.handle_pause("1 peer is gone", now_s)
        assert "its training loop made no progress in time" in policy.waiting_reason
    assert policy.should_rejoin(1000.0, trainer_waiting=True)
    policy.handle_pause("1 peer is gone", 1001.0)
    assert not caplog.messages
    policy.connected()
    assert policy.waiting_reason == ""
    policy.handle_pause("1 peer is gone", 1002.0)
    assert policy.waiting_reason == "1 peer is gone"
    with pytest.raises(RunPaused):
        policy.handle_pause("1 peer is gone", 1062.0)


def test_a_worker_gives_up_if_the_coordinator_is_gone_when_its_loop_continues(
    policy: ReconnectPolicy,
) -> None:
    policy.trainer_stalled()
    assert policy.should_rejoin(50.0, trainer_waiting=True)
    policy.handle_pause("", 49.0 + REJOIN_TIMEOUT_S)
    with pytest.raises(CoordinatorUnreachable, match="whose training loop made no progress in time"):
        policy.handle_pause("", 50.0 + REJOIN_TIMEOUT_S)
