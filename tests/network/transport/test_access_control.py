"""Strangers get no access, and a member's key works for that member alone."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from gridtrain.core.messages import PROTOCOL_VERSION, Hello, Ping
from gridtrain.errors import NEVER_SENT
from gridtrain.network.transport import flood_detector
from gridtrain.network.transport.interface import (
    ConnectionRole,
    PeerDown,
    PeerUp,
    ReachResult,
    TransportViolation,
)
from gridtrain.network.transport.zmq import dialer, handshake, sockets, zeromq_transport
from gridtrain.network.wire import codec


def hello(key: bytes) -> list[bytes]:
    return codec.encode(Hello(key, PROTOCOL_VERSION, "gridtrain 9.9"))


@pytest.fixture
def besieger(raw, identity_of):
    """`besieger(endpoint, name)`: a socket with that key and its monitor, connected to the endpoint."""

    def make(endpoint, name, server=b"", **options):
        dealer = raw(zmq.DEALER, name, server or endpoint.key)
        for option, value in options.items():
            setattr(dealer, option, value)
        monitor = dealer.get_monitor_socket()
        dealer.connect(endpoint.transport.listen("tcp://127.0.0.1:0"))
        return dealer, monitor

    return make


def next_event(net, monitor, wanted: set[int], *endpoints) -> int:
    """The first of the wanted events of the socket."""
    seen: list[int] = []

    def told() -> bool:
        while monitor.poll(0):
            seen.append(int(recv_monitor_message(monitor)["event"]))
        return bool(wanted & set(seen))

    net.until(told, *endpoints)
    return next(event for event in seen if event in wanted)


HANDSHAKE = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
}


# -- at the handshake ----------------------------------------------------------------------------


def test_a_stranger_gets_nothing(zeromq_net, besieger):
    bert = zeromq_net.add("bert")
    bert.policy.only(anna=ConnectionRole.MEMBER)
    dealer, monitor = besieger(bert, "stranger")
    dealer.send_multipart(hello(b"s" * 32))
    assert next_event(zeromq_net, monitor, HANDSHAKE, bert) == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    assert bert.events == [] and bert.transport.traffic.sent_messages == {}
    assert dealer.poll(0) == 0


def test_a_stranger_that_passes_the_handshake_is_not_greeted(zeromq_net, besieger, identity_of, monkeypatch):
    """The gate is asked again, for its Hello."""
    monkeypatch.setattr(handshake, "authenticate", lambda gate, domain, kind, keys: keys[0].hex())
    bert = zeromq_net.add("bert")
    bert.policy.only(anna=ConnectionRole.MEMBER)
    dealer, monitor = besieger(bert, "stranger")
    assert next_event(zeromq_net, monitor, HANDSHAKE, bert) == zmq.EVENT_HANDSHAKE_SUCCEEDED
    dealer.send_multipart(hello(identity_of("stranger").public))
    assert next_event(zeromq_net, monitor, {zmq.EVENT_DISCONNECTED}, bert) and dealer.poll(0) == 0
    assert bert.transport.traffic.sent_messages == {}


@pytest.mark.parametrize(
    ("domain", "mechanism", "credentials"),
    [
        (b"other", b"CURVE", [b"k" * 32]),
        (b"", b"CURVE", [b"k" * 32]),
        (b"gridtrain", b"NULL", []),
        (b"gridtrain", b"PLAIN", [b"user", b"password"]),
        (b"gridtrain", b"CURVE", [b"k" * 31]),
        (b"gridtrain", b"CURVE", []),
    ],
)
def test_the_zap_handler_answers_for_curve_in_our_domain_alone(domain, mechanism, credentials):
    def everybody(key):
        return ConnectionRole.MEMBER

    assert handshake.authenticate(everybody, b"gridtrain", b"CURVE", [b"k" * 32]) == (b"k" * 32).hex()
    assert handshake.authenticate(everybody, domain, mechanism, credentials) == ""


def test_without_encryption_nobody_is_spoken_to(zeromq_net, raw):
    bert = zeromq_net.add("bert")
    dealer = raw(zmq.DEALER)
    monitor = dealer.get_monitor_socket()
    dealer.connect(bert.transport.listen("tcp://127.0.0.1:0"))
    dealer.send_multipart(hello(b"s" * 32))
    assert next_event(zeromq_net, monitor, HANDSHAKE, bert) != zmq.EVENT_HANDSHAKE_SUCCEEDED
    assert bert.events == []


def test_who_takes_us_for_somebody_else_learns_nothing(zeromq_net, besieger, identity_of):
    """Without our key a dialler cannot even tell whether we are there."""
    bert = zeromq_net.add("bert")
    dealer, monitor = besieger(bert, "anna", server=identity_of("carl").public)
    dealer.send_multipart(hello(identity_of("anna").public))
    failed = next_event(zeromq_net, monitor, HANDSHAKE, bert)
    assert failed in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    assert bert.events == []


def test_reaching_out_does_not_take_another_for_the_peer(zeromq_net, identity_of):
    anna, bert = zeromq_net.add("anna"), zeromq_net.add("bert")
    address = bert.transport.listen("tcp://127.0.0.1:0")
    anna.transport.reach(identity_of("carl").public, [address], 5.0)
    zeromq_net.until(lambda: anna.of(ReachResult), anna, bert)
    assert anna.events == [ReachResult(identity_of("carl").public, "")]


# -- whose words ---------------------------------------------------------------------------------


def test_a_member_cannot_greet_as_another(zeromq_net, besieger, identity_of):
    bert = zeromq_net.add("bert")
    dealer, monitor = besieger(bert, "mallory")
    dealer.send_multipart(hello(identity_of("anna").public))
    dealer.send_multipart(codec.encode(Ping(1)))
    next_event(zeromq_net, monitor, {zmq.EVENT_DISCONNECTED}, bert)
    mallory, anna = (identity_of(name).public.hex()[:8] for name in ("mallory", "anna"))
    reason = f"key {mallory} sent a Hello as key {anna} -> {NEVER_SENT}"
    assert bert.events == [TransportViolation(None, reason)]
    assert bert.transport.traffic.sent_messages == {}


def test_a_routing_id_that_is_in_use_cannot_be_taken(zeromq_net, besieger, identity_of):
    """mallory takes the routing id of a connection of anna: libzmq does not listen to it."""
    bert = zeromq_net.add("bert")
    dealer, _ = besieger(bert, "anna", routing_id=b"anna's place")
    dealer.send_multipart(hello(identity_of("anna").public))
    zeromq_net.until(lambda: bert.of(PeerUp), bert)
    squatter, monitor = besieger(bert, "mallory", routing_id=b"anna's place")
    next_event(zeromq_net, monitor, {zmq.EVENT_HANDSHAKE_SUCCEEDED}, bert)
    squatter.send_multipart(codec.encode(Ping(666)))
    dealer.send_multipart(codec.encode(Ping(1)))
    zeromq_net.until(lambda: bert.got(), bert)
    assert bert.story() == ["up anna", "Ping 1 from anna"]


def test_a_message_under_anothers_routing_id_is_nobodys(zeromq_net, besieger, identity_of):
    """If libzmq ever gave one connection's routing id to another, the key on the frames would show it."""
    anna, bert = zeromq_net.pair()
    dealer, _ = besieger(bert, "mallory")
    dealer.send_multipart(hello(identity_of("mallory").public))
    zeromq_net.until(lambda: len(bert.of(PeerUp)) == 2, bert, anna)
    links = bert.transport._listener._connections
    (annas,) = [link for link in links.values() if link.key == anna.key]
    (mallorys,) = [routing_id for routing_id, link in links.items() if link is not annas]
    links[mallorys] = annas  # as if mallory's connection had come to anna's place
    dealer.send_multipart(codec.encode(Ping(666)))
    zeromq_net.until(lambda: bert.of(TransportViolation), bert, anna)
    assert bert.got() == []


