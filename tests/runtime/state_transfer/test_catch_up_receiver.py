"""A follower's side of the updates: what it applies is what the members voted for, whoever sends it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from defences import disable_defences

from gridtrain.core import messages as m
from gridtrain.core.commit.two_phase_commit import extend_history
from gridtrain.core.group import member_events as io
from gridtrain.errors import RemoteProtocolError
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.mailbox.mailbox import Mailbox
from gridtrain.runtime.state_transfer import catch_up_source, update_log
from gridtrain.runtime.state_transfer.blobs import BlobReceiver
from gridtrain.runtime.state_transfer.block_buffer import BLOCK_BYTES
from gridtrain.runtime.state_transfer.catch_up_receiver import (
    CatchUpReceiver,
    ReplayWork,
    SnapshotWork,
    progress_line,
)
from gridtrain.runtime.state_transfer.catch_up_session import CatchUpSession
from gridtrain.runtime.state_transfer.catch_up_source import MAX_REQUESTS, CatchUpSource
from gridtrain.runtime.state_transfer.state_snapshot import StateSnapshot
from gridtrain.runtime.state_transfer.update_log import StepUpdate, UpdateLog

N = 1000
A, B = b"a" * 32, b"b" * 32
COMMON = random.Random(3).randbytes(BLOCK_BYTES + 77)
START = (4, b"history of step 4".ljust(32))


def step_update(step: int, *, skip: bool = False) -> StepUpdate:
    dice = np.random.RandomState(step)
    indices = np.sort(dice.choice(N, 10, replace=False)).astype(np.int64)
    update = None if skip else SparseVector(indices, dice.standard_normal(10).astype(np.float32))
    return StepUpdate(step, b'["SGD", [{"lr": 0.1}]]', skip, update, (b"s" * 32,) if step % 2 else ())


STEPS = [step_update(step, skip=step == 7) for step in range(5, 12)]


def history_after(step: int) -> bytes:
    history = START[1]
    for update in STEPS:
        if update.step <= step:
            history = extend_history(history, update.digest)
    return history


class Wire:
    """As much of a transport as a donor needs; what it sent is in `sent`."""

    def __init__(self) -> None:
        self.sent: list[tuple[m.PeerId, m.Message]] = []

    def connected(self, peer: m.PeerId) -> bool:
        return True

    def backlog_bytes(self, peer: m.PeerId) -> int:
        return 0

    def send(self, peer: m.PeerId, message: m.Message) -> None:
        self.sent.append((peer, message))


class Donor:
    """A state source with a snapshot of step 4 and the updates up to `latest`."""

    def __init__(self, latest: int = 11) -> None:
        self.donating = CatchUpSource(None, lambda call: call())
        self.donating.set_receivers(io.TakeSnapshot(4, (A,)))
        self.donating._snapshot_sender.store(StateSnapshot.build(*START, b"own", COMMON))
        for update in STEPS:
            if update.step <= latest:
                self.donating.record_step(update, N)
        self.wire: Any = Wire()

    def answers(self, asks: list[tuple[m.PeerId, m.Message]]) -> list[m.Message]:
        told = [answer for _, ask in asks for answer in self.donating.handle_request(A, ask)]
        told += [message for _, message in self.donating.send_due(self.wire, 0.0)]
        sent, self.wire.sent = self.wire.sent, []
        return told + [message for _, message in sent]


def follow(following: CatchUpReceiver, donor: Donor, peer: m.PeerId = A) -> None:
    """Until nothing is asked or answered any more; the trainer does its work at once."""
    asks = following.source_up(peer)
    for _ in range(50):
        answers = donor.answers(asks)
        asks = [
            ask for answer in answers for ask in following.handle_message(peer, answer, 0.0)
        ] + following.tick(0.0)
        while following.has_work:
            following.finish_work(following.take_work())


@pytest.mark.parametrize("others", [True, False])
def test_a_source_that_sends_no_updates_is_replaced_if_there_is_another(others: bool) -> None:
    """The membership view names step 11; a sends its snapshot and nothing more, b all."""
    session = CatchUpSession(Mailbox(lambda: None, lambda: False), BlobReceiver(), idle_s=5.0)
    session.set_limits(1 << 30, N)
    session.execute(io.BeginCatchUp())
    donors = {A: Donor(), B: Donor()} if others else {A: Donor()}
    asks = [ask for peer in donors for ask in session.execute(io.SourceConnected(peer))]
    session.execute(io.SetCatchUpTarget(11, history_after(11)))
    now_s, status = 0.0, None
    while now_s < 30.0 and (status is None or not (status.is_complete or status.event)):
        pending, asks = asks, []
        for peer, donor in donors.items():
            for answer in donor.answers([ask for ask in pending if ask[0] == peer]):
                if peer == B or not isinstance(answer, m.UpdateLogEntry):
                    asks += session.handle_message(peer, answer, now_s)
        while (work := session.take_work()) is not None:
            session.finish_work(work)
        now_s += 0.5
        status = session.poll(now_s, is_member=True, synced=False)
        assert status is not None
        asks += status.requests
    assert status is not None and 5.0 <= now_s < 9.0
    assert status.is_complete is others and isinstance(status.event, io.CatchUpFailed) is not others


def test_it_loads_the_image_then_replays_what_was_voted_for() -> None:
    following, donor = CatchUpReceiver(1 << 30, N), Donor()
    done: list[Any] = []
    asks = following.source_up(A)
    for _ in range(20):
        answers = donor.answers(asks)
        asks = [
            ask for answer in answers for ask in following.handle_message(A, answer, 0.0)
        ] + following.tick(0.0)
        while following.has_work:
            work = following.take_work()
            assert not following.has_work, "one thing at a time"
            done.append(work)
            following.finish_work(work)
    image, *replayed = done
    assert (
        isinstance(image, SnapshotWork)
        and bytes(image.shared_part) == COMMON
        and bytes(image.private_part) == b"own"
    )
    steps = [step for work in replayed if isinstance(work, ReplayWork) for step in work.steps]
    assert [step.step for step in steps] == [5, 6, 7, 8, 9, 10, 11]
    for got, expected in zip(steps, STEPS, strict=True):
        assert got.digest == expected.digest and got.flags == expected.flags
        if got.update is not None and expected.update is not None:
            assert got.update.values.tobytes() == expected.update.values.tobytes()
    assert following.position == (11, history_after(11)) and following.is_caught_up
    following.set_target(11, history_after(11))
    assert following.has_reached_target and not following.failure


def test_it_goes_on_with_another_donor_where_the_first_one_ended() -> None:
    following = CatchUpReceiver(1 << 30, N)
    follow(following, Donor(latest=8))
    assert following.position == (8, history_after(8))
    asks = following.source_down(A) + following.source_up(B)
    assert asks == [(B, m.UpdatesRequest(8))]
    for answer in Donor().answers([(B, m.UpdatesRequest(8))]):
        following.handle_message(B, answer, 0.0)
    while following.has_work:
        following.finish_work(following.take_work())
    assert following.position == (11, history_after(11))


def test_only_what_waits_counts_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is always one more to replay, for as long as the run lasts."""
    following, donor = CatchUpReceiver(1 << 30, N), Donor()
    follow(following, donor)
    payload = update_log.encode_update(STEPS[0], N)
    monkeypatch.setattr(
        "gridtrain.runtime.state_transfer.catch_up_receiver.MOST_PENDING_BYTES", 3 * len(payload)
    )
    following.handle_message(A, m.UpdateLogEntry(12, 12, payload), 0.0)
    for step in range(13, 60):
        work = following.take_work()
        following.handle_message(A, m.UpdateLogEntry(step, step, payload), 0.0)
        following.finish_work(work)
        assert following.has_work and not following.failure
    for step in (60, 61, 62):
        following.handle_message(A, m.UpdateLogEntry(step, step, payload), 0.0)
    assert f"{4 * len(payload)} bytes of updates are pending" in following.failure


