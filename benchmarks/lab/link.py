"""A host's link: its rate in each direction, and its delay.

                  up: tbf on the host's end
    host  eth0 ============================= link ============================== port of the bridge
                                                                                 down: tbf on the port
    delay:        with netem on the port, above tbf; in a kernel without netem on the host, before TCP:
                  eth0 | mangle PREROUTING: NFQUEUE, delayed by delay.py | TCP

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

from gridtrain.network.transport.rate_limiter import parse_rate
from lab.ns import LabError, add, command, inside, owner_tag, remove

LONGEST_DELAY_S = 1.0
READY_S = 20.0
SLOW_BPS = 25_000_000
"""Bytes per second up to which offloads are switched off: 200 Mbit/s."""

LATENCY_MS = 50
"""The longest time of a frame in the queue of the bucket; further frames are dropped, and TCP slows down."""

NETEM_FRAMES = 1 << 17
"""The most frames in netem; its default of 1000 loses most frames of a fast link with a delay."""

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

    def set(self, rate: str, new_rate: bool, delay_s: float | None) -> None:
        """Set the rate of frames that leave here, and netem's delay unless that is None."""
        if delay_s is not None:
            _netem(self, delay_s)
        if rate and (new_rate or delay_s is not None):
            rate_Bps = parse_rate(rate)
            shown = command("tc", "-n", self.namespace, "qdisc", "show", "dev", self.interface)
            place = ["parent", "1:1"] if "qdisc netem" in shown else ["root"]
            bucket = ["rate", f"{round(rate_Bps * 8)}bit", "burst", f"{bucket_bytes(rate_Bps)}b"]
            tbf = ["dev", self.interface, *place, "tbf", *bucket, "latency", f"{LATENCY_MS}ms"]
            command("tc", "-n", self.namespace, "qdisc", "replace", *tbf)
            self.offloads(rate_Bps > SLOW_BPS)

    def offloads(self, on: bool) -> None:
        """Allow or forbid the interface to send frames longer than its MTU.  Raises `LabError`."""
        inside(self.namespace, lambda: _set_offloads(self.interface, on))


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


def _netem(end: End, delay_s: float) -> None:
    how = f"root handle 1: netem limit {NETEM_FRAMES} delay {1e6 * delay_s:.0f}us"
    command("tc", "-n", end.namespace, "qdisc", "replace", "dev", end.interface, *how.split())


@dataclass(frozen=True, slots=True)
class Settings:
    """Rates such as "20Mbit" (empty: no limit), and the delay."""

    up: str = ""
    down: str = ""
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        for rate in filter(None, (self.up, self.down)):
            parse_rate(rate)
        if not 0 <= self.delay_s <= LONGEST_DELAY_S:
            raise ValueError(f"delay_s is {self.delay_s}; it must be from 0 to {LONGEST_DELAY_S:g} seconds")


class Link:
    """The link between a host and a bridge.

    Args:
        near, far: its ends at the host and at the bridge.
        inner: a router's other interfaces, so that packets that leave its home are delayed, too.
        start: starts a program on the host.
    """

    def __init__(self, near: End, far: End, inner: Sequence[str], start: Start) -> None:
        self.settings = Settings()
        self._near, self._far, self._both = near, far, bool(inner)
        self._arrivals = Arrivals(near, inner, start)

    def change(self, up: str = "", down: str = "", delay_s: float | None = None) -> None:
        """Change the settings that are not empty or None.  Raises `LabError`, `ValueError`, `ConfigError`."""
        was = self.settings
        delay_s = was.delay_s if delay_s is None else delay_s
        now = Settings(up or was.up, down or was.down, delay_s)
        is_delay_new = delay_s != was.delay_s
        if is_delay_new and (reason := why_not()):
            raise LabError(reason)
        with_netem = is_delay_new and not netem_why_not()
        if is_delay_new and not with_netem:
            self._arrivals.set(delay_s)
        self._far.set(now.down, bool(down), delay_s if with_netem else None)
        self._near.set(now.up, bool(up), delay_s if with_netem and self._both else None)
        self.settings = now


class Arrivals:
    """Delay of the packets that arrive at a host, in a kernel without netem.

    Args:
        end: the host's end of the link.
        inner: a router's other interfaces, where packets are delayed, too.
    """

    def __init__(self, end: End, inner: Sequence[str], start: Start) -> None:
        self._end, self._start = end, start
        self._interfaces = (end.interface, *inner)
        self._holder: subprocess.Popen[bytes] | None = None
        self._queue = 0

    def set(self, delay_s: float) -> None:
        """Set the delay of arriving packets.  Raises `LabError`."""
        before = self._holder
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
def netem_why_not() -> str:
    """Return why netem cannot be used; empty if it can.  Needs root."""
    namespace = f"{owner_tag()}-0-netem"
    try:
        add(namespace)
        _netem(End(namespace, "lo"), 0.001)
    except LabError as error:
        return str(error)
    finally:
        remove([namespace])
    return ""


@functools.cache
def why_not() -> str:
    """Return why a delay is not possible here; empty if it is.  Needs root."""
    if not netem_why_not():
        return ""
    if shutil.which("iptables-restore") is None:
        return "no netem in this kernel, and no iptables-restore (on Debian or Ubuntu: apt install iptables)"
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
        return f"no netem in this kernel, and its substitute does not work: {error}"
    finally:
        remove([namespace])
    return ""
