"""The kernel buffers of a connection, on this system and on others."""

from __future__ import annotations

import os
import socket

import pytest

from gridtrain.network.transport.interface import PeerUp
from gridtrain.network.transport.zmq import tcp_options
from gridtrain.network.transport.zmq.tcp_options import TcpConnection

MIB = 2**20
LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", None)
needs_lowat = pytest.mark.skipif(LOWAT is None, reason="this system has no TCP_NOTSENT_LOWAT")


@pytest.mark.parametrize(
    ("wmem_max", "grows_to", "asked"),
    [
        (212_992, 4 * MIB, 0),  # Linux as it comes: what it would give is less than what it grows to
        (4 * MIB, 4 * MIB, 4 * MIB),
        (64 * MIB, 4 * MIB, 4 * MIB),
        (4 * MIB, 64 * MIB, 0),
        (2 * MIB, 4 * MIB, 0),
        (0, 0, 0),  # no Linux
    ],
)
def test_a_fixed_buffer_is_asked_for_where_it_is_larger_than_a_growing_one(wmem_max, grows_to, asked):
    assert tcp_options.buffer_bytes_to_request(wmem_max, grows_to) == asked


def waiting_bytes(fd: int) -> int:
    """TCP_NOTSENT_LOWAT of the connection with this descriptor; 0: it is not a connection."""
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            connection.getpeername()
            return connection.getsockopt(socket.IPPROTO_TCP, LOWAT)
    except OSError:
        return 0


@needs_lowat
def test_only_the_connection_that_was_meant_gets_other_buffers():
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near, _ = server.accept()
        with near, far:
            remote, port = far.getsockname(), server.getsockname()[1]
            before = waiting_bytes(near.fileno())
            TcpConnection(near.fileno(), (remote[0], remote[1] + 1), {port}).enlarge_buffers()  # fd reused
            TcpConnection(near.fileno(), remote, {port + 1}).enlarge_buffers()  # reused by another server
            assert waiting_bytes(near.fileno()) == before != tcp_options.MAX_UNSENT_BYTES
            TcpConnection(near.fileno(), remote, {port}).enlarge_buffers()
            assert waiting_bytes(near.fileno()) == tcp_options.MAX_UNSENT_BYTES
            far.sendall(b"x")
            assert near.recv(1) == b"x"


@needs_lowat
def test_both_ends_of_an_edge_have_them(zeromq_net):
    def widened() -> set[int]:
        return {
            fd
            for fd in map(int, os.listdir("/proc/self/fd"))
            if waiting_bytes(fd) == tcp_options.MAX_UNSENT_BYTES
        }

    before = widened()
    anna, bert = zeromq_net.pair()
    assert anna.of(PeerUp) and bert.of(PeerUp)
    assert len(widened() - before) == 2