def changed(update: StepUpdate) -> StepUpdate:
    assert update.update is not None
    values = update.update.values.copy()
    values[0] += 1
    return StepUpdate(
        update.step, update.settings, 0, SparseVector(update.update.indices, values), update.other_digests
    )


def replay_a_lie() -> CatchUpReceiver:
    following = CatchUpReceiver(1 << 30, N)
    follow(following, Donor(latest=8))
    lie = m.UpdateLogEntry(9, 9, update_log.encode_update(changed(STEPS[4]), N))
    following.handle_message(A, lie, 0.0)
    while following.has_work:
        following.finish_work(following.take_work())
    following.set_target(9, history_after(9))
    return following


def test_a_donor_that_changes_an_update_is_found_out() -> None:
    following = replay_a_lie()
    assert not following.has_reached_target and "differ from the updates of the group" in following.failure


def test_without_the_votes_it_would_be_believed() -> None:
    with disable_defences("vote-digest"):
        following = replay_a_lie()
        assert following.has_reached_target and not following.failure


def test_a_donor_that_changes_a_block_is_found_out() -> None:
    def attack() -> CatchUpReceiver:
        following = CatchUpReceiver(1 << 30, N)
        donor = Donor()
        asks = following.source_up(A)
        for answer in donor.answers(asks):
            asks = following.handle_message(A, answer, 0.0)
        following.handle_message(A, m.SnapshotBlock(4, 0, bytes(BLOCK_BYTES)), 0.0)
        return following

    with pytest.raises(RemoteProtocolError, match="block 0 of the snapshot of step 4"):
        attack()
    with disable_defences("image-block"):
        assert attack()._snapshot.progress[0] == 1


