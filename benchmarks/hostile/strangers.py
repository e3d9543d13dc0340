"""Clients without a registered key, which open many connections to a port from one process.

    python -m hostile.strangers silent 1500 127.0.0.1:7700            1,500 connections that send nothing
    python -m hostile.strangers greeting 1500 127.0.0.1:7700          that send ZMTP's greeting and no more
    python -m hostile.strangers handshakes 200 127.0.0.1:7700 KEY     200 complete handshakes a second

They come from addresses of 19 ranges that no worker has.  A connection that the server closes is opened
again, until the process is ended.  Each line of stdout is one JSON object: `{"mark": "ready"}` when all
connections have been opened once, and a `count` every second after that.
"""

from __future__ import annotations

import contextlib
import itertools
import resource
import selectors
import socket
import time
from collections.abc import Iterator, Mapping, Sequence

import zmq

import record
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.zmq import sockets
from hostile.wire import GREETING
from lab.group import say

TRY_S = 2.0
"""Timeout of a handshake."""

AGAIN_PER_S = 300.0
"""Connections that are opened again, a second."""


def sources() -> Iterator[str]:
    """Yield addresses to connect from, in turn, without end."""
    return itertools.cycle([f"127.0.{host}.1" for host in range(2, 21)])


def connect(source: str, host: str, port: int) -> socket.socket:
    """Start connecting without waiting."""
    connection = socket.socket()
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_IP, getattr(socket, "IP_BIND_ADDRESS_NO_PORT", 24), 1)
    connection.bind((source, 0))
    with contextlib.suppress(BlockingIOError):
        connection.connect((host, port))
    return connection


def hold_connections(count: int, host: str, port: int, greeting: bytes) -> None:
    """Keep `count` connections open; each sends `greeting` and nothing after it."""
    with selectors.DefaultSelector() as selector:
        addresses, made, closed, allowed = sources(), 0, 0, float(count)
        seen_s = reported_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            allowed += (now_s - seen_s) * AGAIN_PER_S
            seen_s = now_s
            while len(selector.get_map()) < count and allowed >= 1:
                allowed -= 1
                selector.register(connect(next(addresses), host, port), selectors.EVENT_WRITE)
            for key, events in selector.select(0.02):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if events & selectors.EVENT_WRITE:
                    with contextlib.suppress(OSError):
                        connection.send(greeting)
                    made += 1
                    selector.modify(connection, selectors.EVENT_READ)
                    if made == count:
                        say("ready", closed=closed)
                elif _is_closed(connection):
                    closed += 1
                    selector.unregister(connection)
                    connection.close()
            if now_s >= reported_s + 1.0:
                reported_s = now_s
                say("count", made=made, closed=closed, open=len(selector.get_map()))


def _is_closed(connection: socket.socket) -> bool:
    """Discard received bytes; return whether the server has closed the connection."""
    try:
        return not connection.recv(4096)
    except BlockingIOError:
        return False
    except OSError:
        return True


# -- handshakes with keys of their own -----------------------------------------------------------------


def open_dealer(context: sockets.Context, identity: Identity, server: bytes) -> zmq.Socket[bytes]:
    """Return a socket that connects once and sends nothing by itself."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.RECONNECT_IVL, sockets.RECONNECT_NEVER_MS)
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, identity.public)
    dealer.setsockopt(zmq.CURVE_SECRETKEY, identity.secret)
    dealer.setsockopt(zmq.CURVE_SERVERKEY, server)
    return dealer


class Handshakes:
    """Handshakes in progress with their sockets, and how earlier ones ended."""

    def __init__(self) -> None:
        self._context: sockets.Context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 8000)
        self._poller = zmq.Poller()
        self._open: dict[zmq.Socket[bytes], tuple[zmq.Socket[bytes], float]] = {}  # by monitor
        self.begun, self.refused, self.accepted, self.unanswered = 0, 0, 0, 0

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, identity: Identity, server: bytes, address: str, source: str = "") -> None:
        dealer = open_dealer(self._context, identity, server)
        monitor = sockets.open_monitor(dealer)
        dealer.connect(address.replace("tcp://", f"tcp://{source}:0;") if source else address)
        self._poller.register(monitor, zmq.POLLIN)
        self._open[monitor] = (dealer, time.monotonic() + TRY_S)
        self.begun += 1

    def settle(self, timeout_s: float) -> None:
        """Count and close the handshakes that have ended."""
        now_s = time.monotonic()
        ready = dict(self._poller.poll(round(timeout_s * 1000)))
        for monitor, (dealer, until_s) in list(self._open.items()):
            happened = {event for event, _ in sockets.monitor_events(monitor)} if monitor in ready else set()
            if zmq.EVENT_HANDSHAKE_FAILED_AUTH in happened:
                self.refused += 1
            elif zmq.EVENT_HANDSHAKE_SUCCEEDED in happened:
                self.accepted += 1
            elif happened & sockets.LOST_EVENTS or now_s >= until_s:
                self.unanswered += 1
            else:
                continue
            self._poller.unregister(monitor)
            del self._open[monitor]
            sockets.close(dealer, monitor)

    def report(self) -> None:
        counts = {"refused": self.refused, "accepted": self.accepted, "unanswered": self.unanswered}
        say("count", begun=self.begun, **counts)


def repeat_handshakes(per_s: float, address: str, server: bytes) -> None:
    """Begin `per_s` handshakes a second, each with an unregistered key."""
    addresses, keys = sources(), itertools.cycle([Identity.generate() for _ in range(500)])
    handshakes, began_s, reported_s = Handshakes(), time.monotonic(), time.monotonic()
    say("ready")
    while True:
        due = int((time.monotonic() - began_s) * per_s) - handshakes.begun
        for _ in range(min(due, 100)):
            handshakes.begin(next(keys), server, address, next(addresses))
        handshakes.settle(0.01)
        if time.monotonic() >= reported_s + 1.0:
            reported_s = time.monotonic()
            handshakes.report()


def hammer(identity: Identity, addresses: Mapping[bytes, str], at_once: int = 8) -> None:
    """Begin handshakes with a refused key at these addresses (by public key), as fast as they end."""
    handshakes, reported_s = Handshakes(), time.monotonic()
    for server, address in itertools.cycle(list(addresses.items())):
        while len(handshakes) >= at_once:
            handshakes.settle(0.01)
        handshakes.begin(identity, server, address)
        if time.monotonic() >= reported_s + 1.0:
            reported_s = time.monotonic()
            handshakes.report()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = record.parser(__doc__, out="")
    parser.add_argument("kind", choices=("silent", "greeting", "handshakes"))
    parser.add_argument("count", type=int)
    parser.add_argument("server", help="HOST:PORT")
    parser.add_argument("key", nargs="?", default="", help="the server's public key, for handshakes")
    chosen = parser.parse_args(arguments)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    host, _, port = chosen.server.removeprefix("tcp://").rpartition(":")
    if chosen.kind == "handshakes":
        repeat_handshakes(chosen.count, f"tcp://{host}:{port}", bytes.fromhex(chosen.key))
    else:
        greeting = GREETING if chosen.kind == "greeting" else b""
        hold_connections(chosen.count, host, int(port), greeting)


if __name__ == "__main__":
    main()
