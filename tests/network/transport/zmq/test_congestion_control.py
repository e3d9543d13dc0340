"""Which congestion control a connection gets, and when it gets bbr back."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from gridtrain.network.transport.zmq import congestion_control
from gridtrain.network.transport.zmq.congestion_control import SendMonitor
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


def looks(text: str, *, restarts: bool = False) -> list[str]:
    """One choice for each letter: "." nothing was lost, "x" a packet was, "X" the same with a large window,
    "-" hardly anything was sent."""
    monitor, chosen, segments, lost = SendMonitor(restarts=restarts), [], 0, 0
    for letter in text:
        segments += 1 if letter == "-" else 1000
        lost += letter in "xX"
        chosen.append(monitor.record(segments, lost, window=400 if letter == "X" else 38))
    return chosen


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
    assert looks(text)[-1] == ("bbr" if bad else "cubic")
    assert "bbr" not in looks(text)[:-1]


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("....", "cubic"),
        ("..-", "bbr"),  # the kernel has forgotten the window, or soon will
        ("..-.", "bbr"),  # payloads with a computation between them
        (".-..-..-..-.", "bbr"),
        ("-....", "cubic"),  # a long payload
        ("-....-", "bbr"),
        ("-....xxxxxx....", "bbr"),  # for the rest of the connection
        ("-xxx-xxx-xxx....", "cubic"),  # with bbr, whose window is small without losses, too
    ],
)
def test_bbr_sends_the_payload_after_a_pause(text, last):
    assert looks(text, restarts=True)[-1] == last
    if "x" not in text:
        assert looks(text)[-1] == "cubic", "a kernel that keeps the window in a pause"


def test_the_kernels_counts_begin_anew():
    end = (1 << 32) - 10
    monitor = SendMonitor(segments=end, counted=end, retransmitted=(1 << 32) - 1)
    assert [monitor.record(1000 * look, look, window=10) for look in range(1, 7)] == [*["cubic"] * 5, "bbr"]


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
    monitor = SendMonitor(restarts=False, counted=-1000, retransmitted=-1)
    monitor.recent.extend([True] * (congestion_control.BAD_LOOKS - 1))
    reused = TcpConnection(fd, remote, {port + 1})
    reused._send_monitor = connection._send_monitor = monitor
    reused.revise_congestion_control()
    assert congestion_control.control_of(near) == "cubic"
    connection.revise_congestion_control()
    assert congestion_control.control_of(near) == "bbr"
    connection.revise_congestion_control()
    assert congestion_control.control_of(near) == "bbr", "for the rest of the connection"


@pytest.mark.skipif(not has_both, reason="this kernel lacks bbr or cubic")
def test_a_connection_has_bbr_in_a_pause_and_cubic_for_a_long_payload(ends):
    near, far, port = ends
    connection = TcpConnection(near.fileno(), far.getsockname(), {port})
    connection.choose_congestion_control()
    connection._send_monitor = SendMonitor()
    connection.revise_congestion_control()
    assert congestion_control.control_of(near) == "bbr"
    for _ in range(congestion_control.BUSY_LOOKS):
        for _ in range(2 * congestion_control.PAUSE_SEGMENTS):
            near.sendall(bytes(100))
            assert len(far.recv(100, socket.MSG_WAITALL)) == 100
        connection.revise_congestion_control()
    assert congestion_control.control_of(near) == "cubic"


@pytest.mark.parametrize(
    ("control", "after_idle", "found"),
    [("cubic", "1", "cubic"), ("cubic", "0", ""), ("bbr", "1", ""), ("reno", None, "")],
)
def test_the_kernels_default_is_slow_after_a_pause(control, after_idle, found, tmp_path):
    (tmp_path / "tcp_congestion_control").write_text(f"{control}\n")
    if after_idle is not None:  # older kernels have no such file in a container
        (tmp_path / "tcp_slow_start_after_idle").write_text(f"{after_idle}\n")
    assert congestion_control.slow_restart(tmp_path) == found
