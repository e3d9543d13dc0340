"""Delays each packet of a netfilter queue by a fixed time.

    kernel:   packet --NFQUEUE--> waits ............................ continues
                         | id                                            ^ "all up to id"
    delay.py:            `--> (now + delay, id) in a queue --when due----'

`lab.link` starts one process for each delayed host, in the host's namespace; it prints "ready" when the
queue is bound, and receives only metadata of packets.  All packets have the same delay, so they stay in
order, and one verdict is sent for all that are due.  On SIGTERM all waiting packets continue at once.  Run
as a file (python -I -S delay.py QUEUE SECONDS) it starts in 20 ms.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import struct
import sys
import time
from collections import deque

MAX_HELD = 1 << 17
"""Packets; the kernel does not delay more.  40 ms at 10 Gbit/s are 34,000 packets of 1500 bytes."""

EARLY_S = 0.00025
"""Packets that are due within this time continue at once, because waking up takes about as long."""

LONGEST_PAUSE_S = 0.0005
PAUSES = 10
"""The queue is read again after 1/`PAUSES` of the delay, so that packets of a busy link are handled in groups
(of four on a link with 5 ms and 100 Mbit/s).  With 1/40 they were handled one by one, and the processes of
four busy hosts used half a core."""

BUFFER_BYTES = 64 << 20
BATCH = 256
LONGEST_MESSAGE_BYTES = 4096

_SUBSYSTEM = 3 << 8  # NFNL_SUBSYS_QUEUE
_PACKET, _CONFIG, _VERDICT_BATCH = _SUBSYSTEM | 0, _SUBSYSTEM | 2, _SUBSYSTEM | 3
_ERROR = 2  # NLMSG_ERROR, which is the answer to a request with _ACK too
_REQUEST, _ACK = 1, 4
_CFG_COMMAND, _CFG_PARAMETERS, _CFG_LENGTH, _CFG_MASK, _CFG_FLAGS = 1, 2, 3, 4, 5
_BIND, _COPY_META, _FAIL_OPEN, _GSO = 1, 1, 1, 4
_PACKET_HEADER, _VERDICT_HEADER, _ACCEPT = 1, 2, 1
_SOL_NETLINK, _NO_ENOBUFS, _SO_RCVBUFFORCE, _NETLINK_NETFILTER = 270, 5, 33, 12

_HEAD = struct.Struct("=IHHIIBBH")  # nlmsghdr and nfgenmsg
_ATTRIBUTE = struct.Struct("=HH")
_PACKET_AT, _ID_AT = _HEAD.size, _HEAD.size + _ATTRIBUTE.size


def message(kind: int, flags: int, queue: int, *attributes: bytes) -> bytes:
    """Encode a netlink message to the netfilter queue of this number."""
    body = b"".join(attributes)
    head = _HEAD.pack(_HEAD.size + len(body), kind, _REQUEST | flags, 0, 0, 0, 0, socket.htons(queue))
    return head + body


def attribute(kind: int, value: bytes) -> bytes:
    padding = bytes(-len(value) % 4)
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + padding


class Queue:
    """A bound netfilter queue of the calling thread's namespace.

    Raises `OSError` if the kernel has no queues, or another process uses this one.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
        with contextlib.suppress(PermissionError):
            self.socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, BUFFER_BYTES)
        self.socket.setsockopt(_SOL_NETLINK, _NO_ENOBUFS, 1)
        self.socket.bind((0, 0))
        self._ask(attribute(_CFG_COMMAND, struct.pack(">BBH", _BIND, 0, 0)))
        flags = struct.pack(">I", _FAIL_OPEN | _GSO)
        self._ask(
            attribute(_CFG_PARAMETERS, struct.pack(">IB", 0, _COPY_META)),
            attribute(_CFG_LENGTH, struct.pack(">I", MAX_HELD)),
            attribute(_CFG_FLAGS, flags),
            attribute(_CFG_MASK, flags),
        )
        self.socket.setblocking(False)
        self._buffer = bytearray(LONGEST_MESSAGE_BYTES)

    def _ask(self, *attributes: bytes) -> None:
        self.socket.send(message(_CONFIG, _ACK, self.number, *attributes))
        answer = self.socket.recv(LONGEST_MESSAGE_BYTES)
        kind, code = struct.unpack_from("=4xH10xi", answer)
        if kind == _ERROR and code:
            raise OSError(-code, os.strerror(-code))

    def next_id(self) -> int | None:
        """Return the number of the next packet that has arrived, or None."""
        while True:
            try:
                self.socket.recv_into(self._buffer)
            except BlockingIOError:
                return None
            kind = struct.unpack_from("=4xH", self._buffer)[0]
            first = _ATTRIBUTE.unpack_from(self._buffer, _PACKET_AT)[1]
            if kind == _PACKET and first == _PACKET_HEADER:
                number: int = struct.unpack_from(">I", self._buffer, _ID_AT)[0]
                return number

    def accept_up_to(self, packet_id: int) -> None:
        """Let this packet and all earlier ones continue."""
        verdict = attribute(_VERDICT_HEADER, struct.pack(">II", _ACCEPT, packet_id))
        self.socket.send(message(_VERDICT_BATCH, 0, self.number, verdict))


def hold(queue: Queue, delay_s: float) -> None:
    """Delay packets until SIGTERM."""
    held: deque[tuple[float, int]] = deque()  # when each packet is due, and its number
    pause_s = min(LONGEST_PAUSE_S, delay_s / PAUSES)
    try:
        while True:
            wait_s = max(0.0, held[0][0] - EARLY_S - time.monotonic()) if held else None
            select.select([queue.socket], [], [], wait_s)
            for _ in range(BATCH):
                if (packet_id := queue.next_id()) is None:
                    break
                held.append((time.monotonic() + delay_s, packet_id))
            due, now_s = None, time.monotonic() + EARLY_S
            while held and held[0][0] <= now_s:
                due = held.popleft()[1]
            if due is not None:
                queue.accept_up_to(due)
            time.sleep(pause_s)
    finally:
        if held:
            queue.accept_up_to(held[-1][1])


def main() -> None:
    number, delay_s = int(sys.argv[1]), float(sys.argv[2])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # Other processes compute on these cores and must not delay a packet that is due.
    with contextlib.suppress(PermissionError, OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    gc.disable()
    try:
        queue = Queue(number)
    except OSError as error:
        sys.exit(f"netfilter queue {number} cannot be bound: {error.strerror}")
    print("ready", flush=True)
    hold(queue, delay_s)


if __name__ == "__main__":
    main()
