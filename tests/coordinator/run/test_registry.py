"""Deadlines, state and status of one registered worker."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain_coordinator.run.liveness import (
    FEWEST_BEATS,
    INTERVALS,
    JOIN_WAIT_S,
    MIN_SILENCE_S,
    Liveness,
    StateTransferProgress,
)
from gridtrain_coordinator.run.registry import (
    AVOIDED_PAIR_RTT_S,
    Registry,
    Worker,
    batch_limits,
    round_trip_times,
    setup_differences,
    shown_facts,
)

A, B, C = (letter * 32 for letter in (b"a", b"b", b"c"))
LIMITS = Deadlines()
SETUP = m.Setup((("model", "tiny"),), m.LedgerSpec(100, 0, epochs=1), 4, None)


def worker(peer: m.PeerId = A, joined_s: float = 0.0) -> Worker:
    return Worker(peer, peer[:1].decode(), "", joined_s, Liveness(joined_s))


def disconnected() -> Liveness:
    broken = Liveness(0.0)
    broken.record_disconnected(1.0)
    return broken


def test_a_state_transfer_extends_the_deadline_while_bytes_arrive() -> None:
    progress = StateTransferProgress()
    assert progress.deadline_s(30.0) == -math.inf
    for now_s, left_bytes, deadline_s in ((5.0, 2.0, 35.0), (9.0, 2.0, 35.0), (10.0, 1.0, 40.0)):
        progress.update(left_bytes, now_s)
        assert progress.deadline_s(30.0) == deadline_s
    progress.excuse_stall(7.0)
    assert progress.deadline_s(30.0) == 47.0
    progress.update(0.0, 11.0)
    assert progress.deadline_s(30.0) == -math.inf


def test_a_transfer_may_restart_twice_and_slow_bytes_are_no_progress() -> None:
    transfer = StateTransferProgress()
    transfer.begin(10.0, 100.0, 0.5)
    assert not transfer.has_begun and transfer.progressed_s == 0.5
    reported = [
        (0, False),  # nothing has arrived
        (90, True),  # the table of chunks
        (85, False),
        (81, False),
        (80, True),  # ten bytes less
        (60, True),
        (95, True),  # the transfer restarts
        (90, False),
        (1, True),
        (0, True),  # complete
        (0, False),
        (1e9, True),  # restarts again; more bytes than the state has
        (95, False),
        (0, True),
        (100, False),  # not a third time
        (0, False),
    ]
    for second, (left, counts) in enumerate(reported, 1):
        transfer.update(left, float(second))
        assert (transfer.progressed_s == second) is counts, (second, left)
        assert transfer.has_begun is (second > 1)


def test_a_worker_counts_as_lost_at_its_deadline_and_not_before() -> None:
    quiet, ended = worker(), worker()
    timeout_s = LIMITS.silence_s
    assert quiet.deadline_s(LIMITS) == timeout_s and not quiet.failure_reason(LIMITS, timeout_s - 0.01)
    assert quiet.failure_reason(LIMITS, timeout_s) == f"sent nothing for {timeout_s:.1f} s"
    quiet.liveness.mark_loading(True)
    assert quiet.deadline_s(LIMITS) == max(LIMITS.ready_s, timeout_s)
    for broken_s, wait_s, why in (
        (-math.inf, LIMITS.regreet_s, "lost its connection and did not reconnect"),
        (1.0 + LIMITS.regreet_s, min(LIMITS.ended_s, LIMITS.regreet_s), "lost its connections to this"),
        (1.01 + LIMITS.regreet_s, LIMITS.regreet_s, "lost its connection and"),
    ):
        ended = worker()
        ended.liveness.record_disconnected(1.0)
        ended.liveness.record_disconnected(1.5)
        ended.liveness.record_link_broken(broken_s)
        assert ended.deadline_s(LIMITS) == 1.0 + wait_s
        assert not ended.failure_reason(LIMITS, 0.99 + wait_s)
        assert ended.failure_reason(LIMITS, 1.0 + wait_s).startswith(why)
        ended.liveness.record_connected(0.99 + wait_s)
        join_s = 0.99 + wait_s + max(wait_s, JOIN_WAIT_S)
        assert ended.deadline_s(LIMITS) == join_s, "a Join may arrive"
        ended.excuse_stall(1.0, join_s + 1.0, LIMITS)
        assert ended.deadline_s(LIMITS) >= join_s + 1.0, "the Join may not have been read yet"
        ended.record_join("tcp://a:1")
        assert ended.liveness.link_broken_s == -math.inf and ended.liveness.disconnected_s is None


def heartbeat(one: Worker, number: int, at_s: float) -> None:
    one.liveness.record_message(at_s)
    one.record_heartbeat(m.Heartbeat(number, 0, number, ()), at_s)


def test_a_worker_with_regular_heartbeats_counts_as_lost_sooner() -> None:
    regular, hesitant = worker(), worker()
    for number in range(1, FEWEST_BEATS + 1):
        for one, pause_s in ((regular, 0.0), (hesitant, 0.4 if number == 7 else 0.0)):
            heard_s = one.liveness.last_heard_s
            assert one.deadline_s(LIMITS) == heard_s + LIMITS.silence_s, "too few heartbeats"
            heartbeat(one, number, 0.5 * number + pause_s)
    now_s = regular.liveness.last_heard_s
    assert regular.deadline_s(LIMITS) == now_s + MIN_SILENCE_S
    assert regular.failure_reason(LIMITS, now_s + MIN_SILENCE_S) == "sent nothing for 2.0 s"
    assert hesitant.deadline_s(LIMITS) == pytest.approx(now_s + INTERVALS * 0.9, rel=0.05)
    heartbeat(hesitant, 99, now_s + 3.0)
    assert hesitant.deadline_s(LIMITS) == now_s + 3.0 + LIMITS.silence_s, "at most the general timeout"
    regular.liveness.mark_loading(True)
    assert regular.deadline_s(LIMITS) == now_s + max(LIMITS.ready_s, LIMITS.silence_s)


def test_an_idle_worker_and_one_that_catches_up_have_the_full_timeout() -> None:
    idle, newcomer = worker(), worker()
    newcomer.setup, newcomer.is_admitted = replace(SETUP, can_catch_up=True), True
    for number in range(1, 2 * FEWEST_BEATS):
        idle.record_heartbeat(m.Heartbeat(number, 0, 0, ()), 0.5 * number)
        heartbeat(newcomer, number, 0.5 * number)
    assert newcomer.is_catching_up and idle.deadline_s(LIMITS) == LIMITS.silence_s
    assert newcomer.deadline_s(LIMITS) == newcomer.liveness.last_heard_s + LIMITS.silence_s


@pytest.mark.parametrize("stayed_connected", [True, False])
def test_a_pause_after_which_a_worker_returned_lengthens_its_timeout(stayed_connected: bool) -> None:
    """A broken connection says nothing about the interval of heartbeats."""
    workers = Registry()
    before = workers.register(A, "a", "", 0.0)
    for number in range(1, FEWEST_BEATS + 1):
        heartbeat(before, number, 0.5 * number)
    now_s = before.liveness.last_heard_s
    if not stayed_connected:
        before.liveness.record_disconnected(now_s)
    workers.record_lost(before)
    after = workers.register(A, "a", "", now_s + 3.0)
    for number in range(1, FEWEST_BEATS + 1):
        heartbeat(after, number, now_s + 3.0 + 0.5 * number)
    expected_s = LIMITS.silence_s if stayed_connected else MIN_SILENCE_S
    assert after.deadline_s(LIMITS) == after.liveness.last_heard_s + expected_s


def test_a_stall_of_the_coordinator_does_not_count_as_an_interval() -> None:
    one = worker()
    for number in range(1, FEWEST_BEATS + 1):
        heartbeat(one, number, 0.5 * number)
    one.excuse_stall(3.0, one.liveness.last_heard_s + 3.0, LIMITS)
    heartbeat(one, 99, 0.5 * FEWEST_BEATS + 3.5)
    assert one.deadline_s(LIMITS) == one.liveness.last_heard_s + MIN_SILENCE_S


def test_a_stall_of_the_coordinator_extends_all_deadlines() -> None:
    waiting = worker()
    waiting.liveness.record_disconnected(1.0)
    waiting.begin_probing(2.0)
    assert waiting.deadline_s(LIMITS) == 2.0
    waiting.excuse_stall(30.0, 40.0, LIMITS)
    assert waiting.liveness.last_heard_s == 40.0 - LIMITS.silence_s and waiting.probe_deadline_s == 40.0
    assert waiting.liveness.disconnected_s == 40.0 - LIMITS.regreet_s
    assert waiting.progressed_s == 30.0 == waiting.state_progress.progressed_s


def test_a_worker_is_introduced_then_admitted_and_eligible_once_it_has_caught_up() -> None:
    new = worker()
    assert not new.is_introduced and not new.is_eligible
    new.begin_probing(5.0)
    assert new.is_introduced and not new.is_admitted
    new.record_round_trips({B: 0.1}, {B})
    assert not new.is_admitted, "it has not sent its setup"
    new.record_setup(replace(SETUP, can_catch_up=True))
    new.record_round_trips({B: 0.1}, {B})
    assert new.is_catching_up and not new.is_eligible
    new.mark_caught_up()
    assert new.is_eligible and not new.is_catching_up


@pytest.mark.parametrize(
    ("changed", "rank", "state"),
    [
        ({}, None, "joining"),
        ({"is_admitted": True}, None, "admitted"),
        ({"is_admitted": True, "standby_reason": "too small"}, None, "spare"),
        ({"is_admitted": True, "setup": replace(SETUP, can_catch_up=True)}, None, "following"),
        ({"is_admitted": True}, 0, "active"),
        ({"is_admitted": True, "liveness": disconnected()}, 0, "suspect"),
    ],
)
def test_the_status_shows_the_state_of_a_worker(
    changed: dict[str, object], rank: int | None, state: str
) -> None:
    shown = worker()
    for name, value in changed.items():
        setattr(shown, name, value)
    row = shown.status_row(rank, [m.Member(A, "a", "", 7, False)], 2.5)
    assert row["state"] == state and row["share"] == (0 if rank is None else 7)
    assert row["last_heard_s"] == 2.5 and row["spare"] == changed.get("standby_reason", "")


def test_a_rollback_discards_later_steps_and_checkpoints() -> None:
    member = worker()
    for step, remaining in ((9, 2), (4, 1)):
        member.step = 7
        member.record_checkpoints(
            tuple(m.CheckpointInfo(applied, b"", m.LedgerState()) for applied in (4, 5))
        )
        member.roll_back(step)
        assert member.step == min(7, step + 1) and len(member.checkpoints) == remaining


def test_workers_are_ordered_by_seniority_and_avoided_pairs_count_as_slow() -> None:
    workers = Registry()
    workers.update({peer: worker(peer, at_s) for peer, at_s in ((A, 2.0), (C, 1.0), (B, 1.0))})
    assert workers.sort_by_seniority([A, B, C]) == [B, C, A]
    assert workers.display_name(A) == "a" and workers.display_name(b"x" * 32) == "78787878"
    listed = [*workers.values()]
    assert round_trip_times(listed) == {}
    assert round_trip_times(listed, [(A, B)]) == {(A, C): 0.0, (A, B): AVOIDED_PAIR_RTT_S, (C, B): 0.0}
    workers[A].rtt_s = {B: 0.1, C: 0.2}
    assert round_trip_times(listed, [(A, B)]) == {(A, B): AVOIDED_PAIR_RTT_S, (A, C): 0.2}
    workers[C].setup = SETUP
    assert batch_limits(listed) == [0, SETUP.batch_size, 0]


def test_a_setup_that_differs_is_described() -> None:
    assert setup_differences(SETUP, replace(SETUP, batch_size=9)) == []
    other = replace(SETUP, ledger=m.LedgerSpec(100, 0, steps=7), stages=2, facts=(("optimizer", "sgd"),))
    assert setup_differences(SETUP, other) == [
        "model is missing here and tiny in the run",
        "end of the run is 7 steps over 100 samples with data seed 0 here and 1 epoch over 100 samples with "
        "data seed 0 in the run",
        "stages is 2 here and 1 in the run",
        "optimizer is sgd here and missing in the run",
    ]


def test_shards_of_other_sizes_are_a_difference() -> None:
    one, other = (
        replace(SETUP, ledger=m.LedgerSpec(100, 0, epochs=1, shards=sizes)) for sizes in ((60, 40), (50, 50))
    )
    (difference,) = setup_differences(one, other)
    assert difference.count("1 epoch over 100 samples in 2 shards (sizes ") == 2


def test_the_shown_stages_are_the_present_ones() -> None:
    facts = (("clip_norm", "None"), ("exchange", "Dense(), 3 stages cut at [0, 2, 3, 4]"), ("stages", "3"))
    assert shown_facts(facts) == {**dict(facts), "clip_norm": "none"}
    assert shown_facts(facts, (0, 2, 4)) == {
        "clip_norm": "none",
        "exchange": "Dense(), 3 stages cut at [0, 2, 3, 4]; now 2 stages cut at [0, 2, 4]",
        "stages": "2 (3 at the beginning)",
    }
