"""Delay, loss and congestion control of the lab's lines; skipped where the kernel has no means for them."""

from __future__ import annotations

import fcntl
import shutil
import socket
import struct
import sys
import threading
import time
from ctypes import addressof, create_string_buffer
from pathlib import Path

import pytest

from lab import arrivals, delay, ns
from lab.net import Host, Net
from lab.ns import LabError

DATAGRAMS = 2000


@pytest.fixture
def lines(net: Net) -> Net:
    if reason := arrivals.why_not():
        pytest.skip(f"no delay and loss here: {reason}")
    return net


def round_trip_s(dialler: Host, listener: Host, times: int = 12) -> float:
    """Of TCP's handshake; the quickest of several, as these cores have other work too."""
    took_s = []
    with listener.listen() as waiting:
        for _ in range(times):
            began_s = time.perf_counter()
            connection = dialler.dial(listener.address, waiting.getsockname()[1])
            took_s.append(time.perf_counter() - began_s)
            connection.close()
            waiting.accept()[0].close()
    return min(took_s)


def datagram_sockets(sender: Host, receiver: Host) -> tuple[socket.socket, socket.socket]:
    def bound() -> socket.socket:
        handle = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        handle.bind(("", 0))
        handle.settimeout(10)
        return handle

    return sender.inside(bound), receiver.inside(bound)


def holders(net: Net) -> int:
    return sum(process.poll() is None for process in net._processes)


# -- delay ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("milliseconds", [5, 40])
def test_a_round_trip_takes_the_delays_of_both(lines: Net, milliseconds: int) -> None:
    anna, bert = lines.host("anna"), lines.host("bert")
    at_once_s = round_trip_s(anna, bert)
    for host in (anna, bert):
        host.shape(delay_s=milliseconds / 1e3)
    took_s = round_trip_s(anna, bert)
    print(f"{1e3 * at_once_s:.2f} ms without, {1e3 * took_s:.2f} ms with {milliseconds} ms each")
    assert took_s > 2 * milliseconds / 1e3 - 0.001  # of the whole: a busy machine's own share varies
    assert took_s - at_once_s < 3 * milliseconds / 1e3, "each delay once"


def test_a_delay_is_of_one_direction(lines: Net) -> None:
    """anna hears late; what she says goes at once."""
    anna, bert = lines.host("anna"), lines.host("bert")
    anna.shape(delay_s=0.03)
    ears = {"anna": datagram_sockets(bert, anna), "bert": datagram_sockets(anna, bert)}
    took_s = {}
    for name, (sender, receiver) in ears.items():
        with sender, receiver:
            address = (lines.hosts[name].address, receiver.getsockname()[1])
            few_s = []
            for _ in range(5):
                began_s = time.perf_counter()
                sender.sendto(b"?", address)
                receiver.recv(1)
                few_s.append(time.perf_counter() - began_s)
            took_s[name] = min(few_s)
    assert took_s["anna"] >= 0.029
    assert took_s["bert"] < 0.01


def test_packets_stay_in_order_and_none_is_lost(lines: Net) -> None:
    anna, bert = lines.host("anna"), lines.host("bert")
    bert.shape(delay_s=0.02)
    sender, receiver = datagram_sockets(anna, bert)
    with sender, receiver:
        for number in range(DATAGRAMS):
            sender.sendto(number.to_bytes(4, "big"), (bert.address, receiver.getsockname()[1]))
        heard = [int.from_bytes(receiver.recv(4), "big") for _ in range(DATAGRAMS)]
    assert heard == list(range(DATAGRAMS))


def test_a_delay_changes_and_goes(lines: Net) -> None:
    anna, bert = lines.host("anna"), lines.host("bert")
    for delay_s in (0.03, 0.01, 0.0):
        bert.shape(delay_s=delay_s)
        assert delay_s - 0.001 < round_trip_s(anna, bert) < delay_s + 0.008
    assert holders(lines) == 0


def test_nobody_can_have_a_delay_without_its_holder(lines: Net) -> None:
    """A line whose holder has died is a hole, and not a line without a delay."""
    if not arrivals.netem_why_not():
        pytest.skip("the kernel's own netem holds the packets here")
    anna, bert = lines.host("anna"), lines.host("bert")
    bert.shape(delay_s=0.001)
    with bert.listen() as waiting:
        port = waiting.getsockname()[1]
        anna.dial(bert.address, port).close()
        (holder,) = lines._processes
        holder.kill()
        holder.wait()
        with pytest.raises(OSError):
            anna.dial(bert.address, port, timeout_s=0.3)


def test_a_router_delays_both_ways(lines: Net) -> None:
    hub, home = lines.host("hub"), lines.router("home")
    anna = home.host("anna")
    home.shape(delay_s=0.01)
    assert 0.019 < round_trip_s(anna, hub) < 0.028


