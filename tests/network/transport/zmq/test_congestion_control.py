"""Which congestion control a connection gets, and when it gets bbr back."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from gridtrain.network.transport.zmq import congestion_control
from gridtrain.network.transport.zmq.congestion_control import LossMonitor
from gridtrain.network.transport.zmq.tcp_options import TcpConnection

AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
has_both = AVAILABLE.exists() and {"bbr", "cubic"} <= set(AVAILABLE.read_text().split())


@pytest.mark.parametrize(
    ("control", "round_trip_s", "asked"),
    [
        ("bbr", 0.0003, "cubic"),
        ("bbr", 0.0115, "cubic"),  # a line of 5 ms: bbr takes it for slower than it is
        ("bbr", 0.02, ""),  # long: a lost frame would cost cubic dear
        ("cubic", 0.0003, ""),
        ("reno", 0.0003, ""),  # somebody's choice
        ("bbr", 4294.967295, ""),  # not measured
    ],
)
def test_a_short_line_is_not_left_to_bbr(control, round_trip_s, asked):
    assert congestion_control.preferred_control(control, round_trip_s) == asked


def looks(text: str) -> list[bool]:
    """One result for each letter: "." nothing was lost, "x" a packet was, "X" the same with a large window,
    "-" hardly anything was sent."""
    losses, answers, segments, lost = LossMonitor(), [], 0, 0
    for letter in text:
        segments += 1 if letter == "-" else 1000
        lost += letter in "xX"
        answers.append(losses.record(segments, lost, window=400 if letter == "X" else 38))
    return answers


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("....................", False),
        ("x......x......x......x......x", False),  # cubic's own full queue, every few seconds
        ("XXXXXXXXXXXX", False),  # ... or all the time, where several connections share the queue
        ("xxxxxx", True),
        ("..x..x..x..x..x..x", True),  # one frame in some thousands, all the time
        ("xxxxx" + 20 * "." + "x", False),  # long ago
        ("x-x-x-x-x-x", True),
        ("xxxxx-----", False),
    ],
)
def test_a_line_is_bad_if_it_loses_again_and_again(text, bad):
    assert looks(text)[-1] is bad
    assert not any(looks(text)[:-1])


def test_the_kernels_counts_begin_anew():
    losses = LossMonitor(segments=(1 << 32) - 10, retransmitted=(1 << 32) - 1)
    assert [losses.record(1000 * look, look, window=10) for look in range(1, 7)] == [*[False] * 5, True]


@pytest.fixture
def ends():
    """Two ends of a connection over loopback, where bbr is chosen, and the port of the first one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near, _ = server.accept()
        with near, far:
            try:
                near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
            except OSError as error:
                pytest.skip(f"bbr is not allowed here: {error}")
            yield near, far, server.getsockname()[1]


@pytest.mark.skipif(not has_both, reason="this kernel lacks bbr or cubic")
def test_a_connection_has_cubic_until_it_shows_losses(ends):
    near, far, port = ends
    fd, remote = near.fileno(), far.getsockname()
    TcpConnection(fd, remote, {port + 1}).choose_congestion_control()  # the descriptor was reused
    assert congestion_control.control_of(near) == "bbr"
    connection = TcpConnection(fd, remote, {port})
    connection.choose_congestion_control()
    assert congestion_control.control_of(near) == "cubic"
    losses = LossMonitor(segments=-1000, retransmitted=-1)
    losses.recent.extend([True] * (congestion_control.BAD_LOOKS - 1))
    reused = TcpConnection(fd, remote, {port + 1})
    reused._loss_monitor = connection._loss_monitor = losses
    reused.watch_losses()
    assert congestion_control.control_of(near) == "cubic"
    connection.watch_losses()
    assert congestion_control.control_of(near) == "bbr"
