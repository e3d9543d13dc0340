"""Transfers between two hosts of the network lab, for its tests."""

from __future__ import annotations

import socket
import threading
import time

from lab.net import Host

DEADLINE_S = 30.0


def send(sender: Host, receiver: Host, nbytes: int) -> float:
    """Send zeros over TCP; return the seconds from the arrival of the first byte to that of the last."""
    with receiver.listen() as listener:
        outgoing = sender.dial(receiver.address, listener.getsockname()[1])
        incoming, _ = listener.accept()
    pump = threading.Thread(target=lambda: (outgoing.sendall(bytes(nbytes)), outgoing.close()))
    with incoming:
        incoming.settimeout(DEADLINE_S)
        pump.start()
        left, began_s = nbytes - len(incoming.recv(1)), time.perf_counter()
        while left:
            data = incoming.recv(1 << 16)
            assert data, f"the connection ended with {left} bytes missing"
            left -= len(data)
        took_s = time.perf_counter() - began_s
    pump.join()
    return took_s


def say(sender: Host, receiver: Host, *writes: bytes) -> None:
    """Send each write as its own segment and wait until all have arrived."""
    with receiver.listen() as listener:
        outgoing = sender.dial(receiver.address, listener.getsockname()[1])
        incoming, _ = listener.accept()
    with outgoing, incoming:
        outgoing.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        incoming.settimeout(DEADLINE_S)
        for data in writes:
            pump = threading.Thread(target=outgoing.sendall, args=(data,))
            pump.start()
            arrived = bytearray()
            while len(arrived) < len(data):
                arrived += incoming.recv(1 << 16)
            pump.join()
            assert arrived == data
