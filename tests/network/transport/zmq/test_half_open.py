"""How long and how many half-open connections may wait; and that silent crowds delay no honest peer."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gridtrain.network.transport.interface import PeerDown, PeerUp
from gridtrain.network.transport.zmq import half_open, sockets, tcp_options
from gridtrain.network.transport.zmq.half_open import (
    CLOSES_PER_S,
    HALF_OPEN_S,
    MAX_HALF_OPEN,
    MAX_OF_ONE_RANGE,
    MAX_TOTAL,
    HalfOpenConnections,
    address_range,
)
from gridtrain.network.transport.zmq.tcp_options import TcpConnection

HOME, ELSEWHERE = "198.51.100.7", "203.0.113.9"


def overstayers(made: HalfOpenConnections, heard_s: float, now_s: float = 0.0) -> list[int]:
    return half_open.connections_to_close(made, heard_s, now_s)


def crowd(made: HalfOpenConnections, host: str, fds: range, now_s: float = 0.0) -> None:
    for fd in fds:
        made.add(fd, host, now_s)


# -- the rules -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("198.51.100.7", "198.51.100.0/24"),
        ("::ffff:198.51.100.7", "198.51.100.0/24"),  # the same party, by another policy
        ("2001:db8:1:2:3::4", "2001:db8:1::/48"),
        ("[2001:db8:1:2::3]", "2001:db8:1::/48"),
        ("fe80::1%eth0", "fe80::/48"),
        ("127.0.0.1", "127.0.0.0/24"),
        ("", ""),
        ("no address", "no address"),
    ],
)
def test_address_ranges(host, name):
    assert address_range(host) == name


def test_who_says_nothing_is_cut_after_its_time():
    made = HalfOpenConnections()
    made.add(1, HOME, 0.0)
    made.add(2, HOME, 1.0)
    assert made.due_s() == HALF_OPEN_S
    assert overstayers(made, HALF_OPEN_S - 0.01) == []
    assert overstayers(made, HALF_OPEN_S) == [1]
    assert overstayers(made, HALF_OPEN_S) == []  # each is named once
    assert made.due_s() == HALF_OPEN_S + 1.0


def test_who_greets_or_goes_does_not_wait_any_more():
    made = HalfOpenConnections()
    crowd(made, HOME, range(3))
    assert made.remove(0) and made.remove(1) and not made.remove(1)
    assert overstayers(made, HALF_OPEN_S) == [2]
    assert len(made) == 0 and made.due_s() == float("inf")


def test_while_nothing_is_read_nobody_is_too_late():
    """Under a download cap a Hello may be unread for long: only what was read counts."""
    made = HalfOpenConnections()
    made.add(1, HOME, 10.0)
    assert overstayers(made, heard_s=9.0) == []  # it is much later, but nothing was read since 9.0


def test_a_household_may_come_all_at_once_and_no_more():
    made = HalfOpenConnections()
    crowd(made, HOME, range(MAX_OF_ONE_RANGE))
    assert overstayers(made, 0.0) == []
    made.add(1000, HOME, 0.0)
    made.add(1001, ELSEWHERE, 0.0)
    assert overstayers(made, 0.0) == [0]  # the oldest of that range


def test_when_too_many_are_half_open_the_largest_crowd_loses_its_oldest():
    made = HalfOpenConnections()
    groups = MAX_HALF_OPEN // 50
    for group in range(groups):
        crowd(made, f"10.0.{group}.1", range(group * 100, group * 100 + 50))
    rest = MAX_HALF_OPEN - groups * 50
    crowd(made, HOME, range(10_000, 10_000 + rest))
    assert overstayers(made, 0.0) == []
    made.add(20_000, ELSEWHERE, 0.0)
    (cut,) = overstayers(made, 0.0)
    assert cut in {group * 100 for group in range(groups)}
    assert 20_000 in made


def test_a_reused_descriptor_is_a_new_connection():
    made = HalfOpenConnections()
    made.add(1, HOME, 0.0)
    made.add(1, ELSEWHERE, 3.0)
    assert len(made) == 1
    assert overstayers(made, HALF_OPEN_S) == []


def test_beyond_the_soft_limits_the_pace_is_moderate_and_the_latest_have_time():
    made = HalfOpenConnections()
    crowd(made, HOME, range(1500))
    first = overstayers(made, 0.0, now_s=0.0)
    assert first == list(range(int(CLOSES_PER_S)))
    assert overstayers(made, 0.0, now_s=0.0) == []
    assert made.due_s() == pytest.approx(1.0 / CLOSES_PER_S)
    later = overstayers(made, 0.0, now_s=1.0)
    assert later == list(range(len(first), 2 * len(first)))


def test_beyond_the_hard_limit_there_is_no_pace():
    made = HalfOpenConnections()
    crowd(made, HOME, range(MAX_TOTAL))
    overstayers(made, 0.0)
    crowd(made, HOME, range(10_000, 10_000 + MAX_TOTAL))
    overstayers(made, 0.0)
    assert len(made) == MAX_TOTAL
    assert 10_000 + MAX_TOTAL - 1 in made and 1000 not in made


# -- cutting, with real descriptors --------------------------------------------------------------


@pytest.fixture
def connection():
    """(the accepted end, the dialling end, the port)"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near, _ = server.accept()
        with near, far:
            far.settimeout(5.0)
            yield near, far, server.getsockname()[1]


