"""What only a real socket can do to us: hostile bytes, versions, dead processes, taken ports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgpack
import pytest
import zmq

from gridtrain.errors import TransportError
from gridtrain.protocol.messages import PROTOCOL_VERSION, Hello, Ping, Pong, StateBlock
from gridtrain.transport import sockets
from gridtrain.transport.base import PeerDown, PeerUp, Received, Violation
from gridtrain.transport.zeromq import ZeroMQTransport
from gridtrain.wire import codec

MALLORY = b"mallory".ljust(32, b".")


@pytest.fixture
def raw():
    """Makes plain ZeroMQ sockets that say whatever a test wants."""
    context = zmq.Context()
    yield context.socket
    context.destroy(linger=0)


def greeting(peer: bytes = MALLORY, version: int = PROTOCOL_VERSION) -> list[bytes]:
    return codec.encode(Hello(peer, version, "gridtrain 9.9"))


# -- hostile bytes -------------------------------------------------------------------------------

HOSTILE = {
    "garbage": [b"\xc1garbage"],
    "an empty frame": [b""],
    "too many frames": [b"x"] * 50,
    "a map": [msgpack.packb({1: 2})],
    "an unknown code": [msgpack.packb([999])],
    "a header beyond its bound": [bytes(codec.MAX_HEADER_BYTES + 1)],
    "frames each within the bound, together beyond it": [bytes(codec.MAX_PAYLOAD_BYTES)] * 2,
}


@pytest.mark.parametrize("greeted", [False, True], ids=["stranger", "greeted"])
@pytest.mark.parametrize("frames", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_messages_are_violations_and_the_honest_peer_goes_on(zeromq_net, raw, frames, greeted):
    anna, bert = zeromq_net.pair()
    mallory = raw(zmq.DEALER)
    mallory.connect(bert.transport.listen("tcp://127.0.0.1:0"))
    if greeted:
        mallory.send_multipart(greeting())
        zeromq_net.until(lambda: len(bert.of(PeerUp)) == 2, anna, bert)
    mallory.send_multipart(frames, copy=False)
    zeromq_net.until(lambda: bert.of(Violation), anna, bert)
    (violation,) = bert.of(Violation)
    assert violation.peer == (MALLORY if greeted else None)
    assert len(violation.reason) < 300
    anna.transport.send(bert.key, Ping(1))
    zeromq_net.until(lambda: bert.got(), anna, bert)


def test_a_frame_beyond_the_bound_costs_the_connection(zeromq_net, raw):
    anna, bert = zeromq_net.pair()
    mallory = raw(zmq.DEALER)
    mallory.connect(bert.transport.listen("tcp://127.0.0.1:0"))
    mallory.send_multipart(greeting())
    zeromq_net.until(lambda: len(bert.of(PeerUp)) == 2, anna, bert)
    mallory.send(bytes(codec.MAX_PAYLOAD_BYTES + 1), copy=False)
    zeromq_net.until(lambda: bert.of(PeerDown), anna, bert)
    assert bert.story() == ["up anna", "up mallory", "down mallory"]
    anna.transport.send(bert.key, Ping(1))
    zeromq_net.until(lambda: bert.got(), anna, bert)


def test_before_hello_nothing_is_listened_to(zeromq_net, raw):
    bert = zeromq_net.add("bert")
    mallory = raw(zmq.DEALER)
    mallory.connect(bert.transport.listen("tcp://127.0.0.1:0"))
    mallory.send_multipart(codec.encode(Ping(1)))
    zeromq_net.until(lambda: bert.events, bert)
    assert bert.events == [Violation(None, "Ping before Hello")]


def test_a_second_hello_does_not_rename_a_peer(zeromq_net, raw):
    bert = zeromq_net.add("bert")
    mallory = raw(zmq.DEALER)
    mallory.connect(bert.transport.listen("tcp://127.0.0.1:0"))
    mallory.send_multipart(greeting())
    mallory.send_multipart(greeting(b"v" * 32))
    mallory.send_multipart(codec.encode(Ping(1)))
    zeromq_net.until(lambda: bert.got(), bert)
    assert bert.story() == ["up mallory", "violation mallory", "Ping 1 from mallory"]


def test_the_latest_connection_that_greets_has_the_route(zeromq_net, raw):
    bert = zeromq_net.add("bert")
    address = bert.transport.listen("tcp://127.0.0.1:0")
    old, new = raw(zmq.DEALER), raw(zmq.DEALER)
    old.connect(address)
    old.send_multipart(greeting())
    zeromq_net.until(lambda: bert.of(PeerUp), bert)
    new.connect(address)
    new.send_multipart(greeting())
    zeromq_net.until(lambda: len(bert.of(PeerUp)) == 2, bert)
    old.send_multipart(codec.encode(Ping(1)))  # of a connection that is over: neither news nor a crime
    new.send_multipart(codec.encode(Ping(2)))
    zeromq_net.until(lambda: bert.got(), bert)
    assert bert.story() == ["up mallory", "down mallory", "up mallory", "Ping 2 from mallory"]
    bert.transport.send(MALLORY, Pong(2))
    assert new.recv_multipart() == new_hello(bert)
    assert new.recv_multipart() == codec.encode(Pong(2))
    old.close(linger=0)  # and its end does not take the newer one down
    new.send_multipart(codec.encode(Ping(3)))
    zeromq_net.until(lambda: len(bert.got()) == 2, bert)
    assert len(bert.of(PeerDown)) == 1


def new_hello(endpoint) -> list[bytes]:
    return codec.encode(Hello(endpoint.key, PROTOCOL_VERSION, "gridtrain test"))


# -- who answers ---------------------------------------------------------------------------------


def test_another_version_is_told_to_both_sides(zeromq_net, raw):
    anna = zeromq_net.add("anna")
    future = raw(zmq.DEALER)
    future.connect(anna.transport.listen("tcp://127.0.0.1:0"))
    future.send_multipart(greeting(version=2))
    zeromq_net.until(lambda: anna.events, anna)
    assert anna.events == [
        Violation(
            MALLORY,
            "peer speaks gridtrain protocol 2, this software speaks 1 (the peer runs 'gridtrain 9.9') "
            "-> install the same version of gridtrain on both machines",
        )
    ]
    assert future.recv_multipart() == new_hello(anna)  # so that the other side can say it too
    assert not anna.transport.connected(MALLORY)


def test_a_joiner_learns_that_the_coordinator_speaks_another_version(zeromq_net, raw):
    coordinator = raw(zmq.ROUTER)
    port = coordinator.bind_to_random_port("tcp://127.0.0.1")
    worker = zeromq_net.add("worker")
    worker.transport.dial(None, f"tcp://127.0.0.1:{port}")
    routing_id, *_ = coordinator.recv_multipart()
    coordinator.send_multipart([routing_id, *greeting(version=2)])
    zeromq_net.until(lambda: worker.events, worker)
    (violation,) = worker.of(Violation)
    assert "peer speaks gridtrain protocol 2, this software speaks 1" in violation.reason


def test_an_address_where_somebody_else_answers(zeromq_net):
    anna, bert = zeromq_net.add("anna"), zeromq_net.add("bert")
    anna.transport.dial(b"c" * 32, bert.transport.listen("tcp://127.0.0.1:0"))
    zeromq_net.until(lambda: anna.of(Violation), anna, bert)
    assert "answers with key 62657274" in anna.of(Violation)[0].reason
    assert not anna.transport.connected(bert.key)


# -- addresses -----------------------------------------------------------------------------------


def test_a_taken_port_says_what_to_do(zeromq_net):
    address = zeromq_net.add("anna").transport.listen("tcp://127.0.0.1:0")
    with pytest.raises(TransportError, match="the port is taken -> stop the program that uses it, choose"):
        zeromq_net.add("bert").transport.listen(address)


@pytest.mark.parametrize("address", ["127.0.0.1:7000", "ipc:///x:1", "tcp://127.0.0.1", "tcp://host:70000"])
def test_addresses_that_can_never_work(zeromq_net, address):
    anna = zeromq_net.add("anna")
    with pytest.raises(TransportError, match=r'an address looks like "tcp://'):
        anna.transport.dial(None, address)
    with pytest.raises(TransportError, match=r'an address looks like "tcp://'):
        anna.transport.listen(address)


@pytest.mark.parametrize("wildcard", ["tcp://*:0", "tcp://*:*", "tcp://0.0.0.0:0"])
def test_all_interfaces_become_an_address_that_can_be_dialled(zeromq_net, wildcard):
    anna = zeromq_net.add("anna")
    bert = zeromq_net.add("bert", advertise_host="localhost")
    address = bert.transport.listen(wildcard)
    assert address.startswith("tcp://localhost:") and not address.endswith(":0")
    anna.transport.dial(bert.key, address)
    zeromq_net.until(lambda: anna.of(PeerUp) and bert.of(PeerUp), anna, bert)


# -- other processes -----------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.parametrize("who_dialled", ["the dead", "the living"])
def test_a_killed_process_is_noticed_at_once(zeromq_net, who_dialled):
    anna = zeromq_net.add("anna")
    script = [sys.executable, str(Path(__file__).with_name("peer_process.py"))]
    script += ["dial", anna.transport.listen("tcp://*:0")] if who_dialled == "the dead" else ["listen"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            if who_dialled == "the living":
                anna.transport.dial(None, process.stdout.readline().strip())
            zeromq_net.until(lambda: anna.of(PeerUp), anna, deadline_s=30.0)
            process.send_signal(signal.SIGKILL)
            start_s = time.monotonic()
            zeromq_net.until(lambda: anna.of(PeerDown), anna)
            assert time.monotonic() - start_s < 1.0
        finally:
            process.kill()
    assert anna.story() == ["up bert", "down bert"]


# -- bounds of libzmq ----------------------------------------------------------------------------


def test_zmtp_framing_is_counted_as_it_is_on_the_wire():
    assert [sockets.wire_bytes(n) for n in (0, 255, 256, 2**20)] == [2, 257, 265, 2**20 + 9]


def test_a_download_cap_slows_the_sender_instead_of_filling_memory(zeromq_net):
    anna, bert = zeromq_net.pair(acceptor={"download_Bps": 1e6})
    for index in range(60):
        anna.transport.send(bert.key, StateBlock(1, 1, index, 60, bytes(2**20)))
    zeromq_net.until(lambda: bert.got(), bert, anna)
    end_s = time.monotonic() + 0.3
    zeromq_net.until(lambda: time.monotonic() > end_s, anna, bert)
    assert len(bert.got()) == 1  # a second of debt
    assert anna.transport.backlog_bytes(bert.key) > 2**20


def test_two_threads_play_ping_pong():
    """Also the way it is used: one thread for each transport."""
    anna, bert = (ZeroMQTransport(name * 32, "gridtrain test") for name in (b"a", b"b"))
    anna.dial(b"b" * 32, bert.listen("tcp://127.0.0.1:0"))
    stop = threading.Event()

    def answer() -> None:
        while not stop.is_set():
            for event in bert.poll(1.0):
                if isinstance(event, Received):
                    bert.send(event.peer, Pong(event.message.nonce))

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        pongs, end_s = 0, time.monotonic() + 10.0
        while pongs < 200:
            assert time.monotonic() < end_s
            for event in anna.poll(1.0):
                pongs += isinstance(event, Received)
                if isinstance(event, PeerUp | Received):
                    anna.send(event.peer, Ping(pongs))
    finally:
        stop.set()
        bert.wake()
        thread.join()
        anna.close()
        bert.close()
