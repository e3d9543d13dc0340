"""The delay of the lab's links; skipped where the kernel does not support one."""

from __future__ import annotations

import fcntl
import shutil
import socket
import struct
import sys
import time
from ctypes import addressof, create_string_buffer
from pathlib import Path

import pytest
from lab_transfer import send

from gridtrain.errors import ConfigError
from lab import delay, link
from lab.net import Host, Net

DATAGRAMS = 2000


@pytest.fixture
def shaped_net(net: Net) -> Net:
    """A network whose links can have a delay."""
    if reason := link.why_not():
        pytest.skip(f"a delay is not available: {reason}")
    return net


def round_trip_s(dialler: Host, listener: Host, times: int = 12) -> float:
    """Return the shortest of several TCP handshakes, because the cores have other work, too."""
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


def delay_processes(net: Net) -> int:
    return sum(process.poll() is None for process in net._processes)


# -- delay ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("milliseconds", [5, 40])
def test_a_round_trip_takes_the_delays_of_both(shaped_net: Net, milliseconds: int) -> None:
    anna, bert = shaped_net.host("anna"), shaped_net.host("bert")
    at_once_s = round_trip_s(anna, bert)
    for host in (anna, bert):
        host.shape(delay_s=milliseconds / 1e3)
    took_s = round_trip_s(anna, bert)
    print(f"{1e3 * at_once_s:.2f} ms without delays, {1e3 * took_s:.2f} ms with {milliseconds} ms each")
    assert took_s > 2 * milliseconds / 1e3 - 0.001  # not of the difference: a busy machine's share varies
    assert took_s - at_once_s < 3 * milliseconds / 1e3, "each delay applies once"


def test_a_delay_applies_to_one_direction(shaped_net: Net) -> None:
    """Packets to anna are late, those from anna are not."""
    anna, bert = shaped_net.host("anna"), shaped_net.host("bert")
    anna.shape(delay_s=0.03)
    sockets = {anna: datagram_sockets(bert, anna), bert: datagram_sockets(anna, bert)}
    took_s = {}
    for to, (sender, receiver) in sockets.items():
        with sender, receiver:
            address = (to.address, receiver.getsockname()[1])
            samples_s = []
            for _ in range(5):
                began_s = time.perf_counter()
                sender.sendto(b"?", address)
                receiver.recv(1)
                samples_s.append(time.perf_counter() - began_s)
            took_s[to.name] = min(samples_s)
    assert took_s["anna"] >= 0.029
    assert took_s["bert"] < 0.01


def test_packets_stay_in_order_and_none_is_lost(shaped_net: Net) -> None:
    anna, bert = shaped_net.host("anna"), shaped_net.host("bert")
    bert.shape(delay_s=0.02)
    sender, receiver = datagram_sockets(anna, bert)
    with sender, receiver:
        for number in range(DATAGRAMS):
            sender.sendto(number.to_bytes(4, "big"), (bert.address, receiver.getsockname()[1]))
        received = [int.from_bytes(receiver.recv(4), "big") for _ in range(DATAGRAMS)]
    assert received == list(range(DATAGRAMS))


def test_a_delay_can_be_changed_and_removed(shaped_net: Net) -> None:
    anna, bert = shaped_net.host("anna"), shaped_net.host("bert")
    for delay_s in (0.03, 0.01, 0.0):
        bert.shape(delay_s=delay_s)
        assert delay_s - 0.001 < round_trip_s(anna, bert) < delay_s + 0.008
    assert delay_processes(shaped_net) == 0


def test_a_link_whose_delay_process_died_drops_packets(shaped_net: Net) -> None:
    """It must not become a link without a delay."""
    anna, bert = shaped_net.host("anna"), shaped_net.host("bert")
    bert.shape(delay_s=0.001)
    with bert.listen() as waiting:
        port = waiting.getsockname()[1]
        anna.dial(bert.address, port).close()
        (process,) = shaped_net._processes
        process.kill()
        process.wait()
        with pytest.raises(OSError):
            anna.dial(bert.address, port, timeout_s=0.3)


def test_a_router_delays_both_ways(shaped_net: Net) -> None:
    hub, home = shaped_net.host("hub"), shaped_net.router("home")
    anna = home.host("anna")
    home.shape(delay_s=0.01)
    assert 0.019 < round_trip_s(anna, hub) < 0.028


def test_a_rate_holds_beside_a_delay(shaped_net: Net) -> None:
    anna, bert = shaped_net.host("anna"), shaped_net.host("bert")
    bert.shape(down="20Mbit", delay_s=0.005)
    assert 0.85 * 0.5 < send(anna, bert, 1_250_000) < 1.6 * 0.5


def longer_than_mtu(host: Host) -> bool:
    """Return whether the host may send frames longer than its MTU (ETHTOOL_GTSO)."""

    def ask() -> bool:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
            value = create_string_buffer(struct.pack("=II", 0x1E, 0), 8)
            fcntl.ioctl(handle, 0x8946, struct.pack("16sP16x", host.interface.encode(), addressof(value)))
        return bool(struct.unpack("=II", value.raw)[1])

    return host.inside(ask)


def test_a_higher_rate_switches_offloads_on_again(net: Net) -> None:
    """Without, 1 Gbit/s would cost ten times the CPU after a measurement at 100 Mbit/s."""
    anna = net.host("anna")
    seen = []
    for rate in ("1Gbit", "100Mbit", "1Gbit"):
        anna.shape(up=rate)
        seen.append(longer_than_mtu(anna))
    assert seen == [True, False, True]


# -- invalid settings ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"delay_s": -0.01}, "delay_s is -0.01; it must be from 0 to 1 seconds"),
        ({"delay_s": 20.0}, "delay_s is 20.0; it must be from 0 to 1 seconds"),
        ({"up": "20"}, "'20' is not a rate"),
    ],
)
def test_invalid_settings_are_refused(net: Net, settings: dict[str, float], message: str) -> None:
    with pytest.raises((ValueError, ConfigError), match=message):
        net.host("anna").shape(**settings)


def test_missing_requirements_of_a_delay_are_reported(lab: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda name: None)
        assert link.why_not.__wrapped__().startswith("there is no command 'iptables-restore'")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda name: name)  # the lookup happens after the program has started
        patch.setattr(link, "_PROGRAM", Path("/nonexistent.py"))
        assert "cannot delay packets: delay.py did not start in" in link.why_not.__wrapped__()


def test_only_one_process_can_bind_a_queue(shaped_net: Net, tmp_path: Path) -> None:
    anna = shaped_net.host("anna")
    first = anna.inside(lambda: delay.Queue(7))
    with first.socket:
        second = anna.run([sys.executable, "-I", "-S", delay.__file__, "7", "0.01"], tmp_path)
        assert second.wait(30) == 1
    assert "netfilter queue 7 cannot be bound: " in (tmp_path / "anna.err").read_text()