# -- for as long as the gate says ------------------------------------------------------------------


def test_a_removed_member_that_floods_is_cut_for_good(zeromq_net):
    """After its next message nothing more of it is read, and it cannot reconnect."""
    anna, bert = zeromq_net.pair()
    for nonce in range(1000):
        anna.transport.send(bert.key, Ping(nonce))
    bert.policy.only()
    end_s = time.monotonic() + 0.3
    zeromq_net.until(lambda: anna.of(PeerDown) and time.monotonic() > end_s, anna, bert)
    assert bert.story() == ["up anna", "down anna"]
    assert "up bert" not in anna.story()[1:]


def test_the_gate_is_asked_for_each_message_and_not_more(zeromq_net, monkeypatch):
    anna, bert = zeromq_net.pair()
    asked = []
    monkeypatch.setattr(
        bert.transport, "_access_policy", lambda key: asked.append(key) or ConnectionRole.MEMBER
    )
    for nonce in range(10):
        anna.transport.send(bert.key, Ping(nonce))
    zeromq_net.until(lambda: len(bert.got()) == 10, bert, anna)
    assert asked == [anna.key] * 10


def test_a_peer_that_talks_without_end_is_cut(zeromq_net, besieger, identity_of, monkeypatch):
    """It sends 300 pings where 200 are a flood."""
    monkeypatch.setattr(flood_detector, "FLOOD_MESSAGES", 200)
    monkeypatch.setattr(flood_detector, "FLOOD_MESSAGES_per_s", 0.0)
    bert = zeromq_net.add("bert")
    dealer, _ = besieger(bert, "mallory", sndhwm=0)
    dealer.send_multipart(hello(identity_of("mallory").public))
    for nonce in range(300):
        dealer.send_multipart(codec.encode(Ping(nonce)))
    zeromq_net.until(lambda: bert.of(PeerDown) or len(bert.got()) == 300, bert)
    assert len(bert.got()) == 200
    (flood,) = bert.of(TransportViolation)
    assert flood.peer == identity_of("mallory").public and "bytes without credit" in flood.reason
    assert [down.reason for down in bert.of(PeerDown)] == ["the peer is flooding this connection"]