def test_cutting_ends_the_connection_and_leaves_the_descriptor_to_its_owner(connection):
    near, far, port = connection
    accepted = TcpConnection.identify(near.fileno(), {port})
    assert accepted is not None and accepted.remote == far.getsockname()
    assert accepted.shut_down()
    assert far.recv(1) == b""
    os.fstat(near.fileno())  # still open: libzmq closes it itself


@contextlib.contextmanager
def no_free_descriptor():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with contextlib.suppress(OSError):
            while True:
                files.enter_context(open(os.devnull))
        yield


def test_a_connection_is_known_and_cut_while_no_descriptor_is_free(connection):
    near, far, port = connection
    tcp_options.raise_descriptor_limit()  # as when listening
    with no_free_descriptor():
        accepted = TcpConnection.identify(near.fileno(), {port})
        assert accepted is not None and accepted.shut_down()
    assert far.recv(1) == b""


def test_without_a_descriptor_at_the_start_no_connection_is_known(connection):
    near, _, port = connection
    tcp_options._reserved_descriptors.cache_clear()  # as in a process that has not listened
    count = len(os.listdir("/proc/self/fd"))
    with no_free_descriptor():
        assert TcpConnection.identify(near.fileno(), {port}) is None
    assert len(os.listdir("/proc/self/fd")) == count
    assert TcpConnection.identify(near.fileno(), {port}) is not None


def test_a_forked_process_leaves_the_numbers_of_its_parent_alone(connection, tmp_path):
    """It may close all descriptors, as a daemon does, and have other files of these numbers."""
    near, _, port = connection
    tcp_options.raise_descriptor_limit()
    reserved = tcp_options._reserved_descriptors()
    with tcp_options._reserved_lock:  # another thread's, at that moment
        child = os.fork()
        if not child:
            code = 1
            try:
                signal.alarm(20)  # ends the process
                file = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
                os.dup2(file, reserved[1])
                code = int(TcpConnection.identify(near.fileno(), {port}) is None)
                os.write(reserved[1], b"mine")
            finally:
                os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "file").read_text() == "mine"


def test_a_known_connection_ends_when_its_owner_closes_it(connection):
    near, far, port = connection
    assert TcpConnection.identify(near.fileno(), {port}) is not None
    near.close()
    assert far.recv(1) == b""


def test_only_the_connection_that_was_meant_is_cut(connection, tmp_path):
    near, far, port = connection
    remote = far.getsockname()
    another_peer = (remote[0], remote[1] + 1)
    assert not TcpConnection(near.fileno(), another_peer, {port}).shut_down()  # the descriptor was reused
    assert not TcpConnection(near.fileno(), remote, {port + 1}).shut_down()  # reused by another server
    assert not TcpConnection(far.fileno(), remote, {port}).shut_down()  # a connection that we made
    with open(tmp_path / "journal", "w") as file:
        assert not TcpConnection(file.fileno(), remote, {port}).shut_down()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        assert TcpConnection.identify(other.fileno(), {port}) is None
    assert TcpConnection.identify(10**6, {port}) is None
    near.send(b"x")
    assert far.recv(1) == b"x"


def test_listening_raises_the_limit_of_descriptors(zeromq_net):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lower = min(1024, soft)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lower, hard))
    try:
        zeromq_net.add("bert").transport.listen("tcp://127.0.0.1:0")
        raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        unlimited = hard == resource.RLIM_INFINITY
        assert raised == max(lower, tcp_options.MAX_DESCRIPTORS if unlimited else min(hard, 65536))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_burst_of_connections_waits_to_be_accepted(zeromq_net):
    address = zeromq_net.add("bert").transport.listen("tcp://127.0.0.1:0")
    somaxconn = int(Path("/proc/sys/net/core/somaxconn").read_text())
    assert listen_queue(int(address.rpartition(":")[2])) == min(sockets.LISTEN_QUEUE, somaxconn)


