"""The sniffer finds data that crosses the bridge, however it was divided."""

from __future__ import annotations

import random
import socket

from lab_transfer import say
from sniffer import Sniffer, pieces, texts_of

from lab.net import Net

WORD = b"correct horse battery staple"


def test_a_word_that_is_divided_into_segments_is_found(net: Net) -> None:
    anna, bert = net.host("anna"), net.host("bert")
    with Sniffer(net) as sniffer:
        say(anna, bert, *(WORD[i : i + 1] for i in range(len(WORD))))
    assert sniffer.found(WORD) and not sniffer.found(b"incorrect horse")
    assert not any(WORD in frame for frame in sniffer.frames)


def test_a_word_within_megabytes_is_found(net: Net) -> None:
    """Frames of up to 64 KiB, with and without offloads."""
    anna, bert, cleo = (net.host(name) for name in ("anna", "bert", "cleo"))
    cleo.shape(up="200Mbit")
    for sender in (anna, cleo):
        text = random.Random(sender.name).randbytes(3_000_000)
        with Sniffer(net) as sniffer:
            say(sender, bert, text)
        assert sniffer.found(text) and not sniffer.dropped


def test_a_word_in_a_datagram_is_found(net: Net) -> None:
    anna, bert = net.host("anna"), net.host("bert")

    def open_udp() -> socket.socket:
        return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    with anna.inside(open_udp) as one, bert.inside(open_udp) as two:
        two.bind((bert.address, 7700))
        with Sniffer(net) as sniffer:
            one.sendto(WORD, (bert.address, 7700))
            assert two.recv(100) == WORD
    assert sniffer.found(WORD)


def test_traffic_of_hosts_behind_nat_is_seen_unless_it_stays_at_home(net: Net) -> None:
    hub, home = net.host("hub"), net.router("home")
    anna, bert = home.host("anna"), home.host("bert")
    with Sniffer(net) as sniffer:
        say(anna, hub, WORD)
        say(anna, bert, WORD[::-1])
    assert sniffer.found(WORD) and not sniffer.found(WORD[::-1])


# -- assembly, without a network ---------------------------------------------------------------------


def test_a_stream_is_assembled_from_any_order_with_repeats() -> None:
    rng = random.Random(3)
    text = rng.randbytes(5000)
    for trial in range(50):
        parts = []
        for start in range(0, 5000, 100):
            parts.append((start, text[start : start + 100]))
            again = rng.randrange(4900)
            parts.append((again, text[again : again + rng.randrange(1, 100)]))
        rng.shuffle(parts)
        assert list(pieces(parts)) == [text], f"trial {trial}"
    assert list(pieces([(0, b"abc"), (13, b"xyz")])) == [b"abc", b"xyz"]


def frame(sequence: int, flags: int, payload: bytes) -> bytes:
    """Return Ethernet, IPv4 and TCP headers, the payload and the padding of short frames."""
    tcp = bytes(4) + sequence.to_bytes(4, "big") + bytes(4) + bytes([0x50, flags]) + bytes(6) + payload
    ip = b"\x45\0" + (20 + len(tcp)).to_bytes(2, "big") + bytes(5) + b"\x06" + bytes(10)
    return bytes(12) + b"\x08\0" + ip + tcp + b"PADDING"


def test_a_second_connection_with_the_same_ports_is_a_second_stream() -> None:
    syn, ack, last = 0x02, 0x10, 2**32 - 1
    frames = [frame(last - 1, syn, b""), frame(last, ack, b"c"), frame(0, ack, b"orrect ")]
    frames += [frame(last - 1, syn, b"")]  # a retransmission
    frames += [frame(70, syn, b""), frame(71, ack, b"horse battery")]
    assert list(texts_of(frames)) == [b"correct ", b"horse battery"]
