"""A transfer between two hosts of the network lab, by which its tests measure rates and count bytes."""

from __future__ import annotations

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