def test_a_rate_holds_beside_a_delay(lines: Net) -> None:
    anna, bert = lines.host("anna"), lines.host("bert")
    bert.shape(down="20Mbit", delay_s=0.005)
    nbytes = 1_250_000
    with bert.listen() as waiting:
        outgoing = anna.dial(bert.address, waiting.getsockname()[1])
        incoming, _ = waiting.accept()
    pump = threading.Thread(target=outgoing.sendall, args=(bytes(nbytes),))
    with outgoing, incoming:
        incoming.settimeout(30)
        began_s = time.perf_counter()
        pump.start()
        left = nbytes
        while left:
            left -= len(incoming.recv(1 << 16))
        took_s = time.perf_counter() - began_s
        pump.join()
    assert 0.85 * 0.5 < took_s < 1.6 * 0.5


def longer_than_mtu(host: Host) -> bool:
    """Whether the host may send frames that the kernel has not cut yet (ETHTOOL_GTSO)."""

    def ask() -> bool:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
            value = create_string_buffer(struct.pack("=II", 0x1E, 0), 8)
            fcntl.ioctl(handle, 0x8946, struct.pack("16sP16x", host.interface.encode(), addressof(value)))
        return bool(struct.unpack("=II", value.raw)[1])

    return host.inside(ask)


def test_a_slow_line_that_becomes_fast_gets_its_long_frames_back(net: Net) -> None:
    """Else 1 Gbit/s would cost ten times the CPU after a measurement at 100 Mbit/s."""
    anna = net.host("anna")
    seen = []
    for rate in ("1Gbit", "100Mbit", "1Gbit"):
        anna.shape(up=rate)
        seen.append(longer_than_mtu(anna))
    assert seen == [True, False, True]


# -- loss ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay_s", [0.0, 0.005])
def test_as_many_are_lost_as_was_said(lines: Net, delay_s: float) -> None:
    """2,000 datagrams at 10 %: 200 lost, give or take 13; five times that is never reached by chance."""
    anna, bert = lines.host("anna"), lines.host("bert")
    bert.shape(loss=0.1, delay_s=delay_s)
    sender, receiver = datagram_sockets(anna, bert)
    with sender, receiver:
        port = receiver.getsockname()[1]
        for number in range(DATAGRAMS):
            sender.sendto(number.to_bytes(4, "big"), (bert.address, port))
        for _ in range(30):  # the end; one of them arrives
            sender.sendto(DATAGRAMS.to_bytes(4, "big"), (bert.address, port))
        heard = 0
        while int.from_bytes(receiver.recv(4), "big") < DATAGRAMS:
            heard += 1
    assert 0.9 * DATAGRAMS - 67 < heard < 0.9 * DATAGRAMS + 67


# -- settings that make no sense -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"delay_s": -0.01}, "delay_s is -0.01; it must be from 0 to 1 seconds"),
        ({"delay_s": 20.0}, "delay_s is 20.0; it must be from 0 to 1 seconds"),
        ({"loss": 1.0}, "loss is 1.0; it is a share of the frames"),
        ({"loss": 5.0}, "loss is 5.0; it is a share of the frames"),
        ({"up": "20"}, "is not a rate such as 20Mbit"),
    ],
)
def test_what_makes_no_sense_is_refused(net: Net, settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        net.host("anna").shape(**settings)


def test_the_reason_why_there_is_no_delay(lab: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "netem_why_not", lambda: "no netem")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda name: None)
        assert arrivals.why_not.__wrapped__().startswith("no netem in this kernel, and no iptables-restore")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda name: name)  # it is asked for after the program has begun
        patch.setattr(arrivals, "_PROGRAM", Path("/nonexistent.py"))
        assert "its substitute does not work: nothing delays packets in" in arrivals.why_not.__wrapped__()


def test_a_queue_is_one_process_s(lines: Net, tmp_path: Path) -> None:
    anna = lines.host("anna")
    first = anna.inside(lambda: delay.Queue(7))
    with first.socket:
        second = anna.run([sys.executable, "-I", "-S", delay.__file__, "7", "0.01"], tmp_path)
        assert second.wait(30) == 1
    assert "netfilter queue 7 cannot be bound: " in second.stderr_path.read_text()


# -- congestion control --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reno", "cubic"])
def test_a_lab_has_its_own_congestion_control(lab: None, name: str) -> None:
    here = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    if name not in (ns.CONGESTION / "tcp_available_congestion_control").read_text().split():
        pytest.skip(f"this kernel has no {name}")
    machine_s = here.read_text()
    with Net(congestion=name) as net, net.host("anna").listen() as listener:
        outgoing = net.hosts["anna"].dial("127.0.0.1", listener.getsockname()[1])
        with outgoing:
            used = outgoing.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    assert used.rstrip(b"\0").decode() == name
    assert here.read_text() == machine_s


def test_a_congestion_control_that_is_none_is_refused(lab: None) -> None:
    with (
        pytest.raises(LabError, match="this kernel has no congestion control 'hope'"),
        Net(congestion="hope"),
    ):
        pass
