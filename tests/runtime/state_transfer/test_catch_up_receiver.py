"""The receiver of catch-up applies only updates that the members voted for, whichever source sends them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gridtrain.config import JoinConfig
from gridtrain.core import messages as m
from gridtrain.core.commit.two_phase_commit import extend_history
from gridtrain.core.group import member_events as ev
from gridtrain.errors import RemoteProtocolError, TransportError
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.mailbox.mailbox import Mailbox
from gridtrain.runtime.state_transfer import catch_up_source, update_log
from gridtrain.runtime.state_transfer.blobs import BlobReceiver
from gridtrain.runtime.state_transfer.block_buffer import BLOCK_BYTES
from gridtrain.runtime.state_transfer.catch_up_receiver import (
    CatchUpReceiver,
    ReplayWork,
    StateSnapshotWork,
    progress_line,
)
from gridtrain.runtime.state_transfer.catch_up_session import CatchUpSession
from gridtrain.runtime.state_transfer.catch_up_source import MAX_REQUESTS, CatchUpSource, donated_Bps
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


class RecordingTransport:
    """The part of a transport that a source needs; messages are recorded in `sent`."""

    def __init__(self) -> None:
        self.sent: list[tuple[m.PeerId, m.Message]] = []

    def connected(self, peer: m.PeerId) -> bool:
        return True

    def backlog_bytes(self, peer: m.PeerId) -> int:
        return 0

    def send(self, peer: m.PeerId, message: m.Message) -> None:
        self.sent.append((peer, message))


class Source:
    """A state source with a snapshot of step 4 and the updates up to `latest`."""

    def __init__(self, latest: int = 11) -> None:
        self.catch_up = CatchUpSource(None, lambda call: call())
        self.catch_up.set_receivers(ev.TakeStateSnapshot(4, (A,)))
        self.catch_up._snapshot_sender.store(StateSnapshot.build(*START, b"own", COMMON))
        for update in STEPS:
            if update.step <= latest:
                self.catch_up.record_step(update, N)
        self.transport: Any = RecordingTransport()

    def answers(self, requests: list[tuple[m.PeerId, m.Message]]) -> list[m.Message]:
        answers = [answer for _, request in requests for answer in self.catch_up.handle_request(A, request)]
        answers += [message for _, message in self.catch_up.send_due(self.transport, 0.0)]
        sent, self.transport.sent = self.transport.sent, []
        return answers + [message for _, message in sent]


def catch_up(receiver: CatchUpReceiver, source: Source, peer: m.PeerId = A) -> None:
    """Exchanges messages until there are none; the trainer does its work at once."""
    requests = receiver.source_up(peer)
    for _ in range(50):
        answers = source.answers(requests)
        requests = [
            request for answer in answers for request in receiver.handle_message(peer, answer, 0.0)
        ] + receiver.tick(0.0)
        while receiver.has_work:
            receiver.finish_work(receiver.take_work())


@pytest.mark.parametrize("others", [True, False])
def test_a_source_that_sends_no_updates_is_replaced_if_there_is_another(others: bool) -> None:
    """The membership view names step 11; a sends only its snapshot, b also the updates."""
    session = CatchUpSession(Mailbox(lambda: None, lambda: False), BlobReceiver(), idle_s=5.0)
    session.limits = (1 << 30, N)
    session.execute(ev.BeginCatchUp())
    sources = {A: Source(), B: Source()} if others else {A: Source()}
    requests = [request for peer in sources for request in session.execute(ev.SourceConnected(peer))]
    session.execute(ev.SetCatchUpTarget(11, history_after(11)))
    now_s, event = 0.0, None
    while now_s < 30.0 and event is None and not session.can_load_state:
        pending, requests = requests, []
        for peer, source in sources.items():
            for answer in source.answers([request for request in pending if request[0] == peer]):
                if peer == B or not isinstance(answer, m.UpdateLogEntry):
                    requests += session.handle_message(peer, answer, now_s)
        while (work := session.take_work()) is not None:
            session.finish_work(work)
        now_s += 0.5
        more, event = session.poll(now_s, is_member=True, synced=False)
        requests += more
    assert 5.0 <= now_s < 9.0
    assert isinstance(event, ev.CatchUpFailed) is not others


def test_the_snapshot_is_loaded_and_then_the_voted_updates_are_replayed() -> None:
    receiver, source = CatchUpReceiver(1 << 30, N), Source()
    done: list[Any] = []
    requests = receiver.source_up(A)
    for _ in range(20):
        answers = source.answers(requests)
        requests = [
            request for answer in answers for request in receiver.handle_message(A, answer, 0.0)
        ] + receiver.tick(0.0)
        while receiver.has_work:
            work = receiver.take_work()
            assert not receiver.has_work, "one piece of work at a time"
            done.append(work)
            receiver.finish_work(work)
    snapshot, *replayed = done
    assert (
        isinstance(snapshot, StateSnapshotWork)
        and bytes(snapshot.shared_part) == COMMON
        and bytes(snapshot.private_part) == b"own"
    )
    steps = [step for work in replayed if isinstance(work, ReplayWork) for step in work.steps]
    assert [step.step for step in steps] == [5, 6, 7, 8, 9, 10, 11]
    for got, expected in zip(steps, STEPS, strict=True):
        assert got.digest == expected.digest and got.flags == expected.flags
        if got.update is not None and expected.update is not None:
            assert got.update.values.tobytes() == expected.update.values.tobytes()
    assert receiver.position == (11, history_after(11)) and receiver.is_caught_up
    receiver.set_target(11, history_after(11))
    assert receiver.has_reached_target and not receiver.failure


def test_catch_up_continues_with_another_source_at_the_same_step() -> None:
    receiver = CatchUpReceiver(1 << 30, N)
    catch_up(receiver, Source(latest=8))
    assert receiver.position == (8, history_after(8))
    requests = receiver.source_down(A) + receiver.source_up(B)
    assert requests == [(B, m.UpdatesRequest(8))]
    for answer in Source().answers([(B, m.UpdatesRequest(8))]):
        receiver.handle_message(B, answer, 0.0)
    while receiver.has_work:
        receiver.finish_work(receiver.take_work())
    assert receiver.position == (11, history_after(11))


def test_only_pending_updates_count_as_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is always one more update to replay while the run lasts."""
    receiver, source = CatchUpReceiver(1 << 30, N), Source()
    catch_up(receiver, source)
    payload = update_log.encode_update(STEPS[0], N)
    monkeypatch.setattr(
        "gridtrain.runtime.state_transfer.catch_up_receiver.MAX_PENDING_BYTES", 3 * len(payload)
    )
    receiver.handle_message(A, m.UpdateLogEntry(12, 12, payload), 0.0)
    for step in range(13, 60):
        work = receiver.take_work()
        receiver.handle_message(A, m.UpdateLogEntry(step, step, payload), 0.0)
        receiver.finish_work(work)
        assert receiver.has_work and not receiver.failure
    for step in (60, 61, 62):
        receiver.handle_message(A, m.UpdateLogEntry(step, step, payload), 0.0)
    assert f"{4 * len(payload)} bytes of updates are pending" in receiver.failure


