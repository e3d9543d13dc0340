"""Bursts between workers: measured rates in virtual time, and limits for peers."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from gridtrain.core.messages import (
    BURST_MESSAGE_BYTES,
    BURST_MESSAGES,
    Burst,
    BurstReceived,
    BurstRequest,
    PeerId,
)
from gridtrain.errors import TransportError
from gridtrain.runtime.link_probes.bandwidth_probe import (
    BURST_WINDOW_S,
    MAX_BURSTS,
    MAX_TARGETS,
    RATE_LIFETIME_S,
    BandwidthProbe,
)

FULL = bytes(BURST_MESSAGE_BYTES)
ANNA, BERT = b"a" * 32, b"b" * 32


class RecordingTransport:
    """Records sent messages; sending to a peer in `broken` fails."""

    def __init__(self) -> None:
        self.messages: list[tuple[PeerId, Burst]] = []
        self.broken: set[PeerId] = set()

    def send(self, peer: PeerId, message: Any) -> None:
        if peer in self.broken:
            raise TransportError("gone")
        self.messages.append((peer, message))


def answer_to(transport: RecordingTransport) -> BurstReceived:
    """The answer to the last burst."""
    _, last = transport.messages[-1]
    return BurstReceived(last.nonce, last.payload[-8:])


def return_burst(
    probe: BandwidthProbe, peer: PeerId, request: BurstRequest | None, *arrivals_s: float
) -> None:
    """Let the burst that `probe` has requested arrive, all at once or at these times."""
    assert request is not None
    times_s = arrivals_s if len(arrivals_s) > 1 else arrivals_s * BURST_MESSAGES
    for index, arrival_s in enumerate(times_s):
        probe.handle_burst(peer, Burst(request.nonce, index, FULL), arrival_s)


def test_both_ends_measure_the_rate_of_the_link() -> None:
    """A link of 1 MB/s and 10 ms each way: 256 KiB arrive after 10 + 262 ms, the answer 10 ms later.

    The other direction has 4 MB/s, and the sender requests a burst to measure it.
    """
    link_Bps, one_way_s = 1e6, 0.010
    sender, receiver, transport = BandwidthProbe(Random(1)), BandwidthProbe(Random(2)), RecordingTransport()
    sender.begin({BERT: 2 * one_way_s}, until_s=100.0, now_s=0.0)
    assert sender.advance(transport, 0.0)  # type: ignore[arg-type]
    assert [peer for peer, _ in transport.messages] == [BERT] * BURST_MESSAGES
    answers = []
    for index, (_, burst) in enumerate(transport.messages):
        arrival_s = one_way_s + (index + 1) * BURST_MESSAGE_BYTES / link_Bps
        answers.append(receiver.handle_burst(ANNA, burst, arrival_s))
    assert answers[:-1] == [None] * (BURST_MESSAGES - 1)
    answer = answers[-1]
    assert isinstance(answer, BurstReceived)
    assert answer == answer_to(transport)
    assert sender.take_new_rates() is None
    request = sender.handle_acknowledgement(BERT, answer, arrival_s + one_way_s)
    assert sender.advance(transport, 1.0) and sender.take_new_rates() is None  # type: ignore[arg-type]
    assert request is not None
    back = receiver.handle_burst_request(ANNA, request.nonce, 1.0)
    assert [burst.index for burst in back] == [*range(BURST_MESSAGES)]
    return_burst(sender, BERT, request, *(1.0 + i * BURST_MESSAGE_BYTES / 4e6 for i in range(BURST_MESSAGES)))
    assert not sender.advance(transport, 2.0)  # type: ignore[arg-type]
    assert sender.take_new_rates() == ((BERT, pytest.approx(link_Bps), pytest.approx(4e6)),)
    assert receiver.take_new_rates() == ((ANNA, 0.0, pytest.approx(link_Bps)),)
    assert sender.take_new_rates() is None and receiver.take_new_rates() is None


class TcpConnection:
    """Arrivals over a link with TCP's slow start: each acknowledged segment permits two more."""

    SEGMENT_BYTES = 1460

    def __init__(self, link_Bps: float, rtt_s: float) -> None:
        self.link_Bps, self.rtt_s, self.window = link_Bps, rtt_s, 10

    def arrivals_s(self, now_s: float) -> list[float]:
        """When each message of a burst that is sent now has arrived."""
        count = -(-BURST_MESSAGES * BURST_MESSAGE_BYTES // self.SEGMENT_BYTES)
        sent_s: list[float] = []
        for segment in range(count):
            awaited = -(-(segment + 1 - self.window) // 2)  # acknowledgements
            permitted_s = sent_s[awaited - 1] + self.rtt_s if awaited > 0 else now_s
            begins_s = max(permitted_s, sent_s[-1] if sent_s else now_s)
            sent_s.append(begins_s + self.SEGMENT_BYTES / self.link_Bps)
        self.window += count
        ends = ((index + 1) * BURST_MESSAGE_BYTES for index in range(BURST_MESSAGES))
        return [sent_s[-(-end // self.SEGMENT_BYTES) - 1] + self.rtt_s / 2 for end in ends]


@pytest.mark.parametrize(
    ("rate_Mbit", "rtt_s", "bursts"),
    [(50, 0.020, 2), (20, 0.050, 2), (100, 0.010, 2), (5, 0.020, 1), (1, 0.100, 1)],
)
def test_slow_start_does_not_make_a_link_seem_slow(rate_Mbit: float, rtt_s: float, bursts: int) -> None:
    """A slow link, on which a burst takes long, gets only one."""
    tcp = TcpConnection(rate_Mbit * 1e6 / 8, rtt_s)
    sender, receiver, transport = BandwidthProbe(Random(1)), BandwidthProbe(Random(2)), RecordingTransport()
    now_s, received = 0.0, None
    sender.begin({BERT: rtt_s}, until_s=100.0, now_s=now_s)
    while sender.advance(transport, now_s):  # type: ignore[arg-type]
        assert sender.take_new_rates() is None, "only the first report of a rate counts"
        messages = [burst for _, burst in transport.messages[-BURST_MESSAGES:]]
        for burst, arrival_s in zip(messages, tcp.arrivals_s(now_s), strict=True):
            answer = receiver.handle_burst(ANNA, burst, arrival_s)
        received = received or receiver.take_new_rates()
        now_s = arrival_s + rtt_s / 2
        assert isinstance(answer, BurstReceived)
        if (request := sender.handle_acknowledgement(BERT, answer, now_s)) is not None:
            return_burst(sender, BERT, request, now_s)
    assert len(transport.messages) == bursts * BURST_MESSAGES
    ((_, sent_Bps, _),) = sender.take_new_rates() or ()
    ((_, _, received_Bps),) = received or ()
    assert 0.8 * tcp.link_Bps < min(sent_Bps, received_Bps) <= 1.1 * tcp.link_Bps


def test_messages_that_a_busy_receiver_reads_at_once_do_not_make_a_link_seem_fast() -> None:
    """Its loop is blocked from message 7 to message 15 of a burst on a link of 1 MB/s."""
    receiver = BandwidthProbe(Random(1))
    for index in range(BURST_MESSAGES):
        arrived = index + 1 if index < BURST_MESSAGES // 2 - 1 else BURST_MESSAGES
        receiver.handle_burst(ANNA, Burst(5, index, FULL), arrived * BURST_MESSAGE_BYTES / 1e6)
    assert receiver.take_new_rates() == ((ANNA, 0.0, pytest.approx(1e6)),)


def test_a_repeated_burst_that_is_not_answered_leaves_the_first_rate() -> None:
    sender, transport = BandwidthProbe(Random(1)), RecordingTransport()
    sender.begin({BERT: 0.020}, until_s=1.0, now_s=0.0)
    sender.advance(transport, 0.0)  # type: ignore[arg-type]
    sender.handle_acknowledgement(BERT, answer_to(transport), 0.120)
    assert sender.advance(transport, 0.120) and len(transport.messages) == 2 * BURST_MESSAGES  # type: ignore[arg-type]
    assert not sender.advance(transport, 1.0)  # type: ignore[arg-type]
    ((_, sent_Bps, _),) = sender.take_new_rates() or ()
    assert sent_Bps == pytest.approx(BURST_MESSAGES * BURST_MESSAGE_BYTES / 0.100)


def test_a_round_trip_lengthened_by_a_busy_loop_does_not_exaggerate_the_rate() -> None:
    """Pings took 20 ms because loops were busy; the burst of 100 Mbit/s is answered after 19 ms."""
    sender, transport = BandwidthProbe(Random(1)), RecordingTransport()
    sender.begin({BERT: 0.020}, until_s=100.0, now_s=0.0)
    sender.advance(transport, 0.0)  # type: ignore[arg-type]
    sender.handle_acknowledgement(BERT, answer_to(transport), 0.019)
    ((_, reported_Bps, _),) = sender.take_new_rates() or ()
    assert reported_Bps <= 4 * BURST_MESSAGES * BURST_MESSAGE_BYTES / 0.019, "not 26 GB/s"


def test_a_bounded_sample_of_peers_is_probed_one_at_a_time() -> None:
    peers = {bytes([i]) * 32: 0.001 for i in range(40)}
    bursts, transport = BandwidthProbe(Random(3)), RecordingTransport()
    bursts.begin(peers, until_s=100.0, now_s=0.0)
    probed: list[PeerId] = []
    while bursts.advance(transport, 0.0):  # type: ignore[arg-type]
        assert len(transport.messages) == BURST_MESSAGES
        peer, _ = transport.messages[-1]
        probed.append(peer)
        return_burst(bursts, peer, bursts.handle_acknowledgement(peer, answer_to(transport), 0.5), 0.5)
        transport.messages.clear()
    assert len(probed) == len(set(probed)) == MAX_TARGETS and probed == sorted(probed), "in the given order"
    other = BandwidthProbe(Random(4))
    other.begin(peers, until_s=100.0, now_s=0.0)
    other.advance(transport, 0.0)  # type: ignore[arg-type]
    assert transport.messages[0][0] != probed[0], "another worker draws another sample"


def test_time_is_bounded_and_a_broken_peer_is_omitted() -> None:
    bursts, transport = BandwidthProbe(Random(5)), RecordingTransport()
    transport.broken = {ANNA}
    bursts.begin({ANNA: 0.0, BERT: 0.0}, until_s=1.0, now_s=0.0)
    assert bursts.advance(transport, 0.0)  # type: ignore[arg-type]
    assert {peer for peer, _ in transport.messages} == {BERT}
    assert not bursts.advance(transport, 1.0)  # type: ignore[arg-type]
    bursts.begin({BERT: 0.0}, until_s=9.0, now_s=1.0)
    assert bursts.advance(transport, 2.0)  # type: ignore[arg-type]
    bursts.remove_peer(BERT)
    assert not bursts.advance(transport, 2.1)  # type: ignore[arg-type]


def test_what_is_known_of_peers_that_have_left_is_bounded() -> None:
    bursts = BandwidthProbe(Random(5))
    for number in range(2 * MAX_TARGETS * MAX_BURSTS):
        peer = number.to_bytes(32, "big")
        for burst in bursts.handle_burst_request(peer, 1, 0.0):
            bursts.handle_burst(peer, burst, 0.0)
        bursts.remove_peer(peer)
    for known in (bursts._request_times, bursts._burst_times, bursts._measured_received):
        assert 0 < len(known) <= MAX_TARGETS * MAX_BURSTS


def test_a_worker_admitted_again_reports_known_rates_and_measures_new_peers() -> None:
    """A coordinator that restarts knows no rates, and its workers are admitted every few seconds."""
    bursts, transport = BandwidthProbe(Random(5)), RecordingTransport()
    bursts.begin({ANNA: 0.0}, until_s=9.0, now_s=0.0)
    bursts.advance(transport, 0.0)  # type: ignore[arg-type]
    return_burst(bursts, ANNA, bursts.handle_acknowledgement(ANNA, answer_to(transport), 0.5), 0.5)
    (reported,) = bursts.take_new_rates() or ()
    transport.messages.clear()
    bursts.begin({ANNA: 0.0, BERT: 0.0}, until_s=9.0, now_s=3.0)
    assert bursts.advance(transport, 3.0)  # type: ignore[arg-type]
    assert {peer for peer, _ in transport.messages} == {BERT}
    return_burst(bursts, BERT, bursts.handle_acknowledgement(BERT, answer_to(transport), 4.0), 4.0)
    assert [peer for peer, *_ in bursts.take_new_rates() or ()] == [ANNA, BERT]
    bursts.begin({ANNA: 0.0, BERT: 0.0}, until_s=9.0, now_s=5.0)
    assert not bursts.advance(transport, 5.0)  # type: ignore[arg-type]
    assert reported in (bursts.take_new_rates() or ())
    bursts.begin({ANNA: 0.0}, until_s=999.0, now_s=RATE_LIFETIME_S + 1.0)
    assert bursts.advance(transport, RATE_LIFETIME_S + 1.0)  # type: ignore[arg-type]


def test_unexpected_bursts_and_answers_are_ignored() -> None:
    bursts = BandwidthProbe(Random(6))
    bursts.handle_acknowledgement(ANNA, BurstReceived(1, bytes(8)), 0.1)
    assert bursts.handle_burst(ANNA, Burst(7, BURST_MESSAGES - 1, FULL), 0.0) is None  # its start is missing
    bursts.handle_burst(ANNA, Burst(8, 0, FULL), 0.0)
    assert bursts.handle_burst(ANNA, Burst(9, BURST_MESSAGES - 1, FULL), 0.1) is None  # another burst began
    assert bursts.take_new_rates() is None


@pytest.mark.parametrize(
    "indices",
    [
        [0, 15],  # 14 is missing
        [*range(14), 15],
        [1, *range(1, 16)],  # the first is missing
        [*range(8), *range(7, 16)],  # one twice
        [*range(7), 8, 7, *range(9, 16)],
    ],
)
def test_a_burst_with_gaps_is_not_answered(indices: list[int]) -> None:
    bursts = BandwidthProbe(Random(6))
    assert [bursts.handle_burst(ANNA, Burst(5, index, FULL), 0.001) for index in indices] == [None] * len(
        indices
    )
    assert bursts.take_new_rates() is None


def test_an_answer_before_the_last_message_is_ignored() -> None:
    """A peer that has the first message knows the nonce, but not the end of the last message."""
    bursts, transport = BandwidthProbe(Random(7)), RecordingTransport()
    bursts.begin({ANNA: 0.05}, until_s=100.0, now_s=0.0)
    bursts.advance(transport, 0.0)  # type: ignore[arg-type]
    _, first = transport.messages[0]
    bursts.handle_acknowledgement(ANNA, BurstReceived(first.nonce, first.payload[-8:]), 0.05)
    bursts.handle_acknowledgement(BERT, answer_to(transport), 0.05)
    assert bursts.take_new_rates() is None and bursts.advance(transport, 0.06)  # type: ignore[arg-type]
    bursts.handle_acknowledgement(ANNA, answer_to(transport), 0.1)
    assert bursts.take_new_rates() is not None


def test_nonces_cannot_be_predicted() -> None:
    nonces = set()
    for seed in range(20):
        bursts, transport = BandwidthProbe(Random(seed)), RecordingTransport()
        bursts.begin({ANNA: 0.0, BERT: 0.0}, until_s=100.0, now_s=0.0)
        bursts.advance(transport, 0.0)  # type: ignore[arg-type]
        bursts.remove_peer(transport.messages[-1][0])
        bursts.advance(transport, 0.0)  # type: ignore[arg-type]
        nonces |= {burst.nonce for _, burst in transport.messages}
    assert len(nonces) == 40


def test_a_peer_that_does_not_answer_leaves_time_for_the_others() -> None:
    """8 peers and 40 s: the first one, which does not answer, uses 5 s, and all others are measured.

    The rate to the first one is reported as at most 256 KiB in 5 s.
    """
    bursts, transport = BandwidthProbe(Random(9)), RecordingTransport()
    bursts.begin({bytes([i]) * 32: 0.0 for i in range(8)}, until_s=40.0, now_s=0.0)
    bursts.advance(transport, 0.0)  # type: ignore[arg-type]
    unanswered, late = transport.messages[-1][0], answer_to(transport)
    bursts.advance(transport, 4.9)  # type: ignore[arg-type]
    assert {peer for peer, _ in transport.messages} == {unanswered}
    now_s, measured = 5.0, set()
    while bursts.advance(transport, now_s):  # type: ignore[arg-type]
        bursts.handle_acknowledgement(unanswered, late, now_s)  # too late: another burst is in flight
        peer, _ = transport.messages[-1]
        now_s += 0.5
        return_burst(bursts, peer, bursts.handle_acknowledgement(peer, answer_to(transport), now_s), now_s)
        measured.add(peer)
    assert len(measured) == 7 and unanswered not in measured
    sent_Bps = {peer: sent_Bps for peer, sent_Bps, _ in bursts.take_new_rates() or ()}
    assert sent_Bps.keys() == {unanswered, *measured}
    assert sent_Bps[unanswered] == pytest.approx(BURST_MESSAGES * BURST_MESSAGE_BYTES / 5.0)
    assert min(sent_Bps[peer] for peer in measured) > sent_Bps[unanswered]


def test_a_requested_burst_of_a_slow_peer_counts_when_it_arrives() -> None:
    """The peer was admitted first, and uploads 16 kB/s: 8 s of waiting for it would cost the others' time."""
    bursts, transport = BandwidthProbe(Random(9)), RecordingTransport()
    bursts.begin({ANNA: 0.020, BERT: 0.020}, until_s=2.0, now_s=0.0)
    bursts.advance(transport, 0.0)  # type: ignore[arg-type]
    request = bursts.handle_acknowledgement(ANNA, answer_to(transport), 0.5)
    bursts.advance(transport, 1.0)  # type: ignore[arg-type]
    assert transport.messages[-1][0] == BERT, "its share of the time is over"
    return_burst(bursts, BERT, bursts.handle_acknowledgement(BERT, answer_to(transport), 1.5), 1.5)
    assert not bursts.advance(transport, 1.5)  # type: ignore[arg-type]
    assert {peer: received_Bps > 0 for peer, _, received_Bps in bursts.take_new_rates() or ()} == {
        **{ANNA: False, BERT: True}
    }
    return_burst(bursts, ANNA, request, *(1.5 + index * 1.024 for index in range(BURST_MESSAGES)))
    assert bursts.take_new_rates() == ((ANNA, 0.0, pytest.approx(16e3)),)


def test_too_many_bursts_are_a_violation() -> None:
    bursts = BandwidthProbe(Random(7))
    for i in range(MAX_BURSTS * BURST_MESSAGES):
        assert not isinstance(
            bursts.handle_burst(ANNA, Burst(i // BURST_MESSAGES, i % BURST_MESSAGES, FULL), 0.0), str
        )
    assert bursts.handle_burst(ANNA, Burst(9, 0, FULL), 1.0) == "sent more than 1024 Bursts in 60 s"
    assert not isinstance(bursts.handle_burst(BERT, Burst(9, 0, FULL), 1.0), str)
    assert not isinstance(bursts.handle_burst(ANNA, Burst(9, 0, FULL), BURST_WINDOW_S), str)


def test_a_burst_of_another_length_is_a_violation() -> None:
    violation = BandwidthProbe(Random(8)).handle_burst(ANNA, Burst(1, 0, b"short"), 0.0)
    assert violation == "sent a Burst of 5 bytes; it must be 16384 bytes long"