@pytest.mark.parametrize(("request_", "answers"), [(m.UpdatesRequest(4), 7), (m.SnapshotRequest(), 1)])
def test_nothing_is_sent_again_and_again(request_: m.Message, answers: int) -> None:
    donor = Donor()
    for _ in range(MAX_REQUESTS):
        assert len(donor.answers([(A, request_)])) == answers
    (refused,) = donor.answers([(A, request_)])[:1]
    assert isinstance(refused, m.SnapshotUnavailable)
    with disable_defences("update-asks"):
        assert len(donor.answers([(A, request_)])) == answers


def test_who_is_no_follower_any_more_gets_no_updates() -> None:
    donor = Donor(latest=8)
    donor.answers([(A, m.UpdatesRequest(4))])
    donor.donating.set_receivers(io.TakeSnapshot(-1, ()))
    donor.donating.record_step(STEPS[4], N)
    assert donor.answers([]) == []


def test_what_the_log_does_not_hold_is_not_followed() -> None:
    following = CatchUpReceiver(1 << 30, N)
    donor = Donor(latest=4)
    donor.donating.record_step(STEPS[3], N)  # step 8: steps 5 to 7 are not here
    follow(following, donor)
    assert following.failure == "the updates after step 4 are not available"


def test_a_script_that_cannot_be_replayed_says_so() -> None:
    following, donor = CatchUpReceiver(1 << 30, N), Donor()
    donor.donating.disable("its script changes updates")
    follow(following, donor)
    assert following.failure == "its script changes updates"


def test_settings_of_many_groups_are_followed() -> None:
    """One group for each of 500 parameters is honest, and no fault of the donor."""
    update = replace(STEPS[0], settings=b"x" * 250 * 500)
    assert (
        update_log.decode_update(update.step, update_log.encode_update(update, N), N).settings
        == update.settings
    )


def test_settings_that_fit_into_no_update_are_not_sent() -> None:
    following, donor = CatchUpReceiver(1 << 30, N), Donor()
    donor.donating.record_step(replace(STEPS[-1], step=12, settings=b"x" * (2 << 20)), N)
    follow(following, donor)
    assert "settings have 2097152 bytes" in following.failure


def test_an_update_that_fits_into_no_message_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the donor's loop, and with it the donor."""
    monkeypatch.setattr(catch_up_source, "MOST_UPDATE_BYTES", 10)
    following, donor = CatchUpReceiver(1 << 30, N), Donor()
    follow(following, donor)
    assert "does not fit into a message" in following.failure


@pytest.mark.parametrize("update", STEPS, ids=lambda u: f"step {u.step}")
def test_an_update_is_the_same_after_its_way(update: StepUpdate) -> None:
    got = update_log.decode_update(update.step, update_log.encode_update(update, N), N)
    assert got.digest == update.digest and update_log.encode_update(got, N) == update_log.encode_update(
        update, N
    )


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"12345",
        b"\xff\xff\xff\xff\0\0",
        b"\0\0\0\0\2\0",
        b"\0\0\0\0\0\5",
        b"\0\0\0\0\1\0rest",
        b"\0\0\0\0\0\0",
    ],
)
def test_what_is_no_update_is_refused(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        update_log.decode_update(5, payload, N)


def test_the_log_is_bounded_and_has_no_gap() -> None:
    log = UpdateLog(max_count=3)
    for update in STEPS:
        log.add(update)
    assert [log.get(step) is not None for step in range(5, 13)] == [False] * 4 + [True] * 3 + [False]
    assert (
        log.has_all_after(8)
        and log.has_all_after(11)
        and not log.has_all_after(7)
        and not log.has_all_after(12)
    )
    log.add(step_update(20))
    assert log.latest_step == 20 and not log.has_all_after(11)
    small = UpdateLog(max_bytes=1)
    for update in STEPS:
        small.add(update)
    assert small.has_all_after(10) and not small.has_all_after(9), "the latest is always kept"


def test_progress_in_words() -> None:
    assert progress_line((0, 0, -1, -1)) == "waiting for a snapshot of the state"
    assert progress_line((5, 10, -1, 7), width=4) == "[##..] 5 of 10 blocks of the state"
    assert progress_line((10, 10, 6, 9)) == "at step 6; the other workers are at step 9"