def changed(update: StepUpdate) -> StepUpdate:
    assert update.update is not None
    values = update.update.values.copy()
    values[0] += 1
    return StepUpdate(
        update.step, update.settings, 0, SparseVector(update.update.indices, values), update.other_digests
    )


def test_a_changed_update_is_detected() -> None:
    receiver = CatchUpReceiver(1 << 30, N)
    catch_up(receiver, Source(latest=8))
    entry = m.UpdateLogEntry(9, 9, update_log.encode_update(changed(STEPS[4]), N))
    receiver.handle_message(A, entry, 0.0)
    while receiver.has_work:
        receiver.finish_work(receiver.take_work())
    receiver.set_target(9, history_after(9))
    assert not receiver.has_reached_target and "differ from the updates of the group" in receiver.failure


def test_a_changed_block_is_detected() -> None:
    receiver = CatchUpReceiver(1 << 30, N)
    for answer in Source().answers(receiver.source_up(A)):
        receiver.handle_message(A, answer, 0.0)
    with pytest.raises(RemoteProtocolError, match="block 0 of the snapshot of step 5"):
        receiver.handle_message(A, m.SnapshotBlock(4, 0, bytes(BLOCK_BYTES)), 0.0)


@pytest.mark.parametrize(("request_", "answers"), [(m.UpdatesRequest(4), 7), (m.SnapshotRequest(), 1)])
def test_repeated_requests_are_limited(request_: m.Message, answers: int) -> None:
    source = Source()
    for _ in range(MAX_REQUESTS):
        assert len(source.answers([(A, request_)])) == answers
    (refused,) = source.answers([(A, request_)])[:1]
    assert isinstance(refused, m.SnapshotUnavailable)


