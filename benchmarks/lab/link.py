"""A host's link: its rate in each direction, and its delay.

                  up: tbf on the host's end
    host  eth0 ============================= link ============================== port of the bridge
                                                                                 down: tbf on the port
    delay:  of arriving packets on the host, before TCP: eth0 | mangle PREROUTING: NFQUEUE, delay.py | TCP

Packets are delayed after they have left the sender's host, because packets that wait there count against the
sender's socket (TCP small queues), which slows bulk transfers down.  Between two hosts with a delay d each, a
packet takes d and a round trip takes 2 d.

Segmentation offload makes frames of 64 KiB on virtual links, which a bucket of 32 KiB would drop.  So up to
200 Mbit/s offloads are switched off; above, where they are needed, the bucket is larger.
"""

from __future__ import annotations

import fcntl
import functools
import select
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from ctypes import addressof, create_string_buffer
from dataclasses import dataclass
from pathlib import Path

from lab.ns import LabError, add, command, inside, owner_tag, remove

LONGEST_DELAY_S = 1.0
READY_S = 20.0
SLOW_BPS = 25_000_000
"""Bytes per second up to which offloads are switched off: 200 Mbit/s."""

LATENCY_MS = 50
"""The longest time of a frame in the queue of the bucket; further frames are dropped, and TCP slows down."""

_PROGRAM = Path(__file__).with_name("delay.py")
_SIOCETHTOOL = 0x8946
_OFFLOADS = {"tso": 0x1F, "gso": 0x24, "gro": 0x2C}  # ETHTOOL_STSO, ETHTOOL_SGSO, ETHTOOL_SGRO

Start = Callable[[Sequence[str]], "subprocess.Popen[bytes]"]
"""Starts a program in the host's namespace, with pipes as stdout and stderr; it ends with the lab."""


def bucket_bytes(rate_Bps: float) -> int:
    """Return the bytes that a link of this rate passes at once after a pause."""
    return 32 * 1024 if rate_Bps <= SLOW_BPS else 256 * 1024


@dataclass(frozen=True, slots=True)
class End:
    """An end of a link: an interface in a namespace."""

    namespace: str
    interface: str

    def limit(self, rate_Bps: float) -> None:
        """Set the rate of frames that leave here."""
        bucket = ["rate", f"{round(rate_Bps * 8)}bit", "burst", f"{bucket_bytes(rate_Bps)}b"]
        tbf = ["dev", self.interface, "root", "tbf", *bucket, "latency", f"{LATENCY_MS}ms"]
        command("tc", "-n", self.namespace, "qdisc", "replace", *tbf)
        inside(self.namespace, lambda: _set_offloads(self.interface, rate_Bps > SLOW_BPS))


def _set_offloads(interface: str, on: bool) -> None:
    """Do what `ethtool -K INTERFACE tso off gso off gro off` does, for machines without it.

    Joining received frames (gro) is never switched on: it is off on a new virtual interface.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        for name, number in _OFFLOADS.items():
            value = create_string_buffer(struct.pack("=II", number, on and name != "gro"), 8)
            request = struct.pack("16sP16x", interface.encode(), addressof(value))
            try:
                fcntl.ioctl(handle, _SIOCETHTOOL, request)
            except OSError as error:
                raise LabError(f"{name} of {interface} cannot be switched: {error.strerror}") from None


class Arrivals:
    """Delay of the packets that arrive at a host.

    Args:
        end: the host's end of the link.
        inner: a router's other interfaces, so that packets that leave its home are delayed, too.
        start: starts a program on the host.
    """

    def __init__(self, end: End, inner: Sequence[str], start: Start) -> None:
        self._end, self._start = end, start
        self._interfaces = (end.interface, *inner)
        self.delay_s = 0.0
        self._holder: subprocess.Popen[bytes] | None = None
        self._queue = 0

    def set(self, delay_s: float) -> None:
        """Set the delay of arriving packets.  Raises `LabError`, `ValueError`."""
        if not 0 <= delay_s <= LONGEST_DELAY_S:
            raise ValueError(f"delay_s is {delay_s}; it must be from 0 to {LONGEST_DELAY_S:g} seconds")
        before, self.delay_s = self._holder, delay_s
        self._queue = 1 - self._queue  # the new process is ready before the old one ends
        self._holder = self._hold(delay_s) if delay_s else None
        self._write_rules()
        if before is not None:
            before.terminate()
            before.communicate()

    def _hold(self, delay_s: float) -> subprocess.Popen[bytes]:
        holder = self._start([sys.executable, "-I", "-S", str(_PROGRAM), str(self._queue), repr(delay_s)])
        assert holder.stdout is not None
        ready, _, _ = select.select([holder.stdout], [], [], READY_S)
        if not ready or holder.stdout.readline() != b"ready\n":
            holder.kill()
            error = holder.communicate()[1].decode(errors="replace").strip()
            raise LabError(f"delay.py did not start in {self._end.namespace}: {error or 'no output'}")
        return holder

    def _write_rules(self) -> None:
        """Replace all rules of the mangle table; a router's rules are in other tables."""
        delayed = self._interfaces if self._holder is not None else ()
        rules = [f"-A PREROUTING -i {name} -j NFQUEUE --queue-num {self._queue}" for name in delayed]
        text = "\n".join(["*mangle", ":PREROUTING ACCEPT [0:0]", *rules, "COMMIT", ""])
        command("ip", "netns", "exec", self._end.namespace, "iptables-restore", "--wait", stdin=text)


# -- requirements ----------------------------------------------------------------------------------


@functools.cache
def why_not() -> str:
    """Return why a delay is not possible here; empty if it is.  Needs root."""
    if shutil.which("iptables-restore") is None:
        return "there is no command 'iptables-restore' (on Debian or Ubuntu: apt install iptables)"
    namespace = f"{owner_tag()}-0-queue"

    def start(argv: Sequence[str]) -> subprocess.Popen[bytes]:
        enter = ["ip", "netns", "exec", namespace]
        pipe = subprocess.PIPE
        return subprocess.Popen([*enter, *argv], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)

    try:
        add(namespace)
        tried = Arrivals(End(namespace, "lo"), (), start)
        tried.set(0.001)
        tried.set(0.0)
    except LabError as error:
        return f"this kernel cannot delay packets: {error}"
    finally:
        remove([namespace])
    return ""