CRASH = """
import os, time, zmq
dealer = zmq.Context().socket(zmq.DEALER)
dealer.sndhwm, dealer.heartbeat_ivl, dealer.heartbeat_timeout = 0, 1, 100_000
dealer.connect({address!r})
end_s = time.monotonic() + 0.3
while time.monotonic() < end_s:
    dealer.send(b"x" * 10)
os.kill(os.getpid(), 9)
"""

VICTIM = """
import subprocess, sys, time
import zmq
from gridtrain.network.transport.zmq import sockets
sockets.RECEIVE_MESSAGES = int(sys.argv[1])
router = sockets.open_router(zmq.Context(), None)
address = sockets.bind(router, "tcp://127.0.0.1:0")
subprocess.run([sys.executable, "-c", {crash!r}.format(address=address)])
while router.poll(300):
    router.recv_multipart()
print("alive")
"""


def test_no_peer_brings_libzmq_to_the_end_of_our_process():
    """A full receive queue, a ping behind it, a reset: libzmq 4.3.5 aborts, unless its queue has no bound."""
    script = VICTIM.format(crash=CRASH)
    for _ in range(2):
        argv = [sys.executable, "-c", script, str(sockets.RECEIVE_MESSAGES)]
        ended = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stdout.strip()) == (0, "alive"), ended.stderr


NULL_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"


def test_a_message_that_never_ends_is_cut_off(plain_net, identity_of, monkeypatch):
    """8 MiB of one message, in raw ZMTP, where 2 MiB may be unread."""
    mallory = identity_of("mallory").public
    monkeypatch.setattr(dialer, "MAX_UNREAD_BYTES", 2 * 2**20)
    monkeypatch.setattr(zeromq_transport, "CHECK_INTERVAL_S", 0.02)
    bert = plain_net.add("bert")
    port = int(bert.transport.listen("tcp://127.0.0.1:0").rpartition(":")[2])
    (greeting,) = hello(mallory)
    frame = b"\x03" + (2**20).to_bytes(8, "big") + bytes(2**20)
    said = b"\x04" + bytes([len(READY)]) + READY
    said += b"\0" + bytes([len(greeting)]) + greeting + frame * 8
    end_s = time.monotonic() + 5.0
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(NULL_GREETING)
        line.setblocking(False)
        plain_net.until(lambda: select.select([line], [], [], 0)[0], bert)  # it has greeted, too
        plain_net.until(lambda: len(line.recv(256, socket.MSG_PEEK)) > len(NULL_GREETING), bert)

        def over() -> bool:
            nonlocal said
            with suppress(OSError):  # it is full, or was cut
                said = said[line.send(said) :]
            return bool(bert.of(PeerDown)) or time.monotonic() > end_s

        plain_net.until(over, bert)
    (violation,) = bert.of(TransportViolation)
    assert violation.peer == mallory and "never completes a message" in violation.reason
    assert [down.reason for down in bert.of(PeerDown)] == ["the peer is filling this process's memory"]