def test_a_worker_that_no_longer_catches_up_gets_no_updates() -> None:
    source = Source(latest=8)
    source.answers([(A, m.UpdatesRequest(4))])
    source.catch_up.set_receivers(ev.TakeStateSnapshot(-1, ()))
    source.catch_up.record_step(STEPS[4], N)
    assert source.answers([]) == []


def test_a_connection_that_breaks_while_updates_are_sent_delays_only_these_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error would end the source's I/O loop."""
    source, send = Source(), RecordingTransport.send

    def break_connection(transport: RecordingTransport, peer: m.PeerId, message: m.Message) -> None:
        if peer == A:
            raise TransportError("the connection broke")
        send(transport, peer, message)

    monkeypatch.setattr(RecordingTransport, "send", break_connection)
    source.catch_up.set_receivers(ev.TakeStateSnapshot(4, (A, B)))
    source.catch_up.handle_request(B, m.UpdatesRequest(4))
    assert len(source.answers([(A, m.UpdatesRequest(4))])) == len(STEPS)
    monkeypatch.undo()
    assert len(source.answers([])) == len(STEPS), "they continue when the connection is back"


def test_catch_up_fails_if_the_log_lacks_updates() -> None:
    receiver = CatchUpReceiver(1 << 30, N)
    source = Source(latest=4)
    source.catch_up.record_step(STEPS[3], N)  # step 8, without steps 5 to 7
    catch_up(receiver, source)
    assert receiver.failure == "the updates after step 5 are not available"


def test_a_script_that_cannot_be_replayed_gives_the_reason() -> None:
    receiver, source = CatchUpReceiver(1 << 30, N), Source()
    source.catch_up.disable("its script changes updates")
    catch_up(receiver, source)
    assert receiver.failure == "its script changes updates"


def test_settings_of_many_parameter_groups_are_encoded() -> None:
    """An honest source may have a group for each of 500 parameters."""
    update = replace(STEPS[0], settings=b"x" * 250 * 500)
    assert (
        update_log.decode_update(update.step, update_log.encode_update(update, N), N).settings
        == update.settings
    )


def test_settings_that_fit_into_no_update_are_not_sent() -> None:
    receiver, source = CatchUpReceiver(1 << 30, N), Source()
    source.catch_up.record_step(replace(STEPS[-1], step=12, settings=b"x" * (2 << 20)), N)
    catch_up(receiver, source)
    assert "settings have 2097152 bytes" in receiver.failure


def test_an_update_that_fits_into_no_message_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sending it would end the source's I/O loop."""
    monkeypatch.setattr(catch_up_source, "MAX_UPDATE_BYTES", 10)
    receiver, source = CatchUpReceiver(1 << 30, N), Source()
    catch_up(receiver, source)
    assert "does not fit into a message" in receiver.failure


@pytest.mark.parametrize("update", STEPS, ids=lambda u: f"step {u.step}")
def test_an_update_survives_the_round_trip(update: StepUpdate) -> None:
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
def test_an_invalid_update_is_refused(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        update_log.decode_update(5, payload, N)


def test_the_log_is_bounded_and_has_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_log, "MAX_LOGGED_STEPS", 3)
    log = UpdateLog()
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
    assert small.has_all_after(10) and not small.has_all_after(9), "the latest update always stays"


def test_progress_is_shown_as_text() -> None:
    assert progress_line((0, 0, -1, -1)) == "waiting for a snapshot of the state"
    assert progress_line((5, 10, -1, 7), width=4) == "[##..] 5 of 10 blocks of the state"
    assert progress_line((10, 10, 6, 9)) == "at step 7; the other workers are at step 10"


@pytest.mark.parametrize(
    ("limits", "rate_Mbit"),
    [
        ({}, 25),
        ({"upload_limit": "1Gbit"}, 25),
        ({"upload_limit": "20Mbit"}, 5),  # the exchanges of the members keep the rest
        ({"upload_limit": "20Mbit", "donate_limit": "15Mbit"}, 15),
        ({"upload_limit": "20Mbit", "donate_limit": "25Mbit"}, 25),
        ({"donate_limit": "40Mbit"}, 40),
    ],
)
def test_the_state_takes_a_quarter_of_a_limited_upload_unless_its_limit_is_set(
    limits: dict[str, str], rate_Mbit: int
) -> None:
    assert donated_Bps(JoinConfig("", "", **limits)) == rate_Mbit * 1e6 / 8
