"""What plain TCP carries over one line with one socket and with several: a bound for any program above it.

Decides nothing for the product; decision 0036 has its figures.  Each case is a lab of its own with two hosts:

    sender ==== k sockets, all written to at once, for --seconds ====> receiver        Mbit/s that arrived

Run:  python benchmarks/streams.py --delay 20ms --loss 0 0.001 --sockets 1 4 8 --control bbr cubic
"""

from __future__ import annotations

import argparse
import selectors
import socket
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.cells import seconds
from lab.net import Net

PORT, BLOCK = 7800, bytes(2**18)
WARM_S = 2.0
"""Not counted: a connection has to find out what its line carries."""


def receive(sockets: int, seconds_: float) -> None:
    """Prints the Mbit/s of all connections together."""
    with socket.create_server(("0.0.0.0", PORT)) as server, selectors.DefaultSelector() as ready:
        for _ in range(sockets):
            ready.register(server.accept()[0], selectors.EVENT_READ)
        began_s = time.monotonic()
        buffer, counted, since_s = bytearray(2**20), 0, 0.0
        while (now_s := time.monotonic()) < began_s + WARM_S + seconds_:
            if not since_s and now_s >= began_s + WARM_S:
                counted, since_s = 0, now_s
            for key, _ in ready.select(0.1):
                assert isinstance(key.fileobj, socket.socket)
                counted += key.fileobj.recv_into(buffer)
        print(counted * 8 / 1e6 / (time.monotonic() - since_s))


def send(address: str, sockets: int) -> None:
    """Until the other end has had enough."""
    until_s = time.monotonic() + 10.0
    with selectors.DefaultSelector() as ready:
        for _ in range(sockets):
            ready.register(_connected(address, until_s), selectors.EVENT_WRITE)
        try:
            while True:
                for key, _ in ready.select():
                    assert isinstance(key.fileobj, socket.socket)
                    key.fileobj.send(BLOCK, socket.MSG_DONTWAIT)
        except (ConnectionError, BlockingIOError):
            return


def _connected(address: str, until_s: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=5.0)
        except OSError:  # it does not listen yet
            if time.monotonic() >= until_s:
                raise


def case(options: argparse.Namespace, control: str, loss: float, sockets: int) -> float:
    with Net(congestion=control) as net, TemporaryDirectory(prefix="streams-") as name:
        folder = Path(name)
        hosts = [net.host(who) for who in ("receiver", "sender")]
        for host in hosts:
            more = ({"delay_s": options.delay} if options.delay else {}) | ({"loss": loss} if loss else {})
            host.shape(up=options.rate, down=options.rate, **more)
        common = [sys.executable, str(Path(__file__).resolve())]
        receiver = hosts[0].run(
            [*common, "--receive", str(sockets), "--seconds", str(options.seconds)], folder
        )
        hosts[1].run([*common, "--send", hosts[0].address, "--sockets", str(sockets)], folder)
        if receiver.wait(60.0 + options.seconds):
            raise SystemExit(receiver.stderr_path.read_text())
        return float(receiver.stdout_path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", default="1Gbit")
    parser.add_argument("--delay", type=seconds, default=0.0, metavar="TIME", help="one way, such as 20ms")
    parser.add_argument("--loss", type=float, nargs="+", default=[0.0], help="shares of the frames")
    parser.add_argument("--sockets", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--control", nargs="+", default=["bbr", "cubic"])
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--receive", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--send", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        return receive(options.receive, options.seconds)
    if options.send:
        return send(options.send, options.sockets[0])
    for control in options.control:
        for loss in options.loss:
            for sockets in options.sockets:
                found = case(options, control, loss, sockets)
                print(
                    f"{control:6} loss {100 * loss:g} %  {sockets:2} sockets  {found:7.1f} Mbit/s", flush=True
                )


if __name__ == "__main__":
    main()