def listen_queue(port: int) -> int:
    """Return how many connections may wait at this process's port: tcpi_sacked of linux/tcp.h, tcp_info."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        made = None
        with contextlib.suppress(OSError):  # not a socket
            made = socket.socket(fileno=fd)
        if made is None:
            continue
        try:
            is_tcp = made.family == socket.AF_INET and made.type == socket.SOCK_STREAM
            listens = is_tcp and made.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and made.getsockname()[1] == port:
                info = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
                return struct.unpack_from("=I", info, 28)[0]
        finally:
            made.detach()
    raise AssertionError(f"nothing listens at port {port}")


# -- a crowd of silent connections ---------------------------------------------------------------

SILENT = 400


@pytest.fixture
def patient(monkeypatch):
    """Silent connections are not closed for their age: a peer behind all of them would wait for minutes."""
    monkeypatch.setattr(half_open, "HALF_OPEN_S", 600.0)


@pytest.fixture
def besieged(zeromq_net):
    """`besieged(count)`: an endpoint with this many connections that send nothing."""
    opened = []

    def make(count):
        bert = zeromq_net.add("bert")
        address = bert.transport.listen("tcp://127.0.0.1:0")
        port = int(address.rpartition(":")[2])
        for _ in range(count):
            opened.append(socket.create_connection(("127.0.0.1", port), timeout=5.0))
            if len(opened) % 50 == 0:
                bert.events += bert.transport.poll(0.0)
        for silent in opened:
            silent.setblocking(False)
        return bert, address

    def still_open() -> int:
        return sum(not closed(silent) for silent in opened)

    make.still_open = still_open
    yield make
    for silent in opened:
        silent.close()


def closed(silent: socket.socket) -> bool:
    """Reads past libzmq's own greeting, which is sent first."""
    try:
        while silent.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def test_a_silent_crowd_delays_no_honest_peer(zeromq_net, patient, besieged):
    bert, address = besieged(SILENT)
    anna = zeromq_net.add("anna")
    anna.transport.dial(bert.key, address)
    zeromq_net.until(lambda: anna.of(PeerUp) and bert.of(PeerUp), anna, bert)
    zeromq_net.until(lambda: besieged.still_open() <= MAX_OF_ONE_RANGE, bert, anna)
    assert bert.story() == ["up anna"]


SIEGE = """
import selectors, socket, sys
selector = selectors.DefaultSelector()
def come():
    silent = socket.socket()
    silent.setblocking(False)
    silent.connect_ex(("127.0.0.1", int(sys.argv[1])))
    selector.register(silent, selectors.EVENT_READ)
for _ in range(1500):
    come()
print("there", flush=True)
while True:
    for key, _ in selector.select():
        try:
            if key.fileobj.recv(4096):
                continue  # libzmq's own greeting
        except BlockingIOError:
            continue
        except OSError:
            pass
        selector.unregister(key.fileobj)
        key.fileobj.close()
        come()  # as soon as it is cut
"""


@pytest.mark.integration
def test_a_silent_crowd_that_comes_back_at_once_delays_nobody(zeromq_net, patient):
    bert = zeromq_net.add("bert")
    address = bert.transport.listen("tcp://127.0.0.1:0")
    command = [sys.executable, "-c", SIEGE, address.rpartition(":")[2]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as siege:
        try:
            siege.stdout.readline()
            end_s = time.monotonic() + 1.0
            zeromq_net.until(lambda: time.monotonic() > end_s, bert)
            for name in ("anna", "carl", "dave"):
                honest = zeromq_net.add(name)
                honest.transport.dial(bert.key, address)
                zeromq_net.until(lambda honest=honest: honest.of(PeerUp), honest, bert)
            assert bert.of(PeerDown) == []
        finally:
            siege.kill()


def test_silent_connections_are_cut_and_a_greeted_one_stays(zeromq_net, besieged, monkeypatch):
    monkeypatch.setattr(half_open, "HALF_OPEN_S", 0.3)
    bert, address = besieged(20)
    anna = zeromq_net.add("anna")
    anna.transport.dial(bert.key, address)
    zeromq_net.until(lambda: anna.of(PeerUp) and bert.of(PeerUp), anna, bert)
    zeromq_net.until(lambda: besieged.still_open() == 0, bert, anna)
    assert bert.story() == ["up anna"] and anna.story() == ["up bert"]
