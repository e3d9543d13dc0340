"""What a heartbeat reports as progress and as exchanged bytes."""

from __future__ import annotations

from gridtrain.core.group.member_events import HeartbeatDue
from gridtrain.core.messages import IS_WAITING, MISSED_STEPS, STATE_BYTES
from gridtrain.network.transport.interface import RELAYED_PIECE, TrafficCounters
from gridtrain.runtime.heartbeat import HeartbeatSource
from gridtrain.runtime.mailbox.mailbox import Mailbox
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot


def test_relayed_payloads_and_state_count_but_neither_control_nor_what_is_forwarded_for_others() -> None:
    source, traffic = HeartbeatSource(Mailbox(lambda: None)), TrafficCounters()
    traffic.count_received("RelayRequest", 500)
    traffic.count_sent("RelayedMessage", 500)
    traffic.relayed_received_bytes["RoundProgress"] += 40
    beat = source.make_heartbeat(traffic, 0)
    assert beat.progress == 0
    assert dict(beat.metrics) == {"exchanged_bytes": 0.0, "received_bytes": 500.0, "sent_bytes": 500.0}

    progress = []
    for counter, kind in (
        (traffic.relayed_sent_bytes, "Data"),
        (traffic.relayed_received_bytes, RELAYED_PIECE),
        (traffic.relayed_received_bytes, "Data"),
        (traffic.relayed_received_bytes, "SnapshotBlock"),
        (traffic.relayed_received_bytes, "Vote"),
    ):
        counter[kind] += 30
        beat = source.make_heartbeat(traffic, 0)
        progress.append(beat.progress)
    assert progress == [1, 2, 3, 4, 4]
    assert (dict(beat.metrics)["exchanged_bytes"], dict(beat.metrics)[STATE_BYTES]) == (30.0, 30.0)


def test_a_total_grows_by_what_is_added_and_is_no_progress() -> None:
    source = HeartbeatSource(Mailbox(lambda: None))
    source.increase_figure("lost_mass", 0.0)
    source.count_missed_step()
    assert source.figures == {MISSED_STEPS: 1.0}
    for amount in (2.5, 0.5):
        source.increase_figure("lost_mass", amount)
    beat = source.make_heartbeat(TrafficCounters(), 0)
    assert dict(beat.metrics)["lost_mass"] == 3.0 and beat.progress == 0


def test_the_coordinator_is_told_while_the_trainer_waits() -> None:
    mailbox = Mailbox(lambda: None)
    source = HeartbeatSource(mailbox)

    def is_ready(snapshot: WorkerSnapshot) -> bool:
        waiting.append(source.make_heartbeat(TrafficCounters(), 0))
        return True

    waiting: list[HeartbeatDue] = []
    mailbox.wait(is_ready)
    assert dict(waiting[0].metrics)[IS_WAITING] == 1.0
    assert IS_WAITING not in dict(source.make_heartbeat(TrafficCounters(), 0).metrics)
