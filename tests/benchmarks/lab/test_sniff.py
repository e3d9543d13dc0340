"""The sniffer finds data that crosses the bridge, however it was divided, and reports what it missed."""

from __future__ import annotations

import random
import socket
import threading
from pathlib import Path

import pytest
from sniffer import Conversations, Sniffer, Stream, segment_of

from lab.net import Host, Net

WORD = b"correct horse battery staple"


def say(sender: Host, receiver: Host, *writes: bytes) -> None:
    """Send each write as its own segment, and wait until all have arrived."""
    with receiver.listen() as listener:
        outgoing = sender.dial(receiver.address, listener.getsockname()[1])
        incoming, _ = listener.accept()
    with outgoing, incoming:
        outgoing.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        incoming.settimeout(30)
        for data in writes:
            pump = threading.Thread(target=outgoing.sendall, args=(data,))
            pump.start()
            arrived = bytearray()
            while len(arrived) < len(data):
                arrived += incoming.recv(1 << 16)
            pump.join()
            assert arrived == data


def test_a_word_is_found_once_with_its_position(net: Net, tmp_path: Path) -> None:
    anna, bert = net.host("anna"), net.host("bert")
    with Sniffer(net, tmp_path / "all.pcap") as sniffer:
        say(anna, bert, b"x" * 100 + WORD)
    (where,) = sniffer.found(WORD)
    assert where.what.startswith(f"{anna.address}:") and f" > {bert.address}:" in where.what
    assert where.offset == 100 and str(where).endswith(", byte 100")
    assert sniffer.complete
    assert sniffer.found(b"incorrect horse") == []


def test_a_word_that_is_divided_into_segments_is_found(net: Net, tmp_path: Path) -> None:
    anna, bert = net.host("anna"), net.host("bert")
    with Sniffer(net, tmp_path / "all.pcap") as sniffer:
        say(anna, bert, *(WORD[i : i + 1] for i in range(len(WORD))))
    assert [where.offset for where in sniffer.found(WORD)] == [0]
    assert WORD not in (tmp_path / "all.pcap").read_bytes(), "no single frame contains it"


def test_a_word_within_megabytes_is_found(net: Net, tmp_path: Path) -> None:
    """Frames of up to 64 KiB, with and without offloads."""
    anna, bert, cleo = (net.host(name) for name in ("anna", "bert", "cleo"))
    cleo.shape(up="200Mbit")
    noise = random.Random(1).randbytes(3_000_000)
    text = noise[:1_499_990] + WORD + noise[1_499_990:]
    with Sniffer(net, tmp_path / "all.pcap") as sniffer:
        say(anna, bert, text)
        say(cleo, bert, text)
    assert [where.offset for where in sniffer.found(WORD)] == [1_499_990] * 2
    assert [where.offset for where in sniffer.found(text)] == [0, 0]
    assert sniffer.complete and sniffer.frames > 2000


def test_a_word_in_a_datagram_is_found(net: Net, tmp_path: Path) -> None:
    anna, bert = net.host("anna"), net.host("bert")

    def open_udp() -> socket.socket:
        return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    with anna.inside(open_udp) as one, bert.inside(open_udp) as two:
        two.bind((bert.address, 7700))
        with Sniffer(net, tmp_path / "all.pcap") as sniffer:
            one.sendto(WORD, (bert.address, 7700))
            assert two.recv(100) == WORD
    (where,) = sniffer.found(WORD)
    assert where.what.startswith("frame ")


def test_traffic_of_hosts_behind_nat_is_seen_unless_it_stays_at_home(net: Net, tmp_path: Path) -> None:
    hub, home = net.host("hub"), net.router("home")
    anna, bert = home.host("anna"), home.host("bert")
    with Sniffer(net, tmp_path / "all.pcap") as sniffer:
        say(anna, hub, WORD)
        say(anna, bert, WORD[::-1])
    (where,) = sniffer.found(WORD)
    assert where.what.startswith(f"{home.address}:")
    assert sniffer.found(WORD[::-1]) == []


def test_missed_frames_are_reported(net: Net, tmp_path: Path) -> None:
    anna, bert = net.host("anna"), net.host("bert")
    with Sniffer(net, tmp_path / "all.pcap", limit_bytes=5000) as sniffer:
        say(anna, bert, bytes(20_000), WORD)
    assert sniffer.over_limit and not sniffer.complete
    assert (tmp_path / "all.pcap").stat().st_size <= 5000 + 24
    assert sniffer.found(WORD) == []


def test_a_pattern_that_chance_would_find_is_refused(net: Net, tmp_path: Path) -> None:
    with Sniffer(net, tmp_path / "all.pcap") as sniffer:
        pass
    with pytest.raises(ValueError, match="3 bytes; under 4 chance would find it"):
        sniffer.found(b"abc")


# -- reassembling streams, without a network ---------------------------------------------------------


def test_a_stream_is_reassembled_from_any_order_with_repeats_across_the_end_of_32_bits() -> None:
    seed = 3
    rng, text = random.Random(seed), random.Random(seed).randbytes(5000)
    first = 2**32 - 2000
    for trial in range(50):
        parts = []
        for start in range(0, 5000, 100):
            parts.append((start, text[start : start + 100]))
            again = rng.randrange(4900)
            parts.append((again, text[again : again + rng.randrange(1, 100)]))
        rng.shuffle(parts)
        stream = Stream("test", first)
        for offset, payload in parts:
            stream.add((first + offset) % 2**32, payload)
        assert list(stream.pieces()) == [(0, text)], f"seed {seed}, trial {trial}"


def test_a_gap_divides_a_stream() -> None:
    stream = Stream("test", 7)
    stream.add(7, b"abc")
    stream.add(20, b"xyz")
    assert list(stream.pieces()) == [(0, b"abc"), (13, b"xyz")]


def frame(sequence: int, flags: int, payload: bytes) -> bytes:
    """Return Ethernet, IPv4 and TCP headers, the payload and the padding of short frames."""
    tcp = b"\x30\x39\x1e\x14" + sequence.to_bytes(4, "big") + bytes(4) + bytes([0x50, flags]) + bytes(6)
    total = (20 + len(tcp) + len(payload)).to_bytes(2, "big")
    ip = (
        b"\x45\0"
        + total
        + bytes(5)
        + b"\x06\0\0"
        + socket.inet_aton("10.0.0.1")
        + socket.inet_aton("10.0.0.2")
    )
    return bytes(12) + b"\x08\0" + ip + tcp + payload + b"PADDING"


def test_the_segment_of_a_frame_is_decoded() -> None:
    segment = segment_of(frame(5, 0x18, b"hello"))
    assert segment is not None
    assert segment.flow == "10.0.0.1:12345 > 10.0.0.2:7700"
    assert (segment.sequence, segment.begins, segment.payload) == (5, False, b"hello")
    assert segment_of(b"\0" * 60) is None
    assert segment_of(b"") is None


def test_a_second_connection_with_the_same_ports_is_a_second_stream() -> None:
    syn, ack = 0x02, 0x10
    frames = [
        frame(9, syn, b""),
        frame(10, ack, b"correct "),
        frame(9, syn, b""),
    ]  # the last: a retransmission
    frames += [frame(10, ack, b"correct "), frame(70, syn, b""), frame(71, ack, b"horse battery")]
    captured = Conversations.of(frames)
    assert [list(stream.pieces()) for stream in captured.streams] == [
        [(0, b"correct ")],
        [(0, b"horse battery")],
    ]
    assert captured.find(b"correct horse") == []
