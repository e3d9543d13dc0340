"""Holds each packet of a netfilter queue for a fixed time: a line's delay, where the kernel has no netem.

Decides when a packet goes on.  Never sees what is in it (metadata only), and never changes or drops one.

    kernel:  packet --NFQUEUE--> held ................................. goes on
                        | id                                              ^ "all up to id"
    here:               `--> (now + delay, id) in a queue --when due------'

Started by `arrivals.py` in a host's namespace, one process for each delayed host; prints "ready" when the
queue is bound.  All packets wait equally long, so they stay in order, and one verdict serves all that are
due.  On SIGTERM what is held goes on at once.  Run as a file, python -I -S delay.py QUEUE SECONDS, it starts
in 20 ms.
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

MOST_HELD = 1 << 17
"""Packets; above, the kernel lets them pass at once.  40 ms at 10 Gbit/s are 34,000 of 1500 bytes."""

EARLY_S = 0.00025
"""What is due so soon goes now: waking up costs about that much."""

LONGEST_PAUSE_S = 0.0005
PAUSES = 10
"""Between two looks at the queue a pause, of so small a part of the delay: on a busy line packets come in
groups then.  Of a line of 5 ms at 100 Mbit/s they are four; with a fortieth they were one, and the holders of
four busy hosts took half a core, ahead of all that was measured there."""

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
    """A netlink message to netfilter's queue of that number."""
    body = b"".join(attributes)
    head = _HEAD.pack(_HEAD.size + len(body), kind, _REQUEST | flags, 0, 0, 0, 0, socket.htons(queue))
    return head + body


def attribute(kind: int, value: bytes) -> bytes:
    padding = bytes(-len(value) % 4)
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + padding


class Queue:
    """A bound netfilter queue of the namespace in which it is made.

    Raises `OSError` if the kernel has none, or another process has this one.
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
            attribute(_CFG_LENGTH, struct.pack(">I", MOST_HELD)),
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
        """Return the number of the next packet that has come; None if there is none at the moment."""
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
        """Let this packet and all before it go on."""
        verdict = attribute(_VERDICT_HEADER, struct.pack(">II", _ACCEPT, packet_id))
        self.socket.send(message(_VERDICT_BATCH, 0, self.number, verdict))


def hold(queue: Queue, delay_s: float) -> None:
    """Hold packets until SIGTERM."""
    held: deque[tuple[float, int]] = deque()
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
    # Others compute on these cores: a packet that is due must not wait for its turn.
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
